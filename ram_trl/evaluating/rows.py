"""What is evaluated: the base, agents, merges and directories, each put in the place of the base in a loaded model."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..arithmetic.methods import METHODS
from ..errors import ConfigError
from ..merging.merge import merge_agents
from ..merging.plan import MergeSettings, plan_merge
from ..registering.restore import restore_agent, restored_dtype
from ..storage.base_model import BaseDigests, check_same_base, open_recorded_base
from ..storage.checkpoint import Checkpoint
from ..storage.fisher import FisherStore
from ..storage.registry import AgentRegistry, RegisteredAgent
from .in_place import apply_agent, apply_directory, apply_merge


__all__ = ["Row", "check_names", "find_agents", "make_merge_rows", "make_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """A model to evaluate.

    Args:
        name (`str`):
            Name in the table.
        kind (`str`):
            `"base"`, `"agent"` or `"merged"`.
        agent (`str`, *optional*):
            Name of the agent, without version.
        identity (`dict`):
            What tells it from any other model.
        apply (`Callable[[nn.Module], AbstractContextManager]`):
            Makes a loaded base this model while the context lasts.
        write (`Callable[[Path], Path]`):
            Gives a directory of this model, the one named if it has to be written.
        dtype (`torch.dtype`, *optional*):
            For an agent, the widest dtype that its parameters had.
    """

    name: str
    kind: str
    agent: str | None
    identity: dict[str, Any]
    apply: Callable[[nn.Module], AbstractContextManager]
    write: Callable[[Path], Path]
    dtype: torch.dtype | None = None


def find_agents(registry: AgentRegistry, agents: Sequence[str] | None) -> list[RegisteredAgent]:
    """The agents that are to be evaluated; by default the latest version of every one.

    Raises:
        RamTrlError: if there is none, or not one of that name.
    """
    chosen = list(registry) if agents is None else [registry.get(spec) for spec in agents]
    if not chosen:
        raise ConfigError(f"no agent to evaluate: {registry.path} holds none")
    return chosen


def make_rows(
    registry: AgentRegistry, agents: Sequence[str] | None, directories: Sequence[str], base_model: str | None
) -> tuple[list[Row], Checkpoint]:
    """Look up the base, agents and directories that are to be evaluated.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        agents (`Sequence[str]`, *optional*):
            Agents, `"math"` or `"math@v2"`; by default the latest version of every agent.
        directories (`Sequence[str]`):
            Directories of merged models, `DIR` or `NAME=DIR`.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.

    Returns:
        `tuple[list[Row], Checkpoint]`: the rows, the base first; and the base.

    Raises:
        RamTrlError: naming what cannot be evaluated.
    """
    chosen = find_agents(registry, agents)
    check_same_base(chosen)
    base, first = open_recorded_base(chosen[0], base_model), chosen[0]
    identity = {"base": first.manifest.base_model.digest}
    rows = [
        Row("base", "base", None, identity, lambda _: _recorded(base, first), lambda _: _recorded_path(base, first))
    ]
    rows += [_agent_row(registry, agent, base, base_model) for agent in chosen]
    rows += [_directory_row(first, directory, base_model) for directory in directories]
    check_names(rows)
    return rows, base


def make_merge_rows(
    registry: AgentRegistry, agents: list[str], merges: Mapping[str, Mapping[str, Any]], base_model: str | None
) -> list[Row]:
    """Look up merges that are to be evaluated.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        agents (`list[str]`):
            Agents that are merged where a merge names no others.
        merges (`Mapping[str, Mapping]`):
            Settings of [`apply_merge`], by name; `agents` among them, if they are not these.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.

    Returns:
        `list[Row]`: a row for each merge.

    Raises:
        RamTrlError: naming what cannot be merged.
    """
    return [_merge_row(registry, name, agents, settings, base_model) for name, settings in merges.items()]


def check_names(rows: Sequence[Row]) -> None:
    """Refuse two rows of one name.

    Raises:
        ConfigError: naming it.
    """
    names = [row.name for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"{min(twice)!r} would be evaluated twice: give merges names of their own, and directories as NAME=DIR"
        )


@contextmanager
def _recorded(base: Checkpoint, agent: RegisteredAgent) -> Iterator[None]:
    """The base as it is, once it is known to be the one that the agents were recorded over: gains are against it."""
    _recorded_path(base, agent)
    yield


def _recorded_path(base: Checkpoint, agent: RegisteredAgent) -> Path:
    digests = BaseDigests(base, agent.tensors())
    for name in base.tensors:
        digests.compare(name, base.digest(name))
    return base.path


def _agent_row(registry: AgentRegistry, agent: RegisteredAgent, base: Checkpoint, base_model: str | None) -> Row:
    records = agent.tensors()
    dtypes = {restored_dtype(agent, info, records) for info in base.tensors.values()}

    def write(path: Path) -> Path:
        restore_agent(registry, str(agent), str(path), base_model=base_model)
        return path

    return Row(
        str(agent),
        "agent",
        agent.name,
        {"agent": agent.digest},
        lambda model: apply_agent(model, registry, str(agent), base_model=base_model),
        write,
        functools.reduce(torch.promote_types, dtypes),
    )


def _merge_row(
    registry: AgentRegistry, name: str, agents: list[str], settings: Mapping[str, Any], base_model: str | None
) -> Row:
    known = {"agents", *(field.name for field in fields(MergeSettings))}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(
            f"merge {name!r} has unknown options {', '.join(unknown)}; known are: {', '.join(sorted(known))}"
        )
    arguments = {"agents": agents, **settings}
    plan = plan_merge(
        registry,
        arguments["agents"],
        MergeSettings(**{key: value for key, value in arguments.items() if key != "agents"}),
        base_model,
    )
    plan.close()
    identity = {
        "agents": [[str(agent), agent.digest] for agent in plan.agents],
        "settings": asdict(plan.settings),
    }
    # the same bytes, whatever computes them
    del identity["settings"]["engine"]
    if METHODS[plan.settings.method].needs_fisher:
        # it can be estimated anew
        fishers = [FisherStore(registry).get(agent).manifest for agent in plan.agents]
        identity["fisher"] = [asdict(fisher)["files"] for fisher in fishers]

    def write(path: Path) -> Path:
        merge_agents(registry, str(path), base_model=base_model, **arguments)
        return path

    return Row(
        name,
        "merged",
        None,
        identity,
        lambda model: apply_merge(model, registry, base_model=base_model, **arguments),
        write,
    )


def _directory_row(agent: RegisteredAgent, directory: str, base_model: str | None) -> Row:
    name, sign, named = directory.partition("=")
    if sign and not Path(directory).exists():
        directory = named
    else:
        name = ""
    source = Checkpoint.open(directory)
    files = [
        [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(source.path.glob("*.safetensors"))
    ]
    path = Path(directory).resolve()
    # a version of a generalist in a registry
    version = re.fullmatch(r"v0*(\d+)", path.name)
    return Row(
        name or (f"{path.parent.name}@v{version[1]}" if version else path.name),
        "merged",
        None,
        {"directory": source.name, "files": files},
        lambda model: apply_directory(model, agent, directory, base_model=base_model),
        lambda path: source.path,
    )
