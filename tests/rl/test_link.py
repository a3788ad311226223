"""An external worker's connection: it asks until it is answered, answers heartbeats, and says when the job is not heard of."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from pearl.channel import Server, wait
from pearl.protocol import Join, Joined, Leaving, Notice, Ping, Pong, Refused, Stop, ToController, Wake
from pearl.rl.door import Doorkeeper, server_options
from pearl.rl.link import EXIT_LOST, Address, Link

LIMIT_S = 40.0
TOKEN = "a1b2"


class Job:
    """The other end, driven by the test. `heard` has everything that came, by peer."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.keeper = Doorkeeper(self.context, TOKEN)
        self.server = Server(self.context, "tcp://127.0.0.1:0", ToController, options=server_options(1 << 20))
        self.heard: list[tuple[str, Any]] = []
        host, port = self.server.address.removeprefix("tcp://").split(":")
        self.address = Address(host=host, port=int(port), token=TOKEN)

    def until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < deadline, f"waited for {what}: {self.heard}"
            wait([self.server, self.keeper.socket], 0.05)
            self.keeper.answer()
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
    job.keeper.close()
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
    assert join.gpus == ["gpu0"] and not job.keeper.refused
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


def test_a_job_that_lets_it_knock_and_has_no_time_to_answer_is_there_all_the_same(job: Job, link: Link) -> None:
    assert not link.reached
    job.until(lambda: link.reached, "the handshake")
    assert link.answer is None and not link.lost


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


def test_a_job_that_falls_silent_is_asked_whether_it_still_knows_the_worker(job: Job, link: Link) -> None:
    link.doubt_s = 1.0
    peer = job.admit()
    assert link.answered.wait(LIMIT_S) and not link.lost
    job.until(lambda: (peer, Pong(rank=3, sequence=-1)) in job.of(Pong), "a question")
    assert not link.lost


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


def test_who_has_another_token_hears_so_from_the_door(job: Job) -> None:
    link = Link(Address(host=job.address.host, port=job.address.port, token="b2c3"), 60.0, [])
    link.start()
    job.until(link.answered.is_set, "an answer")
    assert isinstance(link.answer, Refused) and "token" in link.answer.reason and not link.reached
    assert not job.heard and job.keeper.refused >= 1
    link.close()


HUNG = """
import ctypes, sys, time
from pearl.rl.link import Address, Link
link = Link(Address.parse(sys.argv[1]), 60.0, [])
link.stuck_s = 2.0
link.start()
assert link.answered.wait(60.0)
link.take(0.0)
if sys.argv[2] == "ended":
    while not link._mail._inbox.qsize():
        time.sleep(0.05)
else:
    link.watch()
ctypes.PyDLL(None).sleep(90) if sys.argv[2] == "held" else time.sleep(90)
"""


@pytest.mark.parametrize("how", ["hangs", "held", "ended"])
def test_a_process_whose_main_loop_hangs_ends_itself(job: Job, how: str) -> None:
    """In a wait; in a library that holds the interpreter; when it was told to end."""
    command = [sys.executable, "-c", HUNG, str(job.address), how]
    hung = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    peer = job.admit()
    if how == "ended":
        job.server.send(peer, Stop(number=1, reason="let go", exit_code=1))
    job.until(lambda: hung.poll() is not None, "its end")
    _, said = hung.communicate(timeout=LIMIT_S)
    assert hung.returncode == 1 and "most recent call first" in said, said
    assert ("elastic.stuck_s=2 s" in said) == (how != "held")
