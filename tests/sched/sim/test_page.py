"""Pictures and the page of simulated runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_cases import result_of, run_of

from pearl.sched.sim.figures import draw_predictions, draw_throughput, draw_timeline
from pearl.sched.sim.page import write_page
from pearl.sched.sim.results import SimResult
from pearl.sched.sim.tables import Run

PNG = b"\x89PNG"


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_throughput([run_of("a", "S1", 0, 50.0), run_of("b", "S2", 0, 60.0)], tmp_path / "bars.png")
    draw_timeline(result_of([200.0, 100.0]), tmp_path / "time.png", title="S1")
    draw_predictions([(100.0, 110.0), (300.0, 280.0)], tmp_path / "points.png")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["bars.png", "points.png", "time.png"], "nothing else is left behind"
    assert all(file.read_bytes().startswith(PNG) and file.stat().st_size > 5000 for file in files)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    empty = SimResult(seconds=1.0, steps=(), intervals=(), transitions=())
    for draw in (lambda: draw_throughput([], tmp_path / "a"), lambda: draw_timeline(empty, tmp_path / "a")):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_predictions([], tmp_path / "a")
    with pytest.raises(ValueError, match="nothing to show"):
        write_page([], tmp_path / "a", title="t")
    assert not list(tmp_path.iterdir())


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    named = Run(policy="<b>ours</b>", segment="S1", seed=0, result=result_of([100.0, 90.0], [95.0, 95.0], counts={"turns": 7}))
    write_page([named, run_of("base", "S1", 0, 150.0)], tmp_path / "page.html", title="Segments & policies", base="base")
    text = (tmp_path / "page.html").read_text()
    assert "Segments &amp; policies" in text and "&lt;b&gt;ours&lt;/b&gt;" in text and "<b>ours" not in text
    assert "median error 5.3%" in text and "turns 7" in text
    assert text.count("data:image/png;base64,") == 4 and "http" not in text
