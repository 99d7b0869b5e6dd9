"""A run is never lost: faults that really happen, in real GRPO runs of one process and of two."""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Zoo, copy_model, merged_by_peft, read_model
from peft import LoraConfig
from training import (
    BF16,
    LORA,
    AtStep,
    assert_same_weights,
    grpo,
    printed_command,
    registered_files,
    restored_weights,
    run_python,
    run_shell,
    saved_weights,
    train,
)
from transformers import TrainerCallback

from ram_trl import AgentRegistry, RAMRegistryCallback, register_agent
from ram_trl.errors import BaseModelError, NonFiniteError, RamTrlError, StorageError


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


# One process


class FailingRun:
    """A run whose registration fails, in a registry that holds a version already.

    Args:
        zoo (`Zoo`):
            Makes the base.
        path (`Path`):
            Where everything goes.
    """

    def __init__(self, zoo: Zoo, path: Path):
        self.path, self.registry, self.base = path, path / "registry", path / "base"
        copy_model(zoo.base("qwen2_untied"), self.base)
        agent = zoo.agent(zoo.base("qwen2_untied"), seed=1)
        register_agent(AgentRegistry(self.registry), "math", str(agent), base_model=str(self.base))
        self.files = registered_files(self.registry)

    def train(self, damage, peft_config=None, strict=False, callbacks=(), **options):
        """Train, and damage something after the last step."""
        callback = RAMRegistryCallback(self.registry, agent="math", strict=strict)
        callbacks = [callback, AtStep(2, damage), *callbacks]
        trainer = grpo(self.base, self.path / "out", callbacks, peft_config, **options)
        if strict:
            with pytest.raises(RamTrlError) as raised:
                train(trainer)
            assert raised.value is callback.error
        else:
            train(trainer)
        assert callback.registered is None
        return callback, trainer

    def replace_registry(self, model=None):
        self.registry.rename(self.path / "registry-away")
        self.registry.write_text("")

    def bring_back_registry(self):
        self.registry.unlink()
        (self.path / "registry-away").rename(self.registry)

    def take_away_base(self, model=None):
        self.base.rename(self.path / "base-away")

    def bring_back_base(self):
        (self.path / "base-away").rename(self.base)

    def assert_untouched(self):
        assert registered_files(self.registry) == self.files
        AgentRegistry(self.registry).get("math@v1").verify()


@pytest.fixture
def failing_run(zoo: Zoo, tmp_path) -> FailingRun:
    return FailingRun(zoo, tmp_path)


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_an_unwritable_registry_costs_a_message_and_the_printed_command_registers_later(
    failing_run: FailingRun, caplog, peft_config
):
    callback, trainer = failing_run.train(failing_run.replace_registry, peft_config, **EVERY_STEP, **BF16)
    assert isinstance(callback.error, StorageError)
    assert "agent 'math' was NOT registered: writing to the registry" in caplog.text
    command = printed_command(caplog.text)
    assert "checkpoint-2" in command
    trained = saved_weights(trainer, failing_run.path / "saved")
    if peft_config is not None:
        trained = merged_by_peft(failing_run.base, failing_run.path / "saved", failing_run.path / "merged")

    failing_run.bring_back_registry()
    failing_run.assert_untouched()
    result = run_shell(command, cwd=failing_run.path)
    assert result.returncode == 0, result.stderr
    assert_same_weights(restored_weights(failing_run.registry, "math@v2", failing_run.path / "back"), trained)


def test_a_base_that_vanished_costs_a_message_and_the_printed_command_registers_what_was_executed(
    failing_run: FailingRun, caplog
):
    callback, trainer = failing_run.train(failing_run.take_away_base, bf16=True)
    assert isinstance(callback.error, BaseModelError)
    assert str(failing_run.base) in caplog.text
    failing_run.assert_untouched()
    trained = saved_weights(trainer, failing_run.path / "DIR")
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}

    failing_run.bring_back_base()
    # no checkpoint was written: the command says where to save the model first
    assert "after trainer.save_model(DIR)" in caplog.text
    result = run_shell(printed_command(caplog.text), cwd=failing_run.path)
    assert result.returncode == 0, result.stderr
    rounded = {name: tensor.bfloat16() for name, tensor in trained.items()}
    assert_same_weights(restored_weights(failing_run.registry, "math@v2", failing_run.path / "back"), rounded)


