"""PEARL's own engine as a side of `bench.engine`: LLM.generate."""

from __future__ import annotations

import time

import torch
import workload

from pearl.engine.llm import LLM
from pearl.engine.models.config import ModelConfig
from pearl.protocol import SamplingParams

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    parser = workload.arguments()
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    llm = LLM(
        options.model, dtype=DTYPES[options.dtype], kernels=options.kernels, max_model_len=2048, max_num_seqs=64, device="cpu"
    )
    loaded = time.perf_counter() - began
    model: ModelConfig = llm.engine.model_config

    def generate(prompts: list[list[int]], count: int, conversations: object) -> list[list[int]]:
        del conversations  # the prefix cache finds the history
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    about = {"side": "pearl", "version": llm.engine.kernels_why, "load_s": loaded}
    workload.serve(about, model.vocab_size, generate)


if __name__ == "__main__":
    main()
