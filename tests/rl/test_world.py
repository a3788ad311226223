"""Finding each other: whoever does not come is named, also without a launcher's store; and which rank gets which parts."""

from __future__ import annotations

import dataclasses
import datetime
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from trainer_cases import config as trainer_config
from trainer_cases import folder as model_folder

from pearl.config import Timeouts
from pearl.rl import world
from pearl.rl.layout import JobLayout
from pearl.rl.publisher import LocalPublisher


def test_ranks_that_come_one_after_the_other_meet() -> None:
    store, seen = dist.HashStore(), {rank: [] for rank in range(3)}

    def come(rank: int) -> None:
        world._meet(store, rank, 3, 20.0, seen[rank].append)

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for rank in (0, 2, 1):
        ranks[rank].start()
        time.sleep(0.3)
    for rank in ranks:
        rank.join(10)
        assert not rank.is_alive()
    assert seen[0] == [[1, 2], [1], []]
    assert seen[2] == [[1], []]
    assert seen[1] == [[]]


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0, 3 of 4 did not come within 0\.4 s"):
        store = dist.HashStore()
        store.set("here/1", "")
        world._meet(store, 2, 4, 0.4, lambda ranks: None)
    assert 0.3 < time.monotonic() - began < 5


def test_without_a_launchers_store_rank_0_opens_one_and_does_not_wait_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    limit = datetime.timedelta(seconds=20)
    began = time.monotonic()
    server = world._rendezvous(0, 2, limit)
    assert time.monotonic() - began < 5
    client = world._rendezvous(1, 2, limit)
    server.set("a", "b")
    assert client.get("a") == b"b"


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_PORT": "29500"}])
def test_without_an_address_the_way_to_start_is_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items() | {("RANK", "0"), ("WORLD_SIZE", "2")}:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"MASTER_ADDR=.*MASTER_PORT=.*torchrun"):
        world.join(5.0)
    assert not dist.is_initialized()


def test_one_rank_has_all_parts_and_needs_no_group(tmp_path: Path) -> None:
    layout = JobLayout(world=1, train_ranks=1)
    groups = world.make_groups(layout, 0, 5.0, dist.HashStore())
    assert (groups.training, groups.publish) == (None, None)
    folder = model_folder(tmp_path)
    parts = world.build_parts(trainer_config(), layout, 0, groups, folder, dist.HashStore())
    assert parts.trainer is not None
    assert parts.engine is not None
    assert isinstance(parts.publisher, LocalPublisher)
    parts.publisher.begin(3)
    assert parts.publisher.poll() is not None
    assert parts.engine.weight_version == 3


def test_a_serving_rank_waits_for_the_policy_but_not_for_ever(tmp_path: Path) -> None:
    layout, groups = JobLayout(world=2, train_ranks=1), world.Groups(training=None, publish=None, owners={0: 0, 1: 0})
    config = dataclasses.replace(trainer_config(), timeouts=Timeouts(start_s=0.3))
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        world.build_parts(config, layout, 1, groups, tmp_path, dist.HashStore())
    assert 0.2 < time.monotonic() - began < 10


def test_a_rank_without_any_part_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="must serve"):
        world._publisher(JobLayout(world=2, train_ranks=1), None, None, None, None, 1.0)


def test_versions_are_given_where_workers_of_other_machines_can_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all may join, the machine's name would not do: it is often known as an address of the loopback."""

    def host(listen: str, several: bool = False) -> str:
        elastic = dataclasses.replace(trainer_config().elastic, listen=listen)
        return world._pull_host(dataclasses.replace(trainer_config(), elastic=elastic), several)

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    asked = []

    class Way(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            asked.append(address[0])
            if not ways:
                raise OSError(101, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.5", 1

    ways = True
    monkeypatch.setattr(socket, "socket", Way)
    assert host("0.0.0.0:7000") == host("*:7000") == "10.0.0.5" and set(asked) == {world.ELSEWHERE}
    assert [host(""), host("127.0.0.1:0"), host("localhost:0"), host("10.1.1.1:0")] == [world.LOCAL] * 3 + ["10.1.1.1"]
    monkeypatch.setenv("MASTER_ADDR", "head")
    assert host("0.0.0.0:7000", several=True) == "10.0.0.5" and asked[-1] == "head"
    ways = False
    assert host("0.0.0.0:7000") == "127.0.1.1", "in a network with no way out its name is all that tells"

    def unknown(name: str) -> str:
        raise OSError(f"{name} is not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert host("0.0.0.0:7000") == world.LOCAL
