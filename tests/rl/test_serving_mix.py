"""Sessions with real engines: samples hold what the engines computed, whatever was cached or handed over."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pearl.config import EngineConfig, ModelOptions
from pearl.engine.engine import Engine
from pearl.protocol import Role
from pearl.rl.measure_costs import fresh_model
from pearl.rl.serving_mix import WARM_UP_STEPS, Conversations, Mix

CONFIG = EngineConfig(
    model=fresh_model(ModelOptions()),
    dtype="float32",
    load_format="dummy",
    num_blocks=256,
    max_num_seqs=16,
    max_batch_tokens=256,
    max_model_len=200,
)
MIX = Mix(first=(8, 60), appended=(1, 20), generated=(2, 10), pause=(0, 5), longest=150)


def engine(role: Role = Role.MIXED) -> Engine:
    return Engine(replace(CONFIG, role=role), text=False)


def played(source: Engine, decoder: Engine | None = None, steps: int = 40, count: int = 6) -> Conversations:
    timer, rng = itertools.count(), np.random.default_rng(3)
    conversations = Conversations(source, count, MIX, lambda: float(next(timer)), rng, decoder=decoder)
    for _ in range(WARM_UP_STEPS):
        conversations.step()
    before = source.stats().num_computed_tokens, decoder and decoder.stats().num_computed_tokens
    for _ in range(steps):
        conversations.step()
    after = source.stats().num_computed_tokens, decoder and decoder.stats().num_computed_tokens
    conversations.close()
    samples = conversations.samples()
    assert sum(one.batch + one.new for one in samples[0]) == after[0] - before[0]
    if decoder is not None:
        assert sum(one.batch + one.new for one in samples[1]) == after[1] - before[1]
    return conversations


def test_samples_hold_every_token_that_was_computed() -> None:
    with_prompts, decoding = 0, 0
    one = engine()
    for sample in played(one).samples()[0]:
        assert sample.seconds == 1.0, "begun and ended once"
        assert (sample.new > 0) == (sample.prompts > 0) and sample.pairs >= sample.new**2 / max(1, 2 * sample.prompts) - 1e-6
        assert sample.context >= 8 * sample.batch and sample.given == sample.taken == 0
        with_prompts += sample.prompts > 0
        decoding += sample.batch > 0
    assert with_prompts > 5 and decoding > 20, "requests came and went"
    one.check_integrity()
    assert not one.has_unfinished()
    one.close()


def test_hand_overs_are_counted_at_both_ends() -> None:
    source, target = engine(Role.PREFILL), engine(Role.DECODE)
    conversations = played(source, target)
    given, taken = conversations.samples()
    assert sum(one.given for one in given) == sum(one.taken for one in taken) > 5
    assert all(one.batch == 0 for one in given if one.new == 0) and all(one.prompts == 0 for one in taken)
    came, written = sum(one.came for one in taken), sum(one.new for one in given)
    assert 0 < came <= written + 16 * sum(one.given for one in given), "what the target had is not sent again"
    assert not conversations.waited, "engines of one process copy at once"
    for one in (source, target):
        one.check_integrity()
        assert not one.has_unfinished()
        one.close()


def test_prompts_of_one_step_fit_into_it() -> None:
    small = Engine(replace(CONFIG, max_batch_tokens=64), text=False)
    timer = itertools.count()
    conversations = Conversations(small, 12, MIX, lambda: float(next(timer)), np.random.default_rng(0))
    for _ in range(60):
        conversations.step()
    conversations.close()
    assert max(one.new + one.batch for one in conversations.samples()[0]) <= 64
    small.close()


def test_an_engine_that_takes_nothing_in_is_named() -> None:
    source, target = engine(Role.PREFILL), engine(Role.DECODE)
    target.sleep()
    conversations = Conversations(source, 2, MIX, lambda: 0.0, np.random.default_rng(0), decoder=target)
    with pytest.raises(RuntimeError, match="an engine with room did not take it in"):
        for _ in range(20):
            conversations.step()
    source.close()
    target.close()
