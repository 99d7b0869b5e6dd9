"""What is finished of an evaluation, on disk: a later call with the same settings goes on from there."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..errors import CorruptedFileError, OutputExistsError
from ..storage.durable import explain_os_errors, make_dirs, read_json
from .benchmark import BenchmarkEvaluation
from .reward import RewardEvaluation
from .rows import Row
from .statistics import Measurement


__all__ = ["Evaluation", "Store", "write_text"]

logger = logging.getLogger(__name__)

Evaluation = RewardEvaluation | BenchmarkEvaluation

_RESULTS = "results"


class Store:
    """What is finished, a file for each row and task.

    Args:
        root (`Path`):
            Output directory.
        how (`str`):
            Dtype and backend of the evaluation.
    """

    def __init__(self, root: Path, how: str):
        self._root, self._how = root, how

    def open(self) -> None:
        """Make the directory, or refuse one that is something else."""
        folder = self._root / _RESULTS
        if self._root.exists() and not folder.is_dir() and (not self._root.is_dir() or any(self._root.iterdir())):
            raise OutputExistsError(
                f"{self._root} holds something that is not an evaluation: choose another --output_dir"
            )
        with explain_os_errors(f"making {folder}"):
            make_dirs(folder)

    def load(self, row: Row, evaluation: Evaluation) -> dict[str, Any] | None:
        """What was measured of a row with just these settings, or `None`."""
        path = self._path(row, evaluation, ".json")
        if not path.exists():
            return None
        try:
            content = read_json(path)
        except CorruptedFileError:
            logger.warning("%s is damaged and measured again", path)
            return None
        return content if content.get("fingerprint") == self._fingerprint(row, evaluation) else None

    def save(
        self,
        row: Row,
        evaluation: Evaluation,
        metrics: dict[str, Measurement],
        records: list[dict[str, Any]],
        seconds: float,
    ) -> None:
        """Keep what was measured, the completions first."""
        lines = [json.dumps(record, default=str) for record in records]
        content = {
            "fingerprint": self._fingerprint(row, evaluation),
            "row": row.name,
            "task": evaluation.task.name,
            "seconds": seconds,
            "metrics": {
                name: {"scores": measured.scores, "mean": measured.mean, "stderr": measured.stderr, "n": measured.n}
                for name, measured in metrics.items()
            },
        }
        write_text(self._path(row, evaluation, ".completions.jsonl"), "\n".join([*lines, ""]))
        write_text(self._path(row, evaluation, ".json"), json.dumps(content, allow_nan=False) + "\n")

    def _path(self, row: Row, evaluation: Evaluation, ending: str) -> Path:
        return self._root / _RESULTS / row.name / f"{evaluation.task.name}{ending}"

    def _fingerprint(self, row: Row, evaluation: Evaluation) -> str:
        known = [row.identity, repr(evaluation.task), evaluation.fingerprint, self._how]
        return blake3(json.dumps(known, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file that is there whole, or as it was."""
    with explain_os_errors(f"writing {path}"):
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
