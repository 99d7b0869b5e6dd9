"""What a URL means: a directory, a repository of the Hub, a folder of a file system that fsspec knows."""

import os
import re
from pathlib import Path

from ..errors import ConfigError
from .remote import Remote, hide_secrets


__all__ = ["is_url", "local_path", "open_remote"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z0-9+.-]+::")


def is_url(place: object) -> bool:
    """Whether a place is meant as a URL, and not as a directory."""
    return isinstance(place, str) and _SCHEME.match(place) is not None


def local_path(place: "str | os.PathLike") -> Path | None:
    """The directory that a place means, if it is one of this machine: a path, or `file://` and a path."""
    if not is_url(place):
        return Path(place)
    return Path(place.partition("://")[2]) if place.startswith(("file://", "local://")) else None


def open_remote(url: str) -> Remote:
    """The place that a URL means.

    Raises:
        ConfigError: if it is no URL that can be used.
    """
    if re.match(r"https?://(www\.)?(huggingface\.co|hf\.co)/", url):
        raise ConfigError(f"{hide_secrets(url)} is a page: write hf://USER/REPO")
    if url.startswith("hf://"):
        from .hub import HubRemote

        return HubRemote(url)
    from .filesystem import FileSystemRemote

    return FileSystemRemote(url)
