"""External workers that fail at the worst moments, and others that lie: the job goes on, its books add up, nothing is left."""

from __future__ import annotations

import re
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from bench.elastic_job import ElasticJob, Wire, kill
from pearl.channel import Client, wait
from pearl.protocol import (
    Done,
    Failed,
    Fetch,
    HandedOff,
    Join,
    Joined,
    Leaving,
    NewRequest,
    Ping,
    Pong,
    Prepare,
    Ready,
    Refused,
    Report,
    Stop,
    Submit,
    TakenOver,
    Tokens,
    TokenUpdate,
    ToRank,
    Wake,
)
from pearl.rl.door import client_options
from pearl.rl.plausible import FAILED_SESSIONS
from pearl.sched.cost_profile import ChangeCost

slow = pytest.mark.slow
MANY = "max_steps=400"


def end(job: ElasticJob, signum: int = signal.SIGINT, most_failed: int = 0) -> None:
    """Ctrl-C, and nothing may be left; the books of all steps hold."""
    job.process.send_signal(signum)
    assert job.wait_until_gone(40) is not None, f"{job.report()}\n{job.family()}"
    assert job.process.wait() == 128 + signum
    for row in job.rows():
        assert row["lost_tokens"] == 0 and row["failed_trajectories"] <= most_failed, row
        assert row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"], row


class Liar:
    """A worker that speaks the protocol and does as the test says."""

    def __init__(self, address: str) -> None:
        found = re.fullmatch(r"(\S+)/(\w+)", address)
        assert found is not None
        self.context = zmq.Context()
        options = client_options(found[2])
        self.client = Client(self.context, f"tcp://{found[1]}", secrets.token_hex(16), ToRank, options=options)
        self.heard: list[Any] = []
        self.number, self.answers = -1, False

    def join(self) -> int:
        self.client.send(Join(pid=1, host="nowhere"))
        self.number = self.until(Joined).rank
        return self.number

    def serve(self) -> list[NewRequest]:
        """Joins, does as it is told, and has requests: the first that came."""
        self.answers = True
        rank = self.join()
        self.client.send(Ready(rank=rank, max_model_len=1 << 20, kv_tokens=1 << 20))
        self.client.send(Done(rank=rank, number=self.until(Prepare).number, seconds=0.0))
        wake = self.until(Wake)
        self.client.send(Done(rank=rank, number=wake.number, seconds=0.0))
        version = wake.weight_version
        self.client.send(
            Report(rank=rank, epoch=wake.epoch, running=0, waiting=0, kv_used=0, kv_total=99, weight_version=version)
        )
        return self.until(Submit).requests

    def tokens(self, *updates: TokenUpdate, seconds: float = 0.01) -> None:
        self.client.send(Tokens(rank=self.number, updates=list(updates), seconds=seconds, waiting=0, running=0, free_blocks=9))

    def until(self, kind: Any, seconds: float = 120.0) -> Any:
        """The last such message, once there is one; with pings and fetches answered meanwhile, if it is to be believed."""
        deadline = time.monotonic() + seconds
        while not (found := [message for message in self.heard if isinstance(message, kind)]):
            assert time.monotonic() < deadline, f"no {kind} came: {self.heard}"
            wait([self.client], 0.1)
            new = self.client.receive()
            for message in new if self.answers else ():
                if isinstance(message, Ping):
                    self.client.send(Pong(rank=self.number, sequence=message.sequence))
                if isinstance(message, Fetch):
                    self.client.send(Done(rank=self.number, number=message.number, seconds=0.0))
            self.heard += new
        return found[-1]

    def close(self) -> None:
        self.client.close()
        self.context.term()


