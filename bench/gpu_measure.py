"""How the GPU suite measures: times on the device, what the device can do at most, and the rows of the table.

Owns the clock and the arithmetic; what is measured comes as functions. Times are medians over replays of a captured graph where
a capture works (so that they are the device's, not Python's), each after a write that empties the cache. Off a GPU, in the dry
run, the same code times with the wall clock, which says nothing. Not run on a GPU yet.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

CACHE_BYTES = 256 << 20
"""More than the last cache of any of these chips."""
WARM_UPS, REPEATS = 3, 20
MOST_SECONDS = 4.0
"""That one measurement may take beyond its first few runs."""
COPY_BYTES, MATRIX = 4 << 30, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What this device reached today: bytes read and written per second by a copy, and bf16 products in flop per second."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row. `ok`: None says that nothing is demanded. `others`: ms of what else does it. `of_ceiling`: share reached."""

    section: str
    name: str
    ok: bool | None = None
    gap: float | None = None
    ms: float | None = None
    value: float | None = None
    unit: str = ""
    of_ceiling: float | None = None
    target: float | None = None
    others: dict[str, float | str] = field(default_factory=dict)
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in asdict(self).items() if value not in (None, "", {})}


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(run: Callable[[], object], *, graph: bool = True) -> float:
    """Milliseconds of `run`, which must not wait for the device if it is to be captured."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize()
    return statistics.median(_event_times(_captured(run) if graph else run))


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of a graph of `run`; `run` itself where it cannot be captured."""
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    return captured.replay


def _event_times(run: Callable[[], object]) -> list[float]:
    flush = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    until = time.monotonic() + MOST_SECONDS
    while len(times) < REPEATS and (len(times) < WARM_UPS or time.monotonic() < until):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def wall_ms(run: Callable[[], object]) -> float:
    """Milliseconds until `run` has returned and the device is done."""
    synchronise()
    began = time.perf_counter()
    run()
    synchronise()
    return (time.perf_counter() - began) * 1e3


def measure_ceiling(device: torch.device, *, copy_bytes: int = COPY_BYTES, size: int = MATRIX) -> Ceiling:
    """Best of both on random numbers: a product of zeros is faster than any real one."""
    source = torch.randint(0, 255, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_ms = median_ms(functools.partial(target.copy_, source))
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product_ms = median_ms(functools.partial(torch.matmul, a, b))
    return Ceiling(bytes_per_s=2e3 * copy_bytes / copied_ms, flop_per_s=2e3 * size**3 / product_ms)


def gap(found: Tensor, exact: Tensor) -> float:
    """The greatest difference relative to the greatest number; NaN anywhere gives NaN, which no limit admits."""
    if found.shape != exact.shape:
        raise ValueError(f"shape {tuple(found.shape)}: must be {tuple(exact.shape)}")
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())


def floor_ms(nbytes: int, flop: int, ceiling: Ceiling) -> float:
    """No less time than this is possible at what was measured."""
    return max(nbytes / ceiling.bytes_per_s, flop / ceiling.flop_per_s) * 1e3


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Aligned columns: what, whether it is as demanded, the gap to float64, times and shares."""
    cells = [["section", "what", "ok", "gap", "ms", "of ceiling", "value", "others, ms"]]
    for row in rows:
        others = ", ".join(f"{name} {_number(ms)}" for name, ms in row.get("others", {}).items())
        share = _number(row.get("of_ceiling")) + (f" (>= {row['target']:.2g})" if "target" in row else "")
        ok = {True: "yes", False: "NO"}.get(row.get("ok"), "")  # type: ignore[call-overload]
        value = f"{_number(row['value'])} {row.get('unit', '')}" if "value" in row else ""
        last = "; ".join(part for part in (others, row.get("note", "")) if part)
        cells.append([row["section"], row["name"], ok, _number(row.get("gap")), _number(row.get("ms")), share, value, last])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.3g}"
