"""The GPU suite's engine: publishing into it, prefill, decode with and without graphs, roles, sleep, moving blocks, a peer.

Owns the scenario; `Scale` says how large it is (the dry run does the same on a CPU with a tiny model, to see that all of it
works). Random weights: speed does not depend on them. Not run on a GPU yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.gpu_measure import Ceiling, Outcome, floor_ms, median_ms, synchronise, wall_ms
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.migration.blocks import backend, copy_blocks
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.protocol import Role, SamplingParams

STD = 0.02
OF_FLOOR = 1.25
"""A decode step at batch 32 takes at most so many times as long as reading weights and KV once."""
SECTION = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes in tokens; `batches` are those of decoding, the step of `judged` is held against the floor."""

    model: ModelConfig
    dtype: str
    num_blocks: int
    prompts: int
    prompt_tokens: int
    batches: tuple[int, ...]
    judged: int
    context: int
    steps: int
    batch_tokens: int


def qwen3_8b() -> Scale:
    """The shape of Qwen3-8B, from its config.json."""
    model = _qwen3(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, heads=(32, 8), head_dim=128)
    return Scale(
        model=model, dtype="bfloat16", num_blocks=9216, prompts=8, prompt_tokens=4096, batches=(1, 8, 32, 128), judged=32,
        context=1024, steps=24, batch_tokens=8192,
    )  # fmt: skip


def tiny() -> Scale:
    """For the dry run."""
    model = _qwen3(vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, heads=(4, 2), head_dim=8)
    return Scale(
        model=model, dtype="float32", num_blocks=64, prompts=3, prompt_tokens=20, batches=(1, 3), judged=3, context=12,
        steps=3, batch_tokens=32,
    )  # fmt: skip


def _qwen3(*, heads: tuple[int, int], **sizes: int) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM", max_position=40960, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=False, qk_norm=True,
        num_heads=heads[0], num_kv_heads=heads[1], **sizes,
    )  # fmt: skip


