"""Public names of the engine, loaded when first asked for. For users: nothing inside pearl imports from here."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "LLM": "pearl.engine.llm",
    "Engine": "pearl.engine.engine",
    "EngineConfig": "pearl.config",
    "SamplingParams": "pearl.protocol",
    "Role": "pearl.protocol",
    "Completion": "pearl.engine.request",
    "RequestUpdate": "pearl.engine.request",
    "EngineStats": "pearl.engine.core",
    "ModelConfig": "pearl.engine.models.config",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pearl.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
