"""Reinforced Agent Merging for TRL.

Register the agents of your GRPO runs, then merge them into one model:

```python
from ram_trl import RAMRegistryCallback

trainer = GRPOTrainer(..., callbacks=[RAMRegistryCallback("registry", agent="math")])
```

```bash
accelerate launch recipes/merge.py --registry registry --output_dir merged
```
"""

import importlib
from typing import Any

from .version import __version__


# Where each public name lives. They are imported when asked for: the callback needs transformers, the rest does not.
_PUBLIC = {
    "AgentRegistry": "storage.registry",
    "MergeConfig": "config",
    "RAMRegistryCallback": "callbacks",
    "RamTrlError": "errors",
    "analyze_agents": "analyzing.analyze",
    "apply_agent": "evaluating.in_place",
    "apply_merge": "evaluating.in_place",
    "integrate_agents": "merging.integrate",
    "merge_agents": "merging.merge",
    "rebase_agent": "registering.rebase",
    "register_agent": "registering.register",
    "restore_agent": "registering.restore",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ram_trl' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
