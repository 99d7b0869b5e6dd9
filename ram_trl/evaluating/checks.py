"""What an evaluation refuses before anything is loaded, and what it warns of."""

import logging
from collections.abc import Sequence

import torch

from ..distributed import World
from ..errors import ConfigError
from .rows import Row
from .tasks import RewardTask, Task
from .vllm_generation import check_vllm


__all__ = ["DTYPES", "check_options", "check_owners", "warn_of_rounding"]

logger = logging.getLogger(__name__)

# What `from_pretrained` is given for each `--dtype`.
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_options(
    tasks: Sequence[Task], dtype: str, device_map: str | None, batch_size: int, backend: str, world: World
) -> None:
    """Refuse options of [`~ram_trl.evaluating.evaluate.Evaluator`] that cannot be, or not together.

    Raises:
        ConfigError: naming the option.
    """
    if not tasks:
        raise ConfigError("no task to evaluate")
    names = [task.name for task in tasks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two tasks are named {min(twice)!r}: give each a name of its own")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    if backend not in ("transformers", "vllm"):
        raise ConfigError(f"backend={backend!r} is not one of transformers, vllm")
    if backend == "vllm":
        if world.size > 1 or device_map:
            raise ConfigError("vLLM spreads a model over GPUs by itself: start one process, without device_map")
        if others := [task.name for task in tasks if not isinstance(task, RewardTask)]:
            raise ConfigError(f"task {others[0]} has no reward_funcs, so it runs with --backend transformers alone")
        check_vllm()
    if device_map and world.size > 1:
        raise ConfigError(
            f"device_map={device_map!r} spreads the model over the GPUs of one process: start one process, or leave "
            "it out to have the model once on each GPU"
        )


def check_owners(tasks: Sequence[Task], rows: Sequence[Row]) -> None:
    """Refuse a task of an agent that is not evaluated.

    Raises:
        ConfigError: naming both.
    """
    known = sorted({row.agent for row in rows if row.agent})
    for task in tasks:
        if task.agent is not None and task.agent not in known:
            raise ConfigError(
                f"task {task.name} belongs to agent {task.agent!r}, which is not evaluated; there are: "
                f"{', '.join(known)}"
            )


def warn_of_rounding(row: Row, held: torch.dtype, world: World) -> None:
    """Tell of an agent that ran in a wider dtype than the model in memory has."""
    if world.is_main and row.dtype is not None and torch.promote_types(row.dtype, held) != held:
        dtype = str(row.dtype).removeprefix("torch.")
        logger.warning(
            "%s ran in %s, is measured rounded to %s: --dtype %s shows it as it is", row.name, dtype, held, dtype
        )
