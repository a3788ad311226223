"""The table of a model's parameters: one ParamSpec each, and which Hugging Face tensors it is made of. Pure, torch-free.

Loading, publishing, resharding and export all read this table; nothing else knows tensor names. Fused parameters (qkv,
gate_up) list their parts in order along axis 0, so a part is a contiguous row range of the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows `[start, start + size)` of a parameter are the Hugging Face tensor `hf_name`."""

    hf_name: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of the decoder. `shard_axis` is the axis a tensor-parallel layout cuts, None if replicated."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    shard_axis: int | None = None
    init: str = "normal"

    def part_shape(self, part: Part) -> tuple[int, ...]:
        return (part.size, *self.shape[1:])


def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """All parameters of the model in a fixed order. With tied embeddings there is no `lm_head.weight`."""
    c = config
    head = [] if c.tie_embeddings else [_whole("lm_head.weight", "lm_head.weight", (c.vocab_size, c.hidden_size), 0)]
    layers = [spec for index in range(c.num_layers) for spec in _layer(c, index)]
    return (
        _whole("embed.weight", "model.embed_tokens.weight", (c.vocab_size, c.hidden_size), 0),
        *layers,
        _whole("norm.weight", "model.norm.weight", (c.hidden_size,), None, init="ones"),
        *head,
    )


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape, for every tensor that the model needs."""
    return {part.hf_name: spec.part_shape(part) for spec in param_specs(config) for part in spec.parts}


def _layer(c: ModelConfig, index: int) -> list[ParamSpec]:
    ours, theirs = f"layers.{index}.", f"model.layers.{index}."
    attention = theirs + "self_attn."
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
    gate_up = [(theirs + "mlp.gate_proj", c.intermediate_size), (theirs + "mlp.up_proj", c.intermediate_size)]
    specs = [
        _whole(ours + "input_norm.weight", theirs + "input_layernorm.weight", (c.hidden_size,), None, init="ones"),
        *_linear(ours + "qkv", qkv, c.hidden_size, 0, bias=c.attention_bias),
        *_linear(ours + "o", [(attention + "o_proj", c.hidden_size)], q, 1, bias=c.output_bias),
        _whole(ours + "post_norm.weight", theirs + "post_attention_layernorm.weight", (c.hidden_size,), None, init="ones"),
        *_linear(ours + "gate_up", gate_up, c.hidden_size, 0, bias=c.mlp_bias),
        *_linear(ours + "down", [(theirs + "mlp.down_proj", c.hidden_size)], c.intermediate_size, 1, bias=c.mlp_bias),
    ]
    if c.qk_norm:
        specs.append(_whole(ours + "q_norm.weight", attention + "q_norm.weight", (c.head_dim,), None, init="ones"))
        specs.append(_whole(ours + "k_norm.weight", attention + "k_norm.weight", (c.head_dim,), None, init="ones"))
    return specs


def _whole(name: str, hf_name: str, shape: tuple[int, ...], axis: int | None, *, init: str = "normal") -> ParamSpec:
    return ParamSpec(name=name, shape=shape, parts=(Part(hf_name=hf_name, start=0, size=shape[0]),), shard_axis=axis, init=init)


def _linear(name: str, parts: list[tuple[str, int]], width: int, axis: int, *, bias: bool) -> list[ParamSpec]:
    rows = sum(size for _, size in parts)
    starts = [sum(size for _, size in parts[:index]) for index in range(len(parts))]
    both = [("weight", (rows, width), axis, "normal"), ("bias", (rows,), 0 if axis == 0 else None, "zeros")]
    return [
        ParamSpec(
            name=f"{name}.{kind}",
            shape=shape,
            parts=tuple(
                Part(hf_name=f"{hf_name}.{kind}", start=start, size=size)
                for (hf_name, size), start in zip(parts, starts, strict=True)
            ),
            shard_axis=kind_axis,
            init=init,
        )
        for kind, shape, kind_axis, init in both[: 2 if bias else 1]
    ]
