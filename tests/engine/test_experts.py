"""Mixtures of experts against transformers: routing, layers, gradients, files in both forms, the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_cases
import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from weight_cases import IDS, config_of, is_model, load, logits_of, new_decoder, one_by_one, snapshot, tensors_of, unchanged

from pearl.engine.kernels.experts import mix, route
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import from_folder
from pearl.engine.models.params import hf_shapes, param_specs
from pearl.engine.weights.checkpoint import hf_tensors, read_folder, save_folder

VARIANTS: dict[str, dict[str, Any]] = {
    "shares as they are": {"norm_topk_prob": False},
    "shares divided": {"norm_topk_prob": True},
    "every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "one layer dense": {"mlp_only_layers": [1], "num_hidden_layers": 3, "norm_topk_prob": True},
    "one of many": {"num_experts": 16, "num_experts_per_tok": 1},
    "all of three": {"num_experts": 3, "num_experts_per_tok": 3},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
}
STACKED = "model.layers.0.mlp.experts.gate_up_proj"
SINGLE = "model.layers.0.mlp.experts.2.up_proj.weight"


def build(variant: str, seed: int = 0) -> PreTrainedModel:
    return hf_models.randomise(hf_models.moe(seed, **VARIANTS[variant]), seed)


def filled(model: PreTrainedModel):
    decoder, store = new_decoder(config_of(model))
    store.stage(tensors_of(model), 0)
    store.commit()
    return decoder, store


# ---------------------------------------------------------------------------------------------------- the operation


def weights(experts: int, hidden: int = 6, inner: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    router, gate_up, down = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return router, gate_up, down


def by_hand(x_TD: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalise: bool) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for x_D in x_TD:
        shares = (router @ x_D).softmax(0)
        chosen = shares.argsort(descending=True)[:top_k]
        total = shares[chosen].sum() if normalise else 1.0
        row = torch.zeros_like(x_D)
        for expert in chosen:
            gate, up = (gate_up[expert] @ x_D).chunk(2)
            row = row + shares[expert] / total * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 7])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_experts_one_by_one(tokens: int, top_k: int, normalise: bool) -> None:
    x = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    arguments = weights(7)
    ours = ReferenceKernels().moe(x, *arguments, top_k=top_k, normalise=normalise)
    assert float((ours - by_hand(x, *arguments, top_k, normalise)).abs().max()) < 1e-12
    other = by_hand(x, *arguments, top_k, not normalise)
    assert top_k == 7 or float((ours - other).abs().max()) > 1e-3


def test_experts_of_several_places_add_up() -> None:
    router, gate_up, down = weights(7)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = ReferenceKernels().moe(x, router, gate_up, down, top_k=3, normalise=True)
    parts = [
        ReferenceKernels().moe(x, router, gate_up[a:b], down[a:b], top_k=3, normalise=True, first=a)
        for a, b in ((0, 2), (2, 3), (3, 7))
    ]
    assert float((sum(parts) - whole).abs().max()) < 1e-12
    assert all(float(part.abs().max()) > 0 for part in parts)


def test_ties_go_to_the_lowest_expert() -> None:
    for tokens in (1, 5, 64):
        experts_TK, shares_TK = route(torch.ones(tokens, 4), torch.ones(40, 4), 3, True)
        assert experts_TK.tolist() == [[0, 1, 2]] * tokens
        assert torch.allclose(shares_TK, torch.full((tokens, 3), 1 / 3))


def test_shares_of_16_bit_models_are_computed_in_fp32() -> None:
    """In bfloat16 the router's products of these tokens would tie or swap."""
    generator = torch.Generator().manual_seed(0)
    x, router = torch.randn(200, 64, generator=generator).bfloat16(), torch.randn(64, 64, generator=generator).bfloat16()
    experts, shares = route(x, router, 4, False)
    exact = (x.double() @ router.double().T).softmax(-1).topk(4)
    assert torch.equal(experts, exact.indices) and shares.dtype == torch.float32
    assert float((shares - exact.values).abs().max()) < 1e-5
    narrow = (x @ router.T).float().softmax(-1).topk(4)
    assert not torch.equal(narrow.indices, exact.indices)


