"""What is found out about a job before any process starts: its model folder, environment, device and output folder.

Owns the checks that have to look at the machine; what follows from the numbers alone is `config.resolve`'s. It reads headers,
not weights, and plays one reset, not an episode. Invariants: what is refused could never have run, and is refused with a
ValueError of one line that names the setting; nothing is written. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

from pearl.config import Config, check_lengths
from pearl.engine.models import config as model_config
from pearl.engine.tokenizer import Tokenizer
from pearl.metrics.trackers import load_wandb
from pearl.rl import fresh_model
from pearl.rl.emulated import pace_of
from pearl.rl.envs import registry
from pearl.rl.envs.base import Environment, example_of, has_random_player, system_prompt_of, words_of
from pearl.rl.recipes.registry import hub_name
from pearl.rl.rollout import opening
from pearl.sched.sim.availability import read_trace
from pearl.training_options import check_layers

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TRIAL_S = 5.0
"""An environment whose first observation takes longer is not tried; its process will have `env.timeout_s`."""
FRAME_TOKENS = 64
"""A chat template is taken to put at most so many tokens around a message, before it is asked."""


def check(config: Config, *, new_run: bool = True, machine: bool = True) -> None:
    """Refuses what a resolved Config asks for and this machine does not have; starts nothing, constructs nothing.

    Without `machine` only what would be refused anywhere: its models, devices and folders are not looked at.
    """
    registry.check(config.env.name, registry.constructor_options(config.env))
    if config.warmup.steps and not has_random_player(registry.class_of(config.env.name)):
        missing = f"{config.env.name} has no random_valid_action(rng) -> str, which the warm-up plays with"
        raise ValueError(f"warmup.steps={config.warmup.steps}: {missing}; write one, or set warmup.steps=0")
    if config.emulated is not None:
        pace_of(config)
    if not machine:
        return
    if config.elastic.trace:
        _check_trace(config.elastic.trace)
    if config.wandb:
        load_wandb(config.wandb)
    _check_device(config.engine.device)
    if config.model.path is not None:
        _check_model(config, config.model.path)
    if new_run:
        _check_output(config.output_dir)


def check_prompt(config: Config) -> str:
    """Makes the environment and reads its first prompt: ValueError if it leaves no room for an answer.

    Returns a notice if an episode of `env.max_turns` turns may not fit, else "". An environment that is slow to begin, or
    raises, is left to its own process, which says so.
    """
    trial = _first_observation(config)
    if trial is None:
        return ""
    environment, observation = trial
    limit, per_turn = _limit(config), config.rollout.max_tokens
    words = "".join([system_prompt_of(environment), *example_of(environment), observation])
    frames = (1 + len(example_of(environment))) * FRAME_TOKENS
    turns = config.env.max_turns * (per_turn + len(observation.encode()) + FRAME_TOKENS)
    if len(words.encode()) + frames + turns <= limit:  # a token is at least a byte: no need to count
        return ""
    first, more = _count(config, environment, observation)
    if first + per_turn > limit:
        raise ValueError(
            f"{_limit_name(config)}={limit}: the first prompt of {config.env.name} has {first} tokens, and an answer may "
            f"have rollout.max_tokens={per_turn}; must be at least {first + per_turn}"
        )
    whole = first + config.env.max_turns * per_turn + (config.env.max_turns - 1) * more
    if whole > limit:
        return (
            f"{_limit_name(config)}={limit}: episodes of env.max_turns={config.env.max_turns} may need {whole} tokens "
            f"and are cut short where they do"
        )
    return ""


# ------------------------------------------------------------------------------------------------- the model folder


def _check_model(config: Config, path: str) -> None:
    folder = Path(path)
    try:
        model = model_config.from_folder(folder)
    except ValueError as error:
        text = str(error).removeprefix(f"model={path!r}: ")
        hub = "" if (folder / "config.json").exists() else hub_name(config.recipe, path)
        brings = f"; `hf download {hub} --local-dir {path}` brings it" if hub else ""
        raise ValueError(f"model.path={path!r}: {text}{brings}") from None
    check_lengths(config, model.max_position, "the model's max_position")
    check_layers(config.trainer, model.num_layers, "the model's num_layers")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"model.path={path!r}: no tokenizer.json in this folder")
    if not _has_chat_template(folder):
        where = "chat_template in tokenizer_config.json, or chat_template.jinja"
        raise ValueError(f"model.path={path!r}: has no chat template ({where}); take the instruct or chat model of the family")
    if config.emulated is None:
        _check_weights(path, folder)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    if any((folder / "additional_chat_templates").glob("*.jinja")):
        return True
    settings = folder / "tokenizer_config.json"
    try:
        return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))
    except (ValueError, AttributeError):
        raise ValueError(f"model.path={str(folder)!r}: tokenizer_config.json is not a JSON object") from None


def _check_weights(path: str, folder: Path) -> None:
    """Every weight file is there, and as long as its header says."""
    from safetensors import SafetensorError, safe_open

    for file in _weight_files(path, folder):
        if not file.is_file():
            raise ValueError(f"model.path={path!r}: {INDEX} names {file.name}, which is not there")
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"model.path={path!r}: {file.name} is damaged or not complete ({error})") from None
        except OSError as error:
            raise ValueError(f"model.path={path!r}: {file.name} cannot be read ({error.strerror})") from None


def _weight_files(path: str, folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"model.path={path!r}: {INDEX} is damaged, it has no weight_map") from None
    if not (folder / WEIGHTS).is_file():
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in folder.glob(pattern))
        found = f"; it has {', '.join(others[:3])}" if others else ""
        raise ValueError(f"model.path={path!r}: has neither {WEIGHTS} nor {INDEX} (only safetensors are read){found}")
    return [folder / WEIGHTS]


# ------------------------------------------------------------------------------------------------- the machine


def _check_device(device: str) -> None:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise ValueError(f"engine.device={device!r}: must be auto, cpu, cuda or cuda:N")
    if device.startswith("cuda") and not any(Path("/dev").glob("nvidia[0-9]*")):
        raise ValueError(f"engine.device={device!r}: this machine has no CUDA device; must be auto or cpu here")


def _check_trace(path: str) -> None:
    try:
        read_trace(Path(path))
    except OSError as error:
        raise ValueError(f"elastic.trace={path!r}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"elastic.trace={path!r}: {error}") from None


def _check_output(output_dir: str) -> None:
    folder = Path(output_dir).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        raise ValueError(f"output_dir={output_dir!r}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir={output_dir!r}: {there} cannot be written")


# ------------------------------------------------------------------------------------------------- the first prompt


def _first_observation(config: Config) -> tuple[Environment, str] | None:
    """The environment after reset(0). None if it raises or is not through in time: then its own process will tell."""
    got: list[tuple[Environment, Any]] = []

    def play() -> None:
        try:
            environment = registry.make(config.env.name, **registry.constructor_options(config.env))
            got.append((environment, environment.reset(0)[0]))
            getattr(environment, "close", lambda: None)()
        except (Exception, SystemExit):
            return

    thread = threading.Thread(target=play, name="first prompt", daemon=True)
    thread.start()
    thread.join(min(TRIAL_S, config.env.timeout_s))
    return got[0] if got and isinstance(got[0][1], str) else None


def _count(config: Config, environment: Environment, observation: str) -> tuple[int, int]:
    """Tokens of the first prompt, and those that an observation like the first adds between two answers."""
    with tempfile.TemporaryDirectory() as temporary:
        if config.model.path is not None:
            folder = Path(config.model.path)
        else:
            folder = fresh_model.write_model_folder(temporary, config.model, words_of(environment))
        tokenizer = Tokenizer.from_folder(folder)
    first = tokenizer.chat_start(opening(system_prompt_of(environment), observation, example_of(environment)))
    more = tokenizer.chat_continue({"role": "user", "content": observation}, ended=True)
    return len(first), len(more)


def _limit(config: Config) -> int:
    if config.engine.max_model_len is not None:
        return config.engine.max_model_len
    path = config.model.path
    return config.model.max_position if path is None else model_config.from_folder(path).max_position


def _limit_name(config: Config) -> str:
    if config.engine.max_model_len is not None:
        return "engine.max_model_len"
    return "model.max_position" if config.model.path is None else "the model's max_position"
