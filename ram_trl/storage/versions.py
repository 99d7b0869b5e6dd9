"""Named things in immutable, numbered versions: `FOLDER/NAME/v000001`. The directory is the database.

A version appears by one rename when all its bytes are on disk. Two processes that commit the same name at once get two
versions, without locks. `v000002.removed` stands for a version that was there: its number is not used again.
"""

import contextlib
import os
import re
import shlex
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import AgentNotFoundError, ConfigError, CorruptedFileError, StorageError
from .durable import (
    STAGING_PREFIX,
    digest_file,
    explain_os_errors,
    make_dirs,
    needed_dirs,
    publish,
    read_json,
    staging_dir,
    sync_dir,
    write_json,
)
from .labels import Labels
from .manifest import FileRecord, GeneralistManifest, Manifest
from .names import HIGHEST, QUARANTINE, TRASH, VERSION, check_name, is_name, parse_spec, version_dir_name


__all__ = [
    "LARGEST_MANIFEST",
    "MANIFEST",
    "VersionStore",
    "discard",
    "file_records",
    "verify_file",
    "verify_files",
    "write_manifest",
]

MANIFEST = "manifest.json"
# Bytes; a longer one could be read here, and neither sent nor taken in.
LARGEST_MANIFEST = 16_000_000
# How far ahead a number from elsewhere may be: one near the highest would leave none for those that come after it.
_FURTHEST = 1_000_000
_REMOVED = re.compile(rf"{VERSION.pattern}\.removed")


class VersionStore:
    """Versions of one kind of thing.

    Args:
        path (`Path`):
            Folder that holds a folder for each name.
        kind (`str`):
            What they are, for messages: `"agent"`.
    """

    def __init__(self, path: Path, kind: str):
        self.path, self.kind = path, kind

    def exists(self) -> bool:
        return self.path.is_dir()

    def names(self) -> list[str]:
        """Names that have a version, sorted."""
        if not self.exists():
            return []
        with explain_os_errors(f"reading {self.path}"):
            folders = sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir())
        return [name for name in folders if is_name(name) and self.versions(name)]

    def versions(self, name: str) -> list[int]:
        """Numbers of the versions of a name, ascending; empty if there is none."""
        return sorted(self._numbers(name, VERSION))

    def find(self, spec: str) -> tuple[str, list[int]]:
        """Name and versions that a spec means: `"math"`, all that there are, `"math@v2"`, or `"math@best"`, an alias.

        Raises:
            AgentNotFoundError: if there is no such name or version; if it is out of sight, it says where.
            CorruptedFileError: if the alias is damaged.
            InvalidNameError: if it is not a name.
        """
        name, version = parse_spec(spec, self.kind)
        versions = self.versions(name)
        if not versions:
            where = f"{self.path.parent}; it holds: {', '.join(self.names()) or 'none'}"
            raise AgentNotFoundError(f"no {self.kind} {name!r} in {where}{self._hidden(name)}")
        number = self._alias(name, version) if isinstance(version, str) else version
        if number is not None and number not in versions:
            alias = f"{spec} means v{number}: " if isinstance(version, str) else ""
            listed = ", ".join(f"v{version}" for version in versions)
            raise AgentNotFoundError(
                f"{alias}{self.kind} {name!r} has no version v{number}; it has: {listed}{self._hidden(name, number)}"
            )
        return name, versions if number is None else [number]

    def version_dir(self, name: str, number: int) -> Path:
        return self.path / name / version_dir_name(number)

    def labels(self, name: str) -> Labels:
        """Aliases and tags of a name's versions."""
        return Labels(self.path / name, self.versions(name))

    def hidden(self, place: str) -> "VersionStore":
        """The versions that are in the trash or in quarantine: `TRASH` or `QUARANTINE`."""
        return VersionStore(self.path.parent / place / self.path.name, self.kind)

    def check_writable(self) -> None:
        """Create the folder if need be and try to write in it."""
        make_dirs(self.path)
        with staging_dir(self.path):
            pass

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        check_name(name, self.kind)
        with needed_dirs(self.path / name), staging_dir(self.path / name) as staged:
            yield staged

    def commit(self, name: str, staged: Path, above: int = 0) -> int:
        """Make a staged directory durable and the next version of its name, with a number above `above`.

        Returns:
            `int`: the number that it got.
        """
        while not self.take(name, staged, number := self.free_number(name, above)):
            pass
        return number

    def free_number(self, name: str, above: int = 0, wanted: int | None = None) -> int:
        """`wanted` if no version of the name ever had it, else the next number that is free, above `above`.

        Raises:
            StorageError: if there is none, because a version with the highest number was there.
        """
        used = {*self.versions(name), *self._numbers(name, _REMOVED)}
        last = max([above, *used])
        if wanted is not None and wanted not in used and wanted <= last + _FURTHEST:
            return wanted
        if last >= HIGHEST:
            raise StorageError(f"{self.kind} {name!r} had v{last}, the highest number there is: use another name")
        return last + 1

    def take(self, name: str, staged: Path, number: int) -> bool:
        """Make a staged directory durable and that version of its name, unless another process took the number."""
        # who made these folders may have been killed before they were on disk
        for folder in (self.path, self.path.parent):
            sync_dir(folder)
        try:
            publish(staged, self.version_dir(name, number))
        except FileExistsError:
            return False
        return True

    def mark_used(self, name: str, number: int) -> None:
        """Leave a mark that this number was used, durably: it is not used again."""
        path = self.version_dir(name, number)
        path.with_name(f"{path.name}.removed").touch()
        sync_dir(path.parent)

    def was_used(self, name: str, number: int) -> bool:
        """Whether a version was there that went away."""
        return number in self._numbers(name, _REMOVED)

    def command(self, name: str, spec: str) -> str:
        """Command line that does something to a version, for messages: `"ram-trl recover ..."`."""
        return f"ram-trl {name} --registry {shlex.quote(str(self.path.parent))} --{self.kind} {spec}"

    def _alias(self, name: str, alias: str) -> int:
        labels = self.labels(name)
        if (number := labels.read_alias(alias)) is None:
            listed = ", ".join(labels.aliases()) or "none"
            raise AgentNotFoundError(f"{self.kind} {name!r} has no alias {alias!r}; it has: {listed}")
        return number

    def _hidden(self, name: str, number: int | None = None) -> str:
        """Where versions are that are out of sight, for messages."""
        for place in (TRASH, QUARANTINE):
            numbers = self.hidden(place).versions(name)
            if number in numbers or (number is None and numbers):
                spec = f"{name}@v{numbers[-1] if number is None else number}"
                return f"; {spec} is in the {place}: {self.command('recover', spec)}"
        return ""

    def _numbers(self, name: str, pattern: re.Pattern) -> list[int]:
        check_name(name, self.kind)
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


