"""Every family and option through the real engine: ids of transformers' greedy search, log-probs within 1e-4; folders back."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import hf_models
import pytest
import torch
import weight_cases
from engine_cases import make, one, run
from model_variants import VARIANTS
from transformers import AutoModelForCausalLM, PreTrainedModel

from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.engine.weights.checkpoint import save_folder
from pearl.protocol import SamplingParams

LENGTHS, COUNT = (3, 4, 5, 8, 9, 13), 8
PROMPTS = [hf_models.prompt(n, seed=n) for n in LENGTHS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT)


@functools.cache
def model(variant: str) -> PreTrainedModel:
    build, overrides = VARIANTS[variant]
    return hf_models.randomise(build(**overrides))


@functools.cache
def oracle(variant: str, ids: tuple[int, ...], count: int = COUNT) -> tuple[list[int], list[float]]:
    return hf_models.greedy(model(variant), list(ids), count)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda variant: hf_models.save(model(variant), root / variant))


def assert_all_equal(engine: Engine, variant: str) -> None:
    rids = [engine.add_request(ids, GREEDY) for ids in PROMPTS]
    done = run(engine)
    for rid, ids in zip(rids, PROMPTS, strict=True):
        tokens, logprobs = oracle(variant, tuple(ids))
        assert done[rid][0].token_ids == tokens
        assert done[rid][0].logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_and_logprobs_are_those_of_transformers(folders, variant: str) -> None:
    """Together and once more over the cached prefixes, which windows reach back into."""
    engine = make(folders(variant), block_size=4)
    assert_all_equal(engine, variant)
    assert_all_equal(engine, variant)
    longest = one(engine, PROMPTS[-1], GREEDY)
    assert longest.num_cached_tokens >= 12 and longest.token_ids == oracle(variant, tuple(PROMPTS[-1]))[0]


@pytest.mark.parametrize(("block_size", "budget"), [(3, 1), (3, 5), (4, 3), (4, 5), (1, 7), (16, 4)])
@pytest.mark.parametrize("variant", ["dense-window", "dense-window-1", "dense-window-mixed", "qwen2-window", "mistral-window"])
def test_windows_in_blocks_and_chunks_of_any_size(folders, variant: str, block_size: int, budget: int) -> None:
    engine = make(folders(variant), block_size=block_size, max_batch_tokens=budget, max_num_seqs=min(budget, 6))
    assert_all_equal(engine, variant)


@pytest.mark.parametrize("variant", ["dense-window", "dense-window-mixed"])
def test_windows_survive_preemption_and_a_long_answer(folders, variant: str) -> None:
    """Ten blocks of four: three requests of up to 29 tokens push each other out and are computed again."""
    engine = make(folders(variant), block_size=4, num_blocks=10)
    rids = [engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=16)) for ids in PROMPTS[3:]]
    done = run(engine)
    for rid, ids in zip(rids, PROMPTS[3:], strict=True):
        tokens, logprobs = oracle(variant, tuple(ids), 16)
        assert done[rid][0].token_ids == tokens
        assert done[rid][0].logprobs == pytest.approx(logprobs, abs=1e-4)
    assert sum(done[rid][0].num_preemptions for rid in rids) > 0


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "head" not in name and "groups" not in name])
def test_a_folder_written_here_is_the_same_model_everywhere(tmp_path: Path, folders, variant: str) -> None:
    config = from_folder(folders(variant))
    decoder = weight_cases.load(folders(variant))
    save_folder(tmp_path / "ours", config, dict(decoder.named_parameters()))
    assert from_folder(tmp_path / "ours") == config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs) is type(model(variant))
    ids = hf_models.prompt(40)
    assert torch.equal(hf_models.logits(theirs, ids), hf_models.logits(model(variant), ids))


@pytest.mark.parametrize("variant", ["dense-yarn", "dense-dynamic", "llama-llama3"])
def test_the_longest_sequence_is_what_the_configuration_says(folders, variant: str) -> None:
    """Scaling multiplies nothing a second time, and dynamic scaling never has to go beyond the length it starts at."""
    engine = make(folders(variant), num_blocks=80)
    assert engine.max_model_len == 256
    ids = hf_models.prompt(252)
    completion = one(engine, ids, GREEDY)
    assert len(completion.token_ids) == 4 and completion.finish_reason == "length"
    tokens, logprobs = oracle(variant, tuple(ids), 4)
    assert completion.token_ids == tokens
    assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
    with pytest.raises(ValueError, match=r"max_model_len=257: must not exceed .*256"):
        make(folders(variant), max_model_len=257)


def test_old_spellings_in_a_folder(tmp_path: Path, folders) -> None:
    """`rope_scaling` with `type` beside a top-level `rope_theta`, as files of 2023 have it."""
    folder = hf_models.save(model("llama-llama3"), tmp_path / "old")
    content = json.loads((folder / "config.json").read_text())
    rope = content.pop("rope_parameters")
    content |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    (folder / "config.json").write_text(json.dumps(content))
    assert from_folder(folder) == from_folder(folders("llama-llama3"))
    assert_all_equal(make(folder), "llama-llama3")
