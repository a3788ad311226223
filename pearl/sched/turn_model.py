"""How long a turn takes in a pool of workers that many trajectories share: a closed queueing model, for many pools at once.

Owns the model and its solution; it does not know shapes that are allowed, thresholds or the paper's forms. Pure numpy.

A trajectory cycles through its environment (a delay), the prefill of what is new, the way of its KV to where it decodes, and
`r` decode steps. n trajectories share `decoders` workers, and `prefillers` others in a split pool. With d sequences decoding
on each decoder, by Little's law, everything follows without iteration:

    u = d / (d * w_local * k + r * t(d))          turns per second and decoder; t(d): seconds of a step
    D = d / u = d * w_local * k + r * t(d)        decoding, slowed down by prefills on the same worker
    W = w / (1 - k * rho)                         prefill under processor sharing; rho: share of time its worker computes them
    R = Z + W_remote + W_local + X + D            a turn; Z: environment and overhead, X: transfer

k = (m - 1) / m for m trajectories per worker: who arrives meets the others, not itself (arrival theorem; Schweitzer 1979 for
the closed form). The d that is right is the one of which the n trajectories spend the share D / R decoding: a root, found by
bracketing for all pools together.

Memory: a decoder runs at most H / context sequences; what else is under way waits (`queue`). Prefixes of trajectories that are
with their environment stay cached while there is room; what is lost (`lost_prefixes`) is computed again where the prompt is
computed, and sent whole where KV is sent. A decoder that has lost the prefix of an append of its own gives that to a prefiller,
which computes all of it. What was generated on a decoder is computed again by the prefiller that gets the next turn, since only
the decoder has its KV.

Host time of a step is paid once: a prompt beside decodes adds none to theirs, one that nobody decodes beside pays its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pearl.sched.cost_profile import CostProfile, HandOverCost
from pearl.sched.workload import Workload

Array = Any  # float64 arrays that broadcast against each other

ROOT_STEPS = 8
"""Of the bracketing."""

PLACING_PASSES = 2
"""What a pool loses from its caches depends on who is placed there, and the reverse."""

KV_SLACK = 0.97
"""Share of a pool that can be filled before blocks run out in practice: tails of blocks, room for growth."""

GROWTH = 0.75
"""How much longer than the mean a context is at its end, and shorter at its beginning, of those that grow together."""

KEPT = 0.8
"""Share of a pool's room that holds what will be found; the rest is with requests that run, with sessions that have ended, and
with those that take turns in it. A fit to simulated makespans."""


def lost_prefixes(load: Array, barrier: bool, eviction: Literal["lru", "keep"] = "lru") -> Array:
    """Share of the turns whose prefix is gone, with `load` = contexts that are to stay over room for them.

    "lru": the one that was used longest ago goes first, and that is the next to come back: a cache that is a little too small
    loses far more than what does not fit. The contexts of a batch that began together also grow together, so at its end the
    cache is too small if it is ample on average. Both curves are fits to simulated caches (10-30 % off).
    "keep": what does not fit is lost and nothing else, g - KEPT / load of a context g times as long as the mean. Of contexts
    that grow together g is between 1 - GROWTH and 1 + GROWTH, each length equally often. It is for pools that compute prompts
    alone: one too small for those who decode is full of running requests, and no order keeps anything for those that wait.
    """
    room, power = (0.66, 1.2) if barrier else (1.0, 3.0)
    kept = 1 / np.maximum(load, 1e-9)
    by_age = 1.0 - np.minimum(1.0, room * kept) ** power
    if eviction == "lru":
        return by_age
    kept = KEPT * kept
    if not barrier:
        return np.minimum(by_age, np.maximum(0.0, 1 - kept))
    grown = np.clip(1 + GROWTH - kept, 0.0, 2 * GROWTH)
    return np.minimum(by_age, grown**2 / (4 * GROWTH) + np.maximum(0.0, 1 - GROWTH - kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn in each pool, in seconds; arrays. `trajectories` are those in the pool, `decode_batch` per decoder.

    `kv_use` is the larger of context that is wanted over room, per kind of worker; above 1 something is computed again.
    """

    turn: Array
    wait: Array
    prefill: Array
    transfer: Array
    decode: Array
    interference: Array
    queue: Array
    trajectories: Array
    decode_batch: Array
    prefill_busy: Array
    miss_share: Array
    kv_use: Array


