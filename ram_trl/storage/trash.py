"""Versions out of sight, and back: a trash that `gc` empties, and a quarantine for what is damaged.

```
registry/trash/agents/math/v000002            what was removed; its Fisher information in trash/fisher/math/v000002
registry/quarantine/agents/math/v000003       what failed verification
registry/quarantine/agents/math/v000003.json  {"reason": ..., "when": ...}
```

A version goes there, and comes back, by one rename: nobody sees a part of it. `agents/math/v000002.removed` is on disk
before, so that its number is not used again, whatever becomes of it.
"""

import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, ConfigError
from .durable import explain_os_errors, make_dirs, read_json, replace_json, sync_dir
from .manifest import GeneralistManifest, Manifest
from .names import QUARANTINE, TRASH, parse_spec
from .versions import VersionStore, discard, verify_files


__all__ = ["Trash", "note_path", "put_away", "read_note"]


class Trash:
    """Moves versions of one kind out of sight and back.

    Args:
        store ([`VersionStore`]):
            Where they are to be seen.
        read_manifest (`Callable`):
            Given the directory of a version, and what to do about damage, reads its manifest, or raises.
        beside ([`VersionStore`], *optional*):
            What goes with them: the Fisher information of agents.
    """

    def __init__(
        self,
        store: VersionStore,
        read_manifest: Callable[[Path, str], Manifest | GeneralistManifest],
        beside: VersionStore | None = None,
    ):
        self._store, self._read_manifest, self._beside = store, read_manifest, beside

    def remove(self, name: str, numbers: list[int], reason: str | None = None) -> list[str]:
        """Move versions into the trash or, for a reason, into quarantine.

        Returns:
            `list[str]`: the versions. Their numbers are not used again.
        """
        for number in numbers:
            put_away(self._store, name, number, reason)
            # afterwards: nobody looks at it without the version
            if self._beside and number in self._beside.versions(name):
                put_away(self._beside, name, number, reason, made_again=True)
        return [f"{name}@v{number}" for number in numbers]

    def quarantine(self, spec: str, reason: str) -> str:
        """Move one version into quarantine.

        Raises:
            AgentNotFoundError: if it is not there.
            ConfigError: if a name was given and no version.
        """
        name, numbers = self._store.find(spec)
        if "@" not in spec:
            raise ConfigError(f"name the version to quarantine: {name}@v{numbers[-1]}")
        with explain_os_errors(f"moving {self._store.kind} {spec} into quarantine"):
            return self.remove(name, numbers, reason)[0]

    def recover(self, spec: str) -> list[str]:
        """Bring versions back from where they are.

        Args:
            spec (`str`):
                `"math"`, all of its versions in the trash, or `"math@v2"`, from the trash or from quarantine.

        Returns:
            `list[str]`: the versions that are there again.

        Raises:
            AgentNotFoundError: if there is nothing to bring back.
            CorruptedFileError: if it is in quarantine and still damaged.
        """
        name, numbers, place = self._find(spec)
        with explain_os_errors(f"recovering {self._store.kind} {spec}"):
            for number in numbers:
                if place == QUARANTINE:
                    path = self._store.hidden(place).version_dir(name, number)
                    cure = f"it stays in quarantine: repair {path}, or make it again"
                    files = self._read_manifest(path, cure).files
                    verify_files(path, files, f"{self._store.kind} {name}@v{number}", cure)
                # first: nobody looks at it without the version
                beside = self._beside
                if beside and number in beside.hidden(place).versions(name) and number not in beside.versions(name):
                    _bring_back(beside, name, number, place)
                _bring_back(self._store, name, number, place)
        return [f"{name}@v{number}" for number in numbers]

    def _find(self, spec: str) -> tuple[str, list[int], str]:
        store = self._store
        name, version = parse_spec(spec, store.kind)
        number = store.labels(name).read_alias(version) if isinstance(version, str) else version
        hidden = {place: store.hidden(place).versions(name) for place in (TRASH, QUARANTINE)}
        if version is None and hidden[TRASH]:
            return name, hidden[TRASH], TRASH
        for place, numbers in hidden.items():
            if number in numbers:
                return name, [number], place
        if number in store.versions(name):
            raise AgentNotFoundError(f"{store.kind} {spec} is there: there is nothing to recover")
        listed = [f"{name}@v{number} in the {place}" for place, numbers in hidden.items() for number in numbers]
        raise AgentNotFoundError(f"no {store.kind} {spec} to recover; there is: {', '.join(listed) or 'nothing'}")


def put_away(
    store: VersionStore, name: str, number: int, reason: str | None = None, *, made_again: bool = False
) -> None:
    """Move a version into the trash or, for a reason, into quarantine.

    Args:
        store ([`VersionStore`]):
            The store that shows it.
        name (`str`):
            Name of the agent or generalist.
        number (`int`):
            Number of the version.
        reason (`str`, *optional*):
            What is wrong with it.
        made_again (`bool`, *optional*, defaults to `False`):
            Whether another may take its number, as of Fisher information.
    """
    place = TRASH if reason is None else QUARANTINE
    hidden = store.hidden(place).version_dir(name, number)
    if not made_again:
        store.mark_used(name, number)
    elif os.path.lexists(hidden):
        discard(hidden)
    if reason is not None:
        make_dirs(hidden.parent)
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        replace_json(note_path(hidden), {"reason": reason, "when": when})
    _move(store.version_dir(name, number), hidden)


def note_path(hidden: Path) -> Path:
    """Where it is written why a version is in quarantine."""
    return hidden.with_name(f"{hidden.name}.json")


def read_note(hidden: Path) -> dict[str, Any]:
    """Why and since when a version is in quarantine, as far as it is known."""
    return read_json(note_path(hidden)) if note_path(hidden).is_file() else {}


def _bring_back(store: VersionStore, name: str, number: int, place: str) -> None:
    hidden = store.hidden(place).version_dir(name, number)
    _move(hidden, store.version_dir(name, number))
    note_path(hidden).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Rename across directories; both know it after a power loss."""
    make_dirs(target.parent)
    if os.path.lexists(target):
        raise ConfigError(f"{target} is in the way of {source}: remove one of them by hand")
    os.rename(source, target)
    sync_dir(target.parent)
    sync_dir(source.parent)
