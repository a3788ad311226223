"""The pool's books: growing, sharing, freeing, leases, and the conservation law under random use."""

from __future__ import annotations

import pytest
from fake_model import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.block_manager import BlockManager


def counts(blocks: BlockManager) -> tuple[int, int, int, int]:
    return blocks.num_free, blocks.num_cached, blocks.num_used, blocks.num_leased


def written(blocks: BlockManager, name: str, prompt, num_written=None, version: int = 0, **options):
    """A request that matched, grew over its prompt, wrote it and registered its blocks."""
    request = make_request(name, prompt, **options)
    blocks.match_prefix(request, version)
    assert blocks.grow(request, len(prompt))
    request.num_computed_tokens = request.num_written_tokens = len(prompt) if num_written is None else num_written
    blocks.register(request, version)
    return request


def test_growing_takes_all_blocks_or_none():
    blocks = BlockManager(4, 4)
    a, b = make_request("a", [1] * 5), make_request("b", [2] * 9)
    assert blocks.grow(a, 1) and len(a.block_table) == 1
    assert blocks.grow(a, 4) and len(a.block_table) == 1
    assert blocks.grow(a, 5) and len(a.block_table) == 2
    assert not blocks.grow(b, 9) and b.block_table == [] and counts(blocks) == (2, 0, 2, 0)
    assert blocks.grow(b, 8) and counts(blocks) == (0, 0, 4, 0)
    assert set(a.block_table).isdisjoint(b.block_table)
    assert blocks.num_missing(b, 9) == 1 and blocks.num_missing(b, 3) == 0


