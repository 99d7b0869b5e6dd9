"""Diagonal Fisher information of agents, beside their versions, which are immutable.

```
registry/fisher/math/v000001/fisher.safetensors     a bfloat16 tensor for every tensor of the base
                             manifest.json          of which agent, from how many examples, digests
```

It is made from examples of the user's own (`recipes/fisher.py`), so an agent can do without it, and get another one.
Only its range matters: bfloat16 has that of float32.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, CorruptedFileError
from .durable import explain_os_errors, make_dirs, publish, read_json, staging_dir, write_json
from .manifest import FileRecord
from .registry import AgentRegistry, RegisteredAgent
from .tensor_file import TensorFile
from .versions import MANIFEST, file_records, verify_files


__all__ = ["FISHER", "FisherManifest", "FisherStore"]

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


class FisherStore:
    """The Fisher information of a registry's agents.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
    """

    def __init__(self, registry: AgentRegistry):
        self._path = registry.path / "fisher"

    def directory(self, agent: RegisteredAgent) -> Path:
        """Where an agent's is, if it has one."""
        return self._path / agent.name / f"v{agent.version:06d}"

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
        with explain_os_errors(f"writing to {self._path}"):
            make_dirs(self.directory(agent).parent)
            with staging_dir(self.directory(agent).parent) as staged:
                yield staged

    def commit(self, staged: Path, agent: RegisteredAgent, manifest: FisherManifest) -> Path:
        """Record the file's digest and give the directory its place, durably."""
        manifest.files = file_records(staged)
        write_json(staged / MANIFEST, dataclasses.asdict(manifest))
        publish(staged, self.directory(agent))
        return self.directory(agent)

    def open(self, agent: RegisteredAgent) -> TensorFile:
        """An agent's Fisher information, verified.

        Raises:
            ConfigError: if it has none, or one of another agent of its name; with the command that makes it.
            CorruptedFileError: if the file is not what was written.
        """
        path = self.directory(agent)
        command = f"accelerate launch recipes/fisher.py --registry {self._path.parent} --agent {agent} --dataset DATA"
        if not path.exists():
            raise ConfigError(f"agent {agent} has no Fisher information, which method=fisher needs: {command}")
        try:
            content = read_json(path / MANIFEST)
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            manifest = FisherManifest(**content, files=files)
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptedFileError(
                f"{path / MANIFEST} is damaged: {error}; remove {path}, then {command}"
            ) from error
        if manifest.agent_digest != agent.manifest.to_dict()["digest"]:
            raise ConfigError(f"{path} is of another agent of the name {agent}: remove it, then {command}")
        verify_files(path, manifest.files, f"the Fisher of agent {agent}", f"remove {path}, then {command}")
        return TensorFile(path / FISHER)
