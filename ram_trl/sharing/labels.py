"""Aliases and tags travel with the versions that they are about. An alias that is there already stays."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .catalogue import Catalogue


__all__ = ["LabelChanges", "Transfer", "label_changes"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What became of one version.

    Args:
        agent (`str`):
            The version where it came from: `"math@v2"`.
        arrived (`str`):
            The version where it went: another number if `v2` was used there.
        size (`int`):
            Bytes of its files, with those of its Fisher information.
        moved (`int`):
            Bytes that were sent or fetched now; 0 if it was there already.
        notes (`list[str]`):
            Aliases that were there already and name another version; Fisher information that is damaged.
    """

    agent: str
    arrived: str
    size: int
    moved: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class LabelChanges:
    """Labels to write at the place where versions of one agent arrived.

    Args:
        aliases (`dict[str, int]`):
            Aliases and the versions, there, that they are to mean.
        tags (`dict[int, list[str]]`):
            New tags by version, there.
        notes (`dict[int, list[str]]`):
            By version, here, in words: the aliases that were left as they are there.
    """

    aliases: dict[str, int]
    tags: dict[int, list[str]]
    notes: dict[int, list[str]]


def label_changes(
    source: Catalogue,
    name: str,
    numbers: Mapping[int, int],
    aliases: Mapping[str, int],
    tags: Mapping[int, Collection[str]],
    overwrite_aliases: bool,
) -> LabelChanges:
    """Which labels of an agent are new where its versions went.

    Args:
        source ([`Catalogue`]):
            Where they come from.
        name (`str`):
            Name of the agent.
        numbers (`Mapping[int, int]`):
            The versions that travelled: their numbers at the source, and where they went.
        aliases (`Mapping[str, int]`):
            Aliases that are there.
        tags (`Mapping[int, Collection[str]]`):
            Tags that are there, by version.
        overwrite_aliases (`bool`):
            Whether an alias that means another version there is moved.
    """
    changes = LabelChanges({}, {}, {})
    for alias, number in source.aliases(name).items():
        if number not in numbers or aliases.get(alias) == numbers[number]:
            continue
        if alias in aliases and not overwrite_aliases:
            note = f"alias {alias} stays {name}@v{aliases[alias]} (--overwrite_aliases moves it)"
            changes.notes.setdefault(number, []).append(note)
        else:
            changes.aliases[alias] = numbers[number]
    for number, arrived in numbers.items():
        new = [tag for tag in source.tags(name, number) if tag not in tags.get(arrived, ())]
        if new:
            changes.tags[arrived] = new
    return changes
