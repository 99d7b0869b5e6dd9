"""The model card of a merged model."""

import json
import os
from typing import Any

from ..arithmetic.methods import METHODS
from .report import COLUMNS, format_row


__all__ = ["model_card"]

_TAGS = ("merge", "ram", "reinforcement-learning", "trl", "ram_trl")

_RESCALING = """\
An agent's unique changes are multiplied by its weight and lambda; "effective" is lambda as it
  came out after rounding to the dtype of these weights. Shared changes are averaged by weight."""
_NOT_RESCALING = '"effective" is what is left in these weights of what the agent alone changed.'

_CARD = """\
---
{front_matter}
---

# {title}

One model merged from {num_agents} reinforced {agents}, all trained from `{base}`, with
[{method}](https://huggingface.co/papers/{paper}){options}.
{summary}

| {columns} |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
{rows}

- A parameter counts as changed when it differs from the base by more than epsilon = {epsilon:g}.
- rho = shared / unique. {columns_mean}
- Parameters by the number of agents that changed them: {overlap}; {total:,} in all.
{warnings}
## How to use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```

## How to reproduce

```bash
accelerate launch recipes/merge.py --registry REGISTRY --output_dir OUTPUT {arguments}
```

Base: `{base}`{revision}, digest `{digest}`. ram_trl {version}. All counts are in `merge_report.json`.
"""


def model_card(report: dict[str, Any], title: str) -> str:
    """Text of `README.md`: YAML front matter that the Hub reads, the counts, how to reproduce.

    Args:
        report (`dict`):
            Content of `merge_report.json`.
        title (`str`):
            Name of the model.
    """
    base, agents, method = report["base_model"], report["agents"], METHODS[report["method"]]
    front_matter = []
    is_local = os.path.isabs(base["name"])
    if not is_local:
        # The Hub refuses a card that names a directory. JSON strings are YAML strings, whatever is in them.
        front_matter += ["base_model:", f"- {json.dumps(base['name'])}", "base_model_relation: merge"]
    front_matter += [
        "library_name: transformers",
        "tags:",
        *(f"- {tag}" for tag in _TAGS if method.rescale or tag != "ram"),
    ]
    options = ", ".join(f"{name} = {value:g}" for name, value in report["method_options"].items())
    overlap = ", ".join(f"{count:,} by {number or 'none'}" for number, count in enumerate(report["overlap_histogram"]))
    return _CARD.format(
        front_matter="\n".join(front_matter),
        title=title,
        num_agents=len(agents),
        agents="agent" if len(agents) == 1 else "agents",
        # of a local base the name of its directory, not where it is
        base=os.path.basename(base["name"]) if is_local else base["name"],
        method=method.title,
        paper=method.paper,
        options=f" ({options})" if options else "",
        summary=method.summary,
        columns_mean=_RESCALING if method.rescale else _NOT_RESCALING,
        columns=" | ".join(COLUMNS),
        rows="\n".join(f"| {' | '.join(format_row(row))} |" for row in agents),
        epsilon=report["epsilon"],
        total=report["total_parameters"],
        overlap=overlap,
        warnings="".join(f"- Warning: {warning}.\n" for warning in report["warnings"]),
        arguments=_arguments(report),
        revision=f" at revision `{base['revision']}`" if base["revision"] else "",
        digest=base["digest"],
        version=report["ram_trl_version"],
    )


def _arguments(report: dict[str, Any]) -> str:
    agents = " ".join(f"{row['name']}@v{row['version']}" for row in report["agents"])
    weights = " ".join(f"{row['name']}@v{row['version']}={row['weight']!r}" for row in report["agents"])
    own = ("r", "alpha") if METHODS[report["method"]].rescale else ()
    options = ("method", *own, "epsilon", "output_dtype", "rounding", "seed")
    listed = " ".join(f"--{option} {report[option]}" for option in options)
    if report["method_options"]:
        pairs = " ".join(f"{name}={value!r}" for name, value in report["method_options"].items())
        listed += f" --method_options {pairs}"
    return f"--agents {agents} {listed} --weights {weights}"