class StopAfterSecondStep(TrainerCallback):
    """Ends training between two checkpoints."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


@pytest.mark.parametrize("options", [{}, {"save_strategy": "steps", "save_steps": 9, "max_steps": 9}])
def test_the_printed_command_never_names_the_checkpoint_of_another_run(failing_run: FailingRun, caplog, options):
    copy_model(failing_run.base, failing_run.path / "out" / "checkpoint-2")
    copy_model(failing_run.base, failing_run.path / "out" / "checkpoint-99")
    failing_run.train(failing_run.replace_registry, callbacks=[StopAfterSecondStep()], **options, **BF16)
    assert "checkpoint-" not in printed_command(caplog.text)


def test_the_printed_command_names_a_checkpoint_that_was_not_planned(failing_run: FailingRun, caplog):
    # as on SIGTERM (enable_jit_checkpoint)
    checkpoint = failing_run.path / "out" / "checkpoint-2"
    save = AtStep(2, lambda model: model.save_pretrained(checkpoint))
    failing_run.train(failing_run.replace_registry, callbacks=[save], **BF16)
    failing_run.bring_back_registry()
    result = run_shell(printed_command(caplog.text), cwd=failing_run.path)
    assert result.returncode == 0, result.stderr
    back = restored_weights(failing_run.registry, "math@v2", failing_run.path / "back")
    assert_same_weights(back, read_model(checkpoint))


def test_a_disk_that_is_gone_costs_no_run_even_if_checkpoints_cannot_be_looked_for(
    failing_run: FailingRun, caplog, monkeypatch
):
    glob = Path.glob

    def fail(path, pattern):
        if path.name == "checkpoint-2":
            raise OSError(errno.EIO, "Input/output error")
        return glob(path, pattern)

    def lose(model):
        failing_run.replace_registry()
        monkeypatch.setattr(Path, "glob", fail)

    callback, _ = failing_run.train(lose, **EVERY_STEP, **BF16)
    assert isinstance(callback.error, StorageError)
    assert "--model DIR" in printed_command(caplog.text)


class EarlierIsBetter(TrainerCallback):
    """Makes the first evaluation the best one."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_score"] = -state.global_step


def test_the_printed_command_names_the_best_checkpoint_if_the_run_ends_with_that(failing_run: FailingRun, caplog):
    options = {**EVERY_STEP, "eval_strategy": "steps", "eval_steps": 1}
    _, trainer = failing_run.train(
        failing_run.replace_registry,
        callbacks=[EarlierIsBetter()],
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
        **options,
        **BF16,
    )
    assert "checkpoint-1" in printed_command(caplog.text)
    trained = saved_weights(trainer, failing_run.path / "saved")
    assert_same_weights(read_model(failing_run.path / "out" / "checkpoint-1"), trained)


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_diverged_model_is_not_registered_and_the_tensor_is_named(
    failing_run: FailingRun, caplog, peft_config, value
):
    name = "q_proj.lora_A.weight" if peft_config else "q_proj.weight"

    def diverge(model):
        parameter = next(p for n, p in model.named_parameters() if n.replace(".default", "").endswith(name))
        with torch.no_grad():
            parameter[0, 0] = value

    callback, trainer = failing_run.train(diverge, peft_config, **BF16)
    assert isinstance(callback.error, NonFiniteError)
    assert f"model.layers.0.self_attn.{name}' of the agent holds NaN or infinity" in caplog.text
    failing_run.assert_untouched()
    saved_weights(trainer, failing_run.path / "saved")


