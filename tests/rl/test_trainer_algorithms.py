"""Every algorithm in the trainer: gradients that no way of cutting an update changes, credit by hand, the critic, options."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_cases import command, config, folder, sequences

from pearl.config import AlgorithmOptions, TrainerOptions, resolve
from pearl.protocol import TrainSequence, TrainStep
from pearl.rl.advantage import EPSILON
from pearl.rl.credit import assign
from pearl.rl.policy_pass import loss_of, terms_of
from pearl.rl.returns import token_gae, token_rewards
from pearl.rl.trainer import NonFiniteError, Trainer

replaced = msgspec.structs.replace

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.3, "entropy_coef": 0.02},
    "k1 in the rewards": {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "rloo, exact in the rewards": {"name": "rloo", "kl_coef": 0.3, "kl_in": "reward", "aggregation": "sequence_sum"},
    "reinforce++": {"name": "reinforce++", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2"},
    "ppo": {"name": "ppo", "kl_coef": 0.1, "gamma": 0.9, "dual_clip": 3.0},
    "ppo, trunk": {"name": "ppo", "critic": "trunk", "value_coef": 0.7, "kl_coef": 0.1, "gamma": 0.9},
    "ppo, turns": {"name": "ppo", "gae_level": "turn", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "gspo": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.3, "kl_coef": 0.2, "kl_estimator": "k2"},
    "cispo": {"name": "cispo", "aggregation": "fixed", "loss_divisor": 30},
    "sequence importance": {"importance_level": "sequence", "importance_cap": 2.0, "importance_of": "all"},
    "masked": {"importance_rule": "mask", "importance_cap": 1.4, "importance_of": "all", "aggregation": "sequence_mean"},
}


def with_turns(made: list[TrainSequence], seed: int = 0) -> list[TrainSequence]:
    """Each sequence's trained tokens in turns of one to three, with rewards that add up to the sequence's."""
    rng = np.random.default_rng(seed)
    done = []
    for s in made:
        left, turns = sum(s.loss_mask), []
        while left:
            turns.append((min(left, int(rng.integers(1, 4))), float(rng.normal())))
            left -= turns[-1][0]
        done.append(replaced(s, turns=turns, reward=sum(reward for _, reward in turns)))
    return done


def fresh(
    path: Path, options: dict[str, Any], dtype: torch.dtype = torch.float64, trainer: TrainerOptions | None = None
) -> Trainer:
    """A trainer whose policy, reference and critic all differ."""
    chosen = config(algorithm=AlgorithmOptions(**options), trainer=trainer or TrainerOptions())
    made = Trainer(path, chosen, dtype=dtype)
    made.set_reference()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for model in (made.decoder, *([made._critic] if made._critic else [])):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return made


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    models = {"policy": trainer.decoder} | ({"critic": trainer._critic} if trainer._critic else {})
    return {
        f"{model}.{name}": parameter.grad.clone()
        for model, module in models.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], atol: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder(tmp_path_factory.mktemp("model"))
    Trainer(path, config(seed=3))
    return path


def step_of(updates: list | None = None) -> TrainStep:
    made = with_turns(sequences())
    stale = [replaced(s, weight_versions=[v - (v >= 0) for v in s.weight_versions]) for s in made[9:]]
    return command([*made[:9], *stale], updates)


WHOLE = [[[list(range(7))]], [[[7, 8, 9, 10, 11]]]]
CUT = [[[[6, 2], [0], [], [5, 1, 3, 4]]], [[[11, 7], [10, 9, 8]]]]


@pytest.mark.parametrize("case", CASES)
def test_gradient_does_not_depend_on_the_cut(model: Path, case: str):
    trainers = fresh(model, CASES[case]), fresh(model, CASES[case], trainer=TrainerOptions(logits_rows=3))
    first, second = (trainer.train_step(step_of(cut)) for trainer, cut in zip(trainers, (WHOLE, CUT), strict=True))
    assert max(tensor.abs().max() for tensor in gradients(trainers[0]).values()) > 1e-4
    assert_same(gradients(trainers[0]), gradients(trainers[1]), atol=1e-10)
    for key, value in first.items():
        if not key.endswith("_s"):
            assert value == pytest.approx(second[key], abs=1e-8), key


@pytest.mark.parametrize("case", CASES)
def test_gradient_does_not_depend_on_the_cut_in_fp32(model: Path, case: str):
    one = [[[list(range(12))]]]
    trainers = [fresh(model, CASES[case], torch.float32) for _ in range(2)]
    for trainer, cut in zip(trainers, (one, [[[[3, 2, 1], [0, 11, 7], [5, 6, 4, 8], [10, 9]]]]), strict=True):
        trainer.train_step(step_of(cut))
    found = [gradients(trainer) for trainer in trainers]
    scale = max(1.0, *(float(tensor.abs().max()) for tensor in found[0].values()))
    assert_same({n: g / scale for n, g in found[0].items()}, {n: g / scale for n, g in found[1].items()}, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11), max_size=4))
def test_any_packing_and_order(model: Path, order: list[int], cuts: set[int]):
    edges = [0, *sorted(cuts), 12]
    packed = [[[[*order[a:b]] for a, b in itertools.pairwise(edges)]]]
    for case in ("ppo, turns", "gspo"):
        whole, other = fresh(model, CASES[case]), fresh(model, CASES[case])
        whole.train_step(step_of())
        other.train_step(step_of(packed))
        assert_same(gradients(whole), gradients(other), atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_each_option_changes_the_gradient(model: Path, case: str):
    """Otherwise the tests above would say nothing of it."""
    ours, plain = fresh(model, CASES[case]), fresh(model, {})
    ours.train_step(step_of())
    plain.train_step(step_of())
    found, expected = gradients(ours)["policy.norm.weight"], gradients(plain)["policy.norm.weight"]
    assert (found - expected).abs().max() > 1e-6


# ---------------------------------------------------------------------------------------------------- credit


def advantages_of(trainer: Trainer, step: TrainStep) -> dict[str, float | None]:
    return {name: value for name, value in trainer.train_step(step).items() if name.startswith("advantage")}


def test_reinforce_plus_plus_normalises_over_the_batch(model: Path):
    made = [replaced(s, reward=float(index % 5)) for index, s in enumerate(sequences())]
    counts, rewards = np.array([sum(s.loss_mask) for s in made]), np.array([s.reward for s in made])
    mean = (counts * rewards).sum() / counts.sum()
    std = math.sqrt((counts * (rewards - mean) ** 2).sum() / counts.sum())
    found = advantages_of(fresh(model, {"name": "reinforce++"}), command(made))
    expected = (rewards - mean) / (std + EPSILON)
    assert found["advantage_max"] == pytest.approx(expected.max())
    assert found["advantage_abs_mean"] == pytest.approx(abs(expected).mean())


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++", "gspo", "cispo"])
def test_equal_rewards_move_nothing(model: Path, name: str):
    made = [replaced(s, reward=0.1) for s in sequences()]
    metrics = fresh(model, {"name": name}).train_step(command(made, CUT))
    assert metrics["grad_norm"] == 0.0 and metrics["advantage_zero_fraction"] == 1.0


def test_kl_comes_off_the_rewards(model: Path):
    """With k1, what siblings are compared by is the reward less the log-ratio of the whole sequence to the reference."""
    options = {"name": "rloo", "kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    made = sequences()
    trainer = fresh(model, options)
    shift = []
    for s in made:
        logps = []
        for decoder in (trainer.decoder, trainer._reference):
            batch = trainer._build(trainer._begin(command([s])), 0, [0])
            logps.append(decoder.run(batch, lambda h, w: (h @ w.T).log_softmax(-1)).detach())
        rows = torch.arange(len(batch.targets_N))
        shift.append(float((logps[0] - logps[1])[rows, batch.targets_N].sum()))
    fixed = [replaced(s, reward=s.reward - 0.5 * kl) for s, kl in zip(made, shift, strict=True)]
    plain = fresh(model, {"name": "rloo"})
    expected, found = plain.train_step(command(fixed)), trainer.train_step(command(made))
    assert_same(gradients(plain), gradients(trainer), atol=1e-10)
    assert found["kl"] == pytest.approx(sum(shift) / sum(sum(s.loss_mask) for s in made))
    assert found["advantage_max"] == pytest.approx(expected["advantage_max"])


def test_ppo_gradients_by_hand(model: Path):
    """GAE of the critic's values, whitened over the batch; the critic's loss is half the mean squared error."""
    options = {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8}
    made = with_turns(sequences())
    trainer, values, pairs = fresh(model, options), [], []
    critic = trainer._critic
    for s in made:
        batch = trainer._build(trainer._begin(command([s])), 0, [0])
        values.append(critic.values(batch))
        rewards = token_rewards(s.turns, s.reward, np.zeros(len(values[-1])))
        pairs.append(token_gae(rewards, values[-1].detach().numpy(), 0.9, 0.8))
    returns = torch.from_numpy(np.concatenate([pair[1] for pair in pairs]))
    loss = 0.5 * (torch.cat(values) - returns).square().mean()
    names = [name for name, _ in critic.named_parameters()]
    expected = dict(zip(names, torch.autograd.grad(loss, list(critic.parameters())), strict=True))
    metrics = trainer.train_step(command(made))
    assert metrics["value_loss"] == pytest.approx(loss.item())
    for name, gradient in expected.items():
        torch.testing.assert_close(critic.get_parameter(name).grad, gradient, atol=1e-12, rtol=0)
    advantages = np.concatenate([pair[0] for pair in pairs])
    whitened = (advantages - advantages.mean()) / (advantages.std() + EPSILON)
    means = [part.mean() for part in np.split(whitened, np.cumsum([len(pair[0]) for pair in pairs])[:-1])]
    assert metrics["advantage_max"] == pytest.approx(max(means))
    known = torch.cat(values).detach()
    assert metrics["explained_variance"] == pytest.approx(float(1 - (returns - known).square().mean() / returns.var(False)))


def test_gradients_with_a_head_on_the_trunk_by_hand(model: Path):
    """Those of the policy's loss, as a policy without the head has it, and of the weighed loss of its values."""
    options = {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8}
    step = command(with_turns(sequences()))
    trainer = fresh(model, options | {"critic": "trunk", "value_coef": 0.7})
    batch = trainer._build(trainer._begin(step), 0, list(range(12)))
    values = trainer.decoder.run(batch, lambda hidden, _: trainer.decoder.values_of(hidden))
    batch = trainer._scored(trainer._begin(step), batch)
    torch.testing.assert_close(batch.values_N, values.detach(), atol=1e-12, rtol=0)
    [[credited]] = assign(trainer._begin(step), [[batch]], trainer.algorithm, trainer.comm)
    terms, _ = terms_of(trainer.decoder, batch, trainer.config)
    ours = loss_of(terms, credited, trainer.algorithm, None, engine_ratio=True).loss
    loss = ours + 0.7 * 0.5 * (values - credited.returns_N).square().mean()
    names, parameters = zip(*trainer.decoder.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    metrics = trainer.train_step(step)
    assert float(expected["value_head.weight"].abs().max()) > 1e-3
    for name in names:
        torch.testing.assert_close(trainer.decoder.get_parameter(name).grad, expected[name], atol=1e-12, rtol=0)
    assert metrics["value_loss"] == pytest.approx(float(0.5 * (values.detach() - credited.returns_N).square().mean()))
    assert metrics["critic_s"] == 0.0 and "critic_grad_norm" not in metrics


def test_a_head_on_the_trunk_is_in_states_and_in_no_folder(model: Path, tmp_path: Path):
    options = config(algorithm=AlgorithmOptions(name="ppo", critic="trunk"))
    trainer = Trainer(model, options)
    trainer.set_reference()
    trainer.train_step(command(with_turns(sequences()), objective="sft"))
    trainer.train_step(command(with_turns(sequences())))
    head = trainer.decoder.get_parameter("value_head.weight")
    assert float(head.abs().max()) > 0
    trainer.save(tmp_path / "policy")
    assert not any("value" in name for name, _ in trainer.named_hf_tensors())
    Trainer(tmp_path / "policy", config())
    trainer.save_state(tmp_path / "state")
    again = Trainer(model, options)
    again.load_state(tmp_path / "state")
    assert torch.equal(again.decoder.get_parameter("value_head.weight"), head)
    first, second = (one.train_step(command(with_turns(sequences(seed=4)))) for one in (trainer, again))
    assert first["value_loss"] == second["value_loss"] and torch.equal(again.decoder.get_parameter("value_head.weight"), head)
    with pytest.raises(ValueError, match="algorithm.critic: the state was written with a value head"):
        Trainer(model, config(algorithm=AlgorithmOptions(name="ppo"))).load_state(tmp_path / "state")
    trainer.set_reference()
    assert not head.any()


def test_the_critic_learns_what_trajectories_are_worth(model: Path):
    """The reward is told by the first token; a fresh critic explains nothing, a taught one nearly all."""
    options = config(
        algorithm=AlgorithmOptions(name="ppo", critic_lr=0.01), optimizer={"lr": 1e-6, "max_grad_norm": 1.0}, max_steps=100
    )
    trainer = Trainer(model, options)
    trainer.set_reference()
    made = [
        replaced(s, token_ids=[index % 2, *s.token_ids[1:]], reward=float(index % 2)) for index, s in enumerate(sequences(16))
    ]
    explained = [trainer.train_step(command(made))["explained_variance"] for _ in range(40)]
    assert explained[0] <= 0.0 and explained[-1] > 0.9


def test_a_policy_step_of_ppo_needs_a_critic(model: Path):
    with pytest.raises(ValueError, match="algorithm.name=ppo: set_reference"):
        Trainer(model, config(algorithm=AlgorithmOptions(name="ppo"))).train_step(command(sequences()))


def test_a_critic_that_is_not_finite_changes_nothing(model: Path):
    """Not even the policy, whose own gradients are finite."""
    trainer = fresh(model, {"name": "ppo"})
    trainer._critic.get_parameter("norm.weight").data.fill_(1e200)
    before = {name: tensor.clone() for name, tensor in trainer._state().items()}
    with pytest.raises(NonFiniteError, match="the update was not applied"):
        trainer.train_step(step_of())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._state().items() if name in before)


