"""What a Hugging Face folder says beside the model itself: its generation defaults, and where models are if it is none.

Only reads. Nothing here is applied to a request: defaults of a folder change log-probs, so whoever wants them passes them on.
Torch-free.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OTHER_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
DESCRIPTIONS = ("config.json", "generation_config.json")
"""All that an engine without weights and text needs of a folder."""
SMALL = "SmolLM2-135M-Instruct"
DEPTH = 4
"""How far below a folder models are looked for: RUN/checkpoints/step_000010/NAME is as deep as a run has one."""


def descriptions(folder: str | Path) -> dict[str, str]:
    """The texts of DESCRIPTIONS, of those that are there, by name."""
    paths = [Path(folder) / name for name in DESCRIPTIONS]
    return {path.name: path.read_text() for path in paths if path.is_file()}


def generation_defaults(folder: str | Path) -> dict[str, Any]:
    """What `generation_config.json` recommends, as keywords of SamplingParams; {} if it recommends nothing.

    `do_sample: false` is temperature 0. EOS ids are not among them (they always count), nor is what the engine has no word for.
    ValueError if the file is not a JSON object.
    """
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    names = {name: name for name in SAME_NAMES} | OTHER_NAMES
    found = {ours: said[theirs] for theirs, ours in names.items() if said.get(theirs) is not None}
    return found | {"temperature": 0.0} if said.get("do_sample") is False else found


def models_below(folder: str | Path) -> list[Path]:
    """Folders with `config.json` and safetensors somewhere below `folder`, the newest first; hidden ones are passed over."""
    found = [
        path.parent
        for depth in range(1, DEPTH + 1)
        for path in Path(folder).glob("/".join(["[!.]*"] * depth + ["config.json"]))
        if any(path.parent.glob("*.safetensors"))
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def where_else(folder: str | Path) -> str:
    """The end of an error message: "" or a hint at the newest models below the folder, or at what would bring this one."""
    below = models_below(folder)
    if not below and Path(folder).name == SMALL:
        return f"; `python -m pearl.engine.smollm2 {folder}` brings it"
    return f"; below it are {', '.join(map(str, below[:3]))}" if below else ""
