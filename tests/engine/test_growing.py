"""KV of a prompt is copied while it is computed; whatever ends that in between, nothing is left behind or read too early."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import hf_models
import msgspec
import pytest
import torch
from engine_cases import GREEDY, assert_greedy, model, named, one
from pair_cases import Pair

from pearl.engine.migration import copying
from pearl.engine.migration.pieces import copy_part, view
from pearl.engine.migration.planner import CopyPart
from pearl.engine.request import Completion
from pearl.protocol import KVTransfer, Role, SamplingParams

PROMPT = 19
CHUNKS = {"max_batch_tokens": 8, "kernels": "reference"}
"""Three steps for the prompt: 8, 8 and 3 tokens, in blocks of 4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


class Along(Pair):
    """What grows in `p` is read along by `d`, which looks after every layer if `by_layers`, and else between two steps."""

    def __init__(
        self,
        folder: Path,
        faults: list[str] | None = None,
        *,
        by_layers: bool = True,
        p: dict | None = None,
        d: dict | None = None,
    ) -> None:
        super().__init__(folder, faults, p=CHUNKS | (p or {}), d={"kernels": "reference"} | (d or {}))
        self.growing: list[KVTransfer] = []
        self.layers: list[tuple[int, int]] = []
        self.between: Callable[[], None] = lambda: None
        self.p.on_growing = self.told
        leases = self.p._pool.leases
        plain = leases.layer_done

        def layer_done(step: int, layers: int) -> None:
            plain(step, layers)
            self.layers.append((step, layers))
            self.between()
            if by_layers:
                self.d._poll_moves()
                self.d.check_integrity()

        leases.layer_done = layer_done

    def run(self, most: int = 400) -> dict[tuple[str, int], Completion]:
        """As time goes by, so that what is stuck ends, and credits that nobody uses."""
        while self.p.has_unfinished() or self.d.has_unfinished():
            assert self.num_steps < most, (self.p.stats(), self.d.stats())
            self.step()
            self.clock.advance(0.25)
        self.clock.advance(5.0)
        for _ in range(4):
            self.step()
        done = super().run(most)
        for engine in (self.p, self.d):
            assert not engine._transfers._tickets and not engine._transfers._offered and not engine._core.growing
        return done

    def told(self, transfer: KVTransfer) -> None:
        self.growing.append(transfer)
        self.d.read_along(transfer)

    def start(self, ids: list[int], params: SamplingParams = GREEDY, rid: str = "r") -> bool:
        credit = self.d.reserve_kv(rid, ids, params)
        self.p.add_request(ids, params, request_id=rid, reservation=credit)
        return credit is not None


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[CopyPart]:
    """Every part that is copied; none may hold a value that was not written (the pool is NaN before)."""
    seen: list[CopyPart] = []

    def watched(source: torch.Tensor, destination: torch.Tensor, part: CopyPart) -> None:
        seen.append(part)
        for block in part.source_blocks:
            values = view(source, part.layers, part.source_heads)[:, :, block]
            first = values.shape[-1] // 4 * (PROMPT % 4) if block == LAST[0] else values.shape[-1]
            assert not values[..., :first].isnan().any(), (part, block)
        copy_part(source, destination, part)

    monkeypatch.setattr(copying, "copy_part", watched)
    LAST[0] = -1
    return seen


LAST = [-1]
"""The block that the prompt of the test fills in part."""


# ---------------------------------------------------------------------------------------------------- the order of things


