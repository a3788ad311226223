"""What engine steps and a batch become for the cluster scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pearl.kv_transfer import RequestState
from pearl.protocol import HandedOff, KVEndpoint, KVLayout, KVTransfer, SamplingParams, Tokens
from pearl.rl import telemetry
from pearl.rl.telemetry import TelemetryMeter
from pearl.rl.token_report import TokenReport
from pearl.rl.types import Group, Trajectory, Turn
from pearl.sched.profile import StepTelemetry


class Member:
    """A worker, as it tells of its steps: each at once, or the sums of all of them with `tell`."""

    def __init__(self, rank: int = 1) -> None:
        self.report, self._rank = TokenReport(0.0), rank

    def step(self, names: Sequence[str], computed: int, seconds: float, finish: str | None = None) -> Tokens:
        """A token for each of these requests, which have 100 tokens of context."""
        self.add(names, computed, seconds, finish)
        return self.tell(seconds)

    def add(self, names: Sequence[str], computed: int, seconds: float, finish: str | None = None) -> None:
        end = SimpleNamespace(finish_reason=finish, error=None, num_cached_tokens=0) if finish else None
        said = {"token_ids": (1,), "logprobs": (0.0,), "weight_versions": (0,), "completion": end}
        batch, prompts = self.report.add([SimpleNamespace(request_id=name, **said) for name in names])
        if computed:
            self.report.add_step(computed=computed, batch=batch, prompts=prompts, context=100.0, seconds=seconds)

    def tell(self, step_s: float = 0.0) -> Tokens:
        updates, steps = self.report.take(0.0)
        return Tokens(
            rank=self._rank, updates=updates, seconds=step_s, waiting=0, running=1, free_blocks=1, step_s=step_s, steps=steps
        )


def requests(count: int, of: str = "r") -> list[str]:
    return [f"{of}{number}" for number in range(count)]


def learn(
    meter: TelemetryMeter, batch: Sequence[Group] = (), env_s: float = 0.0, now: float = 0.0, **given: Any
) -> StepTelemetry:
    nothing: dict[str, Any] = {"miss_share": None, "trajectories": 0, "local_tokens": 0}
    return meter.finish(batch, env_s, now=now, **(nothing | given))


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


@pytest.mark.parametrize("together", [False, True])
def test_prompts_pay_for_what_decoding_does_not_explain_and_are_told_from_it(together: bool) -> None:
    meter, member = TelemetryMeter(), Member()
    steps = [(requests(32), 32 * 50, 0.030)]  # 32 prompts of 50 tokens, nothing else
    steps += [(requests(batch), batch, 0.002 + 0.0001 * batch) for batch in (4, 32) for _ in range(10)]
    steps += [([*requests(32), "late"], 32 + 400, 0.0052 + 0.040)]  # one more prompt beside 32 decodes
    steps += [(requests(8), 0, 9.0)]  # nobody counted
    for one in steps:
        member.add(*one)
        if not together:
            meter.stepped(member.tell(), 0.0)
    meter.stepped(member.tell(), 0.0)
    seen = learn(meter)
    assert [(one.batch, one.context, one.count) for one in seen.decode] == [(4, 100, 10), (32, 100, 10)]
    assert [one.seconds for one in seen.decode] == pytest.approx([0.0024, 0.0052])
    alone, beside = sorted(seen.prefill, key=lambda one: one.beside)
    assert (alone.new, alone.count, alone.beside) == (50, 32, 0) and alone.seconds == pytest.approx(0.030 / 32)
    assert (beside.new, beside.count, beside.beside) == (400, 1, 32) and beside.seconds == pytest.approx(0.040)
    assert learn(meter).decode == ()


def test_a_request_is_new_once_also_across_steps_and_again_after_its_end() -> None:
    meter, member = TelemetryMeter(), Member()
    meter.stepped(member.step(["a"], 100, 0.01), 0.0)
    learn(meter)
    meter.stepped(member.step(["a"], 1, 0.002), 0.0)
    meter.stepped(member.step(["a"], 1, 0.002, "stop"), 0.0)
    meter.stepped(member.step(["a"], 40, 0.005), 0.0)
    seen = learn(meter)
    assert [one.count for one in seen.decode] == [2] and [one.new for one in seen.prefill] == [40]


def offer(name: str, prompt: int, tokens: int) -> KVTransfer:
    state = RequestState(
        request_id=name, name=name, index=0, params=SamplingParams(), token_ids=[1] * tokens, num_prompt_tokens=prompt,
        max_tokens=9, seed=0, stop_token_ids=[], eos_token_ids=[], logprobs=[], top_logprobs=[], prompt_logprobs=[],
        weight_versions=[], num_cached_tokens=0, num_preemptions=0, cache_salt=None, session_id=None, cacheable=True,
        streaming=False,
    )  # fmt: skip
    layout = KVLayout(dtype="x", block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, order="none")
    source = KVEndpoint(worker="w", host="h", pid=1, num_blocks=1, addresses={})
    return KVTransfer(
        transfer_id=f"t{name}", request_id=name, state=state, source=source, blocks=[], lease_word=0,
        num_written_tokens=tokens - 1, layout=layout, weight_version=0, epoch=0, deadline=9.0,
    )  # fmt: skip


def test_a_hand_over_lasts_from_its_offer_to_the_next_token_without_the_step_that_made_it() -> None:
    meter = TelemetryMeter()
    offers = [offer("fresh", 500, 501), offer("moved", 500, 601), offer("kept", 9, 10)]
    meter.handed_off(HandedOff(rank=1, transfers=offers), 1.0)
    meter.stepped(Member(1).step(["kept"], 1, 0.01), 1.01)  # nobody took it: its source goes on
    meter.stepped(Member(2).step(["fresh"], 1, 0.01), 1.05)
    meter.stepped(Member(3).step(["moved"], 1, 0.01), 1.21)
    meter.stepped(Member(3).step(["moved"], 1, 0.01), 1.90)
    batch = [group(trajectory(10, [(4, 6), (4, 0)]))]
    seen = learn(meter, batch, trajectories=1)
    turn, whole = seen.transfer
    assert (turn.tokens, turn.count) == ((6 + 10) / 2, 1) and turn.seconds == pytest.approx(0.04), "what a turn adds"
    assert (whole.tokens, whole.count) == (600, 1) and whole.seconds == pytest.approx(0.20)
    assert learn(meter, batch).transfer == ()


def test_offers_that_nobody_goes_on_with_take_no_more_room_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that offers what nobody knows: the oldest offers are forgotten, and the true one that came last is measured."""
    monkeypatch.setattr(telemetry, "MOST_OFFERS", 3)
    meter = TelemetryMeter()
    meter.handed_off(HandedOff(rank=1, transfers=[offer("early", 500, 501)]), 0.9)
    for number in range(20):
        meter.handed_off(HandedOff(rank=1, transfers=[offer(f"unknown{number}", 500, 501)]), 1.0)
    meter.handed_off(HandedOff(rank=1, transfers=[offer("true", 500, 601)]), 1.0)
    assert len(meter._offers) == 3
    for name in ("early", "true"):
        meter.stepped(Member(2).step([name], 1, 0.01), 1.25)
    [moved] = learn(meter, [group(trajectory(10, [(4, 6), (4, 0)]))], trajectories=1).transfer
    assert (moved.tokens, moved.count) == (600, 1) and moved.seconds == pytest.approx(0.24)


