"""An arena on a GPU: how tensors lie in regions and how those come and go, with stand-ins; and on a GPU where there is one."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from pearl.engine.arena import Arena
from pearl.engine.device_arena import ALIGNMENT, REGION_BYTES, DeviceArena, _bytes_of, on_device
from pearl.engine.migration.blocks import native

STEP = 2 << 20


class HostRegion:
    """A region whose memory is a tensor on the CPU, garbage whenever it is taken. `budget`: bytes that all have together."""

    taken = 0
    budget = 1 << 40

    def __init__(self, nbytes: int) -> None:
        self.bytes = -(-nbytes // STEP) * STEP
        self.memory = torch.empty(self.bytes, dtype=torch.uint8)
        self.address, self.mapped = self.memory.data_ptr(), False
        self.take()

    def take(self) -> None:
        if not self.mapped:
            if HostRegion.taken + self.bytes > HostRegion.budget:
                raise RuntimeError(f"memory of {self.bytes} bytes: out of memory")
            HostRegion.taken += self.bytes
            self.mapped = True
            self.memory.fill_(0xFF)

    def give_back(self) -> None:
        HostRegion.taken -= self.bytes * self.mapped
        self.mapped = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HostRegion]:
    monkeypatch.setattr(HostRegion, "taken", 0)
    monkeypatch.setattr(HostRegion, "budget", 1 << 40)
    return []


def arena(made: list[HostRegion]) -> DeviceArena:
    def make(nbytes: int) -> HostRegion:
        made.append(HostRegion(nbytes))
        return made[-1]

    def view(region: HostRegion, start: int, nbytes: int) -> Tensor:
        return region.memory[start : start + nbytes]

    return DeviceArena(make, view)


def test_tensors_are_zeros_apart_and_aligned(made: list[HostRegion]) -> None:
    memory = arena(made)
    sizes, dtypes = [(3, 5), (7,), (1000, 1000), (1,)], [torch.float32, torch.bfloat16, torch.float64, torch.int8]
    shapes = list(zip(sizes, dtypes, strict=True))
    tensors = [memory.zeros(*shape) for shape in shapes]
    for value, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True), 1):
        assert tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous() and not tensor.any()
        tensor.fill_(value)
    assert [bool((tensor == value).all()) for value, tensor in enumerate(tensors, 1)] == [True] * len(shapes)
    assert all((tensor.data_ptr() - made[0].address) % ALIGNMENT == 0 for tensor in tensors) and len(made) == 1


def test_small_tensors_share_a_region_and_large_ones_do_not_waste_it(made: list[HostRegion]) -> None:
    """As a model's: norms between large matrices. What is taken is little more than what is used."""
    memory, used = arena(made), 0
    for _ in range(6):
        for count in (4096, 40 << 20, 4096, 70 << 20):
            used += memory.zeros((count,), torch.uint8).nbytes
    assert sum(region.bytes for region in made) < used + 2 * REGION_BYTES + len(made) * STEP + 6 * (24 << 20)
    assert sum(region.bytes for region in made) == HostRegion.taken


def test_memory_goes_and_comes_at_the_same_addresses(made: list[HostRegion]) -> None:
    memory = arena(made)
    small, large = memory.zeros((8,), torch.float32), memory.zeros((REGION_BYTES,), torch.uint8)
    places = small.data_ptr(), large.data_ptr()
    memory.give_back()
    assert HostRegion.taken == 0 and len(made) == 2
    memory.give_back()
    memory.take()
    assert (small.data_ptr(), large.data_ptr()) == places and all(region.mapped for region in made)
    memory.take()
    assert HostRegion.taken == sum(region.bytes for region in made)


def test_taking_is_all_or_nothing(made: list[HostRegion]) -> None:
    memory = arena(made)
    memory.zeros((8,), torch.float32)
    memory.zeros((REGION_BYTES,), torch.uint8)
    memory.give_back()
    HostRegion.budget = REGION_BYTES + STEP
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.take()
    assert HostRegion.taken == 0
    HostRegion.budget = 1 << 40
    memory.take()
    assert all(region.mapped for region in made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_a_reason() -> None:
    found, why = on_device(torch.device("cuda", 0))
    assert found is None and why


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_native_part_loads_without_a_gpu() -> None:
    """It is compiled and linked; asked for memory it says in words that there is no device."""
    from importlib import import_module

    try:
        module = import_module("pearl._C")
    except ImportError:
        pytest.skip("pearl._C is not built")
    if not module.has_cuda:
        pytest.skip("pearl._C was built without CUDA")
    assert module.region_refusal(0)
    with pytest.raises(RuntimeError, match="cuda"):
        module.DeviceRegion(1 << 20, 0)
    with pytest.raises(RuntimeError, match="cuda"):
        module.OpenedRegion(0, 1 << 20, 0)
    for kind, arguments in ((module.DeviceRegion, (0, 0)), (module.OpenedRegion, (0, 0, 0))):
        with pytest.raises(ValueError, match="bytes=0: must be > 0"):
            kind(*arguments)


@pytest.mark.gpu
def test_a_gpu_has_its_memory_back() -> None:
    """The device's own count of free bytes, and a tensor at the same address that can be written again."""
    assert native("cuda")[0] is not None
    device = torch.device("cuda", torch.cuda.current_device())
    memory = Arena(device)
    tensor = memory.zeros((256 << 20,), torch.uint8)
    small = memory.zeros((10,), torch.bfloat16)
    assert tensor.is_cuda and not tensor.any() and not small.any()
    place, free = tensor.data_ptr(), torch.cuda.mem_get_info(device)[0]
    memory.give_back()
    assert torch.cuda.mem_get_info(device)[0] - free >= 256 << 20
    memory.take()
    tensor.fill_(3)
    small.fill_(2.0)
    assert tensor.data_ptr() == place and bool((tensor == 3).all()) and bool((small == 2.0).all())
    assert free - torch.cuda.mem_get_info(device)[0] < 4 << 20


@pytest.mark.gpu
def test_a_gpu_s_memory_is_shared_by_a_file() -> None:
    """Mapped a second time, as another process would: the same bytes, and after sleep those that were there."""
    module = native("cuda")[0]
    assert module is not None
    device = torch.cuda.current_device()
    region = module.DeviceRegion(4 << 20, device)
    file = region.export_file()
    opened = module.OpenedRegion(file, region.bytes, device)
    os.close(file)
    mine, other = (_bytes_of(torch.device("cuda", device))(one, 0, 1 << 20) for one in (region, opened))
    mine.fill_(7)
    assert opened.address != region.address and bool((other == 7).all())
    region.give_back()
    region.take()
    mine.fill_(9)
    assert bool((other == 7).all())
    torch.cuda.synchronize()
    opened.close()
    assert opened.address == 0
