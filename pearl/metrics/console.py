"""What a person reads while a job runs: plain lines, one per step. Formatting only; `print` is the caller's."""

from __future__ import annotations

from typing import Any


def step_line(row: dict[str, Any]) -> str:
    """One line for a row of metrics.jsonl (keys as in docs/metrics.md)."""
    split = " ".join(f"{name} {row[f'{name}_s']:.2f}" for name in ("rollout", "train", "publish", "other"))
    evaluation = f"  eval {row['eval_success_rate']:.2f}" if row.get("eval_success_rate") is not None else ""
    gap = f"  gap {row['logprob_gap']:.0e}" if row.get("logprob_gap") is not None else ""
    return (
        f"step {row['step']:>4}/{row['max_steps']}  reward {row['reward_mean']:+.3f}  success {row['success_rate']:.2f}"
        f"{evaluation}  {count(row['tokens_per_s'])} tok/s  {row['time_s']:.2f} s ({split}){gap}"
    )


def count(value: float) -> str:
    """1234 -> '1.2k'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """75.3 -> '1 min 15 s'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
