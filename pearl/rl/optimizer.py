"""The optimizer: all parameters as one flat vector, AdamW over it, clipping by the global norm, the learning-rate schedule.

Owns where parameters and gradients live. It does not know models (beyond their parameter list), losses or steps.
Invariant: each parameter and its `.grad` are views of the flat vectors for ever, so that a norm, an all-reduce and an
optimizer update are each one operation however many parameters there are; weights never move to other addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pearl.config import OptimizerOptions

ALIGNMENT = 16
"""Elements to which every parameter's place in the flat vector is aligned (64 bytes in fp32); the gaps stay zero."""


def learning_rate(step: int, options: OptimizerOptions, max_steps: int) -> float:
    """The rate of RL step `step` (counted from 0), the same for all optimizer updates of that step.

    It rises over `warmup_steps` (step k has (k + 1) / warmup_steps of it), and then stays, or falls to 0 at `max_steps`,
    on a line or a half cosine (Loshchilov & Hutter 2017).
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = min(1.0, (step - options.warmup_steps) / max(1, max_steps - options.warmup_steps))
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return options.lr * factor[options.schedule]


class FlatParameters:
    """Moves parameters, and their gradients, into two vectors: matrices first (they decay), then vectors (they do not).

    `weights` and `gradients` are those vectors. All parameters must have one dtype and device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        ordered = sorted(parameters, key=lambda parameter: parameter.ndim < 2)
        starts, end = [], 0
        for parameter in ordered:
            starts.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = ordered[0]
        self.weights = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        for start, parameter in zip(starts, ordered, strict=True):
            place = slice(start, start + parameter.numel())
            view = self.weights[place].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradients[place].view(parameter.shape)
        self._decayed = next((start for start, parameter in zip(starts, ordered, strict=True) if parameter.ndim < 2), end)

    def groups(self, weight_decay: float) -> list[dict]:
        """Parameter groups of a torch optimizer that updates the weights in place."""
        cut = self._decayed
        halves = [(slice(0, cut), weight_decay), (slice(cut, None), 0.0)]
        return [{"params": [self._part(place)], "weight_decay": decay} for place, decay in halves if len(self.weights[place])]

    def _part(self, place: slice) -> nn.Parameter:
        part = nn.Parameter(self.weights[place])
        part.grad = self.gradients[place]
        return part


def adamw(flat: FlatParameters, options: OptimizerOptions) -> torch.optim.AdamW:
    """A fresh AdamW (Loshchilov & Hutter 2019) over the flat vector; the rate is set before every update."""
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(flat.groups(options.weight_decay), lr=options.lr, betas=betas, eps=options.eps, fused=True)


def clip_(gradients: Tensor, max_norm: float, norm: float) -> None:
    """Scales the gradients down, in place, to `max_norm` where their `norm` is above it."""
    if norm > max_norm:
        gradients.mul_(max_norm / norm)


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One optimizer update at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
