"""A version filled into messages again and again: from the same memory or other, in other orders, and with mistakes."""

from __future__ import annotations

from collections.abc import Iterator

import hf_models
import pytest
import torch
from torch import Tensor
from weight_cases import config_of, tensors_of

from pearl.engine.models.params import hf_shapes
from pearl.engine.weights import filling
from pearl.engine.weights.snapshot import Snapshot

MODEL = hf_models.dense()
CONFIG, TENSORS = config_of(MODEL), dict(tensors_of(MODEL))
NAMES = list(hf_shapes(CONFIG))


def held(snapshot: Snapshot) -> dict[str, Tensor]:
    """What the newest version has, checked."""
    with snapshot.reader().lease() as lease:
        lease.check()
        found: dict[str, list[Tensor]] = {}
        for name, rows, _ in lease.rows():
            found.setdefault(name, []).append(rows.clone())
    return {name: torch.cat(parts) for name, parts in found.items()}


def fresh(dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    return [(name, TENSORS[name].to(dtype).clone()) for name in NAMES]


def assert_holds(snapshot: Snapshot, pairs: list[tuple[str, Tensor]]) -> None:
    found = held(snapshot)
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in pairs) and len(found) == len(pairs)


@pytest.fixture(params=[1 << 20, 4096], ids=["one bucket", "many buckets"])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    return Snapshot(CONFIG, torch.bfloat16, bucket_bytes=request.param)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are looked at one by one."""
    seen: list[str] = []
    real = filling.Filling._take_one
    monkeypatch.setattr(filling.Filling, "_take_one", lambda self, name, tensor: seen.append(name) or real(self, name, tensor))
    return seen


def test_memory_that_is_filled_again_is_read_again_without_a_look_at_names(looks: list[str]) -> None:
    snapshot, pairs = Snapshot(CONFIG, torch.bfloat16), fresh()
    for version in range(6):
        for _, tensor in pairs:
            tensor.add_(0.25)
        looks.clear()
        assert snapshot.write(pairs, version)
        assert looks == (NAMES if version < 2 else [])  # each slot once
        assert_holds(snapshot, pairs)


def test_other_memory_dtypes_and_orders_are_taken_as_they_are(snapshot: Snapshot) -> None:
    turned = [(name, tensor.T.contiguous().T if tensor.ndim == 2 else tensor) for name, tensor in fresh()]
    version = 0
    for pairs in (fresh(), fresh(torch.float64), fresh(torch.bfloat16), list(reversed(fresh())), turned, fresh()):
        for _ in range(3):
            for _, tensor in pairs:
                tensor.mul_(-1.5)
            assert snapshot.write(pairs, version)
            assert_holds(snapshot, pairs)
            version += 1


def test_mistakes_in_what_was_known_are_found(snapshot: Snapshot) -> None:
    pairs = fresh()
    for version in range(2):
        snapshot.write(pairs, version)
    name, tensor = pairs[3]
    with pytest.raises(ValueError, match="tensors are missing"):
        snapshot.write(pairs[:-1], 2)
    with pytest.raises(ValueError, match="arrived twice"):
        snapshot.write([*pairs, pairs[0]], 2)
    with pytest.raises(ValueError, match=f"{name}: shape"):
        snapshot.write([*pairs[:3], (name, tensor[..., :-1]), *pairs[4:]], 2)
    with pytest.raises(ValueError, match="unheard: the model has no such tensor"):
        snapshot.write([*pairs[:3], ("unheard", tensor), *pairs[4:]], 2)
    with pytest.raises(ValueError, match="must be pairs of a name and a torch.Tensor"):
        snapshot.write([*pairs[:3], (name, None), *pairs[4:]], 2)
    before = tensor.clone()
    tensor.flatten()[-1] = float("nan")
    with pytest.raises(ValueError, match=f"{name}: 1 of {tensor.numel()} values are not finite in torch.bfloat16"):
        snapshot.write(pairs, 2)
    tensor.copy_(before)
    assert snapshot.write(pairs, 2)
    assert_holds(snapshot, pairs)


def test_what_comes_one_by_one_is_read_before_the_next_is_asked_for(snapshot: Snapshot) -> None:
    """One buffer may serve all tensors of a generator."""
    buffer = torch.empty(max(tensor.numel() for tensor in TENSORS.values()))

    def lazy() -> Iterator[tuple[str, Tensor]]:
        for name in NAMES:
            view = buffer[: TENSORS[name].numel()].view(TENSORS[name].shape)
            view.copy_(TENSORS[name])
            yield name, view
        buffer.fill_(7.0)

    for version in range(4):
        assert snapshot.write(lazy(), version)
        assert_holds(snapshot, fresh())
