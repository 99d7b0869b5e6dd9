"""The gate of the continual demonstration, as a user would write one: `--gate toy_gate:no_task_below_base`."""

from pathlib import Path
from typing import Any

import torch
from toy_tasks import DEFAULT_TASKS, accuracy
from transformers import AutoModelForCausalLM, AutoTokenizer


NUM_PROMPTS = 300
# Other prompts than those that the demonstration reports on.
SEED = 1
# Fraction of the prompts: two standard errors of a difference between two such measurements.
TOLERANCE = 0.08


def no_task_below_base(candidate: Path, report: dict[str, Any]) -> bool | str:
    """Refuses a candidate that answers any of the tasks clearly worse than the base that its agents started from."""
    tokenizer = AutoTokenizer.from_pretrained(candidate)
    for task in DEFAULT_TASKS:
        rewards = []
        for path in (candidate, report["base_model"]["name"]):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            rewards.append(accuracy(model, tokenizer, task, NUM_PROMPTS, SEED))
        if rewards[0] < rewards[1] - TOLERANCE:
            return f"{task}: reward {rewards[0]:.3f}, the base has {rewards[1]:.3f}"
    return True
