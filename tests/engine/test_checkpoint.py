"""Checkpoint folders in and out, against transformers; folders that must be refused before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from weight_cases import EMBEDDING, HEAD, IDS, Q, config_of, is_model, load, new_decoder, tensors_of

from pearl.engine.models.config import from_folder
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights import checkpoint
from pearl.engine.weights.checkpoint import hf_tensors, read_folder, save_folder


@pytest.mark.parametrize(
    "model",
    [
        hf_models.dense(),
        hf_models.dense(tie_word_embeddings=True),
        hf_models.llama(attention_bias=True, mlp_bias=True),
    ],
    ids=["dense", "tied", "llama"],
)
@pytest.mark.parametrize("shard", ["50GB", "10KB"])
def test_folder_round_trip(tmp_path: Path, model: PreTrainedModel, shard: str) -> None:
    hf_models.randomise(model, seed=2)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"kept": true}')
    assert (tmp_path / "theirs" / checkpoint.INDEX).is_file() == (shard == "10KB")
    decoder = load(tmp_path / "theirs")
    assert is_model(decoder, model)
    save_folder(tmp_path / "ours", decoder.config, dict(decoder.named_parameters()), like=tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(hf_models.logits(again, IDS), hf_models.logits(model, IDS))
    assert json.loads((tmp_path / "ours" / "tokenizer.json").read_text()) == {"kept": True}
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours"}


def test_folder_without_a_model_to_copy_from(tmp_path: Path) -> None:
    model = hf_models.randomise(hf_models.llama(attention_bias=True, mlp_bias=True, eos_token_id=[3, 4], rms_norm_eps=1e-3))
    decoder, store = new_decoder(config_of(model))
    store.stage(tensors_of(model), 0)
    store.commit()
    save_folder(tmp_path / "new" / "deep", decoder.config, dict(decoder.named_parameters()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "deep").eval()
    assert torch.equal(hf_models.logits(again, IDS), hf_models.logits(model, IDS))
    assert from_folder(tmp_path / "new" / "deep") == decoder.config


def written(folder: Path, seed: int, shard_bytes: int) -> PreTrainedModel:
    model = hf_models.dense(seed)
    decoder, store = new_decoder(config_of(model))
    store.stage(tensors_of(model), 0)
    store.commit()
    save_folder(folder, decoder.config, dict(decoder.named_parameters()), shard_bytes=shard_bytes)
    return model


@pytest.mark.parametrize("shard_bytes", [1, 4096, 20_000])
def test_a_sharded_folder_is_what_transformers_reads(tmp_path: Path, shard_bytes: int) -> None:
    model = written(tmp_path / "new", 5, shard_bytes)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert torch.equal(hf_models.logits(again, IDS), hf_models.logits(model, IDS))
    assert is_model(load(tmp_path / "new"), model)
    for path in (tmp_path / "new").glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= shard_bytes
    index = json.loads((tmp_path / "new" / checkpoint.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in tensors_of(model))


@pytest.mark.parametrize("sizes", [(1 << 30, 9000), (9000, 1 << 30), (9000, 9000), (9000, 12_000), (1 << 30, 1 << 30)])
def test_whoever_reads_while_a_folder_is_replaced_finds_the_old_or_the_new_weights(
    tmp_path: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [written(tmp_path / "policy", 0, sizes[0])]
    models.append(written(tmp_path / "expected", 1, sizes[1]))
    looks: list[tuple[int, int]] = []

    def look() -> None:
        ours = load(tmp_path / "policy")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
        looks.append(
            tuple(
                next(number for number, model in enumerate(models) if same(model))
                for same in (
                    lambda model: is_model(ours, model),
                    lambda model: torch.equal(hf_models.logits(theirs, IDS), hf_models.logits(model, IDS)),
                )
            )
        )

    def looking(step: Callable) -> Callable:
        def done(*arguments, **options):
            look()
            step(*arguments, **options)
            look()

        return done

    monkeypatch.setattr(checkpoint.os, "replace", looking(checkpoint.os.replace))
    monkeypatch.setattr(Path, "unlink", looking(Path.unlink))
    written(tmp_path / "policy", 1, sizes[1])
    monkeypatch.undo()
    assert looks[0] == (0, 0) and looks[-1] == (1, 1)
    for reader in range(2):
        seen = [pair[reader] for pair in looks]
        assert seen == sorted(seen)
    left = {path.name for path in (tmp_path / "policy").glob("*.safetensors*")}
    assert len(left) == len({path.name for path in (tmp_path / "expected").glob("*.safetensors*")})


def test_saving_over_a_sharded_16_bit_folder(tmp_path: Path) -> None:
    """The old shards and their index must not win over what was saved, nor may the old dtype round it."""
    old, new = hf_models.dense(), hf_models.randomise(hf_models.dense(seed=1))
    old.bfloat16().save_pretrained(tmp_path, max_shard_size="10KB")
    (tmp_path / "notes.md").write_text("mine")
    decoder, store = new_decoder(config_of(new))
    store.stage(tensors_of(new), 0)
    store.commit()
    save_folder(tmp_path, decoder.config, dict(decoder.named_parameters()), like=tmp_path)
    assert is_model(load(tmp_path), new)
    assert from_folder(tmp_path).dtype == "float32"
    assert torch.equal(hf_models.logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), IDS), hf_models.logits(new, IDS))
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}
    assert (tmp_path / "notes.md").is_file()


def test_a_failed_save_leaves_the_old_folder_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_models.dense()
    hf_models.save(model, tmp_path / "kept")
    decoder = load(tmp_path / "kept")
    decoder.init_weights(0)

    def full_disk(tensors: dict, path: Path, metadata: dict) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    for folder in (tmp_path / "kept", tmp_path / "fresh"):
        with pytest.raises(OSError, match="no space left"):
            save_folder(folder, decoder.config, dict(decoder.named_parameters()), like=tmp_path / "kept")
    assert is_model(load(tmp_path / "kept"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert not [path for path in (tmp_path / "kept").iterdir() if path.name.startswith(".")]


BAD_FOLDERS: dict[str, tuple[Callable[[dict], None], str]] = {
    "missing": (lambda t: t.pop(Q), f"{Q}: missing"),
    "unexpected": (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "model.extra.weight: unexpected"),
    "shape": (lambda t: t.update({Q: t[Q][:8].clone()}), r"q_proj.weight: shape \(8, 32\), must be \(64, 32\)"),
    "dtype": (lambda t: t.update({Q: t[Q].to(torch.int8)}), "q_proj.weight: dtype I8, must be one of F64, F32, F16, BF16"),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, kind: str) -> None:
    hf_models.save(hf_models.dense(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change, message = BAD_FOLDERS[kind]
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        read_folder(tmp_path, from_folder(tmp_path))


def test_all_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    hf_models.save(hf_models.dense(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for change, _ in BAD_FOLDERS.values():
        if Q in tensors:
            change(tensors)
    tensors["zzz"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="weights do not fit") as error:
        read_folder(tmp_path, from_folder(tmp_path))
    assert "zzz: unexpected" in str(error.value)
    assert f"{Q}: missing" in str(error.value)


def test_old_files_with_a_tied_head_and_rotary_buffers(tmp_path: Path) -> None:
    model = hf_models.llama(tie_word_embeddings=True)
    hf_models.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert HEAD not in tensors
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), HEAD: tensors[EMBEDDING].clone()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert {name for name, _ in read_folder(tmp_path, from_folder(tmp_path))} == set(hf_shapes(from_folder(tmp_path)))
    assert is_model(load(tmp_path), model)
    tensors[HEAD][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight: differs from model.embed_tokens.weight"):
        read_folder(tmp_path, from_folder(tmp_path))


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    hf_models.dense().save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    shard = index["weight_map"][Q]
    other = next(file for file in index["weight_map"].values() if file != shard)
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], Q: other}}))
    with pytest.raises(ValueError, match=f"{Q}: in {checkpoint.INDEX} but not in its file"):
        read_folder(tmp_path, from_folder(tmp_path))
    (tmp_path / shard).unlink()
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"names files that are not there: {shard}"):
        read_folder(tmp_path, from_folder(tmp_path))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    hf_models.dense().config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor .* \(only safetensors are read\)"):
        read_folder(tmp_path, config_of(hf_models.dense()))


def test_hf_tensors_are_views_that_make_up_the_model() -> None:
    config = config_of(hf_models.llama(attention_bias=True, mlp_bias=True))
    decoder, _ = new_decoder(config)
    pairs = dict(hf_tensors(config, dict(decoder.named_parameters())))
    assert {name: tuple(value.shape) for name, value in pairs.items()} == hf_shapes(config)
    assert sum(value.numel() for value in pairs.values()) == sum(value.numel() for value in decoder.parameters())
    pairs["model.layers.1.self_attn.k_proj.weight"].fill_(3.0)
    qkv = decoder.get_parameter("layers.1.qkv.weight").detach()
    assert bool((qkv[64:96] == 3).all())
    assert float(qkv[:64].abs().max()) == 0 == float(qkv[96:].abs().max())