def test_turns_that_do_not_fit_are_refused(model: Path):
    made = with_turns(sequences())
    with pytest.raises(ValueError, match=r"sequences\[1\].turns has"):
        fresh(model, {"name": "ppo"}).train_step(command([made[0], replaced(made[1], turns=[(1, 0.0)] * 99), *made[2:]]))
    with pytest.raises(ValueError, match="turns has a reward that is not finite"):
        turns = [(count, math.inf) for count, _ in made[0].turns]
        fresh(model, {"name": "ppo"}).train_step(command([replaced(made[0], turns=turns), *made[1:]]))


def test_state_with_a_critic_goes_on_bit_for_bit(model: Path, tmp_path: Path):
    options = {"name": "ppo", "kl_coef": 0.1}
    trainer = fresh(model, options, torch.float32)
    trainer.train_step(step_of(WHOLE))
    trainer.save_state(tmp_path / "state")
    other = Trainer(model, config(algorithm=AlgorithmOptions(**options)))
    other.load_state(tmp_path / "state")
    for seed in (1, 2):
        again = command(with_turns(sequences(seed=seed)), CUT)
        first, second = trainer.train_step(again), other.train_step(again)
        assert {k: v for k, v in first.items() if not k.endswith("_s")} == {
            k: v for k, v in second.items() if not k.endswith("_s")
        }
    for name, tensor in trainer._state().items():
        assert torch.equal(tensor, other._state()[name]), name


