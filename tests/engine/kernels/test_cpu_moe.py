"""Mixtures of experts of the CPU kernels against loops in float64 and against the torch code, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from native_cases import ISAS, cpu, pack, same_bits, using
from torch import Tensor

from pearl.engine.kernels.experts import mix, route

FP32, BF16 = torch.float32, torch.bfloat16
each_isa = pytest.mark.parametrize("isa", ISAS)
each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One layer of experts and its inputs."""

    x_TD: Tensor
    router_ED: Tensor
    gate_up_EFD: Tensor
    down_EDF: Tensor
    top_k: int
    normalise: bool


def mixture(
    rows: int, hidden: int, inner: int, experts: int, top_k: int, *, dtype: torch.dtype = FP32, normalise: bool = True
) -> Mixture:
    generator = torch.Generator().manual_seed(rows * 7 + hidden)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Mixture(
        x_TD=draw(rows, hidden),
        router_ED=draw(experts, hidden),
        gate_up_EFD=draw(experts, 2 * inner, hidden),
        down_EDF=draw(experts, hidden, inner),
        top_k=top_k,
        normalise=normalise,
    )


def run(m: Mixture, first: int = 0, last: int | None = None) -> Tensor:
    """With the experts first .. last-1 alone."""
    router = pack(m.router_ED)
    gate_up = [pack(weight, halves=True) for weight in m.gate_up_EFD[first:last]]
    down = [pack(weight) for weight in m.down_EDF[first:last]]
    y = torch.full_like(m.x_TD, torch.nan)
    cpu.moe(
        m.x_TD.data_ptr(),
        len(m.x_TD),
        router.weight,
        [one.weight for one in gate_up],
        [one.weight for one in down],
        first,
        m.top_k,
        m.normalise,
        y.data_ptr(),
    )
    return y


def exact(m: Mixture, first: int = 0, last: int | None = None) -> Tensor:
    """The definition, a token and an expert at a time, in float64."""
    out = torch.zeros(m.x_TD.shape, dtype=torch.float64)
    here = range(len(m.router_ED))[first:last]
    for t, x in enumerate(m.x_TD.double()):
        shares = torch.softmax(m.router_ED.double() @ x, dim=0)
        chosen = sorted(range(len(shares)), key=lambda e: (-float(shares[e]), e))[: m.top_k]
        whole = float(shares[chosen].sum()) if m.normalise else 1.0
        for e in set(chosen) & set(here):
            gate, up = (m.gate_up_EFD[e].double() @ x).chunk(2)
            out[t] += shares[e] / whole * (m.down_EDF[e].double() @ (F.silu(gate) * up))
    return out


def assert_close(y: Tensor, wanted: Tensor) -> None:
    """Rounded products go into sums of random sign, so the error is measured against the size of the whole."""
    scale = float(wanted.abs().max())
    error = float((y.double() - wanted).abs().max())
    assert error <= scale * (2e-5 if y.dtype == FP32 else 1.5e-2), (error, scale)


@each_isa
@each_dtype
@pytest.mark.parametrize("normalise", [True, False])
def test_mixtures_are_right(isa: str, dtype: torch.dtype, normalise: bool) -> None:
    with using(isa):
        for rows in (1, 2, 9, 40):
            for shape in ((64, 32, 8, 2), (33, 17, 5, 3), (48, 48, 3, 1), (50, 20, 17, 17)):
                m = mixture(rows, *shape, dtype=dtype, normalise=normalise)
                assert_close(run(m), exact(m))


def test_shares_matter() -> None:
    """The cases above would show it if they were not divided, or not used."""
    m = mixture(9, 64, 32, 8, 2)
    other = mixture(9, 64, 32, 8, 2, normalise=False)
    assert float((exact(m) - exact(other)).abs().max()) > 0.01 * float(exact(m).abs().max())


@each_isa
def test_parts_of_the_experts_add_up(isa: str) -> None:
    m = mixture(21, 48, 24, 7, 3)
    with using(isa):
        parts = [run(m, 0, 3), run(m, 3, 4), run(m, 4, 7)]
        for part, (first, last) in zip(parts, ((0, 3), (3, 4), (4, 7)), strict=True):
            assert_close(part, exact(m, first, last))
        assert torch.allclose(sum(parts), run(m), rtol=1e-4, atol=1e-4)
        assert not bool(run(m, 0, 0).any())


@each_isa
@each_dtype
def test_ties_go_to_the_lowest_number(isa: str, dtype: torch.dtype) -> None:
    """(Whole numbers: so that the logits are exact, in any order of the sum.)"""
    m = mixture(5, 32, 16, 9, 4, dtype=dtype)
    m.x_TD.mul_(2).round_()
    m.router_ED[:] = m.router_ED[:1].sign()
    with using(isa):
        assert_close(run(m), exact(m))
        m.router_ED[6] += m.x_TD[2].sign()  # one that stands out, for some tokens; the others still tie
        assert_close(run(m), exact(m))


@each_isa
@each_dtype
def test_a_token_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    m = mixture(130, 49, 20, 6, 2, dtype=dtype)
    with using(isa):
        whole = run(m)
        for first, last in ((0, 1), (129, 130), (3, 12), (60, 130)):
            part = Mixture(
                x_TD=m.x_TD[first:last].contiguous(),
                router_ED=m.router_ED,
                gate_up_EFD=m.gate_up_EFD,
                down_EDF=m.down_EDF,
                top_k=m.top_k,
                normalise=m.normalise,
            )
            assert same_bits(run(part), whole[first:last])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    m = mixture(130, 64, 100, 6, 2, dtype=BF16)
    alone = run(m)
    with using(threads=threads):
        for _ in range(10):
            assert same_bits(run(m), alone)


def test_no_further_from_the_truth_than_the_torch_code() -> None:
    m = mixture(200, 64, 96, 8, 2, dtype=BF16)
    experts, shares = route(m.x_TD, m.router_ED, m.top_k, m.normalise)
    theirs = mix(m.x_TD, experts, shares, m.gate_up_EFD, m.down_EDF, 0)
    wanted = exact(m)
    assert float((run(m).double() - wanted).abs().mean()) <= 1.05 * float((theirs.double() - wanted).abs().mean())


def test_an_empty_batch_does_nothing() -> None:
    assert run(mixture(0, 32, 16, 4, 2)).shape == (0, 32)


def test_wrong_arguments_are_named() -> None:
    m = mixture(2, 32, 16, 4, 2)
    router, gate_up, down = pack(m.router_ED), pack(m.gate_up_EFD[0], halves=True), pack(m.down_EDF[0])
    y = torch.empty_like(m.x_TD)

    def call(up: object, low: object, first: int = 0, top_k: int = 2) -> None:
        cpu.moe(m.x_TD.data_ptr(), 2, router.weight, [up], [low], first, top_k, True, y.data_ptr())

    call(gate_up.weight, down.weight)
    with pytest.raises(ValueError, match="in halves"):
        call(pack(m.gate_up_EFD[0]).weight, down.weight)
    with pytest.raises(ValueError, match="of one inner size"):
        call(gate_up.weight, pack(m.down_EDF[0][:, :15]).weight)
    with pytest.raises(ValueError, match="experts of the router=4: must be >= 5"):
        call(gate_up.weight, down.weight, first=4)
    with pytest.raises(ValueError, match="top_k=0"):
        call(gate_up.weight, down.weight, top_k=0)
