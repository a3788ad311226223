"""The trainer of one rank: carries out TrainStep commands on a replica of the policy, exactly as their plan says.

Owns the policy's fp32 weights, the reference, the optimizer and the numbers a step is judged by. It does not know where
sequences come from, who serves the weights or how a plan was made.
Invariant: the gradient of an update is the mean over the update's trained tokens, whatever the packing, the micro-batches
and the number of ranks; an update whose loss or gradient is not finite changes no weight, on any rank.

Ratios and log-probs are of `softmax(logits / rollout.temperature)`, which is what the engine reports unless top_p or top_k
cut the distribution before drawing; then the ratio is taken to the policy as the step begins instead (a warning says so).
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
from pearl.engine.weights.checkpoint import hf_tensors, read_folder, save_folder
from pearl.protocol import TrainStep
from pearl.rl.advantage import group_advantages
from pearl.rl.checkpoint import save_policy
from pearl.rl.loss import POLICY_METRICS, SFT_METRICS, log_softmax, picked, policy_loss, sft_loss
from pearl.rl.micro_batch import MicroBatch, build, check
from pearl.rl.optimizer import FlatParameters, adamw, clip_, learning_rate, update
from pearl.rl.training_step import TrainingStep


class NonFiniteError(ArithmeticError):
    """A loss or gradient was NaN or infinite; the weights are those of the update before."""


class Trainer:
    """Loads (or makes) the policy and trains it; `comm` joins the replicas of several ranks, one CPU thread or GPU each."""

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
        self.decoder = self._new_decoder()
        self._fill_weights()
        self._flat = FlatParameters(self.decoder.parameters())
        self._comm.broadcast(self._flat.weights, src=0)
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
            reference = self._new_decoder().requires_grad_(False)
            with torch.no_grad():
                for ours, theirs in zip(reference.parameters(), self.decoder.parameters(), strict=True):
                    ours.copy_(theirs)
            self._reference = reference
        self._optimizers = {}
        self._policy_steps = 0

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The present weights under their Hugging Face names: fp32 views, valid until the next update."""
        return hf_tensors(self.model_config, {name: tensor.detach() for name, tensor in self.decoder.named_parameters()})

    def save(self, path: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, whole or not at all; rank 0 writes and all wait for it."""
        if self._comm.rank == 0:
            save_policy(self, Path(path))
        self._comm.barrier(self.config.timeouts.command_s)

    def write_folder(self, path: Path) -> None:
        """Writes weights, config and tokenizer files into `path` (not atomic; `save` is)."""
        params = {name: tensor.detach() for name, tensor in self.decoder.named_parameters()}
        save_folder(path, self.model_config, params, like=self.folder)

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
                self._update(step, number, batches)
        if step.is_policy:
            self._policy_steps += 1
        self._comm.all_reduce_sum(step.drift)
        return step.metrics(with_kl=self._reference is not None)

    # ------------------------------------------------------------------------------------------------ one step

    def _begin(self, command: TrainStep) -> TrainingStep:
        policy = command.objective == "policy"
        options = self.config.optimizer
        if command.objective not in self._optimizers:
            self._optimizers[command.objective] = adamw(self._flat, options)
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
        )

    def _update(self, step: TrainingStep, number: int, batches: list[MicroBatch]) -> None:
        # A micro-batch without trained tokens adds zero to the sums; ranks meet once per update, so it may be left out.
        self._flat.gradients.zero_()
        sums = torch.zeros_like(step.sums)
        for batch in batches:
            if batch.num_trained:
                sums += self._accumulate(step, number, batch)
        with self._timed(step, "optimizer"):
            self._comm.all_reduce_sum(self._flat.gradients)
            self._comm.all_reduce_sum(sums)
            norm = float(torch.linalg.vector_norm(self._flat.gradients))
            loss = float(sums[0]) / step.trained[number]
            if not math.isfinite(norm) or not math.isfinite(loss):
                where = f"step {step.command.step}, update {number} of {len(step.trained)} ({step.command.objective})"
                raise NonFiniteError(f"{where}: loss={loss}, grad_norm={norm}; the update was not applied")
            clip_(self._flat.gradients, self.config.optimizer.max_grad_norm, norm)
            update(step.optimizer, step.lr)
        step.sums += sums
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
                # Before the first update the present policy is the one the step began with.
                present = number == 0 and not self._engine_ratio
                result = policy_loss(
                    logits_NV,
                    batch.targets_N,
                    None if present else batch.behaviour_N,
                    batch.advantages_N,
                    self.config.algorithm,
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
        """Log-probs of a later update's tokens under the weights the step begins with, for `drift` and, maybe, ratios."""
        if not batch.num_trained:
            return batch
        with self._timed(step, "score"), torch.no_grad():
            logp_NV = log_softmax(self._logits(self.decoder, batch), self.config.rollout.temperature)
            logp_N = picked(logp_NV, batch.targets_N)
        step.add_drift(logp_N, batch)
        return batch if self._engine_ratio else batch.with_behaviour(logp_N)

    def _logits(self, decoder: Decoder, batch: MicroBatch) -> Tensor:
        """Logits of the trained rows only: the vocabulary is by far the widest thing in the model."""
        packed = PackedBatch(positions_T=batch.positions_T, lengths=batch.lengths)
        hidden_TD = decoder(batch.input_ids_T, batch.positions_T, varlen_attend(self._kernels, packed, self.model_config))
        return decoder.logits(hidden_TD[batch.rows_N])

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
        return Decoder(self.model_config, self._kernels, dtype=self.dtype, device=self.device)

    def _fill_weights(self) -> None:
        if any(self.folder.glob("*.safetensors")):
            with torch.no_grad():
                places = dict(self.named_hf_tensors())
                for name, tensor in read_folder(self.folder, self.model_config):
                    places[name].copy_(tensor)
            return
        self.decoder.init_weights(self.config.seed)
        self._comm.barrier(self.config.timeouts.start_s)  # nobody may find rank 0's file before having looked
        if self._comm.rank == 0:
            self.write_folder(self.folder)

