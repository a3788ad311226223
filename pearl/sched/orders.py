"""What an order to one worker is called: the row it had, and what it is to become, as a command.

Owns the wording, and nothing else: whether to order is `cluster_scheduler.py`. Pure.
"""

from __future__ import annotations

from pearl.sched.commands import Borrow, GiveBack, Leave, Member, Prepare, SetRole
from pearl.sched.events import WorkerRole, Zone
from pearl.sched.state import ClusterState, Worker

Order = Prepare | Member | SetRole | Borrow | GiveBack | Leave


def word_order(
    state: ClusterState, was: Worker, role: WorkerRole, *, active: bool, leaving: bool, decision: int, due: float
) -> Order:
    """`was` is the row before the order, whose epoch is one more. `due`: when the trainer will need its GPUs."""
    epoch = was.epoch + 1
    if leaving or was.leaving:
        return Leave(decision=decision, worker=was.name, epoch=epoch, deadline=was.deadline)
    if not active and not was.prepared:
        return Prepare(decision=decision, worker=was.name, epoch=epoch)
    if not active:
        deadline = state.training_deadline if state.training == "wanted" else due
        return GiveBack(decision=decision, worker=was.name, epoch=epoch, deadline=deadline)
    if was.was_active:
        return SetRole(decision=decision, worker=was.name, epoch=epoch, role=role)
    if was.zone is Zone.OVERLAP:
        version = state.weight_version
        return Borrow(decision=decision, worker=was.name, epoch=epoch, role=role, weight_version=version)
    return Member(worker=was.name, epoch=epoch, role=role)


def kind_of(before: Worker) -> str:
    """Which of `cost_profile.CHANGES` the order was that a worker in this row was to carry out."""
    if not before.prepared:
        return "prepare"
    if before.zone is Zone.OVERLAP and not (before.was_active and before.next_active):
        return "borrow" if before.next_active else "give_back"
    return "switch" if before.was_active else "finalise"
