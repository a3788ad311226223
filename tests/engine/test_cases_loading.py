"""Model folders as they are found: two generations of configuration, shards beside other files, heads, biases, odd values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_greedy, make, model, one
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pearl.protocol import SamplingParams

IDS = hf_models.prompt(64)
SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def changed(source: Path, target: Path, *, drop: tuple[str, ...] = (), generation: Any = None, **fields: Any) -> Path:
    """A copy of a model folder with other entries in its config.json."""
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text())
    content = {key: value for key, value in content.items() if key not in drop} | fields
    (target / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (target / "generation_config.json").write_text(json.dumps(generation))
    return target


def scores(hf: PreTrainedModel) -> list[float]:
    rows = hf_models.logits(hf, IDS).log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()


def assert_scores(folder: Path, hf: PreTrainedModel) -> None:
    completion = one(make(folder, num_blocks=40), IDS, SCORE)
    assert (completion.prompt_logprobs or [])[1:] == pytest.approx(scores(hf), abs=1e-4)


# ---------------------------------------------------------------------------------------------------- heads, shards, sets


def test_a_tied_model_with_and_without_a_head_in_the_file(tmp_path: Path) -> None:
    hf = hf_models.randomise(hf_models.dense(tie_word_embeddings=True))
    folder = hf_models.save(hf, tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert_scores(folder, hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_scores(folder, hf)
    tensors["lm_head.weight"] += 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight: differs"):
        make(folder)


def test_the_index_says_which_files_are_read(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and (tmp_path / "model.safetensors.index.json").is_file()
    others = {name: tensor.contiguous() + 1.0 for name, tensor in model().state_dict().items()}
    save_file(others, tmp_path / "consolidated.safetensors")
    assert_scores(tmp_path, model())


@pytest.mark.parametrize(
    ("layers_in_config", "removed", "words"),
    [
        (3, None, r"model\.layers\.2\.input_layernorm\.weight: missing"),
        (1, None, r"model\.layers\.1\..*: unexpected"),
        (2, "model.layers.1.self_attn.q_norm.weight", r"model\.layers\.1\.self_attn\.q_norm\.weight: missing"),
    ],
)
def test_weights_and_configuration_must_agree(
    folder: Path, tmp_path: Path, layers_in_config: int, removed: str | None, words: str
) -> None:
    other = changed(folder, tmp_path / "other", num_hidden_layers=layers_in_config, drop=("layer_types",))
    tensors = load_file(other / "model.safetensors")
    if removed:
        del tensors[removed]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        make(other)


# ---------------------------------------------------------------------------------------------------- rope, biases


def test_both_generations_of_rope_theta(folder: Path, tmp_path: Path) -> None:
    saved = json.loads((folder / "config.json").read_text())
    assert saved["rope_parameters"]["rope_theta"] == 1e6 and "rope_theta" not in saved and "dtype" in saved
    assert_scores(folder, model())
    new = ("rope_parameters", "dtype")
    old = changed(folder, tmp_path / "old", drop=new, rope_theta=1e6, rope_scaling=None, torch_dtype="float32")
    assert_scores(old, model())
    none = changed(folder, tmp_path / "none", drop=new)
    without = AutoModelForCausalLM.from_pretrained(none)
    assert_scores(none, without)
    assert max(abs(a - b) for a, b in zip(scores(without), scores(model()), strict=True)) > 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e6}}, "rope_type='foo': .*default, linear.*yarn"),
        ({"rope_scaling": {"type": "foo"}}, "rope_type='foo'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": None, "factor": 2.0}}, "rope_type=None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor='4'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": True}}, "beta_fast=True"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set for all layers"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta=-1.0"),
    ],
)
def test_unserved_rope_is_refused_whatever_its_spelling(folder: Path, tmp_path: Path, fields: dict, words: str) -> None:
    """Old `rope_scaling` beside new `rope_parameters` decides in transformers, so it must not be overlooked here."""
    with pytest.raises(ValueError, match=words):
        make(changed(folder, tmp_path / "other", **fields))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("bias", [True, False, None, "missing"])
def test_attention_bias_on_off_null_and_missing(tmp_path: Path, family: str, bias: Any) -> None:
    build = {"qwen3": hf_models.dense, "llama": hf_models.llama}[family]
    hf = hf_models.randomise(build(attention_bias=bias is True))
    folder = hf_models.save(hf, tmp_path / "plain")
    if bias is None:
        folder = changed(folder, tmp_path / "other", attention_bias=None)
    elif bias == "missing":
        folder = changed(folder, tmp_path / "other", drop=("attention_bias",))
    assert_scores(folder, hf)


# ---------------------------------------------------------------------------------------------------- generation defaults


def test_generation_defaults_are_not_applied_behind_the_callers_back(folder: Path, tmp_path: Path) -> None:
    defaults = {"temperature": 0.6, "top_k": 2, "repetition_penalty": 1.3, "do_sample": True, "max_new_tokens": 2}
    other = changed(folder, tmp_path / "other", generation=defaults)
    completion = one(make(other), IDS[:6], SamplingParams(seed=4, max_tokens=6, logprobs=128))
    assert completion.params == SamplingParams(seed=4, max_tokens=6, logprobs=128)
    for position, best in enumerate(completion.top_logprobs or []):
        row_V = hf_models.logits(model(), IDS[:6] + completion.token_ids[:position])[-1].log_softmax(-1)
        assert best == pytest.approx(dict(enumerate(row_V.tolist())), abs=1e-4)
    assert len(completion.token_ids) == 6
    assert one(make(other), IDS[:6], SamplingParams(max_tokens=1)).params == SamplingParams(max_tokens=1)


def test_an_eos_id_outside_the_vocabulary_masks_nothing(folder: Path, tmp_path: Path) -> None:
    """-1 stands for "none" in some folders: held back before min_tokens, it must not hold back the last id."""
    last = one(make(folder), IDS[:6], SamplingParams(min_tokens=1, max_tokens=1, logprobs=128)).top_logprobs
    for index, eos in enumerate((-1, [-1, 500])):
        other = make(changed(folder, tmp_path / str(index), generation={"eos_token_id": eos}))
        assert one(other, IDS[:6], SamplingParams(min_tokens=1, max_tokens=1, logprobs=128)).top_logprobs == last
        assert 127 in (last or [{}])[0]


# ---------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"drop": ("hidden_size",)}, "'hidden_size'"),
        ({"drop": ("max_position_embeddings",)}, "'max_position_embeddings'"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None"),
        ({"vocab_size": 128.0}, r"vocab_size=128\.0"),
        ({"vocab_size": "128"}, "vocab_size='128'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4: must be a multiple of num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': .*'silu'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=.*GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures=None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn': .*bfloat16"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0: must be an integer >= 1"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window=False, sliding_window=None"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*num_hidden_layers=2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*chunked_attention"),
        ({"eos_token_id": "5"}, "eos_token_id='5'"),
        ({"eos_token_id": True}, "eos_token_id=True"),
        ({"generation": {"eos_token_id": [5, "x"]}}, "eos_token_id=.*'x'"),
        ({"generation": []}, r"generation_config\.json.*object"),
        ({"rope_parameters": "x"}, "rope_parameters='x'"),
    ],
)
def test_odd_configurations_are_refused_by_name(folder: Path, tmp_path: Path, fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(changed(folder, tmp_path / "other", **fields))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", b"\xff{}"),
        ("generation_config.json", b"x{"),
        ("model.safetensors", b""),
        ("model.safetensors", b"abc"),
        ("model.safetensors", None),
        ("model.safetensors.index.json", b"{}"),
    ],
)
def test_damaged_files_are_refused_by_name(folder: Path, tmp_path: Path, file: str, content: bytes | None) -> None:
    other = changed(folder, tmp_path / "other")
    whole = (folder / "model.safetensors").read_bytes()
    (other / file).write_bytes(whole[:-100] if content is None else content)
    with pytest.raises(ValueError, match=str(other)):
        make(other)


def test_null_entries_mean_the_defaults(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "other", eos_token_id=[], attention_bias=None, dtype=None, tie_word_embeddings=None)
    assert_greedy(one(make(other), IDS[:6], GREEDY), 8)
