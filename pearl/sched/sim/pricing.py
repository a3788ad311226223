"""What a `SchedulerOutput` takes on a worker of a given cost profile: seconds, and of what.

Owns the translation from a step's tokens to the formulae of `cost_profile.py`; used by simulated runners and by emulated
devices alike. Pure: it needs the output alone, since an entry says where its tokens begin. Invariant: a steady run of n steps
costs what its n single steps cost, up to rounding.

One token on a context is a decode, also if it is the last piece of a prompt; more are a prefill. What a prompt costs its host
apart from its tokens (`per_prompt_s`, measured with prompts that are computed in one step) is paid with its last piece, from
which its first token is drawn, and by no other; a profile's `base_s` by each step. A step with both costs
`max + mixing * min` of its decode step, `eager` times as long as by itself, and its prefills: with `mixing=1` (the profile's
default) the serial sum, with `mixing=0` the larger of the two, as if one hid behind the other. The host's time per step is
paid once.
"""

from __future__ import annotations

import math

import msgspec

from pearl.engine.request import SchedulerOutput
from pearl.sched.cost_profile import CostProfile


class StepPrice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`seconds` of the whole output (of all its `num_steps`). `decode_s` and `prefill_s` are what the parts would cost alone,
    host time left out. `batch` sequences of `context` tokens on average are decoded; `new` tokens in `chunks` pieces, on
    `prefix` tokens on average (weighted by tokens), are computed."""

    seconds: float
    decode_s: float = 0.0
    prefill_s: float = 0.0
    batch: int = 0
    context: float = 0.0
    new: int = 0
    chunks: int = 0
    prefix: float = 0.0


def price(output: SchedulerOutput, costs: CostProfile) -> StepPrice:
    """A step of no tokens costs nothing."""
    batch = context = new = chunks = prompts = 0
    pairs = below = 0.0
    for entry in output.requests:
        if entry.num_tokens == 1:
            batch += 1
            context += entry.start + 1
        else:
            chunks += 1
            prompts += entry.samples
            new += entry.num_tokens
            below += entry.num_tokens * entry.start
            pairs += entry.num_tokens * (entry.start + entry.num_tokens / 2)
    if output.num_steps > 1:
        if chunks:
            raise ValueError(f"num_steps={output.num_steps} of step {output.step}: with prefills it must be 1")
        return steady_price(costs, batch, context, output.num_steps)
    if not batch and not chunks:
        return StepPrice(seconds=0.0)
    decode_s = float(costs.decode.seconds(batch, context / batch)) if batch else 0.0
    prefill = costs.prefill
    prefill_s = prefill.base_s + prefill.per_token_s * new + prefill.per_pair_s * pairs if chunks else 0.0
    prefill_s += prefill.per_prompt_s * prompts
    if chunks:
        decode_s *= costs.eager
    return StepPrice(
        seconds=max(decode_s, prefill_s) + costs.mixing * min(decode_s, prefill_s) + costs.step_overhead_s,
        decode_s=decode_s,
        prefill_s=prefill_s,
        batch=batch,
        context=context / batch if batch else 0.0,
        new=new,
        chunks=chunks,
        prefix=below / new if new else 0.0,
    )


def steady_price(costs: CostProfile, batch: int, tokens: int, steps: int) -> StepPrice:
    """Of a steady run, as in `steady_s`."""
    seconds = steady_s(costs, batch, tokens, steps)
    return StepPrice(seconds=seconds, decode_s=seconds - steps * costs.step_overhead_s, batch=batch, context=tokens / batch)


def steady_s(costs: CostProfile, batch: int, tokens: int, steps: int) -> float:
    """`steps` decode steps of the same `batch` sequences, whose contexts in the first add up to `tokens`, and grow by one
    each with each step."""
    first = float(costs.decode.seconds(batch, tokens / batch)) + costs.step_overhead_s
    return steps * first + costs.decode.per_context_s * batch * (steps * (steps - 1) / 2)


def steady_steps(costs: CostProfile, batch: int, tokens: int, seconds: float) -> int:
    """How many steps of such a run have begun once `seconds` have passed: at least 1. The inverse of `steady_s`."""
    first = float(costs.decode.seconds(batch, tokens / batch)) + costs.step_overhead_s
    slope = costs.decode.per_context_s * batch
    half = first - slope / 2
    whole = (math.sqrt(half * half + 2 * slope * seconds) - half) / slope if slope else seconds / first
    steps = max(0, int(whole) - 1)
    while steady_s(costs, batch, tokens, steps + 1) <= seconds:
        steps += 1
    return steps + 1
