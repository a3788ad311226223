"""Steps queued one ahead: the same tokens as one after the other, whatever is done to the engine in between."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import hf_models
import pytest
from engine_cases import make, model, named, oracle, run

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.protocol import Role, SamplingParams

KINDS = [
    dict(temperature=0.0, max_tokens=10),
    dict(temperature=1.0, max_tokens=9, seed=5, logprobs=2),
    dict(temperature=0.0, max_tokens=12, repetition_penalty=2.0, frequency_penalty=1.5),
    dict(temperature=0.7, max_tokens=8, seed=6, top_k=5, n=2),
    dict(temperature=0.0, max_tokens=7, prompt_logprobs=True),
    dict(temperature=0.0, max_tokens=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def add_all(engine: Engine) -> None:
    for number, kind in enumerate(KINDS):
        engine.add_request(hf_models.prompt(4 + 3 * number, seed=number), SamplingParams(**kind), request_id=f"r{number}")
    stop = oracle(tuple(hf_models.prompt(6)), 3)[0][2]
    stops = SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=[stop])
    engine.add_request(hf_models.prompt(6), stops, request_id="stops")


def results(engine: Engine) -> dict[tuple[str, int], tuple]:
    return {
        (name, one.index): (one.token_ids, one.finish_reason, one.weight_versions, one.num_preemptions, len(one.logprobs))
        for name, ones in run(engine).items()
        for one in ones
    }


def both(folder: Path, meddle: Callable[[Engine], object], after: int = 4, **settings) -> list[dict]:
    """What comes of the same requests one step after the other and one ahead, with something done after some steps."""
    found = []
    for overlap in (False, True):
        engine = make(folder, overlap=overlap, max_batch_tokens=16, **settings)
        add_all(engine)
        for _ in range(after):
            engine._pending = engine.step_updates()  # told once more at the end
            engine.check_integrity()
        assert engine._steps.queued == overlap
        meddle(engine)
        engine.check_integrity()
        found.append(results(engine))
    return found


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14}, {"max_num_seqs": 3}], ids=str)
def test_the_same_tokens(folder: Path, settings: dict) -> None:
    """Also where blocks run out and requests give way, and where they wait for a place."""
    found = both(folder, lambda engine: None, **settings)
    tokens = [{key: value[0] for key, value in each.items()} for each in found]
    assert tokens[0] == tokens[1] and len(tokens[0]) == len(KINDS) + 2
    assert len(tokens[0]["stops", 0]) <= 3


def test_updates_come_one_call_later(folder: Path) -> None:
    engine = make(folder, overlap=True)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0))
    told = [[token for update in engine.step_updates() for token in update.token_ids] for _ in range(4)]
    assert [len(ids) for ids in told] == [0, 1, 1, 1] and not engine.has_unfinished() and not engine._steps.queued
    assert sum(told, []) == oracle((1, 2, 3), 3)[0]


def test_a_step_is_queued_before_the_last_one_is_waited_for(folder: Path) -> None:
    engine = make(folder, overlap=True)
    order: list[str] = []
    launch = engine._runner.launch

    def noted(output, requests, *, weight_version):
        order.append(f"launch {output.step}")
        result = launch(output, requests, weight_version=weight_version)
        return lambda: order.append(f"wait {output.step}") or result()

    engine._runner.launch = noted
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert order[:6] == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "launch 3"]


def sleep_and_wake(engine: Engine) -> None:
    engine.sleep("keep")
    engine.wake()


MEDDLING = {
    "abort": lambda engine: engine.abort("r0"),
    "preempt": lambda engine: [engine.preempt(name) for name in ("r1", "r2", "r3")],
    "pause": lambda engine: [engine.pause(), engine.step_updates(), engine.step_updates(), engine.resume()],
    "sleep": sleep_and_wake,
    "decode": lambda engine: engine.switch_role(Role.DECODE),
    "recompute": lambda engine: engine.switch_role(Role.PREFILL, "recompute") and engine.switch_role(Role.MIXED),
    "cache": lambda engine: engine.reset_prefix_cache(),
}


@pytest.mark.parametrize("name", MEDDLING)
def test_the_same_tokens_whatever_is_done_in_between(folder: Path, name: str) -> None:
    found = both(folder, MEDDLING[name])
    tokens = [{key: value[0] for key, value in each.items() if key[0] != "r0" or name != "abort"} for each in found]
    assert tokens[0] == tokens[1] and len(tokens[0]) >= len(KINDS)


@pytest.mark.parametrize(("mode", "way"), [("keep", "streaming"), ("recompute", "staged"), ("abort", "staged")])
def test_new_weights_wait_for_the_step_that_is_queued(folder: Path, mode: str, way: str) -> None:
    """Every token is of the version that it says, as an engine that runs only that far under the old weights has it."""
    engine = make(folder, overlap=True)
    ids = hf_models.prompt(6)
    engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=12), request_id="r")
    for _ in range(4):
        engine.step_updates()
    engine.update_weights(named(1), 1, mode=mode, way=way)
    assert not engine._steps.queued
    (done,) = run(engine)["r"]
    old = done.weight_versions.count(0)
    assert old == 4 and done.weight_versions == sorted(done.weight_versions)
    assert done.token_ids[:old] == oracle(tuple(ids), old)[0]
    assert done.finish_reason == ("abort" if mode == "abort" else "length")
    if mode == "recompute":
        assert done.token_ids[old:] == oracle(tuple(ids + done.token_ids[:old]), 12 - old, seed=1)[0]
    assert engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=5)) and (
        run(engine)["0"][0].token_ids == oracle(tuple(ids), 5, seed=1)[0]
    )


def test_requests_are_handed_over_with_what_was_queued(folder: Path) -> None:
    source, target = (make(folder, overlap=True) for _ in range(2))
    ids = hf_models.prompt(9)
    for name in ("asked", "leaving"):
        source.add_request(ids, SamplingParams(temperature=0.0, max_tokens=12), request_id=name)
    for _ in range(4):
        source.step_updates()
    transfers = [source.export_kv("asked")]
    source.step_updates()
    source.switch_role(Role.PREFILL)
    transfers += source.take_handoffs()
    assert [transfer.request_id for transfer in transfers] == ["asked", "leaving"]
    for transfer in transfers:
        assert target.import_kv(transfer)
        source.finish_export(transfer.transfer_id, True)
    found = run(target)
    assert {found[name][0].token_ids == oracle(tuple(ids), 12)[0] for name in ("asked", "leaving")} == {True}
    run(source)


@pytest.mark.parametrize("where", ["launch", "draw", "result"])
def test_a_step_that_fails_has_not_happened(folder: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has the one queued behind it; what was finished before is told, and everything goes on."""
    engine = make(folder, overlap=True)
    add_all(engine)
    expected = results(make_and_add(folder))
    for _ in range(3):
        engine._pending = engine.step_updates()
    launch, draw = engine._runner.launch, engine._runner.queue_draw

    def drawn_in_vain(batch, hidden_TD):
        draw(batch, hidden_TD)
        raise MemoryError("no room")

    def failing(output, requests, *, weight_version):
        if where == "launch":
            raise MemoryError("no room")
        launch(output, requests, weight_version=weight_version)

        def result():
            raise MemoryError("no room")

        return result

    if where == "draw":
        monkeypatch.setattr(engine._runner, "queue_draw", drawn_in_vain)
    else:
        monkeypatch.setattr(engine._runner, "launch", failing)
    with pytest.raises(MemoryError):
        for _ in range(2):
            engine._pending = engine.step_updates()
    monkeypatch.undo()
    engine.check_integrity()
    assert {key: value[0] for key, value in results(engine).items()} == {key: value[0] for key, value in expected.items()}


