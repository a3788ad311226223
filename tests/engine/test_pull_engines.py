"""Versions of a node's snapshot in real engines: whole ones and those cut over several ranks, while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import engine_cases
import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_greedy, make, named, one, oracle, run
from instances import led

from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.engine import Engine
from pearl.engine.leader import Leader
from pearl.engine.models.config import from_folder
from pearl.engine.weights.holding import LiveHolding
from pearl.engine.weights.pull import Holder, fetch, load
from pearl.engine.weights.pull_server import PullServer
from pearl.engine.weights.snapshot import Snapshot
from pearl.protocol import SamplingParams

PROMPT = hf_models.prompt(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(engine_cases.model(), tmp_path_factory.mktemp("dense"))


@pytest.fixture
def snapshot(folder: Path) -> Snapshot:
    """Version 1 is the second model."""
    made = Snapshot(from_folder(folder), torch.float32, bucket_bytes=4096)
    assert made.write(named(1), 1)
    return made


@pytest.mark.parametrize("size", [2, 4])
def test_an_instance_of_several_ranks_takes_a_version_of_the_snapshot(folder: Path, snapshot: Snapshot, size: int) -> None:
    def drive(engine: Leader) -> list:
        before = one(engine, PROMPT)
        assert load(engine, snapshot.reader()) == 1
        after = [one(engine, PROMPT) for _ in range(2)]
        with pytest.raises(ValueError, match="version=1: must be greater than 1, the present version"):
            load(engine, snapshot.reader(), 1)
        snapshot.write(named(0), 2)
        snapshot._messages[0][1].whole[100] ^= 1
        snapshot._messages[1][1].whole[100] ^= 1
        with pytest.raises(ValueError, match="version 2: bucket 2: the checksum differs"):
            load(engine, snapshot.reader(), 2)
        assert engine.weight_version == 1
        return [before, *after, one(engine, PROMPT)]

    before, *after, last = led(folder, drive, size=size)
    assert_greedy(before, 8)
    for completion in (*after, last):
        assert_greedy(completion, 8, seed=1)
    assert [completion.num_cached_tokens for completion in after] == [0, 8]
    assert before.token_ids != last.token_ids and last.weight_versions == [1] * 8


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("size", [1, 2])
def test_versions_come_while_requests_run(folder: Path, snapshot: Snapshot, mode: str, size: int) -> None:
    """As from `update_weights`: what ran goes on by its mode, what comes afterwards is the new model's, on no old prefix."""

    def drive(engine: Engine) -> list:
        rid = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=12))
        for _ in range(4):
            engine.step()
        load(engine, snapshot.reader(), mode=mode)
        following = engine.add_request(PROMPT, GREEDY)
        done = run(engine)
        return [done[rid][0], done[following][0], one(engine, PROMPT)]

    running, following, again = led(folder, drive, size=2) if size == 2 else drive(make(folder))
    assert_greedy(following, 8, seed=1)
    assert (following.num_cached_tokens, following.weight_versions) == (0, [1] * 8)
    assert again.num_cached_tokens == 8
    old, new = oracle(tuple(PROMPT), 4)[0], oracle(tuple(PROMPT + running.token_ids[:4]), 8, 1)[0]
    assert running.token_ids[:4] == old
    if mode == "abort":
        assert (running.finish_reason, len(running.token_ids)) == ("abort", 4)
    else:
        assert running.weight_versions == [0] * 4 + [1] * 8
        assert (running.token_ids[4:] == new) is (mode == "recompute")


def test_fifty_versions_in_a_row_serve_each_its_own_model(folder: Path, snapshot: Snapshot) -> None:
    engine, reader = make(folder), snapshot.reader()
    places = [value.data_ptr() for value in engine._decoder.parameters()]
    expected = {seed: oracle(tuple(PROMPT), 8, seed)[0] for seed in (0, 1)}
    assert expected[0] != expected[1]
    for version in range(2, 52):
        assert snapshot.write(named(version % 2), version)
        assert load(engine, reader) == version
        completion = one(engine, PROMPT)
        assert completion.token_ids == expected[version % 2] and completion.num_cached_tokens == 0
    assert places == [value.data_ptr() for value in engine._decoder.parameters()]


def test_an_instance_of_several_ranks_does_not_give_its_live_weights(folder: Path, snapshot: Snapshot) -> None:
    """It has parts of them: whoever asks hears so at once, and the next holder is asked."""

    def drive(engine: Leader) -> tuple[str, dict[str, str]]:
        live = LiveHolding(snapshot.plan, engine.named_hf_tensors, lambda: engine.weight_version)
        into = Snapshot(from_folder(folder), torch.float32, bucket_bytes=4096)
        with closing(PullServer(live, timeout_s=2.0)) as server:
            with pytest.raises(CollectiveError) as caught:
                fetch(into, [Holder(name="instance", port=server.port)], name="me", version=0, timeout_s=2.0)
            assert into.versions == () and server.stats.refused == 1
            return str(caught.value), server.stats.dropped

    words, dropped = led(folder, drive)
    assert "instance: hf_tensors: a shard cannot be seen under Hugging Face names" in words
    assert dropped == {}


def test_a_source_that_fills_one_buffer_again_and_again_is_read_in_time(folder: Path) -> None:
    """Tensors are taken as they come: a snapshot holds none of them until the next."""
    kept = Snapshot(from_folder(folder), torch.float32, bucket_bytes=1 << 20)
    buffer = torch.empty(max(tensor.numel() for _, tensor in named(1)))

    def lazy() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named(1):
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
        buffer.fill_(7.0)

    assert kept.write(lazy(), 1)
    engine = make(folder)
    load(engine, kept.reader())
    assert_greedy(one(engine, PROMPT), 8, seed=1)
