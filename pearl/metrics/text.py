"""Episodes as a person reads them: what the model said, what the environment answered, what it was worth.

    python -m pearl.metrics.text RUN [--last N] [--failed]

Reads records of trajectories.jsonl and nothing else. Invariant: what a model or an environment wrote cannot steer the
terminal; control characters are shown as escapes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pearl.metrics.console import number
from pearl.metrics.jsonl import runs_near

BLOCK = 1 << 16
SHOWN_INFO = ("invalid", "success")
"""Keys of a turn's `info` that have words of their own here; others are shown as they are."""


def trajectory_text(record: dict[str, Any]) -> str:
    """A transcript of one record of trajectories.jsonl, turn by turn; ends without a newline."""
    turns = record.get("turns", [])
    lines = [_heading(record, len(turns))]
    if record.get("prompt"):
        lines += ["  it begins", *_quoted(record["prompt"], "<")]
    for index, turn in enumerate(turns, 1):
        lines += _turn(index, turn)
    return "\n".join([*lines, f"  {_ending(record)}"])


def _heading(record: dict[str, Any], turns: int) -> str:
    oldest, newest = (record.get("weight_versions") or [-1, -1])[:2]
    versions = "no token sampled" if newest < 0 else f"weights v{oldest}" if oldest == newest else f"weights v{oldest}-{newest}"
    sampled = sum(record.get("loss_mask", []))
    counts = f"{turns} turn{'' if turns == 1 else 's'}, {sampled} of {len(record.get('token_ids', []))} tokens sampled"
    return f"trajectory {record.get('trajectory_id', '?')}   seed {record.get('env_seed', '?')}, {counts}, {versions}"


def _turn(index: int, turn: dict[str, Any]) -> list[str]:
    info = turn.get("info") or {}
    marks = "  INVALID" if info.get("invalid") else ""
    rest = {key: value for key, value in info.items() if key not in SHOWN_INFO}
    details = f"  {_visible(str(rest))}" if rest else ""
    sampled = turn.get("num_sampled", "?")
    heading = f"  turn {index}  reward {number(turn.get('reward'), '+.3g')}  {sampled} tokens{marks}{details}"
    observation = turn.get("observation", "")
    answer = _quoted(observation, "<") if observation else ["    < (no answer)"]
    return [heading, *_quoted(turn.get("text", ""), ">"), *answer]


def _ending(record: dict[str, Any]) -> str:
    outcome = record.get("outcome", "?")
    if outcome == "failed":
        return f"LOST: {_visible(str(record.get('error') or 'no reason given'))}"
    reached = "success" if record.get("success") else "no success"
    return f"{outcome}: {reached}, reward {number(record.get('reward'), '+.3g')}"


def _quoted(text: str, mark: str) -> list[str]:
    """Every line behind its mark: > is what the model said, < what it was told."""
    return [f"    {mark} {_visible(line)}" for line in text.rstrip("\n").split("\n")]


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# ------------------------------------------------------------------------------------------------------------- the command


def last_records(path: str | Path, most: int, *, failed: bool = False) -> list[dict[str, Any]]:
    """The last `most` complete records, oldest first; with `failed` of those that were lost or without success.

    Reads from the end, as far as it must: the file of a long run is large.
    """
    found: list[dict[str, Any]] = []
    with Path(path).open("rb") as file:
        for line in _lines_from_the_end(file):
            if len(found) == most:
                break
            record = msgspec.json.decode(line, type=dict)
            if not (failed and record.get("success") and record.get("outcome") != "failed"):
                found.append(record)
    return found[::-1]


def _lines_from_the_end(file: BinaryIO) -> Iterator[bytes]:
    """Complete lines, the last one first; what follows the last newline was cut by a crash and is left out."""
    position = file.seek(0, os.SEEK_END)
    rest, cut = b"", True
    while position > 0:
        start = max(0, position - BLOCK)
        file.seek(start)
        rest, *lines = (file.read(position - start) + rest).split(b"\n")
        position = start
        if lines and cut:
            lines.pop()
            cut = False
        yield from (line for line in reversed(lines) if line)
    if rest and not cut:
        yield rest


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m pearl.metrics.text", allow_abbrev=False, description="Episodes as text.")
    options.add_argument("run", type=Path, help="a run directory, or a trajectories.jsonl")
    options.add_argument("--last", type=int, default=5, metavar="N", help="how many of the latest episodes (default: 5)")
    options.add_argument("--failed", action="store_true", help="only those that were lost or ended without success")
    arguments = options.parse_args(argv)
    path = arguments.run / "trajectories.jsonl" if arguments.run.is_dir() else arguments.run
    try:
        if arguments.last < 1:
            raise ValueError(f"--last {arguments.last}: must be >= 1")
        if not path.is_file():
            what = "no episodes yet, trajectories.jsonl is not there" if arguments.run.is_dir() else "no such directory or file"
            raise ValueError(f"{what}{runs_near(arguments.run)}")
        records = last_records(path, arguments.last, failed=arguments.failed)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"pearl.metrics.text: error: {arguments.run}: {error}", file=sys.stderr)
        return 2
    return _print("\n\n".join(trajectory_text(record) for record in records) or "no such episode")


def _print(text: str) -> int:
    """Prints; a reader that leaves early (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit would fail again
    return 0


if __name__ == "__main__":
    sys.exit(main())
