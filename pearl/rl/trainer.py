"""The trainer of one rank: carries out TrainStep commands on the policy, or its share of it, exactly as their plan says.

Owns the policy's fp32 weights, the reference, the critic, the optimizers and the numbers a step is judged by. It does not
know where sequences come from, who serves the weights, how a plan was made or what an algorithm's formulae are.
Invariants: the gradient of an update is the same whatever the packing, the micro-batches and the number of ranks; an update
whose loss or gradient is not finite, the policy's or the critic's, changes no weight, on any rank. A rank alone holds
the policy as one flat vector; several hold it in shares (`sharding.py`), and every pass is then a collective: all of them
run the same passes, over a token that is not trained where a rank's share of the data is empty.

Ratios and log-probs are of `softmax(logits / rollout.temperature)`, which is what the engine reports unless top_p or top_k
cut the distribution before drawing; then the ratio is taken to the policy as the step begins instead (a warning says so).
Tokens that an older policy sampled are corrected by their importance (`policy_loss`). The log-probs under the policy that
the step begins with come from the first update's own forward pass, and for later updates from one before the first update,
which also measures `drift`: correcting costs no pass. KL in the rewards and a critic need that pass for all updates.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pearl.config import Config
from pearl.engine.comm.communicator import Communicator, SingleCommunicator
from pearl.engine.kernels.narrow import NarrowKernels
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import from_folder
from pearl.engine.models.params import param_specs
from pearl.engine.weights.checkpoint import save_folder
from pearl.protocol import TrainStep
from pearl.rl import policy_weights
from pearl.rl.algorithms import algorithm_of
from pearl.rl.asleep import Asleep
from pearl.rl.checkpoint import save_policy
from pearl.rl.credit import assign, greatest, needs_scores, sequence_advantages
from pearl.rl.critic import CRITIC_SUMS, ActorCritic, Critic, critic_metrics, joint_loss
from pearl.rl.loss import POLICY_METRICS, SFT_METRICS, sft_loss
from pearl.rl.micro_batch import MicroBatch, build, check
from pearl.rl.optimizer import FlatParameters, Parameters, adamw, clip_, learning_rate, moments, prime, update, updates_made
from pearl.rl.policy_pass import loss_of, referred, scored, terms_of
from pearl.rl.sharding import ShardedParameters, mesh_of, own_rows, shard
from pearl.rl.trained_decoder import TrainedDecoder, prepare
from pearl.rl.trainer_state import Facts, read_facts, read_tensors, write_state
from pearl.rl.training_step import TrainingStep

CRITIC = "critic"  # the name of the critic's optimizer, beside those of the objectives
VALUES = "values."  # what the names of the critic's parameters begin with in a state


class NonFiniteError(ArithmeticError):
    """A loss or gradient was NaN or infinite; the weights are those of the update before."""


class Trainer:
    """Loads (or makes) the policy and trains it; `comm` joins the training ranks, one CPU thread or GPU each.

    Everything public but properties is a collective of those ranks.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: Config,
        *,
        comm: Communicator | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """A folder without weights gets seeded random ones, which are written into it. ValueError for a bad folder.

        `dtype` is that of weights, gradients and optimizer (float64 where arithmetic itself is under test).
        """
        self.config = config
        self.dtype = dtype
        self.folder = Path(model_folder)
        self.model_config = from_folder(self.folder)
        self.device = torch.device(device)
        self._comm: Communicator = comm or SingleCommunicator()
        self._kernels = NarrowKernels() if config.trainer.compute_dtype == "bfloat16" else ReferenceKernels()
        self._mesh = mesh_of(self._comm.group, self.device) if self._comm.size > 1 else None  # type: ignore[attr-defined]
        self.algorithm = algorithm_of(config.algorithm)
        self.decoder = self._new_policy()
        policy_weights.fill(self.decoder, self.folder, config.seed, keep=self._comm.rank == 0)
        self._parameters = self._parameters_of(self.decoder)
        self._reference: TrainedDecoder | None = None
        self._critic: Critic | None = None
        self._critic_parameters: Parameters | None = None
        self._aside: Asleep | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._policy_steps = 0
        self._engine_ratio = config.rollout.top_p == 1.0 and config.rollout.top_k <= 0
        if not self._engine_ratio:
            cut = f"rollout.top_p={config.rollout.top_p}, rollout.top_k={config.rollout.top_k}: the engine's log-probs are of a"
            ratios = "ratios refer to the policy at the start of each step and do not correct for staleness"
            warnings.warn(f"{cut} cut distribution, so {ratios}", stacklevel=2)

    @property
    def comm(self) -> Communicator:
        return self._comm

    def set_reference(self) -> None:
        """Freezes a copy of the present policy as the reference of KL terms; optimizer, schedule and critic start afresh."""
        self._check_awake()
        self._reference = None
        if self.config.algorithm.kl_coef > 0:
            self._reference = self._new_policy().requires_grad_(False)
            for ours, theirs in zip(self._reference.parameters(), self.decoder.parameters(), strict=True):
                own_rows(ours)[1].copy_(own_rows(theirs)[1])
        self._optimizers = {}
        self._policy_steps = 0
        self._new_critic()

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The present weights under their Hugging Face names: views, valid until the next update.

        On several ranks each parameter is gathered as its first tensor is asked for: all ranks go through all of it.
        """
        self._check_awake()
        return policy_weights.named_hf_tensors(self.decoder)

    def save(self, path: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, whole or not at all; rank 0 writes and all wait for it."""
        self._check_awake()
        held = policy_weights.gathered(self.decoder, keep=self._comm.rank == 0)
        if held:
            save_policy(lambda folder: save_folder(folder, self.model_config, held, like=self.folder), Path(path))
        self._comm.barrier(self.config.timeouts.command_s)

    def save_state(self, path: str | Path) -> None:
        """Writes policy, reference, optimizers and the schedule's position into the folder `path`; OSError if it cannot."""
        self._check_awake()
        write_state(Path(path), self._state(), self._facts(), self._comm, self.config.timeouts.command_s)

    def load_state(self, path: str | Path) -> None:
        """Goes on from what `save_state` wrote, on any number of ranks: further steps are those of the trainer that saved.

        Settings are those of the present configuration; a critic that the state does not have begins afresh. StateError,
        before anything changes, for a folder that is not whole or is of another model; after it, one that cannot be read
        leaves a trainer that must not be used.
        """
        self._check_awake()
        facts = read_facts(Path(path), self._facts())
        keeps_reference = facts.reference and self.config.algorithm.kl_coef > 0
        self._reference = self._new_policy().requires_grad_(False) if keeps_reference else None
        self._optimizers = {}
        self._new_critic()
        for name in (name for name in facts.updates if name != CRITIC or self._critic is not None):
            self._optimizers[name] = adamw(self._trained(name), self.config.optimizer)
            prime(self._optimizers[name], facts.updates[name])
        taught = CRITIC in facts.updates
        state = {name: tensor for name, tensor in self._state().items() if taught or not name.startswith(VALUES)}
        read_tensors(Path(path), state, self._comm)
        if self._critic is not None and not taught:
            self._critic.begin(self.decoder)
        self._policy_steps = facts.policy_steps

    def sleep(self) -> int:
        """Puts weights and optimizer aside, in host memory, until `wake()`; the bytes of device memory that this rank freed.

        Nothing else may be asked of a trainer that sleeps (RuntimeError).
        """
        self._check_awake()
        models = [model for model in (self.decoder, self._reference, self._critic) if model is not None]
        parameters = [parameter for model in models for parameter in model.parameters()]
        states = [state for optimizer in self._optimizers.values() for state in optimizer.state.values()]
        kept = [tensor for state in states for tensor in state.values() if isinstance(tensor, Tensor)]
        self._aside = Asleep([*parameters, *kept], [p.grad for p in parameters if p.grad is not None])
        return self._aside.freed_bytes

    def wake(self) -> None:
        """Takes the weights up again, bit for bit. Addresses may have changed."""
        if self._aside is not None:
            self._aside.wake()
            self._aside = None

    def _check_awake(self) -> None:
        if self._aside is not None:
            raise RuntimeError("the trainer sleeps: wake() must come first")

    def train_step(self, command: TrainStep) -> dict[str, float | None]:
        """Carries out the plan's updates and returns the step's metrics, the same on every rank (seconds are this rank's).

        Nothing has changed when it raises ValueError (bad data or plan, no reference); NonFiniteError names the update.
        """
        self._check_awake()
        c = self.model_config
        check(command, ranks=self._comm.size, vocab_size=c.vocab_size, max_position=c.max_position)
        if command.objective == "policy":
            self._check_ready()
        step = self._begin(command)
        with self._timed(step, "prepare"):
            updates = [
                [self._build(step, number, indices) for indices in ranks[self._comm.rank]]
                for number, ranks in enumerate(command.plan.updates)
            ]
        if step.is_policy:
            unscored = 0 if needs_scores(self.algorithm) else 1
            updates[unscored:] = [[self._scored(step, batch) for batch in batches] for batches in updates[unscored:]]
            updates = assign(step, updates, self.algorithm, self._comm)
        for number, batches in enumerate(updates):
            if step.trained[number]:
                self._update(step, number, [batch for batch in batches if self._runs(batch)])
        if step.is_policy:
            self._policy_steps += 1
        self._comm.all_reduce_sum(step.drift)
        step.gap_max = greatest(step.drift.new_tensor([step.gap_max]), self._comm)
        return step.metrics(with_kl=self._reference is not None)

    # ------------------------------------------------------------------------------------------------ one step

    def _begin(self, command: TrainStep) -> TrainingStep:
        policy = command.objective == "policy"
        options = self.config.optimizer
        if command.objective not in self._optimizers:
            self._optimizers[command.objective] = adamw(self._parameters, options)
        advantages = [0.0] * len(command.sequences)
        if policy:
            rewards, groups = [s.reward for s in command.sequences], [s.group for s in command.sequences]
            advantages = sequence_advantages(rewards, groups, self.algorithm)
        return TrainingStep(
            command=command,
            lr=learning_rate(self._policy_steps, options, self.config.max_steps) if policy else self.config.warmup.lr,
            advantages=advantages,
            metric_names=POLICY_METRICS if policy else SFT_METRICS,
            device=self.device,
            aggregation=self.algorithm.aggregation if policy else "token_mean",
            loss_divisor=self.config.algorithm.loss_divisor,
        )

    def _check_ready(self) -> None:
        options, own_critic = self.config.algorithm, self.algorithm.has_critic and not self.algorithm.shares_trunk
        lacks_reference = options.kl_coef > 0 and self._reference is None
        if lacks_reference or (own_critic and self._critic is None):
            why = f"kl_coef={options.kl_coef}" if lacks_reference else f"name={options.name}"
            raise ValueError(f"algorithm.{why}: set_reference() must come before a policy step")

    def _build(self, step: TrainingStep, number: int, indices: list[int]) -> MicroBatch:
        return build(
            [step.command.sequences[index] for index in indices],
            [step.advantages[index] for index in indices],
            weight_version=step.command.weight_version,
            device=self.device,
            weights=[step.weights[number][index] for index in indices],
            numbers=indices,
            dtype=self.dtype,
            never_empty=self._mesh is not None,
        )

    def _runs(self, batch: MicroBatch) -> bool:
        """Whether a pass over the batch is run: one without trained tokens adds nothing, but ranks run the same passes."""
        return batch.num_trained > 0 or self._mesh is not None

    def _update(self, step: TrainingStep, number: int, batches: list[MicroBatch]) -> None:
        """One update of the policy, and of the critic if there is one: both, or neither."""
        self._parameters.zero_gradients()
        sums = torch.zeros(len(step.sums) + len(CRITIC_SUMS), dtype=torch.float64, device=self.device)
        for batch in batches:
            sums += self._accumulate(step, number, batch)
        totals, norm = self._reduced(step, number, self._parameters, sums)
        totals, of_values = totals.split((len(step.sums), len(CRITIC_SUMS)))
        step.norms.append(norm)
        step.sums += torch.cat((totals[:1] * step.trained[number], totals[1:]))
        if step.is_policy and self.algorithm.shares_trunk:
            step.critic.append(critic_metrics(of_values.tolist(), step.trained[number]))
        taught = self._teach(step, number, batches) if step.is_policy and self._critic is not None else None
        with self._timed(step, "optimizer"):
            self._apply(step.command.objective, norm, step.lr)
            if taught is not None:
                ratio = (self.config.algorithm.critic_lr or self.config.optimizer.lr) / self.config.optimizer.lr
                self._apply(CRITIC, taught, step.lr * ratio)

    def _reduced(self, step: TrainingStep, number: int, parameters: Parameters, sums: Tensor) -> tuple[Tensor, float]:
        """The sums of all ranks (the loss first) and the norm of the gradients of all, both finite."""
        with self._timed(step, "optimizer"):
            totals = torch.cat((sums, parameters.finish_gradients().reshape(1)))
            self._comm.all_reduce_sum(totals)
            norm, loss = math.sqrt(totals[-1]), float(totals[0])
        if not math.isfinite(norm) or not math.isfinite(loss):
            where = f"step {step.command.step}, update {number} of {len(step.trained)} ({step.command.objective})"
            raise NonFiniteError(f"{where}: loss={loss}, grad_norm={norm}; the update was not applied")
        return totals[:-1], norm

    def _apply(self, name: str, norm: float, lr: float) -> None:
        clip_(self._trained(name), self.config.optimizer.max_grad_norm, norm)
        update(self._optimizers[name], lr)

    def _accumulate(self, step: TrainingStep, number: int, batch: MicroBatch) -> Tensor:
        """Adds one micro-batch's share of the update to the gradients; its metric sums, and CRITIC_SUMS of a value head."""
        head, reference_N = None, None
        if step.is_policy and self.algorithm.kl_in_loss:
            assert self._reference is not None
            with self._timed(step, "reference"):
                head, reference_N = referred(self._reference, batch, self.config)
        with self._timed(step, "forward"):
            terms, values_N = terms_of(self.decoder, batch, self.config, head)
            if step.is_policy:
                result = loss_of(terms, batch, self.algorithm, reference_N, engine_ratio=self._engine_ratio)
            else:
                result = sft_loss(terms, batch.weights_N)
        if step.is_policy and batch.proximal_N is None:
            step.add_drift(result.logprobs_N, batch)
        coef = self.config.algorithm.value_coef if step.is_policy else None
        loss, of_values = joint_loss(result.loss, values_N, batch, step.trained[number], coef)
        with self._timed(step, "backward"):
            loss.backward()
        return torch.cat((torch.stack([result.metrics[name] for name in step.metric_names]), of_values))

    def _teach(self, step: TrainingStep, number: int, batches: list[MicroBatch]) -> float:
        """The critic's gradients on the same tokens, and their norm."""
        assert self._critic is not None and self._critic_parameters is not None
        with self._timed(step, "critic"):
            self._critic_parameters.zero_gradients()
            sums = torch.zeros(len(CRITIC_SUMS), dtype=torch.float64, device=self.device)
            for batch in batches:
                sums += self._critic.learn(batch, step.trained[number])
        totals, norm = self._reduced(step, number, self._critic_parameters, sums)
        step.critic.append(critic_metrics(totals.tolist(), step.trained[number]) | {"critic_grad_norm": norm})
        return norm

    def _scored(self, step: TrainingStep, batch: MicroBatch) -> MicroBatch:
        """A batch with its log-probs under the weights the step begins with (they count for `drift`), KL terms and values."""
        if not self._runs(batch):
            return batch
        with self._timed(step, "score"):
            reference = self._reference if self.algorithm.kl_in_reward else None
            batch = scored(self.decoder, reference, self._critic, batch, self.config)
        assert batch.proximal_N is not None
        step.add_drift(batch.proximal_N, batch)
        return batch

    # ------------------------------------------------------------------------------------------------ parts

    @contextmanager
    def _timed(self, step: TrainingStep, phase: str) -> Iterator[None]:
        start = self._now()
        yield
        step.seconds[phase] += self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _new_decoder(self, kind: type[TrainedDecoder]) -> Any:
        alone = self._mesh is None
        decoder = kind(self.model_config, self._kernels, dtype=self.dtype, device=self.device, allocate=alone)
        prepare(decoder, self.config.trainer)
        if self._mesh is not None:
            shard(decoder, self._mesh, self.device)
        return decoder

    def _new_policy(self) -> TrainedDecoder:
        return self._new_decoder(ActorCritic if self.algorithm.shares_trunk else TrainedDecoder)

    def _new_critic(self) -> None:
        """A critic that knows nothing yet, with an optimizer, if the algorithm has one of its own."""
        if isinstance(self.decoder, ActorCritic):
            self.decoder.begin()
        elif self.algorithm.has_critic:
            self._critic = self._new_decoder(Critic)
            self._critic.begin(self.decoder)
            self._critic_parameters = self._parameters_of(self._critic)
            self._optimizers[CRITIC] = adamw(self._critic_parameters, self.config.optimizer)

    def _parameters_of(self, decoder: TrainedDecoder) -> Parameters:
        return FlatParameters(decoder.named_parameters()) if self._mesh is None else ShardedParameters(decoder)

    def _trained(self, name: str) -> Parameters:
        """What the optimizer of this name updates."""
        return self._parameters if name != CRITIC or self._critic_parameters is None else self._critic_parameters

    def _state(self) -> dict[str, Tensor]:
        """Everything that a step changes and a later one reads, by name, in place."""
        tensors = {f"policy.{name}": parameter.detach() for name, parameter in self.decoder.named_parameters()}
        if self._reference is not None:
            tensors |= {f"reference.{name}": parameter.detach() for name, parameter in self._reference.named_parameters()}
        for objective, optimizer in self._optimizers.items():
            named = moments(optimizer, self._trained(objective)).items()
            tensors |= {f"{objective}.{name}": tensor for name, tensor in named}
        if self._critic is not None:
            tensors |= {f"{VALUES}{name}": parameter.detach() for name, parameter in self._critic.named_parameters()}
        return tensors

    def _facts(self) -> Facts:
        return Facts(
            dtype=str(self.dtype).removeprefix("torch."),
            shapes={spec.name: spec.shape for spec in param_specs(self.model_config)},
            reference=self._reference is not None,
            policy_steps=self._policy_steps,
            value_head=self.algorithm.shares_trunk,
            train_layers=self.config.trainer.train_layers or 0,
            updates={name: updates_made(optimizer) for name, optimizer in self._optimizers.items()},
        )
