"""Qwen3-8B and Qwen3-30B-A3B on workers of two H800 or H200: what a simulated cluster is made of, each figure with its source.

Owns numbers. [P] printed in a paper or by a project, [M] kernel times of a public database, fitted, [A] our assumption.
Nothing here was measured by this project on a GPU.

H800 serving and reconfiguration: `sched/published.py`.
H200 serving [M]: kernel sums of the AIConfigurator 0.12 database (SGLang 0.5.14, H200 SXM, tp 2; 54 decode, 33 prefill points
per model), fitted by least squares of relative errors; largest error 8B 10 % (prefill) and 4 % (decode), 30B-A3B 6 % and 9 %.
H200 KV: 0.85 of 2 x 141 GB [P] less the weights, 16.4 and 61.1 GB, over 147,456 and 98,304 bytes per token [P].
H200 reconfiguration [A]: that of H800; the times are those of processes, links and host memory, which are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from pearl.sched.cost_profile import CostKey, CostProfile, DecodeCost, PrefillCost, read_profiles
from pearl.sched.published import qwen3_8b_h800, qwen3_30b_a3b_h800
from pearl.sched.sim.workload import FROZEN_LAKE, SOFTWARE, TaskFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A worker's costs, what training and publishing take, and the work it is for.

    `train_s_per_token` are GPU-seconds; `rebuild_s` is a change of role that captures its graphs anew, as systems take that do
    not change roles in place.
    """

    name: str
    costs: CostProfile
    family: TaskFamily
    train_s_per_token: float
    publish_s: float
    rebuild_s: float


def _qwen3_8b_h200() -> CostProfile:
    return replace(
        qwen3_8b_h800(),
        key=CostKey(gpu="H200", model="Qwen3-8B", tp=2, kernels="sglang"),
        decode=DecodeCost(base_s=3.40e-3, per_seq_s=3.9e-6, per_context_s=1.67e-8),  # [M]
        prefill=PrefillCost(base_s=3.31e-3, per_token_s=1.249e-5, per_pair_s=4.32e-10),  # [M]
        kv_capacity_tokens=1_514_000,
    )


def _qwen3_30b_a3b_h200() -> CostProfile:
    return replace(
        qwen3_30b_a3b_h800(),
        key=CostKey(gpu="H200", model="Qwen3-30B-A3B", tp=2, kernels="sglang"),
        decode=DecodeCost(
            base_s=3.10e-3, per_seq_s=3.67e-5, per_context_s=1.14e-8, experts_s=4.85e-3, expert_keep=15 / 16
        ),  # [M]
        prefill=PrefillCost(base_s=1.125e-2, per_token_s=7.34e-6, per_pair_s=5.98e-10),  # [M]
        kv_capacity_tokens=1_817_000,
    )


TRAIN_8B = 163.8 * 8 / (64 * 28_600)
"""[P] 163.8 s for 64 trajectories of 28.6 K tokens on 8 H800 (arXiv 2609.35158)."""

TRAIN_30B_A3B = TRAIN_8B
"""[A] 0.4 times the arithmetic of the 8B model at 0.4 times its efficiency; nobody prints it."""

PUBLISH_30B_A3B_S = 15.8
"""[P] weight synchronisation of 30B-A3B; 4.4 s with a checkpoint engine."""

PUBLISH_8B_S = PUBLISH_30B_A3B_S * 16.4 / 61.1
"""[A] by bytes."""

REBUILD_30B_A3B_S, REBUILD_8B_S = 32.5, 20.0
"""[P] capture of CUDA graphs of 30B-A3B; [A] for 8B by layers and sizes captured."""


def _8b(name: str, costs: CostProfile) -> Preset:
    return Preset(
        name=name, costs=costs, family=SOFTWARE, train_s_per_token=TRAIN_8B, publish_s=PUBLISH_8B_S, rebuild_s=REBUILD_8B_S
    )


def _30b(name: str, costs: CostProfile) -> Preset:
    return Preset(
        name=name,
        costs=costs,
        family=SOFTWARE,
        train_s_per_token=TRAIN_30B_A3B,
        publish_s=PUBLISH_30B_A3B_S,
        rebuild_s=REBUILD_30B_A3B_S,
    )


def _quickstart(name: str) -> Preset:
    """The quickstart's model of 0.13 M parameters on one CPU thread, as `pearl.rl.measure_costs` measured it."""
    with resources.as_file(resources.files(__package__) / "quickstart_cpu.json") as path:
        costs = read_profiles(Path(path))[0]
    return Preset(
        name=name, costs=costs, family=FROZEN_LAKE, train_s_per_token=2e-5, publish_s=0.01, rebuild_s=costs.switch.fixed_s
    )


PRESETS: dict[str, Callable[[str], Preset]] = {
    "qwen3-8b-h800": lambda name: _8b(name, qwen3_8b_h800()),
    "qwen3-8b-h200": lambda name: _8b(name, _qwen3_8b_h200()),
    "qwen3-30b-a3b-h800": lambda name: _30b(name, qwen3_30b_a3b_h800()),
    "qwen3-30b-a3b-h200": lambda name: _30b(name, _qwen3_30b_a3b_h200()),
    "quickstart-cpu": _quickstart,
}


def preset_named(name: str) -> Preset:
    """ValueError lists the names there are."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name](name)
