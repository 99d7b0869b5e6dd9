"""Continual integration: the registry's agents become the next version of a generalist in the same registry.

The candidate is written, judged by a gate while nobody sees it yet, and published with the verdict. If it is refused
it is kept, says why, and does not become the latest version.
"""

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..arithmetic.defaults import RESCALING
from ..arithmetic.methods import METHODS
from ..distributed import SINGLE, World
from ..errors import ConfigError, IncompatibleAgentError
from ..progress import Progress
from ..storage.base_model import differs_from_base
from ..storage.checkpoint import Checkpoint, parse_size
from ..storage.generalists import Generalist
from ..storage.manifest import GeneralistManifest, ParentRecord
from ..storage.names import check_name
from ..storage.registry import AgentRegistry
from ..version import __version__
from .gate import Gate, gate_name, judge
from .merge import run_merge
from .plan import MergePlan, MergeSettings, plan_merge, plan_together


__all__ = ["Integration", "integrate_agents"]

logger = logging.getLogger(__name__)

# Arguments of a merge beside its settings.
_NO_SETTINGS = ("agents", "base_model", "gate", "max_shard_size")


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
            Agents to merge, `"math"`, `"math@v2"` or `"math@best"`; by default the latest version of every agent.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        max_shard_size (`str`, *optional*, defaults to `"5GB"`):
            Largest size of a weight file.
        gate (`Callable[[Path, dict], bool | str]`, *optional*):
            Called on rank 0 alone with the directory of the candidate, a model that transformers loads, and the
            content of its `merge_report.json`. It returns `True` to promote the candidate, `False` or a reason to
            refuse it. An error in it refuses too. It may add files to the directory, and must not talk to other
            ranks, which wait for it. Without a gate every candidate is promoted.
        world ([`~ram_trl.distributed.World`], *optional*):
            The processes that merge together.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.
        **settings:
            `method`, `method_options`, `r`, `alpha`, `epsilon`, `weights`, `output_dtype`, `rounding`, `seed`,
            `engine`: see [`merge_agents`].

    Returns:
        [`~ram_trl.storage.generalists.Generalist`]: the new version, on every rank; `manifest.refused` says why the
        gate refused it, if it did.

    Raises:
        RamTrlError: naming what is wrong and the cure; nothing was written then.
    """
    registry = AgentRegistry(registry)

    def make_plan() -> MergePlan:
        options = {"agents": agents, "gate": gate, "max_shard_size": max_shard_size, **settings}
        Integration(generalist, options)
        plan = plan_merge(registry, agents, MergeSettings(**settings), base_model)
        registry.generalists.check_writable(generalist)
        return plan

    plan = plan_together(make_plan, world)
    made: list[Generalist] = []

    @contextlib.contextmanager
    def stage() -> Iterator[Path]:
        with registry.generalists.stage(generalist) as staged:
            yield staged
            manifest = _manifest(generalist, plan)
            if gate is not None:
                manifest.gate = gate_name(gate)
                manifest.refused = judge(gate, staged)
            made.append(registry.generalists.commit(staged, manifest))

    run_merge(plan, stage, generalist, max_shard_size, world=world, progress=progress)
    merged = world.gather(made)[0][0]
    if world.is_main and merged.manifest.refused is not None:
        logger.warning("%s was not promoted: %s", merged, merged.manifest.refused)
    return merged


@dataclass(frozen=True, slots=True)
class Integration:
    """What a training run merges after it has registered its agent.

    Args:
        generalist (`str`):
            Name of the generalist.
        options (`Mapping`):
            Arguments of [`integrate_agents`]: `agents`, `base_model`, `max_shard_size`, `gate` and settings.

    Raises:
        ConfigError: if an option is unknown or has a value that no merge could use.
        InvalidNameError: if the generalist's name is not one.
    """

    generalist: str
    options: Mapping[str, Any]

    def __post_init__(self):
        check_name(self.generalist, "generalist")
        known = [option.name for option in dataclasses.fields(MergeSettings)]
        settings = {name: value for name, value in self.options.items() if name not in _NO_SETTINGS}
        if unknown := sorted(set(map(str, settings)) - set(known)):
            raise ConfigError(
                f"{unknown[0]!r} is no option of a merge; there are {', '.join((*_NO_SETTINGS, *known))}"
            )
        method = METHODS[MergeSettings(**settings).method]
        if method.rescale is None and (given := sorted({"r", "alpha"} & set(settings))):
            raise ConfigError(f"method={method.name} has no {given[0]}, which is for {', '.join(RESCALING)}")
        parse_size(self.options.get("max_shard_size", "5GB"))
        agents, gate = self.options.get("agents"), self.options.get("gate")
        is_list = isinstance(agents, list | tuple) and all(isinstance(agent, str) for agent in agents)
        if agents is not None and not is_list:
            raise ConfigError(f"agents={agents!r} is not a list of names")
        if gate is not None and not callable(gate):
            raise ConfigError(f"gate={gate!r} is not a function")

    def check(self, registry: AgentRegistry, trained: str, base: Checkpoint) -> None:
        """Find before training what would fail after it.

        Args:
            registry ([`AgentRegistry`]):
                The registry.
            trained (`str`):
                Name of the agent that the run trains.
            base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
                Base model of the run.

        Raises:
            ConfigError: if the agents to merge leave out the one that is trained, or a weight is of none of them.
            AgentNotFoundError: if one of the others is not there.
            IncompatibleAgentError: if one of the others has another base.
        """
        registry.generalists.check_writable(self.generalist)
        named = self.options.get("agents")
        if named is not None and trained not in named:
            raise ConfigError(
                f"the agents to merge are {', '.join(named)}: {trained!r}, which is trained, is left out"
            )
        others = [registry.get(spec) for spec in (registry.names() if named is None else named) if spec != trained]
        known = {trained, *(named or ()), *(name for other in others for name in (other.name, str(other)))}
        if unknown := sorted(set(self.options.get("weights") or ()) - known):
            raise ConfigError(f"weights has {unknown[0]!r}, which will not be merged; there are {', '.join(known)}")
        for other in others:
            if differs_from_base(other, base):
                raise IncompatibleAgentError(
                    f"agent {other} has another base ({other.manifest.base_model.name}) than this run ({base.name}): "
                    "leave it out with merge_config={'agents': [...]}, or carry it over with ram-trl rebase; train "
                    "from a generalist without merge_to, then rebase and merge"
                )

    def command(self, registry: AgentRegistry) -> str:
        """The command line that merges so."""
        words: dict[str, list[Any]] = {"registry": [registry.path], "merge_to": [self.generalist]}
        for name, value in self.options.items():
            if name in ("weights", "method_options"):
                words[name] = [f"{key}={number}" for key, number in (value or {}).items()]
            elif name == "agents":
                words[name] = list(value or ())
            elif value is not None:
                words[name] = [gate_name(value) if name == "gate" else value]
        options = [f"--{name} {shlex.join(map(str, values))}" for name, values in words.items() if values]
        return f"accelerate launch recipes/merge.py {' '.join(options)}"


def _manifest(generalist: str, plan: MergePlan) -> GeneralistManifest:
    settings = {**dataclasses.asdict(plan.settings), "weights": {}}
    for agent, weight in zip(plan.agents, plan.weights, strict=True):
        settings["weights"][str(agent)] = weight
    recorded = plan.agents[0].manifest.base_model
    return GeneralistManifest(
        generalist=generalist,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ram_trl_version=__version__,
        # where it is now
        base_model=dataclasses.replace(recorded, name=plan.base.name, revision=plan.base.revision),
        parents=[ParentRecord(agent=agent.name, version=agent.version, digest=agent.digest) for agent in plan.agents],
        settings=settings,
    )
