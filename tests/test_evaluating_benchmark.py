"""Evaluation by lm-evaluation-harness: tasks of our own, offline, on a tiny model."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from models import tokenizer as make_tokenizer
from run_evaluating import result_of
from training import run_shell
from transformers import AutoModelForCausalLM

from ram_trl.distributed import SINGLE
from ram_trl.errors import ConfigError
from ram_trl.evaluating import benchmark
from ram_trl.evaluating.benchmark import BenchmarkEvaluation
from ram_trl.evaluating.evaluate import evaluate_models
from ram_trl.evaluating.tasks import BenchmarkTask


pytest.importorskip("lm_eval", reason="the extra ram_trl[eval] is not installed")

ROOT = Path(__file__).parent.parent
QUESTIONS = [{"question": f"{'ab'[i % 2]}{i}=", "label": i % 2} for i in range(15)]
CHOICES = ["a", "b"]
FUNCTIONS = """
def parsed(doc, results):
    is_even = int(doc["question"][1:-1]) % 2 == 0
    return {"broken": 0.0, **({"parsed": 1.0} if is_even else {})}


def infinite(values):
    return float("inf")
"""
# YAML with tags that JSON has not
PARSED = """{
task: toy_parsed,
process_results: !function utils.parsed,
metric_list: [
    {metric: parsed, aggregation: mean, higher_is_better: true},
    {metric: broken, aggregation: !function utils.infinite, higher_is_better: false},
],
"""


def test_files_that_no_task_is_of_are_not_read(tmp_path):
    for name in ("utils.py", "tasks/utils.py", ".venv/lib/torch.py", "tasks/.git/hook.py", "tasks/data.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert list(benchmark._own_files(str(tmp_path))) == ["tasks/utils.py", "utils.py"]
    assert benchmark._own_files(None) == {}


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
    # of a tag and of a group, which have no score, and one whose data is not there
    tagged = {"task": "toy_tagged", "tag": "toy_tag", **common, **choice, "metric_list": [metric]}
    (folder / "tagged.yaml").write_text(json.dumps(tagged))
    (folder / "group.yaml").write_text(json.dumps({"group": "toy_group", "task": ["toy_choice", "toy_write"]}))
    absent = {**tagged, "task": "toy_absent", "dataset_kwargs": {"data_files": {"test": str(folder / "absent.jsonl")}}}
    (folder / "absent.yaml").write_text(json.dumps({key: value for key, value in absent.items() if key != "tag"}))
    # one with functions of its own, which gives some questions no score
    (folder / "utils.py").write_text(FUNCTIONS)
    (folder / "parsed.yaml").write_text(PARSED + json.dumps({**common, **write})[1:])
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
    _, kept = result_of(tmp_path / "out", "base", "choice")
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
    _, kept = result_of(tmp_path / "out", "math@v1", "choice")
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
        path, kept = result_of(tmp_path / "out", row, "choice")
        assert kept["metrics"]["acc,none"]["scores"] == expected
        # each question was asked once
        lines = path.with_suffix(".completions.jsonl").read_text().splitlines()
        asked = [json.loads(line)["prompt"] for line in lines]
        assert len(asked) == len(set(asked)) == 15


def test_what_the_harness_does_not_know():
    with pytest.raises(ConfigError, match="task choice: include_path='/nowhere' is not a directory"):
        BenchmarkEvaluation(BenchmarkTask(name="choice", benchmark="toy_choice", include_path="/nowhere"), 0)


def test_what_is_read_of_a_benchmark_is_known(include_path, tmp_path):
    folder = Path(shutil.copytree(include_path, tmp_path / "tasks"))
    task = BenchmarkTask(name="choice", benchmark="toy_choice", include_path=str(folder))

    def fingerprint():
        # as a later process sees the files
        benchmark._index.cache_clear()
        return BenchmarkEvaluation(task, 0).fingerprint

    def edit(name, old, new):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    before = fingerprint()
    assert fingerprint() == before
    for name, old, new in (
        ("choice.yaml", "{{question}}", "Q: {{question}}"),
        ("questions.jsonl", "a0=", "c0="),
        ("utils.py", "1.0", "0.5"),
    ):
        if name == "choice.yaml":
            # the copy has a file of its own
            edit(name, str(Path(include_path) / "questions.jsonl"), str(folder / "questions.jsonl"))
            before = fingerprint()
        edit(name, old, new)
        assert fingerprint() != before, name
        before = fingerprint()


def test_questions_without_a_score_keep_their_place(include_path, zoo):
    model = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_tied"))
    task = BenchmarkTask(name="parsed", benchmark="toy_parsed", include_path=include_path)
    measured, _ = BenchmarkEvaluation(task, 0).run(model, make_tokenizer(), 4, SINGLE)
    # the task scores questions of an even number alone
    assert measured["parsed,none"].scores == [1.0 if i % 2 == 0 else None for i in range(15)]
    assert measured["parsed,none"].n == 8 and measured["parsed,none"].higher_is_better
    # a metric that came out infinite is one without a value
    assert measured["broken,none"].mean is None and not measured["broken,none"].higher_is_better


def test_a_wrong_metric_costs_no_second_evaluation(registry, include_path, tmp_path):
    options = {"name": "choice", "benchmark": "toy_choice", "include_path": include_path, "limit": 2}

    def run(metric):
        return evaluate_models(registry, [BenchmarkTask(metric=metric, **options)], str(tmp_path), agents=["math"])

    with pytest.raises(ConfigError, match="task choice: metric 'elo' is none of acc,none"):
        run("elo")
    path, _ = result_of(tmp_path, "base", "choice")
    before = path.stat().st_mtime_ns
    assert list(run("acc")["rows"]) == ["base", "math@v1"] and path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "name, words",
    [
        ("toy_tag", "'toy_tag' is a tag of lm-evaluation-harness"),
        ("toy_group", "'toy_group' is a group without a score of its own.*toy_choice, toy_write"),
        ("toy_absent", "lm-evaluation-harness failed: .*absent.jsonl"),
    ],
)
def test_what_has_no_score_is_refused_at_once(include_path, name, words):
    with pytest.raises(ConfigError, match=f"task choice: .*{words}"):
        BenchmarkEvaluation(BenchmarkTask(name="choice", benchmark=name, include_path=include_path), 0)
