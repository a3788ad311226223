"""The order of workers against sorting them all."""

from __future__ import annotations

import random

from pearl.protocol import Role
from pearl.sched.standing import Standing, names


def test_it_is_what_sorting_gives() -> None:
    rng, standing, truth = random.Random(3), Standing(), dict[str, tuple[Role, tuple[int, int]]]()
    for _ in range(2000):
        slot = rng.randrange(40)
        worker = f"w{slot}"
        if rng.random() < 0.2:
            standing.remove(worker)
            truth.pop(worker, None)
        else:
            truth[worker] = rng.choice(list(Role)), (rng.randrange(4), slot)
            standing.put(worker, *truth[worker])
        for role in Role:
            there = sorted((rank, name) for name, (where, rank) in truth.items() if where is role)
            assert list(standing.of(role)) == there and list(names(standing.of(role))) == [name for _, name in there]
            assert all(standing.holds(name, role) == (where is role) for name, (where, _) in truth.items())
        assert standing.any() == bool(truth) and not standing.holds("nobody", Role.MIXED)
