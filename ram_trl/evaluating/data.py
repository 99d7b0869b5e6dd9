"""Datasets of tasks: files, directories and those of the Hub."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .tasks import PerplexityTask, RewardTask


if TYPE_CHECKING:
    from datasets import Dataset


__all__ = ["load_examples"]

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_examples(task: RewardTask | PerplexityTask, name: str) -> "Dataset":
    """The examples of a task, as many as it takes.

    Args:
        task ([`~ram_trl.evaluating.tasks.RewardTask`] or [`~ram_trl.evaluating.tasks.PerplexityTask`]):
            The task.
        name (`str`):
            Its dataset: a file, a directory, or a Hub id.

    Raises:
        ConfigError: if it cannot be loaded or is empty.
    """
    # imported here: it takes a second, and benchmarks do without
    from datasets import load_dataset, load_from_disk

    path, where = Path(name), f"task {task.name}: dataset {name!r}"
    if path.is_file() and path.suffix not in _FORMATS:
        raise ConfigError(f"{where} is none of {', '.join(_FORMATS)}")
    if path.is_file() and not path.stat().st_size:
        raise ConfigError(f"{where} has no examples")
    try:
        if path.is_file():
            rows = load_dataset(_FORMATS[path.suffix], data_files=name, split=task.split or "train")
        elif path.is_dir() and any((path / marker).exists() for marker in ("dataset_info.json", "dataset_dict.json")):
            rows = load_from_disk(name)
            rows = rows[task.split or "test"] if isinstance(rows, dict) else rows
        else:
            rows = load_dataset(name, task.dataset_config, split=task.split or "test")
    except Exception as error:
        # the readers of files raise errors of their own libraries
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where} cannot be loaded: {problem}") from error
    if not len(rows):
        raise ConfigError(f"{where} has no examples")
    return rows.select(range(min(len(rows), task.limit or len(rows))))