def test_lies_doubled_and_stale_words_change_nothing(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, "max_steps=12") as job:
        liar = Liar(job.address())
        number = liar.join()
        liar.client.send(Join(pid=1, host="nowhere"))
        order = liar.until(Prepare)
        tokens = {"token_ids": [1], "logprobs": [0.0], "weight_versions": [0]}
        words = [
            Pong(rank=0, sequence=0),  # in the name of a rank of WORLD
            Failed(rank=0, error="not mine to say"),
            Report(rank=number, epoch=99, running=1, waiting=1, kv_used=1, kv_total=1, weight_version=0),
            Done(rank=number, number=order.number + 1000, seconds=0.0),
            Done(rank=number, number=0, seconds=0.0),
            TakenOver(rank=number, transfer_id="none", request_id="none", ok=True),
            HandedOff(rank=number, transfers=[]),
            Tokens(
                rank=number,
                updates=[TokenUpdate(request_id=f"{n}-0/0", **tokens) for n in range(8)],
                seconds=0.0, waiting=0, running=0, free_blocks=0,
            ),
        ]  # fmt: skip
        for word in words * 2:
            liar.client.send(word)
        liar.client.socket.send(b"\x93junk")
        liar.client.send(Done(rank=number, number=order.number, seconds=0.1))
        liar.client.send(Done(rank=number, number=order.number, seconds=0.1))
        liar.client.send(Ready(rank=number, max_model_len=1 << 20, kv_tokens=100))
        job.step(1)
        job.wait_for(f"worker rank{number} is gone: silent", 40)  # it answers no heartbeat
        stranger = Liar(job.address())
        stranger.client.send(Leaving(rank=1, notice_s=0.0))
        assert "not a member" in stranger.until(Refused).reason
        rows = job.finish()
        for one in (liar, stranger):
            one.close()
    assert len(rows) == 12 and rows[-1]["late_tokens"] >= 8


def sampled(request: NewRequest, count: int, **fields: Any) -> TokenUpdate:
    words: dict[str, Any] = {"token_ids": [5] * count, "logprobs": [-1.0] * count, "weight_versions": [0] * count}
    return TokenUpdate(request_id=request.request_id, **(words | fields))


LIES = {
    "more tokens than were asked for": (lambda one: [sampled(one, one.params.max_tokens + 1)], "were asked for"),
    "as many, twice": (lambda one: [sampled(one, one.params.max_tokens)] * 2, "were asked for"),
    "tokens of a version to come": (lambda one: [sampled(one, 1, weight_versions=[1 << 30])], "weight_version"),
    "log-probs of no number": (lambda one: [sampled(one, 1, logprobs=[float("nan")])], "log-probs"),
    "an end without a token": (lambda one: [sampled(one, 0, finish_reason="stop")], "without a token"),
}


@slow
def test_who_lies_about_requests_is_let_go_and_they_go_on_elsewhere(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, MANY, "pd.mode=mixed") as job:
        for name, (lie, reason) in LIES.items():
            liar = Liar(job.address())
            requests = liar.serve()
            liar.tokens(*lie(requests[0]))
            stop = liar.until(Stop)
            assert reason in stop.reason, (name, stop)
            liar.close()
        liar = Liar(job.address())
        requests = liar.serve()
        while not any(isinstance(message, Stop) for message in liar.heard):
            liar.tokens(*[sampled(one, 0, finish_reason="error", error="no") for one in requests])
            liar.heard = [message for message in liar.heard if not isinstance(message, Submit)]
            requests = getattr(liar.until(Submit | Stop), "requests", [])
        assert "requests failed there" in liar.until(Stop).reason
        liar.close()
        job.step(2)
        end(job, most_failed=FAILED_SESSIONS - 1)  # it may have been sent the same ones again and again
        assert job.rows()[-1]["external_failures"] >= 3


@slow
def test_a_worker_whose_main_loop_hangs_is_let_go_and_ends_itself(tmp_path: Path) -> None:
    hangs = (
        "import sys, threading\nfrom pearl.engine.emulated import EmulatedEngine\nfrom pearl.rl import join\n"
        "EmulatedEngine.step_updates = lambda self: threading.Event().wait()\n"
        "sys.exit(join.main(sys.argv[1:]))"
    )
    with ElasticJob.begin(tmp_path, MANY, "elastic.stuck_s=3") as job:
        job.address()
        job.externals["hung"] = job.beside(["-c", hangs, str(job.run / "join_address")], "hung")
        job.wait_for("its engine said nothing for elastic.stuck_s=3 s", 60)
        assert job.externals["hung"].wait(60) == 1
        assert "done nothing for elastic.stuck_s=3 s" in job.said("hung")
        job.step(1)
        end(job)


