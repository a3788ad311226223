"""What an external worker can have said: whatever no worker says is named, and what each may say is not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pearl.protocol import (
    HandedOff,
    KVEndpoint,
    KVLayout,
    KVTransfer,
    Leaving,
    Pong,
    Ready,
    Report,
    RequestState,
    SamplingParams,
    StepSums,
    Tokens,
    TokenUpdate,
)
from pearl.rl.plausible import FAILED_SESSIONS, MOST, MOST_STEPS, TRIES, Failures, implausible
from pearl.rl.telemetry import TelemetryMeter

NUMBERS: dict[str, Any] = {"running": 1, "waiting": 0, "kv_used": 3, "kv_total": 9, "weight_version": 4}


SUMS = StepSums(prefill=False, count=1, size=-1, context=0.0, decodes=0, prompts=1, seconds=0.1)


def update(**fields: Any) -> TokenUpdate:
    words: dict[str, Any] = {"token_ids": [1, 9], "logprobs": [0.0, -3.5], "weight_versions": [3, 4]}
    return TokenUpdate(**({"request_id": "7-0/0"} | words | fields))


def tokens(*updates: TokenUpdate, **fields: Any) -> Tokens:
    words: dict[str, Any] = {"seconds": 0.1, "waiting": 0, "running": 1, "free_blocks": 2}
    return Tokens(rank=5, updates=list(updates), **(words | fields))


def verdict(event: Any) -> str:
    return implausible(event, vocab_size=10, newest=4, max_model_len=64)


@pytest.mark.parametrize(
    "event",
    [
        tokens(update()), tokens(update(logprobs=[1e-6, -60.0])), tokens(), Report(rank=5, epoch=1, **NUMBERS),
        Report(rank=5, epoch=1, **(NUMBERS | {"weight_version": -1})), Ready(rank=5, max_model_len=64),
        Leaving(rank=5, notice_s=0.0), Pong(rank=5, sequence=-1),
    ],
)  # fmt: skip
def test_what_workers_say_is_believed(event: Any) -> None:
    assert verdict(event) == ""


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (tokens(update(token_ids=[1])), "1 tokens came with 2 log-probs"),
        (tokens(update(weight_versions=[3])), "and 1 versions"),
        (tokens(update(token_ids=[1, 10])), r"in 0\.\.9"),
        (tokens(update(token_ids=[-1, 1])), r"in 0\.\.9"),
        (tokens(update(logprobs=[0.0, 0.5])), "at most 0"),
        (tokens(update(logprobs=[0.0, -math.inf])), "finite"),
        (tokens(update(logprobs=[0.0, math.nan])), "finite"),
        (tokens(update(logprobs=[0.0, -1e30])), "log-probs"),
        (tokens(update(weight_versions=[3, 5])), r"weight_version=5: there are none but 0\.\.4"),
        (tokens(update(weight_versions=[-1, 4])), "no version"),
        (tokens(update(num_cached_tokens=-1)), "num_cached_tokens=-1"),
        (tokens(update(), seconds=math.nan), "finite"),
        (tokens(update(), running=-1), "at least 0"),
        (tokens(update(), step_s=math.inf), "finite"),
        (tokens(update(), steps=[SUMS]), "at least 0"),
        (tokens(update(), seconds=1e300), r"at most 1e\+15"),
        (tokens(update(), steps=[msgspec.structs.replace(SUMS, size=2**64 - 1)]), r"at most 1e\+15"),
        (tokens(update(), steps=[msgspec.structs.replace(SUMS, size=1, count=MOST_STEPS + 1)]), "1000001 steps"),
        (Report(rank=5, epoch=1, **(NUMBERS | {"kv_total": -9})), "at least 0"),
        (Report(rank=5, epoch=1, **(NUMBERS | {"weight_version": 5})), "weight_version=5"),
        (Leaving(rank=5, notice_s=math.inf), "finite"),
        (Ready(rank=5, max_model_len=63), "may have 64 tokens"),
    ],
)
def test_what_cannot_be_is_named(event: Any, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        assert not verdict(event), verdict(event)


def offer(**fields: Any) -> HandedOff:
    """A prompt of three tokens with its first sampled one."""
    state: dict[str, Any] = {
        "request_id": "7-0/0", "name": "7-0/0", "index": 0, "params": SamplingParams(max_tokens=5), "token_ids": [1, 2, 3, 4],
        "num_prompt_tokens": 3, "max_tokens": 5, "seed": 1, "stop_token_ids": [], "eos_token_ids": [], "cache_salt": None,
        "session_id": None, "cacheable": True, "streaming": True, "num_cached_tokens": 0, "num_preemptions": 0,
        "logprobs": [-0.5], "top_logprobs": [], "prompt_logprobs": [], "weight_versions": [4],
    }  # fmt: skip
    layout = KVLayout(dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=8, order="plain")
    transfer: dict[str, Any] = {
        "transfer_id": "t1", "request_id": "7-0/0", "state": RequestState(**state), "blocks": [2], "lease_word": 1,
        "source": KVEndpoint(worker="w", host="h", pid=1, num_blocks=9, addresses={}), "num_written_tokens": 3,
        "layout": layout, "weight_version": 4, "epoch": 0, "deadline": 30.0,
    }  # fmt: skip
    return HandedOff(rank=5, transfers=[KVTransfer(**(transfer | fields))])


def test_what_cannot_be_offered_is_named() -> None:
    """Whoever takes it in belongs to the job: it must not be what fails."""
    assert verdict(offer()) == ""
    assert "KV of 4 of its 4 tokens" in verdict(offer(num_written_tokens=4))
    assert "in 1 blocks of 0" in verdict(offer(layout=msgspec.structs.replace(offer().transfers[0].layout, block_size=0)))
    assert "weight_version=5: there are none but" in verdict(offer(weight_version=5))
    assert "is one of request '8-0/0'" in verdict(offer(request_id="8-0/0"))


def test_what_is_believed_can_be_summed_up_and_learned_from() -> None:
    """However often the largest numbers are said: one worker's must not end the job."""
    meter, sums = TelemetryMeter(), msgspec.structs.replace(SUMS, size=1, decodes=3)
    largest = msgspec.structs.replace(sums, count=MOST_STEPS, size=int(MOST), context=MOST, decodes=int(MOST), seconds=MOST)
    mixed = msgspec.structs.replace(sums, prefill=True, size=64, seconds=1.0)
    for steps in (largest, largest, largest, sums, mixed):
        said = tokens(update(), seconds=MOST, steps=[steps])
        assert verdict(said) == ""
        meter.stepped(said, 0.0)
    meter.playing(0, 0.0)
    meter.playing(4, 1.0)
    learned = meter.finish([], 0.0, miss_share=None, trajectories=0, local_tokens=0, now=1.0)
    assert len(learned.decode) == 2 and all(math.isfinite(one.seconds) for one in (*learned.decode, *learned.prefill))


