"""Finding blocks by content: chains, roots, colliding hashes, eviction order."""

from __future__ import annotations

import pytest

from pearl.engine.prefix_cache import Parent, PrefixCache, SessionChains, block_hash, blocks_of, root_hash
from pearl.engine.token_runs import TokenRuns

ROOT = (0, None)


def enter(cache: PrefixCache, hash_: int, parent: Parent, token_ids: tuple[int, ...], block_id: int) -> int:
    """The entry id of one block."""
    return cache.insert_all([hash_], parent, [token_ids], [block_id])[0].entry_id


def filled(*blocks: tuple[int, ...]) -> tuple[PrefixCache, list[int]]:
    """A cache with one chain, block ids 0, 1, ...; and the entry ids."""
    cache, parent, hash_, ids = PrefixCache(), ROOT, root_hash(ROOT), []
    for block_id, token_ids in enumerate(blocks):
        hash_ = block_hash(hash_, token_ids)
        parent = enter(cache, hash_, parent, token_ids, block_id)
        ids.append(parent)
    return cache, ids


def test_hashes_are_chained_salted_and_the_same_in_every_process():
    first = block_hash(root_hash(ROOT), (1, 2))
    assert first == block_hash(root_hash((0, None)), (1, 2))
    roots = [(0, None), (1, None), (0, "a"), (0, ""), (0, "None"), (10, None), (1, "0:")]
    assert len({root_hash(root) for root in roots}) == len(roots)
    others = [block_hash(root_hash((1, None)), (1, 2)), block_hash(first, (1, 2)), block_hash(root_hash(ROOT), (2, 1))]
    assert first not in others and len(set(others)) == 3
    assert block_hash(5, (-1, 5)) != block_hash(5, (-2, 5))  # python's own hash() says these are equal


def test_found_only_with_equal_ids_and_parent():
    cache, (first, second) = filled((1, 2), (3, 4))
    at = root_hash(ROOT)
    one = block_hash(at, (1, 2))
    assert cache.find(one, ROOT, (1, 2)).block_id == 0
    assert cache.find(block_hash(one, (3, 4)), first, (3, 4)).entry_id == second
    assert cache.find(one, ROOT, (1, 3)) is None
    assert cache.find(one, (1, None), (1, 2)) is None
    assert cache.find(one, (0, "salt"), (1, 2)) is None
    assert cache.find(block_hash(one, (3, 4)), second, (3, 4)) is None
    cache.check_integrity()


def test_one_bucket_for_all_still_tells_them_apart():
    cache = PrefixCache()
    first = enter(cache, 7, ROOT, (1,), 0)
    other = enter(cache, 7, ROOT, (2,), 1)
    child = enter(cache, 7, first, (3,), 2)
    assert len({first, other, child}) == 3
    assert cache.find(7, first, (3,)).block_id == 2 and cache.find(7, other, (3,)) is None
    cache.drop(0)
    assert cache.find(7, ROOT, (1,)) is None and cache.find(7, ROOT, (2,)).block_id == 1
    cache.check_integrity()


def test_equal_content_in_a_second_block_is_not_cached_twice():
    cache, (first, _) = filled((1, 2), (3, 4))
    assert enter(cache, block_hash(root_hash(ROOT), (1, 2)), ROOT, (1, 2), 9) == first
    assert 9 not in cache and len(cache) == 2


def test_children_of_a_dropped_parent_are_never_found_again():
    cache, (first, _) = filled((1, 2), (3, 4))
    cache.drop(0)
    assert not cache.is_live(first) and cache.is_live(ROOT)
    hash_ = block_hash(root_hash(ROOT), (1, 2))
    again = enter(cache, hash_, ROOT, (1, 2), 0)
    assert again != first and cache.find(block_hash(hash_, (3, 4)), again, (3, 4)) is None
    enter(cache, block_hash(hash_, (3, 4)), again, (3, 4), 1)  # the same block, now under the living parent
    assert cache.find(block_hash(hash_, (3, 4)), again, (3, 4)).block_id == 1 and len(cache) == 2
    cache.check_integrity()


def test_eviction_takes_the_block_released_longest_ago():
    cache, _ = filled((1,), (2,), (3,), (4,))
    with pytest.raises(KeyError, match="held"):
        cache.evict(1)
    for block_id in (3, 2, 1, 0):
        cache.release(block_id)
    cache.hold(2)
    cache.release(3)  # released again: the youngest now
    assert cache.evictable_blocks() == [1, 0, 3]
    assert cache.evict(1) + cache.evict(2) == [1, 0, 3]
    assert 2 in cache and 1 not in cache and cache.num_evictable == 0
    cache.check_integrity()


