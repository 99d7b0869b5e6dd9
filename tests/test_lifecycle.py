"""What is registered when: every way in which a run can end, begin again or change, in real runs.

docs/TRAINING.md is the table of it.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import Zoo, merged_by_peft, read_model
from peft import LoraConfig
from torch import nn
from training import (
    BF16,
    LORA,
    AtStep,
    assert_same_weights,
    grpo,
    printed_command,
    restored_weights,
    run_shell,
    saved_weights,
    train,
)
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from ram_trl import AgentRegistry, RAMRegistryCallback, merge_agents
from ram_trl.errors import IncompatibleAgentError


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_score",
    # all prompts at once
    "per_device_eval_batch_size": 64,
}


class StopAfterFirstStep(TrainerCallback):
    """Ends training early, as transformers' EarlyStoppingCallback does."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


class Scores(TrainerCallback):
    """Gives every evaluation a score.

    Args:
        scores (`list[float]`):
            The scores, in the order of the evaluations.
    """

    def __init__(self, *scores: float):
        self._scores = list(scores)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_score"] = self._scores[state.global_step - 1]


class CountedSteps(TrainerCallback, ExportableState):
    """A callback that checkpoints bring back."""

    def __init__(self, count: int = 0):
        self.count = count

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"count": self.count}, "attributes": {}}


def assert_nothing_registered(registry: Path) -> None:
    """No version, whole or in part; the folders may be there."""
    assert not AgentRegistry(registry).names()
    assert not [path for path in registry.rglob("*") if path.is_file()]


def wait_until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


# The run ends


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_a_run_that_stopped_early_is_registered_and_the_steps_are_said(zoo: Zoo, tmp_path, caplog, peft_config):
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    train(grpo(base, tmp_path / "out", [callback, StopAfterFirstStep()], peft_config, max_steps=3, **BF16))
    assert "agent math@v1 was registered after 1 of 3 steps" in caplog.text
    training = callback.registered.manifest.training
    assert (training["step"], training["max_steps"]) == (1, 3)
    assert "math@v1 was registered after 1 of 3 steps" in merge_agents(tmp_path / "registry", None)["warnings"][0]


def test_a_run_that_is_told_to_end_is_registered_as_it_is_then(zoo: Zoo, tmp_path):
    base, log = zoo.base("qwen2_untied"), tmp_path / "log"
    command = [sys.executable, Path(__file__).parent / "run_killed.py", "sigterm", tmp_path, base]
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_until(lambda: (tmp_path / "training").exists() or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0, log.read_text()
        finally:
            process.kill()
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["registered"] == "math@v1"
    assert 1 < outcome["step"] < outcome["max_steps"]
    assert f"agent math@v1 was registered after {outcome['step']} of {outcome['max_steps']} steps" in log.read_text()
    training = AgentRegistry(tmp_path / "registry").get("math").manifest.training
    assert (training["step"], training["max_steps"]) == (outcome["step"], outcome["max_steps"])
    back = restored_weights(tmp_path / "registry", "math", tmp_path / "back")
    assert_same_weights(back, read_model(tmp_path / "saved"))
    # transformers' checkpoint is as old as it, or one step older
    assert outcome["step"] - outcome["checkpoint"] in (0, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_run_that_is_interrupted_or_fails_registers_nothing(zoo: Zoo, tmp_path, error):
    def fail(model):
        raise error

    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    with pytest.raises(error):
        train(grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback, AtStep(1, fail)], **BF16))
    assert (callback.registered, callback.error) == (None, None)
    assert_nothing_registered(tmp_path / "registry")


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_a_run_that_goes_back_to_its_best_checkpoint_registers_that_and_says_its_step(
    zoo: Zoo, tmp_path, caplog, peft_config
):
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    # the best evaluation, at step 3, has no checkpoint: the trainer goes back to step 2
    callbacks = [
        callback,
        Scores(0, 1, 2, 0),
    ]
    options = {**EVALUATED, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = train(grpo(base, tmp_path / "out", callbacks, peft_config, **options, **BF16))

    assert (trainer.state.global_step, trainer.state.best_global_step) == (4, 3)
    best = tmp_path / "out" / "checkpoint-2"
    assert_same_weights(saved_weights(trainer, tmp_path / "saved"), read_model(best))
    expected = read_model(best) if peft_config is None else merged_by_peft(base, best, tmp_path / "merged")
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), expected)
    training = callback.registered.manifest.training
    assert (training["step"], training["max_steps"], training["best_step"]) == (4, 4, 2)
    assert training["metrics"]["step"] == 2
    # nothing was left out, so nobody is warned
    assert [record for record in caplog.records if record.name.startswith("ram_trl")] == []
    assert merge_agents(tmp_path / "registry", None)["warnings"] == []


