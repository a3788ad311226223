"""Whole simulated jobs: what adds up, what is the same each time, and what happens to requests when workers come and go."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import sim_jobs
from sim_jobs import external, plans, run_checked, settings

from pearl.engine.steady import SteadyCore
from pearl.sched.cost_profile import HandOverCost
from pearl.sched.events import TrainingBegins, TrainingFinished
from pearl.sched.router import Router
from pearl.sched.settings import BorrowSettings, ExpandSettings, PdSettings, SchedulerSettings
from pearl.sched.sim.dispatch import Dispatcher
from pearl.sched.sim.plans import Faults
from pearl.sched.sim.results import SimResult
from pearl.sched.sim.simulator import Simulation


def scheduler(**pd: Any) -> SchedulerSettings:
    return SchedulerSettings(
        pd=PdSettings(**pd), borrow=BorrowSettings(workers="all"), expand=ExpandSettings(external="always")
    )


SPLIT = scheduler(mode="split", ratio="1:1", append_on_decode="0")


def run(seed: int = 0, availability: Any = None, **changes: Any) -> SimResult:
    simulation = Simulation(settings(**changes), plans(seed), availability)
    run_checked(simulation)
    return simulation.result()


@pytest.mark.parametrize("semantics", ["barrier", "slots"])
@pytest.mark.parametrize("mode", ["mixed", "split", "hybrid", "auto"])
def test_a_job_trains_what_it_starts_and_loses_nothing(mode: str, semantics: str) -> None:
    result = run(semantics=semantics, scheduler=scheduler(mode=mode), availability=external(until=15.0, notice_s=2.0))
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result.counts["taken"] == 24 and result.counts["tokens_lost"] == 0
    assert result.generated == result.counts["generated"] >= result.counts["tokens_taken"]
    assert sum(step.generated for step in result.steps) == result.counts["generated"]
    assert all(step.began_s < step.collected_s < step.trained_s < step.ended_s for step in result.steps)
    assert mode != "split" or result.counts["transfers"] > 0


@pytest.mark.parametrize("mode", ["mixed", "split"])
def test_runs_of_steps_at_once_change_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one thing, which is taken away here: loads are reported when a run of steps ends, not after each of them."""
    monkeypatch.setattr(Router, "on_load", lambda *args: None)
    monkeypatch.setattr(Simulation, "_report", lambda *args: None)
    results = []
    for steps in (1, 0):
        if not steps:
            monkeypatch.setattr(SteadyCore, "steady_steps", lambda core: 0)
        results.append(Simulation(settings(scheduler=scheduler(mode=mode)), plans(2), external()).run())
    fast, slow = results
    assert fast.counts["outputs"] < 0.5 * slow.counts["outputs"]
    assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9)
    same = ("steps", "turns", "generated", "computed", "preemptions", "transferred_tokens")
    assert {name: fast.counts.get(name) for name in same} == {name: slow.counts.get(name) for name in same}


@pytest.mark.parametrize("copies", [False, True])
def test_hand_overs_cost_the_hosts_of_both_ends(copies: bool) -> None:
    """And bytes are waited for by the request alone, or cost the target's host as much; nothing else changes."""
    results = []
    for cost in (HandOverCost(copies=copies), HandOverCost(give_s=0.2, take_s=0.3, copies=copies)):
        costs = replace(sim_jobs.SMALL, hand_over=cost, transfer_base_s=0.01, transfer_bytes_per_s=1e8)
        results.append(run(costs=costs, scheduler=SPLIT, max_steps=1))
    free, paid = results
    assert free.counts["transfers"] > 0 and paid.counts["tokens_lost"] == 0
    assert free.counts["generated"] == paid.counts["generated"]
    assert paid.steps[0].makespan_s > free.steps[0].makespan_s + 1.0


def test_kv_that_the_target_copies_may_still_be_lost() -> None:
    costs = replace(sim_jobs.SMALL, hand_over=HandOverCost(take_s=0.01, copies=True))
    result = run(costs=costs, scheduler=SPLIT, faults=Faults(transfer=0.5))
    assert 0 < result.counts["failed_transfers"] < result.counts["transfers"]


