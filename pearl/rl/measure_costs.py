"""What serving costs here: engines are measured for about a minute, and a cost profile is written.

    python -m pearl.rl.measure_costs [MODEL_FOLDER] --out costs.json [--gpu NAME] [--dtype float32] [--kernels auto]

Without a folder it measures the quickstart's fresh model. Owns the measuring: steps of requests that come and go (as
`serving_mix.py` plays them), hand-overs between two engines, a change of role, sleep and wake. It decides nothing. Step times
are fitted together, with no negative coefficient; other figures are medians. `prepare` is building the engine, `borrow` and
`give_back` its wake and sleep alone: what a trainer takes on top is for the job's telemetry to say.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pearl.config import EngineConfig, ModelOptions
from pearl.engine.engine import Engine
from pearl.engine.models.config import ModelConfig, from_folder, from_hf
from pearl.protocol import Role, SamplingParams
from pearl.rl.fresh_model import model_settings
from pearl.rl.serving_mix import WARM_UP_STEPS, Conversations, Mix, StepSample, Timer
from pearl.sched.cost_profile import (
    CHANGES,
    ChangeCost,
    CostKey,
    CostProfile,
    DecodeCost,
    HandOverCost,
    PrefillCost,
    read_profiles,
    write_profiles,
)
from pearl.sched.fit import total_fit

BLOCK_SIZE = 16


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured: so many sessions at a time (`batches`), `steps` steps with each, first short ones, then long ones
    (`first`: tokens of their first prompts, from, to).

    A turn appends and generates at most so many tokens (`appended`, `generated`), and pauses for `pause` steps at most.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    first: tuple[tuple[int, int], ...] = ((16, 128), (128, 320))
    appended: int = 48
    generated: int = 32
    pause: int = 12
    steps: int = 32
    rounds: int = 3

    @property
    def longest(self) -> int:
        return max(high for _, high in self.first) + self.appended + 2 * self.generated + 2

    @property
    def blocks(self) -> int:
        """Of BLOCK_SIZE tokens, so that all sessions of the largest batch fit an engine's pool."""
        return max(self.batches) * -(-self.longest // BLOCK_SIZE)

    @property
    def contexts(self) -> tuple[int, int]:
        """Of requests that are moved by themselves."""
        return self.first[0][0], self.first[-1][1]

    def mixes(self) -> list[Mix]:
        appended, generated, pause = (2, self.appended), (2, self.generated), (0, self.pause)
        return [
            Mix(first=first, appended=appended, generated=generated, pause=pause, longest=self.longest) for first in self.first
        ]


class Measuring:
    """One engine, or several that take turns; prompts that no other one begins with."""

    def __init__(
        self, build: Callable[[Role], Engine], vocab_size: int, grid: Grid, timer: Timer, side_by_side: int = 1
    ) -> None:
        self.timer = timer
        began = timer()
        self.engine = build(Role.MIXED)
        self.prepare_s = timer() - began
        self.engines = [self.engine, *(build(Role.MIXED) for _ in range(side_by_side - 1))]
        self._build, self._vocab, self.grid = build, vocab_size, grid
        self._rng = np.random.default_rng(0)

    def ids(self, count: int) -> list[int]:
        return self._rng.integers(0, self._vocab, count).tolist()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def steps(self) -> list[StepSample]:
        """Sessions come and go with every engine, which take turns."""
        found: list[StepSample] = []
        for mix, count in itertools.product(self.grid.mixes(), self.grid.batches):
            played = [Conversations(engine, count, mix, self.timer, self._rng) for engine in self.engines]
            for _ in range(WARM_UP_STEPS + self.grid.steps):
                for one in played:
                    one.step()
            for one in played:
                one.close()
                found += one.samples()[0]
        return found

    def hand_overs(self) -> tuple[list[StepSample], list[StepSample], bool]:
        """Steps of an engine that computes prompts, of one that decodes them, and whether that one copies KV itself."""
        source, target = self.engine, self._build(Role.DECODE)
        source.switch_role(Role.PREFILL)
        given: list[StepSample] = []
        taken: list[StepSample] = []
        copies = True
        for mix, count in itertools.product(self.grid.mixes(), self.grid.batches[::2]):
            played = Conversations(source, count, mix, self.timer, self._rng, decoder=target)
            for _ in range(WARM_UP_STEPS + self.grid.steps):
                played.step()
            played.close()
            copies = copies and not played.waited
            for all_of, some in zip((given, taken), played.samples(), strict=True):
                all_of += some
        target.close()
        source.switch_role(Role.MIXED)
        return given, taken, copies

    def changes(self) -> dict[str, ChangeCost]:
        """A change of role, sleep and wake, building the engine; seconds."""
        roles = [Role.PREFILL, Role.DECODE, Role.MIXED] * self.grid.rounds
        switch = statistics.median(self._timed(lambda role=role: self.engine.switch_role(role)) for role in roles)
        asleep, awake = [], []
        for _ in range(self.grid.rounds):
            asleep.append(self._timed(self.engine.sleep))
            awake.append(self._timed(self.engine.wake))
        measured = {"switch": switch, "give_back": statistics.median(asleep), "borrow": statistics.median(awake)}
        measured["prepare"] = self.prepare_s
        return {kind: ChangeCost(fixed_s=seconds) for kind, seconds in measured.items()}

    def way(self, steps: StepCosts, bytes_per_token: float) -> dict[str, Any]:
        """What a hand-over costs, and how its KV comes, as fields of a CostProfile."""
        given, taken, copies = self.hand_overs()
        give, take, per_token = hand_over_of(given, taken, steps)
        cost = HandOverCost(give_s=give, take_s=take, copies=copies)
        if copies:
            return {"hand_over": cost, "transfer_bytes_per_s": bytes_per_token / max(1e-12, per_token)}
        base_s, rate = self.transfer(bytes_per_token)
        return {"hand_over": cost, "transfer_base_s": max(0.0, base_s - give - take), "transfer_bytes_per_s": rate}

    def transfer(self, bytes_per_token: float) -> tuple[float, float]:
        """(seconds per transfer, bytes per second) between two engines of this process, by the best transport there is."""
        other = self._build(Role.MIXED)
        lengths = self.grid.contexts
        short, long = (statistics.median(self._move(other, n) for _ in range(2 * self.grid.rounds)) for n in lengths)
        other.close()
        rate = (lengths[1] - lengths[0]) * bytes_per_token / max(1e-9, long - short)
        return max(0.0, short - lengths[0] * bytes_per_token / rate), rate

    def _move(self, other: Engine, context: int) -> float:
        """From taking a running request out of one engine to its next token in the other, less that step."""
        name = self.engine.add_request(self.ids(context), _params(8))
        while not any(update.request_id == name and update.token_ids for update in self.engine.step_updates()):
            pass
        began = self.timer()
        transfer = self.engine.export_kv(name)
        taken = other.import_kv(transfer)
        self.engine.finish_export(transfer.transfer_id, taken)
        if not taken:
            raise RuntimeError(f"a request of {context} tokens was not taken in by an idle engine")
        while not any(update.token_ids for update in other.step_updates()):
            self.engine.step_updates()
        took = self.timer() - began
        step = self._timed(other.step_updates)
        _drain(other)
        _drain(self.engine)
        return max(0.0, took - step)

    def _timed(self, call: Callable[[], Any]) -> float:
        began = self.timer()
        call()
        return self.timer() - began


def _drain(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step_updates()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What was fitted; `error` is the median of a step's."""

    decode: DecodeCost
    prefill: PrefillCost
    step_overhead_s: float
    error: float

    def seconds(self, one: StepSample) -> float:
        """A step by itself, hand-overs left out; as `sched.sim.pricing` prices it with `mixing=1`."""
        d, p = self.decode, self.prefill
        decoding = d.per_seq_s * one.batch + d.per_context_s * one.context
        prompts = p.per_prompt_s * one.prompts + p.per_token_s * one.new + p.per_pair_s * one.pairs
        return self.step_overhead_s + decoding + (prompts + p.base_s if one.prompts else 0.0)


def fitted(samples: Sequence[StepSample]) -> StepCosts:
    """All coefficients together. What every step pays, whatever it does, is `step_overhead_s`; then what a step that decodes
    and computes prompts takes is the sum of both, each without it."""
    rows = [[1.0, s.batch, s.context, float(s.prompts > 0), s.prompts, s.new, s.pairs] for s in samples]
    (base, per_seq, per_context, start, per_prompt, per_token, per_pair), error = total_fit(rows, [s.seconds for s in samples])
    return StepCosts(
        decode=DecodeCost(base_s=0.0, per_seq_s=per_seq, per_context_s=per_context),
        prefill=PrefillCost(
            base_s=start, per_prompt_s=per_prompt, per_token_s=max(per_token, 1e-12), per_pair_s=per_pair
        ),
        step_overhead_s=base,
        error=error,
    )


def hand_over_of(
    given: Sequence[StepSample], taken: Sequence[StepSample], steps: StepCosts
) -> tuple[float, float, float]:
    """Seconds that a hand-over adds to steps of its source, to those of its target, and there per token of KV that comes."""
    (give,), _ = total_fit([[s.given] for s in given], [s.seconds for s in given], [steps.seconds(s) for s in given])
    rows = [[s.taken, s.came] for s in taken]
    (take, per_token), _ = total_fit(rows, [s.seconds for s in taken], [steps.seconds(s) for s in taken])
    return give, take, per_token


def measure(
    config: EngineConfig, name: str, gpu: str, grid: Grid, timer: Timer = time.perf_counter, side_by_side: int = 1
) -> tuple[CostProfile, float]:
    """The profile of an engine of these settings (`model` is a ModelConfig), and the median error of its step times.

    `side_by_side` engines take turns while steps are measured, as on a processor that they share: their caches are colder.
    """
    build = partial(_build, config)
    measuring = Measuring(build, config.model.vocab_size, grid, timer, side_by_side)
    engine = measuring.engine
    samples = measuring.steps()
    steps = fitted(samples)
    bytes_per_token = float(engine.model_config.kv_bytes_per_token)
    profile = CostProfile(
        key=CostKey(gpu=gpu, model=name, tp=config.tensor_parallel, kernels=engine.kernels_why.split(" ")[0]),
        decode=steps.decode,
        prefill=steps.prefill,
        step_overhead_s=steps.step_overhead_s,
        kv_bytes_per_token=bytes_per_token,
        kv_capacity_tokens=float(engine.stats().total_blocks * config.block_size),
        max_batch=float(max(grid.batches)),
        max_context=float(grid.longest),
        source=f"measured on one {platform.machine()} machine: {len(samples)} steps of requests that come and go",
        **measuring.way(steps, bytes_per_token),
        **measuring.changes(),
    )
    measuring.close()
    return profile, steps.error


def _build(config: EngineConfig, role: Role) -> Engine:
    return Engine(replace(config, role=role), text=False)


def fresh_model(options: ModelOptions, vocab_size: int = 512) -> ModelConfig:
    """What a run without a model folder serves."""
    return from_hf(model_settings(options, vocab_size, 2, 0))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the profile was written; 2: it cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m pearl.rl.measure_costs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face folder; its sizes matter, not its weights")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of cost profiles; this one is put in or replaced")
    parser.add_argument("--gpu", default=platform.processor() or platform.machine(), help="what the device is called")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--processor-time", action="store_true", help="not the wall's: for a CPU that others use too")
    parser.add_argument("--side-by-side", type=int, default=1, help="engines that take turns meanwhile, as on a shared CPU")
    parser.add_argument("--blocks", type=int, default=2048, help=f"of the KV pool, of {BLOCK_SIZE} tokens")
    options = parser.parse_args(arguments)
    grid = Grid()
    try:
        _at_least("--side-by-side", options.side_by_side, 1, "the engine that is measured")
        _at_least("--blocks", options.blocks, grid.blocks, f"{max(grid.batches)} requests of {grid.longest} tokens")
        model = from_folder(options.model) if options.model else fresh_model(ModelOptions())
        config = EngineConfig(
            model=model,
            dtype=options.dtype,
            kernels=options.kernels,
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_blocks=options.blocks,
            max_num_seqs=max(grid.batches),
            max_batch_tokens=max(4096, grid.longest),
            max_model_len=grid.longest,
        )
        name = options.model.name if options.model else "quickstart"
        timer = time.thread_time if options.processor_time else time.perf_counter
        profile, error = measure(config, name, options.gpu, grid, timer, options.side_by_side)
    except ValueError as wrong:
        parser.exit(2, f"{parser.prog}: {wrong}\n")
    kept = [one for one in read_profiles(options.out) if one.key != profile.key] if options.out.exists() else []
    write_profiles(options.out, [*kept, profile])
    print(f"{profile.key}: median error of a step {error:.1%}, written to {options.out}")
    d, p, h = profile.decode, profile.prefill, profile.hand_over
    print(f"  each step    {_formula(profile.step_overhead_s, ('n', d.per_seq_s), ('n c', d.per_context_s))}")
    per_prompt = (("prompts", p.per_prompt_s), ("new", p.per_token_s), ("new (prefix + new/2)", p.per_pair_s))
    print(f"  with prompts {_formula(p.base_s, *per_prompt)} more")
    way = f"{profile.transfer_base_s * 1e3:.3g} ms and {profile.transfer_bytes_per_s / 1e6:.4g} MB/s"
    print(f"  hand-over    {h.give_s * 1e3:.3g} ms at its source, {h.take_s * 1e3:.3g} ms at its target, {way}")
    for kind in CHANGES:
        print(f"  {kind:<12} {getattr(profile, kind).fixed_s * 1e3:.3f} ms")
    return 0


def _at_least(name: str, value: int, least: int, what: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be >= {least}, for {what}")


def _formula(base: float, *terms: tuple[str, float]) -> str:
    return " + ".join([f"{base * 1e3:.4g}", *(f"{value * 1e3:.3g} {name}" for name, value in terms)]) + " ms"


if __name__ == "__main__":
    sys.exit(main())
