"""Losses against hand-computed numbers and, in float64, against autograd of the formulae written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pearl.config import AlgorithmOptions
from pearl.rl.algorithms import algorithm_of
from pearl.rl.loss import LossSums, PolicyRows, kl_terms, policy_loss
from pearl.rl.loss import sft_loss as weighted_sft_loss
from pearl.rl.token_terms import Head, TokenTerms, token_terms

PLAIN = AlgorithmOptions(clip_low=0.2, clip_high=0.28, importance_cap=2.0)


def rows(count: int, vocab: int = 7, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, vocab, generator=generator, dtype=torch.float64)


def terms_of(logits: Tensor, targets: Tensor, reference: Tensor | None = None, temperature: float = 1.0) -> TokenTerms:
    """The terms of these very logits: their rows are the hidden states, and the output matrix is the identity."""
    one = torch.eye(logits.shape[1], dtype=logits.dtype)
    head = None if reference is None else Head(reference, one)
    return token_terms(logits, one, targets, temperature=temperature, reference=head)


def loss_of(
    logits: Tensor,
    targets: Tensor,
    behaviour: Tensor | None,
    advantages: Tensor,
    options: AlgorithmOptions,
    *,
    proximal_N: Tensor | None = None,
    corrected_N: Tensor | None = None,
    reference_NV: Tensor | None = None,
    temperature: float = 1.0,
    sequence_N: Tensor | None = None,
) -> LossSums:
    """The policy's loss with weights of 1."""
    reference = None if reference_NV is None else terms_of(reference_NV.detach(), targets, temperature=temperature).logprobs_N
    rows = PolicyRows(
        advantages_N=advantages,
        weights_N=torch.ones(len(targets), dtype=logits.dtype),
        sequence_N=torch.zeros_like(targets) if sequence_N is None else sequence_N,
        behaviour_N=behaviour,
        proximal_N=proximal_N,
        corrected_N=corrected_N,
        reference_N=reference,
    )
    return policy_loss(terms_of(logits, targets, reference_NV, temperature), rows, algorithm_of(options))


def sft_loss(logits: Tensor, targets: Tensor) -> LossSums:
    return weighted_sft_loss(terms_of(logits, targets), torch.ones(len(targets), dtype=logits.dtype))


def exact_kl(logp: Tensor, logq: Tensor) -> Tensor:
    return terms_of(logp, torch.zeros(len(logp), dtype=torch.long), logq).kl_N


def k3(logp: Tensor, logq: Tensor) -> Tensor:
    return kl_terms(TokenTerms(logp, logp, logp), logq, "k3")


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
    result = loss_of(logits, targets, behaviour, torch.tensor([advantage], dtype=torch.float64), PLAIN)
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
    (gradient,) = torch.autograd.grad(loss_of(logits, targets, behaviour, advantages, PLAIN).loss, logits)
    one_hot = torch.nn.functional.one_hot(targets, 7).double()
    torch.testing.assert_close(gradient, -advantages[:, None] * (one_hot - logits.detach().softmax(-1)), atol=1e-12, rtol=0)
    (without,) = torch.autograd.grad(loss_of(logits, targets, None, advantages, PLAIN).loss, logits)
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
    result = loss_of(logits, targets, behaviour, advantages, PLAIN, proximal_N=proximal, corrected_N=first)
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
        result = loss_of(logits.expand(5, 5), every, behaviour, behaviour.exp() * advantages, options, corrected_N=mask)
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
    plain = torch.autograd.grad(loss_of(logits, targets, behaviour, advantages, PLAIN).loss, logits)[0]
    corrected = loss_of(logits, targets, behaviour, advantages, PLAIN, proximal_N=proximal, corrected_N=mask)
    torch.testing.assert_close(torch.autograd.grad(corrected.loss, logits)[0], plain, atol=1e-6, rtol=0)
    assert float(corrected.metrics["importance"]) / 40 == pytest.approx(1.0, abs=1e-6)


