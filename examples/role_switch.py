"""Two workers in one program change their roles under load; a picture of the tokens they computed, with the changes marked.

    python examples/role_switch.py                      20 seconds, a tiny model with random weights, writes role_switch.png
    python examples/role_switch.py --model FOLDER       a Hugging Face model folder
    python examples/role_switch.py --seconds 40 --out roles.png

What a program does that embeds the engine: it makes Engines, places requests, steps each engine by hand, passes what one offers
(`take_handoffs`) on to another (`import_kv`) and answers (`finish_export`). Nothing here waits: a change of role takes effect
between two steps, and requests go on with the same tokens wherever they are.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pearl.engine import Engine, EngineConfig, ModelConfig, Role, SamplingParams

PLAN = [
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.DECODE),
    (Role.DECODE, Role.PREFILL),
    (Role.MIXED, Role.MIXED),
    (Role.DECODE, Role.PREFILL),
    (Role.PREFILL, Role.DECODE),
]
"""The two workers' roles, one pair after the other, each for an equal share of the time."""
AT_ONCE = 24
"""Requests that are kept under way."""
BINS = 60

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=1024,
    rope_theta=1e4,
    rms_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
)


@dataclass
class Worker:
    """An engine and what it has done: (seconds since the start, tokens) of each step; a prompt counts when it is whole."""

    engine: Engine
    prompts: list[tuple[float, int]] = field(default_factory=list)
    answers: list[tuple[float, int]] = field(default_factory=list)

    def step(self, now: float, prompts: dict[str, int]) -> int:
        """Runs one step; returns how many requests ended in it. `prompts`: the lengths of those not computed yet."""
        updates = self.engine.step_updates()
        self.prompts.append((now, sum(prompts.pop(update.request_id, 0) for update in updates)))
        self.answers.append((now, sum(len(update.token_ids) for update in updates)))
        return sum(update.completion is not None for update in updates)


class Demo:
    """Keeps `AT_ONCE` requests under way on two workers whose roles follow `PLAN`."""

    def __init__(self, model: ModelConfig | str, seconds: float) -> None:
        load = "auto" if isinstance(model, str) else "dummy"
        config = EngineConfig(model=model, dtype="float32", load_format=load, num_blocks=1024, max_batch_tokens=256)
        self.workers = [Worker(Engine(config, text=False)) for _ in PLAN[0]]
        self.vocab_size = self.workers[0].engine.model_config.vocab_size
        self.seconds, self.random = seconds, random.Random(0)
        self.switches: list[tuple[float, str]] = []
        self.prompts: dict[str, int] = {}
        self.asked = self.ended = self.moved = 0
        self.arriving: list[tuple[str, Engine, Engine]] = []
        """Transfers whose KV is still being copied, from where and to where."""

    def run(self) -> None:
        """Until the time is over and every request has ended."""
        start = time.monotonic()
        phase = -1
        while True:
            now = time.monotonic() - start
            if now < self.seconds:
                wanted = min(int(now / self.seconds * len(PLAN)), len(PLAN) - 1)
                if wanted != phase:
                    phase = wanted
                    self.switch(now, PLAN[phase])
                while self.asked - self.ended < AT_ONCE:
                    self.add()
            elif self.ended == self.asked:
                return
            for worker in self.workers:
                self.ended += worker.step(now, self.prompts)
            self.pass_on()

    def switch(self, now: float, roles: tuple[Role, Role]) -> None:
        for worker, role in zip(self.workers, roles, strict=True):
            if worker.engine.stats().role is not role:
                report = worker.engine.switch_role(role)
                print(f"{now:6.2f} s: a worker is {role} after {report.seconds * 1e3:.2f} ms; it hands over {report.moved}")
        self.switches.append((now, " + ".join(roles)))
        self.pass_on()

    def add(self) -> None:
        """A new request goes to a worker that computes prompts, the one with less to do if both do."""
        able = [worker.engine for worker in self.workers if worker.engine.stats().role is not Role.DECODE]
        engine = min(able, key=lambda one: one.stats().waiting + one.stats().running)
        ids = [self.random.randrange(self.vocab_size) for _ in range(self.random.randint(50, 200))]
        params = SamplingParams(max_tokens=self.random.randint(20, 60))
        rid = engine.add_request(ids, params, request_id=f"request {self.asked}")
        self.prompts[rid] = len(ids)

        self.asked += 1

    def pass_on(self) -> None:
        """What one worker offers goes to the other; what that has no room for goes on where it is."""
        first, second = (worker.engine for worker in self.workers)
        for source, destination in ((first, second), (second, first)):
            for transfer in source.take_handoffs():
                name, taken = transfer.transfer_id, destination.import_kv(transfer)
                source.finish_export(name, taken, arrived=not destination.is_arriving(name))
                self.moved += taken
                if destination.is_arriving(name):
                    self.arriving.append((name, source, destination))
        for entry in [entry for entry in self.arriving if not entry[2].is_arriving(entry[0])]:
            self.arriving.remove(entry)
            entry[1].finish_export(entry[0], True)  # now its KV may go there

    def draw(self, path: Path) -> None:
        """Tokens per second of each worker over time, prompts and answers apart."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5.5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(self.workers), 1, sharex=True, sharey=True)
        end = max(now for worker in self.workers for now, _ in worker.answers)
        for number, (panel, worker) in enumerate(zip(panels, self.workers, strict=True)):
            for label, series, colour in (("prompts", worker.prompts, "#4a7fb5"), ("answers", worker.answers, "#d98b4a")):
                edges, rates = per_second(series, end)
                panel.step(edges, rates, where="post", color=colour, label=label)
            for now, roles in self.switches:
                panel.axvline(now, color="#8a8a8a", linewidth=0.8, linestyle="--")
                role, top = roles.split(" + ")[number], panel.get_xaxis_transform()
                panel.text(now, 0.97, f" {role}", transform=top, va="top", fontsize=8)
            panel.set_ylabel(f"worker {number}\ntokens per second")
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].legend(loc="upper right", frameon=False, fontsize=8)
        panels[-1].set_xlabel("seconds")
        figure.suptitle(f"{self.ended} requests, {self.moved} hand-overs; dashed: roles change", fontsize=10)
        figure.savefig(path, format="png")


def per_second(series: list[tuple[float, int]], end: float) -> tuple[list[float], list[float]]:
    """Beginnings of `BINS` equal spans of time, and the tokens per second in each."""
    width = max(end, 1e-9) / BINS
    sums = [0.0] * BINS
    for now, tokens in series:
        sums[min(int(now / width), BINS - 1)] += tokens
    return [number * width for number in range(BINS)], [value / width for value in sums]


def main(arguments: list[str] | None = None) -> Demo:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", help="a Hugging Face model folder; a tiny random model without")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("role_switch.png"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    demo = Demo(options.model or TINY, options.seconds)
    demo.run()
    demo.draw(options.out)
    print(f"{demo.ended} requests, {demo.moved} hand-overs; {options.out}")
    return demo


if __name__ == "__main__":
    main()
