"""Plans carried out by members of a gloo group: bit for bit, in bounded memory, and all raise alike or none does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from gloo_members import run_members
from reshard_cases import local_tensors, model, some_experts
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator, Pending, SingleCommunicator
from pearl.engine.comm.layout import Layout
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.exchange import WINDOW, Exchange
from pearl.engine.weights.neighbours import Handed, Neighbours
from pearl.engine.weights.reshard import ReshardPlan, plan_reshard

CONFIG = model(experts=some_experts(4), attention_bias=True)
DTYPE = torch.bfloat16
Held = dict[str, Tensor]

CASES = {
    "uneven shards to tensor parallel": (Layout(members=(0, 1, 2), fsdp=3), Layout(members=(3, 4), tp=2)),
    "experts spread otherwise": (Layout(members=(0, 1), fsdp=2), Layout(members=(2, 3, 4, 5), tp=2, ep=4)),
    "two copies to three": (Layout(members=(0, 1, 2, 3), fsdp=2), Layout(members=(4, 5, 6))),
    "who trains serves too": (Layout(members=(0, 1, 2), fsdp=3), Layout(members=(2, 1, 0, 3), tp=2)),
    "the other way round": (Layout(members=(1, 0), tp=2), Layout(members=(0, 1), fsdp=2)),
}


def weights(seed: int, config: ModelConfig = CONFIG) -> Held:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(config).items()}


def planned(source: Layout, target: Layout, bucket_bytes: int = 256) -> ReshardPlan:
    return plan_reshard(CONFIG, source, target, dtype="bfloat16", bucket_bytes=bucket_bytes)


class Member:
    """One member and its tensors."""

    def __init__(self, comm: GroupCommunicator | SingleCommunicator, plan: ReshardPlan, **options) -> None:
        self.plan, self.number = plan, plan.members[comm.rank]
        self.exchange = Exchange(comm, plan, **({"timeout_s": 15.0} | options))

    def holds(self, layout: Layout, seed: int, dtype: torch.dtype) -> Held:
        if self.number not in layout.members:
            return {}
        return {name: t.to(dtype) for name, t in local_tensors(CONFIG, layout, self.number, weights(seed)).items()}

    def run(self, version: int, change: Callable[[Held], None] = lambda held: None, *, staged: bool = False) -> bool:
        """Whether what has come is the slice of the whole tensors, converted. Staged, nothing changes before it is written."""
        source = self.holds(self.plan.source, version, torch.float32)
        change(source)
        expected = self.holds(self.plan.target, version, DTYPE)
        target = {name: torch.full_like(tensor, math.nan) for name, tensor in expected.items()}
        self.exchange.begin(version, source, None if staged else target)
        self.exchange.wait(20.0)
        if staged:
            for tensor in source.values():
                tensor.zero_()
            assert all(bool(tensor.isnan().all()) for tensor in target.values())
            self.exchange.write(target)
        return all(torch.equal(target[name], expected[name]) for name in expected)

    def failure(self, version: int, change: Callable[[Held], None] = lambda held: None) -> str:
        with pytest.raises(ValueError) as caught:
            self.run(version, change)
        return str(caught.value)


@pytest.fixture(params=["shared memory", "gloo"])
def shared(request: pytest.FixtureRequest) -> bool:
    return request.param == "shared memory"


@pytest.mark.parametrize("name", CASES)
def test_what_arrives_is_the_converted_slice(name: str, shared: bool):
    plan = planned(*CASES[name])

    def work(comm: GroupCommunicator) -> tuple[list[bool], bool]:
        member = Member(comm, plan, shared_memory=shared)
        right = [member.run(version, staged=version % 2 == 0) for version in (3, 4, 5, 6, 8)]
        return right, member.exchange._near == (set(range(comm.size)) - {comm.rank} if shared else set())

    assert run_members(len(plan.members), work) == [([True] * 5, True)] * len(plan.members)


def test_whoever_may_not_share_is_sent_messages_by_all():
    plan = planned(*CASES["who trains serves too"])

    def work(comm: GroupCommunicator) -> tuple[set[int], bool]:
        member = Member(comm, plan, shared_memory=comm.rank != 1)
        right = member.run(1) and member.run(2, staged=True)
        return member.exchange._near, right

    others = [{2, 3}, set(), {0, 3}, {0, 2}]
    assert run_members(4, work) == [(near, True) for near in others]


def test_a_member_alone_copies_in_its_own_memory():
    plan = planned(Layout(members=(5,)), Layout(members=(5,)))
    member = Member(SingleCommunicator(), plan)
    assert member.run(1) and member.run(2, staged=True) and plan.nbytes == 0


def test_few_messages_are_under_way_and_polls_do_not_wait():
    """The receiver comes late; meanwhile the sender's polls return, with as many messages begun as it has memory for."""
    plan = planned(Layout(members=(0,)), Layout(members=(1,)))

    class Counting:
        def __init__(self, comm: GroupCommunicator) -> None:
            self.comm, self.rank, self.size, self.begun, self.most = comm, comm.rank, comm.size, [], 0

        def send_async(self, *arguments, **options) -> Pending:
            self.begun = [item for item in self.begun if not item.done()]
            self.begun.append(self.comm.send_async(*arguments, **options))
            self.most = max(self.most, len(self.begun))
            return self.begun[-1]

        def __getattr__(self, name: str):
            return getattr(self.comm, name)

    def work(comm: GroupCommunicator) -> tuple[int, float] | bool:
        if comm.rank == 1:
            member = Member(comm, plan)
            member.exchange._agreed = True
            time.sleep(0.5)
            return member.run(1)
        counting = Counting(comm)
        member = Member(counting, plan)  # type: ignore[arg-type]
        member.exchange._agreed = True
        member.exchange.begin(1, member.holds(plan.source, 1, torch.float32), {})
        start = time.monotonic()
        for _ in range(20):
            member.exchange.poll()
        late = time.monotonic() - start
        assert member.exchange.waiting
        member.exchange.wait(20.0)
        return counting.most, late

    (most, late), good = run_members(2, work)
    assert good and most == WINDOW < len(plan.of(0).sends) and late < 0.4