def test_extreme_behaviour_stays_finite():
    logits = rows(3).requires_grad_()
    behaviour = torch.tensor([-1e5, 0.0, -1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    result = loss_of(logits, torch.arange(3), behaviour, torch.ones(3), PLAIN, corrected_N=mask)
    result.loss.backward()
    assert all(math.isfinite(float(value)) for value in result.metrics.values()) and bool(logits.grad.isfinite().all())


def test_sums_add_up_over_parts():
    logits, targets = rows(9), torch.arange(9) % 7
    behaviour, advantages = rows(9, seed=1)[:, 0] - 2, rows(9, seed=2)[:, 0]
    options = AlgorithmOptions(kl_coef=0.3, entropy_coef=0.1)
    reference = rows(9, seed=3)
    whole = loss_of(logits, targets, behaviour, advantages, options, reference_NV=reference)
    parts = [
        loss_of(logits[p], targets[p], behaviour[p], advantages[p], options, reference_NV=reference[p])
        for p in (slice(0, 2), slice(2, 2), slice(2, 9))
    ]
    for name, value in whole.metrics.items():
        assert float(sum(part.metrics[name] for part in parts)) == pytest.approx(float(value), abs=1e-12), name
    torch.testing.assert_close(torch.cat([part.logprobs_N for part in parts]), whole.logprobs_N)


def test_temperature_is_part_of_the_distribution():
    logits, targets = rows(4), torch.tensor([1, 2, 3, 4])
    advantages = torch.ones(4, dtype=torch.float64)
    expected = (logits / 0.7).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    result = loss_of(logits, targets, expected, advantages, PLAIN, temperature=0.7)
    assert float(result.metrics["ratio"]) == pytest.approx(4.0)
    torch.testing.assert_close(result.logprobs_N, expected)
    assert float(loss_of(logits, targets, expected, advantages, PLAIN).metrics["log_ratio_abs"]) > 0.1
    reference = rows(4, seed=11)
    kl = exact_kl((logits / 0.7).log_softmax(-1), (reference / 0.7).log_softmax(-1)).sum()
    both = loss_of(logits, targets, expected, advantages, PLAIN, reference_NV=reference, temperature=0.7)
    assert float(both.metrics["kl"]) == pytest.approx(kl.item())


def test_exact_kl_by_hand_and_its_gradient():
    p, q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64), torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    assert float(exact_kl(p.log(), q.log())) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    logits, reference = rows(6, seed=4).requires_grad_(), rows(6, seed=5)
    targets, zeros = torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.float64)
    options = AlgorithmOptions(kl_coef=0.7)
    result = loss_of(logits, targets, zeros, zeros, options, reference_NV=reference)
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
        result = loss_of(logits, torch.arange(6), zeros, zeros, options, reference_NV=logits)
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
    result = loss_of(logits, targets, zeros, zeros, options, reference_NV=reference)
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
    result = loss_of(logits, torch.zeros(3, dtype=torch.long), zeros, zeros, AlgorithmOptions(entropy_coef=0.25))
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
    assert float(result.metrics["entropy"]) == pytest.approx(entropy.item())
    expected = torch.autograd.grad(-0.25 * entropy, logits)[0]
    torch.testing.assert_close(torch.autograd.grad(result.loss, logits)[0], expected, atol=1e-12, rtol=0)


def test_zero_advantages_have_exactly_zero_gradient():
    logits = rows(6).float().requires_grad_()
    behaviour = torch.tensor([-30.0, -1.0, -2.0, -0.1, -5.0, -9.0])
    loss_of(logits, torch.arange(6), behaviour, torch.zeros(6), PLAIN).loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("kind", ["policy", "sft"])
def test_no_rows_give_a_zero_loss_with_a_graph(kind: str):
    logits = torch.zeros(0, 7, requires_grad=True)
    empty, targets = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    options = AlgorithmOptions(kl_coef=1.0, entropy_coef=1.0)
    policy = loss_of(logits, targets, empty, empty, options, reference_NV=torch.zeros(0, 7))
    result = policy if kind == "policy" else sft_loss(logits, targets)
    assert result.loss.item() == 0.0 and all(float(value) == 0.0 for value in result.metrics.values())
    result.loss.backward()
    assert logits.grad.shape == (0, 7)


def test_sft_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
    result = sft_loss(logits, torch.tensor([1, 0]))
    assert result.loss.item() == pytest.approx(-math.log(0.75) - math.log(0.5))
    assert result.logprobs_N.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])


# ---------------------------------------------------------------------------------------------------- estimators, importance


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_in_the_loss(estimator: str):
    logits, reference = rows(5, seed=6).requires_grad_(), rows(5, seed=7)
    targets, zeros = torch.tensor([6, 5, 4, 3, 2]), torch.zeros(5, dtype=torch.float64)
    result = loss_of(
        logits, targets, zeros, zeros, AlgorithmOptions(kl_coef=0.5, kl_estimator=estimator), reference_NV=reference
    )
    p = logits.log_softmax(-1)[torch.arange(5), targets]
    d = reference.log_softmax(-1)[torch.arange(5), targets] - p
    expected = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[estimator].sum()
    assert float(result.metrics["kl"]) == pytest.approx(expected.item())
    gradient = torch.autograd.grad(0.5 * expected, logits)[0]
    torch.testing.assert_close(torch.autograd.grad(result.loss, logits)[0], gradient, atol=1e-12, rtol=0)


