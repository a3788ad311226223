"""Conversations with one or several engines, measured step by step: what a cost profile is fitted on.

Owns how the work comes: sessions whose prompts, generations and pauses are drawn, so that requests begin, end and change the
batch all the time, as they do when environments are served. It fits nothing. Invariants: a sample holds all that the engine's
host did for its step, requests taken in included, and nothing of the caller; what a request found cached is known before its
sample is given out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pearl.engine.engine import Engine
from pearl.engine.request import RequestUpdate
from pearl.protocol import KVTransfer, SamplingParams

Timer = Callable[[], float]

WARM_UP_STEPS = 8
"""Of each kind of play; compilers and caches are cold before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What sessions are like: tokens, and steps of the engine. A session ends before `longest` tokens.

    First prompts are of `first` tokens (from, to), later turns append `appended` and generate `generated` (at most), and pause
    for `pause` steps in between; all drawn evenly.
    """

    first: tuple[int, int]
    appended: tuple[int, int]
    generated: tuple[int, int]
    pause: tuple[int, int]
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step: `batch` sequences of `context` tokens in all decoded, `prompts` of `new` tokens in all computed, `pairs` as in
    PrefillCost. `given` and `taken` requests were handed over, of `came` tokens of KV."""

    seconds: float
    batch: int = 0
    context: int = 0
    prompts: int = 0
    new: int = 0
    pairs: float = 0.0
    given: int = 0
    taken: int = 0
    came: int = 0


@dataclass(slots=True)
class _Session:
    name: str
    ids: list[int]
    due: int = 0
    """The step before which its next turn begins."""
    turn: int = 0
    decoded: int = 0
    """Tokens whose KV the decoder has of its last turn."""


@dataclass(slots=True)
class _Turn:
    """A request; how much of its prompt was cached is told when it ends."""

    session: _Session
    prompt: int
    cached: int = 0


@dataclass(slots=True)
class _Row:
    """A step, before it is known what its prompts found cached."""

    seconds: float
    decoding: list[int] = field(default_factory=list)
    """Contexts."""
    began: list[_Turn] = field(default_factory=list)
    given: int = 0
    taken: int = 0
    came: int = 0

    def sample(self) -> StepSample:
        """A prompt of which one token was not cached counts as decoding, as prices do it."""
        contexts, prompts, new, pairs = list(self.decoding), 0, 0, 0.0
        for turn in self.began:
            count = turn.prompt - turn.cached
            if count == 1:
                contexts.append(turn.prompt)
                continue
            prompts += 1
            new += count
            pairs += count * (turn.cached + count / 2)
        return StepSample(
            seconds=self.seconds,
            batch=len(contexts),
            context=sum(contexts),
            prompts=prompts,
            new=new,
            pairs=pairs,
            given=self.given,
            taken=self.taken,
            came=self.came,
        )


