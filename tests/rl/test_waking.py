"""Trainer and engine take turns on one device: the order of things, and what is left when one of them fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pearl.protocol import Fetch, Role, Wake
from pearl.rl.waking import Waking


class Parts:
    """Engine, trainer and fetcher in one log; what is named in `failing` fails."""

    def __init__(self, *, lends: bool = True, version: int = -1) -> None:
        self.log: list[str] = []
        self.failing: set[str] = set()
        self.asleep, self.weight_version, self.polls = True, version, 1
        self.role = Role.MIXED
        trainer = SimpleNamespace(sleep=lambda: self.do("trainer sleeps"), wake=lambda: self.do("trainer wakes"))
        self.waking = Waking(self, self, trainer if lends else None)  # type: ignore[arg-type]

    def do(self, what: str, error: type[Exception] = RuntimeError) -> None:
        self.log.append(what)
        if what in self.failing:
            raise error(f"{what}: no")

    def sleep(self, weights: str = "keep") -> None:
        self.do("engine sleeps")
        self.asleep, self.weight_version = True, -1 if weights == "drop" else self.weight_version

    def wake(self) -> None:
        self.do("engine wakes")
        self.asleep = False

    def stats(self) -> Any:
        return SimpleNamespace(role=self.role)

    def switch_role(self, role: Role) -> None:
        self.do("role")
        self.role = role

    def begin(self, version: int, pulls: list[str]) -> None:
        self.do(f"fetch {version}", OSError)
        self.coming, self.left = version, self.polls

    def poll(self) -> dict[str, float] | None:
        self.left -= 1
        if self.left > 0:
            return None
        self.do("fetched", OSError)
        self.weight_version = self.coming
        return {"fetch_s": 1.0}

    def cancel(self) -> None:
        self.log.append("cancel")


def wake(version: int = 3, role: Role = Role.MIXED) -> Wake:
    return Wake(number=0, role=role, epoch=1, weight_version=version)


def test_wake_and_sleep_change_hands_in_order() -> None:
    parts = Parts()
    assert parts.waking.begin(wake(role=Role.DECODE)) == {"fetch_s": 1.0}
    assert parts.log == ["trainer sleeps", "engine wakes", "fetch 3", "fetched", "role"]
    parts.log.clear()
    parts.waking.fall_asleep()
    parts.waking.fall_asleep()  # done already
    assert parts.log == ["engine sleeps", "trainer wakes"] and parts.weight_version == -1


def test_a_fetch_goes_on_between_other_things() -> None:
    parts = Parts()
    parts.polls = 3
    assert parts.waking.begin(wake()) is None and parts.waking.under_way is not None
    assert parts.waking.poll() is None
    assert parts.waking.poll() == {"fetch_s": 1.0} and parts.waking.under_way is None


def test_new_enough_weights_are_not_fetched() -> None:
    parts = Parts(lends=False, version=5)
    assert parts.waking.begin(wake(5)) == {}
    assert parts.log == ["engine wakes"]
    assert parts.waking.begin(Fetch(number=1, weight_version=4)) == {}


@pytest.mark.parametrize("what", ["engine wakes", "fetch 3", "fetched"])
def test_what_fails_gives_the_device_back_to_the_trainer(what: str) -> None:
    parts = Parts()
    parts.failing = {what}
    with pytest.raises(ValueError, match=f"{what}: no"):
        parts.waking.begin(wake())
    assert parts.asleep and parts.log[-1] == "trainer wakes" and parts.waking.under_way is None
    parts.failing = set()
    assert parts.waking.begin(wake()) == {"fetch_s": 1.0}


def test_a_trainer_that_cannot_come_back_is_tried_again() -> None:
    parts = Parts()
    parts.waking.begin(wake())
    parts.failing = {"trainer wakes"}
    with pytest.raises(ValueError, match="trainer wakes: no"):
        parts.waking.fall_asleep()
    parts.failing = set()
    parts.log.clear()
    parts.waking.fall_asleep()
    assert parts.log == ["trainer wakes"]


def test_a_newer_version_that_cannot_be_had_leaves_the_one_that_is_served() -> None:
    parts = Parts(lends=False, version=2)
    parts.asleep, parts.failing = False, {"fetched"}
    with pytest.raises(ValueError, match="fetched: no"):
        parts.waking.begin(Fetch(number=1, weight_version=3))
    assert not parts.asleep and parts.weight_version == 2


def test_a_new_order_ends_what_is_under_way() -> None:
    parts = Parts()
    parts.polls = 9
    parts.waking.begin(wake())
    parts.waking.fall_asleep()
    assert "cancel" in parts.log and parts.log[-1] == "trainer wakes" and parts.waking.under_way is None
