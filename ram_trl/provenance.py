"""What a trainer's arguments and state say of a run: how it computed, which checkpoint holds its end, where it began.

Nothing here may cost a run its agent: what cannot be had is logged and left out.
"""

import dataclasses
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sized
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import torch
import transformers
import trl
from torch.utils.data import DataLoader
from transformers import TrainerState, TrainingArguments

from .registering.training_log import CHECKPOINT, last_metrics, public_metrics


__all__ = ["best_step", "describe_run", "executed_in", "final_checkpoint", "git_checkout"]

logger = logging.getLogger(__name__)

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Libraries that change what a run computes, if it loaded them.
_OPTIONAL_LIBRARIES = ("bitsandbytes", "deepspeed", "vllm")
_GIT_SECONDS = 10
_REWARD = re.compile(r"(?:eval_)?rewards/(.+)/mean")
_SECRET_NAME = re.compile(
    r"secret|passw|credential|authorization|auth$|(api|access|private|signing)[_-]?key|token$", re.IGNORECASE
)
# Names that end so and hold words of a vocabulary.
_NO_SECRETS = ("bos_token", "eos_token", "image_token", "pad_token")
_SECRET_VALUE = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # http://user:password@host
    r"|\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}"
    r"|(?<=Bearer )\S+"
    r"|(?<=token=)[^&\s]+|(?<=key=)[^&\s]+|(?<=password=)[^&\s]+|(?<=secret=)[^&\s]+"
)


def executed_in(args: TrainingArguments) -> torch.dtype | None:
    """Dtype of autocast, if the run computes under it."""
    # accelerate's own state is that of the trainer that was made last
    return _AUTOCAST.get(args.mixed_precision)


def _best_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The checkpoint that the trainer went back to before it ended, if it did."""
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return None
    path = Path(state.best_model_checkpoint)
    return path if os.path.isdir(path) else None


def best_step(args: TrainingArguments, state: TrainerState) -> int | None:
    """The step that the weights are of, if the trainer went back to that."""
    best = _best_checkpoint(args, state)
    # state.best_global_step may be a later one, which was evaluated and not saved
    name = best and CHECKPOINT.fullmatch(best.name)
    return int(name[1]) if name else None


def final_checkpoint(args: TrainingArguments, state: TrainerState, began: float) -> str | None:
    """The checkpoint that holds the model as it is at the end; the last one need not, and may be of an earlier run."""
    best = _best_checkpoint(args, state)
    path = best or Path(args.output_dir, f"checkpoint-{state.global_step}")
    try:
        is_of_this_run = best is not None or path.stat().st_mtime >= began
        return str(path) if is_of_this_run and any(path.glob("*.safetensors")) else None
    except OSError:
        # there is none, or its disk is gone, which must not cost the run
        return None


def describe_run(
    args: TrainingArguments,
    state: TrainerState,
    level: str = "full",
    dataloader: DataLoader | None = None,
    checkout: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Where an agent comes from, for its manifest (docs/FORMAT.md). Does not raise.

    Args:
        args (`TrainingArguments`):
            Configuration of the run.
        state (`TrainerState`):
            State of the trainer at the end.
        level (`str`, *optional*, defaults to `"full"`):
            `"minimal"` leaves out what may be private: options, names of rewards, data, git, paths.
        dataloader (`DataLoader`, *optional*):
            What the trainer read its data through.
        checkout (`Mapping`, *optional*):
            What [`git_checkout`] gave when training began.
    """

    def steps() -> dict[str, Any]:
        return {
            "arguments": type(args).__name__,
            "step": state.global_step,
            # the weights are of this one, if the trainer went back to its best checkpoint
            "best_step": best_step(args, state),
            "max_steps": state.max_steps,
            "num_processes": args.world_size,
            "mixed_precision": args.mixed_precision,
        }

    run: dict[str, Any] = {
        "provenance": level,
        **_collected("the steps", steps, {}),
        "metrics": _collected("the metrics", lambda: last_metrics(state.log_history, best_step(args, state)), {}),
        "versions": _collected("the versions", _versions, {}),
    }
    if level == "minimal":
        return {**run, "metrics": public_metrics(run["metrics"])}
    rewards = [match[1] for key in run["metrics"] if (match := _REWARD.fullmatch(key))]
    return {
        **run,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
        "config": _collected("the configuration", lambda: _differing(args), {}),
        # callbacks do not see the functions, but the trainer logs each under its name
        "reward_functions": list(dict.fromkeys(rewards)) or None,
        "dataset": _collected("the dataset", lambda: _fingerprint(dataloader), None),
        "git": checkout,
    }


def git_checkout() -> dict[str, Any] | None:
    """Commit of the working directory, and whether its files differ from that; `None` where there is none."""
    commit = _git("rev-parse", "--verify", "HEAD")
    if not commit or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    # it writes nothing, asks nothing, and starts no monitor that a checkout configures
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("git says nothing of this run: %r", error)
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _collected(what: str, collect: Callable[[], Any], otherwise: Any) -> Any:
    """What a function gives, or something else if it fails."""
    try:
        return collect()
    except Exception as error:
        logger.warning("%s of this run are not recorded, because of %r", what, error)
        return otherwise


def _versions() -> dict[str, str]:
    libraries = (torch, transformers, accelerate, peft, trl, datasets)
    versions = {"python": platform.python_version(), **{module.__name__: module.__version__ for module in libraries}}
    for name in _OPTIONAL_LIBRARIES:
        if name in sys.modules:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
    return versions


def _fingerprint(dataloader: DataLoader | None) -> dict[str, Any] | None:
    """What tells one data set from another. Trainers that tokenise beforehand read what they made of the user's."""
    if dataloader is None:
        return None
    dataset = dataloader.dataset
    return {
        "fingerprint": dataset._fingerprint if isinstance(dataset, datasets.Dataset) else None,
        "rows": len(dataset) if isinstance(dataset, Sized) else None,
    }


def _differing(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as its class has them, without secrets."""
    values = {}
    for field in dataclasses.fields(config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = _plain(getattr(config, field.name))
        if field.init and not _is_secret(field.name) and value not in ({}, _plain(default)):
            values[field.name] = value
    return values


def _plain(value: Any) -> Any:
    """A value as JSON has it, without secrets; of an object of another kind the name of its class."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | os.PathLike):
        return _SECRET_VALUE.sub("***", os.fspath(value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if not _is_secret(str(key))}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _differing(value)
    return f"<{type(value).__name__}>"


def _is_secret(name: str) -> bool:
    return name not in _NO_SECRETS and _SECRET_NAME.search(name) is not None
