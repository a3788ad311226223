"""The parts of a rank that has no device: engine, trainer and publisher that take the time which their work would cost.

Owns what a cost profile means for them. It decides nothing: the main loop, the control thread, the controller, environments
and books are those of any job. Invariants: every wait is the profile's price times `emulation.slowdown`; nothing is learned
and no weights exist, so versions are numbers. Torch-free.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pearl.config import Config
from pearl.engine.emulated import EmulatedEngine, Speech
from pearl.engine.models.config import ModelConfig, from_folder
from pearl.engine.request import SchedulerOutput
from pearl.protocol import TrainStep
from pearl.rl import process
from pearl.rl.layout import JobLayout
from pearl.rl.plain_launcher import MEETING
from pearl.sched.cost_profile import CostProfile, read_profiles
from pearl.sched.sim.presets.qwen3 import PRESETS, preset_named
from pearl.sched.sim.pricing import price

TRAIN_TOKEN_S, PUBLISH_S = 7.2e-4, 4.4
"""Where nothing else says: 163.8 s for 64 trajectories of 28.6 K tokens on 8 GPUs; a weight version of 61 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What everything costs, in seconds that are to pass here: `slowdown` times those of the profile."""

    profile: CostProfile
    slowdown: float
    train_token_s: float
    publish_s: float


def pace_of(config: Config) -> Pace:
    """Of a job without devices. ValueError says which cost profiles there are."""
    name, options = config.emulated or "", config.emulation
    preset = preset_named(name) if name in PRESETS else None
    profile = preset.costs if preset is not None else _read(name)
    train, publish = (preset.train_s_per_token, preset.publish_s) if preset else (TRAIN_TOKEN_S, PUBLISH_S)
    train = train if options.train_token_s is None else options.train_token_s
    publish = publish if options.publish_s is None else options.publish_s
    slow = options.slowdown
    return Pace(profile=profile, slowdown=slow, train_token_s=slow * train, publish_s=slow * publish)


def _read(name: str) -> CostProfile:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"device='emulated:{name}': must be one of {', '.join(PRESETS)}, or a file of cost profiles")
    profiles = read_profiles(path)
    if len(profiles) != 1:
        raise ValueError(f"device='emulated:{name}': has {len(profiles)} cost profiles, must have 1")
    return profiles[0]


class ProfileCosts:
    """A cost profile as an emulated engine asks for it, in seconds that are to pass here."""

    def __init__(self, pace: Pace) -> None:
        self._profile, self._slowdown = pace.profile, pace.slowdown

    def step_s(self, output: SchedulerOutput) -> float:
        return self._slowdown * price(output, self._profile).seconds

    def host_s(self) -> float:
        return self._slowdown * self._profile.step_overhead_s

    def transfer_s(self, tokens: int) -> float:
        return self._slowdown * float(self._profile.transfer_s(tokens))

    def change_s(self, kind: str) -> float:
        return self._slowdown * float(getattr(self._profile, kind).seconds(1))


class EmulatedTrainer:
    """Takes as long as training would. `Checkpoint` and `Export` write what there is: how often it has trained."""

    def __init__(self, token_s: float, ranks: int, pause: Callable[[float], None] = time.sleep) -> None:
        self._token_s, self._ranks, self._pause = token_s, ranks, pause
        self.steps = 0

    def train_step(self, command: TrainStep) -> dict[str, Any]:
        tokens = sum(len(sequence.token_ids) for sequence in command.sequences)
        self._pause(self._token_s * tokens / self._ranks)
        self.steps += 1
        sampled = sum(sum(sequence.loss_mask) for sequence in command.sequences)
        return {"tokens": tokens, "trained_tokens": sampled}

    def set_reference(self) -> None:
        """There is no policy to keep."""

    def sleep(self) -> int:
        """What putting it aside costs is part of waking the engine."""
        return 0

    def wake(self) -> None:
        """As `sleep`."""

    def save(self, path: str) -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "emulated.json").write_text(json.dumps({"steps": self.steps}) + "\n")

    save_state = save

    def load_state(self, path: str) -> None:
        self.steps = int(json.loads((Path(path) / "emulated.json").read_text())["steps"])


class EmulatedPublisher:
    """This rank's part in a publication: a wait, after which its engine, if it has one, serves the version."""

    def __init__(self, engine: EmulatedEngine | None, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._version, self._began = -1, 0.0

    def begin(self, version: int) -> None:
        self._version, self._began = version, time.perf_counter()

    def poll(self) -> dict[str, Any] | None:
        seconds = time.perf_counter() - self._began
        if seconds < self._seconds:
            return None
        if self._engine is not None and self._engine.weight_version < self._version:
            self._engine.take_version(self._version)
        return {"seconds": seconds, "bytes": 0.0, "commit_s": 0.0}

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """`timeout_s` is not needed: the wait has an end of its own."""
        time.sleep(max(0.0, self._seconds - (time.perf_counter() - self._began)))
        metrics = self.poll()
        assert metrics is not None
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedParts:
    """As `world.Parts`."""

    trainer: EmulatedTrainer | None
    engine: EmulatedEngine | None
    publisher: EmulatedPublisher
    fetcher: EmulatedFetcher | None = None
    pulls: None = None


def build_parts(config: Config, layout: JobLayout, rank: int, folder: Path) -> EmulatedParts:
    """Trainer, engine and publisher of a rank."""
    pace = pace_of(config)
    trainer = EmulatedTrainer(pace.train_token_s, len(layout.training)) if rank in layout.training else None
    if rank in layout.serving:
        engine = build_engine(config, pace, folder)
        return EmulatedParts(trainer=trainer, engine=engine, publisher=EmulatedPublisher(engine, pace.publish_s))
    publisher = EmulatedPublisher(None, pace.publish_s)
    if config.borrow.workers in ("none", "0"):
        return EmulatedParts(trainer=trainer, engine=None, publisher=publisher)
    lent = build_engine(config, pace, folder, asleep=True)
    return EmulatedParts(trainer=trainer, engine=lent, publisher=publisher, fetcher=EmulatedFetcher(lent, 0.0))


class EmulatedFetcher:
    """The way to a newer version: a wait of `seconds`."""

    def __init__(self, engine: EmulatedEngine, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._version, self._began = -1, 0.0

    def begin(self, version: int, pulls: list[str]) -> None:
        self._version, self._began = version, time.perf_counter()

    def poll(self) -> dict[str, Any] | None:
        seconds = time.perf_counter() - self._began
        if seconds < self._seconds:
            return None
        if self._engine.weight_version < self._version:
            self._engine.take_version(self._version)
        return {"seconds": seconds, "bytes": 0.0, "commit_s": 0.0}

    def cancel(self) -> None:
        self._version = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedExternal:
    """As `external_parts.ExternalParts`."""

    engine: EmulatedEngine
    fetcher: EmulatedFetcher
    seconds: float
    pulls: str = ""

    def close(self) -> None:
        """There is nothing to give back."""


def build_external(config: Config, folder: Path, start: float) -> EmulatedExternal:
    """An external worker's parts, after the time that preparing one takes."""
    pace = pace_of(config)
    engine = build_engine(config, pace, folder)
    time.sleep(pace.slowdown * float(pace.profile.prepare.seconds(1)))
    fetcher = EmulatedFetcher(engine, pace.publish_s)
    return EmulatedExternal(engine=engine, fetcher=fetcher, seconds=time.perf_counter() - start)


def build_engine(config: Config, pace: Pace, folder: Path, *, asleep: bool = False) -> EmulatedEngine:
    """An engine for the model of a folder, of which only vocabulary and longest context matter."""
    model = from_folder(folder)
    blocks = config.engine.num_blocks or max(1, int(pace.profile.kv_capacity_tokens // config.engine.block_size))
    mean = min(config.emulation.turn_tokens, config.rollout.max_tokens)
    return EmulatedEngine(
        dataclasses.replace(config.engine, num_blocks=blocks, model=None),
        costs=ProfileCosts(pace),
        speech=Speech(alphabet=alphabet_of(folder, model), mean_tokens=mean),
        max_model_len=config.engine.max_model_len or model.max_position,
        vocab_size=model.vocab_size,
        asleep=asleep,
    )


def alphabet_of(folder: Path, model: ModelConfig) -> tuple[int, ...]:
    """Ids that an emulated policy says: the environment's words, if the tokenizer was made with them, else all but specials;
    all there are, if there is no tokenizer."""
    path = folder / "tokenizer.json"
    added = json.loads(path.read_text()).get("added_tokens", []) if path.is_file() else []
    words = tuple(token["id"] for token in added if not token.get("special"))
    if words:
        return words
    specials = {token["id"] for token in added}
    return tuple(token_id for token_id in range(model.vocab_size) if token_id not in specials)


class Meeting:
    """Where the ranks of a job without WORLD find each other: what rank 0 sets, the others get; by pipes of their launcher."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._pipes = [int(part) for part in os.environ.get(MEETING, "").split(",") if part]
        self._known: dict[str, bytes] = {}
        self._read = b""

    def set(self, key: str, value: str) -> None:
        """Tells all others."""
        self._known[key] = value.encode()
        for pipe in self._pipes if self._rank == 0 else ():
            os.write(pipe, msgspec.json.encode([key, value]) + b"\n")

    def get(self, key: str) -> bytes:
        """What rank 0 set. RuntimeError if that takes too long, or rank 0 has ended."""
        deadline = time.monotonic() + self._timeout_s
        while key not in self._known:
            if not process.is_readable(self._pipes[0], max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"waited timeouts.start_s={self._timeout_s:g} s for rank 0 to say {key!r}")
            came = os.read(self._pipes[0], 65536)
            if not came:
                raise RuntimeError("rank 0 has ended")
            *lines, self._read = (self._read + came).split(b"\n")
            self._known |= {name: value.encode() for name, value in map(msgspec.json.decode, lines)}
        return self._known[key]
