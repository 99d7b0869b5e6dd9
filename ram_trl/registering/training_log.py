"""What a trainer's log says of a run: the last value of every number, and what a checkpoint on disk keeps of it."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RamTrlError
from ..storage.durable import read_json


__all__ = ["CHECKPOINT", "PROVENANCE", "check_provenance", "last_metrics", "public_metrics", "saved_run"]

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# How much is recorded of where an agent comes from.
PROVENANCE = ("full", "minimal")
_STATE = "trainer_state.json"
# Bytes and values of a log of some 100,000 entries of 80 numbers each; more is not read.
_MAX_BYTES, _MAX_VALUES = 256_000_000, 8_000_000
# Every trainer logs these; the names of others are a user's own, as those of rewards are.
_PUBLIC = frozenset(
    {
        "epoch",
        "loss",
        "train_loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "reward",
        "reward_std",
        "kl",
        "entropy",
    }
)


def check_provenance(provenance: str) -> None:
    """Refuse what is no level of provenance.

    Raises:
        ConfigError: if it is neither `"full"` nor `"minimal"`.
    """
    if provenance not in PROVENANCE:
        raise ConfigError(f"provenance={provenance!r} is not one of {', '.join(PROVENANCE)}")


def last_metrics(log: Iterable[Mapping[str, Any]], until: int | None = None) -> dict[str, float]:
    """The last finite value of every number in a log.

    Args:
        log (`Iterable[Mapping]`):
            `log_history` of a trainer's state.
        until (`int`, *optional*):
            Leave out what was logged after this step.
    """
    metrics = {}
    for entry in log:
        if until is None or entry["step"] <= until:
            numbers = {key: value for key, value in entry.items() if isinstance(value, int | float)}
            metrics.update({key: value for key, value in numbers.items() if type(value) is not bool})
    # a JSON file has no NaN
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def public_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that every trainer logs: the names of others may be private."""
    return {key: value for key, value in metrics.items() if key.removeprefix("eval_") in _PUBLIC}


def saved_run(model: Path) -> dict[str, Any]:
    """Steps and last metrics of the run that a checkpoint is of, if it is one and says so.

    Only a directory that a trainer named after its step: what is saved elsewhere may be of another step than the log
    that lies beside it.
    """
    named = CHECKPOINT.fullmatch(model.name)
    try:
        if named is None or not (model / _STATE).is_file():
            return {}
        state = read_json(model / _STATE, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES)
        if state["global_step"] != int(named[1]):
            return {}
        steps = {"step": int(state["global_step"]), "max_steps": int(state["max_steps"])}
        return {**steps, "metrics": last_metrics(state["log_history"])}
    # whatever the file holds, the agent is registered
    except (RamTrlError, OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        logger.warning("%s was not understood, and is not recorded: %r", model / _STATE, error)
        return {}
