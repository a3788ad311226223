"""Memory that is given back to the system for good, at addresses that stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pearl.engine.arena import Arena

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_zeros_and_stay_where_they_are(dtype: torch.dtype) -> None:
    memory = Arena(CPU)
    one, other = memory.zeros((3, 5000), dtype), memory.zeros((7,), dtype)
    assert one.shape == (3, 5000) and one.dtype is dtype and one.is_contiguous() and not one.any() and not other.any()
    one.fill_(1.5)
    other.fill_(2.5)
    assert bool((one == 1.5).all())
    places = one.data_ptr(), other.data_ptr()
    memory.give_back()
    assert (one.data_ptr(), other.data_ptr()) == places and not one.any() and not other.any()
    one.fill_(3.5)
    assert bool((one == 3.5).all()) and not other.any()


def test_a_tensor_lives_longer_than_its_arena() -> None:
    tensor = Arena(CPU).zeros((1 << 16,), torch.float32)
    assert float(tensor.add_(1.0).sum()) == 1 << 16


def test_nothing_takes_no_memory() -> None:
    memory = Arena(CPU)
    assert memory.zeros((0, 4), torch.float32).shape == (0, 4)
    memory.give_back()


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        Arena(CPU).zeros((1 << 62,), torch.float32)


def test_memory_that_cannot_be_given_back_says_so() -> None:
    memory = Arena(torch.device("meta"))
    tensor = memory.zeros((4,), torch.float32)
    with pytest.raises(ValueError, match="device='meta': .*cannot be given back.*on cpu"):
        memory.give_back()
    assert tensor.shape == (4,)


MEASURE = """
import math, sys, torch
from pathlib import Path
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.models.config import ModelConfig
from pearl.protocol import SamplingParams

def mib():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

model = ModelConfig(architecture="LlamaForCausalLM", vocab_size=32768, hidden_size=256, intermediate_size=1024, num_layers=4,
                    num_heads=4, num_kv_heads=4, head_dim=64, max_position=256, rope_theta=1e4, rms_eps=1e-6,
                    tie_embeddings=False, qk_norm=False, dtype="float32")
engine = Engine(EngineConfig(model=model, dtype="float32", load_format="dummy", num_blocks=1024, kv_fill=math.nan))
weights = sum(p.nbytes for p in engine._decoder.parameters()) / 2**20
pool = engine._runner.kv_pool.nbytes / 2**20
engine.add_request([1, 2, 3], SamplingParams(max_tokens=4)); engine.step()
numbers = [weights, pool, mib()]
engine.sleep("keep"); numbers.append(mib()); engine.wake(); numbers.append(mib())
engine.sleep("drop"); numbers.append(mib()); engine.wake(); numbers.append(mib())
print(*numbers)
"""


def test_sleep_really_gives_the_memory_back() -> None:
    """Anonymous resident memory of a process whose engine sleeps, in MiB."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    weights, pool, awake, kept, woken, dropped, refilled = (float(word) for word in done.stdout.split())
    assert weights > 50 and pool > 100
    assert awake - kept == pytest.approx(pool, abs=8)
    assert woken == pytest.approx(awake, abs=8)
    assert woken - dropped == pytest.approx(pool + weights, abs=8)
    assert refilled - dropped == pytest.approx(pool, abs=8)
