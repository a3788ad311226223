"""Charts: well-formed, to scale, with gaps where there is no number."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from pearl.metrics import svg


def shapes(text: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(tag))


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]  # type: ignore[misc]


def test_a_line_is_to_scale() -> None:
    [line] = shapes(svg.line_chart([1, 2, 3], {"a": [0.0, 1.0, 0.5]}), "polyline")
    (left, low), (middle, high), (right, between) = points(line)
    assert (left, right) == (svg.LEFT, svg.WIDTH - svg.RIGHT) and middle == (left + right) / 2
    assert (low, high, between) == (svg.HEIGHT - svg.BOTTOM, svg.TOP, (low + high) / 2)


@pytest.mark.parametrize("hole", [None, math.nan, math.inf])
def test_what_is_no_number_leaves_a_gap(hole: float | None) -> None:
    lines = shapes(svg.line_chart(list(range(6)), {"a": [1.0, 2.0, hole, 3.0, 4.0, 5.0]}), "polyline")
    assert [len(points(line)) for line in lines] == [2, 3]


def test_rare_values_are_joined_and_one_alone_is_a_dot() -> None:
    text = svg.line_chart(list(range(9)), {"a": [None, None, 1.0, None, None, 2.0, None, None, 3.0]})
    assert [len(points(line)) for line in shapes(text, "polyline")] == [3]
    assert len(shapes(svg.line_chart([4], {"a": [1.0]}), "circle")) == 1


def test_long_lines_show_means_of_shares() -> None:
    values = [float(number % 2) for number in range(10 * svg.MOST_POINTS)]
    [line] = shapes(svg.line_chart(list(range(len(values))), {"a": values}, low=0, high=1), "polyline")
    assert len(points(line)) == svg.MOST_POINTS
    assert {y for _, y in points(line)} == {(svg.TOP + svg.HEIGHT - svg.BOTTOM) / 2}


def test_bars_stand_on_each_other() -> None:
    bars = shapes(svg.bar_chart([1, 2], {"a": [1.0, None], "b": [3.0, 2.0]}), "rect")
    assert [round(float(bar.attrib["height"]) / (svg.HEIGHT - svg.TOP - svg.BOTTOM), 3) for bar in bars] == [0.25, 0.75, 0.5]
    lower, upper, _ = bars
    assert float(upper.attrib["y"]) + float(upper.attrib["height"]) == pytest.approx(float(lower.attrib["y"]), abs=0.2)


def test_lanes_begin_at_the_earliest_span() -> None:
    text = svg.lanes({"rank0": [("a", 10.0, 11.0)], "rank1": [("b", 12.0, 14.0)]}, {"a": 0, "b": 1})
    spans = [box for box in shapes(text, "rect") if "style" in box.attrib]
    first, second = (float(box.attrib["x"]) for box in spans)
    widths = [float(box.attrib["width"]) for box in spans]
    assert second - first == pytest.approx(2 * widths[0], abs=0.1) and widths[1] == pytest.approx(2 * widths[0], abs=0.1)


def test_names_cannot_break_the_picture_and_nothing_is_no_picture() -> None:
    name = "<b>&\"'"
    for text in (
        svg.line_chart([1, 2], {name: [1.0, 1.0]}),
        svg.bar_chart([1], {name: [1.0]}),
        svg.lanes({name: [(name, 0.0, 0.0)]}, {}),
    ):
        assert any(name in (title.text or "") for title in shapes(text, "title")) and "<b>" not in text
    assert svg.line_chart([1], {"a": [None]}) == svg.bar_chart([1], {"a": [0.0]}) == svg.lanes({"x": []}, {}) == ""
