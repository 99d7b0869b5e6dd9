"""One version of an agent as one file, to be sent, kept elsewhere, and taken into another registry.

A plain tar of regular files, `NAME/v000002/manifest.json` first, then the files in the manifest's order: the same
bytes for the same version, on every machine. An archive may come from anybody, so nothing in it is believed: with the
manifest every byte that is not content is known beforehand, and one that differs is refused. So there are no links, no
other names, no sizes that lie and no compression to deal with, and no general reader of tar files is asked.
"""

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from ..errors import ConfigError, CorruptedFileError, OutputExistsError
from ..progress import Progress, meter
from ..storage.checkpoint import ADAPTER_CONFIG
from ..storage.durable import STAGING_PREFIX, explain_os_errors, needed_dirs, sync_dir, write_json
from ..storage.manifest import Manifest
from ..storage.names import VERSION, is_name
from ..storage.registry import ADAPTER, ADAPTER_MAP, DELTA, TENSORS, AgentRegistry, RegisteredAgent
from ..storage.versions import LARGEST_MANIFEST, MANIFEST


__all__ = ["export_agent", "import_agent"]

# Files of an agent by its kind (docs/FORMAT.md).
_FILES = {"full": {TENSORS, DELTA}, "lora": {TENSORS, ADAPTER, ADAPTER_CONFIG, ADAPTER_MAP}}
# Units of a tar file, in bytes: of everything in it, and of its length.
_BLOCK, _RECORD = 512, 10_240
# The first size that the eleven octal digits of a header do not hold.
_LARGE = 8**11
_CHUNK = 1 << 20


def export_agent(
    registry: AgentRegistry | str, spec: str, output: str | os.PathLike, progress: Progress | None = None
) -> RegisteredAgent:
    """Write a version of an agent as an archive. Its files are checked as they are read.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        spec (`str`):
            `"math"` (its latest version) or `"math@v2"`.
        output (`str`):
            File to create. It appears whole, or not at all.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the version that was written.

    Raises:
        OutputExistsError: if there is such a file.
        CorruptedFileError: if the version is not what was registered; nothing was written then.
        StorageError: if it cannot be read or written.
    """
    registry, output = AgentRegistry(registry), Path(output)
    agent = registry.get(spec)
    if os.path.lexists(output):
        raise OutputExistsError(f"{output} exists: choose another --output")
    if registry.path.resolve() in output.resolve().parents:
        raise ConfigError(f"{output} is inside the registry {registry.path}: choose another --output")
    staged = output.absolute().with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex}.tar")
    with explain_os_errors(f"writing {output}"), needed_dirs(staged.parent):
        try:
            with open(staged, "xb") as file:
                _write(agent, file, progress)
                file.flush()
                os.fsync(file.fileno())
            _name(staged, output)
        finally:
            staged.unlink(missing_ok=True)
        sync_dir(staged.parent)
    return agent


def import_agent(
    registry: AgentRegistry | str,
    archive: str | os.PathLike,
    name: str | None = None,
    progress: Progress | None = None,
) -> tuple[RegisteredAgent, bool]:
    """Take a version of an agent from an archive into a registry, exactly as it is.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry; created if need be.
        archive (`str`):
            What [`export_agent`] wrote.
        name (`str`, *optional*):
            Another name for the agent. Its manifest then says so, and has another digest.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`] and `bool`: the version, and whether it is new; the same one may have been there. It has
        the number that it had where it comes from, or the next free one if that was used here.

    Raises:
        CorruptedFileError: if the archive is not what was exported; the registry is as it was then.
        StorageError: if it cannot be read, or the registry not written.
    """
    registry = AgentRegistry(registry)
    with explain_os_errors(f"reading {archive}"), _open_regular(archive) as file:
        length = os.fstat(file.fileno()).st_size
        folder, number, content = _read_manifest(file, archive)
        manifest = Manifest.from_dict(_parse(content, archive), f"{archive}: {MANIFEST}")
        _check(manifest, folder, len(content), length, archive)
        renamed = name is not None and name != manifest.agent
        if renamed:
            manifest.agent = name
        if (same := registry.find_same(manifest.agent, manifest.to_dict()["digest"])) is not None:
            return same, False
        with registry.stage(manifest.agent) as staged:
            if renamed:
                write_json(staged / MANIFEST, manifest.to_dict())
            else:
                (staged / MANIFEST).write_bytes(content)
            advance = meter("import", sum(record.size for record in manifest.files.values()), progress)
            for file_name, record in manifest.files.items():
                _expect(file, _header(folder, file_name, record.size), archive)
                with open(staged / file_name, "xb") as target:
                    for chunk in _chunks(file, record.size, archive):
                        target.write(chunk)
                        advance(len(chunk))
                _expect(file, bytes(-record.size % _BLOCK), archive)
            _expect(file, bytes(length - file.tell()), archive)
            agent = registry.admit(staged, number)
            # it is still there if another process brought the same version meanwhile
            return agent, not staged.exists()


def _name(staged: Path, output: Path) -> None:
    """Give a file its name, unless something has it by now: writing takes a while, and a rename would replace it."""
    try:
        os.link(staged, output)
    except OSError as error:
        if os.path.lexists(output):
            raise OutputExistsError(f"{output} exists by now: choose another --output") from error
        # a file system without hard links
        os.rename(staged, output)


