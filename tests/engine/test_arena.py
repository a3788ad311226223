"""Memory that is given back to the system for good, at addresses that stay."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pearl.engine.arena import Arena

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


KINDS = {"private": Arena.zeros, "shared": Arena.shared_zeros}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_zeros_and_stay_where_they_are(dtype: torch.dtype, kind: str) -> None:
    memory, zeros = Arena(CPU), KINDS[kind]
    one, other = zeros(memory, (3, 5000), dtype), zeros(memory, (7,), dtype)
    assert one.shape == (3, 5000) and one.dtype is dtype and one.is_contiguous() and not one.any() and not other.any()
    one.fill_(1.5)
    other.fill_(2.5)
    assert bool((one == 1.5).all())
    places = one.data_ptr(), other.data_ptr()
    memory.give_back()
    assert (one.data_ptr(), other.data_ptr()) == places and not one.any() and not other.any()
    one.fill_(3.5)
    assert bool((one == 3.5).all()) and not other.any()


@kinds
def test_a_tensor_lives_longer_than_its_arena(kind: str) -> None:
    tensor = KINDS[kind](Arena(CPU), (1 << 16,), torch.float32)
    assert float(tensor.add_(1.0).sum()) == 1 << 16


@kinds
def test_nothing_takes_no_memory(kind: str) -> None:
    memory = Arena(CPU)
    assert KINDS[kind](memory, (0, 4), torch.float32).shape == (0, 4)
    memory.give_back()


@kinds
@pytest.mark.parametrize("count", [1 << 44, 1 << 62])
def test_more_than_there_is_is_an_error(kind: str, count: int) -> None:
    before = open_files()
    with pytest.raises((OSError, OverflowError)):
        KINDS[kind](Arena(CPU), (count,), torch.float32)
    assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_others_see_what_is_written_to_shared_memory() -> None:
    memory = Arena(CPU)
    tensor, private = memory.shared_zeros((1000,), torch.int32), memory.zeros((10,), torch.int32)
    file = memory.file(tensor)
    assert file is not None and memory.file(private) is None
    tensor.copy_(torch.arange(1000))
    look = f"import sys; sys.stdout.buffer.write(open('/proc/{os.getpid()}/fd/{file}', 'rb').read())"
    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, check=True, timeout=60).stdout
    assert seen == tensor.numpy().tobytes()
    memory.give_back()
    assert os.fstat(file).st_blocks == 0 and os.fstat(file).st_size == 4000


def test_shared_memory_cannot_shrink_and_leaves_nothing_open() -> None:
    before = open_files()
    memory = Arena(CPU)
    tensor = memory.shared_zeros((5000,), torch.float32)
    file = memory.file(tensor)
    assert file is not None
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    assert open_files() == before + 1
    del memory
    assert open_files() == before
    assert not tensor.any()


def test_children_do_not_have_shared_memory() -> None:
    """Neither a program that is started, nor a child that goes on as this program."""
    memory = Arena(CPU)
    file = memory.file(memory.shared_zeros((1 << 20,), torch.float32))
    assert file is not None
    assert fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    child = os.fork()
    if child == 0:
        names = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
        mapped = Path("/proc/self/maps").read_text()
        os._exit(any("pearl-kv" in name for name in [*names, mapped]))
    assert os.waitpid(child, 0)[1] == 0
    assert os.fstat(file).st_size == 4 << 20


OWNER = """
import os, time, torch
from pearl.engine.arena import Arena
memory = Arena(torch.device("cpu"))
tensor = memory.shared_zeros((1 << 20,), torch.uint8).fill_(7)
print(os.fstat(memory.file(tensor)).st_ino, flush=True)
time.sleep(60)
"""


def holders(inode: str) -> list[str]:
    """Processes that have the memfd of that number open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = any(line.split()[4] == inode and "pearl-kv" in line for line in (process / "maps").open())
            names = [entry for entry in (process / "fd").iterdir() if "memfd:pearl-kv" in os.readlink(entry)]
            if mapped or any(str(entry.stat().st_ino) == inode for entry in names):
                found.append(process.name)
        except OSError:
            continue  # it has ended, or is another user's
    return found


def test_a_killed_owner_leaves_nothing() -> None:
    """A file without a name is gone with the last process that has it, and nobody else had it."""
    before = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    inode = owner.stdout.readline().strip()
    assert holders(inode) == [str(owner.pid)]
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    assert holders(inode) == []
    assert not [name for name in os.listdir("/dev/shm") if "pearl" in name and name not in before]


MEASURE = """
import math, sys, torch
from pathlib import Path
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.models.config import ModelConfig
from pearl.protocol import SamplingParams

def mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024

model = ModelConfig(architecture="LlamaForCausalLM", vocab_size=32768, hidden_size=256, intermediate_size=1024, num_layers=4,
                    num_heads=4, num_kv_heads=4, head_dim=64, max_position=256, rope_theta=1e4, rms_eps=1e-6,
                    tie_embeddings=False, qk_norm=False, dtype="float32")
engine = Engine(EngineConfig(model=model, dtype="float32", load_format="dummy", num_blocks=1024, kv_fill=math.nan))
packed = engine._store._packed  # the plain matrices, and the memory for a next version, have not been touched
plain = sum(value.nbytes for name, value in engine._decoder.named_parameters() if name not in packed.names)
weights = (plain + packed._bytes) / 2**20
pool = engine._runner.kv_pool.nbytes / 2**20
engine.add_request([1, 2, 3], SamplingParams(max_tokens=4)); engine.step()
numbers = [weights, pool, mib()]
engine.sleep("keep"); numbers.append(mib()); engine.wake(); numbers.append(mib())
engine.sleep("drop"); numbers.append(mib()); engine.wake(); numbers.append(mib())
print(*numbers)
"""


def test_sleep_really_gives_the_memory_back() -> None:
    """Resident memory, files aside, of a process whose engine sleeps, in MiB."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    weights, pool, awake, kept, woken, dropped, refilled = (float(word) for word in done.stdout.split())
    assert weights > 50 and pool > 100
    assert awake - kept == pytest.approx(pool, abs=8)
    assert woken == pytest.approx(awake, abs=8)
    assert woken - dropped == pytest.approx(pool + weights, abs=8)
    assert refilled - dropped == pytest.approx(pool, abs=8)
