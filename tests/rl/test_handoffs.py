"""Requests between two members: whichever side fails, is late or answers twice, one of them has the request, and only one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from pearl.config import EngineConfig
from pearl.engine.emulated import EmulatedEngine, Speech, turn_tokens
from pearl.protocol import (
    Abort,
    FinishExport,
    HandedOff,
    KVEndpoint,
    KVLayout,
    KVTransfer,
    NewRequest,
    RequestState,
    Role,
    SamplingParams,
    Submit,
    TakenOver,
    TakeOver,
    Tokens,
    TokenUpdate,
    packed,
)
from pearl.rl.handoffs import HandOffs
from pearl.rl.serving import Serving
from pearl.sched.router import Router

TRANSFER = KVTransfer(
    transfer_id="t1",
    request_id="s/0",
    state=RequestState(
        request_id="s/0", name="s/0", index=0, params=SamplingParams(), token_ids=[1], num_prompt_tokens=1, max_tokens=2,
        seed=0, stop_token_ids=[], eos_token_ids=[], cache_salt=None, session_id="s", cacheable=True, streaming=True,
        num_cached_tokens=0, num_preemptions=0, logprobs=[], top_logprobs=[], prompt_logprobs=[], weight_versions=[],
    ),
    source=KVEndpoint(worker="w", host="h", pid=1, num_blocks=1, addresses={}),
    blocks=[], lease_word=0, num_written_tokens=0,
    layout=KVLayout(dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=1, order="x"),
    weight_version=0, epoch=0, deadline=9.0,
)  # fmt: skip


class Stage:
    """A prefill worker "p" with the request of session "s", two decode workers; `wanted` says whether anybody waits for it."""

    def __init__(self, decoders: tuple[str, ...] = ("d", "e")) -> None:
        self.router = Router()
        self.router.add_worker("p", Role.PREFILL)
        for name in decoders:
            self.router.add_worker(name, Role.DECODE)
        self.sent: list[tuple[str, Any]] = []
        self.wanted = True
        self.moves = HandOffs(self.router, lambda worker, message: self.sent.append((worker, message)), self.has, 60.0)
        assert self.router.place("s", 10) == "p" or not decoders
        self.target = self.router.decode_target("s")

    def has(self, worker: str, request_id: str) -> bool:
        return self.wanted and request_id == "s/0" and self.router.worker_of("s") == worker

    def offer(self) -> str:
        self.moves.offered("p", "s", TRANSFER)
        [(target, message)] = self.take()
        assert message == TakeOver(transfer=TRANSFER)
        return target

    def answer(self, target: str, **fields: Any) -> TokenUpdate | None:
        return self.moves.answered(target, TakenOver(**({"rank": 1, "transfer_id": "t1", "request_id": "s/0"} | fields)))

    def take(self) -> list[tuple[str, Any]]:
        sent, self.sent = self.sent, []
        return sent


def update(**fields: Any) -> TokenUpdate:
    return TokenUpdate(**({"request_id": "s/0", "token_ids": [], "logprobs": [], "weight_versions": []} | fields))


ABORT = update(finish_reason="abort")
TOKEN = update(token_ids=[5], logprobs=[-1.0], weight_versions=[0])
ACCEPTED, KEPT = FinishExport(transfer_id="t1", ok=True), FinishExport(transfer_id="t1", ok=False)


def test_an_offer_goes_where_the_router_meant_it_and_is_accepted_in_two_parts() -> None:
    stage = Stage()
    assert stage.offer() == stage.target
    assert stage.answer(stage.target, ok=True, arrived=False) is None
    assert stage.take() == [("p", FinishExport(transfer_id="t1", ok=True, arrived=False))]
    assert stage.router.worker_of("s") == stage.target and stage.moves.under_way == 1
    stage.answer(stage.target, ok=True)
    assert stage.take() == [("p", ACCEPTED)] and stage.moves.under_way == 0
    stage.answer(stage.target, ok=True)  # once more
    assert stage.take() == [] and stage.moves.counts["unknown"] == 1


def test_what_is_refused_is_offered_to_the_next_and_stays_if_nobody_has_room() -> None:
    stage = Stage()
    first = stage.offer()
    assert stage.answer(first, ok=False) is None
    [(second, message)] = stage.take()
    assert second == {"d": "e", "e": "d"}[first] and message == TakeOver(transfer=TRANSFER)
    assert stage.answer(first, ok=True) is None, "too late: another was asked since"
    assert stage.take() == [(first, Abort(request_ids=["s/0"]))]
    assert stage.answer(second, ok=False) is None
    assert stage.take() == [("p", KEPT)] and stage.router.worker_of("s") == "p"
    assert stage.router.loads[first].promised == 0 and stage.moves.counts["refused"] == 2


def test_nobody_else_is_asked_for_what_its_source_has_gone_on_with_or_ended() -> None:
    for said in (TOKEN, ABORT):
        stage = Stage()
        target = stage.offer()
        stage.moves.heard("p", said)
        assert stage.answer(target, ok=False) == (ABORT if said is ABORT else None)
        assert stage.take() == [("p", KEPT)] and stage.moves.under_way == 0


def test_with_nobody_to_take_it_the_request_stays() -> None:
    stage = Stage()
    for name in ("d", "e"):
        stage.router.drain(name)
    stage.moves.offered("p", "s", TRANSFER)
    assert stage.take() == [("p", KEPT)] and stage.moves.counts["nobody"] == 1


def test_an_offer_of_what_nobody_waits_for_is_ended() -> None:
    stage = Stage()
    stage.wanted = False
    stage.moves.offered("p", "s", TRANSFER)
    assert stage.take() == [("p", Abort(request_ids=["s/0"]))] and stage.moves.under_way == 0


def test_an_answer_of_another_member_is_not_believed() -> None:
    stage = Stage()
    target = stage.offer()
    other = {"d": "e", "e": "d"}[target]
    stage.answer(other, ok=True)
    assert stage.take() == [(other, Abort(request_ids=["s/0"]))] and stage.router.worker_of("s") == "p"


@pytest.mark.parametrize("taken", [True, False])
def test_the_end_of_the_source_counts_only_if_nobody_took_it(taken: bool) -> None:
    stage = Stage()
    target = stage.offer()
    assert not stage.moves.heard("p", ABORT)
    assert stage.answer(target, ok=taken) == (None if taken else ABORT)
    assert stage.router.worker_of("s") == (target if taken else "p")


def test_a_source_that_went_on_keeps_the_request() -> None:
    """Its offer lapsed before the answer came; the taker has missed tokens and is told to let it go."""
    stage = Stage()
    target = stage.offer()
    assert stage.moves.heard("p", TOKEN)
    stage.answer(target, ok=True)
    assert stage.take() == [(target, Abort(request_ids=["s/0"])), ("p", KEPT)] and stage.router.worker_of("s") == "p"
    assert stage.moves.under_way == 0


@pytest.mark.parametrize("aborted", [True, False])
def test_a_taker_that_dies_before_its_answer_leaves_the_request_where_it_was(aborted: bool) -> None:
    stage = Stage()
    target = stage.offer()
    if aborted:
        stage.moves.heard("p", ABORT)
    stage.router.lose_worker(target)
    assert stage.moves.lost(target) == ([ABORT] if aborted else [])
    assert stage.take() == [("p", KEPT)] and stage.router.worker_of("s") == "p"


def test_a_taker_that_dies_after_its_answer_leaves_nothing_to_wait_for() -> None:
    stage = Stage()
    target = stage.offer()
    stage.answer(target, ok=True, arrived=False)
    stage.take()
    assert stage.router.lose_worker(target) == ["s"] and stage.moves.lost(target) == []
    assert stage.take() == [("p", ACCEPTED)] and stage.moves.under_way == 0


def test_a_source_that_dies_is_forgotten_and_a_late_taker_told() -> None:
    stage = Stage()
    target = stage.offer()
    assert stage.router.lose_worker("p") == ["s"] and stage.moves.lost("p") == []
    stage.answer(target, ok=True)
    assert stage.take() == [(target, Abort(request_ids=["s/0"]))]


def test_a_source_that_dies_while_its_kv_is_read_changes_nothing() -> None:
    stage = Stage()
    target = stage.offer()
    stage.answer(target, ok=True, arrived=False)
    stage.take()
    stage.router.lose_worker("p")
    assert stage.moves.lost("p") == []
    stage.answer(target, ok=True)
    assert stage.take() == [] and stage.router.worker_of("s") == target


def test_a_trajectory_that_ends_on_the_way_ends_on_both_sides() -> None:
    stage = Stage()
    target = stage.offer()
    stage.moves.ended("s/0")
    assert stage.take() == [(target, Abort(request_ids=["s/0"])), ("p", Abort(request_ids=["s/0"]))]
    stage.moves.ended("s/0")
    assert stage.take() == []


def test_a_trajectory_that_ends_while_its_kv_is_read_frees_the_source() -> None:
    stage = Stage()
    target = stage.offer()
    stage.answer(target, ok=True, arrived=False)
    stage.take()
    stage.moves.ended("s/0")
    assert stage.take() == [(target, Abort(request_ids=["s/0"])), ("p", FinishExport(transfer_id="t1", ok=True))]


def test_a_doubled_offer_is_one() -> None:
    stage = Stage()
    stage.offer()
    stage.moves.offered("p", "s", msgspec.structs.replace(TRANSFER))
    assert stage.take() == [] and stage.moves.counts["doubled"] == 1


class Free:
    """A device on which nothing takes any time."""

    def step_s(self, output: Any) -> float:
        return 0.0

    def host_s(self) -> float:
        return 0.0

    def transfer_s(self, tokens: int) -> float:
        return 0.0

    def change_s(self, kind: str) -> float:
        return 0.0


SPEECH = Speech(alphabet=(1, 2, 3), mean_tokens=12, sigma=0.2)


class Pools:
    """One prefill and two decode members with real engine cores, and the router, over pools that hold next to nothing."""

    def __init__(self, blocks: dict[str, int]) -> None:
        self.router = Router(block_size=4, append_on_decode_tokens=0)
        self.events: list[tuple[str, Any]] = []
        self.live: set[str] = set()
        self.tokens: Counter[str] = Counter()
        self.members: dict[str, Serving] = {}
        for rank, (name, count) in enumerate(blocks.items()):
            role = Role.PREFILL if name == "p" else Role.DECODE
            config = EngineConfig(num_blocks=count, block_size=4, role=role)
            engine = EmulatedEngine(
                config, costs=Free(), speech=SPEECH, max_model_len=64, vocab_size=10, pause=lambda seconds: None
            )
            engine.take_version(0)
            self.members[name] = Serving(rank, engine, lambda event, name=name: self.events.append((name, event)))  # type: ignore[misc]
            self.members[name].active = True
            self.router.add_worker(name, role)
        self.moves = HandOffs(self.router, lambda name, message: self.members[name].take(message), self.has, 60.0)

    def has(self, worker: str, request_id: str) -> bool:
        return request_id in self.live and self.router.worker_of(request_id) == worker

    def ask(self, name: str, prompt: int, seed: int) -> None:
        worker = self.router.place(name, prompt)
        assert worker is not None
        params = SamplingParams(max_tokens=40, seed=seed, stop_token_ids=[0])
        request = NewRequest(request_id=name, prompt=packed([5] * (prompt - 1) + [6]), params=params, session_id=name)
        self.members[worker].take(Submit(requests=[request]))
        self.live.add(name)

    def turn(self) -> None:
        for member in self.members.values():
            if member.has_work:
                member.step()
        events, self.events = self.events, []
        for name, event in events:
            self.hear(name, event)

    def hear(self, name: str, event: Any) -> None:
        match event:
            case Tokens():
                self.router.on_load(name, waiting=event.waiting, running=event.running, free_blocks=event.free_blocks)
                for one in event.updates:
                    assert self.has(name, one.request_id) and self.moves.heard(name, one)
                    self.tokens[one.request_id] += len(one.token_ids)
                    if one.finish_reason is not None:
                        assert one.finish_reason == "stop", one
                        self.live.remove(one.request_id)
                        self.router.done(one.request_id)
            case HandedOff():
                for transfer in event.transfers:
                    self.moves.offered(name, transfer.request_id, transfer)
            case TakenOver():
                assert self.moves.answered(name, event) is None


@pytest.mark.parametrize("blocks", [{"p": 40, "d": 7, "e": 7}, {"p": 9, "d": 7, "e": 9}, {"p": 7, "d": 7, "e": 7}])
def test_full_pools_on_either_side_block_nobody(blocks: dict[str, int]) -> None:
    """Pools of 7 to 9 blocks hold one or two of twelve requests: they are refused, asked elsewhere, decoded where they are."""
    pools = Pools(blocks)
    for number in range(12):
        pools.ask(f"s{number}", prompt=9 + number % 3, seed=number)
    for _ in range(600):
        pools.turn()
    assert not pools.live, f"stuck: {pools.live}, {[member.engine.stats() for member in pools.members.values()]}"
    assert pools.tokens == {f"s{number}": turn_tokens(SPEECH, number) for number in range(12)}, "each token comes once"
    assert pools.moves.counts["refused"] > 0 and pools.moves.under_way == 0
    for member in pools.members.values():
        member.engine.check_integrity()  # type: ignore[attr-defined]
        assert member.engine.stats().leased_blocks == 0


def test_offers_that_are_too_many_for_one_message_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.rl.serving.OFFERED_TOKENS", 25)
    pools = Pools({"p": 40, "d": 40})
    for number, prompt in enumerate((9, 9, 9, 35, 9)):
        pools.ask(f"s{number}", prompt=prompt, seed=number)
    pools.members["p"].step()
    offers = [[one.request_id for one in event.transfers] for _, event in pools.events if isinstance(event, HandedOff)]
    assert offers == [["s0", "s1"], ["s2"], ["s3"], ["s4"]]


def test_an_offer_that_nobody_answers_stays_where_it_was_after_a_while() -> None:
    stage = Stage()
    target = stage.offer()
    assert stage.moves.expire(0.0) == [] and stage.moves.expire(60.0) == [] and not stage.take()
    assert stage.moves.expire(60.1) == []
    assert stage.take() == [(target, Abort(request_ids=["s/0"])), ("p", KEPT)]
    assert stage.moves.under_way == 0 and stage.moves.counts["overdue"] == 1 and stage.router.worker_of("s") == "p"
    assert stage.answer(target, ok=True) is None  # too late
    assert stage.take() == [(target, Abort(request_ids=["s/0"]))]


def test_kv_that_never_arrives_is_no_longer_kept_at_its_source() -> None:
    stage = Stage()
    target = stage.offer()
    stage.answer(target, ok=True, arrived=False)
    stage.take()
    stage.moves.expire(0.0)
    stage.moves.expire(61.0)
    assert stage.take() == [("p", ACCEPTED)] and stage.router.worker_of("s") == target


def test_the_end_of_a_source_counts_once_nobody_answers_its_offer() -> None:
    stage = Stage()
    stage.offer()
    assert not stage.moves.heard("p", ABORT)
    stage.moves.expire(0.0)
    assert stage.moves.expire(61.0) == [ABORT]


@pytest.mark.parametrize("ok", [True, False])
def test_an_answer_to_what_is_over_leaves_the_session_s_next_request_where_it_is(ok: bool) -> None:
    """The source went on by itself and ended; the next turn is with somebody else by then."""
    stage = Stage()
    target = stage.offer()
    assert stage.moves.heard("p", TOKEN)
    stage.router.done("s")
    stage.wanted = False
    stage.router.lose_worker("p")
    other = stage.router.place("s", 11)
    stage.router.add_worker("p", Role.PREFILL)
    stage.answer(target, ok=ok)
    assert stage.router.worker_of("s") == other


def test_a_move_that_is_never_offered_may_be_tried_again() -> None:
    stage = Stage()
    stage.moves.asked("s", "s/0", "p")
    stage.moves.expire(0.0)
    stage.moves.expire(61.0)
    assert stage.moves.counts["unoffered"] == 1
    stage.moves.asked("s", "s/0", "p")
    stage.wanted = False  # it ended by itself
    stage.moves.expire(100.0)
    stage.moves.expire(200.0)
    assert stage.moves.counts["unoffered"] == 1 and not stage.take()