class Conversations:
    """`count` sessions with `engine`; with a `decoder`, it computes their prompts alone and hands them over to that one."""

    def __init__(
        self, engine: Engine, count: int, mix: Mix, timer: Timer, rng: np.random.Generator, decoder: Engine | None = None
    ) -> None:
        self._engine, self._decoder, self._mix, self._timer, self._rng = engine, decoder, mix, timer, rng
        self._vocab = engine.model_config.vocab_size
        self._sessions = [self._fresh(number) for number in range(count)]
        self._begun = count
        self._turns: dict[str, _Turn] = {}
        self._fresh_turns: set[str] = set()
        self._rows: list[_Row] = []
        self._decoder_rows: list[_Row] = []
        self._now = 0
        self.waited = False
        """Whether any KV came later than it was taken in."""

    def _draw(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(bounds[0], bounds[1] + 1))

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(0, self._vocab, count).tolist()

    def _fresh(self, number: int) -> _Session:
        return _Session(name=f"s{number}", ids=self._ids(self._draw(self._mix.first)))

    def step(self) -> None:
        """The turns that are due begin, then each engine that has something to do makes one step."""
        self._now += 1
        row = self._step(self._engine, self._due())
        if self._decoder is None:
            self._rows.append(row)
            return
        offers = self._engine.take_handoffs()
        taking = self._hand_over(row, offers, self._decoder)
        self._rows.append(row)
        after = self._step(self._decoder, [])
        after.seconds += taking
        after.taken, after.came = row.given, row.came
        row.came = 0
        self._decoder_rows.append(after)

    def _due(self) -> list[tuple[str, list[int], SamplingParams, str]]:
        """Requests whose prompts one step can take."""
        room, found = self._engine.config.max_batch_tokens - len(self._turns), []
        for session in self._sessions:
            if session.due > self._now or len(session.ids) > room:
                continue
            session.due, name = 1 << 60, f"{session.name}.{session.turn}"
            room -= len(session.ids)
            most = min(self._draw(self._mix.generated), self._mix.longest - len(session.ids) - 1)
            found.append((name, list(session.ids), SamplingParams(max_tokens=most, ignore_eos=True), session.name))
            self._turns[name] = _Turn(session=session, prompt=len(session.ids))
            self._fresh_turns.add(name)
        return found

    def _step(self, engine: Engine, due: Sequence[tuple[str, list[int], SamplingParams, str]]) -> _Row:
        began = self._timer()
        for name, ids, params, session in due:
            engine.add_request(ids, params, request_id=name, session_id=session)
        updates = engine.step_updates()
        row = _Row(seconds=self._timer() - began)
        for update in updates:
            self._take(row, update)
        return row

    def _take(self, row: _Row, update: RequestUpdate) -> None:
        turn = self._turns[update.request_id]
        session = turn.session
        if update.request_id in self._fresh_turns:
            self._fresh_turns.discard(update.request_id)
            row.began.append(turn)
        elif update.token_ids:
            row.decoding.append(len(session.ids))
        session.ids += update.token_ids
        if update.completion is not None:
            turn.cached = update.completion.num_cached_tokens
            del self._turns[update.request_id]
            self._next_turn(session)

    def _next_turn(self, session: _Session) -> None:
        session.turn += 1
        session.due = self._now + 1 + self._draw(self._mix.pause)
        more = self._draw(self._mix.appended)
        if len(session.ids) + more + 2 > self._mix.longest:
            fresh = self._fresh(self._begun)
            self._begun += 1
            session.name, session.ids, session.turn, session.decoded = fresh.name, fresh.ids, 0, 0
        else:
            session.decoded = len(session.ids) - 1
            session.ids += self._ids(more)

    def _hand_over(self, row: _Row, offers: list[KVTransfer], decoder: Engine) -> float:
        """Seconds that the decoder spends on taking in; what the source spends is added to its row."""
        taking = 0.0
        for offer in offers:
            began = self._timer()
            taken = decoder.import_kv(offer)
            between = self._timer()
            arriving = decoder.is_arriving(offer.transfer_id)
            self._engine.finish_export(offer.transfer_id, taken, arrived=not arriving)
            taking += between - began
            row.seconds += self._timer() - between
            self.waited |= arriving
            if not taken:
                raise RuntimeError(f"request {offer.request_id!r}: an engine with room did not take it in")
            row.given += 1
            row.came += offer.num_written_tokens - self._held(offer)
        return taking

    def _held(self, offer: KVTransfer) -> int:
        """Tokens of whose KV the decoder has whole blocks in its cache."""
        size = self._engine.config.block_size
        return self._turns[offer.request_id].session.decoded // size * size

    def close(self) -> None:
        """Ends what is under way."""
        engines = [self._engine] if self._decoder is None else [self._engine, self._decoder]
        for engine in engines:
            for name in list(self._turns):
                engine.abort(name)
        while any(engine.has_unfinished() for engine in engines):
            for engine in engines:
                for update in engine.step_updates():
                    if update.completion is not None and update.request_id in self._turns:
                        self._turns.pop(update.request_id).cached = update.completion.num_cached_tokens

    def samples(self) -> tuple[list[StepSample], list[StepSample]]:
        """(of the engine, of the decoder), without the first ones; after `close`."""
        mine, others = (
            [row.sample() for row in rows[WARM_UP_STEPS:] if row.decoding or row.began]
            for rows in (self._rows, self._decoder_rows)
        )
        return mine, others
