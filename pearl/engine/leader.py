"""Leader: the first rank of a tensor-parallel instance, an Engine to its caller. The others do what is called on it.

Owns when the other ranks hear of what: calls that change something are noted and go out with the next step (or the next
tensors), so that all ranks apply them at the same place. It knows no processes. Invariants: all ranks make the same calls in
the same order and so take the same decisions; what is refused here was never sent; an instance of which a rank is lost serves
nothing any more.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from pearl.clock import Clock, WallClock
from pearl.config import EngineConfig
from pearl.engine import calls
from pearl.engine.assembly import with_pool
from pearl.engine.calls import HeldClock, send_calls, send_end, sent
from pearl.engine.comm.agreement import agreed, check_same
from pearl.engine.comm.communicator import CollectiveError, Communicator
from pearl.engine.core import UpdateMode
from pearl.engine.engine import Engine
from pearl.engine.migration.transport import Transport
from pearl.engine.request import RequestUpdate
from pearl.engine.role import Drain, RoleSwitchReport
from pearl.engine.served_weights import UPDATE_MODES
from pearl.engine.weights.store import NamedRows
from pearl.protocol import KVReservation, KVTransfer, Role, SamplingParams


class Leader(Engine):
    """As Engine, on rank 0 of `comm`; the other ranks are in `worker.follow` with the same `config`.

    `check_ranks`: every step all ranks compare the ids they drew (for tests and to look for faults; one more collective).
    `last_words` says what ranks that are lost gave as their reason, if they gave one.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock | None = None,
        *,
        comm: Communicator,
        load_weights: bool = True,
        text: bool = True,
        transports: Sequence[Transport] | None = None,
        check_ranks: bool = False,
        last_words: Callable[[], str] | None = None,
    ) -> None:
        self.comm, self._check_ranks, self._last_words = comm, check_ranks, last_words
        self._held = HeldClock(clock or WallClock())
        self._noted: list[calls.Call] = []
        self._gone: str | None = None
        config = with_pool(config, comm)
        with agreed(comm):
            super().__init__(config, self._held, comm, load_weights=load_weights, text=text, transports=transports)
        self.meet(comm)

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
        now = self._now()
        ids = self._prompt_ids(prompt)
        params = SamplingParams() if params is None else params
        with self._held.held(now):
            options: dict[str, Any] = {"streaming": streaming, "most_computed": most_computed}
            rid = super().add_request(ids, params, request_id, cache_salt, session_id, reservation, **options)
        call = calls.AddRequest(
            now=now,
            request_id=rid,
            prompt=ids,
            params=params,
            cache_salt=cache_salt,
            session_id=session_id,
            reservation=reservation,
            **options,
        )
        return self._note(call, rid)

    def abort(self, request_id: str) -> bool:
        now = self._now()
        return super().abort(request_id) and self._note(calls.Abort(now=now, request_id=request_id), True)

    def discard(self, request_id: str) -> bool:
        """As Engine's; also when the instance is lost, so that nothing is left behind."""
        now = self._held.now()
        return super().discard(request_id) and self._note(calls.Discard(now=now, request_id=request_id), True)

    def preempt(self, request_id: str) -> None:
        now = self._now()
        super().preempt(request_id)
        if self._known(request_id):
            self._note(calls.Preempt(now=now, request_id=request_id), None)

    def pause(self) -> None:
        self._note(calls.Pause(now=self._now()), super().pause())

    def resume(self) -> None:
        self._note(calls.Resume(now=self._now()), super().resume())

    # ------------------------------------------------------------------------------------------------ steps

    def step_updates(self) -> list[RequestUpdate]:
        """As Engine's; but when it raises in the middle of a step the instance is lost, since other ranks have gone on.

        A Ctrl-C is therefore raised when the step is through; only a second one gets into the middle of it.
        """
        now = self._now()
        if not self._store.ready and not self.asleep:
            return super().step_updates()  # which refuses
        updates: list[RequestUpdate] = []
        try:
            with _interrupted_afterwards(), self._all_or_none(), self._held.held(now):
                self._send(calls.Step(now=now, check=self._check_ranks))
                updates = super().step_updates()
                if self._check_ranks:
                    check_same(self.comm, self._runner.last_ids)
        except KeyboardInterrupt:
            self._pending[:0] = updates  # they come with the next step
            raise
        return updates

    # ------------------------------------------------------------------------------------------------ weights and role

    def stage_weights(self, tensors: Iterable[NamedRows], version: int, *, adopt: bool = False) -> None:
        """As Engine's. The tensors are given here alone and go to all ranks, of which each keeps its part; if one of them
        cannot take them, all discard what was staged."""
        now = self._now()
        if type(version) is not int:
            return super().stage_weights(tensors, version)  # which refuses
        with self._all_or_none(Exception):
            self._send(calls.StageWeights(now=now, version=version))
            try:
                with agreed(self.comm), self._tensors_end():
                    super().stage_weights(sent(self.comm, tensors), version, adopt=adopt)
            except CollectiveError:
                raise
            except Exception:
                self.discard_weights()
                raise

    def commit_weights(self, version: int, mode: UpdateMode = "keep") -> None:
        """As Engine's, once all ranks have said that they can."""
        now = self._now()
        if self._store.staged_version != version or mode not in UPDATE_MODES:
            return super().commit_weights(version, mode)  # which refuses
        well = False
        with self._all_or_none(ValueError):
            self._send(calls.CommitWeights(now=now, version=version, mode=mode))
            try:
                with agreed(self.comm):
                    self._store.check()
                    well = True
            except ValueError:
                if well or self._store.staged_version is None:
                    self.discard_weights()
                raise
            super().commit_weights(version, mode)

    def _stream(self, tensors: Iterable[NamedRows], version: int, mode: UpdateMode) -> None:
        """A sequence is checked, and written, here before the others hear of it; what comes one by one goes along."""
        now, before, here = self._now(), self._store.version, super()._stream
        if type(version) is not int:
            return here(tensors, version, mode)  # which refuses
        at_once = isinstance(tensors, Sequence)
        try:
            if at_once:
                here(tensors, version, mode)
            with self._all_or_none(Exception):
                self._send(calls.StreamWeights(now=now, version=version, mode=mode))
                with agreed(self.comm), self._tensors_end():
                    passing = sent(self.comm, tensors)
                    deque(passing, maxlen=0) if at_once else here(passing, version, mode)
        except Exception:
            if self._store.version != before and self._gone is None:
                self.drop_weights()
            raise

    def drop_weights(self) -> None:
        self._note(calls.DropWeights(now=self._now()), super().drop_weights())

    def discard_weights(self) -> None:
        self._note(calls.DiscardWeights(now=self._now()), super().discard_weights())

    def switch_role(self, role: Role, drain: Drain = "handover") -> RoleSwitchReport:
        self._now()
        return super().switch_role(role, drain)

    def _switch(self, role: Role, drain: Drain) -> int:
        now = self._now()
        with self._held.held(now):
            left = super()._switch(role, drain)
        told = "handover" if drain == "finish" else drain  # the others have run the same steps
        return self._note(calls.SwitchRole(now=now, role=role, drain=told), left)

    def sleep(self, weights: Literal["keep", "drop"] = "keep") -> None:
        self._note(calls.Sleep(now=self._now(), weights=weights), super().sleep(weights))

    def wake(self) -> None:
        self._note(calls.Wake(now=self._now()), super().wake())

    def reset_prefix_cache(self) -> int:
        return self._note(calls.ResetPrefixCache(now=self._now()), super().reset_prefix_cache())

    # ------------------------------------------------------------------------------------------------ requests that move

    def take_handoffs(self) -> list[KVTransfer]:
        now = self._now()
        with self._held.held(now):
            return self._note(calls.TakeHandoffs(now=now), super().take_handoffs())

    def export_kv(self, request_id: str) -> KVTransfer:
        now = self._now()
        with self._held.held(now):
            return self._note(calls.ExportKV(now=now, request_id=request_id), super().export_kv(request_id))

    def finish_export(self, transfer_id: str, ok: bool, *, arrived: bool = True) -> None:
        now = self._now()
        with self._held.held(now):
            super().finish_export(transfer_id, ok, arrived=arrived)
        self._note(calls.FinishExport(now=now, transfer_id=transfer_id, ok=ok, arrived=arrived), None)

    def import_kv(self, transfer: KVTransfer, transport: str | Transport = "auto") -> bool:
        """As Engine's, by the name of a transport. What is taken in runs when the KV is there on all ranks, which is settled
        with the steps; if one of them cannot get its part, all compute the request again."""
        now, name = self._now(), _name_of(transport)
        with self._held.held(now):
            taken = super().import_kv(transfer, name)
        return self._note(calls.ImportKV(now=now, transfer=transfer, transport=name, taken=taken), taken)

    def read_along(self, transfer: KVTransfer, transport: str | Transport = "auto") -> bool:
        now, name = self._now(), _name_of(transport)
        ways = self._ways_along(transfer, name)
        if ways is None:
            return False
        with self._held.held(now):
            begun = self._read_along(transfer, ways)
        return self._note(calls.ReadAlong(now=now, transfer=transfer, transport=name), begun)

    def reserve_kv(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None = None
    ) -> KVReservation | None:
        now, ids = self._now(), self._prompt_ids(prompt_token_ids)
        with self._held.held(now):
            credit = super().reserve_kv(request_id, ids, params, cache_salt)
        call = calls.ReserveKV(now=now, request_id=request_id, prompt_token_ids=ids, params=params, cache_salt=cache_salt)
        return self._note(call, credit)

    def release_reservation(self, reservation: KVReservation) -> None:
        now = self._now()
        super().release_reservation(reservation)
        self._note(calls.ReleaseReservation(now=now, reservation=reservation), None)

    def close(self) -> None:
        """Lets the other ranks go. The engine serves nothing afterwards; a second call does nothing."""
        if self._gone is None:
            with contextlib.suppress(CollectiveError):
                self._send(calls.Close(now=self._now()))
            self._gone = "it was closed"
        super().close()

    # ------------------------------------------------------------------------------------------------ inside

    def _now(self) -> float:
        """The time of the call that begins. RuntimeError if the instance is not whole any more."""
        if self._gone is not None:
            raise RuntimeError(f"the instance of {self.comm.size} ranks serves nothing any more: {self._gone}")
        return self._held.now()

    def _note(self, call: calls.Call, result: Any) -> Any:
        """Keeps a call that has been carried out here for the other ranks; returns its result."""
        self._noted.append(call)
        return result

    def _send(self, call: calls.Call) -> None:
        noted, self._noted = self._noted, []
        send_calls(self.comm, [*noted, call])

    @contextlib.contextmanager
    def _all_or_none(self, *harmless: type[Exception]) -> Iterator[None]:
        """An error inside ends the instance, except for the `harmless` kinds, which all ranks have agreed on."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, CollectiveError) or not isinstance(error, harmless):
                self._gone = f"{type(error).__name__}: {error}"
            words = self._last_words() if isinstance(error, CollectiveError) and self._last_words is not None else ""
            if words:
                self._gone = words
                raise CollectiveError(f"{words} ({error})") from error
            raise

    @contextlib.contextmanager
    def _tensors_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            send_end(self.comm)


def _name_of(transport: str | Transport) -> str:
    if not isinstance(transport, str):
        raise ValueError(f"transport={transport!r}: must be a name, since every rank has its own")
    return transport


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Holds a first SIGINT back until what is inside is through. Signals reach the main thread alone."""
    plain = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or plain is None:
        yield
        return
    came: list[int] = []

    def note(signum: int, _frame: object) -> None:
        came.append(signum)
        signal.signal(signal.SIGINT, plain)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, plain)
        if came:
            signal.raise_signal(signal.SIGINT)
