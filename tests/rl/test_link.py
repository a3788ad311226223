"""An external worker's connection: it asks until it is answered, answers heartbeats, and says when the job is not heard of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from pearl.channel import Server, wait
from pearl.protocol import Join, Joined, Leaving, Notice, Ping, Pong, Refused, Stop, ToController, Wake
from pearl.rl.link import EXIT_LOST, Address, Link

LIMIT_S = 20.0
TOKEN = "a1b2"


class Job:
    """The other end, driven by the test. `heard` has everything that came, by peer."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.server = Server(self.context, "tcp://127.0.0.1:0", ToController)
        self.heard: list[tuple[str, Any]] = []
        host, port = self.server.address.removeprefix("tcp://").split(":")
        self.address = Address(host=host, port=int(port), token=TOKEN)

    def until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < deadline, f"waited for {what}: {self.heard}"
            wait([self.server], 0.05)
            self.heard += self.server.receive()

    def of(self, kind: type) -> list[tuple[str, Any]]:
        return [(peer, message) for peer, message in self.heard if isinstance(message, kind)]

    def admit(self, rank: int = 3) -> str:
        self.until(lambda: bool(self.of(Join)), "a join")
        peer = self.of(Join)[-1][0]
        self.server.send(peer, Joined(rank=rank, config="{}", model_folder="", weight_version=0))
        return peer


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.server.close()
    job.context.term()


@pytest.fixture
def link(job: Job) -> Iterator[Link]:
    link = Link(job.address, 60.0, ["gpu0"])
    link.start()
    yield link
    link.close()


def test_an_address_is_read_and_written_and_nothing_else_is_one() -> None:
    address = Address.parse(" tcp://10.0.0.7:4711/0af3 \n")
    assert (address.host, address.port, address.token) == ("10.0.0.7", 4711, "0af3")
    assert Address.parse(str(address)) == address
    for wrong in ("", "10.0.0.7:4711", "10.0.0.7/0af3", ":4711/0af3", "host:0/0af3", "host:70000/0af3", "host:1/a b"):
        with pytest.raises(ValueError, match="HOST:PORT/TOKEN"):
            Address.parse(wrong)


def test_it_asks_with_the_token_and_is_let_in(job: Job, link: Link) -> None:
    job.admit(rank=7)
    [(_, join), *_] = job.of(Join)
    assert join.token == TOKEN and join.gpus == ["gpu0"]
    assert link.answered.wait(LIMIT_S) and isinstance(link.answer, Joined) and link.answer.rank == 7


def test_it_answers_heartbeats_under_its_number_and_passes_orders_on(job: Job, link: Link) -> None:
    peer = job.admit(rank=7)
    job.server.send(peer, Notice(text="for people"))
    job.server.send(peer, Ping(sequence=5))
    job.server.send(peer, Wake(number=1, role="mixed", epoch=1, weight_version=0))
    job.until(lambda: bool(job.of(Pong)), "a pong")
    assert job.of(Pong) == [(peer, Pong(rank=7, sequence=5))]
    assert [type(message) for message in link.take(LIMIT_S)] == [Wake]
    link.send(Leaving(rank=7, notice_s=3.0))
    job.until(lambda: bool(job.of(Leaving)), "what it said")


def test_it_asks_again_until_somebody_answers(job: Job, link: Link) -> None:
    job.until(lambda: len(job.of(Join)) >= 2, "a second try")
    job.admit()
    assert link.answered.wait(LIMIT_S)
    peers = {peer for peer, _ in job.of(Join)}
    assert len(peers) == 1 and len(peers.pop()) == 32


def test_a_job_that_falls_silent_is_lost_and_the_loop_hears_of_it(job: Job, link: Link) -> None:
    job.admit()
    assert link.answered.wait(LIMIT_S)
    link.silence_s = 2.0
    [stop] = link.take(LIMIT_S)
    assert isinstance(stop, Stop) and stop.exit_code == EXIT_LOST and "silent for 2 s" in stop.reason
    assert link.lost


def test_a_worker_that_is_no_longer_known_is_lost_at_once(job: Job, link: Link) -> None:
    peer = job.admit()
    assert link.answered.wait(LIMIT_S)
    job.server.send(peer, Refused(reason="not a member any more"))
    [stop] = link.take(LIMIT_S)
    assert stop.exit_code == EXIT_LOST and "not a member any more" in stop.reason


def test_who_is_refused_is_told_why(job: Job, link: Link) -> None:
    job.until(lambda: bool(job.of(Join)), "a join")
    job.server.send(job.of(Join)[0][0], Refused(reason="the token is not that of this job"))
    assert link.answered.wait(LIMIT_S)
    assert link.answer == Refused(reason="the token is not that of this job") and not link.lost
