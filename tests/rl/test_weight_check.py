"""Checksums after a publication: they see any changed bit and any two swapped values, and agree where the weights do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_cases import config, folder

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.rl import weight_check
from pearl.rl.publisher import LocalPublisher
from pearl.rl.trainer import Trainer
from pearl.rl.weight_check import ENGINE, TRAINER, CheckedPublisher, checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_changed_bit_and_two_swapped_values_are_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = checksums("", [("w", tensor)], dtype)
    monkeypatch.setattr(weight_check, "WORDS_AT_ONCE", 4)
    assert checksums("", [("w", tensor)], dtype) == whole
    assert checksums("", [("w", tensor.t().contiguous().t())], dtype) == whole
    swapped, changed = tensor.clone(), tensor.clone()
    swapped[0, 0], swapped[6, 4] = tensor[6, 4].clone(), tensor[0, 0].clone()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    changed.view(kind)[3, 3] ^= 1
    for other in (swapped, changed):
        assert checksums("", [("w", other)], dtype) != whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_agree_after_each_publication_and_not_before(tmp_path: Path, dtype: str) -> None:
    model = folder(tmp_path)
    trainer = Trainer(model, config())
    engine = Engine(
        EngineConfig(model=from_folder(model), dtype=dtype, device="cpu", num_blocks=8, max_model_len=32), load_weights=False
    )
    publisher = CheckedPublisher(LocalPublisher(trainer, engine), trainer, engine, getattr(torch, dtype))
    for version in range(2):
        publisher.begin(version)
        sums = publisher.poll()
        assert sums is not None
        ours = {name.removeprefix(TRAINER): total for name, total in sums.items() if name.startswith(TRAINER)}
        assert ours == {name.removeprefix(ENGINE): total for name, total in sums.items() if name.startswith(ENGINE)}
        assert ours.keys() == dict(engine.named_hf_tensors()).keys()
        name, tensor = next(iter(engine.named_hf_tensors()))
        tensor.view(-1)[0] += 1.0
        assert checksums("", engine.named_hf_tensors(), getattr(torch, dtype))[name] != ours[name]
