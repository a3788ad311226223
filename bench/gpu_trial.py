"""One case of the GPU suite, tried: on a GPU (checked and timed), in Triton's interpreter (checked), or compiled for a chip.

Owns what is demanded of a case; the problems come from the case lists. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from bench.gpu_cases import TOLERANCE, Case, Inputs
from bench.gpu_measure import Ceiling, Outcome, floor_ms, median_ms
from pearl.engine.kernels.triton.launch import run

SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def checked(case: Case, random: np.random.Generator, device: torch.device, dtypes: Sequence[torch.dtype]) -> tuple[bool, str]:
    """Whether the small problem's gaps are within the tolerance in every dtype, and what they are."""
    gaps = {}
    for dtype in dtypes:
        problem = case.make(Inputs(device, dtype, random), **case.small)
        gaps[dtype] = problem.check(problem.run(run))
    # As a comparison that NaN fails.
    right = all(value <= TOLERANCE[dtype] for dtype, value in gaps.items())
    return right, "small: " + ", ".join(f"{SHORT[dtype]} {value:.1e}" for dtype, value in gaps.items())


def tried(case: Case, random: np.random.Generator, ceiling: Ceiling, chips: Sequence[int]) -> list[Outcome]:
    """On this GPU: the small problem in every dtype, the real one in bf16, its time, and the times of others."""
    device = torch.device("cuda", torch.cuda.current_device())
    right, note = checked(case, random, device, list(SHORT))
    problem = case.make(Inputs(device, torch.bfloat16, random), **case.real)
    gap = problem.check(problem.run(run))
    ms = median_ms(lambda: problem.run(run))
    share = floor_ms(problem.nbytes, problem.flop, ceiling) / ms
    by_flop = problem.flop / ceiling.flop_per_s > problem.nbytes / ceiling.bytes_per_s
    value, unit = (problem.flop / ms / 1e9, "TFLOP/s") if by_flop else (problem.nbytes / ms / 1e6, "GB/s")
    others: dict[str, float | str] = {}
    for name, other in problem.others.items():
        others[name] = _time_of(other)
    ok = right and gap <= TOLERANCE[torch.bfloat16] and (case.target is None or share >= case.target)
    return [
        Outcome(
            section=case.section, name=case.name, ok=ok, gap=gap, ms=ms, value=value, unit=unit, of_ceiling=share,
            target=case.target, others=others, note=note,
        )
    ]  # fmt: skip


def _time_of(other: Callable[[], object]) -> float | str:
    """Milliseconds, or in a word why there are none: somebody else's failure is not ours."""
    try:
        with torch.inference_mode():
            return median_ms(other)
    except Exception as error:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return f"({type(error).__name__})"


def interpreted(case: Case, random: np.random.Generator, ceiling: Ceiling, chips: Sequence[int]) -> list[Outcome]:
    """The small problem in Triton's interpreter, which takes bfloat16 for integers."""
    right, note = checked(case, random, torch.device("cpu"), [torch.float32, torch.float16])
    return [Outcome(section=case.section, name=f"{case.name}: interpreted", ok=right, note=note)]


def compiled(case: Case, random: np.random.Generator, ceiling: Ceiling, chips: Sequence[int]) -> list[Outcome]:
    """The real problem's launches compiled for chips that are not here: shared memory within the chip, no spills."""
    from pearl.engine.kernels.triton.aot import SHARED_LIMIT, Recorder, compile_launch

    problem = case.make(Inputs(torch.device("meta"), torch.bfloat16, random), **case.real)
    rows = []
    for chip in chips:
        recorder = Recorder(chip)
        outputs = problem.run(recorder)
        made = list(map(partial(compile_launch, chip=chip), {one.key(): one for one in recorder.launches}.values()))
        fits = all(one.shared_bytes <= SHARED_LIMIT[chip] for one in made)
        shapes = " ".join("x".join(map(str, output.shape)) for output in outputs)
        note = "; ".join(f"{one.name} {one.registers} r, {one.local_bytes} s, {one.shared_bytes} B" for one in made)
        ok = bool(made) and fits and not any(one.local_bytes for one in made)
        rows.append(Outcome(section=case.section, name=f"{case.name}: sm_{chip}", ok=ok, note=f"{note}; gives {shapes}"))
    return rows