class TurnModel:
    """The model of one workload on one kind of worker."""

    def __init__(self, workload: Workload, costs: CostProfile) -> None:
        w = workload
        self.workload, self.costs = workload, costs
        self._mixed_workers: dict[float, tuple[Array, Array]] = {}
        self._room = KV_SLACK * costs.kv_capacity_tokens / w.context
        """Trajectories whose KV one worker holds."""
        new = w.first_prompt / w.turns + w.appended
        self._mixed_new = new
        self._remote_new = new + w.generated
        self._whole_s = float(costs.prefill.seconds(w.context, 0.0) - costs.prefill.seconds(0.0, 0.0))
        """What a lost prefix adds to its prompt, whose start is paid anyway."""
        local, handed = w.local_appended or new, 1 - w.local_share
        self._mixed_s = float(costs.prefill_beside_s(new, w.context))
        self._remote_s = handed * float(costs.prefill_s(self._remote_new, w.context))
        self._local_s = w.local_share * float(costs.prefill_beside_s(local, w.context))
        self._taking_s = 0.0
        self._returned_s = float(costs.prefill_s(w.context, 0.0))
        """Of an append whose prefix is gone. (Contexts that are short enough for it a decoder computes itself, which takes
        about as long.)"""
        self._returned_moved_s = float(costs.moving_s(w.context))
        self._outside = w.env_s + w.overhead_s
        self._base_s = handed * costs.transfer_base_s
        self._moved_s, self._moved_whole_s = (handed * float(costs.moving_s(tokens)) for tokens in (new, w.context))
        self._add_hand_over(costs.hand_over)

    def _add_hand_over(self, cost: HandOverCost) -> None:
        """What it costs the hosts of both ends is work of theirs, as a prompt is."""
        handed = 1 - self.workload.local_share
        self._remote_s += handed * cost.give_s
        self._taking_s += handed * cost.take_s
        self._returned_s += cost.give_s

    def solve(self, decoders: Array, prefillers: Array, trajectories: Array) -> Turn:
        """Pools whose number of trajectories is known. `prefillers` 0 means that all its workers are mixed."""
        decoders, prefillers, trajectories = np.broadcast_arrays(*_floats(decoders, prefillers, trajectories))
        return self._solve(decoders, prefillers, trajectories, None)

    def solve_beside(self, decoders: Array, prefillers: Array, mixed: Array, alive: Array) -> Turn:
        """Pools beside `mixed` other, mixed workers; arrays of shape (pools, 1), `alive` of shape (segments,).

        The first of the `alive` trajectories are placed so that turns take equally long in both parts, and each part keeps
        its share of them as they get fewer. The Turn is that of the first part (`trajectories` says how many that is), and
        as long as the slower part's. The placement is found approximately, what it leads to is solved exactly; so no
        prediction is better than what can be had.
        """
        decoders, prefillers, mixed = np.broadcast_arrays(*_floats(decoders, prefillers, mixed))
        everybody = float(alive[0])
        times, held = self._mixed_worker(everybody)
        least = everybody / 1024  # a part that is no use still exists

        def there(turn: Array) -> Array:
            return np.minimum(np.maximum(everybody - mixed * np.interp(turn, times, held), least), everybody - least)

        here = everybody * (decoders + prefillers) / (decoders + prefillers + mixed)
        for _ in range(PLACING_PASSES):
            here = 0.5 * (here + self._solve(decoders, prefillers, here, there).trajectories)
        split = self.solve(decoders, prefillers, here / everybody * alive)
        beside = np.interp((1 - here / everybody) * alive / mixed, held, times)
        return replace(split, turn=np.maximum(split.turn, beside))

    def _mixed_worker(self, most: float) -> tuple[Array, Array]:
        """(turn, trajectories) of one mixed worker, both rising: what it holds if turns may take so long."""
        if most not in self._mixed_workers:
            held = np.concatenate(([0.0], np.geomspace(min(0.01, most), most, 160)))
            turns = self.solve(1.0, 0.0, np.maximum(held, 1e-6)).turn
            self._mixed_workers[most] = (np.maximum.accumulate(turns), held)
        return self._mixed_workers[most]

    def _solve(self, decoders: Array, prefillers: Array, assumed: Array, there: Callable[[Array], Array] | None) -> Turn:
        """Finds d by the Illinois variant of false position.

        `assumed` trajectories decide what caches hold; `there(turn)` says how many there are if a turn takes that long, and is
        None if that is what was assumed.
        """
        pools = _Pools(self, decoders, prefillers, assumed)

        def excess(d: Array) -> Array:
            terms = self._terms(d, pools)
            here = assumed if there is None else there(terms.turn)
            return here * terms.share / decoders - d

        most = (assumed if there is None else there(np.zeros_like(assumed))) / decoders
        room = np.minimum(self._room, most)
        low, high = 1e-6 * room, np.minimum(room, self._saturated(pools))
        f_low, f_high = excess(low), excess(high)
        full = f_high > 0  # more want to decode than there is room for
        side = np.zeros_like(high)
        for _ in range(ROOT_STEPS):
            weight = np.minimum(0.99, np.maximum(0.01, f_low / np.maximum(1e-300, f_low - f_high)))
            middle = low + weight * (high - low)
            f_middle = excess(middle)
            up = f_middle > 0
            f_high = np.where(up, np.where(side > 0, 0.5, 1.0) * f_high, f_middle)
            f_low = np.where(up, f_middle, np.where(side < 0, 0.5, 1.0) * f_low)
            low, high, side = np.where(up, middle, low), np.where(up, high, middle), np.where(up, 1.0, -1.0)
        weight = np.minimum(1.0, np.maximum(0.0, f_low / np.maximum(1e-300, f_low - f_high)))
        d = np.where(full, room, low + weight * (high - low))
        terms = self._terms(d, pools)
        return self._turn(d, pools, assumed if there is None else there(terms.turn), full, terms)

    def _saturated(self, pools: _Pools) -> Array:
        """No fewer than the sequences per decoder that keep all prefill workers busy; infinite if nothing does."""
        w, decode = self.workload, self.costs.decode
        rate = 1 / np.maximum(1e-300, pools.busy_per_rate * pools.others_remote)  # turns per second and decoder
        crowded = pools.crowded + pools.launched * decode.seconds(self._room, w.context)
        crowded = crowded + w.generated * (decode.per_seq_s + decode.per_context_s * w.context)
        left = 1 - rate * crowded
        step = decode.base_s + decode.experts_s + self.costs.step_overhead_s
        return np.where(left > 0, rate * w.generated * step / np.where(left > 0, left, 1.0), np.inf)

    def _terms(self, d: Array, pools: _Pools) -> _Terms:
        """A turn with `d` sequences decoding per decoder; `share` of it is 0 where the prefill workers cannot keep up."""
        w = self.workload
        steps = w.generated * self.costs.decode_step_s(d, w.context)
        crowded = pools.crowded + pools.launched * self.costs.decode.seconds(d, w.context)
        decode = d * crowded + steps
        rate = d / decode
        wait = (pools.local + pools.host * pools.alone(d)) / (1 - np.minimum(0.999, rate * crowded))
        busy = rate * pools.busy_per_rate
        free = np.maximum(0.0, 1 - pools.others_remote * busy)
        scaled = (self._outside + wait + pools.transfer + decode) * free + pools.remote
        return _Terms(
            share=decode * free / scaled,
            turn=scaled / np.maximum(free, 1e-9),
            steps=steps,
            decode=decode,
            rate=rate,
            wait=wait,
            transfer=pools.transfer,
            busy=busy + pools.mixed * rate * pools.local,
            miss=pools.miss,
        )

    def _turn(self, d: Array, pools: _Pools, here: Array, full: Array, terms: _Terms) -> Turn:
        """By Little's law; what no other term accounts for is waiting: for prefill workers, or for room in full pools."""
        turn = here / (pools.decoders * terms.rate)
        known = self._outside + terms.wait + terms.transfer + terms.decode
        queue = np.where(full, np.maximum(0.0, turn - terms.turn), 0.0)
        return Turn(
            turn=turn,
            wait=np.full_like(turn, self._outside),
            prefill=terms.wait + pools.split * np.maximum(0.0, turn - known - queue),
            transfer=terms.transfer + np.zeros_like(turn),
            decode=terms.steps,
            interference=terms.decode - terms.steps,
            queue=queue,
            trajectories=here,
            decode_batch=d,
            prefill_busy=terms.busy,
            miss_share=terms.miss + np.zeros_like(turn),
            kv_use=np.maximum(pools.held, pools.split * pools.held_remote) / self._room,
        )


