"""Publishing: what engines are given and when, what is measured, and that engine and trainer then agree on log-probs."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import publish_members
import pytest
import torch
from torch import Tensor
from trainer_cases import VOCAB, command, config, folder, sequences

from pearl.config import EngineConfig
from pearl.engine.comm.communicator import CollectiveError, SingleCommunicator
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.snapshot import Snapshot
from pearl.protocol import SamplingParams, TrainSequence
from pearl.rl.node_publisher import NodeSender
from pearl.rl.publisher import GatheringPublisher, LocalPublisher
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


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [0],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder(tmp_path_factory.mktemp("model"))
    Trainer(path, config(seed=3))
    return path


def publish(trainer, engine, version):
    publisher = LocalPublisher(trainer, engine)
    publisher.begin(version)
    return publisher.poll()


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


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_engine_and_trainer_agree_on_every_version(tmp_path: Path, family: str):
    model = folder(tmp_path, **(EXPERTS if family == "experts" else {}))
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


def test_a_local_publication_is_through_at_the_first_poll(model: Path):
    trainer, engine = Trainer(model, config()), RecordingEngine()
    publisher = LocalPublisher(trainer, engine)
    for version in (0, 1):
        publisher.begin(version)
        assert engine.version == version - 1
        metrics = publisher.poll() if version else publisher.wait(5.0)
        assert engine.version == version
        assert metrics.keys() == {"seconds", "bytes", "commit_s"} and 0 < metrics["commit_s"] <= metrics["seconds"]
    publisher.begin(1)
    with pytest.raises(ValueError, match="version=1: must be greater than 1"):
        publisher.wait(5.0)


def test_a_training_rank_that_does_not_send_goes_through_all_tensors(model: Path):
    trainer, taken = Trainer(model, config()), []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in Trainer.named_hf_tensors(trainer):
            taken.append(name)
            yield name, tensor

    trainer.named_hf_tensors = counted
    publisher = GatheringPublisher(trainer)
    publisher.begin(1)
    assert publisher.poll() is None and 0 < len(taken) < len(hf_shapes(from_folder(model)))
    assert publisher.wait(5.0)["bytes"] == 0.0
    assert taken == list(hf_shapes(from_folder(model)))


def test_a_wait_ends(model: Path):
    class Nobody(SingleCommunicator):
        size = 2

        def all_reduce_sum_async(self, tensor: Tensor, what: str = "") -> Nobody:
            return self

        def done(self) -> bool:
            return False

    publisher = NodeSender(Trainer(model, config()), Nobody(), Snapshot(from_folder(model), torch.float32))
    publisher.begin(4)
    assert publisher.poll() is None
    start = time.monotonic()
    with pytest.raises(CollectiveError, match=r"publishing version 4: not through within 0\.2 s"):
        publisher.wait(0.2)
    assert time.monotonic() - start < 2


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict | None]]:
    """What each of the three processes said in each phase; None from one that has ended."""
    path = folder(tmp_path_factory.mktemp("members"))
    Trainer(path, config(seed=3))
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(publish_members.RANKS)]
    members = [
        context.Process(target=publish_members.member, args=(rank, str(path), pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process in members:
        process.start()
    for _, ours in pipes:
        ours.close()
    said: list[list[dict | None]] = []
    for _ in range(7):
        row = []
        for receiver, _ in pipes:
            assert receiver.poll(60)
            try:
                row.append(receiver.recv())
            except EOFError:
                row.append(None)
        said.append(row)
    for process in members:
        process.join(10)
        process.kill()
    return said


def test_engines_on_other_ranks_get_every_bit(phases: list):
    for row in (phases[0], phases[1], phases[2], phases[5]):
        assert row[0]["weights"] == row[1]["weights"] == row[2]["weights"]
        assert row[0]["bytes"] == row[1]["bytes"] > 0 and all(said["seconds"] > 0 for said in row)
        assert row[0]["commit_s"] == 0.0 < row[1]["commit_s"]
    assert len({phases[number][1]["weights"] for number in (0, 1, 5)}) == 3


def test_requests_go_on_under_the_old_version_until_the_commit(phases: list):
    for said in phases[1][1:]:
        before = sum(said["made"])
        assert len(said["made"]) >= 5 and all(count == 1 for count in said["made"])
        assert said["versions"] == [0] * before + [1] * (170 - before)


def test_memory_stays_flat_over_many_publications(phases: list):
    assert all(said["grown_kib"] < 2048 for said in phases[2])


def test_weights_that_are_not_finite_are_refused_by_all(phases: list):
    name = "model.layers.1.mlp.down_proj.weight"
    errors = [said["error"] for said in phases[3]]
    assert errors == [f"{name}: 1 of 384 values are not finite in torch.float32"] * 3
    assert all(said["unchanged"] for said in phases[3])


def test_a_version_that_is_not_newer_is_refused_where_it_is_not(phases: list):
    assert {said["error"] for said in phases[4][1:]} == {"version=51: must be greater than 51, the present version"}
    assert all(said["unchanged"] for said in phases[4][1:])
    assert [said["versions"] for said in phases[5][1:]] == [[52] * 5] * 2


def test_a_receiver_that_dies_ends_the_publication_for_all(phases: list):
    sender, receiver, dead = phases[6]
    assert dead is None
    assert sender["error"].startswith("version 53, ") and " to 1, 2: failed: " in sender["error"]
    assert receiver["error"] is not None and "version 53" in receiver["error"] and receiver["version"] == 52
