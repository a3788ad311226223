"""One trajectory as a state machine: what to ask of the model and of the environment next.

Owns the token record of an episode (`Trajectory`). It does not know sockets, workers or clocks: it is told what came and
says what to send. Invariants
- token in, token out: the prompt of turn k+1 is the prompt of turn k, its sampled ids, and the tokens of the next message;
- `loss_mask` is 1 exactly on sampled ids, which keep the log-prob and weight version they were sampled with;
- prompt + new tokens never exceed `max_model_len`, and one turn never samples more than `max_tokens`, interrupted or not.

    new --start--> generating --on_update--> acting --on_outcome--> generating ... --> finished
                   generating <--resume-- interrupted
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from pearl.config import EnvOptions, RolloutOptions
from pearl.protocol import NewRequest, RequestState, SamplingParams, TokenUpdate, TrainSequence
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.types import Trajectory, Turn

LARGEST_REWARD = 1e30
"""Of a trajectory: what is made of it in 32 bits stays finite."""

Phase = Literal["new", "generating", "interrupted", "acting", "finished"]
Ending = Literal["terminated", "truncated", "max_turns", "length", "failed"]


class ChatTokenizer(Protocol):
    """What a rollout needs of `engine.tokenizer.Tokenizer`."""

    @property
    def end_of_turn_id(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def chat_start(self, messages: Sequence[dict[str, str]]) -> list[int]: ...
    def chat_continue(self, message: dict[str, str], *, ended: bool) -> list[int]: ...
    def after_reply(self, ids: list[int], *, ended: bool) -> list[int]: ...


class Rollout:
    """One episode between a model and an environment. `trajectory` (a new one) is its record, `ending` says why it ended.

    `options.max_tokens` is per turn; `max_model_len` bounds the whole trajectory in tokens, `env.max_turns` its turns.

    Every method is harmless when its time is over: it changes nothing and returns None (the caller counts those).
    """

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        tokenizer: ChatTokenizer,
        options: RolloutOptions,
        env: EnvOptions,
        max_model_len: int,
        seed: int,
        system_prompt: str = "",
        example: Sequence[str] = (),
    ) -> None:
        if max_model_len < 2:
            raise ValueError(f"max_model_len={max_model_len}: must be >= 2")
        self.trajectory = trajectory
        self.phase: Phase = "new"
        self.ending: Ending | None = None
        self.request_id: str | None = None
        """The request being served; None when no answer of the model is awaited."""
        self._tokenizer, self._options = tokenizer, options
        self._max_turns, self._max_model_len = env.max_turns, max_model_len
        self._seed, self._system_prompt, self._example = seed, system_prompt, example
        self._packed = array("i", trajectory.token_ids)
        """The same ids side by side: every turn sends all of them, and in a list each has a place of its own in memory."""
        self.known = 0
        """Tokens with KV when the last turn ended: of the present turn's prompt, what can be cached."""
        self._turn_start = 0
        self._attempt = 0

    @property
    def trajectory_id(self) -> str:
        return self.trajectory.trajectory_id

    @property
    def asked_once(self) -> bool:
        """Whether the open turn is at its first attempt."""
        return self._attempt == 0

    @property
    def begun(self) -> bool:
        """Whether the open turn has tokens."""
        return len(self.trajectory.token_ids) > self._turn_start

    @property
    def generated(self) -> int:
        """Tokens sampled in the last turn that is complete; 0 in the first."""
        turns = self.trajectory.turns
        return turns[-1].num_sampled if turns else 0

    @property
    def finished(self) -> bool:
        """The episode is over, one way or another; the environment may still hold it (discard it there)."""
        return self.phase == "finished"

    def start(self, observation: str) -> NewRequest | None:
        """The first request. None (and failed) when the first prompt alone leaves no room to answer, or cannot be read."""
        if self.phase != "new":
            return None
        messages = opening(self._system_prompt, observation, self._example)
        given = self._read(lambda: self._tokenizer.chat_start(messages))
        if given is None:
            return None
        self._append_given(given)
        if self._room() < 1:
            length, limit = len(self.trajectory.token_ids), self._max_model_len
            self.fail(f"the first prompt has {length} tokens and leaves no room for an answer: max_model_len={limit}")
            return None
        return self._begin_turn()

    def excess(self, request_id: str, sampled: int, finish_reason: str | None) -> str:
        """Why so many more tokens with such an end cannot be the answer to what was asked; "" if they can, or nobody asks."""
        if self.phase != "generating" or request_id != self.request_id:
            return ""
        if sampled > self._budget():
            return f"request {request_id}: {sampled} more tokens came, {self._budget()} were asked for"
        if finish_reason in ("stop", "length") and len(self.trajectory.token_ids) + sampled == self._turn_start:
            return f"request {request_id}: it ended by {finish_reason!r} without a token"
        return ""

    def mismatch(self, state: RequestState) -> str:
        """Why this cannot be the request being served, as a worker that has sent all its tokens offers it; "" if it can, or if
        nobody asks."""
        if self.phase != "generating" or state.request_id != self.request_id:
            return ""
        if state.token_ids != self.trajectory.token_ids:
            return f"request {state.request_id} was offered with other tokens than it has"
        most = len(self.trajectory.token_ids) + self._budget()
        asked = state.num_prompt_tokens + state.max_tokens
        return f"request {state.request_id} was offered with {asked} tokens to come, not {most}" if asked > most else ""

    def on_update(self, update: TokenUpdate) -> str | None:
        """Takes sampled tokens; returns the turn's text when the turn is complete (it goes to the environment)."""
        if self.phase != "generating" or update.request_id != self.request_id:
            return None
        if not len(update.token_ids) == len(update.logprobs) == len(update.weight_versions):
            self.fail(f"request {update.request_id}: {len(update.token_ids)} tokens came with {len(update.logprobs)} log-probs")
            return None
        self._append_sampled(update)
        if update.finish_reason is None:
            return None
        self.request_id = None
        if update.finish_reason == "error":
            self.fail(f"request {update.request_id}: {update.error or 'failed without a reason'}")
            return None
        if update.finish_reason == "abort" and self._budget() > 0 and not self._turn_ended():
            self.phase = "interrupted"
            return None
        return self._complete_turn()

    def on_outcome(self, outcome: EnvOutcome) -> NewRequest | None:
        """Takes what the environment said; returns the next turn's request, or None when the episode is over.

        An error is taken at any time (a lost process may have held an episode that waited for the model).
        """
        if self.phase in ("finished", "new") and not (outcome.error and self.phase == "new"):
            return None
        if outcome.error is not None:
            self.fail(f"environment: {outcome.error}")
            return None
        if self.phase != "acting":
            return None
        self._record(outcome)
        largest = max(abs(outcome.reward), abs(self.trajectory.reward))
        if not largest <= LARGEST_REWARD:
            self.fail(f"environment: a reward of {largest:g}, of a turn or in all: must be at most {LARGEST_REWARD:g}")
            return None
        ending = self._ending_after(outcome)
        given = [] if ending else self._read(lambda: self._given(outcome))
        if given is None:
            return None
        if ending is None and self._room() - len(given) < 1:
            ending = "length"
        if ending is not None:
            self.trajectory.outcome = "done"
            self.phase, self.ending = "finished", ending
            return None
        self._append_given(given)
        return self._begin_turn()

    def resume(self) -> NewRequest | None:
        """Goes on with an interrupted turn, or one whose worker was lost, from its last token.

        The prompt is all tokens so far and the token budget what is left of the turn's; None if no turn is open.
        """
        if self.phase not in ("interrupted", "generating"):
            return None
        self._attempt += 1
        return self._request()

    def complete(self) -> str | None:
        """The text of an open turn whose end was not heard, if it can get no more tokens: it goes to the environment."""
        if self.phase not in ("interrupted", "generating") or (self._budget() > 0 and not self._turn_ended()):
            return None
        self.request_id = None
        return self._complete_turn()

    def fail(self, error: str) -> None:
        """Ends the episode as failed; it will not be trained on. `error` is one line."""
        if self.phase == "finished":
            return
        self.trajectory.outcome, self.trajectory.error = "failed", error
        self.phase, self.ending, self.request_id = "finished", "failed", None

    # ------------------------------------------------------------------------------------------------- inside

    def _begin_turn(self) -> NewRequest:
        self._turn_start, self._attempt = len(self.trajectory.token_ids), 0
        return self._request()

    def _request(self) -> NewRequest:
        """Another attempt has its own id (late updates of the first are told apart) and, if the turn has tokens, its own seed
        (positions restart)."""
        turn, attempt = len(self.trajectory.turns), self._attempt
        self.phase = "generating"
        self.request_id = f"{self.trajectory_id}/{turn}" + (f".{attempt}" if attempt else "")
        params = SamplingParams(
            temperature=self._options.temperature,
            top_p=self._options.top_p,
            top_k=self._options.top_k,
            max_tokens=self._budget(),
            stop_token_ids=[self._tokenizer.end_of_turn_id],
            seed=request_seed(self._seed, self.trajectory_id, turn, attempt if self.begun else 0),
        )
        prompt = self._packed.tobytes()
        return NewRequest(request_id=self.request_id, prompt=prompt, params=params, session_id=self.trajectory_id)

    def _room(self) -> int:
        return self._max_model_len - len(self.trajectory.token_ids)

    def _budget(self) -> int:
        """Tokens that this turn may still sample."""
        sampled = len(self.trajectory.token_ids) - self._turn_start
        return min(self._options.max_tokens - sampled, self._room())

    def _turn_ended(self) -> bool:
        """The model itself closed its turn."""
        ids = self.trajectory.token_ids
        return len(ids) > self._turn_start and ids[-1] == self._tokenizer.end_of_turn_id

    def _read(self, make: Callable[[], list[int]]) -> list[int] | None:
        """Ids of what an environment said. None (and failed) for a text that the tokenizer or its chat template refuses."""
        try:
            return make()
        except ValueError as error:
            self.fail(f"environment: what it says cannot be read: {' '.join(str(error).split())[:500]}")
            return None

    def _given(self, outcome: EnvOutcome) -> list[int]:
        """What the model reads next; the ids that came along are those that the tokenizer would make of the observation."""
        if outcome.token_ids is not None:
            return self._tokenizer.after_reply(outcome.token_ids, ended=self._turn_ended())
        return self._tokenizer.chat_continue({"role": "user", "content": outcome.observation}, ended=self._turn_ended())

    def _append_given(self, ids: list[int]) -> None:
        record, count = self.trajectory, len(ids)
        self._packed.fromlist(ids)  # less than half of what `extend` costs
        record.token_ids.extend(ids)
        record.loss_mask.extend([0] * count)
        record.logprobs.extend([0.0] * count)
        record.weight_versions.extend([-1] * count)

    def _append_sampled(self, update: TokenUpdate) -> None:
        record = self.trajectory
        self._packed.fromlist(update.token_ids)
        record.token_ids.extend(update.token_ids)
        record.loss_mask.extend([1] * len(update.token_ids))
        record.logprobs.extend(update.logprobs)
        record.weight_versions.extend(update.weight_versions)

    def _complete_turn(self) -> str:
        sampled = self.trajectory.token_ids[self._turn_start :]
        text = self._tokenizer.decode(sampled)
        self.known = len(self.trajectory.token_ids) - 1
        self.trajectory.turns.append(Turn(text=text, num_sampled=len(sampled)))
        self.phase = "acting"
        return text

    def _record(self, outcome: EnvOutcome) -> None:
        turn = self.trajectory.turns[-1]
        turn.observation, turn.reward, turn.info = outcome.observation, outcome.reward, outcome.info
        self.trajectory.reward += outcome.reward
        self.trajectory.success = bool(outcome.info.get("success", False))

    def _ending_after(self, outcome: EnvOutcome) -> Ending | None:
        if outcome.terminated:
            return "terminated"
        if outcome.truncated:
            return "truncated"
        return "max_turns" if len(self.trajectory.turns) >= self._max_turns else None


def opening(system_prompt: str, observation: str, example: Sequence[str] = ()) -> list[dict[str, str]]:
    """The messages before the model's first turn: system prompt, an example episode, the first observation.

    What the environment says at the end of the example and the first observation are one message: roles take turns.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    shown, last = (example[:-1], f"{example[-1]}\n") if len(example) % 2 else (example, "")
    before = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(shown)]
    return [*system, *before, {"role": "user", "content": last + observation}]


def request_seed(seed: int, trajectory_id: str, turn: int, attempt: int = 0) -> int:
    """A 64-bit seed that depends on nothing but these, on any machine and in any run."""
    text = f"{seed}/{trajectory_id}/{turn}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def trajectory_of(request_id: str) -> str:
    """The trajectory that a rollout's request belongs to."""
    return request_id.rsplit("/", 1)[0]


def train_sequence(trajectory: Trajectory, *, group: int) -> TrainSequence:
    """The trajectory as the trainer sees it; `group` numbers the groups of its batch."""
    return TrainSequence(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        weight_versions=trajectory.weight_versions,
        reward=trajectory.reward,
        group=group,
        turns=[(turn.num_sampled, turn.reward) for turn in trajectory.turns],
    )