def test_all_hear_of_a_number_that_is_not_finite_and_the_group_goes_on(shared: bool):
    """1e39 is finite for the sender and infinite once converted. Receivers that had nothing to do with it raise as well."""
    plan = planned(*CASES["uneven shards to tensor parallel"])

    def spoil(held: Held) -> None:
        held["layers.0.o.weight"].view(-1)[1] = 3.4e38

    def work(comm: GroupCommunicator) -> tuple[str, str, bool]:
        member = Member(comm, plan, shared_memory=shared)
        mine = spoil if comm.rank == 1 else lambda held: None
        return member.failure(1, mine), member.failure(2, mine), member.run(3)

    results = run_members(5, work)
    assert all(result == results[0] for result in results)
    assert "layers.0.o.weight: 1 of" in results[0][0] and "not finite in torch.bfloat16" in results[0][0]
    assert results[0][2] is True


def test_what_a_member_keeps_is_checked_too():
    plan = planned(Layout(members=(0, 1), fsdp=2), Layout(members=(0, 1), fsdp=2))

    def spoil(held: Held) -> None:
        held["norm.weight"][0] = math.nan

    def work(comm: GroupCommunicator) -> str:
        return Member(comm, plan).failure(1, spoil if comm.rank == 0 else lambda held: None)

    assert run_members(2, work) == ["norm.weight: 1 of 3 values are not finite in torch.bfloat16"] * 2


def test_nothing_is_written_of_what_is_not_whole():
    plan = planned(Layout(members=(0,)), Layout(members=(1,)))

    def spoil(held: Held) -> None:
        held["norm.weight"][0] = math.nan

    def work(comm: GroupCommunicator) -> list[str]:
        member, words = Member(comm, plan), []
        with pytest.raises(ValueError, match=r"norm\.weight: 1 of"):
            member.run(1, spoil if comm.rank == 0 else lambda held: None, staged=True)
        for version in (2, 3):
            with pytest.raises(RuntimeError) as caught:
                member.exchange.write(member.holds(plan.target, 1, DTYPE))
            words.append(str(caught.value))
            assert member.run(version)
        with pytest.raises(RuntimeError):  # what was written at once is not staged
            member.exchange.write(member.holds(plan.target, 1, DTYPE))
        member.run(4, staged=True)
        if comm.rank == 1:
            with pytest.raises(ValueError, match=r"target: embed\.weight is missing"):
                member.exchange.write({})
        return words

    expected = [f"version {version}: nothing is staged that could be written" for version in (1, 2)]
    assert run_members(2, work) == [expected] * 2


