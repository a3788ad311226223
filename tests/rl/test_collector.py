"""Rollouts between environments and workers: what is sent where, and what becomes of answers that come late or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pearl.config import EnvOptions, RolloutOptions
from pearl.protocol import Abort, NewRequest, Role, Submit, Tokens, TokenUpdate
from pearl.rl.collector import Collector
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.rollout import Rollout
from pearl.rl.types import Trajectory
from pearl.sched.router import Router

END = 1


class Letters:
    """One id per character; every message is its text, then END."""

    end_of_turn_id = END

    def encode(self, text: str) -> list[int]:
        return [10 + ord(letter) for letter in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(number - 10) for number in ids if number >= 10)

    def chat_start(self, messages: Any) -> list[int]:
        return [number for message in messages for number in [*self.encode(message["content"]), END]]

    def chat_continue(self, message: dict[str, str], *, ended: bool) -> list[int]:
        return self.after_reply([*self.encode(message["content"]), END], ended=ended)

    def after_reply(self, ids: list[int], *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), *ids]


class Pool:
    """Keeps what was asked; `answers` are given at the next poll."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.answers: list[EnvOutcome] = []
        self.flushes = 0
        self.seconds = 0.0

    def reset(self, episode_id: str, seed: int) -> None:
        self.asked.append(("reset", episode_id, str(seed)))

    def step(self, episode_id: str, action: str) -> None:
        self.asked.append(("step", episode_id, action))

    def discard(self, episode_id: str) -> None:
        self.asked.append(("discard", episode_id))

    def flush(self) -> None:
        self.flushes += 1

    def poll(self, now: float) -> list[EnvOutcome]:
        answers, self.answers = self.answers, []
        return answers


class Stage:
    """A collector with two workers, a pool that waits for the test, and a list of what was sent."""

    def __init__(self) -> None:
        self.pool, self.router = Pool(), Router()
        self.router.add_worker("a")
        self.router.add_worker("b")
        self.sent: list[tuple[str, Any]] = []

        def new_rollout(trajectory: Trajectory, purpose: str) -> Rollout:
            return Rollout(
                trajectory,
                tokenizer=Letters(),
                options=RolloutOptions(max_tokens=4, temperature=1.0 if purpose == "train" else 0.0),
                env=EnvOptions(max_turns=3),
                max_model_len=60,
                seed=0,
            )

        def send(worker: str, message: Any) -> None:
            self.sent.append((worker, message))

        self.collector = Collector(new_rollout, pool=self.pool, router=self.router, send=send)

    def outcome(self, name: str, **fields: Any) -> None:
        self.pool.answers.append(EnvOutcome(episode_id=name, **fields))
        self.collector.poll_environments(0.0)

    def begin(self, *names: str, purpose: str = "train") -> dict[str, tuple[str, NewRequest]]:
        """Starts episodes and answers their reset; worker and first request of each."""
        for name in names:
            self.collector.start(name, group_id=0, env_seed=3, purpose=purpose)
            self.outcome(name, observation="obs")
        return self.requests()

    def requests(self) -> dict[str, tuple[str, NewRequest]]:
        self.collector.flush()
        sent, self.sent = self.sent, []
        found = {}
        for to, message in sent:
            if isinstance(message, Submit):
                found |= {request.session_id or "": (to, request) for request in message.requests}
            else:
                self.sent.append((to, message))
        return found

    def tokens(self, worker: str, request_id: str, ids: list[int], reason: Any = "stop", **fields: Any) -> None:
        count = len(ids)
        lists = {"token_ids": ids, "logprobs": [-1.0] * count, "weight_versions": [2] * count}
        update = TokenUpdate(request_id=request_id, finish_reason=reason, **lists, **fields)
        event = Tokens(rank=0, updates=[update], seconds=0.5, waiting=0, running=1, free_blocks=9)
        self.collector.on_tokens(worker, event)


@pytest.fixture
def stage() -> Iterator[Stage]:
    yield Stage()


def test_an_episode_goes_back_and_forth_until_it_ends(stage: Stage) -> None:
    [(worker, request)] = stage.begin("0-0").values()
    assert (stage.collector.playing, stage.collector.at_engine) == (1, 1)
    stage.tokens(worker, request.request_id, [75, 76], reason=None)
    stage.tokens(worker, request.request_id, [END], num_cached_tokens=3)
    assert stage.pool.asked == [("reset", "0-0", "3"), ("step", "0-0", "AB")]
    assert (stage.collector.playing, stage.collector.at_engine) == (1, 0)
    stage.outcome("0-0", observation="go", reward=0.25)
    [(again, second)] = stage.requests().values()
    assert again == worker, "the next turn goes where its KV is"
    assert second.prompt_token_ids[: len(request.prompt_token_ids)] == request.prompt_token_ids
    stage.tokens(worker, second.request_id, [77, END])
    stage.outcome("0-0", observation="", reward=1.0, terminated=True, info={"success": True})
    [trajectory] = stage.collector.take_ended()
    assert (trajectory.outcome, trajectory.reward, trajectory.success) == ("done", 1.25, True)
    assert sum(trajectory.loss_mask) == 5
    assert stage.collector.take_ended() == []
    assert (stage.collector.playing, stage.router.loads[worker].in_flight) == (0, 0)
    counts = stage.collector.counts
    assert counts["generated_tokens"] == 5
    assert counts["cached_tokens"] == 3
    assert counts["prompt_tokens"] == len(request.prompt_token_ids) + len(second.prompt_token_ids)
    assert stage.collector.engine_seconds == 1.5


