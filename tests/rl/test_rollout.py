"""Rollouts with a letter-by-letter tokenizer: masks, budgets, interruptions, errors, and the prefix rule."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.config import EnvOptions, RolloutOptions
from pearl.protocol import NewRequest, TokenUpdate
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.rollout import Rollout, opening, request_seed, train_sequence, trajectory_of
from pearl.rl.types import Trajectory

END, NEWLINE, SYSTEM, USER, ASSISTANT = 1, 2, 3, 4, 5
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class LetterTokenizer:
    """One id per character (from 10 on); a turn is: role, text, END, NEWLINE."""

    end_of_turn_id = END

    def encode(self, text: str) -> list[int]:
        return [10 + ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(number - 10) for number in ids if number >= 10)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        ids = []
        for message in messages:
            ids += [ROLES[message["role"]], *self.encode(message["content"]), END, NEWLINE]
        return [*ids, ASSISTANT]

    def chat_start(self, messages: list[dict[str, str]]) -> list[int]:
        return self.render(messages)

    def chat_continue(self, message: dict[str, str], *, ended: bool) -> list[int]:
        return self.after_reply([NEWLINE, *self.render([message])], ended=ended)

    def after_reply(self, ids: list[int], *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), *ids]


TOKENIZER = LetterTokenizer()


def new_rollout(*, max_tokens: int = 8, max_model_len: int = 200, max_turns: int = 8, system: str = "") -> Rollout:
    return Rollout(
        Trajectory(trajectory_id="train4.1", group_id=4, env_seed=9),
        tokenizer=TOKENIZER,
        options=RolloutOptions(max_tokens=max_tokens, temperature=0.7, top_p=0.9, top_k=5),
        env=EnvOptions(max_turns=max_turns),
        max_model_len=max_model_len,
        seed=3,
        system_prompt=system,
    )


def update(
    request: NewRequest | str, ids: list[int], finish: str | None = None, *, version: int = 0, error: str | None = None
) -> TokenUpdate:
    return TokenUpdate(
        request_id=request if isinstance(request, str) else request.request_id,
        token_ids=ids,
        logprobs=[-0.01 * token for token in ids],
        weight_versions=[version] * len(ids),
        finish_reason=finish,
        error=error,
    )


def said(text: str, reward: float = 0.0, **more: object) -> EnvOutcome:
    return EnvOutcome(episode_id="train4.1", observation=text, reward=reward, **more)


def words(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def check_record(trajectory: Trajectory) -> None:
    lists = (trajectory.loss_mask, trajectory.logprobs, trajectory.weight_versions)
    assert {len(values) for values in lists} == {len(trajectory.token_ids)}
    for mask, logprob, version in zip(*lists, strict=True):
        assert (mask == 1) == (version >= 0)
        assert mask or logprob == 0.0
    assert sum(trajectory.loss_mask) == sum(turn.num_sampled for turn in trajectory.turns) or trajectory.outcome == "failed"


def test_three_turns_mask_exactly_the_sampled_ids() -> None:
    rollout = new_rollout(system="rules")
    request = rollout.start("o0")
    expected = TOKENIZER.render(opening("rules", "o0"))
    mask = [0] * len(expected)
    for turn, observation in enumerate(["o1", "o2", None]):
        assert request.prompt_token_ids == expected
        assert request.request_id == f"train4.1/{turn}" and request.session_id == "train4.1"
        assert rollout.on_update(update(request, words("ab"), version=turn)) is None
        assert rollout.on_update(update(request, [*words("c"), END], "stop", version=turn + 1)) == "abc"
        expected = [*expected, *words("abc"), END]
        mask += [1] * 4
        last = observation is None
        request = rollout.on_outcome(said(observation or "over", 0.25, terminated=last, info={"success": last}))
        if observation is not None:
            given = [NEWLINE, USER, *words(observation), END, NEWLINE, ASSISTANT]
            expected, mask = expected + given, mask + [0] * len(given)
    record = rollout.trajectory
    assert request is None and rollout.finished and rollout.ending == "terminated"
    assert (record.token_ids, record.loss_mask) == (expected, mask)
    assert (record.outcome, record.success, record.reward) == ("done", True, 0.75)
    assert [version for version in record.weight_versions if version >= 0] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert [(turn.text, turn.num_sampled, turn.observation, turn.reward) for turn in record.turns] == [
        ("abc", 4, "o1", 0.25),
        ("abc", 4, "o2", 0.25),
        ("abc", 4, "over", 0.25),
    ]
    assert record.oldest_version == 0
    check_record(record)


def test_the_record_is_the_conversation_as_the_template_renders_it() -> None:
    rollout = new_rollout(system="s")
    request = rollout.start("one")
    rollout.on_update(update(request, [*words("x"), END], "stop"))
    request = rollout.on_outcome(said("two"))
    rollout.on_update(update(request, words("yy"), "length"))
    request = rollout.on_outcome(said("three"))
    messages = [*opening("s", "one"), {"role": "assistant", "content": "x"}, {"role": "user", "content": "two"}]
    messages += [{"role": "assistant", "content": "yy"}, {"role": "user", "content": "three"}]
    assert request.prompt_token_ids == TOKENIZER.render(messages)


@pytest.mark.parametrize("ids", [[*words("ab"), END], words("ab")], ids=["ended", "cut"])
def test_ids_that_come_with_an_observation_are_those_of_the_tokenizer(ids: list[int]) -> None:
    records = []
    for come in (None, [NEWLINE, *TOKENIZER.render([{"role": "user", "content": "p"}])]):
        rollout = new_rollout(max_tokens=len(ids))
        request = rollout.start("o")
        assert rollout.on_update(update(request, ids, "length")) == "ab"
        assert rollout.on_outcome(said("p", token_ids=come)) is not None
        records.append(rollout.trajectory)
    assert records[0] == records[1]


def test_an_open_turn_is_complete_once_it_can_get_no_more() -> None:
    rollout = new_rollout(max_tokens=3)
    request = rollout.start("o")
    assert rollout.on_update(update(request, words("ab"))) is None
    assert rollout.complete() is None and rollout.phase == "generating"
    assert rollout.on_update(update(request, words("c"))) is None
    assert rollout.complete() == "abc" and rollout.request_id is None
    assert rollout.complete() is None and rollout.resume() is None


def test_the_end_given_to_a_cut_turn_is_not_trained() -> None:
    rollout = new_rollout(max_tokens=2)
    request = rollout.start("o")
    rollout.on_update(update(request, words("ab"), "length"))
    rollout.on_outcome(said("p"))
    cut = len(request.prompt_token_ids) + 2
    assert rollout.trajectory.token_ids[cut] == END and rollout.trajectory.loss_mask[cut] == 0


def test_requests_carry_the_options_and_a_seed_of_their_own() -> None:
    rollout = new_rollout()
    request = rollout.start("o")
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.9, 5, 8)
    assert params.stop_token_ids == [END] and params.seed == request_seed(3, "train4.1", 0)
    seeds = {request_seed(*parts) for parts in itertools.product((0, 1), ("a", "b"), (0, 1), (0, 1))}
    assert len(seeds) == 16 and all(0 <= seed < 2**64 for seed in seeds)
    assert request_seed(3, "train4.1", 0) == 11751480594858892154
    assert trajectory_of(request.request_id) == "train4.1" == trajectory_of("train4.1/3.2")


def test_the_budget_of_a_turn_shrinks_with_the_room() -> None:
    first = len(TOKENIZER.render(opening("", "o")))
    rollout = new_rollout(max_tokens=8, max_model_len=first + 5)
    assert rollout.start("o").params.max_tokens == 5
    rollout = new_rollout(max_tokens=8, max_model_len=first + 3 + 6 + 1)
    request = rollout.start("o")
    rollout.on_update(update(request, [*words("ab"), END], "stop"))
    request = rollout.on_outcome(said("p"))
    assert request.params.max_tokens == 1
    assert len(request.prompt_token_ids) + 1 == first + 3 + 6 + 1


def test_no_room_for_another_turn_ends_the_episode_as_truncated() -> None:
    first = len(TOKENIZER.render(opening("", "o")))
    rollout = new_rollout(max_model_len=first + 3 + 6)
    request = rollout.start("o")
    rollout.on_update(update(request, [*words("ab"), END], "stop"))
    assert rollout.on_outcome(said("p", 0.5)) is None
    record = rollout.trajectory
    assert rollout.ending == "length" and record.outcome == "done" and record.reward == 0.5
    assert len(record.token_ids) == first + 3 and record.loss_mask[-1] == 1
    rollout = new_rollout(max_model_len=first)
    assert rollout.start("o") is None
    assert rollout.trajectory.outcome == "failed" and f"max_model_len={first}" in rollout.trajectory.error


def test_the_turn_limit_truncates() -> None:
    rollout = new_rollout(max_turns=2)
    request = rollout.start("o")
    for ended in (False, True):
        rollout.on_update(update(request, [END], "stop"))
        request = rollout.on_outcome(said("p"))
        assert rollout.finished is ended
    assert rollout.ending == "max_turns" and rollout.trajectory.outcome == "done" and not rollout.trajectory.success


def test_an_interrupted_turn_goes_on_from_its_last_token() -> None:
    rollout = new_rollout(max_tokens=8)
    request = rollout.start("o")
    rollout.on_update(update(request, words("abc"), version=1))
    assert rollout.on_update(update(request, words("d"), "abort", version=1)) is None
    assert rollout.phase == "interrupted" and rollout.on_outcome(said("stray")) is None
    again = rollout.resume()
    assert again.prompt_token_ids == request.prompt_token_ids + words("abcd")
    assert again.params.max_tokens == 4 and again.params.seed != request.params.seed
    assert again.request_id == "train4.1/0.1" and again.session_id == request.session_id
    assert rollout.on_update(update(request, words("zz"), "stop")) is None
    assert rollout.on_update(update(again, [*words("e"), END], "stop", version=2)) == "abcde"
    record = rollout.trajectory
    assert record.turns[0].num_sampled == 6 and record.weight_versions[-6:] == [1, 1, 1, 1, 2, 2]
    assert rollout.resume() is None
    following = rollout.on_outcome(said("p"))
    assert following.request_id == "train4.1/1" and following.params.max_tokens == 8
    check_record(record)


def test_a_lost_worker_is_like_an_interruption() -> None:
    rollout = new_rollout(max_tokens=8)
    request = rollout.start("o")
    rollout.on_update(update(request, words("abc")))
    again = rollout.resume()
    assert again.params.max_tokens == 5 and again.prompt_token_ids[-3:] == words("abc")
    assert rollout.resume().request_id == "train4.1/0.2"
    assert rollout.on_update(update(again, words("x"), "stop")) is None


@pytest.mark.parametrize("last", [words("b"), [END]])
def test_an_abort_after_the_last_token_completes_the_turn(last: list[int]) -> None:
    rollout = new_rollout(max_tokens=2 if last != [END] else 5)
    request = rollout.start("o")
    assert rollout.on_update(update(request, words("a") + last, "abort")) == TOKENIZER.decode(words("a") + last)
    assert rollout.phase == "acting"


def test_what_comes_late_or_twice_changes_nothing() -> None:
    rollout = new_rollout()
    assert rollout.on_update(update("train4.1/0", words("a"))) is None
    assert rollout.on_outcome(said("early")) is None and rollout.resume() is None and rollout.phase == "new"
    request = rollout.start("o")
    assert rollout.start("again") is None
    assert rollout.on_outcome(said("early")) is None
    finish = update(request, [END], "stop")
    assert rollout.on_update(finish) == ""
    before = copy.deepcopy(rollout.trajectory)
    for late in (finish, update("train4.1/1", words("a")), update("other/0", words("a")), update(request, [], "abort")):
        assert rollout.on_update(late) is None
    assert rollout.trajectory == before
    rollout.on_outcome(said("end", truncated=True))
    before = copy.deepcopy(rollout.trajectory)
    assert rollout.on_outcome(said("end", 1.0, truncated=True)) is None and rollout.on_update(finish) is None
    rollout.fail("too late")
    assert rollout.on_outcome(said("", error="too late")) is None
    assert rollout.trajectory == before and rollout.ending == "truncated"


@pytest.mark.parametrize("phase", ["new", "generating", "interrupted", "acting"])
def test_an_environments_error_fails_the_trajectory_at_any_time(phase: str) -> None:
    rollout = new_rollout()
    if phase != "new":
        request = rollout.start("o")
    if phase in ("interrupted", "acting"):
        rollout.on_update(update(request, words("a"), "abort" if phase == "interrupted" else "stop"))
    assert rollout.phase == phase
    assert rollout.on_outcome(said("", error="no answer within timeout_s=30")) is None
    record = rollout.trajectory
    assert (record.outcome, record.error, rollout.ending) == ("failed", "environment: no answer within timeout_s=30", "failed")
    assert rollout.resume() is None and rollout.request_id is None
    check_record(record)


@pytest.mark.parametrize("first", [True, False])
def test_what_the_tokenizer_refuses_fails_the_trajectory_alone(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LetterTokenizer, *args: object, **more: object) -> list[int]:
        raise ValueError("the chat template says:\n no such role")

    rollout = new_rollout()
    if not first:
        rollout.on_update(update(rollout.start("o"), words("a"), "stop"))
    monkeypatch.setattr(LetterTokenizer, "chat_start" if first else "chat_continue", refuse)
    assert (rollout.start("o") if first else rollout.on_outcome(said("p"))) is None
    error = "environment: what it says cannot be read: the chat template says: no such role"
    assert rollout.finished and (rollout.trajectory.outcome, rollout.trajectory.error) == ("failed", error)
    check_record(rollout.trajectory)


@pytest.mark.parametrize("rewards", [(1e308, 1e308), (1e31,), (-1e31, 1e31), (0.8e30, 0.8e30)])
def test_rewards_that_cannot_be_trained_on_fail_the_trajectory(rewards: tuple[float, ...]) -> None:
    rollout = new_rollout()
    request = rollout.start("o")
    for reward in rewards:
        if request is not None:
            rollout.on_update(update(request, words("a"), "stop"))
            request = rollout.on_outcome(said("p", reward))
    assert rollout.trajectory.outcome == "failed" and "must be at most 1e+30" in rollout.trajectory.error


def test_a_requests_error_fails_the_trajectory() -> None:
    rollout = new_rollout()
    request = rollout.start("o")
    assert rollout.on_update(update(request, [], "error", error="logits are not finite")) is None
    assert rollout.trajectory.error == "request train4.1/0: logits are not finite"
    rollout = new_rollout()
    request = rollout.start("o")
    broken = TokenUpdate(request_id=request.request_id, token_ids=[11, 12], logprobs=[-1.0], weight_versions=[0, 0])
    assert rollout.on_update(broken) is None and "2 tokens came with 1 log-probs" in rollout.trajectory.error


def test_the_training_sequence_is_the_record() -> None:
    rollout = new_rollout()
    request = rollout.start("o")
    rollout.on_update(update(request, [*words("a"), END], "stop", version=4))
    rollout.on_outcome(said("end", 1.5, terminated=True))
    sequence = train_sequence(rollout.trajectory, group=7)
    assert sequence.token_ids == [*request.prompt_token_ids, *words("a"), END]
    assert sequence.loss_mask == [0] * len(request.prompt_token_ids) + [1, 1]
    assert sequence.weight_versions[-2:] == [4, 4] and (sequence.reward, sequence.group) == (1.5, 7)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), max_tokens=st.integers(1, 9), max_model_len=st.integers(8, 90))
def test_any_course_keeps_the_record_and_the_limits(data: st.DataObject, max_tokens: int, max_model_len: int) -> None:
    rollout = new_rollout(max_tokens=max_tokens, max_model_len=max_model_len, max_turns=5)
    request, last_prompt, of_turn = rollout.start("start"), [], 0
    while request is not None:
        assert request.prompt_token_ids[: len(last_prompt)] == last_prompt
        assert request.prompt_token_ids == rollout.trajectory.token_ids
        assert 1 <= request.params.max_tokens <= min(max_tokens - of_turn, max_model_len - len(request.prompt_token_ids))
        last_prompt = request.prompt_token_ids
        count = data.draw(st.integers(0, request.params.max_tokens))
        full = count == request.params.max_tokens
        ids = [100 + number for number in range(count)]
        cut = data.draw(st.integers(0, count))
        rollout.on_update(update(request, ids[:cut]))
        finish = "length" if full else data.draw(st.sampled_from(["abort", "stop"]))
        rest = ids[cut:] + ([END] if finish == "stop" else [])
        text = rollout.on_update(update(request, rest, finish))
        of_turn += count
        if text is None:
            request = rollout.resume()
            continue
        assert rollout.trajectory.turns[-1].num_sampled == of_turn + (finish == "stop")
        of_turn = 0
        request = rollout.on_outcome(said("x" * data.draw(st.integers(0, 9)), 0.5, terminated=data.draw(st.booleans())))
    first_prompt = len(TOKENIZER.render(opening("", "start")))
    assert rollout.finished and len(rollout.trajectory.token_ids) <= max(max_model_len, first_prompt)
    check_record(rollout.trajectory)
    if rollout.trajectory.outcome == "done":
        assert rollout.trajectory.loss_mask[-1] == 1
        assert rollout.trajectory.reward == 0.5 * len(rollout.trajectory.turns)


def test_an_example_comes_before_the_first_observation_and_roles_take_turns() -> None:
    def messages(*example: str) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in opening("be brief", "now you", example)]

    assert messages() == [("system", "be brief"), ("user", "now you")]
    assert messages("1?", "2") == [("system", "be brief"), ("user", "1?"), ("assistant", "2"), ("user", "now you")]
    assert messages("1?", "2", "right")[-2:] == [("assistant", "2"), ("user", "right\nnow you")]
    rollout = Rollout(
        Trajectory(trajectory_id="a", group_id=0, env_seed=0),
        tokenizer=TOKENIZER,
        options=RolloutOptions(max_tokens=4),
        env=EnvOptions(),
        max_model_len=100,
        seed=0,
        example=("1?", "2", "right"),
    )
    request = rollout.start("now you")
    assert request is not None and request.prompt_token_ids == TOKENIZER.render(opening("", "now you", ("1?", "2", "right")))
    assert rollout.trajectory.loss_mask == [0] * len(request.prompt_token_ids)
