"""The code of docs/library.md, run from top to bottom on a tiny model, and the facts its tables state."""

from __future__ import annotations

import re
from pathlib import Path

import hf_models
import msgspec
import pytest
import tiny_tokenizers as tiny

from pearl.protocol import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
MODEL = "models/SmolLM2-135M-Instruct"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = hf_models.save(hf_models.dense(vocab_size=264, max_position_embeddings=512), tmp_path / "model")
    return tiny.save(tiny.byte_level(), folder, tiny.QWEN3)


def test_the_code_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5 and len(blocks[0].strip().splitlines()) <= 15
    names: dict = {}
    for block in blocks:
        exec(compile(block.replace(MODEL, str(folder)), "docs/library.md", "exec"), names)
    out = capsys.readouterr().out
    assert names["done"].weight_versions == [0, 1, 1, 1, 1, 1] and "[0, 1, 1, 1, 1, 1]" in out
    assert "<|im_end|> is only text" in out and names["one"].finish_reason in ("stop", "length")
    assert names["ids"].count(263) == 2  # the system prompt and the user's turn, not the user's text


def test_every_sampling_parameter_is_explained_with_its_default() -> None:
    table = PAGE[PAGE.index("## Sampling parameters") : PAGE.index("**Ends.**")]
    for field in msgspec.structs.fields(SamplingParams):
        assert f"`{field.name}" in table, field.name
    for name, value in re.findall(r"`(\w+)=([^`]+)`", table):
        assert repr(getattr(SamplingParams(), name)) == value.replace('"', "'"), name
