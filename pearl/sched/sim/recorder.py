"""What a simulated run measures: per interval, per RL step, and as telemetry for the scheduler, as a live run would report it.

Owns the sums and turns them into `results` and `StepTelemetry`. It changes nothing of the run. Invariant: every token drawn or
computed is counted in one interval and one step.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pearl.protocol import Role, StepSums
from pearl.sched.found_prefixes import FoundPrefixes
from pearl.sched.profile import StepTelemetry
from pearl.sched.sim.episode import Episode
from pearl.sched.sim.plans import TrajectoryPlan
from pearl.sched.sim.pricing import StepPrice
from pearl.sched.sim.results import IntervalRecord
from pearl.sched.step_samples import StepSamples, told
from pearl.sched.workload import QUANTILES


class Recorder:
    """Called with what happens; `sample` once per tick, `close_interval` and `telemetry` at their times."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.intervals: list[IntervalRecord] = []
        self._roles: Counter[str] = Counter()
        self._samples = 0
        self.interval_from = 0.0
        self._interval_counts: Counter[str] = Counter()
        self._step_counts: Counter[str] = Counter()
        self._pieces: dict[str, tuple[int, float]] = {}
        """By worker: tokens and seconds of its last steps, if these gave no token. As a live member tells it (`rl/serving.py`),
        pieces of long prompts are part of the next step that does."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._steps = StepSamples()
        self._prefixes = FoundPrefixes()
        self._turns = self._local = self._local_tokens = 0
        self._contexts = self._flight_s = 0.0

    # ------------------------------------------------------------------------------------------------ what happens

    def stepped(self, worker: str, cost: StepPrice, steps: int, preempted: int, drawn: int, prompts: int) -> None:
        """This worker finished an output of so many steps, which gave `drawn` tokens, `prompts` of them a request's first."""
        self.counts["steps"] += steps
        self.counts["outputs"] += 1
        self.counts["preemptions"] += preempted
        self.counts["computed"] += cost.new
        self.counts["generated"] += drawn
        new, seconds = self._pieces.pop(worker, (0, 0.0))
        if steps > 1:
            new, seconds = 0, 0.0  # nobody goes on with what these were pieces of
        if not drawn:
            self._pieces[worker] = new + cost.new, seconds + cost.seconds
            return
        sums = step_sums(cost, steps, drawn, prompts, new, seconds)
        if sums is not None:
            self._steps.add(sums)

    def placed(self, role: Role, episode: Episode) -> None:
        """A turn's request goes to a worker of this role."""
        episode.apart = role is Role.PREFILL
        if role is Role.DECODE and episode.turn and not episode.drawn:
            self._local += 1
            self._local_tokens += episode.current.appended

    def request_over(self, cached: int, episode: Episode) -> None:
        """A turn's tokens are complete; `cached` tokens of its prompt were found."""
        self.counts["turns"] += 1
        self._turns += 1
        self._contexts += len(episode.ids)
        if episode.turn:
            last = episode.plan.turns[episode.turn - 1].generated
            self._prefixes.add(known=episode.known, generated=last, cached=cached, apart=episode.apart)

    def sample(self, roles: dict[str, float], in_flight: int, seconds: float) -> None:
        """How it looks now; counts for `seconds`."""
        self._roles.update(roles)
        self._samples += 1
        self._flight_s += in_flight * seconds

    # ------------------------------------------------------------------------------------------------ what it was like

    def close_interval(self, now: float, in_flight: int, kv_use: float) -> None:
        """Enters the interval since the last one."""
        if now <= self.interval_from:
            return
        generated, computed = self._since(self._interval_counts)
        record = IntervalRecord(
            at_s=self.interval_from,
            seconds=now - self.interval_from,
            generated=generated,
            computed=computed,
            roles={name: count / max(1, self._samples) for name, count in sorted(self._roles.items())},
            in_flight=in_flight,
            kv_use=kv_use,
        )
        self.intervals.append(record)
        self._roles.clear()
        self._samples, self.interval_from = 0, now

    def step_tokens(self) -> tuple[int, int]:
        """(generated, computed) since the last call."""
        return self._since(self._step_counts)

    def _since(self, before: Counter[str]) -> tuple[int, int]:
        found = tuple(self.counts[name] - before[name] for name in ("generated", "computed"))
        before["generated"], before["computed"] = self.counts["generated"], self.counts["computed"]
        return found  # type: ignore[return-value]

    def telemetry(self, plans: list[TrajectoryPlan], overhead_s: float) -> StepTelemetry:
        """Of the step whose batch these trajectories are; begins a new one."""
        turns = np.array([len(plan.turns) for plan in plans], dtype=np.float64)
        every = [turn for plan in plans for turn in plan.turns]
        seen, decode_share = max(1, self._turns), self._steps.decode_share(self._flight_s)
        decode, prefill = self._steps.take()
        measured = StepTelemetry(
            trajectories=len(plans),
            turns=float(turns.mean()),
            appended=float(np.mean([turn.appended for turn in every])),
            generated=float(np.mean([turn.generated for turn in every])),
            first_prompt=float(np.mean([plan.first_prompt for plan in plans])),
            context=self._contexts / seen if self._turns else None,
            longest=float(max(plan.tokens for plan in plans)),
            env_s=sum(plan.reset_s + sum(turn.env_s for turn in plan.turns) for plan in plans) / len(every),
            overhead_s=overhead_s,
            miss_share=self._prefixes.take(),
            local_share=self._local / seen if self._turns else None,
            local_appended=self._local_tokens / self._local if self._local else None,
            decode_share=decode_share,
            turn_quantiles=tuple((np.quantile(turns, QUANTILES) / turns.mean()).tolist()),
            decode=decode,
            prefill=prefill,
        )
        self._begin_step()
        return measured


def step_sums(
    cost: StepPrice, steps: int, drawn: int, prompts: int, new: int = 0, seconds: float = 0.0
) -> StepSums | None:
    """An output of so many steps, as a member of a live job tells of it: the context is the mean of all who ran, prompts are
    those of which the first token was drawn. None where that tells nothing. `new` tokens were computed in so many `seconds`
    by the steps before, which gave none."""
    step = told(computed=new + cost.new + cost.batch, batch=drawn // steps, prompts=prompts)
    if step is None:
        return None
    prefill, size, decodes = step
    context = (cost.batch * cost.context + cost.chunks * cost.prefix + cost.new) / max(1, cost.batch + cost.chunks)
    return StepSums(
        prefill=prefill,
        count=steps,
        size=steps * size,
        context=steps * context,
        decodes=steps * decodes,
        prompts=steps * max(1, prompts),
        seconds=seconds + cost.seconds,
    )
