"""ModelConfig from config.json against transformers' own reading of it: windows, experts, rope; there and back; any damage."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_variants import LLAMA3, VARIANTS, YARN, rope
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pearl.engine.models.config import FAMILIES, ROPE_KINDS, Experts, ModelConfig, RopeScaling, from_hf, to_hf
from pearl.engine.models.rope import rope_frequencies, rope_tables

BASE = hf_models.SHAPE | {"num_hidden_layers": 4, "hidden_act": "silu"}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CLASSES = {
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "MistralForCausalLM": MistralConfig,
    "LlamaForCausalLM": LlamaConfig,
}


def raw(architecture: str, **fields: Any) -> dict[str, Any]:
    """A config.json as a person writes it; a value of `...` leaves the entry out."""
    content = BASE | {"architectures": [architecture]} | (MOE if "Moe" in architecture else {}) | fields
    return {name: value for name, value in content.items() if value is not ...}


def both(architecture: str, **fields: Any) -> tuple[ModelConfig, Any]:
    """Our reading and transformers' of the same entries."""
    content = raw(architecture, **fields)
    theirs = CLASSES[architecture](**copy.deepcopy(content))
    ours = from_hf(content)
    saved = from_hf({**theirs.to_dict(), "architectures": [architecture]})
    assert saved == ours, "what transformers writes must mean the same as what it read"
    return ours, theirs


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 9},
        {"use_sliding_window": True, "sliding_window": 4},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, "layer_types": [FULL] * 4},
        {"use_sliding_window": False, "sliding_window": 7, "layer_types": [FULL] * 4},
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["attention", SLIDING, FULL, FULL]},
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_windows_by_layer(architecture: str, fields: dict) -> None:
    ours, theirs = both(architecture, **fields)
    expected = [theirs.sliding_window if kind == SLIDING else 0 for kind in theirs.layer_types]
    assert [ours.window(layer) for layer in range(4)] == expected


@pytest.mark.parametrize("window", [4, None, ...])
@pytest.mark.parametrize("switch", [True, False, ...])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MistralForCausalLM"])
def test_one_window_for_all_layers(architecture: str, switch: Any, window: Any) -> None:
    ours, theirs = both(architecture, use_sliding_window=switch, sliding_window=window, max_window_layers=2)
    assert [ours.window(layer) for layer in range(4)] == [theirs.sliding_window or 0] * 4


@pytest.mark.parametrize("architecture", CLASSES)
def test_biases_and_norms_of_each_family(architecture: str) -> None:
    biases = {"Qwen2ForCausalLM": (True, False, False), "MistralForCausalLM": (False, False, False)}
    for said in (True, False, None, ...):
        ours = from_hf(raw(architecture, attention_bias=said, mlp_bias=said))
        default = (said is True, said is True, said is True and architecture == "LlamaForCausalLM")
        assert (ours.attention_bias, ours.output_bias, ours.mlp_bias) == biases.get(architecture, default)
        assert ours.qk_norm == architecture.startswith("Qwen3")


@pytest.mark.parametrize("architecture", [name for name in CLASSES if name != "Qwen3ForCausalLM"])
def test_head_dim_follows_from_the_others_where_it_is_not_said(architecture: str) -> None:
    assert from_hf(raw(architecture, head_dim=...)).head_dim == 8
    assert from_hf(raw("Qwen3ForCausalLM", head_dim=...)).head_dim == 128
    assert from_hf(raw(architecture, num_key_value_heads=None)).num_kv_heads == 4


# ---------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
        {"mlp_only_layers": [0, 3]},
        {"mlp_only_layers": None},
        {"mlp_only_layers": [0, 1, 2, 3]},
        {"num_experts": 0},
        {"norm_topk_prob": True},
        {"num_experts": 8, "num_local_experts": 4},
    ],
)
def test_experts_stand_in_the_layers_of_transformers(fields: dict) -> None:
    ours, theirs = both("Qwen3MoeForCausalLM", **fields)
    model = hf_models.Qwen3MoeForCausalLM(theirs)
    sparse = [i for i, layer in enumerate(model.model.layers) if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)]
    if not sparse:
        assert ours.experts is None
        return
    assert ours.experts == Experts(
        count=theirs.num_experts,
        top_k=2,
        intermediate_size=16,
        norm_topk_prob=theirs.norm_topk_prob,
        layers=tuple(sparse),
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": ...}, "'num_experts'"),
        ({"num_experts": -1}, "num_experts=-1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5: must not exceed num_experts=4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1"),
    ],
)
def test_experts_that_cannot_be_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_hf(raw("Qwen3MoeForCausalLM", **fields))


# ---------------------------------------------------------------------------------------------------- rope

