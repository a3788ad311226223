"""Takes a weight version from whoever has it, into this node's snapshot, and from there into an engine.

Owns the receiver's side: whom to ask, in which order, for how long. It does not know who ought to be asked (`fanout.py`). No
collective of the trainers has a part in it. Invariants: nothing that came is seen by anybody before all of it is in, every
checksum was verified and every value is finite; a failure leaves snapshot and engine with what they had; every wait has a
limit.

`fetch` needs no engine and may run in any thread beside one that serves; `load` is done between two steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pearl.engine.comm.communicator import CollectiveError, Communicator
from pearl.engine.comm.conversation import Conversation, ConversationError, pair_over
from pearl.engine.comm.groups import LOCAL
from pearl.engine.comm.pairs import Pair
from pearl.engine.weights.arrivals import NamedRows
from pearl.engine.weights.conversation import Answer, Ask, Report
from pearl.engine.weights.snapshot import Draft, Snapshot, SnapshotReader, digest_of
from pearl.engine.weights.transfer import WeightReceiver

TIMEOUT_S = 10.0
TOTAL_TIMEOUT_S = 300.0
POLL_S = 0.0005
PAUSE_S = 0.05
"""How long until those are asked again who have nothing yet."""


class StagingTarget(Protocol):
    """Who takes weights bit by bit; an Engine."""

    @property
    def weight_version(self) -> int: ...
    def stage_weights(self, tensors: Iterable[NamedRows], version: int, *, adopt: bool = False) -> None: ...
    def commit_weights(self, version: int, mode: str = "keep") -> None: ...
    def discard_weights(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whom to ask: the PullServer at `port` of `host`. `name` is for people."""

    name: str
    port: int
    host: str = LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """`holder` gave `version`, None if it was in the snapshot already; `failures`: why others did not, by name."""

    version: int
    holder: str | None
    nbytes: int
    seconds: float
    failures: dict[str, str]


class SnapshotReceiver(WeightReceiver):
    """A WeightReceiver whose memory is a draft of a snapshot: what has come need not be copied to be kept."""

    def __init__(self, comm: Communicator, snapshot: Snapshot, timeout_s: float = TIMEOUT_S) -> None:
        plan = snapshot.plan
        super().__init__(comm, plan.config, plan.dtype, bucket_bytes=plan.bucket_bytes, timeout_s=timeout_s)

    def receive(self, draft: Draft) -> None:
        """Begins to take the draft's version; to be polled."""
        self._messages = list(draft.messages)
        self.begin(draft.version)

    def settle(self, timeout_s: float) -> bool:
        """After a failure: True once nothing can be written to the draft any more; False if that took too long."""
        deadline = time.monotonic() + timeout_s
        for pending in self._pending:
            try:
                while pending is not None and not pending.done():
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(POLL_S)
            except CollectiveError:
                continue  # it failed, and so it is over
        return True


def pull(
    target: StagingTarget,
    snapshot: Snapshot,
    holders: Sequence[Holder],
    *,
    name: str,
    version: int | None = None,
    total_timeout_s: float = TOTAL_TIMEOUT_S,
    timeout_s: float = TIMEOUT_S,
    patience_s: float = 0.0,
    mode: str = "keep",
    adopt: bool = True,
) -> PullReport:
    """`fetch`, then `load`: the engine serves the new version, or after an error what it served before."""
    waits = {"total_timeout_s": total_timeout_s, "timeout_s": timeout_s, "patience_s": patience_s}
    report = fetch(snapshot, holders, name=name, version=version, **waits)
    reader = snapshot.reader()
    try:
        load(target, reader, report.version, mode=mode, adopt=adopt)
    finally:
        reader.close()
    return report


def load(
    target: StagingTarget, reader: SnapshotReader, version: int | None = None, *, mode: str = "keep", adopt: bool = True
) -> int:
    """Makes an engine serve a version of its node's snapshot; the version.

    `adopt`: the snapshot's memory is the staged copy, which takes an engine on the CPU; otherwise the engine makes its own.
    ValueError if it is not there, not newer than the engine's, damaged, or does not fit.
    """
    with reader.lease(version) as lease:
        if lease.version <= target.weight_version:
            raise ValueError(f"version={lease.version}: must be greater than {target.weight_version}, the present version")
        lease.check()
        try:
            target.stage_weights(list(lease.rows()), lease.version, adopt=adopt)
            target.commit_weights(lease.version, mode=mode)
        except BaseException:
            target.discard_weights()
            raise
        return lease.version


def fetch(
    snapshot: Snapshot,
    holders: Sequence[Holder],
    *,
    name: str,
    version: int | None = None,
    total_timeout_s: float = TOTAL_TIMEOUT_S,
    timeout_s: float = TIMEOUT_S,
    patience_s: float = 0.0,
) -> PullReport:
    """Brings `version`, or a newer one than there is, into `snapshot`. `name`: who we are.

    The holders are asked in their order until one has given it. One that is busy or has no such version yet is asked again
    for `patience_s` before the next is asked, and once more after all others: a receiver in a tree waits for its parent, and
    does not run to the root. `timeout_s` bounds every single wait, `total_timeout_s` all of it. CollectiveError says why none
    of them gave it; ValueError if there is nobody to ask, or the snapshot is past that version.
    """
    present = max(snapshot.versions, default=-1)
    if not holders:
        raise ValueError("holders=(): must name somebody to ask")
    if version is not None and version in snapshot.versions:
        return PullReport(version=version, holder=None, nbytes=0, seconds=0.0, failures={})
    if version is not None and version <= present:
        raise ValueError(f"version={version}: must be greater than {present}, the newest in the snapshot here")
    return _Search(snapshot, name, version, present, timeout_s, total_timeout_s).among(holders, patience_s)


