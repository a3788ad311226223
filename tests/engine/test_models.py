"""The decoder against transformers: packed, paged in chunks, in every spelling of a configuration; gradients; the head."""

from __future__ import annotations

from collections.abc import Callable

import hf_models
import numpy as np
import pytest
import torch
from decoder_cases import config_of, decoder_of, gap, packed_logits, paged_logits, sequences_of
from model_variants import IGNORING, VARIANTS
from torch import Tensor

from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models import layers
from pearl.engine.models.config import ModelConfig, from_hf
from pearl.engine.models.decoder import Decoder, varlen_attend
from pearl.engine.models.params import param_specs

TOLERANCE = 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_packed_and_paged(variant: str) -> None:
    build, overrides = VARIANTS[variant]
    model = hf_models.randomise(build(**overrides))
    decoder = decoder_of(model)
    assert [name for name, _ in decoder.named_parameters()] == [spec.name for spec in param_specs(decoder.config)]
    sequences = sequences_of()
    expected = [hf_models.logits(model, ids) for ids in sequences]
    with torch.no_grad():
        assert gap(packed_logits(decoder, sequences), expected) < TOLERANCE
    assert gap(paged_logits(decoder, sequences, block_size=4, chunk=7), expected) < TOLERANCE


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 3), (3, 1), (4, 4), (5, 64), (16, 1), (16, 9)])
def test_block_and_chunk_sizes_do_not_matter(block_size: int, chunk: int) -> None:
    model = hf_models.randomise(hf_models.dense())
    sequences = sequences_of((33, 4, 1, 16, 9))
    expected = [hf_models.logits(model, ids) for ids in sequences]
    ours = paged_logits(decoder_of(model), sequences, block_size=block_size, chunk=chunk, seed=chunk)
    assert gap(ours, expected) < TOLERANCE


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 1), (3, 2), (3, 5), (4, 3), (4, 64), (16, 4)])
@pytest.mark.parametrize("variant", ["dense-window-mixed", "mistral-window"])
def test_block_and_chunk_sizes_do_not_matter_to_windows(variant: str, block_size: int, chunk: int) -> None:
    build, overrides = VARIANTS[variant]
    model = hf_models.randomise(build(**overrides))
    sequences = sequences_of((33, 4, 1, 16, 5))
    expected = [hf_models.logits(model, ids) for ids in sequences]
    ours = paged_logits(decoder_of(model), sequences, block_size=block_size, chunk=chunk, seed=chunk)
    assert gap(ours, expected) < TOLERANCE


@pytest.mark.parametrize(("variant", "ignoring"), IGNORING)
def test_a_wrong_number_in_the_configuration_shows(variant: str, ignoring: Callable[[ModelConfig], ModelConfig]) -> None:
    build, overrides = VARIANTS[variant]
    model, ids = hf_models.randomise(build(**overrides)), hf_models.prompt(40)
    wrong = ignoring(config_of(model))
    assert wrong != config_of(model)
    with torch.no_grad():
        ours = packed_logits(decoder_of(model, wrong), [ids])
    assert gap(ours, [hf_models.logits(model, ids)]) > 0.1


@pytest.mark.parametrize("part", ["q_norm", "k_norm", "qkv.bias", "o.bias", "gate_up.bias", "down.bias", "post_norm"])
def test_every_randomised_parameter_shows(part: str) -> None:
    """What the comparison rests on: leaving out a norm's weight or a bias is far outside the tolerance."""
    build = hf_models.dense if part in ("q_norm", "k_norm") else hf_models.llama
    model = hf_models.randomise(build(**({} if build is hf_models.dense else {"attention_bias": True, "mlp_bias": True})))
    decoder, ids = decoder_of(model), hf_models.prompt(40)
    with torch.no_grad():
        for name, value in decoder.named_parameters():
            if part in name:
                value.fill_(0.0 if name.endswith("bias") else 1.0)
        assert gap(packed_logits(decoder, [ids]), [hf_models.logits(model, ids)]) > 0.02


def test_old_and_new_spelling_of_a_configuration() -> None:
    model = hf_models.randomise(hf_models.dense())
    new = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "float32"}
    assert from_hf(old) == from_hf(new)
    assert from_hf({**new, "rope_theta": 5.0}).rope_theta == 1e6  # the new spelling wins
    del old["rope_theta"]
    assert from_hf(old).rope_theta == 1e4
    ids = hf_models.prompt(40)
    with torch.no_grad():
        assert gap(packed_logits(decoder_of(model, from_hf(old)), [ids]), [hf_models.logits(model, ids)]) > 1.0


TRAINED = ["dense", "dense-tied", "llama-biases", "qwen2", "dense-window-mixed", "qwen2-window", "llama-llama3", "dense-yarn"]


