"""A model over several ranks serves as it does on one: same ids, same log-probs, whatever is done to the engine meanwhile."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path

import engine_cases
import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_free, named, run
from gloo_members import run_members
from instances import config_of, led, outcomes
from model_variants import VARIANTS

from pearl.clock import VirtualClock
from pearl.engine import calls, worker
from pearl.engine.comm.communicator import GroupCommunicator, SingleCommunicator
from pearl.engine.engine import Engine
from pearl.engine.leader import Leader
from pearl.engine.models.config import from_folder
from pearl.engine.request import Completion
from pearl.protocol import Role, SamplingParams

FAMILIES = {
    "dense": ({}, 2),
    "dense-tied": ({"tie_word_embeddings": True, "vocab_size": 129}, 2),
    "dense-bias": ({"vocab_size": 130}, 4),
    "dense-one-kv-head-of-5": ({"vocab_size": 129}, 5),
    "dense-window": ({}, 2),
    "llama-biases": ({"intermediate_size": 49}, 2),
    "llama-llama3": ({}, 4),
    "qwen2": ({}, 2),
    "mistral-window": ({}, 2),
    "moe": ({}, 2),
    "moe-uneven": ({"num_experts": 5, "num_attention_heads": 6, "num_key_value_heads": 3}, 3),
}
"""Variant -> what else its model has, and over how many ranks it is cut."""
MIX = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, repetition_penalty=1.3),
    SamplingParams(max_tokens=10, seed=7, top_k=20, prompt_logprobs=True),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=9, n=3, presence_penalty=0.5),
    SamplingParams(temperature=1.5, min_p=0.01, max_tokens=14, logprobs_mode="raw", frequency_penalty=0.2),
    SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=list(range(0, 128, 3))),
]
SMALL = {"num_blocks": 14, "max_batch_tokens": 9, "max_num_seqs": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(engine_cases.model(), tmp_path_factory.mktemp("dense"))


def mixed(engine: Engine) -> dict[str, list[Completion]]:
    """Requests of all kinds, some while others run; one is aborted, one pre-empted."""
    done: dict[str, list[Completion]] = {}
    rids = []
    for number, params in enumerate(MIX):
        rids.append(engine.add_request(hf_models.prompt(5 + 4 * number, seed=number), params, session_id=f"s{number}"))
        for completion in engine.step():
            done.setdefault(completion.request_id, []).append(completion)
    engine.preempt(rids[0])
    leaving = engine.add_request(hf_models.prompt(6), SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        for completion in engine.step():
            done.setdefault(completion.request_id, []).append(completion)
    assert engine.abort(leaving) and not engine.abort("unknown")
    for rid, completions in run(engine).items():
        done.setdefault(rid, []).extend(completions)
    return done


def assert_same(one: dict[str, list[Completion]], several: dict[str, list[Completion]]) -> None:
    assert one.keys() == several.keys()
    for rid, completions in one.items():
        for left, right in zip(completions, several[rid], strict=True):
            exact = ("token_ids", "finish_reason", "stop_reason", "index", "num_preemptions", "num_cached_tokens", "error")
            for field in (*exact, "weight_versions", "text"):
                assert getattr(left, field) == getattr(right, field), (rid, field)
            assert right.logprobs == pytest.approx(left.logprobs, abs=1e-4)
            assert (right.prompt_logprobs or [])[1:] == pytest.approx((left.prompt_logprobs or [])[1:], abs=1e-4)
            assert [set(top) for top in right.top_logprobs or []] == [set(top) for top in left.top_logprobs or []]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_the_same_over_several_ranks(name: str, tmp_path: Path) -> None:
    more, size = FAMILIES[name]
    build, overrides = VARIANTS.get(name, (hf_models.moe, {}))
    folder = hf_models.save(hf_models.randomise(build(**(overrides | more))), tmp_path)
    one = mixed(Engine(config_of(folder, **SMALL)))
    assert sum(completion.num_preemptions for done in one.values() for completion in done) > 1
    assert_same(one, led(folder, mixed, size, **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_same_over_several_ranks(name: str, tmp_path: Path) -> None:
    build, overrides = VARIANTS[name]
    folder = hf_models.save(hf_models.randomise(build(**overrides)), tmp_path)
    heads = hf_models.SHAPE | overrides
    size = next(size for size in (2, 3, 5, 7) if heads["num_attention_heads"] % size == 0)
    assert_same(mixed(Engine(config_of(folder))), led(folder, mixed, size))


def test_an_id_of_the_shorter_part_of_the_vocabulary_can_be_drawn_and_none_beyond_it(tmp_path: Path) -> None:
    """129 ids over 2 ranks: the last one is made the likeliest by its row of the head, the filled-up one never comes."""
    model = hf_models.dense(vocab_size=129)
    with torch.no_grad():
        model.lm_head.weight[128] *= 6
    folder = hf_models.save(model, tmp_path)
    prompts = [hf_models.prompt(5, seed=seed) for seed in range(12)]

    def drive(engine: Engine) -> list[int]:
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=8, temperature=2.0))
        return [token for done in run(engine).values() for token in done[0].token_ids]

    drawn = led(folder, drive)
    assert drawn.count(128) > 10 and max(drawn) == 128
    assert drawn == drive(Engine(config_of(folder)))


@pytest.mark.parametrize("source", [list, iter])
@pytest.mark.parametrize("way", ["staged", "streaming"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_weights_given_to_the_first_rank_reach_all(folder: Path, mode: str, way: str, source: Callable) -> None:
    def drive(engine: Engine) -> dict[str, list[Completion]]:
        for number in range(3):
            engine.add_request(hf_models.prompt(6 + number), SamplingParams(temperature=0.0, max_tokens=10))
        for _ in range(4):
            engine.step()
        engine.update_weights(source(named(1)), 5, mode, way)
        engine.add_request(hf_models.prompt(9), GREEDY)
        return run(engine)

    several = led(folder, drive)
    assert_same(drive(Engine(config_of(folder))), several)
    assert several["3"][0].token_ids == engine_cases.oracle(tuple(hf_models.prompt(9)), 8, 1)[0]


def test_weights_in_pieces_between_steps(folder: Path) -> None:
    def drive(engine: Engine) -> dict[str, list[Completion]]:
        engine.add_request(hf_models.prompt(7), SamplingParams(temperature=0.0, max_tokens=30))
        for name, tensor in named(1):
            half = len(tensor) // 2
            pieces = [(name, tensor)] if half % 2 else [(name, tensor[:half], 0), (name, tensor[half:], half)]
            engine.stage_weights(pieces, 3)
            engine.step()
        engine.commit_weights(3, "recompute")
        return run(engine)

    assert_same(drive(Engine(config_of(folder))), led(folder, drive))


def poisoned(index: int) -> list[tuple[str, torch.Tensor]]:
    tensors = named(1)
    bad = tensors[index][1].clone()
    bad.view(-1)[-1] = math.nan
    return [*tensors[:index], (tensors[index][0], bad), *tensors[index + 1 :]]


@pytest.mark.parametrize("source", [list, iter])
def test_a_version_that_is_refused_leaves_all_ranks_with_the_old_one(folder: Path, source: Callable) -> None:
    def broken():
        yield from named(1)[:5]
        raise OSError("the file is gone")

    def drive(engine: Leader) -> Completion:
        engine.add_request(hf_models.prompt(7), SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        for tensors, said in ((poisoned(6), "not finite"), (named(1)[:-1], "missing"), ([("x", torch.ones(1))], "no such")):
            with pytest.raises(ValueError, match=said):
                engine.update_weights(source(tensors), 1)
        with pytest.raises(OSError, match="the file is gone"):
            engine.update_weights(broken(), 1)
        for version in (0, -3, "2", 1.0):
            with pytest.raises(ValueError, match="version="):
                engine.update_weights(source(named(1)), version)
        with pytest.raises(ValueError, match="mode='later'"):
            engine.update_weights(source(named(1)), 1, "later")
        [old] = run(engine)["0"]
        engine.update_weights(source(named(1)), 1)
        new = engine_cases.one(engine, hf_models.prompt(9))
        assert new.token_ids == engine_cases.oracle(tuple(hf_models.prompt(9)), 8, 1)[0]
        return old

    engine_cases.assert_greedy(led(folder, drive), 8)


@pytest.mark.parametrize("source", [list, iter])
def test_a_stream_that_fails_leaves_no_rank_serving(folder: Path, source: Callable) -> None:
    def drive(engine: Leader) -> None:
        rid = engine.add_request(hf_models.prompt(7), GREEDY)
        engine.step()
        with pytest.raises(ValueError, match="not finite"):
            engine.update_weights(source(poisoned(6)), 1, way="streaming")
        with pytest.raises(RuntimeError, match="no weights"):
            engine.step()
        engine.update_weights(source(named(0)), 1, way="streaming")
        ids, logprobs = engine_cases.oracle(tuple(hf_models.prompt(7)), 8)
        [completion] = run(engine)[rid]
        assert completion.token_ids == ids and completion.logprobs == pytest.approx(logprobs, abs=1e-4)

    led(folder, drive)


def test_a_rank_that_cannot_take_a_version_keeps_all_from_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Engine, tensors, version: int) -> None:
        next(tensors)
        raise ValueError("there is no room for it")

    def drive(engine: Leader) -> None:
        rid = engine.add_request(hf_models.prompt(7), GREEDY)
        engine.step()
        for _ in range(2):
            with pytest.raises(ValueError, match="rank 1: there is no room for it"):
                engine.update_weights(named(1), 1)
        assert engine.weight_version == 0 and engine._store.staged_version is None
        engine_cases.assert_greedy(run(engine)[rid][0], 8)

    monkeypatch.setattr(worker._Follower, "stage_weights", full)
    led(folder, drive)


def test_a_tied_head_that_differs_on_another_rank_alone_is_refused_by_all(tmp_path: Path) -> None:
    model = hf_models.dense(tie_word_embeddings=True)
    folder = hf_models.save(model, tmp_path)
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    head = dict(tensors)["model.embed_tokens.weight"].clone()
    head[127, 0] += 1

    def drive(engine: Leader) -> None:
        with pytest.raises(ValueError, match=r"rank 1: .*lm_head.weight differs from"):
            engine.update_weights([*tensors, ("lm_head.weight", head)], 1)
        engine.update_weights(tensors, 1)
        engine_cases.one(engine, hf_models.prompt(4))

    led(folder, drive)


def test_sleep_pause_role_and_cache_are_those_of_all_ranks(folder: Path) -> None:
    def drive(engine: Engine) -> tuple:
        engine.add_request(hf_models.prompt(9), SamplingParams(temperature=0.0, max_tokens=12))
        engine.step()
        engine.pause()
        assert engine.step() == []
        engine.resume()
        engine.step()
        for weights in ("keep", "drop"):
            engine.sleep(weights)
            assert engine.step() == []
            gone = engine.add_request(hf_models.prompt(3))
            engine.discard(gone)
            engine.wake()
            if weights == "drop":
                engine.update_weights(named(0), 2)
            engine.step()
        engine.switch_role(Role.DECODE)
        dropped = engine.reset_prefix_cache()
        return run(engine), dropped, engine.stats()

    one, several = drive(Engine(config_of(folder))), led(folder, drive)
    assert_same(one[0], several[0])
    assert one[1:] == several[1:]


def test_what_is_refused_never_reaches_the_others(folder: Path) -> None:
    def drive(engine: Leader) -> None:
        for prompt, params in (([], GREEDY), ([500], GREEDY), ([1.5], GREEDY), (hf_models.prompt(256), GREEDY), ([1], "x")):
            with pytest.raises(ValueError):
                engine.add_request(prompt, params)
        with pytest.raises(ValueError, match="request_id"):
            engine.add_request([1], GREEDY, request_id="a\0b")
        with pytest.raises(ValueError):
            engine.switch_role("baker")
        with pytest.raises(ValueError, match="awake"):
            engine.wake()
        for unknown in ("x", 5, None):
            engine.preempt(unknown)
            assert not engine.abort(unknown) and not engine.discard(unknown)
        engine_cases.assert_greedy(engine_cases.one(engine, hf_models.prompt(5)), 8)

    led(folder, drive)


def test_ranks_that_draw_differently_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with random numbers of its own: both say so in the first step that shows it, and nothing is served after it."""
    plain = Engine._request

    def own(self: Engine, name, ids, params, seed, index):
        return plain(self, name, ids, params, seed + 1, index)

    said = []

    def drive(engine: Leader) -> None:
        for seed in range(4):
            engine.add_request(hf_models.prompt(5, seed=seed))
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                run(engine, check=False)
            said.append(str(caught.value))

    monkeypatch.setattr(worker._Follower, "_request", own)
    first, other = outcomes(folder, drive)
    assert first is None and "rank 1 of 2 drew other tokens than rank 0" in said[0]
    assert said[1].startswith("the instance of 2 ranks serves nothing any more: RuntimeError: rank 1 of 2 drew")
    assert isinstance(other, RuntimeError) and str(other) == said[0]


