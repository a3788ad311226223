"""The simulated trainer: waits for its GPUs, trains a batch for as long as that takes, publishes.

Owns the order of a step's training, as the live run has it: batch complete, `TrainingBegins`, the scheduler's leave, training,
publication, `WeightsPublished`, `TrainingFinished`. It knows no workers. Invariants: one batch at a time, one version each; who
has the next batch at once has not been idle, so nobody is told that it was (`rl/claim.py` in a live run).
"""

from __future__ import annotations

from collections.abc import Callable

from pearl.sched.events import ClusterEvent, TrainingBegins, TrainingFinished, WeightsPublished
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.plans import SimSettings
from pearl.sched.sim.rollout import Batch


class Trainer:
    """`publish(version)` gives the weights to all who serve; `finished(batch, trained_s)` is called when a step is over."""

    def __init__(
        self,
        settings: SimSettings,
        agenda: Agenda,
        emit: Callable[[ClusterEvent], None],
        publish: Callable[[int], None],
        finished: Callable[[Batch, float], None],
    ) -> None:
        self._settings, self._agenda, self._emit, self._publish, self._finished = settings, agenda, emit, publish, finished
        self.version = 0
        self.batch: Batch | None = None
        """The one that is trained, or waits for the GPUs."""
        self.training = False
        self.waited_s = 0.0
        """For GPUs to come back, in all."""
        self._wanted_at = 0.0

    def train(self, batch: Batch) -> None:
        self.batch, self._wanted_at = batch, self._agenda.now
        self._emit(TrainingBegins(step=self.version + 1, deadline=self._agenda.now))

    def may_begin(self, step: int) -> None:
        if self.batch is None or step != self.version + 1 or self.training:
            raise RuntimeError(f"step={step}: nothing to train, or it is being trained already; version {self.version}")
        self.training = True
        self.waited_s += self._agenda.now - self._wanted_at
        tokens = sum(plan.tokens for plan in self.batch.plans)
        s = self._settings
        seconds = s.train_fixed_s + tokens * s.train_s_per_token / s.hardware.training_gpus
        self._agenda.after(seconds, lambda: self._agenda.after(s.publish_s, self._end))

    def _end(self) -> None:
        batch = self.batch
        assert batch is not None
        self.version += 1
        self.batch, self.training = None, False
        self._publish(self.version)
        self._emit(WeightsPublished(version=self.version))
        self._finished(batch, self._agenda.now - self._settings.publish_s)
        if self.batch is None:
            self._emit(TrainingFinished(step=self.version))
