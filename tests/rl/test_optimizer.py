"""The schedule by hand; AdamW over the flat vector against torch's own over the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pearl.config import OptimizerOptions
from pearl.rl.optimizer import MOMENTS, FlatParameters, adamw, clip_, learning_rate, moments, prime, update, updates_made


def test_constant_and_warmup():
    options = OptimizerOptions(lr=0.1, warmup_steps=4)
    assert [learning_rate(k, options, 10) for k in (0, 1, 3, 4, 9)] == pytest.approx([0.025, 0.05, 0.1, 0.1, 0.1])


def test_linear_reaches_zero_at_max_steps():
    options = OptimizerOptions(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(k, options, 6) for k in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_cosine():
    options = OptimizerOptions(lr=2.0, schedule="cosine")
    assert [learning_rate(k, options, 4) for k in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])
    assert learning_rate(1, options, 4) == pytest.approx(1.0 + 0.5**0.5)


def test_warmup_longer_than_the_run():
    assert learning_rate(3, OptimizerOptions(lr=1.0, warmup_steps=8, schedule="cosine"), 4) == 0.5


def flat_of(values: list[nn.Parameter]) -> FlatParameters:
    return FlatParameters((f"p{index}", value) for index, value in enumerate(values))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (3, 7), (2, 2), (1,)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def loss(values: list[nn.Parameter]) -> torch.Tensor:
    return sum(((value - index) ** 2).sum() * (index + 0.5) for index, value in enumerate(values))


def test_updates_equal_torch_adamw_and_addresses_stay():
    ours, theirs = parameters(), parameters()
    flat = flat_of(ours)
    options = OptimizerOptions(lr=0.05, weight_decay=0.3, beta1=0.8, beta2=0.9)
    optimizer = adamw(flat, options)
    groups = [{"params": theirs[1:3], "weight_decay": 0.3}, {"params": [theirs[0], theirs[3]], "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), eps=1e-8)
    addresses = [value.data_ptr() for value in ours]
    for lr in (0.05, 0.05, 0.01):
        flat.gradients.zero_()
        loss(ours).backward()
        update(optimizer, lr)
        oracle.zero_grad()
        loss(theirs).backward()
        for group in oracle.param_groups:
            group["lr"] = lr
        oracle.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)
    assert [value.data_ptr() for value in ours] == addresses


def test_gradients_accumulate_into_the_flat_vector():
    ours = parameters()
    flat = flat_of(ours)
    loss(ours).backward()
    once = flat.gradients.clone()
    loss(ours).backward()
    torch.testing.assert_close(flat.gradients, 2 * once)
    norm = torch.stack([value.grad.square().sum() for value in ours]).sum().sqrt()
    torch.testing.assert_close(torch.linalg.vector_norm(flat.gradients), norm)


def test_clip_scales_down_only():
    flat = flat_of([nn.Parameter(torch.zeros(2))])
    flat.gradients[:2] = torch.tensor([3.0, 4.0])
    assert float(flat.finish_gradients()) == pytest.approx(25.0)
    clip_(flat, 10.0, 5.0)
    assert flat.gradients[:2].tolist() == [3.0, 4.0]
    clip_(flat, 1.0, 5.0)
    assert flat.gradients[:2].tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("chosen", [slice(0, 4), slice(1, 3), slice(0, 1)], ids=["both", "matrices", "vector"])
def test_moments_are_named_views(chosen: slice):
    """Each parameter's moments are what AdamW over that parameter alone would keep, and writing to them is seen."""
    values = parameters()[chosen]
    flat = flat_of(values)
    optimizer = adamw(flat, OptimizerOptions(beta1=0.8, beta2=0.9))
    assert updates_made(optimizer) == 0 and moments(optimizer, flat) == {}
    loss(values).backward()
    update(optimizer, 0.1)
    named = moments(optimizer, flat)
    assert updates_made(optimizer) == 1 and len(named) == 2 * len(values)
    for index, value in enumerate(values):
        torch.testing.assert_close(named[f"exp_avg.p{index}"], 0.2 * value.grad)
        torch.testing.assert_close(named[f"exp_avg_sq.p{index}"], 0.1 * value.grad.square())
    for tensor in named.values():
        tensor.zero_()
    assert all(float(state[moment].abs().sum()) == 0.0 for state in optimizer.state.values() for moment in MOMENTS)


def test_primed_optimizer_goes_on():
    """An optimizer that is given another one's count and moments makes the same next update."""
    first, second = parameters(), parameters()
    flats = [flat_of(first), flat_of(second)]
    old, new = (adamw(flat, OptimizerOptions()) for flat in flats)
    for _ in range(2):
        flats[0].zero_gradients()
        loss(first).backward()
        update(old, 0.1)
    prime(new, updates_made(old))
    for name, tensor in moments(new, flats[1]).items():
        tensor.copy_(moments(old, flats[0])[name])
    flats[1].weights.copy_(flats[0].weights)
    for flat, values, optimizer in ((flats[0], first, old), (flats[1], second, new)):
        flat.zero_gradients()
        loss(values).backward()
        update(optimizer, 0.1)
    assert updates_made(new) == 3 and torch.equal(flats[0].weights, flats[1].weights)
