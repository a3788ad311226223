"""What serving costs here: one engine is measured for about a minute, and a cost profile of it is written.

    python -m pearl.rl.measure_costs [MODEL_FOLDER] --out costs.json [--gpu NAME] [--dtype float32] [--kernels auto]

Without a folder it measures the quickstart's fresh model. Owns the measuring: decode steps over batch and context, prefills
over new tokens and prefix, KV moved between two engines, a change of role, sleep and wake. It decides nothing. Each figure is
the median of several; step times are fitted by least squares of relative errors with no negative coefficient. `prepare` is
building the engine, `borrow` and `give_back` its wake and sleep alone: what a trainer takes on top is for the job's telemetry
to say.
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
from pathlib import Path
from typing import Any

import numpy as np

from pearl.config import EngineConfig, ModelOptions
from pearl.engine.engine import Engine
from pearl.engine.models.config import ModelConfig, from_folder, from_hf
from pearl.protocol import Role, SamplingParams
from pearl.rl.fresh_model import model_settings
from pearl.sched.cost_profile import (
    CHANGES,
    ChangeCost,
    CostKey,
    CostProfile,
    DecodeCost,
    PrefillCost,
    read_profiles,
    write_profiles,
)
from pearl.sched.fit import relative_fit

Timer = Callable[[], float]


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured: every batch at every context (tokens), every number of new tokens on every prefix."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (64, 192, 384)
    new: tuple[int, ...] = (16, 64, 128, 256)
    prefixes: tuple[int, ...] = (0, 64, 192)
    prompts: tuple[int, ...] = (1, 4)
    steps: int = 24
    rounds: int = 3

    @property
    def longest(self) -> int:
        return max(max(self.contexts) + self.steps, max(self.prefixes) + max(self.new)) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """(batch, context, seconds) of decode steps, (prompts, new, prefix, seconds) of prefills, and of steps that do both
    (batch, context, new, seconds).

    `new` and `prefix` are of each prompt.
    """

    decode: tuple[tuple[float, float, float], ...]
    prefill: tuple[tuple[float, float, float, float], ...]
    mixed: tuple[tuple[float, float, float, float], ...] = ()


class Measuring:
    """One engine, and prompts that no other one begins with."""

    def __init__(self, build: Callable[[Role], Engine], vocab_size: int, grid: Grid, timer: Timer) -> None:
        self.timer = timer
        began = timer()
        self.engine = build(Role.MIXED)
        self.prepare_s = timer() - began
        self._build, self._vocab, self.grid = build, vocab_size, grid
        self._rng = np.random.default_rng(0)

    def ids(self, count: int) -> list[int]:
        return self._rng.integers(0, self._vocab, count).tolist()

    def steps(self) -> Measured:
        """All of the grid, after one round that warms caches and compilers up."""
        grid = self.grid
        self._decode(grid.batches[0], grid.contexts[0])
        self._prefill(1, grid.new[0], 0)
        decode = [(float(n), c + self.grid.steps / 2, self._decode(n, c)) for n in grid.batches for c in grid.contexts]
        prefill = []
        for new in grid.new:
            for prefix, prompts in itertools.product(grid.prefixes, grid.prompts):
                seconds = statistics.median(self._prefill(prompts, new, prefix) for _ in range(grid.rounds))
                prefill.append((float(prompts), float(new), float(prefix), seconds))
        context = min(grid.contexts)
        mixed = []
        for batch, new in itertools.product(sorted(grid.batches)[-3:], sorted(grid.new)[-3:]):
            mixed.append((float(batch), context + grid.steps / 2, float(new), self._mixed(batch, context, new)))
        return Measured(decode=tuple(decode), prefill=tuple(prefill), mixed=tuple(mixed))

    def _decode(self, batch: int, context: int) -> float:
        """Median seconds of a step in which `batch` sequences of about `context` tokens decode."""
        names, took = self._decoding(batch, context), []
        while self.engine.stats().running == batch and len(took) < self.grid.steps:
            took.append(self._timed(self.engine.step_updates))
        self._abort(names)
        return statistics.median(took)

    def _mixed(self, batch: int, context: int, new: int) -> float:
        """Median seconds of a step in which `batch` sequences decode while a prompt of `new` tokens is computed."""
        names, took = self._decoding(batch, context), []
        while self.engine.stats().running >= batch and len(took) < self.grid.steps:
            ids = self.ids(new)
            began = self.timer()
            self.engine.add_request(ids, _params(1))
            self.engine.step_updates()
            took.append(self.timer() - began)
        self._abort(names)
        return statistics.median(took)

    def _decoding(self, batch: int, context: int) -> list[str]:
        """Requests that have got their first token."""
        names = [self.engine.add_request(self.ids(context), _params(self.grid.steps + 2)) for _ in range(batch)]
        waiting = set(names)
        while waiting:
            waiting -= {update.request_id for update in self.engine.step_updates() if update.token_ids}
        return names

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)
        _drain(self.engine)

    def _prefill(self, prompts: int, new: int, prefix: int) -> float:
        """Seconds in which requests of `new` tokens behind a cached prefix are taken in, computed, and end with one token."""
        engine, shared = self.engine, self.ids(prefix)
        if prefix:
            engine.add_request([*shared, *self.ids(1)], _params(1))
            _drain(engine)
        rows = [shared + self.ids(new) for _ in range(prompts)]

        def serve() -> None:
            for ids in rows:
                engine.add_request(ids, _params(1))
            _drain(engine)

        return self._timed(serve)

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

    def transfer(self, bytes_per_token: float) -> tuple[float, float]:
        """(seconds per transfer, bytes per second) between two engines of this process, by the best transport there is."""
        other = self._build(Role.MIXED)
        lengths = (min(self.grid.contexts), max(self.grid.contexts))
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


def fitted(measured: Measured) -> tuple[DecodeCost, PrefillCost, float]:
    """The costs of a step, and the largest relative error of the fit."""
    decode = [[1.0, n, n * context] for n, context, _ in measured.decode]
    prefill = [[1.0, k, k * new, k * new * (prefix + new / 2)] for k, new, prefix, _ in measured.prefill]
    seconds = [row[-1] for row in measured.decode], [row[-1] for row in measured.prefill]
    (base, per_seq, per_context), decode_error = relative_fit(decode, seconds[0])
    (start, per_prompt, per_token, per_pair), prefill_error = relative_fit(prefill, seconds[1])
    cost = DecodeCost(base_s=base, per_seq_s=per_seq, per_context_s=per_context)
    prompt = PrefillCost(base_s=start, per_prompt_s=per_prompt, per_token_s=max(per_token, 1e-12), per_pair_s=per_pair)
    return cost, prompt, max(decode_error, prefill_error)


def mixing_of(measured: Measured, decode: DecodeCost, prefill: PrefillCost) -> float:
    """Share of the smaller part that a step which does both pays for on top of the larger, as `sched.sim.pricing` prices it."""
    shares = []
    for batch, context, new, seconds in measured.mixed:
        parts = sorted((float(decode.seconds(batch, context)), float(prefill.seconds(new, 0.0))))
        shares.append((seconds - parts[1]) / parts[0])
    return min(1.0, max(0.0, statistics.median(shares))) if shares else 1.0


def measure(
    config: EngineConfig, name: str, gpu: str, grid: Grid, timer: Timer = time.perf_counter
) -> tuple[CostProfile, float]:
    """The profile of an engine of these settings (`model` is a ModelConfig), and the largest error of its step times."""
    measuring = Measuring(lambda role: Engine(replace(config, role=role), text=False), config.model.vocab_size, grid, timer)
    engine = measuring.engine
    measured = measuring.steps()
    decode, prefill, error = fitted(measured)
    bytes_per_token = float(engine.model_config.kv_bytes_per_token)
    base_s, rate = measuring.transfer(bytes_per_token)
    profile = CostProfile(
        key=CostKey(gpu=gpu, model=name, tp=config.tensor_parallel, kernels=engine.kernels_why.split(" ")[0]),
        decode=decode,
        prefill=prefill,
        kv_bytes_per_token=bytes_per_token,
        kv_capacity_tokens=float(engine.stats().total_blocks * config.block_size),
        transfer_bytes_per_s=rate,
        transfer_base_s=base_s,
        mixing=mixing_of(measured, decode, prefill),
        max_batch=float(max(grid.batches)),
        max_context=float(max(grid.contexts)),
        source=f"measured on one {platform.machine()} machine: {len(grid.batches) * len(grid.contexts)} decode points",
        **measuring.changes(),
    )
    engine.close()
    return profile, error


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
    parser.add_argument("--blocks", type=int, default=2048, help="of the KV pool, of 16 tokens")
    options = parser.parse_args(arguments)
    grid = Grid()
    try:
        model = from_folder(options.model) if options.model else fresh_model(ModelOptions())
        config = EngineConfig(
            model=model,
            dtype=options.dtype,
            kernels=options.kernels,
            load_format="dummy",
            num_blocks=options.blocks,
            max_num_seqs=max(grid.batches),
            max_batch_tokens=max(4096, grid.longest),
            max_model_len=grid.longest,
        )
        name = options.model.name if options.model else "quickstart"
        timer = time.thread_time if options.processor_time else time.perf_counter
        profile, error = measure(config, name, options.gpu, grid, timer)
    except ValueError as wrong:
        parser.exit(2, f"{parser.prog}: {wrong}\n")
    kept = [one for one in read_profiles(options.out) if one.key != profile.key] if options.out.exists() else []
    write_profiles(options.out, [*kept, profile])
    print(f"{profile.key}: largest error of the fit {error:.1%}, written to {options.out}")
    d, p = profile.decode, profile.prefill
    print(f"  decode step  {_formula(d.base_s, ('n', d.per_seq_s), ('n c', d.per_context_s))}")
    per_prompt = (("prompts", p.per_prompt_s), ("new", p.per_token_s), ("new (prefix + new/2)", p.per_pair_s))
    print(f"  prefill      {_formula(p.base_s, *per_prompt)}")
    print(f"  both         the larger + {profile.mixing:.2f} of the smaller")
    for kind in CHANGES:
        print(f"  {kind:<12} {getattr(profile, kind).fixed_s * 1e3:.3f} ms")
    return 0


def _formula(base: float, *terms: tuple[str, float]) -> str:
    return " + ".join([f"{base * 1e3:.4g}", *(f"{value * 1e3:.3g} {name}" for name, value in terms)]) + " ms"


if __name__ == "__main__":
    sys.exit(main())
