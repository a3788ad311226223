"""The layout of a step and the runner, also with one step scheduled ahead of what is known."""

from __future__ import annotations

from pathlib import Path

import hf_models
import pytest
import torch

from pearl.config import EngineConfig
from pearl.engine import model_runner
from pearl.engine.assembly import assemble, load_folder
from pearl.engine.batch import build_batch
from pearl.engine.core import CoreSettings, EngineCore
from pearl.engine.model_runner import ModelRunner
from pearl.engine.request import Request, ScheduledRequest, SchedulerOutput
from pearl.protocol import SamplingParams


def request(name: str, ids: list[int], prompt: int, table: list[int], **params) -> Request:
    return Request(
        request_id=name,
        params=SamplingParams(**params),
        token_ids=ids,
        num_prompt_tokens=prompt,
        max_tokens=8,
        seed=3,
        block_table=table,
    )


def entry(name: str, start: int, count: int, *, samples: bool = True, prompt_logprobs: bool = False) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=name, start=start, num_tokens=count, samples=samples, wants_prompt_logprobs=prompt_logprobs
    )


def test_layout_of_a_mixed_step() -> None:
    requests = {
        "chunk": request("chunk", [10, 11, 12, 13, 14, 15], 6, [7, 2]),
        "decode": request("decode", [20, 21, 22, 23, 24], 3, [5, 0, 9]),
        "one": request("one", [30, 31], 2, [1]),
        "fresh": request("fresh", [40, 41, 42], 3, [3]),
    }
    output = SchedulerOutput(
        step=0,
        requests=(
            entry("chunk", 2, 3, samples=False, prompt_logprobs=True),
            entry("decode", 4, 1),
            entry("fresh", 0, 3, prompt_logprobs=True),
            entry("one", 0, 1, samples=False),
        ),
    )
    batch = build_batch(output, requests, block_size=4)
    paged = batch.paged
    assert batch.input_ids_T.tolist() == [24, 30, 12, 13, 14, 40, 41, 42]
    assert paged.positions_T.tolist() == [4, 0, 2, 3, 4, 0, 1, 2]
    assert paged.slot_mapping_T.tolist() == [0, 4, 30, 31, 8, 12, 13, 14]
    assert paged.query_starts_S1.tolist() == [0, 1, 2, 5, 8]
    assert paged.context_lens_S.tolist() == [5, 1, 5, 3]
    assert paged.block_tables_SN.tolist() == [[5, 0, 9], [1, 0, 0], [7, 2, 0], [3, 0, 0]]
    assert (paged.num_decodes, paged.max_query_len, paged.max_context_len) == (2, 3, 5)
    assert (batch.sample_rows, batch.positions_R) == ([0, 7], [2, 0])
    assert [sampled.request_id for sampled in batch.sampled] == ["decode", "fresh"]
    assert [(rows.request_id, rows.first, rows.targets) for rows in batch.prompt_rows] == [
        ("chunk", 2, [13, 14, 15]),
        ("fresh", 5, [41, 42]),
    ]
    assert batch.unknown == []
    types = (batch.input_ids_T, paged.positions_T, paged.slot_mapping_T, paged.query_starts_S1, paged.block_tables_SN)
    assert [tensor.dtype for tensor in types] == [torch.int64] * 3 + [torch.int32] * 2


def test_slots_of_a_large_pool_do_not_overflow() -> None:
    requests = {"r": request("r", [1, 2], 2, [8000])}
    batch = build_batch(SchedulerOutput(step=0, requests=(entry("r", 1, 1),)), requests, block_size=276480)
    assert batch.paged.slot_mapping_T.tolist() == [2211840001]


@pytest.fixture(scope="module")
def hf():
    return hf_models.randomise(hf_models.dense())


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(hf, tmp_path_factory.mktemp("dense"))


def parts_of(folder: Path, **settings) -> tuple[EngineCore, ModelRunner]:
    parts = assemble(EngineConfig(model=folder, dtype="float32", block_size=4, num_blocks=60))
    load_folder(parts.store, parts.model, folder)
    sizes = {"block_size": 4, "num_blocks": 60, "max_model_len": 256, "max_num_seqs": 8, "max_batch_tokens": 6}
    return EngineCore(CoreSettings(vocab_size=128, **(sizes | settings))), parts.runner


