"""What a place holds, read from a list of its files. Nothing of it is believed: a place may be anybody's."""

import contextlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import AgentNotFoundError, CorruptedFileError, StorageError, UnsupportedModelError
from ..storage.durable import unique_keys
from ..storage.fisher import FisherManifest
from ..storage.manifest import FileRecord, Manifest
from ..storage.names import VERSION, is_label, is_name, parse_spec, version_dir_name
from ..storage.versions import MANIFEST
from .remote import Source


__all__ = ["Catalogue", "Held"]

_USED = re.compile(rf"{VERSION.pattern}\.(removed|claim)")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Files of a place; bytes of a manifest; bytes of a label.
_MAX_FILES, _MAX_MANIFEST, _MAX_LABEL = 1_000_000, 1 << 24, 1 << 12


@dataclass(frozen=True, slots=True)
class Held:
    """One version, or its Fisher information, at a place.

    Args:
        folder (`str`):
            Its folder: `"agents/math/v000002"`.
        name (`str`):
            Name of the agent.
        number (`int`):
            Number of the version.
        manifest (`bytes`):
            Its `manifest.json` as it is there.
        digest (`str`):
            Digest of the agent's manifest.
        files (`dict[str, FileRecord]`):
            Every other file.
    """

    folder: str
    name: str
    number: int
    manifest: bytes
    digest: str
    files: dict[str, FileRecord]

    def __str__(self) -> str:
        return f"{self.name}@v{self.number}"

    @property
    def size(self) -> int:
        """Bytes of its files, without the manifest."""
        return sum(record.size for record in self.files.values())