SCALINGS: dict[str, dict[str, Any]] = {
    "none": rope("default"),
    "linear": rope("linear", factor=4.0),
    "linear-below-1": rope("linear", factor=0.5),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": LLAMA3,
    "llama3-whole-numbers": rope(
        "llama3", factor=32, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=64
    ),
    "llama3-original-at-the-top": LLAMA3 | {"original_max_position_embeddings": 100},
    "llama3-no-original": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": rope("yarn", **YARN),
    "yarn-no-original": rope("yarn", factor=4.0),
    "yarn-no-factor": rope("yarn", factor=None, original_max_position_embeddings=32),
    "yarn-factor-1": rope("yarn", factor=1.0, original_max_position_embeddings=32),
    "yarn-attention-factor": rope("yarn", attention_factor=0.7, **YARN),
    "yarn-mscale": rope("yarn", mscale=0.707, mscale_all_dim=1.0, **YARN),
    "yarn-mscale-alone": rope("yarn", mscale=0.707, **YARN),
    "yarn-mscale-0": rope("yarn", mscale=0.707, mscale_all_dim=0.0, **YARN),
    "yarn-both": rope("yarn", mscale=0.707, mscale_all_dim=1.0, attention_factor=1.3, **YARN),
    "yarn-betas": rope("yarn", beta_fast=8.0, beta_slow=0.25, **YARN),
    "yarn-null-betas": rope("yarn", beta_fast=None, beta_slow=None, attention_factor=None, **YARN),
    "yarn-one-point": rope("yarn", beta_fast=1.0, beta_slow=1.0, truncate=False, **YARN),
    "yarn-not-truncated": rope("yarn", truncate=False, **YARN),
    "yarn-truncate-null": rope("yarn", truncate=None, **YARN),
    "yarn-mscale-shrinking": rope("yarn", mscale=0.7, mscale_all_dim=1.0, factor=0.5, original_max_position_embeddings=32),
    "yarn-ramp-past-the-end": rope(
        "yarn", rope_theta=50.0, beta_fast=1e5, factor=4.0, original_max_position_embeddings=10**6
    ),
    "yarn-long": rope("yarn", factor=4.0, original_max_position_embeddings=32768),
}


def angles_of(fields: dict[str, Any]) -> tuple[np.ndarray, float]:
    """transformers' frequencies and factor."""
    embedding = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(raw("LlamaForCausalLM", **fields))))
    return embedding.inv_freq.double().numpy(), embedding.attention_scaling


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_frequencies_are_those_of_transformers(kind: str, head_dim: int) -> None:
    fields = SCALINGS[kind] | {"head_dim": head_dim}
    config, _ = both("LlamaForCausalLM", **fields)
    ours, amplitude = rope_frequencies(config)
    theirs, scaling = angles_of(fields)
    assert np.abs(ours / theirs - 1).max() < 2e-6
    assert amplitude == pytest.approx(scaling, rel=1e-12)
    plain, _ = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    if kind not in ("none", "dynamic", "yarn-factor-1"):
        assert np.abs(ours / plain - 1).max() > 0.1


@pytest.mark.parametrize("kind", SCALINGS)
def test_all_spellings_of_rope_mean_the_same(kind: str) -> None:
    """New; old with `type`; old with `rope_type`; theta at the top of the file and in the object, where the latter wins."""
    fields = copy.deepcopy(SCALINGS[kind])
    scaling = fields.pop("rope_parameters")
    expected, _ = both("LlamaForCausalLM", **SCALINGS[kind])
    theta, name = scaling.pop("rope_theta"), scaling.pop("rope_type")
    for key in ("type", "rope_type"):
        old = {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": {key: name, **scaling}}
        assert both("LlamaForCausalLM", **fields, **old)[0] == expected
        beside = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
        assert both("LlamaForCausalLM", **fields, **old | beside)[0] == expected
    inside = {"rope_parameters": {"type": name, "rope_theta": theta, **scaling}, "rope_theta": 5.0, "rope_scaling": None}
    assert both("LlamaForCausalLM", **fields, **inside)[0] == expected


def test_rope_theta_has_a_default_and_one_place_that_wins() -> None:
    assert both("LlamaForCausalLM", rope_parameters=...)[0].rope_theta == 1e4
    assert both("LlamaForCausalLM", rope_parameters=..., rope_theta=3e5)[0].rope_theta == 3e5
    assert both("LlamaForCausalLM", rope_theta=5.0)[0].rope_theta == 1e6
    assert both("LlamaForCausalLM", rope_parameters={"rope_type": "default"}, rope_theta=9.0)[0].rope_theta == 9.0


def test_rope_tables_are_exact_at_long_positions() -> None:
    """fp32 of fp64 angles: at position 100 000 an fp32 angle would be wrong by 0.004."""
    config = dataclasses.replace(from_hf(raw("LlamaForCausalLM", **LLAMA3)), max_position=100_001)
    frequencies, _ = rope_frequencies(config)
    for table, exact in zip(rope_tables(config, "cpu"), (np.cos, np.sin), strict=True):
        assert table.dtype == torch.float32 and table.shape == (100_001, 16)
        for position in (0, 255, 4095, 100_000):
            wanted = exact(position * np.concatenate([frequencies, frequencies]))
            assert np.abs(table[position].numpy() - wanted).max() < 1e-7


def test_yarn_tables_carry_the_attention_factor() -> None:
    config = from_hf(raw("LlamaForCausalLM", **rope("yarn", attention_factor=1.5, **YARN)))
    cos, sin = rope_tables(config, "cpu")
    assert torch.allclose(cos.square() + sin.square(), torch.tensor(2.25), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "ntk", "factor": 2.0}, "rope_type='ntk': must be one of default, linear"),
        ({"kind": "linear", "factor": 0}, "factor=0"),
        ({"kind": "linear", "factor": float("nan")}, "factor=nan"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_position=None"),
        ({"kind": "llama3", "factor": 2.0, "original_max_position": 8, "low_freq_factor": 4.0}, "must exceed low_freq_factor"),
    ],
)
def test_scaling_that_cannot_be_is_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RopeScaling(**fields)