@pytest.mark.parametrize("variant", TRAINED)
def test_gradients_equal_transformers(variant: str) -> None:
    """One backward pass of a packed batch against the sum over separate sequences. Lengths make two padded groups."""
    build, overrides = VARIANTS[variant]
    model = hf_models.randomise(build(**overrides))
    sequences = sequences_of((13, 3, 30, 16, 4))
    decoder = decoder_of(model)
    with torch.inference_mode():
        packed_logits(decoder, sequences)  # whatever is remembered from it must be usable in training
    total = sum(len(ids) - 1 for ids in sequences)

    def loss_of(rows: list[Tensor]) -> Tensor:
        pairs = [(r[:-1], torch.tensor(ids[1:])) for r, ids in zip(rows, sequences, strict=True)]
        return sum(torch.nn.functional.cross_entropy(r, t, reduction="sum") for r, t in pairs) / total

    loss = loss_of(packed_logits(decoder, sequences))
    expected = loss_of([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences])
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) < 1e-5
    theirs = dict(model.named_parameters())
    for spec in param_specs(decoder.config):
        wanted = torch.cat([theirs[part.hf_name].grad for part in spec.parts])
        mine = decoder.get_parameter(spec.name).grad
        assert float((mine - wanted).abs().max()) < 1e-5 * max(1.0, float(wanted.abs().max())), spec.name
        assert float(wanted.abs().max()) > 1e-4, f"{spec.name}: nothing to compare"


def test_head_of_a_16_bit_model_is_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HEAD_ROWS", 48)  # several slices
    decoder = decoder_of(hf_models.dense(), dtype=torch.bfloat16).requires_grad_(False)
    hidden_TD = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_VD = decoder.get_parameter("lm_head.weight")
    logits = decoder.logits(hidden_TD)
    expected = hidden_TD.float() @ weight_VD.float().T
    assert logits.dtype == torch.float32
    assert float((logits - expected).abs().max()) < TOLERANCE
    assert float((hidden_TD @ weight_VD.T - expected).abs().max()) > 100 * TOLERANCE


def test_16_bit_model_is_no_further_from_fp32_than_transformers() -> None:
    model, ids = hf_models.randomise(hf_models.dense()), hf_models.prompt(64)
    exact = torch.log_softmax(hf_models.logits(model, ids), -1)
    with torch.no_grad():
        ours = packed_logits(decoder_of(model, dtype=torch.bfloat16), [ids])[0]
    theirs = hf_models.logits(model.bfloat16(), ids)
    mean = [float((torch.log_softmax(x, -1) - exact).abs().mean()) for x in (ours, theirs)]
    assert mean[0] <= 1.1 * mean[1]


def test_rope_tables_stay_fp32_when_the_model_is_cast() -> None:
    decoder = decoder_of(hf_models.dense()).to(torch.bfloat16)
    angle = np.outer(np.arange(256), 1e6 ** -(np.arange(0, 16, 2) / 16))
    for table, exact in ((decoder.rope_cos, np.cos(angle)), (decoder.rope_sin, np.sin(angle))):
        assert table.dtype == torch.float32
        assert np.abs(table.numpy() - np.concatenate([exact, exact], axis=1)).max() < 1e-7
    assert next(decoder.parameters()).dtype == torch.bfloat16
    assert list(decoder.buffers()) == []


def test_init_weights_is_a_function_of_the_seed() -> None:
    config = config_of(hf_models.llama(attention_bias=True))
    first, second, other = (Decoder(config, ReferenceKernels(), dtype=torch.float32) for _ in range(3))
    narrow = Decoder(config, ReferenceKernels(), dtype=torch.bfloat16)
    for decoder, seed in ((first, 3), (second, 3), (other, 4), (narrow, 3)):
        decoder.init_weights(seed)
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name))
        assert torch.equal(value.bfloat16(), narrow.get_parameter(name))
        if "norm" in name:
            assert bool((value == 1).all())
        elif name.endswith("bias"):
            assert bool((value == 0).all())
        else:
            assert not torch.equal(value, other.get_parameter(name))
            assert 0.018 < float(value.detach().std()) < 0.022
            assert abs(float(value.detach().mean())) < 0.002


def test_a_position_past_the_end_raises() -> None:
    decoder = decoder_of(hf_models.dense())
    batch = PackedBatch(positions_T=torch.tensor([256]), lengths=(1,))
    with pytest.raises((IndexError, RuntimeError)):
        decoder(torch.tensor([1]), batch.positions_T, varlen_attend(decoder.kernels, batch, decoder.config))


def test_the_head_of_a_served_16_bit_model_is_one_product() -> None:
    """This version of torch has the product with fp32 sums of 16-bit factors that GPUs take."""
    hidden, weight = (torch.empty(size, 8, dtype=torch.bfloat16, device="meta") for size in (3, 20))
    assert torch.mm(hidden, weight.T, out_dtype=torch.float32).dtype is torch.float32


@pytest.mark.gpu
def test_the_head_on_a_gpu_does_not_widen_its_weights() -> None:
    hidden, weight = (torch.randn(size, 1024, device="cuda").bfloat16() for size in (5, 50_000))
    expected = hidden.float() @ weight.float().T
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        found = layers.wide_head(hidden, weight)
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes
    assert found.dtype is torch.float32 and gap([found.cpu()], [expected.cpu()]) < 1e-3  # of sums of about 30
