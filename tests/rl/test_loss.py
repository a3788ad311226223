"""Losses against hand-computed numbers and, in float64, against autograd of the formulae written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pearl.config import AlgorithmOptions
from pearl.rl.loss import exact_kl, k3, policy_loss, sft_loss

PLAIN = AlgorithmOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0)


def rows(count: int, vocab: int = 7, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, vocab, generator=generator, dtype=torch.float64)


def logits_with(ratios: list[float], behaviour: float = math.log(0.2)) -> tuple[Tensor, Tensor, Tensor]:
    """Two-token vocabularies in which token 0 has probability 0.2 * ratio; (logits, targets, behaviour)."""
    probability = torch.tensor([0.2 * ratio for ratio in ratios], dtype=torch.float64)
    logits = torch.stack([probability.log(), (1 - probability).log()], dim=1).requires_grad_()
    return logits, torch.zeros(len(ratios), dtype=torch.long), torch.full((len(ratios),), behaviour, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "clipped"),
    [
        (1.0, 1.0, 1.0, False),
        (1.25, 2.0, 2.5, False),  # inside the wider upper bound
        (1.5, 2.0, 2.56, True),  # 1.28 * 2
        (1.5, -2.0, -3.0, False),  # a bad action made likelier keeps its gradient
        (0.5, 2.0, 1.0, False),
        (0.5, -2.0, -1.6, True),  # 0.8 * -2
        (0.85, -2.0, -1.7, False),
        (3.0, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, term: float, clipped: bool):
    logits, targets, behaviour = logits_with([ratio])
    result = policy_loss(logits, targets, behaviour, torch.tensor([advantage], dtype=torch.float64), PLAIN)
    assert result.loss.item() == pytest.approx(-term, abs=1e-12)
    assert float(result.metrics["clipped"]) == float(clipped)
    assert float(result.metrics["ratio"]) == pytest.approx(ratio)
    assert float(result.metrics["log_ratio_abs"]) == pytest.approx(abs(math.log(ratio)))
    assert float(result.metrics["kl"]) == 0.0
    result.loss.backward()
    assert bool((logits.grad == 0).all()) == (clipped or advantage == 0.0)


def test_on_policy_gradient_is_that_of_reinforce():
    logits = rows(5).requires_grad_()
    targets, advantages = torch.tensor([0, 3, 6, 2, 2]), torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    behaviour = logits.detach().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(policy_loss(logits, targets, behaviour, advantages, PLAIN).loss, logits)
    one_hot = torch.nn.functional.one_hot(targets, 7).double()
    torch.testing.assert_close(gradient, -advantages[:, None] * (one_hot - logits.detach().softmax(-1)), atol=1e-12, rtol=0)
    (without,) = torch.autograd.grad(policy_loss(logits, targets, None, advantages, PLAIN).loss, logits)
    torch.testing.assert_close(without, gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "weight", "advantage", "term", "clipped", "capped"),
    [
        (1.0, 0.5, 2.0, 1.0, False, False),
        (1.0, 1.9, -1.0, -1.9, False, False),
        (1.0, 2.5, 1.0, 2.0, False, True),  # the cap
        (1.5, 0.5, 2.0, 1.28, True, False),  # clipped as if the proximal policy had sampled it
        (1.25, 8.0, 2.0, 5.0, False, True),  # ratio to the behaviour is 10, to the proximal policy 1.25: not clipped
    ],
)
def test_corrected_surrogate_by_hand(
    ratio: float, weight: float, advantage: float, term: float, clipped: bool, capped: bool
):
    logits, targets, proximal = logits_with([ratio, ratio])
    behaviour = proximal - torch.tensor([math.log(weight), 0.0], dtype=torch.float64)
    advantages = torch.tensor([advantage, 0.0], dtype=torch.float64)
    first = torch.tensor([True, False])
    result = policy_loss(logits, targets, behaviour, advantages, PLAIN, proximal_N=proximal, corrected_N=first)
    assert result.loss.item() == pytest.approx(-term, abs=1e-12)
    assert float(result.metrics["clipped"]) == float(clipped)
    assert float(result.metrics["ratio"]) == pytest.approx(2 * ratio)
    assert (float(result.metrics["corrected"]), float(result.metrics["capped"])) == (1.0, float(capped))
    assert float(result.metrics["importance"]) == pytest.approx(min(weight, PLAIN.importance_cap))


def test_corrected_gradient_is_the_on_policy_one_in_expectation():
    """Over all actions of a state, drawn from another policy: sum_a mu(a) w(a) A(a) grad log pi(a) = grad sum_a pi(a) A(a)."""
    logits = rows(1, vocab=5).requires_grad_()
    behaviour = rows(1, vocab=5, seed=1, scale=0.3).log_softmax(-1)[0]
    advantages = rows(1, vocab=5, seed=2)[0]
    (expected,) = torch.autograd.grad(-(logits.softmax(-1)[0] * advantages).sum(), logits)
    weights = (logits.detach().log_softmax(-1)[0] - behaviour).exp()
    options = AlgorithmOptions(importance_cap=weights.max().item() + 1.0)

    def gradient(options: AlgorithmOptions) -> Tensor:
        every, mask = torch.arange(5), torch.ones(5, dtype=torch.bool)
        result = policy_loss(logits.expand(5, 5), every, behaviour, behaviour.exp() * advantages, options, corrected_N=mask)
        return torch.autograd.grad(result.loss, logits)[0]

    torch.testing.assert_close(gradient(options), expected, atol=1e-12, rtol=0)
    assert (gradient(AlgorithmOptions(importance_cap=1.0)) - expected).abs().max() > 0.01


def test_correcting_what_needs_no_correction_changes_nothing():
    """Behaviour and proximal log-probs that differ by arithmetic alone give the gradient of the plain ratio."""
    logits = rows(40).requires_grad_()
    targets, advantages = torch.arange(40) % 7, rows(40, seed=1)[:, 0]
    proximal = (logits.detach() + 0.05 * rows(40, seed=2)).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    behaviour = proximal + 1e-7 * rows(40, seed=3)[:, 0]
    mask = torch.ones(40, dtype=torch.bool)
    plain = torch.autograd.grad(policy_loss(logits, targets, behaviour, advantages, PLAIN).loss, logits)[0]
    corrected = policy_loss(logits, targets, behaviour, advantages, PLAIN, proximal_N=proximal, corrected_N=mask)
    torch.testing.assert_close(torch.autograd.grad(corrected.loss, logits)[0], plain, atol=1e-6, rtol=0)
    assert float(corrected.metrics["importance"]) / 40 == pytest.approx(1.0, abs=1e-6)


def test_extreme_behaviour_stays_finite():
    logits = rows(3).requires_grad_()
    behaviour = torch.tensor([-1e5, 0.0, -1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    result = policy_loss(logits, torch.arange(3), behaviour, torch.ones(3), PLAIN, corrected_N=mask)
    result.loss.backward()
    assert all(math.isfinite(float(value)) for value in result.metrics.values()) and bool(logits.grad.isfinite().all())


def test_sums_add_up_over_parts():
    logits, targets = rows(9), torch.arange(9) % 7
    behaviour, advantages = rows(9, seed=1)[:, 0] - 2, rows(9, seed=2)[:, 0]
    options = AlgorithmOptions(kl_coef=0.3, entropy_coef=0.1)
    reference = rows(9, seed=3)
    whole = policy_loss(logits, targets, behaviour, advantages, options, reference_NV=reference)
    parts = [
        policy_loss(logits[p], targets[p], behaviour[p], advantages[p], options, reference_NV=reference[p])
        for p in (slice(0, 2), slice(2, 2), slice(2, 9))
    ]
    for name, value in whole.metrics.items():
        assert float(sum(part.metrics[name] for part in parts)) == pytest.approx(float(value), abs=1e-12), name
    torch.testing.assert_close(torch.cat([part.logprobs_N for part in parts]), whole.logprobs_N)


def test_temperature_is_part_of_the_distribution():
    logits, targets = rows(4), torch.tensor([1, 2, 3, 4])
    advantages = torch.ones(4, dtype=torch.float64)
    expected = (logits / 0.7).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    result = policy_loss(logits, targets, expected, advantages, PLAIN, temperature=0.7)
    assert float(result.metrics["ratio"]) == pytest.approx(4.0)
    torch.testing.assert_close(result.logprobs_N, expected)
    assert float(policy_loss(logits, targets, expected, advantages, PLAIN).metrics["log_ratio_abs"]) > 0.1
    reference = rows(4, seed=11)
    kl = exact_kl((logits / 0.7).log_softmax(-1), (reference / 0.7).log_softmax(-1)).sum()
    both = policy_loss(logits, targets, expected, advantages, PLAIN, reference_NV=reference, temperature=0.7)
    assert float(both.metrics["kl"]) == pytest.approx(kl.item())


def test_exact_kl_by_hand_and_its_gradient():
    p, q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64), torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    assert float(exact_kl(p.log(), q.log())) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    logits, reference = rows(6, seed=4).requires_grad_(), rows(6, seed=5)
    targets, zeros = torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.float64)
    options = AlgorithmOptions(kl_coef=0.7)
    result = policy_loss(logits, targets, zeros, zeros, options, reference_NV=reference)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    logp, logq = logits.detach().log_softmax(-1), reference.log_softmax(-1)
    kl = (logp.exp() * (logp - logq)).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, 0.7 * logp.exp() * (logp - logq - kl), atol=1e-12, rtol=0)
    assert float(result.metrics["kl"]) == pytest.approx(float(kl.sum()))


def test_kl_to_itself_is_zero_with_zero_gradient():
    logits = rows(6).requires_grad_()
    zeros = torch.zeros(6, dtype=torch.float64)
    for estimator in ("exact", "k3"):
        options = AlgorithmOptions(kl_coef=1.0, kl_estimator=estimator)
        result = policy_loss(logits, torch.arange(6), zeros, zeros, options, reference_NV=logits)
        assert abs(float(result.metrics["kl"])) < 1e-14
        assert float(torch.autograd.grad(result.loss, logits)[0].abs().max()) < 1e-14


def test_k3_is_not_clamped_in_value_or_gradient():
    # q - p = 12: a clamp of the difference at 10, or of the result at 10 (both are in use elsewhere), would show.
    logp = torch.tensor([-13.0], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([-1.0], dtype=torch.float64)
    value = k3(logp, logq)
    assert value.item() == pytest.approx(math.exp(12) - 13)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert float(gradient) == pytest.approx(1 - math.exp(12))


def test_k3_in_the_policy_loss_is_of_the_targets():
    logits, reference = rows(5, seed=6).requires_grad_(), rows(5, seed=7)
    targets, zeros = torch.tensor([6, 5, 4, 3, 2]), torch.zeros(5, dtype=torch.float64)
    options = AlgorithmOptions(kl_coef=0.5, kl_estimator="k3")
    result = policy_loss(logits, targets, zeros, zeros, options, reference_NV=reference)
    p = logits.log_softmax(-1)[torch.arange(5), targets]
    q = reference.log_softmax(-1)[torch.arange(5), targets]
    expected = ((q - p).exp() - (q - p) - 1).sum()
    assert float(result.metrics["kl"]) == pytest.approx(expected.item())
    torch.testing.assert_close(
        torch.autograd.grad(result.loss, logits)[0], torch.autograd.grad(0.5 * expected, logits)[0], atol=1e-12, rtol=0
    )


def test_k3_is_unbiased_for_the_exact_kl():
    logp, logq = rows(1, seed=8).log_softmax(-1)[0], rows(1, seed=9).log_softmax(-1)[0]
    mean = (logp.exp() * k3(logp, logq)).sum()
    assert float(mean) == pytest.approx(float(exact_kl(logp[None], logq[None])))


def test_entropy_bonus_pushes_towards_uniform():
    logits = rows(3, seed=10, scale=2.0).requires_grad_()
    zeros = torch.zeros(3, dtype=torch.float64)
    result = policy_loss(logits, torch.zeros(3, dtype=torch.long), zeros, zeros, AlgorithmOptions(entropy_coef=0.25))
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
    assert float(result.metrics["entropy"]) == pytest.approx(entropy.item())
    expected = torch.autograd.grad(-0.25 * entropy, logits)[0]
    torch.testing.assert_close(torch.autograd.grad(result.loss, logits)[0], expected, atol=1e-12, rtol=0)


def test_zero_advantages_have_exactly_zero_gradient():
    logits = rows(6).float().requires_grad_()
    behaviour = torch.tensor([-30.0, -1.0, -2.0, -0.1, -5.0, -9.0])
    policy_loss(logits, torch.arange(6), behaviour, torch.zeros(6), PLAIN).loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("kind", ["policy", "sft"])
def test_no_rows_give_a_zero_loss_with_a_graph(kind: str):
    logits = torch.zeros(0, 7, requires_grad=True)
    empty, targets = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    options = AlgorithmOptions(kl_coef=1.0, entropy_coef=1.0)
    policy = policy_loss(logits, targets, empty, empty, options, reference_NV=torch.zeros(0, 7))
    result = policy if kind == "policy" else sft_loss(logits, targets)
    assert result.loss.item() == 0.0 and all(float(value) == 0.0 for value in result.metrics.values())
    result.loss.backward()
    assert logits.grad.shape == (0, 7)


def test_sft_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
    result = sft_loss(logits, torch.tensor([1, 0]))
    assert result.loss.item() == pytest.approx(-math.log(0.75) - math.log(0.5))
    assert result.logprobs_N.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