def failed(*sessions: str, rank: int = 5) -> Tokens:
    updates = [update(request_id=f"{name}/0", token_ids=[], finish_reason="error", error="no") for name in sessions]
    return Tokens(rank=rank, updates=updates, seconds=0.1, waiting=0, running=0, free_blocks=0)


def test_a_request_that_fails_is_asked_again_and_is_to_blame_when_it_fails_for_ever() -> None:
    failures = Failures()
    for _ in range(TRIES - 1):
        event, why = failures.weigh(failed("a"))
        assert [one.finish_reason for one in event.updates] == ["abort"] and event.updates[0].error is None and not why
    event, why = failures.weigh(failed("a"))
    assert [one.finish_reason for one in event.updates] == ["error"] and not why and failures.count == TRIES


def test_who_fails_requests_of_many_sessions_is_to_go_unless_there_were_versions_between() -> None:
    failures = Failures()
    assert not failures.weigh(failed("a", "b"))[1]
    assert not failures.weigh(failed("c", rank=6))[1]  # another's
    assert f"{FAILED_SESSIONS} requests failed there" in failures.weigh(failed("c"))[1]
    failures.forget(5)
    assert not failures.weigh(failed("a", "b"))[1]
    failures.forget()
    assert not failures.weigh(failed("c"))[1]
    assert failures.weigh(tokens(update())) == (tokens(update()), "")
