"""Real runs on tiny models, for the tests of the callback."""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from datasets import Dataset
from models import read_model, tokenizer
from peft import PeftConfig
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ram_trl import AgentRegistry, RAMRegistryCallback, restore_agent


TrainerType = TypeVar("TrainerType", bound=Trainer)

# Such a run takes half a second, so the tests train instead of pretending.
OPTIONS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
}
ROLLOUTS = {"num_generations": 4, "max_completion_length": 6}
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}


def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Differs from completion to completion, so that every step has a gradient."""
    return [sum(ids) / len(ids) / 64 for ids in completion_ids]


def grpo(
    model: str | Path | nn.Module,
    output_dir: Path,
    callbacks: Sequence[TrainerCallback],
    peft_config: PeftConfig | None = None,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    **options,
) -> GRPOTrainer:
    """A trainer for a few steps; `options` are those of `GRPOConfig`."""
    torch.manual_seed(0)
    prompts = Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(16)]})
    return trainer_class(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(output_dir), **{**OPTIONS, **ROLLOUTS, **options}),
        train_dataset=prompts,
        eval_dataset=prompts,
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def train(trainer: TrainerType, **arguments) -> TrainerType:
    """Train without the numbers that a trainer prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(**arguments)
    return trainer


class AtStep(TrainerCallback):
    """Does something in the middle of a run.

    Args:
        step (`int`):
            After which step.
        action (`Callable[[nn.Module], None]`):
            What to do, with the model in training.
    """

    def __init__(self, step: int, action: Callable[[nn.Module], object]):
        self._step, self._action = step, action

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self._step:
            self._action(model)


def saved_weights(trainer: Trainer, path: Path) -> dict[str, Tensor]:
    """The trained model's weights by the names of files, as transformers itself writes them."""
    trainer.save_model(str(path))
    return read_model(path)


def restored_weights(registry: str | Path, agent: str, path: Path) -> dict[str, Tensor]:
    """The weights of a registered agent."""
    restore_agent(AgentRegistry(registry), agent, str(path))
    return read_model(path)


def assert_same_weights(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name


def printed_command(log: str) -> str:
    """The command that a failed registration tells the user to run."""
    commands = re.findall(r"^ *(ram-trl register .*)$", log, flags=re.MULTILINE)
    assert len(commands) == 1, log
    return commands[0]


def run_shell(
    command: str, env: dict[str, str] | None = None, timeout: float = 180, **options
) -> subprocess.CompletedProcess:
    """Run a command line as a user would, in the environment of this Python. What it started ends with it."""
    scripts = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", **(env or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, shell=True, env=env, start_new_session=True, **pipes, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            # torchrun ends its workers, which are in sessions of their own, when it is asked to
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_python(script: str | Path, *arguments: str | Path, **options) -> subprocess.CompletedProcess:
    """Run a Python script in a process of its own."""
    return run_shell(shlex.join([sys.executable, str(script), *map(str, arguments)]), **options)


def registered_files(registry: Path) -> set[str]:
    """Everything in a registry, hidden directories too."""
    return {str(path.relative_to(registry)) for path in registry.rglob("*")}


__all__ = [
    "BF16",
    "LORA",
    "OPTIONS",
    "ROLLOUTS",
    "AtStep",
    "RAMRegistryCallback",
    "assert_same_weights",
    "grpo",
    "printed_command",
    "registered_files",
    "restored_weights",
    "reward",
    "run_python",
    "run_shell",
    "saved_weights",
    "train",
]
