"""The trainer on two and three ranks, each a process, against the trainer on one: the same numbers, the same files."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from trainer_cases import ACTOR_CRITIC, NARROW, ON_TRUNK, command, config, folder, sequences

from pearl.protocol import TrainSequence, TrainStep
from pearl.rl.checkpoint import is_stable
from pearl.rl.sharding import whole
from pearl.rl.trainer import Trainer

replaced = msgspec.structs.replace

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "mlp_only_layers": [0]}
ODD = {"hidden_size": 18, "intermediate_size": 25, "head_dim": 4, "vocab_size": 41}
ODD |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | EXPERTS
"""On three ranks nothing divides, and of the four rows of q_norm the last rank has none. One layer is dense, one of experts."""

SPREAD: dict[int, list] = {
    # A rank without sequences, ranks with more micro-batches than the others need, two updates.
    2: [[[[0, 1, 2, 3, 4], [5]], [[], [6]]], [[[]], [[7, 8, 9, 10, 11]]]],
    3: [[[[0, 1], [5]], [[], [6]], [[2, 3, 4], []]], [[[]], [[7, 8, 9, 10, 11]], [[]]]],
}
ALONE = [[[[0, 1, 2, 3, 4, 5, 6]]], [[[7, 8, 9, 10, 11]]]]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-6}
"""Adam divides by the gradient's size: weights whose gradients are nearly zero differ by more than the gradients do."""


def masked(made: list[TrainSequence], *indices: int) -> list[TrainSequence]:
    return [replaced(s, loss_mask=[0] * len(s.token_ids)) if i in indices else s for i, s in enumerate(made)]


def plans(spread: list) -> dict[str, list[TrainStep]]:
    """The steps that a rank program runs, over this plan. Sequences 5 and 6 are the only ones of their micro-batches."""
    stale = sequences(seed=6, version=1)
    worst = sequences(seed=7)
    # On one rank alone, a ratio overflows: its group's worst action, sampled with a log-prob of -200.
    worst[6] = replaced(worst[6], reward=-9.0, logprobs=[-200.0 if on else 0.0 for on in worst[6].loss_mask])
    return {
        "equal": [
            command(masked(sequences(), 5), spread),
            command(sequences(seed=4), spread, objective="sft"),
            command(masked(stale, 6, 7, 8, 9, 10, 11), spread, weight_version=2),
            command([*stale[:6], *sequences(seed=8, version=2)[6:]], spread, weight_version=2),
        ],
        "refused": [command(worst, spread, step=9), command(sequences(seed=8), spread)],
        "resume": [
            command(sequences(seed=10), spread, objective="sft"),
            *(command(sequences(seed=seed), spread) for seed in (11, 12, 13)),
        ],
    }


def run_ranks(place: Path) -> None:
    world = max(SPREAD)
    program = str(Path(__file__).parents[1] / "trainer_rank.py")
    arguments = [str(world), *map(str, SPREAD)]
    ranks = [
        subprocess.Popen([sys.executable, program, str(place), str(rank), *arguments], env=environment())
        for rank in range(world)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def single(place: Path, dtype: torch.dtype = torch.float32) -> Trainer:
    trainer = Trainer(place / "model", config(), dtype=dtype)
    trainer.set_reference()
    return trainer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ranks have run, with a model, and the state of a single trainer made beforehand."""
    place = tmp_path_factory.mktemp("ranks")
    Trainer(folder(place / "model", **ODD), config(seed=3))
    trainer = single(place)
    for step in plans(ALONE)["resume"][:2]:
        trainer.train_step(step)
    trainer.save_state(place / "state")
    for size, spread in SPREAD.items():
        (place / f"ranks{size}").mkdir()
        for name, steps in plans(spread).items():
            (place / f"ranks{size}" / f"{name}.steps").write_bytes(msgspec.msgpack.encode(steps))
    run_ranks(place)
    return place


@pytest.fixture(scope="module", params=SPREAD)
def ran(request: pytest.FixtureRequest, place: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of so many ranks, and the results that each of them left."""
    own = place / f"ranks{request.param}"
    return own, [torch.load(own / f"results.{rank}") for rank in range(request.param)]


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], atol: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_metrics(first: list[dict], second: list[dict], tolerance: float) -> None:
    """All but seconds."""
    for mine, other in zip(first, second, strict=True):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            if not key.endswith("_s"):
                close = value if value is None else pytest.approx(value, abs=tolerance, rel=tolerance)
                assert other[key] == close, key


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_several_ranks_equal_one(ran: tuple[Path, list], dtype: torch.dtype):
    """Gradients, weights and metrics after four steps with empty and fully masked micro-batches, fresh and stale tokens."""
    own, results = ran
    trainer, atol = single(own.parent, dtype), TOLERANCE[dtype]
    expected = [trainer.train_step(step) for step in plans(ALONE)["equal"]]
    gradients = {name: whole(p.grad) for name, p in trainer.decoder.named_parameters()}
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2
    for result in (result[str(dtype)] for result in results):
        assert_same(gradients, result["gradients"], 10 * atol)
        assert_same(weights(trainer), result["weights"], atol)
        assert_same_metrics(expected, result["metrics"], 10 * atol)
    assert expected[2]["importance_weight_mean"] is not None and expected[0]["importance_weight_mean"] is None


