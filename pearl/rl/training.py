"""The order of a training run: warm-up, then collect - train - publish, step by step, with evaluation and checkpoints.

Owns what a step is and its row of metrics. It does not know sockets or processes (`controller.py` carries out its commands)
nor when a group may start (`sched/admission.py`). Invariants: a batch is complete groups in the order of their ids; the
books of the buffer add up after every step; a step's row is on disk before the next step begins.
"""

from __future__ import annotations

import random
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pearl.clock import Clock
from pearl.config import Config
from pearl.engine.tokenizer import Tokenizer
from pearl.metrics.jsonl import JsonlWriter
from pearl.metrics.trackers import trackers_of
from pearl.protocol import Checkpoint, Done, Export, Publish, Restore, Serve, SetReference, TrainSequence, TrainStep
from pearl.rl.algorithms import algorithm_of
from pearl.rl.best_policy import BestPolicy
from pearl.rl.buffer import Buffer
from pearl.rl.checkpoint_folder import TRAINER_FOLDER, CheckpointFolder, load
from pearl.rl.cluster import Cluster
from pearl.rl.collector import Collector
from pearl.rl.controller_state import capture, restore
from pearl.rl.envs import registry as environments
from pearl.rl.layout import JobLayout
from pearl.rl.packing import plan_packing
from pearl.rl.rollout import train_sequence
from pearl.rl.step_metrics import EpisodeRows, StepMeter, batch_metrics
from pearl.rl.types import Group, Trajectory
from pearl.rl.warmup import warmup_sequences
from pearl.sched.admission import Admission

EVAL_SEEDS = 1_000_000_000
"""Environment seeds from here on are for evaluation; training never reaches them."""

FAILURES_IN_A_ROW = 64
"""So many failed trajectories (or a whole batch of them, if that is more) with no other in between end the run: an
environment that can only fail would be started again for ever."""

FILTERED_BATCHES = 3
"""So many batches of groups are given up for their equal rewards in one step, at most: a policy that has solved everything
(or nothing at all) would never fill a batch."""

SEED_STRIDE = 1_000_000
"""Training group k of a run with seed s plays environment seed s * SEED_STRIDE + k (modulo EVAL_SEEDS)."""


class Driver(Protocol):
    """What a run needs of the controller."""

    config: Config
    run: Path
    clock: Clock
    layout: JobLayout
    pool: Any
    cluster: Cluster

    def wait_for(self, ready: Any, limit: str, what: str, *, renew: Any = None) -> None: ...
    def carry_out(self, make: Any, ranks: Any) -> dict[int, Done]: ...
    def notice(self, text: str) -> None: ...
    def report(self, row: dict[str, Any]) -> None: ...


