"""A GGUF file of the Llama architecture with a GPT-2 style vocabulary as a Hugging Face folder.

Owns the spelling of llama.cpp: names of tensors and settings, the order of query and key rows, the vocabulary. De-quantising
is the `gguf` package's (extra `models`). It knows no particular model and no network. Invariants: whatever is not understood
is refused, never guessed; memory is bounded by `CHUNK` rows of one tensor, whatever the size of the file. Torch-free.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 4096
"""Rows of a tensor that are de-quantised at once."""

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMAL, CONTROL = 1, 3
"""Kinds of tokens in `tokenizer.ggml.token_type`: made by merges, and special."""

UNDERSTOOD = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
"""Settings a file must have. `smollm`: each digit alone, then GPT-2's pattern (llama.cpp, llama-vocab.cpp)."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor under its Hugging Face name; `rows` are its rows as stored (quantised), already in Hugging Face's order."""

    name: str
    shape: tuple[int, ...]
    rows: np.ndarray
    kind: Any


class GgufFile:
    """An opened GGUF file. ValueError if it is damaged, or is no model that this module understands."""

    def __init__(self, path: str | Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ValueError(f"reading GGUF needs the package gguf: pip install 'pearl-rl[models]' ({error})") from None
        try:
            self._reader = GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise ValueError(f"{path}: is no readable GGUF file: {error}") from error
        for key, wanted in UNDERSTOOD.items():
            if self.value(key) != wanted:
                raise ValueError(f"{path}: {key}={self.value(key)!r}: must be {wanted!r}")
        if self.has("llama.rope.scaling.type"):
            raise ValueError(f"{path}: llama.rope.scaling.type={self.value('llama.rope.scaling.type')!r}: must not be set")

    def value(self, key: str) -> Any:
        """A setting; ValueError if the file has none of that name."""
        field = self._reader.get_field(key)
        if field is None:
            raise ValueError(f"GGUF file has no {key!r}")
        return field.contents()

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def weights(self) -> Iterator[_Weight]:
        """All tensors in the file's order. ValueError names one that has no place in this architecture."""
        heads = {"attn_q": self.value("llama.attention.head_count"), "attn_k": self.value("llama.attention.head_count_kv")}
        for tensor in self._reader.tensors:
            name, part = _hf_name(tensor.name)
            rows = tensor.data
            if part in heads:
                rows = rows[rotary_rows(len(rows), heads[part])]
            yield _Weight(name, tuple(int(size) for size in reversed(tensor.shape)), rows, tensor.tensor_type)


def rotary_rows(rows: int, heads: int) -> np.ndarray:
    """Where in a GGUF file each row of a Hugging Face query or key projection is.

    llama.cpp rotates neighbouring rows of a head, Hugging Face those half a head apart: of a head's halves a and b the file
    has a0 b0 a1 b1 ... (llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute).
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits (uint16) of the nearest bfloat16, even on ties. ValueError for what is not finite."""
    if not np.isfinite(values).all():
        raise ValueError("a weight is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def write_weights(gguf: GgufFile, path: Path, progress: Callable[[int, int], None]) -> None:
    """`model.safetensors` in bfloat16, a piece at a time; `progress(written, all)` after each tensor."""
    from gguf.quants import dequantize

    weights = list(gguf.weights())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + 2 * int(np.prod(weight.shape))
        header[weight.name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for count, weight in enumerate(weights, start=1):
            for first in range(0, len(weight.rows), CHUNK):
                to_bfloat16(dequantize(weight.rows[first : first + CHUNK], weight.kind)).tofile(file)
            progress(count, len(weights))


def config_json(gguf: GgufFile) -> dict[str, Any]:
    """The contents of config.json, as transformers 5 spells them."""
    width, heads = gguf.value("llama.embedding_length"), gguf.value("llama.attention.head_count")
    if gguf.value("llama.rope.dimension_count") * heads != width:
        raise ValueError(f"llama.rope.dimension_count: {heads} heads must add up to llama.embedding_length={width}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(gguf.value("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": gguf.value("llama.feed_forward_length"),
        "num_hidden_layers": gguf.value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.value("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "max_position_embeddings": gguf.value("llama.context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(gguf.value("llama.rope.freq_base"))},
        "rms_norm_eps": _shortest(gguf.value("llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(weight.name != "lm_head.weight" for weight in gguf.weights()),
        "dtype": "bfloat16",
        **generation_json(gguf),
    }


def generation_json(gguf: GgufFile) -> dict[str, Any]:
    """The contents of generation_config.json: ids only, no sampling defaults."""
    kinds = {"bos": "bos", "eos": "eos", "padding": "pad"}
    return {f"{short}_token_id": gguf.value(f"tokenizer.ggml.{long}_token_id") for long, short in kinds.items()}


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json` (which holds the chat template, if the file has one)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = gguf.value("tokenizer.ggml.tokens"), gguf.value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if set(kinds) - {NORMAL, CONTROL}:
        raise ValueError(f"tokenizer.ggml.token_type: kinds {sorted(set(kinds))}, must be {NORMAL} or {CONTROL}")
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens: {len(tokens)} tokens are not all different")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.value("llama.context_length"),
        "bos_token": tokens[gguf.value("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[gguf.value("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[gguf.value("tokenizer.ggml.padding_token_id")],
    }
    if gguf.has("tokenizer.chat_template"):
        settings["chat_template"] = gguf.value("tokenizer.chat_template")
    write_json(folder / "tokenizer_config.json", settings)


def write_folder(gguf: GgufFile, folder: Path, progress: Callable[[int, int], None]) -> None:
    """All files of the model into `folder`, which exists; the weights last."""
    write_json(folder / "config.json", config_json(gguf))
    write_json(folder / "generation_config.json", generation_json(gguf))
    write_tokenizer(gguf, folder)
    write_weights(gguf, folder / "model.safetensors", progress)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _hf_name(name: str) -> tuple[str, str]:
    """(Hugging Face's name, llama.cpp's name of the part) of a tensor such as `blk.3.attn_q.weight`."""
    pieces = name.split(".")
    if len(pieces) == 2 and pieces[0] in TOP and pieces[1] == "weight":
        return f"{TOP[pieces[0]]}.weight", pieces[0]
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in IN_LAYER and pieces[3] == "weight":
        return f"model.layers.{pieces[1]}.{IN_LAYER[pieces[2]]}.weight", pieces[2]
    raise ValueError(f"tensor {name!r}: has no place in a Llama model")


def _shortest(value: float) -> float:
    """A number that was stored in fp32 as it was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
