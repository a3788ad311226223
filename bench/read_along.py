"""Claim: a prompt whose KV is read along while it is computed can be decoded elsewhere in a third of the time or less.

The time from the first token of a prompt of 2,048 tokens, computed in chunks of 256, against the same time if nothing is copied
before that. Two engines in two processes of one machine, one thread each; sides take turns, medians are compared. It runs from
when the step with the first token is through to when the request runs in the receiver: the message with the request, and what
is left of the 48 MiB of KV. Reading along costs the receiver what it copies and the sender nothing but the bandwidth: how long
prompts take is shown for both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from subprocess import Popen

import msgspec
import torch

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.models.config import ModelConfig
from pearl.kv_transfer import KVReservation, KVTransfer
from pearl.protocol import Role, SamplingParams

MOST = 1 / 3
"""What the time after the first token may be of that without reading along."""
PROMPT, CHUNK, BLOCK = 2048, 256, 16
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=256, intermediate_size=512, num_layers=12, num_heads=8,
    num_kv_heads=8, head_dim=64, rms_eps=1e-5, rope_theta=1e4, max_position=4096, tie_embeddings=True, qk_norm=False,
)  # fmt: skip
PAUSE_S = 0.001
"""Between two looks of a receiver that has nothing to decode."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


class Job(msgspec.Struct, kw_only=True):
    """A prompt for the other process; with a `reservation` its KV may be read along."""

    ids: list[int]
    name: str
    reservation: KVReservation | None


class Offer(msgspec.Struct, kw_only=True):
    """What grows, or what is offered: `first_token` is when its step was through, `started` when its first one began."""

    transfer: KVTransfer
    started: float = 0.0
    first_token: float = 0.0


def new_engine(role: Role, kernels: str) -> Engine:
    config = EngineConfig(
        model=MODEL, dtype="bfloat16", load_format="dummy", num_blocks=2 * PROMPT // BLOCK, block_size=BLOCK, role=role,
        max_batch_tokens=CHUNK, enable_prefix_cache=False, transfer_deadline_s=60.0, kernels=kernels,
    )  # fmt: skip
    return Engine(config, text=False)


# ------------------------------------------------------------------------------------------------ the second process


def send(connection: Connection, kernels: str) -> None:
    """Computes prompts and offers them, until the first process goes."""
    engine = new_engine(Role.PREFILL, kernels)

    def say(offer: Offer) -> None:
        connection.send_bytes(msgspec.msgpack.encode(offer))

    engine.on_growing = lambda transfer: say(Offer(transfer=transfer))
    connection.send_bytes(b"ready")
    while True:
        job = msgspec.msgpack.decode(connection.recv_bytes(), type=Job)
        engine.add_request(job.ids, PARAMS, request_id=job.name, reservation=job.reservation)
        started = time.monotonic()
        while not (transfers := engine.take_handoffs()):
            engine.step()
            first_token = time.monotonic()
        say(Offer(transfer=transfers[0], started=started, first_token=first_token))
        connection.recv_bytes()  # it runs there
        engine.finish_export(transfers[0].transfer_id, True)


# ------------------------------------------------------------------------------------------------ the first


def receive(connection: Connection, engine: Engine, number: int, *, along: bool) -> tuple[float, float]:
    """Seconds from the first token to when the request runs here, and those of the prompt."""
    ids = random.Random(number).choices(range(MODEL.vocab_size), k=PROMPT)
    name = f"r{number}"
    credit = engine.reserve_kv(name, ids, PARAMS) if along else None
    connection.send_bytes(msgspec.msgpack.encode(Job(ids=ids, name=name, reservation=credit)))
    offer = None
    while not engine.stats().running:
        if connection.poll(0 if engine.has_unfinished() else 0.02):
            offer = msgspec.msgpack.decode(connection.recv_bytes(), type=Offer)
            taken = engine.read_along(offer.transfer) if offer.transfer.growing else engine.import_kv(offer.transfer)
            assert taken
        else:
            engine.step()
            time.sleep(PAUSE_S)
    runs = time.monotonic()
    assert offer is not None
    connection.send_bytes(b"it runs")
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().num_preemptions == 0
    return runs - offer.first_token, offer.first_token - offer.started


def measure(kernels: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in milliseconds, with ("along") and without ("after")."""
    mine, theirs = os.pipe(), os.pipe()
    ends = [str(mine[0]), str(theirs[1])]
    command = [sys.executable, "-m", "bench.read_along", "--kernels", kernels, "--ends", *ends]
    with Popen(command, pass_fds=[mine[0], theirs[1]]) as sender:
        connection = Pipe(theirs[0], mine[1])
        try:
            engine = new_engine(Role.DECODE, kernels)
            assert connection.recv_bytes() == b"ready"
            times: dict[str, list[tuple[float, float]]] = {"along": [], "after": []}
            for number in range(2 * rounds + 2):
                side = ("along", "after")[number % 2]
                result = receive(connection, engine, number, along=side == "along")
                if number >= 2:
                    times[side].append(result)
        finally:
            sender.kill()
    names = ("after_first_token_ms", "prompt_ms")
    return {
        side: {name: statistics.median(values) * 1e3 for name, values in zip(names, zip(*pairs, strict=True), strict=True)}
        for side, pairs in times.items()
    }


class Pipe:
    """Two ends of two pipes as one connection."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = Connection(reading, writable=False)
        self._writing = Connection(writing, readable=False)
        self.recv_bytes, self.poll, self.send_bytes = self._reading.recv_bytes, self._reading.poll, self._writing.send_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.read_along", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    parser.add_argument("--kernels", default="auto", help="as EngineConfig's (default auto)")
    parser.add_argument("--ends", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.ends is not None:
        try:
            send(Pipe(*args.ends), args.kernels)
        except (EOFError, BrokenPipeError):
            return
    result = measure(args.kernels, args.rounds)
    along, after = (result[side]["after_first_token_ms"] for side in ("along", "after"))
    outcome = {
        "bench": "read_along",
        "claim": "time from the first token to the request running elsewhere, read along over read afterwards",
        "value": round(along / after, 3),
        "target": round(MOST, 3),
        "ok": along <= MOST * after,
        "kernels": args.kernels,
        "load": round(os.getloadavg()[0], 1),
        "ms": {side: {name: round(value, 2) for name, value in times.items()} for side, times in result.items()},
    }
    print(f"{'milliseconds':12}{'after the first token':>24}{'prompt':>12}")
    for side, times in result.items():
        print(f"{side:12}{times['after_first_token_ms']:24.2f}{times['prompt_ms']:12.1f}")
    print(json.dumps(outcome) if args.json else f"along / after: {outcome['value']} (at most {outcome['target']})")


if __name__ == "__main__":
    main()