def test_a_tokens_result_does_not_depend_on_the_others() -> None:
    router, gate_up, down = weights(7)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together = ReferenceKernels().moe(x, router, gate_up, down, top_k=2, normalise=True)
    for order in (torch.arange(39, -1, -1), torch.arange(0, 40, 3)):
        some = ReferenceKernels().moe(x[order], router, gate_up, down, top_k=2, normalise=True)
        assert float((some - together[order]).abs().max()) < 1e-14


def test_gradients_of_the_operation() -> None:
    """Against numerical differences; an expert without tokens has the gradient zero, and so do all without any token."""
    router, gate_up, down = (weight.requires_grad_() for weight in weights(4, hidden=3, inner=2))
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)

    def run(*arguments: Tensor) -> Tensor:
        return ReferenceKernels().moe(*arguments, top_k=2, normalise=True)

    assert torch.autograd.gradcheck(run, (x, router, gate_up, down))
    experts = torch.tensor([[1], [1]])
    mix(x[:2], experts, torch.ones(2, 1, dtype=torch.float64), gate_up, down, 0).sum().backward()
    assert [float(grad.abs().sum()) > 0 for grad in gate_up.grad] == [False, True, False, False]
    gate_up.grad = down.grad = router.grad = None
    run(x[:0], router, gate_up, down).sum().backward()
    assert all(weight.grad is not None and float(weight.grad.abs().sum()) == 0 for weight in (router, gate_up, down))


# ---------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant: str) -> None:
    model = build(variant)
    decoder, _ = filled(model)
    decoder.requires_grad_(True)
    with torch.enable_grad():
        logits = logits_of.__wrapped__(decoder)
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(IDS[1:]))
        loss.backward()
    expected = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(expected[:-1], torch.tensor(IDS[1:])).backward()
    assert float((logits - expected).detach().abs().max()) < 1e-4
    theirs = dict(one_by_one([(name, value.grad) for name, value in model.named_parameters()]))
    for spec in param_specs(decoder.config):
        mine = decoder.get_parameter(spec.name).grad
        for part in spec.parts:
            wanted = theirs[part.hf_name]
            assert float((mine[part.target_index] - wanted).abs().max()) < 1e-5 * max(1.0, float(wanted.abs().max())), spec.name
        assert float(mine.abs().max()) > 1e-4, f"{spec.name}: nothing to compare"


def test_what_the_variants_say_matters() -> None:
    """Self-check: each option, ignored, is seen in the logits."""
    base = tensors_of(build("shares as they are"))
    other = hf_models.moe(norm_topk_prob=True)
    other.load_state_dict(dict(base), strict=False)
    assert float((hf_models.logits(other, IDS) - hf_models.logits(build("shares as they are"), IDS)).abs().max()) > 0.5
    for variant in ("every second layer", "one layer dense"):
        layers = config_of(build(variant)).experts.layers
        assert layers == {"every second layer": (1, 3), "one layer dense": (0, 2)}[variant]


def test_a_16_bit_model_is_no_further_from_fp32_than_transformers() -> None:
    """In the mean over tokens; a token whose experts swap is far off in both."""
    model = build("shares divided")
    exact = torch.log_softmax(hf_models.logits(model, IDS), -1)
    decoder, store = new_decoder(config_of(model), torch.bfloat16)
    store.stage(tensors_of(model), 0)
    store.commit()
    theirs = hf_models.logits(model.bfloat16(), IDS)
    mean = [float((torch.log_softmax(x, -1) - exact).abs().mean()) for x in (logits_of(decoder), theirs)]
    assert mean[0] <= 1.1 * mean[1]


@pytest.mark.parametrize("variant", ["shares as they are", "shares divided", "one layer dense"])
def test_the_engine_equals_transformers(tmp_path: Path, variant: str) -> None:
    model = build(variant)
    engine = engine_cases.make(hf_models.save(model, tmp_path), max_batch_tokens=7)
    prompts = [hf_models.prompt(n, seed=n) for n in (1, 5, 13, 20)]
    rids = [engine.add_request(ids, engine_cases.GREEDY) for ids in prompts]
    done = engine_cases.run(engine)
    for rid, ids in zip(rids, prompts, strict=True):
        wanted, logprobs = hf_models.greedy(model, ids, 8)
        assert done[rid][0].token_ids == wanted
        assert done[rid][0].logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("way", ["staged", "streaming"])
