"""Publishing: what the engine is given, what is measured, and that engine and trainer then agree on log-probs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_cases import VOCAB, command, config, folder, sequences

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.engine.models.params import hf_shapes
from pearl.protocol import SamplingParams, TrainSequence
from pearl.rl.publisher import publish
from pearl.rl.trainer import Trainer


class RecordingEngine:
    """Takes what an engine is given; refuses versions that are not newer."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.version = -1
        self.mode = ""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, mode: str = "recompute") -> None:
        if version <= self.version:
            raise ValueError(f"version={version}: must be greater than {self.version}")
        self.tensors = {name: tensor.clone() for name, tensor in tensors}
        self.version, self.mode = version, mode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder(tmp_path_factory.mktemp("model"))
    Trainer(path, config(seed=3))
    return path


def test_the_whole_model_is_given_and_counted(model: Path):
    trainer, engine = Trainer(model, config()), RecordingEngine()
    metrics = publish(trainer, engine, 4)
    shapes = hf_shapes(from_folder(model))
    assert {name: tuple(tensor.shape) for name, tensor in engine.tensors.items()} == shapes
    assert (engine.version, engine.mode) == (4, "keep")
    assert metrics["bytes"] == 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert metrics["seconds"] > 0
    with pytest.raises(ValueError, match="version=4: must be greater than 4"):
        publish(trainer, engine, 4)


def test_each_publication_has_the_present_weights(model: Path):
    trainer, engine = Trainer(model, config()), RecordingEngine()
    publish(trainer, engine, 0)
    before = engine.tensors
    trainer.train_step(command(sequences(), objective="sft"))
    publish(trainer, engine, 1)
    assert all(not tensor.requires_grad for tensor in engine.tensors.values())
    moved = [name for name, tensor in engine.tensors.items() if not torch.equal(tensor, before[name])]
    assert set(moved) == set(before)


def generate(engine: Engine, prompts: list[list[int]]) -> list[TrainSequence]:
    params = [SamplingParams(max_tokens=9, seed=seed) for seed in range(len(prompts))]
    for prompt, wish in zip(prompts, params, strict=True):
        engine.add_request(prompt, wish)
    made = []
    while engine.has_unfinished():
        for completion in engine.step():
            given = len(completion.prompt_token_ids)
            made.append(
                TrainSequence(
                    token_ids=[*completion.prompt_token_ids, *completion.token_ids],
                    loss_mask=[0] * given + [1] * len(completion.token_ids),
                    logprobs=[0.0] * given + list(completion.logprobs),
                    weight_versions=[-1] * given + list(completion.weight_versions),
                    reward=float(sum(completion.token_ids) % 5),
                    group=0,
                )
            )
    return made


def test_engine_and_trainer_agree_on_every_version(model: Path):
    trainer = Trainer(model, config(optimizer={"lr": 0.01}))
    trainer.set_reference()
    sizes = {"max_model_len": 64, "max_batch_tokens": 16, "block_size": 4}
    engine = Engine(EngineConfig(model=from_folder(model), dtype="float32", device="cpu", **sizes), load_weights=False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (size,), generator=generator).tolist() for size in (1, 3, 5, 17)]
    stale: list[TrainSequence] = []
    for version in range(3):
        publish(trainer, engine, version)
        made = generate(engine, prompts)
        assert {v for s in made for v in s.weight_versions} == {-1, version}
        metrics = trainer.train_step(command(made + stale, weight_version=version))
        assert metrics["logprob_gap"] < 1e-5
        assert (metrics["policy_shift"] is None) == (not stale)
        if stale:
            assert metrics["policy_shift"] > 1e-3
        stale = made