def test_k2_has_the_gradient_of_the_kl_and_k1_none_in_expectation():
    """Over all tokens of a state, each with its probability: E[grad k2] is the KL's gradient, E[grad k1] is zero."""
    logits, reference = rows(1, seed=8).requires_grad_(), rows(1, seed=9)
    logp, logq = logits.log_softmax(-1)[0], reference.log_softmax(-1)[0]
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    p = logp.exp().detach()
    for estimator, expected in (("k1", torch.zeros_like(exact)), ("k2", exact)):
        values = kl_terms(TokenTerms(logp, logp, logp), logq, estimator)
        (gradient,) = torch.autograd.grad((p * values).sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


OFFS = torch.tensor([0.5, 0.4, -3.0, 0.1], dtype=torch.float64)
"""log(proximal) - log(behaviour) of four tokens; the first two are one sequence, of the third only the last is not stale."""


@pytest.mark.parametrize(
    ("options", "weights", "cut"),
    [
        ({"importance_cap": 1.6}, [1.6, math.exp(0.4), math.exp(-3.0)], 1),
        ({"importance_cap": 2.0, "importance_level": "sequence"}, [2.0, 2.0, math.exp(-3.0)], 2),
        ({"importance_cap": 2.5, "importance_level": "sequence"}, [math.exp(0.9)] * 2 + [math.exp(-3.0)], 0),
        ({"importance_cap": 1.6, "importance_rule": "mask"}, [0.0, math.exp(0.4), 0.0], 2),
        ({"importance_cap": 2.4, "importance_rule": "mask", "importance_level": "sequence"}, [0.0, 0.0, 0.0], 3),
    ],
)
def test_importance_by_hand(options: dict, weights: list[float], cut: int):
    logits, targets = rows(4).requires_grad_(), torch.tensor([0, 1, 2, 3])
    start = logits.detach().log_softmax(-1)[torch.arange(4), targets]
    advantages = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    result = loss_of(
        logits,
        targets,
        start - OFFS,
        advantages,
        AlgorithmOptions(clip_high=9.0, **options),
        corrected_N=mask,
        sequence_N=torch.tensor([4, 4, 2, 2]),
    )
    expected = -sum(w * a for w, a in zip(weights, [1.0, -2.0, 3.0], strict=True)) - math.exp(0.1) * 0.5
    assert result.loss.item() == pytest.approx(expected)
    assert (float(result.metrics["corrected"]), float(result.metrics["capped"])) == (3.0, cut)
    assert float(result.metrics["importance"]) == pytest.approx(sum(weights))


def test_extreme_importance_of_sequences_stays_finite():
    logits = rows(4).float().requires_grad_()
    behaviour = torch.tensor([-2e4, -2e4, 0.0, -1e3])
    for rule in ("truncate", "mask"):
        options = AlgorithmOptions(importance_cap=2.0, importance_level="sequence", importance_rule=rule)
        mask = torch.ones(4, dtype=torch.bool)
        result = loss_of(
            logits, torch.arange(4), behaviour, torch.ones(4), options, corrected_N=mask, sequence_N=torch.tensor([0, 0, 1, 1])
        )
        (gradient,) = torch.autograd.grad(result.loss, logits)
        assert bool(gradient.isfinite().all()) and all(math.isfinite(float(value)) for value in result.metrics.values())


def test_a_good_action_with_an_overflowing_ratio_has_no_gradient():
    logits = rows(2).float().requires_grad_()
    result = loss_of(logits, torch.arange(2), torch.tensor([-300.0, -2.0]), torch.ones(2), PLAIN)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert bool((gradient[0] == 0).all()) and bool(gradient.isfinite().all())


def test_weights_multiply_every_term():
    logits, reference = rows(3).requires_grad_(), rows(3, seed=1)
    targets, weights = torch.tensor([0, 1, 2]), torch.tensor([0.0, 2.0, 0.5], dtype=torch.float64)
    options = AlgorithmOptions(kl_coef=0.3, entropy_coef=0.1)
    terms = terms_of(logits, targets, reference)
    start = terms.logprobs_N.detach()
    given = PolicyRows(
        advantages_N=torch.ones_like(weights), weights_N=weights, sequence_N=targets, behaviour_N=start, reference_N=start
    )
    expected = (weights * (-1.0 + 0.3 * terms.kl_N - 0.1 * terms.entropy_N)).sum()
    assert policy_loss(terms, given, algorithm_of(options)).loss.item() == pytest.approx(expected.item())
