"""The cluster as people see it: who is what, what a finished decision did, and the cluster's part of a step's metrics.

Formatting only; it decides and changes nothing. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pearl.rl.collector import Collector
from pearl.rl.layout import JobLayout
from pearl.rl.members import name_of
from pearl.sched.events import Activity, Zone
from pearl.sched.service import ClusterService
from pearl.sched.state import Worker

EVERYDAY = ("borrow", "give_back")
"""Decisions of every step, which are told by the table alone."""


def role_words(layout: JobLayout, externals: Iterable[int], service: ClusterService | None) -> dict[int, str]:
    """What each member is, in one or two words: train, mixed, prefill, decode, or on its way from one to another."""
    words = {rank: "+".join(layout.roles(rank)) for rank in range(layout.world)}
    words |= dict.fromkeys(externals, "preparing")
    if (layout.takes_turns and len(words) == 1) or service is None:
        return words
    for number in words:
        row = service.scheduler.state.workers.get(name_of(number))
        if row is not None and (row.on_device or (row.zone is Zone.DEDICATED and row.prepared)):
            words[number] = _words(row)
    return words


def decision_line(row: dict[str, Any]) -> str:
    """A row of transitions.jsonl as a sentence; empty for what happens in every step."""
    if row["kind"] in EVERYDAY:
        return ""
    gain = f", to save {row['gain_s']:.2f} s a batch" if row["gain_s"] else ""
    ending = f"took {row['seconds']:.2f} s" if row["ok"] else f"failed: {row['error']}"
    return f"{row['kind']}: {row['before']} -> {row['after']} ({row['cause']}{gain}); {ending}"


def cluster_metrics(service: ClusterService, collector: Collector) -> dict[str, Any]:
    """Of the row of a step; docs/metrics.md explains each key."""
    scheduler, counts = service.scheduler, collector.counts
    predicted = scheduler.prediction.makespan_s if scheduler.prediction is not None else math.inf
    residuals = scheduler.log.take_residuals()
    return {
        "serving_shape": str(scheduler.state.shape()),
        "predicted_rollout_s": predicted if math.isfinite(predicted) else None,
        "rollout_residual": residuals[-1].ratio if residuals else None,
        "transitions": service.finished,
        "handed_over": collector.handoffs.counts["taken"],
        "interrupted": counts["interrupted"],
        "requeued": counts["requeued"],
        "returned": counts["returned"],
        "scheduler_cpu_s": service.seconds,
    }


def _words(row: Worker) -> str:
    """A row of the table as people read it; borrowed ranks are "lent"."""
    lent = "lent " if row.zone is Zone.OVERLAP else ""
    if row.leaving:
        return "leaving"
    if row.activity is not Activity.TRANSITIONING:
        return f"{lent}{row.role}" if row.was_active else "idle"
    if row.was_active and row.next_active:
        return f"{row.role} > {row.next_role}"
    return f"waking {row.next_role}" if row.next_active else f"{lent}{row.role} > asleep"
