"""Fisher information: estimated by the recipe in real processes, kept beside the agents, and merged by."""

import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from models import change_tensor, copy_model, read_model, tokenizer
from safetensors.torch import load_file, save_file
from test_merge import full_delta, lora_delta, merged
from tiles import context_of
from training import run_shell
from transformers import AutoModelForCausalLM, AutoTokenizer

from ram_trl import AgentRegistry, merge_agents, register_agent, restore_agent
from ram_trl.arithmetic.methods import METHODS
from ram_trl.arithmetic.ram import TileUpdate
from ram_trl.distributed import SINGLE
from ram_trl.errors import ConfigError, CorruptedFileError, NonFiniteError
from ram_trl.evaluating.fisher import IGNORED, estimate_fisher, read_examples
from ram_trl.lifecycle.gc import collect_garbage
from ram_trl.merging.plan import MergeSettings, plan_merge
from ram_trl.storage.fisher import FisherManifest, FisherStore


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
    own = AutoTokenizer.from_pretrained(zoo.base("qwen2_tied"))
    ids = {row["prompt"]: own(row["prompt"])["input_ids"] for row in ROWS}
    answers = [(ids[row["prompt"]], own(row["completion"])["input_ids"]) for row in ROWS[:4]]
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
    agents, damaged = ["full@v1", "lora"], r"the Fisher of agent full@v1: .* is not the file .*recipes/fisher.py"
    # not by all ranks for themselves, before anything is shown
    plan_merge(AgentRegistry(registry), agents, MergeSettings(method="fisher")).close()
    shown = []
    with pytest.raises(CorruptedFileError, match=damaged):
        merge_agents(
            str(registry), str(tmp_path / "out"), agents=agents, method="fisher", progress=lambda *of: shown.append(of)
        )
    folders = [registry / place / name / "v000001" for place in ("agents", "fisher") for name in ("full", "lora")]
    sizes = [file.stat().st_size for folder in folders for file in folder.iterdir() if file.name != "manifest.json"]
    assert shown and {(stage, total) for stage, _, total in shown} == {("check", sum(sizes))}
    stored.write_bytes(data[:5])
    with pytest.raises(CorruptedFileError, match=r"the Fisher of agent full@v1: .*recipes/fisher.py"):
        merge_agents(str(registry), str(tmp_path / "out"), agents=agents, method="fisher")
    (stored.parent / "manifest.json").write_text("{}")
    with pytest.raises(CorruptedFileError, match="is damaged"):
        merge_agents(str(registry), str(tmp_path / "out"), agents=["full@v1", "lora"], method="fisher")
    # the agent itself is untouched
    agent.verify()
    assert not (tmp_path / "out").exists()


def test_an_agents_fisher_information_is_removed_with_it(folder, tmp_path):
    registry = AgentRegistry(shutil.copytree(folder / "registry", tmp_path / "registry"))
    assert registry.remove("full@v1") == ["full@v1"]
    collect_garbage(registry)
    assert [str(file.relative_to(registry.path)) for file in registry.path.rglob("*.safetensors")] == [
        "agents/lora/v000001/adapter_model.safetensors",
        "fisher/lora/v000001/fisher.safetensors",
    ]
    registry.remove("lora")
    collect_garbage(registry)
    assert not list(registry.path.rglob("*.safetensors"))


