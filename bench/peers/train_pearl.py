"""PEARL's side of `bench/rl.py`: one rank that serves and trains by turns, without controller and environments."""

from __future__ import annotations

import torch

from bench.peers import rl_workload as work
from pearl.config import Config, EngineConfig, ModelOptions, OptimizerOptions, TrainerOptions
from pearl.engine.engine import Engine
from pearl.protocol import TrainSequence, TrainStep
from pearl.rl.packing import plan_packing
from pearl.rl.publisher import LocalPublisher
from pearl.rl.trainer import Trainer
from pearl.sampling_params import SamplingParams


def main() -> None:
    options = work.options()
    torch.set_num_threads(options.threads)
    size = work.GROUPS * work.SIBLINGS
    config = Config(
        rollout_batch_size=size,
        group_size=work.SIBLINGS,
        model=ModelOptions(path=options.model),
        optimizer=OptimizerOptions(lr=work.LR, mini_batch_size=size),
        trainer=TrainerOptions(compute_dtype="bfloat16"),
        engine=EngineConfig(model=options.model, dtype="bfloat16", device="cpu", num_blocks=1024, max_model_len=512),
    )
    trainer = Trainer(options.model, config)
    trainer.set_reference()
    engine = Engine(config.engine, load_weights=False, text=False)
    publisher = LocalPublisher(trainer, engine)
    versions = iter(range(1 << 30))

    def publish() -> None:
        publisher.begin(next(versions))
        publisher.wait(600.0)

    def step(seed: int, parts: work.Parts) -> None:
        with parts.part("rollout"):
            sequences = rolled_out(engine, seed, trainer.model_config.vocab_size)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        plan = plan_packing(lengths, mini_batch_size=size, micro_batch_tokens=8192, ranks=1, order=range(size))
        version = sequences[0].weight_versions[-1]
        metrics = trainer.train_step(
            TrainStep(number=seed, step=seed, objective="policy", sequences=sequences, plan=plan, weight_version=version)
        )
        for name in ("score", "forward", "backward", "optimizer"):
            parts.seconds[name] = metrics[f"{name}_s"] or 0.0
        with parts.part("publish"):
            publish()

    publish()
    work.answer_requests(f"PEARL, torch {torch.__version__}", step)


def rolled_out(engine: Engine, seed: int, vocab_size: int) -> list[TrainSequence]:
    """Answers to the prompts as sequences to train on."""
    params = SamplingParams(temperature=1.0, max_tokens=work.ANSWER, ignore_eos=True)
    asked = {}
    for group, prompt in enumerate(work.prompts(seed, vocab_size)):
        for _ in range(work.SIBLINGS):
            asked[engine.add_request(prompt, params)] = (group, prompt)
    sequences = []
    while engine.has_unfinished():
        for done in engine.step():
            group, prompt = asked[done.request_id]
            sequences.append(
                TrainSequence(
                    token_ids=prompt + done.token_ids,
                    loss_mask=[0] * len(prompt) + [1] * len(done.token_ids),
                    logprobs=[0.0] * len(prompt) + done.logprobs,
                    weight_versions=[done.weight_versions[0]] * len(prompt) + done.weight_versions,
                    reward=work.reward(done.token_ids),
                    group=group,
                )
            )
    return sequences


if __name__ == "__main__":
    main()
