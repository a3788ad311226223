"""transformers and plain torch making the step of `bench/rl.py`, as a stand-in where TRL is not installed.

What TRL's GRPOTrainer does, without its overhead: `generate` with a KV cache, one forward pass with logits of the answers
alone, the clipped loss, backward, AdamW. Weights, gradients and optimizer are in fp32 and products in bf16 (autocast); answers
come from a bf16 copy, which is filled anew after each update.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.peers import rl_workload as work


def main() -> None:
    options = work.options()
    torch.set_num_threads(options.threads)
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    server = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=work.LR, weight_decay=0.0, fused=True)

    def step(seed: int, parts: work.Parts) -> None:
        torch.manual_seed(seed)
        with parts.part("rollout"), torch.no_grad():
            ids = torch.tensor(work.prompts(seed, policy.config.vocab_size)).repeat_interleave(work.SIBLINGS, 0)
            ids = server.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=work.ANSWER,
                max_new_tokens=work.ANSWER,
                pad_token_id=0,
            )
        rewards = torch.tensor([work.reward(row[work.PROMPT :].tolist()) for row in ids]).view(work.GROUPS, -1)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        with parts.part("forward"):
            loss = loss_of(policy, ids, advantages)
        with parts.part("backward"):
            loss.backward()
        with parts.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with parts.part("publish"), torch.no_grad():
            for theirs, ours in zip(server.parameters(), policy.parameters(), strict=True):
                theirs.copy_(ours)

    work.answer_requests(f"transformers, torch {torch.__version__}", step)


def loss_of(policy: torch.nn.Module, ids: Tensor, advantages: Tensor) -> Tensor:
    """The clipped objective over answers, the policy that sampled them being the present one."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy(ids, logits_to_keep=work.ANSWER + 1).logits[:, :-1].float()
    answers = ids[:, work.PROMPT :]
    logp = logits.gather(2, answers[..., None]).squeeze(2) - logits.logsumexp(2)
    ratio = (logp - logp.detach()).exp()
    clipped = ratio.clamp(1 - work.CLIP_LOW, 1 + work.CLIP_HIGH)
    return -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()


if __name__ == "__main__":
    main()
