"""Recipes by name: each is a module of this package with a function `recipe() -> Config`."""

from __future__ import annotations

import difflib
import importlib

from pearl.config import Config

RECIPES = ("quickstart",)


def load(name: str) -> Config:
    """The Config of a recipe; ValueError lists the known names."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(RECIPES)}"
        raise ValueError(f"recipe {name!r}: {hint}")
    return importlib.import_module(f"pearl.rl.recipes.{name}").recipe()
