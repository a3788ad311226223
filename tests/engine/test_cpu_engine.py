"""The engine on the CPU kernels: chosen unasked, right on every instruction set, equal bits in any company, equal draws."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
import torch
from cpu_problems import machine
from engine_cases import GREEDY, assert_greedy, make, model, oracle, run
from pair_cases import Pair

from pearl import _C
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.llm import LLM
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams

ROOT = Path(__file__).parents[2]
SMOLLM2 = os.environ.get("PEARL_SMOLLM2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def test_they_are_chosen_unasked_for_what_they_serve(folder: Path) -> None:
    assert make(folder).kernels_why == "cpu (auto, cpu, torch.float32)"
    assert make(folder, dtype="bfloat16").kernels_why == "cpu (auto, cpu, torch.bfloat16)"
    passed_over = make(folder, dtype="float16").kernels_why
    assert passed_over.startswith("reference (auto") and "cpu: dtype=torch.float16" in passed_over
    assert make(folder, kernels="reference").kernels_why.startswith("reference (reference")
    with pytest.raises(ValueError, match="kernels='cpu': cpu: dtype=torch.float16: they compute in float32 and bfloat16"):
        make(folder, dtype="float16", kernels="cpu")


@pytest.mark.parametrize("isa", _C.cpu.supported_isas())
def test_every_instruction_set_gives_the_oracle_tokens(folder: Path, isa: str) -> None:
    prompts = [hf_models.prompt(n, seed=n) for n in (3, 17, 40)]
    with machine(isa):
        engine = make(folder)
        rids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        done = run(engine)
    for prompt, rid in zip(prompts, rids, strict=True):
        assert done[rid][0].prompt_token_ids == prompt
        assert_greedy(done[rid][0], 8)


SAY = "import sys; from pearl import _C; print(_C.cpu.isa())"


def test_the_environment_names_an_instruction_set() -> None:
    """The plainest is there on every machine; a wrong name is an error that lists the right ones."""
    for name in ("portable", "sse9"):
        command = [sys.executable, "-c", SAY]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PEARL_CPU_ISA": name}, capture_output=True, text=True, timeout=120
        )
        if name == "portable":
            assert done.stdout.strip() == "portable"
        else:
            assert done.returncode != 0 and "PEARL_CPU_ISA" in done.stderr and "portable" in done.stderr


# ---------------------------------------------------------------------------------------------------- equal bits


def numbers_of(done: Completion) -> tuple[list[int], list[float] | None, list]:
    return done.token_ids, done.logprobs, done.prompt_logprobs or []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_has_the_same_bits_whatever_happens_around_it(folder: Path, dtype: str) -> None:
    """Company, budgets, pre-emption, the prefix cache, threads: ids and log-probs are equal to the last bit."""
    prompt = hf_models.prompt(41, seed=5)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, prompt_logprobs=True)
    alone = make(folder, dtype=dtype, block_size=16)
    rid = alone.add_request(prompt, params)
    expected = numbers_of(run(alone)[rid][0])
    rng, threads = random.Random(0), torch.get_num_threads()
    try:
        for settings in ({"max_batch_tokens": 3, "max_num_seqs": 3}, {"num_blocks": 8}, {"max_batch_tokens": 17}, {}):
            torch.set_num_threads(rng.choice([1, 2, 3]))
            engine = make(folder, dtype=dtype, block_size=16, **settings)
            others = [hf_models.prompt(rng.randrange(1, 60), seed=seed) for seed in range(3)] + [prompt[:33]]
            for other in others:
                engine.add_request(other, SamplingParams(temperature=0.0, max_tokens=20))
            for _ in range(rng.randrange(4)):
                engine.step()
            rid = engine.add_request(prompt, params)
            assert numbers_of(run(engine)[rid][0]) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_move_between_engines_to_the_last_bit(folder: Path, dtype: str) -> None:
    """Blocks of one and of two tiles: what was begun in one engine goes on in the other as if it had never left."""
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=True)
    prompts = [hf_models.prompt(n, seed=n) for n in (3, 16, 33, 50)]
    for block_size in (16, 32):
        settings = {"dtype": dtype, "block_size": block_size}
        pair, alone = Pair(folder, p=settings, d=settings), make(folder, **settings)
        for number, prompt in enumerate(prompts):
            for engine in (pair.p, alone):
                engine.add_request(prompt, params, request_id=str(number))
        moved, stayed = pair.run(), run(alone)
        assert len(pair.moved) == len(prompts) and all(ok for _, ok in pair.moved)
        for (name, _), completion in moved.items():
            assert numbers_of(completion) == numbers_of(stayed[name][0])


def test_pools_in_another_order_are_refused(folder: Path) -> None:
    """And the request is decoded where it is."""
    pair = Pair(folder, d={"kernels": "reference"})
    pair.p.add_request(hf_models.prompt(9), GREEDY)
    pair.p.step()
    [transfer] = pair.p.take_handoffs()
    with pytest.raises(ValueError, match="order='tiles16' at the source, 'plain' at the destination"):
        pair.d.import_kv(transfer)
    pair.p.finish_export(transfer.transfer_id, False)
    assert_greedy(run(pair.p)[transfer.request_id][0], 8)


# ---------------------------------------------------------------------------------------------------- draws


def drawn(engine: Engine, many: list[SamplingParams]) -> list[Completion]:
    rids = [engine.add_request(hf_models.prompt(5, seed=i), params) for i, params in enumerate(many)]
    done = run(engine)
    return [done[rid][0] for rid in rids]


def test_draws_equal_those_of_the_reference(folder: Path) -> None:
    """All parameters of a draw, in one batch: the same ids; log-probs, and the likeliest beside, within 1e-4."""
    rng = random.Random(1)
    many = [
        SamplingParams(
            temperature=rng.choice([0.0, 1e-40, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 1, 7, 1000]),
            top_p=rng.choice([1.0, 0.9, 0.2]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.3]),
            min_tokens=rng.choice([0, 4]),
            stop_token_ids=[3, 77],
            logprobs=rng.choice([0, 0, 3, 128]),
            logprobs_mode=rng.choice(["processed", "raw"]),
            seed=seed,
            max_tokens=6,
        )
        for seed in range(48)
    ]
    ours, theirs = (drawn(make(folder, kernels=kernels, num_blocks=400), many) for kernels in ("cpu", "reference"))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (other.token_ids, other.finish_reason, other.stop_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for best, same in zip(one.top_logprobs or [], other.top_logprobs or [], strict=True):
            assert best.keys() == same.keys()
            assert list(best.values()) == pytest.approx(list(same.values()), abs=1e-4)
    assert len({tuple(one.token_ids) for one in ours}) > 40


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_numbers_that_broke_down_end_their_request_alone(folder: Path, kernels: str) -> None:
    engine = make(folder, kernels=kernels)
    with torch.no_grad():
        engine._decoder.embed.weight[99] = math.nan
    params = SamplingParams(temperature=0.0, max_tokens=4)
    bad, good = engine.add_request([99, 1], params), engine.add_request([1, 2], params)
    done = run(engine)
    assert done[bad][0].finish_reason == "error" and "not finite" in (done[bad][0].error or "")
    assert done[good][0].token_ids == oracle((1, 2), 4)[0]


def test_every_token_masked_is_an_error_of_its_row(tmp_path: Path) -> None:
    folder = hf_models.save(hf_models.dense(vocab_size=2), tmp_path)
    params = SamplingParams(stop_token_ids=[0, 1], min_tokens=2, max_tokens=4)
    for kernels in ("cpu", "reference"):
        engine = make(folder, kernels=kernels)
        rids = [engine.add_request([1], params), engine.add_request([1], SamplingParams(max_tokens=2))]
        done = run(engine)
        assert "no token is left" in (done[rids[0]][0].error or "")
        assert done[rids[1]][0].error is None


# ---------------------------------------------------------------------------------------------------- memory


def test_the_packed_weights_sleep_with_the_plain_ones_and_come_back_with_a_version(folder: Path) -> None:
    engine = make(folder)
    before = [value.clone() for _, value in engine.named_hf_tensors()]
    names = [name for name, _ in engine.named_hf_tensors()]
    engine.sleep("drop")
    engine.wake()
    engine.update_weights(list(zip(names, before, strict=True)), 1)
    rid = engine.add_request(hf_models.prompt(9), SamplingParams(temperature=0.0, max_tokens=6))
    assert run(engine)[rid][0].token_ids == oracle(tuple(hf_models.prompt(9)), 6)[0]


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="PEARL_SMOLLM2 names no folder")
def test_smollm2_in_bf16_is_no_farther_off_than_transformers() -> None:
    """Mean absolute error of the log-probs of a text against fp32."""
    from transformers import AutoModelForCausalLM

    ids = LLM(EngineConfig(model=str(SMOLLM2), num_blocks=200, max_model_len=512)).tokenizer.encode(
        "The capital of France is Paris. Water boils at 100 degrees, and the sum of two and two is four. " * 4
    )

    def scores(dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype)(torch.tensor([ids])).logits[0].float()
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    exact = scores(torch.float32)
    ours = torch.tensor(LLM(str(SMOLLM2), num_blocks=200, max_model_len=512).score(ids))
    assert float((ours - exact).abs().mean()) <= float((scores(torch.bfloat16) - exact).abs().mean())
    narrow = torch.tensor(LLM(str(SMOLLM2), dtype="float32", num_blocks=200, max_model_len=512).score(ids))
    assert float((narrow - exact).abs().max()) < 1e-4
