"""Every type that crosses a process: roles, sampling parameters, commands, events, request traffic.

Owns the wire vocabulary of a job and its validation. It does not know sockets (`channel.py`), tensors or clocks.
Invariant: all types are immutable msgspec structs; decoding validates as strictly as constructing does.

Direction of travel: the controller sends `Command`s (numbered, carried out in number order by a rank's main loop) and
request traffic (`Submit`, `Abort`); ranks send `Event`s.
"""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec


class Role(enum.StrEnum):
    """What a serving worker does with requests. A value read by the batch scheduler, never a subclass or a launch flag."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


FinishReason = Literal["stop", "length", "abort", "error"]


def _number(field: str, value: object, low: float, high: float, *, integer: bool, valid: str) -> None:
    kinds = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{field}={value!r}: must be {'an integer' if integer else 'a number'}, {valid}")
    if not low <= value <= high:  # false for nan too, and inf is above every high
        raise ValueError(f"{field}={value!r}: must be {valid}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are drawn and when it ends.

    Order of the filters: penalties, temperature, top_k, top_p, min_p (as transformers). `temperature=0` is greedy (lowest id
    on ties) and its log-probs are those of the unscaled softmax. `top_k` of None, 0, -1 or more than the vocabulary keeps all.
    `max_tokens=None` means up to the engine's `max_model_len`. `logprobs=k` adds the k best beside the sampled token,
    `logprobs=None` returns none at all. Raises ValueError naming the field, its value and the valid ones.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 0
    prompt_logprobs: bool = False
    logprobs_mode: Literal["processed", "raw"] = "processed"

    def __post_init__(self) -> None:
        tiny = math.ulp(0.0)
        _number("temperature", self.temperature, 0, 1e6, integer=False, valid="a finite number >= 0")
        _number("top_p", self.top_p, tiny, 1, integer=False, valid="in (0, 1]")
        _number("min_p", self.min_p, 0, 1, integer=False, valid="in [0, 1]")
        _number("repetition_penalty", self.repetition_penalty, tiny, 1e6, integer=False, valid="a finite number > 0")
        _number("presence_penalty", self.presence_penalty, -1e6, 1e6, integer=False, valid="a finite number")
        _number("frequency_penalty", self.frequency_penalty, -1e6, 1e6, integer=False, valid="a finite number")
        _number("n", self.n, 1, 4096, integer=True, valid="between 1 and 4096")
        _number("min_tokens", self.min_tokens, 0, 2**31, integer=True, valid=">= 0")
        if self.top_k is not None:
            _number("top_k", self.top_k, -1, 2**62, integer=True, valid="None, -1, 0 (all) or a positive count")
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, 2**31, integer=True, valid="None or >= 1")
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}")
        if self.seed is not None:
            _number("seed", self.seed, 0, 2**64 - 1, integer=True, valid="None or an integer in [0, 2**64)")
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, 0, 2**31, integer=True, valid="None or >= 0")
        if self.logprobs_mode not in ("processed", "raw"):
            raise ValueError(f"logprobs_mode={self.logprobs_mode!r}: must be 'processed' or 'raw'")
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), list | tuple):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a list")
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r}: must be a list of non-empty strings")
        for token_id in self.stop_token_ids:
            _number("stop_token_ids", token_id, 0, 2**31, integer=True, valid="token ids >= 0")

    @classmethod
    def from_dict(cls, values: dict) -> SamplingParams:
        """Builds from untrusted keys; an unknown one raises ValueError with the valid names."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}: must be one of {', '.join(cls.__struct_fields__)}")
        return cls(**values)


# ---------------------------------------------------------------------------------------------------- request traffic


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation to start on the receiving worker; `params.seed` is always set by the controller."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    session_id: str | None = None


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
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    reward: float
    group: int


class PackingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which sequences share an optimizer update and a forward pass.

    `updates[u][r][m]` lists the indices of the sequences in micro-batch m of rank r for optimizer update u. Every rank has
    the same number of micro-batches in an update (some may be empty), so all ranks run the same collectives.
    """

    updates: list[list[list[list[int]]]]


# ---------------------------------------------------------------------------------------------------- commands


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One numbered order of the controller. Numbers are global; each rank carries out those sent to it in rising order."""

    number: int


class Serve(Command, frozen=True, kw_only=True, tag="serve"):
    """Begin (or go on) stepping the engine between commands; refused before a whole weight version is in."""


class SwitchRole(Command, frozen=True, kw_only=True, tag="switch_role"):
    role: Role
    epoch: int


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


AnyCommand = Serve | SwitchRole | TrainStep | SetReference | Publish | Export | Checkpoint | Restore | Stop
ToRank = Submit | Abort | Kill | Ping | StepReport | Status | Notice | AnyCommand


# ---------------------------------------------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened on a rank."""

    rank: int


class Hello(Event, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank: from now on it answers heartbeats. `roles`: "train", "serve" or both."""

    pid: int
    host: str
    roles: list[str]


class Ready(Event, frozen=True, kw_only=True, tag="ready"):
    """All that the rank needs is built and commands are welcome. `max_model_len` is that of its engine, 0 without one."""

    max_model_len: int


class Pong(Event, frozen=True, kw_only=True, tag="pong"):
    sequence: int


class TokenUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What one engine step added to one request; the lists run in parallel. There are many, hence the lean encoding."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class Tokens(Event, frozen=True, kw_only=True, tag="tokens"):
    """All updates of one engine step in one message, and the load the router needs."""

    updates: list[TokenUpdate]
    seconds: float
    waiting: int
    running: int
    free_blocks: int


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """Command `number` was carried out. `metrics` is what it measured (losses, seconds, bytes)."""

    number: int
    seconds: float
    metrics: dict[str, int | float | None] = {}


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """The rank cannot go on; the job ends. `error` is one line, `traceback` goes to the log."""

    error: str
    traceback: str = ""


class Interrupted(Event, frozen=True, kw_only=True, tag="interrupted"):
    """A person or the launcher asked the rank to end (SIGINT, SIGTERM)."""

    signal: str


ToController = Hello | Ready | Pong | Tokens | Done | Failed | Interrupted
