"""What the controller and the members of a cluster tell each other: who serves in which role, orders to one member, requests
that move between members, and how an external worker comes and goes.

Owns the types, and the bases of all commands and events. No tensors, sockets or clocks. Members are numbered: the ranks of
WORLD from 0, external workers from there on in the order in which they come; a number is never used again in a job. An order
to one member carries the member's new `epoch`, is numbered like every command, and is answered by one `Done`, whose `error`
says that the member could not, but lives.
"""

from __future__ import annotations

import enum

import msgspec

from pearl.kv_transfer import KVTransfer


class Role(enum.StrEnum):
    """What a serving worker does with requests. A value read by the batch scheduler, never a subclass or a launch flag."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One numbered order of the controller. Numbers are global; each rank carries out those sent to it in rising order."""

    number: int


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened on a rank, or to the external worker of this number."""

    rank: int


# ---------------------------------------------------------------------------------------------------- orders to one member


class SwitchRole(Command, frozen=True, kw_only=True, tag="switch_role"):
    """Change the role in place, between two steps; running requests that the new role does not go on with are offered."""

    role: Role
    epoch: int


class Prepare(Command, frozen=True, kw_only=True, tag="prepare"):
    """Build an engine, in the background; its weights come with `Wake`."""

    epoch: int


class Wake(Command, frozen=True, kw_only=True, tag="wake"):
    """Be awake and serve in this role, with weights of `weight_version` at least.

    Older ones are replaced first, from the machine's snapshot where there is one, else from one of `pulls` ("host:port" of
    those who have versions). On a training rank the trainer is put aside before the engine wakes.
    """

    role: Role
    epoch: int
    weight_version: int
    pulls: list[str] = []


class Sleep(Command, frozen=True, kw_only=True, tag="sleep"):
    """Stop serving: every unfinished request ends as "abort", its tokens sent; memory is given back, the trainer returns."""

    epoch: int


class Leave(Command, frozen=True, kw_only=True, tag="leave"):
    """Stop serving as in `Sleep`, answer, and end with exit code 0."""

    epoch: int


class Fetch(Command, frozen=True, kw_only=True, tag="fetch"):
    """A newer version is to be had of `pulls`: take it and go on serving meanwhile. For who has no part in publishing."""

    weight_version: int
    pulls: list[str] = []


# ---------------------------------------------------------------------------------------------------- requests that move


class HandOver(msgspec.Struct, frozen=True, kw_only=True, tag="hand_over"):
    """Offer these running requests to others; unknown ones are ignored."""

    request_ids: list[str]


class TakeOver(msgspec.Struct, frozen=True, kw_only=True, tag="take_over"):
    """Go on with what another member offers; answered by `TakenOver`."""

    transfer: KVTransfer


class FinishExport(msgspec.Struct, frozen=True, kw_only=True, tag="finish_export"):
    """Answers an offer. `ok`: another member has the request, else it goes on here. `arrived`: its KV is no longer needed."""

    transfer_id: str
    ok: bool
    arrived: bool = True


class HandedOff(Event, frozen=True, kw_only=True, tag="handed_off"):
    """Requests that this member offers; each has to be answered by `FinishExport`. All their tokens were sent before."""

    transfers: list[KVTransfer]


class TakenOver(Event, frozen=True, kw_only=True, tag="taken_over"):
    """Whether the request is this member's now. Said twice if its KV was still under way: then again once it has `arrived`."""

    transfer_id: str
    request_id: str
    ok: bool
    arrived: bool = True


# ---------------------------------------------------------------------------------------------------- who is there


class Report(Event, frozen=True, kw_only=True, tag="report"):
    """A serving member's own numbers, about once a second. KV in tokens; `epoch` of the last order that it obeyed."""

    epoch: int
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    weight_version: int


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """First message of an external worker, which has no number yet. That it was invited, its connection has shown."""

    pid: int
    host: str
    gpus: list[str] = []


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    """The answer: its number, the job's configuration (JSON), the folder of the model, and where the present weights are.

    `files`: what an engine needs of that folder, for who does not see it.
    """

    rank: int
    config: str
    model_folder: str
    weight_version: int
    pulls: list[str] = []
    files: dict[str, str] = {}


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The other answer; the worker ends."""

    reason: str


class Leaving(Event, frozen=True, kw_only=True, tag="leaving"):
    """An external worker will be gone after `notice_s` seconds."""

    notice_s: float
