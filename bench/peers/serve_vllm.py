"""vLLM on the CPU as a side of `bench.engine`: LLM.generate on token ids, without a tokenizer.

Its own page asks for tcmalloc and Intel's OpenMP to be preloaded (it is ten times slower without): this starts itself again
with both, tcmalloc from the environment variable TCMALLOC or the system, OpenMP from this Python's environment.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
import time
from pathlib import Path

import workload

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def preloaded() -> str:
    """The libraries, as LD_PRELOAD wants them. SystemExit if one is missing."""
    openmp = next((str(path) for path in Path(sys.prefix).rglob("libiomp5.so")), None)
    tcmalloc = os.environ.get("TCMALLOC") or ctypes.util.find_library("tcmalloc_minimal")
    if openmp is None or tcmalloc is None:
        raise SystemExit(f"vllm: libiomp5.so ({openmp}) and tcmalloc ({tcmalloc}, or set TCMALLOC) must be there")
    return f"{tcmalloc}:{openmp}"


def environment(threads: int) -> dict[str, str]:
    return {
        "LD_PRELOAD": preloaded(),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def main() -> None:
    options = workload.arguments().parse_args()
    if "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment(options.threads))
    import vllm  # after the environment is set, which it reads when it is imported

    began = time.perf_counter()
    llm = vllm.LLM(
        model=options.model,
        dtype=DTYPES[options.dtype],
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    loaded = time.perf_counter() - began

    def generate(prompts: list[list[int]], count: int, conversations: object) -> list[list[int]]:
        del conversations
        params = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    vocab_size = llm.llm_engine.model_config.hf_config.vocab_size
    workload.serve({"side": "vllm", "version": vllm.__version__, "load_s": loaded}, vocab_size, generate)
    os._exit(0)  # its threads do not always end


if __name__ == "__main__":
    main()