class TrainingRun:
    """One run from its first command, or from a checkpoint, to the last; `run()` returns the sentence that ends it."""

    def __init__(self, driver: Driver, collector: Collector, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self.config = driver.config
        self.buffer = Buffer()
        self._driver = driver
        self._collector = collector
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        groups = self.config.rollout_batch_size // self.config.group_size
        if self.config.max_staleness is None:
            raise ValueError("max_staleness=None: the configuration must be resolved first")
        self._max_staleness = self.config.max_staleness
        self._admission = Admission(groups_per_batch=groups, max_staleness=self._max_staleness)
        self._checkpoints = CheckpointFolder(driver.run, self.config.keep_checkpoints)
        self._best = BestPolicy(driver.run)
        self._rows = JsonlWriter(driver.run / "metrics.jsonl")
        self._trackers = trackers_of(self.config, driver.run)
        self._episodes = JsonlWriter(driver.run / "trajectories.jsonl")
        self._successes: list[float] = []
        self._evaluated: list[Trajectory] = []
        self._lines = EpisodeRows(tokenizer.decode)
        self._filters = algorithm_of(self.config.algorithm).filter_zero_variance
        self._filtered = 0
        self._started = 0
        self._step = 0
        self._record_step = 1
        self._version = 0
        self._failed_in_a_row = 0
        self._breathed = driver.clock.now()
        self._admitting = False

    # ------------------------------------------------------------------------------------------------- the order

    def run(self, checkpoint: Path | None = None) -> str:
        """Plays the run from its beginning or from `checkpoint`."""
        config = self.config
        if checkpoint is None:
            self._warm_up()
            self._train_command(lambda number: SetReference(number=number))
        else:
            self._restore(checkpoint)
        self._publish(self._version)
        self._driver.carry_out(lambda number: Serve(number=number), self._driver.layout.serving)
        self._release()
        self._admitting = True
        meter = StepMeter(self._driver.clock, self._collector, self._driver.layout, barrier=self._max_staleness == 0)
        for step in range(self._step + 1, config.max_steps + 1):
            batch = self._collect()
            self._driver.cluster.measured(batch, meter.collected(), self._driver.clock.now())
            trained = self._train(step, batch)
            published = self._publish(self._version + 1)
            self._version, self._step = self._version + 1, step
            due = config.eval_steps and step % config.eval_steps == 0
            score, eval_s = self._evaluate() if due else (None, 0.0)
            if score is not None:
                self._keep_if_best(score)
            row = self._row(batch, score) | meter.finish(trained, published, eval_s)
            self._rows.write(row)
            for tracker in self._trackers:
                tracker.write(row)
            self._driver.report(row)
            if config.save_steps and (step % config.save_steps == 0 or step == config.max_steps):
                self._save()
            if step < config.max_steps:
                self._release()
            self._record_step = step + 1
        self._admitting = False
        self.admit()  # files what has ended since the last batch was complete
        self._train_command(lambda number: Export(number=number, path=str(self._driver.run / "policy")))
        return self._summary()

    def _train_command(self, make: Any) -> Done:
        """Carries out a command of the training ranks; rank 0 speaks for all."""
        self._claim()
        return self._driver.carry_out(make, self._driver.layout.training)[0]

    def _claim(self) -> None:
        """Takes the trainers' ranks back from whoever uses them, until `_release`."""
        claim = self._driver.cluster.claim
        session = claim.begin(self._driver.clock.now())
        if claim.may_begin < session:
            self._driver.wait_for(lambda: claim.may_begin >= session, "timeouts.command_s", "borrowed ranks to be given back")

    def _release(self) -> None:
        """The trainers' ranks idle from now on."""
        self._driver.cluster.claim.finish(self._unfinished(), self._driver.clock.now())

    def _unfinished(self) -> int:
        """Trajectories that the next batch still needs."""
        return max(0, self.config.rollout_batch_size - self.buffer.ready * self.config.group_size)

    def _publish(self, version: int) -> dict[int, Done]:
        """RuntimeError if the ranks were asked to compare their weights (`check_weights`), and an engine's differ."""
        self._claim()
        self._driver.cluster.publishing(version, self._driver.clock.now())
        everyone = range(self._driver.layout.world)
        done = self._driver.carry_out(lambda number: Publish(number=number, version=version), everyone)
        theirs = done[0].metrics
        for rank in self._driver.layout.serving if self.config.check_weights else ():
            ours = {name: total for name, total in done[rank].metrics.items() if name.startswith("engine/")}
            wrong = [name for name, total in ours.items() if theirs[name.replace("engine/", "trainer/", 1)] != total]
            if wrong or not ours:
                names = ", ".join(name.removeprefix("engine/") for name in wrong[:5]) or "all"
                raise RuntimeError(f"check_weights: version {version} on rank {rank} is not the trainer's: {names} differ")
        self._driver.cluster.published(version, self._driver.clock.now())
        return done

    def _restore(self, checkpoint: Path) -> None:
        state = load(checkpoint)
        self.buffer, unplayed = restore(state)
        self._step, self._version, self._started = state.step, state.weight_version, state.started
        self._record_step = state.step + 1
        self._successes = list(state.successes)
        self._collector.resumed({name: int(count) for name, count in state.counters.items()})
        self._driver.cluster.resumed()
        self._train_command(lambda number: Restore(number=number, path=str(checkpoint / TRAINER_FOLDER)))
        for episode in unplayed:
            self._collector.start(episode.trajectory_id, group_id=episode.group_id, env_seed=episode.env_seed, purpose="train")
        self._driver.notice(f"resumed after step {self._step} with weight version {self._version}")

    def _save(self) -> None:
        """A checkpoint: begun aside, filled by the training ranks, made to count by `commit` after all of them are done."""
        aside = self._checkpoints.begin(self._step)
        self._train_command(lambda number: Checkpoint(number=number, path=str(aside / TRAINER_FOLDER), step=self._step))
        state = capture(
            self.buffer,
            step=self._step,
            weight_version=self._version,
            started=self._started,
            successes=self._successes,
            counters=self._collector.counts,
        )
        self._record_step = self._step + 1  # not before: what a checkpoint holds must survive a rewind to its step
        written = self._checkpoints.committing(self._step, state)
        wait([written], self.config.timeouts.silence_s / 3)  # as a rule it is quick
        self._driver.wait_for(written.done, "timeouts.command_s", "the checkpoint to be on disk")
        written.result()

    def _warm_up(self) -> None:
        options, env = self.config.warmup, self.config.env
        if not options.steps:
            return
        rng, limits = random.Random(self.config.seed), {"max_turns": env.max_turns, "max_model_len": self._max_model_len}
        metrics: dict[str, Any] = {}
        for step in range(1, options.steps + 1):
            sequences = warmup_sequences(
                lambda: environments.make(env.name, **environments.constructor_options(env)),
                self._tokenizer,
                options.episodes,
                rng,
                between=self._breathe,
                **limits,
            )
            metrics = self._train_step(step, "sft", sequences, len(sequences)).metrics
            if step % 10 == 0 or step == options.steps:
                self._driver.notice(f"warm-up {step:>3}/{options.steps}  loss {metrics['loss']:.3f}")

    def _breathe(self) -> None:
        """Lets the loop turn in the middle of long work, now and then: ranks take a controller that says nothing for dead."""
        if self._driver.clock.now() - self._breathed >= self.config.timeouts.heartbeat_s:
            turned = iter((False, True))
            self._driver.wait_for(lambda: next(turned), "timeouts.command_s", "examples to be played")
            self._breathed = self._driver.clock.now()

    def _collect(self) -> list[Group]:
        needed = self._admission.groups_per_batch
        batch: list[Group] | None = None

        def complete() -> bool:
            nonlocal batch
            batch = self.buffer.take(needed, self._version, self._max_staleness)
            return batch is not None

        self._driver.wait_for(
            complete,
            "rollout.request_timeout_s",
            f"a batch of {needed} groups",
            renew=lambda: (self._collector.counts["generated_tokens"], self.buffer.dispatched, self.buffer.dropped.total()),
        )
        assert batch is not None
        self._filtered = 0
        return batch

    def _train(self, step: int, batch: list[Group]) -> Done:
        sequences = [
            train_sequence(trajectory, group=number) for number, group in enumerate(batch) for trajectory in group.trajectories
        ]
        return self._train_step(step, "policy", sequences, self.config.optimizer.mini_batch_size)

    def _train_step(self, step: int, objective: Any, sequences: list[TrainSequence], mini_batch: int) -> Done:
        rng = np.random.default_rng([self.config.seed, step])
        plan = plan_packing(
            [len(sequence.token_ids) for sequence in sequences],
            mini_batch_size=mini_batch,
            micro_batch_tokens=self.config.optimizer.micro_batch_tokens,
            ranks=len(self._driver.layout.training),
            order=rng.permutation(len(sequences)).tolist(),
        )
        return self._train_command(
            lambda number: TrainStep(
                number=number, step=step, objective=objective, sequences=sequences, plan=plan, weight_version=self._version
            )
        )

    def _evaluate(self) -> tuple[float, float]:
        """Greedy episodes on seeds that training never sees: the share that succeeded, and the seconds it took."""
        began = self._driver.clock.now()
        self._evaluated = []
        self._admitting = False
        count = self.config.eval_episodes
        for episode in range(count):
            name = f"eval-{self._step}-{episode}"
            self._collector.start(name, group_id=-1, env_seed=EVAL_SEEDS + episode, purpose="eval")
        self._driver.wait_for(
            lambda: len(self._evaluated) == count,
            "rollout.request_timeout_s",
            "evaluation episodes",
            renew=lambda: (self._collector.counts["generated_tokens"], len(self._evaluated)),
        )
        self._admitting = True
        return sum(trajectory.success for trajectory in self._evaluated) / count, self._driver.clock.now() - began

    def _keep_if_best(self, score: float) -> None:
        if self._best.is_better(score):
            self._train_command(lambda number: Export(number=number, path=str(self._best.path)))
            self._best.note(self._step, score)

    # ------------------------------------------------------------------------------------------------- each turn

    def admit(self) -> None:
        """Called in every turn of the loop: files what ended and starts what may start."""
        for trajectory in self._collector.take_ended():
            self._file(trajectory)
        if not self._admitting:
            return
        room = self._admission.may_start(
            started=self._started,
            trained_batches=self._step,
            dropped=self.buffer.dropped_groups,
            total_batches=self.config.max_steps,
        )
        for _ in range(room):
            self._start_group()
        self._driver.cluster.claim.progress(self._unfinished(), self._driver.clock.now())

    def queues(self) -> dict[str, int]:
        """Where the trajectories are, for people."""
        at_engine = self._collector.at_engine
        return {
            "ready groups": self.buffer.ready,
            "in flight": self.buffer.in_flight,
            "at engine": at_engine,
            "at environment": self._collector.playing - at_engine,
        } | ({"without a worker": self._collector.unplaced} if self._collector.unplaced else {})

    def _start_group(self) -> None:
        group_id, self._started = self._started, self._started + 1
        env_seed = (self.config.seed * SEED_STRIDE + group_id) % EVAL_SEEDS
        spares = self.config.rollout.redundancy
        names = [f"{group_id}-{member}" for member in range(self.config.group_size + spares)]
        self.buffer.dispatch(group_id, env_seed, names, spares)
        for name in names:
            self._collector.start(name, group_id=group_id, env_seed=env_seed, purpose="train")

    def _file(self, trajectory: Trajectory) -> None:
        self._episodes.write({"step": self._record_step} | self._lines.row(trajectory))
        if trajectory.group_id < 0:
            self._evaluated.append(trajectory)
            return
        if not self.buffer.is_running(trajectory):  # its group has enough without it
            return
        self._check_failures(trajectory)
        if trajectory.outcome == "failed" and self._may_retry(trajectory):
            name = f"{trajectory.trajectory_id}r"
            self.buffer.retry(trajectory, name)
            self._collector.start(name, group_id=trajectory.group_id, env_seed=trajectory.env_seed, purpose="train")
            return
        state = self.buffer.finish(trajectory)
        for name in self.buffer.spared(trajectory.group_id) if state == "open" else ():
            self._collector.give_up(name, "its siblings were sooner")
            state = "ready"
        if state == "ready":
            self._filter(trajectory.group_id)

    def _filter(self, group_id: int) -> None:
        """Gives up a complete group that teaches nothing, if such are to be replaced by others."""
        if self._filters and self._filtered < FILTERED_BATCHES * self._admission.groups_per_batch:
            if self.buffer.is_flat(group_id):
                self.buffer.drop_group(group_id, "zero variance")
                self._filtered += 1

    def _check_failures(self, trajectory: Trajectory) -> None:
        """RuntimeError when nothing but failures comes back."""
        self._failed_in_a_row = self._failed_in_a_row + 1 if trajectory.outcome == "failed" else 0
        if self._failed_in_a_row >= max(FAILURES_IN_A_ROW, self.config.rollout_batch_size):
            raise RuntimeError(f"{self._failed_in_a_row} trajectories in a row failed, the last with: {trajectory.error}")

    def _may_retry(self, trajectory: Trajectory) -> bool:
        return trajectory.trajectory_id.count("r") < self.config.env.retries

    # ------------------------------------------------------------------------------------------------- the books

    def _row(self, batch: list[Group], score: float | None) -> dict[str, Any]:
        self.buffer.check()
        counts = {
            "dispatched": self.buffer.dispatched,
            "trained": self.buffer.trained,
            "dropped": self.buffer.dropped.total(),
            "in_flight": self.buffer.in_flight,
            "failed_trajectories": self.buffer.dropped["failed"],
            "filtered_trajectories": self.buffer.dropped["zero variance"],
        }
        environment = {f"env_{name}": self._driver.pool.counts[name] for name in ("errors", "timeouts", "restarts")}
        row = {"step": self._step, "max_steps": self.config.max_steps, "weight_version": self._version}
        row |= batch_metrics(batch, self._version - 1) | counts | environment | {"eval_success_rate": score}
        row |= self._driver.cluster.metrics()
        self._successes.append(row["success_rate"])
        return row

    def _summary(self) -> str:
        last = self._successes[-10:]
        books = self.buffer.counts()
        return (
            f"success {sum(last) / len(last):.3f} (mean of the last {len(last)} steps); trajectories: "
            + ", ".join(f"{name} {count}" for name, count in books.items())
            + f"; policy in {self._driver.run / 'policy'}"
        )