def test_reset_names_the_blocks_that_nobody_holds():
    cache, _ = filled((1,), (2,), (3,))
    cache.release(1)
    assert cache.reset() == (3, [1])
    assert len(cache) == 0 and cache.reset() == (0, [])
    cache.check_integrity()


def test_integrity_sees_broken_maps():
    for break_it in (
        lambda cache: cache._by_block.pop(0),
        lambda cache: cache._buckets.clear(),
        lambda cache: cache._by_block.__setitem__(1, cache._by_block[0]),
        lambda cache: cache.release(9),
    ):
        cache, _ = filled((1,), (2,))
        break_it(cache)
        with pytest.raises(RuntimeError):
            cache.check_integrity()


def chain_of(ids, root=(0, None), size=2):
    chain = [root_hash(root)]
    for start in range(0, len(ids) // size * size, size):
        chain.append(block_hash(chain[-1], tuple(ids[start : start + size])))
    return chain


def trail_of(cache, ids, root=(0, None), size=2):
    """The entries of a chain, which it enters."""
    hashes = chain_of(ids, root, size)[1:]
    return cache.insert_all(hashes, root, blocks_of(ids, size, 0, len(hashes)), range(len(hashes)))


def runs_of(ids):
    runs = TokenRuns()
    runs.extend(ids)
    return runs


@pytest.mark.parametrize("kind", [list, runs_of])
def test_a_session_s_chain_and_trail_hold_as_far_as_the_ids_do(kind):
    sessions, ids = SessionChains(max_blocks=10, block_size=2), [1, 2, 3, 4, 5, 6, 7]
    chain, trail = chain_of(ids), trail_of(PrefixCache(), ids)
    sessions.keep("s", kind(ids), chain, trail)
    for longer in (ids, [*ids, 8, 9], ids[:6]):
        assert sessions.recall("s", kind(longer), (0, None)) == (chain, trail)
    for number, same in enumerate([0, 0, 1, 1, 2, 2, 3]):
        changed = [*ids[:number], 99, *ids[number + 1 :], 8]
        assert sessions.recall("s", kind(changed), (0, None)) == (chain[: 1 + same], trail[:same])
    for length in range(1, 7):
        assert sessions.recall("s", kind(ids[:length]), (0, None)) == (chain[: 1 + length // 2], trail[: length // 2])
    assert sessions.recall("other", kind(ids), (0, None)) == ([], [])
    assert (len(sessions), sessions.num_blocks) == (1, 3)


@pytest.mark.parametrize("root", [(1, None), (0, "salt")])
def test_a_chain_of_another_root_is_forgotten(root):
    sessions, ids = SessionChains(max_blocks=10, block_size=2), [1, 2, 3, 4]
    sessions.keep("s", ids, chain_of(ids), trail_of(PrefixCache(), ids))
    assert sessions.recall("s", ids, root) == ([], [])
    assert (len(sessions), sessions.num_blocks) == (0, 0)


def test_the_session_used_longest_ago_is_forgotten_first():
    sessions, ids = SessionChains(max_blocks=6, block_size=2), [1, 2, 3, 4]
    for name in "abc":
        sessions.keep(name, ids, chain_of(ids), [])
    sessions.recall("a", ids, (0, None))
    sessions.keep("d", ids, chain_of(ids), [])
    assert [name for name in "abcd" if sessions.recall(name, ids, (0, None))[0]] == ["a", "c", "d"]
    assert (len(sessions), sessions.num_blocks) == (3, 6)
    sessions.keep("a", ids[:2], chain_of(ids[:2]), [])  # in place of what it had
    assert (len(sessions), sessions.num_blocks) == (3, 5)
    sessions.keep("c", list(range(14)), chain_of(list(range(14))), [])  # more than all may have
    sessions.keep("d", [1], chain_of([1]), [])  # not one whole block
    assert (len(sessions), sessions.num_blocks) == (1, 1)


def test_a_trail_is_there_up_to_the_first_entry_that_was_dropped():
    cache, ids = PrefixCache(), [1, 2, 3, 4, 5, 6]
    trail = trail_of(cache, ids)
    assert cache.still_there(trail, ROOT) == trail
    assert cache.still_there(trail, (1, None)) == cache.still_there([], ROOT) == []
    cache.drop(1)
    assert cache.still_there(trail, ROOT) == trail[:1]
    enter(cache, trail[1].hash, trail[0].entry_id, trail[1].token_ids, 1)  # equal content is another entry
    assert cache.still_there(trail, ROOT) == trail[:1]