@pytest.mark.parametrize("length", [5, 6, 7, 8, 9])
def test_freeing_gives_back_whole_blocks_less_the_shared_ones(length):
    blocks = BlockManager(16, 4)
    first = written(blocks, "first", [1, 2, 3, 4, 9])
    second = written(blocks, "second", [1, 2, 3, 4] + [5] * (length - 4))
    assert second.num_cached_tokens == 4 and second.block_table[0] == first.block_table[0]
    before = blocks.num_available
    blocks.free(second)
    assert blocks.num_available - before == -(-length // 4) - 1
    assert second.block_table == [] and second.num_computed_tokens == second.num_written_tokens == 0
    blocks.check_integrity([first])
    blocks.free(first)
    assert blocks.num_available == 16


def test_only_full_written_blocks_are_shared_and_one_token_is_left():
    blocks = BlockManager(16, 4)
    written(blocks, "half", [1, 2, 3, 4, 5, 6, 7, 8], num_written=7)
    probe = make_request("probe", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.match_prefix(probe, 0) == 4 == probe.num_computed_tokens == probe.num_written_tokens
    blocks.free(probe)
    written(blocks, "full", [1, 2, 3, 4, 5, 6, 7, 8])
    for length, hit in ((9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        probe = make_request("probe", [1, 2, 3, 4, 5, 6, 7, 8, 9][:length])
        assert blocks.match_prefix(probe, 0) == hit == probe.num_cached_tokens
        blocks.free(probe)


def test_versions_salts_and_uncacheable_requests_do_not_share():
    blocks, prompt = BlockManager(32, 4), [1, 2, 3, 4, 5]
    written(blocks, "plain", prompt)
    for version, salt, hit in ((0, None, 4), (1, None, 0), (0, "a", 0)):
        probe = make_request("probe", prompt, salt=salt)
        assert blocks.match_prefix(probe, version) == hit
        blocks.free(probe)
    mixed = make_request("mixed", [7, 7, 7, 7, 7])
    mixed.cacheable = False
    blocks.grow(mixed, 5)
    mixed.num_computed_tokens = mixed.num_written_tokens = 5
    blocks.register(mixed, 0)
    assert blocks.match_prefix(make_request("probe", [7] * 5), 0) == 0
    off = BlockManager(32, 4, enable_prefix_cache=False)
    written(off, "plain", prompt)
    assert off.match_prefix(make_request("probe", prompt), 0) == 0 and len(off.cache) == 0


def test_the_last_blocks_of_the_request_freed_first_are_evicted_first():
    blocks = BlockManager(4, 2)
    old, new = written(blocks, "old", [1, 1, 2, 2]), written(blocks, "new", [3, 3, 4, 4])
    order = [*reversed(old.block_table), *reversed(new.block_table)]
    blocks.free(old)
    blocks.free(new)
    assert blocks.cache.evictable_blocks() == order and counts(blocks) == (0, 4, 0, 0)
    taker = make_request("taker", [9] * 3)
    assert blocks.grow(taker, 2)
    assert taker.block_table == order[:1]
    probe = make_request("probe", [1, 1, 2, 2, 0])
    assert blocks.match_prefix(probe, 0) == 2
    blocks.check_integrity([taker, probe])


def test_a_prefix_shared_with_an_evicted_copy_is_cached_again():
    blocks = BlockManager(6, 2)
    first = written(blocks, "first", [1, 1, 2])
    twin = make_request("twin", [1, 1, 2, 2, 3])
    blocks.grow(twin, 5)  # computed at the same time: no hit, own copy
    twin.num_computed_tokens = twin.num_written_tokens = 3
    blocks.register(twin, 0)
    assert twin.block_table[0] not in blocks.cache
    blocks.free(first)
    other = make_request("other", [9] * 6)
    assert blocks.grow(other, 6)  # evicts first's copy
    twin.num_computed_tokens = twin.num_written_tokens = 5
    blocks.register(twin, 0)
    blocks.free(other)
    probe = make_request("probe", [1, 1, 2, 2, 8])
    assert blocks.match_prefix(probe, 0) == 4 and probe.block_table == twin.block_table[:2]
    blocks.check_integrity([twin, probe])


def test_leased_blocks_outlive_their_owner():
    blocks = BlockManager(4, 4)
    request = written(blocks, "r", [1, 2, 3, 4, 5])
    table = list(request.block_table)
    lease, second = blocks.lease(table), blocks.lease(table[:1])
    assert counts(blocks) == (2, 0, 2, 0)
    blocks.free(request)
    assert counts(blocks) == (2, 0, 0, 2) and blocks.num_leases == 2
    assert not blocks.grow(make_request("big", [0] * 12), 12)
    again = make_request("again", [1, 2, 3, 4, 9])
    assert blocks.match_prefix(again, 0) == 4 and counts(blocks) == (2, 0, 1, 1)
    blocks.free(again)
    blocks.check_integrity([])
    blocks.release_lease(lease)
    assert counts(blocks) == (3, 0, 0, 1)
    blocks.release_lease(second)
    assert counts(blocks) == (3, 1, 0, 0)
    with pytest.raises(ValueError, match=f"lease_id={lease}"):
        blocks.release_lease(lease)
    cached = blocks.lease(table[:1])  # a cached block that nobody owns can be leased too
    assert counts(blocks) == (3, 0, 0, 1)
    assert blocks.reset_prefix_cache() == 1
    blocks.release_lease(cached)
    assert counts(blocks) == (4, 0, 0, 0)
    for wrong in (0, 4, -1):
        with pytest.raises(ValueError, match="block_ids"):
            blocks.lease([wrong])


def test_reset_keeps_owners_and_counts_what_was_cached():
    blocks = BlockManager(8, 2)
    gone, alive = written(blocks, "gone", [1, 1, 2, 2]), written(blocks, "alive", [3, 3, 4])
    blocks.free(gone)
    assert blocks.reset_prefix_cache() == 3 and counts(blocks) == (6, 0, 2, 0)
    assert blocks.match_prefix(make_request("probe", [3, 3, 4]), 0) == 0
    blocks.check_integrity([alive])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_impossible_sizes(num_blocks, block_size):
    with pytest.raises(ValueError, match="=0: must be >= 1"):
        BlockManager(num_blocks, block_size)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda blocks, request: request.block_table.append(request.block_table[0]),
        lambda blocks, request: request.block_table.pop(),
        lambda blocks, request: blocks._free.pop(),
        lambda blocks, request: blocks._free.append(request.block_table[0]),
        lambda blocks, request: blocks._refs.__setitem__(request.block_table[0], 2),
        lambda blocks, request: blocks._lease_counts.__setitem__(0, 1),
        lambda blocks, request: request.token_ids.__setitem__(0, 9),
        lambda blocks, request: setattr(request, "num_written_tokens", 6),
        lambda blocks, request: blocks.cache.order.release(request.block_table[0]),
        lambda blocks, request: blocks.cache.order._doubtful.add(10) or blocks.cache.order._kept.update({10: 0}),
    ],
)
def test_integrity_sees_broken_books(break_it):
    blocks = BlockManager(4, 4)
    request = written(blocks, "r", [1, 2, 3, 4, 5])
    blocks.check_integrity([request])
    break_it(blocks, request)
    with pytest.raises(RuntimeError):
        blocks.check_integrity([request])


names = st.sampled_from(["new", "grow", "free", "lease", "end_lease", "reset"])
steps = st.lists(st.tuples(names, st.integers(0, 99)), max_size=60)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), eviction=st.sampled_from(["lru", "keep"]), steps=steps)
def test_conservation_under_random_use(num_blocks, block_size, eviction, steps):
    blocks, alive, leases = BlockManager(num_blocks, block_size, eviction=eviction), [], []
    leased: dict[int, tuple[int, ...]] = {}
    for number, (name, value) in enumerate(steps):
        if name == "new":
            request = make_request(f"r{number}", [1, 2, 1, 2, 3, 3, 3, 3, 3][value % 3 :][: 1 + value % 7])
            request.session_id = str(value % 3) if value % 4 else None
            blocks.match_prefix(request, 0)
            alive.append(request)
        elif name == "grow" and alive:
            request = alive[value % len(alive)]
            request.token_ids.extend([value % 3] * (value % 4))
            before = list(request.block_table)
            if blocks.grow(request, len(request.token_ids)):
                request.num_computed_tokens = request.num_written_tokens = len(request.token_ids)
                blocks.register(request, 0)
            assert request.block_table[: len(before)] == before
            under_lease = {block_id for block_ids in leased.values() for block_id in block_ids}
            assert not under_lease & set(request.block_table[len(before) :])
        elif name == "free" and alive:
            request = alive.pop(value % len(alive))
            blocks.free(request)
            blocks.remember_session(request)
        elif name == "lease" and alive:
            table = tuple(alive[value % len(alive)].block_table)
            leases.append(blocks.lease(table))
            leased[leases[-1]] = table
        elif name == "end_lease" and leases:
            leased.pop(leases[0])
            blocks.release_lease(leases.pop(0))
        elif name == "reset":
            blocks.reset_prefix_cache()
        blocks.check_integrity(alive)
        assert sum(counts(blocks)) == num_blocks
    for request in alive:
        blocks.free(request)
    for lease_id in leases:
        blocks.release_lease(lease_id)
    blocks.check_integrity([])
    assert blocks.num_available == num_blocks


def test_a_request_that_waited_while_its_session_went_on_takes_over_its_blocks():
    """Siblings, or several requests of one session: one looked its prompt up in vain before another had computed it."""
    blocks, ids = BlockManager(64, 4), list(range(1, 34))
    late, first = make_request("late", [*ids, *range(40, 60)]), make_request("first", ids)
    late.session_id = first.session_id = "s"
    assert blocks.match_prefix(late, 0) == 0
    blocks.free(late)
    assert blocks.match_prefix(first, 0) == 0 and blocks.grow(first, 33)
    first.num_computed_tokens = first.num_written_tokens = 33
    blocks.register(first, 0)
    blocks.remember_session(first)
    blocks.free(first)
    assert blocks.match_prefix(late, 0) == 32 and late.block_table == [entry.block_id for entry in late.trail]
    blocks.check_integrity([late])
