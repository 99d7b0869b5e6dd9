"""What is finished of an evaluation, on disk: a later call with the same settings goes on from there.

A file is named by what was measured and how, not by the row: names of rows are labels, which may change.
"""

import errno
import fcntl
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from ..errors import CorruptedFileError, OutputExistsError
from ..storage.checkpoint import model_files
from ..storage.durable import digest_file, explain_os_errors, make_dirs, read_json
from .benchmark import BenchmarkEvaluation
from .perplexity import PerplexityEvaluation
from .reward import RewardEvaluation
from .rows import Row
from .statistics import Measurement


__all__ = ["Evaluation", "Store", "digest_model_files", "write_bytes", "write_text"]

logger = logging.getLogger(__name__)

Evaluation = RewardEvaluation | BenchmarkEvaluation | PerplexityEvaluation

_RESULTS = "results"
# Held by the process that writes to the directory, as long as it lives.
_LOCK = ".lock"
_locks: dict[Path, IO] = {}
# Fields of a task that say how it is shown, not how it is measured.
_LABELS = ("agent", "metric")


class Store:
    """What is finished, a file for each row and task.

    Args:
        root (`Path`):
            Output directory.
        how (`dict`):
            What all results of the evaluation depend on: dtype, backend, batch size, ...
    """

    def __init__(self, root: Path, how: dict[str, Any]):
        self._root, self._how = root, how

    def open(self) -> None:
        """Make the directory, or refuse one that is something else."""
        folder = self._root / _RESULTS
        is_ours = any((self._root / name).exists() for name in (_LOCK, "evaluation.json"))
        if self._root.exists() and not is_ours and (not self._root.is_dir() or any(self._root.iterdir())):
            raise OutputExistsError(
                f"{self._root} holds something that is not an evaluation: choose another --output_dir"
            )
        with explain_os_errors(f"making {folder}"):
            make_dirs(folder)
            self._lock()

    def _lock(self) -> None:
        path = (self._root / _LOCK).resolve()
        if path in _locks:
            return
        file = path.open("w")
        try:
            # of the process: it may evaluate into the directory again
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise OutputExistsError(
                    f"another command writes to {self._root}: wait for it, or choose another --output_dir"
                ) from error
            logger.debug("%s cannot be locked: %s", path, error)
        else:
            _locks[path] = file

    def load(self, row: Row, evaluation: Evaluation) -> dict[str, Any] | None:
        """What was measured of a row with just these settings, or `None`."""
        fingerprint = self._fingerprint(row, evaluation)
        path = self._path(fingerprint)
        if not path.exists():
            return None
        try:
            content = read_json(path)
        except CorruptedFileError:
            logger.warning("%s is damaged and measured again", path)
            return None
        return content if content.get("fingerprint") == fingerprint else None

    def save(
        self,
        row: Row,
        evaluation: Evaluation,
        metrics: dict[str, Measurement],
        records: list[dict[str, Any]],
        seconds: float,
    ) -> dict[str, Any]:
        """Keep what was measured, the completions first.

        Returns:
            `dict`: what [`load`] gives from now on.
        """
        fingerprint = self._fingerprint(row, evaluation)
        path = self._path(fingerprint)
        completions = path.with_suffix(".completions.jsonl")
        lines = [json.dumps(record, default=str) for record in records]
        content = {
            "fingerprint": fingerprint,
            # labels, of the first row and task that were measured so
            "row": row.name,
            "task": evaluation.task.name,
            "seconds": seconds,
            "completions": f"{_RESULTS}/{completions.name}",
            "metrics": {name: asdict(measured) for name, measured in metrics.items()},
        }
        write_text(completions, "\n".join([*lines, ""]))
        write_text(path, json.dumps(content, allow_nan=False) + "\n")
        return content

    def _path(self, fingerprint: str) -> Path:
        return self._root / _RESULTS / f"{fingerprint[:16]}.json"

    def _fingerprint(self, row: Row, evaluation: Evaluation) -> str:
        options = {key: value for key, value in asdict(evaluation.task).items() if key not in _LABELS}
        known = [row.identity, options, evaluation.fingerprint, self._how]
        return blake3(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def digest_model_files(directory: Path) -> dict[str, str]:
    """Digests of a model's files that are not weights, by name: what it is asked by depends on them."""
    return {str(file.relative_to(directory)): digest_file(file) for file in model_files(directory)}


def write_text(path: Path, text: str) -> None:
    """Write a file that is there whole, or as it was."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is there whole, or as it was."""
    with explain_os_errors(f"writing {path}"):
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)
