"""How an engine's parts are chosen and put together from an EngineConfig: model, kernels, pool, runner, weight store.

Owns the defaults that depend on model and machine (device, dtype, maximal length, pool size). It serves nothing itself.
Invariant: every refusal is a ValueError that names the setting, raised before memory is taken.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from pearl.config import EngineConfig
from pearl.engine.arena import Arena
from pearl.engine.comm.agreement import agreed, least
from pearl.engine.comm.communicator import Communicator
from pearl.engine.cuda_graph import GRAPHED, DecodeGraphs, cuda_capture
from pearl.engine.kernels.interface import Kernels
from pearl.engine.kernels.registry import choose
from pearl.engine.kv_cache import allocate_pool, available_memory, plan_num_blocks
from pearl.engine.model_runner import ModelRunner
from pearl.engine.models.config import ModelConfig, from_folder
from pearl.engine.models.decoder import Decoder
from pearl.engine.models.params import Shard, local_config, param_specs
from pearl.engine.role import plan_role
from pearl.engine.weights.checkpoint import read_folder
from pearl.engine.weights.store import WeightStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an Engine is made of. `why` says in words which kernels were chosen and for what reason.

    `weight_memory` holds the decoder's parameters and `kv_memory` the runner's pool, so that sleep can give them back.
    """

    model: ModelConfig
    decoder: Decoder
    runner: ModelRunner
    store: WeightStore
    weight_memory: Arena
    kv_memory: Arena
    num_blocks: int
    max_model_len: int
    tokenizer_folder: Path | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a configuration comes to on one rank, before memory is taken. `local`: the heads that this rank attends with."""

    device: torch.device
    model: ModelConfig
    shard: Shard
    local: ModelConfig
    max_model_len: int
    kernels: Kernels
    why: str

    @property
    def weight_bytes(self) -> int:
        """What the weights take. On a CPU once one version has followed another: the one that is served, and memory for the
        next, a tied embedding both plain and packed."""
        sizes = {spec.name: math.prod(spec.shape) for spec in param_specs(self.model, self.shard)}
        numbers = sum(sizes.values())
        if self.device.type == "cpu":
            numbers = 2 * (numbers + (sizes["embed.weight"] if self.model.tie_embeddings else 0))
        return numbers * DTYPES[self.model.dtype].itemsize


def choose_parts(config: EngineConfig, rank: int = 0) -> Choice:
    """Decides all that can be refused beforehand, for one of `config.tensor_parallel` ranks; ValueError names the setting."""
    device, dtype = _device(config, rank), DTYPES[config.dtype]
    model = dataclasses.replace(_model(config), dtype=config.dtype)
    shard = Shard(rank=rank, size=config.tensor_parallel)
    local = local_config(model, shard)
    max_model_len = _max_model_len(config, model)
    plan_role(config.role, max_batch_tokens=config.max_batch_tokens, decode_prefill_tokens=config.decode_prefill_tokens)
    kernels, why = choose(config.kernels, device=device, dtype=dtype, model=model, block_size=config.block_size)
    if config.deterministic and not kernels.row_invariant:
        reason = f"kernels={kernels.name!r} compute other bits in other batches"
        raise ValueError(f"engine.deterministic={config.deterministic}: must be False, {reason}; those for CPUs do not")
    return Choice(
        device=device, model=model, shard=shard, local=local, max_model_len=max_model_len, kernels=kernels, why=why
    )


def assemble(config: EngineConfig, comm: Communicator | None = None) -> Parts:
    """Builds the parts of this rank of `comm` (None: the only one); the weights are still empty."""
    choice = choose_parts(config, 0 if comm is None else comm.rank)
    device, model, kernels, dtype = choice.device, choice.model, choice.kernels, DTYPES[config.dtype]
    weight_memory, kv_memory = Arena(device), Arena(device)
    decoder = Decoder(
        model, kernels, dtype=dtype, device=device, memory=weight_memory.zeros, shard=choice.shard, comm=comm
    )
    decoder.requires_grad_(False)
    memory = available_memory(device) if config.num_blocks is None else 0
    num_blocks = plan_num_blocks(config, choice.local, choice.max_model_len, memory)
    pool = allocate_pool(
        choice.local, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, memory=kv_memory, fill=config.kv_fill
    )
    served = kernels.serve(decoder.served_model(), pool, weight_memory.zeros)
    runner = ModelRunner(decoder, kernels, pool, block_size=config.block_size, served=served)
    runner.graphs = _graphs(config, choice)
    return Parts(
        model=model,
        decoder=decoder,
        runner=runner,
        store=WeightStore(
            model, dict(decoder.named_parameters()), choice.shard, packed=None if served is None else served.weights
        ),
        weight_memory=weight_memory,
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        max_model_len=choice.max_model_len,
        tokenizer_folder=_tokenizer_folder(config),
        why=choice.why,
    )


def _graphs(config: EngineConfig, choice: Choice) -> DecodeGraphs | None:
    """For kernels that can be captured, on one GPU: what ranks exchange within a step is not captured."""
    wanted = config.cuda_graphs and config.tensor_parallel == 1
    if not wanted or choice.device.type != "cuda" or choice.kernels.name not in GRAPHED:
        return None
    return DecodeGraphs(
        cuda_capture(choice.device),
        device=choice.device,
        max_rows=config.max_num_seqs,
        max_context=choice.max_model_len,
        width=-(-choice.max_model_len // config.block_size) + 1,
    )


def with_pool(config: EngineConfig, comm: Communicator) -> EngineConfig:
    """The configuration with as many blocks on every rank as the one with the least room can have.

    Ranks on a CPU share its memory; the weights, not there yet, come on top. ValueError, on all ranks, if one has no room.
    """
    if config.num_blocks is not None:
        return config
    with agreed(comm):
        choice = choose_parts(config, comm.rank)
        memory = available_memory(choice.device) // (comm.size if choice.device.type == "cpu" else 1)
        num_blocks = plan_num_blocks(config, choice.local, choice.max_model_len, max(0, memory - choice.weight_bytes))
    return dataclasses.replace(config, num_blocks=least(comm, num_blocks))


def load_folder(store: WeightStore, model: ModelConfig, folder: str | Path) -> None:
    """The weights of a Hugging Face folder as version 0."""
    if isinstance(folder, ModelConfig):
        raise ValueError("model: is a ModelConfig, which has no weights; use load_format='dummy' or load_weights=False")
    store.stage(read_folder(Path(folder), model), 0)
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


def _device(config: EngineConfig, rank: int) -> torch.device:
    """Several ranks on CUDA have a device each, in the order of their ranks."""
    name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name if config.device == "auto" else config.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={config.device!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    ranks, there = config.tensor_parallel, torch.cuda.device_count()
    if ranks > 1 and device.index is not None:
        raise ValueError(f"device={config.device!r}: must be auto, cpu or cuda with tensor_parallel={ranks}")
    needed = max(ranks, (device.index or 0) + 1)
    if needed > there:
        raise ValueError(f"device={config.device!r}, tensor_parallel={ranks}: needs {needed} CUDA devices, of {there} here")
    return torch.device("cuda", rank) if ranks > 1 else device


def _tokenizer_folder(config: EngineConfig) -> Path | None:
    if isinstance(config.model, ModelConfig):
        return None
    folder = Path(config.model)
    return folder if (folder / "tokenizer.json").is_file() else None
