"""Evaluation by lm-evaluation-harness: tasks of our own, offline, on a tiny model."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from models import tokenizer as make_tokenizer
from training import run_shell
from transformers import AutoModelForCausalLM

from ram_trl.distributed import SINGLE
from ram_trl.errors import ConfigError
from ram_trl.evaluating.benchmark import BenchmarkEvaluation
from ram_trl.evaluating.evaluate import evaluate_models
from ram_trl.evaluating.tasks import BenchmarkTask


pytest.importorskip("lm_eval", reason="the extra ram_trl[eval] is not installed")

ROOT = Path(__file__).parent.parent
QUESTIONS = [{"question": f"{'ab'[i % 2]}{i}=", "label": i % 2} for i in range(15)]
CHOICES = ["a", "b"]


@pytest.fixture(scope="module")
def include_path(tmp_path_factory):
    """A task of choices, and one of generation, as a user's directory of YAML files."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    common = {**data, "test_split": "test", "doc_to_text": "{{question}}"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": CHOICES, "doc_to_target": "label"}
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    (folder / "choice.yaml").write_text(
        json.dumps({"task": "toy_choice", **common, **choice, "metric_list": [metric]})
    )
    generation = {"until": ["."], "max_gen_toks": 4, "do_sample": False}
    write = {"output_type": "generate_until", "doc_to_target": "===", "generation_kwargs": generation}
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    (folder / "write.yaml").write_text(json.dumps({"task": "toy_write", **common, **write, "metric_list": [metric]}))
    return str(folder)


@pytest.fixture(scope="module")
def registry(zoo):
    base = zoo.base("qwen2_tied")
    return zoo.registry(base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["code", "math"])})


def right_choices(model):
    """1 for every question whose right choice is the likelier one, by a forward pass of its own."""
    tokenizer, scores = make_tokenizer(), []
    for row in QUESTIONS:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(row["question"])["input_ids"]])).logits[0, -1]
        likelihoods = [logits[tokenizer(choice)["input_ids"][0]].item() for choice in CHOICES]
        scores.append(float(likelihoods.index(max(likelihoods)) == row["label"]))
    return scores


def test_rows_of_a_benchmark(registry, zoo, include_path, tmp_path):
    tasks = [
        BenchmarkTask(
            name="choice",
            benchmark="toy_choice",
            include_path=include_path,
            agent="math",
            apply_chat_template=False,
            num_fewshot=0,
        ),
        BenchmarkTask(name="write", benchmark="toy_write", include_path=include_path, limit=5),
    ]
    options = {"agents": ["math"], "merges": {"ram_plus": {"agents": ["code", "math"]}}, "dtype": "float32"}
    content = evaluate_models(registry, tasks, str(tmp_path / "out"), **options)
    base = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_tied"), dtype=torch.float32)
    expected = right_choices(base)
    kept = json.loads((tmp_path / "out" / "results" / "base" / "choice.json").read_text())
    assert kept["metrics"]["acc,none"]["scores"] == expected
    cell = content["rows"]["base"]["tasks"]["choice"]["metrics"]["acc,none"]
    mean = sum(expected) / 15
    assert cell["value"] == pytest.approx(mean) and cell["n"] == 15
    # the harness's own standard error
    assert cell["stderr"] == pytest.approx((mean * (1 - mean) / 14) ** 0.5)
    assert content["tasks"]["write"]["metric"] == "exact_match,none"
    assert content["rows"]["base"]["tasks"]["write"]["metrics"]["exact_match,none"]["n"] == 5
    [gain] = content["retained_gain"]
    assert (gain["row"], gain["agent"], gain["task"]) == ("ram_plus", "math@v1", "choice")
    # an agent in the memory of the base is that agent
    kept = json.loads((tmp_path / "out" / "results" / "math@v1" / "choice.json").read_text())
    agent = AutoModelForCausalLM.from_pretrained(zoo.agent(zoo.base("qwen2_tied"), 1, scale=0.2), dtype=torch.float32)
    assert kept["metrics"]["acc,none"]["scores"] == right_choices(agent)


def test_two_processes(registry, zoo, include_path, tmp_path):
    task = {"benchmark": "toy_choice", "include_path": include_path, "apply_chat_template": False}
    (tmp_path / "tasks.yaml").write_text(json.dumps({"choice": task}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    command += [ROOT / "recipes" / "evaluate.py", "--registry", registry.path, "--tasks", tmp_path / "tasks.yaml"]
    command += ["--agents", "math", "--dtype", "float32", "--output_dir", tmp_path / "out"]
    result = run_shell(shlex.join(map(str, command)), env={"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    base = zoo.base("qwen2_tied")
    for row, path in (("base", base), ("math@v1", zoo.agent(base, 1, scale=0.2))):
        expected = right_choices(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        folder = tmp_path / "out" / "results" / row
        assert json.loads((folder / "choice.json").read_text())["metrics"]["acc,none"]["scores"] == expected
        # each question was asked once
        asked = [json.loads(line)["prompt"] for line in (folder / "choice.completions.jsonl").read_text().splitlines()]
        assert len(asked) == len(set(asked)) == 15


def test_what_the_harness_does_not_know(include_path, zoo):
    with pytest.raises(ConfigError, match="task choice: include_path='/nowhere' is not a directory"):
        BenchmarkEvaluation(BenchmarkTask(name="choice", benchmark="toy_choice", include_path="/nowhere"), 0)
    task = BenchmarkTask(name="choice", benchmark="toy_choice", include_path=include_path, metric="elo", limit=2)
    model = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_tied"))
    with pytest.raises(ConfigError, match="metric 'elo' is none of acc,none"):
        BenchmarkEvaluation(task, 0).run(model, make_tokenizer(), 4, SINGLE)
