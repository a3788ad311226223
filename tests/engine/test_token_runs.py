"""TokenRuns against the list that it stands for, operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.engine.prefix_cache import blocks_of
from pearl.engine.token_runs import TokenRuns

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(-1, 3)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("replace"), st.integers(-1, 3)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
        st.tuples(st.just("extend"), st.lists(st.integers(0, 2), max_size=6)),
        st.tuples(st.just("runs"), st.lists(st.integers(0, 2), max_size=6)),
    ),
    max_size=30,
)


def both(operations: list[tuple[str, Any]]) -> tuple[TokenRuns, list[int]]:
    runs, plain = TokenRuns(), list[int]()
    for what, value in operations:
        if what == "append":
            runs.append(value)
            plain.append(value)
        elif what == "pop" and plain:
            assert runs.pop() == plain.pop()
        elif what == "replace" and plain:
            runs[len(plain) - 1] = plain[-1] = value
        elif what == "cut":
            runs.cut(value)
            del plain[value:]
        elif what in ("extend", "runs"):
            other = TokenRuns()
            other.extend(value)
            runs.extend(other if what == "runs" else value)
            plain.extend(value)
    return runs, plain


@given(OPERATIONS, st.integers(-15, 15), st.integers(-15, 15))
def test_it_is_the_list_it_stands_for(operations: list[tuple[str, Any]], start: int, stop: int) -> None:
    runs, plain = both(operations)
    assert len(runs) == len(plain) and list(runs) == plain and runs == plain
    assert runs[start:stop] == tuple(plain[start:stop]) and runs[start:] == tuple(plain[start:])
    for index in range(-len(plain), len(plain)):
        assert runs[index] == plain[index]
    if plain:
        assert runs.bounds() == (min(plain), max(plain))
    copy = runs.copy()
    assert copy == runs
    copy.append(7)
    assert copy != runs and list(runs) == plain


@given(OPERATIONS, st.integers(1, 5), st.data())
def test_its_blocks_are_those_of_the_list(operations: list[tuple[str, Any]], size: int, data: st.DataObject) -> None:
    runs, plain = both(operations)
    last = data.draw(st.integers(0, len(plain) // size))
    first = data.draw(st.integers(0, last))
    assert blocks_of(runs, size, first, last) == blocks_of(plain, size, first, last)


def test_equal_runs_are_equal_however_they_came_about() -> None:
    runs = TokenRuns.of(4, 3)
    runs.append(4)
    assert runs == TokenRuns.of(4, 4) and runs != TokenRuns.of(4, 3) and runs != TokenRuns.of(5, 4)


def test_only_the_end_changes() -> None:
    runs = TokenRuns.of(4, 3)
    with pytest.raises(IndexError, match="only the last"):
        runs[0] = 5
    with pytest.raises(IndexError, match="index 3 of 3"):
        runs[3]
