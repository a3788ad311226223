"""An engine without a device: the core's decisions, steps that last as long as they cost, tokens that depend on seeds alone."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest

from pearl.clock import VirtualClock
from pearl.config import EngineConfig
from pearl.engine.emulated import EmulatedEngine, Speech, turn_tokens
from pearl.engine.request import RequestUpdate, SchedulerOutput
from pearl.protocol import Role, SamplingParams

END = 99
SPEECH = Speech(alphabet=tuple(range(10, 20)), mean_tokens=12.0)


class Costs:
    """A millisecond per token, 5 of host time, 50 per token on its way, a second per change."""

    def step_s(self, output: SchedulerOutput) -> float:
        return 0.005 + 0.001 * output.num_tokens

    def host_s(self) -> float:
        return 0.005

    def transfer_s(self, tokens: int) -> float:
        return 0.05 * tokens

    def change_s(self, kind: str) -> float:
        return {"switch": 1.0, "borrow": 6.0, "give_back": 3.0}[kind]


def make(role: Role = Role.MIXED, clock: VirtualClock | None = None, **settings: object) -> EmulatedEngine:
    clock = clock or VirtualClock()
    config = EngineConfig(**{"block_size": 4, "num_blocks": 64, "max_batch_tokens": 32, "role": role} | settings)  # type: ignore[arg-type]
    engine = EmulatedEngine(
        config, costs=Costs(), speech=SPEECH, max_model_len=200, vocab_size=100, clock=clock, pause=clock.advance
    )
    engine.take_version(0)
    return engine


def params(seed: int, most: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=most, seed=seed, stop_token_ids=[END])


def run(engine: EmulatedEngine) -> dict[str, list[int]]:
    """What each request said; and the books hold after each step."""
    said: dict[str, list[int]] = {}
    while engine.has_unfinished():
        take(engine.step_updates(), said)
        engine.check_integrity()
    return said


def take(updates: list[RequestUpdate], said: dict[str, list[int]]) -> None:
    for update in updates:
        said.setdefault(update.request_id, []).extend(update.token_ids)


def test_requests_end_by_themselves_and_tokens_depend_on_the_seed_alone() -> None:
    together, alone = make(), {}
    for seed in range(20):
        together.add_request(list(range(1, 9)), params(seed), request_id=f"r{seed}")
        one = make()
        one.add_request(list(range(1, 9)), params(seed), request_id=f"r{seed}")
        alone |= run(one)
    said = run(together)
    assert said == alone
    for seed in range(20):
        tokens = said[f"r{seed}"]
        assert tokens[-1] == END and len(tokens) == turn_tokens(SPEECH, seed)
        assert set(tokens[:-1]) <= set(SPEECH.alphabet)


def test_a_limit_on_tokens_comes_first() -> None:
    engine = make()
    engine.add_request([1, 2], params(3, most=2), request_id="r")
    assert len(run(engine)["r"]) == 2 < turn_tokens(SPEECH, 3)


def test_turns_are_as_long_as_asked_for_and_say_all_kinds_of_things() -> None:
    lengths = [turn_tokens(SPEECH, seed) for seed in range(4000)]
    assert fmean(lengths) == pytest.approx(12, rel=0.03) and min(lengths) >= 1 and max(lengths) > 30
    engine = make(num_blocks=400)
    for seed in range(200):
        engine.add_request([1], params(seed), request_id=str(seed))
    counts = Counter(token for tokens in run(engine).values() for token in tokens[:-1])
    assert set(counts) == set(SPEECH.alphabet) and max(counts.values()) < 1.6 * min(counts.values())


def test_a_step_lasts_as_long_as_it_costs_and_the_host_s_time_counts() -> None:
    clock = VirtualClock()
    engine = make(clock=clock)
    engine.add_request(list(range(1, 21)), params(1), request_id="r")
    engine.step_updates()
    assert clock.now() == pytest.approx(0.005 + 0.020 - 0.005)  # nothing ran before: the host's share had passed already
    clock.advance(0.003)  # the host prepares the next step
    before = clock.now()
    engine.step_updates()
    assert clock.now() - before == pytest.approx(0.006 - 0.003)
    clock.advance(1.0)  # nobody asked for a step: the device idled
    before = clock.now()
    engine.step_updates()
    assert clock.now() - before == pytest.approx(0.001)


def test_nothing_is_served_before_a_version_and_versions_only_rise() -> None:
    clock = VirtualClock()
    engine = EmulatedEngine(
        EngineConfig(num_blocks=8), costs=Costs(), speech=SPEECH, max_model_len=64, vocab_size=100, clock=clock,
        pause=clock.advance,
    )  # fmt: skip
    engine.add_request([1], params(1), request_id="r")
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step_updates()
    engine.take_version(3)
    assert engine.step_updates()[0].weight_versions == (3,)
    with pytest.raises(ValueError, match="greater than 3"):
        engine.take_version(3)
    with pytest.raises(ValueError, match="num_blocks"):
        EmulatedEngine(EngineConfig(), costs=Costs(), speech=SPEECH, max_model_len=64, vocab_size=100)


def test_a_version_during_a_turn_is_told_per_token() -> None:
    engine = make()
    engine.add_request([1, 2, 3], params(5), request_id="r")
    first = engine.step_updates()[0].weight_versions
    engine.take_version(1)
    assert (first, engine.step_updates()[0].weight_versions) == ((0,), (1,))


def test_asleep_nothing_runs_and_awake_it_goes_on() -> None:
    clock = VirtualClock()
    engine, other = make(clock=clock), make()
    for one in (engine, other):
        one.add_request([1, 2, 3], params(7), request_id="r")
    said: dict[str, list[int]] = {}
    take(engine.step_updates(), said)
    began = clock.now()
    engine.sleep()
    assert clock.now() - began == 3.0 and not engine.step_updates()
    engine.wake()
    for name, tokens in run(engine).items():
        said[name].extend(tokens)
    assert said == run(other)
    with pytest.raises(ValueError, match="is awake"):
        engine.wake()


def handed_over(source: EmulatedEngine, target: EmulatedEngine) -> tuple[list[int], list[str]]:
    """Steps both until nothing is left; what was said, and where it went."""
    said: dict[str, list[int]] = {}
    moved = []
    while source.has_unfinished() or target.has_unfinished():
        take(source.step_updates(), said)
        for transfer in source.take_handoffs():
            taken = target.import_kv(transfer)
            source.finish_export(transfer.transfer_id, taken, arrived=not target.is_arriving(transfer.transfer_id))
            moved.append(transfer.transfer_id)
        take(target.step_updates(), said)
        for engine in (source, target):
            engine.check_integrity()
        for transfer_id in moved:
            if not target.is_arriving(transfer_id):
                source.finish_export(transfer_id, True)
    return said["r"], moved


def test_a_prefill_engine_hands_over_and_the_tokens_stay_the_same() -> None:
    clock = VirtualClock()
    prefill, decode, mixed = make(Role.PREFILL, clock), make(Role.DECODE, clock), make()
    for engine in (prefill, mixed):
        engine.add_request(list(range(1, 31)), params(11), request_id="r")
    said, moved = handed_over(prefill, decode)
    assert said == run(mixed)["r"] and len(moved) == 1
    assert clock.now() > 0.05 * 30  # its KV took its time
    assert prefill.stats().free_blocks + prefill.stats().cached_blocks == 64


def test_a_change_of_role_hands_running_requests_over() -> None:
    clock = VirtualClock()
    source, target, mixed = make(Role.MIXED, clock), make(Role.DECODE, clock), make()
    for engine in (source, mixed):
        engine.add_request(list(range(1, 11)), params(13), request_id="r")
    said: dict[str, list[int]] = {}
    take(source.step_updates(), said)
    report = source.switch_role(Role.PREFILL)
    assert report.moved == 1 and report.seconds == 1.0
    rest, moved = handed_over(source, target)
    assert said["r"] + rest == run(mixed)["r"] and len(moved) == 1


def test_what_has_no_room_elsewhere_goes_on_at_home() -> None:
    clock = VirtualClock()
    prefill, full = make(Role.PREFILL, clock), make(Role.DECODE, clock, num_blocks=2)
    prefill.add_request(list(range(1, 11)), params(17), request_id="r")
    said: dict[str, list[int]] = {}
    while not (offers := prefill.take_handoffs()):
        take(prefill.step_updates(), said)
    with pytest.raises(ValueError, match="KV pool"):
        full.import_kv(offers[0])
    prefill.finish_export(offers[0].transfer_id, False)
    for name, tokens in run(prefill).items():
        said[name].extend(tokens)
    assert len(said["r"]) == turn_tokens(SPEECH, 17)
