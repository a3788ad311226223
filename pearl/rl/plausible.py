"""What an external worker can have said: pure checks of its words, before anything is made of them.

Owns the bounds, and how often a worker may fail requests. Nobody outside the job is trusted: what no engine of this model says
would end the trainers, or mislead the scheduler, for all. Invariant: a worker whose words are impossible is let go, with none
of them counted; what one costs that only says that requests fail is at most `FAILED_SESSIONS` - 1 trajectories per version.
Torch-free.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pearl.kv_transfer import why_impossible
from pearl.protocol import Event, HandedOff, Leaving, Ready, Report, Tokens
from pearl.rl.rollout import trajectory_of

LOGPROB_SLACK = 1e-3
"""Above 0, by the arithmetic."""
LOWEST_LOGPROB = -1e4
"""Of a token that was drawn; the ratio of a policy to less than this is no number any more."""
MOST = 1e15
"""No number of a worker is larger. Sums of larger ones are none that anything can be learned from, or none at all."""
MOST_STEPS = 1_000_000
"""No message is about more engine steps."""
FAILED_SESSIONS = 3
"""So many trajectories of one version whose requests a worker could not serve are its own fault."""
TRIES = 3
"""So often a request that failed at one worker is asked again before the failure is taken to be the request's own."""


def implausible(event: Event, *, vocab_size: int, newest: int, max_model_len: int) -> str:
    """Why no worker can say this, "" if one can. `newest`: the newest version that anybody can have; `max_model_len`: how long
    the job's requests may be."""
    match event:
        case Tokens():
            load = event.waiting, event.running, event.free_blocks
            steps = (value for sums in event.steps for value in msgspec.structs.astuple(sums))
            wrong = _numbers(event.seconds, event.step_s, *load, *steps) or _counts(event)
            return wrong or _tokens(event, vocab_size, newest)
        case Report():
            wrong = _numbers(event.kv_used, event.kv_total, event.running, event.waiting)
            return wrong or _version(event.weight_version, newest)
        case Leaving():
            return _numbers(event.notice_s)
        case Ready():
            short = f"max_model_len={event.max_model_len}: requests of this job may have {max_model_len} tokens"
            return short if event.max_model_len < max_model_len else _numbers(event.kv_tokens)
        case HandedOff():
            wrongs = (why_impossible(one) or _version(one.weight_version, newest) for one in event.transfers)
            return next(filter(None, wrongs), "")
    return ""


def _numbers(*values: float) -> str:
    wrong = [value for value in values if not (0 <= value <= MOST)]
    return f"{wrong[0]}: such numbers are finite, at least 0 and at most {MOST:g}" if wrong else ""


def _counts(event: Tokens) -> str:
    counted = max((max(one.count, one.prompts) for one in event.steps), default=0)
    return f"{counted} steps: a message is about {MOST_STEPS} at most" if counted > MOST_STEPS else ""


def _version(version: int, newest: int) -> str:
    return "" if -1 <= version <= newest else f"weight_version={version}: there are none but 0..{newest}"


def _tokens(event: Tokens, vocab_size: int, newest: int) -> str:
    for update in event.updates:
        ids, logprobs, versions = update.token_ids, update.logprobs, update.weight_versions
        name = f"request {update.request_id[:200]}"
        if not len(ids) == len(logprobs) == len(versions):
            return f"{name}: {len(ids)} tokens came with {len(logprobs)} log-probs and {len(versions)} versions"
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            return f"{name}: token ids must be in 0..{vocab_size - 1}"
        if not all(LOWEST_LOGPROB <= value <= LOGPROB_SLACK for value in logprobs):
            return f"{name}: log-probs of drawn tokens are finite and at most 0"
        if versions and not (min(versions) >= 0 and max(versions) <= newest):
            return f"{name}: {_version(max(versions), newest) or 'a token of no version'}"
        if update.num_cached_tokens < 0:
            return f"{name}: num_cached_tokens={update.num_cached_tokens}"
    return ""


class Failures:
    """Requests that external workers could not serve: they are asked again, elsewhere if the worker fails too many."""

    def __init__(self) -> None:
        self.count = 0
        self._of: dict[int, Counter[str]] = {}

    def weigh(self, event: Tokens) -> tuple[Tokens, str]:
        """The event with failures as interruptions, as long as they may be the worker's; and why it is to go, if it is."""
        if not any(update.finish_reason == "error" for update in event.updates):
            return event, ""
        failed = self._of.setdefault(event.rank, Counter())
        updates = []
        for update in event.updates:
            session = trajectory_of(update.request_id)
            if update.finish_reason == "error":
                self.count += 1
                failed[session] += 1
                if len(failed) >= FAILED_SESSIONS:
                    return event, f"{len(failed)} requests failed there, the last: {update.error}"
                if failed[session] < TRIES:
                    update = msgspec.structs.replace(update, finish_reason="abort", error=None)
            updates.append(update)
        return msgspec.structs.replace(event, updates=updates), ""

    def forget(self, number: int | None = None) -> None:
        """The worker is gone, or (None) there is a new version."""
        if number is None:
            self._of.clear()
        else:
            self._of.pop(number, None)
