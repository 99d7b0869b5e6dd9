"""What a registry holds that nobody needs: found, and removed on request.

That is the trash, what crashes and breaks left behind while something was written, labels and Fisher information of
versions that are gone. A version that is there, its number and its labels are never touched.
"""

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, CorruptedFileError
from ..progress import Progress, meter
from ..storage.durable import STAGING_PREFIX, explain_os_errors
from ..storage.generalists import LATEST
from ..storage.labels import ALIASES, TAGS
from ..storage.names import QUARANTINE, SIGNATURE, TRASH, VERSION, is_name
from ..storage.registry import AgentRegistry
from ..storage.versions import VersionStore, discard


__all__ = ["Garbage", "collect_garbage", "find_garbage"]


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that `gc` removes.

    Args:
        path (`Path`):
            The file or directory.
        what (`str`):
            What it is: `"agent math@v2, removed"`.
        bytes (`int`):
            Bytes of its files.
        is_still ([`Callable`], *optional*):
            Looked at once more before it is removed: whether it still is what it was.
    """

    path: Path
    what: str
    bytes: int
    is_still: Callable[[], bool] | None = None


def collect_garbage(
    registry: AgentRegistry,
    *,
    min_age: float = 24.0,
    quarantine: bool = False,
    progress: Progress | None = None,
) -> list[Garbage]:
    """Remove what [`find_garbage`] finds; arguments as there.

    Returns:
        `list[Garbage]`: what was removed.

    Raises:
        StorageError: if something cannot be removed.
    """
    garbage = find_garbage(registry, min_age=min_age, quarantine=quarantine)
    advance = meter("gc", sum(one.bytes for one in garbage), progress)
    removed = []
    for one in garbage:
        with explain_os_errors(f"removing {one.path}"):
            if os.path.lexists(one.path) and (one.is_still is None or one.is_still()):
                # another gc may be faster
                with contextlib.suppress(FileNotFoundError):
                    discard(one.path)
                    removed.append(one)
        advance(one.bytes)
    return removed


def find_garbage(registry: AgentRegistry, *, min_age: float = 24.0, quarantine: bool = False) -> list[Garbage]:
    """Find what can be removed from a registry; nothing is changed.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        min_age (`float`, *optional*, defaults to 24.0):
            Hours in which nothing was written to what was being written, before it is taken for left behind.
        quarantine (`bool`, *optional*, defaults to `False`):
            Whether to find what is in quarantine too.

    Raises:
        AgentNotFoundError: if there is no registry.
        ConfigError: if the age is negative or no number.
    """
    if not min_age >= 0:
        raise ConfigError(f"min_age={min_age!r} is no number of hours: use 0 for whatever is left behind, whenever")
    registry.check_exists()
    with explain_os_errors(f"reading the registry {registry.path}"):
        return list(_walk(registry, min_age * 3600, [TRASH, *([QUARANTINE] if quarantine else [])]))


def _walk(registry: AgentRegistry, min_age: float, emptied: list[str]) -> Iterator[Garbage]:
    stores = (registry.store, registry.generalists.store, registry.fishers)
    for place in (TRASH, QUARANTINE):
        for store in stores:
            yield from _hidden(store, place, place in emptied)
    folders = []
    for store in stores:
        folders += [store.path, *_folders(store.path)]
        folders += [path / labels for path in _folders(store.path) for labels in (ALIASES, TAGS)]
        hidden = [store.hidden(place) for place in (TRASH, QUARANTINE)]
        folders += [path for one in hidden if not _is_linked(one) for path in _folders(one.path)]
    # the registry itself may be named by a link, as any folder
    for folder in [registry.path, *(folder for folder in folders if not folder.is_symlink())]:
        yield from _left_behind(folder, min_age)
    for store in (registry.store, registry.generalists.store):
        for name in _names(store.path):
            yield from _orphan_labels(store, name, _kept(store, emptied))
    kept = _kept(registry.store, emptied)
    for name in _names(registry.fishers.path):
        for number in registry.fishers.versions(name):
            path = registry.fishers.version_dir(name, number)
            is_gone = functools.partial(_is_gone, registry.store, name, number, kept)
            if is_gone():
                yield Garbage(path, f"Fisher of {name}@v{number}, which is gone", _size(path), is_gone)


def _hidden(store: VersionStore, place: str, is_emptied: bool) -> Iterator[Garbage]:
    hidden = store.hidden(place)
    if _is_linked(hidden):
        return
    for name in _names(hidden.path):
        numbers = hidden.versions(name)
        for number in numbers if is_emptied else ():
            path = hidden.version_dir(name, number)
            state = "removed" if place == TRASH else "in quarantine"
            yield Garbage(path, f"{store.kind} {name}@v{number}, {state}", _size(path))
        for file in sorted((hidden.path / name).glob("v*.json")):
            if is_emptied or file.stem not in {hidden.version_dir(name, number).name for number in numbers}:
                yield Garbage(file, "a note of what was in quarantine", _size(file))


def _is_linked(hidden: VersionStore) -> bool:
    """Whether trash or quarantine is a link, which may lead anywhere: it is left alone."""
    return hidden.path.is_symlink() or hidden.path.parent.is_symlink()


def _kept(store: VersionStore, emptied: list[str]) -> list[str]:
    """Where versions out of sight stay, so that what belongs to them does too."""
    return [place for place in (TRASH, QUARANTINE) if place not in emptied or _is_linked(store.hidden(place))]


def _left_behind(folder: Path, min_age: float) -> Iterator[Garbage]:
    """What was being written, or removed, when the process ended."""
    for path in _entries(folder):
        if path.name.startswith(STAGING_PREFIX) and _is_old(path, min_age):
            yield Garbage(path, "left behind", _size(path), functools.partial(_is_old, path, min_age))


def _orphan_labels(store: VersionStore, name: str, kept: list[str]) -> Iterator[Garbage]:
    """Aliases, tags and signatures of versions that are gone, and what was the latest of nothing."""
    labels, folder = store.labels(name), store.path / name

    def is_orphan(alias: str) -> bool:
        try:
            number = labels.read_alias(alias)
        except CorruptedFileError:
            # which verify reports
            return False
        return number is not None and _is_gone(store, name, number, kept)

    def is_empty() -> bool:
        return not any(place.versions(name) for place in [store, *map(store.hidden, kept)])

    for alias in [] if (folder / ALIASES).is_symlink() else labels.alias_names():
        if is_orphan(alias):
            path = labels.alias_path(alias)
            what = f"alias {name}@{alias} of a version that is gone"
            yield Garbage(path, what, _size(path), functools.partial(is_orphan, alias))
    signatures = [path for path in _entries(folder) if path.name.endswith(SIGNATURE)]
    found = [(path, VERSION.fullmatch(path.name.removesuffix(SIGNATURE))) for path in signatures]
    beside = [("signature", path, int(match[1])) for path, match in found if match]
    tagged = [] if (folder / TAGS).is_symlink() else labels.all_tags()
    for what, path, number in [("tags", labels.tags_path(n), n) for n in tagged] + beside:
        is_gone = functools.partial(_is_gone, store, name, number, kept)
        if is_gone():
            yield Garbage(path, f"{what} of {name}@v{number}, which is gone", _size(path), is_gone)
    if (folder / LATEST).is_file() and is_empty():
        what = f"what was the latest of {name}, of which nothing is left"
        yield Garbage(folder / LATEST, what, _size(folder / LATEST), is_empty)


def _is_gone(store: VersionStore, name: str, number: int, kept: list[str]) -> bool:
    """Whether a version was there and will not come back."""
    there = number in store.versions(name) or any(number in store.hidden(place).versions(name) for place in kept)
    return not there and (store.was_used(name, number) or not os.path.lexists(store.path / name))


def _names(path: Path) -> list[str]:
    return [folder.name for folder in _folders(path)]


def _folders(path: Path) -> list[Path]:
    """Folders of names; none that a link leads to, which may be anywhere."""
    folders = [] if path.is_symlink() else _entries(path)
    return [folder for folder in folders if is_name(folder.name) and folder.is_dir() and not folder.is_symlink()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _all_below(path: Path) -> Iterator[os.stat_result]:
    """What is known of a file or directory and of everything in it; what goes meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError):
        yield os.lstat(path)
    for folder, folders, files in [] if path.is_symlink() else os.walk(path):
        for name in [*folders, *files]:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(folder, name))


def _size(path: Path) -> int:
    return sum(status.st_size for status in _all_below(path) if not stat.S_ISDIR(status.st_mode))


def _is_old(path: Path, min_age: float) -> bool:
    """Whether nothing was written there for so many seconds."""
    return time.time() - max((status.st_mtime for status in _all_below(path)), default=0.0) >= min_age
