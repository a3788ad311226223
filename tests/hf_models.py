"""Tiny Hugging Face models as the oracle of the engine's and the trainer's tests. Fixtures only, no tests.

The initializer range is large on purpose: with the default one the logits are so flat that a wrong rope base or a missing
norm hides below any tolerance. `randomise` also moves what Hugging Face leaves constant (biases 0, norm weights 1).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def dense(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 on the CPU, in eval mode. `rope_theta=x` is short for the rope_parameters."""
    return _build(Qwen3ForCausalLM, Qwen3Config, seed, overrides)


def llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """The same shape as a Llama; `attention_bias` and `mlp_bias` are taken."""
    return _build(LlamaForCausalLM, LlamaConfig, seed, overrides)


def qwen2(seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    """The same shape as a Qwen2: biases on queries, keys and values."""
    return _build(Qwen2ForCausalLM, Qwen2Config, seed, overrides)


def mistral(seed: int = 0, **overrides: Any) -> MistralForCausalLM:
    """The same shape as a Mistral; its window is 4096 unless `sliding_window` is given."""
    return _build(MistralForCausalLM, MistralConfig, seed, overrides)


def moe(seed: int = 0, **overrides: Any) -> Qwen3MoeForCausalLM:
    """The same shape as a Qwen3-MoE: four small experts, two for each token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig, seed, experts | overrides)


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Adds 0.3 * randn to every bias and norm weight, in place; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def save(model: PreTrainedModel, path: Path) -> Path:
    """Writes a Hugging Face folder; returns it."""
    model.save_pretrained(path)
    return path


def prompt(n: int, *, seed: int = 0, vocab_size: int = 128) -> list[int]:
    """The first n ids of a fixed random sequence."""
    return torch.randint(0, vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))[0].tolist()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """fp32 logits [len(ids), vocab] of one sequence, without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model: PreTrainedModel, ids: list[int], n: int) -> tuple[list[int], list[float]]:
    """n greedy ids after `ids` and their log-probabilities: the full sequence is computed anew for each token."""
    tokens, logprobs = list(ids), []
    for _ in range(n):
        row = torch.log_softmax(logits(model, tokens)[-1], dim=-1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row[tokens[-1]]))
    return tokens[len(ids) :], logprobs


def _build(model_class: type, config_class: type, seed: int, overrides: dict[str, Any]) -> Any:
    fields = copy.deepcopy(SHAPE | overrides)  # transformers writes into the rope parameters that it is given
    if "rope_theta" in fields:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    torch.manual_seed(seed)
    model: nn.Module = model_class(config_class(**fields))
    return model.eval()