# ---------------------------------------------------------------------------------------------------- there and back, damage


@pytest.mark.parametrize("variant", VARIANTS)
def test_configurations_there_and_back(variant: str) -> None:
    build, overrides = VARIANTS[variant]
    model = build(**overrides)
    config = from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert from_hf(to_hf(config)) == config
    theirs = type(model.config)(**to_hf(config))
    assert from_hf({**theirs.to_dict(), "architectures": [type(model).__name__]}) == config


@pytest.mark.parametrize(
    "fields", [{}, {"mlp_only_layers": [1], "norm_topk_prob": True}, {"num_experts": 0}, {"decoder_sparse_step": 2}]
)
def test_experts_there_and_back(fields: dict) -> None:
    window = {"use_sliding_window": True, "sliding_window": 6, "attention_bias": True}
    config, _ = both("Qwen3MoeForCausalLM", **window, **fields)
    assert from_hf(to_hf(config)) == config
    theirs = Qwen3MoeConfig(**to_hf(config))
    assert from_hf({**theirs.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}) == config


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("LlamaForCausalLM", {"windows": (4, 4, 4, 4)}, r"windows=\(4, 4, 4, 4\): cannot be written"),
        ("LlamaForCausalLM", {"qk_norm": True}, "qk_norm=True: cannot be written in the config.json of a Llama"),
        ("Qwen3ForCausalLM", {"windows": (4, 5, 0, 0)}, "windows="),
        ("MistralForCausalLM", {"windows": (4, 0, 4, 4)}, "windows="),
        ("Qwen2ForCausalLM", {"output_bias": True, "mlp_bias": True}, "output_bias=True, mlp_bias=True"),
        ("Qwen3ForCausalLM", {"architecture": "Nobody"}, "architecture='Nobody': must be one of"),
    ],
)
def test_what_a_family_has_no_words_for_is_not_written(architecture: str, changes: dict, words: str) -> None:
    config = dataclasses.replace(from_hf(raw(architecture, sliding_window=None)), **changes)
    with pytest.raises(ValueError, match=words):
        to_hf(config)


def test_windows_that_bound_nothing_are_no_windows() -> None:
    config = from_hf(raw("Qwen3ForCausalLM"))
    assert dataclasses.replace(config, windows=(0, 0, 0, 0)) == config
    for windows in ((4,), (4, 4, 4, -1), (4, 4, 4, True)):
        with pytest.raises(ValueError, match="windows="):
            dataclasses.replace(config, windows=windows)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([0, -1, 10**400, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
PLACES = sorted(
    {*BASE, *MOE, "architectures", "rope_theta", "rope_scaling", "dtype", "torch_dtype", "use_sliding_window", "sliding_window"}
    | {"max_window_layers", "layer_types", "attention_bias", "mlp_bias", "mlp_only_layers", "decoder_sparse_step"}
    | {"norm_topk_prob", "num_local_experts", "partial_rotary_factor", "original_max_position_embeddings"}
    | {"quantization_config"}
)
IN_ROPE = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "mscale"]
IN_ROPE += ["high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale_all_dim"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    kind=st.sampled_from(["default", *ROPE_KINDS]),
    damage=st.dictionaries(st.sampled_from(PLACES), json_values | st.just(...), max_size=2),
    bent=st.dictionaries(st.sampled_from(IN_ROPE), json_values | st.just(...), max_size=2),
)
def test_damage_is_refused_or_read_never_a_crash(architecture: str, kind: str, damage: dict, bent: dict) -> None:
    whole = rope(kind, low_freq_factor=1.0, high_freq_factor=4.0, **YARN)["rope_parameters"] | bent
    content = raw(architecture, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    content["rope_parameters"] = {name: value for name, value in whole.items() if value is not ...}
    content = {name: value for name, value in (content | damage).items() if value is not ...}
    try:
        config = from_hf(content)
    except ValueError:
        return
    assert from_hf(to_hf(config)) == config
    hash(config)
