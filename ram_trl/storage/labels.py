"""Labels that people give to versions: an alias names one version and moves, a tag may be on many and stays.

```
registry/agents/math/aliases/best.json     {"version": 2}: math@best means math@v2
                     tags/v000002/paper    an empty file: math@v2 carries the tag "paper"
```

Every label is a file of its own that appears, changes and goes by one operation of the file system: no locks. A label
of a version that is not there says nothing; it is there again when the version comes back from the trash.
"""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from ..errors import AgentNotFoundError, CorruptedFileError, RamTrlError
from .durable import explain_os_errors, make_dirs, read_json, replace_json, sync_dir
from .names import HIGHEST, VERSION, check_label, is_label, version_dir_name


__all__ = ["ALIASES", "TAGS", "Labels", "read_pointer"]

ALIASES, TAGS, _SUFFIX = "aliases", "tags", ".json"


class Labels:
    """Aliases and tags of the versions of one agent or generalist.

    Args:
        folder (`Path`):
            Folder of the agent, which holds its versions.
        versions (`Collection[int]`):
            Numbers of the versions that are there.

    Example:

    ```python
    labels = AgentRegistry("registry").labels("math")
    labels.set_alias("best", 2)
    labels.add_tag(2, "paper")
    assert labels.aliases() == {"best": 2} and labels.tags() == {2: ["paper"]}
    ```
    """

    def __init__(self, folder: Path, versions: Collection[int]):
        self._folder, self._versions = folder, frozenset(versions)

    def aliases(self) -> dict[str, int]:
        """Aliases that mean a version that is there, by name. Unreadable ones are left out; `verify` finds them."""
        found = {}
        for alias in self.alias_names():
            with contextlib.suppress(RamTrlError):
                if (number := self.read_alias(alias)) in self._versions:
                    found[alias] = number
        return found

    def tags(self) -> dict[int, list[str]]:
        """Sorted tags of every version that is there and has one."""
        return {number: names for number, names in self.all_tags().items() if number in self._versions}

    def alias_names(self) -> list[str]:
        """Names of all aliases, sorted, whatever they mean."""
        files = _list(self._folder / ALIASES)
        names = [file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX)]
        return sorted(filter(is_label, names))

    def all_tags(self) -> dict[int, list[str]]:
        """Sorted tags by version, also of versions that are not there."""
        folders = [match for entry in _list(self._folder / TAGS) if (match := VERSION.fullmatch(entry))]
        tags = {int(match[1]): sorted(filter(is_label, _list(self._folder / TAGS / match[0]))) for match in folders}
        return {number: names for number, names in sorted(tags.items()) if names}

    def read_alias(self, alias: str) -> int | None:
        """Number of the version that an alias means, whether it is there or not; `None` if there is no such alias.

        Raises:
            CorruptedFileError: if its file does not name a version.
            InvalidNameError: if it is no name for an alias.
        """
        return read_pointer(self.alias_path(alias), "set the alias again (ram-trl alias)")

    def alias_path(self, alias: str) -> Path:
        """File of an alias."""
        check_label(alias, "alias")
        return self._folder / ALIASES / f"{alias}{_SUFFIX}"

    def tags_path(self, number: int) -> Path:
        """Directory of a version's tags."""
        return self._folder / TAGS / version_dir_name(number)

    def set_alias(self, alias: str, number: int) -> None:
        """Have an alias mean a version, whatever it meant before, durably.

        Raises:
            AgentNotFoundError: if the version is not there.
            InvalidNameError: if it is no name for an alias.
            StorageError: if it cannot be written.
        """
        path = self.alias_path(alias)
        self._check_there(number)
        with explain_os_errors(f"writing alias {alias}"):
            make_dirs(path.parent)
            replace_json(path, {"version": number})

    def drop_alias(self, alias: str) -> None:
        """Remove an alias, not the version; arguments and errors as of [`set_alias`]."""
        path = self.alias_path(alias)
        if not os.path.lexists(path):
            raise AgentNotFoundError(
                f"{self._folder.name!r} has no alias {alias!r}; it has: {_listed(self.aliases())}"
            )
        _unlink(path, f"removing alias {alias}")

    def add_tag(self, number: int, tag: str) -> None:
        """Tag a version, durably.

        Raises:
            AgentNotFoundError: if the version is not there.
            InvalidNameError: if it is no name for a tag.
            StorageError: if it cannot be written.
        """
        check_label(tag, "tag")
        self._check_there(number)
        with explain_os_errors(f"writing tag {tag}"):
            folder = self.tags_path(number)
            make_dirs(folder)
            (folder / tag).touch()
            sync_dir(folder)

    def drop_tag(self, number: int, tag: str) -> None:
        """Take a tag off a version; arguments and errors as of [`add_tag`]."""
        check_label(tag, "tag")
        path = self.tags_path(number) / tag
        if not os.path.lexists(path):
            tags = self.tags().get(number, ())
            raise AgentNotFoundError(f"{self._folder.name}@v{number} has no tag {tag!r}; it has: {_listed(tags)}")
        _unlink(path, f"removing tag {tag}")

    def _check_there(self, number: int) -> None:
        if number not in self._versions:
            raise AgentNotFoundError(f"{self._folder.name!r} has no version v{number}")


def read_pointer(path: Path, cure: str) -> int | None:
    """Number of the version that a file like `{"version": 2}` names; `None` if there is no such file.

    Raises:
        CorruptedFileError: if it does not name a version.
        StorageError: if it cannot be read.
    """
    if not os.path.lexists(path):
        return None
    try:
        if path.is_symlink():
            raise CorruptedFileError(f"{path} is a link")
        number = read_json(path).get("version")
    except CorruptedFileError as error:
        raise CorruptedFileError(f"{error}: {cure}") from error
    if type(number) is not int or not 0 < number <= HIGHEST:
        raise CorruptedFileError(f"{path} does not name a version: {cure}")
    return number


def _list(folder: Path) -> list[str]:
    """Entries of a directory, sorted; none if there is no such directory."""
    with explain_os_errors(f"reading {folder}"):
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def _unlink(path: Path, doing: str) -> None:
    with explain_os_errors(doing):
        path.unlink(missing_ok=True)
        sync_dir(path.parent)


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
