"""Registries elsewhere: agents pushed to and pulled from the Hugging Face Hub and anything that fsspec knows."""

import importlib
from typing import Any


# Imported when asked for: a registry in a directory needs nothing of it.
_PUBLIC = {"open_registry": "reading", "pull_agents": "pull", "push_agents": "push"}

__all__ = ["open_registry", "pull_agents", "push_agents"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ram_trl.sharing' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
