"""Which tokens run in the next step: the batch scheduler.

Owns the order of requests (waiting, running), pre-emption and the token budget. It does not know what tokens mean, when a
request ends, tensors or time. There is no prefill phase: every running request has `num_computed_tokens` to catch up to its
known tokens. Order of a step: requests one token behind (decodes), then those further behind, then the waiting ones.

Invariants
- No decode starves: decodes come first, and a request is admitted only with budget that no running one could use, so the
  running ones never outnumber `max_batch_tokens`.
- A waiting request is admitted when blocks for all its known tokens can be had at once, so catching up needs no pre-emption;
  only a decode that crosses into a new block can, and then the request admitted last gives way and is recomputed later.
- A request is given back before anything of it was computed, and at most once: whoever placed it elsewhere sets it no limit.
- Blocks that an unfinished output reads or writes stay where they are: a request that gave way or ended while such an output
  exists keeps its table (it is "draining") until `settle`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from pearl.engine.block_manager import BlockManager
from pearl.engine.request import PLACEHOLDER, Request, RequestStatus, ScheduledRequest, SchedulerOutput
from pearl.engine.role import RolePolicy

RUNNING_PER_SPARE_BLOCK = 8
"""Admission leaves one block free for each so many running requests: their next tokens would else throw the new one out."""


class _Step:
    """The output being put together: what is scheduled and what is left of the budget."""

    __slots__ = ("entries", "preempted", "tokens_left")

    def __init__(self, tokens: int) -> None:
        self.entries: list[ScheduledRequest] = []
        self.preempted: list[str] = []
        self.tokens_left = tokens

    def take(self, request: Request, num_tokens: int) -> None:
        """Runs the request's next `num_tokens` tokens, whose blocks it holds, in this step."""
        start = request.num_computed_tokens
        end = start + num_tokens
        request.num_computed_tokens = end
        request.num_in_flight += 1
        self.tokens_left -= num_tokens
        wants = request.params.prompt_logprobs and _lacks_prompt_logprobs(request, start, end)
        self.entries.append(
            ScheduledRequest(
                request_id=request.request_id,
                start=start,
                num_tokens=num_tokens,
                samples=end == len(request.token_ids),
                wants_prompt_logprobs=wants,
            )
        )


def _lacks_prompt_logprobs(request: Request, start: int, end: int) -> bool:
    """Whether the positions from `start` to `end` give a log-prob of the prompt that is still missing."""
    last_prompt = request.num_prompt_tokens - 1
    return start < last_prompt and min(end, last_prompt) >= len(request.prompt_logprobs)


