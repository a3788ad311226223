"""Whole engines on the Triton kernels against transformers: every operation in its place, over a poisoned pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
from torch import Tensor
from triton_cases import DEVICE

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.config import EngineConfig
from pearl.engine.cuda_graph import DecodeGraphs
from pearl.engine.engine import Engine
from pearl.engine.kernels import registry
from pearl.engine.kernels.triton.kernels import TritonKernels, unsupported
from pearl.engine.kernels.triton.launch import Run
from pearl.protocol import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets inf

ONE_LAYER = {"num_hidden_layers": 1}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "groups of 7, tied": (
        hf_models.dense,
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "heads of 80": (hf_models.dense, {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 80, **ONE_LAYER}),
    "experts": (hf_models.moe, ONE_LAYER),
    "a window of 4": (hf_models.mistral, {"sliding_window": 4, **ONE_LAYER}),
}


BLOCK_SIZES = {"a window of 4": 3}
"""Where it is not 4."""


class AnyDevice(TritonKernels):
    """In the interpreter they run on a CPU too."""

    def refusal(self, *, device, dtype, model, block_size) -> str | None:
        return unsupported(dtype, model, block_size)


class Noting(Run):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, kernel, grid, **arguments) -> None:
        self.names.add(kernel.__name__)
        super().__call__(kernel, grid, **arguments)


@pytest.mark.parametrize(("name", "ahead"), [*((name, False) for name in MODELS), ("groups of 7, tied", True)])
def test_engine(name: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, one that decodes beside them, one with a cached prefix: ids and log-probs of transformers.

    `ahead`: steps are queued before the last one's ids are known, and those of single tokens run as a graph would: over the
    memory and with the launches of the largest context (1100 keys, three splits) and of more rows.
    """
    launch = Noting()
    monkeypatch.setitem(registry.KERNELS, "reference", lambda: AnyDevice(launch))
    build, overrides = MODELS[name]
    model = hf_models.randomise(build(0, **overrides))
    engine = Engine(
        EngineConfig(
            model=hf_models.save(model, tmp_path), dtype="float32", kernels="reference", device=DEVICE.type,
            block_size=BLOCK_SIZES.get(name, 4), num_blocks=40, kv_fill=math.nan, max_batch_tokens=8, overlap=ahead,
        )
    )  # fmt: skip
    runner, replayed = engine._runner, []

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: replayed.append(run()) or replayed[-1]

    if ahead:
        runner.graphs = DecodeGraphs(capture, device=DEVICE, max_rows=4, max_context=1100, width=70)
    long, short = hf_models.prompt(13, seed=1), hf_models.prompt(3, seed=2)
    expected = {}
    for ids in (short, long, [*long[:8], 5, 6]):
        rid = engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=3))
        expected[rid] = hf_models.greedy(model, ids, 3)
    done = {}
    while engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
    for rid, (ids, logprobs) in expected.items():
        assert done[rid].token_ids == ids
        assert done[rid].logprobs == pytest.approx(logprobs, abs=1e-4)
    engine.check_integrity()
    assert bool(replayed) == ahead
    assert {"rms_norm_kernel", "qk_norm_rope_kernel", "store_kv_kernel", "attention_kernel"} <= launch.names
    assert ("grouped_product_kernel" if name == "experts" else "silu_and_mul_kernel") in launch.names


def test_penalties_one_step_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that only the device knows are counted there: the same tokens, and no step waits for the one before it."""
    monkeypatch.setitem(registry.KERNELS, "reference", AnyDevice)
    folder = hf_models.save(hf_models.randomise(hf_models.dense(0, **ONE_LAYER)), tmp_path)
    found = []
    for ahead in (False, True):
        engine = Engine(
            EngineConfig(model=folder, dtype="float32", kernels="reference", device=DEVICE.type, num_blocks=40, overlap=ahead)
        )
        runner, waits = engine._runner, []
        launch = runner.launch

        def noted(output, requests, *, weight_version, launch=launch, runner=runner, waits=waits):
            before = runner._last.tokens
            runner._last = runner._last._replace(tokens=lambda: waits.append(output.step) or before())
            queued = launch(output, requests, weight_version=weight_version)
            return queued

        runner.launch = noted
        kinds = [
            dict(repetition_penalty=1.9), dict(presence_penalty=2.0, min_tokens=4, stop_token_ids=[*range(9)]),
            dict(frequency_penalty=1.5, temperature=1.0, seed=3), {},
        ]  # fmt: skip
        for number, kind in enumerate(kinds):
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, **kind})
            engine.add_request(hf_models.prompt(3 + number, seed=number), params)
        done = {}
        while engine.has_unfinished():
            done |= {completion.request_id: completion.token_ids for completion in engine.step()}
        found.append(done)
        assert waits == []
    assert found[0] == found[1] and len(found[0]) == 4


def test_graphs_over_sleep_and_a_deep_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more requests than rows, replayed with other blocks, lengths and tables than those that were captured; asleep the
    pool's contents are lost, and come back as NaN."""
    monkeypatch.setitem(registry.KERNELS, "reference", AnyDevice)
    model = hf_models.randomise(hf_models.dense(0, **ONE_LAYER))
    engine = Engine(
        EngineConfig(
            model=hf_models.save(model, tmp_path), dtype="float32", kernels="reference", device=DEVICE.type, block_size=4,
            num_blocks=30, kv_fill=math.nan, max_num_seqs=2,
        )
    )  # fmt: skip
    replays = []

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: replays.append(run()) or replays[-1]

    graphs = DecodeGraphs(capture, device=DEVICE, max_rows=2, max_context=64, width=17)
    engine._runner.graphs = graphs
    prompts = [hf_models.prompt(length, seed=length) for length in (3, 9, 5, 14, 4)]
    for _ in range(2):
        names = [engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=4)) for ids in prompts]
        done = {}
        while engine.has_unfinished():
            done |= {completion.request_id: completion.token_ids for completion in engine.step()}
        assert [done[name] for name in names] == [hf_models.greedy(model, ids, 4)[0] for ids in prompts]
        captured, count = graphs.captured, len(replays)
        engine.sleep("keep")
        engine.wake()
    assert graphs.captured == captured and {bucket.rows for bucket in captured} == {1, 2} and count > 6
