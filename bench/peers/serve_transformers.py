"""Hugging Face transformers as a side of `bench.engine`: `generate` on one batch; a conversation keeps its cache."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
import workload

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    options = workload.arguments().parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=DTYPES[options.dtype]).eval()
    loaded = time.perf_counter() - began
    kept: dict[str, Any] = {}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], count: int, conversations: object) -> list[list[int]]:
        ids = torch.tensor(prompts)
        cache = kept.get("cache")
        goes_on = conversations is not None and cache is not None and cache.get_seq_length() < ids.shape[1]
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            **({"past_key_values": cache} if goes_on else {}),
        )
        last = conversations is None or ids.shape[1] + count >= _whole()
        kept["cache"] = None if last else made.past_key_values
        return made.sequences[:, ids.shape[1] :].tolist()

    about = {"side": "transformers", "version": f"{transformers.__version__}, torch {torch.__version__}", "load_s": loaded}
    workload.serve(about, model.config.vocab_size, generate)


def _whole() -> int:
    """Tokens of a conversation that is over."""
    conversation = workload.WORKLOADS["W3"]
    return conversation.turns * (conversation.prompt + conversation.output)


if __name__ == "__main__":
    main()
