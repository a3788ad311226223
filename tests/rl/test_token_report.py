"""Tokens between an engine and the controller: each once, in order, at once with an end, else by time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pearl.rl.token_report import TokenReport


def update(name: str, *ids: int, end: str | None = None) -> Any:
    """What an engine says of a request after a step."""
    completion = SimpleNamespace(finish_reason=end, error=None, num_cached_tokens=7) if end else None
    count = len(ids)
    return SimpleNamespace(
        request_id=name, token_ids=ids, logprobs=(-1.0,) * count, weight_versions=(4,) * count, completion=completion
    )


def names(updates: list[Any]) -> list[tuple[str, list[int], str | None]]:
    return [(one.request_id, one.token_ids, one.finish_reason) for one in updates]


def test_tokens_wait_until_the_time_is_over_and_an_end_does_not() -> None:
    report = TokenReport(1.0)
    report.add([update("a", 1), update("b", 11)])
    assert report.due(0.0) and names(report.take(0.0)[0]) == [("a", [1], None), ("b", [11], None)], "the first at once"
    report.add([update("a", 2), update("b", 12)])
    report.add([update("a", 3)])
    assert not report.due(0.4)
    report.add([update("b", 13, end="stop")])
    assert report.due(0.4)
    [ended] = report.take(0.4)[0]
    assert names([ended]) == [("b", [12, 13], "stop")] and ended.num_cached_tokens == 7 and ended.logprobs == [-1.0, -1.0]
    assert not report.due(0.9) and report.due(1.0)
    assert names(report.take(1.0)[0]) == [("a", [2, 3], None)]
    assert not report.due(9.0), "there is nothing to tell"


def test_what_leaves_late_takes_the_others_along() -> None:
    report = TokenReport(1.0)
    report.take(0.0)
    report.add([update("a", 1), update("b", 11, end="length")])
    assert names(report.take(0.6)[0]) == [("b", [11], "length"), ("a", [1], None)]
    report.add([update("a", 2)])
    assert not report.due(1.5), "the time began anew"
    assert names(report.take(1.5, everything=True)[0]) == [("a", [2], None)]


def test_who_ends_without_a_word_of_the_engine_keeps_its_tokens_and_who_is_dropped_does_not() -> None:
    report = TokenReport(1.0)
    report.take(0.0)
    report.add([update("a", 1), update("b", 2)])
    report.end("a", "abort")
    report.drop("b")
    report.drop("nobody")
    report.end("c", "error", "no room")
    updates, _ = report.take(0.1, everything=True)
    assert names(updates) == [("a", [1], "abort"), ("c", [], "error")] and updates[1].error == "no room"


def test_the_first_token_of_what_was_taken_over_does_not_wait_and_ends_no_prompt() -> None:
    report = TokenReport(1.0)
    report.take(0.0)
    report.taken_over("a", begun=True)
    report.taken_over("b", begun=False)
    assert report.add([update("a", 1), update("b"), update("c", 9)]) == (2, 1)
    assert report.due(0.1) and names(report.take(0.1)[0]) == [("a", [1], None)]
    assert report.add([update("a", 2), update("b", 5), update("c", 10)]) == (3, 1)
    assert names(report.take(0.2)[0]) == [("b", [5], None)] and not report.due(0.3)
    assert names(report.take(1.0)[0]) == [("c", [9, 10], None), ("a", [2], None)]


def test_steps_are_added_up_by_size_once() -> None:
    report = TokenReport(1.0)
    for batch, computed in ((4, 4), (5, 5), (4, 300), (9, 9)):
        report.add_step(computed=computed, batch=batch, prompts=0, context=10.0, seconds=0.5)
    report.add_step(computed=290, batch=2, prompts=2, context=10.0, seconds=0.5)
    _, sums = report.take(0.0)
    assert [(one.prefill, one.count, one.size, one.decodes, one.prompts, one.context, one.seconds) for one in sums] == [
        (False, 2, 9, 9, 2, 20.0, 1.0), (True, 1, 296, 4, 1, 10.0, 0.5), (False, 1, 9, 9, 1, 10.0, 0.5),
        (True, 1, 290, 0, 2, 10.0, 0.5),
    ]  # fmt: skip
    assert report.take(9.0) == ([], [])


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([None, "stop"]), st.sampled_from([0.0, 0.1, 0.7, 2.0])),
        max_size=60,
    ),
    every_s=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_token_is_told_once_and_in_order(steps: list[tuple[int, int, Any, float]], every_s: float) -> None:
    report, now, given_ids, told = TokenReport(every_s), 0.0, dict[str, list[int]](), dict[str, list[int]]()
    lives = [0] * 4
    for number, (request, count, end, passes) in enumerate(steps):
        name, ids = f"{request}.{lives[request]}", [10 * number + one for one in range(count)]
        lives[request] += end is not None
        given_ids.setdefault(name, []).extend(ids)
        report.add([update(name, *ids, end=end)])
        now += passes
        updates = report.take(now)[0] if report.due(now) else []
        for one in updates:
            told.setdefault(one.request_id, []).extend(one.token_ids)
        assert [one.request_id for one in updates if one.finish_reason is not None] == ([name] if end else [])
        if every_s == 0.0:
            assert told == given_ids
    for one in report.take(now, everything=True)[0]:
        told.setdefault(one.request_id, []).extend(one.token_ids)
    assert told == given_ids