def test_actor_and_critic_on_several_ranks_equal_those_on_one(ran: tuple[Path, list]):
    """With credit that needs all ranks' tokens, frozen layers (here the one without experts) and recomputed ones.

    The ranks put everything aside after each step, and take it up again.
    """
    own, results = ran
    trainer = Trainer(own.parent / "model", config(**ACTOR_CRITIC), dtype=torch.float64)
    trainer.set_reference()
    before = {name: tensor.clone() for name, tensor in trainer.decoder.named_parameters()}
    metrics = [trainer.train_step(step) for step in plans(ALONE)["equal"]]
    expected = dict(trainer.decoder.named_parameters())
    moved = {name for name, tensor in expected.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in expected if name.startswith(("layers.1.", "norm."))}
    expected |= {f"critic.{name}": tensor for name, tensor in trainer._critic.named_parameters()}
    for result in (result["actor-critic"] for result in results):
        assert_same({name: tensor.detach() for name, tensor in expected.items()}, result["weights"], 1e-9)
        assert_same_metrics(metrics, result["metrics"], 1e-8)


def test_a_value_head_on_several_ranks_equals_that_on_one(ran: tuple[Path, list]):
    own, results = ran
    trainer = Trainer(own.parent / "model", config(**ON_TRUNK), dtype=torch.float64)
    trainer.set_reference()
    metrics = [trainer.train_step(step) for step in plans(ALONE)["equal"]]
    gradients = {name: whole(p.grad) for name, p in trainer.decoder.named_parameters()}
    assert float(gradients["value_head.weight"].abs().max()) > 1e-3 and metrics[0]["value_loss"] > 0
    for result in (result["trunk"] for result in results):
        assert_same(gradients, result["gradients"], 1e-8)
        assert_same(weights(trainer), result["weights"], 1e-9)
        assert_same_metrics(metrics, result["metrics"], 1e-8)


def test_several_ranks_in_bf16_equal_one_as_far_as_bf16_goes(ran: tuple[Path, list]):
    own, results = ran
    trainer = Trainer(own.parent / "model", config(**NARROW))
    trainer.set_reference()
    metrics = trainer.train_step(plans(ALONE)["equal"][0])
    ours = torch.cat([whole(p.grad).flatten() for p in trainer.decoder.parameters()])
    wide = single(own.parent)
    wide.train_step(plans(ALONE)["equal"][0])
    assert 0 < distance(torch.cat([p.grad.flatten() for p in wide.decoder.parameters()]), ours) < 0.05
    for result in (result["narrow"] for result in results):
        theirs = torch.cat([result["gradients"][name].flatten() for name, _ in trainer.decoder.named_parameters()])
        assert theirs.dtype == torch.float32 and distance(theirs, ours) < 0.02
        assert result["metrics"][0]["loss"] == pytest.approx(metrics["loss"], abs=5e-3)


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / second.norm())


def test_each_rank_holds_its_share(ran: tuple[Path, list]):
    _, results = ran
    held = [result["rows torch.float32"] for result in results]
    counts = {name: [rows[name][0] for rows in held] for name in held[0]}
    assert all(sum(count) > max(count) for count in counts.values())
    expected = {2: ([21, 20], [2, 2]), 3: ([14, 14, 13], [2, 2, 0])}
    assert (counts["embed.weight"], counts["layers.0.q_norm.weight"]) == expected[len(results)]


def test_gathered_tensors_are_the_same_bits_on_all_ranks_and_in_the_export(ran: tuple[Path, list]):
    """What ranks gather is bit for bit what rank 0 wrote, and what a trainer alone reads back."""
    own, results = ran
    alone = weights(Trainer(folder(own / "alone"), config(seed=5)))
    assert_same(alone, weights(Trainer(own / "fresh", config())), 0.0)
    assert is_stable(own / "exported")
    exported = weights(Trainer(own / "exported", config()))
    for result in results:
        assert_same(alone, result["fresh"], 0.0)
        assert_same(exported, result["exported"], 0.0)


def test_what_is_not_finite_on_one_rank_is_refused_on_all(ran: tuple[Path, list]):
    _, results = ran
    errors = {result["refused"]["error"] for result in results}
    assert len(errors) == 1 and "step 9, update 0 of 2 (policy): loss=" in errors.pop()
    assert all(result["refused"]["unchanged"] for result in results)
    assert all(math.isfinite(result["refused"]["loss"]) for result in results)


def test_resumed_ranks_go_on_exactly(ran: tuple[Path, list]):
    _, results = ran
    for result in (result["resumed"] for result in results):
        assert_same(result["straight"], result["again"], 1e-7)
        assert_same_metrics(result["metrics"], result["again metrics"], 1e-7)


def test_a_state_is_read_by_another_number_of_ranks(ran: tuple[Path, list]):
    own, results = ran
    steps = plans(ALONE)["resume"]
    straight = single(own.parent)
    for step in steps:
        straight.train_step(step)
    assert_same(weights(straight), results[0]["resumed"]["from one rank"], 1e-6)
    trainer = Trainer(own.parent / "model", config())
    trainer.load_state(own / "state")
    for step in steps[2:]:
        trainer.train_step(step)
    assert_same(weights(straight), weights(trainer), 1e-6)
