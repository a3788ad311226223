"""A trainer's state: exact on the way out and in, and what is not a whole state of this model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_cases import command, config, folder, sequences

from pearl.config import AlgorithmOptions, TrainerOptions
from pearl.protocol import TrainStep
from pearl.rl.checkpoint_folder import TRAINER_FACTS as FACTS
from pearl.rl.trainer import Trainer
from pearl.rl.trainer_state import StateError

RATES = {"lr": 0.01, "schedule": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1}
UPDATES = [[[[0, 1, 2, 3, 4, 5]]], [[[6, 7, 8], [9, 10, 11]]]]


def steps() -> list[TrainStep]:
    """Policy steps with a supervised one between: two optimizers, a reference, stale tokens, a schedule under way."""
    made = [command(sequences(seed=seed), UPDATES, weight_version=seed % 2) for seed in range(3)]
    return [made[0], command(sequences(seed=8), UPDATES, objective="sft"), *made[1:]]


def new(path: Path, **fields: object) -> Trainer:
    return Trainer(path, config(optimizer=RATES, **fields))


def everything(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._state().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder(tmp_path_factory.mktemp("model"))
    Trainer(path, config(seed=3))
    return path


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    trainer = new(model)
    trainer.set_reference()
    for step in steps()[:2]:
        trainer.train_step(step)
    trainer.save_state(tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_resuming_is_exact(model: Path, tmp_path: Path, before: int):
    """Weights, moments and metrics of four steps are the same bits, wherever between them the run was interrupted."""
    trainer = new(model)
    trainer.set_reference()
    for step in steps()[:before]:
        trainer.train_step(step)
    trainer.save_state(tmp_path / "state")
    straight = [trainer.train_step(step) for step in steps()[before:]]
    again = new(model)
    addresses = {name: parameter.data_ptr() for name, parameter in again.decoder.named_parameters()}
    again.load_state(tmp_path / "state")
    resumed = [again.train_step(step) for step in steps()[before:]]
    assert same(everything(trainer), everything(again))
    for first, second in zip(straight, resumed, strict=True):
        assert {k: v for k, v in first.items() if k[-2:] != "_s"} == {k: v for k, v in second.items() if k[-2:] != "_s"}
    assert addresses == {name: parameter.data_ptr() for name, parameter in again.decoder.named_parameters()}


def test_loading_replaces_what_was_there(model: Path, saved: Path):
    """A trainer that has gone another way comes back to the state, all of it."""
    first, second = new(model), new(model)
    first.load_state(saved)
    second.set_reference()
    for seed in (20, 21):
        second.train_step(command(sequences(seed=seed)))
    second.set_reference()
    second.load_state(saved)
    assert same(everything(first), everything(second)) and len(everything(first)) > 4 * 22
    assert first.train_step(steps()[2])["lr"] == second.train_step(steps()[2])["lr"]


def test_saving_again_replaces_the_state(model: Path, saved: Path):
    trainer = new(model)
    trainer.load_state(saved)
    trainer.train_step(steps()[2])
    trainer.save_state(saved)
    other = new(model)
    other.load_state(saved)
    assert same(everything(trainer), everything(other))


def test_the_reference_follows_the_settings(model: Path, saved: Path):
    """Without a KL term the saved reference is left where it is; a KL term without a saved reference must be given one."""
    without = new(model, algorithm=AlgorithmOptions())
    without.load_state(saved)
    assert without.train_step(steps()[2])["kl"] is None
    without.save_state(saved)
    trainer = new(model)
    trainer.load_state(saved)
    with pytest.raises(ValueError, match=r"set_reference\(\) must come before"):
        trainer.train_step(steps()[2])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "half a data file": (lambda state: cut(state / "__0_0.distcp"), r"__0_0.distcp: has \d+ bytes: must have \d+ bytes"),
    "no data file": (lambda state: (state / "__0_0.distcp").unlink(), "__0_0.distcp: missing: must have"),
    "half of the index": (lambda state: cut(state / ".metadata"), r".metadata: has \d+ bytes: must have"),
    "not finished": (lambda state: (state / FACTS).unlink(), "no trainer state"),
    "half of the facts": (lambda state: cut(state / FACTS), "trainer.json: damaged"),
    "another version": (lambda state: edit(state / FACTS, version=9), "version 9; this release reads version 1"),
    "another dtype": (lambda state: edit(state / FACTS, dtype="float64"), "in float64, the trainer in float32"),
    "a bit": (lambda state: flip(state / "__0_0.distcp"), "cannot be read"),
    "foreign index": (lambda state: foreign(state / ".metadata"), "cannot be read"),
}


def foreign(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states_are_refused(model: Path, saved: Path, damage: str):
    do, message = DAMAGES[damage]
    do(saved)
    trainer = new(model)
    before = everything(trainer)
    with pytest.raises(StateError, match=message) as caught:
        trainer.load_state(saved)
    assert str(saved) in str(caught.value)
    if "cannot be" not in message:
        assert same(before, everything(trainer))


def test_a_state_of_another_model_is_refused(saved: Path, tmp_path: Path):
    trainer = new(folder(tmp_path / "other", intermediate_size=32))
    with pytest.raises(StateError, match=r"another model: layers.0.down.weight is \(16, 24\) there, \(16, 32\) here"):
        trainer.load_state(saved)
    deeper = new(folder(tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(StateError, match=r"layers.2.down.weight is absent there, \(16, 24\) here"):
        deeper.load_state(saved)


def test_other_layers_than_were_trained_are_refused(model: Path, tmp_path: Path):
    """The moments of the others are not there."""
    some = new(model, trainer=TrainerOptions(train_layers=1))
    some.set_reference()
    some.train_step(steps()[0])
    some.save_state(tmp_path / "some")
    for layers, named in ((None, "all"), (2, "2")):
        with pytest.raises(StateError, match=f"trainer.train_layers={named}: must be 1 as when the state was written"):
            new(model, trainer=TrainerOptions(train_layers=layers)).load_state(tmp_path / "some")
    again = new(model, trainer=TrainerOptions(train_layers=1))
    again.load_state(tmp_path / "some")
    assert same(everything(again), everything(some))


def test_what_cannot_be_written_is_an_os_error(model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    trainer = new(model)
    with pytest.raises(OSError):
        trainer.save_state(tmp_path / "file" / "state")
    (tmp_path / "state" / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(OSError, match="cannot be written"):
        trainer.save_state(tmp_path / "state")
