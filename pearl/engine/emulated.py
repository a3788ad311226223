"""An engine without a device: the real core decides, a step takes the time that it would cost, and tokens are drawn at random.

Owns the waiting and the drawing. Requests, blocks, prefix cache, roles and hand-offs are `core.py`'s, the same as in `Engine`,
whose interface this has as far as a job uses it. What things cost is told from outside (`EmulatedCosts`). No KV exists: what
is handed over arrives after the time that its bytes would take, and none are moved. Invariants: tokens depend on a request's
seed and position alone, and every request ends; a step lasts as long as it costs, the host's own time included as far as that
is part of the cost. Torch-free.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

from pearl.clock import Clock, WallClock
from pearl.config import EngineConfig
from pearl.engine.core import CoreSettings, EngineCore, EngineStats, UpdateMode
from pearl.engine.limits import check_request
from pearl.engine.migration.planner import check_layouts
from pearl.engine.moving import Export
from pearl.engine.request import Request, RequestStatus, RequestUpdate, SampledToken, SchedulerOutput, StepResult
from pearl.engine.role import RoleSwitchReport
from pearl.engine.steps import Steps
from pearl.engine.travel import request_of, state_of
from pearl.kv_transfer import why_impossible
from pearl.protocol import KVEndpoint, KVLayout, KVTransfer, Role, SamplingParams

IDLE_S = 0.002
"""How long a step takes in which nothing can run, though something is on its way."""
WORD_BITS = 64
_numbers = itertools.count()
"""Engines of this process."""


class EmulatedCosts(Protocol):
    """Seconds, as they are to pass here."""

    def step_s(self, output: SchedulerOutput) -> float: ...
    def host_s(self) -> float:
        """What of a step's price is the host's own work, which takes its own time anyway."""

    def transfer_s(self, tokens: int) -> float: ...
    def change_s(self, kind: str) -> float:
        """Of a change of role ("switch"), of waking ("borrow") and of falling asleep ("give_back")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What an emulated policy says: ids of `alphabet`, uniformly, and a turn's end after a lognormal number of tokens."""

    alphabet: tuple[int, ...]
    mean_tokens: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        if not self.alphabet or not self.mean_tokens >= 1 or not self.sigma >= 0:
            sizes = f"alphabet of {len(self.alphabet)}, mean_tokens={self.mean_tokens}, sigma={self.sigma}"
            raise ValueError(f"{sizes}: must have at least 1 id, be >= 1 and >= 0")

    def draw(self, request: Request) -> SampledToken:
        """The request's next token; the first of its stop ids when its turn is over."""
        position = len(request.token_ids) - request.num_prompt_tokens
        if request.token_ids[-1] < 0:  # a placeholder stands for the token that is drawn now
            position -= 1
        if request.stop_token_ids and position + 1 >= turn_tokens(self, request.seed):
            return SampledToken(token_id=min(request.stop_token_ids), logprob=-math.log(len(self.alphabet)))
        index = _mixed(request.seed + (position + 1) * 0x9E3779B97F4A7C15) % len(self.alphabet)
        return SampledToken(token_id=self.alphabet[index], logprob=-math.log(len(self.alphabet)))


@functools.lru_cache(maxsize=1 << 14)
def turn_tokens(speech: Speech, seed: int) -> int:
    """Tokens of the turn with this seed, its end included; lognormal with the speech's mean."""
    uniform = (_mixed(seed) + 0.5) / 2**WORD_BITS
    normal = NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9))
    return max(1, round(speech.mean_tokens * math.exp(speech.sigma * normal - speech.sigma**2 / 2)))


