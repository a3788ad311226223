"""Requests move between instances of one rank and of several: tokens are those of one engine, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_cases
import hf_models
import msgspec
import pytest
from engine_cases import GREEDY, assert_greedy, make, named, run
from instances import Instances, config_of, together

from pearl.engine import worker
from pearl.engine.engine import Engine
from pearl.engine.llm import LLM
from pearl.engine.migration.copying import Copying
from pearl.engine.migration.local import LocalTransport
from pearl.engine.migration.transport import TransferError
from pearl.engine.request import Completion
from pearl.protocol import Role, SamplingParams

SIZES = [(1, 2), (2, 1), (2, 2)]
SMALL = {"num_blocks": 24, "max_batch_tokens": 9, "max_num_seqs": 5}
MIX = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, repetition_penalty=1.3),
    SamplingParams(max_tokens=10, seed=7, top_k=20, prompt_logprobs=True),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=9, n=3, presence_penalty=0.5),
    SamplingParams(temperature=1.5, min_p=0.01, max_tokens=14, frequency_penalty=0.2),
    SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=list(range(0, 128, 3))),
    SamplingParams(temperature=0.0, max_tokens=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(engine_cases.model(), tmp_path_factory.mktemp("dense"))


def same(one: Completion, other: Completion) -> None:
    for field in ("token_ids", "finish_reason", "stop_reason", "index", "error", "weight_versions", "text"):
        assert getattr(one, field) == getattr(other, field), field
    assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert (other.prompt_logprobs or [])[1:] == pytest.approx((one.prompt_logprobs or [])[1:], abs=1e-4)
    assert [set(top) for top in other.top_logprobs or []] == [set(top) for top in one.top_logprobs or []]


def alone(folder: Path) -> dict[tuple[str, int], Completion]:
    """What one engine makes of the mix."""
    engine = make(folder)
    for number, params in enumerate(MIX):
        engine.add_request(hf_models.prompt(5 + 4 * number, seed=number), params, request_id=f"r{number}")
    return {(rid, one.index): one for rid, done in run(engine).items() for one in done}


def mixed(pair: Instances) -> dict[tuple[str, int], Completion]:
    for number, params in enumerate(MIX):
        pair.p.add_request(hf_models.prompt(5 + 4 * number, seed=number), params, request_id=f"r{number}")
        pair.step()
    done = pair.run()
    assert sum(ok for _, ok in pair.moved) >= 4
    return done


@pytest.mark.parametrize("sizes", SIZES)
def test_the_tokens_are_those_of_one_engine(folder: Path, sizes: tuple[int, int]) -> None:
    wanted, done = alone(folder), together(folder, sizes, mixed, SMALL, SMALL)
    assert wanted.keys() == done.keys()
    for key, completion in wanted.items():
        same(completion, done[key])


@pytest.mark.parametrize(
    ("build", "more", "sizes"),
    [
        (hf_models.dense, {"num_key_value_heads": 1}, (1, 2)),
        (hf_models.dense, {"num_key_value_heads": 1}, (2, 1)),
        (hf_models.dense, {"num_key_value_heads": 2}, (4, 1)),
        (hf_models.dense, {"num_key_value_heads": 2}, (2, 4)),
        (hf_models.dense, {"num_key_value_heads": 4}, (4, 2)),
        (hf_models.moe, {"num_experts": 5, "num_attention_heads": 6, "num_key_value_heads": 6}, (3, 2)),
    ],
    ids=["1-of-1/2", "2/1-of-1", "4-over-2/1", "2/4-over-2", "4/2", "moe-3/2"],
)
def test_heads_find_their_places_however_they_are_cut(
    build: Callable, more: dict, sizes: tuple[int, int], tmp_path: Path
) -> None:
    """Key-value heads that are cut on one side, whole or on several ranks on the other; the pools hold NaN elsewhere."""
    folder = hf_models.save(hf_models.randomise(build(**more)), tmp_path)
    prompts = {f"r{n}": hf_models.prompt(n, seed=n) for n in (1, 4, 9, 14)}
    engine = make(folder)
    for rid, ids in prompts.items():
        engine.add_request(ids, GREEDY, request_id=rid)
    wanted = {rid: done[0] for rid, done in run(engine).items()}

    def play(pair: Instances) -> dict:
        for number, (rid, ids) in enumerate(prompts.items()):
            pair.start(ids, rid=rid) if number % 2 else pair.p.add_request(ids, GREEDY, request_id=rid)
        done = pair.run()
        assert pair.d.stats().num_preemptions == 0 and len(pair.moved) == 4
        return done

    for (rid, _), completion in together(folder, sizes, play, {"max_batch_tokens": 6}).items():
        same(wanted[rid], completion)


@pytest.mark.parametrize("sizes", SIZES)
def test_prompts_are_read_along_by_all_ranks(folder: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the prompt is whole all that is missing is its last chunk; nothing is computed again.

    On a busy machine a rank may open its lease too late to be read along with: its part then comes afterwards.
    """
    begun = []
    plain = Copying.__init__

    def noted(self: Copying, *arguments: Any, **named: Any) -> None:
        begun.append(arguments[0].growing)
        plain(self, *arguments, **named)

    monkeypatch.setattr(Copying, "__init__", noted)

    def play(pair: Instances) -> None:
        for seed in range(3):
            assert pair.start(hf_models.prompt(19, seed=seed), rid=f"r{seed}")
        for completion in pair.run().values():
            assert_greedy(completion, 8)
        assert pair.d.stats().num_preemptions == 0 and pair.moved == [(f"r{seed}", True) for seed in range(3)]
        assert pair.d.stats().num_generated_tokens == 3 * 7

    together(folder, sizes, play, {"max_batch_tokens": 8})
    copies = {(1, 2): 2, (2, 1): 2, (2, 2): 2}[sizes]
    assert begun.count(True) >= copies and all(begun[:copies])


