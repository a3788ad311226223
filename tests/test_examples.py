"""The programs of examples/ run, and do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import hf_models
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_code_of_the_roles_page_runs(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "roles.md").read_text()
    whole, reading_along = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    made, loop = whole.split("prefill.add_request", 1)
    folder = hf_models.save(hf_models.dense(), tmp_path / "model")
    code = f"{made}{reading_along}prefill.add_request{loop}"
    exec(compile(code, "docs/roles.md", "exec"), {"FOLDER": folder, "ids": hf_models.prompt(20)})


def test_roles_change_under_load_and_the_picture_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "role_switch.py"))["main"]
    picture = tmp_path / "roles.png"
    demo = main(["--seconds", "4", "--out", str(picture)])
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert len(demo.switches) > 3 and out.count("a worker is prefill") > 1
    assert demo.ended == demo.asked > 24 and demo.moved > 0
    for worker in demo.workers:
        assert sum(tokens for _, tokens in worker.prompts) > 0 and sum(tokens for _, tokens in worker.answers) > 0
        stats = worker.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks and stats.offered == 0
