"""A simulated worker by itself: when its steps end, what interrupts a run of them, and what is left when it dies."""

from __future__ import annotations

from typing import Any

import pytest
import sim_jobs

from pearl.engine.limits import CoreSettings
from pearl.engine.request import Request, RequestUpdate, ScheduledRequest, SchedulerOutput
from pearl.engine.token_runs import TokenRuns
from pearl.protocol import Role
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.episode import PARAMS
from pearl.sched.sim.pricing import StepPrice, price
from pearl.sched.sim.worker import SimWorker

COSTS = sim_jobs.SMALL
SETTINGS = CoreSettings(
    block_size=16, num_blocks=100, max_model_len=1000, max_num_seqs=8, max_batch_tokens=200, vocab_size=1 << 60
)


def decode(context: int) -> SchedulerOutput:
    """One step of one sequence."""
    entry = ScheduledRequest(request_id="x", start=context, num_tokens=1, samples=True)
    return SchedulerOutput(step=0, requests=(entry,))


class Heard:
    def __init__(self) -> None:
        self.outputs: list[tuple[float, SchedulerOutput]] = []
        self.tokens: dict[str, int] = {}
        self.agenda = Agenda()
        self.worker = SimWorker("w", COSTS, SETTINGS, self.agenda, self)
        self.worker.wake(Role.MIXED, 3)

    def stepped(self, worker: SimWorker, output: SchedulerOutput, cost: StepPrice, updates: list[RequestUpdate]) -> None:
        self.outputs.append((self.agenda.now, output))
        for update in updates:
            self.tokens[update.request_id] = self.tokens.get(update.request_id, 0) + len(update.token_ids)
            assert set(update.weight_versions) <= {3}

    def offered(self, worker: SimWorker, export: Any) -> None:
        raise AssertionError("nobody hands over")

    def add(self, number: int, prompt: int, tokens: int, at: float = 0.0) -> None:
        ids: Any = TokenRuns.of(number, prompt)
        request = Request(
            request_id=f"r{number}", params=PARAMS, token_ids=ids, num_prompt_tokens=prompt, max_tokens=tokens, seed=number
        )
        self.agenda.at(at, lambda: self.worker.post(lambda core: core.add_request(request)))

    def run(self, until: float = 1e9) -> None:
        while self.agenda.next_at() <= until:
            self.agenda.step()


def test_a_request_takes_its_prefill_and_its_decode_steps() -> None:
    heard = Heard()
    heard.add(1, prompt=50, tokens=40)
    heard.run()
    assert [output.num_steps for _, output in heard.outputs] == [1, 39]
    single = [price(one, COSTS).seconds for _, output in heard.outputs for one in output.expand()]
    assert heard.agenda.now == pytest.approx(sum(single)) and heard.tokens == {"r1": 40}


def test_an_arrival_ends_a_run_with_the_step_under_way() -> None:
    heard = Heard()
    heard.add(1, prompt=50, tokens=40)
    heard.run(until=0.0)
    step = price(decode(50), COSTS).seconds
    prefill = heard.agenda.next_at()
    heard.add(2, prompt=30, tokens=5, at=prefill + 3.4 * step)  # in the fourth step
    heard.run()
    sizes = [(output.num_steps, len(output.requests)) for _, output in heard.outputs]
    assert sizes[:3] == [(1, 1), (4, 1), (1, 2)] and heard.tokens == {"r1": 40, "r2": 5}
    expanded = [len(one.requests) for _, output in heard.outputs for one in output.expand()]
    assert sum(expanded) == 40 + 5


def test_who_dies_has_drawn_what_was_through() -> None:
    heard = Heard()
    heard.add(1, prompt=50, tokens=40)
    heard.run(until=0.0)
    heard.agenda.at(heard.agenda.next_at() + 2.5 * price(decode(50), COSTS).seconds, heard.worker.die)
    heard.run()
    assert heard.tokens == {"r1": 3} and not heard.worker.serving  # with the prompt, and two steps
    heard.worker.post(lambda core: pytest.fail("nobody is there"))


def test_a_held_worker_takes_no_step() -> None:
    heard = Heard()
    ends: list[float] = []
    heard.worker.post(lambda core: heard.worker.hold(5.0, lambda: ends.append(heard.agenda.now)))
    heard.add(1, prompt=50, tokens=4, at=1.0)
    heard.run()
    assert ends == [5.0] and heard.outputs[0][0] > 5.0 and heard.tokens == {"r1": 4}


def test_what_its_host_spends_makes_the_next_step_longer_and_no_other() -> None:
    ends = []
    for owed in (0.0, 2.0):
        heard = Heard()
        heard.add(1, prompt=50, tokens=40)
        heard.run(until=0.0)
        heard.worker.charge(owed / 2)
        heard.worker.charge(owed / 2)
        heard.run()
        ends.append(heard.agenda.now)
        assert heard.tokens == {"r1": 40}
    assert ends[1] - ends[0] == pytest.approx(2.0)
    assert [output.num_steps for _, output in heard.outputs] == [1, 1, 38], "that step is one by itself"


def test_who_wakes_again_owes_nothing() -> None:
    heard = Heard()
    heard.worker.charge(5.0)
    heard.worker.sleep()
    heard.worker.wake(Role.MIXED, 3)
    heard.add(1, prompt=50, tokens=1)
    heard.run()
    assert heard.agenda.now < 1.0


def test_a_worker_that_stops_because_of_an_offer_has_handed_out_the_others_before() -> None:
    """Else whoever stops it places requests anew that are offered a moment later."""
    heard = Heard()
    heard.worker.wake(Role.PREFILL, 3)
    serving: list[bool] = []

    def offered(worker: SimWorker, export: Any) -> None:
        serving.append(worker.serving)
        if len(serving) > 1:
            worker.post(lambda core: worker.sleep())

    heard.offered = offered  # type: ignore[method-assign]
    for number in (1, 2, 3):  # the first by itself, the others, which come meanwhile, in one step
        heard.add(number, prompt=50, tokens=40)
    heard.run()
    assert serving == [True, True, True] and not heard.worker.serving
