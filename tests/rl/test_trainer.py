"""The trainer against Hugging Face's autograd, against itself packed in other ways, and over two processes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hf_models import dense, moe, randomise, save
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import VOCAB, command, config, folder, sequences

from pearl.config import AlgorithmOptions, RolloutOptions, WarmupOptions
from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.decoder import varlen_attend
from pearl.engine.weights.checkpoint import hf_tensors
from pearl.protocol import TrainSequence, TrainStep
from pearl.rl.advantage import group_advantages
from pearl.rl.checkpoint import is_stable, save_policy
from pearl.rl.policy_weights import fill_from_folder
from pearl.rl.trainer import NonFiniteError, Trainer

replaced = msgspec.structs.replace


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the last update's gradients."""
    return {name: parameter.grad.clone() for name, parameter in trainer.decoder.named_parameters()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], atol: float) -> None:
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def trained(
    path: Path, step: TrainStep, *, moved: bool = True, dtype: torch.dtype = torch.float64, **fields: Any
) -> tuple[Trainer, dict]:
    """A fresh trainer after one step; `moved`: the policy differs from the reference, so that the KL has a gradient."""
    trainer = Trainer(path, config(**fields), dtype=dtype)
    trainer.set_reference()
    if moved:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(5)
            for parameter in trainer.decoder.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return trainer, trainer.train_step(step)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, completed by a trainer."""
    path = folder(tmp_path_factory.mktemp("model"))
    Trainer(path, config(seed=3))
    return path


# ---------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("kind", "estimator"), [("dense", "exact"), ("dense", "k3"), ("moe", "exact")])
def test_gradient_equals_hugging_face_autograd(tmp_path: Path, kind: str, estimator: str):
    make = partial({"dense": dense, "moe": moe}[kind], 0, tie_word_embeddings=True)
    policy, reference = randomise(make()), make()
    options = AlgorithmOptions(kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.02)
    made = [replaced(s, logprobs=[value - 1.0 if value else 0.0 for value in s.logprobs]) for s in sequences(6)]
    trainer = Trainer(save(reference, tmp_path / "hf"), config(algorithm=options))
    trainer.set_reference()
    fill_from_folder(trainer.decoder, save(policy, tmp_path / "policy"))
    metrics = trainer.train_step(command(made))
    advantages = group_advantages([s.reward for s in made], [s.group for s in made], normalize_std=True)
    total = torch.zeros(())
    for s, advantage in zip(made, advantages, strict=True):
        rows = torch.tensor([t - 1 for t, on in enumerate(s.loss_mask) if on])
        ids = torch.tensor([s.token_ids])
        targets = ids[0, rows + 1]
        logp = policy(input_ids=ids, use_cache=False).logits[0, rows].log_softmax(-1)
        with torch.no_grad():
            logq = reference(input_ids=ids, use_cache=False).logits[0, rows].log_softmax(-1)
        p, q = logp.gather(1, targets[:, None])[:, 0], logq.gather(1, targets[:, None])[:, 0]
        ratio = (p - torch.tensor(s.logprobs)[rows + 1]).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        exact = torch.nn.functional.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
        kl = exact if estimator == "exact" else (q - p).exp() - (q - p) - 1
        total = total + (-surrogate + 0.3 * kl - 0.02 * torch.distributions.Categorical(logits=logp).entropy()).sum()
    loss = total / sum(sum(s.loss_mask) for s in made)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5, rel=1e-5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.grad)
    theirs = load_file(save(policy, tmp_path / "gradients") / "model.safetensors")  # under the names of folders
    scale = max(gradient.abs().max().item() for gradient in theirs.values())
    ours = dict(hf_tensors(trainer.model_config, gradients(trainer)))
    assert set(ours) <= set(theirs)
    assert_same({n: g / scale for n, g in ours.items()}, {n: theirs[n] / scale for n in ours}, atol=1e-5)


PACKINGS = {
    "one each": [[[[i] for i in range(12)]]],
    "uneven": [[[[0, 1, 2, 3, 4, 5, 6], [7], [], [8, 9, 10, 11]]]],
    "backwards": [[[list(range(11, -1, -1))]]],
    "shuffled": [[[[5, 0, 11, 3], [1, 10, 2], [9, 4, 6, 8, 7]]]],
}


@pytest.mark.parametrize("estimator", ["exact", "k3"])
def test_gradient_does_not_depend_on_packing(model: Path, estimator: str):
    options = AlgorithmOptions(kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.02)
    whole, expected = trained(model, command(sequences()), algorithm=options)
    assert max(gradient.abs().max() for gradient in gradients(whole).values()) > 1e-2
    for name, updates in PACKINGS.items():
        other, metrics = trained(model, command(sequences(), updates), algorithm=options)
        assert_same(gradients(whole), gradients(other), atol=1e-12)
        for key in ("loss", "kl", "entropy", "ratio_mean", "clip_fraction", "grad_norm", "logprob_gap"):
            assert metrics[key] == pytest.approx(expected[key], abs=1e-10), (name, key)


def test_gradient_does_not_depend_on_packing_in_fp32(model: Path):
    whole, _ = trained(model, command(sequences()), dtype=torch.float32)
    for updates in PACKINGS.values():
        other, _ = trained(model, command(sequences(), updates), dtype=torch.float32)
        assert_same(gradients(whole), gradients(other), atol=1e-6)


def test_padding_changes_neither_loss_nor_gradient(model: Path):
    def padded(s: TrainSequence) -> TrainSequence:
        more = {"token_ids": [7] * 100, "loss_mask": [0] * 100, "logprobs": [0.0] * 100, "weight_versions": [-1] * 100}
        return replaced(s, **{name: getattr(s, name) + values for name, values in more.items()})

    plain, expected = trained(model, command(sequences()))
    other, metrics = trained(model, command([padded(s) for s in sequences()]))
    assert_same(gradients(plain), gradients(other), atol=0.0)
    assert metrics["loss"] == expected["loss"] and metrics["tokens"] == expected["tokens"] + 1200


def test_only_sampled_tokens_are_trained(model: Path):
    """Log-probs, versions and later tokens of what was not sampled have no influence; the mask has."""
    made = sequences()
    plain, _ = trained(model, command(made))
    noisy = [
        replaced(s, logprobs=[v if on else 9.0 for v, on in zip(s.logprobs, s.loss_mask, strict=True)]) for s in made
    ]
    other, _ = trained(model, command(noisy))
    assert_same(gradients(plain), gradients(other), atol=0.0)
    masked, _ = trained(model, command([replaced(made[0], loss_mask=[0] * len(made[0].token_ids)), *made[1:]]))
    assert not torch.allclose(gradients(plain)["embed.weight"], gradients(masked)["embed.weight"])


# ---------------------------------------------------------------------------------------------------- degenerate data


def test_equal_rewards_have_exactly_zero_policy_gradient(model: Path):
    made = [replaced(s, reward=0.1) for s in sequences()] + [replaced(sequences(1, seed=9)[0], group=77, reward=5.0)]
    before = weights(Trainer(model, config()))
    trainer, metrics = trained(model, command(made), moved=False, dtype=torch.float32, algorithm=AlgorithmOptions())
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients(trainer).values())
    assert metrics["advantage_zero_fraction"] == 1.0 and metrics["grad_norm"] == 0.0
    assert_same(before, weights(trainer), atol=0.0)


def test_fully_masked_parts_are_no_error(model: Path):
    made = sequences()
    masked = [replaced(s, loss_mask=[0] * len(s.token_ids), group=99) for s in sequences(4, seed=1)]
    updates = [[[[12, 13], list(range(12)), []]], [[[14, 15]]]]
    trainer, metrics = trained(model, command(made + masked, updates))
    plain, _ = trained(model, command(made))
    assert_same(gradients(plain), gradients(trainer), atol=1e-12)
    assert metrics["updates"] == 1
    assert all(value is None or math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("objective", ["policy", "sft"])
def test_a_step_with_nothing_to_train_changes_nothing(model: Path, objective: str):
    made = [replaced(s, loss_mask=[0] * len(s.token_ids)) for s in sequences()]
    before = weights(Trainer(model, config()))
    trainer, metrics = trained(model, command(made, objective=objective), moved=False, dtype=torch.float32)
    assert metrics["loss"] == 0.0 and metrics["trained_tokens"] == 0
    assert_same(before, weights(trainer), atol=0.0)


@pytest.mark.parametrize("objective", ["policy", "sft"])
def test_a_loss_that_is_not_finite_changes_no_weight(model: Path, objective: str):
    trainer = Trainer(model, config())
    trainer.set_reference()
    made = sequences()
    worst = [replaced(s, reward=-9.0 if i == 0 else s.reward) for i, s in enumerate(made)]
    worst[0] = replaced(worst[0], logprobs=[-200.0 if on else 0.0 for on in worst[0].loss_mask])
    half = [[[list(range(4, 12))]], [[[0, 1, 2, 3]]]]
    good = trainer.train_step(command(made, half[:1], objective=objective))
    assert math.isfinite(good["loss"])
    if objective == "sft":
        trainer.decoder.get_parameter("norm.weight").data.fill_(math.inf)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=rf"step 17, update 0 of 1 \({objective}\): loss=\S+, grad_norm=\S+; the update"):
        trainer.train_step(command(worst, half[1:], objective=objective, step=17))
    after = weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bad_commands_are_refused_before_anything_changes(model: Path):
    trainer = Trainer(model, config())
    with pytest.raises(ValueError, match=r"kl_coef=0.3: set_reference\(\) must come before"):
        trainer.train_step(command(sequences()))
    trainer.set_reference()
    before = weights(trainer)
    with pytest.raises(ValueError, match="has sequence 12"):
        trainer.train_step(command(sequences(), [[[[0]]], [[[12]]]]))
    assert_same(before, weights(trainer), atol=0.0)


# ---------------------------------------------------------------------------------------------------- what is measured


def own_logprobs(trainer: Trainer, made: list[TrainSequence], off: float, version: int = 0) -> list[TrainSequence]:
    """The sequences with the trainer's present log-probs plus `off`, computed one sequence at a time by a second way."""
    out = []
    for s in made:
        ids = torch.tensor(s.token_ids)
        batch = PackedBatch(positions_T=torch.arange(len(ids)), lengths=(len(ids),))
        with torch.no_grad():
            attend = varlen_attend(ReferenceKernels(), batch, trainer.model_config)
            logp = trainer.decoder.logits(trainer.decoder(ids, batch.positions_T, attend)).log_softmax(-1)
        values = [logp[t - 1, s.token_ids[t]].item() + off if on else 0.0 for t, on in enumerate(s.loss_mask)]
        out.append(replaced(s, logprobs=values, weight_versions=[version if on else -1 for on in s.loss_mask]))
    return out


