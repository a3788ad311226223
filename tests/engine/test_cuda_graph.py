"""Decode graphs: sizes, what is filled in, when one is made and kept. A stand-in captures on a CPU; marked tests need a GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import make, model, named, run
from torch import Tensor

from pearl.engine.cuda_graph import Bucket, DecodeGraphs, bucket_of, context_bucket, row_bucket
from pearl.engine.engine import Engine
from pearl.engine.kernels.interface import PagedBatch
from pearl.protocol import Role, SamplingParams

CPU = torch.device("cpu")


class Capturing:
    """Like a CUDA graph: what is captured does not run then; a replay reads the same input memory and writes the same output
    memory. `refuses`: captures that fail, in order."""

    def __init__(self, *, refuses: int = 0) -> None:
        self.captures = self.replays = 0
        self._refuses = refuses

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        if self.captures <= self._refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        out: list[Tensor] = []

        def replay() -> Tensor:
            self.replays += 1
            value = run()
            out[:] = out or [torch.empty_like(value)]
            return out[0].copy_(value)

        return replay


def graphs_of(engine: Engine, capture: Capturing) -> DecodeGraphs:
    """Graphs for an engine on a CPU. Reference kernels plan on the host, once per batch: each forward pass gets a new one."""
    runner, operations = engine._runner, engine._runner.operations

    def planned(ids_T: Tensor, batch: PagedBatch) -> Tensor:
        return operations(ids_T, dataclasses.replace(batch, max_context_len=int(batch.context_lens_S.max())))

    runner.operations = planned
    runner.graphs = DecodeGraphs(capture, device=CPU, max_rows=8, max_context=64, width=20)
    return runner.graphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def engine_of(folder: Path, **settings) -> Engine:
    return make(folder, kernels="reference", **settings)


# ---------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000])
def test_row_buckets_hold_their_rows_and_waste_little(most: int) -> None:
    sizes = [row_bucket(rows, most) for rows in range(1, most + 1)]
    assert all(rows <= size <= most for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and all(row_bucket(size, most) == size for size in sizes)
    assert all(size <= 1.25 * rows for rows, size in enumerate(sizes, 1) if rows >= 28)
    assert len(set(sizes)) <= 3 + 8 + 8 * max(0, most.bit_length() - 6)


def test_context_buckets_are_few() -> None:
    assert [context_bucket(context, 40960) for context in (1, 1024, 1025, 8192, 8193, 40000)] == [
        1024, 1024, 2048, 8192, 16384, 40960,
    ]  # fmt: skip
    assert context_bucket(50, 60) == 60


def batch_of(queries: list[int], context: int) -> PagedBatch:
    decodes, tokens = sum(count == 1 for count in queries), sum(queries)
    index = torch.zeros(tokens, dtype=torch.int64)
    return PagedBatch(
        positions_T=index, slot_mapping_T=index, query_starts_S1=torch.tensor([0, *queries]).cumsum(0).int(),
        context_lens_S=torch.full((len(queries),), context, dtype=torch.int32),
        block_tables_SN=torch.zeros(len(queries), 2, dtype=torch.int32), num_decodes=decodes, max_query_len=max(queries),
        max_context_len=context,
    )  # fmt: skip


def test_only_batches_of_single_tokens_have_a_bucket() -> None:
    sizes = dict(max_rows=8, max_context=100)
    assert bucket_of(batch_of([1, 1, 1], 9), **sizes) == Bucket(4, 100)
    assert bucket_of(batch_of([1] * 8, 100), **sizes) == Bucket(8, 100)
    for queries, context in (([1, 5], 9), ([5], 9), ([1] * 9, 9), ([1], 101)):
        assert bucket_of(batch_of(queries, context), **sizes) is None


# ---------------------------------------------------------------------------------------------------- engines


def add_all(engine: Engine) -> None:
    """Prompts of different lengths that end at different times, so that batches of 5 rows and less decode."""
    for number, (length, count) in enumerate([(3, 12), (9, 7), (14, 9), (5, 3), (6, 11)]):
        params = SamplingParams(max_tokens=count, temperature=0.0 if number % 2 else 1.0, seed=number)
        engine.add_request(hf_models.prompt(length, seed=number), params)


def tokens(engine: Engine) -> list[list[int]]:
    add_all(engine)
    found = run(engine)
    return [found[name][0].token_ids for name in sorted(found, key=int)]


def test_the_same_tokens_with_graphs(folder: Path) -> None:
    expected = tokens(engine_of(folder))
    engine, capture = engine_of(folder), Capturing()
    graphs = graphs_of(engine, capture)
    assert tokens(engine) == expected
    assert {bucket.rows for bucket in graphs.captured} == {1, 2, 4, 8}
    assert capture.captures == len(graphs.captured) and capture.replays > 3 and not graphs.failures


def test_chunks_of_a_prompt_are_never_replayed(folder: Path) -> None:
    """A prompt in steps of 4 tokens, the last of which is a single one: a row like those of decoding."""
    prompt, params = hf_models.prompt(13), SamplingParams(max_tokens=6, temperature=0.0)
    found = []
    for graphed in (False, True):
        engine, capture = engine_of(folder, max_batch_tokens=4), Capturing()
        if graphed:
            graphs_of(engine, capture)
        engine.add_request(prompt, params)
        found.append(run(engine)["0"][0].token_ids)
        for _ in range(3 * graphed):
            engine.step()
    assert found[0] == found[1] == hf_models.greedy(model(), prompt, 6)[0]
    assert capture.captures == 1 and capture.replays == 5


def test_graphs_are_kept_over_roles_versions_and_sleep(folder: Path) -> None:
    """What is captured before is replayed after each of them, with the tokens of the weights that are in then."""
    engine, capture = engine_of(folder), Capturing()
    graphs = graphs_of(engine, capture)
    first = tokens(engine)
    known = capture.captures
    engine.switch_role(Role.DECODE)
    assert tokens(engine) == first
    engine.switch_role(Role.MIXED)
    engine.sleep("keep")
    engine.wake()
    assert tokens(engine) == first
    engine.sleep("drop")
    engine.wake()
    engine.update_weights(named(1), 1)
    changed = tokens(engine)
    engine.update_weights(named(0), 2, way="streaming")
    assert tokens(engine) == first != changed
    assert capture.captures == known == len(graphs.captured)


def test_what_cannot_be_captured_stays_eager(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bucket fails, the others have graphs; it is tried once and said once."""
    engine, capture = engine_of(folder), Capturing(refuses=1)
    graphs = graphs_of(engine, capture)
    with caplog.at_level(logging.WARNING):
        first = tokens(engine)
        assert tokens(engine) == first == tokens(engine_of(folder))
    assert list(graphs.failures.values()) == ["operation not permitted when stream is capturing"]
    assert set(graphs.captured).isdisjoint(graphs.failures) and capture.captures == len(graphs.captured) + 1
    assert [record.getMessage() for record in caplog.records if "without a graph" in record.getMessage()] == [
        f"decode steps of {next(iter(graphs.failures))} stay without a graph: operation not permitted when stream is capturing"
    ]


