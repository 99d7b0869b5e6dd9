"""What came of what: the versions of agents and generalists of a registry in the order of time.

An agent descends from the model that it was trained from, if that was a generalist, and from the version that it was
carried over from (`ram-trl rebase`); a generalist from the agents that it was merged of.
"""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, InvalidNameError, RamTrlError
from ..storage.generalists import Generalist, GeneralistStore
from ..storage.labels import Labels
from ..storage.names import VERSION, is_name, parse_spec
from ..storage.registry import AgentRegistry, RegisteredAgent


__all__ = ["Event", "lineage"]

logger = logging.getLogger(__name__)

_GENERALISTS = "generalists"


@dataclass(kw_only=True, slots=True)
class Event:
    """One version came into being.

    Args:
        version (`str`):
            `"math@v2"`.
        kind (`str`):
            `"agent"` or `"generalist"`.
        created (`str`):
            When, ISO 8601 in UTC.
        how (`str`):
            In words: what was trained, how it was merged.
        base_model (`str`):
            Name of the base model.
        parents (`list[str]`):
            The versions that it descends from: an agent's from generalists and agents, a generalist's from agents.
        missing (`list[str]`):
            Those of them that are not in the registry any more, or not as they were.
        children (`list[str]`):
            The versions that descend from it.
        verdict (`str`, *optional*):
            Of a generalist: `"accepted"` or why the gate refused it.
        is_latest (`bool`):
            Whether the name alone means this version.
        aliases (`list[str]`), tags (`list[str]`):
            Its labels.
    """

    version: str
    kind: str
    created: str
    how: str
    base_model: str
    parents: list[str]
    missing: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    verdict: str | None = None
    is_latest: bool = False
    aliases: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)


def lineage(registry: AgentRegistry | str, spec: str | None = None) -> list[Event]:
    """The history of a registry, or of one name in it.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        spec (`str`, *optional*):
            `"math"` or `"math@v2"`, an agent or a generalist: only its versions, what they descend from, and what
            descends from them.

    Returns:
        `list[Event]`: in the order of time, parents first. A version whose manifest is damaged is left out, and
        logged.

    Raises:
        AgentNotFoundError: if there is no such registry, agent, generalist or version.
    """
    registry = AgentRegistry(registry)
    registry.names()
    agents, generalists = _readable("agent", registry), _readable("generalist", registry.generalists)
    digests = {agent.digest: key for key, agent in agents.items()}
    events = {key: _trained(registry, agent) for key, agent in agents.items()}
    events |= {key: _merged(registry, one) for key, one in generalists.items()}
    parents = {key: _origins(registry, agent) for key, agent in agents.items()}
    for key, one in generalists.items():
        # a digest names a version for certain; it may have another number in the registry that it came from
        parents[key] = [
            digests.get(parent.digest, f"agent {parent.agent}@v{parent.version} as it was merged")
            for parent in one.manifest.parents
        ]
    for key, origins in parents.items():
        for origin in origins:
            version = origin.split()[1]
            events[key].parents.append(version)
            if origin in events:
                events[origin].children.append(events[key].version)
            else:
                events[key].missing.append(version)
    chosen = set(events) if spec is None else _related(registry, spec, parents)
    return [events[key] for key in sorted(chosen, key=lambda key: (events[key].created, _depth(key, parents), key))]


def _readable(kind: str, store: AgentRegistry | GeneralistStore) -> dict[str, Any]:
    """Every version that can be read. An agent and a generalist may have the same name, so keys say which it is."""
    found = {}
    for name in store.names():
        for number in store.versions(name):
            try:
                found[f"{kind} {name}@v{number}"] = store.get(f"{name}@v{number}")
            except RamTrlError as error:
                logger.warning("left out: %s", error)
    return found


def _trained(registry: AgentRegistry, agent: RegisteredAgent) -> Event:
    manifest, how = agent.manifest, [agent.manifest.kind]
    if isinstance(steps := manifest.training.get("step"), int):
        how.append(f"{steps:,} steps")
    if "rebased_from" in manifest.training:
        how.append("carried over")
    return Event(
        version=str(agent),
        kind="agent",
        created=manifest.created,
        how=", ".join(how),
        base_model=manifest.base_model.name,
        parents=[],
        is_latest=agent.version == registry.versions(agent.name)[-1],
        **_labels(registry.labels(agent.name), agent.version),
    )


def _merged(registry: AgentRegistry, generalist: Generalist) -> Event:
    manifest, store = generalist.manifest, registry.generalists
    try:
        is_latest = store.latest(generalist.name) == generalist.version
    except RamTrlError as error:
        logger.warning("%s", error)
        is_latest = False
    return Event(
        version=str(generalist),
        kind="generalist",
        created=manifest.created,
        how=f"merged by {manifest.settings.get('method', 'an unknown method')}",
        base_model=manifest.base_model.name,
        parents=[],
        verdict="accepted" if manifest.refused is None else f"refused: {manifest.refused}",
        is_latest=is_latest,
        **_labels(store.labels(generalist.name), generalist.version),
    )


def _labels(labels: Labels, number: int) -> dict[str, list[str]]:
    aliases = [alias for alias, meant in labels.aliases().items() if meant == number]
    return {"aliases": aliases, "tags": labels.tags().get(number, [])}


def _origins(registry: AgentRegistry, agent: RegisteredAgent) -> list[str]:
    """What an agent was trained from, if it was a generalist of this registry, and what it was carried over from."""
    origins, base = [], Path(agent.manifest.base_model.name)
    folder, name, version = ("", "", *base.parts)[-3:] if base.parts else ("", "", "")
    numbered = VERSION.fullmatch(version)
    if folder == _GENERALISTS and is_name(name) and numbered:
        # where it says is nothing any more if the registry was moved; Path.is_dir would raise where one may not look
        if not os.path.isdir(base) or registry.path.resolve() in base.resolve().parents:
            origins.append(f"generalist {name}@v{int(numbered[1])}")
    with contextlib.suppress(InvalidNameError, KeyError):
        name, number = parse_spec(agent.manifest.training["rebased_from"], "agent")
        # of a name or an alias alone nobody knows any more which version it meant
        if isinstance(number, int):
            origins.append(f"agent {name}@v{number}")
    return origins


def _related(registry: AgentRegistry, spec: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """Versions that a spec means, with all that they descend from and all that descends from them."""
    meant: set[str] = set()
    for kind, store in (("agent", registry.store), ("generalist", registry.generalists.store)):
        with contextlib.suppress(AgentNotFoundError):
            name, numbers = store.find(spec)
            meant |= {f"{kind} {name}@v{number}" for number in numbers} & set(parents)
    if not meant:
        raise AgentNotFoundError(f"no agent and no generalist {spec!r} in {registry.path}: see ram-trl log without it")
    children: dict[str, list[str]] = {}
    for key, origins in parents.items():
        for origin in origins:
            children.setdefault(origin, []).append(key)
    return (_closure(meant, parents) | _closure(meant, children)) & set(parents)


def _closure(start: set[str], neighbours: Mapping[str, Sequence[str]]) -> set[str]:
    reached, border = set(start), list(start)
    while border:
        new = set(neighbours.get(border.pop(), ())) - reached
        reached |= new
        border += new
    return reached


def _depth(key: str, parents: Mapping[str, Sequence[str]]) -> int:
    """How many versions came before, of those registered in the same second the order."""
    return len(_closure({key}, parents))