def test_chunks_come_while_later_ones_are_computed_and_the_last_layer_by_layer(folder: Path, copies: list[CopyPart]) -> None:
    pair = Along(folder)
    events: list[tuple] = []
    assert pair.start(hf_models.prompt(PROMPT))
    pair.between = lambda: (LAST.__setitem__(0, pair.growing[0].blocks[-1]), events.append(("layer", *pair.layers[-1])))
    table = []
    for step in range(3):
        before = len(copies)
        pair.take(pair.p)
        table = table or pair.growing[0].blocks
        events += [("step", step)]
        for part in copies[before:]:
            events.append((part.layers, [table.index(block) for block in part.source_blocks]))
    assert len(pair.growing) == 1 and pair.growing[0].growing and pair.p.stats().offered == 1
    number = pair.layers[0][0]
    assert events == [
        ("layer", number, 1), ("layer", number, 2), ("step", 0), ((0, 1), [0, 1]), ((1, 2), [0, 1]),
        ("layer", number + 1, 1), ("layer", number + 1, 2), ("step", 1), ((0, 1), [2, 3]), ((1, 2), [2, 3]),
        ("layer", number + 2, 1), ("layer", number + 2, 2), ("step", 2), ((0, 1), [4]), ((1, 2), [4]),
    ]  # fmt: skip
    [transfer] = pair.p.take_handoffs()
    assert (transfer.transfer_id, transfer.blocks, transfer.lease_word, transfer.growing) == (
        pair.growing[0].transfer_id, table, pair.growing[0].lease_word, False
    )  # fmt: skip
    copied = len(copies)
    assert pair.move(transfer, pair.p, pair.d)
    assert len(copies) == copied and pair.d.stats().running == 1 and pair.begun == [5]  # nothing was left to send
    assert_greedy(pair.run()["r", 0], 8)


def test_between_steps_whole_chunks_come(folder: Path, copies: list[CopyPart]) -> None:
    """A receiver that looks only now and then is behind by what was computed since."""
    pair = Along(folder, by_layers=False)
    LAST[0] = 0
    pair.start(hf_models.prompt(PROMPT))
    seen = []
    for _ in range(3):
        pair.take(pair.p)
        LAST[0] = pair.growing[0].blocks[-1]
        pair.take(pair.d)
        seen.append(sum(len(part.source_blocks) * (part.layers[1] - part.layers[0]) for part in copies))
    assert seen == [4, 8, 10]
    assert_greedy(pair.run()["r", 0], 8)


def test_what_the_receiver_has_is_not_sent_and_what_the_sender_has_comes_first(
    folder: Path, copies: list[CopyPart]
) -> None:
    pair = Along(folder)
    ids = hf_models.prompt(PROMPT)
    one(pair.d, [*ids[:4], 127], SamplingParams(temperature=0.0, max_tokens=1))
    one(pair.p, [*ids[:12], 127], SamplingParams(temperature=0.0, max_tokens=1))
    for transfer in pair.p.take_handoffs():
        pair.p.finish_export(transfer.transfer_id, False)
    pair.layers.clear()
    pair.start(ids)
    pair.between = lambda: LAST.__setitem__(0, pair.growing[0].blocks[-1])
    done = pair.run()["r", 0]
    assert_greedy(done, 8)
    assert pair.begun == [4] and sum(len(part.source_blocks) * (part.layers[1] - part.layers[0]) for part in copies) == 8
    table = pair.growing[0].blocks
    assert [table.index(block) for block in copies[0].source_blocks] == [1, 2] and copies[0].layers == (0, 2)


