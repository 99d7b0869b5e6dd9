"""Agents from elsewhere into a registry: fetched, compared with their manifest, then visible. Not before."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ConfigError, CorruptedFileError
from ..progress import Progress, meter
from ..storage.durable import explain_os_errors, publish
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.versions import verify_files
from .catalogue import Catalogue, Held
from .fetch import check_space, fetch, staging_for
from .fishers import find_fishers, left_out
from .labels import Transfer, label_changes
from .places import local_path, open_remote
from .remote import LocalFolder, Source


__all__ = ["bring", "pull_agents"]


def pull_agents(
    registry: AgentRegistry | str | os.PathLike,
    source: str | os.PathLike,
    agents: Sequence[str] | None = None,
    *,
    overwrite_aliases: bool = False,
    progress: Progress | None = None,
) -> list[Transfer]:
    """Fetch agents from another place. What is here already is not fetched again, nor what a broken pull has left.

    Args:
        registry ([`AgentRegistry`] or `str`):
            Registry that gets them; created if there is none.
        source (`str`):
            Where they are: `"hf://USER/REPO"`, optionally with `@REVISION`, a URL that fsspec knows, or a directory.
        agents (`Sequence[str]`, *optional*):
            Which: `"math"` (its latest version), `"math@v2"` or `"math@best"`. Default: the latest version of every
            agent and those that aliases mean.
        overwrite_aliases (`bool`, *optional*, defaults to `False`):
            Whether an alias that means another version here is moved to where it points there.
        progress (`Callable`, *optional*):
            Called with what is done, how many bytes of it, and how many there are.

    Returns:
        `list[Transfer]`: what became of each version. A version keeps its number, if that was never used here.

    Raises:
        AgentNotFoundError: if there is no such place or agent.
        ConfigError: if the place is no URL that can be used.
        CorruptedFileError: if something there is not what was registered. Nothing of it is visible here.
        StorageError: if the place cannot be reached, or the disk is full.
    """
    folder = local_path(source)
    place = open_remote(str(source)) if folder is None else LocalFolder(folder)
    return bring(place, AgentRegistry(registry), agents, overwrite_aliases, progress)


def bring(
    source: Source,
    registry: AgentRegistry,
    agents: Sequence[str] | None,
    overwrite_aliases: bool = False,
    progress: Progress | None = None,
) -> list[Transfer]:
    """[`pull_agents`] from a place that is open already."""
    if isinstance(source, LocalFolder) and source.path.resolve() == registry.path.resolve():
        raise ConfigError(f"{registry.path} is to be filled from itself: name another place")
    catalogue = Catalogue(source)
    wanted = [catalogue.agent(name, number) for name, number in catalogue.choose(agents, "aliased")]
    fishers, notes = find_fishers(catalogue, wanted)
    parts: list[tuple[Path, Held]] = []
    for held in wanted:
        same = registry.find_same(held.name, held.digest)
        if same is None:
            parts.append((registry.store.path / held.name, held))
        if str(held) in fishers and (same is None or not _fisher_place(registry, same).exists()):
            parts.append((registry.fisher_dir(held.name, held.number).parent, fishers[str(held)]))
    check_space(registry.path, parts)
    registry.check_writable()
    advance = meter("pull", sum(part.size for _, part in parts), progress)
    arrived: list[tuple[Held, RegisteredAgent, int]] = []
    for held in wanted:
        with explain_os_errors(f"pulling {held}"):
            agent, moved = _bring_agent(source, registry, held, advance)
            if fisher := fishers.get(str(held)):
                try:
                    moved += _bring_fisher(source, _fisher_place(registry, agent), fisher, advance)
                except CorruptedFileError as error:
                    # the agent is here, and others wait
                    del fishers[str(held)]
                    notes[str(held)] = [left_out(error)]
        arrived.append((held, agent, moved))
    more = _bring_labels(catalogue, registry, arrived, overwrite_aliases)
    return [
        Transfer(
            agent=str(held),
            arrived=str(agent),
            size=held.size + (fishers[str(held)].size if str(held) in fishers else 0),
            moved=moved,
            notes=[*notes.get(str(held), ()), *more.get(str(held), ())],
        )
        for held, agent, moved in arrived
    ]


def _bring_agent(
    source: Source, registry: AgentRegistry, held: Held, advance: Callable[[int], None]
) -> tuple[RegisteredAgent, int]:
    """The version in the registry, and the bytes that it took."""
    if (same := registry.find_same(held.name, held.digest)) is not None:
        return same, 0
    with staging_for(registry.store.path / held.name, held) as staged:
        # another process may have brought it while this one waited
        if (same := registry.find_same(held.name, held.digest)) is not None:
            return same, 0
        moved = fetch(source, held, staged, advance)
        return registry.admit(staged, held.number), moved


def _bring_fisher(source: Source, target: Path, held: Held, advance: Callable[[int], None]) -> int:
    """Fisher information belongs to a version, and need not be there: what is here already stays."""
    if target.exists():
        return 0
    with staging_for(target.parent, held) as staged:
        if target.exists():
            return 0
        moved = fetch(source, held, staged, advance)
        verify_files(staged, held.files, f"the Fisher of agent {held}, which arrived", "pull it again")
        publish(staged, target)
        return moved


def _fisher_place(registry: AgentRegistry, agent: RegisteredAgent) -> Path:
    return registry.fisher_dir(agent.name, agent.version)


def _bring_labels(
    catalogue: Catalogue,
    registry: AgentRegistry,
    arrived: list[tuple[Held, RegisteredAgent, int]],
    overwrite_aliases: bool,
) -> dict[str, list[str]]:
    """Write the labels that are new here; notes by version about those that are not written."""
    notes = {}
    for name in dict.fromkeys(held.name for held, _, _ in arrived):
        labels = registry.labels(name)
        numbers = {held.number: agent.version for held, agent, _ in arrived if held.name == name}
        changes = label_changes(catalogue, name, numbers, labels.aliases(), labels.tags(), overwrite_aliases)
        for alias, number in changes.aliases.items():
            labels.set_alias(alias, number)
        for number, tags in changes.tags.items():
            for tag in tags:
                labels.add_tag(number, tag)
        notes |= {f"{name}@v{number}": lines for number, lines in changes.notes.items()}
    return notes