def _write(agent: RegisteredAgent, file: BinaryIO, progress: Progress | None) -> None:
    folder, content = f"{agent.name}/{agent.path.name}", (agent.path / MANIFEST).read_bytes()
    records = agent.manifest.files
    file.write(_header(folder, MANIFEST, len(content)) + content + bytes(-len(content) % _BLOCK))
    advance = meter("export", sum(record.size for record in records.values()), progress)
    for name, record in records.items():
        file.write(_header(folder, name, record.size))
        hasher = blake3()
        with _open_regular(agent.path / name) as source:
            for chunk in _chunks(source, record.size, source.name):
                hasher.update(chunk)
                file.write(chunk)
                advance(len(chunk))
            is_longer = source.read(1) != b""
        if is_longer or hasher.hexdigest() != record.blake3:
            raise CorruptedFileError(
                f"agent {agent}: {agent.path / name} is not the file that was registered: ram-trl verify says more"
            )
        file.write(bytes(-record.size % _BLOCK))
    # two blocks of zeros are the end, and more of them fill the last record
    file.write(bytes(_length(file.tell()) - file.tell()))


def _length(position: int) -> int:
    """Length of a tar file whose members end at a position."""
    return -(-(position + 2 * _BLOCK) // _RECORD) * _RECORD


def _header(folder: str, name: str, size: int) -> bytes:
    """Header of a regular file as POSIX has it (ustar; of a large file with the size in a pax header before it)."""
    if size < _LARGE:
        return _block(folder, name, size, b"0")
    record = f" size={size}\n"
    # a record begins with its own length, here of two digits
    extended = f"{len(record) + 2}{record}".encode()
    padding = bytes(-len(extended) % _BLOCK)
    return _block("PaxHeaders", name, len(extended), b"x") + extended + padding + _block(folder, name, 0, b"0")


def _block(folder: str, name: str, size: int, kind: bytes) -> bytes:
    before = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % size + b"0" * 11 + b"\0"
    after = kind + bytes(100) + b"ustar\00000" + bytes(64) + b"0000000\0" * 2 + folder.encode().ljust(155, b"\0")
    total = sum(before) + 8 * ord(" ") + sum(after)
    return (before + b"%06o\0 " % total + after).ljust(_BLOCK, b"\0")


def _open_regular(path: str | os.PathLike) -> BinaryIO:
    # opening a FIFO would wait for ever
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CorruptedFileError(f"{path} is not a regular file")
    return file


def _chunks(file: BinaryIO, size: int, path: Any) -> Iterator[bytes]:
    """The next bytes of a file, in pieces."""
    while size:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            raise CorruptedFileError(f"{path} ends too early: get it again")
        size -= len(chunk)
        yield chunk


def _expect(file: BinaryIO, expected: bytes, archive: Any) -> None:
    if file.read(len(expected)) != expected:
        raise _no_archive(archive, f"what stands before byte {file.tell():,} is not what was written there")


def _read_manifest(file: BinaryIO, archive: Any) -> tuple[str, int, bytes]:
    """The folder that the members are in, the number of the version, and the bytes of its manifest."""
    block = file.read(_BLOCK)
    folder, digits = block[345:500].rstrip(b"\0").decode("ascii", "replace"), block[124:135]
    name, _, version = folder.partition("/")
    numbered = VERSION.fullmatch(version)
    if not is_name(name) or not numbered or int(numbered[1]) == 0 or not re.fullmatch(rb"[0-7]{11}", digits):
        raise _no_archive(archive, "it does not begin like one, or is compressed")
    size = int(digits, 8)
    if block != _header(folder, MANIFEST, size) or size > LARGEST_MANIFEST:
        raise _no_archive(archive, f"it does not begin with a {MANIFEST}")
    content = b"".join(_chunks(file, size, archive))
    _expect(file, bytes(-size % _BLOCK), archive)
    return folder, int(numbered[1]), content


def _parse(content: bytes, archive: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _no_archive(archive, f"its {MANIFEST} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _no_archive(archive, f"its {MANIFEST} holds no JSON object")
    return parsed


def _check(manifest: Manifest, folder: str, manifest_size: int, length: int, archive: Any) -> None:
    """Refuse what can be refused before anything is written: other files than an agent has, and other sizes."""
    if manifest.agent != folder.partition("/")[0]:
        raise _no_archive(archive, f"its manifest is that of agent {manifest.agent!r}")
    if set(manifest.files) != _FILES.get(manifest.kind):
        raise _no_archive(archive, f"it records other files than an agent has: {', '.join(manifest.files)}")
    end = len(_header(folder, MANIFEST, 0)) + manifest_size + -manifest_size % _BLOCK
    for name, record in manifest.files.items():
        end += len(_header(folder, name, record.size)) + record.size + -record.size % _BLOCK
    if length < _length(end):
        raise _no_archive(archive, f"it has {length:,} of its {_length(end):,} bytes: get it again")
    if length > _length(end):
        raise _no_archive(archive, f"it has {length:,} bytes, where its files make {_length(end):,}")


def _no_archive(archive: Any, why: str) -> CorruptedFileError:
    return CorruptedFileError(f"{archive} is not an archive of ram-trl export: {why}")