def test_an_offer_that_lapsed_is_not_taken_for_the_next_turns() -> None:
    """A decode worker rests for longer than offers to it hold, as one does that captures its graphs anew: what was offered
    goes on at its source, ends there, and its next turn is somewhere else when the offer is looked at."""
    sizes = replace(settings().engine, transfer_deadline_s=1.0)
    hardware = replace(settings().hardware, reserved_workers=3)
    fixed = SchedulerSettings(
        pd=PdSettings(mode="split", ratio="1:2", append_on_decode="0"), borrow=BorrowSettings(workers="none"), tail_share=0.0
    )
    given = settings(engine=sizes, hardware=hardware, scheduler=fixed, max_steps=None, until_s=60.0)
    simulation = Simulation(given, plans(1))

    def rest() -> None:
        simulation.agenda.after(10.0, rest)
        workers = [node.worker for node in simulation.fleet.nodes.values() if node.worker.serving]
        decoder = next(worker for worker in workers if worker.role == "decode")
        decoder.post(lambda core: decoder.hold(4.0, lambda: None))

    simulation.agenda.after(10.0, rest)
    run_checked(simulation)
    assert simulation.dispatcher.counts["transfers"] > 50 and simulation.result().counts["tokens_lost"] == 0


def test_appends_whose_prefix_is_lost_are_given_back_and_computed_by_who_computes_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the turns find nothing. Those that are placed where their KV should be come back once each, so that no decode
    worker computes more than an append and a block for a turn's first request; nothing is lost, and all of it is trained."""
    split = scheduler(mode="split", ratio="1:1", append_on_decode="60")
    pieces: dict[tuple[str, str], int] = {}
    stepped = Dispatcher.stepped

    def watch(self: Dispatcher, worker: Any, output: Any, *rest: Any) -> None:
        for entry in output.requests:
            if worker.role == "decode" and entry.num_tokens > 1 and not entry.request_id.endswith(".1"):  # before the split
                key = worker.name, entry.request_id
                pieces[key] = pieces.get(key, 0) + entry.num_tokens
        stepped(self, worker, output, *rest)

    monkeypatch.setattr(Dispatcher, "stepped", watch)
    hardware, costs = replace(settings().hardware, reserved_workers=4), replace(sim_jobs.SMALL, kv_capacity_tokens=20_000)
    result = run(scheduler=split, miss_share=0.5, hardware=hardware, costs=costs)
    counts = result.counts
    assert 10 < counts["returned"] <= counts["turns"] and not counts["preemptions"]
    assert counts["tokens_lost"] == 0 and counts["taken"] == 24
    assert 0 < max(pieces.values()) <= 60 + 16


def test_equal_inputs_give_equal_results() -> None:
    options = dict(scheduler=SPLIT, faults=Faults(death=0.01, transfer=0.1, hang=0.01, hang_s=5.0, revive_s=3.0), seed=5)
    first, again = (Simulation(settings(**options), plans(5), external()).run() for _ in range(2))
    assert first == again
    other = Simulation(settings(**options | {"seed": 6}), plans(5), external()).run()
    assert other != first


def test_trajectories_come_in_the_order_of_their_groups() -> None:
    simulation = Simulation(settings(), plans())
    seen = []
    taken = simulation.trainer.train

    def train(batch: Any) -> None:
        seen.append(sorted({episode.plan.group for episode in batch.episodes}))
        taken(batch)

    simulation.trainer.train = train  # type: ignore[method-assign]
    simulation.run()
    assert seen == [[0, 1], [2, 3], [4, 5]]


def test_with_a_barrier_a_batch_starts_when_the_last_is_complete() -> None:
    steps = run(semantics="barrier", max_staleness=1).steps
    for before, after in pairwise(steps):
        assert after.began_s == pytest.approx(before.collected_s)


def test_with_slots_the_next_trajectories_do_not_wait() -> None:
    steps = run(semantics="slots", max_staleness=1).steps
    assert steps[1].began_s < steps[0].collected_s


def test_synchronous_steps_do_not_overlap() -> None:
    result = run(max_staleness=0)
    assert all(step.staleness_mean == 0 for step in result.steps)
    for before, after in pairwise(result.steps):
        assert after.began_s >= before.ended_s


