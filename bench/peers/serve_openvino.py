"""OpenVINO GenAI as a side of `bench.engine`: its pipeline with paged attention and continuous batching, from a GGUF file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import workload


def pipeline(options) -> genai.LLMPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 64, 2048
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    precision = {"bf16": "bf16", "fp32": "f32"}[options.dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": options.threads,
    }
    path = Path(options.gguf) / f"{Path(options.model).name}-f16.gguf"
    return genai.LLMPipeline(str(path), "CPU", scheduler_config=scheduler, **properties)


def main() -> None:
    parser = workload.arguments()
    parser.add_argument("--gguf", required=True, help="folder with MODEL-f16.gguf")
    options = parser.parse_args()
    began = time.perf_counter()
    pipe = pipeline(options)
    loaded = time.perf_counter() - began
    vocab_size = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]

    def generate(prompts: list[list[int]], count: int, conversations: object) -> list[list[int]]:
        del conversations
        ids = np.array(prompts, dtype=np.int64)
        config = genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        made = pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), config)
        return [list(tokens) for tokens in made.tokens]

    workload.serve({"side": "openvino", "version": genai.__version__, "load_s": loaded}, vocab_size, generate)
    os._exit(0)


if __name__ == "__main__":
    main()
