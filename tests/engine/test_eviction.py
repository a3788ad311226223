"""Which cached blocks make room: sessions that come back in turns, those that have ended, and what is shared."""

from __future__ import annotations

import pytest
from fake_model import make_request

from pearl.engine.block_manager import BlockManager
from pearl.engine.eviction import EvictionOrder
from pearl.engine.request import Request

SIZE = 4


def turn(blocks: BlockManager, session: str, ids: list[int]) -> int:
    """One turn of a session, begun and ended; returns how many of its blocks were found."""
    request = begin(blocks, session, ids)
    found = request.num_cached_tokens // SIZE
    end(blocks, request)
    return found


def begin(blocks: BlockManager, session: str, ids: list[int]) -> Request:
    request = make_request(f"{session}.{len(ids)}", ids)
    request.session_id = session
    blocks.match_prefix(request, 0)
    assert blocks.grow(request, len(ids))
    request.num_computed_tokens = request.num_written_tokens = len(ids)
    blocks.register(request, 0)
    return request


def end(blocks: BlockManager, request: Request) -> None:
    blocks.free(request)
    blocks.remember_session(request)


def context(session: int) -> list[int]:
    """One full block that no other session has, and one token."""
    return [10 + session] * (SIZE + 1)


def found_in(blocks: BlockManager, sessions: range) -> int:
    return sum(turn(blocks, str(session), context(session)) for session in sessions)


@pytest.mark.parametrize("num_sessions", [3, 4, 9])
def test_sessions_in_turns_keep_what_fits(num_sessions: int) -> None:
    """A block for each of n sessions, of which the running one needs one more: n - 1 fit.

    By age each takes the block of the next one, which then finds nothing. Else the first to come back takes that of the
    second, and these two go on to take turns in one block, while the n - 2 others find theirs.
    """
    by_age, kept = (BlockManager(num_sessions, SIZE, eviction=name) for name in ("lru", "keep"))
    sessions = range(num_sessions)
    assert [found_in(by_age, sessions) for _ in range(5)] == [0] * 5
    assert [found_in(kept, sessions) for _ in range(5)] == [0] + [num_sessions - 2] * 4
    for blocks in (by_age, kept):
        blocks.check_integrity([])


def test_sessions_that_have_ended_make_room() -> None:
    """Of 8 in turns 6 have found their blocks when 4 of those end: two of the others, 0 and 1, go on losing theirs, until
    what has ended is 1.5 rounds old."""
    blocks = BlockManager(8, SIZE)
    for _ in range(3):
        found_in(blocks, range(8))
    found = [found_in(blocks, range(4)) for _ in range(8)]
    assert found[0] == 2 and found[-5:] == [4] * 5, found
    blocks.check_integrity([])


def test_those_that_begin_are_kept_and_push_out_what_was_lost() -> None:
    blocks = BlockManager(4, SIZE)
    for _ in range(3):
        found_in(blocks, range(4))  # 0 and 1 share a block
    assert turn(blocks, "9", context(9)) == 0
    assert turn(blocks, "9", context(9)) == 1
    assert found_in(blocks, range(2, 4)) == 2


def test_without_a_session_nothing_is_lost() -> None:
    blocks = BlockManager(3, SIZE)
    for _ in range(3):
        for number in range(3):
            request = make_request("r", context(number))
            assert blocks.match_prefix(request, 0) == 0 and blocks.grow(request, SIZE + 1)
            request.num_computed_tokens = request.num_written_tokens = SIZE + 1
            blocks.register(request, 0)
            blocks.free(request)
    assert not request.lost_prefix and not blocks.cache.order._doubtful


def evict(blocks: BlockManager, count: int) -> None:
    hungry = make_request("hungry", [1])
    assert blocks.grow(hungry, (blocks.num_free + count) * SIZE)
    blocks.free(hungry)


def lost(blocks: BlockManager) -> Request:
    """A request whose session had a block here, which is gone."""
    assert turn(blocks, "lost", context(0)) == 0
    evict(blocks, blocks.num_cached)
    request = begin(blocks, "lost", context(0))
    assert request.lost_prefix and request.num_cached_tokens == 0
    return request


