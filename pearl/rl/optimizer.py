"""The optimizer: AdamW over the tensors that hold the parameters, its state by name, the learning-rate schedule.

Owns where the parameters and gradients of a rank that trains alone live (`FlatParameters`; those of several ranks are in
`sharding.py`). It does not know models (beyond their parameters' names), losses or steps.
Invariant: each parameter and its `.grad` are views of the flat vectors for ever, so that a norm and an optimizer update are
each one operation however many parameters there are; weights never move to other addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from pearl.config import OptimizerOptions

ALIGNMENT = 16
"""Elements to which every parameter's place in the flat vector is aligned (64 bytes in fp32); the gaps stay zero."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each element, under torch's names."""


class Parameters(Protocol):
    """The parameters of a decoder as its optimizer sees them: tensors ("parts") that are updated in place."""

    def zero_gradients(self) -> None: ...

    def finish_gradients(self) -> Tensor:
        """Called after an update's last backward pass; the sum of squares of this rank's gradients (fp64 scalar)."""

    def scale_gradients(self, factor: float) -> None: ...

    def groups(self, weight_decay: float) -> list[dict]:
        """Parameter groups of a torch optimizer: matrices decay, vectors do not."""

    def named(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Tensors like the parts of `groups`, in their order, as views under the parameters' names."""


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

    `weights` and `gradients` are those vectors. All parameters must have one dtype and device. Frozen ones stay where they
    are.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        ordered = sorted((pair for pair in named if pair[1].requires_grad), key=lambda pair: pair[1].ndim < 2)
        starts, end = [], 0
        for _, parameter in ordered:
            starts.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = ordered[0][1]
        self.weights = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        for start, (name, parameter) in zip(starts, ordered, strict=True):
            self._places[name] = (start, parameter.shape)
            view = self._view(self.weights, start, parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self._view(self.gradients, start, parameter.shape)
        cut = next((start for start, shape in self._places.values() if len(shape) < 2), end)
        halves = [(0, cut, True), (cut, end, False)]
        self._halves = [half for half in halves if half[0] < half[1]]

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def finish_gradients(self) -> Tensor:
        return torch.linalg.vector_norm(self.gradients).double().square()

    def scale_gradients(self, factor: float) -> None:
        self.gradients.mul_(factor)

    def groups(self, weight_decay: float) -> list[dict]:
        return [
            {"params": [self._part(first, end)], "weight_decay": weight_decay if decays else 0.0}
            for first, end, decays in self._halves
        ]

    def named(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            name: self._view(part, start - first, shape)
            for (first, end, _), part in zip(self._halves, parts, strict=True)
            for name, (start, shape) in self._places.items()
            if first <= start < end
        }

    @staticmethod
    def _view(vector: Tensor, start: int, shape: torch.Size) -> Tensor:
        return vector[start : start + shape.numel()].view(shape)

    def _part(self, first: int, end: int) -> nn.Parameter:
        part = nn.Parameter(self.weights[first:end])
        part.grad = self.gradients[first:end]
        return part


def adamw(parameters: Parameters, options: OptimizerOptions) -> torch.optim.AdamW:
    """A fresh AdamW (Loshchilov & Hutter 2019) over the parts; the rate is set before every update."""
    betas = (options.beta1, options.beta2)
    groups = parameters.groups(options.weight_decay)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps, fused=True)


def clip_(parameters: Parameters, max_norm: float, norm: float) -> None:
    """Scales the gradients down, in place, to `max_norm` where their `norm` (over all ranks) is above it."""
    if norm > max_norm:
        parameters.scale_gradients(max_norm / norm)


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One optimizer update at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def updates_made(optimizer: torch.optim.Optimizer) -> int:
    """How many updates the moments are made of."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def prime(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Gives a fresh optimizer the state after `updates` updates, with moments of zero for a reader to fill."""
    for part in _parts(optimizer) if updates else []:
        step = torch.tensor(float(updates), dtype=torch.float32, device=part.device)
        optimizer.state[part] = {"step": step, **{moment: torch.zeros_like(part) for moment in MOMENTS}}


def moments(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """The optimizer's own tensors as `moment.parameter`, views; empty before the first update."""
    if not optimizer.state:
        return {}
    return {
        f"{moment}.{name}": tensor
        for moment in MOMENTS
        for name, tensor in parameters.named([optimizer.state[part][moment] for part in _parts(optimizer)]).items()
    }


def _parts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [part for group in optimizer.param_groups for part in group["params"]]
