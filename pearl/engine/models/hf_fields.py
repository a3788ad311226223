"""How Hugging Face spells the fields that several families share: `config.json` to ModelConfig keywords and back. Torch-free.

Owns spellings, defaults and types of single fields, as transformers 5 reads them; knows no family. Invariant: a value of the
wrong type or out of range is a ValueError that names the field as the file spells it, never a TypeError later.
"""

from __future__ import annotations

import math
from typing import Any

from pearl.engine.models.config import FAMILIES, ROPE_KINDS, ModelConfig, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_KINDS = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}
"""The layer types that are served, and what older files call them."""

_NEEDED: Any = object()


def whole(hf: dict, name: str, default: Any = _NEEDED, *, least: int = 1) -> int:
    """An integer >= `least`; null and a missing entry are the default, or an error where there is none."""
    value = _value(hf, name, default)
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{name}={value!r}: must be an integer >= {least}")
    return value


def number(hf: dict, name: str, default: Any = _NEEDED, *, above: float = 0.0) -> float:
    """A finite number above `above`."""
    value = _value(hf, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= 1e300:
        raise ValueError(f"{name}={value!r}: must be a finite number above {above:g}")
    return float(value)


def flag(hf: dict, name: str, default: bool = False) -> bool:
    """true or false."""
    value = _value(hf, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be true or false")
    return value


def token_ids(hf: dict, name: str) -> tuple[int, ...]:
    """One token id or a list of them."""
    value = hf.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ValueError(f"{name}={value!r}: must be a token id or a list of them")
    return tuple(ids)


def decoder_fields(hf: dict, *, head_dim: int | None = None) -> dict[str, Any]:
    """ModelConfig keywords of what all families spell alike; `head_dim` is the family's default, None: hidden / heads."""
    act = hf.get("hidden_act", "silu")
    if act not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act={act!r}: this engine serves 'silu'")
    heads, hidden = whole(hf, "num_attention_heads"), whole(hf, "hidden_size")
    kv_heads = whole(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads}: must be a multiple of num_key_value_heads={kv_heads}")
    bos = token_ids(hf, "bos_token_id")
    if len(bos) > 1:
        raise ValueError(f"bos_token_id={list(bos)}: must be one token id")
    theta, scaling = _rope(hf)
    return {
        "vocab_size": whole(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": whole(hf, "intermediate_size"),
        "num_layers": whole(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": whole(hf, "head_dim", head_dim or hidden // heads, least=2),
        "max_position": whole(hf, "max_position_embeddings"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_eps": number(hf, "rms_norm_eps", 1e-6),
        "tie_embeddings": flag(hf, "tie_word_embeddings"),
        "dtype": _dtype(hf),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": token_ids(hf, "eos_token_id"),
    }


def decoder_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The entries of a `config.json` that all families share."""
    c = config
    eos = list(c.eos_token_ids)
    return {
        "architectures": [c.architecture],
        "model_type": FAMILIES[c.architecture],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position,
        "rope_parameters": _rope_to_hf(c.rope_theta, c.rope_scaling),
        "rms_norm_eps": c.rms_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tie_embeddings,
        "dtype": c.dtype,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
    }


def attention_biases(hf: dict) -> dict[str, bool]:
    """Biases on all four projections of the attention or on none."""
    biased = flag(hf, "attention_bias")
    return {"attention_bias": biased, "output_bias": biased}


def layer_windows(hf: dict) -> tuple[int, ...]:
    """Windows of families whose layers differ (Qwen2, Qwen3): by `layer_types`, else from layer `max_window_layers` on."""
    window, layers = switched_window(hf), whole(hf, "num_hidden_layers")
    kinds = hf.get("layer_types")
    if kinds is None:
        full = whole(hf, "max_window_layers", 28, least=0)
        return uniform_windows(window, layers, first=full)
    if not isinstance(kinds, list) or any(not isinstance(kind, str) or kind not in LAYER_KINDS for kind in kinds):
        raise ValueError(f"layer_types={kinds!r}: must be a list of {FULL} and {SLIDING}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types={kinds!r}: must be one for each of num_hidden_layers={layers}")
    sliding = [LAYER_KINDS[kind] == SLIDING for kind in kinds]
    if any(sliding) and not window:
        said = ", ".join(f"{name}={hf.get(name)!r}" for name in ("use_sliding_window", "sliding_window"))
        raise ValueError(f"layer_types={kinds!r}: has {SLIDING}, but {said} set no window")
    return tuple(window if slides else 0 for slides in sliding) if any(sliding) else ()


def switched_window(hf: dict) -> int:
    """`sliding_window` where `use_sliding_window` is on, else 0. Missing it is 4096, null it is none, as in transformers."""
    return plain_window(hf) if flag(hf, "use_sliding_window") else 0


def plain_window(hf: dict) -> int:
    """`sliding_window`: 0 where it is null, 4096 where it is missing."""
    return 0 if hf.get("sliding_window", 4096) is None else whole(hf, "sliding_window", 4096)


def uniform_windows(window: int, layers: int, *, first: int = 0) -> tuple[int, ...]:
    """The same window in all layers from `first` on."""
    return (0,) * min(first, layers) + (window,) * max(0, layers - first) if window and first < layers else ()


def layer_windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """What `layer_windows` reads; with several different windows it reads something else, which `to_hf` notices."""
    windows = config.windows or (0,) * config.num_layers
    return {
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
        "layer_types": [SLIDING if window else FULL for window in windows],
    }


def _value(hf: dict, name: str, default: Any) -> Any:
    value = hf.get(name)
    if value is None and default is not _NEEDED:
        return default
    if name not in hf:
        raise ValueError(f"config.json has no {name!r}, which this model needs")
    return value


def _dtype(hf: dict) -> str:
    value = hf.get("dtype")
    value = hf.get("torch_dtype") if value is None else value
    return "float32" if value is None else str(value).removeprefix("torch.")


def _rope(hf: dict) -> tuple[float, RopeScaling | None]:
    """The base and the scaling. In the order of transformers: an old `rope_scaling` before `rope_parameters`, and what
    stands in either before the same entry at the top of the file."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(name), (dict, type(None))):
            raise ValueError(f"{name}={hf[name]!r}: must be an object")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"rope_parameters={rope!r}: one set for all layers is served, not one for each of {nested}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ValueError(f"partial_rotary_factor={partial!r}: this engine rotates whole heads, so must be 1")
    theta = number(rope, "rope_theta", number(hf, "rope_theta", 10000.0, above=1.0), above=1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and kind not in ROPE_KINDS:
        raise ValueError(f"rope_type={kind!r}: must be one of default, {', '.join(ROPE_KINDS)}")
    return theta, None if kind == "default" else _scaling(hf, rope, kind)


def _scaling(hf: dict, rope: dict, kind: str) -> RopeScaling:
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind=kind, factor=number(rope, "factor"))
    name = "original_max_position_embeddings"
    original = whole(hf, name, whole(rope, name, whole(hf, "max_position_embeddings")))
    if kind == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        return RopeScaling(
            kind=kind,
            factor=number(rope, "factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = number(rope, "factor", whole(hf, "max_position_embeddings") / original)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", "truncate" not in rope),  # null counts as false
        attention_factor=_attention_factor(rope, factor),
    )


def _attention_factor(rope: dict, factor: float) -> float | None:
    """What is said, or the ratio of `mscale` and `mscale_all_dim` where both are (DeepSeek's spelling), or None."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    scales = [number(rope, name, 0.0, above=-math.inf) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    above, below = (1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    if not above * below > 0:
        raise ValueError(f"mscale={scales[0]}, mscale_all_dim={scales[1]}: must make a positive attention factor")
    return above / below


def _rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    }.get(scaling.kind, ())
    rope = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if names:
        rope["original_max_position_embeddings"] = scaling.original_max_position
    return rope | {name: getattr(scaling, name) for name in names if getattr(scaling, name) is not None}
