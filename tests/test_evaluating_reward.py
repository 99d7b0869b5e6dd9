"""Evaluation by reward: what is generated, what functions get and give, processes, resuming, the recipes."""

import importlib.util
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import tokenizer as make_tokenizer
from run_evaluating import Judge, result_of
from training import run_shell
from transformers import AutoModelForCausalLM

from ram_trl import merge_agents, restore_agent
from ram_trl.distributed import SINGLE
from ram_trl.errors import ConfigError, NonFiniteError, OutputExistsError
from ram_trl.evaluating.evaluate import evaluate_models
from ram_trl.evaluating.generation import TransformersGenerator, sample_seed
from ram_trl.evaluating.report import format_evaluation
from ram_trl.evaluating.reward import RewardEvaluation
from ram_trl.evaluating.rows import make_merge_rows, make_rows
from ram_trl.evaluating.store import Store
from ram_trl.evaluating.tasks import RewardTask, read_tasks


ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}


@pytest.fixture(scope="module")
def registry(zoo):
    # agents that answer otherwise than the base
    base = zoo.base("qwen2_tied")
    return zoo.registry(base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["code", "math"])})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Datasets: text of many lengths, and messages."""
    folder = tmp_path_factory.mktemp("data")
    texts = [{"prompt": "ab3"[i % 3] * (1 + i * 5 % 13) + f"{i}=", "answer": str(i)} for i in range(23)]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in texts]
    stories = [{"prompt": row["prompt"], "completion": f"{row['answer']}xyz"} for row in texts]
    for name, rows in (("texts", texts), ("chats", chats), ("stories", stories), ("empty", [])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "no_prompt.jsonl").write_text('{"question": "a"}\n')
    (folder / "numbers.jsonl").write_text('{"prompt": 3}\n')
    (folder / "answered.jsonl").write_text('{"prompt": "a", "completions": "b"}\n')
    return folder


@pytest.fixture(scope="module")
def model(zoo):
    return AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_tied"), dtype=torch.float32)


def make_task(folder, dataset="texts", functions=("letters",), **options):
    functions = [f"run_evaluating:{function}" for function in functions]
    options = {"name": "math", "max_new_tokens": 8, **options}
    return RewardTask(dataset=str(folder / f"{dataset}.jsonl"), reward_funcs=functions, **options)


def evaluate(task, model, batch_size=4, seed=0):
    """Scores by metric, and records, of a model as it is."""
    generator = TransformersGenerator(model, make_tokenizer(), batch_size)
    metrics, records = RewardEvaluation(task, seed).run(generator, SINGLE, None)
    return {name: measured.scores for name, measured in metrics.items()}, records


@pytest.mark.parametrize("dataset", ["texts", "chats"])
def test_greedy_completions_are_those_of_generate_alone(folder, model, dataset):
    task, tokenizer = make_task(folder, dataset), make_tokenizer()
    scores, records = evaluate(task, model)
    rows = [json.loads(line) for line in (folder / f"{dataset}.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in records] == [row["prompt"] for row in rows]
    for record, score in zip(records, scores["reward"], strict=True):
        text = record["prompt"]
        if dataset == "chats":
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert record["completion"] == expected
        assert score == sum(c < "i" for c in expected) / 8


def test_several_functions_are_weighed_as_trl_does(folder, model):
    task = make_task(folder, functions=["letters", "digits"], reward_weights=[2.0, 0.25])
    scores, records = evaluate(task, model)
    letters, digits = scores["run_evaluating:letters"], scores["run_evaluating:digits"]
    assert [value is None for value in digits] == [i % 2 == 1 for i in range(23)]
    expected = [2 * one + (0 if other is None else 0.25 * other) for one, other in zip(letters, digits, strict=True)]
    assert scores["reward"] == pytest.approx(expected)
    assert records[1]["rewards"] == {"run_evaluating:letters": letters[1], "run_evaluating:digits": None}


def test_samples_depend_on_their_prompt_and_seed_alone(folder, model):
    task = make_task(folder, temperature=1.0, num_samples=3)
    by_batch = [evaluate(task, model, batch_size)[1] for batch_size in (1, 7, 64)]
    assert by_batch[0] == by_batch[1] == by_batch[2]
    texts = [record["completion"] for record in by_batch[0]]
    assert len(texts) == 69 and len(set(texts[:3])) > 1
    assert [record["completion"] for record in evaluate(task, model, seed=1)[1]] != texts
    # a prompt keeps its samples whatever other prompts there are
    fewer = evaluate(make_task(folder, temperature=1.0, num_samples=3, limit=5), model)[1]
    assert fewer == by_batch[0][:15]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"temperature": 1.5, "top_k": 4}, {"temperature": 1.0, "top_p": 0.3}]
)
def test_samples_have_the_distribution_of_the_model(folder, model, options):
    task = make_task(folder, max_new_tokens=1, **options)
    prompt, count = make_tokenizer()("ab1=")["input_ids"], 4000
    seeds = [sample_seed(0, "math", 0, sample) for sample in range(count)]
    generator = TransformersGenerator(model, make_tokenizer(), count)
    drawn = torch.tensor(generator.generate([prompt] * count, seeds, task)).view(-1)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1] / options["temperature"]
    probabilities, order = logits.softmax(-1).sort(descending=True)
    # the smallest set that reaches top_p, the top_k most probable ones
    kept = (probabilities.cumsum(0) - probabilities < options.get("top_p", 1.0)) & (
        torch.arange(64) < options.get("top_k", 64)
    )
    expected = torch.zeros(64).scatter(0, order, probabilities * kept / (probabilities * kept).sum())
    observed = drawn.bincount(minlength=64) / count
    assert (observed[expected == 0] == 0).all()
    assert ((observed - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_functions_may_be_coroutines(folder, model):
    assert evaluate(make_task(folder, functions=["later"]), model)[0] == evaluate(make_task(folder), model)[0]


def test_all_batches_and_rows_have_one_event_loop(folder, model):
    for _ in range(2):
        scores, _ = evaluate(make_task(folder, functions=["judge"]), model)
        assert scores == evaluate(make_task(folder), model)[0]


def test_coroutines_of_a_batch_run_together(folder, model):
    scores, _ = evaluate(make_task(folder, functions=["waits", "tells"], limit=2), model)
    assert scores["run_evaluating:waits"] == scores["run_evaluating:tells"]


def test_a_function_is_known_by_its_files(folder, tmp_path, monkeypatch):
    import run_evaluating

    def fingerprint(*functions):
        return RewardEvaluation(make_task(folder, functions=functions), 0).fingerprint

    # a callable object and a partial function, which other processes have elsewhere in memory
    before = fingerprint("judge", "twice")
    monkeypatch.setattr(run_evaluating, "judge", Judge())
    assert fingerprint("judge", "twice") == before
    monkeypatch.syspath_prepend(tmp_path)
    source = "from functools import partial\ndef one(completions, **kwargs): return [1.0]\nscore = partial(one)\n"
    task = RewardTask(name="a", dataset=str(folder / "texts.jsonl"), reward_funcs=["my_rewards:score"])
    (tmp_path / "my_rewards.py").write_text(source)
    before = RewardEvaluation(task, 0).fingerprint
    assert RewardEvaluation(task, 0).fingerprint == before
    # Python has imported the one and does not import the other
    (tmp_path / "my_rewards.py").write_text(source.replace("1.0", "2.0"))
    with pytest.raises(ConfigError, match=r"my_rewards.py changed after it was imported.*start a new process"):
        RewardEvaluation(task, 0)
    # as in a new process
    monkeypatch.setattr("ram_trl.evaluating.reward._digests", {})
    assert RewardEvaluation(task, 0).fingerprint != before


def test_two_commands_do_not_write_to_one_directory(tmp_path):
    store = Store(tmp_path / "evaluation", {})
    (tmp_path / "evaluation" / "results").mkdir(parents=True)
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(1); input()"
    command = [sys.executable, "-c", hold, str(tmp_path / "evaluation" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        with pytest.raises(OutputExistsError, match=r"another command writes to .*choose another --output_dir"):
            store.open()
        other.communicate("\n")
    store.open()
    Store(tmp_path / "evaluation", {}).open()


def test_a_prompt_that_the_model_cannot_read_is_refused(folder, model):
    # the longest prompt has 16 tokens, the model 64 positions
    assert len(evaluate(make_task(folder, max_new_tokens=48, limit=8), model)[1]) == 8
    with pytest.raises(
        ConfigError, match=r"prompt of \d+ tokens and max_new_tokens=64 .* than the 64 .*lower max_new"
    ):
        evaluate(make_task(folder, max_new_tokens=64), model)


def test_a_lack_of_memory_names_the_cure(folder, model):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    hook = model.register_forward_pre_hook(refuse)
    try:
        with pytest.raises(ConfigError, match=r"lower --batch_size \(4\)"):
            evaluate(make_task(folder), model)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "function, words",
    [
        ("nan", "run_evaluating:nan gave nan for the prompt .*give None"),
        ("short", "gave 1 rewards for 4 completions"),
        ("words", "run_evaluating:words failed: ValueError: could not convert"),
        ("raises", "run_evaluating:raises failed: RuntimeError: no connection to the judge"),
        ("huge", "run_evaluating:huge gave 1e\\+200 for the prompt"),
        ("by_name", "run_evaluating:by_name failed: TypeError: it gave a dict, not a list of rewards"),
        ("leaves", "run_evaluating:leaves failed: SystemExit: 0"),
        ("takes_away", "gave 3 rewards for 4 completions"),
        ("absent", "cannot be imported|can be imported"),
    ],
)
def test_what_a_function_must_not_do(folder, model, function, words):
    with pytest.raises(ConfigError, match=f"task math: .*{words}") as caught:
        evaluate(make_task(folder, functions=[function]), model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "dataset, words",
    [
        ("empty", "cannot be loaded|has no examples"),
        ("no_prompt", "has no column 'prompt', only question"),
        ("numbers", "neither text nor messages"),
        ("answered", "has a column 'completions'"),
        ("absent", "cannot be loaded"),
    ],
)
def test_what_a_dataset_must_not_be(folder, model, dataset, words):
    with pytest.raises(ConfigError, match=f"task math: .*({words})"):
        evaluate(make_task(folder, dataset), model)


def test_datasets_of_other_forms(folder, model, tmp_path):
    from datasets import Dataset, DatasetDict

    expected = evaluate(make_task(folder), model)
    rows = Dataset.from_json(str(folder / "texts.jsonl"))
    rows.to_parquet(tmp_path / "texts.parquet")
    rows.save_to_disk(tmp_path / "saved")
    DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    shutil.copy(folder / "texts.jsonl", tmp_path / "plain" / "test.jsonl")
    for name in ("texts.parquet", "saved", "splits", "plain"):
        options = {"name": "math", "max_new_tokens": 8, "reward_funcs": ["run_evaluating:letters"]}
        assert evaluate(RewardTask(dataset=str(tmp_path / name), **options), model) == expected, name


def test_the_prompts_and_the_reward_of_the_quickstart(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import toy_tasks

    torch.manual_seed(0)
    tokenizer = toy_tasks.build_tokenizer()
    model = toy_tasks.build_model(tokenizer).eval()
    rows = toy_tasks.prompts_with_answers("sort", 60, 0, held_out=True)
    # what the untrained model says, in one batch, is the right answer of every third prompt
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    output = model.generate(**inputs, max_new_tokens=toy_tasks.max_answer_tokens(), do_sample=False)
    said = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    for number in range(0, 60, 3):
        rows[number]["answer"] = said[number]
    (tmp_path / "sort.json").write_text(json.dumps(rows))
    task = RewardTask(
        name="sort",
        dataset=str(tmp_path / "sort.json"),
        reward_funcs=["toy_tasks:exact_match_reward"],
        max_new_tokens=toy_tasks.max_answer_tokens(),
    )
    metrics, _ = RewardEvaluation(task, 0).run(TransformersGenerator(model, tokenizer, 7), SINGLE, None)
    assert metrics["reward"].scores == [1.0, 0.0, 0.0] * 20


def without_times(content):
    """An evaluation without what differs from run to run."""
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key != "seconds"}
    return content


def read(path):
    return without_times(json.loads(path.read_text()))


def test_rows_in_one_model_are_the_models_on_disk(folder, registry, zoo, tmp_path):
    merge_agents(registry, str(tmp_path / "average"), method="average")
    restore_agent(registry, "math", str(tmp_path / "math"))
    task = make_task(folder, agent="math")
    content = evaluate_models(
        registry,
        [task],
        str(tmp_path / "out"),
        merges={"ram_plus": {}, "half": {"agents": ["math"], "weights": {"math": 0.5}}},
        merged=[str(tmp_path / "average")],
        dtype="float32",
        batch_size=4,
    )
    assert list(content["rows"]) == ["base", "code@v1", "math@v1", "ram_plus", "half", "average"]
    for row, path in (
        ("base", zoo.base("qwen2_tied")),
        ("math@v1", tmp_path / "math"),
        ("average", tmp_path / "average"),
    ):
        scores, _ = evaluate(task, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        _, kept = result_of(tmp_path / "out", row, "math")
        assert kept["metrics"]["reward"]["scores"] == scores["reward"], row
    assert [gain["row"] for gain in content["retained_gain"]] == ["ram_plus", "half", "average"]
    values = {name: row["tasks"]["math"]["metrics"]["reward"]["value"] for name, row in content["rows"].items()}
    assert len(set(values.values())) > 3
    gain = content["retained_gain"][0]["value"]
    assert gain == pytest.approx((values["ram_plus"] - values["base"]) / (values["math@v1"] - values["base"]))


def test_rows_as_directories_are_the_rows_in_memory(registry, tmp_path):
    # what vLLM is given, which was not run
    merge_agents(registry, str(tmp_path / "merged"))
    rows, base = make_rows(registry, None, [str(tmp_path / "merged")], None)
    rows += make_merge_rows(registry, ["code", "math"], {"average": {"method": "average"}}, None)
    assert [row.name for row in rows] == ["base", "code@v1", "math@v1", "merged", "average"]
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype="auto")
    for row in rows:
        written = AutoModelForCausalLM.from_pretrained(row.write(tmp_path / row.name), dtype="auto").state_dict()
        with row.apply(model):
            assert all(torch.equal(tensor, written[name]) for name, tensor in model.state_dict().items()), row.name


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_is_refused_where_it_is_not_installed(folder, registry, tmp_path):
    with pytest.raises(ConfigError, match="vLLM cannot be imported"):
        evaluate_models(registry, [make_task(folder)], str(tmp_path / "out"), backend="vllm")


def test_what_is_finished_is_kept_until_something_changes(folder, registry, zoo, tmp_path):
    data, base = shutil.copytree(folder, tmp_path / "data"), shutil.copytree(zoo.base("qwen2_tied"), tmp_path / "base")

    def run(options=None, **task):
        options = {"agents": ["math"], "base_model": str(base), **(options or {})}
        task = make_task(data, **{"limit": 4, **task})
        return without_times(evaluate_models(registry, [task], str(tmp_path / "out"), **options))

    def times():
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/results/*.json")}

    first, before = run(), times()
    assert len(before) == 2 and run() == first and times() == before
    # whose task it is says nothing of what was measured
    assert [gain["task"] for gain in run({"merges": {"ram_plus": {}}}, agent="math")["retained_gain"]] == ["math"]
    assert len(times()) == 3 and {path: time for path, time in times().items() if path in before} == before
    # what is damaged is measured again
    next(iter(before)).write_text("{")
    assert run() == first
    assert sum(times()[path] != time for path, time in before.items()) == 1

    def change_prompts():
        (data / "texts.jsonl").write_text((data / "texts.jsonl").read_text().replace("a", "b"))

    def change_template():
        (base / "chat_template.jinja").write_text("{{ messages }}")

    # and everything where an answer could be another; what was measured before is kept
    for number, (options, change) in enumerate(
        [({"seed": 1}, None), ({"batch_size": 2}, None), ({}, change_prompts), ({}, change_template)], start=1
    ):
        if change:
            change()
        before = times()
        run(options)
        assert len(times()) == 3 + 2 * number and {path: times()[path] for path in before} == before


def test_options_that_cannot_be(folder, registry, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    task = make_task(folder)
    with pytest.raises(OutputExistsError, match="not an evaluation"):
        evaluate_models(registry, [task], str(tmp_path / "full"))
    for options, words in (
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"backend": "sglang"}, "backend='sglang'"),
        ({"backend": "vllm", "device_map": "auto"}, "without device_map"),
        ({"merged": [str(tmp_path / "m"), str(tmp_path / "m")]}, "neither a directory nor a Hub id"),
        ({"merges": {"base": {}}}, "'base' would be evaluated twice"),
    ):
        with pytest.raises((ConfigError, ValueError), match=words):
            evaluate_models(registry, [task], str(tmp_path / "out"), **options)
    with pytest.raises(ConfigError, match="belongs to agent 'poet'"):
        evaluate_models(registry, [make_task(folder, agent="poet")], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def write_tasks(tmp_path, folder, functions="letters", **more):
    options = {"agent": "math", "dataset": str(folder / "texts.jsonl"), "max_new_tokens": 8, **more}
    options["reward_funcs"] = [f"run_evaluating:{functions}"]
    # JSON is YAML
    (tmp_path / "tasks.yaml").write_text(json.dumps({"math": options}))
    return str(tmp_path / "tasks.yaml")


def run_recipe(recipe, monkeypatch, *arguments):
    """Run a recipe in this process, which has the libraries already; its exit code."""
    monkeypatch.setattr(sys, "argv", [recipe, *map(str, arguments)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runpy.run_path(str(RECIPES / recipe), run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


def launch(processes, *arguments, **environment):
    """Run recipes/evaluate.py as a user does."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", processes]
        command += ["--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--main_process_port", 20000 + os.getpid() % 20000]
    command += [RECIPES / "evaluate.py", *arguments]
    return run_shell(shlex.join(map(str, command)), env={**ENVIRONMENT, **environment})


