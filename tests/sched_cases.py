"""A small cluster on paper: costs and workloads with round numbers, and a driver that carries commands out at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pearl.sched.cluster_scheduler import ClusterScheduler
from pearl.sched.commands import Admit, Borrow, GiveBack, Leave, Prepare, SetRole
from pearl.sched.cost_profile import ChangeCost, CostKey, CostProfile, DecodeCost, PrefillCost
from pearl.sched.events import OrderDone, Tick, WorkerGone, WorkerJoined, WorkerRole, Zone
from pearl.sched.profile import RuntimeProfile
from pearl.sched.published import qwen3_8b_h800, software_engineering
from pearl.sched.settings import SchedulerSettings
from pearl.sched.workload import Workload

COSTS = CostProfile(
    key=CostKey(gpu="paper", model="round", tp=1, kernels="none"),
    decode=DecodeCost(base_s=0.01, per_seq_s=1e-4, per_context_s=1e-7),
    prefill=PrefillCost(base_s=0.01, per_token_s=1e-4, per_pair_s=1e-9),
    kv_bytes_per_token=1e5,
    kv_capacity_tokens=100_000,
    transfer_bytes_per_s=1e10,
    switch=ChangeCost(fixed_s=0.5),
    borrow=ChangeCost(fixed_s=2.0, per_worker_s=0.1),
    give_back=ChangeCost(fixed_s=1.0, per_worker_s=0.1),
    prepare=ChangeCost(fixed_s=50.0),
    finalise=ChangeCost(fixed_s=5.0),
)

LOAD = Workload(batch=64, turns=20, appended=400, generated=100, context=4000, longest=9000, env_s=0.5)


def busy_load(batch: float = 64) -> Workload:
    """Of software engineering agents with quick environments: splitting pays from a few workers on."""
    return replace(software_engineering(batch), env_s=0.5)


def joined(name: str, number: int, **options: Any) -> WorkerJoined:
    """A worker of two GPUs; overlap workers and trainers of one number share theirs."""
    return WorkerJoined(worker=name, gpus=frozenset((f"g{2 * number}", f"g{2 * number + 1}")), **options)


class Driver:
    """Carries out what a ClusterScheduler orders, `delay` seconds later; what it gave is in `done`.

    `broken` workers fail every order, `silent` ones never answer.
    """

    def __init__(self, settings: SchedulerSettings | None = None, load: Workload | None = None, **costs: Any) -> None:
        profile = RuntimeProfile(replace(qwen3_8b_h800(), **costs), load or busy_load())
        self.scheduler = ClusterScheduler(settings or SchedulerSettings(), profile)
        self.now = 0.0
        self.done: list[Any] = []
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.delay = 1.0
        self._answers: list[tuple[float, Any]] = []

    def send(self, event: Any) -> list[Any]:
        """One event; the table holds after it."""
        commands = self.scheduler.on_event(event, self.now)
        self.scheduler.state.check()
        self.done += commands
        for command in commands:
            members = command.members if isinstance(command, Admit) else [command]
            for one in members:
                if isinstance(command, Admit | Borrow | GiveBack | Prepare | SetRole) and one.worker not in self.silent:
                    ok = one.worker not in self.broken
                    answer = OrderDone(worker=one.worker, epoch=one.epoch, ok=ok, seconds=self.delay)
                    self._answers.append((self.now + self.delay, answer))
            if isinstance(command, Leave):
                self._answers.append((self.now + self.delay, WorkerGone(worker=command.worker, reason="left")))
        return commands

    def run(self, seconds: float, tick: float = 1.0) -> None:
        """Time passes; answers arrive, ticks are sent."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            due = [answer for at, answer in self._answers if at <= self.now]
            self._answers = [one for one in self._answers if one[0] > self.now]
            for answer in due:
                self.send(answer)
            self.send(Tick())

    def start(self, dedicated: int, overlap: int = 0, role: WorkerRole = WorkerRole.MIXED) -> None:
        """So many dedicated workers d0.. that serve, and trainers t0.. with overlap workers o0.. on their GPUs."""
        for number in range(overlap):
            self.scheduler.state.apply(joined(f"t{number}", number, zone=Zone.OVERLAP, role=WorkerRole.TRAINING), self.now)
            self.scheduler.state.apply(joined(f"o{number}", number, zone=Zone.OVERLAP, active=False), self.now)
        for number in range(dedicated):
            self.scheduler.state.apply(joined(f"d{number}", overlap + number, role=role), self.now)
            self.scheduler.router.add_worker(f"d{number}")

    @property
    def shape(self) -> str:
        return str(self.scheduler.state.shape())

    def kinds(self) -> list[str]:
        return [decision.kind for decision in self.scheduler.log.take()]
