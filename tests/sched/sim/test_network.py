"""Transfers that share bandwidth, against times by hand."""

from __future__ import annotations

import random

import pytest

from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.network import Network


class Ends:
    def __init__(self, base_s: float = 0.0) -> None:
        self.agenda = Agenda()
        self.network = Network(self.agenda, bytes_per_s=100.0, base_s=base_s)
        self.done: dict[str, float] = {}
        self.failed: dict[str, float] = {}

    def send(self, name: str, source: str, target: str, size: float, at: float = 0.0) -> None:
        def begin() -> None:
            self.network.send(
                source,
                target,
                size,
                done=lambda: self.done.update({name: self.agenda.now}),
                failed=lambda: self.failed.update({name: self.agenda.now}),
            )

        self.agenda.at(at, begin)

    def run(self) -> dict[str, float]:
        while self.agenda.step():
            pass
        assert len(self.network) == 0
        return self.done


def test_alone_it_takes_bytes_over_bandwidth_and_the_base() -> None:
    ends = Ends(base_s=0.5)
    ends.send("x", "a", "b", 200.0)
    assert ends.run() == pytest.approx({"x": 2.5})


def test_those_with_an_end_in_common_share_it_while_they_overlap() -> None:
    ends = Ends()
    ends.send("x", "a", "b", 200.0)
    ends.send("y", "a", "c", 100.0, at=1.0)  # x has 100 left: both at 50, both until 3
    ends.send("z", "d", "e", 100.0, at=1.0)  # nobody is in its way
    assert ends.run() == pytest.approx({"x": 3.0, "y": 3.0, "z": 2.0})


def test_the_busier_end_counts() -> None:
    ends = Ends()
    for name, source in (("x", "a"), ("y", "b"), ("z", "c")):
        ends.send(name, source, "t", 100.0)
    ends.send("w", "a", "u", 100.0)  # at half of what a sends, though x takes only a third of what t receives
    assert ends.run() == pytest.approx({"x": 3.0, "y": 3.0, "z": 3.0, "w": 2.0})


def test_a_lost_end_fails_what_has_it_and_frees_the_others() -> None:
    ends = Ends()
    ends.send("x", "a", "b", 200.0)
    ends.send("y", "a", "c", 200.0)
    ends.agenda.at(1.0, lambda: ends.network.lose("c"))
    assert ends.run() == pytest.approx({"x": 2.5}) and ends.failed == pytest.approx({"y": 1.0})


@pytest.mark.parametrize("seed", range(10))
def test_every_flow_ends_once_and_nobody_sends_too_much(seed: int) -> None:
    rng, ends = random.Random(seed), Ends()
    rows = [
        (f"f{n}", f"s{rng.randrange(3)}", f"t{rng.randrange(3)}", rng.uniform(1, 300), rng.uniform(0, 5)) for n in range(30)
    ]
    for name, source, target, size, at in rows:
        ends.send(name, source, target, size, at)
    ends.agenda.at(4.0, lambda: ends.network.lose("t0"))
    ends.run()
    assert sorted([*ends.done, *ends.failed]) == sorted(row[0] for row in rows)
    for end in ("s0", "s1", "s2", "t1", "t2"):
        mine = [row for row in rows if end in row and row[0] in ends.done]
        assert sum(row[3] for row in mine) <= 100.0 * max(ends.done[row[0]] for row in mine) * (1 + 1e-9)
