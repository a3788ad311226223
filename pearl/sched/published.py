"""Cost profiles and a workload made from published figures, for who has measured nothing yet.

Owns numbers and where they come from. Step times: fits to the kernel times of the AIConfigurator 0.12 database (SGLang 0.5.14,
H100 SXM; errors of the fits 6-13 %), to which 2 ms of host time per step are added; H800 has the compute and memory of H100.
Reconfiguration: "PEARL: Adaptive Prefill-Decode Execution with Elasticity for Agentic Reinforcement Learning"
(arXiv 2609.35158), table of costs. A role switch in place with captured graphs kept: 0.4 s. Decoding without captured graphs:
4.4 to 4.9 times slower, printed by a serving engine; steps that compute prompts beside decodes are not captured. Transfers:
87 GB/s over 4 x 200 Gb. Workload: production traces of software engineering agents.
"""

from __future__ import annotations

from pearl.sched.cost_profile import ChangeCost, CostKey, CostProfile, DecodeCost, PrefillCost
from pearl.sched.workload import Workload

_EAGER = 4.65
_SOURCE = "AIConfigurator 0.12 kernel sums; arXiv 2609.35158"


def qwen3_8b_h800() -> CostProfile:
    """A worker of 2 H800. KV: 36 layers x 8 heads x 128 x 2 in bf16; 811 K tokens beside 16.4 GB of weights at 0.85."""
    return CostProfile(
        key=CostKey(gpu="H800", model="Qwen3-8B", tp=2, kernels="sglang"),
        decode=DecodeCost(base_s=4.18e-3, per_seq_s=3.3e-6, per_context_s=2.38e-8),
        prefill=PrefillCost(base_s=4.02e-3, per_token_s=1.227e-5, per_pair_s=4.31e-10),
        kv_bytes_per_token=147_456,
        kv_capacity_tokens=811_000,
        transfer_bytes_per_s=87e9,
        step_overhead_s=2e-3,
        eager=_EAGER,
        switch=ChangeCost(fixed_s=0.4),
        borrow=ChangeCost(fixed_s=6.3),
        give_back=ChangeCost(fixed_s=3.2),
        prepare=ChangeCost(fixed_s=56.3),
        finalise=ChangeCost(fixed_s=11.1),
        source=_SOURCE,
    )


def qwen3_30b_a3b_h800() -> CostProfile:
    """A worker of 2 H800; 8 of 128 experts per token; 762 K tokens of KV beside 61.1 GB of weights at 0.85."""
    return CostProfile(
        key=CostKey(gpu="H800", model="Qwen3-30B-A3B", tp=2, kernels="sglang"),
        decode=DecodeCost(base_s=2.83e-3, per_context_s=1.64e-8, experts_s=9.32e-3, expert_keep=15 / 16),
        prefill=PrefillCost(base_s=1.37e-2, per_token_s=7.65e-6, per_pair_s=5.85e-10),
        kv_bytes_per_token=98_304,
        kv_capacity_tokens=762_000,
        transfer_bytes_per_s=87e9,
        step_overhead_s=2e-3,
        eager=_EAGER,
        switch=ChangeCost(fixed_s=0.4),
        borrow=ChangeCost(fixed_s=6.1),
        give_back=ChangeCost(fixed_s=4.4),
        prepare=ChangeCost(fixed_s=67.1),
        finalise=ChangeCost(fixed_s=17.9),
        source=_SOURCE,
    )


def software_engineering(batch: float = 64) -> Workload:
    """60 turns, 608 tokens appended and 148 generated per turn, mean context 17.2 K under a limit of 32 K.

    Environment 4 s per turn on average; turns lognormal about their mean, cut at 2.2 times it. 20 % of the prefixes are found
    gone, which accounts for 29 computed prompt tokens per generated one where 4 are appended.
    """
    return Workload(
        batch=batch,
        turns=60,
        appended=608,
        generated=148,
        first_prompt=4000,
        context=17_200,
        longest=32_000,
        env_s=4.0,
        miss_share=0.2,
        turn_quantiles=(0.62, 0.89, 1.26, 1.7, 2.2),
    )
