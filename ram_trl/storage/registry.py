"""The registry: a directory that holds agents, each in immutable, numbered versions. The directory is the database.

```
registry/agents/math/v000001/manifest.json       what it is, and the digests of the other files
                             tensors.json        every tensor of the base: shape, dtype, digests
                             delta.safetensors   a full fine-tune: differences from the base
                             adapter_model.safetensors, adapter_config.json    a LoRA agent, as PEFT writes it
                             adapter_map.json    a LoRA agent: which base tensor each factor changes
```

A version appears by one rename when all its bytes are on disk. Two processes that register the same agent at once get
two versions, without locks.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, ConfigError, CorruptedFileError, InvalidNameError, StorageError
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
from .manifest import FileRecord, LoraRecord, Manifest, TensorRecord
from .tensor_file import TensorFile


__all__ = [
    "ADAPTER",
    "ADAPTER_MAP",
    "DELTA",
    "TENSORS",
    "AgentRegistry",
    "RegisteredAgent",
    "check_agent_name",
    "write_records",
]

MANIFEST, TENSORS, DELTA = "manifest.json", "tensors.json", "delta.safetensors"
ADAPTER, ADAPTER_MAP = "adapter_model.safetensors", "adapter_map.json"
_AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_VERSION = re.compile(r"v([0-9]{6}|[1-9][0-9]{6,8})")
_REMOVED = re.compile(rf"{_VERSION.pattern}\.removed")


@dataclass(frozen=True, slots=True)
class RegisteredAgent:
    """One version of an agent in a registry.

    Args:
        name (`str`):
            Name of the agent.
        version (`int`):
            Number of the version, from 1.
        path (`Path`):
            Directory of the version.
        manifest ([`Manifest`]):
            What is recorded of it.
    """

    name: str
    version: int
    path: Path
    manifest: Manifest

    def __str__(self) -> str:
        return f"{self.name}@v{self.version}"

    def verify(self) -> None:
        """Compare every file with its recorded size and digest.

        Raises:
            CorruptedFileError: if a file is missing, changed, or not recorded.
        """
        with explain_os_errors(f"reading {self.path}"):
            found = {file.name for file in self.path.iterdir()} - {MANIFEST}
        for name in sorted(found ^ set(self.manifest.files)):
            state = "has an unrecorded file" if name in found else "lacks its file"
            raise CorruptedFileError(f"agent {self} {state} {name}: {self._cure}")
        for name in self.manifest.files:
            self._verify_file(name)

    def tensors(self) -> dict[str, TensorRecord]:
        """Records of the base's tensors, by name."""
        return self._records(TENSORS, TensorRecord)

    def adapter_map(self) -> dict[str, LoraRecord]:
        """For a LoRA agent, the base tensors that it changes, by name."""
        return self._records(ADAPTER_MAP, LoraRecord)

    def open_weights(self) -> TensorFile:
        """The deltas or the adapter's tensors."""
        return TensorFile(self.path / (DELTA if self.manifest.kind == "full" else ADAPTER))

    @property
    def _cure(self) -> str:
        return f"remove it (ram-trl remove --agent {self}) and register it again from its checkpoint"

    def _verify_file(self, name: str) -> None:
        path, record = self.path / name, self.manifest.files.get(name)
        with explain_os_errors(f"reading {path}"):
            if record is None or path.stat().st_size != record.size or digest_file(path) != record.blake3:
                raise CorruptedFileError(f"agent {self}: {path} is not the file that was registered: {self._cure}")

    def _records(self, file_name: str, record_type: type) -> dict[str, Any]:
        # What is said about a damaged agent must not be said about its base.
        self._verify_file(file_name)
        path = self.path / file_name
        try:
            return {name: record_type(**fields) for name, fields in read_json(path).items()}
        except TypeError as error:
            raise CorruptedFileError(f"{path} is damaged: {error}") from error


