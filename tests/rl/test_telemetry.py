"""What engine steps and a batch become for the cluster scheduler."""

from __future__ import annotations

import pytest

from pearl.protocol import Tokens, TokenUpdate
from pearl.rl.telemetry import TelemetryMeter
from pearl.rl.types import Group, Trajectory, Turn


def step(batch: int, computed: int, seconds: float, context: int = 100) -> Tokens:
    one = TokenUpdate(request_id="r", token_ids=[1], logprobs=[0.0], weight_versions=[0])
    return Tokens(
        rank=1, updates=[one] * batch, seconds=seconds, waiting=0, running=batch, free_blocks=1, computed=computed,
        context=context * batch,
    )  # fmt: skip


def trajectory(prompt: int, turns: list[tuple[int, int]]) -> Trajectory:
    """`turns`: (sampled, given afterwards)."""
    made = Trajectory(trajectory_id="t", group_id=0, env_seed=0)
    made.token_ids, made.loss_mask = [0] * prompt, [0] * prompt
    for sampled, given in turns:
        made.token_ids += [0] * (sampled + given)
        made.loss_mask += [1] * sampled + [0] * given
        made.turns.append(Turn(text="", num_sampled=sampled))
    return made


def group(*members: Trajectory) -> Group:
    made = Group(group_id=0, env_seed=0)
    made.trajectories.extend(members)
    return made


def test_steps_are_gathered_by_size_and_prompts_pay_for_what_decoding_does_not_explain() -> None:
    meter = TelemetryMeter()
    for batch in (4, 32):
        for _ in range(10):
            meter.stepped(step(batch, batch, 0.002 + 0.0001 * batch))
    meter.stepped(step(32, 32 + 400, 0.0052 + 0.040))
    meter.stepped(step(8, 0, 9.0))  # nobody counted
    seen = meter.finish([], 0.0, prompt_tokens=0, cached_tokens=0, trajectories=0)
    assert [(one.batch, one.context, one.count) for one in seen.decode] == [(4, 100, 10), (32, 100, 10)]
    assert [one.seconds for one in seen.decode] == pytest.approx([0.0024, 0.0052])
    [prompt] = seen.prefill
    assert (prompt.new, prompt.count) == (400, 1) and prompt.seconds == pytest.approx(0.042, rel=0.02)
    assert meter.finish([], 0.0, prompt_tokens=0, cached_tokens=0, trajectories=0).decode == ()


def test_a_batch_is_described_by_its_means() -> None:
    meter = TelemetryMeter()
    batch = [group(trajectory(10, [(4, 6)]), trajectory(14, [(4, 6), (4, 6), (4, 0)]))]
    seen = meter.finish(batch, 8.0, prompt_tokens=10 + 14 + 24 + 34, cached_tokens=19, trajectories=2)
    assert (seen.trajectories, seen.turns, seen.generated, seen.first_prompt, seen.longest) == (2, 2.0, 4.0, 12.0, 38.0)
    assert seen.appended == pytest.approx(9.0)  # what follows the last turn too: the environment said it
    assert seen.env_s == 2.0
    assert seen.miss_share == pytest.approx(1 - 19 / (82 - 2 * 21))
    assert seen.turn_quantiles[-1] == 1.5
    assert meter.finish(batch, 9.0, prompt_tokens=0, cached_tokens=0, trajectories=0).env_s == pytest.approx(1.0)