@pytest.mark.parametrize("split", [False, True])
def test_what_later_turns_find_of_their_context_is_counted(stage: Stage, split: bool) -> None:
    """Of the first turn nothing is; of the second all but its last token could be cached, and by a prefill worker all but what
    was generated. What a worker was interrupted at counts with the request that ends the turn."""
    if split:
        stage.router.set_role("a", Role.PREFILL)
        stage.router.set_role("b", Role.DECODE)
        stage.router.append_on_decode_tokens = 0
    [(worker, request)] = stage.begin("0-0").values()
    stage.tokens(worker, request.request_id, [75, 76, END], num_cached_tokens=2)
    assert stage.collector.prefixes.take() is None
    stage.outcome("0-0", observation="go")
    [(worker, second)] = stage.requests().values()
    assert worker == "a"
    stage.tokens(worker, second.request_id, [], reason="abort")
    [(worker, second)] = stage.requests().values()
    length = len(request.prompt_token_ids) + 3
    stage.tokens(worker, second.request_id, [77, END], num_cached_tokens=2)
    there = length - 1 - 3 * split
    assert stage.collector.prefixes.take() == pytest.approx(1 - 2 / there)


def test_requests_are_spread_and_sent_in_one_message_per_worker(stage: Stage) -> None:
    names = [f"0-{number}" for number in range(6)]
    for name in names:
        stage.collector.start(name, group_id=0, env_seed=3, purpose="train")
        stage.pool.answers.append(EnvOutcome(episode_id=name, observation="obs"))
    stage.collector.poll_environments(0.0)
    assert stage.sent == []
    stage.collector.flush()
    assert sorted(to for to, _ in stage.sent) == ["a", "b"]
    assert [len(message.requests) for _, message in stage.sent] == [3, 3]
    assert stage.pool.flushes == 1
    stage.collector.flush()
    assert len(stage.sent) == 2, "nothing is sent twice"


def test_training_samples_and_evaluation_does_not(stage: Stage) -> None:
    assert stage.begin("0-0")["0-0"][1].params.temperature == 1.0
    assert stage.begin("eval-0-0", purpose="eval")["eval-0-0"][1].params.temperature == 0.0


def test_an_environment_that_fails_while_the_model_answers_frees_the_worker(stage: Stage) -> None:
    [(worker, request)] = stage.begin("0-0").values()
    stage.outcome("0-0", error="its process ended")
    [trajectory] = stage.collector.take_ended()
    assert (trajectory.outcome, trajectory.error) == ("failed", "environment: its process ended")
    assert stage.requests() == {}
    assert stage.sent == [(worker, Abort(request_ids=[request.request_id]))]
    assert stage.router.loads[worker].in_flight == 0
    stage.tokens(worker, request.request_id, [75, END])
    assert stage.collector.counts["late_updates"] == 1
    assert stage.collector.take_ended() == []


def test_an_environment_that_fails_on_its_own_turn_aborts_nothing(stage: Stage) -> None:
    [(worker, request)] = stage.begin("0-0").values()
    stage.tokens(worker, request.request_id, [75, END])
    stage.outcome("0-0", error="ValueError: no such move")
    assert [trajectory.outcome for trajectory in stage.collector.take_ended()] == ["failed"]
    assert stage.requests() == {}
    assert stage.sent == []


def test_a_request_that_comes_and_goes_in_one_turn_is_sent_before_its_abort(stage: Stage) -> None:
    stage.collector.start("0-0", group_id=0, env_seed=3, purpose="train")
    stage.outcome("0-0", observation="obs")
    stage.outcome("0-0", error="its process ended")
    stage.collector.flush()
    assert [type(message) for _, message in stage.sent] == [Submit, Abort]


def test_a_refused_request_costs_its_trajectory(stage: Stage) -> None:
    [(worker, request)] = stage.begin("0-0").values()
    stage.tokens(worker, request.request_id, [], reason="error", error="prompt_token_ids: too long")
    [trajectory] = stage.collector.take_ended()
    assert trajectory.outcome == "failed"
    assert "too long" in (trajectory.error or "")
    assert ("discard", "0-0") in stage.pool.asked
    assert stage.requests() == {}
    assert stage.sent == []


def test_an_aborted_request_goes_on_from_its_last_token_with_what_is_left(stage: Stage) -> None:
    [(worker, request)] = stage.begin("0-0").values()
    stage.tokens(worker, request.request_id, [75, 76], reason="abort")
    [(_, second)] = stage.requests().values()
    assert second.request_id != request.request_id
    assert second.prompt_token_ids == [*request.prompt_token_ids, 75, 76]
    assert second.params.max_tokens == request.params.max_tokens - 2
    assert stage.collector.at_engine == 1
    stage.tokens(worker, request.request_id, [77])
    assert stage.collector.counts["late_updates"] == 1


