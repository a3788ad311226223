"""Random lives of a real engine on a tiny model: whatever is done to it, the books add up and every token is the model's.

Each token is compared with transformers under the weights of the token's own version, as far as its KV was all of that version;
the tokens that a request draws on KV of older weights (mode "keep") are only counted, and end when it is computed again. The
pool is poisoned with NaN, so that a read of what was never written shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import hf_models
import pytest
from engine_cases import log_softmax, model, named
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from weight_cases import config_of

from pearl.clock import VirtualClock
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.request import Completion, RequestStatus, RequestUpdate
from pearl.protocol import KVTransfer, Role, SamplingParams

STEMS = [hf_models.prompt(24), hf_models.prompt(24, seed=1)]
SEEDS = 3
MODES = st.sampled_from(["keep", "recompute", "abort"])
FAULTS = st.sampled_from([None, None, None, "missing", "not finite"])
WAYS = st.sampled_from(["staged", "streaming"])
DRAINS = st.sampled_from(["handover", "handover", "finish", "recompute"])
ANSWERS = st.sampled_from(["taken", "taken", "refused", "lost"])
DEADLINE = 4.0
MOST_STEPS = 3000

ADDS = st.fixed_dictionaries(
    {
        "stem": st.sampled_from(STEMS),
        "length": st.integers(0, 24),
        "tail": st.lists(st.integers(0, 127), min_size=1, max_size=3),
        "max_tokens": st.integers(1, 20),
        "temperature": st.sampled_from([0.0, 0.0, 1.0]),
        "prompt_logprobs": st.sampled_from([False, False, False, True]),
        "salt": st.sampled_from([None, None, "a"]),
        "session": st.sampled_from([None, "s", "t"]),
    }
)
STEPS = st.integers(0, 4)
"""Steps after something was done to the engine."""
SIZES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "max_num_seqs": st.sampled_from([1, 2, 5, 5, 16]),
        "max_batch_tokens": st.sampled_from([2, 5, 16, 64]),
        "decode_prefill_tokens": st.sampled_from([1, 4]),
        "enable_prefix_cache": st.sampled_from([True, True, False]),
        "max_model_len": st.sampled_from([20, 64, 64]),
    }
)


@functools.cache
def config():
    return config_of(model())


def poisoned(seed: int, at: int) -> Iterator[tuple[str, Tensor]]:
    for number, (name, tensor) in enumerate(named(seed)):
        yield name, tensor.clone().fill_(math.nan) if number == at else tensor


class EngineMachine(RuleBasedStateMachine):
    """Remembers what was asked for, and which of the running requests have KV of more than one version."""

    @initialize(sizes=SIZES, slots=st.sampled_from([12, 24, 48, 96]), adds=st.lists(ADDS, min_size=2, max_size=5), steps=STEPS)
    def build(self, sizes: dict, slots: int, adds: list[dict], steps: int) -> None:
        num_blocks = slots // sizes["block_size"]
        fixed = EngineConfig(
            model=config(), dtype="float32", kv_fill=math.nan, num_blocks=num_blocks, transfer_deadline_s=DEADLINE, **sizes
        )
        self.clock = VirtualClock()
        self.engine = Engine(fixed, self.clock, load_weights=False, text=False)
        self.peer = Engine(fixed, self.clock, load_weights=False, text=False)
        self.away: set[str] = set()
        self.slots = num_blocks * sizes["block_size"]
        self.max_model_len = sizes["max_model_len"]
        self.version, self.next_version, self.seeds = -1, 0, {}
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.done: dict[str, Completion] = {}
        self.aborted: set[str] = set()
        self.mixed: set[str] = set()
        self.changed: set[str] = set()
        self.preemptions: dict[str, int] = {}
        self.exact: dict[str, list[bool]] = {}
        self.take_version("keep", "staged")
        for fields in adds:
            self.add(**fields)
        self.run_steps(steps)

    # ------------------------------------------------------------------------------------------------ requests

    @rule(adds=st.lists(ADDS, max_size=3), steps=st.integers(1, 8), heal=st.sampled_from([True, True, True, False]))
    def work(self, adds: list[dict], steps: int, heal: bool) -> None:
        if heal:
            self.heal()
        for fields in adds:
            self.add(**fields)
        self.run_steps(steps)

    def add(self, stem, length, tail, max_tokens, temperature, prompt_logprobs, salt, session) -> None:
        prompt = [*stem[:length], *tail]
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        if len(prompt) > min(self.max_model_len - 1, self.slots):
            with pytest.raises(ValueError, match=str(len(prompt))):
                self.engine.add_request(prompt, params, cache_salt=salt, session_id=session)
            return
        rid = self.engine.add_request(prompt, params, cache_salt=salt, session_id=session)
        self.asked[rid], self.exact[rid], self.preemptions[rid] = (prompt, params), [], 0

    def heal(self) -> None:
        """Nothing is in the way of a step any more."""
        self.engine.resume()
        if self.engine.asleep:
            self.engine.wake()
        if self.version < 0:
            self.take_version("recompute", "streaming", again=True)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        self.clock.advance(1.0)
        if self.version < 0 and not self.engine.asleep:
            with pytest.raises(RuntimeError, match="no weights"):
                self.engine.step_updates()
            return
        updates = self.engine.step_updates()
        if self.engine.asleep or self.engine.paused:
            assert all(update.completion is not None and update.token_ids == () for update in updates)
        for update in updates:
            self.take(update)
        self.observe()
        self.engine.check_integrity()

    def take(self, update: RequestUpdate) -> None:
        rid = update.request_id
        assert rid not in self.done
        self.exact[rid] += [rid not in self.mixed] * len(update.token_ids)
        assert all(version == self.version for version in update.weight_versions)
        if update.completion is not None:
            self.done[rid] = update.completion
            self.check(update.completion)

    def observe(self) -> None:
        """A request that gave way is computed anew: from now on its KV is of one version."""
        for rid, request in self.engine._core.requests.items():
            if request.num_preemptions > self.preemptions[rid]:
                self.preemptions[rid] = request.num_preemptions
                self.mixed.discard(rid)

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0, 5), what=st.sampled_from(["abort", "preempt", "preempt", "preempt"]), steps=STEPS)
    def interfere(self, number: int, what: str, steps: int) -> None:
        rid = list(self.asked)[-1 - number % len(self.asked)]
        if what == "abort" and rid in self.away:
            assert not self.engine.abort(rid)
        elif what == "abort":
            assert self.engine.abort(rid) is (rid not in self.done and rid not in self.aborted)
            self.aborted |= {rid} - self.done.keys()
        else:
            self.engine.preempt(rid)
            self.observe()
        self.run_steps(steps)

    @rule(what=st.sampled_from(["pause", "reset"]), steps=STEPS)
    def disturb(self, what: str, steps: int) -> None:
        if what == "reset":
            self.engine.reset_prefix_cache()
            assert self.engine.stats().cached_blocks == 0
        else:
            self.engine.pause()
        self.run_steps(steps)

    # ------------------------------------------------------------------------------------------------ roles and hand-offs

    @rule(role=st.sampled_from([Role.PREFILL, Role.PREFILL, Role.MIXED, Role.DECODE]), drain=DRAINS, steps=STEPS)
    def switch(self, role: Role, drain: str, steps: int) -> None:
        before = self.engine.stats()
        blind = self.engine.paused or self.engine.asleep or self.version < 0
        if drain == "finish" and role is Role.PREFILL and before.role is not Role.PREFILL and blind:
            with pytest.raises(ValueError, match="nothing would finish"):
                self.engine.switch_role(role, drain)
            assert self.engine.stats() == before
        else:
            report = self.engine.switch_role(role, drain)
            assert self.engine.stats().role is role and self.engine.stats().epoch == before.epoch + 1
            assert drain == "finish" or report.finished == 0
        self.observe()
        # What was drawn in the steps of "finish" is told of with the next one: until then the books know nothing of it.
        self.run_steps(max(steps, 1) if drain == "finish" else steps)

    @rule(answer=ANSWERS, steps=STEPS)
    def hand_over(self, answer: str, steps: int) -> None:
        """What is offered goes to another engine, or nobody takes it, or nobody answers."""
        for transfer in self.engine.take_handoffs():
            self.answer(transfer, answer)
        self.run_steps(steps)

    @rule(number=st.integers(0, 5), answer=ANSWERS, steps=STEPS)
    def export(self, number: int, answer: str, steps: int) -> None:
        here = (RequestStatus.RUNNING, RequestStatus.WAITING)
        found = [rid for rid, request in self.engine._core.requests.items() if request.status in here]
        if found:
            self.answer(self.engine.export_kv(found[number % len(found)]), answer)
        self.run_steps(steps)

    def answer(self, transfer: KVTransfer, answer: str) -> None:
        if answer == "lost":
            return
        ok = False
        if answer == "taken":
            if self.peer.weight_version < max(0, self.version):
                self.peer._store.stage(list(self.peer.named_hf_tensors()), max(0, self.version))
                self.peer._store.commit()
                self.peer._core.set_weight_version(max(0, self.version))
            ok = self.peer.import_kv(transfer)
        self.engine.finish_export(transfer.transfer_id, ok)
        self.away |= {transfer.request_id} if ok else set()
        self.peer.check_integrity()

    @rule(steps=STEPS)
    def bring_back(self, steps: int) -> None:
        """What the other engine took, which computes nothing, comes back if there is room."""
        for rid in sorted(self.away):
            transfer = self.peer.export_kv(rid)
            ok = self.engine.import_kv(transfer)
            self.peer.finish_export(transfer.transfer_id, ok)
            if ok:
                self.away.discard(rid)
        self.peer.check_integrity()
        self.observe()
        self.run_steps(steps)

    # ------------------------------------------------------------------------------------------------ weights

    @rule(mode=MODES, way=WAYS, again=st.booleans(), fault=FAULTS, at=st.integers(0, 24), steps=STEPS)
    def update(self, mode: str, way: str, again: bool, fault: str | None, at: int, steps: int) -> None:
        if self.engine.asleep:
            before = self.engine.stats()
            with pytest.raises(ValueError, match="asleep"):
                self.engine.update_weights(named(0), self.next_version, mode, way)
            assert self.engine.stats() == before
        elif fault is None:
            self.take_version(mode, way, again)
        else:
            self.fail_to_take(mode, way, fault, at)
        self.run_steps(steps)

    def fail_to_take(self, mode: str, way: str, fault: str, at: int) -> None:
        source = named(1)[:-1] if fault == "missing" else poisoned(1, at % len(named(1)))
        with pytest.raises(ValueError, match=fault):
            self.engine.update_weights(source, self.next_version, mode, way)
        if way == "streaming" and fault == "not finite" and self.engine.weight_version < 0:
            self.lose()
        assert self.engine.weight_version == self.version
        self.observe()

    @rule(pieces=st.integers(1, 9), adds=st.lists(ADDS, max_size=1), mode=MODES, whole=st.booleans(), steps=STEPS)
    def stage(self, pieces: int, adds: list[dict], mode: str, whole: bool, steps: int) -> None:
        """A version that comes in pieces, with steps in between."""
        if self.engine.asleep:
            return
        version = self.next_version
        rest = named(self.seeds.setdefault(version, version % SEEDS))
        self.engine.stage_weights(rest[:pieces], version)
        for fields in adds:
            self.add(**fields)
        self.run_steps(steps)
        for refused in (self.engine.sleep, lambda: self.engine.update_weights(rest, version + 1, mode)):
            with pytest.raises(ValueError, match="is being staged"):
                refused()
        if whole:
            self.engine.stage_weights(rest[pieces:], version)
            started = self.started()
            self.engine.commit_weights(version, mode)
            self.came_in(version, mode, started)
        else:
            self.engine.discard_weights()
        self.run_steps(steps)

    def take_version(self, mode: str, way: str, again: bool = False) -> None:
        """A whole version; `again`: the one that was lost, under its own number."""
        version = self.next_version - 1 if again and self.version < 0 and self.next_version else self.next_version
        seed = self.seeds.setdefault(version, version % SEEDS)
        started = self.started()
        self.engine.update_weights(iter(named(seed)), version, mode, way)
        self.came_in(version, mode, started)

    def started(self) -> set[str]:
        """Requests that have drawn a token and not ended."""
        return {rid for rid, drawn in self.exact.items() if drawn} - self.done.keys() - self.aborted

    def came_in(self, version: int, mode: str, started: set[str]) -> None:
        self.version, self.next_version = version, max(self.next_version, version + 1)
        core = self.engine._core
        started -= self.away
        assert (mode == "abort" and bool(started)) is not (started <= core.requests.keys())
        self.changed |= core.requests.keys() | self.away
        self.mixed |= self.away
        if mode == "keep":
            self.mixed |= core.scheduler.running.keys() | core.scheduler.parked.keys()
        elif mode == "abort":
            self.aborted |= self.asked.keys() - core.requests.keys() - self.done.keys() - self.away
        self.observe()

    def lose(self) -> None:
        self.version = -1
        assert self.engine.stats().running == self.engine.stats().cached_blocks == self.engine.stats().used_blocks == 0

    # ------------------------------------------------------------------------------------------------ memory

    @rule(weights=st.sampled_from(["keep", "keep", "drop"]), steps=STEPS)
    def sleep(self, weights: str, steps: int) -> None:
        if self.engine.asleep or self.engine.stats().offered:
            with pytest.raises(ValueError, match="asleep" if self.engine.asleep else "leases"):
                self.engine.sleep(weights)
        else:
            self.engine.sleep(weights)
            if weights == "drop":
                self.lose()
            self.observe()
        self.run_steps(steps)

    # ------------------------------------------------------------------------------------------------ what must hold

    @invariant()
    def books_add_up(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        counted = stats.free_blocks + stats.cached_blocks + stats.used_blocks + stats.leased_blocks
        assert counted == stats.total_blocks and stats.weight_version == self.version
        assert stats.asleep is self.engine.asleep
        here = stats.waiting + stats.running + stats.offered
        assert here == len(self.asked) - len(self.done.keys() | self.aborted | self.away)

    def check(self, completion: Completion) -> None:
        prompt, params = self.asked[completion.request_id]
        tokens, versions, logprobs = completion.token_ids, completion.weight_versions, completion.logprobs
        assert len(tokens) == len(versions) == len(logprobs) == len(self.exact[completion.request_id])
        assert versions == sorted(versions)
        self.check_end(completion, prompt, params)
        ids = (*prompt, *tokens)
        exact = self.exact[completion.request_id]
        for number, (token_id, version, logprob) in enumerate(zip(tokens, versions, logprobs, strict=True)):
            if exact[number]:
                row = log_softmax(ids, self.seeds[version])[len(prompt) + number - 1]
                assert abs(float(row[token_id]) - logprob) < 2e-4
                assert params.temperature or float(row.max()) - logprob < 2e-4
        if params.prompt_logprobs and tokens and completion.request_id not in self.changed:
            rows = log_softmax(ids, self.seeds[versions[0]])
            wanted = [float(rows[at - 1][prompt[at]]) for at in range(1, len(prompt))]
            assert completion.prompt_logprobs[1:] == pytest.approx(wanted, abs=2e-4)

    def check_end(self, completion: Completion, prompt: list[int], params: SamplingParams) -> None:
        """Aborted as asked; else by length, or because the pool holds no more, which an error says."""
        due, room = min(params.max_tokens, self.max_model_len - len(prompt)), self.slots - len(prompt) + 1
        if completion.request_id in self.aborted:
            assert completion.finish_reason == "abort" and len(completion.token_ids) <= due
        elif room < due or completion.finish_reason == "error":
            assert completion.finish_reason == "error" and str(self.slots) in completion.error
            assert len(completion.token_ids) == room <= due
        else:
            assert completion.finish_reason == "length" and len(completion.token_ids) == due

    def teardown(self) -> None:
        """All that was asked for comes to its end, and the pool is as at first."""
        if not hasattr(self, "engine"):
            return
        self.heal()
        for _ in range(MOST_STEPS):
            if not self.engine.has_unfinished() and not self.away:
                break
            self.bring_back(1)
        self.peer.reset_prefix_cache()
        assert self.peer.stats().free_blocks == self.peer.stats().total_blocks
        assert self.done.keys() == self.asked.keys()
        assert {rid for rid, completion in self.done.items() if completion.finish_reason == "abort"} == self.aborted
        self.engine.reset_prefix_cache()
        assert self.engine.stats().free_blocks == self.engine.stats().total_blocks
        self.engine.check_integrity()


COMMON = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(COMMON, max_examples=50, stateful_step_count=40)


class LongEngineMachine(EngineMachine):
    """The same rules, many more lives."""


TestLongEngineMachine = pytest.mark.slow(LongEngineMachine.TestCase)
TestLongEngineMachine.settings = settings(COMMON, max_examples=1500, stateful_step_count=60)
