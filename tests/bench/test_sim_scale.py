"""The cluster on which scale is measured: its roles and sessions, and timings of all that is in the table."""

from __future__ import annotations

import json

import pytest

from bench import sim_scale
from pearl.protocol import Role


def test_a_third_computes_prompts() -> None:
    router, sessions = sim_scale.router_of(9)
    roles = [load.role for load in router.loads.values()]
    assert roles.count(Role.PREFILL) == 3 and roles.count(Role.DECODE) == 6
    assert len(set(sessions)) == 9 * sim_scale.PER_WORKER


def test_the_router_is_timed_at_any_size() -> None:
    for workers in (3, 16):
        assert all(value > 0 for value in sim_scale.router_us(workers))


def test_a_table_without_512_workers_claims_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sim_scale", "--workers", "4", "--simulate", "0", "--json"])
    sim_scale.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"] is False and last["value"] is None and "simulate_s" not in last["cases"]["4"]