def split(stage: Stage) -> tuple[NewRequest, NewRequest]:
    """The second turn of an episode is at the decode worker b, which may give it back; and its first."""
    stage.router.set_role("a", Role.PREFILL)
    stage.router.set_role("b", Role.DECODE)
    [(worker, first)] = stage.begin("0-0").values()
    assert worker == "a" and first.most_computed is None
    stage.router.handed_over("0-0", "b")
    stage.tokens("b", first.request_id, [75, END])
    stage.outcome("0-0", observation="go")
    [(worker, second)] = stage.requests().values()
    assert worker == "b" and second.most_computed == stage.router.append_on_decode_tokens + stage.router.block_size
    return first, second


def test_an_append_that_is_given_back_goes_to_who_computes_prompts_once(stage: Stage) -> None:
    _, second = split(stage)
    stage.tokens("b", second.request_id, [], reason="abort")
    [(worker, third)] = stage.requests().values()
    assert worker == "a" and third.prompt_token_ids == second.prompt_token_ids
    assert third.params == second.params, "it draws what it would have drawn"
    assert third.request_id != second.request_id and third.most_computed is None
    counts = stage.collector.counts
    assert (counts["returned"], counts["interrupted"]) == (1, 0)
    stage.tokens("b", second.request_id, [], reason="abort")
    assert counts["late_updates"] == 1 and stage.requests() == {}, "said twice"
    stage.router.handed_over("0-0", "b")
    stage.tokens("b", third.request_id, [76, END])
    stage.outcome("0-0", observation="go")
    [(worker, fourth)] = stage.requests().values()
    assert worker == "b" and fourth.most_computed is not None, "its next turn is another matter"


@pytest.mark.parametrize("begun", [False, True])
def test_an_append_whose_worker_is_called_back_is_interrupted(stage: Stage, begun: bool) -> None:
    _, second = split(stage)
    if begun:
        stage.tokens("b", second.request_id, [76], reason=None)
    else:
        stage.router.drain("b")
    stage.tokens("b", second.request_id, [], reason="abort")
    assert (stage.collector.counts["returned"], stage.collector.counts["interrupted"]) == (0, 1)
    [(_, third)] = stage.requests().values()
    assert third.most_computed is None, "a turn that is asked for again is not given back"
    assert (third.params.seed == second.params.seed) == (not begun)


@pytest.mark.parametrize("last", [[75, END], [75, 76, 77, 78]], ids=["end of turn", "budget"])
def test_a_turn_that_a_lost_worker_had_finished_is_not_asked_for_again(stage: Stage, last: list[int]) -> None:
    [(worker, request)] = stage.begin("0-0").values()
    stage.tokens(worker, request.request_id, last, reason=None)
    stage.collector.requeue(stage.router.lose_worker(worker))
    assert stage.requests() == {}
    assert stage.pool.asked[-1] == ("step", "0-0", "A" if END in last else "ABCD")
    assert stage.collector.at_engine == 0


def test_a_reset_that_fails_ends_the_episode(stage: Stage) -> None:
    stage.collector.start("0-0", group_id=0, env_seed=3, purpose="train")
    stage.outcome("0-0", error="KeyError: bad seed")
    assert [trajectory.error for trajectory in stage.collector.take_ended()] == ["environment: KeyError: bad seed"]
    assert stage.requests() == {}


def test_a_first_prompt_without_room_ends_the_episode(stage: Stage) -> None:
    stage.collector.start("0-0", group_id=0, env_seed=3, purpose="train")
    stage.outcome("0-0", observation="x" * 80)
    assert [trajectory.outcome for trajectory in stage.collector.take_ended()] == ["failed"]
    assert (stage.requests(), stage.collector.playing) == ({}, 0)


def test_answers_of_unknown_episodes_are_counted_and_change_nothing(stage: Stage) -> None:
    stage.outcome("7-7", observation="who?")
    stage.tokens("a", "7-7/0", [75])
    assert stage.collector.counts["late_updates"] == 2
    assert (stage.collector.playing, stage.requests()) == (0, {})


def test_what_finds_no_worker_waits_for_one(stage: Stage) -> None:
    stage.router.lose_worker("a")
    stage.router.lose_worker("b")
    for name in ("0-0", "0-1"):
        stage.collector.start(name, group_id=0, env_seed=3, purpose="train")
        stage.outcome(name, observation="obs")
    assert stage.requests() == {} and stage.collector.unplaced == 2
    stage.outcome("0-1", error="it died")  # nobody waits for that one any more
    stage.router.add_worker("c")
    [(worker, request)] = stage.requests().values()
    assert (worker, request.session_id, stage.collector.unplaced) == ("c", "0-0", 0)
    stage.tokens("c", request.request_id, [75, END])
    assert stage.pool.asked[-1] == ("step", "0-0", "A")