@pytest.mark.parametrize("updates", [None, [[[[0, 1, 2]]], [[[3, 4], [5]]], [[[6, 7, 8, 9, 10, 11]]]]])
def test_logprob_gap_is_of_the_weights_before_the_first_update(model: Path, updates: list | None):
    trainer = Trainer(model, config(optimizer={"lr": 0.05}))
    trainer.set_reference()
    made = own_logprobs(trainer, sequences(), off=0.01)
    metrics = trainer.train_step(command(made, updates))
    assert metrics["logprob_gap"] == pytest.approx(0.01, abs=1e-5)
    assert metrics["policy_shift"] is None
    # Each update's tokens count: the mean is over all of them, not over those of the first update.
    trainer = Trainer(model, config(optimizer={"lr": 0.05}))
    trainer.set_reference()
    def off(index: int, s: TrainSequence) -> list[float]:
        return [v + 0.1 * (index > 4) * on for v, on in zip(s.logprobs, s.loss_mask, strict=True)]

    parts = [replaced(s, logprobs=off(index, s)) for index, s in enumerate(made)]
    counts = [sum(s.loss_mask) for s in made]
    expected = 0.01 + 0.1 * sum(counts[5:]) / sum(counts)
    assert trainer.train_step(command(parts, updates))["logprob_gap"] == pytest.approx(expected, abs=1e-5)
    if updates:  # while the ratio is of the present policy, which the large rate has moved
        assert metrics["log_ratio_abs"] > 0.02


