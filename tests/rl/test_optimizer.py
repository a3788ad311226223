"""The schedule by hand; AdamW over the flat vector against torch's own over the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pearl.config import OptimizerOptions
from pearl.rl.optimizer import FlatParameters, adamw, clip_, learning_rate, update


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


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (3, 7), (2, 2), (1,)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def loss(values: list[nn.Parameter]) -> torch.Tensor:
    return sum(((value - index) ** 2).sum() * (index + 0.5) for index, value in enumerate(values))


def test_updates_equal_torch_adamw_and_addresses_stay():
    ours, theirs = parameters(), parameters()
    flat = FlatParameters(ours)
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
    flat = FlatParameters(ours)
    loss(ours).backward()
    once = flat.gradients.clone()
    loss(ours).backward()
    torch.testing.assert_close(flat.gradients, 2 * once)
    norm = torch.stack([value.grad.square().sum() for value in ours]).sum().sqrt()
    torch.testing.assert_close(torch.linalg.vector_norm(flat.gradients), norm)


def test_clip_scales_down_only():
    gradients = torch.tensor([3.0, 4.0])
    clip_(gradients, 10.0, 5.0)
    assert gradients.tolist() == [3.0, 4.0]
    clip_(gradients, 1.0, 5.0)
    assert gradients.tolist() == pytest.approx([0.6, 0.8])
