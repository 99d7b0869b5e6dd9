"""Agents of a registry to another place: checked here, sent as far as they are missing there, whole or not at all."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from ..errors import AgentNotFoundError
from ..progress import Progress, meter
from ..storage.names import version_dir_name
from ..storage.registry import AgentRegistry
from .catalogue import Catalogue, Held
from .fishers import verified_fishers
from .labels import Transfer, label_changes
from .places import local_path, open_remote
from .pull import bring
from .remote import Bundle, LocalFolder, RemoteChangedError


__all__ = ["push_agents"]

# How often somebody else may be faster.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class _Plan:
    """Numbers at the other place by version here; what is to be sent; labels; notes by version here."""

    numbers: dict[str, int]
    bundles: dict[str, list[Bundle]]
    labels: dict[str, bytes]
    notes: dict[str, list[str]]


def push_agents(
    registry: AgentRegistry | str | os.PathLike,
    to: str | os.PathLike,
    agents: Sequence[str] | None = None,
    *,
    private: bool = True,
    overwrite_aliases: bool = False,
    progress: Progress | None = None,
) -> list[Transfer]:
    """Send agents to another place. What is there already is not sent again, nor what a broken push has left there.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        to (`str`):
            Where to: `"hf://USER/REPO"`, optionally with `@BRANCH`, a URL that fsspec knows, or a directory.
        agents (`Sequence[str]`, *optional*):
            Which: `"math"` (its latest version), `"math@v2"` or `"math@best"`. Default: the latest version of every
            agent and those that aliases mean.
        private (`bool`, *optional*, defaults to `True`):
            Whether a repository of the Hub that has to be made is private.
        overwrite_aliases (`bool`, *optional*, defaults to `False`):
            Whether an alias that means another version there is moved to where it points here.
        progress (`Callable`, *optional*):
            Called with what is done, how many bytes of it, and how many there are.

    Returns:
        `list[Transfer]`: what became of each version. A version keeps its number, if that was never used there.

    Raises:
        AgentNotFoundError: if there is no such registry or agent.
        ConfigError: if the place is no URL that can be used.
        CorruptedFileError: if an agent is damaged. Nothing is sent then.
        StorageError: if the place cannot be reached or written to.
    """
    registry, folder = AgentRegistry(registry), local_path(to)
    source = LocalFolder(registry.path)
    if not registry.exists():
        raise AgentNotFoundError(f"{registry.path} is not a registry: no agent was ever registered there")
    if folder is not None:
        return bring(source, AgentRegistry(folder), agents, overwrite_aliases, progress)
    here = Catalogue(source)
    wanted = [here.agent(name, number) for name, number in here.choose(agents, "aliased")]
    remote = open_remote(str(to))
    for held in wanted:
        registry.get(str(held)).verify()
    fishers, notes = verified_fishers(registry, here, wanted)
    remote.prepare(private)
    for attempt in range(_TRIES):
        plan = _plan(registry, here, wanted, fishers, Catalogue(remote), overwrite_aliases)
        bundles = [bundle for parts in plan.bundles.values() for bundle in parts]
        advance = meter("push", sum(sum(bundle.sizes.values()) for bundle in bundles), progress)
        try:
            if bundles or plan.labels:
                remote.add(bundles, plan.labels, advance)
            break
        except RemoteChangedError:
            if attempt == _TRIES - 1:
                raise
    return [_transfer(held, fishers.get(str(held)), plan, notes.get(str(held), [])) for held in wanted]


def _plan(
    registry: AgentRegistry,
    here: Catalogue,
    wanted: list[Held],
    fishers: dict[str, Held],
    there: Catalogue,
    overwrite_aliases: bool,
) -> _Plan:
    """What is missing there."""
    plan = _Plan({}, {}, {}, {})
    taken: dict[str, set[int]] = {}
    for held in wanted:
        number = there.same(held)
        parts = plan.bundles.setdefault(str(held), [])
        if number is None:
            number = there.begun(held)
            if number is None:
                number = there.free_number(held.name, held.number, taken.get(held.name, ()))
            parts.append(_bundle(registry, held, number))
        taken.setdefault(held.name, set()).add(number)
        plan.numbers[str(held)] = number
        fisher = fishers.get(str(held))
        if fisher is not None and not there.has_fisher(held.name, number):
            parts.append(_bundle(registry, fisher, number))
    for name in dict.fromkeys(held.name for held in wanted):
        numbers = {held.number: plan.numbers[str(held)] for held in wanted if held.name == name}
        tags = {number: there.tags(name, number) for number in numbers.values()}
        changes = label_changes(here, name, numbers, there.aliases(name), tags, overwrite_aliases)
        for alias, number in changes.aliases.items():
            plan.labels[f"agents/{name}/aliases/{alias}.json"] = json.dumps({"version": number}).encode() + b"\n"
        for number, new in changes.tags.items():
            folder = f"agents/{name}/tags/{version_dir_name(number)}"
            plan.labels.update({f"{folder}/{tag}": b"" for tag in new})
        plan.notes.update({f"{name}@v{number}": lines for number, lines in changes.notes.items()})
    return plan


def _bundle(registry: AgentRegistry, held: Held, number: int) -> Bundle:
    top = held.folder.partition("/")[0]
    sizes = {name: record.size for name, record in held.files.items()}
    return Bundle(
        folder=f"{top}/{held.name}/{version_dir_name(number)}",
        path=registry.path / held.folder,
        sizes=sizes,
        digest=held.digest if top == "agents" else blake3(held.manifest).hexdigest(),
        is_agent=top == "agents",
    )


def _transfer(held: Held, fisher: Held | None, plan: _Plan, notes: list[str]) -> Transfer:
    moved = sum(sum(bundle.sizes.values()) for bundle in plan.bundles[str(held)])
    return Transfer(
        agent=str(held),
        arrived=f"{held.name}@v{plan.numbers[str(held)]}",
        size=held.size + (fisher.size if fisher else 0),
        moved=moved,
        notes=[*notes, *plan.notes.get(str(held), ())],
    )
