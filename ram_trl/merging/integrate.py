"""Continual integration: the registry's agents become the next version of a generalist in the same registry.

The candidate is written, judged by a gate while nobody sees it yet, and published with the verdict. If it is refused
it is kept, says why, and does not become the latest version.
"""

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..distributed import SINGLE, World
from ..errors import ConfigError
from ..progress import Progress
from ..storage.checkpoint import parse_size
from ..storage.durable import read_json
from ..storage.generalists import Generalist
from ..storage.manifest import GeneralistManifest, ParentRecord
from ..storage.registry import AgentRegistry
from ..storage.versions import check_name
from ..version import __version__
from .merge import run_merge
from .plan import MergePlan, MergeSettings, plan_merge


__all__ = ["Gate", "check_integration", "integrate_agents", "merge_command"]

logger = logging.getLogger(__name__)

# Arguments of a merge beside its settings.
_NO_SETTINGS = ("agents", "base_model", "gate", "max_shard_size")

# Takes the directory of a candidate, which transformers loads, and the content of its merge_report.json. Gives True to
# promote it, False or a reason to refuse it.
Gate = Callable[[Path, dict[str, Any]], bool | str]


def integrate_agents(
    registry: AgentRegistry | str,
    generalist: str,
    *,
    agents: Sequence[str] | None = None,
    base_model: str | None = None,
    max_shard_size: str = "5GB",
    gate: Gate | None = None,
    world: World = SINGLE,
    progress: Progress | None = None,
    **settings: Any,
) -> Generalist:
    """Merge registered agents into the next version of a generalist. All ranks call it.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        generalist (`str`):
            Name of the generalist.
        agents (`Sequence[str]`, *optional*):
            Agents to merge, `"math"` or `"math@v2"`; by default the latest version of every agent.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        max_shard_size (`str`, *optional*, defaults to `"5GB"`):
            Largest size of a weight file.
        gate (`Callable[[Path, dict], bool | str]`, *optional*):
            Called on rank 0 with the directory of the candidate, a model that transformers loads, and the content of
            its `merge_report.json`. It returns `True` to promote the candidate, `False` or a reason to refuse it. An
            error in it refuses too. Without a gate every candidate is promoted.
        world ([`~ram_trl.distributed.World`], *optional*):
            The processes that merge together.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.
        **settings:
            `method`, `r`, `alpha`, `epsilon`, `weights`, `output_dtype`, `rounding`, `seed`, `engine`: see
            [`merge_agents`].

    Returns:
        [`~ram_trl.storage.generalists.Generalist`]: the new version, on every rank; `manifest.refused` says why the
        gate refused it, if it did.

    Raises:
        RamTrlError: naming what is wrong and the cure; nothing was written then.
    """
    registry = AgentRegistry(registry)

    def make_plan() -> MergePlan:
        check_integration(generalist, gate=gate, max_shard_size=max_shard_size, **settings)
        registry.generalists.check_writable(generalist)
        return plan_merge(registry, agents, MergeSettings(**settings), base_model)

    plan = world.run(make_plan)
    made: list[Generalist] = []

    @contextlib.contextmanager
    def stage() -> Iterator[Path]:
        with registry.generalists.stage(generalist) as staged:
            yield staged
            manifest = _manifest(generalist, plan)
            if gate is not None:
                manifest.gate = _name(gate)
                manifest.refused = _ask(gate, manifest.gate, staged)
            made.append(registry.generalists.commit(staged, manifest))

    run_merge(plan, stage, generalist, max_shard_size, world=world, progress=progress)
    merged = world.gather(made)[0][0]
    if world.is_main and merged.manifest.refused is not None:
        logger.warning("%s was not promoted: %s", merged, merged.manifest.refused)
    return merged


def check_integration(generalist: str, **arguments: Any) -> None:
    """Refuse what no merge could use, before there is anything to merge. Arguments as [`integrate_agents`].

    Raises:
        ConfigError: if a setting is unknown or has a value that cannot be used.
        InvalidNameError: if the generalist's name is not one.
    """
    check_name(generalist, "generalist")
    known = [option.name for option in dataclasses.fields(MergeSettings)]
    settings = {name: value for name, value in arguments.items() if name not in _NO_SETTINGS}
    if unknown := sorted(set(settings) - set(known)):
        raise ConfigError(f"{unknown[0]!r} is no option of a merge; there are {', '.join((*_NO_SETTINGS, *known))}")
    try:
        MergeSettings(**settings)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"an option of the merge has a value of the wrong type: {error}") from error
    parse_size(arguments.get("max_shard_size", "5GB"))
    if not (arguments.get("gate") is None or callable(arguments["gate"])):
        raise ConfigError(f"gate={arguments['gate']!r} is not a function")


def merge_command(registry: AgentRegistry, generalist: str, arguments: Mapping[str, Any]) -> str:
    """The command line that does what [`integrate_agents`] does with these arguments."""
    options: dict[str, list[Any]] = {"registry": [registry.path], "merge_to": [generalist]}
    for name, value in arguments.items():
        if name == "weights":
            options[name] = [f"{agent}={weight}" for agent, weight in value.items()]
        elif name == "gate" and value is not None:
            options[name] = [_name(value)]
        elif value is not None:
            options[name] = list(value) if name == "agents" else [value]
    words = [f"--{name} {' '.join(shlex.quote(str(value)) for value in values)}" for name, values in options.items()]
    return "accelerate launch recipes/merge.py " + " ".join(words)


def _manifest(generalist: str, plan: MergePlan) -> GeneralistManifest:
    settings = {**dataclasses.asdict(plan.settings), "weights": {}}
    for agent, weight in zip(plan.agents, plan.weights, strict=True):
        settings["weights"][str(agent)] = weight
    return GeneralistManifest(
        generalist=generalist,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ram_trl_version=__version__,
        base_model=plan.agents[0].manifest.base_model,
        parents=[
            ParentRecord(agent=agent.name, version=agent.version, digest=agent.manifest.to_dict()["digest"])
            for agent in plan.agents
        ],
        settings=settings,
    )


def _name(gate: Gate) -> str:
    """`MODULE:FUNCTION` of a gate."""
    # an object that can be called has a name only as a class
    named = gate if hasattr(gate, "__qualname__") else type(gate)
    return f"{named.__module__}:{named.__qualname__}"


def _ask(gate: Gate, name: str, candidate: Path) -> str | None:
    """What the gate has against a candidate, or `None`."""
    try:
        verdict = gate(candidate, read_json(candidate / "merge_report.json"))
    except Exception as error:
        logger.exception("the gate %s failed", name)
        return f"the gate {name} failed: {type(error).__name__}: {error}"
    if verdict is True:
        return None
    if isinstance(verdict, str) and verdict:
        return verdict
    if verdict is False:
        return f"the gate {name} refused it"
    return f"the gate {name} returned {verdict!r}, not True, False or a reason"
