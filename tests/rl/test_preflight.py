"""What is refused after a look at the machine, by the name of the setting, in one line, and before anything starts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pearl.config import Config, ModelOptions, resolve
from pearl.overrides import override
from pearl.rl import preflight
from pearl.rl.envs import registry
from pearl.rl.fresh_model import write_model_folder
from pearl.rl.recipes.quickstart import recipe

ENVIRONMENTS = """
import time
from pearl.rl.envs.frozen_lake import FrozenLake

class Plain:
    def reset(self, seed): return "x" * 40, {}
    def step(self, action): return "", 0.0, True, False, {}

class Talkative(Plain):
    def reset(self, seed): return "ab " * 200, {}

class Slow(Talkative):
    def reset(self, seed):
        time.sleep(60)

class Broken(Talkative):
    def reset(self, seed): raise RuntimeError("not today")

class Proxy(Plain):
    def __getattr__(self, name): return lambda *given: "y"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"environments_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def config_of(*settings: str) -> Config:
    return resolve(override(recipe(), list(settings)), world=1)


def model_folder(folder: Path) -> Path:
    """A folder that has all that is asked for, with a weight file of one tensor."""
    write_model_folder(folder, ModelOptions(), ["<answer>"])
    save_file({"model.norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    return folder


def refusal(config: Config) -> str:
    with pytest.raises(ValueError) as refused:
        preflight.check(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def of_folder(folder: Path) -> Config:
    return config_of(f"model.path={folder}")


def test_the_quickstart_and_a_whole_folder_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    for config in (config_of(), of_folder(folder)):
        preflight.check(config)
        assert preflight.check_prompt(config) == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_not_a_model_and_the_model_in_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"recipe": "quickstart", "seed": 0}))
    model_folder(tmp_path / "run" / "policy")
    text = refusal(of_folder(tmp_path / "run"))
    assert text.startswith(f"model.path='{tmp_path / 'run'}'") and str(tmp_path / "run" / "policy") in text
    assert "config.json" in refusal(of_folder(tmp_path / "nothing"))


def test_an_architecture_that_is_not_served_is_refused_with_those_that_are(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["GPT2LMHeadModel"]}))
    text = refusal(of_folder(folder))
    assert text.startswith("model.path=") and "GPT2LMHeadModel" in text and "Qwen3ForCausalLM" in text


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors is damaged"),
        (lambda folder: os.truncate(folder / "model.safetensors", 200), "model.safetensors is damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs"), "model.safetensors is damaged"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "has no weight_map"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2.safetensors"}}'),
            "names part-2.safetensors, which is not there",
        ),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "no chat template"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not a JSON object"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json is not a JSON object"),
    ],
)
def test_a_folder_that_is_not_whole_says_what_is_missing(tmp_path: Path, harm, words: str) -> None:
    folder = model_folder(tmp_path / "model")
    harm(folder)
    text = refusal(of_folder(folder))
    assert text.startswith(f"model.path={str(folder)!r}: ") and words in text


def test_weights_of_another_kind_are_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "it has pytorch_model.bin" in refusal(of_folder(folder))


def test_a_chat_template_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    preflight.check(of_folder(folder))


def test_the_engine_may_not_take_more_than_the_models_positions(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", ModelOptions(max_position=64), [])
    shutil.copy(model_folder(tmp_path / "other") / "model.safetensors", folder)
    text = refusal(of_folder(folder))
    assert "engine.max_model_len=512" in text and "64" in text
    fits = ["engine.max_model_len=none", "rollout.max_tokens=64"]
    assert "rollout.max_tokens=64" in refusal(config_of(f"model.path={folder}", *fits))


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "mps", "", "cpu:0:0"])
def test_unknown_devices_are_refused_with_the_known(device: str) -> None:
    config = config_of()
    text = refusal(dataclasses.replace(config, engine=dataclasses.replace(config.engine, device=device)))
    assert f"engine.device={device!r}" in text and "auto, cpu, cuda" in text


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has what is refused elsewhere")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_on_a_machine_without_is_refused(device: str) -> None:
    assert f"engine.device={device!r}: this machine has no CUDA device" in refusal(config_of(f"engine.device={device}"))


def test_warm_up_needs_valid_play(module: str) -> None:
    settings = [f"env.name={module}:Plain", "env.options={}"]
    text = refusal(config_of(*settings))
    assert text.startswith("warmup.steps=80: ") and "random_valid_action" in text and "warmup.steps=0" in text
    preflight.check(config_of(*settings, "warmup.steps=0"))
    preflight.check(config_of(f"env.name={module}:Proxy", "env.options={}"))


def test_a_module_with_a_mistake_in_it_is_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}_bad.py").write_text("def (:\n")
    with pytest.raises(ValueError, match=r"cannot be imported: SyntaxError"):
        registry.check(f"{module}_bad:Any", {})


def test_an_output_folder_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    text = refusal(config_of(f"output_dir={tmp_path}/file/deeper"))
    assert text.startswith("output_dir=") and "is a file" in text
    monkeypatch.setattr(os, "access", lambda *given: False)
    config = config_of(f"output_dir={tmp_path}/a/b/c")
    assert "cannot be written" in refusal(config)
    preflight.check(config, new_run=False)


def test_a_first_prompt_without_room_is_refused_with_what_it_takes(module: str) -> None:
    config = config_of(f"env.name={module}:Talkative", "env.options={}", "warmup.steps=0")
    with pytest.raises(ValueError, match=r"engine.max_model_len=512: the first prompt of .* has (\d+) tokens") as refused:
        preflight.check_prompt(config)
    needed = int(str(refused.value).rsplit(" ", 1)[1])
    assert needed == 600 + 3 + 8  # bytes, headers, rollout.max_tokens
    enough = [f"engine.max_model_len={needed}", f"model.max_position={needed}"]
    again = override(config, enough)
    assert "may need" in preflight.check_prompt(again)
    alone = override(again, ["env.max_turns=1"])
    assert preflight.check_prompt(alone) == ""


def test_an_environment_that_does_not_begin_is_left_to_its_process(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "TRIAL_S", 0.1)
    for name in ("Slow", "Broken"):
        assert preflight.check_prompt(config_of(f"env.name={module}:{name}", "env.options={}", "warmup.steps=0")) == ""
