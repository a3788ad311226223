"""What `--resume RUN` needs of a run directory: its settings, its latest checkpoint, the right to write into it.

Owns the answers to "can this run go on, from where, and with which settings". It does not know processes or command lines;
checkpoints are `checkpoint_folder.py`, their contents `controller_state.py`. Invariants: at most one live job holds a run
(`RunLock`, held by rank 0 for its life); nothing is written before the lock is held; after `rewind_run` no row, record or
checkpoint is newer than the step that the run goes on from. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from pearl import config as configuration
from pearl.config import Config
from pearl.metrics.jsonl import rewind_rows, runs_near
from pearl.rl.algorithms import algorithm_of
from pearl.rl.checkpoint_folder import TRAINER_FACTS, TRAINER_FOLDER, CheckpointFolder, Skipped, load
from pearl.rl.controller_state import ControllerState

LOCK_FILE = "run.lock"
SETTINGS_FILE = "config.json"
ROW_FILES = ("metrics.jsonl", "trajectories.jsonl", "transitions.jsonl")

FIXED = ("seed", "rollout_batch_size", "group_size", "model", "env.name", "env.options")
"""What a resumed run cannot change: which groups were started, and what they played, depends on it."""


class _Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What settings have to fit, of the facts in a trainer's state (`trainer_state.Facts`)."""

    reference: bool
    value_head: bool = False
    train_layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on: `config` as it last ran, the newest whole `checkpoint`, and the newer ones that are not."""

    run: Path
    config: Config
    checkpoint: Path
    state: ControllerState
    skipped: tuple[Skipped, ...]


def open_run(run_dir: str | Path) -> ResumePoint:
    """Reads what a run goes on from; changes nothing, so any process may ask.

    ValueError if there is no such run, its config.json is missing or unreadable, or it has no whole checkpoint: then it
    would start from its beginning, which is a new run's business.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise ValueError(f"resume={str(run)!r}: no such directory{runs_near(run)}")
    try:
        config = configuration.from_json((run / SETTINGS_FILE).read_bytes())
    except OSError as error:
        why = f"config.json cannot be read ({error.strerror}){runs_near(run)}"
        raise ValueError(f"resume={str(run)!r}: not a run, {why}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"resume={str(run)!r}: config.json is not one of this release ({error})") from None
    found = CheckpointFolder(run).find()
    if found.path is None:
        raise ValueError(_nothing_to_resume(run, config, found.skipped))
    return ResumePoint(run=run, config=config, checkpoint=found.path, state=load(found.path), skipped=found.skipped)


def check_settings(point: ResumePoint, config: Config) -> None:
    """ValueError if `config` (the run's own, overridden) cannot go on from `point`: a `FIXED` setting differs, no step left, or
    the trainer's state is none that it could train on."""
    for name in FIXED:
        was, now = _setting(point.config, name), _setting(config, name)
        if was != now:
            raise ValueError(f"{name}={now!r}: a resumed run keeps its {name}={was!r}; start a new run to change it")
    if config.max_steps <= point.state.step:
        more = f"set more to go on, e.g. --set max_steps={2 * point.state.step}"
        raise ValueError(f"max_steps={config.max_steps}: {point.checkpoint.name} has trained them all; {more}")
    _check_trained(point, config)


def _check_trained(point: ResumePoint, config: Config) -> None:
    """A state that cannot be read is left to the trainer, which says what is wrong with it."""
    try:
        held = msgspec.json.decode((point.checkpoint / TRAINER_FOLDER / TRAINER_FACTS).read_bytes(), type=_Trained)
    except (OSError, msgspec.MsgspecError):
        return
    if config.algorithm.kl_coef > 0 and not held.reference:
        raise ValueError(
            f"algorithm.kl_coef={config.algorithm.kl_coef}: must be 0, {point.checkpoint.name} holds no reference policy to "
            "measure from; start a new run to change it"
        )
    if algorithm_of(config.algorithm).shares_trunk != held.value_head:
        with_it = "with" if held.value_head else "without"
        name, critic = config.algorithm.name, config.algorithm.critic
        raise ValueError(f"algorithm.critic={critic}: name={name} cannot go on from a policy {with_it} a value head")
    layers, before = config.trainer.train_layers, held.train_layers
    if before not in (None, layers or 0):
        raise ValueError(f"trainer.train_layers={layers}: a resumed run keeps its trainer.train_layers={before or None}")


def write_settings(run: Path, config: Config) -> None:
    """Makes `config` the run's settings, in one instant: others may be reading those before, and a full disk loses neither."""
    aside = run / f".{SETTINGS_FILE}.new"
    with aside.open("w") as file:
        file.write(configuration.to_json(config) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(run / SETTINGS_FILE)


def rewind_run(run_dir: str | Path, step: int) -> dict[str, int]:
    """Moves what the lost part of the run wrote after `step` out of the way; how many rows of each file that were.

    Call it under the run's lock, before anything opens these files.
    """
    run = Path(run_dir)
    CheckpointFolder(run).rewind(step)
    return {name: rewind_rows(run / name, step) for name in ROW_FILES}


def how_to_go_on(run: Path, config: Config, ranks: int) -> str:
    """One line for a run that ended before its end: the command that goes on with it, or why there is none.

    "" for one that made no step, of which nothing was lost.
    """
    found = CheckpointFolder(run).find()
    rows = run / ROW_FILES[0]
    if found.path is None and not found.skipped and not (rows.exists() and rows.stat().st_size):
        return ""
    if found.path is None:
        hint = "" if config.save_steps else "; with --set save_steps=10 there would be one every ten steps"
        return f"it cannot go on: {_no_checkpoint(config, found.skipped)}{hint}"
    step = load(found.path).step
    if step >= config.max_steps:
        return f"all {step} steps are in its last checkpoint, {found.path}"
    return f"to go on after step {step}: pearl run --resume {run}{f' --nproc {ranks}' if ranks > 1 else ''}"


class RunLock:
    """The right to write into a run, held until `release`, the end of a `with`, or the end of the process, however it ends.

    An advisory lock of the kernel (flock(2)) on RUN/run.lock: a dead holder's is gone with it, and children started by
    exec do not inherit it. The file stays and names the holder. ValueError if a live job has it.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / LOCK_FILE
        try:
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ValueError(f"run={str(self.path.parent)!r}: cannot be locked ({error.strerror})") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            self.release()
            if isinstance(error, BlockingIOError):
                raise ValueError(f"run={str(self.path.parent)!r}: is in use by {holder or 'another process'}") from None
            raise ValueError(f"run={str(self.path.parent)!r}: cannot be locked ({error.strerror})") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Gives the run back; again has no effect."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def _setting(config: Config, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _no_checkpoint(config: Config, skipped: tuple[Skipped, ...]) -> str:
    if skipped:
        return f"none of its checkpoints is whole ({'; '.join(f'{item.path.name}: {item.reason}' for item in skipped)})"
    return f"it has no checkpoint (save_steps={config.save_steps})"


def _nothing_to_resume(run: Path, config: Config, skipped: tuple[Skipped, ...]) -> str:
    afresh = f"for that, start a new run: pearl run {config.recipe}".rstrip()
    return f"resume={str(run)!r}: {_no_checkpoint(config, skipped)}, so it would start from step 1; {afresh}"
