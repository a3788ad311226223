"""Environments by name: short names of this package and users' own as "package.module:ClassName".

Owns the table of names and the checks of a choice before any process starts. Nothing is imported until it is asked for.
Invariant: `check` constructs nothing, and what it accepts `make` can call.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from typing import Any

from pearl.config import EnvOptions
from pearl.rl.envs.base import Environment

_TARGETS = {
    "calculator": "pearl.rl.envs.calculator:Calculator",
    "coding": "pearl.rl.envs.coding:Coding",
    "frozen_lake": "pearl.rl.envs.frozen_lake:FrozenLake",
    "gymnasium": "pearl.rl.envs.gymnasium_text:GymnasiumText",
    "hi_lo": "pearl.rl.envs.hi_lo:HiLo",
    "sokoban": "pearl.rl.envs.sokoban:Sokoban",
}


def register(name: str, target: str) -> None:
    """Gives "package.module:ClassName" a short name in this process; ValueError if the name is taken by another."""
    if ":" in name or not name:
        raise ValueError(f"name={name!r}: must not be empty or hold ':'")
    _split(target)
    if _TARGETS.setdefault(name, target) != target:
        raise ValueError(f"name={name!r}: is taken by {_TARGETS[name]}")


def names() -> list[str]:
    """The short names."""
    return sorted(_TARGETS)


def target_of(name: str) -> str:
    """The "package.module:ClassName" of a name (which another process can import); ValueError lists the valid names."""
    if ":" in name:
        _split(name)
        return name
    if name not in _TARGETS:
        near = difflib.get_close_matches(name, _TARGETS, n=1)
        hint = f"did you mean {near[0]!r}? (or" if near else f"must be one of {', '.join(names())} (or"
        raise ValueError(f"env.name={name!r}: {hint} package.module:ClassName for one of your own)")
    return _TARGETS[name]


def make(name: str, **options: Any) -> Environment:
    """A new environment; ValueError for an unknown name, option or value."""
    check(name, options)
    return class_of(name)(**options)


def check(name: str, options: dict[str, Any]) -> None:
    """ValueError if `make(name, **options)` would be refused; imports the class, constructs nothing."""
    kind = class_of(name)
    known = _parameters(kind)
    unknown = sorted(set(options) - set(known))
    if unknown and inspect.Parameter.VAR_KEYWORD not in {item.kind for item in known.values()}:
        raise ValueError(f"env.options.{unknown[0]}: unknown option of {name}; valid: {', '.join(known) or 'none'}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [key for key, item in known.items() if item.default is item.empty and item.kind not in variable]
    missing = [key for key in needed if key not in options]
    if missing:
        raise ValueError(f"env.options.{missing[0]}: {name} needs it; valid options: {', '.join(known)}")
    if hasattr(kind, "check_options"):
        kind.check_options(**options)


def constructor_options(options: EnvOptions) -> dict[str, Any]:
    """What the constructor gets: `options.options`, and the job's `max_turns` if it takes one and none was given."""
    takes_turns = "max_turns" in _parameters(class_of(options.name))
    return {"max_turns": options.max_turns, **options.options} if takes_turns else dict(options.options)


def class_of(name: str) -> type:
    """The class of a name; ValueError if it cannot be imported, or is not an environment's."""
    module_name, class_name = _split(target_of(name))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module: whatever is wrong in it
        reason = f"{'' if isinstance(error, ImportError) else type(error).__name__ + ': '}{error}"
        raise ValueError(f"env.name={name!r}: module {module_name!r} cannot be imported: {reason}") from error
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and _is_environment(kind)):
        valid = sorted(key for key, value in vars(module).items() if isinstance(value, type) and _is_environment(value))
        raise ValueError(
            f"env.name={name!r}: {class_name!r} is not a class with reset and step in {module_name}; "
            f"such are: {', '.join(valid) or 'none'}"
        )
    return kind


def _is_environment(kind: type) -> bool:
    return callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))


@functools.cache
def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(kind).parameters)
    except ValueError:  # some classes written in C have none to show
        return {}


def _split(target: str) -> tuple[str, str]:
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ValueError(f"env.name={target!r}: must look like package.module:ClassName")
    return module_name, class_name
