"""One trace, played by real engines and simulated: the same decisions of the batch scheduler, step by step.

The simulator's cores say what happened to them and in which order; the same happens to engines with a model, whose tokens are
real and their own. What they schedule must be what was simulated, expanded to single steps, hand-overs with their KV included.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import sim_jobs
from sched_cases import LOAD

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.request import Request, SchedulerOutput
from pearl.engine.steady import SteadyCore
from pearl.kv_transfer import KVTransfer
from pearl.protocol import SamplingParams
from pearl.sched.settings import SchedulerSettings
from pearl.sched.sim.plans import EngineSizes, Hardware
from pearl.sched.sim.simulator import Simulation
from pearl.scheduler_options import BorrowSettings, PdSettings

SIZES = EngineSizes(block_size=4, max_num_seqs=6, max_batch_tokens=48, decode_prefill_tokens=12, max_model_len=240)
VOCAB = 128


@dataclass
class Trace:
    """(core, what, payload), in order of time."""

    rows: list[tuple[str, str, Any]] = field(default_factory=list)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("add_request", "arrived", "switch_role", "finish_export"):
            self._wrap(patch, name)
        real, rows = SteadyCore.schedule, self.rows

        def schedule(core: SteadyCore, now: float, num_steps: int = 1) -> SchedulerOutput:
            output = real(core, now, num_steps)
            rows.append((core.name, "output", output))
            return output

        patch.setattr(SteadyCore, "schedule", schedule)

    def _wrap(self, patch: pytest.MonkeyPatch, name: str) -> None:
        real, rows = getattr(SteadyCore, name), self.rows

        def wrapped(core: SteadyCore, *args: Any, **options: Any) -> Any:
            rows.append((core.name, name, _copy(args, options)))
            return real(core, *args, **options)

        patch.setattr(SteadyCore, name, wrapped)


def _copy(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if args and isinstance(args[0], Request):
        return replace(args[0], token_ids=list(args[0].token_ids))
    return args, options


class Live:
    """Real engines that are told what the simulated ones were; `outputs` is what they scheduled, by core."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.folder, self.num_blocks = folder, num_blocks
        self.engines: dict[str, Engine] = {}
        self.outputs: dict[str, list[SchedulerOutput]] = {}
        self.ids: dict[str, list[int]] = {}
        """Of each session, as its engines drew them."""
        self.offers: dict[str, tuple[Engine, KVTransfer]] = {}

    def engine(self, name: str) -> Engine:
        if name not in self.engines:
            config = EngineConfig(
                model=self.folder,
                dtype="float32",
                kernels="reference",
                block_size=SIZES.block_size,
                num_blocks=self.num_blocks,
                max_num_seqs=SIZES.max_num_seqs,
                max_batch_tokens=SIZES.max_batch_tokens,
                max_model_len=SIZES.max_model_len,
                decode_prefill_tokens=SIZES.decode_prefill_tokens,
            )
            engine = self.engines[name] = Engine(config, text=False)
            real, seen = engine._core.schedule, self.outputs.setdefault(name, [])

            def schedule(now: float) -> SchedulerOutput:
                output = real(now)
                seen.append(output)
                return output

            engine._core.schedule = schedule  # type: ignore[method-assign]
        return self.engines[name]

    def play(self, rows: list[tuple[str, str, Any]]) -> None:
        for core, what, payload in rows:
            engine = self.engine(core)
            if what == "output":
                for _ in range(payload.num_steps):
                    self.step(engine)
            elif what == "add_request":
                self.add(engine, payload)
            elif what == "switch_role":
                engine.switch_role(payload[0][0])
                self.collect(engine)
            elif what == "arrived":
                self.hand_over(engine, payload[0][0])

    def step(self, engine: Engine) -> None:
        for completion in engine.step():
            self.ids[completion.request_id.split(".")[0]] += completion.token_ids
        self.collect(engine)

    def collect(self, engine: Engine) -> None:
        for transfer in engine.take_handoffs():
            self.offers[transfer.request_id] = engine, transfer

    def add(self, engine: Engine, request: Request) -> None:
        """Its prompt: what its session has, and as many more tokens as the simulated one has more."""
        session = request.session_id
        assert session is not None
        ids = self.ids.setdefault(session, [])
        rng = random.Random(f"{request.token_ids[0]}" if not ids else f"{request.request_id}")
        ids += [rng.randrange(VOCAB) for _ in range(request.num_prompt_tokens - len(ids))]
        params = SamplingParams(temperature=20.0, seed=int(session), max_tokens=request.max_tokens, ignore_eos=True)
        engine.add_request(
            ids, params, request_id=request.request_id, session_id=session, cache_salt=request.cache_salt,
            most_computed=request.most_computed,
        )  # fmt: skip

    def hand_over(self, engine: Engine, transfer_id: str) -> None:
        """The offer that has arrived in the simulation, by the request's place in the books."""
        source, transfer = self.offers.pop(self.names[transfer_id])
        assert engine.import_kv(transfer)
        source.finish_export(transfer.transfer_id, True)

    names: dict[str, str]
    """Transfer of the simulation -> request."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_models.randomise(hf_models.dense(0), 0)
    return hf_models.save(model, tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize(("mode", "seed", "missed"), [("mixed", 0, 0.0), ("split", 3, 0.0), ("split", 3, 0.4)])
def test_live_engines_decide_as_simulated_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seed: int, missed: float
) -> None:
    """Also what decode workers give back of turns whose prefix is `missed`, and who goes on with that."""
    num_blocks = 60 if mode == "mixed" else 400  # who hands over has room: it is taken earlier than KV comes, but not live
    trace, names = Trace(), dict[str, str]()
    trace.watch(monkeypatch)
    pd = PdSettings(mode=mode, ratio="1:1" if mode == "split" else "auto", append_on_decode="10")
    settings = sim_jobs.settings(
        costs=replace(sim_jobs.SMALL, kv_capacity_tokens=num_blocks * SIZES.block_size),
        workload=replace(LOAD, turns=4, appended=15, generated=15, context=80, longest=200),
        engine=SIZES,
        hardware=Hardware(training_gpus=2, reserved_workers=2, tp=1),
        scheduler=SchedulerSettings(pd=pd, borrow=BorrowSettings(workers="none"), tail_share=0.0),
        max_steps=1,
        miss_share=missed,
    )
    simulation = Simulation(settings, sim_jobs.plans(seed, turns=5, longest=200, tokens=30))
    offered = simulation.dispatcher.offered

    def remember(worker: Any, export: Any) -> None:
        names[export.transfer_id] = export.request.request_id
        offered(worker, export)

    simulation.dispatcher.offered = remember  # type: ignore[method-assign]
    result = simulation.run()
    monkeypatch.undo()
    assert result.counts["turns"] > 12 and result.counts["outputs"] < 0.7 * result.counts["steps"]
    assert (len(names) > 3) == (mode == "split") and (result.counts.get("returned", 0) > 2) == (missed > 0)

    live = Live(folder, num_blocks)
    live.names = names
    live.play(trace.rows)
    cores = {core for core, _, _ in trace.rows}
    assert len(cores) >= 2
    for core in cores:
        simulated = [one for name, what, output in trace.rows if name == core and what == "output" for one in output.expand()]
        assert [_plain(one) for one in live.outputs.get(core, [])] == [_plain(one) for one in simulated], core


def _plain(output: SchedulerOutput) -> tuple[Any, ...]:
    """Of an output all but its number: a live engine counts from its first step, the simulated one from its last role."""
    return output.requests, output.preempted