def file_records(staged: Path) -> dict[str, FileRecord]:
    """Sizes and digests of the files of a directory; the manifest itself is still to be written."""
    return {
        str(file.relative_to(staged)): FileRecord(size=file.stat().st_size, blake3=digest_file(file))
        for file in sorted(staged.rglob("*"))
        if not file.is_dir() and file != staged / MANIFEST
    }


def write_manifest(staged: Path, manifest: Manifest | GeneralistManifest) -> None:
    """Write the manifest of a staged version, and read it again: what nobody can read must not be acknowledged.

    Raises:
        ConfigError: if it holds what JSON cannot give back, or more than is read.
    """
    path = staged / MANIFEST
    try:
        write_json(path, manifest.to_dict())
        manifest.from_dict(read_json(path), path.name)
        if (size := path.stat().st_size) > LARGEST_MANIFEST:
            raise ValueError(f"it has {size:,} bytes, and {LARGEST_MANIFEST:,} are read")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"what is to be recorded could not be read again: {error}: use finite numbers, text, lists, and dicts "
            "whose keys are text"
        ) from error


def verify_files(
    path: Path,
    records: dict[str, FileRecord],
    what: str,
    cure: str,
    advance: Callable[[int], None] | None = None,
) -> None:
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
        advance (`Callable`, *optional*):
            Told how many bytes were read.

    Raises:
        CorruptedFileError: if a file is missing, changed, not recorded, or no regular file.
    """
    with explain_os_errors(f"reading {path}"):
        # a walk over a directory that is gone finds nothing, and says nothing
        path.stat()
        found = {str(file.relative_to(path)) for file in path.rglob("*")} - {MANIFEST}
        # it is read wherever it is, but what is elsewhere is not part of the version
        is_own = stat.S_ISREG((path / MANIFEST).lstat().st_mode)
    if not is_own:
        raise CorruptedFileError(f"{what}: {path / MANIFEST} is not a file of its own: {cure}")
    expected = {str(parent) for name in records for parent in Path(name).parents} - {"."} | set(records)
    for name in sorted(found ^ expected):
        state = "has an unrecorded file" if name in found else "lacks its file"
        raise CorruptedFileError(f"{what} {state} {name}: {cure}")
    for name in records:
        verify_file(path, name, records, what, cure, advance)


def verify_file(
    path: Path,
    name: str,
    records: dict[str, FileRecord],
    what: str,
    cure: str,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Compare one file; arguments as [`verify_files`]."""
    record, file = records.get(name), path / name
    with explain_os_errors(f"reading {file}"):
        # what is recorded is a file, and no link to one elsewhere, which could change
        found = file.lstat()
        is_file = stat.S_ISREG(found.st_mode)
        if (
            record is None
            or not is_file
            or found.st_size != record.size
            or digest_file(file, advance) != record.blake3
        ):
            raise CorruptedFileError(f"{what}: {file} is not the file that was registered: {cure}")