def test_stale_tokens_count_as_policy_shift(model: Path):
    trainer = Trainer(model, config())
    trainer.set_reference()
    fresh = own_logprobs(trainer, sequences(4), off=0.02, version=5)
    stale = own_logprobs(trainer, sequences(4, seed=1), off=0.3, version=4)
    first = trainer.train_step(command(stale, weight_version=5))
    assert first["logprob_gap"] is None and first["policy_shift"] == pytest.approx(0.3, abs=1e-4)
    trainer = Trainer(model, config())
    trainer.set_reference()
    # A sequence with one stale token is not fresh: its other tokens were computed on the old version's KV.
    one = fresh[0].loss_mask.index(1)
    mixed = replaced(fresh[0], weight_versions=[4 if t == one else v for t, v in enumerate(fresh[0].weight_versions)])
    both = trainer.train_step(command([mixed, *fresh[1:]], weight_version=5))
    assert both["logprob_gap"] == pytest.approx(0.02, abs=1e-4) and both["policy_shift"] == pytest.approx(0.02, abs=1e-4)


@pytest.mark.parametrize(("off", "weight", "capped"), [(0.2, math.exp(-0.2), 0), (-0.3, math.exp(0.3), 0), (-1.5, 2.0, 1)])
def test_stale_tokens_are_weighted_by_their_importance(model: Path, off: float, weight: float, capped: int):
    """With log-probs off by a constant, the gradient is the on-policy one times the weight, and is not clipped."""
    surrogate = {"algorithm": AlgorithmOptions(importance_cap=2.0), "dtype": torch.float64}
    start = Trainer(model, config(algorithm=AlgorithmOptions(importance_cap=2.0)), dtype=torch.float64)
    fresh = own_logprobs(start, sequences(), off=0.0, version=5)
    stale = own_logprobs(start, sequences(), off=off, version=4)
    on_policy, expected = trained(model, command(fresh, weight_version=5), moved=False, **surrogate)
    corrected, metrics = trained(model, command(stale, weight_version=5), moved=False, **surrogate)
    assert_same({n: weight * g for n, g in gradients(on_policy).items()}, gradients(corrected), atol=1e-6)
    assert metrics["importance_weight_mean"] == pytest.approx(weight, abs=1e-5) and metrics["importance_capped"] == capped
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["clip_fraction"] == 0.0
    assert expected["importance_weight_mean"] is None and expected["importance_capped"] is None


