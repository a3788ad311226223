"""What engine steps teach about costs: sums over steps of about one size, and the samples that they become.

Owns the sums between two RL steps, how they are split into what decodes and what prompts cost, and how many sequences were
decoding. It is told of steps by the members of a live job and by simulated workers alike, as both mean the same by a
`StepSums`; it measures nothing itself.
Invariant: each step is in one sum, and counts once.

The first token of a request ends its prompt, every other one is a decode: so a step is one of decodes alone, of prompts alone,
or both; of the last kind, what exceeds a decode step of its size is put down to the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pearl.protocol import StepSums
from pearl.sched.profile import DecodeSample, PrefillSample

LEAST_SHARE = 0.1
"""Of a step with decodes and prompts that is the prompts' at least, whatever a decode step of its size takes."""


def told(*, computed: int, batch: int, prompts: int) -> tuple[bool, int, int] | None:
    """What a step was that computed so many tokens and gave `batch` requests one, `prompts` of them their first: (whether it
    computed prompts, new tokens of these or else sequences, decodes). None, if that cannot be told."""
    decodes = batch - prompts
    new = computed - decodes
    if new <= 0:
        return None if prompts else (False, batch, decodes)
    return True, new, decodes


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Sums over steps of about one size: `size` sequences or new prompt tokens, `decodes` beside them, of `prompts` prompts."""

    count: int = 0
    size: float = 0.0
    context: float = 0.0
    decodes: float = 0.0
    prompts: float = 0.0
    seconds: float = 0.0

    def add(self, more: StepSums) -> None:
        self.count += more.count
        self.size += more.size
        self.context += more.context
        self.decodes += more.decodes
        self.prompts += more.prompts
        self.seconds += more.seconds


class StepSamples:
    """`add` what was told of steps; `take` the samples of all since the last time. Sizes are powers of two apart."""

    def __init__(self) -> None:
        self._decoding_s = 0.0
        """In which sequences were decoding, of all sequences together."""
        self._decode: dict[int, _Steps] = {}
        self._prefill: dict[tuple[int, bool], _Steps] = {}

    def add(self, sums: StepSums) -> None:
        """Of steps without a size, or of prompts whose number nobody knows, nothing is learned."""
        if sums.count <= 0 or sums.size <= 0 or (sums.prefill and sums.prompts <= 0):
            return
        self._decoding_s += sums.decodes / sums.count * sums.seconds
        bits = (sums.size // sums.count).bit_length()
        if sums.prefill:
            self._prefill.setdefault((bits, sums.decodes > 0), _Steps()).add(sums)
        else:
            self._decode.setdefault(bits, _Steps()).add(sums)

    def take(self) -> tuple[tuple[DecodeSample, ...], tuple[PrefillSample, ...]]:
        """A sample per size: of a decode step, and of a prompt."""
        decode = tuple(
            DecodeSample(batch=one.size / one.count, context=one.context / one.count, seconds=_each(one), count=one.count)
            for one in self._decode.values()
            if one.seconds > 0
        )
        prefill = tuple(
            PrefillSample(
                new=one.size / one.prompts,
                prefix=max(0.0, one.context / one.count - one.size / one.prompts),
                seconds=_beyond_decodes(one, decode) * one.count / one.prompts,
                count=one.prompts,
                beside=one.decodes / one.count,
            )
            for one in self._prefill.values()
            if one.seconds > 0
        )
        self._decode, self._prefill, self._decoding_s = {}, {}, 0.0
        return decode, prefill

    def decode_share(self, flight_s: float) -> float | None:
        """Mean share of the trajectories that were decoding, f of the paper: before `take`. They were under way for `flight_s`
        seconds, all together. None if nobody knows."""
        return min(1.0, self._decoding_s / flight_s) if flight_s > 0 and self._decoding_s > 0 else None


def _each(steps: _Steps) -> float:
    return steps.seconds / steps.count


def _beyond_decodes(steps: _Steps, samples: Sequence[DecodeSample]) -> float:
    return max(_each(steps) - _decode_s(samples, steps.decodes / steps.count), LEAST_SHARE * _each(steps))


def _decode_s(samples: Sequence[DecodeSample], batch: float) -> float:
    """How long a decode step of so many sequences takes; 0 for none, or if nobody knows."""
    if not batch or not samples:
        return 0.0
    sizes, seconds = [one.batch for one in samples], [one.seconds for one in samples]
    if len(samples) == 1:
        return seconds[0]
    slope, start = np.polyfit(sizes, seconds, 1, w=np.sqrt([one.count for one in samples]))
    return max(0.0, float(start) + max(0.0, float(slope)) * batch)
