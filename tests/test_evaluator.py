"""`Evaluator`: call after call in one model, merges that cannot be made, names that are only labels, what is told."""

import json
import logging
import shutil

import pytest
import torch
from models import read_model
from run_evaluating import result_of
from safetensors.torch import save_file
from test_evaluating_reward import launch, make_task, run_recipe, write_tasks
from transformers import AutoModelForCausalLM

from ram_trl import AgentRegistry, merge_agents
from ram_trl.distributed import SINGLE, World
from ram_trl.errors import ConfigError, OutputExistsError, StorageError
from ram_trl.evaluating import evaluate, rows
from ram_trl.evaluating.evaluate import Evaluator, evaluate_models
from ram_trl.evaluating.rows import make_merge_rows
from ram_trl.storage.fisher import FISHER, FisherManifest, FisherStore


@pytest.fixture(scope="module")
def registry(zoo):
    base = zoo.base("qwen2_tied")
    return zoo.registry(base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["code", "math"])})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": "ab3"[i % 3] * (1 + i % 4) + f"{i}=", "answer": str(i)} for i in range(6)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_two_tasks_of_one_name_and_unknown_options_are_refused(folder, registry, tmp_path):
    with pytest.raises(ConfigError, match="two tasks are named"):
        Evaluator(registry, [make_task(folder), make_task(folder)], str(tmp_path / "out"))
    evaluator = Evaluator(registry, [make_task(folder)], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="merge 'odd' has unknown options densty; known are: agents, alpha"):
        evaluator.run({"odd": {"densty": 0.2}})


def test_a_directory_with_results_of_something_else_is_refused(folder, registry, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.csv").write_text("1,2\n")
    with pytest.raises(OutputExistsError, match="holds something that is not an evaluation"):
        evaluate_models(registry, [make_task(folder)], str(tmp_path))


def test_later_merges_come_to_the_earlier_ones(folder, registry, tmp_path, monkeypatch):
    loads = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **o: loads.append(a) or load(*a, **o))
    measured = []
    evaluator = Evaluator(
        registry,
        [make_task(folder, agent="math")],
        str(tmp_path / "one"),
        progress=lambda doing, done, total: measured.append(doing) if done == total else None,
    )
    first = evaluator.run({"half": {"r": 0.5}})
    assert list(first["rows"]) == ["base", "code@v1", "math@v1", "half"]
    content = evaluator.run({"half": {"r": 0.5}, "average": {"method": "average"}})
    assert [doing.partition(":")[0] for doing in measured] == ["base", "code@v1", "math@v1", "half", "average"]
    assert len(loads) == 1
    assert {name: content["rows"][name] for name in first["rows"]} == first["rows"]
    assert evaluator.run()["rows"] == content["rows"]
    assert json.loads((tmp_path / "one" / "evaluation.json").read_text()) == content
    with pytest.raises(ConfigError, match="merge 'half' was another one before"):
        evaluator.run({"half": {"r": 0.25}})
    # the same as all of them at once
    merges = {"half": {"r": 0.5}, "average": {"method": "average"}}
    other = evaluate_models(registry, [make_task(folder, agent="math")], str(tmp_path / "two"), merges=merges)
    assert other["retained_gain"] == content["retained_gain"]
    assert [row["mean"] for row in other["rows"].values()] == [row["mean"] for row in content["rows"].values()]


def test_every_row_can_be_read_when_it_is_measured(folder, registry, tmp_path):
    seen = []

    def look(doing, done, total):
        path = tmp_path / "out" / "evaluation.json"
        if done == total and path.exists():
            seen.append([doing.partition(":")[0], *json.loads(path.read_text())["rows"]])

    evaluate_models(
        registry, [make_task(folder)], str(tmp_path / "out"), agents=["math"], merges={"m": {}}, progress=look
    )
    assert seen == [["math@v1", "base"], ["m", "base", "math@v1"]]
    assert "| m |" in (tmp_path / "out" / "evaluation.md").read_text()


# every parameter that one agent alone has changed is beyond float16
IMPOSSIBLE = {"r": 1e6, "output_dtype": "float16"}


def test_a_merge_that_cannot_be_made_does_not_stop_the_others(folder, registry, zoo, tmp_path):
    merges = {"broken": IMPOSSIBLE, "average": {"method": "average"}}
    content = evaluate_models(registry, [make_task(folder)], str(tmp_path / "out"), merges=merges)
    assert list(content["rows"]) == ["base", "code@v1", "math@v1", "average"]
    assert list(content["failed"]) == ["broken"] and "\n" not in content["failed"]["broken"]
    assert "- Not measured: broken: " in (tmp_path / "out" / "evaluation.md").read_text()
    # the model was the base again before the next row: its merge is the one of a fresh start
    fresh = evaluate_models(
        registry, [make_task(folder)], str(tmp_path / "fresh"), merges={"average": merges["average"]}
    )
    assert fresh["rows"]["average"]["mean"] == content["rows"]["average"]["mean"] and fresh["failed"] == {}