def test_correction_refers_to_the_start_of_the_step_in_every_update(model: Path):
    """Later updates' ratios are to the policy that the step began with: nothing moves at a rate of next to zero."""
    made = own_logprobs(Trainer(model, config()), sequences(), off=0.25, version=4)
    three = [[[[0, 1, 2]]], [[[3, 4], [5]]], [[[6, 7, 8, 9, 10, 11]]]]
    still = {"lr": 1e-12}
    _, metrics = trained(model, command(made, three, weight_version=5), moved=False, optimizer=still, dtype=torch.float32)
    assert metrics["log_ratio_abs"] < 1e-6 and metrics["importance_weight_mean"] == pytest.approx(math.exp(-0.25), abs=1e-4)
    _, fresh = trained(model, command(made, three, weight_version=4), moved=False, optimizer=still, dtype=torch.float32)
    assert fresh["log_ratio_abs"] == pytest.approx(0.25, abs=1e-4)
    _, moving = trained(model, command(made, three, weight_version=5), moved=False, optimizer={"lr": 0.05}, dtype=torch.float32)
    assert moving["log_ratio_abs"] > 0.02
    assert moving["importance_weight_mean"] == pytest.approx(math.exp(-0.25), abs=1e-4)


def test_fresh_sequences_are_not_touched_by_stale_ones(model: Path):
    """In a mixed batch each sequence's share of the gradient is what it is alone, up to the divisor."""
    start = Trainer(model, config(algorithm=AlgorithmOptions(normalize_std=False)), dtype=torch.float64)
    made = own_logprobs(start, sequences(8), off=0.2, version=5)
    mixed = [*made[:4], *own_logprobs(start, sequences(8), off=0.2, version=4)[4:]]
    options = {"algorithm": AlgorithmOptions(normalize_std=False), "moved": False}
    counts = [sum(s.loss_mask) for s in made]
    parts = []
    for chosen in (mixed[:4], mixed[4:]):
        share = sum(sum(s.loss_mask) for s in chosen) / sum(counts)
        trainer, _ = trained(model, command(chosen, weight_version=5), **options)
        parts.append({name: share * gradient for name, gradient in gradients(trainer).items()})
    both, metrics = trained(model, command(mixed, weight_version=5), **options)
    assert_same({name: parts[0][name] + parts[1][name] for name in parts[0]}, gradients(both), atol=1e-12)
    assert metrics["importance_weight_mean"] == pytest.approx(math.exp(-0.2), abs=1e-5)