def test_a_table_that_is_too_wide_is_run_eagerly(folder: Path) -> None:
    engine, capture = engine_of(folder), Capturing()
    runner = engine._runner
    runner.graphs = DecodeGraphs(capture, device=CPU, max_rows=8, max_context=64, width=2)
    assert tokens(engine) == tokens(engine_of(folder))
    assert capture.captures == capture.replays == 0


def test_rows_that_fill_up_repeat_the_last_one(folder: Path) -> None:
    """They write nothing but what the last row writes: no slot outside of the requests' blocks is touched."""
    seen: list[PagedBatch] = []

    def forward(ids_T: Tensor, batch: PagedBatch) -> Tensor:
        seen.append(batch)
        return ids_T[:, None].float()

    graphs = DecodeGraphs(Capturing(), device=CPU, max_rows=8, max_context=64, width=4)
    batch = dataclasses.replace(
        batch_of([1] * 5, 9),
        slot_mapping_T=torch.tensor([40, 8, 12, 16, 33]),
        positions_T=torch.tensor([8, 0, 4, 0, 5]),
        context_lens_S=torch.tensor([9, 1, 5, 1, 6], dtype=torch.int32),
        block_tables_SN=torch.arange(10, dtype=torch.int32).view(5, 2),
    )
    hidden = graphs.run(forward, torch.tensor([1, 2, 3, 4, 5]), batch)
    assert hidden is not None and hidden[:, 0].tolist() == [1, 2, 3, 4, 5]
    (filled,) = seen
    assert filled.slot_mapping_T.tolist() == [40, 8, 12, 16, 33, 33, 33, 33]
    assert filled.positions_T.tolist()[4:] == [5] * 4 and filled.context_lens_S.tolist()[4:] == [6] * 4
    assert filled.block_tables_SN[4:, :2].tolist() == [[8, 9]] * 4 and filled.query_starts_S1.tolist() == list(range(9))


# ---------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_graphs_on_a_gpu(folder: Path) -> None:
    """Real captures of the Triton kernels: the same tokens as without, also after sleep and other weights."""
    settings = dict(kernels="triton", device="cuda", max_num_seqs=8)
    expected = tokens(make(folder, **settings, cuda_graphs=False))
    engine = make(folder, **settings)
    assert tokens(engine) == expected
    graphs = engine._runner.graphs
    assert graphs is not None and {bucket.rows for bucket in graphs.captured} == {1, 2, 4, 8} and not graphs.failures
    engine.update_weights(named(1), 1)
    assert tokens(engine) != expected
    engine.update_weights(named(0), 2)
    assert tokens(engine) == expected


@pytest.mark.gpu
def test_steps_ahead_with_graphs_on_a_gpu(folder: Path) -> None:
    settings = dict(kernels="triton", device="cuda", max_num_seqs=8)
    assert tokens(make(folder, **settings, overlap=True)) == tokens(make(folder, **settings, cuda_graphs=False))


@pytest.mark.gpu
def test_graphs_outlive_sleep_on_a_gpu(folder: Path) -> None:
    engine = make(folder, kernels="triton", device="cuda", max_num_seqs=8)
    expected = tokens(engine)
    engine.sleep("keep")
    engine.wake()
    assert tokens(engine) == expected
