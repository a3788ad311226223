"""What a job assumes of costs and workload before it has measured anything.

Owns the guesses, which are of the right form and no more: they are wrong by orders of magnitude on most machines, and nothing
optional is decided by them (`RuntimeProfile.measured`). Pure.
"""

from __future__ import annotations

from pearl.config import Config
from pearl.sched.cost_profile import ChangeCost, CostKey, CostProfile, DecodeCost, PrefillCost
from pearl.sched.workload import Workload

KV_BYTES_PER_TOKEN = 1e5


def guess_costs(kv_tokens: int) -> CostProfile:
    """A worker whose pool holds so many tokens (0: nobody knows). A hand-off takes a few turns of two loops."""
    return CostProfile(
        key=CostKey(gpu="unknown", model="unknown"),
        decode=DecodeCost(base_s=2e-3, per_seq_s=2e-5, per_context_s=1e-8),
        prefill=PrefillCost(base_s=2e-3, per_token_s=2e-5, per_pair_s=1e-10),
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        kv_capacity_tokens=kv_tokens or 1e6,
        transfer_bytes_per_s=1e10,
        transfer_base_s=5e-3,
        switch=ChangeCost(fixed_s=0.1),
        borrow=ChangeCost(fixed_s=2.0),
        give_back=ChangeCost(fixed_s=1.0),
        prepare=ChangeCost(fixed_s=30.0),
        finalise=ChangeCost(fixed_s=2.0),
        max_batch=1.0,
        max_context=1.0,
        source="a guess",
    )


def guess_workload(config: Config, max_model_len: int) -> Workload:
    """Episodes of half the turns and half the tokens that they may have."""
    turns = max(1.0, config.env.max_turns / 2)
    generated = max(1.0, config.rollout.max_tokens / 2)
    prompt = max_model_len / 8
    longest = min(float(max_model_len), prompt + turns * 2 * generated)
    return Workload(
        batch=config.rollout_batch_size,
        turns=turns,
        appended=generated,
        generated=generated,
        first_prompt=prompt,
        context=(prompt + longest) / 2,
        longest=longest,
        barrier=config.max_staleness == 0,
        eviction=config.engine.eviction,
        in_flight=float(config.rollout_batch_size * (1 + (config.max_staleness or 0))),
    )
