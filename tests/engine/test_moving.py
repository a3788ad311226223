"""Random lives of two cores that hand requests to each other, also one step ahead, and read along while prompts are computed:
books add up, tokens are the model's, and what is announced as written is written."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_model import Driver, assert_all_free, chain, every_mode, make_core, make_request, oracle

from pearl.engine.growing import Growing
from pearl.engine.request import Request, RequestStatus, SchedulerOutput, StepResult
from pearl.engine.travel import request_of, state_of
from pearl.protocol import Role

BLOCK = 4
DEADLINE = 10.0
ROLES = [Role.MIXED, Role.PREFILL, Role.PREFILL, Role.DECODE]


class Side(Driver):
    """A driver with a clock, and what is on its way to it: transfer id -> (export, the side it comes from)."""

    def __init__(self, name: str, mode: dict, **sizes) -> None:
        core = make_core(num_blocks=24, max_batch_tokens=12, decode_prefill_tokens=3, name=name, **sizes)
        super().__init__(core, **mode)
        self.now = 0.0
        self.coming: dict[str, tuple] = {}
        self.along: dict[str, Along] = {}
        self.num_along = 0

    def step(self, grown: Callable[[Growing], None] = lambda growing: None) -> SchedulerOutput:
        """`grown` hears of what may be read along, before it is computed."""
        before = set(self.core.growing)
        output = self.core.schedule(self.now)
        for name, growing in self.core.growing.items():
            if name not in before:
                grown(growing)
        self.queue.append((output, None if self.lazy else self.execute(output)))
        if not self.ahead or len(self.queue) == 2:
            self.finish_one()
        self.settle()
        self.check()
        return output

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = self.model.execute(output)
        if output.step % 3:  # a runner may tell of its layers, of which there is one, or not
            self.core._words.layer_done(output.step, 1)
        return result

    def finish_one(self) -> None:
        output, result = self.queue.pop(0)
        self.take(self.core.finish(output, result or self.execute(output), self.now))

    def read_along(self, source: Side, growing: Growing) -> None:
        prompt = request_of(state_of(growing.request, request_id=growing.request.request_id, streaming=True), self.now)
        reservation_id = growing.request.reservation_id
        credit = self.core.read_along(growing.transfer_id, reservation_id, prompt, growing.weight_version)
        if credit is not None:
            self.along[credit.reservation_id] = Along(growing, source, credit.blocks, credit.num_held)

    def peek(self) -> None:
        """Copies what is announced of all that is read along."""
        for name, along in list(self.along.items()):
            credit = self.core.credits.get(name)
            if credit is None or credit.early is None:
                del self.along[name]
            elif not along.copy(self.model.slots):
                self.core.early_lost(name)
                self.core.early_over(name)
            elif along.copied == along.growing.num_tokens:
                credit.state = "here"
        self.check()

    def settle(self) -> None:
        for transfer_id, arrival in list(self.core.arrivals.items()):
            if not arrival.live:
                self.core.release_arrival(transfer_id)

    def import_from(self, source: Side, export, *, at_once: bool) -> bool:
        """What an engine does with a transfer; the bytes come now or later."""
        request = request_of(state_of(export.request, request_id=export.request.request_id, streaming=True), self.now)
        arrival = self.core.take_in(
            request,
            transfer_id=export.transfer_id,
            num_tokens=export.num_tokens,
            version=export.weight_version,
            reservation_id=export.request.reservation_id,
            expires=self.now + DEADLINE,
        )
        if arrival is None:
            return False
        along = self.along.pop(arrival.begun_as or "", None)
        self.num_along += along is not None
        self.coming[export.transfer_id] = (export, source, arrival.num_held if along is None else along.copied)
        if at_once:
            self.arrive(export.transfer_id)
        return True

    def arrive(self, transfer_id: str) -> None:
        """The bytes are read, and counted if their lease still holds."""
        export, source, copied = self.coming.pop(transfer_id)
        arrival = self.core.arrivals.get(transfer_id)
        if arrival is None or not arrival.live:
            return
        if export.blocks and not source.core._words.holds(export.blocks[-1], export.word):
            self.core.give_up(transfer_id)
            self.settle()
            return
        for index in range(copied // BLOCK, len(export.blocks)):
            for offset in range(BLOCK):
                value = source.model.slots.get(export.blocks[index] * BLOCK + offset)
                self.model.slots[arrival.blocks[index] * BLOCK + offset] = value
        self.core.arrived(transfer_id)
        self.check()


class Along:
    """A prompt that is read along into `blocks`, of which the first `copied` tokens are there. Blocks go when they are full."""

    def __init__(self, growing: Growing, source: Side, blocks: tuple[int, ...], num_held: int) -> None:
        self.growing, self.source, self.blocks, self.copied = growing, source, blocks, num_held

    def copy(self, slots: dict) -> bool:
        """Whether it is still under lease."""
        words, last = self.source.core._words, self.growing.blocks[-1]
        if not words.holds(last, self.growing.word):
            return False
        progress, total = words.progress(last), self.growing.num_tokens
        written = progress.next_tokens if progress.layers else progress.written
        whole = total if written >= total else written // BLOCK * BLOCK
        values = chain(self.growing.request.token_ids[:total])
        for position in range(self.copied, whole):
            index, offset = divmod(position, BLOCK)
            value = self.source.model.slots[self.growing.blocks[index] * BLOCK + offset]
            assert value[0] == values[position], "what was announced is not there"
            slots[self.blocks[index] * BLOCK + offset] = value
        self.copied = max(self.copied, whole)
        return True


class Life:
    def __init__(self, seed: int, mode: dict) -> None:
        self.random = random.Random(seed)
        self.sides = [Side("a", mode), Side("b", mode)]
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.version = 0

    def other(self, side: Side) -> Side:
        return self.sides[side is self.sides[0]]

    def any_side(self) -> Side:
        return self.random.choice(self.sides)

    def act(self) -> None:
        acts = [self.step] * 8 + [self.add] * 2 + [self.hand_over] * 4 + [self.arrive] * 2 + [self.export, self.switch]
        acts += [self.reserve] * 2 + [self.peek] * 4
        self.random.choice([*acts, self.abort, self.time, self.lose, self.publish])()

    def step(self) -> None:
        side = self.any_side()
        side.step(lambda growing: self.random.random() < 0.8 and self.other(side).read_along(side, growing))

    def peek(self) -> None:
        self.any_side().peek()

    def add(self) -> None:
        name, rng = f"r{len(self.asked)}", self.random
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        self.asked[name] = (prompt, rng.randint(1, 8))
        side = self.any_side()
        side.core.add_request(self.request(name))
        side.check()

    def request(self, name: str) -> Request:
        prompt, count = self.asked[name]
        return make_request(name, prompt, count, ignore_eos=True, salt=None)

    def reserve(self) -> None:
        """A credit on one side, the request on the other."""
        handing = [side for side in self.sides if side.core.scheduler.policy.hands_over]
        name, side = f"r{len(self.asked)}", self.other(self.random.choice(handing or self.sides))
        self.asked[name] = ([self.random.randrange(2) for _ in range(self.random.randint(1, 20))], 4)
        request = self.request(name)
        credit = side.core.reserve(self.request(name), side.now)
        request.reservation_id = None if credit is None else credit.reservation_id
        self.other(side).core.add_request(request)
        side.check()

    def hand_over(self) -> None:
        for side in self.sides:
            for export in side.core.take_offers():
                self.pass_on(side, export)

    def export(self) -> None:
        side = self.any_side()
        here = (RequestStatus.RUNNING, RequestStatus.WAITING)
        found = [request for request in side.core.requests.values() if request.status in here and not request.num_in_flight]
        if found:
            export = side.core.offer(self.random.choice(found), side.now)
            export.taken = True
            self.pass_on(side, export)

    def pass_on(self, side: Side, export) -> None:
        """Accepted with the bytes now or later, refused, lost, or accepted with an answer that comes after the deadline."""
        how = self.random.choice(["now", "now", "later", "later", "refused", "lost", "late answer"])
        other = self.other(side)
        if how == "lost":
            return
        ok = how != "refused" and other.import_from(side, export, at_once=how != "later")
        given = ok and how == "later" and self.random.random() < 0.5  # its KV stays until it is there, or until the deadline
        if how == "late answer":
            side.now += DEADLINE * 10
            side.core.expire(side.now)
        stale = side.core.num_stale_messages + (export.transfer_id not in side.core.exports)
        side.core.finish_export(export.transfer_id, ok, not given)
        assert side.core.num_stale_messages == stale

        for each in self.sides:
            each.settle()
            each.check()

    def arrive(self) -> None:
        side = self.any_side()
        if side.coming:
            side.arrive(self.random.choice(list(side.coming)))

    def switch(self) -> None:
        side = self.any_side()
        side.core.switch_role(self.random.choice(ROLES), self.random.choice(["handover", "recompute"]), side.now)
        side.check()

    def abort(self) -> None:
        running = [name for name in self.asked if any(name in side.core.requests for side in self.sides)]
        if running:
            name = self.random.choice(running)
            for side in self.sides:
                update = side.core.abort(name)
                if update is not None:
                    self.aborted.add(name)
                    side.take([update])
                side.settle()
                side.check()

    def time(self) -> None:
        side = self.any_side()
        side.now += DEADLINE * self.random.choice([0.3, 1.0, 4.0])

    def lose(self) -> None:
        side = self.any_side()
        if self.random.random() < 0.3:
            side.core.lose_kv()
            side.settle()
            side.check()

    def publish(self) -> None:
        """A new version on both sides, one after the other."""
        if any(side.queue for side in self.sides):
            return
        self.version += 1
        for side in self.sides:
            side.core.set_weight_version(self.version, self.random.choice(["keep", "recompute"]))
            side.model.version = self.version
            side.settle()
            side.check()

    def end(self) -> None:
        for _ in range(3000):
            if not any(side.core.requests or side.core.arrivals or side.queue for side in self.sides):
                break
            for side in self.sides:
                side.now += 1.0
                for transfer_id in list(side.coming):
                    side.arrive(transfer_id)
                if side.core.requests:
                    side.step()
                elif side.queue:
                    side.finish_one()
                side.settle()
            self.hand_over()
        for side in self.sides:
            side.core.expire(side.now + DEADLINE * 1000)
            side.settle()
            assert_all_free(side.core)
            assert side.core.stats().leased_blocks == side.core.scheduler.num_reserved == 0

    def check(self) -> None:
        """Each request ended once, with its own tokens, some of them drawn here and some there."""
        a, b = (side.completions for side in self.sides)
        assert not a.keys() & b.keys() and a.keys() | b.keys() == self.asked.keys()
        for name, completion in (a | b).items():
            prompt, count = self.asked[name]
            if name in self.aborted:
                assert completion.token_ids == oracle(prompt, len(completion.token_ids))
            else:
                assert completion.token_ids == oracle(prompt, count)
                assert len(completion.logprobs) == len(completion.weight_versions) == count


@every_mode
@pytest.mark.parametrize("seed", range(25))
def test_two_cores_lose_and_double_nothing(seed: int, mode: dict) -> None:
    life = Life(seed, mode)
    for _ in range(200):
        life.act()
    life.end()
    life.check()


def test_these_lives_read_along() -> None:
    """Prompts that were read along, in part or as a whole, came to be taken in: else the test above says little of them."""
    lives = [Life(seed, {"ahead": True}) for seed in range(12)]
    for life in lives:
        for _ in range(200):
            life.act()
        life.end()
    assert sum(side.num_along for life in lives for side in life.sides) > 5


@every_mode
@pytest.mark.parametrize("arrived_first", [False, True])
def test_kv_of_a_request_that_was_given_away_stays_until_it_has_arrived(mode: dict, arrived_first: bool) -> None:
    a, b = Side("a", mode), Side("b", mode)
    a.core.switch_role(Role.PREFILL)
    a.core.add_request(make_request("r", [1] * 9, 5, ignore_eos=True))
    while not (offers := a.core.take_offers()):
        a.step()
    while a.queue:
        a.finish_one()
    [export] = offers
    assert b.import_from(a, export, at_once=False)
    a.core.finish_export(export.transfer_id, True, arrived=False)
    assert not a.core.requests and a.core.stats().leased_blocks == 3 and a.core.stats().offered == 0
    assert not a.core.only_offers
    a.core.add_request(make_request("r", [0] * 60, 5, ignore_eos=True))  # the name is free again; its blocks are not
    a.step()
    a.core.abort("r")
    if arrived_first:
        b.arrive(export.transfer_id)
        a.core.finish_export(export.transfer_id, True)
        assert b.core.stats().num_preemptions == 0
    else:
        a.core.expire(DEADLINE * 10)
        b.arrive(export.transfer_id)
        assert b.core.stats().num_preemptions == 1
    a.check()
    while a.queue:
        a.finish_one()
    assert a.core.stats().leased_blocks == 0 and a.core.num_stale_messages == 0
    assert b.run()["r"].token_ids == oracle([1] * 9, 5)


@every_mode
def test_a_prefill_core_computes_prompts_and_one_token_each(mode: dict) -> None:
    side = Side("a", mode)
    side.core.switch_role(Role.PREFILL)
    for number in range(6):
        side.core.add_request(make_request(f"r{number}", [number % 2] * (3 + number), 5, ignore_eos=True))
    for _ in range(12):
        side.step()
    assert {name: len(tokens) for name, tokens in side.streamed.items()} == {f"r{number}": 1 for number in range(6)}
    offers = side.core.take_offers()
    assert sorted(export.request.request_id for export in offers) == sorted(side.streamed)
    assert side.core.take_offers() == [] and side.core.only_offers and side.core.stats().used_blocks == 0
    for export in offers:
        assert export.num_tokens == export.request.num_prompt_tokens
        side.core.finish_export(export.transfer_id, True)
    while side.queue:
        side.finish_one()
    assert not side.core.has_unfinished()
    assert_all_free(side.core)


def test_a_request_in_flight_cannot_be_offered() -> None:
    core = make_core()
    core.add_request(make_request("r", [1, 2], 4))
    core.schedule(0.0)
    with pytest.raises(RuntimeError, match="1 unfinished outputs"):
        core.offer(core.requests["r"], 0.0)
