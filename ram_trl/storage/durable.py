"""Directories that appear whole, or not at all, and stay after a power loss.

Everything is written into a hidden directory beside its destination. Commit = flush each file, flush the directories,
rename, flush the parent; only then is success reported.
"""

import contextlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from ..errors import ConfigError, CorruptedFileError, OutputExistsError, RamTrlError, StorageError


__all__ = [
    "STAGING_PREFIX",
    "check_output_dir",
    "digest_file",
    "explain_os_errors",
    "make_dirs",
    "needed_dirs",
    "output_dir_stage",
    "publish",
    "read_json",
    "replace_json",
    "staging_dir",
    "start_writeback",
    "sync_dir",
    "sync_file",
    "unique_keys",
    "write_json",
    "write_text",
]

STAGING_PREFIX = ".tmp-"
_READ_BYTES = 1 << 20
# Records of 100,000 tensors. More only make a reader busy, and large: JSON is believed after it was parsed.
_MAX_JSON_BYTES = 1 << 26
_MAX_JSON_VALUES = 1 << 20


@contextlib.contextmanager
def explain_os_errors(doing: str) -> Iterator[None]:
    """Turn an `OSError` of the file system into a [`StorageError`] that says what was being done."""
    try:
        yield
    except RamTrlError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StorageError(f"{doing} failed: {error.strerror or error}{where}") from error


@contextlib.contextmanager
def staging_dir(parent: Path) -> Iterator[Path]:
    """A new hidden directory in `parent`; removed on exit unless it was published."""
    path = parent / f"{STAGING_PREFIX}{uuid.uuid4().hex}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Make a staged directory durable and give it its name.

    Raises:
        FileExistsError: if `target` exists and is not an empty directory. The staged directory is then still there.
        CorruptedFileError: if something in the staged directory is not a file of its own.
        StorageError: if something cannot be flushed. Nothing has the name then.
    """
    # Some writers create files for their owner only: give them what the directory got from the umask.
    mode = stat.S_IMODE(staged.stat().st_mode) & 0o666
    for folder, folders, names in os.walk(staged, topdown=False):
        for name in [*folders, *names]:
            _check_own(os.path.join(folder, name))
        for name in names:
            path = os.path.join(folder, name)
            os.chmod(path, mode)
            sync_file(path)
        sync_dir(Path(folder))
    try:
        os.rename(staged, target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(f"{target} exists") from error
        raise
    try:
        sync_dir(target.parent)
    except OSError:
        # whether the name would be there after a power loss is not known: success must not be visible either
        with contextlib.suppress(OSError):
            os.rename(target, staged)
        raise


@contextlib.contextmanager
def output_dir_stage(target: Path) -> Iterator[Path]:
    """A staged directory that becomes `target` if the block ends well, and vanishes if it does not.

    Raises:
        OutputExistsError: if `target` exists and is not an empty directory.
    """
    check_output_dir(target)
    with explain_os_errors(f"writing {target}"):
        with needed_dirs(target.absolute().parent), staging_dir(target.absolute().parent) as staged:
            yield staged
            publish(staged, target.absolute())


def sync_dir(path: Path) -> None:
    """Flush the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with explain_os_errors(f"flushing the directory {path}"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str | os.PathLike) -> None:
    """Flush the bytes of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with explain_os_errors(f"flushing the {os.fstat(descriptor).st_size} bytes of {os.fspath(path)}"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(path: Path) -> None:
    """Create a directory and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_dir(folder.parent)


@contextlib.contextmanager
def needed_dirs(path: Path) -> Iterator[None]:
    """Create a directory and its missing parents; if the block fails, those that it left empty vanish again."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_dirs(path)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def check_output_dir(path: Path) -> None:
    """Refuse an output directory that holds something already.

    Raises:
        OutputExistsError: if it exists and is not an empty directory.
    """
    if "\0" in str(path) or not _is_text(str(path)):
        raise ConfigError(f"{str(path)!r} is not a name for a directory")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputExistsError(f"{path} exists and is not an empty directory: choose another --output_dir")
    if path.resolve() == Path.cwd():
        raise OutputExistsError(f"{path} is the working directory: name a directory inside of it as --output_dir")
    # The finished directory takes its name by a rename, which can replace neither a link nor a mount.
    if path.is_symlink() or os.path.ismount(path):
        raise OutputExistsError(f"{path} is a link or a mount point: choose a directory inside of it as --output_dir")


def write_json(path: Path, content: dict) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    data = text.encode()
    with explain_os_errors(f"writing {len(data)} bytes to {path}"):
        path.write_bytes(data)


def replace_json(path: Path, content: dict) -> None:
    """Write a small file of JSON, also in the place of one that is there, by one rename, durably."""
    written = path.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex}")
    try:
        write_json(written, content)
        sync_file(written)
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
    sync_dir(path.parent)


def read_json(
    path: Path, digest: str | None = None, *, max_bytes: int = _MAX_JSON_BYTES, max_values: int = _MAX_JSON_VALUES
) -> dict:
    """Read a JSON object.

    Args:
        path (`Path`):
            The file.
        digest (`str`, *optional*):
            The BLAKE3 that its bytes have to have.
        max_bytes, max_values (`int`, *optional*):
            How much of it is read; by default more than any model needs.

    Raises:
        StorageError: if the file cannot be read.
        CorruptedFileError: if it does not hold a JSON object, or more of it than that.
    """
    try:
        # opening a FIFO would wait for ever
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CorruptedFileError(f"{path} is not a regular file")
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if digest is not None and blake3(text).hexdigest() != digest:
        raise CorruptedFileError(f"{path} was changed while it was being read: leave it alone and try again")
    if len(text) > max_bytes or sum(text.count(mark) for mark in (b"{", b"[", b",")) > max_values:
        raise CorruptedFileError(f"{path} is not valid JSON for a model: it holds more than any model has tensors")
    try:
        content = json.loads(text.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptedFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptedFileError(f"{path} does not hold a JSON object")
    return content


def unique_keys(pairs: list[tuple[str, object]]) -> dict:
    """The object of some pairs, for `json.loads`: a name that occurs twice means something else to every reader.

    Raises:
        ValueError: if a name occurs twice, or holds half of a surrogate pair and cannot be written again.
    """
    keys = dict(pairs)
    for name in keys:
        name.encode()
    if len(keys) != len(pairs):
        raise ValueError("a name occurs twice")
    return keys


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Have the system write a range to disk now, without waiting: the flush at the end finds little left to do."""
    # Pages that are not yet on disk are not dropped, only sent there. A system that cannot do it loses nothing.
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def digest_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """BLAKE3 of a file's bytes, hexadecimal; `advance` is told how many were read.

    Raises:
        CorruptedFileError: if it is not a regular file, nor a link to one.
    """
    hasher, block = blake3(), memoryview(bytearray(_READ_BYTES))
    # opening a FIFO would wait for ever
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CorruptedFileError(f"{path} is not a regular file")
        while count := file.readinto(block):
            hasher.update(block[:count])
            if advance:
                advance(count)
    return hasher.hexdigest()


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_own(path: str) -> None:
    """Refuse what others could change, or what cannot be flushed, within a directory that is to be immutable."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1):
        raise CorruptedFileError(f"{path} is a link, a device or a pipe: put a file of its own in its place")
