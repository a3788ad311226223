"""Checks of single fields of a configuration: each raises ValueError with the field's name, its value and what is valid.

Owns the wording. It does not know any section of the configuration.
"""

from __future__ import annotations

import math
from typing import Any


def one_of(name: str, value: object, valid: tuple) -> None:
    """ValueError unless `value` is one of `valid`."""
    if value not in valid:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, valid))}")


def at_least(section: Any, prefix: str, low: float, *names: str, whole: bool = False) -> None:
    """ValueError for the first of these fields of `section` that is not a finite number (`whole`: integer) >= `low`."""
    for name in names:
        value = getattr(section, name)
        if not _is_number(value, whole) or value < low:
            kind = "an integer " if whole else ""
            raise ValueError(f"{prefix + '.' if prefix else ''}{name}={value!r}: must be {kind}>= {low}")


def above_zero(section: Any, prefix: str, *names: str) -> None:
    """ValueError for the first of these fields of `section` that is not a finite number above 0."""
    for name in names:
        value = getattr(section, name)
        if not _is_number(value) or value <= 0:
            raise ValueError(f"{prefix + '.' if prefix else ''}{name}={value!r}: must be > 0")


def within(section: Any, prefix: str, low: float, high: float, *names: str) -> None:
    """ValueError for the first of these fields of `section` that is not a number in [low, high]."""
    for name in names:
        value = getattr(section, name)
        if not _is_number(value) or not low <= value <= high:
            raise ValueError(f"{prefix}.{name}={value!r}: must be in [{low}, {high}]")


def below_one(section: Any, prefix: str, *names: str) -> None:
    """ValueError for the first of these fields of `section` that is not a number in [0, 1)."""
    for name in names:
        value = getattr(section, name)
        if not _is_number(value) or not 0 <= value < 1:
            raise ValueError(f"{prefix}.{name}={value!r}: must be in [0, 1)")


def below(section: Any, prefix: str, less: str, more: str) -> None:
    """ValueError unless the field `less` of `section` is below its field `more`."""
    low, high = getattr(section, less), getattr(section, more)
    if not low < high:
        raise ValueError(f"{prefix}.{less}={low:g}: must be below {prefix}.{more}={high:g}")


def _is_number(value: Any, whole: bool = False) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