def test_a_state_without_a_critic_is_taken_over_by_ppo(model: Path, tmp_path: Path):
    trainer = fresh(model, {}, torch.float32)
    trainer.train_step(step_of())
    trainer.save_state(tmp_path / "state")
    other = Trainer(model, config(algorithm=AlgorithmOptions(name="ppo")))
    other.load_state(tmp_path / "state")
    assert math.isfinite(other.train_step(step_of())["value_loss"])


# ---------------------------------------------------------------------------------------------------- gaps


def test_the_gaps_between_engine_and_trainer_by_hand(model: Path):
    made = sequences()
    trainer = fresh(model, {})
    own = []
    for index, s in enumerate(made):
        batch = trainer._build(trainer._begin(command([s])), 0, [0])
        logp = trainer.decoder.run(batch, lambda h, w: (h @ w.T).log_softmax(-1)).detach()
        logp = logp[torch.arange(len(batch.targets_N)), batch.targets_N].tolist()
        off = [0.01 * index if place % 2 else -0.03 for place in range(len(logp))]
        values = iter(a - b for a, b in zip(logp, off, strict=True))
        own.append((replaced(s, logprobs=[next(values) if on else 0.0 for on in s.loss_mask]), np.array(off)))
    offs = np.concatenate([off for _, off in own])
    metrics = trainer.train_step(command([s for s, _ in own], CUT))
    assert metrics["logprob_gap"] == pytest.approx(abs(offs).mean())
    assert metrics["logprob_gap_max"] == pytest.approx(abs(offs).max())
    assert metrics["logprob_gap_k3"] == pytest.approx((np.exp(offs) - offs - 1).mean())
    assert metrics["logprob_gap_sequence"] == pytest.approx(np.mean([abs(off.sum()) for _, off in own]))


