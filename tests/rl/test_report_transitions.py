"""Changes of the cluster on the report page: what they were to bring, and what they did bring."""

from __future__ import annotations

import pytest

from pearl.rl.report_transitions import NEAR, measured_gain_s, section

EVIL = "<b>x</b>"


def change(number: int, at: float, **fields: object) -> dict:
    usual = {"number": number, "at": at, "kind": "switch", "cause": "step_ended", "before": "4M", "after": "1P3D"}
    return usual | {"gain_s": 2.0, "cost_s": 0.1, "seconds": 0.25, "ok": True, "error": "", "forced": False} | fields


def steps(*finished: tuple[float, int]) -> list[dict]:
    """Rows of a run by (time of the step, changes finished by its end)."""
    return [{"step": place, "time_s": time, "transitions": count} for place, (time, count) in enumerate(finished, 1)]


def test_the_measured_gain_leaves_out_steps_in_which_something_changed() -> None:
    rows = steps((10, 0), (12, 0), (99, 1), (5, 1), (7, 1), (99, 2), (3, 2))
    changes = [change(1, 20.0), change(2, 60.0)]
    assert [measured_gain_s(place, changes, rows) for place in (0, 1)] == [11 - 6, 6 - 3]


def test_no_gain_is_measured_where_there_is_nothing_to_compare() -> None:
    both_at_once = steps((10, 0), (10, 2), (5, 2))
    assert measured_gain_s(0, [change(1, 1.0), change(2, 2.0)], both_at_once) is None
    assert measured_gain_s(0, [change(1, 1.0)], steps((10, 0), (9, 1))) is None, "no step after it"
    assert measured_gain_s(0, [change(1, 1.0)], steps((9, 1), (9, 1))) is None, "no step before it"
    assert measured_gain_s(0, [change(1, 1.0, ok=False)], steps((10, 0), (9, 1), (5, 1))) is None
    assert measured_gain_s(0, [change(1, 1.0)], [{"step": 1, "time_s": 1.0}]) is None, "rows of a run without a scheduler"


def test_only_near_steps_count() -> None:
    rows = steps(*[(100, 0)] * 9, *[(10, 0)] * NEAR, (50, 1), *[(4, 1)] * NEAR, *[(900, 1)] * 9)
    assert measured_gain_s(0, [change(1, 1.0)], rows) == 6


def test_the_section() -> None:
    rows = steps((10, 0), (12, 1), (5, 1))
    changes = [
        change(1, 100.0, cause=EVIL),
        change(2, 130.0, before="1P3D", after="2P2D", forced=True),
        change(3, 140.0, before="2P2D", after="4M", ok=False, error="rank2: late"),
    ]
    html = section(changes, rows)
    assert EVIL not in html and "&lt;b&gt;x&lt;/b&gt;" in html
    cells = [line.split("</td><td>") for line in html.split("<tr>")[2:]]
    assert [cell[4] for cell in cells] == ["1P3D", "2P2D", "4M"]
    assert (cells[0][5], cells[0][6], cells[1][5]) == ("+2.00", "+5.00", "not weighed")
    assert cells[0][0].endswith("0") and cells[1][0].endswith("30") and "rank2: late" in cells[2][9]
    # Each shape as long as it was there; the failed change left the one before.
    assert html.count("2P2D: ") == 2 and "4M: 2.26" in html and "switch: 0.250 s" in html
    legend = html.split("</table>")[1]
    assert all(kind in legend for kind in ("switch", "borrow", "give_back", "expand", "admit", "leave", "1P3D"))


@pytest.mark.parametrize("rows", [[], [{"at": None, "seconds": None}]])
def test_nothing_to_show(rows: list) -> None:
    assert ("<svg" in section(rows, [])) is False
    assert bool(section(rows, [])) is bool(rows)
