"""recipes/train_grpo.py as a user runs it: from a YAML file to a merged model, and what it says of mistakes."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from models import Zoo, read_model
from training import run_python, run_shell

from ram_trl import AgentRegistry


ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "train_grpo.py"

REWARDS = """
def nearness(completion_ids, answer, **kwargs):
    return [-abs(sum(ids) / len(ids) - expected) for ids, expected in zip(completion_ids, answer)]

def brevity(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture
def folder(zoo: Zoo, tmp_path) -> Path:
    """A user's folder: prompts with answers, reward functions, and the options in a file."""
    prompts = [{"prompt": f"{number}+1=", "answer": number} for number in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    options = {
        "model_name_or_path": str(zoo.base("qwen2_tied")),
        "dtype": "bfloat16",
        "dataset_name": "prompts.jsonl",
        "reward_funcs": ["my_rewards:nearness", "my_rewards:brevity"],
        "registry": "registry",
        "agent": "math",
        "output_dir": "run",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "learning_rate": "1.0e-3",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "save_strategy": "no",
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(options))
    return tmp_path


def test_from_a_yaml_file_to_a_registered_agent_to_a_merged_model(zoo: Zoo, folder):
    launch = f"accelerate launch --config_file {ROOT}/accelerate_configs/cpu.yaml {RECIPE} --config train.yaml"
    result = run_shell(launch, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "registered math@v1 in registry" in result.stdout

    listed = run_shell("ram-trl list --registry registry --json", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    (agent,) = json.loads(listed.stdout)
    assert (agent["name"], agent["version"], agent["kind"]) == ("math", 1, "full")
    assert agent["base_model"]["name"] == str(zoo.base("qwen2_tied"))
    assert {"rewards/nearness/mean", "rewards/brevity/mean"} <= agent["training"]["metrics"].keys()

    options = ["--registry", "registry", "--output_dir", "merged", "--r", "0", "--epsilon", "0"]
    merge = run_python(ROOT / "recipes" / "merge.py", *options, cwd=folder)
    assert merge.returncode == 0, merge.stderr
    # one agent merged alone without rescaling is that agent, as the recipe saved it
    trained, merged, base = (read_model(p) for p in (folder / "run", folder / "merged", zoo.base("qwen2_tied")))
    assert merged.keys() == trained.keys() == base.keys()
    assert all(torch.equal(merged[name], trained[name]) for name in trained)
    assert any(not torch.equal(merged[name], base[name]) for name in base)


@pytest.fixture
def run_recipe(folder, monkeypatch, capfd):
    """Run the recipe in this process, where TRL is imported already, with more options than those of the file."""

    def run(*options: str, config: str = "train.yaml") -> tuple[int, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
        monkeypatch.setattr(sys, "argv", [str(RECIPE), "--config", config, *options])
        code = 0
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
        except SystemExit as error:
            code = error.code
        return code, capfd.readouterr().err

    return run


MISTAKES = {
    "module": (["--reward_funcs", "no_such_module:f"], "'no_such_module:f' is not a MODULE:FUNCTION that can be impo"),
    "function": (["--reward_funcs", "my_rewards:f"], "module 'my_rewards' has no attribute 'f'"),
    "colon": (["--reward_funcs", "my_rewards"], "'my_rewards' is not a MODULE:FUNCTION"),
    "no module": (["--reward_funcs", ":f"], "':f' is not a MODULE:FUNCTION"),
    "no file": (["--dataset_name", "none.jsonl"], "dataset_name='none.jsonl' is not a file"),
    "suffix": (["--dataset_name", "my_rewards.py"], "'my_rewards.py' is none of .json, .jsonl, .csv, .parquet"),
    "no prompt": (["--dataset_name", "answers.csv"], "'answers.csv' has no column 'prompt', only answer"),
    "damaged": (["--dataset_name", "damaged.jsonl"], "dataset_name='damaged.jsonl' cannot be loaded: "),
    "no such dataset": (["--dataset_name", "nobody/nothing"], "dataset_name='nobody/nothing' cannot be loaded: "),
    "agent": (["--agent", "../math"], "'../math' is not a name for an agent"),
    "base": (["--registry_base_model", "/no/base"], "/no/base is neither a directory nor a Hub id"),
    "provenance": (["--provenance", "none"], "provenance='none' is not one of full, minimal"),
    "generalist": (["--merge_to", "a/b"], "'a/b' is not a name for a generalist"),
    "no generalist": (["--merge_config", "merge.yaml"], "--merge_config is for --merge_to: name a generalist"),
    "no merge file": (["--merge_to", "all", "--merge_config", "none.yaml"], "cannot read none.yaml"),
    "merge option": (["--merge_to", "all", "--merge_config", "merge.yaml"], "has an unknown option 'rho'; known are"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_line_and_exit_code_2(folder, run_recipe, mistake):
    (folder / "answers.csv").write_text("answer\n1\n2\n")
    (folder / "merge.yaml").write_text("rho: 1\n")
    (folder / "damaged.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    options, message = MISTAKES[mistake]
    assert_refused(folder, run_recipe(*options), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory: 'other.yaml'"),
        ("moonshine: 1", "moonshine"),
        ("- registry", "must contain a YAML mapping"),
        ("registry: [", "expected the node content"),
        ("registry: registry", "--model_name_or_path and --dataset_name are both needed"),
    ],
)
def test_a_mistake_in_the_file_of_options_gets_one_clear_line_and_exit_code_2(folder, run_recipe, content, message):
    if content is not None:
        (folder / "other.yaml").write_text(content)
    options = ["--registry", "registry", "--agent", "math", "--reward_funcs", "my_rewards:brevity", "--use_cpu"]
    options += ["--bf16", "False", "--output_dir", "run"]
    assert_refused(folder, run_recipe(*options, config="other.yaml"), message)


def assert_refused(folder: Path, outcome: tuple[int, str], message: str) -> None:
    code, printed = outcome
    (line,) = (line for line in printed.splitlines() if line.startswith("error: "))
    assert message in line
    assert printed.splitlines()[-1] == line
    assert "Traceback" not in printed
    assert code == 2
    assert not (folder / "registry").exists()
    # a trainer makes its directory when it is made
    assert not list((folder / "run").glob("*"))


def test_what_is_registered_is_merged_as_a_file_says(folder, run_recipe):
    gate = "def accepts(candidate, report):\n    return report['r'] == 0.2 or 'another r'\n"
    (folder / "my_gates.py").write_text(gate)
    (folder / "merge.yaml").write_text("preset: official\nagents: [math]\ngate: my_gates:accepts\n")
    code, printed = run_recipe("--merge_to", "generalist", "--merge_config", "merge.yaml", "--provenance", "minimal")
    assert code == 0, printed
    training = AgentRegistry(folder / "registry").get("math").manifest.training
    assert (training["provenance"], "config" in training) == ("minimal", False)
    generalist = AgentRegistry(folder / "registry").generalists.get("generalist")
    assert generalist.parents == ["math@v1"]
    assert (generalist.manifest.settings["r"], generalist.manifest.settings["alpha"]) == (0.2, 1.0)
    assert generalist.manifest.gate == "my_gates:accepts"


@pytest.mark.parametrize("strict", [False, True])
def test_a_registration_that_fails_leaves_the_saved_model_and_fails_the_recipe_only_if_strict(
    zoo: Zoo, folder, run_recipe, caplog, strict
):
    (folder / "my_rewards.py").write_text(
        "import pathlib\n"
        "def nearness(completion_ids, **kwargs):\n"
        "    registry = pathlib.Path('registry')\n"
        "    if registry.is_dir():\n"
        "        registry.rename('away')\n"
        "        registry.write_text('')\n"
        "    return [float(sum(ids)) for ids in completion_ids]\n"
    )
    code, printed = run_recipe("--reward_funcs", "my_rewards:nearness", *(["--strict"] if strict else []))
    assert "agent 'math' was NOT registered: writing to the registry registry failed" in caplog.text
    assert read_model(folder / "run").keys() == read_model(zoo.base("qwen2_tied")).keys()
    assert code == (2 if strict else 0)
    assert ("error: writing to the registry" in printed.splitlines()[-1]) == strict
