"""One training rank of the tests of several: runs what a folder asks for and leaves its results there. Not a test.

Started as `python trainer_rank.py FOLDER RANK WORLD SIZE...`. The first SIZE ranks train, once for each of the sizes. The
others are in WORLD but take part in nothing then: a collective that strays into WORLD would hang, and the test fail.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from trainer_cases import ACTOR_CRITIC, NARROW, ON_TRUNK, config, folder

from pearl.engine.comm.communicator import GroupCommunicator
from pearl.protocol import TrainStep
from pearl.rl.sharding import own_rows, whole
from pearl.rl.trainer import NonFiniteError, Trainer

LIMIT = datetime.timedelta(seconds=60)


def main(place: Path, rank: int, world: int, *sizes: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    groups = {size: dist.new_group(list(range(size)), timeout=LIMIT, backend="gloo") for size in sizes}
    for size, group in groups.items():
        if rank < size:
            run(place, place / f"ranks{size}", GroupCommunicator(group))
        store.set(f"done {size} {rank}", "1")
        store.wait([f"done {size} {other}" for other in range(world)], LIMIT)


def run(place: Path, own: Path, comm: GroupCommunicator) -> None:
    """`place` has what all sizes share, the folder `own` the steps and results of this one."""
    steps = {path.stem: steps_in(path) for path in sorted(own.glob("*.steps"))}
    results: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        trainer = Trainer(place / "model", config(), comm=comm, dtype=dtype)
        trainer.set_reference()
        results[str(dtype)] = after(trainer, [trainer.train_step(step) for step in steps["equal"]])
        results[f"rows {dtype}"] = {name: tuple(own_rows(p)[1].shape) for name, p in trainer.decoder.named_parameters()}
    narrow = Trainer(place / "model", config(**NARROW), comm=comm)
    narrow.set_reference()
    results["narrow"] = after(narrow, [narrow.train_step(steps["equal"][0])])
    shared = Trainer(place / "model", config(**ON_TRUNK), comm=comm, dtype=torch.float64)
    shared.set_reference()
    results["trunk"] = after(shared, [shared.train_step(step) for step in steps["equal"]])
    results["actor-critic"] = actor_critic(place, comm, steps["equal"])
    results["refused"] = refused(trainer, steps["refused"])
    trainer.save(own / "exported")
    results["exported"] = weights(trainer)
    results["resumed"] = resumed(place, own, comm, steps["resume"])
    if comm.rank == 0:
        folder(own / "fresh")
    comm.barrier(LIMIT.total_seconds())
    results["fresh"] = weights(Trainer(own / "fresh", config(seed=5), comm=comm))
    torch.save(results, own / f"results.{comm.rank}")


def steps_in(path: Path) -> list[TrainStep]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[TrainStep])


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}


def after(trainer: Trainer, metrics: list[dict]) -> dict[str, Any]:
    parameters = trainer.decoder.named_parameters()
    return {"metrics": metrics, "weights": weights(trainer), "gradients": {n: whole(p.grad).clone() for n, p in parameters}}


def actor_critic(place: Path, comm: GroupCommunicator, steps: list[TrainStep]) -> dict[str, Any]:
    trainer = Trainer(place / "model", config(**ACTOR_CRITIC), comm=comm, dtype=torch.float64)
    trainer.set_reference()
    metrics = []
    for step in steps:
        metrics.append(trainer.train_step(step))
        assert trainer.sleep() > 0
        trainer.wake()
    assert trainer._critic is not None
    named = [*trainer.decoder.named_parameters(), *((f"critic.{n}", p) for n, p in trainer._critic.named_parameters())]
    return {"metrics": metrics, "weights": {name: whole(parameter).clone() for name, parameter in named}}


def refused(trainer: Trainer, steps: Iterable[TrainStep]) -> dict[str, Any]:
    """The first step is not finite on one rank only; the second is good."""
    before = weights(trainer)
    bad, good = steps
    error = ""
    try:
        trainer.train_step(bad)
    except NonFiniteError as caught:
        error = str(caught)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    return {"error": error, "unchanged": unchanged, "loss": trainer.train_step(good)["loss"]}


def resumed(place: Path, own: Path, comm: GroupCommunicator, steps: list[TrainStep]) -> dict[str, Any]:
    def new() -> Trainer:
        return Trainer(place / "model", config(), comm=comm)

    straight = new()
    straight.set_reference()
    for step in steps[:2]:
        straight.train_step(step)
    straight.save_state(own / "state")
    metrics = [straight.train_step(step) for step in steps[2:]]
    again = new()
    again.load_state(own / "state")
    results = {"straight": weights(straight), "metrics": metrics}
    results["again metrics"] = [again.train_step(step) for step in steps[2:]]
    results["again"] = weights(again)
    other = new()
    other.load_state(place / "state")
    for step in steps[2:]:
        other.train_step(step)
    return results | {"from one rank": weights(other)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