@slow
def test_workers_killed_while_they_prepare_wake_and_fetch(tmp_path: Path) -> None:
    costs = {"prepare": ChangeCost(fixed_s=1.0)}
    with ElasticJob.begin(tmp_path, MANY, "emulation.publish_s=0.8", costs=costs) as job:
        job.address()
        for name, seconds in (("preparing", 0.6), ("waking", 2.6), ("fetching", 6.0)):
            job.join(name)
            job.until(lambda name=name: "joined" in job.said(name), f"{name} to join")
            time.sleep(seconds)  # any moment will do; these are likely ones
            kill(job, name)
            job.step(1)
        job.wait_for("is gone: silent", 60, count=3)
        job.step(1)
        end(job)


@slow
def test_a_worker_leaves_in_the_middle_of_a_change_of_roles(tmp_path: Path) -> None:
    costs = {"switch": ChangeCost(fixed_s=1.5)}
    with ElasticJob.begin(tmp_path, MANY, "pd.mode=split", "pd.ratio=1:2", "pd.cooldown_s=0", costs=costs, world=4) as job:
        job.join("one")
        job.join("two")
        job.serving(1)
        kill(job, "one", signal.SIGTERM)
        kill(job, "two", signal.SIGTERM)
        for name in ("one", "two"):
            assert job.externals[name].wait(60) == 0, job.report()
        job.step(2)
        end(job)


@slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_only_decode_worker_goes(tmp_path: Path, signum: int) -> None:
    with ElasticJob.begin(tmp_path, MANY, "pd.mode=split", "pd.ratio=1:1", "pd.cooldown_s=0", world=2) as job:
        job.join("one")
        job.until(lambda: any("1P1D" in str(row["after"]) for row in job.transitions()), "a prefill and a decode worker")
        job.step(1)
        kill(job, "one", signum)
        job.wait_for("is gone", 60)
        job.step(2)
        job.until(lambda: job.rows()[-1]["serving_shape"] in ("1M", "1P", "1D"), "the other to serve alone")
        end(job)


@slow
def test_a_slow_wire_makes_a_worker_slow_and_loses_nothing(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, MANY) as job:
        wire = Wire(job.address(), late_s=0.1)
        job.join("slow", wire.address)
        job.serving(1)
        job.step(3)
        end(job)
        wire.close()


@slow
@pytest.mark.parametrize("phase", ["starting", "joining", "preparing", "serving", "stalled", "leaving"])
def test_ctrl_c_in_every_phase_leaves_nothing(tmp_path: Path, phase: str) -> None:
    costs = {"prepare": ChangeCost(fixed_s=3.0)} if phase == "preparing" else {}
    with ElasticJob.begin(tmp_path, MANY, costs=costs) as job:
        if phase == "starting":
            job.wait_for("run directory", 60)
            end(job)
            return
        job.join("one")
        if phase == "joining":
            job.process.send_signal(signal.SIGINT)
            assert job.process.wait(40) == 130
            kill(job, "one", signal.SIGTERM)  # it would look for the job for a minute
            assert job.wait_until_gone(40) is not None, job.family()
            return
        job.until(lambda: "joined" in job.said("one"), "a worker to join")
        if phase != "preparing":
            job.serving(1)
            job.step(1)
        if phase == "stalled":
            kill(job, "one", signal.SIGSTOP)
        if phase == "leaving":
            kill(job, "one", signal.SIGTERM)
        if phase == "stalled":
            job.process.send_signal(signal.SIGINT)
            assert job.process.wait(40) == 130
            kill(job, "one", signal.SIGCONT)
            assert job.wait_until_gone(40) is not None, job.family()
            return
        end(job)