def make_and_add(folder: Path) -> Engine:
    engine = make(folder)
    add_all(engine)
    return engine


def test_ranks_do_not_overlap() -> None:
    with pytest.raises(ValueError, match="engine.overlap=True: must be False with tensor_parallel=2"):
        EngineConfig(overlap=True, tensor_parallel=2)


def something(engine: Engine, rng: random.Random, added: dict[str, list[int]], gone: set[str]) -> None:
    """One command out of many, or none."""
    live = [name for name in added if name in engine._core.requests]
    what = rng.randrange(14)
    if what < 4 and len(live) < 6:
        name = f"r{len(added)}"
        added[name] = hf_models.prompt(rng.randint(1, 14), seed=len(added))
        engine.add_request(added[name], SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 8)), request_id=name)
    elif what == 4 and live:
        gone.add(rng.choice(live))
        engine.abort(sorted(gone)[-1])
    elif what == 5 and live:
        engine.preempt(rng.choice(live))
    elif what == 6:
        try:
            sleep_and_wake(engine)
        except ValueError:
            assert engine._core.exports  # the step that was waited for has made an offer, whose lease protects the pool
    elif what == 7:
        engine.switch_role(rng.choice(list(Role)), rng.choice(["handover", "recompute"]))
    elif what == 8 and engine._core.scheduler.running:
        name = rng.choice(list(engine._core.scheduler.running))
        with contextlib.suppress(ValueError):  # it may end in the step that is waited for
            engine.export_kv(name)
            for export in list(engine._core.exports):
                engine.finish_export(export, False)
    elif what == 9:
        engine.reset_prefix_cache()
    elif what == 10:
        (engine.resume if engine.paused else engine.pause)()
    for transfer in engine.take_handoffs():
        engine.finish_export(transfer.transfer_id, False)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(folder: Path, seed: int) -> None:
    """Whatever is done in whatever order, greedy requests get the model's tokens, each once, and the books balance."""
    rng, added, gone = random.Random(seed), {}, set()
    engine = make(folder, overlap=True, max_batch_tokens=8, max_num_seqs=4, num_blocks=rng.choice([16, 60]))
    told: dict[str, list[int]] = {}
    done: dict[str, list[int]] = {}

    def step() -> None:
        for update in engine.step_updates():
            told.setdefault(update.request_id, []).extend(update.token_ids)
            if update.completion is not None:
                done[update.request_id] = update.completion.token_ids
        engine.check_integrity()

    for _ in range(150):
        something(engine, rng, added, gone)
        engine.check_integrity()
        step()
    engine.resume()
    engine.switch_role(Role.MIXED)
    for _ in range(500):
        if not engine.has_unfinished():
            break
        step()
    assert done.keys() == added.keys() and len(added) > 10
    for name, ids in added.items():
        assert told.get(name, []) == done[name]
        assert done[name] == oracle(tuple(ids), 8)[0][: len(done[name])]
        assert name in gone or done[name]
