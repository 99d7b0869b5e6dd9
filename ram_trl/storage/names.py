"""Names of things, numbers of versions, and labels of versions: what is allowed, and how it is written."""

import os
import re
from pathlib import Path

from ..errors import ConfigError, InvalidNameError


__all__ = [
    "HIGHEST",
    "QUARANTINE",
    "SIGNATURE",
    "TRASH",
    "VERSION",
    "check_label",
    "check_name",
    "check_number",
    "is_label",
    "is_name",
    "parse_spec",
    "registry_path",
    "version_dir_name",
]

# Folders of a registry for versions that are out of sight (trash.py).
TRASH, QUARANTINE = "trash", "quarantine"
# A signature is a file beside a version, with this at the end of its name.
SIGNATURE = ".sig"
# Directory of a version.
VERSION = re.compile(r"v([0-9]{6}|[1-9][0-9]{6,8})")
HIGHEST = 999_999_999

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_LABEL = re.compile(r"(?![vV](?:[0-9._-]|$))[A-Za-z][A-Za-z0-9._-]{0,63}")


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def check_name(name: str, kind: str) -> None:
    """Refuse a name that is not letters, digits, dots, dashes and underscores.

    Raises:
        InvalidNameError: if it is not a valid name.
    """
    if not isinstance(name, str) or not is_name(name):
        article = "an" if kind[0] in "aeiou" else "a"
        raise InvalidNameError(
            f"{name!r} is not a name for {article} {kind}: use up to 96 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def is_label(text: str) -> bool:
    return _LABEL.fullmatch(text) is not None and text != "latest"


def check_label(label: str, kind: str) -> None:
    """Refuse a name of an alias or a tag that could be taken for a version, or that leads elsewhere.

    Raises:
        InvalidNameError: if it is not letters, digits, dots, dashes and underscores, begins with no letter, or is
            written like a version.
    """
    if not isinstance(label, str) or not is_label(label):
        article = "an" if kind[0] in "aeiou" else "a"
        raise InvalidNameError(
            f"{label!r} is not a name for {article} {kind}: use up to 64 letters, digits, '.', '_' and '-', beginning "
            "with a letter, and neither 'latest' nor a version like 'v2'"
        )


def check_number(number: int) -> None:
    """Refuse what is not the number of a version.

    Raises:
        InvalidNameError: if it is not an integer from 1 to 999,999,999.
    """
    if type(number) is not int or not 0 < number <= HIGHEST:
        raise InvalidNameError(f"{number!r} is not the number of a version: use 1 to {HIGHEST}")


def registry_path(path: "str | os.PathLike") -> Path:
    """The directory of a registry.

    Raises:
        ConfigError: if it is written like the URL of a place elsewhere.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        scheme = os.fspath(path).partition(":")[0]
        raise ConfigError(
            f"a {scheme}:// URL is no directory, and here one is needed: ram-trl pull fetches agents into a registry, "
            "ram-trl push sends them"
        )
    return Path(path)


def version_dir_name(number: int) -> str:
    """`"v000002"` for 2."""
    return f"v{number:06d}"


def parse_spec(spec: str, kind: str) -> tuple[str, int | str | None]:
    """Take `"math"`, `"math@v2"` or `"math@best"` apart: the name, and a number, an alias or nothing.

    Raises:
        InvalidNameError: if it is none of these.
    """
    if not isinstance(spec, str):
        raise InvalidNameError(f"{spec!r} is not a name: write it like math or math@v2")
    name, separator, version = spec.partition("@")
    check_name(name, kind)
    if not separator:
        return name, None
    if re.fullmatch(r"v[1-9][0-9]{0,8}", version):
        return name, int(version[1:])
    if not is_label(version):
        raise InvalidNameError(
            f"{spec!r} does not name a version: write it like {name}@v2, or {name}@ALIAS; {name} alone is the latest"
        )
    return name, version
