"""The registry: a directory that holds agents, each in immutable, numbered versions (`versions.py`).

```
registry/agents/math/v000001/manifest.json       what it is, and the digests of the other files
                             tensors.json        every tensor of the base: shape, dtype, digests
                             delta.safetensors   a full fine-tune: differences from the base
                             adapter_model.safetensors, adapter_config.json    a LoRA agent, as PEFT writes it
                             adapter_map.json    a LoRA agent: which base tensor each factor changes
```

The models that were merged of them are in `registry/generalists` (`generalists.py`), the agents' Fisher information in
`registry/fisher` (`fisher.py`).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, ConfigError, CorruptedFileError
from .durable import explain_os_errors, read_json, write_json
from .generalists import GeneralistStore
from .manifest import LoraRecord, Manifest, TensorRecord
from .tensor_file import TensorFile
from .versions import MANIFEST, VersionStore, check_name, discard, file_records, verify_file, verify_files


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

    def verify(self) -> None:
        """Compare every file with its recorded size and digest.

        Raises:
            CorruptedFileError: if a file is missing, changed, or not recorded.
        """
        verify_files(self.path, self.manifest.files, f"agent {self}", self._cure)

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

    def _records(self, file_name: str, record_type: type) -> dict[str, Any]:
        # What is said about a damaged agent must not be said about its base.
        verify_file(self.path, file_name, self.manifest.files, f"agent {self}", self._cure)
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

    Attributes:
        generalists ([`~ram_trl.storage.generalists.GeneralistStore`]):
            The models that were merged of the agents and kept in the registry.

    Example:

    ```python
    registry = AgentRegistry("registry")
    for agent in registry:
        print(agent, agent.manifest.kind, agent.manifest.base_model.name)
    ```
    """

    def __init__(self, path: "str | os.PathLike | AgentRegistry"):
        self.path = path.path if isinstance(path, AgentRegistry) else Path(path)
        self.generalists = GeneralistStore(self.path)
        self._store = VersionStore(self.path / "agents", "agent")

    def __iter__(self) -> Iterator[RegisteredAgent]:
        """The latest version of every agent, by name."""
        return iter([self.get(name) for name in self.names()])

    def exists(self) -> bool:
        return self._store.exists()

    def names(self) -> list[str]:
        """Names of the agents that have a version, sorted.

        Raises:
            AgentNotFoundError: if there is no registry at this path.
        """
        if not self.exists():
            raise AgentNotFoundError(f"{self.path} is not a registry: no agent was ever registered there")
        return self._store.names()

    def versions(self, name: str) -> list[int]:
        """Version numbers of an agent, ascending; empty if there is none."""
        return self._store.versions(name)

    def get(self, spec: str) -> RegisteredAgent:
        """Look up `"math"` (its latest version) or `"math@v2"`.

        Raises:
            AgentNotFoundError: if there is no such registry, agent or version.
            InvalidNameError: if the name is not one.
        """
        name, numbers = self._find(spec)
        path = self._store.version_dir(name, numbers[-1])
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
            self._store.check_writable()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        with explain_os_errors(f"writing to the registry {self.path}"), self._store.stage(name) as staged:
            yield staged

    def commit(self, staged: Path, manifest: Manifest) -> RegisteredAgent:
        """Record the digests of a staged version's files, write its manifest and make it the agent's next version."""
        with explain_os_errors(f"registering agent {manifest.agent}"):
            manifest.files = file_records(staged)
            write_json(staged / MANIFEST, manifest.to_dict())
            number = self._store.commit(manifest.agent, staged)
            return RegisteredAgent(manifest.agent, number, self._store.version_dir(manifest.agent, number), manifest)

    def remove(self, spec: str) -> list[str]:
        """Remove one version (`"math@v2"`) or all of an agent's (`"math"`), damaged ones too, with their Fisher.

        Returns:
            `list[str]`: the versions that were removed. Their numbers are not used again.
        """
        name, numbers = self._find(spec)
        with explain_os_errors(f"removing agent {spec}"):
            for number in numbers:
                # first, as nothing would find it without the agent
                if self.fisher_dir(name, number).exists():
                    discard(self.fisher_dir(name, number))
                self._store.remove(name, number)
        return [f"{name}@v{number}" for number in numbers]

    def fisher_dir(self, name: str, number: int) -> Path:
        """Where the Fisher information of an agent's version is, if it has one."""
        return self.path / "fisher" / name / f"v{number:06d}"

    def _find(self, spec: str) -> tuple[str, list[int]]:
        # a name is refused before the registry is missed
        check_agent_name(spec.partition("@")[0] if isinstance(spec, str) else spec)
        self.names()
        return self._store.find(spec)


def check_agent_name(name: str) -> None:
    """Refuse a name that is not letters, digits, dots, dashes and underscores.

    Raises:
        InvalidNameError: if it is not a valid name.
    """
    check_name(name, "agent")


def write_records(path: Path, records: Mapping[str, TensorRecord] | Mapping[str, LoraRecord]) -> None:
    """Write records by name; fields that are unset are left out."""
    content = {
        name: {key: value for key, value in asdict(record).items() if value is not None}
        for name, record in records.items()
    }
    write_json(path, content)