@dataclass(slots=True)
class _Terms:
    """Of one turn, in seconds but for `share`, `rate` (turns per second and decoder), `busy` and `miss`."""

    share: Array
    turn: Array
    steps: Array
    decode: Array
    rate: Array
    wait: Array
    transfer: Array
    busy: Array
    miss: Array


class _Pools:
    """What does not depend on how many decode: counts, what caches hold, and the work of a turn."""

    def __init__(self, model: TurnModel, decoders: Array, prefillers: Array, here: Array) -> None:
        w, c, room = model.workload, model.costs, model._room
        self.decoders = decoders
        self.split = (prefillers > 0).astype(np.float64)
        self.mixed = 1.0 - self.split
        some = np.maximum(prefillers, 1.0)
        self.held, self.held_remote = here / decoders, here / some
        lost = lost_prefixes(self.held / room, w.barrier), lost_prefixes(self.held_remote / room, w.barrier, w.eviction)
        gone, gone_remote = (w.miss_share + (1 - w.miss_share) * one for one in lost)
        appends = self.mixed + self.split * w.local_share  # of a turn, placed where it is decoded
        returned = self.split * w.local_share * gone
        prompts = appends - returned
        self.miss = appends * gone + (1 - appends) * gone_remote
        moved = self.split * (model._moved_s + model._moved_whole_s * gone) + returned * model._returned_moved_s
        self.local = self.split * ((1 - gone) * model._local_s + model._taking_s) + returned * c.hand_over.take_s
        self.local = self.local + self.mixed * (model._mixed_s + gone * model._whole_s) + moved * c.hand_over.copies
        self.host = prompts * c.step_overhead_s
        others = c.mixing * np.maximum(0.0, 1 - 1 / self.held)
        self.crowded = self.local * others
        self.launched = prompts * others * (c.eager - 1)
        """Decode steps' time that each turn's prompt adds to a step of those who decode beside it."""
        self.remote = self.split * model._remote_s + (1 - appends) * model._whole_s * gone_remote
        self.remote = self.remote + returned * model._returned_s
        self.busy_per_rate = decoders * self.remote / some
        self.others_remote = np.maximum(0.0, 1 - 1 / self.held_remote)
        self.transfer = self.split * model._base_s + returned * c.transfer_base_s + moved * (not c.hand_over.copies)

    def alone(self, d: Array) -> Array:
        """The chance that none of a worker's other trajectories decodes, if `d` of all do."""
        return np.maximum(0.0, 1 - d / self.held) ** np.maximum(0.0, self.held - 1)


def _floats(*values: Array) -> list[Array]:
    return [np.asarray(value, dtype=np.float64) for value in values]
