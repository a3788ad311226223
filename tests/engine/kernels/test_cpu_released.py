"""Weights that are packed once: the plain matrices' memory goes back, and is filled again when somebody reads it."""

from __future__ import annotations

from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import make

from pearl.engine.engine import Engine
from pearl.protocol import SamplingParams

WIDE = {"hidden_size": 256, "intermediate_size": 512}
CASES = {
    "tied": lambda: hf_models.dense(**WIDE, tie_word_embeddings=True),
    "untied": lambda: hf_models.llama(**WIDE, tie_word_embeddings=False),
    "experts": lambda: hf_models.moe(hidden_size=256, moe_intermediate_size=64),
}


def tokens(engine: Engine) -> list[int]:
    engine.add_request(hf_models.prompt(9), SamplingParams(temperature=0.0, max_tokens=8))
    done = []
    while engine.has_unfinished():
        done += engine.step()
    return done[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_given_back_is_there_again_bit_for_bit(tmp_path: Path, case: str, dtype: str) -> None:
    folder = hf_models.save(CASES[case](), tmp_path / "model")
    plain = dict(make(folder, kernels="reference", dtype=dtype).named_hf_tensors())
    engine = make(folder, kernels="cpu", dtype=dtype)
    matrices = [value.detach() for name, value in engine._decoder.named_parameters() if value.ndim > 1 and "embed" not in name]
    first = tokens(engine)
    assert all(not matrix.flatten()[4096:-4096].any() for matrix in matrices)
    for name, tensor in engine.named_hf_tensors():
        assert torch.equal(tensor, plain[name]), name
    assert tokens(engine) == first


def test_a_new_version_is_written_over_it(tmp_path: Path) -> None:
    folder = hf_models.save(CASES["tied"](), tmp_path / "model")
    plain = [(name, 1.5 * tensor) for name, tensor in make(folder, kernels="reference").named_hf_tensors()]
    for way in ("staged", "streaming"):
        engine = make(folder, kernels="cpu")
        engine.update_weights(iter(plain), 1, way=way)
        found = dict(engine.named_hf_tensors())
        assert all(torch.equal(found[name], wanted) for name, wanted in plain)