def test_what_is_not_finite_is_neither_stored_nor_merged(zoo, folder, tmp_path):
    base = zoo.base("qwen2_untied")
    diverged = copy_model(base, tmp_path / "diverged")
    # finite, but the squares of its gradients are not
    change_tensor(diverged, "model.norm.weight", lambda tensor: torch.full_like(tensor, 3e38))
    registry = AgentRegistry(tmp_path / "registry")
    agent = register_agent(registry, "diverged", str(diverged), base_model=str(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with pytest.raises(NonFiniteError, match="the Fisher of agent diverged@v1 over 1 examples has NaN or infinity in"):
        estimate_fisher(
            registry, agent, model, [([5, 6], [5, 6])], base_model=None, world=SINGLE, add_up=lambda values: values
        )
    assert not (registry.path / "fisher").exists()

    registry = AgentRegistry(shutil.copytree(folder / "registry", tmp_path / "copy"))
    agent = registry.get("full")
    store, path = FisherStore(registry), FisherStore(registry).directory(agent)
    values = load_file(path / "fisher.safetensors")
    values["model.embed_tokens.weight"][3, 3] = torch.nan
    shutil.rmtree(path)
    with store.stage(agent) as staged:
        save_file(values, staged / "fisher.safetensors")
        record = {"examples": 4, "created": "", "ram_trl_version": ""}
        digest = agent.manifest.to_dict()["digest"]
        store.commit(staged, agent, FisherManifest(agent=str(agent), agent_digest=digest, **record))
    message = f"the Fisher of agent full@v1 has NaN or infinity in 'model.embed_tokens.weight': remove {path}"
    with pytest.raises(NonFiniteError, match=message):
        merge_agents(registry, str(tmp_path / "out"), method="fisher")


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_examples_are_read_from_files_of_every_kind(tmp_path, suffix):
    from datasets import Dataset

    data, path = Dataset.from_list(ROWS), str(tmp_path / f"data{suffix}")
    (data.to_parquet if suffix == ".parquet" else data.to_json)(path)
    one = tokenizer()
    examples = read_examples(path, one, 2, 100)
    for row, (tokens, labels) in zip(ROWS, examples, strict=False):
        prompt, answer = (one(row[column])["input_ids"] for column in ("prompt", "completion"))
        assert (tokens, labels) == (prompt + answer, [IGNORED] * len(prompt) + answer)
    assert len(examples) == 2


def test_messages_go_through_the_chat_template(tmp_path):
    row = {
        "prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}],
        "completion": [{"role": "assistant", "content": "2."}],
    }
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    one = tokenizer()
    whole = one.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    assert whole == "s:add=u:1+1==a:2.="
    [(tokens, labels)] = read_examples(str(tmp_path / "chat.jsonl"), one, 9, 100)
    assert one.decode(tokens) == whole
    assert one.decode([label for label in labels if label != IGNORED]) == "a:2.="
    # what the template writes before an answer is no part of it
    one.chat_template += "{% if add_generation_prompt %}a:{% endif %}"
    [(tokens, labels)] = read_examples(str(tmp_path / "chat.jsonl"), one, 9, 100)
    assert one.decode([label for label in labels if label != IGNORED]) == "2.="
    one.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ConfigError, match=r"row 1 of .*chat.jsonl does not fit the chat template.*no system"):
        read_examples(str(tmp_path / "chat.jsonl"), one, 9, 100)
    one.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template: give text"):
        read_examples(str(tmp_path / "chat.jsonl"), one, 9, 100)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", "prompt,completion\n1+1=,2", "data.csv is none of .json, .jsonl, .parquet"),
        ("data.jsonl", '{"text": "a"}\n{"text": \n', "data.jsonl cannot be read: "),
        ("data.jsonl", '{"prompt": "1+1=", "completion": 2}\n', "row 1 of .*data.jsonl is not text, nor both"),
        ("data.jsonl", '{"text": "a"}\n{"text": null}\n', "row 2 of .*data.jsonl is not text: None"),
        ("data.jsonl", '{"prompt": "a", "completion": null}\n', "row 1 of .* is not text, nor both messages"),
        (
            "data.jsonl",
            '{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}\n',
            "row 1 of .* is not text, nor both messages: give both columns in one form",
        ),
    ],
)
def test_data_that_holds_no_examples_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_examples(str(tmp_path / name), tokenizer(), 9, 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--agent full --dataset data.jsonl",
            "agent full@v1 has a Fisher already: remove registry/fisher/full/v000001",
        ),
        ("--agent none --dataset data.jsonl", "no agent 'none' in"),
        ("--agent full --dataset columns.jsonl", "columns.jsonl has columns ['question'], not prompt and completion"),
        ("--agent full --dataset nothing.jsonl", "nothing.jsonl cannot be read: FileNotFoundError"),
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
