"""The table of a model's parameters: one ParamSpec each, and which Hugging Face tensors it is made of. Pure, torch-free.

Loading, publishing, resharding and export all read this table; nothing else knows tensor names. A parameter is made of parts:
regions of it, each with the region of a Hugging Face tensor that lies there. Fused parameters (qkv, gate_up, experts) have
several, and the table of one tensor-parallel rank has the regions that this rank holds. So what one layout sends another is
the intersection of two tables' regions of the same tensor.
Invariants: the parts of a parameter cover it once; over all ranks they cover every tensor, replicated ones several times.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pearl.engine.models.config import Experts, ModelConfig

Range = tuple[int, int]
"""The numbers from the first to the second, without the second."""
Box = tuple[Range, ...]
"""A region of a tensor: a range along each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which rank of how many that share a model (tensor parallelism) holds a table's parameters."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}: must be 0 to {self.size - 1} (size={self.size})")

    def share(self, count: int) -> Range:
        """This rank's range of `count` things dealt out in order, as evenly as they can be."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size


WHOLE = Shard(rank=0, size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The region `source` of the Hugging Face tensor `hf_name` lies, in the same order, at `target` of the parameter.

    The parameter may have more axes than the tensor: along these, the first ones, the region is one number wide (an expert).
    """

    hf_name: str
    target: Box
    source: Box

    @property
    def target_index(self) -> tuple[int | slice, ...]:
        """What to index the parameter with for a view of the region's shape in the tensor."""
        lead = len(self.target) - len(self.source)
        return (*(low for low, _ in self.target[:lead]), *(slice(low, high) for low, high in self.target[lead:]))

    def source_index(self, first: int = 0) -> tuple[slice, ...]:
        """What to index the tensor with, or those of its rows that begin with number `first`."""
        (low, high), *others = self.source
        return slice(low - first, high - first), *(slice(*other) for other in others)

    def within(self, start: int, stop: int) -> Part | None:
        """As much of it as lies in rows `[start, stop)` of the tensor; None if nothing does."""
        (first, last), *others = self.source
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        axis = len(self.target) - len(self.source)
        shift = self.target[axis][0] - first
        target = (*self.target[:axis], (low + shift, high + shift), *self.target[axis + 1 :])
        return Part(hf_name=self.hf_name, target=target, source=((low, high), *others))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of the decoder, of this `shape` on this rank. `shard_axis`: along which the ranks cut it; None: no cut."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    shard_axis: int | None = None
    init: str = "normal"
    stacked: Part | None = None
    """Experts may also come as one tensor, which is this part; files that are written have one for each (`parts`)."""
    also: str | None = None
    """Name of a second tensor that may come beside the part's own and must be equal to it (a tied head)."""


def param_specs(config: ModelConfig, shard: Shard | None = None) -> tuple[ParamSpec, ...]:
    """The parameters of the model, or of one rank, in a fixed order. With tied embeddings there is no `lm_head.weight`.

    ValueError names what cannot be cut for so many ranks (see `local_config`).
    """
    c, shard = config, shard or WHOLE
    local_config(c, shard)
    rows = shard.share(c.vocab_size)
    embed = _matrix("embed", [("model.embed_tokens", rows)], (0, c.hidden_size), 0)
    head = _matrix("lm_head", [("lm_head", rows)], (0, c.hidden_size), 0)
    if c.tie_embeddings:
        embed, head = [dataclasses.replace(embed[0], also="lm_head.weight")], []
    layers = [spec for index in range(c.num_layers) for spec in _layer(c, shard, index)]
    return (*embed, *layers, _norm("norm", "model.norm", c.hidden_size), *head)


def all_parts(spec: ParamSpec) -> tuple[Part, ...]:
    """The parts of a parameter in every form in which its tensors may come."""
    return spec.parts if spec.stacked is None else (*spec.parts, spec.stacked)


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as one rank attends: `num_heads` and `num_kv_heads` are those of the rank, all else is the whole model's.

    Key-value heads are replicated where there are fewer of them than ranks. ValueError names what cannot be cut.
    """
    c, size = config, shard.size
    if c.num_heads % size:
        raise ValueError(f"num_heads={c.num_heads}: must be a multiple of tensor_parallel={size}")
    if c.num_kv_heads % size and size % c.num_kv_heads:
        raise ValueError(f"num_kv_heads={c.num_kv_heads}: must be a multiple or a divisor of tensor_parallel={size}")
    counts = {"vocab_size": c.vocab_size}
    if c.experts is not None:
        counts["num_experts"] = c.experts.count
    if c.experts is None or len(c.experts.layers) < c.num_layers:
        counts["intermediate_size"] = c.intermediate_size
    for name, count in counts.items():
        if count < size:
            raise ValueError(f"{name}={count}: must be at least tensor_parallel={size}")
    return dataclasses.replace(c, num_heads=c.num_heads // size, num_kv_heads=max(1, c.num_kv_heads // size))


def hf_shapes(config: ModelConfig, *, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> whole shape, of every tensor the model needs: one for each expert, or `stacked` in one."""
    shapes = {}
    for spec in param_specs(config):
        for part in (spec.stacked,) if stacked and spec.stacked else spec.parts:
            shapes[part.hf_name] = tuple(high for _, high in part.source)
    return shapes


