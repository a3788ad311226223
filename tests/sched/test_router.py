"""Router: affinity against load, lost workers, and counts that always add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.sched.router import Router


def router_of(*workers: str, **options: int) -> Router:
    router = Router(**options)
    for worker in workers:
        router.add_worker(worker)
    return router


def test_new_sessions_go_to_the_least_loaded() -> None:
    router = router_of("a", "b", "c")
    assert [router.place(f"s{number}", 10) for number in range(6)] == ["a", "b", "c", "a", "b", "c"]
    router.done("s4")
    assert router.place("new", 10) == "b"


def test_equal_counts_are_told_apart_by_tokens_then_free_blocks() -> None:
    router = router_of("a", "b")
    router.place("long", 1000)
    router.place("short", 10)
    assert router.place("next", 10) == "b"
    router = router_of("a", "b")
    router.on_load("b", waiting=0, running=0, free_blocks=5)
    assert router.place("s", 10) == "b"


def test_a_session_stays_where_its_kv_is() -> None:
    router = router_of("a", "b")
    assert router.place("s", 10) == "a"
    router.done("s")
    router.place("t", 10)
    for number in range(4):
        router.place(f"more{number}", 10)
    router.loads["a"].in_flight += 3
    assert router.place("s", 500) == "a" and router.moved == 0


def test_a_session_leaves_a_worker_that_is_far_behind_unless_it_is_long() -> None:
    for prompt_len, expected in ((100, "b"), (5000, "a")):
        router = router_of("a", "b", slack=2, tokens_per_request=1024)
        router.place("s", prompt_len)
        router.done("s")
        router.loads["a"].in_flight = 4
        assert router.place("s", prompt_len) == expected
        assert router.moved == (expected == "b")


def test_a_session_leaves_a_worker_with_a_queue() -> None:
    router = router_of("a", "b", slack=100)
    router.place("s", 10)
    router.done("s")
    router.loads["a"].in_flight = 2
    router.on_load("a", waiting=3, running=9, free_blocks=0)
    assert router.place("s", 10) == "b"
    router.done("s")
    assert router.place("s", 10) == "b"


def test_a_lost_worker_gives_its_requests_back_in_order() -> None:
    router = router_of("a", "b")
    for number in range(6):
        router.place(f"s{number}", 10)
    router.done("s2")
    assert router.lose_worker("a") == ["s0", "s4"]
    assert [router.place(name, 10) for name in ("s0", "s4", "s2")] == ["b"] * 3
    assert router.lose_worker("b") == ["s1", "s3", "s5", "s0", "s4", "s2"]
    assert router.place("s0", 10) is None and router.worker_of("s0") is None
    router.add_worker("b")
    assert router.place("s0", 10) == "b" and router.worker_of("s0") == "b"
    assert router.lose_worker("nobody") == []


def test_what_is_unknown_is_ignored_and_what_is_wrong_is_refused() -> None:
    router = router_of("a")
    router.done("nobody")
    router.forget("nobody")
    router.on_load("nobody", waiting=1, running=1, free_blocks=1)
    assert list(router.loads) == ["a"]
    router.place("s", 10)
    with pytest.raises(ValueError, match="'s': has a request in flight on 'a'"):
        router.place("s", 10)
    with pytest.raises(ValueError, match="1 requests in flight"):
        router.add_worker("a")
    router.forget("s")
    router.add_worker("a")
    assert router.loads["a"].in_flight == router.loads["a"].prompt_tokens == 0


WHAT = st.sampled_from(["place", "done", "forget", "lose", "add"])


@settings(deadline=None, max_examples=100)
@given(steps=st.lists(st.tuples(WHAT, st.integers(0, 5), st.integers(1, 3000)), max_size=60))
def test_counts_add_up_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    router = router_of("w0", "w1")
    live: dict[str, tuple[str, int]] = {}
    for what, number, size in steps:
        session, worker = f"s{number}", f"w{number % 3}"
        if what == "place" and session not in live:
            placed = router.place(session, size)
            assert (placed is None) == (not router.loads)
            if placed is not None:
                live[session] = (placed, size)
        elif what in ("done", "forget"):
            getattr(router, what)(session)
            live.pop(session, None)
        elif what == "lose":
            lost = router.lose_worker(worker)
            assert set(lost) == {name for name, (place, _) in live.items() if place == worker}
            live = {name: value for name, value in live.items() if name not in lost}
        elif what == "add" and worker not in router.loads:
            router.add_worker(worker)
        for name, load in router.loads.items():
            here = [length for place, length in live.values() if place == name]
            assert (load.in_flight, load.prompt_tokens) == (len(here), sum(here))
        assert all(router.worker_of(name) == place for name, (place, _) in live.items())