def test_one_and_two_processes_and_a_killed_one(folder, registry, tmp_path):
    tasks = write_tasks(tmp_path, folder, "letters_until_killed")
    with_stories = json.loads(Path(tasks).read_text()) | {"stories": {"perplexity": str(folder / "stories.jsonl")}}
    Path(tasks).write_text(json.dumps(with_stories))
    arguments = ["--registry", registry.path, "--tasks", tasks, "--method", "ram_plus", "average", "--batch_size", 4]
    merges = {method: {"method": method} for method in ("ram_plus", "average")}

    def here(name):
        return evaluate_models(registry, read_tasks(tasks), str(tmp_path / name), merges=merges, batch_size=4)

    one = here("one")
    two = launch(2, *arguments, "--output_dir", tmp_path / "two")
    assert two.returncode == 0, two.stderr
    assert format_evaluation(one) in two.stdout
    assert read(tmp_path / "two" / "evaluation.json") == without_times(one)
    names = [cell["completions"] for row in one["rows"].values() for cell in row["tasks"].values()]
    for name in ("evaluation.md", *names):
        assert (tmp_path / "two" / name).read_text() == (tmp_path / "one" / name).read_text()
    # six batches a row: killed in the third row
    dead = launch(1, *arguments, "--output_dir", tmp_path / "dead", KILL_AT_CALL="15")
    # of the process, or of the shell that ran it
    assert dead.returncode in (-9, 137)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("dead/results/*.json")}
    assert sorted(json.loads(path.read_text())["row"] for path in kept) == ["base", "base", "code@v1", "code@v1"]
    # what is finished can be read already
    assert list(read(tmp_path / "dead" / "evaluation.json")["rows"]) == ["base", "code@v1"]
    assert without_times(here("dead")) == without_times(one)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_function_that_fails_on_one_process_ends_them_all(folder, registry, tmp_path):
    tasks = write_tasks(tmp_path, folder, "raises_on_rank_1")
    result = launch(2, "--registry", registry.path, "--tasks", tasks, "--output_dir", tmp_path / "out")
    assert result.returncode != 0
    assert "reward function run_evaluating:raises_on_rank_1 failed: RuntimeError: no connection" in result.stderr
    assert "(rank 1)" in result.stderr