def test_what_was_computed_again_goes_first_also_after_a_lease() -> None:
    blocks = BlockManager(6, SIZE)
    request = lost(blocks)
    block_id = request.block_table[0]
    turn(blocks, "other", context(1))
    lease = blocks.lease(request.block_table)
    end(blocks, request)
    blocks.release_lease(lease)
    blocks.cache.release(block_id)  # and if it is said again
    assert blocks.cache.evictable_blocks()[0] == block_id
    blocks.check_integrity([])


def test_what_another_session_finds_is_kept() -> None:
    """Siblings share a prompt: whoever computed it, it is as good as those who find it."""
    blocks = BlockManager(8, SIZE)
    request = lost(blocks)
    block_id = request.block_table[0]
    end(blocks, request)
    turn(blocks, "older", context(1))
    assert blocks.cache.evictable_blocks()[0] == block_id
    assert turn(blocks, "sibling", [*context(0), 7]) == 1
    assert blocks.cache.evictable_blocks()[-1] == block_id
    blocks.check_integrity([])


def test_what_gave_way_and_is_found_again_was_lost_all_the_same() -> None:
    blocks = BlockManager(6, SIZE)
    request = lost(blocks)
    block_id = request.block_table[0]
    blocks.free(request)
    assert blocks.match_prefix(request, 0) == SIZE and request.lost_prefix
    end(blocks, request)
    turn(blocks, "other", context(1))
    assert blocks.cache.evictable_blocks()[0] == block_id


def test_what_was_never_computed_is_not_lost() -> None:
    """A request that ends while it waits has looked for its blocks, and has had none."""
    blocks = BlockManager(6, SIZE)
    request = make_request("waits", context(0))
    request.session_id = "s"
    assert blocks.match_prefix(request, 0) == 0
    end(blocks, request)
    request = begin(blocks, "s", context(0))
    assert not request.lost_prefix
    end(blocks, request)
    assert turn(blocks, "s", context(0)) == 1
    blocks.check_integrity([])


def test_a_part_that_is_left_is_kept() -> None:
    """Of three blocks the last is gone: the first two are found and stay, the third goes first."""
    blocks = BlockManager(8, SIZE)
    ids = [5] * (3 * SIZE + 1)
    turn(blocks, "s", ids)
    evict(blocks, 1)
    turn(blocks, "other", context(1))
    request = begin(blocks, "s", ids)
    table = list(request.block_table)
    assert request.num_cached_tokens == 2 * SIZE
    end(blocks, request)
    assert blocks.cache.evictable_blocks()[0] == table[2] and blocks.cache.evictable_blocks()[-2:] == [table[1], table[0]]


def test_new_weights_forget_what_was_lost() -> None:
    blocks = BlockManager(6, SIZE)
    end(blocks, lost(blocks))
    blocks.reset_prefix_cache()
    assert len(blocks.cache.order) == 0 and not blocks.cache.order._doubtful
    assert turn(blocks, "lost", context(0)) == 0 and not blocks.cache.order._doubtful


def test_the_order_without_marks_is_that_of_release() -> None:
    order = EvictionOrder()
    order.release_all([3, 1])
    order.release(2)
    order.release(3)
    assert list(order) == [1, 2, 3] and order.first(2) == [1, 2] and len(order) == 3 and 2 in order
    order.hold(2)
    assert list(order) == [1, 3] and 2 not in order


def test_overdue_blocks_go_first_then_the_doubtful_ones() -> None:
    order = EvictionOrder()
    order.release(1)  # in turn 0
    last = order.end_turn(None)
    order.mark([2], doubtful=True)
    order.release_all([2, 3])  # in turn 1
    assert list(order) == [2, 1, 3], "nobody knows yet how soon sessions come back"
    assert order.end_turn(last) == 2
    assert list(order) == [1, 2, 3], "a session has come back after 1 turn, and 2 have passed"
    assert order.first(1) == [1] and order.first(2) == [1, 2]


def test_integrity_sees_a_block_in_the_wrong_queue() -> None:
    order = EvictionOrder()
    order.release(1)
    order.mark([1], doubtful=True)
    with pytest.raises(RuntimeError, match="wrong queue"):
        order.check_integrity()
