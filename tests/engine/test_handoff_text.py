"""Text that moves with its request: what one engine has given out and what the other adds are the text of one engine."""

from __future__ import annotations

from pathlib import Path

import hf_models
import pytest
import tiny_tokenizers as tiny
from pair_cases import Pair

from pearl.engine.engine import Engine
from pearl.protocol import Role, SamplingParams

IDS = [64, 65, 66]
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=[tiny.byte_level, tiny.sentencepiece_like])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = request.param()
    hf = hf_models.randomise(hf_models.dense(vocab_size=tokenizer.get_vocab_size()))
    return tiny.save(tokenizer, hf_models.save(hf, tmp_path_factory.mktemp("text") / "model"))


def params(**fields) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=5, max_tokens=NUM_TOKENS, **fields)


def pieces(folder: Path, **fields) -> tuple[list[str], str, str]:
    """The text of each token, all of it, and what stopped it, in one engine."""
    pair = Pair(folder, p={"role": Role.MIXED})
    pair.p.add_request(IDS, params(**fields), request_id="r")
    updates = list(pair.p.stream())
    completion = updates[-1].completion
    return [update.text for update in updates], completion.text, completion.stop_reason


def moved(folder: Path, after: int, **fields) -> Pair:
    pair = Pair(folder, p={"role": Role.MIXED})
    pair.p.add_request(IDS, params(**fields), request_id="r")
    for _ in range(after):
        pair.take(pair.p)
    assert pair.move(pair.p.export_kv("r"), pair.p, pair.d)
    pair.run()
    return pair


def test_text_goes_on_in_the_middle_of_a_character(folder: Path) -> None:
    given, text, _ = pieces(folder)
    held = [number for number, piece in enumerate(given, 1) if not piece and number < NUM_TOKENS]
    assert held, "some token must leave a character unfinished"
    for after in sorted({1, 2, *held[:6], NUM_TOKENS - 1}):
        pair = moved(folder, after)
        assert pair.done["r", 0].text == pair.texts["r", 0] == text


def test_a_stop_string_across_the_move_is_found_and_nothing_of_it_was_shown(folder: Path) -> None:
    _, text, _ = pieces(folder)
    stop = text[6:9]
    assert len(stop) == 3
    given, cut, reason = pieces(folder, stop=[stop])
    assert reason == stop and stop not in cut
    for after in range(1, len(given)):
        pair = moved(folder, after, stop=[stop])
        done = pair.done["r", 0]
        assert (done.text, done.stop_reason, pair.texts["r", 0]) == (cut, stop, cut)
        assert len(done.token_ids) == len(given)


def test_min_tokens_counts_those_of_both_engines(folder: Path) -> None:
    _, text, _ = pieces(folder)
    stop = text[2:3]
    given, cut, reason = pieces(folder, stop=[stop], min_tokens=12)
    assert len(given) >= 12
    for after in (1, 8, 11):
        done = moved(folder, after, stop=[stop], min_tokens=12).done["r", 0]
        assert (len(done.token_ids), done.text, done.stop_reason) == (len(given), cut, reason)


def test_text_made_at_the_end_is_made_where_the_end_is(folder: Path) -> None:
    _, text, _ = pieces(folder)
    pair = Pair(folder, p={"role": Role.MIXED})
    pair.p.add_request(IDS, params(), request_id="r", streaming=False)
    for _ in range(3):
        pair.take(pair.p)
    assert pair.move(pair.p.export_kv("r"), pair.p, pair.d)
    pair.take(pair.d)
    assert pair.texts["r", 0] == ""
    assert pair.run()["r", 0].text == text


def test_an_engine_without_text_refuses_stop_strings_and_leaves_other_text_out(folder: Path) -> None:
    pair = Pair(folder)
    pair.p.add_request(IDS, params(), request_id="r")
    pair.take(pair.p)
    [transfer] = pair.p.take_handoffs()
    deaf = Engine(pair.d.config, pair.clock, text=False, transports=pair.d._transfers.transports)
    assert deaf.import_kv(transfer)
    pair.p.finish_export(transfer.transfer_id, True)
    [completion] = [update.completion for update in deaf.stream() if update.completion is not None]
    assert completion.text == "" and len(completion.token_ids) == NUM_TOKENS
