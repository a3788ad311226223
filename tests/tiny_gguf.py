"""Tiny GGUF files of the Llama architecture, written with llama.cpp's library (package gguf). Fixtures only, no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_tokenizers as tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MERGES = [("a", "b"), ("ab", "c"), ("1", "2"), ("D", "E")]
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES), *tiny.SPECIALS]


def tokenizer() -> Tokenizer:
    """256 bytes, merges ab(256) abc(257) 12(258) DE(259); digits apart, so that 12 never comes about."""
    made = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(TOKENS[:260])}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def permuted_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows in llama.cpp's order: halves of a head interleaved."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def settings(model: PreTrainedModel) -> dict[str, Any]:
    c = model.config
    return {
        "llama.block_count": c.num_hidden_layers,
        "llama.context_length": c.max_position_embeddings,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_attention_heads,
        "llama.attention.head_count_kv": c.num_key_value_heads,
        "llama.rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "llama.rope.dimension_count": c.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 260 + [3] * 4,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
        "tokenizer.ggml.padding_token_id": 261,
        "tokenizer.chat_template": tiny.CHATML,
    }


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    change: dict[str, Any] | None = None,
    more: dict[str, np.ndarray] | None = None,
    permuted: bool = True,
    quantised: bool = False,
) -> Path:
    """A file of a transformers Llama; `change` replaces settings (None drops one), `more` adds tensors."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, "llama")
    for key, value in (settings(model) | (change or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    tied = model.config.tie_word_embeddings
    heads_of = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        heads = heads_of.get(name.split(".")[-2])
        values = permuted_rows(values, heads) if heads and permuted else values
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), np.ascontiguousarray(values))
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"
