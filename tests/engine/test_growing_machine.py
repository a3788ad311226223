"""Random lives of two engines that read along and hand over, of one rank and of several: tokens are the model's, pools free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import pytest
from engine_cases import GREEDY, assert_greedy, model, named
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances import Instances, together

from pearl.engine.engine import Engine
from pearl.protocol import KVTransfer, Role

ROLES = st.sampled_from([Role.PREFILL, Role.PREFILL, Role.MIXED, Role.DECODE])
SIDES = st.sampled_from("pd")
STEP = st.tuples(st.just("step"), SIDES)
ACTS = st.one_of(
    STEP,
    STEP,
    STEP,
    st.tuples(st.just("start"), st.integers(1, 24), st.sampled_from(["now", "now", "later", "never"])),
    st.tuples(st.just("start"), st.integers(1, 24), st.just("now")),
    st.tuples(st.just("add"), SIDES, st.integers(1, 16)),
    st.tuples(st.just("deliver")),
    st.tuples(st.just("hand over"), st.sampled_from(["taken", "taken", "refused", "lost"])),
    st.tuples(st.just("hand over"), st.just("taken")),
    st.tuples(st.sampled_from(["abort", "preempt", "export"]), SIDES, st.integers(0, 3)),
    st.tuples(st.just("switch"), SIDES, ROLES, st.sampled_from(["handover", "finish", "recompute"])),
    st.tuples(st.just("update"), st.sampled_from(["keep", "recompute"])),
    st.tuples(st.just("time"), st.sampled_from([0.5, 5.0])),
    st.tuples(st.just("reset"), SIDES),
)
LIVES = st.lists(ACTS, min_size=15, max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


class Life:
    """What is done to a pair; messages about growing prompts come now, later or never."""

    def __init__(self, pair: Instances) -> None:
        self.pair, self.version, self.count = pair, 0, 0
        self.when: dict[str, str] = {}
        self.late: list[KVTransfer] = []
        self.asked: set[str] = set()
        self.aborted: set[str] = set()

    def side(self, name: str) -> Engine:
        return self.pair.p if name == "p" else self.pair.d

    def other(self, engine: Engine) -> Engine:
        return self.pair.d if engine is self.pair.p else self.pair.p

    def do(self, act: tuple) -> None:
        getattr(self, act[0].replace(" ", "_"))(*act[1:])

    def step(self, name: str) -> None:
        self.pair.take(self.side(name))
        for transfer in self.pair.growing:
            when = self.when[transfer.request_id]
            if when == "now":
                self.pair.d.read_along(transfer)
            elif when == "later":
                self.late.append(transfer)
        self.pair.growing.clear()
        self.pair.d.check_integrity()

    def name(self) -> str:
        self.count += 1
        self.asked.add(f"r{self.count}")
        return f"r{self.count}"

    def start(self, length: int, when: str) -> None:
        rid = self.name()
        self.when[rid] = when
        self.pair.start(hf_models.prompt(length, seed=self.count), rid=rid)

    def add(self, name: str, length: int) -> None:
        self.side(name).add_request(hf_models.prompt(length, seed=self.count), GREEDY, request_id=self.name())

    def deliver(self) -> None:
        if self.late:
            self.pair.d.read_along(self.late.pop(0))

    def hand_over(self, how: str) -> None:
        for source in (self.pair.p, self.pair.d):
            for transfer in source.take_handoffs():
                self.answer(transfer, source, how)

    def answer(self, transfer: KVTransfer, source: Engine, how: str) -> None:
        if how == "taken":
            self.pair.move(transfer, source, self.other(source))
        elif how == "refused":
            source.finish_export(transfer.transfer_id, False)

    def running(self, engine: Engine, number: int) -> str | None:
        names = [name for name in engine._core.requests if name in engine._core.scheduler.running]
        return names[number % len(names)] if names else None

    def abort(self, name: str, number: int) -> None:
        rid = self.running(self.side(name), number)
        if rid is not None and self.side(name).abort(rid):
            self.aborted.add(rid)

    def preempt(self, name: str, number: int) -> None:
        self.side(name).preempt(self.running(self.side(name), number) or "nobody")

    def export(self, name: str, number: int) -> None:
        rid = self.running(self.side(name), number)
        if rid is not None:
            self.answer(self.side(name).export_kv(rid), self.side(name), "taken")

    def switch(self, name: str, role: Role, drain: str) -> None:
        self.side(name).switch_role(role, drain)

    def update(self, mode: str) -> None:
        self.version += 1
        for engine in (self.pair.p, self.pair.d):
            engine.update_weights(named(0), self.version, mode)

    def time(self, seconds: float) -> None:
        self.pair.clock.advance(seconds)

    def reset(self, name: str) -> None:
        self.side(name).reset_prefix_cache()

    def end(self) -> None:
        """All comes to its end, as time goes by."""
        pair = self.pair
        for _ in range(300):
            if not (pair.p.has_unfinished() or pair.d.has_unfinished()):
                break
            self.step("p")
            self.step("d")
            self.hand_over("taken")
            pair.clock.advance(0.5)
        pair.clock.advance(60.0)
        for _ in range(3):
            self.step("p")
            self.step("d")
        pair.assert_free()
        for engine in (pair.p, pair.d):
            assert not engine.has_unfinished() and not engine._core.credits and not engine._core.exports
            assert not engine._core.growing and not engine._transfers._tickets and not engine._transfers._offered
        assert {rid for rid, _ in pair.done} == self.asked
        for (rid, _), completion in pair.done.items():
            if rid not in self.aborted:
                assert_greedy(completion, 8)


def live(pair: Instances, acts: list[tuple]) -> None:
    life = Life(pair)
    for act in acts:
        life.do(act)
    life.end()


SMALL = {"num_blocks": 12, "max_batch_tokens": 6, "max_num_seqs": 4, "transfer_deadline_s": 5.0}
QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def lives(folder: Path, sizes: tuple[int, int], acts: list[tuple]) -> Any:
    return together(folder, sizes, lambda pair: live(pair, acts), SMALL, SMALL)


@QUICK
@given(acts=LIVES)
def test_two_engines(folder: Path, acts: list[tuple]) -> None:
    lives(folder, (1, 1), acts)


@settings(QUICK, max_examples=4)
@given(acts=LIVES)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_instances_of_several_ranks(folder: Path, sizes: tuple[int, int], acts: list[tuple]) -> None:
    lives(folder, sizes, acts)


@pytest.mark.slow
@LONG
@given(acts=LIVES)
def test_many_lives_of_two_engines(folder: Path, acts: list[tuple]) -> None:
    lives(folder, (1, 1), acts)


@pytest.mark.slow
@settings(LONG, max_examples=60)
@given(acts=LIVES)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_many_lives_of_several_ranks(folder: Path, sizes: tuple[int, int], acts: list[tuple]) -> None:
    lives(folder, sizes, acts)
