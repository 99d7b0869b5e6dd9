"""Where an agent comes from: what the manifest says of a run, what it does not say, and that it never costs one."""

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from models import Zoo, copy_model, tokenizer
from training import BF16, grpo, printed_command, run_shell, train
from transformers import TrainerState
from trl import GRPOConfig, SFTConfig, SFTTrainer

from ram_trl import RAMRegistryCallback, provenance, register_agent
from ram_trl.cli import main
from ram_trl.errors import ConfigError
from ram_trl.provenance import describe_run, git_checkout


SECRET = "hf_" + "abcdefghijklmnop"
WITH_SECRETS = {
    "hub_token": SECRET,
    "model_init_kwargs": {"dtype": torch.bfloat16, "token": "t0p", "config": {"api_key": "t0p"}},
    "vllm_server_base_url": "http://user:t0p@host:8000/v1?token=t0p",
    "run_name": f"run with {SECRET}",
}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> str:
    """The working directory is a git checkout; its commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text("one\n")
    git(folder, "init", "-q")
    git(folder, "add", "train.py")
    git(folder, "commit", "-q", "-m", "one")
    monkeypatch.chdir(folder)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def runs(zoo: Zoo, tmp_path_factory):
    """A run of each level, registered as full@v1 and minimal@v1: their manifests' training, and where."""
    path, training = tmp_path_factory.mktemp("provenance"), {}
    for level in ("full", "minimal"):
        callback = RAMRegistryCallback(path / "registry", agent=level, provenance=level)
        trainer = train(grpo(zoo.base("llama"), path / "out", [callback], max_grad_norm=0.25, seed=7, **BF16))
        training[level] = callback.registered.manifest.training
    return training, trainer, path


def test_the_manifest_says_what_the_run_was(runs):
    training, trainer, path = runs
    full = training["full"]
    assert (full["provenance"], full["arguments"], full["step"], full["max_steps"]) == ("full", "GRPOConfig", 2, 2)
    assert (full["learning_rate"], full["seed"], full["config"]["seed"]) == (1e-3, 7, 7)
    assert full["config"]["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert full["config"]["output_dir"] == str(path / "out")
    assert full["config"]["max_grad_norm"] == 0.25
    # what is as the class has it says nothing
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert not [name for name, value in full["config"].items() if value == defaults[name]]
    assert full["reward_functions"] == trainer.reward_func_names == ["reward"]
    assert full["dataset"] == {"fingerprint": trainer.train_dataset._fingerprint, "rows": 16}
    assert full["metrics"]["rewards/reward/mean"] == full["metrics"]["reward"] > 0
    assert full["versions"]["torch"] == torch.__version__
    assert {"python", "trl", "transformers", "datasets"} <= set(full["versions"])


def test_the_minimal_record_keeps_numbers_and_nothing_private(runs):
    training, trainer, path = runs
    minimal = training["minimal"]
    assert {"config", "reward_functions", "dataset", "git", "learning_rate", "seed"} & set(minimal) == set()
    assert (minimal["provenance"], minimal["step"], minimal["max_steps"]) == ("minimal", 2, 2)
    assert minimal["mixed_precision"] == training["full"]["mixed_precision"]
    assert minimal["versions"] == training["full"]["versions"]
    assert 0 < minimal["metrics"]["reward"] < 1
    text = json.dumps(minimal)
    assert str(path) not in text and "rewards/" not in text and trainer.train_dataset._fingerprint not in text


def test_show_prints_where_an_agent_comes_from(runs, capsys):
    _, trainer, path = runs
    for level in ("full", "minimal"):
        main(["show", "--registry", str(path / "registry"), "--agent", level])
        shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
        assert shown["trained"].strip() == "2 of 2 steps, GRPOConfig"
        assert torch.__version__ in shown["trained with"]
        if level == "full":
            assert shown["rewarded by"].strip() == "reward"
            assert shown["trained on"].strip() == f"16 rows, {trainer.train_dataset._fingerprint}"
        assert ("rewarded by" in shown, "trained on" in shown) == (level == "full",) * 2


def test_secrets_are_in_no_record(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False, **WITH_SECRETS)
    record = describe_run(args, TrainerState())
    text = json.dumps(record, allow_nan=False)
    assert "t0p" not in text and SECRET not in text
    config = record["config"]
    assert config["vllm_server_base_url"] == "http://***@host:8000/v1?token=***"
    assert config["run_name"] == "run with ***"
    assert config["model_init_kwargs"] == {"dtype": "bfloat16", "config": {}}


def test_options_that_json_has_not_are_named_by_their_class(tmp_path):
    odd = {"quantization_config": object(), "path": tmp_path, "nan": float("nan"), "names": {"b", "a"}}
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False, model_init_kwargs=odd)
    config = describe_run(args, TrainerState())["config"]
    assert config["model_init_kwargs"] == {
        "quantization_config": "<object>",
        "path": str(tmp_path),
        "nan": "nan",
        "names": ["a", "b"],
    }


