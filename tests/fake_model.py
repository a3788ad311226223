"""A pretended model over a pretended paged pool: every mistake in slots, order, caching or versions changes its tokens.

The "KV" of a token is (chain value of all tokens up to it, weight version), written into the slot its block table gives.
The next token is a function of all the values read back through the block table, so a wrong slot, a stale block, a missed
position or a token recomputed in the wrong place shows as a wrong token, and a value not written is an error at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from pearl.engine.core import CoreSettings, EngineCore
from pearl.engine.request import PLACEHOLDER, Completion, Request, RequestUpdate, SampledToken, SchedulerOutput, StepResult
from pearl.protocol import SamplingParams

VOCAB = 13
EOS = 12

MODES = [{"ahead": False}, {"ahead": True}, {"ahead": True, "lazy": True}]
every_mode = pytest.mark.parametrize("mode", MODES, ids=["sync", "ahead", "ahead_lazy"])


def mix(*values: int) -> int:
    text = ",".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")


def chain(token_ids: Sequence[int]) -> list[int]:
    values, last = [], 0
    for token_id in token_ids:
        last = mix(last, token_id)
        values.append(last)
    return values


def next_token(values: Sequence[int]) -> int:
    return mix(*values) % VOCAB


def prompt_logprob(values: Sequence[int], token_id: int) -> float:
    return -(mix(*values, token_id) % 1000) / 100


def oracle(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The model's next `num_tokens` tokens, computed without blocks, chunks or a cache."""
    ids, out = list(prompt), []
    for _ in range(num_tokens):
        out.append(next_token(chain(ids)))
        ids.append(out[-1])
    return out


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int = 4, salt: str | None = None, **params) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
    return Request(
        request_id=request_id,
        params=sampling,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        eos_token_ids=frozenset({EOS}),
        cache_salt=salt,
    )


def make_core(num_blocks: int = 64, block_size: int = 4, new_text=None, name: str = "engine", **sizes) -> EngineCore:
    defaults = {"max_model_len": 256, "max_num_seqs": 256, "max_batch_tokens": 64, "vocab_size": VOCAB}
    settings = CoreSettings(num_blocks=num_blocks, block_size=block_size, **{**defaults, **sizes})
    return EngineCore(settings, new_text, name=name)


class FakeModel:
    """Executes outputs on a core's requests. `version` is what it computes with."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.block_size = core.settings.block_size
        self.slots: dict[int, tuple[int, int, int]] = {}  # slot -> (chain value, version, token id)
        self.version = 0
        self.last: dict[str, SampledToken] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        """All writes first, then all reads, as a layer of a real model does."""
        sampled: dict[str, SampledToken] = {}
        logprobs: dict[str, list[float]] = {}
        for entry in output.requests:
            self._write(self.core.requests[entry.request_id], entry.start, entry.num_tokens)
        for entry in output.requests:
            request, end = self.core.requests[entry.request_id], entry.start + entry.num_tokens
            values = self._read(request, end)
            if entry.samples:
                token_id = next_token(values)
                sampled[entry.request_id] = SampledToken(token_id=token_id, logprob=-token_id / 7)
            if entry.wants_prompt_logprobs:
                last = min(end, request.num_prompt_tokens - 1)
                logprobs[entry.request_id] = [
                    prompt_logprob(values[:at], request.token_ids[at]) for at in range(entry.start + 1, last + 1)
                ]
        self.last = sampled
        return StepResult(sampled=sampled, prompt_logprobs=logprobs, weight_version=self.version)

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, request: Request, start: int, num_tokens: int) -> None:
        for position in range(start, start + num_tokens):
            token_id = request.token_ids[position]
            if token_id == PLACEHOLDER:
                token_id = self.last[request.request_id].token_id
            before = self.slots[self._slot(request, position - 1)][0] if position else 0
            self.slots[self._slot(request, position)] = (mix(before, token_id), self.version, token_id)

    def _read(self, request: Request, length: int) -> list[int]:
        kv = [self.slots[self._slot(request, position)] for position in range(length)]
        if request.cacheable and any(version != self.version for _, version, _ in kv):
            raise AssertionError(f"{request.request_id} reads KV of versions {kv} under version {self.version}")
        return [value for value, _, _ in kv]

    def check_cache(self) -> None:
        """Every cache entry's block really holds the ids it is found by, of the present version."""
        for entry in self.core.blocks.cache.entries():
            first = entry.block_id * self.block_size
            held = [self.slots[first + offset] for offset in range(self.block_size)]
            assert tuple(token_id for _, _, token_id in held) == entry.token_ids
            assert all(version == self.core.weight_version for _, version, _ in held)


class Driver:
    """Steps a core with a FakeModel, one output at a time or one ahead.

    `lazy` runs an output only after the one before it is finished (its tokens known); otherwise right after its schedule.
    Collects every request's streamed tokens and completion, and checks the books after every call.
    """

    def __init__(self, core: EngineCore, *, ahead: bool = False, lazy: bool = False) -> None:
        self.core, self.model = core, FakeModel(core)
        self.ahead, self.lazy = ahead, lazy
        self.queue: list[tuple[SchedulerOutput, StepResult | None]] = []
        self.completions: dict[str, Completion] = {}
        self.streamed: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.outputs: list[SchedulerOutput] = []

    def step(self) -> SchedulerOutput:
        output = self.core.schedule(0.0)
        self.outputs.append(output)
        self.queue.append((output, None if self.lazy else self.model.execute(output)))
        if not self.ahead or len(self.queue) == 2:
            self.finish_one()
        self.check()
        return output

    def finish_one(self) -> None:
        output, result = self.queue.pop(0)
        self.take(self.core.finish(output, result or self.model.execute(output), 0.0))

    def take(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            assert update.request_id not in self.completions
            self.streamed.setdefault(update.request_id, []).extend(update.token_ids)
            self.texts[update.request_id] = self.texts.get(update.request_id, "") + update.text
            if update.completion is not None:
                self.completions[update.request_id] = update.completion

    def check(self) -> None:
        self.core.check_integrity()
        self.model.check_cache()

    def run(self, most: int = 2000) -> dict[str, Completion]:
        """Until nothing is left."""
        for _ in range(most):
            if not self.core.has_unfinished():
                assert_all_free(self.core)
                return self.completions
            if self.core.requests:
                self.step()
            else:
                self.finish_one()
        raise AssertionError(f"not finished after {most} steps: {self.core.stats()}")


def assert_all_free(core: EngineCore) -> None:
    stats = core.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert not core.requests and not core.scheduler.running and not core.scheduler.waiting and not core.scheduler.draining
