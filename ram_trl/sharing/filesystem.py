"""Registries on anything that fsspec knows: S3, GCS, Azure, SFTP, ... A version is there when its manifest is."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from ..errors import ConfigError, StorageError
from .remote import Bundle, RemoteChangedError, hide_secrets, reaching


__all__ = ["FileSystemRemote"]

# What is asked for at once.
_READ_BYTES = 1 << 25
# What to install for the places that most people have.
_EXTRAS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
}
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci")


class FileSystemRemote:
    """A registry below a URL of fsspec.

    Nothing there can be renamed in one step, so a version's files go to their place, and its manifest last. Before
    them goes `agents/math/v000002.claim`, which says whose place it is: who finds another's takes the next number,
    who finds his own goes on where he was.

    Args:
        url (`str`):
            The URL of the registry: `"s3://bucket/registry"`.
    """

    def __init__(self, url: str):
        self.url, self._url = hide_secrets(url), url
        self._protocol = url.partition("://")[0]
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            library = _EXTRAS.get(self._protocol, "its library for fsspec")
            raise ConfigError(f"{self.url} needs a library that is not installed: pip install {library}") from error
        except Exception as error:
            known = "hf://USER/REPO, s3://BUCKET/FOLDER or another URL that fsspec knows"
            problem = hide_secrets(" ".join(str(error).split()), url)
            raise ConfigError(f"{self.url} cannot be opened: {problem}: use {known}") from error
        self._root = root.rstrip("/")

    def list_files(self) -> dict[str, int]:
        return {**self._list("agents"), **self._list("fisher")}

    def stream(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            end = min(start + _READ_BYTES, stop)
            with self._reaching(f"reading {path}"):
                piece = self._files.cat_file(self._at(path), start=start, end=end)
            if not piece:
                return
            start += len(piece)
            yield piece

    def prepare(self, private: bool) -> None:
        """Nothing: who may read it is the storage's affair, and it says so when the first file arrives."""

    def add(self, bundles: Sequence[Bundle], labels: Mapping[str, bytes], advance: Callable[[int], None]) -> None:
        for bundle in bundles:
            there = self._list(bundle.folder) if self._claim(bundle) else {}
            for name, size in bundle.sizes.items():
                if there.get(f"{bundle.folder}/{name}") == size:
                    advance(size)
                else:
                    self._put(bundle, name, advance)
            arrived = self._list(bundle.folder)
            for name, size in bundle.sizes.items():
                if (found := arrived.get(f"{bundle.folder}/{name}")) != size:
                    held = "nothing" if found is None else f"{found:,} bytes"
                    raise StorageError(
                        f"{self.url} holds {held} of {bundle.folder}/{name} ({size:,} bytes): push again"
                    )
            # where files cannot be created only if there is none, two may have thought that the place is theirs
            with self._reaching(f"reading {bundle.folder}.claim"):
                self._files.invalidate_cache()
                if self._files.cat_file(self._at(f"{bundle.folder}.claim")) != _claim_of(bundle):
                    raise RemoteChangedError(f"{self.url}: somebody else took {bundle.folder}: push again")
            self._put(bundle, bundle.names[-1], lambda count: None)
        for path, content in labels.items():
            with self._reaching(f"writing {path}"):
                self._make_folder(path)
                self._files.pipe_file(self._at(path), content)

    def _claim(self, bundle: Bundle) -> bool:
        """Take the place of a version; whether what is there already can only be of this one."""
        path = self._at(f"{bundle.folder}.claim")
        content = _claim_of(bundle)
        with self._reaching(f"writing {bundle.folder}.claim"):
            self._make_folder(f"{bundle.folder}/any")
            try:
                self._files.pipe_file(path, content, mode="create")
            except Exception:
                # it is there already, or this storage has no way to create only what is not there
                self._files.invalidate_cache()
                if not self._files.exists(path):
                    self._files.pipe_file(path, content)
            if self._files.cat_file(path) == content:
                return True
            if bundle.is_agent:
                raise RemoteChangedError(f"{self.url}: somebody else has the number of {bundle.folder}: push again")
            self._files.pipe_file(path, content)
            return False

    def _put(self, bundle: Bundle, name: str, advance: Callable[[int], None]) -> None:
        class Meter(Callback):
            """Tells how much of the file is on its way."""

            def relative_update(self, inc: int = 1) -> None:
                told[0] += inc
                advance(inc)

        told, size = [0], bundle.sizes.get(name, 0)
        with self._reaching(f"writing {bundle.folder}/{name}"):
            self._files.put_file(str(bundle.path / name), self._at(f"{bundle.folder}/{name}"), callback=Meter())
        # not every file system tells, and some tell it twice
        advance(size - told[0])

    def _list(self, folder: str) -> dict[str, int]:
        """Files below a folder, by their path from the root."""
        with self._reaching("listing it"):
            self._files.invalidate_cache()
            try:
                found: dict[str, Any] = self._files.find(self._at(folder), detail=True)
            except FileNotFoundError:
                return {}
        prefix = self._at("")
        # consoles of object stores make "folders": empty objects whose names end in a slash
        files = {
            name: info.get("size")
            for name, info in found.items()
            if info["type"] == "file" and not (name.endswith("/") and info.get("size") == 0)
        }
        # what is outside keeps its name, and is refused by the catalogue
        return {name.removeprefix(prefix): size for name, size in files.items()}

    def _make_folder(self, path: str) -> None:
        # an object store has no folders: it would make a bucket, which is its owner's to make
        if self._protocol not in _OBJECT_STORES:
            self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _reaching(self, doing: str) -> Any:
        return reaching(self._url, doing, f"check the URL, the network and the credentials of {self._protocol}")


def _claim_of(bundle: Bundle) -> bytes:
    return json.dumps({"digest": bundle.digest}).encode()