@pytest.mark.parametrize("drain", ["handover", "finish", "recompute"])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_a_change_of_role_under_load(folder: Path, sizes: tuple[int, int], drain: str) -> None:
    def play(pair: Instances) -> None:
        pair.p.switch_role(Role.MIXED)
        for seed, size in enumerate((3, 3, 12, 7)):
            pair.p.add_request(hf_models.prompt(size, seed=seed), GREEDY, request_id=str(seed))
            pair.take(pair.p)
        report = pair.p.switch_role(Role.PREFILL, drain)
        assert (report.moved, report.finished, report.recomputed)[["handover", "finish", "recompute"].index(drain)] == 2
        for completion in pair.run().values():
            assert_greedy(completion, 8)
        assert pair.p.stats().epoch == 2 and len(pair.done) == 4

    together(folder, sizes, play, {"max_batch_tokens": 6, "max_num_seqs": 3})


def test_roles_change_at_random_on_both_sides(folder: Path) -> None:
    rng = random.Random(5)
    prompts: dict[str, list[int]] = {}

    def play(pair: Instances) -> None:
        for number in range(60):
            engine = rng.choice((pair.p, pair.d))
            if number % 4 == 0:
                ids = hf_models.prompt(rng.randint(1, 20), seed=number)
                prompts[f"r{number}"] = ids
                pair.start(ids, rid=f"r{number}") if number % 8 else engine.add_request(ids, GREEDY, request_id=f"r{number}")
            engine.switch_role(rng.choice(list(Role)), rng.choice(["handover", "finish", "recompute"]))
            for _ in range(rng.choice((0, 1, 2))):
                pair.step()
                pair.clock.advance(0.3)
        pair.num_steps = 0
        while pair.p.has_unfinished() or pair.d.has_unfinished():
            pair.step()
            pair.clock.advance(0.3)
        pair.clock.advance(60.0)
        pair.step()
        assert len(pair.run()) == len(prompts)
        for completion in pair.done.values():
            assert_greedy(completion, 8)

    together(folder, (2, 2), play, {"num_blocks": 20}, {"num_blocks": 20})


