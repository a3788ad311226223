"""TRL's GRPOTrainer as a side of `bench/rl.py`, in TRL's own environment (`--trl`). Parts of a step are not told apart."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from bench.peers import rl_workload as work

MOST_STEPS = 1000


class OneStepPerLine(TrainerCallback):
    """Holds training before every step until a line comes, and says afterwards what the step took."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        row = {"seconds": time.perf_counter() - self._wall, "cpu_s": time.process_time() - self._cpu, "parts": {}}
        print(json.dumps(row), flush=True)


def main() -> None:
    options = work.options()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [tokenizer.decode(ids) for seed in range(MOST_STEPS) for ids in work.prompts(seed, len(tokenizer))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            per_device_train_batch_size=work.GROUPS * work.SIBLINGS,
            num_generations=work.SIBLINGS,
            max_completion_length=work.ANSWER,
            generation_kwargs={"min_new_tokens": work.ANSWER},
            beta=0.0,
            epsilon=work.CLIP_LOW,
            epsilon_high=work.CLIP_HIGH,
            learning_rate=work.LR,
            max_steps=MOST_STEPS,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        )

        def rewards(completion_ids: list[list[int]], **others: Any) -> list[float]:
            return [work.reward(ids) for ids in completion_ids]

        trainer = trl.GRPOTrainer(
            model=options.model,
            reward_funcs=rewards,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[OneStepPerLine()],
        )
        print(json.dumps({"about": f"TRL {trl.__version__}, torch {torch.__version__}"}), flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
