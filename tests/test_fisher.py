"""Fisher information: estimated by the recipe in real processes, kept beside the agents, and merged by."""

import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from models import read_model
from safetensors.torch import load_file
from test_merge import full_delta, lora_delta, merged
from tiles import context_of
from training import run_shell
from transformers import AutoModelForCausalLM, AutoTokenizer

from ram_trl import AgentRegistry, merge_agents, register_agent, restore_agent
from ram_trl.arithmetic.methods import METHODS
from ram_trl.arithmetic.ram import TileUpdate
from ram_trl.errors import ConfigError, CorruptedFileError


RECIPE = Path(__file__).parents[1] / "recipes" / "fisher.py"
ROWS = [{"prompt": f"{number}+1=", "completion": f"{number + 1}."} for number in range(5)]


@pytest.fixture(scope="module")
def folder(zoo, tmp_path_factory):
    """A registry with a full and a LoRA agent of a tied base, and a dataset; the recipe ran for both."""
    folder = tmp_path_factory.mktemp("fisher")
    base = zoo.base("qwen2_tied")
    register_agent(str(folder / "registry"), "full", str(zoo.agent(base, seed=1)), base_model=str(base), epsilon=0.0)
    register_agent(str(folder / "registry"), "lora", str(zoo.adapter(base)), base_model=str(base))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row["prompt"]}) + "\n" for row in ROWS))
    launch = "accelerate launch --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu"
    done = run_shell(f"{launch} {RECIPE} {words_for('full', 'data.jsonl')}", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Fisher information of full@v1 from 4 examples: registry/fisher/full/v000001" in done.stdout
    run_here(folder, words_for("lora", "text.jsonl"))
    return folder


def words_for(agent, data):
    return f"--registry registry --agent {agent} --dataset {data} --num_examples 4 --cpu"


def run_here(folder, words):
    """The recipe in this process, which has imported its libraries already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(RECIPE), *words.split()])
        runpy.run_path(str(RECIPE), run_name="__main__")


def fisher_of(folder, agent):
    return load_file(folder / "registry" / "fisher" / agent / "v000001" / "fisher.safetensors")


def slow_fisher(directory, examples):
    """The mean over examples of the squared gradient of log p(answer | prompt), by autograd, token by token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for prompt, answer in examples:
        model.zero_grad()
        tokens = torch.tensor([prompt + answer])
        log_probabilities = model(tokens).logits.log_softmax(dim=-1)
        begin = max(1, len(prompt))
        sum(log_probabilities[0, at - 1, tokens[0, at]] for at in range(begin, tokens.shape[1])).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad**2 / len(examples)
    return sums


def test_the_recipe_estimates_the_mean_of_squared_gradients(zoo, folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(zoo.base("qwen2_tied"))
    ids = {row["prompt"]: tokenizer(row["prompt"])["input_ids"] for row in ROWS}
    answers = [(ids[row["prompt"]], tokenizer(row["completion"])["input_ids"]) for row in ROWS[:4]]
    texts = [([], ids[row["prompt"]]) for row in ROWS[:4]]
    for agent, examples in (("full", answers), ("lora", texts)):
        restore_agent(str(folder / "registry"), agent, str(tmp_path / agent))
        expected, found = slow_fisher(tmp_path / agent, examples), fisher_of(folder, agent)
        assert set(found) == set(expected) == set(read_model(zoo.base("qwen2_tied")))
        for name, values in expected.items():
            assert found[name].dtype == torch.bfloat16
            torch.testing.assert_close(found[name].float(), values, rtol=2**-7, atol=1e-12)


def test_agents_are_merged_by_their_fisher_information(zoo, folder, tmp_path):
    base = zoo.base("qwen2_tied")
    deltas = [full_delta(base, zoo.agent(base, seed=1)), lora_delta(base, zoo.adapter(base))]
    fishers = [fisher_of(folder, agent) for agent in ("full", "lora")]
    report, found = merged(
        str(folder / "registry"),
        tmp_path,
        method="fisher",
        method_options={"scaling": 0.5},
        weights={"lora": 3.0},
        output_dtype="float32",
    )
    for name, before in read_model(base).items():
        tau = [torch.from_numpy(d[name]).double() if name in d else torch.zeros(before.shape) for d in deltas]
        mass = [weight * fisher[name].double() for weight, fisher in zip((1.0, 3.0), fishers, strict=True)]
        mean = (mass[0] * tau[0] + mass[1] * tau[1]) / (mass[0] + mass[1])
        torch.testing.assert_close(found[name].double(), before.double() + 0.5 * mean, rtol=3e-7, atol=1e-9)
    assert all(0 < row["effective_lambda"] < 0.5 for row in report["agents"])


def test_an_agent_without_fisher_information_is_refused_with_the_command(zoo, folder, tmp_path):
    base, registry = str(zoo.base("qwen2_tied")), shutil.copytree(folder / "registry", tmp_path / "registry")
    agent = AgentRegistry(registry).get("full")
    register_agent(str(registry), "full", str(zoo.agent(zoo.base("qwen2_tied"), seed=2)), base_model=base)
    command = rf"agent full@v2 has no Fisher information.*recipes/fisher.py --registry {registry} --agent full@v2"
    with pytest.raises(ConfigError, match=command):
        merge_agents(str(registry), str(tmp_path / "out"), method="fisher")
    stored = registry / "fisher" / "full" / "v000001" / "fisher.safetensors"
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    with pytest.raises(
        CorruptedFileError, match=r"the Fisher of agent full@v1: .* is not the file .*recipes/fisher.py"
    ):
        merge_agents(str(registry), str(tmp_path / "out"), agents=["full@v1", "lora"], method="fisher")
    (stored.parent / "manifest.json").write_text("{}")
    with pytest.raises(CorruptedFileError, match="is damaged"):
        merge_agents(str(registry), str(tmp_path / "out"), agents=["full@v1", "lora"], method="fisher")
    # the agent itself is untouched
    agent.verify()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--agent full --dataset data.jsonl",
            "agent full@v1 has a Fisher already: remove registry/fisher/full/v000001",
        ),
        ("--agent none --dataset data.jsonl", "no agent 'none' in"),
        ("--agent full --dataset columns.jsonl", "columns.jsonl has columns ['question'], not prompt and completion"),
        ("--agent full", "no --dataset was given"),
    ],
)
def test_mistakes_get_one_clear_line(folder, capsys, words, message):
    (folder / "columns.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(SystemExit) as stop:
        run_here(folder, f"--registry registry --cpu {words}")
    assert stop.value.code == 2
    assert message in next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


def test_where_no_agent_has_fisher_information_the_plain_mean_is_left():
    fisher, base = METHODS["fisher"], torch.zeros(4)
    updates = [TileUpdate(0, torch.ones(4), torch.ones(4)), TileUpdate(1, base + 3.0, base + 3.0)]
    context = context_of(fisher, [1.0, 1.0])
    rows = [torch.tensor([0.0, 0.0, 2e-20, 1e38]), torch.tensor([0.0, 1e-5, 1e-20, 3e38])]
    merged = fisher.merge_tile(base, updates, dataclasses.replace(context, fishers=rows))
    torch.testing.assert_close(merged, torch.tensor([2.0, 3.0, (2 + 3) / 3, (1 + 9) / 4]))
