"""Files that come from elsewhere: fetched into a directory that outlives a break, and compared with their record."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from ..errors import CorruptedFileError, StorageError
from ..storage.durable import STAGING_PREFIX, explain_os_errors, make_dirs
from ..storage.manifest import FileRecord
from ..storage.versions import MANIFEST
from .catalogue import Held
from .remote import Source


__all__ = ["check_space", "fetch", "staging_for"]

_READ_BYTES = 1 << 20


@contextlib.contextmanager
def staging_for(folder: Path, held: Held) -> Iterator[Path]:
    """The hidden directory in `folder` in which a version is put together.

    It is named after the version's digest and stays behind when the block fails, so that the next try goes on where
    this one ended. Of several processes that fetch the same version one at a time is in the block.
    """
    path = _staged(folder, held)
    make_dirs(folder)
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            # A file system without locks has to do without: two that fetch the same write the same bytes.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_still(path, descriptor):
                # who had it before has finished, and the directory has another name now
                continue
            yield path
            shutil.rmtree(path, ignore_errors=True)
            return
        finally:
            os.close(descriptor)


def fetch(source: Source, held: Held, staged: Path, advance: Callable[[int], None]) -> int:
    """Bring the files of a version into a directory, each checked against the version's manifest.

    Args:
        source ([`Source`]):
            Where they are.
        held ([`Held`]):
            The version.
        staged (`Path`):
            The directory. What an earlier try left in it is checked and kept.
        advance (`Callable`):
            Told how many bytes are done.

    Returns:
        `int`: bytes that came over the network.

    Raises:
        CorruptedFileError: if a file is not the one that is recorded.
    """
    with explain_os_errors(f"writing to {staged}"):
        for entry in os.scandir(staged):
            if entry.name not in held.files and entry.name != MANIFEST:
                raise CorruptedFileError(f"{entry.path} is no file of {held}: remove {staged}, then pull again")
        moved = 0
        for name, record in held.files.items():
            moved += _fetch_file(source, f"{held.folder}/{name}", staged / name, record, advance)
        (staged / MANIFEST).write_bytes(held.manifest)
    return moved


def check_space(folder: Path, wanted: Sequence[tuple[Path, Held]]) -> None:
    """Refuse to begin what does not fit on the disk. What an earlier try left is on it already.

    Args:
        folder (`Path`):
            A folder on the disk.
        wanted (`Sequence[tuple[Path, Held]]`):
            Versions, each with the folder that it is staged in.

    Raises:
        StorageError: if there is less space than the versions need.
    """
    needed = sum(held.size - _begun(_staged(place, held), held) for place, held in wanted)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with explain_os_errors(f"reading {existing}"):
        free = shutil.disk_usage(existing).free
    if needed > free:
        names = ", ".join(dict.fromkeys(str(held) for _, held in wanted))
        raise StorageError(
            f"{names} need {needed:,} bytes and the disk of {folder} has {free:,}: make space, or name fewer --agents"
        )


def _fetch_file(source: Source, path: str, target: Path, record: FileRecord, advance: Callable[[int], None]) -> int:
    """Complete one file, or fetch it from its beginning if what is there is not of it; the bytes that were moved."""
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    moved = 0
    with open(descriptor, "r+b") as file:
        begun = min(os.fstat(descriptor).st_size, record.size)
        # first what is there already, then, if that is not the beginning of this file, all of it
        for start in (begun, 0) if begun else (0,):
            hasher, done = blake3(), 0
            file.seek(0)
            while done < start and (piece := file.read(min(_READ_BYTES, start - done))):
                hasher.update(piece)
                done += len(piece)
            advance(done)
            file.seek(done)
            file.truncate()
            for piece in source.stream(path, done, record.size):
                if done + len(piece) > record.size:
                    break
                file.write(piece)
                hasher.update(piece)
                done, moved = done + len(piece), moved + len(piece)
                advance(len(piece))
            if done == record.size and hasher.hexdigest() == record.blake3:
                return moved
            advance(-done)
    target.unlink()
    raise CorruptedFileError(
        f"{source.url}: {path} is not the file that was registered: it is damaged there, or on the way; pull again, "
        "and if it stays so remove it there and push it again from a registry that is whole"
    )


def _staged(folder: Path, held: Held) -> Path:
    return folder / f"{STAGING_PREFIX}pull-{held.digest}"


def _begun(staged: Path, held: Held) -> int:
    """Bytes of a version's files that lie in its staging directory."""
    done = 0
    for name, record in held.files.items():
        with contextlib.suppress(OSError):
            done += min(os.lstat(staged / name).st_size, record.size)
    return done


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