def test_trajectories_under_way_are_averaged_over_time() -> None:
    meter = TelemetryMeter()
    batch = [group(trajectory(10, [(4, 6), (4, 0)]))]
    for count, now in ((0, 0.0), (8, 1.0), (2, 3.0)):
        meter.playing(count, now)
    assert learn(meter, batch).in_flight == pytest.approx((8 * 1 + 2 * 2) / 3)
    assert learn(meter, batch).in_flight is None


def test_the_share_of_trajectories_that_decode_is_that_of_their_time() -> None:
    """Eight trajectories for 10 s. Steps of four decodes take 6 s in all, one that computes a prompt beside two decodes 2 s."""
    meter, member = TelemetryMeter(), Member()
    batch = [group(trajectory(10, [(4, 6), (4, 0)]))]
    meter.stepped(member.step(requests(4), 4 * 50, 0.0), 0.0)
    learn(meter, batch)
    meter.playing(0, 0.0)
    for _ in range(3):
        meter.stepped(member.step(requests(4), 4, 2.0), 4.0)
    meter.stepped(member.step([*requests(2), "new"], 2 + 300, 2.0), 9.0)
    meter.playing(8, 10.0)
    assert learn(meter, batch).decode_share == pytest.approx((4 * 6 + 2 * 2) / (8 * 10))
    assert learn(meter, batch).decode_share is None, "nothing was measured since"


def test_short_appends_are_told_from_long_ones() -> None:
    batch = [group(trajectory(10, [(4, 6), (4, 7), (2, 3), (1, 0)]))]
    seen = learn(TelemetryMeter(), batch, local_tokens=6)
    assert seen.local_share == pytest.approx(2 / 4) and seen.local_appended == pytest.approx((6 + 3) / 2)


def test_a_batch_is_described_by_its_means() -> None:
    meter = TelemetryMeter()
    batch = [group(trajectory(10, [(4, 6)]), trajectory(14, [(4, 6), (4, 6), (4, 0)]))]
    seen = learn(meter, batch, 8.0, miss_share=0.25, trajectories=2)
    assert (seen.trajectories, seen.turns, seen.generated, seen.first_prompt, seen.longest) == (2, 2.0, 4.0, 12.0, 38.0)
    assert seen.appended == pytest.approx(18 / 4)  # of a turn; what follows the last one too: the environment said it
    assert seen.env_s == 2.0
    assert seen.miss_share == 0.25
    assert seen.turn_quantiles[-1] == 1.5
    assert learn(meter, batch, 9.0).env_s == pytest.approx(1.0)