@pytest.mark.parametrize("notice_s", [0.0, 2.0])
def test_reclaimed_workers_lose_no_token(notice_s: float) -> None:
    result = run(availability=external(until=10.0, notice_s=notice_s), scheduler=scheduler(mode="mixed"), max_steps=4)
    kinds = [row["kind"] for row in result.transitions]
    assert "expand" in kinds and "admit" in kinds
    assert ("leave" in kinds) == (notice_s > 0)
    assert result.counts["tokens_lost"] == 0


def test_borrowed_gpus_are_back_before_training() -> None:
    result = run(scheduler=scheduler(mode="mixed"), costs=replace(sim_jobs.SMALL, kv_capacity_tokens=2000))
    kinds = [row["kind"] for row in result.transitions]
    assert kinds.count("borrow") >= 2 and kinds.count("give_back") >= 2
    assert result.counts["tokens_lost"] == 0
    borrowed = sum(interval.roles.get("borrowed", 0) for interval in result.intervals)
    assert borrowed > 0


def test_a_run_ends_in_time() -> None:
    simulation = Simulation(settings(max_steps=None, until_s=12.0), plans())
    result = simulation.run()
    assert 11.0 < result.seconds <= 12.0
    assert result.steps == () or result.steps[-1].ended_s <= 12.0


def test_a_trajectory_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="trajectory 0: has"):
        Simulation(settings(), plans(longest=5000, turns=60)).run()


def fault_run(seed: int) -> SimResult:
    """A job in which everything goes wrong, its books checked after every few events."""
    modes = ("mixed", "split", "hybrid", "auto")
    faults = Faults(death=0.02, order=0.1, silence=0.05, transfer=0.2, hang=0.02, hang_s=8.0, revive_s=4.0)
    changes = dict(
        seed=seed,
        semantics=("barrier", "slots")[seed % 2],
        transfer=("append", "context")[seed // 2 % 2],
        update_mode=("keep", "recompute")[seed // 4 % 2],
        scheduler=replace(scheduler(mode=modes[seed % 4]), change_timeout_s=4.0, prepare_timeout_s=60.0, consider_s=2.0),
        costs=replace(sim_jobs.SMALL, kv_capacity_tokens=(1500, 4000)[seed // 8 % 2]),
        faults=faults,
        miss_share=0.1,
        max_steps=4,
    )
    simulation = Simulation(settings(**changes), plans(seed), external(until=10.0 + seed % 20, notice_s=float(seed % 3)))
    run_checked(simulation, every=3)
    return simulation.result()


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_breaks_the_books(seed: int) -> None:
    result = fault_run(seed)
    assert len(result.steps) == 4 and result.counts["tokens_lost"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 220))
def test_no_fault_breaks_the_books_for_long(seed: int) -> None:
    result = fault_run(seed)
    assert len(result.steps) == 4 and result.counts["tokens_lost"] == 0


def test_a_trainer_is_not_told_to_idle_when_the_next_batch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots, many trajectories and a slow trainer batches are complete before they can be trained; with a fast one none
    is. Either way no training begins that was not over, and nothing that is told comes too late to mean anything."""
    for seconds, waits in ((0.2, True), (1e-4, False)):
        simulation = Simulation(settings(semantics="slots", train_s_per_token=seconds, max_steps=4), plans(3), external())
        told: list[Any] = []
        heard = simulation.scheduler.on_event

        def hear(event: Any, now: float, heard: Any = heard, told: list[Any] = told) -> Any:
            told += [event] if isinstance(event, TrainingBegins | TrainingFinished) else []
            return heard(event, now)

        monkeypatch.setattr(simulation.scheduler, "on_event", hear)
        run_checked(simulation)
        begun = [event.step for event in told if isinstance(event, TrainingBegins)]
        over = [event.step for event in told if isinstance(event, TrainingFinished)]
        assert begun == [1, 2, 3, 4] and (over == [4] if waits else over == [1, 2, 3, 4])
        assert [event.step for event in told] == sorted(event.step for event in told)
        assert not simulation.scheduler.state.dropped["doubled"]
