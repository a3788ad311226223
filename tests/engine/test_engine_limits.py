"""How requests end, what is refused, and that a failure costs nobody else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_greedy, make, model, one, oracle, run

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.request import RequestUpdate
from pearl.protocol import Role, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def plain_folder(tmp_path: Path, eos: list[int]) -> Path:
    """The unrandomised model, with end-of-sequence ids in its generation config."""
    folder = hf_models.save(hf_models.dense(), tmp_path / "plain")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def test_eos_list_ignore_eos_stop_ids_and_min_tokens(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path, [127, 18])
    prompt = hf_models.prompt(6)
    greedy = hf_models.greedy(hf_models.dense(), prompt, 12)[0]
    assert greedy.index(18) == 3 and greedy.index(5) == 1

    def ends(**fields) -> tuple:
        completion = one(make(folder), prompt, SamplingParams(temperature=0.0, max_tokens=12, **fields))
        assert len(completion.token_ids) == len(completion.logprobs or [])
        return completion.token_ids, completion.finish_reason, completion.stop_reason

    assert ends() == (greedy[:4], "stop", None)
    assert ends(ignore_eos=True) == (greedy, "length", None)
    assert ends(ignore_eos=True, stop_token_ids=[18]) == (greedy[:4], "stop", 18)
    assert ends(stop_token_ids=[5]) == (greedy[:2], "stop", 5)
    kept, reason, _ = ends(min_tokens=6)
    assert kept[:3] == greedy[:3] and not {18, 127} & set(kept[:5]) and len(kept) >= 6 and reason in ("stop", "length")


def test_max_model_len_edges(folder: Path) -> None:
    engine = make(folder, max_model_len=32)
    whole = hf_models.prompt(40)
    for max_tokens in (1, 5, None):
        completion = one(engine, whole[:31], SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert (completion.token_ids, completion.finish_reason) == (oracle(tuple(whole[:31]), 1)[0], "length")
    assert len(one(engine, whole[:20], SamplingParams(temperature=0.0, max_tokens=None)).token_ids) == 12
    for length in (32, 33, 40):
        with pytest.raises(ValueError, match=rf"{length}.*(31|32)"):
            engine.add_request(whole[:length])
    assert not engine.has_unfinished()
    assert make(folder).max_model_len == 256
    with pytest.raises(ValueError, match=r"max_model_len=300.*256"):
        make(folder, max_model_len=300)


def test_full_length_of_the_model_is_served(folder: Path) -> None:
    prompt = hf_models.prompt(250)
    completion = one(make(folder), prompt, SamplingParams(temperature=0.0, max_tokens=20))
    assert_greedy(completion, 6)


def test_bad_numbers_cost_their_own_request_only(folder: Path) -> None:
    engine = make(folder, num_blocks=12)
    with torch.no_grad():
        engine._decoder.embed.weight[99] = math.nan
    bad = engine.add_request([3, 99, 4, 5, 6], GREEDY)
    prompt = [token_id for token_id in hf_models.prompt(7) if token_id != 99]
    good = engine.add_request(prompt, GREEDY)
    done = run(engine)
    assert (done[bad][0].finish_reason, done[bad][0].token_ids) == ("error", [])
    assert "not finite" in (done[bad][0].error or "")
    for completion in (done[good][0], *(one(engine, [seed, *prompt]) for seed in range(6))):
        assert 99 not in completion.token_ids
        assert_greedy(completion, 8)


# ---------------------------------------------------------------------------------------------------- roles and refusals


def test_roles_change_between_steps(folder: Path) -> None:
    engine = make(folder)
    ids = [engine.add_request(hf_models.prompt(9, seed=seed), GREEDY) for seed in range(3)]
    engine.step()
    report = engine.switch_role(Role.DECODE)
    assert report.seconds >= 0 and engine.stats().role is Role.DECODE and engine.stats().epoch == 1
    done = run(engine)
    for rid in ids:
        assert_greedy(done[rid][0], 8)
    with pytest.raises(ValueError, match=r"boss.*mixed, prefill, decode"):
        engine.switch_role("boss")
    assert engine.stats().role is Role.DECODE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.add_request([]), "empty|at least 1"),
        (lambda engine: engine.add_request([5, 5000]), "5000.*128"),
        (lambda engine: engine.add_request([5, -1]), "-1"),
        (lambda engine: engine.add_request([5, 1.5]), r"1\.5.*integer"),
        (lambda engine: engine.add_request("text"), "no tokenizer"),
        (lambda engine: engine.add_request([1], SamplingParams(stop=["x"])), "stop=.*tokenizer"),
        (lambda engine: engine.add_request([1], SamplingParams(stop_token_ids=[128])), "128"),
        (lambda engine: engine.add_request([1], SamplingParams(logprobs=129)), "logprobs=129.*128"),
        (lambda engine: engine.add_request([1], {"top_k": 1}), "SamplingParams"),
        (lambda engine: engine.add_request(list(range(100))), "100.*80"),
        (lambda engine: engine.add_request([1], reservation=object()), "reservation.*KVReservation"),
        (lambda engine: engine.update_weights([], version=1, way="flown"), "flown.*staged, streaming"),
        (lambda engine: engine.update_weights([], version=1, mode="now"), "now.*keep, recompute, abort"),
        (lambda engine: engine.switch_role(Role.DECODE, drain="x"), "drain='x'.*handover"),
        (lambda engine: engine.tokenizer, "no tokenizer"),
        (lambda engine: engine.sleep("hold"), "weights='hold': must be one of keep, drop"),
        (lambda engine: engine.wake(), "is awake"),
        (lambda engine: engine.export_kv("x"), "request_id='x'"),
        (lambda engine: engine.import_kv(None), "KVTransfer"),
        (lambda engine: engine.reserve_kv("x", [5000], None), "5000.*128"),
        (lambda engine: engine.reserve_kv("x", list(range(100)), None), "100.*80"),
    ],
)
def test_refusals_name_the_matter_and_change_nothing(folder: Path, call, message: str) -> None:
    engine = make(folder, num_blocks=20)
    running = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.step()
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert engine.stats() == before
    assert_greedy(run(engine)[running][0], 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 2}, "comm: has 1 members, must have tensor_parallel=2"),
        ({"device": "toaster"}, "device='toaster'"),
        ({"num_blocks": None, "kv_memory_fraction": 1e-9}, "max_model_len=256.*bytes"),
        ({"model": None}, "model=None"),
        ({"model": "/nowhere"}, "nowhere"),
    ],
)
def test_impossible_settings_are_refused(folder: Path, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"folder": folder} | settings) if "model" not in settings else Engine(EngineConfig(**settings))


def test_a_pool_too_small_for_a_prompt_is_refused_and_the_next_request_runs(folder: Path) -> None:
    engine = make(folder, num_blocks=5)
    with pytest.raises(ValueError, match=r"25.*20"):
        engine.add_request(hf_models.prompt(25))
    assert_greedy(one(engine, hf_models.prompt(6)), 8)
    full = one(engine, hf_models.prompt(15), SamplingParams(temperature=0.0, max_tokens=50))
    assert full.finish_reason == "error" and "20" in (full.error or "")
    assert full.token_ids == oracle(tuple(hf_models.prompt(15)), 50)[0][: len(full.token_ids)]


def test_updates_carry_tokens_log_probs_and_versions_side_by_side(folder: Path) -> None:
    engine = make(folder)
    engine.add_request(hf_models.prompt(6), GREEDY)
    updates: list[RequestUpdate] = list(engine.stream())
    completion = updates[-1].completion
    assert completion is not None and all(update.completion is None for update in updates[:-1])
    assert [token_id for update in updates for token_id in update.token_ids] == completion.token_ids
    assert [value for update in updates for value in update.logprobs] == completion.logprobs
    assert [version for update in updates for version in update.weight_versions] == completion.weight_versions
