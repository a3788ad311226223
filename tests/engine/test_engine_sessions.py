"""Conversations: with a session id a turn hashes only what is new, and nothing else is different."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import hf_models
import pytest
from engine_cases import assert_greedy, make, model, named, one

from pearl.engine import prefix_cache
from pearl.engine.engine import Engine
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams

SIZE = 4
TURN = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ids of every block that is hashed."""
    blocks: list[tuple[int, ...]] = []
    real = prefix_cache.block_hash

    def record(parent_hash: int, token_ids: tuple[int, ...]) -> int:
        blocks.append(token_ids)
        return real(parent_hash, token_ids)

    monkeypatch.setattr(prefix_cache, "block_hash", record)
    return blocks


def take(hashed: list[tuple[int, ...]]) -> int:
    count = len(hashed)
    hashed.clear()
    return count


def talk(engine: Engine, hashed: list[tuple[int, ...]], turns: int, **fields) -> tuple[list[Completion], list[int]]:
    """Turns that each go on from all before; their completions, and how many blocks each hashed."""
    ids, completions, counts = hf_models.prompt(9), [], []
    for number in range(turns):
        completion = one(engine, ids, TURN, **fields)
        completions.append(completion)
        counts.append(take(hashed))
        ids = [*ids, *completion.token_ids, *hf_models.prompt(5, seed=number + 1)]
    return completions, counts


def test_a_turn_hashes_only_what_is_new(folder: Path, hashed: list[tuple[int, ...]]) -> None:
    completions, counts = talk(make(folder), hashed, 6, session_id="s")
    written = [len(turn.prompt_token_ids) + 5 for turn in completions]  # the last token's KV is never computed
    blocks = [0, *(tokens // SIZE for tokens in written)]
    assert counts == [after - before for before, after in pairwise(blocks)]
    assert max(counts) == 3 < blocks[-1] == 17
    for turn in completions:
        assert_greedy(turn, 6)


def test_with_and_without_a_session_all_else_is_equal(folder: Path, hashed: list[tuple[int, ...]]) -> None:
    plain, all_counts = talk(make(folder), hashed, 6)
    with_session, counts = talk(make(folder), hashed, 6, session_id="s")
    assert plain == with_session
    assert [turn.num_cached_tokens for turn in plain] == [0, 12, 24, 36, 44, 56]
    assert counts[0] == all_counts[0] and sum(counts) < sum(all_counts) / 3


def test_without_a_prefix_cache_nothing_is_hashed(folder: Path, hashed: list[tuple[int, ...]]) -> None:
    engine = make(folder, enable_prefix_cache=False)
    assert talk(engine, hashed, 3, session_id="s")[1] == [0, 0, 0]
    assert len(engine._core.blocks.sessions) == 0


@pytest.mark.parametrize("at", [0, 3, 4, 7, 8, 11, 12, 19])
def test_a_turn_that_does_not_continue_the_last_is_hashed_from_where_it_differs(
    folder: Path, hashed: list[tuple[int, ...]], at: int
) -> None:
    engine = make(folder)
    ids = hf_models.prompt(20)
    first = one(engine, ids, TURN, session_id="s")
    take(hashed)
    other = [*ids[:at], (ids[at] + 1) % 128, *ids[at + 1 :]]
    second = one(engine, other, TURN, session_id="s")
    assert take(hashed) == 6 - at // SIZE  # 25 of 26 tokens are written
    assert second.num_cached_tokens == at // SIZE * SIZE
    assert_greedy(first, 6)
    assert_greedy(second, 6)


def test_another_salt_or_version_starts_anew(folder: Path, hashed: list[tuple[int, ...]]) -> None:
    engine, ids = make(folder), hf_models.prompt(20)
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        completion = one(engine, ids, TURN, session_id="s", **fields)
        assert (take(hashed), completion.num_cached_tokens) == (6, 0)
    engine.update_weights(named(1), version=1)
    completion = one(engine, ids, TURN, session_id="s")
    assert (take(hashed), completion.num_cached_tokens) == (6, 0)
    assert_greedy(completion, 6, seed=1)
    completion = one(engine, completion.prompt_token_ids, TURN, session_id="s")
    assert (take(hashed), completion.num_cached_tokens) == (1, 16)  # the block whose ids were not known yet


def test_a_turn_that_ran_through_an_update_is_not_continued_from_the_cache(folder: Path) -> None:
    """Its KV is of two versions: the next turn computes everything under the new one."""
    engine, ids = make(folder), hf_models.prompt(10)
    rid = engine.add_request(ids, TURN, session_id="s")
    engine.step()
    engine.step()
    engine.update_weights(named(1), version=1, mode="keep")
    [turn] = [completion for _ in range(4) for completion in engine.step()]
    assert turn.request_id == rid
    following = one(engine, [*ids, *turn.token_ids, 7], TURN, session_id="s")
    assert following.num_cached_tokens == 0
    assert_greedy(following, 6, seed=1)


def test_sessions_are_bounded_and_the_oldest_hash_again(folder: Path, hashed: list[tuple[int, ...]]) -> None:
    engine = make(folder, num_blocks=8)  # 32 hashed blocks are remembered: 6 sessions of 5
    ids = hf_models.prompt(16)
    for number in range(30):
        one(engine, [number, *ids], TURN, session_id=f"s{number}")
        assert engine._core.blocks.sessions.num_blocks <= 32
    take(hashed)
    counts = []
    for number in (29, 24, 0):
        one(engine, [number, *ids], TURN, session_id=f"s{number}")
        counts.append(take(hashed))
    assert counts == [1, 1, 5]  # the last block is of ids that this turn draws


def test_an_aborted_turn_and_siblings_leave_a_chain_that_holds(folder: Path, hashed: list[tuple[int, ...]]) -> None:
    engine, ids = make(folder), hf_models.prompt(12)
    rid = engine.add_request(ids, SamplingParams(temperature=1.0, max_tokens=9, n=3), session_id="s")
    for _ in range(4):
        engine.step()
    engine.abort(rid)
    assert len(engine.step()) == 3
    take(hashed)
    turn = one(engine, [*ids, 1, 2, 3, 4, 5, 6, 7], TURN, session_id="s")
    assert take(hashed) == 3 and turn.num_cached_tokens == 12
    assert_greedy(turn, 6)


def test_what_a_full_cache_gives_up_changes_no_token(folder: Path) -> None:
    """Four conversations in turns, with room for about three: the same tokens, and more of them found."""
    answers, found = {}, {}
    for eviction in ("lru", "keep"):
        engine, told = make(folder, num_blocks=34, eviction=eviction), []
        talks = [hf_models.prompt(21, seed=number) for number in range(4)]
        for turn in range(5):
            for number, ids in enumerate(talks):
                told.append(one(engine, ids, TURN, session_id=str(number)))
                ids += [*told[-1].token_ids, *hf_models.prompt(1, seed=turn)]
                engine.check_integrity()
        answers[eviction] = [(one.token_ids, one.logprobs) for one in told]
        found[eviction] = sum(one.num_cached_tokens for one in told)
    assert answers["lru"] == answers["keep"]
    assert found["keep"] > found["lru"]