def test_merging_evaluates_what_it_published(folder, registry, tmp_path, monkeypatch, capsys):
    tasks = write_tasks(tmp_path, folder)
    arguments = ["--registry", registry.path, "--agents", "math", "code", "--eval", tasks]
    assert run_recipe("merge.py", monkeypatch, *arguments, "--output_dir", tmp_path / "merged") == 0
    assert f"evaluation: {tmp_path}/merged-evaluation" in capsys.readouterr().out
    content = json.loads((tmp_path / "merged-evaluation" / "evaluation.json").read_text())
    assert list(content["rows"]) == ["base", "math@v1", "code@v1", "merged"]


def test_a_failed_evaluation_leaves_the_merge_and_says_how_to_go_on(folder, registry, tmp_path, monkeypatch, capsys):
    tasks = write_tasks(tmp_path, folder, "raises")
    copied = shutil.copytree(registry.path, tmp_path / "registry")
    arguments = ["--registry", copied, "--merge_to", "all", "--eval", tasks]
    assert run_recipe("merge.py", monkeypatch, *arguments, "--eval_output_dir", tmp_path / "evaluation") == 3
    printed = capsys.readouterr()
    assert "promoted" in printed.out and "was not evaluated: task math: reward function" in printed.err
    [command] = [line.strip() for line in printed.err.splitlines() if "recipes/evaluate.py" in line]
    words = shlex.split(command)
    assert words[:3] == ["accelerate", "launch", "recipes/evaluate.py"]
    write_tasks(tmp_path, folder)
    assert run_recipe("evaluate.py", monkeypatch, *words[3:]) == 0
    content = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert list(content["rows"]) == ["base", "code@v1", "math@v1", "all@v1"]


