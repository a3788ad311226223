"""Every type that crosses a process: roles, sampling parameters, commands, events, request traffic.

Owns the wire vocabulary of a job and its validation. It does not know sockets (`channel.py`), tensors or clocks.
Invariant: all types are immutable msgspec structs; decoding validates as strictly as constructing does.

Sampling parameters, KV transfers and what concerns single members of a cluster have pages of their own (`sampling_params.py`,
`kv_transfer.py`, `cluster_messages.py`) and are named here too.

Direction of travel: the controller sends `Command`s (numbered, carried out in number order by a rank's main loop) and
request traffic (`Submit`, `Abort`); ranks send `Event`s.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from pearl.cluster_messages import Command as Command
from pearl.cluster_messages import Event as Event
from pearl.cluster_messages import Fetch as Fetch
from pearl.cluster_messages import FinishExport as FinishExport
from pearl.cluster_messages import HandedOff as HandedOff
from pearl.cluster_messages import HandOver as HandOver
from pearl.cluster_messages import Join as Join
from pearl.cluster_messages import Joined as Joined
from pearl.cluster_messages import Leave as Leave
from pearl.cluster_messages import Leaving as Leaving
from pearl.cluster_messages import Prepare as Prepare
from pearl.cluster_messages import Refused as Refused
from pearl.cluster_messages import Report as Report
from pearl.cluster_messages import Role as Role
from pearl.cluster_messages import Sleep as Sleep
from pearl.cluster_messages import SwitchRole as SwitchRole
from pearl.cluster_messages import TakenOver as TakenOver
from pearl.cluster_messages import TakeOver as TakeOver
from pearl.cluster_messages import Wake as Wake
from pearl.kv_transfer import KVEndpoint as KVEndpoint
from pearl.kv_transfer import KVLayout as KVLayout
from pearl.kv_transfer import KVReservation as KVReservation
from pearl.kv_transfer import KVTransfer as KVTransfer
from pearl.kv_transfer import RequestState as RequestState
from pearl.sampling_params import SamplingParams as SamplingParams

PACKED_BYTES = array("i").itemsize
FinishReason = Literal["stop", "length", "abort", "error"]


# ---------------------------------------------------------------------------------------------------- request traffic


def packed(ids: Iterable[int]) -> bytes:
    """Token ids as they travel where there are many: 4 bytes each. OverflowError for what is none."""
    return array("i", ids).tobytes()


def unpacked(ids: bytes) -> list[int]:
    """The other way round; ValueError for what `packed` does not give."""
    return array("i", ids).tolist()


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation to start on the receiving worker; `params.seed` is always set by the controller. `prompt` is `packed`.

    `most_computed`: a decode worker that would have to compute more tokens gives it back; None: never.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    session_id: str | None = None
    most_computed: int | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return unpacked(self.prompt)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // PACKED_BYTES


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    request_ids: list[str]


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """To a rank on the same host as a process of this job that answers no more: SIGKILL it."""

    pid: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """The controller is alive; the control thread answers `Pong`."""

    sequence: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step_report"):
    """One finished step, for whoever prints (rank 0). `metrics` is the very row written to metrics.jsonl."""

    metrics: dict[str, int | float | str | None]


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the controller sees it. `busy_share` is the share of the last seconds in which it computed."""

    role: str
    busy_share: float
    running: int
    waiting: int
    weight_version: int


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """About once a second, for whoever shows it (rank 0): what the controller waits for, and how busy everybody is."""

    waiting_for: str
    waited_s: float
    queues: dict[str, int]
    workers: dict[str, WorkerStatus]


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """One line for the person who watches the job; rank 0 prints it."""

    text: str


# ---------------------------------------------------------------------------------------------------- training batches


class TrainSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory as the trainer sees it; all lists have one entry per token.

    `loss_mask` is 1 exactly on sampled ids; `logprobs` (behaviour) and `weight_versions` are 0.0 and -1 elsewhere.
    `turns`: the number of sampled tokens of each turn, and the turn's own reward; empty: one turn with the whole `reward`.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    reward: float
    group: int
    turns: list[tuple[int, float]] = []


class PackingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which sequences share an optimizer update and a forward pass.

    `updates[u][r][m]` lists the indices of the sequences in micro-batch m of rank r for optimizer update u. Every rank has
    the same number of micro-batches in an update (some may be empty), so all ranks run the same collectives.
    """

    updates: list[list[list[list[int]]]]


# ---------------------------------------------------------------------------------------------------- commands


class Serve(Command, frozen=True, kw_only=True, tag="serve"):
    """Begin (or go on) stepping the engine between commands; refused before a whole weight version is in."""


class TrainStep(Command, frozen=True, kw_only=True, tag="train_step"):
    """Optimizer updates over one batch: supervised (`sft`, format warm-up) or policy gradient (`policy`)."""

    step: int
    objective: Literal["sft", "policy"]
    sequences: list[TrainSequence]
    plan: PackingPlan
    weight_version: int


class SetReference(Command, frozen=True, kw_only=True, tag="set_reference"):
    """Freeze a copy of the present policy as the one that KL terms refer to, and start a fresh optimizer."""


class Publish(Command, frozen=True, kw_only=True, tag="publish"):
    """Give the trainer's present weights to the serving engines as `version`."""

    version: int


class Export(Command, frozen=True, kw_only=True, tag="export"):
    """Write the present policy as a Hugging Face folder at `path` (aside, then renamed)."""

    path: str


class Checkpoint(Command, frozen=True, kw_only=True, tag="checkpoint"):
    """Write everything a resumed job needs of the training ranks into the folder `path`; the controller makes it count."""

    path: str
    step: int


class Restore(Command, frozen=True, kw_only=True, tag="restore"):
    """Go on from what `Checkpoint` wrote."""

    path: str


class Stop(Command, frozen=True, kw_only=True, tag="stop"):
    """The last command: leave the main loop with `exit_code`."""

    reason: str
    exit_code: int


MemberOrder = Prepare | Wake | Sleep | SwitchRole | Leave | Fetch
"""Commands to one member alone."""

AnyCommand = Serve | TrainStep | SetReference | Publish | Export | Checkpoint | Restore | Stop | MemberOrder
ToRank = (
    Submit | Abort | HandOver | TakeOver | FinishExport | Kill | Ping | StepReport | Status | Notice | Joined | Refused
    | AnyCommand
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- events


class Hello(Event, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank: from now on it answers heartbeats. `roles`: "train", "serve" or both."""

    pid: int
    host: str
    roles: list[str]


class Ready(Event, frozen=True, kw_only=True, tag="ready"):
    """All that the rank needs is built and commands are welcome. `max_model_len` is that of its engine, 0 without one.

    `kv_tokens`: what its pool holds. `lends`: a training rank whose engine sleeps, and can be woken.
    `pulls`: where weight versions can be had of this rank ("host:port"), empty if nowhere.
    """

    max_model_len: int
    pulls: str = ""
    kv_tokens: int = 0
    lends: bool = False


class Pong(Event, frozen=True, kw_only=True, tag="pong"):
    sequence: int


class TokenUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What was added to one request since the last time; the lists run in parallel. There are many, hence the lean encoding."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class StepSums(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Sums over `count` engine steps of about one `size`: new prompt tokens, or of steps without any (not `prefill`) sequences.

    `context`: tokens of a running request, the mean of a step; `decodes`: tokens that were not a prompt's first, which no step
    of a sum has or all have; `prompts` that ended, counted as 1 in a step in which none did; `seconds` of the steps.
    """

    prefill: bool
    count: int
    size: int
    context: float
    decodes: int
    prompts: int
    seconds: float


class Tokens(Event, frozen=True, kw_only=True, tag="tokens"):
    """What the engine gave: at once what ended and the first of what was taken over, the rest every `rollout.report_s`; and the
    load the router needs.

    `seconds`: of all engine steps since the last such message, `step_s` of the last one; `steps`: these steps by size (none:
    nobody counted). `place`: how many such messages the member sent before (-1: nobody counted); a connection that breaks and
    comes back may have lost some.
    """

    updates: list[TokenUpdate]
    seconds: float
    waiting: int
    running: int
    free_blocks: int
    step_s: float = 0.0
    steps: list[StepSums] = []  # noqa: RUF012 - msgspec gives each message its own
    place: int = -1


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """Command `number` was carried out. `metrics` is what it measured (losses, seconds, bytes).

    `error`: an order to one member that could not be carried out, one line; the member is as it was before, and lives.
    """

    number: int
    seconds: float
    metrics: dict[str, int | float | None] = {}  # noqa: RUF012 - msgspec gives each message its own
    error: str = ""


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """The rank cannot go on; the job ends. `error` is one line, `traceback` goes to the log."""

    error: str
    traceback: str = ""


class Interrupted(Event, frozen=True, kw_only=True, tag="interrupted"):
    """A person or the launcher asked the rank to end (SIGINT, SIGTERM)."""

    signal: str


ToController = (
    Hello | Ready | Pong | Tokens | Done | Failed | Interrupted | HandedOff | TakenOver | Report | Leaving | Join
)  # fmt: skip