class _Search:
    """From one holder to the next, until one has given the version."""

    def __init__(
        self, snapshot: Snapshot, name: str, version: int | None, present: int, timeout_s: float, total_timeout_s: float
    ) -> None:
        self._snapshot, self._name, self._version, self._present = snapshot, name, version, present
        self._timeout_s, self._total_s = timeout_s, total_timeout_s
        self._start = time.monotonic()
        self._deadline = self._start + total_timeout_s
        self._failures: dict[str, str] = {}

    def among(self, holders: Sequence[Holder], patience_s: float) -> PullReport:
        left = list(holders)
        while left and self._wait_s() > 0:
            for holder in tuple(left):
                patient_until = time.monotonic() + patience_s
                try:
                    while (report := self._ask(holder)) is None and time.monotonic() < patient_until:
                        time.sleep(max(0.0, min(PAUSE_S, self._wait_s())))
                except (ConversationError, CollectiveError, ValueError, OSError) as error:
                    self._failures[holder.name] = str(error)
                    left.remove(holder)
                    continue
                if report is not None:
                    return report
            time.sleep(max(0.0, min(PAUSE_S, self._wait_s())) if left else 0.0)
        wanted = f"version {self._version}" if self._version is not None else f"a version after {self._present}"
        reasons = "; ".join(f"{who}: {why}" for who, why in self._failures.items())
        seconds = time.monotonic() - self._start
        raise CollectiveError(f"{self._name}: {wanted} came from nobody within {seconds:.1f} of {self._total_s:g} s: {reasons}")

    def _ask(self, holder: Holder) -> PullReport | None:
        """None if it may have it later."""
        wait = min(self._timeout_s, self._wait_s())
        if wait <= 0:
            return None
        try:
            attempt = _Attempt(self._snapshot, holder, self._name, wait, self._deadline)
            version, nbytes = attempt.run(self._version, self._present)
        except _Later as error:
            self._failures[holder.name] = str(error)
            return None
        seconds = time.monotonic() - self._start
        return PullReport(version=version, holder=holder.name, nbytes=nbytes, seconds=seconds, failures=self._failures)

    def _wait_s(self) -> float:
        return self._deadline - time.monotonic()


class _Later(Exception):
    """The holder may have it later."""


class _Attempt:
    """One holder, asked once."""

    def __init__(self, snapshot: Snapshot, holder: Holder, name: str, timeout_s: float, deadline: float) -> None:
        self._snapshot, self._holder, self._name = snapshot, holder, name
        self._timeout_s, self._deadline = timeout_s, deadline

    def run(self, version: int | None, present: int) -> tuple[int, int]:
        """The version that is now in the snapshot, and its bytes."""
        conversation = Conversation.begin(self._holder.host, self._holder.port, self._timeout_s)
        try:
            plan = self._snapshot.plan
            dtype = str(plan.dtype).removeprefix("torch.")
            ask = Ask(name=self._name, version=version, present=present, dtype=dtype, plan=plan.fingerprint)
            conversation.say(ask, self._timeout_s)
            answer = conversation.hear(Answer, self._timeout_s)
            if answer.refusal:
                raise _Later(answer.refusal) if answer.later else ValueError(answer.refusal)
            if answer.version <= present or version not in (None, answer.version):
                raise ValueError(f"offers version {answer.version}")
            return answer.version, self._take(conversation, answer)
        finally:
            conversation.close()

    def _take(self, conversation: Conversation, answer: Answer) -> int:
        draft = self._snapshot.draft(answer.version, wait_s=self._timeout_s / 2)
        if draft is None:
            raise ValueError("readers hold all slots of the snapshot here")
        pair: Pair | None = None
        receiver: SnapshotReceiver | None = None
        try:
            pair = pair_over(conversation, 1, answer.generation, self._timeout_s)
            assert pair.comm is not None
            receiver = SnapshotReceiver(pair.comm, self._snapshot, self._timeout_s)
            self._receive(receiver, draft, conversation)
        except BaseException as error:
            self._abandon(conversation, answer, str(error))
            settled = receiver is None or receiver.settle(2 * self._timeout_s)
            if pair is not None:
                pair.close(settled=settled)
            if settled:
                draft.discard()
            else:
                draft.abandon()
            raise
        pair.close(settled=True)
        report = Report(version=draft.version, generation=answer.generation, digest=digest_of(draft.messages))
        draft.finish()
        with contextlib.suppress(ConversationError):  # the holder has gone, but all of the version is here
            conversation.say(report, self._timeout_s)
        return receiver.nbytes

    def _receive(self, receiver: SnapshotReceiver, draft: Draft, conversation: Conversation) -> None:
        receiver.receive(draft)
        taken = 0
        while not receiver.finished:
            taken += len(receiver.poll())
            if time.monotonic() > self._deadline:
                raise CollectiveError(f"version {draft.version}: no time is left after {taken} buckets")
            if receiver.waiting:
                time.sleep(POLL_S)

    def _abandon(self, conversation: Conversation, answer: Answer, words: str) -> None:
        """Tells the holder, if it is still there, that it need not wait."""
        report = Report(version=answer.version, generation=answer.generation, problem=words[:1000])
        try:
            conversation.say(report, self._timeout_s)
        except ConversationError:
            return