def _layer(c: ModelConfig, shard: Shard, index: int) -> list[ParamSpec]:
    ours, theirs = f"layers.{index}.", f"model.layers.{index}."
    attention, width = theirs + "self_attn.", (0, c.hidden_size)
    q, kv = _scaled(shard.share(c.num_heads), c.head_dim), _scaled(kv_heads(c, shard), c.head_dim)
    qkv = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
    specs = [
        _norm(ours + "input_norm", theirs + "input_layernorm", c.hidden_size),
        *_matrix(ours + "qkv", qkv, width, 0, bias=c.attention_bias),
        *_matrix(ours + "o", [(attention + "o_proj", width)], q, 1, bias=c.output_bias),
        _norm(ours + "post_norm", theirs + "post_attention_layernorm", c.hidden_size),
    ]
    if c.experts is not None and index in c.experts.layers:
        specs += _experts(ours, theirs + "mlp.", c.experts, c.hidden_size, shard)
    else:
        rows = shard.share(c.intermediate_size)
        gate_up = [(theirs + "mlp.gate_proj", rows), (theirs + "mlp.up_proj", rows)]
        specs += _matrix(ours + "gate_up", gate_up, width, 0, bias=c.mlp_bias)
        specs += _matrix(ours + "down", [(theirs + "mlp.down_proj", width)], rows, 1, bias=c.mlp_bias)
    if c.qk_norm:
        specs.append(_norm(ours + "q_norm", attention + "q_norm", c.head_dim))
        specs.append(_norm(ours + "k_norm", attention + "k_norm", c.head_dim))
    return specs


def kv_heads(c: ModelConfig, shard: Shard) -> Range:
    """The key-value heads that this rank's query heads attend with."""
    low, high = shard.share(c.num_kv_heads)
    return low, max(high, low + 1)


def _experts(ours: str, theirs: str, experts: Experts, hidden: int, shard: Shard) -> list[ParamSpec]:
    """The router, whole on every rank, and this rank's experts: gate and up rows [2 I, D], down [D, I] of each."""
    first, last = shard.share(experts.count)
    width, inner = (0, hidden), (0, experts.intermediate_size)
    inner_up = (experts.intermediate_size, 2 * experts.intermediate_size)
    gate_up, down = [], []
    for expert in range(first, last):
        name, place = f"{theirs}experts.{expert}.", (expert - first, expert - first + 1)
        gate_up.append(Part(hf_name=name + "gate_proj.weight", target=(place, inner, width), source=(inner, width)))
        gate_up.append(Part(hf_name=name + "up_proj.weight", target=(place, inner_up, width), source=(inner, width)))
        down.append(Part(hf_name=name + "down_proj.weight", target=(place, width, inner), source=(width, inner)))
    both = (0, 2 * experts.intermediate_size)
    stacks = [("gate_up", gate_up, (both, width)), ("down", down, (width, inner))]
    return [
        *_matrix(ours + "router", [(theirs + "gate", (0, experts.count))], width, None),
        *(
            ParamSpec(
                name=f"{ours}experts.{kind}",
                shape=(last - first, rows[1], columns[1]),
                parts=tuple(parts),
                shard_axis=0,
                stacked=Part(
                    hf_name=f"{theirs}experts.{kind}_proj",
                    target=((0, last - first), rows, columns),
                    source=((first, last), rows, columns),
                ),
            )
            for kind, parts, (rows, columns) in stacks
        ),
    ]


def _norm(name: str, hf_name: str, size: int) -> ParamSpec:
    box = ((0, size),)
    part = Part(hf_name=hf_name + ".weight", target=box, source=box)
    return ParamSpec(name=name + ".weight", shape=(size,), parts=(part,), init="ones")


def _matrix(
    name: str, blocks: list[tuple[str, Range]], columns: Range, axis: int | None, *, bias: bool = False
) -> list[ParamSpec]:
    """A weight, and perhaps a bias, of the given rows of each tensor one below the other. Cut columns do not cut the bias."""
    width = columns[1] - columns[0]
    weights, biases, height = [], [], 0
    for hf_name, (low, high) in blocks:
        place = (height, height + high - low)
        weights.append(Part(hf_name=hf_name + ".weight", target=(place, (0, width)), source=((low, high), columns)))
        biases.append(Part(hf_name=hf_name + ".bias", target=(place,), source=((low, high),)))
        height = place[1]
    specs = [ParamSpec(name=name + ".weight", shape=(height, width), parts=tuple(weights), shard_axis=axis)]
    if bias:
        cut = 0 if axis == 0 else None
        specs.append(
            ParamSpec(name=name + ".bias", shape=(height,), parts=tuple(biases), shard_axis=cut, init="zeros")
        )
    return specs


def _scaled(heads: Range, width: int) -> Range:
    return heads[0] * width, heads[1] * width
