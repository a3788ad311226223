"""A small stand-in for the package msgspec, for images that lack it: `install()` makes `import msgspec` find it.

Owns nothing but that: structs as dataclasses, and encoding by the standard library. It decodes nothing, so it serves an engine
that is alone in its process (all that the GPU suite needs) and no two that talk to each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import sys
from types import ModuleType
from typing import Any, dataclass_transform

FLAGS = {"frozen", "kw_only"}


@dataclass_transform()
class Struct:
    """Subclasses are dataclasses; empty lists and dictionaries as defaults are new ones in every instance, as in msgspec."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, (list, dict, set)):
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        dataclasses.dataclass(**{name: value for name, value in options.items() if name in FLAGS})(cls)


class DecodeError(ValueError):
    """What msgspec raises for a message that it cannot read."""


class ValidationError(DecodeError):
    """For one whose fields are wrong."""


def _encode(value: Any) -> bytes:
    return json.dumps(value, default=dataclasses.asdict).encode()


def _decode(text: str | bytes, **options: Any) -> Any:
    raise DecodeError("this process has no msgspec: it can send, but not read what others send")


def install() -> bool:
    """Puts the stand-in in msgspec's place if that is not there; True if it did."""
    with contextlib.suppress(ImportError):
        importlib.import_module("msgspec")
        return False
    made = ModuleType("msgspec")
    codec = ModuleType("codec")
    codec.encode, codec.decode = _encode, _decode  # type: ignore[attr-defined]
    structs = ModuleType("msgspec.structs")
    structs.replace = dataclasses.replace  # type: ignore[attr-defined]
    made.__dict__.update(
        Struct=Struct, DecodeError=DecodeError, ValidationError=ValidationError, json=codec, msgpack=codec, structs=structs
    )
    sys.modules["msgspec"] = made
    return True
