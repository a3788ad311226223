"""Engine and trainer side by side: the same log-probs for the same ids, exact masks, groups of any size, published weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hf_models
import msgspec
import pytest
import torch
from engine_cases import make, one, run
from trainer_cases import UNCLIPPED, command, config, folder, sequences

from pearl.config import AlgorithmOptions, RolloutOptions
from pearl.engine.engine import Engine
from pearl.protocol import SamplingParams, TrainSequence
from pearl.rl.advantage import group_advantages
from pearl.rl.publisher import LocalPublisher
from pearl.rl.trainer import Trainer

replaced = msgspec.structs.replace
PLAIN = AlgorithmOptions()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model, so that a published embedding must also be the head."""
    hf = hf_models.randomise(hf_models.dense(tie_word_embeddings=True))
    return hf_models.save(hf, tmp_path_factory.mktemp("tied"))


def trainer_of(model: Path, **fields) -> Trainer:
    trainer = Trainer(model, config(algorithm=PLAIN, **fields))
    trainer.set_reference()
    return trainer


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainer.decoder.named_parameters()}


def episode(engine: Engine, seed: int, *, turns: int = 3, group: int = 0, reward: float = 0.0, **fields) -> TrainSequence:
    """`turns` replies of the engine with observations of 1, 2, .. tokens between them, recorded token by token."""
    ids = hf_models.prompt(5, seed=seed % 4)
    mask, logprobs, versions = [0] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    for turn in range(turns):
        reply = one(engine, ids, SamplingParams(seed=seed * 10 + turn, max_tokens=6, **fields))
        observation = hf_models.prompt(turn + 1, seed=50 + seed)
        ids = ids + reply.token_ids + observation
        mask += [1] * len(reply.token_ids) + [0] * len(observation)
        logprobs += [*(reply.logprobs or []), *[0.0] * len(observation)]
        versions += reply.weight_versions + [-1] * len(observation)
    return TrainSequence(
        token_ids=ids, loss_mask=mask, logprobs=logprobs, weight_versions=versions, reward=reward, group=group
    )


# ---------------------------------------------------------------------------------------------------- one pair of numbers


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [3, 64])
def test_engine_and_trainer_agree_over_turns_updates_and_publishing(model: Path, temperature: float, chunk: int) -> None:
    """The k-th log-prob is the k-th sampled token's, whatever came from the cache, from chunks or from an update."""
    engine = make(model, max_batch_tokens=chunk, block_size=4)
    trainer = trainer_of(model, rollout=RolloutOptions(temperature=temperature))
    for version in range(3):
        made = [
            episode(engine, version * 10 + index, group=index // 4, reward=float(index % 3), temperature=temperature)
            for index in range(8)
        ]
        assert {v for s in made for v in s.weight_versions} == {-1, version}
        metrics = trainer.train_step(command(made, [[[[0, 1, 2], [3]]], [[[4, 5, 6, 7]]]], weight_version=version))
        assert metrics["logprob_gap"] is not None and metrics["logprob_gap"] < 1e-4
        assert metrics["trained_tokens"] == 8 * 18 and metrics["grad_norm"] > 0  # type: ignore[operator]
        before = one(engine, [1, 2, 3], SamplingParams(temperature=0.0)).logprobs
        publisher = LocalPublisher(trainer, engine)
        publisher.begin(version + 1)
        publisher.poll()
        after = one(engine, [1, 2, 3], SamplingParams(temperature=0.0)).logprobs
        assert before != pytest.approx(after, abs=1e-3)
    head = dict(trainer.named_hf_tensors())["model.embed_tokens.weight"]
    assert torch.equal(engine._decoder.embed.weight, head)


def test_everything_but_the_sampled_ids_is_free_of_gradient(model: Path) -> None:
    """Three turns of a real engine: the gradient is that of the replies' log-probs under Hugging Face's autograd."""
    engine, trainer = make(model), trainer_of(model)
    made = [episode(engine, seed, group=0, reward=float(seed)) for seed in range(2)]
    hf = hf_models.randomise(hf_models.dense(tie_word_embeddings=True))
    total = torch.zeros(())
    for s, advantage in zip(made, (-1.0, 1.0), strict=True):
        logits = hf(input_ids=torch.tensor([s.token_ids]), use_cache=False).logits[0]
        for place, on in enumerate(s.loss_mask):
            if on:
                total = total - advantage * logits[place - 1].log_softmax(-1)[s.token_ids[place]]
    (total / 36).backward()
    trainer.train_step(command(made))
    theirs = dict(hf.named_parameters())
    torch.testing.assert_close(
        gradients(trainer)["embed.weight"], theirs["model.embed_tokens.weight"].grad, atol=2e-5, rtol=1e-4
    )
    torch.testing.assert_close(gradients(trainer)["norm.weight"], theirs["model.norm.weight"].grad, atol=2e-5, rtol=1e-4)


def test_a_request_kept_over_a_publish_is_stale_token_by_token(model: Path) -> None:
    engine, trainer = make(model), trainer_of(model)
    rid = engine.add_request([1, 2, 3], SamplingParams(seed=1, max_tokens=8))
    for _ in range(3):
        engine.step()
    trainer.train_step(command([episode(engine_copy, 1, reward=1.0) for engine_copy in (make(model),)] + sequences(4)))
    publisher = LocalPublisher(trainer, engine)
    publisher.begin(1)
    publisher.poll()
    completion = run(engine)[rid][0]
    assert completion.weight_versions == [0] * 3 + [1] * 5
    made = TrainSequence(
        token_ids=[1, 2, 3, *completion.token_ids],
        loss_mask=[0] * 3 + [1] * 8,
        logprobs=[0.0] * 3 + (completion.logprobs or []),
        weight_versions=[-1] * 3 + completion.weight_versions,
        reward=1.0,
        group=0,
    )
    metrics = trainer.train_step(command([made], weight_version=1))
    assert metrics["logprob_gap"] is None and metrics["policy_shift"] is not None  # no sequence is of version 1 alone


# ---------------------------------------------------------------------------------------------------- masks


def test_a_real_end_is_trained_although_padding_has_the_same_id(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"eos_token_id": 7, "pad_token_id": 7}))
    made = TrainSequence(
        token_ids=[3, 4, 5, 7], loss_mask=[0, 0, 1, 1], logprobs=[0.0, 0.0, -3.0, -3.0], weight_versions=[-1, -1, 0, 0],
        reward=1.0, group=0,
    )  # fmt: skip
    without = replaced(made, loss_mask=[0, 0, 1, 0])
    losses = []
    for s in (made, without):
        trainer = Trainer(path, config())
        metrics = trainer.train_step(command([s], objective="sft"))
        losses.append(metrics["loss"])
        assert metrics["trained_tokens"] == sum(s.loss_mask)
        if s is made:
            decoder = trainer.decoder
            assert decoder.embed.weight.grad is not None and bool(decoder.embed.weight.grad[7].any())
    assert losses[0] != losses[1]


