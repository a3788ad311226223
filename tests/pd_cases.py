"""Engines in processes of their own, a router between them, and requests of all kinds for them. Fixtures only, no tests."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import multiprocessing.connection
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import hf_models
import msgspec
import pytest
import tiny_tokenizers
from migration_cases import CHILD, ROOT
from pd_process import (
    Add,
    Answer,
    Finish,
    Look,
    Offer,
    Order,
    ReadAlong,
    Release,
    Reserve,
    Reserved,
    Seen,
    Setup,
    Switch,
    Take,
    Took,
    Updates,
)

from pearl.engine.request import Completion, RequestUpdate
from pearl.protocol import KVReservation, KVTransfer, Role, SamplingParams

PATIENCE_S = 120.0
"""For a busy machine; what takes longer hangs."""
_Kind = TypeVar("_Kind")
VOCAB = 264
EOS = [*range(200, 224)]


def save_model(folder: Path) -> Path:
    """A tiny model with several EOS tokens and a byte-level tokenizer."""
    hf = hf_models.randomise(hf_models.dense(0, vocab_size=VOCAB, eos_token_id=EOS))
    return tiny_tokenizers.save(tiny_tokenizers.byte_level(), hf_models.save(hf, folder))


# ---------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Asked:
    name: str
    ids: list[int]
    params: SamplingParams


UNICODE = "naïve — 東京 😀 Ελλάδα"
KINDS: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "seed": 11},
    {"top_p": 0.8, "logprobs": 3},
    {"min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    {"n": 3, "logprobs": 2},
    {"temperature": 1.5, "stop": [*"abcdefghijklmnopqrstuvwxyz01234é"]},
    {"temperature": 0.0, "prompt_logprobs": True, "logprobs": 2},
    {"temperature": 1.2, "stop_token_ids": list(range(0, VOCAB, 4)), "min_tokens": 3},
    {"temperature": 2.0, "ignore_eos": True, "n": 2, "seed": 2**63},
    {"temperature": 2.0, "stop": [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ56789"], "min_tokens": 4, "logprobs": None},
    {"temperature": 2.0},
    {"logprobs": 4, "logprobs_mode": "raw", "temperature": 0.5, "top_k": 5},
]


def requests(count: int, seed: int = 0) -> list[Asked]:
    """Prompts of one token and more, with shared beginnings, said before, and of parts of characters; each kind of params."""
    rng = random.Random(seed)
    text = list(tiny_tokenizers.byte_level().encode(UNICODE, add_special_tokens=False).ids)
    bases = [[rng.randrange(VOCAB) for _ in range(size)] for size in (8, 16, 23)]
    made: list[Asked] = []
    for number in range(count):
        kind = number % 7
        if kind == 0:
            ids = [rng.randrange(VOCAB)]
        elif kind in (1, 2):
            ids = rng.choice(bases) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        elif kind == 3 and made:
            ids = list(rng.choice(made[-12:]).ids)
        elif kind == 4:
            ids = text[: rng.randint(1, len(text))]
        elif kind == 5:
            ids = list(bases[1])
        else:
            ids = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))]
        fields = KINDS[number * 5 % len(KINDS)]
        most = 20 if "stop" in fields or "stop_token_ids" in fields else rng.choice([1, 2, 5, 9, 16])
        fields = fields | {"max_tokens": most}
        made.append(Asked(f"r{number}", ids, SamplingParams(**fields)))
    return made


def same(mine: Completion, other: Completion) -> None:
    """Tokens and text are equal, and numbers up to the arithmetic."""
    fields = ("request_id", "index", "prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason")
    for field in (*fields, "weight_versions"):
        assert getattr(mine, field) == getattr(other, field), (field, mine, other)
    assert mine.error is None
    assert mine.logprobs == (None if other.logprobs is None else pytest.approx(other.logprobs, abs=1e-4))
    assert (mine.prompt_logprobs is None) == (other.prompt_logprobs is None)
    if mine.prompt_logprobs is not None and other.prompt_logprobs is not None:
        assert mine.prompt_logprobs[0] is None is other.prompt_logprobs[0]
        assert mine.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)
    assert (mine.top_logprobs is None) == (other.top_logprobs is None)
    for tops, wanted in zip(mine.top_logprobs or [], other.top_logprobs or [], strict=True):
        assert tops == pytest.approx(wanted, abs=1e-4)


# ---------------------------------------------------------------------------------------------------- processes


class Worker:
    """A process with an engine (`pd_process.py`)."""

    def __init__(self, setup: Setup) -> None:
        self.role = setup.role
        self.link, theirs = multiprocessing.Pipe()
        command = [sys.executable, str(ROOT / "tests" / "pd_process.py"), str(theirs.fileno())]
        command.append(msgspec.json.encode(setup).decode())
        self.process = subprocess.Popen(command, env=CHILD | {"OMP_NUM_THREADS": "1"}, pass_fds=[theirs.fileno()])
        theirs.close()
        self.updates: list[Updates] = []

    def tell(self, order: Order) -> None:
        self.link.send_bytes(msgspec.msgpack.encode(order))

    def hear(self) -> Answer:
        assert self.link.poll(PATIENCE_S), "the other process says nothing"
        return msgspec.msgpack.decode(self.link.recv_bytes(), type=Answer)

    def expect(self, kind: type[_Kind]) -> _Kind:
        """The next answer of that kind; updates are kept, others must not come."""
        while not isinstance(answer := self.hear(), kind):
            assert isinstance(answer, Updates), answer
            self.updates.append(answer)
        return answer

    def look(self) -> Seen:
        self.tell(Look())
        return self.expect(Seen)

    def until(self, condition: Callable[[Seen], bool]) -> Seen:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(seen := self.look()):
            assert time.monotonic() < deadline, seen
            time.sleep(0.005)
        return seen

    def send_signal(self, way: signal.Signals) -> None:
        self.process.send_signal(way)
        if way == signal.SIGKILL:
            self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.link.close()


class Cluster:
    """Two workers or more, and who passes on what they offer. Requests go to whoever has not the role `decode`."""

    def __init__(self, setups: Iterable[Setup], *, at_once: int = 24, reserve_every: int = 3) -> None:
        """Each `reserve_every`th request is given room at its receiver first."""
        self.workers = [Worker(setup) for setup in setups]
        self.at_once, self.reserve_every = at_once, reserve_every
        self.done: dict[tuple[str, int], Completion] = {}
        self.tokens: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        self.texts: dict[tuple[str, int], str] = collections.defaultdict(str)
        self.moved = self.refused = self.reserved = self.read_along = 0
        self._asked: dict[str, tuple[Asked, Worker]] = {}
        self._offers: dict[str, Worker] = {}
        self._room: dict[str, tuple[Worker, KVReservation]] = {}
        """Who has given a request's credit, until it is spent."""
        self._turn = itertools.count()

    def __enter__(self) -> Cluster:
        for worker in self.workers:
            worker.expect(Seen)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def run(self, asked: list[Asked], flip_every: int | None = None) -> dict[tuple[str, int], Completion]:
        """All of them, to the end; after each `flip_every` that ended, the workers' roles go round."""
        waiting, left = collections.deque(asked), {(one.name, index) for one in asked for index in range(one.params.n)}
        under_way: collections.Counter[str] = collections.Counter()
        flipped, deadline = 0, time.monotonic() + PATIENCE_S
        while left or self._offers:
            assert time.monotonic() < deadline, (len(left), self._offers)
            while waiting and len(under_way) < self.at_once:
                under_way[waiting[0].name] = waiting[0].params.n
                self._place(waiting.popleft())
            before = self.done.keys() - set()
            for link in multiprocessing.connection.wait([worker.link for worker in self.workers], 1.0):
                [worker] = [worker for worker in self.workers if worker.link is link]
                self._hear(worker, worker.hear())
            for key in self.done.keys() - before:
                left.remove(key)
                under_way[key[0]] -= 1
                under_way = +under_way
            if flip_every is not None and len(self.done) // flip_every > flipped:
                flipped += 1
                self._flip()
        return self.done

    def _place(self, one: Asked) -> None:
        number = next(self._turn)
        able = [worker for worker in self.workers if worker.role is not Role.DECODE]
        worker = able[number % len(able)]
        if number % self.reserve_every == 0 and (others := self._others(worker)):
            self._asked[one.name] = (one, worker)
            others[number % len(others)].tell(Reserve(name=one.name, ids=one.ids, params=one.params))
        else:
            worker.tell(Add(name=one.name, ids=one.ids, params=one.params))

    def _others(self, source: Worker) -> list[Worker]:
        others = [worker for worker in self.workers if worker is not source]
        return [worker for worker in others if worker.role is not Role.PREFILL] or others

    def _hear(self, worker: Worker, answer: Answer) -> None:
        match answer:
            case Updates():
                for update in answer.updates:
                    self._note(update)
            case Offer():
                self._offer(worker, answer.transfer)
            case Took():
                source = self._offers[answer.transfer_id] if not answer.arrived else self._offers.pop(answer.transfer_id)
                source.tell(Finish(transfer_id=answer.transfer_id, ok=answer.ok, arrived=answer.arrived))
                self.moved += answer.ok and answer.arrived
                self.refused += not answer.ok
            case Reserved():
                one, source = self._asked.pop(answer.name)
                if answer.reservation is not None:
                    self.reserved += 1
                    self._room[answer.name] = (worker, answer.reservation)
                source.tell(Add(name=one.name, ids=one.ids, params=one.params, reservation=answer.reservation))
            case _:
                raise AssertionError(answer)

    def _offer(self, source: Worker, transfer: KVTransfer) -> None:
        if transfer.growing:
            if transfer.request_id in self._room:
                self.read_along += 1
                self._room[transfer.request_id][0].tell(ReadAlong(transfer=transfer))
            return
        self._offers[transfer.transfer_id] = source
        others = self._others(source)
        receiver = others[len(self._offers) % len(others)]
        if transfer.reservation_id is not None and transfer.request_id in self._room:
            receiver, _ = self._room.pop(transfer.request_id)
        if receiver is source:  # the roles have changed since
            receiver = others[0]
        receiver.tell(Take(transfer=transfer))

    def _note(self, update: RequestUpdate) -> None:
        key = (update.request_id, update.index)
        assert key not in self.done
        self.tokens[key] += update.token_ids
        self.texts[key] += update.text
        if update.completion is not None:
            self.done[key] = update.completion
            if update.index == 0 and update.request_id in self._room:  # it ended where it began
                receiver, reservation = self._room.pop(update.request_id)
                receiver.tell(Release(reservation=reservation))

    def _flip(self) -> None:
        roles = [worker.role for worker in self.workers]
        for worker, role in zip(self.workers, roles[1:] + roles[:1], strict=True):
            worker.role = role
            worker.tell(Switch(role=role))

    def assert_settled(self) -> list[Seen]:
        """Nothing is left anywhere, and each token came once."""
        looks = [worker.until(lambda seen: not seen.unfinished and seen.free) for worker in self.workers]
        assert all(seen.arriving == seen.offered == 0 for seen in looks)
        for key, completion in self.done.items():
            assert self.tokens[key] == completion.token_ids and self.texts[key] == completion.text
        return looks