def test_kl_is_zero_at_the_reference_and_grows(model: Path):
    trainer = Trainer(model, config(optimizer={"lr": 0.01}))
    trainer.set_reference()
    first, second = (trainer.train_step(command(sequences(seed=seed))) for seed in (0, 1))
    assert abs(first["kl"]) < 1e-6 < 1e-4 < second["kl"]
    trainer.set_reference()
    assert abs(trainer.train_step(command(sequences()))["kl"]) < 1e-6
    _, without = trained(model, command(sequences()), algorithm=AlgorithmOptions())
    assert without["kl"] is None


def test_temperature_of_the_rollout_is_the_trainers(model: Path):
    hot = {"rollout": RolloutOptions(temperature=1.7), "algorithm": AlgorithmOptions()}
    trainer = Trainer(model, config(**hot), dtype=torch.float64)
    with torch.no_grad():
        trainer.decoder.embed.weight.mul_(30.0)
        made = own_logprobs(trainer, sequences(), off=0.0)
    assert trainer.train_step(command(made))["logprob_gap"] > 1e-3


def test_cut_distributions_warn_and_take_the_ratio_to_the_start_of_the_step(model: Path):
    made = [replaced(s, logprobs=[v / 3 for v in s.logprobs]) for s in sequences()]
    with pytest.warns(UserWarning, match=r"rollout.top_p=0.8.*do not correct for staleness"):
        trainer = Trainer(model, config(rollout=RolloutOptions(top_p=0.8), optimizer={"lr": 1e-12}))
    trainer.set_reference()
    metrics = trainer.train_step(command(made, [[[[0, 1, 2, 3]]], [[[4, 5, 6, 7], [8, 9, 10, 11]]]]))
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6) and metrics["clip_fraction"] == 0.0
    assert metrics["logprob_gap"] > 0.5
    assert max(gradient.abs().max() for gradient in gradients(trainer).values()) > 1e-3


# ---------------------------------------------------------------------------------------------------- learning