def random_tensors(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and values, one tensor at a time on the device."""
    for name, shape in hf_shapes(model).items():
        value = torch.empty(shape, device=device, dtype=dtype)
        yield name, value.fill_(1.0) if len(shape) == 1 else value.normal_(std=STD)


class EngineBench:
    """One engine, measured in turn. Every method gives rows; whoever calls guards against what one of them raises."""

    def __init__(self, scale: Scale, ceiling: Ceiling, random: np.random.Generator) -> None:
        self.scale, self.ceiling, self.random = scale, ceiling, random
        config = EngineConfig(
            model=scale.model, dtype=scale.dtype, load_format="dummy", num_blocks=scale.num_blocks, max_model_len=8192,
            max_num_seqs=max(scale.batches), max_batch_tokens=scale.batch_tokens, enable_prefix_cache=False,
        )  # fmt: skip
        self.engine = Engine(config, text=False, load_weights=False)
        self.pool = self.engine._runner.kv_pool
        self.device = self.pool.device
        self.weight_bytes = sum(value.nbytes for value in self.engine._decoder.parameters())

    def parts(self) -> dict[str, Callable[[], list[Outcome]]]:
        """Name -> what measures it, in the order in which they must run."""
        return {
            "publish": self.publish,
            "prefill": self.prefill,
            "decode": self.decode,
            "role switch": self.switch_roles,
            "block copy": self.copy_blocks,
            "sleep": self.sleep,
            "transformers": self.transformers,
        }

    def publish(self) -> list[Outcome]:
        """The first version streams in; the second is staged from tensors that are there, then committed between two steps."""
        dtype = self.pool.dtype
        first_ms = wall_ms(
            lambda: self.engine.update_weights(random_tensors(self.scale.model, self.device, dtype), 0, way="streaming")
        )
        tensors = list(random_tensors(self.scale.model, self.device, dtype))
        staged_ms = wall_ms(lambda: self.engine.stage_weights(tensors, 1))
        commit_ms = wall_ms(lambda: self.engine.commit_weights(1))
        moved = 2e-9 * self.weight_bytes
        return [
            Outcome(section=SECTION, name="streamed, made on the way", ms=first_ms, note=self.engine.kernels_why),
            Outcome(section=SECTION, name="staged", ms=staged_ms, value=moved / staged_ms * 1e3, unit="GB/s"),
            Outcome(
                section=SECTION, name="committed: all that a request waits for", ms=commit_ms,
                value=moved / commit_ms * 1e3, unit="GB/s", of_ceiling=moved * 1e12 / commit_ms / self.ceiling.bytes_per_s,
            ),
        ]  # fmt: skip

    def prefill(self) -> list[Outcome]:
        """Prompts of one length, in steps of as many tokens as fit; the first round compiles."""
        scale = self.scale
        rates = []
        for _ in range(3):
            self._add(scale.prompts, scale.prompt_tokens, 1)
            rates.append(scale.prompts * scale.prompt_tokens / wall_ms(self._drain) * 1e3)
        flop_per_token = self.weight_bytes / self.pool.element_size() * 2
        return [
            Outcome(
                section=SECTION, name=f"prefill {scale.prompts} x {scale.prompt_tokens}", value=max(rates[1:]), unit="tokens/s",
                of_ceiling=max(rates[1:]) * flop_per_token / self.ceiling.flop_per_s,
            )
        ]  # fmt: skip

    def decode(self) -> list[Outcome]:
        """Steps of full batches: with graphs and without, one after the other and queued one ahead."""
        rows = []
        for batch in self.scale.batches:
            ways = {
                "eager": self._decode_ms(batch, graphs=False, ahead=False),
                "graph": self._decode_ms(batch, graphs=True, ahead=False),
                "eager, ahead": self._decode_ms(batch, graphs=False, ahead=True),
                "graph, ahead": self._decode_ms(batch, graphs=True, ahead=True),
            }
            others = {name: ms for name, ms in ways.items() if ms is not None}
            floor = floor_ms(self._decode_bytes(batch), 0, self.ceiling)
            judged = batch == self.scale.judged
            best = min(others.values())
            ok = best <= OF_FLOOR * floor if judged and self.device.type == "cuda" else None
            if "graph" in others:
                ok = others["graph"] <= others["eager"] and ok is not False
            rows.append(
                Outcome(
                    section=SECTION, name=f"decode step of {batch}", ok=ok, ms=best, value=batch / best * 1e3, unit="tokens/s",
                    of_ceiling=floor / best, target=1 / OF_FLOOR if judged else None,
                    others=others,
                )
            )  # fmt: skip
        return rows

    def _decode_ms(self, batch: int, *, graphs: bool, ahead: bool) -> float | None:
        """Median of steps in which all of the batch decode; None where there are no graphs to decode with."""
        runner = self.engine._runner
        kept, runner.graphs = runner.graphs, runner.graphs if graphs else None
        if graphs and kept is None:
            return None
        try:
            self._add(batch, self.scale.context, 2 * self.scale.steps + 8)
            while not all(request.is_decoding for request in self.engine._core.requests.values()):
                self.engine.step_updates()
            for _ in range(3):
                self.engine.step_updates()
            self.engine._steps.ahead = ahead
            self.engine.step_updates()
            synchronise()
            began = time.perf_counter()
            times = []
            for _ in range(self.scale.steps):
                self.engine.step_updates()  # has waited for a step: this one, or the one before
                times.append((time.perf_counter() - began) * 1e3)
                began = time.perf_counter()
        finally:
            self.engine._steps.ahead = False
            runner.graphs = kept
            self._abort_all()
        return statistics.median(times)

    def _decode_bytes(self, batch: int) -> int:
        """Weights without the embedding, of which a step reads a few rows, and the keys and values of the middle step."""
        embedding = self.scale.model.vocab_size * self.scale.model.hidden_size * self.pool.element_size()
        tokens = self.scale.context + self.scale.steps // 2
        kv_bytes = self.pool[:, :, 0].nbytes // self.engine.config.block_size
        return self.weight_bytes - embedding + batch * tokens * kv_bytes

    def switch_roles(self) -> list[Outcome]:
        """All changes of role in turn, and back; nothing of the weights or the pool moves."""
        times = []
        for role in [Role.PREFILL, Role.DECODE, Role.MIXED] * 30:
            began = time.perf_counter()
            self.engine.switch_role(role)
            times.append((time.perf_counter() - began) * 1e3)
        worst = statistics.median(sorted(times)[-30:])
        return [Outcome(section=SECTION, name="role switch, idle", ok=worst < 1.0, ms=worst, note="target: below 1 ms")]

    def copy_blocks(self) -> list[Outcome]:
        """A quarter of the pool to scattered places in the other half of it."""
        count = self.scale.num_blocks // 4
        half = self.scale.num_blocks // 2
        source = self.random.permutation(half)[:count].tolist()
        target = (half + self.random.permutation(half)[:count]).tolist()
        once = lambda: copy_blocks(self.pool, self.pool, source, target)  # noqa: E731
        moved = 2 * self.pool[:, :, :count].nbytes
        ms = median_ms(once, graph=False)
        right = torch.equal(self.pool[:, :, source[-1]], self.pool[:, :, target[-1]])
        share = moved / ms * 1e3 / self.ceiling.bytes_per_s
        return [
            Outcome(
                section=SECTION, name=f"copy of {count} scattered blocks", ok=right, ms=ms, value=moved / ms / 1e6, unit="GB/s",
                of_ceiling=share, note=backend(self.device),
            )
        ]  # fmt: skip

    def sleep(self) -> list[Outcome]:
        """The same tokens, greedily, before and after; how much memory the device has more in between."""
        prompt = self.random.integers(0, self.scale.model.vocab_size, self.scale.context).tolist()
        before, free = self._greedy(prompt), self._free_bytes()
        try:
            sleep_ms = wall_ms(lambda: self.engine.sleep("keep"))
        except ValueError as error:
            return [Outcome(section=SECTION, name="sleep", ok=False, note=str(error))]
        given_back = self._free_bytes() - free
        wake_ms = wall_ms(self.engine.wake)
        same = self._greedy(prompt) == before
        note = f"{given_back / 2**30:.2f} GiB given back, of a pool of {self.pool.nbytes / 2**30:.2f}"
        return [
            Outcome(section=SECTION, name="sleep", ms=sleep_ms, note=note),
            Outcome(section=SECTION, name="wake", ok=same, ms=wake_ms, note="the same tokens before and after"),
        ]

    def transformers(self) -> list[Outcome]:
        """The same shape in transformers: one whole prompt, and decode steps on its own cache."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        self.engine.discard_weights()  # and with it the memory of the second copy
        sizes = self.scale.model
        config = Qwen3Config(
            vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim, max_position_embeddings=sizes.max_position, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=self.pool.dtype)
        model = model.to_empty(device=self.device).eval()
        with torch.inference_mode():
            for value in (*model.parameters(), *model.buffers()):
                value.normal_(std=STD)
            batch, tokens = self.scale.judged, self.scale.context
            ids = torch.zeros(batch, tokens, dtype=torch.int64, device=self.device)
            model(ids[:1])
            prefill_ms = wall_ms(lambda: model(ids[:1], logits_to_keep=1))
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            step = lambda: model(ids[:, :1], past_key_values=cache, use_cache=True)  # noqa: E731
            step()
            step_ms = statistics.median(wall_ms(step) for _ in range(self.scale.steps))
        rows = [(f"transformers: prompt of {tokens}", prefill_ms, tokens), (f"transformers: step of {batch}", step_ms, batch)]
        return [Outcome(section=SECTION, name=name, ms=ms, value=n / ms * 1e3, unit="tokens/s") for name, ms, n in rows]

    def _add(self, count: int, tokens: int, max_tokens: int) -> None:
        for ids in self.random.integers(0, self.scale.model.vocab_size, (count, tokens)).tolist():
            self.engine.add_request(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    def _drain(self) -> None:
        while self.engine.has_unfinished():
            self.engine.step_updates()

    def _abort_all(self) -> None:
        for request_id in list(self.engine._core.requests):
            self.engine.discard(request_id)
        self._drain()

    def _greedy(self, prompt: list[int]) -> list[int]:
        self.engine.add_request(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        tokens: list[int] = []
        while self.engine.has_unfinished():
            tokens += [token for completion in self.engine.step() for token in completion.token_ids]
        return tokens

    def _free_bytes(self) -> int:
        synchronise()
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
