"""What a folder recommends, and the hint when somebody names the folder of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hf_models
import pytest

from pearl.engine.llm import LLM
from pearl.engine.model_folder import generation_defaults, models_below
from pearl.engine.models.config import from_folder
from pearl.protocol import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(hf_models.dense(), tmp_path_factory.mktemp("models") / "model")


def says(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


RECOMMENDED = {"temperature": 0.6, "top_k": 2, "top_p": 0.95, "repetition_penalty": 1.3, "do_sample": True}


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "bos_token_id": 0, "transformers_version": "5"}, {}),
        (RECOMMENDED, {name: value for name, value in RECOMMENDED.items() if name != "do_sample"}),
        ({"max_new_tokens": 9, "min_new_tokens": 2, "min_p": None}, {"max_tokens": 9, "min_tokens": 2}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"num_beams": 4, "penalty_alpha": 0.6}, {}),
    ],
)
def test_recommendations_are_keywords_of_sampling_params(tmp_path: Path, said: dict, want: dict) -> None:
    found = generation_defaults(says(tmp_path, said))
    assert found == want
    SamplingParams(**found)


def test_no_file_recommends_nothing(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", "5"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        generation_defaults(says(tmp_path, text))


def test_an_engine_shows_them_and_applies_them_only_when_told(folder: Path, tmp_path: Path) -> None:
    other = hf_models.save(hf_models.dense(), tmp_path / "other")
    says(other, RECOMMENDED)
    plain, llm = (LLM(path, dtype="float32", num_blocks=16) for path in (folder, other))
    assert plain.generation_defaults == {} and llm.generation_defaults["top_k"] == 2
    ids, own = hf_models.prompt(6), SamplingParams(seed=4, max_tokens=8, logprobs=128)
    [want], [got] = plain.generate(ids, own), llm.generate(ids, own)
    assert got.params == own
    assert (got.token_ids, got.logprobs, got.top_logprobs) == (want.token_ids, want.logprobs, want.top_logprobs)
    told = SamplingParams(**llm.generation_defaults, seed=4, max_tokens=8, logprobs=128)
    [applied] = llm.generate(ids, told)
    assert applied.params == told and applied.top_logprobs != want.top_logprobs  # self-check: they do matter


def test_naming_a_run_gives_a_hint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart-1"
    old, new = run / "policy", run / "checkpoints" / "step_000010" / "model"
    for age, path in ((100, old), (0, new)):
        path.parent.mkdir(parents=True, exist_ok=True)
        hf_models.save(hf_models.dense(), path)
        os.utime(path, (1e9 - age, 1e9 - age))
    hidden = run / ".policy.new"
    hf_models.save(hf_models.dense(), hidden)
    assert models_below(run) == [new, old]
    with pytest.raises(ValueError, match=r"not a Hugging Face model folder \(no config.json\); below it are .*step_000010"):
        from_folder(run)
    (run / "config.json").write_text('{"recipe": "quickstart", "max_steps": 10}')
    with pytest.raises(ValueError, match=r"names no architectures\); below it are .*step_000010/model, .*policy$"):
        LLM(run)


def test_without_a_model_below_there_is_no_hint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(no config\.json\)$"):
        from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="architectures"):
        from_folder(tmp_path)