@pytest.mark.parametrize("pad", [0, 1, 100])
def test_masked_tokens_after_the_last_reply_change_nothing(model: Path, pad: int) -> None:
    made = sequences(4)
    padded = [
        replaced(
            s,
            token_ids=s.token_ids + [9] * pad,
            loss_mask=s.loss_mask + [0] * pad,
            logprobs=s.logprobs + [0.0] * pad,
            weight_versions=s.weight_versions + [-1] * pad,
        )
        for s in made
    ]
    plain, other = trainer_of(model), trainer_of(model)
    assert plain.train_step(command(made))["loss"] == other.train_step(command(padded))["loss"]
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(other)[name])


def test_masked_micro_batches_and_no_data_at_all(model: Path) -> None:
    masked = [replaced(s, loss_mask=[0] * len(s.token_ids)) for s in sequences(4)]
    for made, updates in ((masked, [[[[0, 1], []]], [[[2, 3]]]]), ([], [[[[]]]]), (masked[:1], None)):
        trainer = trainer_of(model)
        before = {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}
        metrics = trainer.train_step(command(made, updates))
        assert (metrics["loss"], metrics["trained_tokens"], metrics["updates"]) == (0.0, 0, 0)
        assert all(value is None or math.isfinite(value) for value in metrics.values())
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_hf_tensors())


# ---------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.1 + 0.2] * 7, [1e300] * 3, [5.0], [-0.0, 0.0]])
def test_equal_rewards_move_nothing(model: Path, rewards: list[float], normalize: bool) -> None:
    trainer = Trainer(model, config(algorithm=AlgorithmOptions(normalize_std=normalize)))
    before = {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}
    made = [replaced(s, reward=r, group=3) for s, r in zip(sequences(len(rewards)), rewards, strict=True)]
    metrics = trainer.train_step(command(made))
    assert metrics["grad_norm"] == 0.0 and metrics["advantage_zero_fraction"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_hf_tensors())


def test_the_survivors_of_a_group_are_normalised_among_themselves(model: Path) -> None:
    rewards = [float(index) for index in range(7)]
    made = [replaced(s, reward=r, group=0) for s, r in zip(sequences(7), rewards, strict=True)]
    metrics = trainer_of(model).train_step(command(made))
    assert metrics["advantage_max"] == pytest.approx(3 / 2, abs=1e-5)  # std of 0..6 is 2
    assert metrics["advantage_abs_mean"] == pytest.approx(12 / 7 / 2, abs=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e100, 1e200, 1.7e308])
def test_advantages_do_not_depend_on_the_unit_of_the_rewards(size: float) -> None:
    rewards = [size, size, -size, size / 2]
    expected = group_advantages([1.0, 1.0, -1.0, 0.5], [0] * 4, normalize_std=True)
    assert group_advantages(rewards, [0] * 4, normalize_std=True) == pytest.approx(expected, rel=3e-3)
    if size < 1e300:
        centred = group_advantages(rewards, [0] * 4, normalize_std=False)
        assert centred == pytest.approx([0.625 * size, 0.625 * size, -1.375 * size, 0.125 * size], rel=1e-12)


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids": [0.5, 1.0, 2.0]}, "token_ids.*integer"),
        ({"token_ids": [1, 2, 2**70]}, str(2**70)),
        ({"logprobs": [0.0, 0.0, math.nan]}, "logprobs.*finite"),
        ({"reward": math.nan}, "rewards.*nan"),
        ({"loss_mask": [1, 0, 1]}, r"loss_mask\[0\]"),
    ],
)
def test_bad_sequences_are_refused_and_change_nothing(model: Path, fields: dict, words: str) -> None:
    good = TrainSequence(
        token_ids=[1, 2, 3], loss_mask=[0, 0, 1], logprobs=[0.0, 0.0, -1.0], weight_versions=[-1, -1, 0], reward=0.0, group=0
    )
    trainer = trainer_of(model, optimizer={"max_grad_norm": UNCLIPPED})
    before = {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}
    with pytest.raises(ValueError, match=words):
        trainer.train_step(command([replaced(good, **fields), good]))
    with pytest.raises(ValueError, match="objective='ppo'"):
        trainer.train_step(command([good], objective="ppo"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_hf_tensors())
    assert math.isfinite(trainer.train_step(command([good, replaced(good, reward=1.0)]))["loss"] or 0.0)