class AgentRegistry:
    """Agents on disk.

    Args:
        path (`str`, `os.PathLike` or [`AgentRegistry`]):
            Directory of the registry, created by the first registration; or a registry, to have it again.

    Example:

    ```python
    registry = AgentRegistry("registry")
    for agent in registry:
        print(agent, agent.manifest.kind, agent.manifest.base_model.name)
    ```
    """

    def __init__(self, path: "str | os.PathLike | AgentRegistry"):
        self.path = path.path if isinstance(path, AgentRegistry) else Path(path)

    def __iter__(self) -> Iterator[RegisteredAgent]:
        """The latest version of every agent, by name."""
        return iter([self.get(name) for name in self.names()])

    def exists(self) -> bool:
        return self._agents_dir.is_dir()

    def names(self) -> list[str]:
        """Names of the agents that have a version, sorted.

        Raises:
            AgentNotFoundError: if there is no registry at this path.
        """
        if not self.exists():
            raise AgentNotFoundError(f"{self.path} is not a registry: no agent was ever registered there")
        with explain_os_errors(f"reading {self.path}"):
            folders = sorted(entry.name for entry in os.scandir(self._agents_dir) if entry.is_dir())
        return [name for name in folders if _AGENT_NAME.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> list[int]:
        """Version numbers of an agent, ascending; empty if there is none."""
        return sorted(self._numbers(name, _VERSION))

    def get(self, spec: str) -> RegisteredAgent:
        """Look up `"math"` (its latest version) or `"math@v2"`.

        Raises:
            AgentNotFoundError: if there is no such registry, agent or version.
            InvalidNameError: if the name is not one.
        """
        name, numbers = self._find(spec)
        path = self._version_dir(name, numbers[-1])
        manifest = Manifest.from_dict(read_json(path / MANIFEST), str(path / MANIFEST))
        if manifest.agent != name or manifest.kind not in ("full", "lora"):
            raise CorruptedFileError(f"{path / MANIFEST} is not the manifest of agent {name!r}")
        return RegisteredAgent(name, numbers[-1], path, manifest)

    def check_outside(self, path: Path) -> None:
        """Refuse to write something else into the registry.

        Raises:
            ConfigError: if `path` is inside of it.
        """
        if self.path.resolve() in (path.resolve(), *path.resolve().parents):
            raise ConfigError(f"{path} is inside the registry {self.path}: choose another --output_dir")

    def check_writable(self) -> None:
        """Create the registry if need be and try to write in it.

        Raises:
            StorageError: if that fails.
        """
        with explain_os_errors(f"writing to the registry {self.path}"):
            make_dirs(self._agents_dir)
            with staging_dir(self._agents_dir):
                pass

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        check_agent_name(name)
        with explain_os_errors(f"writing to the registry {self.path}"):
            with needed_dirs(self._agents_dir / name), staging_dir(self._agents_dir / name) as staged:
                yield staged

    def commit(self, staged: Path, manifest: Manifest) -> RegisteredAgent:
        """Record the digests of a staged version's files, write its manifest and make it the agent's next version."""
        with explain_os_errors(f"registering agent {manifest.agent}"):
            manifest.files = {
                file.name: FileRecord(size=file.stat().st_size, blake3=digest_file(file))
                for file in sorted(staged.iterdir())
            }
            write_json(staged / MANIFEST, manifest.to_dict())
            while True:
                number = 1 + max([0, *self.versions(manifest.agent), *self._numbers(manifest.agent, _REMOVED)])
                target = self._version_dir(manifest.agent, number)
                try:
                    publish(staged, target)
                except FileExistsError:
                    # another process took this number
                    continue
                return RegisteredAgent(manifest.agent, number, target, manifest)

    def remove(self, spec: str) -> list[str]:
        """Remove one version (`"math@v2"`) or all of an agent's (`"math"`), damaged ones too.

        Returns:
            `list[str]`: the versions that were removed. Their numbers are not used again.
        """
        name, numbers = self._find(spec)
        with explain_os_errors(f"removing agent {spec}"):
            for number in numbers:
                path = self._version_dir(name, number)
                path.with_name(f"{path.name}.removed").touch()
                hidden = path.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex}")
                path.rename(hidden)
                sync_dir(path.parent)
                if hidden.is_dir() and not hidden.is_symlink():
                    shutil.rmtree(hidden)
                else:
                    hidden.unlink()
        return [f"{name}@v{number}" for number in numbers]

    def _find(self, spec: str) -> tuple[str, list[int]]:
        """Name of an agent, and the version that a spec names or all that there are."""
        name, number = _parse_spec(spec)
        known = self.names()
        if name not in known:
            raise AgentNotFoundError(f"no agent {name!r} in {self.path}; it holds: {', '.join(known) or 'none'}")
        versions = self.versions(name)
        if number is not None and number not in versions:
            listed = ", ".join(f"v{version}" for version in versions)
            raise AgentNotFoundError(f"agent {name!r} has no version v{number}; it has: {listed}")
        return name, versions if number is None else [number]

    def _version_dir(self, name: str, number: int) -> Path:
        return self._agents_dir / name / f"v{number:06d}"

    @property
    def _agents_dir(self) -> Path:
        return self.path / "agents"

    def _numbers(self, name: str, pattern: re.Pattern) -> list[int]:
        check_agent_name(name)
        try:
            entries = os.listdir(self._agents_dir / name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot read {self._agents_dir / name}: {error.strerror}") from error
        return [int(match[1]) for entry in entries if (match := pattern.fullmatch(entry))]


def check_agent_name(name: str) -> None:
    """Refuse a name that is not letters, digits, dots, dashes and underscores.

    Raises:
        InvalidNameError: if it is not a valid name.
    """
    if not _AGENT_NAME.fullmatch(name):
        raise InvalidNameError(
            f"{name!r} is not a name for an agent: use up to 96 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def write_records(path: Path, records: Mapping[str, TensorRecord] | Mapping[str, LoraRecord]) -> None:
    """Write records by name; fields that are unset are left out."""
    content = {
        name: {key: value for key, value in asdict(record).items() if value is not None}
        for name, record in records.items()
    }
    write_json(path, content)


def _parse_spec(spec: str) -> tuple[str, int | None]:
    name, separator, version = spec.partition("@")
    check_agent_name(name)
    if not separator:
        return name, None
    if not re.fullmatch(r"v[1-9][0-9]{0,8}", version):
        raise InvalidNameError(f"{spec!r} does not name a version: write it like {name}@v2")
    return name, int(version[1:])
