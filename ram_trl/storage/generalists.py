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
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AgentNotFoundError, ConfigError, CorruptedFileError
from .durable import STAGING_PREFIX, explain_os_errors, read_json, sync_dir, sync_file, write_json
from .manifest import GeneralistManifest
from .versions import MANIFEST, VersionStore, check_name, file_records, verify_files


__all__ = ["Generalist", "GeneralistStore"]

_LATEST = "latest.json"


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

    def verify(self) -> None:
        """Compare every file with its recorded size and digest.

        Raises:
            CorruptedFileError: if a file is missing, changed, or not recorded.
        """
        verify_files(self.path, self.manifest.files, f"generalist {self}", "merge it again (--merge_to)")


class GeneralistStore:
    """The generalists of a registry.

    Args:
        registry (`Path`):
            Directory of the registry.

    Example:

    ```python
    for generalist in AgentRegistry("registry").generalists:
        print(generalist, generalist.parents, generalist.path)
    ```
    """

    def __init__(self, registry: Path):
        self._registry = registry
        self._store = VersionStore(registry / "generalists", "generalist")

    def __iter__(self) -> Iterator[Generalist]:
        """Every version of every generalist, by name and number."""
        return iter([self.get(f"{name}@v{number}") for name in self.names() for number in self.versions(name)])

    def names(self) -> list[str]:
        """Names of the generalists that have a version, sorted."""
        return self._store.names()

    def versions(self, name: str) -> list[int]:
        """Version numbers of a generalist, ascending; empty if there is none."""
        return self._store.versions(name)

    def get(self, spec: str) -> Generalist:
        """Look up `"generalist"` (the version that was promoted last) or `"generalist@v2"`.

        Raises:
            AgentNotFoundError: if there is no such generalist or version, or none was promoted.
            InvalidNameError: if the name is not one.
        """
        name, numbers = self._store.find(spec)
        number = numbers[0] if "@" in spec else self.latest(name)
        if number is None:
            raise AgentNotFoundError(
                f"no version of generalist {name!r} was promoted: name one of "
                f"{', '.join(f'{name}@v{number}' for number in numbers)}"
            )
        if number not in self.versions(name):
            raise CorruptedFileError(
                f"{self._store.path / name / _LATEST} names v{number}, which is not there: promote another"
            )
        path = self._store.version_dir(name, number)
        manifest = GeneralistManifest.from_dict(read_json(path / MANIFEST), str(path / MANIFEST))
        if manifest.generalist != name:
            raise CorruptedFileError(f"{path / MANIFEST} is not the manifest of generalist {name!r}")
        return Generalist(name, number, path, manifest)

    def latest(self, name: str) -> int | None:
        """The version of a generalist that was promoted last, if one was."""
        check_name(name, "generalist")
        path = self._store.path / name / _LATEST
        if not path.exists():
            return None
        number = read_json(path).get("version")
        if type(number) is not int or number < 1:
            raise CorruptedFileError(f"{path} does not name a version: promote one with ram-trl promote")
        return number

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
            self._store.check_writable()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A directory to write a new version in. Nothing of it is visible until [`commit`]; it is removed on exit."""
        with explain_os_errors(f"writing to the registry {self._registry}"), self._store.stage(name) as staged:
            yield staged

    def commit(self, staged: Path, manifest: GeneralistManifest) -> Generalist:
        """Make a staged model the generalist's next version and, if no gate refused it, the latest.

        Raises:
            StorageError: if it cannot be written; if it could, but not made the latest, the message says so.
        """
        name = manifest.generalist
        with explain_os_errors(f"adding a version of generalist {name}"):
            manifest.files = file_records(staged)
            write_json(staged / MANIFEST, manifest.to_dict())
            number = self._store.commit(name, staged, above=self.latest(name) or 0)
        merged = Generalist(name, number, self._store.version_dir(name, number), manifest)
        if manifest.refused is None:
            promote = f"ram-trl promote --registry {self._registry} --generalist {merged}"
            with explain_os_errors(f"{merged} is there; making it the latest ({promote})"):
                with self._locked(name):
                    # of two merges at once the one that ends later need not be the newer
                    if number > (self.latest(name) or 0):
                        self._point(name, number)
        return merged

    def remove(self, spec: str) -> list[str]:
        """Remove one version (`"generalist@v2"`), or a generalist with all of its versions (`"generalist"`).

        Returns:
            `list[str]`: the versions that were removed. Their numbers are not used again.

        Raises:
            ConfigError: if the version is the latest and others would be left: promote another one first.
        """
        name, numbers = self._store.find(spec)
        with explain_os_errors(f"removing generalist {spec}"), self._locked(name):
            if "@" in spec and self.versions(name) != numbers and self.latest(name) == numbers[0]:
                raise ConfigError(f"{spec} is the latest of {name}: promote another version, then remove it")
            if numbers == self.versions(name):
                (self._store.path / name / _LATEST).unlink(missing_ok=True)
            for number in numbers:
                self._store.remove(name, number)
        return [f"{name}@v{number}" for number in numbers]

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Nobody else on this machine reads and moves the alias meanwhile."""
        folder = os.open(self._store.path / name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # a file system that has no locks has to do without
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _point(self, name: str, number: int) -> None:
        folder = self._store.path / name
        written = folder / f"{STAGING_PREFIX}{uuid.uuid4().hex}"
        try:
            write_json(written, {"version": number})
            sync_file(written)
            os.replace(written, folder / _LATEST)
        finally:
            written.unlink(missing_ok=True)
        sync_dir(folder)