def test_a_run_that_stopped_early_at_its_best_checkpoint_says_both(zoo: Zoo, tmp_path, caplog):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    callbacks = [callback, Scores(1, 0, 0), AtStep(2, lambda model: None), EarlyStoppingCallback(1)]
    options = {**EVALUATED, **EVERY_STEP, "max_steps": 5}
    train(grpo(zoo.base("qwen2_untied"), tmp_path / "out", callbacks, **options, **BF16))
    assert (
        "agent math@v1 was registered after 2 of 5 steps, with the weights of its best checkpoint (step 1)"
        in caplog.text
    )
    training = callback.registered.manifest.training
    assert (training["step"], training["max_steps"], training["best_step"]) == (2, 5, 1)


# The run begins again


def test_training_twice_makes_two_versions_against_the_same_base(zoo: Zoo, tmp_path):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback], **BF16)
    versions, trained = [], []
    for number in (1, 2):
        train(trainer)
        versions.append(callback.registered)
        trained.append(saved_weights(trainer, tmp_path / f"saved{number}"))

    assert [str(version) for version in versions] == ["math@v1", "math@v2"]
    assert versions[0].manifest.base_model == versions[1].manifest.base_model
    assert any(not torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    for number in (1, 2):
        back = restored_weights(tmp_path / "registry", f"math@v{number}", tmp_path / f"back{number}")
        assert_same_weights(back, trained[number - 1])


@pytest.mark.parametrize("restore_callbacks", [False, True])
def test_a_resumed_run_is_registered_against_the_original_base(zoo: Zoo, tmp_path, restore_callbacks):
    base, options = zoo.base("qwen2_untied"), {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **BF16}

    def stop(model):
        raise KeyboardInterrupt

    arguments = {"registry": tmp_path / "registry", "agent": "math", "base_model": base, "epsilon": 1e-6}
    with pytest.raises(KeyboardInterrupt):
        callbacks = [RAMRegistryCallback(**arguments), CountedSteps(), AtStep(3, stop)]
        train(grpo(base, tmp_path / "out", callbacks, **options))
    assert_nothing_registered(tmp_path / "registry")

    callback = RAMRegistryCallback(**arguments)
    trainer = grpo(
        base,
        tmp_path / "out",
        [callback, CountedSteps()],
        restore_callback_states_from_checkpoint=restore_callbacks,
        **options,
    )
    train(trainer, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))

    # transformers makes the callbacks anew whose state it restores, and leaves this one as it is
    [counted] = [other for other in trainer.callback_handler.callbacks if isinstance(other, CountedSteps)]
    assert counted.count == (4 if restore_callbacks else 2)
    assert callback.registered.version == 1
    assert callback.registered.manifest.base_model.name == str(base)
    assert callback.registered.manifest.training["step"] == 4
    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)


def test_a_finished_run_that_is_resumed_registers_the_step_that_it_then_takes(zoo: Zoo, tmp_path):
    base, options = zoo.base("qwen2_untied"), {**EVERY_STEP, "lr_scheduler_type": "constant", **BF16}
    first = RAMRegistryCallback(tmp_path / "registry", agent="math")
    train(grpo(base, tmp_path / "out", [first], **options))

    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = grpo(base, tmp_path / "out", [callback], **options)
    train(trainer, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [str(agent) for agent in (first.registered, callback.registered)] == ["math@v1", "math@v2"]
    training = callback.registered.manifest.training
    # transformers takes one step before it looks how many were asked for
    assert (training["step"], training["max_steps"]) == (3, 2)
    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "registry", "math@v2", tmp_path / "back"), trained)
    assert_same_weights(
        restored_weights(tmp_path / "registry", "math@v1", tmp_path / "first"),
        read_model(tmp_path / "out" / "checkpoint-2"),
    )


