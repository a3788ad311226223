"""Which full KV blocks hold which content, so that a later request with the same beginning need not compute it.

Owns the map from content to block; in which order those go that nobody holds is said by `eviction.py`. It does not know
requests, reference counts or the pool's size (`block_manager.py` does). Invariant: an entry is found only by equal content: the
block's own ids, the identity of the entry before it, and at the chain's root the weight version and the caller's salt.
Hashes only choose the bucket to look in, so a colliding hash costs time and never a wrong answer.
`SessionChains` keeps the hashes of a conversation's last turn and what it was cached as, so that the next turn hashes and looks
up only what is new.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

from pearl.engine.eviction import EvictionOrder
from pearl.engine.token_runs import TokenRuns

Root = tuple[int, str | None]
"""(weight_version, cache_salt): what the first block of a chain has for a parent."""

Parent = int | Root
"""Identity of what comes before a block: the entry id of the block before it, or a Root."""


def block_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """64-bit hash of a block, chained on the hash of the block before it. Same in every process."""
    ids = array("q", token_ids)
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=8, key=parent_hash.to_bytes(8, "little")).digest(), "little")


def run_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """The same for blocks of `TokenRuns`, which their ends nearly tell apart: quick, and a collision costs time only."""
    return hash((parent_hash, token_ids[0], token_ids[-1], len(token_ids)))


def blocks_of(token_ids: Sequence[int] | TokenRuns, size: int, first: int, last: int) -> list[tuple[int, ...]]:
    """The ids of the blocks `first` to `last` (not included), `size` ids each, all of which must be full."""
    if isinstance(token_ids, TokenRuns):
        return token_ids.blocks(size, first, last)
    return [tuple(token_ids[start : start + size]) for start in range(first * size, last * size, size)]


def hash_for(token_ids: Sequence[int] | TokenRuns) -> Callable[[int, tuple[int, ...]], int]:
    """How blocks of these ids are hashed."""
    return run_hash if isinstance(token_ids, TokenRuns) else block_hash


@lru_cache(maxsize=4096)
def root_hash(root: Root) -> int:
    """64-bit hash that a chain starts from."""
    weight_version, salt = root
    text = f"{weight_version}:" if salt is None else f"{weight_version}:salt:{salt}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One cached block. `entry_id` is never used twice, so a child of a dropped parent can never be found again."""

    entry_id: int
    hash: int
    parent: Parent
    token_ids: tuple[int, ...]
    block_id: int


class PrefixCache:
    """Content -> block. `order` has the cached blocks that no table and no lease holds."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[CacheEntry]] = {}
        self._by_block: dict[int, CacheEntry] = {}
        self._by_id: dict[int, CacheEntry] = {}
        self.order = EvictionOrder()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    @property
    def num_evictable(self) -> int:
        return len(self.order)

    def entries(self) -> list[CacheEntry]:
        return list(self._by_block.values())

    def entry_of(self, block_id: int) -> CacheEntry | None:
        return self._by_block.get(block_id)

    def evictable_blocks(self) -> list[int]:
        """Next to be evicted first."""
        return list(self.order)

    def is_live(self, parent: Parent) -> bool:
        """False for an entry that was dropped; a root always lives."""
        return isinstance(parent, tuple) or parent in self._by_id

    def find(self, hash_: int, parent: Parent, token_ids: tuple[int, ...]) -> CacheEntry | None:
        for entry in self._buckets.get(hash_, ()):
            if entry.parent == parent and entry.token_ids == token_ids:
                return entry
        return None

    def still_there(self, trail: list[CacheEntry], root: Root) -> list[CacheEntry]:
        """The first of these entries, each the child of the one before, as far as none of them was dropped."""
        if not trail or trail[0].parent != root:
            return []
        by_id = self._by_id
        gone = next((index for index, entry in enumerate(trail) if by_id.get(entry.entry_id) is not entry), None)
        return trail[:gone]

    def insert_all(
        self, hashes: Sequence[int], parent: Parent, contents: Sequence[tuple[int, ...]], block_ids: Sequence[int]
    ) -> list[CacheEntry]:
        """Makes written blocks findable, each the child of the one before, the first of `parent`; returns their entries, or
        those of blocks that already hold the same."""
        buckets, by_block, by_id, entries = self._buckets, self._by_block, self._by_id, []
        for hash_, token_ids, block_id in zip(hashes, contents, block_ids, strict=True):
            entry = self.find(hash_, parent, token_ids) if hash_ in buckets else None
            if entry is None:
                if block_id in by_block:  # cached as the child of an entry that is gone: unreachable, so replace it
                    self.drop(block_id)
                self._next_id += 1
                entry = CacheEntry(entry_id=self._next_id, hash=hash_, parent=parent, token_ids=token_ids, block_id=block_id)
                if hash_ in buckets:
                    buckets[hash_].append(entry)
                else:
                    buckets[hash_] = [entry]
                by_block[block_id] = by_id[entry.entry_id] = entry
            entries.append(entry)
            parent = entry.entry_id
        return entries

    def drop(self, block_id: int) -> None:
        """Forgets a block's content; nothing if it was not cached."""
        entry = self._by_block.pop(block_id, None)
        if entry is None:
            return
        del self._by_id[entry.entry_id]
        bucket = self._buckets[entry.hash]
        if len(bucket) == 1:
            del self._buckets[entry.hash]
        else:
            bucket.remove(entry)
        self.order.hold(block_id)

    def release(self, block_id: int) -> None:
        """Nobody holds this cached block any more: it may be evicted."""
        self.order.release(block_id)

    def release_all(self, block_ids: Sequence[int]) -> list[int]:
        """Nobody holds these blocks any more, in this order; returns those of them that are not cached."""
        cached = self._by_block
        others = [block_id for block_id in block_ids if block_id not in cached]
        released = block_ids if not others else [block_id for block_id in block_ids if block_id in cached]
        self.order.release_all(released)
        return others

    def hold(self, block_id: int) -> None:
        """Somebody holds this cached block: it is not evicted."""
        self.order.hold(block_id)

    def hold_all(self, block_ids: Sequence[int]) -> None:
        """The same for several."""
        self.order.hold_all(block_ids)

    def evict(self, count: int) -> list[int]:
        """Drops the `count` blocks that go first and returns their ids. KeyError, unchanged, if there are fewer."""
        if count > len(self.order):
            raise KeyError(f"{count} cached blocks cannot be evicted: all but {len(self.order)} are held")
        block_ids = self.order.first(count)
        for block_id in block_ids:
            self.drop(block_id)
        return block_ids

    def reset(self) -> tuple[int, list[int]]:
        """Forgets everything. Returns how many blocks were cached and which of them nobody holds (free again)."""
        dropped, unheld = len(self._by_block), list(self.order)
        for table in (self._buckets, self._by_block, self._by_id):
            table.clear()
        self.order.clear()
        return dropped, unheld

    def check_integrity(self) -> None:
        """Every map tells the same story; raises RuntimeError with the entry that does not."""
        in_buckets = [(hash_, entry) for hash_, bucket in self._buckets.items() for entry in bucket]
        if not len(in_buckets) == len(self._by_block) == len(self._by_id):
            sizes = (len(in_buckets), len(self._by_block), len(self._by_id))
            raise RuntimeError(f"prefix cache maps differ in size: buckets, blocks, ids = {sizes}")
        for hash_, entry in in_buckets:
            by_block, by_id = self._by_block.get(entry.block_id), self._by_id.get(entry.entry_id)
            if entry.hash != hash_ or by_block is not entry or by_id is not entry:
                raise RuntimeError(f"prefix cache entry {entry} is not the one its block, id and hash lead to")
        self.order.check_integrity()
        stray = [block_id for block_id in self.order if block_id not in self._by_block]
        if stray:
            raise RuntimeError(f"blocks {stray} are in the eviction order but hold no cached content")


