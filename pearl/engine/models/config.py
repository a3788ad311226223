"""ModelConfig: what a decoder is, read from a Hugging Face `config.json`. Torch-free.

Only values live here. Which architectures exist and how each spells its fields is in the family files (`qwen3.py`,
`llama.py`); `from_folder` asks them. What no family serves yet is refused by name, never ignored.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path

FAMILIES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
"""Architecture in config.json -> the family module that parses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that takes the MLP's place in some layers: softmax over all, the `top_k` best added up."""

    count: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    """Whether the chosen shares are divided by their sum."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts; the others have the dense MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary grouped-query attention, SiLU-gated MLP or experts. Sizes are counts of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tie_embeddings: bool
    qk_norm: bool
    attention_bias: bool = False
    """Whether the query, key and value projections have biases."""
    output_bias: bool = False
    """Whether the attention's output projection has one."""
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()
    """For each layer how many keys a query sees, itself among them; 0 is all. Empty: all layers see all."""
    experts: Experts | None = None
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_position"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: must be an integer >= 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even (rotary embedding pairs)")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token holds over all layers."""
        width = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * width


def from_hf(hf: dict) -> ModelConfig:
    """Parses the contents of a `config.json` (old and new spelling). ValueError names what is not served."""
    names = hf.get("architectures") or ["(none)"]
    if names[0] not in FAMILIES:
        raise ValueError(f"architectures={names}: this engine serves {', '.join(sorted(FAMILIES))}")
    family = importlib.import_module(f"pearl.engine.models.{FAMILIES[names[0]]}")
    try:
        return family.parse(hf)
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]!r}, which a {names[0]} needs") from None


def from_folder(folder: str | Path) -> ModelConfig:
    """Reads `config.json` and the EOS ids of `generation_config.json` (all of them; they win over config.json's)."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model={str(folder)!r}: not a Hugging Face model folder (no config.json)")
    hf = _read_object(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _read_object(generation).get("eos_token_id")
        if eos is not None:
            hf = {**hf, "eos_token_id": eos}
    return from_hf(hf)


def _read_object(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return content


def dense_fields(hf: dict) -> dict:
    """The fields that every dense family spells the same way, as ModelConfig keywords."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # in the order of transformers
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters={rope!r}: must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type={kind!r}: this engine serves 'default'")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r}: this engine serves 'silu'")
    eos = hf.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token_id) is not int for token_id in eos_ids):
        raise ValueError(f"eos_token_id={eos!r}: must be a token id or a list of them")
    heads = hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "max_position": hf["max_position_embeddings"],
        "rope_theta": float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        "rms_eps": hf.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": tuple(eos_ids),
        "attention_bias": bool(hf.get("attention_bias") or False),
        "output_bias": bool(hf.get("attention_bias") or False),
    }