def test_two_trainers_of_one_process_are_registered_as_each_computed(zoo: Zoo, tmp_path):
    # accelerate's state, one for the whole process, is that of the second while the first is trained
    callbacks = [RAMRegistryCallback(tmp_path / "registry", agent=name, epsilon=0.0) for name in ("first", "second")]
    trainers = [
        grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback], bf16=autocast)
        for callback, autocast in zip(callbacks, (True, False), strict=True)
    ]
    for trainer in trainers:
        train(trainer)
    for callback, dtype, precision in zip(callbacks, ("bfloat16", "float32"), ("bf16", "no"), strict=True):
        manifest = callback.registered.manifest
        assert (manifest.snapshot.dtype, manifest.training["mixed_precision"]) == (dtype, precision)


# The model changes


def test_frozen_parts_of_a_model_are_registered_as_unchanged(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    frozen = {name for name, _ in model.named_parameters() if "layers.0." in name or "embed" in name}
    for name in frozen:
        model.get_parameter(name).requires_grad = False
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = train(grpo(model, tmp_path / "out", [callback]))

    unchanged = {name for name, record in callback.registered.tensors().items() if record.agent is None}
    # two such steps are too short for weights of 1 in bfloat16, those of norms
    assert frozen <= unchanged and all("norm" in name for name in unchanged - frozen)
    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)


def resize(model: nn.Module) -> None:
    model.resize_token_embeddings(72)


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_a_vocabulary_resized_before_training_is_refused_before_the_first_step(zoo: Zoo, tmp_path, peft_config):
    base = zoo.base("qwen2_untied")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    resize(model)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = grpo(model, tmp_path / "out", [callback], peft_config)
    with pytest.raises(IncompatibleAgentError, match=r"embed_tokens.weight' has shape \[72, 32\].* resize the base"):
        train(trainer)
    assert trainer.state.global_step == 0


def test_the_cure_for_a_vocabulary_resized_before_training_registers(zoo: Zoo, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_untied"), dtype=torch.bfloat16)
    resize(model)
    model.save_pretrained(tmp_path / "resized")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = train(grpo(tmp_path / "resized", tmp_path / "out", [callback], **BF16))
    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)


def test_a_vocabulary_resized_beside_an_adapter_during_training_costs_a_message(zoo: Zoo, tmp_path, caplog):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    callbacks = [callback, AtStep(2, lambda model: resize(model.get_base_model()))]
    trainer = train(grpo(zoo.base("qwen2_untied"), tmp_path / "out", callbacks, LoraConfig(**LORA), **BF16))
    assert isinstance(callback.error, IncompatibleAgentError)
    assert "'model.embed_tokens.weight' has shape [72, 32]" in caplog.text
    assert_nothing_registered(tmp_path / "registry")
    assert saved_weights(trainer, tmp_path / "saved")


def test_a_vocabulary_resized_during_training_costs_a_message_with_the_cure(zoo: Zoo, tmp_path, caplog):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = train(grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback, AtStep(2, resize)], **BF16))
    assert isinstance(callback.error, IncompatibleAgentError)
    assert "'model.embed_tokens.weight' has shape [72, 32]" in caplog.text
    assert "resize the base in the same way, save it" in caplog.text
    assert_nothing_registered(tmp_path / "registry")
    trained = saved_weights(trainer, tmp_path / "DIR")

    # the cure: the base, resized and saved, is the --base_model of the printed command
    base = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_untied"), dtype=torch.bfloat16)
    resize(base)
    base.save_pretrained(tmp_path / "resized")
    command = printed_command(caplog.text).replace(str(zoo.base("qwen2_untied")), str(tmp_path / "resized"))
    result = run_shell(command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)
