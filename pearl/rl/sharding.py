"""A decoder cut over the training ranks: layer by layer with FSDP2, rows of every parameter dealt out in rank order.

Owns the cutting, the way from a rank's rows to whole tensors and back, and what the optimizer updates. It does not know
losses, steps or files, and looks at no process group but the mesh it is given.
Invariant: between passes a rank holds its own rows only; a layer is whole while it runs, the embedding, the last norm and
the head while the decoder runs. Gradients are sums over the ranks.

Functions that say "of all ranks" are collectives: every rank of the mesh calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from pearl.engine.models.decoder import Decoder
from pearl.engine.models.params import Box


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh of a group that exists."""
    return DeviceMesh.from_group(group, device.type)


def shard(decoder: Decoder, mesh: DeviceMesh, device: torch.device) -> None:
    """Cuts a decoder whose parameters have no memory yet, and gives this rank's rows memory (not yet written).

    Everything is let go after the forward pass and fetched again for the backward one: a pass without a backward pass then
    leaves nothing behind that a later update would make stale.
    """
    for module in (*decoder.layers, decoder):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    decoder.to_empty(device=device)


@torch.no_grad()
def own_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The number of the first row that this rank holds, and its rows, in place; of a tensor that is not cut, all of them."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    mesh = tensor.device_mesh
    # The cut is that of torch.chunk: equal shares, the last ones smaller or empty.
    share = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * share, tensor.shape[0]), tensor.to_local()


@torch.no_grad()
def write_region(tensor: Tensor, region: Box, values: Tensor) -> None:
    """Sets a region of the (whole) tensor to `values`, in order, as far as this rank holds it."""
    first, rows = own_rows(tensor)
    (start, stop), *others = region
    low, high = max(start, first), min(stop, first + len(rows))
    if low < high:
        shaped = values.reshape([b - a for a, b in region])
        columns = tuple(slice(a, b) for a, b in others)
        rows[low - first : high - first][:, *columns].copy_(shaped[low - start : high - start])


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; itself if it is not cut. A collective of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class ShardedParameters:
    """What the optimizer of one rank updates (`optimizer.Parameters`): its rows of every parameter, in place."""

    def __init__(self, decoder: Decoder) -> None:
        self._parameters: dict[str, DTensor] = {}
        trained = [pair for pair in decoder.named_parameters() if pair[1].requires_grad]
        ordered = sorted(trained, key=lambda pair: pair[1].ndim < 2)
        for name, parameter in ordered:
            assert isinstance(parameter, DTensor)
            self._parameters[name] = parameter
        self._parts = {name: nn.Parameter(own_rows(parameter)[1]) for name, parameter in self._parameters.items()}

    def zero_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = self._parts[name].grad = None

    @torch.no_grad()
    def finish_gradients(self) -> Tensor:
        gradients = []
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                raise RuntimeError(f"{name} has no gradient: the ranks have not run the same passes")
            self._parts[name].grad = gradient.to_local()  # type: ignore[attr-defined]
            gradients.append(self._parts[name].grad)
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

    def scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_([part.grad for part in self._parts.values()], factor)

    def groups(self, weight_decay: float) -> list[dict]:
        matrices = [part for part in self._parts.values() if part.ndim > 1]
        vectors = [part for part in self._parts.values() if part.ndim < 2]
        halves = ((matrices, weight_decay), (vectors, 0.0))
        return [{"params": parts, "weight_decay": decay} for parts, decay in halves if parts]

    def named(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self._parameters.items(), parts, strict=True)
        return {name: _like(part, parameter) for (name, parameter), part in pairs}


def _like(rows: Tensor, parameter: DTensor) -> DTensor:
    """This rank's rows of a tensor that is cut like the parameter."""
    return DTensor.from_local(
        rows, parameter.device_mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
