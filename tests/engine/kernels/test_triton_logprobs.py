"""Log-probs over tiles of the vocabulary against a log-softmax in float64: values, entropies and gradients."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE, DTYPES, NAN, gap, normal

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine.kernels.triton import token_logprobs as module
from pearl.engine.kernels.triton.token_logprobs import token_logprobs

TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def exact(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (hidden @ head.T / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "dim", "vocab", "temperature"), [(1, 16, 3, 1.0), (9, 40, 300, 0.7), (70, 64, 129, 1.0), (130, 33, 64, 2.0)]
)
def test_values_and_gradients(
    tokens: int, dim: int, vocab: int, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles and parts of the vocabulary in both directions; the last ones not full."""
    monkeypatch.setattr(module, "GRADIENT_ELEMENTS", tokens * 128)
    hidden, head = normal(tokens, dim, dtype=dtype), normal(vocab, dim, dtype=dtype, scale=0.4)
    targets = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    targets[0], targets[-1] = 0, vocab - 1
    weights = normal(tokens, seed=3), normal(tokens, seed=4)
    results = []
    for function, wide in ((token_logprobs, dtype), (exact, torch.float64)):
        inputs = [part.detach().to(wide).requires_grad_() for part in (hidden, head)]
        logprobs, entropies = function(*inputs, targets, temperature)
        (logprobs @ weights[0].to(logprobs.dtype) + entropies @ weights[1].to(logprobs.dtype)).backward()
        results.append([logprobs.detach(), entropies.detach(), *(part.grad for part in inputs)])
    assert [part.dtype for part in results[0]] == [torch.float32, torch.float32, dtype, dtype]
    assert max(float((a - b).abs().max()) for a, b in zip(results[0][:2], results[1][:2], strict=True)) < 1e-5
    assert max(gap(a, b) for a, b in zip(results[0][2:], results[1][2:], strict=True)) < TOLERANCE[dtype]


def test_no_tensor_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What backward holds at once is bounded, whatever the vocabulary."""
    monkeypatch.setattr(module, "GRADIENT_ELEMENTS", 16 * 64)
    made: list[int] = []
    whole = module._logit_gradient

    def noted(*arguments):
        made.append(whole(*arguments).numel())
        return whole(*arguments)

    monkeypatch.setattr(module, "_logit_gradient", noted)
    hidden, head = normal(16, 16).requires_grad_(), normal(500, 16).requires_grad_()
    token_logprobs(hidden, head, torch.zeros(16, dtype=torch.int64, device=DEVICE))[0].sum().backward()
    assert len(made) == 8 and max(made) == 16 * 64 and sum(made) == 16 * 500


def test_only_what_wants_a_gradient_gets_one() -> None:
    targets = torch.tensor([1, 2], device=DEVICE)
    hidden, head = normal(2, 16).requires_grad_(), normal(10, 16)
    token_logprobs(hidden, head, targets)[0].sum().backward()
    assert hidden.grad is not None and head.grad is None
    frozen, trained = normal(2, 16), normal(10, 16).requires_grad_()
    token_logprobs(frozen, trained, targets)[1].sum().backward()
    assert trained.grad is not None and frozen.grad is None


def test_sharp_and_broken_rows() -> None:
    """A certain token has log-prob 0 and entropy 0; a NaN stays in its row; no rows are no error."""
    hidden, head = normal(3, 16), normal(40, 16)
    hidden[0] = 100.0 * head[7]
    hidden[1] = NAN
    logprobs, entropies = token_logprobs(hidden, head, torch.tensor([7, 7, 7], device=DEVICE))
    assert float(logprobs[0]) == 0.0 and float(entropies[0]) == 0.0
    assert bool(logprobs[1].isnan()) and bool(entropies[1].isnan())
    expected = exact(hidden[2:].double(), head.double(), torch.tensor([7], device=DEVICE), 1.0)
    assert float(logprobs[2]) == pytest.approx(float(expected[0]), abs=1e-5)
    assert float(entropies[2]) == pytest.approx(float(expected[1]), abs=1e-5)
    none = token_logprobs(hidden[:0].requires_grad_(), head, torch.zeros(0, dtype=torch.int64, device=DEVICE))[0]
    none.sum().backward()
    assert none.shape == (0,)


def test_a_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature=0.0: must be > 0"):
        token_logprobs(normal(1, 16), normal(3, 16), torch.tensor([0], device=DEVICE), 0.0)
