"""The mixture of experts of the Triton kernels against the one in plain torch."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE, DTYPES, NAN, TOLERANCE, gap, normal, uninitialised_memory_is_nan

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine.kernels.experts import route as reference_route
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.kernels.triton import moe
from pearl.engine.kernels.triton.moe import plan_grouped, route

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets inf

REFERENCE = ReferenceKernels()


def weights(experts: int, dim: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (
        normal(experts, dim, dtype=dtype),
        normal(experts, 2 * width, dim, dtype=dtype, scale=0.3),
        normal(experts, dim, width, dtype=dtype, scale=0.3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "dim", "experts", "top_k", "width", "normalise"),
    [(1, 16, 4, 4, 16, True), (7, 24, 5, 2, 20, True), (40, 70, 3, 1, 70, False), (20, 64, 20, 6, 8, True)],
)
def test_experts(tokens: int, dim: int, experts: int, top_k: int, width: int, normalise: bool, dtype: torch.dtype) -> None:
    """Experts without a token, more pairs than a tile holds, sizes that are no multiple of anything."""
    x, parts = normal(tokens, dim, dtype=dtype, seed=9), weights(experts, dim, width, dtype)
    with uninitialised_memory_is_nan():
        found = moe.moe(x, *parts, top_k=top_k, normalise=normalise)
    expected = REFERENCE.moe(x, *parts, top_k=top_k, normalise=normalise)
    assert found.dtype == dtype
    assert gap(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("first", "here"), [(0, 2), (2, 3), (5, 1)])
def test_a_part_of_the_experts(first: int, here: int) -> None:
    """A rank's experts give their part; a token none of whose experts are here gets zeros."""
    x, (router, gate_up, down) = normal(9, 16, seed=9), weights(6, 16, 12)
    part = slice(first, first + here)
    with uninitialised_memory_is_nan():
        found = moe.moe(x, router, gate_up[part], down[part], top_k=2, normalise=True, first=first)
    expected = REFERENCE.moe(x, router, gate_up[part], down[part], top_k=2, normalise=True, first=first)
    assert gap(found, expected) < 1e-5
    assert bool((expected == 0).all(-1).any())
    assert torch.equal((found == 0).all(-1), (expected == 0).all(-1))


def test_many_pairs_of_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several full tiles of one expert, tall ones, with more pairs than the sorting looks at in one go."""
    monkeypatch.setattr(moe, "SCAN", 64)
    x, (router, gate_up, down) = normal(150, 16, seed=9).abs(), weights(3, 16, 16)
    router[1] = 3.0
    assert plan_grouped(pairs=300, experts=3, itemsize=4).rows == 64
    found = moe.moe(x, router, gate_up, down, top_k=2, normalise=False)
    assert gap(found, REFERENCE.moe(x, router, gate_up, down, top_k=2, normalise=False)) < 1e-5


def test_no_tokens() -> None:
    assert moe.moe(normal(0, 16), *weights(3, 16, 16), top_k=2, normalise=True).shape == (0, 16)


def test_routing_takes_the_lowest_of_equals() -> None:
    x, router = torch.ones(2, 8, device=DEVICE), torch.zeros(7, 8, device=DEVICE)
    router[5] = 1.0
    experts, shares = route(x, router, 3, True)
    expected_experts, expected_shares = reference_route(x, router, 3, True)
    assert experts.tolist() == expected_experts.tolist() == [[5, 0, 1]] * 2
    assert gap(shares, expected_shares) < 1e-6


def test_routing_of_nan_stays_in_its_token() -> None:
    x, (router, gate_up, down) = normal(3, 16, seed=9), weights(5, 16, 8)
    expected = REFERENCE.moe(x, router, gate_up, down, top_k=2, normalise=True)
    x[1] = NAN
    experts, _ = route(x, router, 2, True)
    assert bool(((experts >= 0) & (experts < 5)).all())
    found = moe.moe(x, router, gate_up, down, top_k=2, normalise=True)
    assert bool(found[1].isnan().all())
    assert gap(found[[0, 2]], expected[[0, 2]]) < 1e-5


def test_tiles_suffice_for_any_routing() -> None:
    """Pairs are spread at will: every expert may have a tile that is not full, and none needs more."""
    for pairs in (1, 8, 100, 2000):
        for experts in (1, 3, 128):
            plan = plan_grouped(pairs=pairs, experts=experts, itemsize=2)
            alone = min(experts, pairs) - 1  # experts with one pair each, the rest at one
            assert alone + -(-(pairs - alone) // plan.rows) <= plan.tiles
