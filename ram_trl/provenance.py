"""What a trainer's arguments and state say of a run: how it computed, which checkpoint holds its end, its numbers."""

import math
import os
import re
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers
import trl
from transformers import TrainerState, TrainingArguments


__all__ = ["CHECKPOINT", "best_step", "executed_in", "final_checkpoint", "provenance"]

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


def provenance(args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """Where the agent comes from: numbers and versions, no paths."""
    metrics, best = {}, best_step(args, state)
    for entry in state.log_history:
        if best is None or entry["step"] <= best:
            metrics.update({key: value for key, value in entry.items() if isinstance(value, int | float)})
    return {
        "arguments": type(args).__name__,
        "step": state.global_step,
        # the weights are of this one, if the trainer went back to its best checkpoint
        "best_step": best,
        "max_steps": state.max_steps,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
        "num_processes": args.world_size,
        "mixed_precision": args.mixed_precision,
        # a JSON file has no NaN
        "metrics": {key: value for key, value in metrics.items() if math.isfinite(value)},
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, accelerate, peft, trl)},
    }
