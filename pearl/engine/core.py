"""The engine's deciding half: requests in, `SchedulerOutput` out, `StepResult` in, updates out.

Owns the requests, the weight version, the role and the order of unfinished outputs. It does not know models, tensors,
tokenizers or time, and whoever runs the steps (a model, a simulator) is not known to it either.

A step is `schedule` then `finish`. `schedule` may be called while one output is still unfinished: what that output will draw
is `PLACEHOLDER`, and `finish` puts the token in its place. Invariants:
- outputs are finished in the order they were scheduled, each once;
- a request that ends while a later output holds it is void there: its entry is ignored, and its blocks stay until then;
- a block becomes visible in the prefix cache when the output that filled it is finished, and only with KV of one version;
- `schedule` never returns nothing for ever: what can never run is refused at `add_request` or ends with an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pearl.engine.block_manager import BlockManager
from pearl.engine.ending import (
    ABORTED,
    Ending,
    TextStream,
    check_complete,
    ending_by_id,
    ending_by_length,
    update_of,
)
from pearl.engine.limits import CoreSettings, check_request
from pearl.engine.migration.transport import LeaseWords
from pearl.engine.moving import MovingRequests
from pearl.engine.request import (
    PLACEHOLDER,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
from pearl.engine.role import Drain, RolePolicy, RoleSwitch, plan_role, plan_switch
from pearl.engine.scheduler import Scheduler
from pearl.protocol import Role

UpdateMode = Literal["keep", "recompute", "abort"]
MAX_UNFINISHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A look at the engine. total = free + cached + used + leased blocks (leased: held by a lease alone)."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    leased_blocks: int
    waiting: int
    running: int
    weight_version: int
    role: Role
    epoch: int
    paused: bool
    asleep: bool
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int = 0
    offered: int = 0
    arriving: int = 0
    reserved: int = 0
    stale_messages: int = 0


class EngineCore(MovingRequests):
    """`new_text` makes the text stream of a request; without it there is no text and no stop strings.

    `name` begins the ids of its offers and credits, `words` are those of its pool's leases.
    """

    def __init__(
        self,
        settings: CoreSettings,
        new_text: Callable[[Request], TextStream] | None = None,
        *,
        name: str = "engine",
        words: LeaseWords | None = None,
    ) -> None:
        self.settings = settings
        self.blocks = BlockManager(settings.num_blocks, settings.block_size, settings.enable_prefix_cache, settings.eviction)
        self.scheduler = Scheduler(
            self.blocks,
            self._plan_role(settings.role),
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=settings.max_batch_tokens,
            max_model_len=settings.max_model_len,
        )
        self.requests: dict[str, Request] = {}
        self.weight_version = self.epoch = 0
        self.paused = self.asleep = False
        self._new_text = new_text
        self._texts: dict[str, TextStream] = {}
        self._unfinished: deque[SchedulerOutput] = deque()
        self._init_moving(name, words or LeaseWords.zeros(settings.num_blocks))
        self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = self._num_computed_tokens = 0

    # ------------------------------------------------------------------------------------------------ requests

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ValueError, before anything changed, for one that can never give a token."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r}: there is such a request already, ids must be unique")
        check_request(request, self.settings)
        if request.params.prompt_logprobs and not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        self.requests[request.request_id] = request
        if self._new_text is not None:
            self._texts[request.request_id] = self._new_text(request)
        self._num_prompt_tokens += request.num_prompt_tokens
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request with the tokens it has; None if there is no such request or it has ended."""
        request = self.requests.get(request_id)
        if request is None or request.status is RequestStatus.FINISHED:
            return None
        return update_of(request, (), self._end(request, ABORTED))

    def preempt(self, request_id: str) -> bool:
        """Sends a running request back to the front of the queue, to be recomputed; False if it is not running."""
        request = self.scheduler.running.get(request_id)
        if request is None:
            return False
        self.scheduler.preempt(request)
        self._end_growing(request_id)
        return True

    def has_unfinished(self) -> bool:
        """Whether there is anything left to schedule or to finish."""
        return bool(self.requests or self._unfinished or self.arrivals) or self.is_reading_along

    # ------------------------------------------------------------------------------------------------ a step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decides the next step. Every output, an empty one too, must be given to `finish`, in order.

        `now` is the caller's time in seconds: what is past its deadline ends first. Raises RuntimeError if two outputs are
        unfinished, or if requests exist that nothing can ever bring forward (a broken invariant, never a load condition).
        """
        if len(self._unfinished) >= MAX_UNFINISHED:
            steps = [output.step for output in self._unfinished]
            raise RuntimeError(f"outputs {steps} are unfinished: finish one before the next schedule")
        self.expire(now)
        if self.paused or self.asleep:
            output = SchedulerOutput(step=self._num_steps, requests=())
        else:
            output = self.scheduler.schedule(self._num_steps, self.weight_version)
            self._grow(output)
            waits = self._unfinished or self.blocks.num_leases or self.scheduler.returned
            if not output.requests and self.requests and not waits:
                raise RuntimeError(f"nothing can run although nothing is in flight: {self.stats()}")
        self._num_steps += 1
        self._unfinished.append(output)
        return output

    def finish(self, output: SchedulerOutput, result: StepResult, now: float) -> list[RequestUpdate]:
        """Takes in what a step gave: one update for each request that got a token or ended. `now` as in `schedule`."""
        if not self._unfinished or self._unfinished[0] is not output:
            steps = [unfinished.step for unfinished in self._unfinished]
            raise RuntimeError(f"output of step {output.step} is not the oldest unfinished one of {steps}")
        check_complete(output, result)
        self._unfinished.popleft()
        self._num_computed_tokens += output.num_tokens
        updates = [update_of(request, (), self._end(request, ABORTED)) for request in list(self.scheduler.returned.values())]
        for entry in output.requests:
            request = self.requests[entry.request_id]
            request.num_in_flight -= 1
            if request.status is not RequestStatus.FINISHED:
                self._take_written(request, entry, result)
                if self.growing:
                    self._grown(entry.request_id, output.step)
                if entry.samples:
                    updates.append(self._take_token(request, entry, result.sampled[entry.request_id], result.weight_version))
            if request.status is not RequestStatus.RUNNING and not request.num_in_flight:
                self._settle(request)
            elif self.scheduler.policy.hands_over and request.is_decoding and not (request.stays or request.num_in_flight):
                self.offer(request, now)
            elif self.growing and request.is_decoding:
                self._end_growing(entry.request_id)  # it stays
        return updates

    def cancel(self, output: SchedulerOutput) -> None:
        """Takes back the newest unfinished output, which could not be run: its requests are computed again later."""
        if not self._unfinished or self._unfinished[-1] is not output:
            raise RuntimeError(f"output of step {output.step} is not the newest unfinished one")
        self._unfinished.pop()
        for entry in reversed(output.requests):
            request = self.requests[entry.request_id]
            request.num_in_flight -= 1
            if not request.num_in_flight and request.token_ids[-1] == PLACEHOLDER:
                request.token_ids.pop()  # nobody draws it any more
            if request.status is RequestStatus.RUNNING:
                self.scheduler.preempt(request)
            elif not request.num_in_flight:
                self._settle(request)
        self._end_strays()

    def _take_written(self, request: Request, entry: ScheduledRequest, result: StepResult) -> None:
        end = entry.start + entry.num_tokens
        if entry.wants_prompt_logprobs:
            values = result.prompt_logprobs[entry.request_id]
            request.prompt_logprobs.extend(values[len(request.prompt_logprobs) - entry.start - 1 :])
        if request.status is not RequestStatus.RUNNING:
            return  # gave way since: this KV will be computed again
        request.num_written_tokens = end
        block_size = self.settings.block_size
        if end // block_size > entry.start // block_size:
            self.blocks.register(request, self.weight_version)

    def _take_token(self, request: Request, entry: ScheduledRequest, sampled: SampledToken, version: int) -> RequestUpdate:
        if sampled.error is not None:
            return update_of(request, (), self._end(request, Ending(finish_reason="error", error=sampled.error)))
        token_id, position = sampled.token_id, entry.start + entry.num_tokens
        if position == len(request.token_ids):
            request.token_ids.append(token_id)
        elif request.token_ids[position] == PLACEHOLDER:
            request.token_ids[position] = token_id
        else:
            raise RuntimeError(f"request {request.request_id!r}: position {position} already has {request.token_ids[position]}")
        request.logprobs.append(sampled.logprob)
        request.weight_versions.append(version)
        if request.params.logprobs:
            request.top_logprobs.append(sampled.top_logprobs or {})
        self._num_generated_tokens += 1
        ending = ending_by_id(request, token_id)
        text = ""
        stream = self._texts.get(request.request_id) if self._texts else None
        if stream is not None:
            text = stream.push(token_id, hidden=ending is not None)
            if ending is None and stream.stopped_by is not None:
                ending = Ending(finish_reason="stop", stop_reason=stream.stopped_by)
        if ending is None:
            ending = ending_by_length(request, max_model_len=self.settings.max_model_len, num_slots=self.blocks.num_slots)
        if ending is not None:
            text += self._end(request, ending)
        return update_of(request, (token_id,), text)

    # ------------------------------------------------------------------------------------------------ commands

    def pause(self) -> None:
        """From now on `schedule` returns empty outputs; requests are still taken in."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def set_weight_version(self, version: int, mode: UpdateMode = "keep") -> list[RequestUpdate]:
        """New weights are in: what is computed from now on is of `version`, and nothing cached before is found again.

        Requests with KV: "keep" goes on with it (and caches no more blocks), "recompute" computes it again under the new
        version, tokens kept, "abort" ends every request that has been started, whose updates are returned.
        """
        if mode not in ("keep", "recompute", "abort"):
            raise ValueError(f"mode={mode!r}: must be one of keep, recompute, abort")
        if version < 0:
            raise ValueError(f"version={version}: must be >= 0")
        updates: list[RequestUpdate] = []
        if mode == "abort":
            on_the_way = (RequestStatus.RUNNING, RequestStatus.PARKED)
            started = [r for r in self.requests.values() if r.status in on_the_way or r.num_preemptions]
            updates = [update for request in started if (update := self.abort(request.request_id))]
        elif mode == "recompute":
            self._lose_moving_kv()
            self._preempt_all()
        self.reset_prefix_cache()
        self.weight_version = version
        return updates

    def lose_kv(self) -> None:
        """What the pool holds is worth nothing any more: running requests give way, to be recomputed; nothing is cached."""
        self._lose_moving_kv()
        self._preempt_all()
        self.reset_prefix_cache()

    def sleep(self) -> None:
        """As `lose_kv`; and until `wake` `schedule` returns empty outputs, while requests are still taken in and aborted.

        ValueError, before anything changed, while an output is unfinished or a lease protects what the pool holds.
        """
        if self._unfinished or self.blocks.num_leases:
            in_use = f"{len(self._unfinished)} unfinished outputs, {self.blocks.num_leases} leases"
            raise ValueError(f"sleep: the pool is in use by {in_use}; finish or release them first")
        self.lose_kv()
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def reset_prefix_cache(self) -> int:
        """Forgets all cached blocks and returns how many there were; KV computed before is never cached afterwards."""
        for requests in (self.scheduler.running, self.scheduler.parked):
            for request in requests.values():
                request.cacheable = False
        return self.blocks.reset_prefix_cache()

    def switch_role(self, role: Role, drain: Drain = "handover", now: float = 0.0) -> RoleSwitch:
        """Changes the role between two steps: no weight and no block moves, what is cached stays.

        What the new role does not go on with is computed again here ("recompute") or offered to other engines. Offers that
        nobody has taken yet are taken back by a role that can decode them. Credits are void. ValueError for what is no role.
        """
        old, new = self.scheduler.policy, self._plan_role(role)
        switch = plan_switch(old, new, self.scheduler.running.values(), self.epoch + 1)
        self.scheduler.policy, self.epoch = new, switch.epoch
        self._release_credits()
        self._end_strays()
        if not new.hands_over:
            for export in [export for export in self.exports.values() if not export.taken]:
                self._take_back(export)
        elif not old.hands_over:
            coming = {arrival.request.request_id for arrival in self.arrivals.values()}
            for request in self.requests.values():
                request.stays = request.request_id in coming  # nobody looks at it again when its KV is here
        for request_id in reversed(switch.leaving) if drain == "recompute" else ():
            self.preempt(request_id)
        for request_id in switch.leaving if drain != "recompute" else ():
            self.offer(self.requests[request_id], now)
        return switch

    def stats(self) -> EngineStats:
        blocks, scheduler = self.blocks, self.scheduler
        return EngineStats(
            total_blocks=blocks.num_blocks,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            used_blocks=blocks.num_used,
            leased_blocks=blocks.num_leased,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            weight_version=self.weight_version,
            role=scheduler.policy.role,
            epoch=self.epoch,
            paused=self.paused,
            asleep=self.asleep,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_computed_tokens=self._num_computed_tokens,
            offered=self.num_offered,
            arriving=len(self.arrivals),
            reserved=len(self.credits),
            stale_messages=self.num_stale_messages,
        )

    def check_integrity(self) -> None:
        """The pool's conservation law and the requests' life cycle; raises RuntimeError saying what is broken."""
        self.blocks.check_integrity(self.scheduler.holders())
        in_flight = Counter(entry.request_id for output in self._unfinished for entry in output.requests)
        self.scheduler.check_integrity(self.requests, in_flight)
        self._check_moving()
        if not self._texts.keys() <= self.requests.keys():
            raise RuntimeError(f"texts {sorted(self._texts)} outlive the requests {sorted(self.requests)}")

    # ------------------------------------------------------------------------------------------------ inside

    def _end(self, request: Request, ending: Ending) -> str:
        """Ends a live request and returns the rest of its text; it stays known until no unfinished output holds it."""
        request.finish_reason, request.stop_reason, request.error = ending.finish_reason, ending.stop_reason, ending.error
        request.status = RequestStatus.FINISHED
        rest = ""
        stream = self._texts.pop(request.request_id, None)
        if stream is not None:
            rest = stream.close()
            request.text = stream.text
        self._drop_move(request)
        self.scheduler.remove(request)
        self.blocks.remember_session(request)
        if not request.num_in_flight:
            del self.requests[request.request_id]
        return rest

    def _preempt_all(self) -> None:
        for request in reversed(list(self.scheduler.running.values())):
            self.scheduler.preempt(request)
        self._end_strays()

    def _settle(self, request: Request) -> None:
        self.scheduler.settle(request)
        if request.status is RequestStatus.FINISHED:
            self.requests.pop(request.request_id, None)

    def _plan_role(self, role: Role) -> RolePolicy:
        sizes = self.settings
        return plan_role(role, max_batch_tokens=sizes.max_batch_tokens, decode_prefill_tokens=sizes.decode_prefill_tokens)
