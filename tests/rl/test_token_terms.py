"""Terms of tokens and their gradients against autograd of the formulae, in float64; chunks change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE

import pearl.rl.token_terms as module
from pearl.rl.token_terms import Head, token_terms

N, D, V = 11, 5, 17


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Head]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, V, (N,), generator=generator)
    return draw(N, D).requires_grad_(), draw(V, D).requires_grad_(), targets, Head(draw(N, D), draw(V, D))


def by_autograd(hidden: Tensor, weight: Tensor, targets: Tensor, head: Head | None, temperature: float) -> list[Tensor]:
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    kl = torch.zeros(len(targets), dtype=logp.dtype)
    if head is not None:
        kl = (logp.exp() * (logp - (head.hidden_ND @ head.weight_VD.T / temperature).log_softmax(-1))).sum(-1)
    return [logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), kl]


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("referred", [True, False])
def test_values_and_gradients(rows: int, temperature: float, referred: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "COLUMNS", 1)  # pieces of 1, 6, 17 and 17 of the 17 columns
    hidden, weight, targets, head = tensors()
    head = head if referred else None
    terms = token_terms(hidden, weight, targets, temperature=temperature, rows=rows, reference=head)
    expected = by_autograd(hidden, weight, targets, head, temperature)
    factors = torch.randn(3, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, theirs in zip(terms, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    ours = torch.autograd.grad(sum((f * t).sum() for f, t in zip(factors, terms, strict=True)), (hidden, weight))
    theirs = torch.autograd.grad(sum((f * t).sum() for f, t in zip(factors, expected, strict=True)), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_a_frozen_head_gets_no_gradient_and_none_is_made():
    hidden, weight, targets, _ = tensors()
    weight.requires_grad_(False)
    token_terms(hidden, weight, targets, rows=4).logprobs_N.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_bf16_is_computed_in_fp32():
    hidden, weight, targets, _ = tensors(torch.bfloat16)
    terms = token_terms(hidden, weight, targets, rows=4)
    assert terms.logprobs_N.dtype == torch.float32
    wide = by_autograd(hidden.detach().double(), weight.detach().double(), targets, None, 1.0)
    torch.testing.assert_close(terms.logprobs_N.double(), wide[0], atol=1e-5, rtol=0)
    terms.logprobs_N.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    terms = token_terms(hidden, weight, torch.tensor([1, 1]), reference=Head(-hidden.detach(), weight.detach()))
    assert terms.logprobs_N.tolist() == [-2e4, 0.0] and terms.kl_N.tolist() == [2e4, 2e4]
    sum(term.sum() for term in terms).backward()
    assert bool(hidden.grad.isfinite().all()) and bool(weight.grad.isfinite().all())


def test_no_rows():
    hidden, weight = torch.zeros(0, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
    terms = token_terms(hidden, weight, torch.zeros(0, dtype=torch.long))
    assert [len(term) for term in terms] == [0, 0, 0]
    terms.logprobs_N.sum().backward()
    assert bool((weight.grad == 0).all())


def test_uniform_by_hand():
    hidden, weight = torch.zeros(1, D), torch.zeros(V, D)
    terms = token_terms(hidden, weight, torch.tensor([3]))
    assert float(terms.logprobs_N) == pytest.approx(-math.log(V)) and float(terms.entropy_N) == pytest.approx(math.log(V))


def test_only_some_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch):
    """Forwards and backwards, no tensor of the operation has as many elements as there are logits."""
    monkeypatch.setattr(module, "COLUMNS", 2)
    hidden, weight, targets, _ = tensors()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[:1] == (N,):
                largest = max(largest, out.numel())
            return out

    terms = token_terms(hidden, weight, targets, rows=2)
    with Watch():
        token_terms(hidden, weight, targets, rows=2)
        terms.logprobs_N.sum().backward()
    assert 3 * N <= largest <= N * D < N * V  # 2 rows' 34 logits are 3 columns of the 11 rows


def test_narrow_products_cost_what_bf16_factors_do():
    hidden, weight, targets, _ = tensors(torch.float32)
    rounded = [x.detach().bfloat16().float().requires_grad_() for x in (hidden, weight)]
    narrow, exact = token_terms(hidden, weight, targets, narrow=True), token_terms(*rounded, targets)
    torch.testing.assert_close(narrow.logprobs_N, exact.logprobs_N, atol=1e-5, rtol=0)
    ours = torch.autograd.grad(narrow.logprobs_N.sum(), (hidden, weight))
    theirs = torch.autograd.grad(exact.logprobs_N.sum(), rounded)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32 and 0 < float((a - b).norm() / b.norm()) < 2**-7


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_triton_kernels_give_the_same_values_and_gradients(temperature: float, frozen: bool):
    """In Triton's interpreter here; on a GPU they are what the trainer takes."""
    pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")
    found = []
    for tiles in (True, False):
        hidden, weight, targets, _ = (x.to(DEVICE) if isinstance(x, Tensor) else x for x in tensors(torch.float32))
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
        terms = token_terms(hidden, weight, targets, temperature=temperature, tiles=tiles)
        factors = torch.randn(2, N, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        (factors[0] @ terms.logprobs_N + factors[1] @ terms.entropy_N).backward()
        assert bool((terms.kl_N == 0).all()) and (weight.grad is None) == frozen
        found.append([terms.logprobs_N.detach(), terms.entropy_N.detach(), hidden.grad, *([] if frozen else [weight.grad])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_exact_kl_and_float64_never_go_by_tiles():
    hidden, weight, targets, head = tensors()
    assert token_terms(hidden, weight, targets, reference=head, tiles=True).kl_N.abs().min() > 0
    assert token_terms(hidden, weight, targets, tiles=True).logprobs_N.dtype == torch.float64
