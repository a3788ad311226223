"""Recipes by name: each is a module of this package with a function `recipe() -> Config`.

A recipe of a model on the Hugging Face Hub names it as `HUB_NAME`.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from pearl.config import Config

RECIPES = ("quickstart", "frozenlake_random", "sokoban", "smollm2_hilo", "qwen3_8b_swe", "qwen3_30b_a3b_swe")


def load(name: str) -> Config:
    """The Config of a recipe; ValueError lists the known names."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(RECIPES)}"
        raise ValueError(f"recipe {name!r}: {hint}")
    return _module(name).recipe()


def hub_name(name: str, path: str) -> str:
    """Where the Hugging Face Hub has the model that a recipe looks for at `path`; "" where it names none, or another path."""
    if name not in RECIPES or _module(name).recipe().model.path != path:
        return ""
    return getattr(_module(name), "HUB_NAME", "")


def listed() -> str:
    """A line per recipe: its name and what it is."""
    first_lines = {name: (_module(name).__doc__ or "").splitlines()[0] for name in RECIPES}
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:<{width}}  {line}" for name, line in first_lines.items())


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"pearl.rl.recipes.{name}")
