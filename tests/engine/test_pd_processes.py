"""Prefill in one process and decode in another: what one mixed engine would have given, whatever becomes of either."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import hf_models
import pytest
from engine_cases import assert_free
from pair_cases import Pair
from pd_cases import Asked, Cluster, Worker, requests, same, save_model
from pd_process import MOST_HELD, Add, Finish, Go, Hold, Offer, Seen, Setup, Take, Took, Updates, make

from pearl.clock import VirtualClock
from pearl.engine.request import Completion
from pearl.protocol import KVTransfer, Role, SamplingParams

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("dense"))


def mixed(folder: Path, asked: list[Asked]) -> dict[tuple[str, int], Completion]:
    """What one engine gives."""
    engine = make(Setup(folder=str(folder), role=Role.MIXED, settings={"num_blocks": 1000}))
    for one in asked:
        engine.add_request(one.ids, one.params, request_id=one.name)
    done: dict[tuple[str, int], Completion] = {}
    while engine.has_unfinished():
        done |= {(completion.request_id, completion.index): completion for completion in engine.step()}
    return done


def setups(folder: Path, transport: str | None, roles: str = "pd", **settings: object) -> list[Setup]:
    names = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
    return [Setup(folder=str(folder), role=names[role], transport=transport, settings=settings) for role in roles]


def check(folder: Path, asked: list[Asked], cluster: Cluster, flip_every: int | None = None) -> list[Seen]:
    with cluster:
        wanted = mixed(folder, asked)
        reasons = {(completion.finish_reason, type(completion.stop_reason)) for completion in wanted.values()}
        assert reasons == {("length", type(None)), ("stop", type(None)), ("stop", int), ("stop", str)}
        done = cluster.run(asked, flip_every)
        looks = cluster.assert_settled()
    assert done.keys() == wanted.keys()
    for key, completion in wanted.items():
        same(done[key], completion)
    return looks


@pytest.mark.parametrize(
    ("transport", "count"),
    [("host", 40), ("gloo", 40), pytest.param("host", 200, marks=slow), pytest.param("gloo", 200, marks=slow),
     pytest.param(None, 200, marks=slow)],
)  # fmt: skip
def test_all_kinds_of_requests_are_what_one_engine_gives(folder: Path, transport: str | None, count: int) -> None:
    asked = requests(count)
    cluster = Cluster(setups(folder, transport))
    looks = check(folder, asked, cluster)
    expected = [one for one in asked if one.params.max_tokens > 1]
    assert cluster.moved > 0.8 * len(expected) and cluster.reserved > count / 6 and cluster.read_along
    assert all(look.preemptions == 0 for look in looks)  # nothing was computed twice


@pytest.mark.parametrize(
    ("transport", "count"), [("host", 40), pytest.param("host", 200, marks=slow), pytest.param("gloo", 200, marks=slow)]
)
def test_pools_of_a_few_blocks(folder: Path, transport: str, count: int) -> None:
    cluster = Cluster(setups(folder, transport, num_blocks=24, max_batch_tokens=16))
    looks = check(folder, requests(count, seed=1), cluster)
    assert cluster.refused and cluster.moved and sum(look.preemptions for look in looks)


@pytest.mark.parametrize(
    ("transport", "count", "roles"),
    [("gloo", 40, "pd"), pytest.param("host", 200, "pd", marks=slow), pytest.param("gloo", 200, "pd", marks=slow),
     pytest.param(None, 200, "pdm", marks=slow)],
)  # fmt: skip
def test_roles_change_during_all_of_it(folder: Path, transport: str | None, count: int, roles: str) -> None:
    cluster = Cluster(setups(folder, transport, roles))
    check(folder, requests(count, seed=2), cluster, flip_every=5)
    assert cluster.moved


@slow
@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_roles_change_with_pools_of_a_few_blocks(folder: Path, transport: str) -> None:
    cluster = Cluster(setups(folder, transport, num_blocks=24, max_batch_tokens=16))
    check(folder, requests(120, seed=3), cluster, flip_every=4)
    assert cluster.moved and cluster.refused


def test_what_is_coming_while_the_role_becomes_prefill_is_decoded_here(folder: Path) -> None:
    pair = Pair(folder, ["slow"])
    pair.p.add_request(HANDED.ids, HANDED.params, request_id=HANDED.name)
    pair.take(pair.p)
    [transfer] = pair.p.take_handoffs()
    assert pair.d.import_kv(transfer)
    pair.p.finish_export(transfer.transfer_id, True, arrived=False)
    assert pair.d.is_arriving(transfer.transfer_id)
    pair.d.switch_role(Role.PREFILL)
    while pair.d.has_unfinished():
        pair.take(pair.d)
        assert not pair.d.take_handoffs()
    assert pair.d.stats().num_preemptions == 0
    pair.p.finish_export(transfer.transfer_id, True)
    same(pair.run()[HANDED.name, 0], mixed(folder, [HANDED])[HANDED.name, 0])


# ---------------------------------------------------------------------------------------------------- who goes away

DEADLINE_S, TIMEOUT_S = 50.0, 3.0
"""Of an offer or arrival, by a clock that tests move in this process; of a wait for the other end, by the real one."""
LIMIT_S = 60.0
"""For a busy machine. What is not over by then hangs."""
HANDED = Asked("r", hf_models.prompt(17), SamplingParams(temperature=0.0, max_tokens=8))
OWN = [Asked(f"own{n}", hf_models.prompt(9, seed=n), SamplingParams(temperature=0.0, max_tokens=12)) for n in (1, 2, 3)]
STAGES = ("offered", "under way", "taken")
WAYS = (signal.SIGKILL, signal.SIGSTOP)
SOME = {
    ("sender", "gloo", signal.SIGKILL, "under way"),
    ("sender", "host", signal.SIGSTOP, "under way"),
    ("receiver", "gloo", signal.SIGSTOP, "under way"),
    ("receiver", "host", signal.SIGKILL, "answered"),
}
"""What is tried every time; the others are slow only because there are so many."""


def matrix(victim: str, stages: tuple[str, ...]) -> list:
    every = itertools.product(("host", "gloo"), WAYS, stages)
    return [pytest.param(*case, marks=() if (victim, *case) in SOME else slow) for case in every]


class Survivor:
    """The engine of this process: with requests of its own, and books that are looked at after each step."""

    def __init__(self, folder: Path, role: Role, transport: str) -> None:
        settings = {"transfer_deadline_s": DEADLINE_S, "num_blocks": 40}
        self.wanted = mixed(folder, [HANDED, *OWN])
        self.clock = VirtualClock()
        setup = Setup(folder=str(folder), role=role, transport=transport, settings=settings, timeout_s=TIMEOUT_S)
        self.engine = make(setup, self.clock)
        self.done: dict[tuple[str, int], Completion] = {}
        for one in OWN:
            self.add(one)

    def add(self, one: Asked) -> None:
        self.engine.add_request(one.ids, one.params, request_id=one.name)

    def step(self) -> list[KVTransfer]:
        """What it offers of what it was handed; its own requests it keeps."""
        for completion in self.engine.step():
            self.done[completion.request_id, completion.index] = completion
        self.engine.check_integrity()
        offers = self.engine.take_handoffs()
        for transfer in offers:
            if transfer.request_id != HANDED.name:
                self.engine.finish_export(transfer.transfer_id, False)
        return [transfer for transfer in offers if transfer.request_id == HANDED.name]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.engine.stats()
            self.step()
            time.sleep(0.001)

    def finish(self) -> None:
        """All that is here ends, as one engine would have ended it, and nothing is left."""
        self.until(lambda: not self.engine.has_unfinished())
        assert self.done.keys() == self.wanted.keys()
        for key, completion in self.wanted.items():
            same(self.done[key], completion)
        assert_free(self.engine)
        assert not self.engine._core.arrivals and not self.engine._core.exports


@pytest.mark.parametrize(("transport", "way", "stage"), matrix("sender", STAGES))
def test_the_sender_is_killed_or_stopped(folder: Path, transport: str, way: signal.Signals, stage: str) -> None:
    held = "give" if (transport, stage) == ("gloo", "under way") else None
    setup = Setup(folder=str(folder), role=Role.PREFILL, transport=transport, hold=held)
    sender = Worker(setup)
    try:
        here = Survivor(folder, Role.DECODE, transport)
        sender.expect(Seen)
        sender.tell(Add(name=HANDED.name, ids=HANDED.ids, params=HANDED.params))
        transfer = sender.expect(Offer).transfer
        with contextlib.ExitStack() as holding:
            hold = holding.enter_context(Hold("take")) if (transport, stage) == ("host", "under way") else None
            taken = stage != "offered" and here.engine.import_kv(transfer)
            if stage == "taken":
                here.until(lambda: not here.engine.is_arriving(transfer.transfer_id))
            elif stage == "under way":
                here.until(lambda: (sender.look().held if hold is None else hold.count) == MOST_HELD)
                assert here.engine.is_arriving(transfer.transfer_id)
            sender.send_signal(way)
            if stage == "offered":
                taken = here.engine.import_kv(transfer)
            assert taken or (stage == "offered" and way == signal.SIGKILL)
        if not taken:  # as whoever places requests does with those of a process that is gone
            here.add(HANDED)
        here.finish()
        again = transport == "gloo" or way == signal.SIGKILL
        assert here.engine.stats().num_preemptions == (taken and again and stage != "taken")
    finally:
        sender.close()


@pytest.mark.parametrize(("transport", "way", "stage"), matrix("receiver", (*STAGES, "answered")))
def test_the_receiver_is_killed_or_stopped(folder: Path, transport: str, way: signal.Signals, stage: str) -> None:
    """Without an answer the request goes on here. After one it is the receiver's, and is asked for again here; what was kept
    for the receiver to read is free by the deadline."""
    hold = "take" if stage in ("under way", "answered") else None
    setup = Setup(folder=str(folder), role=Role.DECODE, transport=transport, hold=hold, timeout_s=TIMEOUT_S)
    receiver = Worker(setup)
    try:
        here = Survivor(folder, Role.PREFILL, transport)
        receiver.expect(Seen)
        with contextlib.ExitStack() as holding:
            if hold is not None and transport == "gloo":
                holding.enter_context(Hold("give")).go.set()  # piece by piece, without stopping
            here.add(HANDED)
            while not (offers := here.step()):
                pass
            [transfer] = offers
            name = transfer.transfer_id
            if stage != "offered":
                receiver.tell(Take(transfer=transfer))
                took = receiver.expect(Took)
                assert took.ok
            if stage == "taken":
                assert took.arrived or receiver.expect(Took).arrived
                assert receiver.look().preemptions == 0
            elif hold is not None:
                receiver.until(lambda seen: seen.held == MOST_HELD)
            if stage == "answered":
                here.engine.finish_export(name, True, arrived=False)
            receiver.send_signal(way)
            if stage == "offered" and way == signal.SIGSTOP:
                receiver.tell(Take(transfer=transfer))
            here.until(lambda: set(here.done) == {(one.name, 0) for one in OWN})  # who is gone holds up nobody
            assert here.engine.stats().leased_blocks
            here.clock.advance(DEADLINE_S)
            if stage == "answered":
                here.step()
                assert_free(here.engine)
                here.add(HANDED)
                while not (offers := here.step()):
                    pass
                here.engine.finish_export(offers[0].transfer_id, False)
        here.finish()
        if way == signal.SIGSTOP:
            wakes_up(receiver, here, name)
    finally:
        receiver.close()


def wakes_up(receiver: Worker, here: Survivor, name: str) -> None:
    """Its blocks have been others' meanwhile. It finds out, gives the same tokens, and is not believed when it answers."""
    receiver.process.send_signal(signal.SIGCONT)
    receiver.tell(Go())
    done: list[Completion] = []
    deadline = time.monotonic() + LIMIT_S
    while not done and time.monotonic() < deadline:
        match receiver.hear():
            case Took() as took:
                if not took.ok:
                    break
                stale = here.engine.stats().stale_messages
                here.engine.finish_export(name, took.ok, arrived=took.arrived)
                assert here.engine.stats().stale_messages == stale + 1
            case Updates() as updates:
                done = [update.completion for update in updates.updates if update.completion is not None]
    for completion in done:
        same(completion, here.wanted["r", 0])
    receiver.until(lambda seen: seen.free and not seen.unfinished)
    assert_free(here.engine)


