"""Generalists: models that were merged of the registry's agents, each in immutable, numbered versions.

```
registry/generalists/generalist/v000001/manifest.json       parents, settings, verdict of the gate, digests
                                        model.safetensors, config.json, tokenizer, merge_report.json, README.md
                                latest.json                 the version that was promoted last
```

A version is a model directory that transformers and vLLM load. `latest.json` is no link on purpose: what is trained
from a generalist has to name a version, because the base of a run must not move while it lasts.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, ConfigError, CorruptedFileError, RamTrlError
from .durable import explain_os_errors, read_json, replace_json
from .labels import Labels, read_pointer
from .manifest import GeneralistManifest
from .names import check_name
from .trash import Trash
from .versions import MANIFEST, VersionStore, file_records, verify_files, write_manifest


__all__ = ["LATEST", "Generalist", "GeneralistStore"]

LATEST = "latest.json"


@dataclass(frozen=True, slots=True)
class Generalist:
    """One version of a generalist in a registry.

    Args:
        name (`str`):
            Name of the generalist.
        version (`int`):
            Number of the version, from 1.
        path (`Path`):
            Directory of the version: a model that transformers and vLLM load.
        manifest ([`GeneralistManifest`]):
            What is recorded of it.
    """

    name: str
    version: int
    path: Path
    manifest: GeneralistManifest

    def __str__(self) -> str:
        return f"{self.name}@v{self.version}"

    @property
    def parents(self) -> list[str]:
        """The agents that it was merged of: `["code@v1", "math@v3"]`."""
        return [f"{parent.agent}@v{parent.version}" for parent in self.manifest.parents]

    def report(self) -> dict[str, Any]:
        """Content of its `merge_report.json`."""
        return read_json(self.path / "merge_report.json")

    def descends_from(self, agent: str, version: int, digest: str | None) -> bool:
        """Whether it was merged of a version of an agent.

        Args:
            agent (`str`):
                Name of the agent.
            version (`int`):
                Number of the version. It may be another one in the registry that it came from.
            digest (`str`, *optional*):
                Digest of its manifest; the number decides where that cannot be read.
        """
        parents = [parent for parent in self.manifest.parents if parent.agent == agent]
        return any(parent.version == version if digest is None else parent.digest == digest for parent in parents)

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Compare every file with its recorded size and digest; `advance` is told how many bytes were read.

        Raises:
            CorruptedFileError: if a file is missing, changed, or not recorded.
        """
        verify_files(self.path, self.manifest.files, f"generalist {self}", _cure(self.path, str(self)), advance)


