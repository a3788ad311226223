"""What the controller knows at the end of a step, as one value that a checkpoint stores and a resumed run starts from.

Owns which numbers belong to it and their encoding. It does not know files (`checkpoint_folder.py`) or the order of a run
(`training.py`). Invariant: `restore(decode(encode(capture(...))))` gives back every count and every trajectory that had
ended; a trajectory that was still running is played again from its seed, and its first try is counted as dropped for
`RESUME`. Torch-free, pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pearl.rl.buffer import Buffer, Holdings, Unplayed

FORMAT = 1
"""Rises with every change that an older release could not read."""

RESUME = "resume"
"""The cause under which the buffer counts what was running when the checkpoint was taken."""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """The control plane after `step` trained batches, with `weight_version` published.

    `started` counts all groups ever started (the next one's id); `successes` has one success rate per trained step;
    `counters` carries any other numbers that should go on rising. How often a trajectory was retried is in its id.
    """

    format: int = FORMAT
    step: int
    weight_version: int
    started: int
    successes: list[float]
    counters: dict[str, int | float]
    holdings: Holdings


def capture(
    buffer: Buffer,
    *,
    step: int,
    weight_version: int,
    started: int,
    successes: Sequence[float],
    counters: Mapping[str, int | float] | None = None,
) -> ControllerState:
    """The state between two steps: no batch may be taken and not yet trained. Later changes of the buffer do not reach it.

    ValueError for a negative number or a group that `started` does not count; RuntimeError if the books do not add up.
    """
    numbers = {"step": step, "weight_version": weight_version, "started": started}
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"{name}={value}: must be >= 0")
    buffer.check()
    state = ControllerState(**numbers, successes=list(successes), counters=dict(counters or {}), holdings=buffer.holdings())
    _check_started(state)
    return state


def restore(state: ControllerState) -> tuple[Buffer, list[Unplayed]]:
    """The buffer that goes on from `state`, and the trajectories to start again. ValueError if it contradicts itself."""
    _check_started(state)
    return Buffer.from_holdings(state.holdings, RESUME)


def encode(state: ControllerState) -> bytes:
    """The state as msgpack. TypeError for a value (in a turn's `info`) that msgpack has no form for."""
    return msgspec.msgpack.encode(state)


def decode(data: bytes) -> ControllerState:
    """Reads what `encode` wrote; ValueError for anything else, another format included."""
    check_format(data)
    try:
        return msgspec.msgpack.decode(data, type=ControllerState)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a controller's state: {error}") from None


def check_format(data: bytes) -> None:
    """ValueError unless `data` is a state in the format of this release; reads over the rest, so it is quick."""
    try:
        written = msgspec.msgpack.decode(data, type=_Written).format
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a controller's state: {error}") from None
    if written != FORMAT:
        raise ValueError(f"format={written}: this release reads {FORMAT}")


class _Written(msgspec.Struct):
    """The one field that all formats share."""

    format: int


def _check_started(state: ControllerState) -> None:
    held = [group.group_id for group in state.holdings.ready] + [entry.group.group_id for entry in state.holdings.open]
    beyond = [group_id for group_id in held if not 0 <= group_id < state.started]
    if beyond:
        raise ValueError(f"started={state.started}: groups {beyond} are held, ids must be below it")