def test_the_commit_is_that_at_the_beginning_of_the_run(zoo: Zoo, tmp_path, checkout):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = grpo(zoo.base("llama"), tmp_path / "out", [callback], **BF16)
    train(trainer)
    assert callback.registered.manifest.training["git"] == {"commit": checkout, "dirty": False}
    Path("train.py").write_text("two\n")
    Path("notes.txt").write_text("of no importance\n")
    assert git_checkout() == {"commit": checkout, "dirty": True}


def test_where_there_is_no_checkout_or_no_git_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_checkout() is None
    git(tmp_path, "init", "-q")
    # without a commit
    assert git_checkout() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_checkout() is None


def test_git_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.2)
    assert git_checkout() is None


def test_what_cannot_be_had_is_left_out_and_the_agent_registered(zoo: Zoo, tmp_path, monkeypatch, caplog):
    def fail(*arguments):
        raise ZeroDivisionError("unforeseen")

    for name in ("_versions", "_differing", "_fingerprint", "last_metrics", "best_step"):
        monkeypatch.setattr(provenance, name, fail)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    train(grpo(zoo.base("llama"), tmp_path / "out", [callback], **BF16))
    assert (str(callback.registered), callback.error) == ("math@v1", None)
    assert callback.registered.manifest.training["config"] == {}
    assert caplog.text.count("ZeroDivisionError('unforeseen')") == 5
    main(["show", "--registry", str(tmp_path / "registry"), "--agent", "math"])


def test_of_other_trainers_and_of_streams_what_they_have_is_recorded(zoo: Zoo, tmp_path):
    base, rows = zoo.base("llama"), [{"text": "1+1=2"}, {"text": "2+2=4"}] * 4
    args = SFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", bf16=False, max_steps=1)
    args.model_init_kwargs = {"dtype": "bfloat16"}
    for agent, data in (("rows", Dataset.from_list(rows)), ("stream", Dataset.from_list(rows).to_iterable_dataset())):
        callback = RAMRegistryCallback(tmp_path / "registry", agent=agent)
        train(SFTTrainer(str(base), args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[callback]))
        training = callback.registered.manifest.training
        assert (training["arguments"], training["reward_functions"]) == ("SFTConfig", None)
        if agent == "rows":
            assert training["dataset"]["rows"] == 8 and re.fullmatch(
                "[0-9a-f]{16}", training["dataset"]["fingerprint"]
            )
        else:
            assert training["dataset"] == {"fingerprint": None, "rows": None}
        assert training["metrics"]["train_loss"] > 0
    main(["show", "--registry", str(tmp_path / "registry"), "--agent", "stream"])


def test_a_level_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="provenance='none' is not one of full, minimal"):
        RAMRegistryCallback(tmp_path / "registry", agent="math", provenance="none")


def test_a_checkpoint_tells_the_steps_and_numbers_of_its_run(zoo: Zoo, tmp_path, caplog):
    base = zoo.base("llama")
    train(grpo(base, tmp_path / "out", [], save_strategy="steps", save_steps=1, **BF16))
    registry, checkpoint = tmp_path / "registry", tmp_path / "out" / "checkpoint-1"

    def registered(model: Path, **options):
        return register_agent(str(registry), "math", str(model), base_model=str(base), **options).manifest.training

    full = registered(checkpoint)
    assert (full["model"], full["step"], full["max_steps"]) == (str(checkpoint), 1, 2)
    assert full["metrics"]["rewards/reward/mean"] > 0
    minimal = registered(checkpoint, provenance="minimal")
    assert (minimal["step"], "model" in minimal, "rewards/reward/mean" in minimal["metrics"]) == (1, False, False)
    # the log of a long run holds more than any record of a model
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    entries = [{f"reward_{number}": number / 7 for number in range(40)} | {"step": 1}] * 30_000
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "log_history": entries}))
    assert registered(checkpoint)["metrics"]["reward_39"] == 39 / 7
    # of a copy under another name nobody knows which step it is of
    assert registered(copy_model(checkpoint, tmp_path / "renamed")) == {
        "provenance": "full",
        "model": str(tmp_path / "renamed"),
    }
    for content in ('{"global_step": 1}', '{"global_step": 1, "max_steps": 2, "log_history": [1]}', "["):
        (checkpoint / "trainer_state.json").write_text(content)
        assert "step" not in registered(checkpoint)
    assert caplog.text.count("was not understood") == 3


def test_the_printed_command_is_as_silent_as_the_run(zoo: Zoo, tmp_path, caplog):
    base = zoo.base("llama")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", provenance="minimal")
    trainer = grpo(base, tmp_path / "out", [callback], save_strategy="steps", save_steps=2, **BF16)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    trainer.pop_callback(callback)
    train(trainer)
    (tmp_path / "registry" / "agents").rmdir()
    (tmp_path / "registry" / "agents").write_text("")
    callback.on_train_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    (tmp_path / "registry" / "agents").unlink()
    command = printed_command(caplog.text)
    assert "--provenance minimal" in command
    result = run_shell(f"{command} --json")
    assert result.returncode == 0, result.stderr
    assert "model" not in json.loads(result.stdout)["training"]
