"""What the first rank says to the others arrives as it was said, whatever its size, and tensors one after the other."""

from __future__ import annotations

import hashlib

import pytest
import torch
from gloo_members import run_members

from pearl.clock import VirtualClock
from pearl.engine import calls
from pearl.engine.comm.communicator import Communicator
from pearl.protocol import Role, SamplingParams


@pytest.mark.parametrize("size", [0, 1, calls.FRAME_BYTES - 9, calls.FRAME_BYTES - 8, calls.FRAME_BYTES - 7, 3_000_000])
def test_bytes_of_any_size(size: int) -> None:
    payload = (hashlib.sha256(b"x").digest() * (size // 32 + 1))[:size]

    def work(comm: Communicator) -> bytes:
        if comm.rank == 0:
            calls.send(comm, payload)
            calls.send(comm, b"next")
            return payload + b"next"
        return calls.receive(comm) + calls.receive(comm)

    assert run_members(3, work) == [payload + b"next"] * 3


def test_calls_keep_their_kind_their_order_and_their_arguments() -> None:
    params = SamplingParams(temperature=0.3, stop=["x"], stop_token_ids=[3], seed=2**63 + 1, n=2, logprobs=None)
    said: list[calls.Call] = [
        calls.AddRequest(
            now=1.5, request_id="a", prompt=[1, 2], params=params, cache_salt=None, session_id="s", reservation=None,
            streaming=False, most_computed=7,
        ),
        calls.Pause(now=2.0),
        calls.SwitchRole(now=2.25, role=Role.DECODE, drain="finish"),
        calls.StageWeights(now=2.5, version=2**40),
        calls.Step(now=3.0, check=True),
    ]

    def work(comm: Communicator) -> list[calls.Call]:
        if comm.rank == 0:
            calls.send_calls(comm, said)
            return said
        return calls.receive_calls(comm)

    assert run_members(2, work) == [said, said]
    assert calls.arguments(said[2]) == {"role": Role.DECODE, "drain": "finish"}


def test_tensors_arrive_as_they_are_and_only_those_that_were_taken() -> None:
    """The taker on the first rank stops before the fourth, which is no tensor: the others never hear of it."""
    grown = torch.arange(12, dtype=torch.float64).view(3, 4).t().requires_grad_()
    items = [("a", grown), ("b", torch.tensor([1.5], dtype=torch.bfloat16)), ("c", torch.zeros(0, 7), 5), ("d", "no tensor")]

    def work(comm: Communicator) -> list:
        got = []
        if comm.rank == 0:
            for item in calls.sent(comm, items):
                if isinstance(item[1], str):
                    break
                got.append(item)
            calls.send_end(comm)
        else:
            got = list(calls.arriving(comm, torch.device("cpu")))
        return [(name, value.tolist(), value.dtype, value.shape, *start) for name, value, *start in got]

    expected = [(name, value.tolist(), value.dtype, value.shape, *start) for name, value, *start in items[:3]]
    assert run_members(2, work) == [expected, expected]


def test_a_held_clock_stands_still() -> None:
    inner = VirtualClock(3.0)
    clock = calls.HeldClock(inner)
    with clock.held(7.0):
        inner.advance(1.0)
        assert clock.now() == 7.0
    assert clock.now() == 4.0
