"""What the cluster became during a run, and whether it paid: the part of the report that is made of transitions.jsonl.

Owns how changes are shown: shapes over time, and a table of what each was to save and to cost beside what it did. It does not
decide what is a change. Rows are `Decision.row()` of the cluster scheduler (docs/scheduler.md); metrics rows say with
`transitions` how many of them were finished by the end of a step, which is how the two clocks meet. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from pearl.metrics import svg
from pearl.metrics.console import is_number, number

NEAR = 5
"""A change's measured gain is the difference of means over so many steps on both sides, as far as no other change is near."""
MOST = 60
"""So many changes are shown, the last ones."""

Row = dict[str, Any]


def section(changes: list[Row], steps: list[Row]) -> str:
    """The part of the page; "" for a run without changes."""
    if not changes:
        return ""
    heads = ("when, s", "change", "cause", "from", "to", "gain, s", "measured", "cost, s", "measured", "")
    title = "<h2>Changes of the cluster</h2>"
    lines = [_line(place, change, changes, steps) for place, change in enumerate(changes)][-MOST:]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"{title}{_timeline(changes)}<table><tr>{head}</tr>{''.join(lines)}</table>{_note()}"


def measured_gain_s(place: int, changes: Sequence[Row], steps: Sequence[Row]) -> float | None:
    """Seconds by which steps became shorter with change number `place`; None where no whole step lies on one of its sides.

    The steps in which this and the neighbouring changes were finished count for neither side.
    """
    if not changes[place].get("ok"):
        return None
    counts = [row.get("transitions") for row in steps]
    timed = [(row["time_s"], known) for row, known in zip(steps, counts, strict=True) if is_number(row.get("time_s"))]
    before = [seconds for seconds, known in timed if known == place]
    ending = next((index for index, known in enumerate(counts) if is_number(known) and known > place), None)
    if ending is None or counts[ending] != place + 1:
        return None  # not finished yet, or others were within the same step
    after = [seconds for seconds, known in timed if known == place + 1][1:]  # without the step in which it was finished
    if place > 0:
        before = before[1:]  # the step in which the change before was finished
    if not before or not after:
        return None
    before, after = before[-NEAR:], after[:NEAR]
    return sum(before) / len(before) - sum(after) / len(after)


def _line(place: int, change: Row, changes: Sequence[Row], steps: Sequence[Row]) -> str:
    weighed = not change.get("forced")
    ending = "" if change.get("ok") else str(change.get("error") or "not finished")
    cells = (
        number(_since(change, changes), ".0f"),
        str(change.get("kind", "")),
        str(change.get("cause", "")),
        str(change.get("before", "")),
        str(change.get("after", "")),
        number(change.get("gain_s"), "+.2f") if weighed else "not weighed",
        number(measured_gain_s(place, changes, steps), "+.2f"),
        number(change.get("cost_s"), ".2f"),
        number(change.get("seconds"), ".2f"),
        ending,
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _since(change: Row, changes: Sequence[Row]) -> float | None:
    """Seconds since the first change."""
    at, first = change.get("at"), changes[0].get("at")
    return at - first if is_number(at) and is_number(first) else None


def _timeline(changes: list[Row]) -> str:
    """The shapes that the cluster had, one after the other, and below the changes as long as they took."""
    timed = [change for change in changes if is_number(change.get("at")) and is_number(change.get("seconds"))][-MOST:]
    if not timed:
        return ""
    ends = [change["at"] + change["seconds"] for change in timed]
    span = max(ends[-1] - timed[0]["at"], 1e-3)
    starts = [timed[0]["at"] - 0.05 * span, *ends]
    shapes = [str(timed[0].get("before")), *(str(change.get("after" if change.get("ok") else "before")) for change in timed)]
    had = [(name, begin, end) for name, begin, end in zip(shapes, starts, [*ends, ends[-1] + 0.05 * span], strict=True)]
    took = [(str(change.get("kind")), change["at"], change["at"] + change["seconds"]) for change in timed]
    names = list(dict.fromkeys(name for name, *_ in [*had, *took]))
    colours = {name: place % 8 for place, name in enumerate(names)}
    keys = " ".join(f'<i style="background: var(--c{colours[name]})"></i>{escape(name)}' for name in names)
    chart = svg.lanes({"shape": had, "changes": took}, colours)
    caption = f"<figcaption>what the cluster was <small>{keys}</small></figcaption>"
    return f'<figure class="wide">{caption}{chart}</figure>'


def _note() -> str:
    return (
        "<p class='legend'>Shapes count who serves: 2M two mixed workers, 1P3D one for prefill and three for decode. switch: "
        "workers change their roles; borrow, give_back: training ranks serve for a while, and are called back; expand: "
        "external workers build their engines, and do not serve yet; admit: they do; leave: one is told to go.</p>"
        "<p class='legend'>Gain: what a batch was to take less, and by how much the mean of up to "
        f"{NEAR} steps after the change is below that of up to {NEAR} steps before it; nothing where another change was too "
        "near.</p>"
    )
