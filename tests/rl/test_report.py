"""The report page of a made-up run: what it says, that nothing of a run becomes part of the page, and that it stands alone."""

from __future__ import annotations

import json
import re
import tracemalloc
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pearl import config as configuration
from pearl.config import Config, EnvOptions, ModelOptions
from pearl.metrics.trace import TraceWriter
from pearl.rl import fresh_model, report
from pearl.rl.report import chosen, main, page

EVIL = "<script>alert(1)</script><img src=http://example.org/x>"
VOID = {"meta", "link", "br", "img"}


class Balance(HTMLParser):
    """Tags that are open, and all there were."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def episode(number: int, *, success: bool, outcome: str = "done", tokens: int = 4) -> dict:
    return {
        "step": 1 + number,
        "prompt": "p",
        "trajectory_id": f"{number}-0",
        "env_seed": number,
        "outcome": outcome,
        "error": EVIL if outcome == "failed" else None,
        "reward": 1.0,
        "success": success,
        "turns": [{"text": EVIL, "observation": "o"}],
        "token_ids": [*EVIL.encode()[:tokens], 65, 66],
        "loss_mask": [0] * tokens + [1, 1],
        "logprobs": [-2.0, -50.0],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir()
    rows = [
        {"step": step, "max_steps": 4, "time_s": 2.0, "elapsed_s": 2.0 * step}
        | {"reward_mean": 0.1 * step, "success_rate": 0.2 * step}
        | {"rollout_s": 1.0, "train_s": 1.0, "train_busy": 0.25, "serve_busy": 0.5, "tokens_per_s": 1234.0, "staleness_max": 1}
        | {"eval_success_rate": 0.75 if step == 2 else None, "trained": 8, "dropped": 0}
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    episodes = [episode(0, success=False), episode(1, success=True), episode(2, success=False, outcome="failed")]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    config = Config(recipe=EVIL, env=EnvOptions(options={"size": EVIL}), seed=5)
    (folder / "config.json").write_text(configuration.to_json(config))
    fresh_model.write_model_folder(folder / "policy", ModelOptions(), [])
    trace = TraceWriter(folder / "trace.json")
    trace.span("rank0/commands", "TrainStep", 1.0, 2.0)
    trace.span("rank1/engine", "engine steps", 1.5, 3.0)
    trace.close()
    return folder


def test_the_page_says_what_happened(run: Path) -> None:
    text = page(run)
    for fact in ("3 of 4", "0.750", "75%", "50%", "1.2k", "8 trained, 0 dropped"):
        assert f"<b>{fact}</b>" in text, fact
    for name in ("rank0/commands", "rank1/engine", "engine steps: 1.500 s", "a late success", "env.options"):
        assert name in text, name
    assert "<td>seed</td><td>5</td>" in text and "<td>group_size</td>" not in text


def test_it_is_well_formed_stands_alone_and_runs_nothing_of_the_run(run: Path) -> None:
    text = page(run)
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == [] and not parser.seen & {"script", "img", "link", "iframe"}
    assert "&lt;script&gt;" in text and "<script" not in text
    assert re.findall(r"(?:src|href)=[\"']|url\(|@import", text) == []
    drawings = re.findall(r"<svg.*?</svg>", text)
    assert len(drawings) >= 6
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_tokens_are_coloured_by_their_log_prob(run: Path) -> None:
    text = page(run)
    assert '<span class="given">&lt;</span><span class="given">s</span>' in text
    assert '<span class="sampled" style="--p: 50%" title="-2.000">A</span>' in text
    assert '<span class="sampled" style="--p: 100%" title="-50.000">B</span>' in text


def test_it_does_without_what_is_not_there(run: Path) -> None:
    for name in ("trace.json", "config.json", "trajectories.jsonl"):
        (run / name).unlink()
    text = page(run)
    assert "No timeline" in text and "None yet." in text and "config.json cannot be read" in text


def test_without_a_tokenizer_the_words_are_shown(run: Path) -> None:
    (run / "policy" / "tokenizer.json").unlink()
    assert "&lt;script&gt;alert(1)" in page(run)


def test_a_long_run_is_more_than_memory_has_room_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LATE", 10)
    row = {"outcome": "done", "token_ids": [7] * 2000, "loss_mask": [1] * 2000, "logprobs": [-0.25] * 2000, "success": True}
    with (run / "trajectories.jsonl").open("w") as file:
        for number in range(150):
            file.write(json.dumps(row | {"trajectory_id": f"{number}-0", "step": number}) + "\n")
        file.write('{"half of a ro')
    size = (run / "trajectories.jsonl").stat().st_size
    tracemalloc.start()
    try:
        text = page(run)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "149-0" in text and "0-0" in text
    assert peak < size, f"{peak} bytes for a file of {size}"


def test_episodes_are_chosen_once_each() -> None:
    episodes = [episode(number, success=number % 2 == 0, tokens=4 + number % 3) for number in range(10)]
    picks = chosen([*episodes, episode(11, success=False, outcome="failed")])
    names = [pick["trajectory_id"] for _, pick in picks]
    assert names == ["0-0", "8-0", "9-0", "11-0", "2-0"]
    assert chosen([]) == []


def test_the_command_writes_the_file_or_says_why_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert not list(run.glob(".report*"))
    (run / "metrics.jsonl").write_text("")
    assert main([str(run)]) == 2 and "metrics.jsonl is empty" in capsys.readouterr().err
    (run / "config.json").write_text("{}")
    assert main([str(run / "none")]) == 2 and "none: no such directory" in capsys.readouterr().err
    assert main([str(run.with_name("none"))]) == 2
    assert f"none: no such directory (runs in {run.parent}: {run.name})" in capsys.readouterr().err
    assert main([str(run.parent)]) == 2
    assert f"metrics.jsonl is not there (runs in {run.parent}: {run.name})" in capsys.readouterr().err