@dataclass(slots=True)
class _Agent:
    versions: dict[int, dict[str, int]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    aliases: set[str] = field(default_factory=set)
    tags: dict[int, set[str]] = field(default_factory=dict)
    fisher: dict[int, dict[str, int]] = field(default_factory=dict)


class Catalogue:
    """The agents of a place, as they were when it was asked.

    Args:
        source ([`Source`]):
            The place.

    Raises:
        CorruptedFileError: if it lists what no registry has.
    """

    def __init__(self, source: Source):
        self._source, self.url = source, source.url
        self._agents: dict[str, _Agent] = {}
        self._known: dict[str, bytes] = {}
        self._files = source.list_files()
        if len(self._files) > _MAX_FILES:
            raise CorruptedFileError(f"{self.url} lists {len(self._files):,} files, which is no registry")
        for path, size in self._files.items():
            self._sort_in(path, size)
        for agent in self._agents.values():
            agent.used |= set(agent.versions)
            # it is there when its manifest is
            agent.versions = {
                number: files for number, files in agent.versions.items() if number and MANIFEST in files
            }

    def names(self) -> list[str]:
        """Names of the agents that have a version, sorted."""
        return sorted(name for name, agent in self._agents.items() if agent.versions)

    def versions(self, name: str) -> list[int]:
        """Numbers of an agent's versions, ascending."""
        return sorted(self._agent(name).versions)

    def free_number(self, name: str, wanted: int, taken: Collection[int] = ()) -> int:
        """`wanted` if nothing ever had it here and it is not taken, otherwise the next number that is free.

        Raises:
            StorageError: if the highest number is used.
        """
        used = {*self._agent(name).used, *taken}
        if wanted not in used:
            return wanted
        number = 1 + max(used)
        if not VERSION.fullmatch(version_dir_name(number)):
            raise StorageError(
                f"{self.url}: agents/{name} holds v{number - 1}, after which there is no number: remove it there if "
                "it is nobody's, or push to another place"
            )
        return number

    def begun(self, held: Held) -> int | None:
        """The number of this version if it was being pushed here, or lost files, and can be made whole."""
        agent = self._agent(held.name)
        for number in sorted(agent.used):
            path = f"agents/{held.name}/{version_dir_name(number)}"
            listed = agent.versions.get(number, {})
            # a file too many would stay; another manifest is another's
            if not set(listed) <= {MANIFEST, *held.files} or listed.get(MANIFEST) not in (None, len(held.manifest)):
                continue
            # one that is damaged is another's
            with contextlib.suppress(CorruptedFileError, UnsupportedModelError):
                if f"{path}.claim" in self._files:
                    digest = self._small_json(f"{path}.claim").get("digest")
                else:
                    digest = self._agent_manifest(path)[0].to_dict()["digest"] if listed else None
                if digest == held.digest:
                    return number
        return None

    def has_fisher(self, name: str, number: int) -> bool:
        """Whether a version has Fisher information here."""
        return MANIFEST in self._agent(name).fisher.get(number, {})

    def aliases(self, name: str) -> dict[str, int]:
        """The versions that an agent's aliases mean; left out are those of versions that are not here, and damaged."""
        agent, found = self._agent(name), {}
        for alias in sorted(agent.aliases):
            path = f"agents/{name}/aliases/{alias}.json"
            try:
                number = self._small_json(path).get("version")
            except CorruptedFileError:
                # it may have been moved or dropped since it was listed; one of that size is none
                if self._files[path] > _MAX_LABEL:
                    raise
                continue
            if type(number) is int and number in agent.versions:
                found[alias] = number
        return found

    def tags(self, name: str, number: int) -> list[str]:
        """Tags of a version, sorted."""
        return sorted(self._agent(name).tags.get(number, ()))

    def choose(
        self, specs: Sequence[str] | None, default: Literal["latest", "aliased", "all"]
    ) -> list[tuple[str, int]]:
        """Names and numbers that specs mean (`"math"`, `"math@v2"`, `"math@best"`), without repetition.

        Without specs, of every agent: the latest version, that and those that aliases mean, or all.

        Raises:
            AgentNotFoundError: if there is no registry, agent or version.
        """
        names = self.names()
        if not names:
            raise AgentNotFoundError(f"{self.url} holds no agent: check the URL, or push one there")
        chosen: dict[tuple[str, int], None] = {}
        for spec in names if specs is None else specs:
            name, version = parse_spec(spec, "agent")
            if name not in names:
                raise AgentNotFoundError(f"no agent {name!r} in {self.url}; it holds: {', '.join(names)}")
            numbers = self.versions(name)
            wanted = self.aliases(name).get(version) if isinstance(version, str) else version or numbers[-1]
            if wanted not in numbers:
                listed = ", ".join([*(f"v{number}" for number in numbers), *self.aliases(name)])
                raise AgentNotFoundError(
                    f"agent {name!r} in {self.url} has no {spec.partition('@')[2]}; it has: {listed}"
                )
            chosen[name, wanted] = None
            if specs is None and default != "latest":
                more = numbers if default == "all" else self.aliases(name).values()
                chosen |= {(name, number): None for number in more}
        return list(chosen)

    def agent(self, name: str, number: int) -> Held:
        """A version with its manifest, which fits its name and the files that are listed.

        Raises:
            CorruptedFileError: if it does not.
        """
        folder = f"agents/{name}/{version_dir_name(number)}"
        manifest, data = self._agent_manifest(folder)
        if manifest.agent != name or manifest.kind not in ("full", "lora"):
            raise CorruptedFileError(f"{self.url}: {folder}/{MANIFEST} is not the manifest of agent {name!r}")
        return self._held(folder, name, number, data, manifest.to_dict()["digest"], manifest.files)

    def fisher(self, agent: Held) -> Held | None:
        """The Fisher information of a version, if it is here and belongs to it."""
        folder = f"fisher/{agent.name}/{version_dir_name(agent.number)}"
        if not self.has_fisher(agent.name, agent.number):
            return None
        content, data = self._manifest(folder)
        where = f"{self.url}: {folder}/{MANIFEST}"
        try:
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            manifest = FisherManifest(**content, files=files)
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptedFileError(f"{where} is not a manifest: {error}") from error
        if manifest.agent_digest != agent.digest:
            return None
        return self._held(folder, agent.name, agent.number, data, agent.digest, files)

    def same(self, held: Held) -> int | None:
        """The number of a version that has this manifest already, and its files."""
        for number, files in sorted(self._agent(held.name).versions.items()):
            # what is not whole is not there, and of no concern to those who push other versions
            with contextlib.suppress(CorruptedFileError, UnsupportedModelError):
                if files[MANIFEST] == len(held.manifest) and self.agent(held.name, number).digest == held.digest:
                    return number
        return None

    def _agent(self, name: str) -> _Agent:
        return self._agents.get(name) or _Agent()

    def _sort_in(self, path: Any, size: Any) -> None:
        """Find out what a file is of its path."""
        parts = path.split("/") if isinstance(path, str) else []
        plain = parts[:1] in (["agents"], ["fisher"]) and path.isprintable() and "\\" not in path
        if not plain or any(part in ("", ".", "..") for part in parts):
            raise CorruptedFileError(f"{self.url} lists {path!r}, which is no file of a registry: do not use it")
        if type(size) is not int or size < 0:
            raise CorruptedFileError(f"{self.url} lists {path} with a size of {size!r}: do not use it")
        if len(parts) < 3 or not is_name(parts[1]):
            return
        agent = self._agents.setdefault(parts[1], _Agent())
        top, _, folder, *rest = parts
        if version := VERSION.fullmatch(folder):
            held = agent.versions if top == "agents" else agent.fisher
            held.setdefault(int(version[1]), {})["/".join(rest)] = size
        elif top == "agents" and (used := _USED.fullmatch(folder)):
            agent.used.add(int(used[1]))
        elif top == "agents" and folder == "aliases" and len(rest) == 1:
            if rest[0].endswith(".json") and is_label(alias := rest[0].removesuffix(".json")):
                agent.aliases.add(alias)
        elif top == "agents" and folder == "tags" and len(rest) == 2:
            if (version := VERSION.fullmatch(rest[0])) and is_label(rest[1]):
                agent.tags.setdefault(int(version[1]), set()).add(rest[1])

    def _manifest(self, folder: str) -> tuple[dict[str, Any], bytes]:
        return self._json(f"{folder}/{MANIFEST}", _MAX_MANIFEST)

    def _agent_manifest(self, folder: str) -> tuple[Manifest, bytes]:
        content, data = self._manifest(folder)
        return Manifest.from_dict(content, f"{self.url}: {folder}/{MANIFEST}"), data

    def _small_json(self, path: str) -> dict[str, Any]:
        return self._json(path, _MAX_LABEL)[0]

    def _json(self, path: str, limit: int) -> tuple[dict[str, Any], bytes]:
        size = self._files[path]
        if size > limit:
            raise CorruptedFileError(f"{self.url} lists {path} with {size:,} bytes, which is too long: do not use it")
        if path not in self._known:
            self._known[path] = b"".join(self._source.stream(path, 0, size))
        data = self._known[path]
        try:
            content = json.loads(data.decode(), object_pairs_hook=unique_keys) if len(data) == size else None
        except (ValueError, RecursionError) as error:
            raise CorruptedFileError(f"{self.url}: {path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise CorruptedFileError(f"{self.url}: {path} is cut off, or no JSON object: push it again")
        return content, data

    def _held(
        self, folder: str, name: str, number: int, manifest: bytes, digest: str, files: dict[str, FileRecord]
    ) -> Held:
        """A version whose files are those that its manifest records."""
        where = f"{self.url}: {folder}"
        agent = self._agent(name)
        listed = {**(agent.versions if folder.startswith("agents/") else agent.fisher)[number]}
        del listed[MANIFEST]
        for file, record in files.items():
            valid = type(record.size) is int and record.size >= 0 and isinstance(record.blake3, str)
            if not valid or not _FILE.fullmatch(file) or not _DIGEST.fullmatch(record.blake3) or file == MANIFEST:
                raise CorruptedFileError(f"{where}/{MANIFEST} records {file!r}, which is no file of a version")
        for file in sorted(set(listed) ^ set(files)):
            state = "has an unrecorded file" if file in listed else "lacks its file"
            raise CorruptedFileError(f"{where} {state} {file}: push it again from a registry that is whole")
        for file, record in files.items():
            if listed[file] != record.size:
                raise CorruptedFileError(
                    f"{where}/{file} has {listed[file]:,} bytes, and {record.size:,} are recorded: "
                    "push it again from a registry that is whole"
                )
        return Held(folder, name, number, manifest, digest, files)