@pytest.mark.parametrize("length", [1, 2, 4, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_prompts_of_all_lengths_around_chunks_and_blocks(folder: Path, length: int, block_size: int) -> None:
    sizes = {"block_size": block_size, "num_blocks": 160 // block_size}
    pair = Along(folder, p=sizes, d=sizes)
    pair.start(hf_models.prompt(length))
    assert_greedy(pair.run()["r", 0], 8)
    assert len(pair.growing) == 1 and pair.moved == [("r", True)] and pair.d.stats().num_preemptions == 0


def test_many_at_once_in_small_pools(folder: Path) -> None:
    """Those who find no room elsewhere go the plain way; nobody waits for anybody."""
    sizes = {"num_blocks": 14}
    pair = Along(folder, p=sizes, d=sizes)
    given = [pair.start(hf_models.prompt(5 + seed, seed=seed), rid=f"r{seed}") for seed in range(9)]
    assert True in given and False in given
    done = pair.run()
    assert len(done) == 9
    for completion in done.values():
        assert_greedy(completion, 8)


# ---------------------------------------------------------------------------------------------------- ends in the middle


def free(pair: Along, *, steps: int = 6) -> None:
    """Both sides are free again, not by waiting for a deadline."""
    for _ in range(steps):
        for engine in (pair.p, pair.d):
            engine.step()
            engine.check_integrity()
    pair.assert_free()
    assert not pair.p.has_unfinished() and not pair.d.has_unfinished()
    assert pair.p._core.growing == {} and not pair.p._transfers._offered and not pair.d._transfers._tickets


def at(pair: Along, moment: str, do: Callable[[], object], ids: list[int] | None = None) -> None:
    """Does it before, between or after the chunks, or in the middle of the second one (when it is next possible)."""
    pair.start(ids or hf_models.prompt(PROMPT))
    if moment == "queued":
        do()
        return
    pair.take(pair.p)
    if moment == "first chunk":
        do()
    elif moment == "within a chunk":  # after a layer the receiver does something; the sender only between its steps
        pair.between = lambda: (do(), setattr(pair, "between", lambda: None))
        pair.take(pair.p)
    else:
        pair.take(pair.p)
        do()


MOMENTS = ["queued", "first chunk", "second chunk"]
FAULTS = ["none", "slow", "lost", "stuck", "refused"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_abort_frees_both_sides(folder: Path, moment: str, fault: str) -> None:
    pair = Along(folder, [fault])
    at(pair, moment, lambda: pair.p.abort("r"))
    [credit] = pair.d._core.credits.values()
    pair.d._core.release_credit(credit.reservation_id)  # as its owner does, who hears of the end
    free(pair)
    pair.start(hf_models.prompt(PROMPT, seed=1), rid="s")
    assert_greedy(pair.run()["s", 0], 8)


@pytest.mark.parametrize("fault", ["none", "stuck"])
@pytest.mark.parametrize("moment", ["first chunk", "second chunk", "within a chunk"])
@pytest.mark.parametrize("what", ["release", "role", "recompute", "deadline"])
def test_a_credit_that_ends_while_something_comes_into_its_room(folder: Path, what: str, moment: str, fault: str) -> None:
    """The room is used again at once by another request here, whose KV must stay its own."""
    pair = Along(folder, [fault], d={"num_blocks": 7, "max_batch_tokens": 64, "decode_prefill_tokens": 64})

    def end() -> None:
        if what == "release":
            for name in list(pair.d._core.credits):
                pair.d._core.release_credit(name)
        elif what == "role":
            pair.d.switch_role(Role.MIXED)
        elif what == "recompute":
            pair.d.update_weights(named(0), pair.d.weight_version + 1, "recompute")
        else:
            pair.clock.advance(5.0)
        pair.d.add_request(hf_models.prompt(20, seed=9), GREEDY, request_id="other")

    at(pair, moment, end)
    for _ in range(12):
        pair.take(pair.d)
    done = pair.run()
    for name in ("r", "other"):
        if what != "recompute" or name == "other":
            assert_greedy(done[name, 0], 8)


@pytest.mark.parametrize("fault", ["none", "stuck"])
@pytest.mark.parametrize("moment", ["first chunk", "second chunk"])
@pytest.mark.parametrize("what", ["preempt", "export", "mixed", "decode", "recompute", "keep", "lose"])
def test_a_prompt_that_gives_way_or_stays_while_it_is_read_along(folder: Path, what: str, moment: str, fault: str) -> None:
    """Another request takes its blocks at once: what was read of them is worth nothing, or still right."""
    pair = Along(folder, [fault], p={"num_blocks": 8}, d={"num_blocks": 12})

    def end() -> None:
        if what == "preempt":
            pair.p.preempt("r")
        elif what == "export":
            pair.move(pair.p.export_kv("r"), pair.p, pair.d)
        elif what in ("mixed", "decode"):
            pair.p.switch_role(Role(what))
        elif what == "lose":
            pair.p._core.lose_kv()
        else:
            for engine in (pair.p, pair.d):
                engine.update_weights(named(0), engine.weight_version + 1, what)
        pair.p.add_request(hf_models.prompt(9, seed=9), GREEDY, request_id="other")

    at(pair, moment, end)
    done = pair.run()
    for name in ("r", "other"):
        assert_greedy(done[name, 0], 8)


def test_a_preempted_prompt_grows_anew_under_another_id(folder: Path) -> None:
    pair = Along(folder)
    at(pair, "second chunk", lambda: pair.p.preempt("r"))
    assert_greedy(pair.run()["r", 0], 8)
    first, second = pair.growing
    assert first.transfer_id != second.transfer_id and first.lease_word != second.lease_word
    assert pair.moved == [("r", True)] and pair.d.stats().num_preemptions == 0


def test_late_words_about_a_prompt_that_is_gone_are_nothing(folder: Path) -> None:
    """The growing transfer is delivered when its blocks are another's; nothing of them reaches anybody."""
    pair = Along(folder, p={"num_blocks": 8})
    pair.p.on_growing = pair.growing.append
    at(pair, "second chunk", lambda: pair.p.preempt("r"))
    pair.p.abort("r")
    [stale] = pair.growing
    pair.p.add_request(hf_models.prompt(20, seed=4), GREEDY, request_id="s")
    pair.take(pair.p)
    assert pair.d.read_along(stale) is False
    assert pair.d.stats().reserved == 1
    pair.d._core.release_credit(next(iter(pair.d._core.credits)))
    assert pair.d.read_along(stale) is False and pair.d.stats().stale_messages == 1
    assert_greedy(pair.run()["s", 0], 8)


def test_a_copy_that_is_under_way_when_its_source_dies(folder: Path) -> None:
    pair = Along(folder)
    at(pair, "second chunk", lambda: None)
    pair.p.on_growing = None
    pair.between = lambda: None
    del pair.p._pool.leases.layer_done
    pair.p = None
    gc.collect()
    pair.d.step()
    pair.d.step()
    assert not pair.d._transfers._tickets and pair.d.stats().reserved == 1
    pair.clock.advance(5.0)
    pair.d.step()
    assert pair.d.stats().reserved == 0 and not pair.d.has_unfinished()
    assert pair.d.stats().leased_blocks == 0


def test_an_engine_is_unfinished_while_it_reads_along(folder: Path) -> None:
    pair = Along(folder)
    pair.start(hf_models.prompt(PROMPT))
    assert not pair.d.has_unfinished()
    pair.take(pair.p)
    assert pair.d.has_unfinished()
    pair.take(pair.p)
    pair.take(pair.p)
    pair.take(pair.d)
    assert not pair.d.has_unfinished()  # all is there; what is missing is the request
    pair.run()


def test_only_prompts_with_room_elsewhere_grow_and_only_where_they_are_handed_over(folder: Path) -> None:
    pair = Along(folder)
    pair.p.add_request(hf_models.prompt(PROMPT), GREEDY, request_id="plain")
    pair.take(pair.p)
    assert pair.growing == [] and pair.p._core.growing == {} and pair.layers == []
    pair.p.switch_role(Role.MIXED)
    pair.start(hf_models.prompt(PROMPT, seed=1))
    pair.take(pair.p)
    pair.take(pair.p)
    assert pair.growing == []
    pair.p.switch_role(Role.PREFILL)  # in the middle of its prompt
    for completion in pair.run().values():
        assert_greedy(completion, 8)
    assert len(pair.growing) == 1


def test_what_grows_is_no_offer_and_an_offer_does_not_grow(folder: Path) -> None:
    pair = Along(folder)
    pair.start(hf_models.prompt(PROMPT))
    pair.take(pair.p)
    with pytest.raises(ValueError, match="not growing any more"):
        pair.d.import_kv(pair.growing[0])
    transfer = pair.p.export_kv("r")
    with pytest.raises(ValueError, match="must be a growing KVTransfer"):
        pair.d.read_along(transfer)
    pair.move(transfer, pair.p, pair.d)
    assert_greedy(pair.run()["r", 0], 8)


def test_a_receiver_that_cannot_read_along_says_so_and_costs_nothing(folder: Path) -> None:
    pair = Along(folder)
    answers: list[bool] = []
    nowhere = msgspec.structs.replace
    pair.p.on_growing = lambda transfer: answers.extend(
        [
            pair.d.read_along(transfer, "carrier pigeon"),
            pair.d.read_along(nowhere(transfer, source=nowhere(transfer.source, addresses={}))),
            pair.d.read_along(nowhere(transfer, layout=nowhere(transfer.layout, block_size=8))),
            pair.d.read_along(nowhere(transfer, blocks=transfer.blocks[:-1])),
        ]
    )
    pair.start(hf_models.prompt(PROMPT))
    assert_greedy(pair.run()["r", 0], 8)
    assert answers == [False] * 4 and pair.moved == [("r", True)]
