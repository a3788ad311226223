"""What is proposed for a cluster that could borrow: changes of role that last as long as the loan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sched_cases import Driver

from pearl.sched.cost_profile import ChangeCost
from pearl.sched.events import TrainingBegins, TrainingFinished
from pearl.sched.policy import SwitchGate
from pearl.sched.proposal import Adviser
from pearl.sched.settings import BorrowSettings, PdSettings, SchedulerSettings

EAGER = PdSettings(mode_threshold=0.001, ratio_threshold=0.001)


@pytest.mark.parametrize(
    ("dedicated", "lent", "share", "switch_s", "shape"),
    [
        (8, 0, 1.0, 5.0, "3P5D"),
        (8, 0, 1.0, 10.0, "8M"),
        (4, 4, 1.0, 3.0, "3P5D"),
        (4, 4, 1.0, 5.0, "8M"),
        (4, 4, 0.5, 3.0, "8M"),
        (4, 4, 0.5, 1.0, "3P5D"),
    ],
)
def test_roles_that_change_for_a_loan_change_back_after_it(
    dedicated: int, lent: int, share: float, switch_s: float, shape: str
) -> None:
    """Of eight workers a split saves 7.2 s of a batch; for a loan it has to pay twice, and out of what is left of the batch."""
    mixed = SchedulerSettings(pd=PdSettings(mode="mixed"), borrow=BorrowSettings(workers="none"))
    driver = Driver(mixed, switch=ChangeCost(fixed_s=switch_s), borrow=ChangeCost(), give_back=ChangeCost())
    driver.start(dedicated, overlap=lent)
    driver.send(TrainingBegins(step=0, deadline=0.0))
    driver.send(TrainingFinished(step=0))
    scheduler = driver.scheduler
    situation = replace(scheduler.situation(0.0), unfinished=share * scheduler.batch)
    adviser = Adviser(SchedulerSettings(pd=EAGER), scheduler.profile, scheduler.batch)
    proposal = adviser.propose(situation, SwitchGate(EAGER), 0.0)
    assert proposal.kind == ("borrow" if lent else "switch") and proposal.target is not None
    assert str(proposal.target.shape) == shape


@pytest.mark.parametrize(
    ("share", "switch_s", "act"), [(1.0, 3.0, True), (1.0, 5.0, False), (0.5, 3.0, False), (0.0, 0.1, False)]
)
def test_so_do_roles_that_change_in_the_middle_of_one(share: float, switch_s: float, act: bool) -> None:
    mixed = SchedulerSettings(pd=PdSettings(mode="mixed"), borrow=BorrowSettings(workers="all"))
    driver = Driver(mixed, switch=ChangeCost(fixed_s=switch_s), borrow=ChangeCost(), give_back=ChangeCost())
    driver.start(4, overlap=4)
    driver.send(TrainingBegins(step=0, deadline=0.0))
    driver.send(TrainingFinished(step=0))
    driver.run(5)
    scheduler = driver.scheduler
    situation = replace(scheduler.situation(driver.now), unfinished=share * scheduler.batch)
    adviser = Adviser(SchedulerSettings(pd=EAGER), scheduler.profile, scheduler.batch)
    proposal = adviser.propose(situation, SwitchGate(EAGER), 0.0)
    assert str(situation.shape) == "8M" and proposal.kind == "switch" and proposal.verdict.act == act
