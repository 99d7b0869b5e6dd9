"""The gate: a function of the user's that promotes or refuses what was merged, before anybody sees it."""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..storage.durable import read_json
from ..table import printable


__all__ = ["Gate", "gate_name", "judge"]

logger = logging.getLogger(__name__)

# Takes the directory of a candidate, which transformers loads, and the content of its merge_report.json. Gives True to
# promote it, False or a reason to refuse it.
Gate = Callable[[Path, dict[str, Any]], bool | str]


def gate_name(gate: Gate) -> str:
    """`module:function` of a gate; `MODULE` stands for what cannot be imported."""
    # an object that can be called has a name only as a class
    named = gate if hasattr(gate, "__qualname__") else type(gate)
    is_importable = named.__module__ != "__main__" and named.__qualname__.isidentifier()
    return f"{named.__module__}:{named.__qualname__}" if is_importable else f"MODULE:{named.__qualname__}"


def judge(gate: Gate, candidate: Path) -> str | None:
    """Ask a gate about a candidate.

    Args:
        gate (`Callable[[Path, dict], bool | str]`):
            The gate.
        candidate (`Path`):
            Directory of the candidate, staged.

    Returns:
        `str`: what the gate has against it, in one line, or `None`.

    Raises:
        ConfigError: if the gate changed the candidate. It may add plain files, nothing else.
    """
    name, before, folder = gate_name(gate), _written(candidate), os.getcwd()
    try:
        verdict = gate(candidate, read_json(candidate / "merge_report.json"))
        # a comparison of NumPy's or torch's numbers
        verdict = verdict.item() if hasattr(verdict, "item") else verdict
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            # it is the process that is told to end
            raise
        logger.exception("the gate %s failed", name)
        verdict = f"the gate {name} failed: {type(error).__name__}: {error}"
    finally:
        os.chdir(folder)
    _check_left(candidate, before, name)
    if verdict is True:
        return None
    if isinstance(verdict, str) and verdict:
        return _one_line(verdict)
    if verdict is False:
        return f"the gate {name} refused it"
    return _one_line(f"the gate {name} returned {verdict!r}, not True, False or a reason")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _written(candidate: Path) -> dict[str, tuple[int, int, int]]:
    """What tells a file that was written to from one that was not, by name."""
    stats = {str(path.relative_to(candidate)): path.lstat() for path in candidate.rglob("*") if path.is_file()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _check_left(candidate: Path, before: Mapping[str, tuple[int, int, int]], gate: str) -> None:
    """Refuse a candidate that its gate changed: it may add plain files, nothing else.

    Raises:
        ConfigError: naming what it did.
    """
    if candidate.is_symlink() or not candidate.is_dir():
        raise ConfigError(f"the gate {gate} replaced the candidate's directory: let it read there only")
    for path in sorted(candidate.rglob("*"), reverse=True):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"the gate {gate} left {path.name!r} in the candidate, which is no plain file")
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    after = _written(candidate)
    if changed := sorted(name for name, was in before.items() if after.get(name) != was):
        raise ConfigError(
            f"the gate {gate} changed {changed[0]!r} of the candidate: it may add files, not change them"
        )