class Scheduler:
    """Sizes: `max_num_seqs` requests, `max_batch_tokens` tokens per step, `max_model_len` tokens per request."""

    def __init__(
        self, blocks: BlockManager, policy: RolePolicy, *, max_num_seqs: int, max_batch_tokens: int, max_model_len: int
    ) -> None:
        self.blocks = blocks
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.draining: dict[str, Request] = {}
        self.parked: dict[str, Request] = {}
        """On their way to or from another engine; they hold no blocks."""
        self.returned: dict[str, Request] = {}
        """Given back: they end with the next output that is finished."""
        self.num_reserved = 0
        """Places among the running that are kept for requests to come."""
        self.num_preemptions = 0
        self._blocked: tuple[Request, int, int] | None = None
        """The head of the queue that found no room, with the available blocks and the running requests at that time."""

    # ------------------------------------------------------------------------------------------------ membership

    def add(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes an ended request out; the caller has set its status to FINISHED."""
        name = request.request_id
        if not any(place.pop(name, None) for place in (self.running, self.parked, self.returned)):
            self.waiting.remove(request)
            self._blocked = None
        self._release(request)

    def preempt(self, request: Request) -> None:
        """A running request gives way: to the front of the waiting ones, to be recomputed from its tokens."""
        del self.running[request.request_id]
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        self._release(request)

    def park(self, request: Request) -> None:
        """Takes a running or waiting request out of the way of steps; its blocks are whoever's lease keeps them."""
        if self.running.pop(request.request_id, None) is None:
            self.waiting.remove(request)
            self._blocked = None
        self.parked[request.request_id] = request
        request.status = RequestStatus.PARKED
        self.blocks.free(request)

    def unpark(self, request: Request) -> None:
        """A parked request that has its blocks again runs."""
        del self.parked[request.request_id]
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def requeue(self, request: Request, *, lost: bool = False) -> None:
        """A parked request goes to the front of the waiting ones. `lost`: there was KV of it, which is computed again."""
        del self.parked[request.request_id]
        request.status = RequestStatus.WAITING
        request.num_preemptions += lost
        self.num_preemptions += lost
        self.waiting.appendleft(request)
        self._reset(request)

    @property
    def has_seat(self) -> bool:
        """Whether one more request may run, those parked and reserved for counted as running."""
        return len(self.running) + len(self.parked) + self.num_reserved < min(self.max_num_seqs, self.max_batch_tokens)

    @property
    def is_blocked(self) -> bool:
        """Whether the first of the waiting requests has found no room."""
        return bool(self.waiting) and self._blocked is not None and self._blocked[0] is self.waiting[0]

    @property
    def num_spare(self) -> int:
        """Blocks that admission leaves free for the running requests."""
        return len(self.running) // RUNNING_PER_SPARE_BLOCK

    def settle(self, request: Request) -> None:
        """The last unfinished output that holds a draining request is finished: its blocks are free now."""
        self.draining.pop(request.request_id, None)
        self._reset(request)

    def holders(self) -> Iterator[Request]:
        """Every request that may hold blocks, once."""
        yield from self.running.values()
        yield from self.draining.values()

    def check_integrity(self, requests: Mapping[str, Request], in_flight: Mapping[str, int]) -> None:
        """Each of the core's requests is in one place, holds blocks only where it may, and is in as many unfinished outputs
        as `in_flight` says; raises RuntimeError naming the one that is not."""
        waiting = {request.request_id for request in self.waiting}
        parked = self.parked.keys() | self.returned.keys()
        strays = (waiting | self.running.keys() | self.draining.keys() | parked) - requests.keys()
        if strays:
            raise RuntimeError(f"the scheduler holds requests {sorted(strays)} that the core does not know")
        for request_id, request in requests.items():
            finished = request.status is RequestStatus.FINISHED
            places = (request_id in self.running, request_id in waiting, request_id in parked, finished)
            if sum(places) != 1 or in_flight.get(request_id, 0) != request.num_in_flight:
                counts = f"in flight {request.num_in_flight}, unfinished outputs {in_flight.get(request_id, 0)}"
                raise RuntimeError(f"request {request_id!r}: running, waiting, parked, finished = {places}, {counts}")
            if request.block_table and not places[0] and request_id not in self.draining:
                raise RuntimeError(f"request {request_id!r} is {request.status.value} but holds {request.block_table}")

    # ------------------------------------------------------------------------------------------------ one step

    def schedule(self, step: int, weight_version: int) -> SchedulerOutput:
        """Decides step number `step`; positions, blocks and in-flight counts advance at once."""
        plan = _Step(self.max_batch_tokens)
        behind = self._run_decodes(plan)
        catch_up = min(self.policy.prefill_tokens, plan.tokens_left)
        for request in behind:
            if catch_up and request.status is RequestStatus.RUNNING:
                catch_up -= self._run_behind(plan, request, catch_up)
        if not plan.preempted:
            self._admit(plan, catch_up, weight_version)
        return SchedulerOutput(step=step, requests=tuple(plan.entries), preempted=tuple(plan.preempted))

    def _run_decodes(self, plan: _Step) -> list[Request]:
        """Runs all requests that are one token behind; returns the running ones further behind, in order."""
        behind: list[Request] = []
        hands_over, running = self.policy.hands_over, RequestStatus.RUNNING
        for request in list(self.running.values()):
            if request.status is not running:
                continue  # gave way to one before it in this very step
            computed = request.num_computed_tokens
            missing = len(request.token_ids) - computed
            if missing > 1:
                behind.append(request)
                continue
            if not missing and self._ends_with_next_token(request):
                continue
            if hands_over and not request.stays and computed >= request.num_prompt_tokens:
                continue  # its prompt is computed: it leaves as soon as its token is known
            if plan.tokens_left and self._make_room(plan, request, computed + 1):
                if not missing:
                    request.token_ids.append(PLACEHOLDER)
                plan.take(request, 1)
        return behind

    def _run_behind(self, plan: _Step, request: Request, most: int) -> int:
        num_tokens = min(len(request.token_ids) - request.num_computed_tokens, most)
        plan.take(request, num_tokens)
        return num_tokens

    def _admit(self, plan: _Step, catch_up: int, weight_version: int) -> None:
        while self.waiting and catch_up and self.has_seat:
            request = self.waiting[0]
            if request.num_in_flight or self.still_blocked(request):
                return
            available = self.blocks.num_available
            self.blocks.match_prefix(request, weight_version)
            if self._is_too_much(request):
                self._give_back(request)
                continue
            missing = self.blocks.num_missing(request, len(request.token_ids))
            if missing + self.num_spare > self.blocks.num_available or not self.blocks.grow(request, len(request.token_ids)):
                self.blocks.free(request)
                self._blocked = (request, available, len(self.running))
                return
            self._blocked = None
            self.waiting.popleft()
            self.running[request.request_id] = request
            request.status = RequestStatus.RUNNING
            catch_up -= self._run_behind(plan, request, catch_up)

    # ------------------------------------------------------------------------------------------------ inside

    def still_blocked(self, request: Request) -> bool:
        """Whether nothing has come free since this request found no room: spares a long prompt's hashing at every step."""
        if not self.blocks.num_available:
            return True
        if self._blocked is None or self._blocked[0] is not request:
            return False
        return self.blocks.num_available <= self._blocked[1] and len(self.running) >= self._blocked[2]

    def _is_too_much(self, request: Request) -> bool:
        """Whether more of a request that was not begun is left to compute than it allows."""
        most = request.most_computed
        if most is None or request.num_preemptions or not self.policy.gives_back:
            return False
        return len(request.token_ids) - request.num_computed_tokens > most

    def _give_back(self, request: Request) -> None:
        """The first of the waiting requests is not begun here."""
        self.blocks.free(request)
        self.waiting.popleft()
        self._blocked = None
        request.status = RequestStatus.PARKED
        self.returned[request.request_id] = request

    def _ends_with_next_token(self, request: Request) -> bool:
        """Whether the token that an unfinished output is drawing is the last one by length."""
        num_tokens = len(request.token_ids) + 1
        return num_tokens - request.num_prompt_tokens >= request.max_tokens or num_tokens >= self.max_model_len

    def _make_room(self, plan: _Step, request: Request, num_tokens: int) -> bool:
        """Grows a running request's table, sending the last admitted ones away if need be; False: not in this step."""
        while not self.blocks.grow(request, num_tokens):
            if self.draining:
                return False  # blocks are on their way back
            victim = next(reversed(self.running.values()))
            if victim is request and len(self.running) == 1:
                return False  # it ends with the token in flight, or leases hold the rest of the pool and it waits for them
            self.preempt(victim)
            plan.preempted.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _release(self, request: Request) -> None:
        if request.num_in_flight:
            self.draining[request.request_id] = request
        else:
            self._reset(request)

    def _reset(self, request: Request) -> None:
        self.blocks.free(request)
        request.cacheable = True
