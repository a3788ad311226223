"""Moving KV blocks: pearl._C against plain torch, both against a loop, and what both refuse."""

from __future__ import annotations

import random

import pytest
import torch

from pearl.engine.migration import blocks
from pearl.engine.migration.blocks import copy_blocks, gather_blocks, scatter_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64]


def native() -> bool:
    return blocks.backend() == "pearl._C"


@pytest.fixture(params=["pearl._C", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once per implementation."""
    if request.param == "torch":
        monkeypatch.setattr(blocks, "native", lambda device_type: (None, "switched off"))
    elif not native():
        pytest.skip(blocks.backend())
    return request.param


def random_pool(rng: random.Random, dtype: torch.dtype, num_blocks: int, shape: tuple[int, ...], layers: int) -> torch.Tensor:
    """Random bytes (NaN patterns too), seen as `dtype`; sometimes a window of a larger pool, so that rows are further apart."""
    extra = rng.choice([0, 3])
    full = (layers, 2, num_blocks + extra, *shape)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    count = torch.Size(full).numel() * torch.empty(0, dtype=dtype).element_size()
    whole = torch.randint(-128, 128, (count,), dtype=torch.int8, generator=generator).view(dtype).view(full)
    return whole[:, :, extra // 2 : extra // 2 + num_blocks]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int8), b.contiguous().view(torch.int8))


def random_case(seed: int) -> tuple[random.Random, torch.dtype, int, tuple[int, ...], int]:
    rng = random.Random(seed)
    shape = (rng.choice([1, 2, 3]), rng.choice([1, 4, 16]), rng.choice([1, 5, 16]))
    return rng, rng.choice(DTYPES), rng.randint(1, 24), shape, rng.choice([1, 2, 5])


def some_ids(rng: random.Random, num_blocks: int, count: int) -> list[int]:
    """Distinct ids, half of the time sorted so that neighbours run on and are merged."""
    ids = rng.sample(range(num_blocks), count)
    return sorted(ids) if rng.random() < 0.5 else ids


@pytest.mark.parametrize("seed", range(40))
def test_gather_takes_the_named_blocks(path: str, seed: int) -> None:
    rng, dtype, num_blocks, shape, layers = random_case(seed)
    pool = random_pool(rng, dtype, num_blocks, shape, layers)
    ids = [rng.randrange(num_blocks) for _ in range(rng.randint(0, 2 * num_blocks))]
    got = gather_blocks(pool, ids if rng.random() < 0.5 else torch.tensor(ids, dtype=torch.int64))
    assert got.shape == (layers, 2, len(ids), *shape) and got.is_contiguous()
    for position, block in enumerate(ids):
        assert same_bits(got[:, :, position], pool[:, :, block])


@pytest.mark.parametrize("seed", range(40))
def test_scatter_writes_the_named_blocks_and_no_other(path: str, seed: int) -> None:
    rng, dtype, num_blocks, shape, layers = random_case(seed)
    pool = random_pool(rng, dtype, num_blocks, shape, layers)
    ids = some_ids(rng, num_blocks, rng.randint(0, num_blocks))
    buffer = random_pool(random.Random(seed + 1), dtype, len(ids), shape, layers).contiguous()
    memory = pool._base if pool._base is not None else pool
    expected = memory.clone()
    window = expected.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    for position, block in enumerate(ids):
        window[:, :, block] = buffer[:, :, position]
    scatter_blocks(pool, ids, buffer)
    assert same_bits(memory, expected)
    assert same_bits(gather_blocks(pool, ids), buffer)


@pytest.mark.parametrize("seed", range(40))
def test_copy_between_pools_of_different_size(path: str, seed: int) -> None:
    rng, dtype, num_blocks, shape, layers = random_case(seed)
    src = random_pool(rng, dtype, num_blocks, shape, layers)
    dst = random_pool(rng, dtype, num_blocks + 5, shape, layers)
    count = rng.randint(0, num_blocks)
    src_ids = [rng.randrange(num_blocks) for _ in range(count)] if rng.random() < 0.3 else some_ids(rng, num_blocks, count)
    dst_ids = some_ids(rng, num_blocks + 5, count)
    expected = dst.clone()
    for source, target in zip(src_ids, dst_ids, strict=True):
        expected[:, :, target] = src[:, :, source]
    copy_blocks(src, dst, src_ids, dst_ids)
    assert same_bits(dst, expected)


def test_large_copies_give_the_same_bytes_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large copies are streamed past the caches and shared out over threads; small ones, as in the other tests, are not."""
    if not native():
        pytest.skip(blocks.backend())
    pool = random_pool(random.Random(0), torch.float32, 160, (4, 16, 64), 4)
    ids = random.Random(1).sample(range(160), 160)
    alone = gather_blocks(pool, ids)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = gather_blocks(pool, ids)
        back = torch.zeros_like(pool)
        scatter_blocks(back, ids, together)
    finally:
        torch.set_num_threads(before)
    assert alone.nbytes > 16 << 20 and same_bits(alone, together) and same_bits(back, pool)
    monkeypatch.setattr(blocks, "native", lambda device_type: (None, "switched off"))
    assert same_bits(alone, gather_blocks(pool, ids))


def test_copy_inside_one_pool(path: str) -> None:
    pool = random_pool(random.Random(3), torch.float16, 8, (2, 4, 8), 2)
    before = pool.clone()
    copy_blocks(pool, pool, [0, 5], [3, 4])
    for block in range(8):
        assert same_bits(pool[:, :, block], before[:, :, {3: 0, 4: 5}.get(block, block)])


def test_copy_between_windows_of_one_pool(path: str) -> None:
    """The windows' address ranges interleave row by row; only blocks that really coincide are refused."""
    whole = random_pool(random.Random(4), torch.float32, 9, (1, 4, 4), 3).contiguous()
    low, high = whole[:, :, :6], whole[:, :, 3:]
    expected = whole[:, :, 1].clone()
    copy_blocks(low, high, [1], [0])
    assert same_bits(whole[:, :, 3], expected)
    before = whole.clone()
    with pytest.raises(ValueError, match="overlap"):
        copy_blocks(low, high, [1, 4], [0, 1])
    assert same_bits(whole, before)


def test_some_heads_of_every_block_in_some_layers(path: str) -> None:
    """Parts of pools are pools: gather, scatter and copy move them, and nothing beside them."""
    for seed in range(30):
        rng = random.Random(seed)
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        heads, layers, inner = rng.randint(2, 5), rng.randint(2, 4), (rng.choice([1, 4, 16]), rng.choice([3, 8, 64]))
        source = random_pool(rng, dtype, rng.randint(3, 12), (heads, *inner), layers).contiguous()
        target = random_pool(rng, dtype, rng.randint(3, 12), (heads + 1, *inner), layers).contiguous()
        count, width, depth = rng.randint(1, 3), rng.randint(1, heads - 1), rng.randint(1, layers)
        a, b = rng.randint(0, heads - width), rng.randint(0, heads + 1 - width)
        first = rng.randint(0, layers - depth)
        ids, into = some_ids(rng, source.shape[2], count), rng.sample(range(target.shape[2]), count)
        part, place = source[first : first + depth, :, :, a : a + width], target[first : first + depth, :, :, b : b + width]
        expected = target.clone()
        expected[first : first + depth, :, into, b : b + width] = part[:, :, ids]
        other = target.clone()
        copy_blocks(part, place, ids, into)
        assert same_bits(target, expected), seed
        buffer = gather_blocks(part, ids)
        assert same_bits(buffer, part[:, :, ids])
        scatter_blocks(other[first : first + depth, :, :, b : b + width], into, buffer)
        assert same_bits(other, expected), seed


def pool_8() -> torch.Tensor:
    return torch.arange(2 * 2 * 8 * 6, dtype=torch.float32).view(2, 2, 8, 1, 2, 3)


def bad_gather(pool: torch.Tensor, ids: object, out: torch.Tensor | None = None) -> None:
    gather_blocks(pool, ids, out)  # type: ignore[arg-type]


REFUSED = {
    "source id too large": (lambda p, b: bad_gather(p, [0, 8]), r"ids\[1\]=8: .*8 blocks.*0\.\.7"),
    "source id negative": (lambda p, b: bad_gather(p, [-1]), r"ids\[0\]=-1"),
    "source id too large, given out": (lambda p, b: bad_gather(p, [0, 8], b), r"ids\[1\]=8: .*8 blocks.*0\.\.7"),
    "id beyond 64 bits": (lambda p, b: scatter_blocks(p, [0, 2**40], b), r"ids\[1\]=1099511627776"),
    "id not whole": (lambda p, b: bad_gather(p, [1.5]), r"block_ids\[0\]=1\.5"),
    "destination id too large": (lambda p, b: scatter_blocks(p, [0, 99], b), r"ids\[1\]=99"),
    "written twice": (lambda p, b: scatter_blocks(p, [3, 3], b), r"\[0\] and \[1\] are both block 3"),
    "copied onto twice": (lambda p, b: copy_blocks(b, p, [0, 1], [7, 7]), r"both block 7"),
    "read and written": (lambda p, b: copy_blocks(p, p, [1, 2], [2, 3]), r"overlap"),
    "onto itself": (lambda p, b: copy_blocks(p, p, [1], [1]), r"overlap"),
    "buffer inside the pool": (lambda p, b: bad_gather(p[:1], [3, 4], p.view(-1)[18:42].view(1, 2, 2, 1, 2, 3)), r"overlap"),
    "uneven ids": (lambda p, b: copy_blocks(b, p, [0, 1], [7]), r"2 source ids, 1 destination ids"),
    "buffer of another shape": (lambda p, b: scatter_blocks(p, [1, 2, 3], b), r"\(2, 2, 3, 1, 2, 3\)"),
    "buffer of another dtype": (lambda p, b: scatter_blocks(p, [1, 2], b.double()), r"float64.*float32"),
    "buffer strided": (lambda p, b: scatter_blocks(p, [1, 2], b.transpose(4, 5).contiguous().transpose(4, 5)), r"strided"),
    "pool with blocks that overlap": (lambda p, b: bad_gather(p.as_strided(p.shape, (96, 48, 5, 6, 3, 1)), [0]), r"strides"),
    "pool with gaps inside blocks": (lambda p, b: bad_gather(p[..., :1], [0]), r"strides"),
    "pool with two distances between rows": (lambda p, b: bad_gather(torch.cat([p, p])[::2], [0]), r"strides"),
    "pool without a key/value axis": (lambda p, b: bad_gather(p[:, :1], [0]), r"shape="),
    "pools of different blocks": (lambda p, b: copy_blocks(b[..., :1].contiguous(), p, [0], [1]), r"src_pool is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(path: str, name: str) -> None:
    call, message = REFUSED[name]
    pool = pool_8()
    buffer = torch.full((2, 2, 2, 1, 2, 3), -1.0)
    with pytest.raises(ValueError, match=message):
        call(pool, buffer)
    assert torch.equal(pool, pool_8()) and torch.equal(buffer, torch.full_like(buffer, -1.0))


NATIVE_REFUSED = [
    ({"bytes": 95}, r"bytes=95: .*need 96"),
    ({"bytes": -1}, r"bytes=-1"),
    ({"address": 0}, r"address=0"),
    ({"address": 2**64 - 8}, r"end of memory"),
    ({"rows": 0}, r"rows=0"),
    ({"row_stride": 47}, r"row_stride=47: must be >= 48"),
    ({"row_stride": 2**63 - 1}, r"64 bits"),
    ({"num_blocks": -1}, r"num_blocks=-1"),
    ({"num_blocks": 2**40, "block_stride": 2**40}, r"64 bits"),
    ({"block_bytes": 0}, r"block_bytes=0"),
    ({"block_stride": 15}, r"block_stride=15: must be >= 16"),
    ({"block_stride": 17}, r"row_stride=48: must be >= 50"),
    ({"block_stride": 17, "row_stride": 50}, r"bytes=96: .*need 100"),
]


@pytest.mark.parametrize(("change", "message"), NATIVE_REFUSED)
def test_native_pool_checks_its_sizes(change: dict[str, int], message: str) -> None:
    if not native():
        pytest.skip(blocks.backend())
    from pearl import _C

    sizes = {"address": 4096, "bytes": 96, "rows": 2, "row_stride": 48, "num_blocks": 3, "block_stride": 16, "block_bytes": 16}
    _C.BlockPool(**sizes)
    with pytest.raises(ValueError, match=message):
        _C.BlockPool(**(sizes | change))


def test_native_buffer_of_another_size_is_refused() -> None:
    if not native():
        pytest.skip(blocks.backend())
    from pearl import _C

    memory = torch.zeros(96, dtype=torch.int8)
    pool = _C.BlockPool(memory.data_ptr(), bytes=96, rows=2, row_stride=48, num_blocks=3, block_stride=16, block_bytes=16)
    with pytest.raises(ValueError, match="buffer of 63 bytes: 2 blocks of 16 bytes in 2 rows are 64"):
        _C.gather_blocks(pool, [0, 1], memory.data_ptr(), 63)


def test_backend_says_which_and_why() -> None:
    assert blocks.backend("meta").startswith("torch (") and "meta" in blocks.backend("meta")
    assert native() or "pearl._C" in blocks.backend()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_cuda_kernels_equal_the_host_copy(seed: int) -> None:
    rng, dtype, num_blocks, shape, layers = random_case(seed)
    host = random_pool(rng, dtype, num_blocks, shape, layers).contiguous()
    pool = host.cuda()
    ids = some_ids(rng, num_blocks, rng.randint(0, num_blocks))
    buffer = gather_blocks(pool, ids)
    assert same_bits(buffer.cpu(), gather_blocks(host, ids))
    target = torch.zeros_like(pool)
    scatter_blocks(target, ids, buffer)
    copied = torch.zeros_like(pool)
    copy_blocks(pool, copied, ids, ids)
    assert same_bits(target.cpu(), copied.cpu())
    assert same_bits(gather_blocks(copied, ids).cpu(), buffer.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(0, 4), (1, 3)])
def test_cuda_long_runs_and_parts_equal_the_host_copy(heads: tuple[int, int]) -> None:
    """Runs long enough for the driver's own copies beside single blocks; and parts of blocks, which have no runs."""
    host = random_pool(random.Random(5), torch.bfloat16, 200, (4, 16, 64), 3).contiguous()
    ids, into = [*range(40, 140), 7, 3, 150], [*range(100), 199, 120, 110]
    pool, copied, expected = host.cuda(), torch.zeros_like(host).cuda(), torch.zeros_like(host)
    part = slice(*heads)
    copy_blocks(pool[1:, :, :, part], copied[1:, :, :, part], ids, into)
    expected[1:, :, into, part] = host[1:, :, ids, part]
    assert same_bits(copied.cpu(), expected)


def test_cuda_functions_check_first_and_name_what_cuda_says() -> None:
    """On a machine without a GPU the module loads, refuses bad calls as the host copy does, and good ones with CUDA's words."""
    if not native() or torch.cuda.is_available():
        pytest.skip("needs pearl._C and no GPU")
    from pearl import _C

    if not _C.has_cuda:
        pytest.skip("pearl._C was built without nvcc")
    memory = torch.zeros(96, dtype=torch.int8)
    out = torch.zeros(64, dtype=torch.int8)
    pool = _C.BlockPool(memory.data_ptr(), bytes=96, rows=2, row_stride=48, num_blocks=3, block_stride=16, block_bytes=16)
    with pytest.raises(ValueError, match=r"ids\[1\]=3"):
        _C.gather_blocks_cuda(pool, [0, 3], out.data_ptr(), 64, 0, 0)
    with pytest.raises(ValueError, match="both block 2"):
        _C.scatter_blocks_cuda(pool, [2, 2], out.data_ptr(), 64, 0, 0)
    with pytest.raises(ValueError, match="overlap"):
        _C.copy_blocks_cuda(pool, [0], pool, [0], 0, 0)
    with pytest.raises(RuntimeError, match=r"cudaSetDevice: .*(driver|device)"):
        _C.gather_blocks_cuda(pool, [0, 1], out.data_ptr(), 64, 0, 0)
