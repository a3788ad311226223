"""An engine that gives its memory back and takes it again: same tokens, same addresses, nothing found that is gone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_free, assert_greedy, make, model, named, one, oracle, run
from torch import Tensor

from pearl.engine.engine import Engine
from pearl.engine.llm import LLM
from pearl.protocol import Role, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def addresses(engine: Engine) -> dict[str, int]:
    parameters = {name: parameter.data_ptr() for name, parameter in engine._decoder.named_parameters()}
    return parameters | {"pool": engine._runner.kv_pool.data_ptr()}


def tables(engine: Engine) -> dict[str, Tensor]:
    """All tensors that follow from the configuration and are no weights: whatever the decoder holds beside its parameters."""
    decoder = engine._decoder
    held = {name: value for name, value in vars(decoder).items() if isinstance(value, Tensor)}
    return {name: value.clone() for name, value in (held | dict(decoder.named_buffers())).items()}


@pytest.mark.parametrize("weights", ["keep", "drop"])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_running_requests_go_on_with_the_same_tokens(folder: Path, weights: str, steps: int) -> None:
    engine = make(folder, max_batch_tokens=16)
    prompts = [hf_models.prompt(length, seed=length) for length in (6, 21, 9)]
    ids = [engine.add_request(prompt, LONG) for prompt in prompts]
    for _ in range(steps):
        engine.step()
    running = engine.stats().running
    engine.sleep(weights)
    asleep = engine.stats()
    assert asleep.asleep and asleep.running == asleep.used_blocks == asleep.cached_blocks == 0
    assert (asleep.free_blocks, asleep.num_preemptions) == (asleep.total_blocks, running)
    assert engine.step() == [] and engine.has_unfinished()
    engine.wake()
    assert not engine.stats().asleep
    if weights == "drop":
        engine.update_weights(named(0), version=0)
    done = run(engine)
    for rid in ids:
        assert_greedy(done[rid][0], 12)
        assert done[rid][0].weight_versions == [0] * 12


def test_addresses_and_tables_stay_and_the_pool_is_poisoned_again(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(13)
    first = one(engine, prompt)
    before, derived = addresses(engine), tables(engine)
    assert len(derived) >= 2
    for version, weights in enumerate(["keep", "drop", "keep", "drop"], start=1):
        engine.sleep(weights)
        pool = engine._runner.kv_pool
        assert not pool.any()  # given back: it reads as zeros, neither NaN nor old KV
        kept = all(bool(tensor.any()) for _, tensor in engine.named_hf_tensors())
        assert kept is (weights == "keep")
        engine.wake()
        assert bool(pool.isnan().all())
        if weights == "drop":
            engine.update_weights(named(version % 4 // 2), version=version)
        assert addresses(engine) == before
        assert all(torch.equal(value, derived[name]) for name, value in tables(engine).items())
        again = one(engine, prompt)
        assert again.num_cached_tokens == 0
        assert_greedy(again, 8, seed=engine.weight_version % 4 // 2)
    assert first.token_ids == oracle(tuple(prompt), 8)[0]


def test_the_prefix_cache_is_empty_after_waking(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(13)
    one(engine, prompt)
    assert one(engine, prompt).num_cached_tokens == 12
    engine.sleep()
    engine.wake()
    assert one(engine, prompt).num_cached_tokens == 0
    assert one(engine, prompt).num_cached_tokens == 12


@pytest.mark.parametrize("way", ["staged", "streaming"])
def test_dropped_weights_must_come_back_whole_before_a_step(folder: Path, way: str) -> None:
    engine = make(folder)
    started, prompt = engine.add_request(hf_models.prompt(6), LONG), hf_models.prompt(9)
    for _ in range(4):
        engine.step()
    engine.sleep("drop")
    assert engine.weight_version == engine.stats().weight_version == -1
    queued = engine.add_request(prompt, GREEDY)
    engine.wake()
    late = engine.add_request(prompt, GREEDY)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step()
    with pytest.raises(ValueError, match="missing"):
        engine.update_weights(named(1)[:-1], version=1, way=way)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step()
    engine.update_weights(named(1), version=1, way=way)
    done = run(engine)
    for rid in (queued, late):
        assert_greedy(done[rid][0], 8, seed=1)
    completion = done[started][0]
    old = oracle(tuple(hf_models.prompt(6)), 4)[0]
    assert completion.token_ids == old + oracle((*hf_models.prompt(6), *old), 8, 1)[0]
    assert completion.weight_versions == [0] * 4 + [1] * 8


def test_an_update_may_end_what_slept(folder: Path) -> None:
    engine = make(folder)
    started = engine.add_request(hf_models.prompt(6), LONG)
    engine.step()
    engine.sleep("drop")
    queued = engine.add_request(hf_models.prompt(9), GREEDY)
    engine.wake()
    engine.update_weights(named(1), version=1, mode="abort")
    done = run(engine)
    assert (done[started][0].finish_reason, len(done[started][0].token_ids)) == ("abort", 1)
    assert_greedy(done[queued][0], 8, seed=1)


@pytest.mark.parametrize("weights", ["keep", "drop"])
def test_asleep_requests_are_taken_aborted_and_delivered(folder: Path, weights: str) -> None:
    engine = make(folder)
    started, before = (engine.add_request(hf_models.prompt(6), LONG) for _ in range(2))
    engine.step()
    assert engine.abort(before)
    engine.sleep(weights)
    late = engine.add_request(hf_models.prompt(7), GREEDY)
    [completion] = engine.step()
    assert (completion.request_id, completion.finish_reason, len(completion.token_ids)) == (before, "abort", 1)
    assert engine.abort(started) and engine.abort(late) and not engine.abort(before)
    engine.check_integrity()
    assert {(end.request_id, len(end.token_ids)) for end in engine.step()} == {(started, 1), (late, 0)}
    assert not engine.has_unfinished()
    engine.wake()
    assert_free(engine)


def test_streaming_over_a_sleeping_engine_ends(folder: Path) -> None:
    engine = make(folder)
    engine.add_request(hf_models.prompt(6), GREEDY)
    engine.sleep()
    assert list(engine.stream()) == []
    engine.wake()
    assert sum(len(update.token_ids) for update in engine.stream()) == 8


def test_generating_on_a_sleeping_engine_is_an_error_and_not_a_loop(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", num_blocks=50, block_size=4)
    llm.engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        llm.generate([hf_models.prompt(6)], GREEDY)
    llm.engine.wake()
    assert_greedy(llm.generate([hf_models.prompt(6)], GREEDY)[0], 8)


def test_pause_role_and_reset_hold_over_sleep(folder: Path) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.pause()
    engine.sleep()
    engine.switch_role(Role.DECODE)
    assert engine.reset_prefix_cache() == 0
    engine.wake()
    assert engine.step() == [] and engine.paused and engine.stats().role is Role.DECODE
    engine.resume()
    assert_greedy(run(engine)[rid][0], 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.sleep(), "asleep"),
        (lambda engine: engine.sleep("drop"), "asleep"),
        (lambda engine: engine.update_weights(named(1), version=1), "asleep"),
        (lambda engine: engine.update_weights(named(1), version=1, way="streaming"), "asleep"),
        (lambda engine: engine.stage_weights(named(1), 1), "asleep"),
        (lambda engine: engine.commit_weights(1), "version=1: None is staged"),
    ],
)
@pytest.mark.parametrize("weights", ["keep", "drop"])
def test_what_a_sleeping_engine_refuses(folder: Path, weights: str, call: Callable[[Engine], None], message: str) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.step()
    engine.sleep(weights)
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert engine.stats() == before
    engine.wake()
    if weights == "drop":
        engine.update_weights(named(0), version=1)
    assert_greedy(run(engine)[rid][0], 8)


@pytest.mark.parametrize("weights", ["keep", "drop"])
def test_a_version_being_staged_keeps_the_engine_awake(folder: Path, weights: str) -> None:
    engine = make(folder)
    engine.stage_weights(named(1)[:3], 1)
    with pytest.raises(ValueError, match="version 1 is being staged; commit or discard"):
        engine.sleep(weights)
    assert not engine.asleep
    engine.stage_weights(named(1)[3:], 1)
    engine.commit_weights(1)
    assert_greedy(one(engine, hf_models.prompt(6)), 8, seed=1)
    engine.sleep(weights)


def test_what_a_lease_protects_keeps_the_engine_awake(folder: Path) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.step()
    blocks = engine._core.blocks
    lease = blocks.lease(engine._core.requests[rid].block_table)
    with pytest.raises(ValueError, match="0 unfinished outputs, 1 leases"):
        engine.sleep()
    assert not engine.asleep and engine.stats().running == 1
    blocks.release_lease(lease)
    engine.sleep()
    engine.wake()
    assert_greedy(run(engine)[rid][0], 8)


def test_memory_that_cannot_be_given_back_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.step()
    monkeypatch.setattr(engine._weight_memory, "_device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="device='cuda:0': .*cannot be given back"):
        engine.sleep("drop")
    assert not engine.asleep and engine.stats().running == 1
    assert_greedy(run(engine)[rid][0], 8)


def test_the_second_copy_s_memory_is_given_back_too(folder: Path) -> None:
    engine = make(folder)
    engine.update_weights(named(1), version=1)
    assert engine._store._spare
    engine.sleep()
    assert not engine._store._spare


def test_an_unpoisoned_pool_is_zeros(folder: Path) -> None:
    engine = make(folder, kv_fill=None)
    assert_greedy(one(engine, hf_models.prompt(6)), 8)
    assert engine._runner.kv_pool.any()
    engine.sleep()
    engine.wake()
    assert not engine._runner.kv_pool.any()
    assert_greedy(one(engine, hf_models.prompt(6)), 8)
    assert math.isfinite(float(engine._runner.kv_pool.sum()))
