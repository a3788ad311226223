"""Who holds which KV block: the pool's books.

Owns block tables' contents, reference counts, leases and the free list; knows no tensors, no clock, no scheduling policy.
Conservation law: every block is exactly one of free, cached (content kept, held by nobody), owned (in at least one block
table) or leased only (held by a lease after its last owner left): free + cached + owned + leased_only = pool. A full block
whose content is cached may be in several tables; it is never written again. Block tables only grow at their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pearl.engine import prefix_cache
from pearl.engine.eviction import Eviction
from pearl.engine.prefix_cache import CacheEntry, Parent, PrefixCache, Root, SessionChains
from pearl.engine.request import Request

CHAIN_BLOCKS_PER_BLOCK = 4
"""Hashed blocks of sessions that are remembered for each block of the pool: sessions may share their beginnings."""


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens. `eviction` as in EngineConfig."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool = True, eviction: Eviction = "keep") -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._keeps = eviction == "keep"
        self.cache = PrefixCache()
        self.sessions = SessionChains(CHAIN_BLOCKS_PER_BLOCK * num_blocks, block_size)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._lease_counts: dict[int, int] = {}
        self._leases: dict[int, tuple[int, ...]] = {}
        self._next_lease = 0
        self._num_used = 0
        self._registered: dict[str, tuple[int, Parent]] = {}

    # ------------------------------------------------------------------------------------------------ counts

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_free(self) -> int:
        """Blocks without owner, lease or cached content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold cached content and that nobody holds."""
        return self.cache.num_evictable

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + self.cache.num_evictable

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_leased(self) -> int:
        """Blocks that only a lease holds."""
        return sum(1 for block_id in self._lease_counts if not self._refs[block_id])

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks to append before `num_tokens` tokens fit the request's table."""
        return max(0, self.blocks_for(num_tokens) - len(request.block_table))

    # ------------------------------------------------------------------------------------------------ owners

    def match_prefix(self, request: Request, weight_version: int) -> int:
        """Attaches the cached full blocks that the request starts with to its empty table; returns their tokens.

        At least the last token is left to compute, and with prompt log-probs every position whose log-prob is still missing.
        Sets the computed, written and (before any pre-emption) the cached token counts.
        """
        if request.block_table:
            raise RuntimeError(f"request {request.request_id!r} already holds blocks {request.block_table}")
        root: Root = (weight_version, request.cache_salt)
        hits: list[int] = []
        parent: Parent = root
        if self.enable_prefix_cache:
            trail, known = self._recall_session(request, root)
            chain, ids, size, find = self._chain(request, root), request.token_ids, self.block_size, self.cache.find
            most, hash_ = self._most_cacheable(request) // size, prefix_cache.hash_for(ids)
            del trail[most:]
            hits = [entry.block_id for entry in trail]
            parent = trail[-1].entry_id if trail else root
            for index in range(len(hits), most):
                content = tuple(ids[index * size : (index + 1) * size])
                if len(chain) == index + 1:
                    chain.append(hash_(chain[index], content))
                entry = find(chain[index + 1], parent, content)
                if entry is None:
                    break
                hits.append(entry.block_id)
                trail.append(entry)
                parent = entry.entry_id
            if self._keeps:
                self._see_what_was_lost(request, hits, min(known, most))
        self._hold_all(hits)
        request.block_table.extend(hits)
        if hits:
            self._registered[request.request_id] = (len(hits), parent)
        num_tokens = len(hits) * self.block_size
        request.num_computed_tokens = request.num_written_tokens = num_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = num_tokens
        return num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Appends blocks until `num_tokens` tokens fit; all of them or, returning False, none."""
        table = request.block_table
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free) + self.cache.num_evictable:
            return False
        free, refs = self._free, self._refs
        new = free[: -missing - 1 : -1]
        del free[len(free) - len(new) :]
        if len(new) < missing:
            new += self.cache.evict(missing - len(new))
        for block_id in new:
            refs[block_id] = 1
        if self._keeps:
            self.cache.order.mark(new, doubtful=request.lost_prefix)
        table += new
        self._num_used += missing
        return True

    def register(self, request: Request, weight_version: int) -> None:
        """Makes the request's full written blocks findable. Only call it once their KV is in the pool."""
        if not self.enable_prefix_cache or not request.cacheable:
            return
        root: Root = (weight_version, request.cache_salt)
        done, parent = self._registered.get(request.request_id, (0, root))
        if not done or not self.cache.is_live(parent):  # gone: another request's copy of our prefix, so cache our own
            done, parent = 0, root
            request.trail = []
        full = request.num_written_tokens // self.block_size
        chain, hash_ = self._chain(request, root), prefix_cache.hash_for(request.token_ids)
        known = min(done, len(chain) - 1)  # fewer hashes than `done`: another's copy was used, nobody has asked for them
        contents = prefix_cache.blocks_of(request.token_ids, self.block_size, known, full)
        for content in contents[len(chain) - 1 - known :]:
            chain.append(hash_(chain[-1], content))
        block_ids = request.block_table[done:full]
        entries = self.cache.insert_all(chain[done + 1 : full + 1], parent, contents[done - known :], block_ids)
        if request.session_id is not None:
            request.trail += entries
        self._registered[request.request_id] = (max(done, full), entries[-1].entry_id if entries else parent)

    def free(self, request: Request) -> None:
        """Takes all blocks from the request; nothing of it is computed any more. Its last blocks are evicted first."""
        refs, leased = self._refs, self._lease_counts
        unheld = []
        for block_id in reversed(request.block_table):
            left = refs[block_id] = refs[block_id] - 1
            if not left:
                unheld.append(block_id)
        self._num_used -= len(unheld)
        if leased:
            unheld = [block_id for block_id in unheld if block_id not in leased]
        self._free += self.cache.release_all(unheld)
        request.block_table.clear()
        request.num_computed_tokens = request.num_written_tokens = 0
        self._registered.pop(request.request_id, None)

    def remember_session(self, request: Request) -> None:
        """Keeps the hashes and cached blocks of an ended request for the next turn of its session."""
        if request.session_id is not None and self.enable_prefix_cache:
            turn = self.cache.order.end_turn(self.sessions.last_turn(request.session_id))
            self.sessions.keep(request.session_id, request.token_ids, request.block_hashes, request.trail, turn)
            request.trail = []

    def reset_prefix_cache(self) -> int:
        """Forgets all cached content, and what sessions had of it; returns how many blocks were cached. Owners and leases keep
        their blocks."""
        self.sessions.clear()
        dropped, unheld = self.cache.reset()
        self._free.extend(unheld)
        return dropped

    # ------------------------------------------------------------------------------------------------ leases

    def lease(self, block_ids: Iterable[int]) -> int:
        """Keeps blocks from being re-used until `release_lease`, whatever their owner does. Returns the lease's id.

        Raises ValueError for a block that is free: it holds nothing to protect.
        """
        wanted = tuple(dict.fromkeys(block_ids))
        for block_id in wanted:
            held = 0 <= block_id < self.num_blocks and (
                self._refs[block_id] or block_id in self._lease_counts or block_id in self.cache
            )
            if not held:
                raise ValueError(f"block_ids: {block_id} is not an owned, cached or leased block of 0..{self.num_blocks - 1}")
        for block_id in wanted:
            self.cache.hold(block_id)
            self._lease_counts[block_id] = self._lease_counts.get(block_id, 0) + 1
        self._next_lease += 1
        self._leases[self._next_lease] = wanted
        return self._next_lease

    def release_lease(self, lease_id: int) -> None:
        """Ends a lease; raises ValueError for one that does not exist or has ended."""
        if lease_id not in self._leases:
            raise ValueError(f"lease_id={lease_id}: must be one of {sorted(self._leases)}")
        for block_id in reversed(self._leases.pop(lease_id)):
            self._lease_counts[block_id] -= 1
            if not self._lease_counts[block_id]:
                del self._lease_counts[block_id]
                if not self._refs[block_id]:
                    self._give_back(block_id)

    def adopt(self, request: Request, lease_id: int, num_tokens: int) -> None:
        """Makes the blocks of a lease the empty table of a request whose first `num_tokens` tokens they hold; ends the lease.

        Raises RuntimeError if the request holds blocks.
        """
        if request.block_table:
            raise RuntimeError(f"request {request.request_id!r} already holds blocks {request.block_table}")
        blocks = self._leases[lease_id]
        self._hold_all(blocks)
        request.block_table.extend(blocks)
        request.num_computed_tokens = request.num_written_tokens = num_tokens
        self.release_lease(lease_id)

    # ------------------------------------------------------------------------------------------------ books

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Counts everything again from `requests` (all that hold blocks); raises RuntimeError saying what does not add up."""
        self.cache.check_integrity()
        refs, holders = [0] * self.num_blocks, list(requests)
        strays = self._registered.keys() - {request.request_id for request in holders}
        if strays:
            raise RuntimeError(f"requests {sorted(strays)} hold no blocks but are remembered")
        for request in holders:
            self._check_table(request)
            for block_id in request.block_table:
                refs[block_id] += 1
        counts = enumerate(zip(refs, self._refs, strict=True))
        wrong = [(block_id, tables, count) for block_id, (tables, count) in counts if tables != count]
        if wrong:
            raise RuntimeError(f"reference counts differ from the block tables: (block, tables, count) {wrong}")
        counted: dict[int, int] = {}
        for block_ids in self._leases.values():
            for block_id in block_ids:
                counted[block_id] = counted.get(block_id, 0) + 1
        if counted != self._lease_counts:
            raise RuntimeError(f"lease counts {self._lease_counts} differ from the leases {self._leases}")
        owned = {block_id for block_id, count in enumerate(refs) if count}
        kinds = {
            "free": list(self._free),
            "cached": self.cache.evictable_blocks(),
            "owned": sorted(owned),
            "leased_only": [block_id for block_id in counted if block_id not in owned],
        }
        everything = sorted(block_id for block_ids in kinds.values() for block_id in block_ids)
        if everything != list(range(self.num_blocks)) or len(owned) != self._num_used:
            raise RuntimeError(f"free + cached + owned + leased_only is not the pool of {self.num_blocks} blocks: {kinds}")
        cached_free = [block_id for block_id in self._free if block_id in self.cache]
        if cached_free:
            raise RuntimeError(f"free blocks {cached_free} are still in the prefix cache")

    def _check_table(self, request: Request) -> None:
        table, room = request.block_table, len(request.block_table) * self.block_size
        if len(set(table)) != len(table):
            raise RuntimeError(f"request {request.request_id!r} holds a block twice: {table}")
        written, computed, known = request.num_written_tokens, request.num_computed_tokens, len(request.token_ids)
        if not written <= computed <= min(known, room):
            counts = f"written {written} <= computed {computed} <= known {known} and room {room}"
            raise RuntimeError(f"request {request.request_id!r}: {counts} is broken")
        for index, block_id in enumerate(table):
            entry = self.cache.entry_of(block_id)
            if entry is not None and entry.token_ids != self._ids(request, index):
                raise RuntimeError(f"request {request.request_id!r}: its block {block_id} is cached as {entry.token_ids}")

    # ------------------------------------------------------------------------------------------------ inside

    def _hold_all(self, block_ids: Sequence[int]) -> None:
        refs = self._refs
        fresh = [block_id for block_id in block_ids if not refs[block_id]]
        for block_id in block_ids:
            refs[block_id] += 1
        self._num_used += len(fresh)
        self.cache.hold_all(fresh)

    def _give_back(self, block_id: int) -> None:
        if block_id in self._lease_counts:
            return
        if block_id in self.cache:
            self.cache.release(block_id)
        else:
            self._free.append(block_id)

    def _ids(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _see_what_was_lost(self, request: Request, hits: list[int], known: int) -> None:
        """What it found is kept. If that is less than the `known` blocks that its session had here, what it computes itself
        will go before others; it stays so if the request gives way and finds its own blocks again."""
        if not request.lost_prefix:
            self.cache.order.mark(hits, doubtful=False)
            request.lost_prefix = len(hits) < known

    def _recall_session(self, request: Request, root: Root) -> tuple[list[CacheEntry], int]:
        """The blocks that the session's last turn had in common with this request, as far as they are still cached (the
        beginning of the request's trail), and how many there were. Its hashes too, if the request has fewer of this root."""
        if request.session_id is None:
            return [], 0
        chain, trail = self.sessions.recall(request.session_id, request.token_ids, root)
        if len(self._chain(request, root)) < len(chain):
            request.block_hashes = chain
        request.trail = self.cache.still_there(trail, root)
        return request.trail, len(trail)  # the chain may know a block more, which was looked for and never computed

    def _chain(self, request: Request, root: Root) -> list[int]:
        """The request's hashes, [root, block 0, block 1, ...] as far as they are known, of one root: emptied for another."""
        chain, start = request.block_hashes, prefix_cache.root_hash(root)
        if not chain or chain[0] != start:
            chain[:] = [start]
        return chain

    def _most_cacheable(self, request: Request) -> int:
        most = len(request.token_ids) - 1
        if request.params.prompt_logprobs and len(request.prompt_logprobs) < request.num_prompt_tokens:
            most = min(most, max(0, len(request.prompt_logprobs) - 1))
        return most
