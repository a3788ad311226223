"""Warm-up sequences are what a rollout of the same conversation would hold."""

from __future__ import annotations

import random

import pytest

from pearl.config import EnvOptions, RolloutOptions
from pearl.protocol import TokenUpdate, TrainSequence
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.envs.frozen_lake import FrozenLake, read_answer
from pearl.rl.rollout import Rollout
from pearl.rl.types import Trajectory
from pearl.rl.warmup import warmup_sequences

END, ROLE = 1, {"system": 2, "user": 3, "assistant": 4}


class LetterTokenizer:
    end_of_turn_id = END

    def encode(self, text: str) -> list[int]:
        return [10 + ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(number - 10) for number in ids if number >= 10)

    def chat_start(self, messages: list[dict[str, str]]) -> list[int]:
        return [*(i for item in messages for i in (ROLE[item["role"]], *self.encode(item["content"]), END)), ROLE["assistant"]]

    def chat_continue(self, message: dict[str, str], *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), *self.chat_start([message])]


TOKENIZER = LetterTokenizer()


def trained_runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position, (token, trained) in enumerate(zip(ids, mask, strict=True)):
        if trained and (position == 0 or not mask[position - 1]):
            runs.append([])
        if trained:
            runs[-1].append(token)
    return runs


def test_a_sequence_is_the_rollout_of_the_same_play() -> None:
    made = []

    class Recording(FrozenLake):
        def reset(self, seed: int) -> tuple[str, dict]:
            made.append(seed)
            return super().reset(seed)

    sequences = warmup_sequences(Recording, TOKENIZER, 20, random.Random(5), max_turns=6, max_model_len=5000)
    assert len(sequences) == len(made) == 20 and len(set(made)) == 20
    for seed, sequence in zip(made, sequences, strict=True):
        runs = trained_runs(sequence.token_ids, sequence.loss_mask)
        assert all(run[-1] == END and read_answer(TOKENIZER.decode(run)) is not None for run in runs)
        record = replayed(seed, runs)
        assert (sequence.token_ids, sequence.loss_mask) == (record.token_ids, record.loss_mask)
        assert (sequence.reward, sequence.group) == (0.0, -1)
        assert set(sequence.weight_versions) == {-1} and set(sequence.logprobs) == {0.0}
    assert len({len(trained_runs(sequence.token_ids, sequence.loss_mask)) for sequence in sequences}) > 1


def replayed(seed: int, runs: list[list[int]]) -> Trajectory:
    lake = FrozenLake()
    rollout = Rollout(
        Trajectory(trajectory_id="t", group_id=0, env_seed=seed),
        tokenizer=TOKENIZER,
        options=RolloutOptions(max_tokens=100),
        env=EnvOptions(max_turns=6),
        max_model_len=5000,
        seed=0,
        system_prompt=lake.system_prompt,
    )
    request = rollout.start(lake.reset(seed)[0])
    for run in runs:
        zeros, versions = [0.0] * len(run), [0] * len(run)
        update = TokenUpdate(
            request_id=request.request_id, token_ids=run, logprobs=zeros, weight_versions=versions, finish_reason="stop"
        )
        observation, reward, terminated, truncated, _ = lake.step(rollout.on_update(update))
        request = rollout.on_outcome(
            EnvOutcome(episode_id="t", observation=observation, reward=reward, terminated=terminated, truncated=truncated)
        )
    assert rollout.finished
    return rollout.trajectory


def test_the_same_generator_gives_the_same_play() -> None:
    turns: list[int] = []

    def play(seed: int) -> list[TrainSequence]:
        limits = {"max_turns": 8, "max_model_len": 900}
        return warmup_sequences(FrozenLake, TOKENIZER, 5, random.Random(seed), between=lambda: turns.append(seed), **limits)

    assert play(7) == play(7) != play(8)
    assert turns.count(8) >= sum(len(trained_runs(one.token_ids, one.loss_mask)) for one in play(8)) / 2 > 5


def test_sequences_stay_within_the_model() -> None:
    for limit in range(130, 400, 30):
        for sequence in warmup_sequences(FrozenLake, TOKENIZER, 5, random.Random(1), max_turns=8, max_model_len=limit):
            assert len(sequence.token_ids) <= limit and sequence.loss_mask[-1] == 1
    with pytest.raises(ValueError, match="max_model_len=20: not even one turn"):
        warmup_sequences(FrozenLake, TOKENIZER, 1, random.Random(1), max_turns=8, max_model_len=20)


def test_an_environment_without_random_play_is_named() -> None:
    class Silent:
        def reset(self, seed: int) -> tuple[str, dict]:
            return "o", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return "o", 0.0, True, False, {}

    with pytest.raises(ValueError, match="Silent has no random_valid_action"):
        warmup_sequences(Silent, TOKENIZER, 1, random.Random(0), max_turns=1, max_model_len=99)


class Fragile(FrozenLake):
    """Raises in every third episode's second turn, and counts what is opened and closed."""

    made = closed = 0

    def reset(self, seed: int) -> tuple[str, dict]:
        type(self).made += 1
        self.number, self.turn = type(self).made, 0
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        if self.number % 3 == 0 and self.turn == 2:
            raise SystemExit("no more")
        return super().step(action)

    def close(self) -> None:
        type(self).closed += 1
        raise RuntimeError("closed badly")


def test_an_environment_that_raises_costs_its_episode_and_all_are_closed() -> None:
    sequences = warmup_sequences(Fragile, TOKENIZER, 12, random.Random(5), max_turns=6, max_model_len=5000)
    assert len(sequences) == 12
    assert 12 < Fragile.made == Fragile.closed


def test_an_environment_that_only_raises_ends_the_warm_up_and_is_quoted() -> None:
    tries = []

    class Dead(FrozenLake):
        def reset(self, seed: int) -> tuple[str, dict]:
            tries.append(seed)
            raise FileNotFoundError("no such file:\nmaps.txt")

    with pytest.raises(ValueError, match=r"8 episodes of the environment in a row.*FileNotFoundError: no such file: maps.txt$"):
        warmup_sequences(Dead, TOKENIZER, 2, random.Random(5), max_turns=6, max_model_len=5000)
    assert len(tries) == 8