def add(core: EngineCore, name: str, prompt: list[int], **params) -> None:
    core.add_request(
        Request(
            request_id=name,
            params=SamplingParams(**params),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=params["max_tokens"],
            seed=11,
            stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        )
    )


def drive(core: EngineCore, runner: ModelRunner, depth: int) -> dict[str, list[int]]:
    """Runs to the end with up to `depth` outputs unfinished while the newest is executed."""
    done: dict[str, list[int]] = {}
    unfinished = []
    while core.has_unfinished():
        output = core.schedule(0.0)
        unfinished.append((output, runner.execute(output, core.requests, weight_version=0)))
        while len(unfinished) >= depth or (unfinished and not output.requests):
            for update in core.finish(*unfinished.pop(0), 0.0):
                if update.completion:
                    done[update.request_id] = update.completion.token_ids
    core.check_integrity()
    return done


def test_one_step_ahead_gives_the_same_tokens(folder: Path, hf) -> None:
    results = []
    for depth in (1, 2):
        core, runner = parts_of(folder)
        add(core, "greedy", hf_models.prompt(9), temperature=0.0, max_tokens=10)
        add(core, "seeded", hf_models.prompt(4, seed=1), max_tokens=9)
        add(core, "penalised", hf_models.prompt(5, seed=2), temperature=0.0, max_tokens=12, repetition_penalty=2.0,
            frequency_penalty=1.5)  # fmt: skip
        add(core, "stops", hf_models.prompt(6), temperature=0.0, max_tokens=10,
            stop_token_ids=[hf_models.greedy(hf, hf_models.prompt(6), 3)[0][2]])  # fmt: skip
        results.append(drive(core, runner, depth))
    assert results[0] == results[1]
    assert results[0]["greedy"] == hf_models.greedy(hf, hf_models.prompt(9), 10)[0]
    assert len(results[0]["stops"]) <= 3 and len(set(results[0]["penalised"])) > 8


def test_prompt_scores_do_not_depend_on_how_many_rows_are_held(folder: Path, hf, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = hf_models.prompt(20)
    expected = hf_models.logits(hf, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    for held in (1, 3 * 128, 1 << 24):
        monkeypatch.setattr(model_runner, "LOGITS_AT_ONCE", held)
        core, runner = parts_of(folder, max_batch_tokens=64)
        add(core, "r", prompt, max_tokens=1, prompt_logprobs=True)
        output = core.schedule(0.0)
        result = runner.execute(output, core.requests, weight_version=4)
        assert result.prompt_logprobs["r"] == pytest.approx(expected, abs=1e-4)
        assert result.weight_version == 4


def test_only_rows_that_are_needed_reach_the_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner = parts_of(folder, max_batch_tokens=64)
    rows: list[int] = []
    logits = runner.logits
    monkeypatch.setattr(runner, "logits", lambda hidden: rows.append(hidden.shape[0]) or logits(hidden))
    add(core, "a", hf_models.prompt(30), max_tokens=2)
    add(core, "b", hf_models.prompt(20, seed=1), max_tokens=2)
    drive(core, runner, 1)
    assert rows == [2, 2]


def test_ids_of_the_step_before_outlive_one_that_fails(folder: Path, hf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one request of two fails after its draw was queued; the next reads both ids of the step before it."""
    core, runner = parts_of(folder)
    prompts = {name: hf_models.prompt(3, seed=seed) for seed, name in enumerate(("one", "other"))}
    for name, prompt in prompts.items():
        add(core, name, prompt, temperature=0.0, max_tokens=6)
    first = core.schedule(0.0)
    queued = runner.launch(first, core.requests, weight_version=0)
    whole = runner.queue_draw

    def failing(batch, hidden_TD):
        whole(batch, hidden_TD)
        raise MemoryError("no room")

    monkeypatch.setattr(runner, "queue_draw", failing)
    with pytest.raises(MemoryError):
        runner.launch(SchedulerOutput(step=9, requests=first.requests[:1]), core.requests, weight_version=0)
    monkeypatch.undo()
    second = core.schedule(0.0)
    assert len(second.requests) == len(first.requests) == 2
    after = runner.launch(second, core.requests, weight_version=0)
    core.finish(first, queued(), 0.0)
    core.finish(second, after(), 0.0)
    for name, prompt in prompts.items():
        assert core.requests[name].output_token_ids == hf_models.greedy(hf, prompt, 2)[0]