@pytest.mark.parametrize("form", ["stacked", "single"])
def test_the_engine_takes_new_experts_in_either_form(tmp_path: Path, way: str, form: str) -> None:
    old, new = build("shares divided"), build("shares divided", seed=1)
    engine = engine_cases.make(hf_models.save(old, tmp_path))
    ids = hf_models.prompt(6)
    assert engine_cases.one(engine, ids).token_ids == hf_models.greedy(old, ids, 8)[0]
    pairs = tensors_of(new) if form == "stacked" else one_by_one(tensors_of(new))
    engine.update_weights(pairs, 1, way=way)
    assert engine_cases.one(engine, ids).token_ids == hf_models.greedy(new, ids, 8)[0]


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("original_format", [True, False])
def test_folders_in_both_forms_round_trip(tmp_path: Path, original_format: bool) -> None:
    model = build("one layer dense")
    model.save_pretrained(tmp_path / "theirs", save_original_format=original_format, max_shard_size="10KB")
    decoder = load(tmp_path / "theirs")
    assert is_model(decoder, model)
    save_folder(tmp_path / "ours", decoder.config, dict(decoder.named_parameters()), like=tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(hf_models.logits(again, IDS), hf_models.logits(model, IDS))
    model.save_pretrained(tmp_path / "single")
    written, original = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "single"))
    assert written.keys() == original.keys() and SINGLE in written
    assert all(torch.equal(value, original[name]) for name, value in written.items())
    assert from_folder(tmp_path / "ours") == decoder.config


def test_views_of_experts_are_the_models_own_memory() -> None:
    model = build("shares divided")
    decoder, _ = filled(model)
    pairs = dict(hf_tensors(decoder.config, dict(decoder.named_parameters())))
    assert {name: tuple(value.shape) for name, value in pairs.items()} == hf_shapes(decoder.config)
    pairs[SINGLE].fill_(3.0)
    gate_up = decoder.get_parameter("layers.0.experts.gate_up").detach()
    assert bool((gate_up[2, 16:] == 3).all()) and int((gate_up == 3).sum()) == 16 * 32


def _both(tensors: dict[str, Tensor]) -> None:
    tensors[STACKED] = torch.zeros(4, 32, 32)


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], object], str, str]] = {
    "one expert missing": (lambda t: t.pop(SINGLE), f"{SINGLE}: missing", f"1 of .* missing: {SINGLE}"),
    "one too many": (
        lambda t: t.update({SINGLE.replace("2", "4"): t[SINGLE].clone()}),
        "experts.4.up_proj.weight: unexpected",
        "experts.4.up_proj.weight: the model has no such tensor",
    ),
    "transposed": (
        lambda t: t.update({SINGLE: t[SINGLE].T.contiguous()}),
        r"up_proj.weight: shape \(32, 16\), must be \(16, 32\)",
        r"up_proj.weight: shape \(32, 16\), must be \(16, 32\)",
    ),
    "both forms": (_both, f"{STACKED}: unexpected", f"{STACKED}: experts come stacked or one by one, not both"),
}


@pytest.mark.parametrize("kind", BAD)
def test_experts_that_do_not_fit_are_refused(tmp_path: Path, kind: str) -> None:
    change, of_file, of_update = BAD[kind]
    model = build("shares divided")
    hf_models.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=of_file):
        read_folder(tmp_path, from_folder(tmp_path))
    decoder, store = filled(model)
    before = snapshot(decoder)
    for way in ("list", "iterator", "stream"):
        with pytest.raises(ValueError, match=of_update):
            pairs = list(tensors.items())
            store.stream(pairs, 1) if way == "stream" else store.stage(pairs if way == "list" else iter(pairs), 1)
            store.commit()
        store.discard()
        assert unchanged(decoder, before) and store.version == 0


def test_a_long_list_of_what_is_wrong_is_cut(tmp_path: Path) -> None:
    model = hf_models.moe(num_experts=16)
    hf_models.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".experts." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="; and 76 more$") as error:
        read_folder(tmp_path, from_folder(tmp_path))
    assert str(error.value).count(": missing") == 20
    _, store = new_decoder(config_of(model))
    with pytest.raises(ValueError, match=r"96 of \d+ tensors are missing: .*; and 76 more$"):
        store.stream(list(kept.items()), 0)
