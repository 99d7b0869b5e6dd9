"""Two agents, or two versions of one, beside each other: what they changed, and what differs in their records.

What they changed is measured by the same streaming pass as an analysis; nothing of a model is loaded.
"""

import json
from collections.abc import Iterator
from typing import Any

from ..arithmetic.defaults import DEFAULT_EPSILON
from ..errors import ConfigError
from ..progress import Progress
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..table import align
from .analyze import analyze_agents


__all__ = ["compare_agents", "format_comparison"]

# Kinds of modules that the text names; the data has all.
_MODULES_SHOWN = 8
_WIDEST_CELL = 60
# Metrics that the text shows begin so.
_METRICS_SHOWN = ("reward", "eval_", "train_loss")


def compare_agents(
    registry: AgentRegistry | str,
    first: str,
    second: str,
    *,
    epsilon: float | None = None,
    base_model: str | None = None,
    records_only: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare two agents.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        first (`str`), second (`str`):
            `"math"` (its latest version), `"math@v2"` or `"math@best"`.
        epsilon (`float`, *optional*, defaults to `1e-5`, or what the agents were stored with, if that is more):
            A parameter counts as changed when it differs from the base by more than this (equation 1).
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        records_only (`bool`, *optional*, defaults to `False`):
            Compare what is recorded alone, which needs no base model.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        `dict`: `agents`; `records`, for every field that differs its two values; `changes`, what was measured, or
        `None`, and then `no_changes` says why. docs/REGISTRY.md describes it.

    Raises:
        RamTrlError: naming what is wrong and the cure.
    """
    registry = AgentRegistry(registry)
    agents = [registry.get(first), registry.get(second)]
    versions = [str(agent) for agent in agents]
    if versions[0] == versions[1]:
        raise ConfigError(f"{first} and {second} are the same version, {versions[0]}: name another one")
    data: dict[str, Any] = {"agents": versions, "records": _differences(*agents), "changes": None, "no_changes": None}
    if records_only:
        data["no_changes"] = "only the records were asked for"
    elif agents[0].manifest.base_model.digest != agents[1].manifest.base_model.digest:
        data["no_changes"] = "they have different base models, so their changes are not changes of the same parameters"
    else:
        if epsilon is None:
            epsilon = max(DEFAULT_EPSILON, *(agent.manifest.snapshot.epsilon for agent in agents))
        options = {"epsilon": epsilon, "base_model": base_model}
        data["changes"] = _changes(analyze_agents(registry, agents=versions, **options, progress=progress))
    return data


def _changes(analysis: dict[str, Any]) -> dict[str, Any]:
    [pair], agents = analysis["pairs"], analysis["agents"]
    modules = [
        {**{key: module[key] for key in ("module", "parameters", "changed", "density")}, "difference": b - a}
        for module in analysis["modules"]
        for a, b in [module["density"]]
    ]
    return {
        "total_parameters": analysis["total_parameters"],
        "epsilon": analysis["epsilon"],
        **{key: [agent[key] for agent in agents] for key in ("changed", "density")},
        "norm": [agent["magnitude"]["all"]["l2"] for agent in agents],
        **{key: value for key, value in pair.items() if key != "agents"},
        # kinds of modules, the largest difference of densities first
        "modules": sorted(modules, key=lambda module: (-abs(module["difference"]), module["module"])),
    }


def _differences(first: RegisteredAgent, second: RegisteredAgent) -> dict[str, list[Any]]:
    """Every field of the manifests that differs, by its path, with both values; `None` where one has none."""
    one, other = _fields(first), _fields(second)
    return {key: [one.get(key), other.get(key)] for key in sorted({*one, *other}) if one.get(key) != other.get(key)}


def _fields(agent: RegisteredAgent) -> dict[str, Any]:
    content = agent.manifest.to_dict()
    # those say no more than that they are two
    for key in ("agent", "digest", "files"):
        del content[key]
    return dict(_flatten(content, ""))


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def format_comparison(data: dict[str, Any]) -> str:
    """The comparison as text."""
    lines = ["  ".join(("comparing", *data["agents"])), ""]
    if data["changes"] is None:
        lines.append(f"What they changed is not compared: {data['no_changes']}.")
    else:
        lines += _format_changes(data["changes"], data["agents"])
    rows = [
        (key, *map(_cell, values))
        for key, values in data["records"].items()
        if not key.startswith("training.metrics.") or key.removeprefix("training.metrics.").startswith(_METRICS_SHOWN)
    ]
    if rows:
        lines += ["", *align([("recorded", *data["agents"]), *rows], 3)]
    if hidden := len(data["records"]) - len(rows):
        lines += ["", f"{hidden} more metrics differ: --json has them."]
    return "\n".join(lines)


def _format_changes(changes: dict[str, Any], agents: list[str]) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    first, second = agents
    rows = [
        ("of the base's parameters", first, second),
        ("changed", *(f"{count:,}" for count in changes["changed"])),
        ("density", *map(share, changes["density"])),
        ("norm of the update", *(f"{norm:.4g}" for norm in changes["norm"])),
        ("changed by the other too", share(changes["share_of_first"]), share(changes["share_of_second"])),
    ]
    cosine = changes["cosine"]
    lines = [
        *align(rows, 1),
        "",
        f"{changes['overlap']:,} parameters were changed by both, {share(changes['sign_agreement'])} of them in the "
        f"same direction; cosine of the updates {'-' if cosine is None else f'{cosine:.4f}'} "
        f"(epsilon {changes['epsilon']:g}).",
    ]
    modules = [module for module in changes["modules"][:_MODULES_SHOWN] if module["difference"]]
    if modules:
        rows = [(module["module"], *map(share, module["density"])) for module in modules]
        lines += ["", *align([("density, where it differs most", first, second), *rows], 1)]
    return lines


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else "-" if value is None else json.dumps(value)
    # of a path its end tells most
    return text if len(text) <= _WIDEST_CELL else f"...{text[3 - _WIDEST_CELL :]}"
