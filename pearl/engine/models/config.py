"""ModelConfig: what a decoder is, read from a Hugging Face `config.json` and written back. Torch-free.

Only values live here. Which architectures exist and how each spells its fields is in the family files (`qwen3.py`,
`llama.py`, ...); `from_folder` asks them. What no family serves yet is refused by name, never ignored. Invariant: a
`config.json` that `to_hf` wrote is parsed to the same ModelConfig.
"""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from pearl.engine.model_folder import where_else

FAMILIES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
"""Architecture in config.json -> the family module that parses it, which is also its `model_type`."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn")


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

    def __post_init__(self) -> None:
        for name in ("count", "top_k", "intermediate_size"):
            _check_size(name, getattr(self, name))
        if self.top_k > self.count:
            raise ValueError(f"top_k={self.top_k}: must not exceed the number of experts, {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are changed for contexts longer than those of the pre-training. See `rope.py`.

    linear: all are divided by `factor`. llama3: only those whose wavelength exceeds `original_max_position /
    low_freq_factor`, with a passage up to `/ high_freq_factor`. yarn: a ramp between the dimensions that turn `beta_fast` and
    `beta_slow` times, and queries and keys times `attention_factor` (None: 0.1 ln(factor) + 1). dynamic: the base grows with
    the sequence beyond `max_position`; up to there, which is as far as this engine goes, it equals no scaling.
    """

    kind: str
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the ramp's ends are whole dimensions."""
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope_type={self.kind!r}: must be one of default, {', '.join(ROPE_KINDS)}")
        numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        for name in (*numbers, *(("attention_factor",) if self.attention_factor is not None else ())):
            _check_number(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            limit = f"must exceed low_freq_factor={self.low_freq_factor}"
            raise ValueError(f"high_freq_factor={self.high_freq_factor}: {limit}")
        if self.kind in ("llama3", "yarn"):
            _check_size("original_max_position", self.original_max_position)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary grouped-query attention, SiLU-gated MLP or experts. Sizes are counts of elements.

    `max_position` is what config.json says, whatever the rope scaling: a factor there is never applied to it once more. It is
    the default and the upper limit of an engine's `max_model_len`.
    """

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
    rope_scaling: RopeScaling | None = None
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
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even (rotary embedding pairs)")
        _check_number("rms_eps", self.rms_eps)
        _check_number("rope_theta", self.rope_theta, above=1.0)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows={self.windows}: must be one for each of the {self.num_layers} layers")
        if any(type(window) is not int or window < 0 for window in self.windows):
            raise ValueError(f"windows={self.windows}: must be integers >= 0")
        if not any(self.windows):  # one spelling of "all layers see all"
            object.__setattr__(self, "windows", ())
        if self.experts and any(not 0 <= layer < self.num_layers for layer in self.experts.layers):
            raise ValueError(f"experts.layers={self.experts.layers}: must be below num_layers={self.num_layers}")

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees, itself among them; 0 is all."""
        return self.windows[layer] if self.windows else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


def from_hf(hf: dict) -> ModelConfig:
    """Parses the contents of a `config.json` (old and new spelling). ValueError names what is not served."""
    names = hf.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"architectures={names!r}: this engine serves {', '.join(sorted(FAMILIES))}")
    if hf.get("quantization_config"):
        raise ValueError("quantization_config: quantized weights are not served, only floating point ones")
    return _family(name).parse(hf)


def to_hf(config: ModelConfig) -> dict:
    """The contents of a `config.json` that transformers loads as the same model. ValueError if its family has no words for it.

    With rope scaling the spelling is that of `rope_parameters`; experts and windows as the family spells them.
    """
    if config.architecture not in FAMILIES:
        raise ValueError(f"architecture={config.architecture!r}: must be one of {', '.join(sorted(FAMILIES))}")
    hf = _family(config.architecture).to_hf(config)
    again = from_hf(hf)
    if again != config:
        differing = [name for name in ModelConfig.__slots__ if getattr(again, name) != getattr(config, name)]
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
        raise ValueError(f"{said}: cannot be written in the config.json of a {config.architecture}")
    return hf


def from_folder(folder: str | Path) -> ModelConfig:
    """Reads `config.json` and the EOS ids of `generation_config.json` (all of them; they win over config.json's)."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model={str(folder)!r}: not a Hugging Face model folder (no config.json){where_else(folder)}")
    hf = _read_object(path)
    if "architectures" not in hf and (hint := where_else(folder)):  # a run's folder has a config.json of its own kind
        raise ValueError(f"model={str(folder)!r}: not a Hugging Face model folder (config.json names no architectures){hint}")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _read_object(generation).get("eos_token_id")
        if eos is not None:
            hf = {**hf, "eos_token_id": eos}
    return from_hf(hf)


def _family(architecture: str) -> ModuleType:
    return importlib.import_module(f"pearl.engine.models.{FAMILIES[architecture]}")


def _read_object(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return content


def _check_size(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: must be an integer >= 1")


def _check_number(name: str, value: object, *, above: float = 0.0) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < math.inf:
        raise ValueError(f"{name}={value!r}: must be a finite number above {above:g}")