def test_schedule_moves_once_per_step_whatever_the_updates(model: Path):
    options = {"lr": 0.01, "schedule": "linear", "warmup_steps": 2}
    trainer = Trainer(model, config(optimizer=options))
    trainer.set_reference()
    four = [[[[0, 1, 2]]], [[[3, 4, 5]]], [[[6, 7, 8]]], [[[9, 10, 11]]]]
    rates = [trainer.train_step(command(sequences(), four))["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01 * 7 / 8])
    assert trainer.train_step(command(sequences(), four, objective="sft"))["lr"] == config().warmup.lr
    assert trainer.train_step(command(sequences(), four))["lr"] == pytest.approx(0.01 * 6 / 8)
    trainer.set_reference()
    assert trainer.train_step(command(sequences(), four))["lr"] == pytest.approx(0.005)


def test_set_reference_starts_a_fresh_optimizer(model: Path):
    """Momentum of the steps before would move the weights even where the gradient is zero."""
    flat = [replaced(s, reward=1.0) for s in sequences()]
    trainer = Trainer(model, config(algorithm=AlgorithmOptions()))
    trainer.train_step(command(sequences()))
    before = weights(trainer)
    trainer.train_step(command(flat))
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    trainer.set_reference()
    before = weights(trainer)
    trainer.train_step(command(flat))
    assert_same(before, weights(trainer), atol=0.0)


def test_gradient_is_clipped_by_its_global_norm(model: Path):
    _, loose = trained(model, command(sequences()))
    trainer, metrics = trained(model, command(sequences()), optimizer={"max_grad_norm": loose["grad_norm"] / 4})
    assert metrics["grad_norm"] == pytest.approx(loose["grad_norm"])
    clipped = torch.cat([gradient.flatten() for gradient in gradients(trainer).values()]).norm()
    assert clipped.item() == pytest.approx(loose["grad_norm"] / 4)


def test_sft_overfits_a_few_sequences(model: Path):
    trainer = Trainer(model, config(warmup=WarmupOptions(lr=0.02), optimizer={"max_grad_norm": 1.0}))
    made = sequences(3, longest=14)
    losses = [trainer.train_step(command(made, objective="sft"))["loss"] for _ in range(80)]
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert losses[-1] < 0.02


def test_reward_makes_actions_likelier(model: Path):
    """Eight actions, one rewarded: with on-policy sampling its probability rises from 1/8 of the mass towards 1."""
    trainer = Trainer(model, config(algorithm=AlgorithmOptions(), optimizer={"lr": 0.02, "max_grad_norm": 1.0}))
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for number in range(25):
        start = TrainSequence(
            token_ids=[1, 2, 0], loss_mask=[0, 0, 1], logprobs=[0.0] * 3, weight_versions=[-1, -1, number], reward=0.0, group=0
        )
        choices = [own_logprobs(trainer, [replaced(start, token_ids=[1, 2, token])], 0.0, number)[0] for token in range(VOCAB)]
        probabilities = torch.tensor([choice.logprobs[2] for choice in choices]).exp()
        drawn = torch.multinomial(probabilities, 64, replacement=True, generator=generator).tolist()
        made = [replaced(choices[token], reward=float(token % 8 == 3), group=i // 8) for i, token in enumerate(drawn)]
        rewards.append(sum(s.reward for s in made) / 64)
        trainer.train_step(command(made, weight_version=number))
    assert rewards[0] < 0.3 and min(rewards[-3:]) > 0.9


# ---------------------------------------------------------------------------------------------------- folders


def test_random_weights_are_seeded_and_written(tmp_path: Path):
    path = folder(tmp_path / "model")
    first = weights(Trainer(path, config(seed=1)))
    assert list(path.glob("*.safetensors"))
    assert_same(first, weights(Trainer(path, config(seed=2))), atol=0.0)
    other = weights(Trainer(folder(tmp_path / "other"), config(seed=2)))
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_save_and_load(model: Path, tmp_path: Path):
    trainer, _ = trained(model, command(sequences()), dtype=torch.float32)
    trainer.save(tmp_path / "step-1")
    assert is_stable(tmp_path / "step-1")
    assert_same(weights(trainer), weights(Trainer(tmp_path / "step-1", config())), atol=0.0)
    trainer.train_step(command(sequences(seed=1)))
    trainer.save(tmp_path / "step-1")
    assert_same(weights(trainer), weights(Trainer(tmp_path / "step-1", config())), atol=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_failing_save_leaves_the_old_folder(model: Path, tmp_path: Path):
    def failing(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    trainer = Trainer(model, config())
    trainer.save(tmp_path / "policy")
    with pytest.raises(OSError, match="no space left"):
        save_policy(failing, tmp_path / "policy")
    assert is_stable(tmp_path / "policy")
    assert_same(weights(trainer), weights(Trainer(tmp_path / "policy", config())), atol=0.0)
    trainer.save(tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
