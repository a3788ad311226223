"""The trainer of one rank: carries out TrainStep commands on the policy, or its share of it, exactly as their plan says.

Owns the policy's fp32 weights, the reference, the optimizers and the numbers a step is judged by. It does not know where
sequences come from, who serves the weights or how a plan was made.
Invariants: the gradient of an update is the mean over the update's trained tokens, whatever the packing, the micro-batches
and the number of ranks; an update whose loss or gradient is not finite changes no weight, on any rank. A rank alone holds
the policy as one flat vector; several hold it in shares (`sharding.py`), and every pass is then a collective: all of them
run the same passes, over a token that is not trained where a rank's share of the data is empty.

Ratios and log-probs are of `softmax(logits / rollout.temperature)`, which is what the engine reports unless top_p or top_k
cut the distribution before drawing; then the ratio is taken to the policy as the step begins instead (a warning says so).
Tokens that an older policy sampled are corrected by their importance (`policy_loss`). The log-probs under the policy that
the step begins with come from the first update's own forward pass, and for later updates from one before the first update,
which also measures `drift`: correcting costs no pass.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pearl.config import Config
from pearl.engine.comm.communicator import Communicator, SingleCommunicator
from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import from_folder
from pearl.engine.models.decoder import Decoder, varlen_attend
from pearl.engine.models.params import param_specs
from pearl.engine.weights.checkpoint import save_folder
from pearl.protocol import TrainStep
from pearl.rl import policy_weights
from pearl.rl.advantage import group_advantages
from pearl.rl.checkpoint import save_policy
from pearl.rl.loss import POLICY_METRICS, SFT_METRICS, log_softmax, picked, policy_loss, sft_loss
from pearl.rl.micro_batch import MicroBatch, build, check
from pearl.rl.optimizer import FlatParameters, Parameters, adamw, clip_, learning_rate, moments, prime, update, updates_made
from pearl.rl.sharding import ShardedParameters, mesh_of, own_rows, shard
from pearl.rl.trainer_state import Facts, read_facts, read_tensors, write_state
from pearl.rl.training_step import TrainingStep


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
        self._kernels = ReferenceKernels()
        self._mesh = mesh_of(self._comm.group, self.device) if self._comm.size > 1 else None  # type: ignore[attr-defined]
        self.decoder = self._new_decoder()
        self._fill_weights()
        self._parameters: Parameters = (
            FlatParameters(self.decoder.named_parameters()) if self._mesh is None else ShardedParameters(self.decoder)
        )
        self._reference: Decoder | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._policy_steps = 0
        self._engine_ratio = config.rollout.top_p == 1.0 and config.rollout.top_k <= 0
        if not self._engine_ratio:
            warnings.warn(
                f"rollout.top_p={config.rollout.top_p}, rollout.top_k={config.rollout.top_k}: the engine's log-probs are of "
                "a cut distribution, so ratios refer to the policy at the start of each step and do not correct for staleness",
                stacklevel=2,
            )

    @property
    def comm(self) -> Communicator:
        return self._comm

    def set_reference(self) -> None:
        """Freezes a copy of the present policy as the reference of KL terms; optimizer and schedule start afresh."""
        self._reference = None
        if self.config.algorithm.kl_coef > 0:
            self._reference = self._new_decoder().requires_grad_(False)
            for ours, theirs in zip(self._reference.parameters(), self.decoder.parameters(), strict=True):
                own_rows(ours)[1].copy_(own_rows(theirs)[1])
        self._optimizers = {}
        self._policy_steps = 0

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The present weights under their Hugging Face names: views, valid until the next update.

        On several ranks each parameter is gathered as its first tensor is asked for: all ranks go through all of it.
        """
        return policy_weights.named_hf_tensors(self.decoder)

    def save(self, path: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, whole or not at all; rank 0 writes and all wait for it."""
        held = policy_weights.gathered(self.decoder, keep=self._comm.rank == 0)
        if held:
            save_policy(lambda folder: save_folder(folder, self.model_config, held, like=self.folder), Path(path))
        self._comm.barrier(self.config.timeouts.command_s)

    def save_state(self, path: str | Path) -> None:
        """Writes policy, reference, optimizers and the schedule's position into the folder `path`; OSError if it cannot."""
        write_state(Path(path), self._state(), self._facts(), self._comm, self.config.timeouts.command_s)

    def load_state(self, path: str | Path) -> None:
        """Goes on from what `save_state` wrote, on any number of ranks: further steps are those of the trainer that saved.

        Settings are those of the present configuration. StateError, before anything changes, for a folder that is not
        whole or is of another model; after it, one that cannot be read leaves a trainer that must not be used.
        """
        facts = read_facts(Path(path), self._facts())
        keeps_reference = facts.reference and self.config.algorithm.kl_coef > 0
        self._reference = self._new_decoder().requires_grad_(False) if keeps_reference else None
        self._optimizers = {name: adamw(self._parameters, self.config.optimizer) for name in facts.updates}
        for name, optimizer in self._optimizers.items():
            prime(optimizer, facts.updates[name])
        read_tensors(Path(path), self._state(), self._comm)
        self._policy_steps = facts.policy_steps

    def train_step(self, command: TrainStep) -> dict[str, float | None]:
        """Carries out the plan's updates and returns the step's metrics, the same on every rank (seconds are this rank's).

        Nothing has changed when it raises ValueError (bad data or plan, no reference); NonFiniteError names the update.
        """
        c = self.model_config
        check(command, ranks=self._comm.size, vocab_size=c.vocab_size, max_position=c.max_position)
        kl_coef = self.config.algorithm.kl_coef
        if command.objective == "policy" and kl_coef > 0 and self._reference is None:
            raise ValueError(f"algorithm.kl_coef={kl_coef}: set_reference() must come before a policy step")
        step = self._begin(command)
        with self._timed(step, "prepare"):
            updates = [[self._build(step, indices) for indices in ranks[self._comm.rank]] for ranks in command.plan.updates]
        if step.is_policy:
            updates[1:] = [[self._scored(step, batch) for batch in batches] for batches in updates[1:]]
        for number, batches in enumerate(updates):
            if step.trained[number]:
                self._update(step, number, [batch for batch in batches if self._runs(batch)])
        if step.is_policy:
            self._policy_steps += 1
        self._comm.all_reduce_sum(step.drift)
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
            advantages = group_advantages(rewards, groups, normalize_std=self.config.algorithm.normalize_std)
        return TrainingStep(
            command=command,
            lr=learning_rate(self._policy_steps, options, self.config.max_steps) if policy else self.config.warmup.lr,
            optimizer=self._optimizers[command.objective],
            advantages=advantages,
            metric_names=POLICY_METRICS if policy else SFT_METRICS,
            device=self.device,
        )

    def _build(self, step: TrainingStep, indices: list[int]) -> MicroBatch:
        return build(
            [step.command.sequences[index] for index in indices],
            [step.advantages[index] for index in indices],
            weight_version=step.command.weight_version,
            device=self.device,
            never_empty=self._mesh is not None,
        )

    def _runs(self, batch: MicroBatch) -> bool:
        """Whether a pass over the batch is run: one without trained tokens adds nothing, but ranks run the same passes."""
        return batch.num_trained > 0 or self._mesh is not None

    def _update(self, step: TrainingStep, number: int, batches: list[MicroBatch]) -> None:
        self._parameters.zero_gradients()
        sums = torch.zeros_like(step.sums)
        for batch in batches:
            sums += self._accumulate(step, number, batch)
        with self._timed(step, "optimizer"):
            totals = torch.cat((sums, self._parameters.finish_gradients().reshape(1)))
            self._comm.all_reduce_sum(totals)
            norm = math.sqrt(totals[-1])
            loss = float(totals[0]) / step.trained[number]
            if not math.isfinite(norm) or not math.isfinite(loss):
                where = f"step {step.command.step}, update {number} of {len(step.trained)} ({step.command.objective})"
                raise NonFiniteError(f"{where}: loss={loss}, grad_norm={norm}; the update was not applied")
            clip_(self._parameters, self.config.optimizer.max_grad_norm, norm)
            update(step.optimizer, step.lr)
        step.sums += totals[:-1]
        step.norms.append(norm)

    def _accumulate(self, step: TrainingStep, number: int, batch: MicroBatch) -> Tensor:
        """Adds one micro-batch's share to the gradients; returns its metric sums."""
        reference_NV = None
        if step.is_policy and self._reference is not None:
            with self._timed(step, "reference"), torch.no_grad():
                reference_NV = self._logits(self._reference, batch)
        with self._timed(step, "forward"):
            logits_NV = self._logits(self.decoder, batch)
            if step.is_policy:
                result = policy_loss(
                    logits_NV,
                    batch.targets_N,
                    batch.behaviour_N if self._engine_ratio else None,
                    batch.advantages_N,
                    self.config.algorithm,
                    proximal_N=batch.proximal_N,
                    corrected_N=None if batch.all_fresh else ~batch.fresh_N,
                    reference_NV=reference_NV,
                    temperature=self.config.rollout.temperature,
                )
            else:
                result = sft_loss(logits_NV, batch.targets_N)
        if step.is_policy and number == 0:
            step.add_drift(result.logprobs_N, batch)
        with self._timed(step, "backward"):
            (result.loss / step.trained[number]).backward()
        return torch.stack([result.metrics[name] for name in step.metric_names])

    def _scored(self, step: TrainingStep, batch: MicroBatch) -> MicroBatch:
        """A later update's batch with its log-probs under the weights the step begins with; they count for `drift` too."""
        if not self._runs(batch):
            return batch
        with self._timed(step, "score"), torch.no_grad():
            logp_NV = log_softmax(self._logits(self.decoder, batch), self.config.rollout.temperature)
            logp_N = picked(logp_NV, batch.targets_N)
        step.add_drift(logp_N, batch)
        return batch.with_proximal(logp_N)

    def _logits(self, decoder: Decoder, batch: MicroBatch) -> Tensor:
        """Logits of the trained rows only: the vocabulary is by far the widest thing in the model."""
        packed = PackedBatch(positions_T=batch.positions_T, lengths=batch.lengths)
        attend = varlen_attend(self._kernels, packed, self.model_config)
        return decoder(batch.input_ids_T, batch.positions_T, attend, logits_of_N=batch.rows_N)

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

    def _new_decoder(self) -> Decoder:
        alone = self._mesh is None
        decoder = Decoder(self.model_config, self._kernels, dtype=self.dtype, device=self.device, allocate=alone)
        if self._mesh is not None:
            shard(decoder, self._mesh, self.device)
        return decoder

    def _fill_weights(self) -> None:
        if any(self.folder.glob("*.safetensors")):
            policy_weights.fill_from_folder(self.decoder, self.folder)
            return
        policy_weights.fill_from_seed(self.decoder, self.config.seed)
        # Gathering makes the ranks wait for each other: none finds rank 0's file before having looked for it.
        held = policy_weights.gathered(self.decoder, keep=self._comm.rank == 0)
        if held:
            save_folder(self.folder, self.model_config, held, like=self.folder)

    def _state(self) -> dict[str, Tensor]:
        """Everything that a step changes and a later one reads, by name, in place."""
        tensors = {f"policy.{name}": parameter.detach() for name, parameter in self.decoder.named_parameters()}
        if self._reference is not None:
            tensors |= {f"reference.{name}": parameter.detach() for name, parameter in self._reference.named_parameters()}
        for objective, optimizer in self._optimizers.items():
            named = moments(optimizer, self._parameters).items()
            tensors |= {f"{objective}.{name}": tensor for name, tensor in named}
        return tensors

    def _facts(self) -> Facts:
        return Facts(
            dtype=str(self.dtype).removeprefix("torch."),
            shapes={spec.name: spec.shape for spec in param_specs(self.model_config)},
            reference=self._reference is not None,
            policy_steps=self._policy_steps,
            updates={name: updates_made(optimizer) for name, optimizer in self._optimizers.items()},
        )
