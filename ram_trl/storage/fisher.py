"""Diagonal empirical Fisher information of agents, beside their versions, which are immutable.

```
registry/fisher/math/v000001/fisher.safetensors     a bfloat16 tensor for every tensor of the base
                             manifest.json          of which agent, from how many examples, digests
```

It is made from examples of the user's own (`recipes/fisher.py`), so an agent can do without it, and get another one;
it is removed with its agent. Only its range matters: bfloat16 has that of float32.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, CorruptedFileError, StorageError
from .durable import explain_os_errors, make_dirs, publish, read_json, staging_dir, write_json
from .manifest import FileRecord
from .registry import AgentRegistry, RegisteredAgent
from .tensor_file import TensorFile
from .versions import MANIFEST, file_records, verify_files


__all__ = ["FISHER", "FisherManifest", "FisherStore", "StoredFisher"]

FISHER = "fisher.safetensors"


@dataclass(kw_only=True, slots=True)
class FisherManifest:
    """What is recorded of an agent's Fisher information.

    Args:
        agent (`str`):
            Name and version of the agent.
        agent_digest (`str`):
            Digest of the agent's manifest.
        examples (`int`):
            Number of examples that it was averaged over.
        created (`str`):
            Time, ISO 8601, UTC.
        ram_trl_version (`str`):
            Version of this package that wrote it.
        files (`dict[str, FileRecord]`):
            Size and digest of the file.
    """

    agent: str
    agent_digest: str
    examples: int
    created: str
    ram_trl_version: str
    files: dict[str, FileRecord] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredFisher:
    """The Fisher information of one agent.

    Args:
        agent (`str`):
            Name and version of the agent.
        path (`Path`):
            Directory that holds it.
        manifest ([`FisherManifest`]):
            What is recorded of it.
        cure (`str`):
            What to do about damage.
    """

    agent: str
    path: Path
    manifest: FisherManifest
    cure: str

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Compare the file with its recorded size and digest; `advance` is told how many bytes were read.

        Raises:
            CorruptedFileError: if it is missing or changed.
        """
        verify_files(self.path, self.manifest.files, f"the Fisher of agent {self.agent}", self.cure, advance)

    def open_weights(self) -> TensorFile:
        """The tensors, not verified.

        Raises:
            CorruptedFileError: if the file has no header that fits it.
        """
        try:
            return TensorFile(self.path / FISHER)
        except (CorruptedFileError, StorageError) as error:
            raise CorruptedFileError(f"the Fisher of agent {self.agent}: {error}: {self.cure}") from error


class FisherStore:
    """The Fisher information of a registry's agents.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
    """

    def __init__(self, registry: AgentRegistry):
        self._registry = registry

    def directory(self, agent: RegisteredAgent) -> Path:
        """Where an agent's is, if it has one."""
        return self._registry.fisher_dir(agent.name, agent.version)

    def check_absent(self, agent: RegisteredAgent) -> None:
        """Refuse to make what is there.

        Raises:
            ConfigError: if the agent has Fisher information already.
        """
        if self.directory(agent).exists():
            raise ConfigError(f"agent {agent} has a Fisher already: remove {self.directory(agent)} to make another")

    @contextlib.contextmanager
    def stage(self, agent: RegisteredAgent) -> Iterator[Path]:
        """A directory to write the file `FISHER` in. Nothing of it is visible until [`commit`]."""
        self.check_absent(agent)
        folder = self.directory(agent).parent
        with explain_os_errors(f"writing to {folder}"):
            make_dirs(folder)
            with staging_dir(folder) as staged:
                yield staged

    def commit(self, staged: Path, agent: RegisteredAgent, manifest: FisherManifest) -> Path:
        """Record the file's digest and give the directory its place, durably."""
        manifest.files = file_records(staged)
        write_json(staged / MANIFEST, dataclasses.asdict(manifest))
        publish(staged, self.directory(agent))
        return self.directory(agent)

    def get(self, agent: RegisteredAgent) -> StoredFisher:
        """An agent's Fisher information; its bytes are not read.

        Raises:
            ConfigError: if it has none, or one of another agent of its name; with the command that makes it.
            CorruptedFileError: if its manifest is damaged.
        """
        path = self.directory(agent)
        command = (
            f"accelerate launch recipes/fisher.py --registry {self._registry.path} --agent {agent} --dataset DATA"
        )
        if not path.exists():
            raise ConfigError(f"agent {agent} has no Fisher information, which method=fisher needs: {command}")
        cure = f"remove {path}, then {command}"
        try:
            content = read_json(path / MANIFEST)
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            manifest = FisherManifest(**content, files=files)
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptedFileError(f"{path / MANIFEST} is damaged: {error}; {cure}") from error
        if manifest.agent_digest != agent.digest:
            raise ConfigError(f"{path} is of another agent of the name {agent}: remove it, then {command}")
        return StoredFisher(str(agent), path, manifest, cure)