def test_weights_that_cannot_be_loaded_are_reported_by_all_ranks(folder: Path, tmp_path: Path) -> None:
    damaged = hf_models.save(engine_cases.model(), tmp_path)
    (damaged / "model.safetensors").write_bytes(b"x" * 50)
    for error in outcomes(damaged, lambda engine: None):
        assert isinstance(error, ValueError) and "a weight file is damaged" in str(error)


def test_an_instance_without_weights_serves_once_it_was_given_some(folder: Path) -> None:
    config = config_of(from_folder(folder), tensor_parallel=2)

    def member(comm: GroupCommunicator) -> Completion | None:
        if comm.rank:
            return worker.follow(config, comm, load_weights=False, text=False)
        engine = Leader(config, comm=comm, load_weights=False, text=False)
        try:
            rid = engine.add_request(hf_models.prompt(7), GREEDY)
            with pytest.raises(RuntimeError, match="no weights"):
                engine.step()
            engine.update_weights(iter(named(1)), 0, way="streaming")
            return run(engine)[rid][0]
        finally:
            engine.close()

    first, other = run_members(2, member)
    assert first.token_ids == engine_cases.oracle(tuple(hf_models.prompt(7)), 8, 1)[0] and other is None


def test_the_pool_is_of_one_size_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is looked at by each rank, and differs: 40 and 30 MB here, of which each rank of a CPU takes half."""
    memory = iter([40_000_000, 30_000_000])
    monkeypatch.setattr("pearl.engine.assembly.available_memory", lambda device: next(memory))
    total = led(folder, lambda engine: engine.stats().total_blocks, num_blocks=None, max_num_seqs=10_000)
    weights = sum(value.numel() for _, value in named(0)) * 4
    block_bytes = 2 * 2 * 1 * 16 * 4 * 4  # layers, k and v, heads of a rank, head_dim, slots, fp32
    share = 15_000_000 * 0.85 / block_bytes
    assert share - weights / block_bytes < total <= share


def test_a_pool_that_one_rank_has_no_room_for_is_refused_by_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = iter([40_000_000, 90_000])
    monkeypatch.setattr("pearl.engine.assembly.available_memory", lambda device: next(memory))
    for error in outcomes(folder, lambda engine: None, num_blocks=None):
        assert isinstance(error, ValueError) and "max_model_len=256" in str(error)


def test_an_engine_of_several_ranks_needs_its_group(folder: Path) -> None:
    for comm in (None, SingleCommunicator()):
        with pytest.raises(ValueError, match="comm: has 1 members, must have tensor_parallel=2"):
            Engine(config_of(folder, tensor_parallel=2), comm=comm)
    assert_free(Engine(config_of(folder), comm=SingleCommunicator()))


LOOKING = {
    "has_unfinished", "stats", "is_arriving", "check_integrity", "tokenizer", "paused", "asleep", "weight_version",
    "generation_defaults", "named_hf_tensors",
}  # fmt: skip
BUILT_ON_OTHERS = {"step", "stream", "update_weights", "meet"}


def test_every_method_that_changes_something_is_led() -> None:
    public = {name for name, _ in inspect.getmembers(Engine) if not name.startswith("_")}
    led_here = {name for name in vars(Leader) if not name.startswith("_")}
    assert public - LOOKING - BUILT_ON_OTHERS == led_here


def test_every_call_is_one_of_a_method_of_the_engine() -> None:
    for kind in calls.Call.__subclasses__():
        tag, fields = kind.__struct_config__.tag, set(kind.__struct_fields__) - {"now"}
        if kind in (calls.Step, calls.StreamWeights, calls.ImportKV, calls.Close):
            continue  # carried out by the follower itself
        assert fields <= set(inspect.signature(getattr(Engine, tag)).parameters), tag


def test_all_ranks_see_the_time_of_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[float]] = {"Leader": [], "_Follower": []}
    plain = Engine._request

    def noted(self: Engine, *arguments):
        request = plain(self, *arguments)
        seen[type(self).__name__].append(request.arrival)
        return request

    def drive(engine: Leader) -> None:
        clock = VirtualClock(1000.0)
        engine._held._clock = clock
        for _ in range(3):
            engine.add_request(hf_models.prompt(5))
            clock.advance(0.25)
        run(engine)

    monkeypatch.setattr(Engine, "_request", noted)
    led(folder, drive)
    assert seen["Leader"] == seen["_Follower"] == [1000.0, 1000.25, 1000.5]


def test_a_long_prompt_takes_a_second_message(tmp_path: Path) -> None:
    folder = hf_models.save(hf_models.dense(max_position_embeddings=4096, vocab_size=4000), tmp_path)
    prompt = hf_models.prompt(2100, vocab_size=4000)
    assert len(calls.msgspec.msgpack.encode(prompt)) > calls.FRAME_BYTES

    def drive(engine: Engine) -> dict[str, list[Completion]]:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=3))
        return run(engine)

    settings = {"num_blocks": 600}
    assert_same(drive(Engine(config_of(folder, **settings))), led(folder, drive, **settings))
