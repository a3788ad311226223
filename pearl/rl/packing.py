"""Which sequences share an optimizer update and a forward pass: a pure plan over lengths.

Owns `plan_packing`. It knows token counts only, no tensors. Invariants: every index appears exactly once; a micro-batch of
more than one sequence holds at most `micro_batch_tokens` tokens; within an update all ranks have the same number of
micro-batches (some may be empty), so all of them run the same collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from pearl.protocol import PackingPlan


def plan_packing(
    lengths: Sequence[int], *, mini_batch_size: int, micro_batch_tokens: int, ranks: int, order: Sequence[int]
) -> PackingPlan:
    """Packs sequences of these lengths (tokens) in the given order (a permutation of their indices).

    Consecutive `mini_batch_size` of `order` make an update; when they do not divide, there are as many updates as the nearest
    whole number and the last one takes the remainder (so it has 1/2 to 3/2 of the size; a small batch is one update). A
    sequence longer than `micro_batch_tokens` gets a micro-batch of its own.
    """
    for name, value in (("mini_batch_size", mini_batch_size), ("micro_batch_tokens", micro_batch_tokens), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be >= 1")
    indices = [int(index) for index in order]
    if sorted(indices) != list(range(len(lengths))):
        raise ValueError(f"order: must be a permutation of 0..{len(lengths) - 1}, has {len(indices)} entries")
    if any(length < 1 for length in lengths):
        raise ValueError(f"lengths: must be >= 1, the least is {min(lengths)}")
    updates = []
    for members in split_updates(indices, mini_batch_size):
        members.sort(key=lambda index: -int(lengths[index]))
        bins = _pack(members, lengths, micro_batch_tokens, ranks)
        updates.append(_deal(bins, lengths, ranks))
    return PackingPlan(updates=updates)


def split_updates(indices: Sequence[int], mini_batch_size: int) -> list[list[int]]:
    """Consecutive runs of `mini_batch_size`, the last with the remainder; their number is the nearest whole one."""
    count = max(1, (2 * len(indices) + mini_batch_size) // (2 * mini_batch_size)) if indices else 0
    runs = [list(indices[start * mini_batch_size : (start + 1) * mini_batch_size]) for start in range(count - 1)]
    return [*runs, list(indices[(count - 1) * mini_batch_size :])] if count else []


def _pack(members: list[int], lengths: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """Bins within the budget, a multiple of `ranks` of them; `members` are longest first.

    First the fewest bins that best-fit decreasing finds, then the same number (rounded up to the ranks) filled evenly.
    """
    long = [[index] for index in members if lengths[index] > budget]
    short = members[len(long) :]
    tight = _best_fit(short, lengths, budget)
    total = -(-(len(long) + len(tight)) // ranks) * ranks
    even = _least_loaded(short, lengths, budget, total - len(long))
    bins = long + (tight if even is None else even)
    return bins + [[] for _ in range(total - len(bins))]


def _best_fit(members: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in members:
        fitting = [(left, number) for number, left in enumerate(room) if left >= lengths[index]]
        if fitting:
            number = min(fitting)[1]
        else:
            number = len(bins)
            bins.append([])
            room.append(budget)
        bins[number].append(index)
        room[number] -= lengths[index]
    return bins


def _least_loaded(members: list[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Each sequence into the emptiest of `count` bins; None when that breaks the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for index in members:
        number = load.index(min(load))
        if load[number] + lengths[index] > budget:
            return None
        bins[number].append(index)
        load[number] += lengths[index]
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Bins to ranks, heaviest first to the rank with the fewest tokens that still has a place."""
    places = len(bins) // ranks
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    weight = {number: sum(lengths[index] for index in members) for number, members in enumerate(bins)}
    for number in sorted(weight, key=lambda number: (-weight[number], number)):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < places), key=lambda rank: (load[rank], rank))
        shares[rank].append(bins[number])
        load[rank] += weight[number]
    return shares
