"""The registry: a directory that holds agents, each in immutable, numbered versions (`versions.py`).

```
registry/agents/math/v000001/manifest.json       what it is, and the digests of the other files
                             tensors.json        every tensor of the base: shape, dtype, digests
                             delta.safetensors   a full fine-tune: differences from the base
                             adapter_model.safetensors, adapter_config.json    a LoRA agent, as PEFT writes it
                             adapter_map.json    a LoRA agent: which base tensor each factor changes
```

The models that were merged of them are in `registry/generalists` (`generalists.py`), the agents' Fisher information in
`registry/fisher` (`fisher.py`), what is out of sight in `registry/trash` and `registry/quarantine` (`trash.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, ConfigError, CorruptedFileError, StorageError, UnsupportedModelError
from .durable import explain_os_errors, read_json, write_json
from .generalists import GeneralistStore
from .labels import Labels
from .manifest import LoraRecord, Manifest, TensorRecord
from .names import check_name, check_number, registry_path
from .tensor_file import TensorFile
from .trash import Trash
from .versions import MANIFEST, VersionStore, file_records, verify_file, verify_files, write_manifest


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

TENSORS, DELTA = "tensors.json", "delta.safetensors"
ADAPTER, ADAPTER_MAP = "adapter_model.safetensors", "adapter_map.json"


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

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Compare every file with its recorded size and digest; `advance` is told how many bytes were read.

        Raises:
            CorruptedFileError: if a file is missing, changed, or not recorded.
        """
        verify_files(self.path, self.manifest.files, f"agent {self}", self._cure, advance)

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
    def digest(self) -> str:
        """Digest of its manifest, and so of all of it."""
        return self.manifest.to_dict()["digest"]

    @property
    def _cure(self) -> str:
        return _cure(self.path, str(self))

    def _records(self, file_name: str, record_type: type) -> dict[str, Any]:
        # What is said about a damaged agent must not be said about its base.
        verify_file(self.path, file_name, self.manifest.files, f"agent {self}", self._cure)
        path = self.path / file_name
        content = read_json(path, self.manifest.files[file_name].blake3)
        try:
            return {name: record_type(**fields) for name, fields in content.items()}
        except TypeError as error:
            raise CorruptedFileError(f"{path} is damaged: {error}") from error