# ---------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize("early", [False, True])
def test_if_one_rank_cannot_get_its_part_all_compute_it_again(
    folder: Path, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the blocks are nobody's before the last rank has let them go."""
    plain, lost = worker._Follower._ways, []

    def losing(self: worker._Follower, call: Any) -> Any:
        lost.append(type(call).__name__)
        return TransferError(call.transfer.transfer_id, "lost as told") if len(lost) <= 2 else plain(self, call)

    monkeypatch.setattr(worker._Follower, "_ways", losing)

    def play(pair: Instances) -> None:
        for seed in range(3):
            if early:
                pair.start(hf_models.prompt(19, seed=seed), rid=f"r{seed}")
            else:
                pair.p.add_request(hf_models.prompt(9, seed=seed), GREEDY, request_id=f"r{seed}")
            pair.step()
        for completion in pair.run().values():
            assert_greedy(completion, 8)
        assert pair.d.stats().num_preemptions == (0 if early else 2)  # what is lost early is sent when it is offered

    together(folder, (1, 2), play, {"max_batch_tokens": 8}, {"num_blocks": 20})
    assert lost[:2] == (["ReadAlong"] * 2 if early else ["ImportKV"] * 2)


def test_what_the_first_rank_cannot_get_stays_with_its_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(pair: Instances) -> None:
        rid = pair.p.add_request(hf_models.prompt(9), GREEDY)
        pair.take(pair.p)
        [transfer] = pair.p.take_handoffs()
        pair.p._core._words.close(transfer.blocks[-1])  # the first rank's alone: as if its lease had ended
        assert pair.move(transfer, pair.p, pair.d) is False
        assert pair.d.import_kv(transfer) is False  # once more, before the next step
        assert_greedy(pair.run()[rid, 0], 8)
        assert pair.d.stats().num_generated_tokens == 0

    together(folder, (2, 2), play)


def test_a_rank_that_is_a_moment_behind_is_waited_for(folder: Path) -> None:
    """Its lease word is still to come: the copy is under way meanwhile, and not lost."""

    def play(pair: Instances) -> None:
        rid = pair.p.add_request(hf_models.prompt(9), GREEDY)
        pair.take(pair.p)
        [transfer] = pair.p.take_handoffs()
        words, block = pair.p._core._words, transfer.blocks[-1]
        words.memory[block] -= 1
        assert pair.d.import_kv(transfer)
        for _ in range(3):
            pair.take(pair.d)
        assert pair.d.stats().arriving == 1
        words.memory[block] += 1
        pair.take(pair.d)
        assert pair.d.stats().arriving == 0 and pair.d.stats().num_preemptions == 0
        pair.p.finish_export(transfer.transfer_id, True)
        assert_greedy(pair.run()[rid, 0], 8)

    together(folder, (1, 2), play)


@pytest.mark.parametrize("moment", ["mid", "offered", "accepted", "answered"])
@pytest.mark.parametrize("sizes", SIZES)
def test_an_abort_frees_all_ranks(folder: Path, sizes: tuple[int, int], moment: str) -> None:
    def play(pair: Instances) -> None:
        pair.start(hf_models.prompt(11), rid="r")
        for _ in range(2 if moment == "mid" else 3):
            pair.take(pair.p)
            pair.read_along()
        transfers = pair.p.take_handoffs()
        assert len(transfers) == (moment != "mid")
        if moment in ("accepted", "answered"):
            assert pair.d.import_kv(transfers[0])
        if moment == "answered":
            pair.p.finish_export(transfers[0].transfer_id, True)
        assert pair.p.abort("r") is (moment != "answered")
        assert pair.d.abort("r") is (moment in ("accepted", "answered"))
        pair.d.release_reservation(pair.credit)
        for _ in range(3):
            pair.p.step()
            pair.d.step()
        assert not pair.p.has_unfinished() and not pair.d.has_unfinished()
        pair.assert_free()
        rid = pair.p.add_request(hf_models.prompt(11, seed=1), GREEDY)
        for book in (pair.done, pair.tokens, pair.texts):
            book.clear()
        assert_greedy(pair.run()[rid, 0], 8)

    together(folder, sizes, play, {"max_batch_tokens": 4})


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("sizes", SIZES)
def test_new_weights_while_a_prompt_is_read_along(folder: Path, sizes: tuple[int, int], mode: str) -> None:
    def play(pair: Instances) -> None:
        pair.start(hf_models.prompt(19))
        pair.take(pair.p)
        pair.read_along()
        for engine in (pair.p, pair.d):
            engine.update_weights(named(0), 1, mode)
        assert_greedy(pair.run()["r", 0], 8)

    together(folder, sizes, play, {"max_batch_tokens": 8})


def test_pools_are_full_and_nothing_is_lost(folder: Path) -> None:
    """Many in small pools, pre-empted and refused again and again."""

    def play(pair: Instances) -> None:
        for seed in range(10):
            ids = hf_models.prompt(5 + seed, seed=seed)
            pair.start(ids, rid=f"r{seed}") if seed % 2 else pair.p.add_request(ids, GREEDY, request_id=f"r{seed}")
            pair.step()
        while pair.p.has_unfinished() or pair.d.has_unfinished():
            pair.step()
            pair.clock.advance(0.5)
        pair.clock.advance(60.0)
        pair.step()
        assert len(pair.run()) == 10
        for completion in pair.done.values():
            assert_greedy(completion, 8)

    together(folder, (2, 2), play, {"num_blocks": 9}, {"num_blocks": 9})


def test_what_is_refused_changes_nothing(folder: Path) -> None:
    def play(pair: Instances) -> None:
        rid = pair.p.add_request(hf_models.prompt(9), GREEDY)
        pair.take(pair.p)
        [transfer] = pair.p.take_handoffs()
        layout = msgspec.structs.replace(transfer.layout, num_kv_heads=3)
        for wrong, said in (
            (msgspec.structs.replace(transfer, layout=layout), "num_kv_heads=3"),
            (msgspec.structs.replace(transfer, peers=[]), "kv head 1: none of 1 ranks has it"),
        ):
            with pytest.raises(ValueError, match=said):
                pair.d.import_kv(wrong)
        with pytest.raises(ValueError, match="must be a name"):
            pair.d.import_kv(transfer, LocalTransport())
        with pytest.raises(ValueError, match="carrier pigeon"):
            pair.d.import_kv(transfer, "carrier pigeon")
        assert pair.move(transfer, pair.p, pair.d)
        assert_greedy(pair.run()[rid, 0], 8)

    together(folder, (2, 2), play)


def test_an_llm_of_several_ranks_decodes_what_it_would_hand_over(folder: Path) -> None:
    with LLM(config_of(folder, tensor_parallel=2, role=Role.PREFILL)) as llm:
        for completion in llm.generate([hf_models.prompt(5), hf_models.prompt(9)], GREEDY):
            assert_greedy(completion, 8)


# ---------------------------------------------------------------------------------------------------- between processes


@pytest.mark.parametrize("several", ["prefill", "decode"])
def test_ranks_in_processes_of_their_own(folder: Path, several: str) -> None:
    """Their heads come by shared memory, read along or afterwards; then a rank is killed while one is on its way."""
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    other = next(name for name in roles if name != several)
    with LLM(config_of(folder, tensor_parallel=2, role=roles[several], max_batch_tokens=8)) as llm:
        engines = {several: llm.engine, other: Engine(config_of(folder, role=roles[other], max_batch_tokens=8))}
        pair = Instances(engines["prefill"], engines["decode"])
        for seed in range(4):
            ids = hf_models.prompt(9 + 5 * seed, seed=seed)
            pair.start(ids, rid=f"r{seed}") if seed % 2 else pair.p.add_request(ids, GREEDY, request_id=f"r{seed}")
        for completion in pair.run(100_000).values():
            assert_greedy(completion, 8)
        assert pair.moved and all(taken for _, taken in pair.moved) and pair.d.stats().num_preemptions == 0
        if several == "decode":
            return
        pair.p.add_request(hf_models.prompt(13), GREEDY, request_id="last")
        while not (transfers := pair.p.take_handoffs()):
            pair.take(pair.p)
        os.kill(transfers[0].peers[0].pid, signal.SIGKILL)
        waits_for_end_of(transfers[0].peers[0].pid)
        assert pair.d.import_kv(transfers[0]) is False
        assert not pair.d.has_unfinished()
        pair.d.add_request(hf_models.prompt(13), GREEDY, request_id="last")
        assert_greedy(run(pair.d)["last"][0], 8)


def waits_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)