class SessionChains:
    """Hash chains [root, block 0, block 1, ...] by session, with the ids they were made from and the blocks' entries in the
    cache (the trail, which may be shorter, and whose entries may be gone since); the least recently used go first.

    `max_blocks` bounds the hashed blocks of all sessions together. A chain is used as far as the ids are the same, so a session
    whose turns do not continue each other costs hashing and never a wrong hash.
    """

    def __init__(self, max_blocks: int, block_size: int) -> None:
        self._max_blocks, self._block_size = max_blocks, block_size
        self._chains: OrderedDict[str, tuple[array[int] | TokenRuns, list[int], list[CacheEntry]]] = OrderedDict()
        self._turns: dict[str, int] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def num_blocks(self) -> int:
        """Hashed blocks of all sessions."""
        return self._num_blocks

    def last_turn(self, session_id: str) -> int | None:
        """What `keep` was told of the session's last turn; None if it is not remembered."""
        return self._turns.get(session_id)

    def keep(
        self,
        session_id: str,
        token_ids: Sequence[int] | TokenRuns,
        chain: list[int],
        trail: list[CacheEntry],
        turn: int = 0,
    ) -> None:
        """Remembers chain and trail of the ids that a session has now, in place of those before; `turn`: when that was."""
        self._forget(session_id)
        length = len(chain) - 1
        if not 0 < length <= self._max_blocks:
            return
        self._chains[session_id] = (_beginning(token_ids, length * self._block_size), list(chain), trail)
        self._turns[session_id] = turn
        self._num_blocks += length
        while self._num_blocks > self._max_blocks:
            self._forget(next(iter(self._chains)))

    def clear(self) -> None:
        """Forgets all sessions."""
        self._chains.clear()
        self._turns.clear()
        self._num_blocks = 0

    def recall(
        self, session_id: str, token_ids: Sequence[int] | TokenRuns, root: Root
    ) -> tuple[list[int], list[CacheEntry]]:
        """Chain and trail as far as they are those of `token_ids` under `root`; empty, and forgotten, under another root."""
        ids, chain, trail = self._chains.get(session_id, (None, [], []))
        if ids is None:
            return [], []
        if chain[0] != root_hash(root):
            self._forget(session_id)
            return [], []
        self._chains.move_to_end(session_id)
        equal = self._num_equal(ids, token_ids)
        return chain[: 1 + equal], trail[:equal]

    def _num_equal(self, ids: array[int] | TokenRuns, token_ids: Sequence[int] | TokenRuns) -> int:
        """Blocks at the start that are the same in both; the usual case, all of them, is one comparison."""
        size, most = self._block_size, min(len(ids), len(token_ids))
        if isinstance(ids, TokenRuns) and isinstance(token_ids, TokenRuns):
            return ids.num_equal(token_ids) // size
        given = array("q", token_ids[:most])
        if ids[:most] == given:
            return most // size
        return next(start for start in range(0, most, size) if ids[start : start + size] != given[start : start + size]) // size

    def _forget(self, session_id: str) -> None:
        kept = self._chains.pop(session_id, None)
        if kept is not None:
            del self._turns[session_id]
            self._num_blocks -= len(kept[1]) - 1


def _beginning(token_ids: Sequence[int] | TokenRuns, count: int) -> array[int] | TokenRuns:
    return token_ids.beginning(count) if isinstance(token_ids, TokenRuns) else array("q", token_ids[:count])