# ---------------------------------------------------------------------------------------------------- one request at a time


def test_requests_come_from_another_process_or_stay_there(folder: Path) -> None:
    """By the transports that an engine has when none are named: between processes of a machine that is `host`."""
    sender = Worker(Setup(folder=str(folder), role=Role.PREFILL))
    try:
        engine = make(Setup(folder=str(folder), role=Role.DECODE))
        wanted = mixed(folder, [HANDED, *OWN])
        sender.expect(Seen)
        for one in (HANDED, *OWN):
            sender.tell(Add(name=one.name, ids=one.ids, params=one.params))
            transfer = sender.expect(Offer).transfer
            assert transfer.source.pid == sender.process.pid and transfer.source.addresses.keys() >= {"host", "gloo"}
            ok = engine.import_kv(transfer) if one.name != "own2" else False
            while engine.is_arriving(transfer.transfer_id):
                engine.step()
            sender.tell(Finish(transfer_id=transfer.transfer_id, ok=ok))
            completions = [] if ok else [sender_completion(sender)]
            while engine.has_unfinished():
                completions += engine.step()
            [completion] = completions
            same(completion, wanted[one.name, 0])
            seen = sender.until(lambda seen: seen.free)
            assert not seen.unfinished and ok is (one.name != "own2")
        assert engine.stats().num_preemptions == 0
        late = HANDED.name
        sender.tell(Add(name=late, ids=HANDED.ids, params=HANDED.params))
        transfer = sender.expect(Offer).transfer
        sender.tell(Finish(transfer_id=transfer.transfer_id, ok=False))
        sender_completion(sender)
        assert engine.import_kv(transfer) is False
    finally:
        sender.close()


def sender_completion(sender: Worker) -> Completion:
    """The next request that ends there."""
    while True:
        for update in sender.expect(Updates).updates:
            if update.completion is not None:
                return update.completion