def _mixed(word: int) -> int:
    """A 64 bit word from another: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    word &= (1 << WORD_BITS) - 1
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & (1 << WORD_BITS) - 1
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & (1 << WORD_BITS) - 1
    return word ^ (word >> 31)


class EmulatedRunner:
    """`launch` as a ModelRunner's; the result is there when the step's time has passed."""

    def __init__(self, costs: EmulatedCosts, speech: Speech, clock: Clock, pause: Callable[[float], None]) -> None:
        self._costs, self._speech, self._clock, self._pause = costs, speech, clock, pause
        self._free_at = -math.inf

    def launch(
        self, output: SchedulerOutput, requests: Mapping[str, Request], *, weight_version: int
    ) -> Callable[[], StepResult]:
        now = self._clock.now()
        start = max(now - self._costs.host_s(), self._free_at)
        self._free_at = start + (self._costs.step_s(output) if output.requests else IDLE_S)

        def finished() -> StepResult:
            self._pause(max(0.0, self._free_at - self._clock.now()))
            sampled = {
                entry.request_id: self._speech.draw(requests[entry.request_id]) for entry in output.requests if entry.samples
            }
            return StepResult(sampled=sampled, weight_version=weight_version)

        return finished


class EmulatedEngine:
    """Serves on a device that is not there. Not thread-safe. `num_blocks` of `config` must be set; `vocab_size` bounds ids.

    `asleep`: it begins so.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        costs: EmulatedCosts,
        speech: Speech,
        max_model_len: int,
        vocab_size: int,
        asleep: bool = False,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if config.num_blocks is None:
            raise ValueError("engine.num_blocks=None: an emulated engine has no memory to size its pool by")
        self.config, self.max_model_len = config, max_model_len
        self._costs, self._clock, self._pause = costs, clock or WallClock(), pause
        host, pid = socket.gethostname(), os.getpid()
        name = f"{host}:{pid}:emulated{next(_numbers)}"
        self._endpoint = KVEndpoint(worker=name, host=host, pid=pid, num_blocks=config.num_blocks, addresses={})
        self._layout = KVLayout(
            dtype="emulated", block_size=config.block_size, num_layers=1, num_kv_heads=1, head_dim=1, order="none"
        )
        self._core = EngineCore(
            CoreSettings(
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_batch_tokens=config.max_batch_tokens,
                decode_prefill_tokens=config.decode_prefill_tokens,
                enable_prefix_cache=config.enable_prefix_cache,
                eviction=config.eviction,
                vocab_size=vocab_size,
                role=config.role,
                transfer_deadline=config.transfer_deadline_s,
            ),
            name=name,
        )
        self._steps = Steps(self._core, EmulatedRunner(costs, speech, self._clock, pause), ahead=config.overlap)
        if asleep:
            self._core.sleep()
        self._version = -1
        self._here_at: dict[str, float] = {}
        self._pending: list[RequestUpdate] = []

    # ------------------------------------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str | None = None,
        session_id: str | None = None,
        most_computed: int | None = None,
    ) -> str:
        """Queues a generation; `params.seed` decides its tokens. ValueError, as the real one's."""
        ids = list(prompt)
        room = max(1, self.max_model_len - len(ids))
        request = Request(
            request_id=request_id,
            params=params,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=params.seed or 0,
            stop_token_ids=frozenset(params.stop_token_ids),
            cache_salt=cache_salt,
            session_id=session_id,
            most_computed=most_computed,
            arrival=self._clock.now(),
        )
        self._core.add_request(request)
        return request_id

    def abort(self, request_id: str) -> bool:
        """Ends a request with the tokens it has; they come with the next step. False if unknown."""
        update = self._core.abort(request_id)
        self._pending += [] if update is None else [update]
        self._settle_arrivals()
        return update is not None

    def discard(self, request_id: str) -> bool:
        """Like `abort`, but nothing of the request is delivered any more."""
        known = self._core.abort(request_id) is not None
        self._pending = [update for update in self._pending if update.request_id != request_id]
        self._settle_arrivals()
        return known

    def has_unfinished(self) -> bool:
        return bool(self._pending) or self._core.has_unfinished()

    def step_updates(self) -> list[RequestUpdate]:
        """Runs one step; returns when its time has passed. RuntimeError before the first weight version."""
        if self._version < 0 and not self.asleep:
            raise RuntimeError("the engine has no weights: a version must be taken before step")
        self._settle_arrivals()
        fresh = self._steps.run(self._clock, self._version, lambda: None)
        updates, self._pending = self._pending, []
        return updates + fresh

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check_integrity(self) -> None:
        self._core.check_integrity()

    # ------------------------------------------------------------------------------------------------ weights and memory

    @property
    def weight_version(self) -> int:
        return self._version

    def take_version(self, version: int, mode: UpdateMode = "keep") -> None:
        """The weights are of `version` from now on. ValueError if that is not newer."""
        if version <= self._version:
            raise ValueError(f"version={version}: must be greater than {self._version}, the present version")
        self._pending += self._steps.settle(self._clock)
        self._pending += self._core.set_weight_version(version, mode)
        self._version = version

    @property
    def asleep(self) -> bool:
        return self._core.asleep

    def sleep(self, weights: str = "keep") -> None:
        """Requests give way and go on after `wake`. "drop": after it a version has to be taken before anything is served."""
        if self.asleep:
            raise ValueError("the engine is asleep: wake it first")
        self._pending += self._steps.settle(self._clock)
        self._core.sleep()
        self._version = self._version if weights == "keep" else -1
        self._pause(self._costs.change_s("give_back"))

    def wake(self) -> None:
        if not self.asleep:
            raise ValueError("wake: the engine is awake")
        self._pause(self._costs.change_s("borrow"))
        self._core.wake()

    # ------------------------------------------------------------------------------------------------ roles and hand-offs

    def switch_role(self, role: Role, drain: Any = "handover") -> RoleSwitchReport:
        """As the real one's; takes the time that a change costs."""
        start = self._clock.now()
        self._pending += self._steps.settle(self._clock)
        switch = self._core.switch_role(role, drain, start)
        self._settle_arrivals()
        self._pause(self._costs.change_s("switch"))
        moved, again = (0, len(switch.leaving)) if drain == "recompute" else (len(switch.leaving), 0)
        return RoleSwitchReport(seconds=self._clock.now() - start, moved=moved, recomputed=again)

    def take_handoffs(self) -> list[KVTransfer]:
        """What this engine offers since the last call; each must be answered by `finish_export`."""
        now = self._clock.now()
        self._core.expire(now)
        return [self._transfer(export, now) for export in self._core.take_offers()]

    def export_kv(self, request_id: str) -> KVTransfer:
        """Offers a waiting or running request by hand. ValueError if there is none."""
        self._pending += self._steps.settle(self._clock)
        request = self._core.requests.get(request_id)
        if request is None or request.status not in (RequestStatus.RUNNING, RequestStatus.WAITING):
            raise ValueError(f"request_id={request_id!r}: no such request is waiting or running here")
        now = self._clock.now()
        export = self._core.offer(request, now)
        export.taken = True
        return self._transfer(export, now)

    def finish_export(self, transfer_id: str, ok: bool, *, arrived: bool = True) -> None:
        """Answers an offer; unknown ones are ignored and counted."""
        self._core.finish_export(transfer_id, ok, arrived)

    def import_kv(self, transfer: KVTransfer, transport: Any = "auto") -> bool:
        """Goes on with another emulated engine's request. False: no room now. ValueError: never."""
        check_layouts(transfer.layout, self._layout)
        known = self._core.arrivals.get(transfer.transfer_id)
        if transfer.state.name in self._core.requests or (known is not None and known.live):
            raise ValueError(f"request_id={transfer.request_id!r}: is in use by a request that has not finished")
        now = self._clock.now()
        if wrong := why_impossible(transfer):
            raise ValueError(wrong)
        request = request_of(transfer.state, now)
        check_request(request, self._core.settings)
        if self.asleep or self._version < 0 or known is not None:
            return False
        self._core.expire(now)
        arrival = self._core.take_in(
            request,
            transfer_id=transfer.transfer_id,
            num_tokens=transfer.num_written_tokens,
            version=transfer.weight_version,
            reservation_id=None,
            expires=now + transfer.deadline,
        )
        if arrival is None:
            return False
        missing = transfer.num_written_tokens - arrival.num_held
        self._here_at[transfer.transfer_id] = now + (self._costs.transfer_s(missing) if missing > 0 else 0.0)
        self._settle_arrivals()
        return True

    def is_arriving(self, transfer_id: str) -> bool:
        """Whether a request that was taken in still waits for its KV."""
        arrival = self._core.arrivals.get(transfer_id)
        return arrival is not None and arrival.live

    def _settle_arrivals(self) -> None:
        now = self._clock.now()
        for name, arrival in list(self._core.arrivals.items()):
            if not arrival.live:
                self._core.release_arrival(name)  # nothing is written, so nothing has to be waited for
            elif self._here_at.get(name, now) <= now:
                self._core.arrived(name)
        self._here_at = {name: at for name, at in self._here_at.items() if name in self._core.arrivals}

    def _transfer(self, export: Export, now: float) -> KVTransfer:
        name = export.request.request_id
        return KVTransfer(
            transfer_id=export.transfer_id,
            request_id=name,
            state=state_of(export.request, request_id=name, streaming=False),
            source=self._endpoint,
            blocks=list(export.blocks),
            lease_word=export.word,
            num_written_tokens=export.num_tokens,
            layout=self._layout,
            weight_version=export.weight_version,
            epoch=export.epoch,
            deadline=export.expires - now,
        )
