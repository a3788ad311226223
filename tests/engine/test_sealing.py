"""Filling and reading messages: `pearl._C` and torch make the same bytes, the same sums and the same verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pearl.engine.weights import sealing
from pearl.engine.weights.buckets import ALIGNMENT, Bucket, Piece
from pearl.engine.weights.message import HEADER_BYTES, Message

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
needs_native = pytest.mark.skipif(sealing.native() is None, reason="pearl._C is not built")


@pytest.fixture(params=["pearl._C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(sealing, "native", lambda: None)
    elif sealing.native() is None:
        pytest.skip("pearl._C is not built")
    return request.param


@st.composite
def buckets(draw: st.DrawFn) -> tuple[Bucket, torch.dtype]:
    """Pieces of any size, some with room between them, so that words are shared and numbers lie at any offset."""
    dtype = draw(st.sampled_from([F64, F32, F16, BF16]))
    pieces, filled = [], 0
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        nbytes = math.prod(shape) * dtype.itemsize
        pieces.append(Piece(hf_name=f"t{number}", start=0, shape=shape, offset=filled, nbytes=nbytes))
        filled += nbytes + draw(st.sampled_from([0, 0, dtype.itemsize, 3 * dtype.itemsize]))
    return Bucket(pieces=tuple(pieces), nbytes=-(-filled // ALIGNMENT) * ALIGNMENT), dtype


def strided(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, dense: bool, last: bool) -> Tensor:
    """Random numbers, or a slice of a larger tensor; `last`: a transposed one, whose last axis has gaps."""
    whole = torch.randn([side + 2 for side in shape], generator=generator, dtype=F64).mul(3.0).to(dtype)
    view = whole[tuple(slice(1, 1 + side) for side in shape)]
    if last and len(shape) > 1:
        return view.transpose(-1, -2).contiguous().transpose(-1, -2)
    return view.contiguous() if dense else view


def torch_only(message: Message, version: int, sources: list[Tensor]) -> None:
    """The message as torch fills it, what lies between the tensors zero."""
    message.whole.zero_()
    for part, source in zip(message.parts, sources, strict=True):
        part.copy_(source)
    message.words[1] = version
    message.words[0] = message.words[1:].sum()


@needs_native
@settings(max_examples=150, deadline=None)
@given(buckets(), st.sampled_from([F64, F32, F16, BF16]), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_both_ways_make_the_same_messages(plan, source: torch.dtype, seed: int, dense: bool, last: bool) -> None:
    bucket, dtype = plan
    generator = torch.Generator().manual_seed(seed)
    sources = [strided(piece.shape, source, generator, dense=dense, last=last) for piece in bucket.pieces]
    memory = torch.full((Message.size(bucket),), 0xAB, dtype=torch.uint8)  # left over from the message before
    native, plain = Message(memory, bucket, dtype), Message(memory.clone(), bucket, dtype)
    total, finite = native.put(sources)
    native.seal(seed, total)
    torch_only(plain, seed, sources)
    assert finite
    if total is not None:
        assert torch.equal(native.whole, plain.whole)
    for message in (native, plain):
        for part, source_part in zip(message.parts, sources, strict=True):
            assert torch.equal(part, source_part.to(dtype))
        targets = [strided(piece.shape, dtype, generator, dense=dense, last=last) for piece in bucket.pieces]
        assert message.take(seed, targets) == (None, True)
        assert all(torch.equal(target, part) for target, part in zip(targets, message.parts, strict=True))
    some = int(torch.randint(0, native.whole.nbytes, (), generator=generator))
    native.whole[some] ^= 1 << seed % 8
    with pytest.raises(ValueError, match="the checksum differs"):
        native.take(seed)


def patterns() -> Tensor:
    """Every 16-bit upper half with some lower ones: all exponents, ties between two neighbours among them."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] | lower[None, :]).reshape(-1)
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(F32)


