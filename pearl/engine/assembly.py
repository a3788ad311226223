"""How an engine's parts are chosen and put together from an EngineConfig: model, kernels, pool, runner, weight store.

Owns the defaults that depend on model and machine (device, dtype, maximal length, pool size). It serves nothing itself.
Invariant: every refusal is a ValueError that names the setting, raised before memory is taken.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from pearl.config import EngineConfig
from pearl.engine.kernels.registry import choose
from pearl.engine.kv_cache import allocate_pool, available_memory, plan_num_blocks
from pearl.engine.model_runner import ModelRunner
from pearl.engine.models.config import ModelConfig, from_folder
from pearl.engine.models.decoder import Decoder
from pearl.engine.role import plan_role
from pearl.engine.weights.checkpoint import hf_tensors, read_folder
from pearl.engine.weights.store import WeightStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an Engine is made of. `why` says in words which kernels were chosen and for what reason."""

    model: ModelConfig
    decoder: Decoder
    runner: ModelRunner
    store: WeightStore
    num_blocks: int
    max_model_len: int
    tokenizer_folder: Path | None
    why: str


def assemble(config: EngineConfig) -> Parts:
    """Builds the parts; the weights are still empty."""
    device, dtype = _device(config), DTYPES[config.dtype]
    model = dataclasses.replace(_model(config), dtype=config.dtype)
    max_model_len = _max_model_len(config, model)
    plan_role(config.role, max_batch_tokens=config.max_batch_tokens, decode_prefill_tokens=config.decode_prefill_tokens)
    kernels, why = choose(config.kernels, device=device, dtype=dtype, model=model, block_size=config.block_size)
    decoder = Decoder(model, kernels, dtype=dtype, device=device)
    decoder.requires_grad_(False)
    store = WeightStore(model, dict(decoder.named_parameters()), kernels)
    memory = available_memory(device) if config.num_blocks is None else 0
    num_blocks = plan_num_blocks(config, model, max_model_len, memory)
    pool = allocate_pool(
        model, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device, fill=config.kv_fill
    )
    return Parts(
        model=model,
        decoder=decoder,
        runner=ModelRunner(decoder, kernels, pool, block_size=config.block_size),
        store=store,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        tokenizer_folder=_tokenizer_folder(config),
        why=why,
    )


def load_folder(store: WeightStore, model: ModelConfig, folder: str | Path) -> None:
    """The weights of a Hugging Face folder as version 0."""
    if isinstance(folder, ModelConfig):
        raise ValueError("model: is a ModelConfig, which has no weights; use load_format='dummy' or load_weights=False")
    store.stage(read_folder(Path(folder), model), 0)
    store.commit()


def mark_loaded(store: WeightStore, model: ModelConfig, decoder: Decoder) -> None:
    """What the decoder holds now becomes version 0."""
    store.stage(hf_tensors(model, dict(decoder.named_parameters())), 0)
    store.commit()


def _model(config: EngineConfig) -> ModelConfig:
    if isinstance(config.model, ModelConfig):
        return config.model
    if not isinstance(config.model, (str, Path)):
        raise ValueError(f"model={config.model!r}: must be a Hugging Face model folder or a ModelConfig")
    return from_folder(config.model)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The model's own limit unless a smaller one is set; more than the model was made for is refused."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ValueError(f"max_model_len={config.max_model_len}: must not exceed the model's max_position={model.max_position}")
    return config.max_model_len


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={config.device!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={config.device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _tokenizer_folder(config: EngineConfig) -> Path | None:
    if isinstance(config.model, ModelConfig):
        return None
    folder = Path(config.model)
    return folder if (folder / "tokenizer.json").is_file() else None
