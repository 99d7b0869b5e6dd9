"""Named things in immutable, numbered versions: `FOLDER/NAME/v000001`. The directory is the database.

A version appears by one rename when all its bytes are on disk. Two processes that commit the same name at once get two
versions, without locks. `v000002.removed` stands for a version that was there: its number is not used again.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..errors import AgentNotFoundError, CorruptedFileError, InvalidNameError, StorageError
from .durable import (
    STAGING_PREFIX,
    digest_file,
    explain_os_errors,
    make_dirs,
    needed_dirs,
    publish,
    staging_dir,
    sync_dir,
)
from .manifest import FileRecord


__all__ = ["MANIFEST", "VersionStore", "check_name", "discard", "file_records", "verify_file", "verify_files"]

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_VERSION = re.compile(r"v([0-9]{6}|[1-9][0-9]{6,8})")
_REMOVED = re.compile(rf"{_VERSION.pattern}\.removed")


class VersionStore:
    """Versions of one kind of thing.

    Args:
        path (`Path`):
            Folder that holds a folder for each name.
        kind (`str`):
            What they are, for messages: `"agent"`.
    """

    def __init__(self, path: Path, kind: str):
        self.path, self._kind = path, kind

    def exists(self) -> bool:
        return self.path.is_dir()

    def names(self) -> list[str]:
        """Names that have a version, sorted."""
        if not self.exists():
            return []
        with explain_os_errors(f"reading {self.path}"):
            folders = sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir())
        return [name for name in folders if _NAME.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> list[int]:
        """Numbers of the versions of a name, ascending; empty if there is none."""
        return sorted(self._numbers(name, _VERSION))

    def find(self, spec: str) -> tuple[str, list[int]]:
        """Name and versions that a spec means: `"math"`, all that there are, or `"math@v2"`.

        Raises:
            AgentNotFoundError: if there is no such name or version.
            InvalidNameError: if it is not a name.
        """
        name, number = self._parse(spec)
        known = self.names()
        if name not in known:
            where = f"{self.path.parent}; it holds: {', '.join(known) or 'none'}"
            raise AgentNotFoundError(f"no {self._kind} {name!r} in {where}")
        versions = self.versions(name)
        if number is not None and number not in versions:
            listed = ", ".join(f"v{version}" for version in versions)
            raise AgentNotFoundError(f"{self._kind} {name!r} has no version v{number}; it has: {listed}")
        return name, versions if number is None else [number]

    def version_dir(self, name: str, number: int) -> Path:
        return self.path / name / f"v{number:06d}"

    def check_writable(self) -> None:
        """Create the folder if need be and try to write in it."""
        make_dirs(self.path)
        with staging_dir(self.path):
            pass

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        check_name(name, self._kind)
        with needed_dirs(self.path / name), staging_dir(self.path / name) as staged:
            yield staged

    def commit(self, name: str, staged: Path, above: int = 0) -> int:
        """Make a staged directory durable and the next version of its name, with a number above `above`.

        Returns:
            `int`: the number that it got.
        """
        while True:
            number = 1 + max([above, *self.versions(name), *self._numbers(name, _REMOVED)])
            try:
                publish(staged, self.version_dir(name, number))
            except FileExistsError:
                # another process took this number
                continue
            return number

    def remove(self, name: str, number: int) -> None:
        """Remove a version, a damaged one too. Its number is not used again."""
        path = self.version_dir(name, number)
        path.with_name(f"{path.name}.removed").touch()
        discard(path)

    def _parse(self, spec: str) -> tuple[str, int | None]:
        if not isinstance(spec, str):
            raise InvalidNameError(f"{spec!r} is not a name: write it like math or math@v2")
        name, separator, version = spec.partition("@")
        check_name(name, self._kind)
        if not separator:
            return name, None
        if not re.fullmatch(r"v[1-9][0-9]{0,8}", version):
            raise InvalidNameError(f"{spec!r} does not name a version: write it like {name}@v2")
        return name, int(version[1:])

    def _numbers(self, name: str, pattern: re.Pattern) -> list[int]:
        check_name(name, self._kind)
        try:
            entries = os.listdir(self.path / name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot read {self.path / name}: {error.strerror}") from error
        return [int(match[1]) for entry in entries if (match := pattern.fullmatch(entry))]


def discard(path: Path) -> None:
    """Remove a directory, or what is in its place, so that nobody sees a part of it."""
    hidden = path.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex}")
    path.rename(hidden)
    sync_dir(path.parent)
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden)
    else:
        hidden.unlink()


def check_name(name: str, kind: str) -> None:
    """Refuse a name that is not letters, digits, dots, dashes and underscores.

    Raises:
        InvalidNameError: if it is not a valid name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        article = "an" if kind[0] in "aeiou" else "a"
        raise InvalidNameError(
            f"{name!r} is not a name for {article} {kind}: use up to 96 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def file_records(staged: Path) -> dict[str, FileRecord]:
    """Sizes and digests of the files of a directory; the manifest itself is still to be written."""
    return {
        str(file.relative_to(staged)): FileRecord(size=file.stat().st_size, blake3=digest_file(file))
        for file in sorted(staged.rglob("*"))
        if not file.is_dir() and file != staged / MANIFEST
    }


def verify_files(path: Path, records: dict[str, FileRecord], what: str, cure: str) -> None:
    """Compare every file of a version with its recorded size and digest.

    Args:
        path (`Path`):
            Directory of the version.
        records (`dict[str, FileRecord]`):
            What was recorded.
        what (`str`):
            The version, for messages: `"agent math@v2"`.
        cure (`str`):
            What to do about damage.

    Raises:
        CorruptedFileError: if a file is missing, changed, or not recorded.
    """
    with explain_os_errors(f"reading {path}"):
        # a walk over a directory that is gone finds nothing, and says nothing
        path.stat()
        found = {str(file.relative_to(path)) for file in path.rglob("*")} - {MANIFEST}
    expected = {str(parent) for name in records for parent in Path(name).parents} - {"."} | set(records)
    for name in sorted(found ^ expected):
        state = "has an unrecorded file" if name in found else "lacks its file"
        raise CorruptedFileError(f"{what} {state} {name}: {cure}")
    for name in records:
        verify_file(path, name, records, what, cure)


def verify_file(path: Path, name: str, records: dict[str, FileRecord], what: str, cure: str) -> None:
    """Compare one file; arguments as [`verify_files`]."""
    record = records.get(name)
    with explain_os_errors(f"reading {path / name}"):
        if record is None or (path / name).stat().st_size != record.size or digest_file(path / name) != record.blake3:
            raise CorruptedFileError(f"{what}: {path / name} is not the file that was registered: {cure}")