def test_what_was_measured_is_shown_where_the_merged_model_cannot_be(folder, registry, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise NonFiniteError("NaN in 'lm_head.weight'")

    monkeypatch.setattr("ram_trl.evaluating.rows.apply_directory", refuse)
    arguments = ["--registry", registry.path, "--eval", write_tasks(tmp_path, folder)]
    assert run_recipe("merge.py", monkeypatch, *arguments, "--output_dir", tmp_path / "merged") == 3
    printed = capsys.readouterr()
    assert "\nmath@v1  " in printed.out and f"evaluation: {tmp_path}/merged-evaluation" in printed.out
    assert "the merged model was not evaluated: NaN in 'lm_head.weight'; try again" in printed.err


@pytest.mark.parametrize(
    "text, words",
    [
        ("math: {reward_funcs: [a:b]}", "dataset is missing"),
        ("math: {dataset: p.jsonl, reward_funcs: [no_module:b]}", "math: reward_funcs: 'no_module:b' is not"),
    ],
)
def test_a_mistake_in_the_tasks_is_found_before_the_merge(registry, tmp_path, monkeypatch, capsys, text, words):
    (tmp_path / "tasks.yaml").write_text(text)
    arguments = ["--registry", registry.path, "--eval", tmp_path / "tasks.yaml"]
    assert run_recipe("merge.py", monkeypatch, *arguments, "--output_dir", tmp_path / "merged") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_an_unforeseen_error_is_told_with_its_class_and_place(folder, registry, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise KeyError("x")

    monkeypatch.setattr("ram_trl.evaluating.evaluate.evaluate_models", fail)
    arguments = ["--registry", registry.path, "--eval", write_tasks(tmp_path, folder)]
    assert run_recipe("merge.py", monkeypatch, *arguments, "--output_dir", tmp_path / "merged") == 3
    printed = capsys.readouterr().err
    assert "was not evaluated: KeyError: 'x'; try again" in printed and "in fail" in printed
