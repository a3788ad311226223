"""Router: affinity against load, lost workers, and counts that always add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.protocol import Role
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


def with_requests(router: Router, worker: str, count: int) -> None:
    """So many requests are there, of sessions that nobody asks for."""
    router.loads[worker].in_flight = count
    router._stand(worker)


def test_a_session_stays_where_its_kv_is() -> None:
    router = router_of("a", "b")
    assert router.place("s", 10) == "a"
    router.done("s")
    router.place("t", 10)
    for number in range(4):
        router.place(f"more{number}", 10)
    with_requests(router, "a", 3 + router.loads["a"].in_flight)
    assert router.place("s", 500) == "a" and router.moved == 0


def test_a_session_leaves_a_worker_that_is_far_behind_unless_it_is_long() -> None:
    for prompt_len, expected in ((100, "b"), (5000, "a")):
        router = router_of("a", "b", slack=2, tokens_per_request=1024)
        router.place("s", prompt_len)
        router.done("s")
        with_requests(router, "a", 4)
        assert router.place("s", prompt_len) == expected
        assert router.moved == (expected == "b")


def test_a_session_leaves_a_worker_with_a_queue() -> None:
    router = router_of("a", "b", slack=100)
    router.place("s", 10)
    router.done("s")
    with_requests(router, "a", 2)
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


def split_router(**options: int) -> Router:
    """p0, p1 prefill; d0, d1 decode."""
    router = Router(**options)
    for name in ("p0", "p1"):
        router.add_worker(name, Role.PREFILL)
    for name in ("d0", "d1"):
        router.add_worker(name, Role.DECODE)
    return router


def test_new_prompts_go_to_prefill_workers_with_a_decode_worker_in_mind() -> None:
    router = split_router()
    assert [router.place(f"s{number}", 100) for number in range(4)] == ["p0", "p1", "p0", "p1"]
    assert [router.decode_target(f"s{number}") for number in range(4)] == ["d0", "d1", "d0", "d1"]
    assert router.loads["d0"].reserved == 200 and router.loads["d0"].promised == 2
    router.handed_over("s0", "d0")
    assert router.worker_of("s0") == "d0" and router.decode_target("s0") is None
    assert (router.loads["p0"].in_flight, router.loads["d0"].in_flight, router.loads["d0"].reserved) == (1, 1, 100)


def test_short_appends_stay_where_the_kv_is_and_long_ones_do_not() -> None:
    router = split_router(append_on_decode_tokens=50)
    router.place("s", 1000)
    router.handed_over("s", "d1")
    router.done("s")
    assert router.place("s", 1050) == "d1" and router.decode_target("s") is None and router.moved == 0
    router.done("s")
    assert router.place("s", 1101) == "p0" and router.decode_target("s") == "d1" and router.moved == 0
    router.handed_over("s", "d1")
    router.done("s")
    router.place("other", 10)
    assert router.place("s", 1200) == "p0", "where the rest of its prompt is cached, though p1 is as idle"


def test_what_an_append_may_compute_is_limited_and_what_is_given_back_goes_to_who_computes_prompts() -> None:
    router = split_router(append_on_decode_tokens=50, block_size=16)
    assert router.place("s", 1000) == "p0" and router.most_computed("s") is None
    router.handed_over("s", "d1")
    router.done("s", 1010)
    assert router.place("s", 1040) == "d1" and router.most_computed("s") == 66
    router.gave_back("s")
    assert router.most_computed("s") is None and router.loads["d1"].in_flight == 0
    router.place("other", 10)
    router.handed_over("other", "d1")
    assert router.place("s", 1040) == "p0", "which has the most of it"
    assert router.decode_target("s") == "d0" and router.moved == 0, "d1 has nothing that would be worth going there"
    assert router.most_computed("s") is None, "a second time nobody gives it back"
    router.gave_back("unknown")


def test_with_nobody_to_compute_prompts_apart_an_append_has_no_limit() -> None:
    router = split_router(append_on_decode_tokens=50)
    router.place("s", 1000)
    router.handed_over("s", "d1")
    router.done("s")
    router.lose_worker("p0"), router.lose_worker("p1")
    assert router.place("s", 1010) == "d1" and router.most_computed("s") is None
    router.gave_back("s")  # it was placed before they were lost
    assert router.place("s", 1010) in ("d0", "d1")


def test_credits_send_sessions_where_there_is_room() -> None:
    router = split_router(block_size=16)
    router.on_load("d0", waiting=0, running=0, free_blocks=5)
    router.on_load("d1", waiting=0, running=0, free_blocks=100)
    for name in ("a", "a2"):
        router.place(name, 81)
        assert router.decode_target(name) == "d1"
    router.place("b", 80)
    assert router.decode_target("b") == "d0"
    router.place("c", 80)
    assert router.decode_target("c") == "d1", "though d0 is less crowded: what was promised to b is not given twice"
    router.place("d", 5000)
    assert router.decode_target("d") in ("d0", "d1") and router.without_credit == 1, (
        "nobody has room: it queues, and is counted"
    )
    router.lose_worker("p0"), router.lose_worker("p1")
    assert router.loads["d0"].reserved == router.loads["d1"].reserved == router.loads["d1"].promised == 0


def test_in_a_hybrid_sessions_spread_by_capacity_and_stay_whole_on_mixed_workers() -> None:
    router = Router()
    router.add_worker("m", Role.MIXED, capacity=1.0)
    router.add_worker("p", Role.PREFILL)
    router.add_worker("d", Role.DECODE, capacity=3.0)
    placed = [router.place(f"s{number}", 10) for number in range(8)]
    assert placed.count("m") == 2 and placed.count("p") == 6
    router.done("s0")
    assert placed[0] == "m" and router.place("s0", 5000) == "m" and router.decode_target("s0") is None


def test_without_a_counterpart_whoever_is_there_does_all() -> None:
    router = Router()
    router.add_worker("d", Role.DECODE)
    assert router.place("s", 10) == "d"
    router.lose_worker("d")
    router.add_worker("p", Role.PREFILL)
    assert router.place("s", 10) == "p" and router.decode_target("s") is None
    router.set_role("p", Role.MIXED)
    router.done("s")
    assert router.place("s", 20) == "p"


def test_a_draining_worker_gets_nothing_new_and_names_what_it_has() -> None:
    router = router_of("a", "b")
    assert [router.place(name, 10) for name in ("s", "t", "u")] == ["a", "b", "a"]
    router.done("s")
    assert router.drain("a") == ["u"] and router.drain("nobody") == []
    assert router.place("s", 10) == "b" and router.moved == 1
    router.drain("b")
    assert router.place("v", 10) is None
    router.set_role("a", Role.MIXED)
    assert router.place("v", 10) == "a", "a new role is a new start"


def test_rebalancing_evens_out_with_the_shortest_and_ends() -> None:
    router = router_of("a")
    for number, length in enumerate((50, 10, 40, 30, 20)):
        router.place(f"s{number}", length)
    assert router.rebalance() == [], "one worker"
    router.add_worker("b")
    router.add_worker("p", Role.PREFILL)
    moves = router.rebalance()
    assert [(move.session, move.source, move.target) for move in moves] == [("s1", "a", "b"), ("s4", "a", "b")]
    assert router.rebalance() == [], "they are on their way"
    router.handed_over("s1", "b")
    router.move_failed("s4")
    assert [move.session for move in router.rebalance()] == ["s4"], "it may be tried again"
    assert (router.loads["a"].in_flight, router.loads["b"].in_flight) == (4, 1)


def even(router: Router) -> list[tuple[str, str, str]]:
    """What `rebalance` is to say, looked for among all sessions and workers for each move."""
    loads = {name: load for name, load in router.loads.items() if load.role is not Role.PREFILL and load.takes}
    counts = {name: load.in_flight for name, load in loads.items()}
    live = {name: one for name, one in router._sessions.items() if one.live and one.worker in loads}
    for one in live.values():
        if one.moving_to in loads:
            counts[one.worker] -= 1
            counts[one.moving_to] += 1
    staying = {name: one for name, one in live.items() if one.moving_to is None}
    moves: list[tuple[str, str, str]] = []
    while counts:
        source = min(counts, key=lambda name: (-counts[name], loads[name].slot))
        target = min(counts, key=lambda name: (counts[name], loads[name].slot))
        here = [(one.prompt_len, name) for name, one in staying.items() if one.worker == source]
        if counts[source] - counts[target] < 2 or not here:
            return moves
        moves.append((min(here)[1], source, target))
        del staying[min(here)[1]]
        counts[source] -= 1
        counts[target] += 1
    return moves


def chosen(router: Router, session: str, source: str, refused: set[str]) -> str | None:
    """What `taker` is to say of a session that no worker was planned for, looked for among all workers."""
    able = [name for name, load in router.loads.items() if load.role is not Role.PREFILL and load.takes]
    able = [name for name in able if name != source and name not in refused]
    decode = [name for name in able if router.loads[name].role is Role.DECODE] or able
    roomy = [name for name in decode if router._credit(name) >= router._sessions[session].prompt_len]
    return min(roomy or decode, key=router._rank_of, default=None)


DEEDS = st.sampled_from(["place", "done", "forget", "lose", "add", "hand", "drain", "role", "rebalance", "load", "fail"])


@settings(deadline=None, max_examples=150)
@given(steps=st.lists(st.tuples(DEEDS, st.integers(0, 5), st.integers(0, 4), st.sampled_from(list(Role))), max_size=80))
def test_books_balance_with_roles_credits_and_moves(steps: list[tuple[str, int, int, Role]]) -> None:
    router = split_router(block_size=4)
    for what, number, other, role in steps:
        session, worker = f"s{number}", ("p0", "p1", "d0", "d1", "m")[other]
        if what == "place" and router.worker_of(session) is None:
            placed = router.place(session, 100 * (other + 1))
            assert (placed is None) == all(load.draining for load in router.loads.values())
        elif what in ("done", "forget"):
            getattr(router, what)(session)
        elif what == "lose":
            live = [name for name in map("s{}".format, range(6)) if router.worker_of(name) == worker]
            assert sorted(router.lose_worker(worker)) == live
        elif what == "add" and worker not in router.loads:
            router.add_worker(worker, role)
        elif what == "hand":
            router.handed_over(session, worker)
        elif what == "drain":
            router.drain(worker)
        elif what == "role":
            router.set_role(worker, role)
        elif what == "rebalance":
            wanted = even(router)
            moves = router.rebalance()
            assert [(move.session, move.source, move.target) for move in moves] == wanted
            for move in moves:
                assert move.source != move.target and router.loads[move.target].role is not Role.PREFILL
        elif what == "load":
            router.on_load(worker, waiting=other, running=number, free_blocks=number * 10)
        elif what == "fail":
            router.move_failed(session)
        source = router.worker_of(session)
        if source is not None and router._sessions[session].target is None and router._sessions[session].moving_to is None:
            assert router.taker(session, source, {worker}) == chosen(router, session, source, {worker})
        sessions = [f"s{index}" for index in range(6)]
        for name, load in router.loads.items():
            assert load.in_flight == sum(router.worker_of(one) == name for one in sessions)
            assert load.promised == sum(router.decode_target(one) == name for one in sessions)
            assert load.reserved >= 0 and load.prompt_tokens >= 0 and (load.promised > 0) == (load.reserved > 0)