@pytest.mark.parametrize("error", [StorageError("disk full"), MemoryError("no room")])
def test_what_is_not_of_the_merge_ends_the_evaluation(folder, registry, tmp_path, monkeypatch, error):
    tried = []

    def refuse(*_, **__):
        tried.append(1)
        raise error

    monkeypatch.setattr(rows, "apply_merge", refuse)
    evaluator = Evaluator(registry, [make_task(folder, limit=1)], str(tmp_path / "out"), agents=["math"])
    with pytest.raises(type(error), match=str(error)):
        evaluator.run({"a": {}, "b": {"method": "average"}})
    # what was finished is kept, and nothing is held against the merge
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert len(tried) == 1 and list(content["rows"]) == ["base", "math@v1"] and content["failed"] == {}
    monkeypatch.undo()
    assert list(evaluator.run()["rows"]) == ["base", "math@v1", "a", "b"]


def test_rows_that_are_finished_cost_nothing(folder, registry, tmp_path, monkeypatch):
    gathered, written = [], []

    class Counted(World):
        def gather(self, value):
            gathered.append(value)
            return World.gather(self, value)

    write = evaluate.write_text
    monkeypatch.setattr(evaluate, "write_text", lambda path, text: written.append(path.name) or write(path, text))
    arguments = (registry, [make_task(folder, limit=1)], str(tmp_path / "out"))
    evaluator, costs = Evaluator(*arguments, agents=["math"], world=Counted()), []
    # once for every row that is measured
    for merges, rows_measured in (({}, 2), ({}, 0), ({"a": {}}, 1), ({"b": {"r": 0.5}, "c": {"r": 0.7}}, 2), ({}, 0)):
        gathered.clear()
        written.clear()
        evaluator.run(merges)
        assert written.count("evaluation.json") == written.count("evaluation.md") == rows_measured
        costs += [] if merges or rows_measured else [len(gathered)]
    assert costs[0] == costs[1]
    # and once where all rows are there from before
    written.clear()
    content = Evaluator(*arguments, agents=["math"]).run({"a": {}})
    assert list(content["rows"]) == ["base", "math@v1", "a"] and written.count("evaluation.json") == 1


def test_a_model_that_does_not_fit_names_the_cure(folder, registry, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"out of memory on the device: spread the model .*--device_map auto"):
        evaluate_models(registry, [make_task(folder)], str(tmp_path / "out"))


def test_other_libraries_devices_and_files_are_another_measurement(folder, registry, zoo, tmp_path, monkeypatch):
    base = shutil.copytree(zoo.base("qwen2_tied"), tmp_path / "base")

    def fingerprint(world=SINGLE):
        evaluator = Evaluator(registry, [make_task(folder)], str(tmp_path / "out"), base_model=str(base), world=world)
        evaluator._prepare({})
        return evaluator._store._fingerprint(evaluator._rows[0], evaluator._evaluations[0])

    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    # what a training left there is no part of the model
    (base / "trainer_state.json").write_text("{}")
    assert fingerprint() == seen[0]
    seen.append(fingerprint(World(device=torch.device("cuda"))))
    for library in ("torch", "transformers"):
        with monkeypatch.context() as patched:
            patched.setattr(f"{library}.__version__", "0.0")
            seen.append(fingerprint())
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    seen.append(fingerprint())
    assert len(set(seen)) == 5


def test_the_recipe_tells_of_a_merge_that_cannot_be_made(folder, registry, tmp_path, monkeypatch, capsys):
    # the base's values are finite in float16, those of the merge are not
    monkeypatch.setattr("ram_trl.config.EvaluationConfig.evaluation_arguments", arguments_with(IMPOSSIBLE))
    words = ["--registry", registry.path, "--tasks", write_tasks(tmp_path, folder), "--output_dir", tmp_path / "out"]
    assert run_recipe("evaluate.py", monkeypatch, *words, "--method", "ram_plus") == 3
    printed = capsys.readouterr()
    assert "Score" in printed.out and "error: ram_plus was not evaluated: " in printed.err


def arguments_with(settings):
    """`evaluation_arguments` with settings that the recipe has no options for."""
    from ram_trl.config import EvaluationConfig

    original = EvaluationConfig.evaluation_arguments

    def changed(self):
        arguments = original(self)
        return {**arguments, "merges": {name: {**merge, **settings} for name, merge in arguments["merges"].items()}}

    return changed