def test_an_error_that_nobody_foresaw_costs_no_run_either(failing_run: FailingRun, caplog, monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError("unforeseen")

    callback, _ = failing_run.train(
        lambda model: monkeypatch.setattr("ram_trl.registering.live.build_manifest", fail), **BF16
    )
    assert isinstance(callback.error, ZeroDivisionError)
    assert "ZeroDivisionError('unforeseen')" in caplog.text
    assert "Traceback" in caplog.text
    assert printed_command(caplog.text)
    failing_run.assert_untouched()


@pytest.mark.parametrize("damage", ["replace_registry", "take_away_base"])
def test_strict_raises_at_the_end(failing_run: FailingRun, damage):
    callback, trainer = failing_run.train(getattr(failing_run, damage), strict=True, **BF16)
    assert isinstance(callback.error, StorageError if damage == "replace_registry" else BaseModelError)
    assert trainer.state.global_step == 2


def test_a_later_run_of_the_same_trainer_forgets_the_error(failing_run: FailingRun):
    callback, trainer = failing_run.train(failing_run.replace_registry, **BF16)
    failing_run.bring_back_registry()
    trainer.callback_handler.pop_callback(AtStep)
    train(trainer)
    assert callback.error is None
    assert str(callback.registered) == "math@v2"


def test_a_full_disk_costs_no_run_and_leaves_nothing_behind(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    script = Path(__file__).parent / "run_on_full_disk.py"
    arguments = [sys.executable, script, tmp_path, base, zoo.agent(base, seed=1)]
    # A small file system of its own where that is allowed, else a limit on the size of files.
    mount = f"mount -t tmpfs -o size=4m tmpfs {shlex.quote(str(tmp_path))}"
    for unshare in ("unshare -m", "unshare -Urm"):
        if run_shell(f"{unshare} {mount}").returncode == 0:
            command = f"{mount} && {shlex.join(map(str, [*arguments, 'tmpfs']))}"
            result = run_shell(f"{unshare} sh -c {shlex.quote(command)}")
            break
    else:
        result = run_shell(shlex.join(map(str, [*arguments, "limit"])))
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert [failed["error"] for failed in outcome["failed"]] == ["StorageError"] * 3
    for failed in outcome["failed"]:
        assert "No space left on device" in failed["message"] or "File too large" in failed["message"]
        assert failed["untouched"]
        # a file that is open stays on the disk and would keep the user from saving the model
        assert failed["open"] == []
    assert result.stderr.count("was NOT registered") == 3
    assert outcome["then"] == "math@v2"
    assert outcome["same"]


def test_a_process_that_is_killed_in_the_snapshot_leaves_nothing_visible_and_a_checkpoint(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    killed = run_python(Path(__file__).parent / "run_killed.py", "sigkill", tmp_path, base)
    # as a shell says it
    assert killed.returncode == 128 + signal.SIGKILL
    registry = AgentRegistry(tmp_path / "registry")
    # something had been written
    assert [path for path in registry.path.rglob("*") if path.is_file() and path.stat().st_size]
    assert (registry.names(), registry.versions("math")) == ([], [])
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert str(register_agent(registry, "math", str(checkpoint), base_model=str(base))) == "math@v1"
    assert_same_weights(restored_weights(registry.path, "math", tmp_path / "back"), read_model(checkpoint))


# Two processes

RUN_FAULTS = Path(__file__).parent / "run_faults.py"
ON_CPU = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def start_ranks(folder: Path, *arguments: str | Path) -> list[subprocess.Popen]:
    """Two processes of `run_faults.py` without a launcher that would end one when the other is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, **ON_CPU, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in ("0", "1"):
        with open(folder / f"log-{rank}", "w") as log:
            command = [sys.executable, RUN_FAULTS, arguments[0], folder, *arguments[1:]]
            environment |= {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return ranks


@pytest.fixture(scope="module")
def faults(zoo: Zoo, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    """What each of two ranks saw of every fault, and where."""
    folder = tmp_path_factory.mktemp("faults")
    ranks = start_ranks(folder, "faults", zoo.base("qwen2_untied"), zoo.base("qwen3_moe"))
    try:
        codes = [rank.wait(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], [(folder / f"log-{rank}").read_text() for rank in (0, 1)]
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in (0, 1)], folder


def seen(faults: tuple[list[dict[str, Any]], Path], case: str, key: str) -> list[Any]:
    return [rank[case].get(key) for rank in faults[0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_base_that_one_rank_lacks_stops_all_ranks_before_the_first_step(faults, rank):
    assert seen(faults, f"begin on {rank}", "raised") == ["BaseModelError"] * 2
    assert max(seen(faults, f"begin on {rank}", "seconds")) < 60


@pytest.mark.parametrize(
    "case",
    ["names on 0", "names on 1", "gathering on 0", "commit on 0", "sharded on 0", "sharded on 1"],
)
def test_a_fault_of_one_rank_is_known_to_all_and_costs_none_the_run(faults, case):
    steps = None if "sharded" in case else 2
    assert seen(faults, case, "result") == [steps, steps]
    assert seen(faults, case, "raised") == [None, None]
    assert "NoneType" not in seen(faults, case, "error")
    cause = "No space left on device" if case == "commit on 0" else "unforeseen"
    assert all(cause in message for message in seen(faults, case, "message"))
    assert f"rank {case[-1]}" in seen(faults, case, "message")[1 - int(case[-1])]
    assert seen(faults, case, "registered") == [None, None]
    assert max(seen(faults, case, "seconds")) < 60


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_rank_is_raised_on_all_if_strict(faults, rank):
    raised = seen(faults, f"strict on {rank}", "raised")
    assert raised == seen(faults, f"strict on {rank}", "error")
    assert (raised[rank], raised[1 - rank]) == ("ZeroDivisionError", "DistributedError")


def test_after_faults_of_one_rank_the_models_are_saved_and_the_next_runs_are_registered(faults):
    _, folder = faults
    assert seen(faults, "clean", "registered") == ["clean@v1", None]
    assert seen(faults, "sharded", "registered") == ["sharded@v1", None]
    assert AgentRegistry(folder / "registry").names() == ["clean", "sharded"]
    assert not list((folder / "registry").rglob(".tmp-*"))
    for name in ("names", "strict", "gathering", "commit"):
        assert read_model(folder / f"saved-{name}")


def test_a_fault_of_one_rank_is_logged_with_its_traceback_there_and_with_the_command_on_the_main_rank(faults):
    _, folder = faults
    main, other = ((folder / f"log-{rank}").read_text() for rank in (0, 1))
    assert "agent 'names' was NOT registered: ZeroDivisionError: unforeseen (rank 1)" in main
    assert "agent 'names' was NOT registered: ZeroDivisionError('unforeseen')\n" in other
    assert "Traceback" in other


def test_a_rank_that_is_killed_in_the_snapshot_costs_the_other_neither_run_nor_time(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    survivor, victim = start_ranks(tmp_path, "killed", base, "1")
    try:
        assert victim.wait(timeout=180) == -signal.SIGKILL
        assert survivor.wait(timeout=60) == 0
    finally:
        survivor.kill(), victim.kill()
    outcome = json.loads((tmp_path / "outcomes-0.json").read_text())
    assert (outcome["result"], outcome["error"], outcome["registered"]) == (2, "RuntimeError", None)
    assert registered_files(tmp_path / "registry") == {"agents"}
    result = run_shell(printed_command((tmp_path / "log-0").read_text()), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_same_weights(
        restored_weights(tmp_path / "registry", "math@v1", tmp_path / "back"), read_model(tmp_path / "saved")
    )


def test_a_main_rank_that_is_killed_in_the_snapshot_ends_a_launched_run_and_leaves_nothing_visible(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"
    result = run_shell(f"{torchrun} {RUN_FAULTS} killed {tmp_path} {base} 0", env=ON_CPU)
    assert result.returncode != 0
    assert "Signal 9 (SIGKILL)" in result.stderr
    registry, checkpoint = AgentRegistry(tmp_path / "registry"), tmp_path / "out" / "checkpoint-2"
    # something had been written
    assert list(registry.path.rglob("delta.safetensors"))
    assert (registry.names(), registry.versions("math")) == ([], [])
    assert str(register_agent(registry, "math", str(checkpoint), base_model=str(base))) == "math@v1"
    assert_same_weights(restored_weights(registry.path, "math", tmp_path / "back"), read_model(checkpoint))
