"""Engine: one worker of inference, stepped by hand. The public face of core (decides) and model runner (does).

Owns how the two are put together, request ids, seeds and siblings (n > 1). It decides no step and touches no tensor
of one. Invariant: whatever is refused is refused with ValueError before anything has changed.

    engine = Engine(EngineConfig(model=folder, dtype="float32"))
    engine.add_request("once", SamplingParams(max_tokens=8))
    while engine.has_unfinished():
        for completion in engine.step(): ...
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from pearl.clock import Clock, WallClock
from pearl.config import EngineConfig
from pearl.engine.assembly import Parts, assemble, load_folder
from pearl.engine.comm.communicator import Communicator
from pearl.engine.core import CoreSettings, EngineCore, EngineStats
from pearl.engine.handoff import HandOff
from pearl.engine.migration.planner import check_layouts
from pearl.engine.model_folder import generation_defaults
from pearl.engine.models.config import ModelConfig
from pearl.engine.philox import derive_seed
from pearl.engine.request import Completion, Request, RequestUpdate
from pearl.engine.served_weights import ServedWeights
from pearl.engine.siblings import Siblings
from pearl.engine.steps import Steps
from pearl.protocol import KVReservation, SamplingParams

if TYPE_CHECKING:
    from pearl.engine.ending import TextStream
    from pearl.engine.migration.transport import Transport
    from pearl.engine.tokenizer import Tokenizer


class Engine(ServedWeights, HandOff):
    """Serves one model on one device. Not thread-safe: one loop owns it and calls `step`.

    `load_weights=False` builds it empty: it serves nothing until `update_weights` has brought a whole version. `text=False`
    leaves the tokenizer out: prompts are ids and `Completion.text` is empty. `clock` gives arrival times; `comm` is the
    Communicator of a tensor-parallel instance, all of whose ranks are called the same: `leader.Leader` sees to that.
    `transports` are the ways for KV between engines (None: all there are).
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock | None = None,
        comm: Communicator | None = None,
        *,
        load_weights: bool = True,
        text: bool = True,
        transports: Sequence[Transport] | None = None,
    ) -> None:
        self.config, self.comm = config, comm
        size = 1 if comm is None else comm.size
        if size != config.tensor_parallel:
            raise ValueError(
                f"comm: has {size} members, must have tensor_parallel={config.tensor_parallel}; LLM starts the others"
            )
        parts: Parts = assemble(config, comm if size > 1 else None)
        self.model_config = parts.model
        self.max_model_len = parts.max_model_len
        self.kernels_why = parts.why
        self._clock = clock or WallClock()
        self._decoder, self._runner, self._store = parts.decoder, parts.runner, parts.store
        self._own_memory(parts, config.kv_fill)
        self._own_pool(parts, transports, comm)
        self._text_folder = parts.tokenizer_folder if text else None
        self._tokenizer: Tokenizer | None = None
        self._eos = frozenset(token_id for token_id in parts.model.eos_token_ids if 0 <= token_id < parts.model.vocab_size)
        self._core = EngineCore(
            CoreSettings(
                block_size=config.block_size,
                num_blocks=parts.num_blocks,
                max_model_len=parts.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_batch_tokens=config.max_batch_tokens,
                decode_prefill_tokens=config.decode_prefill_tokens,
                enable_prefix_cache=config.enable_prefix_cache,
                eviction=config.eviction,
                vocab_size=parts.model.vocab_size,
                role=config.role,
                transfer_deadline=config.transfer_deadline_s,
            ),
            self._new_text if self._text_folder is not None else None,
            name=self._endpoint.worker,
            words=self._pool.leases,
        )
        self._steps = Steps(self._core, self._runner, ahead=config.overlap)
        self._counter = 0
        self._whole_text: set[str] = set()
        self._siblings = Siblings()
        self._pending: list[RequestUpdate] = []
        if load_weights:
            self._load_first_version()

    def _load_first_version(self) -> None:
        if self.config.load_format == "dummy":
            self._decoder.init_weights(self.config.seed)
            self._store.declare(0)
        else:
            load_folder(self._store, self.model_config, self.config.model)
        self._core.set_weight_version(0, "keep")

    # ------------------------------------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        session_id: str | None = None,
        reservation: KVReservation | None = None,
        *,
        streaming: bool = True,
        most_computed: int | None = None,
    ) -> str:
        """Queues a generation and returns its id (the given one, or the next number).

        A string is tokenised as plain text. With `params.n > 1` the siblings share prompt and seed; their updates carry this
        id and their index. `streaming=False` makes the text at the end only, which costs less. A turn of the session
        `session_id` hashes only what its last turn had not. With a `reservation` of another engine the request has room there
        when it is handed over. A DECODE engine that would have to compute more than `most_computed` of its tokens, since too
        little of the prompt is cached, gives it back: it ends as "abort" without a token. Raises ValueError.
        """
        if most_computed is not None and most_computed < 0:
            raise ValueError(f"most_computed={most_computed}: must be >= 0, or None")
        if reservation is not None:
            request_id = self._check_reservation(reservation, request_id)
        for field, value in (("request_id", request_id), ("cache_salt", cache_salt), ("session_id", session_id)):
            _check_name(field, value)
        ids, params = self._check_prompt(prompt, params)
        if self._text_folder is not None:
            self._tokenizer = self.tokenizer  # a folder whose tokenizer cannot be read fails here, before anything is queued
        rid = self._next_id() if request_id is None else request_id
        if self._known(rid):
            raise ValueError(f"request_id={rid!r}: is in use by a request that has not finished")
        seed = derive_seed(self.config.seed, rid) if params.seed is None else params.seed
        names = self._siblings.names(rid, params.n)
        for index, name in enumerate(names):
            request = self._request(name, ids, params, seed, index)
            request.cache_salt, request.session_id, request.most_computed = cache_salt, session_id, most_computed
            if reservation is not None and not index:
                request.reservation_id = reservation.reservation_id
            self._queue(request, streaming)
        self._siblings.open(rid, names)
        self._counter += request_id is None
        return rid

    def _queue(self, request: Request, streaming: bool) -> None:
        """Siblings differ in id and index alone, so that if the first is taken all are."""
        if not streaming:
            self._whole_text.add(request.request_id)
        try:
            self._core.add_request(request)
        except ValueError:
            self._whole_text.discard(request.request_id)
            raise

    def _known(self, request_id: str) -> bool:
        return request_id in self._core.requests or request_id in self._siblings

    def _request(self, name: str, ids: list[int], params: SamplingParams, seed: int, index: int) -> Request:
        room = max(1, self.max_model_len - len(ids))
        return Request(
            request_id=name,
            params=params,
            token_ids=list(ids),
            num_prompt_tokens=len(ids),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed,
            index=index,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=frozenset() if params.ignore_eos else self._eos,
            arrival=self._clock.now(),
        )

    def _check_reservation(self, reservation: KVReservation, request_id: str | None) -> str:
        """The id of the request that has it."""
        if not isinstance(reservation, KVReservation):
            raise ValueError(f"reservation={reservation!r}: must be a KVReservation")
        if request_id not in (None, reservation.request_id):
            raise ValueError(f"request_id={request_id!r}: the reservation is for {reservation.request_id!r}")
        check_layouts(self._whole_layout, reservation.layout)
        return reservation.request_id

    def _check_prompt(self, prompt: str | Sequence[int], params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: must be a SamplingParams")
        if params.stop and self._text_folder is None:
            raise ValueError(f"stop={params.stop!r}: needs a tokenizer, which this engine has not; use stop_token_ids")
        return self._prompt_ids(prompt), params

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._text_folder is None:
                raise ValueError(f"prompt={prompt[:40]!r}: this engine has no tokenizer; give token ids")
            return self.tokenizer.encode(prompt)
        try:
            ids = [] if isinstance(prompt, (bytes, Mapping, Set)) else list(prompt)
        except TypeError:
            ids = []
        if not ids:
            raise ValueError(f"prompt={prompt!r}: must be text or a list of at least 1 token id")
        if set(map(type, ids)) != {int}:
            wrong = next(token_id for token_id in ids if type(token_id) is not int)
            raise ValueError(f"prompt: token id {wrong!r} must be an integer")
        return ids

    def _next_id(self) -> str:
        """The counter's next free number; it moves on when the request has been taken, so a refused one uses none up."""
        while self._known(str(self._counter)):
            self._counter += 1
        return str(self._counter)

    def abort(self, request_id: str) -> bool:
        """Ends a request (and its siblings) with the tokens it has; they come with the next step. False if unknown."""
        updates = self._aborted(request_id)
        self._pending.extend(updates)
        return bool(updates)

    def discard(self, request_id: str) -> bool:
        """Like `abort`, but nothing of the request is delivered any more."""
        known = bool(self._aborted(request_id))
        self._pending = [update for update in self._pending if update.request_id != request_id]
        return known

    def _aborted(self, request_id: str) -> list[RequestUpdate]:
        members = self._siblings.members(request_id)
        updates = self._outward([update for member in members if (update := self._core.abort(member)) is not None])
        self._settle_moves()
        return updates

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks away; it is computed again and goes on with the same tokens."""
        for member in self._siblings.members(request_id):
            self._core.preempt(member)

    def pause(self) -> None:
        """Steps run nothing until `resume`; requests and their KV stay."""
        self._core.pause()

    def resume(self) -> None:
        self._core.resume()

    @property
    def paused(self) -> bool:
        return self._core.paused

    def has_unfinished(self) -> bool:
        """Whether a step has something to do or to deliver."""
        return bool(self._pending) or self._core.has_unfinished()

    # ------------------------------------------------------------------------------------------------ steps

    def step_updates(self) -> list[RequestUpdate]:
        """Runs one step; what it added to each request, ends included. Empty if nothing could run.

        With `overlap` in the configuration a step's updates come with the next call, while the one after it is running.
        RuntimeError while no whole version of the weights is in. When the model raises (memory, an interrupt), the step has not
        happened.
        """
        if not self._store.ready and not self.asleep:
            raise RuntimeError("the engine has no weights: update_weights must bring a whole version before step")
        self._poll_moves()
        fresh = self._steps.run(self._clock, self._store.version, self._announce_growing)
        updates, self._pending = self._pending, []
        updates += self._outward(fresh)
        self._announce_offers()
        return updates

    def _settle_steps(self) -> None:
        """Waits for the step that is queued, if there is one; what it gave comes with the next step."""
        self._pending += self._outward(self._steps.settle(self._clock))
        self._announce_offers()

    def step(self) -> list[Completion]:
        """Runs one step and returns the requests that finished in it."""
        return [update.completion for update in self.step_updates() if update.completion is not None]

    def stream(self) -> Iterator[RequestUpdate]:
        """Steps until nothing is left (or the engine is paused or asleep), yielding every request's new tokens as they come;
        what is offered to other engines is not waited for.

        What a caller who leaves the loop early has not been given comes with the next step.
        """
        while self.has_unfinished():
            updates = deque(self.step_updates())
            try:
                while updates:
                    yield updates.popleft()
            finally:
                self._pending[:0] = updates
            if (self.paused or self.asleep or self._core.only_offers) and not self._pending:
                return

    def _outward(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        """Siblings under the id that their caller knows; forgets what has ended."""
        if self._whole_text:
            self._whole_text.difference_update(update.request_id for update in updates if update.completion is not None)
        return self._siblings.outward(updates)

    # ------------------------------------------------------------------------------------------------ looking in

    @property
    def tokenizer(self) -> Tokenizer:
        """The model folder's tokenizer, loaded when first used. ValueError if there is none."""
        if self._text_folder is None:
            raise ValueError(f"model={self.config.model!r}: this engine has no tokenizer; give token ids")
        if self._tokenizer is None:
            from pearl.engine.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_folder(self._text_folder)
        return self._tokenizer

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """What the model folder recommends, as keywords of SamplingParams. Never applied to a request by the engine itself."""
        return {} if isinstance(self.config.model, ModelConfig) else generation_defaults(self.config.model)

    def _new_text(self, request: Request) -> TextStream:
        from pearl.engine.text_stream import TextStream

        return TextStream(
            self.tokenizer,
            stop=request.params.stop,
            min_tokens=request.params.min_tokens,
            streaming=request.request_id not in self._whole_text,
        )

    def stats(self) -> EngineStats:
        """Counts of blocks and requests, role and weight version (-1 before the first) at this moment."""
        stats = self._core.stats()
        return stats if self._store.ready else dataclasses.replace(stats, weight_version=self._store.version)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; returns how many blocks they were."""
        return self._core.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises with details if the block pool's books do not balance."""
        self._core.check_integrity()

    def close(self) -> None:
        """Ends the connections by which KV comes and goes, which the end of the process does too. Nothing is served afterwards;
        a second call does nothing."""
        self._transfers.close()


def _check_name(field: str, value: str | None) -> None:
    """Names are hashed in the middle of a step, and the zero character is kept for siblings: ValueError for a bad one."""
    if value is None:
        return
    if not isinstance(value, str) or "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{field}={value!r}: must be a string without lone surrogates and zero characters")