def test_names_are_labels(folder, registry, tmp_path):
    # longer than a name of a file may be, and with what no file may have
    name = "weights=" + "math:0.5," * 60 + "../x"
    for directory in ("a", "b"):
        merge_agents(registry, str(tmp_path / directory / "out"), method="average")
    merged = [f"{directory}={tmp_path / directory / 'out'}" for directory in ("a", "b")]
    content = evaluate_models(
        registry, [make_task(folder)], str(tmp_path / "evaluation"), agents=["math"], merges={name: {}}, merged=merged
    )
    assert list(content["rows"]) == ["base", "math@v1", name, "a", "b"]
    path, _ = result_of(tmp_path / "evaluation", name, "math")
    before = path.stat().st_mtime_ns
    # another name of the same merge is not measured again
    again = evaluate_models(
        registry, [make_task(folder)], str(tmp_path / "evaluation"), agents=["math"], merges={"short": {}}
    )
    assert again["rows"]["short"] == content["rows"][name] and path.stat().st_mtime_ns == before
    for cell in content["rows"][name]["tasks"].values():
        assert len((tmp_path / "evaluation" / cell["completions"]).read_text().splitlines()) == 6
    with pytest.raises(ConfigError, match=r"'out' would be evaluated twice: .* directories as NAME=DIR"):
        directories = [str(tmp_path / directory / "out") for directory in ("a", "b")]
        evaluate_models(registry, [make_task(folder)], str(tmp_path / "evaluation"), merged=directories)


def test_what_was_measured_is_told(folder, registry, tmp_path):
    content = evaluate_models(registry, [make_task(folder)], str(tmp_path / "out"), merges={"m": {"r": 0.3}})
    assert content["tasks"]["math"]["options"]["max_new_tokens"] == 8
    identity = content["rows"]["m"]["identity"]
    assert identity["settings"]["r"] == 0.3 and [name for name, _ in identity["agents"]] == ["code@v1", "math@v1"]
    assert (content["batch_size"], content["backend"], content["dtype"]) == (16, "transformers", "auto")


@pytest.mark.parametrize("dtype, told", [("auto", 1), ("float32", 0)])
def test_an_agent_that_is_measured_rounded_is_told_of(folder, zoo, tmp_path, caplog, dtype, told):
    base = zoo.base("llama")
    models = {"wide": zoo.agent(base, seed=5, dtype=torch.float32), "narrow": zoo.agent(base, seed=6)}
    registry = zoo.registry(base, models)
    with caplog.at_level(logging.WARNING, logger="ram_trl"):
        evaluate_models(registry, [make_task(folder, limit=1)], str(tmp_path / "out"), dtype=dtype)
    lines = [record.message for record in caplog.records if "rounded" in record.message]
    assert len(lines) == told
    assert all("wide@v1 ran in float32" in line and "--dtype float32" in line for line in lines)


def test_fisher_information_that_is_estimated_anew_is_another_merge(registry, zoo, tmp_path):
    copied = AgentRegistry(shutil.copytree(registry.path, tmp_path / "registry"))
    store, shapes = (
        FisherStore(copied),
        {name: held.shape for name, held in read_model(zoo.base("qwen2_tied")).items()},
    )
    identities = []
    for value in (1.0, 2.0, 2.0):
        for agent in copied:
            shutil.rmtree(store.directory(agent), ignore_errors=True)
            with store.stage(agent) as staged:
                save_file({name: torch.full(shape, value) for name, shape in shapes.items()}, staged / FISHER)
                recorded = {"agent": str(agent), "agent_digest": agent.manifest.to_dict()["digest"], "examples": 1}
                store.commit(staged, agent, FisherManifest(**recorded, created="", ram_trl_version=""))
        [row] = make_merge_rows(copied, ["code", "math"], {"f": {"method": "fisher"}}, None)
        identities.append(row.identity)
    assert identities[0] != identities[1] == identities[2]


def test_a_rank_without_memory_for_a_merge_ends_them_all(folder, registry, tmp_path):
    tasks = write_tasks(tmp_path, folder, "takes_all_memory_of_rank_1")
    arguments = ["--registry", registry.path, "--tasks", tasks, "--batch_size", 3, "--output_dir", tmp_path / "out"]
    result = launch(2, *arguments, "--method", "ram_plus")
    assert result.returncode != 0
    # on rank 0 a line, and no wait for a rank that is gone
    assert "error: MemoryError: no room (rank 1)" in result.stderr


def test_a_rank_that_cannot_give_the_base_back_ends_them_all(folder, registry, tmp_path):
    tasks = write_tasks(tmp_path, folder, "breaks_restoring_on_rank_1")
    arguments = ["--registry", registry.path, "--tasks", tasks, "--batch_size", 3, "--output_dir", tmp_path / "out"]
    result = launch(2, *arguments)
    assert result.returncode != 0
    assert "cannot become the base again" in result.stderr and "(rank 1)" in result.stderr
