"""Loading takes hardly more memory than the weights do: they are written straight to where they live, tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pearl.engine.models.config import from_folder
from pearl.engine.models.params import hf_shapes

SHAPE = {
    "vocab_size": 8000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
}

MEASURE = """
import re, sys, threading, time
from pathlib import Path
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
import torch

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    global peak
    while not through:
        peak = max(peak, anonymous())
        time.sleep(0.002)

torch.set_num_threads(1)
(torch.ones(64, 64) @ torch.ones(64, 64)).sum()
before, peak, through = anonymous(), 0, False
watcher = threading.Thread(target=watch)
watcher.start()
engine = Engine(EngineConfig(model=sys.argv[1], dtype=sys.argv[2], block_size=16, num_blocks=8, device="cpu"))
through = True
watcher.join()
weights = sum(p.nbytes for p in engine._decoder.parameters())
print(weights, max(peak, anonymous()) - before)
"""


def folder(path: Path, family: str, stored: torch.dtype, stacked: bool) -> Path:
    """A model whose values do not matter, in several files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    places = {}
    for index, (name, shape) in enumerate(hf_shapes(from_folder(path), stacked=stacked).items()):
        places[name] = f"model-{index}.safetensors"
        save_file({name: torch.full(shape, 0.01, dtype=stored)}, path / places[name], metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stored", "stacked"),
    [
        ("dense", torch.bfloat16, False),
        ("dense", torch.float32, False),
        ("experts", torch.bfloat16, False),
        ("experts", torch.bfloat16, True),
    ],
    ids=["dense", "dense, narrowed", "experts", "experts stacked"],
)
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, family: str, stored: torch.dtype, stacked: bool) -> None:
    command = [sys.executable, "-c", MEASURE, str(folder(tmp_path / "model", family, stored, stacked)), "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    weights, peak = map(int, done.stdout.split())
    print(f"{family}, {stored}: {weights / 1e9:.2f} GB of weights, {peak / 1e9:.2f} GB at most: {peak / weights:.2f} times")
    assert weights > 0.9e9
    assert peak < 1.3 * weights