class AgentRegistry:
    """Agents on disk.

    Args:
        path (`str`, `os.PathLike` or [`AgentRegistry`]):
            Directory of the registry, created by the first registration; or a registry, to have it again.

    Attributes:
        generalists ([`~ram_trl.storage.generalists.GeneralistStore`]):
            The models that were merged of the agents and kept in the registry.
        store, fishers ([`~ram_trl.storage.versions.VersionStore`]):
            Where the agents' versions, and their Fisher information, are on disk.

    Example:

    ```python
    registry = AgentRegistry("registry")
    for agent in registry:
        print(agent, agent.manifest.kind, agent.manifest.base_model.name)
    ```
    """

    def __init__(self, path: "str | os.PathLike | AgentRegistry"):
        self.path = path.path if isinstance(path, AgentRegistry) else registry_path(path)
        self.generalists = GeneralistStore(self.path)
        self.store = VersionStore(self.path / "agents", "agent")
        self.fishers = VersionStore(self.path / "fisher", "Fisher")
        self._trash = Trash(self.store, _read_manifest, beside=self.fishers)

    def __iter__(self) -> Iterator[RegisteredAgent]:
        """The latest version of every agent, by name."""
        return iter([self.get(name) for name in self.names()])

    def exists(self) -> bool:
        return self.store.exists()

    def names(self) -> list[str]:
        """Names of the agents that have a version, sorted; raises as [`check_exists`]."""
        self.check_exists()
        return self.store.names()

    def check_exists(self) -> None:
        """Raise an [`AgentNotFoundError`] if there is no registry at this path."""
        if not self.exists():
            raise AgentNotFoundError(f"{self.path} is not a registry: no agent was ever registered there")

    def versions(self, name: str) -> list[int]:
        """Version numbers of an agent, ascending; empty if there is none."""
        return self.store.versions(name)

    def get(self, spec: str) -> RegisteredAgent:
        """Look up `"math"` (its latest version), `"math@v2"` or `"math@best"` (an alias).

        Raises:
            AgentNotFoundError: if there is no such registry, agent or version.
            InvalidNameError: if the name is not one.
        """
        name, numbers = self._find(spec)
        return self._read(name, numbers[-1])

    def check_outside(self, path: Path) -> None:
        """Raise a [`ConfigError`] if something else is to be written into the registry."""
        if self.path.resolve() in (path.resolve(), *path.resolve().parents):
            raise ConfigError(f"{path} is inside the registry {self.path}: choose another --output_dir")

    def check_writable(self) -> None:
        """Create the registry if need be and try to write in it; raise a [`StorageError`] if that fails."""
        with explain_os_errors(f"writing to the registry {self.path}"):
            self.store.check_writable()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        with explain_os_errors(f"writing to the registry {self.path}"), self.store.stage(name) as staged:
            yield staged

    def commit(self, staged: Path, manifest: Manifest) -> RegisteredAgent:
        """Record the digests of a staged version's files, write its manifest and make it the agent's next version."""
        with explain_os_errors(f"registering agent {manifest.agent}"):
            manifest.files = file_records(staged)
            write_manifest(staged, manifest)
            number = self.store.commit(manifest.agent, staged)
            return RegisteredAgent(manifest.agent, number, self.store.version_dir(manifest.agent, number), manifest)

    def admit(self, staged: Path, number: int) -> RegisteredAgent:
        """Make a version that was registered elsewhere one of this registry, exactly as it is.

        Args:
            staged (`Path`):
                What [`stage`] gave, with all files of the version, its manifest too.
            number (`int`):
                Its number elsewhere, kept unless it was used here or is far ahead; then the next free one is taken.

        Returns:
            [`RegisteredAgent`]: the version; one that has been here before if its manifest is the same.

        Raises:
            CorruptedFileError: if the manifest or a file is not what was registered elsewhere.
            InvalidNameError: if the number is not that of a version.
        """
        check_number(number)
        name, cure = staged.parent.name, "get it again from where it comes from"
        manifest = _read_manifest(staged, cure)
        verify_files(staged, manifest.files, f"agent {name}@v{number}, which arrived", cure)
        with explain_os_errors(f"adding agent {name}@v{number}"):
            while True:
                # before the look around: who admits the same version after it takes this number, and the next look
                # finds that one
                free = self.store.free_number(name, wanted=number)
                if (same := self.find_same(name, manifest.to_dict()["digest"])) is not None:
                    return same
                if self.store.take(name, staged, free):
                    return RegisteredAgent(name, free, self.store.version_dir(name, free), manifest)

    def find_same(self, name: str, manifest_digest: str) -> RegisteredAgent | None:
        """The version of an agent whose manifest has this digest, the newest of several; `None` if there is none."""
        found = [number for number in self.versions(name) if self._digest(name, number) == manifest_digest]
        return self._read(name, found[-1]) if found else None

    def labels(self, name: str) -> Labels:
        """Aliases and tags of an agent's versions, to read and to set."""
        return self.store.labels(name)

    def remove(self, spec: str, force: bool = False) -> list[str]:
        """Move one version (`"math@v2"`) or all of an agent's (`"math"`), damaged ones too, into the trash.

        Args:
            spec (`str`):
                What to remove.
            force (`bool`, *optional*, defaults to `False`):
                Whether to remove also what a generalist of this registry was merged of.

        Returns:
            `list[str]`: the versions that were removed. Their numbers are not used again.

        Raises:
            ConfigError: if a generalist descends from one of them. Nothing was removed then.
        """
        name, numbers = self._find(spec)
        if not force:
            digests = {number: self._digest(name, number) for number in numbers}
            if children := self.generalists.children(name, digests):
                raise ConfigError(f"{children}: --force removes it all the same, into the trash")
        with explain_os_errors(f"removing agent {spec}"):
            return self._trash.remove(name, numbers)

    def quarantine(self, spec: str, reason: str) -> str:
        """Move a version that is damaged (`"math@v2"`) out of sight, write down why, and return its name."""
        return self._trash.quarantine(spec, reason)

    def recover(self, spec: str) -> list[str]:
        """Bring versions back from trash or quarantine, with their Fisher information: see [`Trash.recover`]."""
        return self._trash.recover(spec)

    def fisher_dir(self, name: str, number: int) -> Path:
        """Where the Fisher information of an agent's version is, if it has one."""
        return self.fishers.version_dir(name, number)

    def _read(self, name: str, number: int) -> RegisteredAgent:
        path = self.store.version_dir(name, number)
        return RegisteredAgent(name, number, path, _read_manifest(path, _cure(path, f"{name}@v{number}")))

    def _digest(self, name: str, number: int) -> str | None:
        """Digest of a version's manifest; `None` if it is damaged, or has gone meanwhile."""
        try:
            return self._read(name, number).digest
        except (CorruptedFileError, StorageError, UnsupportedModelError):
            return None

    def _find(self, spec: str) -> tuple[str, list[int]]:
        # a name is refused before the registry is missed
        check_agent_name(spec.partition("@")[0] if isinstance(spec, str) else spec)
        self.check_exists()
        return self.store.find(spec)


def check_agent_name(name: str) -> None:
    """Raise an [`InvalidNameError`] if a name is not letters, digits, dots, dashes and underscores."""
    check_name(name, "agent")


def _cure(path: Path, version: str) -> str:
    """What to do about a damaged version, which is at `path` in its registry."""
    command = VersionStore(path.parents[1], "agent").command("quarantine", version)
    return f"put it out of the way ({command}) and register it again from its checkpoint"


def _read_manifest(path: Path, cure: str) -> Manifest:
    """Read the manifest of a directory in the folder of its agent."""
    file, name = path / MANIFEST, path.parent.name
    try:
        if path.exists() and not os.path.lexists(file):
            raise CorruptedFileError(f"{file} is missing")
        manifest = Manifest.from_dict(read_json(file), str(file))
        if manifest.agent != name or manifest.kind not in ("full", "lora"):
            raise CorruptedFileError(f"{file} is not the manifest of agent {name!r}")
    except CorruptedFileError as error:
        raise CorruptedFileError(f"{error}: {cure}") from error
    return manifest


def write_records(path: Path, records: Mapping[str, TensorRecord] | Mapping[str, LoraRecord]) -> None:
    """Write records by name; fields that are unset are left out."""
    content = {
        name: {key: value for key, value in asdict(record).items() if value is not None}
        for name, record in records.items()
    }
    write_json(path, content)
