"""A mixture of experts in plain torch: which experts a token goes to, and their MLPs on the tokens that came.

Owns the arithmetic alone; knows no parameter name and no rank. Invariants: a token's result does not depend on which others
are in the batch but for the last bits of the matrix products, ties go to the lowest expert number, and every expert's weights
have a gradient (perhaps zero) after a backward pass. Shapes: T tokens, D hidden, E experts, K chosen of them, F intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.engine.kernels.decode_rows import widened


def route(x_TD: Tensor, router_ED: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Numbers and shares (fp32) [T, K] of each token's experts: a softmax over all of them, of which the K greatest remain.

    With `normalise` these are divided by their sum.
    """
    probabilities_TE = torch.softmax(F.linear(widened(x_TD), widened(router_ED)), dim=-1)
    # A stable sort, since topk does not say which of equals it takes.
    shares_TE, experts_TE = torch.sort(probabilities_TE, dim=-1, descending=True, stable=True)
    shares_TK = shares_TE[:, :top_k]
    if normalise:
        shares_TK = shares_TK / shares_TK.sum(dim=-1, keepdim=True)
    return experts_TE[:, :top_k], shares_TK


def mix(x_TD: Tensor, experts_TK: Tensor, shares_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, first: int) -> Tensor:
    """Sum of the experts' results times their shares, of those experts alone that are here: numbers `first` and following."""
    top_k, here = experts_TK.shape[1], len(gate_up_EFD)
    own = experts_TK.flatten() - first
    # Those that are not here go past the end.
    group = torch.where((own >= 0) & (own < here), own, here)
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group, minlength=here + 1)[:here].tolist()
    order = order[: sum(counts)]
    token = torch.div(order, top_k, rounding_mode="floor")
    # One of them runs even without tokens, so that the weights are in the graph. (Unbound: slicing one by one would make a
    # gradient of the size of all for each.)
    busy = [expert for expert, count in enumerate(counts) if count] or [0]
    gate_up, down = gate_up_EFD.unbind(0), down_EDF.unbind(0)
    results, start = [], 0
    for expert in busy:
        rows = x_TD.index_select(0, token[start : start + counts[expert]])
        gate, up = widened(F.linear(rows, gate_up[expert])).chunk(2, dim=-1)
        results.append(widened(F.linear((F.silu(gate) * up).to(x_TD.dtype), down[expert])))
        start += counts[expert]
    weighted = torch.cat(results) * shares_TK.reshape(-1, 1).index_select(0, order)
    slots = weighted.new_zeros(experts_TK.numel(), x_TD.shape[1]).index_copy(0, order, weighted)
    return slots.view(*experts_TK.shape, x_TD.shape[1]).sum(dim=1).to(x_TD.dtype)