class GeneralistStore:
    """The generalists of a registry.

    Args:
        registry (`Path`):
            Directory of the registry.

    Attributes:
        store ([`~ram_trl.storage.versions.VersionStore`]):
            Where they are on disk.

    Example:

    ```python
    for generalist in AgentRegistry("registry").generalists:
        print(generalist, generalist.parents, generalist.path)
    ```
    """

    def __init__(self, registry: Path):
        self._registry = registry
        self.store = VersionStore(registry / "generalists", "generalist")
        self._trash = Trash(self.store, _read_manifest)

    def __iter__(self) -> Iterator[Generalist]:
        """Every version of every generalist, by name and number."""
        return iter([self.get(f"{name}@v{number}") for name in self.names() for number in self.versions(name)])

    def names(self) -> list[str]:
        """Names of the generalists that have a version, sorted."""
        return self.store.names()

    def versions(self, name: str) -> list[int]:
        """Version numbers of a generalist, ascending; empty if there is none."""
        return self.store.versions(name)

    def get(self, spec: str) -> Generalist:
        """Look up `"generalist"` (the version that was promoted last) or `"generalist@v2"`.

        Raises:
            AgentNotFoundError: if there is no such generalist or version, or none was promoted.
            InvalidNameError: if the name is not one.
        """
        name, numbers = self.store.find(spec)
        if "@" in spec:
            return self._read(name, numbers[0])
        self.check_latest(name)
        number = self.latest(name)
        if number is None:
            raise AgentNotFoundError(
                f"no version of generalist {name!r} was promoted: name one of "
                f"{', '.join(f'{name}@v{number}' for number in numbers)}"
            )
        return self._read(name, number)

    def readable(self) -> Iterator[Generalist]:
        """Every version of every generalist whose manifest is intact."""
        for name in self.names():
            for number in self.versions(name):
                with contextlib.suppress(RamTrlError):
                    yield self._read(name, number)

    def labels(self, name: str) -> Labels:
        """Aliases and tags of a generalist's versions, to read and to set."""
        return self.store.labels(name)

    def latest(self, name: str) -> int | None:
        """The version of a generalist that was promoted last, if one was."""
        check_name(name, "generalist")
        return read_pointer(self.store.path / name / LATEST, "promote a version (ram-trl promote)")

    def check_latest(self, name: str) -> None:
        """Refuse a generalist whose latest version is said to be one that is not there.

        Raises:
            CorruptedFileError: if it is, or if what says so is damaged.
        """
        number, numbers = self.latest(name), self.versions(name)
        if number is not None and number not in numbers:
            promote = self.store.command("promote", f"{name}@v{max(numbers, default=1)}")
            raise CorruptedFileError(
                f"{self.store.path / name / LATEST} names v{number}, which is not there: promote another ({promote})"
            )

    def promote(self, spec: str) -> Generalist:
        """Make a version the one that the generalist's name alone means, durably.

        Args:
            spec (`str`):
                `"generalist@v2"`; an earlier version than the present one, to go back, or one that the gate refused.

        Raises:
            CorruptedFileError: if its files are not those that were merged.
        """
        if "@" not in spec:
            raise ConfigError(f"promote a version: {spec}@v2")
        generalist = self.get(spec)
        generalist.verify()
        with explain_os_errors(f"promoting {generalist}"), self._locked(generalist.name):
            # it may have gone while its files were read
            self.get(str(generalist))
            self._point(generalist.name, generalist.version)
        return generalist

    def check_writable(self, name: str) -> None:
        """Refuse a name that is not one, and a place that cannot be written to.

        Raises:
            InvalidNameError: if it is not a name.
            CorruptedFileError: if what says which version is the latest is damaged.
            StorageError: if nothing can be written.
        """
        self.latest(name)
        with explain_os_errors(f"writing to the registry {self._registry}"):
            self.store.check_writable()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        with explain_os_errors(f"writing to the registry {self._registry}"), self.store.stage(name) as staged:
            yield staged

    def commit(self, staged: Path, manifest: GeneralistManifest) -> Generalist:
        """Make a staged model the generalist's next version and, if no gate refused it, the latest.

        Raises:
            StorageError: if it cannot be written; if it could, but not made the latest, the message says so.
        """
        name = manifest.generalist
        with explain_os_errors(f"adding a version of generalist {name}"):
            manifest.files = file_records(staged)
            write_manifest(staged, manifest)
            number = self.store.commit(name, staged, above=self.latest(name) or 0)
        merged = Generalist(name, number, self.store.version_dir(name, number), manifest)
        if manifest.refused is None:
            promote = f"ram-trl promote --registry {self._registry} --generalist {merged}"
            with explain_os_errors(f"{merged} is there; making it the latest ({promote})"):
                with self._locked(name):
                    # of two merges at once the one that ends later need not be the newer
                    if number > (self.latest(name) or 0):
                        self._point(name, number)
        return merged

    def remove(self, spec: str) -> list[str]:
        """Move one version (`"generalist@v2"`), or a generalist with all of its versions, into the trash.

        Returns:
            `list[str]`: the versions that were removed. Their numbers are not used again.

        Raises:
            ConfigError: if the version is the latest and others would be left: promote another one first.
        """
        name, numbers = self.store.find(spec)
        with explain_os_errors(f"removing generalist {spec}"), self._locked(name):
            if "@" in spec and self.versions(name) != numbers and self.latest(name) == numbers[0]:
                raise ConfigError(f"{name}@v{numbers[0]} is the latest of {name}: promote another, then remove it")
            # what says which is the latest stays, and means it again if it comes back
            return self._trash.remove(name, numbers)

    def quarantine(self, spec: str, reason: str) -> str:
        """Move a version that is damaged (`"generalist@v2"`), be it the latest, out of sight; return its name."""
        return self._trash.quarantine(spec, reason)

    def recover(self, spec: str) -> list[str]:
        """Bring versions back from trash or quarantine: see [`Trash.recover`]."""
        return self._trash.recover(spec)

    def children(self, agent: str, digests: Mapping[int, str | None]) -> str:
        """Which generalists were merged of versions of an agent, in words; empty if none was.

        Args:
            agent (`str`):
                Name of the agent.
            digests (`Mapping[int, str]`):
                For each version its manifest's digest, `None` where that cannot be read.
        """
        merged = list(self.readable())
        found = {}
        for number, digest in digests.items():
            if names := [str(one) for one in merged if one.descends_from(agent, number, digest)]:
                found[number] = ", ".join(names)
        return "; ".join(f"{names} was merged of {agent}@v{number}" for number, names in found.items())

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Nobody else on this machine reads and moves the alias meanwhile."""
        folder = os.open(self.store.path / name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # a file system that has no locks has to do without
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _point(self, name: str, number: int) -> None:
        replace_json(self.store.path / name / LATEST, {"version": number})

    def _read(self, name: str, number: int) -> Generalist:
        path = self.store.version_dir(name, number)
        return Generalist(name, number, path, _read_manifest(path, _cure(path, f"{name}@v{number}")))


def _cure(path: Path, version: str) -> str:
    """What to do about a damaged version, which is at `path` in its registry."""
    command = VersionStore(path.parents[1], "generalist").command("quarantine", version)
    return f"put it out of the way ({command}) and merge it again (--merge_to)"


def _read_manifest(path: Path, cure: str) -> GeneralistManifest:
    """Read the manifest of a directory in the folder of its generalist."""
    file, name = path / MANIFEST, path.parent.name
    try:
        if path.exists() and not os.path.lexists(file):
            raise CorruptedFileError(f"{file} is missing")
        manifest = GeneralistManifest.from_dict(read_json(file), str(file))
        if manifest.generalist != name:
            raise CorruptedFileError(f"{file} is not the manifest of generalist {name!r}")
    except CorruptedFileError as error:
        raise CorruptedFileError(f"{error}: {cure}") from error
    return manifest
