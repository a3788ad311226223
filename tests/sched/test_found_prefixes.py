"""What turns find cached of their context, in tokens: by hand, and in a simulated run."""

from __future__ import annotations

import random

import pytest
from sim_jobs import plans

from pearl.protocol import Role
from pearl.sched.found_prefixes import FoundPrefixes
from pearl.sched.sim.episode import Episode
from pearl.sched.sim.recorder import Recorder


def test_a_share_of_tokens_is_missed_not_of_turns() -> None:
    """Of three turns that had 100, 900 and 1,000 tokens the second finds a third: 600 of 2,000 tokens are computed again, while
    of the turns either one or none has missed."""
    found = FoundPrefixes()
    for known, cached in ((100, 100), (900, 300), (1000, 1000)):
        found.add(known=known, generated=50, cached=cached, apart=False)
    assert found.take() == pytest.approx(600 / 2000)
    assert found.take() is None


def test_what_was_generated_elsewhere_is_not_missed() -> None:
    found = FoundPrefixes()
    found.add(known=100, generated=40, cached=60, apart=True)
    assert found.take() == 0.0
    found.add(known=100, generated=40, cached=60, apart=False)
    assert found.take() == pytest.approx(0.4)
    found.add(known=100, generated=40, cached=30, apart=True)
    found.add(known=40, generated=40, cached=0, apart=True)
    assert found.take() == pytest.approx(0.5), "of a turn that could find nothing nothing is said"


def test_more_than_there_was_is_not_found() -> None:
    """A first prompt that siblings have cached, or a worker that says what cannot be, does not make up for what others miss."""
    found = FoundPrefixes()
    found.add(known=100, generated=40, cached=900, apart=True)
    found.add(known=100, generated=40, cached=-7, apart=True)
    assert found.take() == pytest.approx(0.5)


def test_simulated_turns_are_counted_so() -> None:
    recorder, by_hand = Recorder(), FoundPrefixes()
    for plan in (next(plans(seed, turns=9)) for seed in range(4)):
        episode = Episode(plan, random.Random(0))
        while not episode.is_over:
            role, cached = (Role.PREFILL, Role.DECODE, Role.MIXED)[episode.turn % 3], episode.known // 2
            recorder.placed(role, episode)
            if episode.turn:
                last = plan.turns[episode.turn - 1].generated
                by_hand.add(known=episode.known, generated=last, cached=cached, apart=role is Role.PREFILL)
            episode.draw(episode.current.generated, 0)
            recorder.request_over(cached, episode)
            episode.end_turn()
            if not episode.is_over:
                episode.answer(0.0)
    expected = by_hand.take()
    assert expected is not None and 0.1 < expected < 0.6
    assert recorder.telemetry([plan], 0.0).miss_share == pytest.approx(expected)