# ---------------------------------------------------------------------------------------------------- trainer options


@pytest.mark.parametrize("case", ["grpo", "ppo"])
def test_only_the_last_layers_are_trained(model: Path, case: str):
    whole, last = (fresh(model, CASES[case], trainer=TrainerOptions(train_layers=count)) for count in (None, 1))
    for theirs, ours in zip(whole.decoder.parameters(), last.decoder.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    before = {name: parameter.clone() for name, parameter in last.decoder.named_parameters()}
    for trainer in (whole, last):
        if trainer._critic is not None:
            trainer._critic.begin(trainer.decoder)
        trainer.train_step(step_of(WHOLE[:1]))
    found, expected = gradients(last), gradients(whole)
    names = {name for name in expected if ".layers.1." in name or (".norm.weight" in name and "layers" not in name)}
    names |= {name for name in expected if "value_head" in name}
    assert set(found) == names and len(names) < len(expected)
    assert_same(found, {name: expected[name] for name in names}, atol=1e-12)
    for name, parameter in last.decoder.named_parameters():
        moved = f"policy.{name}" in names
        assert torch.equal(parameter, before[name]) != moved, name


def test_more_layers_than_there_are(model: Path):
    many = config(trainer=TrainerOptions(train_layers=3))
    with pytest.raises(ValueError, match="trainer.train_layers=3: must be at most the model's num_layers=2"):
        Trainer(model, many)
    with pytest.raises(ValueError, match="trainer.train_layers=3: must be at most model.num_layers=2"):
        resolve(many, 1)


def test_recomputed_layers_change_no_bit(model: Path):
    plain, frugal = (fresh(model, {}, torch.float32, TrainerOptions(checkpoint_layers=on)) for on in (False, True))
    kept = []
    for trainer in (plain, frugal):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            trainer.train_step(step_of())
        kept.append(sum(sizes))
    assert all(torch.equal(gradient, gradients(frugal)[name]) for name, gradient in gradients(plain).items())
    assert kept[1] < kept[0] / 2


def test_bf16_computes_near_fp32_and_keeps_fp32(model: Path):
    made = command(with_turns(sequences()))
    for case in ("grpo", "ppo"):
        wide, narrow = (
            fresh(model, CASES[case], torch.float32, TrainerOptions(compute_dtype=dtype, checkpoint_layers=dtype != "float32"))
            for dtype in ("float32", "bfloat16")
        )
        first, second = wide.train_step(made), narrow.train_step(made)
        assert second["loss"] == pytest.approx(first["loss"], abs=0.03) and second["loss"] != first["loss"]
        assert {tensor.dtype for tensor in narrow._state().values()} == {torch.float32}
        theirs, ours = (torch.cat([g.flatten() for g in gradients(trainer).values()]) for trainer in (wide, narrow))
        assert torch.nn.functional.cosine_similarity(theirs, ours, dim=0) > 0.99


def test_sleeping_frees_everything_and_changes_nothing(model: Path):
    trainer, other = (fresh(model, CASES["ppo"], torch.float32) for _ in range(2))
    for number in range(3):
        again = command(with_turns(sequences(seed=number)), CUT)
        first, second = trainer.train_step(again), other.train_step(again)
        assert {k: v for k, v in first.items() if not k.endswith("_s")} == {
            k: v for k, v in second.items() if not k.endswith("_s")
        }
        before = {name: tensor.clone() for name, tensor in trainer._state().items()}
        state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
        state = trainer._state()
        assert trainer.sleep() > state_bytes  # the gradients too
        for call in (trainer.set_reference, trainer.named_hf_tensors, trainer.sleep, partial(trainer.train_step, again)):
            with pytest.raises(RuntimeError, match="the trainer sleeps"):
                call()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in state.values())
        trainer.wake()
        trainer.wake()
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._state().items())
