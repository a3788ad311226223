"""Counter-based random numbers: one uniform per (request seed, sample index, output position). NumPy only, no state.

Owns the Philox4x32-10 generator of Salmon et al. 2011 ("Parallel Random Numbers: As Easy as 1, 2, 3"), vectorised over
rows, and how a request without a seed gets one. It knows nothing of logits. Invariant: a number depends on its counter and
key alone, so batches, chunks, pre-emption and the order of rows cannot move it.
"""

from __future__ import annotations

import hashlib

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter_4R: np.ndarray, key_2R: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32 on R counters; all words are 32 bit values held in uint64. Returns uint64 [4, R]."""
    c0, c1, c2, c3 = counter_4R
    weyl = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    keys0 = (key_2R[0] + weyl * np.uint64(_WEYL[0])) & _LOW
    keys1 = (key_2R[1] + weyl * np.uint64(_WEYL[1])) & _LOW
    for k0, k1 in zip(keys0, keys1, strict=True):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _HALF) ^ c1 ^ k0
        c2 = (product0 >> _HALF) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: list[int], indices: list[int], positions: list[int]) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits per row, for 64 bit seeds (the key) and (position, index) counters."""
    seeds_R = np.array(seeds, dtype=np.uint64)
    zeros_R = np.zeros_like(seeds_R)
    counter_4R = (np.array(positions, dtype=np.uint64), np.array(indices, dtype=np.uint64), zeros_R, zeros_R)
    words = philox4x32(counter_4R, np.stack((seeds_R & _LOW, seeds_R >> _HALF)))  # type: ignore[arg-type]
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def derive_seed(engine_seed: int, request_id: str) -> int:
    """The 64 bit seed of a request that brought none: the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