def message_for(count: int, dtype: torch.dtype) -> Message:
    nbytes = count * dtype.itemsize
    piece = Piece(hf_name="t", start=0, shape=(count,), offset=0, nbytes=nbytes)
    bucket = Bucket(pieces=(piece,), nbytes=-(-nbytes // ALIGNMENT) * ALIGNMENT)
    return Message(torch.zeros(Message.size(bucket), dtype=torch.uint8), bucket, dtype)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_numbers_are_rounded_as_torch_rounds_them(way: str, dtype: torch.dtype) -> None:
    numbers = patterns()
    numbers = numbers[numbers.to(dtype).isfinite()].contiguous()
    message = message_for(len(numbers), dtype)
    total, finite = message.put([numbers])
    message.seal(1, total)
    assert finite and (total is None) is (way == "torch")
    assert torch.equal(message.parts[0].view(torch.uint8), numbers.to(dtype).view(torch.uint8))
    assert message.take(1) == (None, True)


@pytest.mark.parametrize("source", [F64, F32, F16, BF16])
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 3.3e38, 7e4])
def test_what_is_not_finite_is_found_wherever_it_is(way: str, source: torch.dtype, dtype: torch.dtype, bad: float) -> None:
    for size, place in ((1, 0), (7, 6), (5000, 4999), (5000, 2047)):
        numbers = torch.ones(size, dtype=source)
        numbers[place] = bad
        message = message_for(size, dtype)
        finite = bool(numbers.to(dtype).isfinite().all())
        assert message.put([numbers])[1] is finite
        assert sealing.copy([torch.zeros(size, dtype=dtype)], [numbers]) is finite
        words = None if finite else f"t: 1 of {size} values are not finite in {dtype}"
        assert message.not_finite() == words
        message.seal(1)
        assert message.take(1)[1] is finite


def test_every_bit_pattern_that_is_no_number_is_seen(way: str) -> None:
    """A rounding that carries must not turn one into a number."""
    numbers = patterns()
    for dtype in (F16, BF16):
        for bad in numbers[~numbers.to(dtype).isfinite()][::97]:
            message = message_for(1, dtype)
            assert message.put([bad.reshape(1)])[1] is False, bad


def test_tensors_are_put_one_by_one_and_sums_add_up(way: str) -> None:
    pieces = tuple(Piece(hf_name=f"t{n}", start=0, shape=(3,), offset=6 * n, nbytes=6) for n in range(5))
    bucket = Bucket(pieces=pieces, nbytes=32)
    message = Message(torch.full((Message.size(bucket),), 7, dtype=torch.uint8), bucket, BF16)
    numbers, totals = torch.randn(5, 3), []
    for number in (3, 0, 4, 1, 2):
        total, finite = message.put([numbers[number]], number)
        totals.append(total)
        assert finite
    message.seal(9, None if None in totals else sum(totals) % (1 << 64))
    assert message.take(9) == (None, True)
    assert torch.equal(torch.stack(message.parts), numbers.to(BF16))


def test_a_refusal_is_not_copied(way: str) -> None:
    message, target = message_for(200, F32), torch.zeros(200)
    message.refuse(3, b"no")
    assert message.take(3, [target])[0] == "no" and int(target.count_nonzero()) == 0


@needs_native
@pytest.mark.parametrize(
    ("offsets", "shape", "words"),
    [
        ([0], (4,), "place at byte 0, 16 bytes: must lie between 64 and 448"),
        ([444], (4,), "place at byte 444"),
        ([64], (0,), "a side of 0"),
        ([64, 64], (4,), "offsets and tensors: must be as many"),
    ],
)
def test_what_would_write_elsewhere_is_refused(offsets: list[int], shape: tuple[int, ...], words: str) -> None:
    module = sealing.native()
    memory, tensor = torch.zeros(HEADER_BYTES + 384, dtype=torch.uint8), torch.ones(8)
    kind = module.Number.float32
    with pytest.raises(ValueError, match=words):
        module.putting(memory.data_ptr(), memory.nbytes, offsets, [(tensor.data_ptr(), shape, (1,))], kind, kind).put()
    with pytest.raises(ValueError, match="must have as many strides"):
        module.putting(memory.data_ptr(), memory.nbytes, [64], [(tensor.data_ptr(), (2, 2), (1,))], kind, kind).put()
    with pytest.raises(ValueError, match="not converted here"):
        given = [(tensor.data_ptr(), (4,), (1,))]
        module.putting(memory.data_ptr(), memory.nbytes, [64], given, kind, module.Number.float64).put()
    assert int(memory.sum()) == 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
