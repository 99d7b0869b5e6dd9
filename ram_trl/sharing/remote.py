"""What a place that holds a registry can do: list, read and add files. Of URLs, what may be shown."""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import RamTrlError, StorageError
from ..storage.durable import explain_os_errors
from ..storage.versions import MANIFEST


__all__ = [
    "Bundle",
    "LocalFolder",
    "Remote",
    "RemoteChangedError",
    "Source",
    "hide_secrets",
    "reaching",
]

_READ_BYTES = 1 << 22
# Names of environment variables that hold what nobody should read.
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|CONNECTION_STRING|_KEY$")


class RemoteChangedError(StorageError):
    """Somebody else added to a place at the same time: look at it again."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of one version on their way to another place.

    Args:
        folder (`str`):
            Where they go: `"agents/math/v000002"`.
        path (`Path`):
            Directory that holds them.
        sizes (`dict[str, int]`):
            Size in bytes of every file but the manifest.
        digest (`str`):
            What its files are known by: the digest of its manifest.
        is_agent (`bool`):
            Whether it is a version of an agent, whose number is one version's for ever; Fisher information can be made
            again.
    """

    folder: str
    path: Path
    sizes: dict[str, int]
    digest: str
    is_agent: bool

    @property
    def names(self) -> list[str]:
        """Its files, the manifest last: when it is there, the others are."""
        return [*self.sizes, MANIFEST]


class Source(Protocol):
    """A place to read from.

    Attributes:
        url (`str`):
            How it is called in messages, without secrets.
    """

    url: str

    def list_files(self) -> dict[str, int]:
        """Files below `agents/` and `fisher/` with their sizes in bytes; empty if there is no registry."""

    def stream(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes `start` to `stop` of a file, in pieces. They may be fewer, if the file is."""


class Remote(Source, Protocol):
    """A place to read from and to add to."""

    def prepare(self, private: bool) -> None:
        """Make sure that it is there, and can be written to as far as this is known beforehand."""

    def add(self, bundles: Sequence[Bundle], labels: Mapping[str, bytes], advance: Callable[[int], None]) -> None:
        """Add versions, each of which appears whole or not at all, then labels.

        Args:
            bundles (`Sequence[Bundle]`):
                The versions. What is there already of one that was broken off is kept.
            labels (`Mapping[str, bytes]`):
                Small files to write or to replace.
            advance (`Callable`):
                Told how many bytes are done.

        Raises:
            RemoteChangedError: if somebody else took the number of a version.
        """


class LocalFolder:
    """A registry in a directory of this machine.

    Args:
        path (`Path`):
            The directory.
    """

    def __init__(self, path: Path):
        self.path, self.url = path, str(path)

    def list_files(self) -> dict[str, int]:
        sizes = {}
        with explain_os_errors(f"reading {self.path}"):
            for top in ("agents", "fisher"):
                for folder, folders, names in os.walk(self.path / top):
                    # registrations under way come and go
                    folders[:] = [name for name in folders if not name.startswith(".")]
                    for name in names:
                        try:
                            found = os.lstat(os.path.join(folder, name))
                        except FileNotFoundError:
                            continue
                        if stat.S_ISREG(found.st_mode):
                            place = os.path.relpath(os.path.join(folder, name), self.path)
                            sizes[place.replace(os.sep, "/")] = found.st_size
        return sizes

    def stream(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        with explain_os_errors(f"reading {self.path / path}"):
            try:
                descriptor = os.open(self.path / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            with open(descriptor, "rb") as file:
                file.seek(start)
                while start < stop and (piece := file.read(min(_READ_BYTES, stop - start))):
                    start += len(piece)
                    yield piece


def hide_secrets(text: str, url: str = "") -> str:
    """A text without what URLs and environments may hold: passwords, signed queries, tokens."""
    # up to the last @: a password may hold one
    if found := re.search(r"://([^/]*)@", url):
        for secret in (found[1], *found[1].split(":")):
            text = text.replace(secret, "***") if len(secret) > 2 else text
    text = re.sub(r"(?<=://)[^/\s'\"]*@(?=[^/\s])", "***@", text)
    text = re.sub(r"(?<=://)([^\s?'\"]*)\?[^\s'\"]*", r"\1?***", text)
    text = re.sub(r"\bhf_[A-Za-z0-9]{6,}", "hf_***", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return text


@contextlib.contextmanager
def reaching(url: str, doing: str, cure: str) -> Iterator[None]:
    """Turn what others' code raises about a place into one line, in which none of the URL's secrets is."""
    try:
        yield
    except RamTrlError:
        raise
    except Exception as error:
        text = " ".join(f"{error}".split())[:300]
        problem = hide_secrets(f"{type(error).__name__}: {text}" if text else type(error).__name__, url)
        raise StorageError(f"{hide_secrets(url)}: {doing} failed: {problem}: {cure}") from error