def test_members_of_different_versions_are_told(shared: bool):
    plan = planned(Layout(members=(0, 1), fsdp=2), Layout(members=(2,)))
    results = run_members(3, lambda comm: Member(comm, plan, shared_memory=shared).failure(7 if comm.rank == 1 else 6))
    assert results == ["message 1 from member 1 to member 2: version 7 came"] * 3


def test_members_of_different_plans_are_told_before_anything_moves():
    layouts = Layout(members=(0,)), Layout(members=(1,))
    results = run_members(2, lambda comm: Member(comm, planned(*layouts, bucket_bytes=256 << comm.rank)).failure(1))
    assert results == ["version 1: the plan of member 1 is not that of 0"] * 2


def test_a_changed_byte_is_noticed_by_all(shared: bool, monkeypatch: pytest.MonkeyPatch):
    plan = planned(Layout(members=(0,)), Layout(members=(1, 2), tp=2))
    send, give = GroupCommunicator.send_async, Neighbours.give

    def send_changed(self: GroupCommunicator, tensor: Tensor, *arguments, **options) -> Pending:
        tensor[100] ^= 1
        return send(self, tensor, *arguments, **options)

    def give_changed(self: Neighbours, slot: int, ticket: int) -> Handed:
        self.slot(slot)[100] ^= 1
        return give(self, slot, ticket)

    monkeypatch.setattr(GroupCommunicator, "send_async", send_changed)
    monkeypatch.setattr(Neighbours, "give", give_changed)
    results = run_members(3, lambda comm: Member(comm, plan, shared_memory=shared).failure(1))
    assert results == ["message 1 from member 0 to member 1: the checksum differs"] * 3


def test_who_waits_for_nobody_gives_up_and_is_out_for_good():
    plan = planned(Layout(members=(0,)), Layout(members=(1,)))

    def work(comm: GroupCommunicator) -> tuple[str, str]:
        member = Member(comm, plan, timeout_s=0.2)
        member.exchange._agreed = True
        if comm.rank == 0:  # comes when the other has given up, so that no message is left under way
            time.sleep(0.6)
            for parcel in plan.of(0).sends[:WINDOW]:
                memory = torch.zeros(1024, dtype=torch.uint8)[: 64 + max(384, parcel.bucket.nbytes)]
                comm.send_async(memory, 1, tag=parcel.key[0]).wait(5.0)
            return "", ""
        with pytest.raises(CollectiveError) as first:
            member.run(1)
        with pytest.raises(CollectiveError) as second:
            member.run(2)
        time.sleep(0.8)
        return str(first.value), str(second.value)

    first, second = run_members(2, work)[1]
    assert first.startswith("version 1: waited 0.2 s for message 1 from member 0 to member 1, message 2 from")
    assert second.startswith("version 2: this group cannot be used any more since version 1: waited 0.2 s")


def test_what_does_not_fit_is_listed_before_anything_is_sent():
    plan = planned(Layout(members=(0,)), Layout(members=(0,)))
    member = Member(SingleCommunicator(), plan)
    source = member.holds(plan.source, 1, torch.float32)
    target = member.holds(plan.target, 1, torch.float32)
    source.pop("norm.weight")
    with pytest.raises(ValueError) as caught:
        member.exchange.begin(1, source, target)
    assert "source: norm.weight is missing; target: embed.weight is (19, 6), torch.float32, must be" in str(caught.value)
    with pytest.raises(ValueError, match="comm: has 1 members, must have the plan's 2"):
        Exchange(SingleCommunicator(), planned(Layout(members=(0,)), Layout(members=(1,))))
