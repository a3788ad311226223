"""The best policy of a run, by its evaluation: RUN/best, a Hugging Face folder, and RUN/best.json, which says how good it is.

Owns when it is replaced. It does not write the policy: the training ranks do, as a whole or not at all. Invariant: the folder
is never worse than best.json says, whenever the process ends (the note is written after the folder).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pearl.rl.checkpoint import put_back

FOLDER = "best"


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """`step` is the one whose evaluation had this `eval_success_rate`."""

    step: int
    eval_success_rate: float


class BestPolicy:
    """`is_better(score)` asks; after the policy was exported to `path`, `note` makes it the one to beat."""

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER
        put_back(self.path)
        self._note_path = run / f"{FOLDER}.json"
        self._note = self._read()

    def is_better(self, score: float) -> bool:
        """Better than all before; an equal score keeps the earlier policy."""
        return self._note is None or score > self._note.eval_success_rate

    def note(self, step: int, score: float) -> None:
        """The policy in `path` is the one of this step, with this score."""
        self._note = _Note(step=step, eval_success_rate=score)
        aside = self._note_path.with_name(f".{self._note_path.name}.new")
        aside.write_bytes(msgspec.json.encode(self._note) + b"\n")
        aside.rename(self._note_path)

    def _read(self) -> _Note | None:
        """A resumed run goes on with what it had; a note that cannot be read is none."""
        try:
            return msgspec.json.decode(self._note_path.read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            return None
