"""Sweeps: what is tried, what Optuna proposes, scores and tables, and `recipes/sweep.py` from beginning to end."""

import json
import math
import os
import runpy
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from training import run_shell

from ram_trl.config import MergeConfig
from ram_trl.errors import AgentNotFoundError, ConfigError, CorruptedFileError
from ram_trl.evaluating.report import HIGHER, PERPLEXITY, kind_of, mean_over_tasks
from ram_trl.evaluating.statistics import Estimate
from ram_trl.merging.plan import MergeSettings
from ram_trl.options import parse_config
from ram_trl.sweeping.picture import draw_sweep
from ram_trl.sweeping.result import SweepResult, check_comparable, score_of
from ram_trl.sweeping.search import Trial, propose, read_trials, write_trials
from ram_trl.sweeping.space import Range
from ram_trl.sweeping.space_file import read_space


ROOT = Path(__file__).parent.parent
RECIPE = str(ROOT / "recipes" / "sweep.py")


def space_of(tmp_path, text):
    (tmp_path / "space.yaml").write_text(text)
    return read_space(str(tmp_path / "space.yaml"))


def merges_of(space):
    return {space.label(point): space.settings(point) for point in space.points()}


def test_a_grid_is_all_combinations(tmp_path):
    space = space_of(tmp_path, "{method: [ram_plus], r: [0, 0.1], agents: [[a, b], [a]], weights: [{a: 0.5}]}")
    merges = merges_of(space)
    # r says nothing of an agent alone
    assert list(merges) == ["r=0 agents=a+b", "agents=a", "r=0.1 agents=a+b"]
    assert merges["r=0.1 agents=a+b"] == {"method": "ram_plus", "r": 0.1, "agents": ["a", "b"], "weights": {"a": 0.5}}


def test_options_are_combined_where_they_say_something(tmp_path):
    space = space_of(
        tmp_path,
        "{r: [0.1, 0.2], alpha: [1.0, 2.0], method: [ram, ram_plus, ram_plus_soft, ties, average], "
        "method_options.density: [0.1, 0.2]}",
    )
    assert sorted(merges_of(space)) == sorted(
        [
            "method=average",
            "method=ram",
            "method=ties method_options.density=0.1",
            "method=ties method_options.density=0.2",
            *(f"r={r} alpha={alpha} method=ram_plus" for r in (0.1, 0.2) for alpha in (1, 2)),
            *(f"r={r} method=ram_plus_soft" for r in (0.1, 0.2)),
        ]
    )


def test_nearly_equal_values_keep_names_of_their_own(tmp_path):
    assert list(merges_of(space_of(tmp_path, "r: [0.1, 0.1000001, 1e-5]"))) == ["r=0.1", "r=0.1000001", "r=1e-05"]


def test_a_range_with_steps_is_a_list(tmp_path):
    space = space_of(tmp_path, "{r: {low: 0, high: 0.35, step: 0.1}, method: [wudi, ram_plus]}")
    assert space.options["r"] == Range(0.0, 0.3, step=0.1)
    assert list(merges_of(space))[1:] == ["r=0 method=ram_plus", *(f"r={r} method=ram_plus" for r in (0.1, 0.2, 0.3))]


def test_a_range_is_counted_without_listing_it(tmp_path):
    # a thousand billion values: listed, they would fill the memory
    space = space_of(tmp_path, "alpha: {low: 0, high: 1e6, step: 1e-6}")
    assert not space.is_countable and space.options["alpha"].high == 1e6
    assert space.holds({"alpha": 0.3}) and space.holds({"alpha": 123456.789012})
    assert not space.holds({"alpha": 123456.7890125})


def test_what_comes_to_the_same_merge_is_tried_once(tmp_path):
    space = space_of(tmp_path, "{method: [ram_plus, ram_plus_soft], r: [0, 0.1], alpha: [0, 1, 2]}")
    ram_plus = ["r=0 alpha=0", "r=0.1 alpha=1", "r=0.1 alpha=2"]
    assert list(merges_of(space)) == [
        *(f"method=ram_plus {values}" for values in ram_plus),
        "method=ram_plus_soft r=0",
        "method=ram_plus_soft r=0.1",
    ]
    assert len(searched(space, lambda settings: 1.0, 99)) == 5


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no options"),
        ("r: 0.1", "is not a list of values"),
        ("r: []", "is not a list of values"),
        ("r: [one]", "r='one' is not a number"),
        ("r: [.nan]", "is not a number"),
        ("speed: [1]", "unknown option 'speed'"),
        ("r: [-1]", "r=-1"),
        ("r: [0.1, 1e-1]", "r has 0.1 twice"),
        ("method: [rem]", "method='rem'"),
        ("agents: [math]", "is not a list of names"),
        ("agents: [[a, b], [a, b]]", r"agents has a\+b twice"),
        ("r: [", "not valid YAML"),
        ("weights: {math: 1.0}", "weights.NAME"),
        ("{weights: [{}], weights.math: [1.0]}", "is a part of weights"),
        ("method_options.density: [0.1]", "method_options.density is no option of method=ram_plus"),
        ("{method: [ties], method_options: [{drop_rate: 0.1}]}", "method_options.drop_rate is no option"),
        ("{method: [average, ties], r: [0.1]}", "r is no option of method=average, ties"),
        ("r: {min: 0, max: 1}", "has 'min'; a range has low, high"),
        ("r: {low: 0}", "is not of the form"),
        ("r: {low: 1, high: 0}", "low must be below high"),
        ("r: {low: 0, high: 1, log: true}", "needs a low above 0"),
        ("r: {low: 0.1, high: 1, log: true, step: 0.1}", "exclude each other"),
        ("r: {low: 0, high: 1, step: 0}", "step must be above 0"),
        ("r: {low: 0, high: 1, step: 5.0e-324}", "step is too small"),
        ("alpha: {low: -1, high: 1}", "alpha=-1"),
        ("{method: [wudi], method_options.steps: {low: 0.5, high: 9}}", "whole numbers"),
        ("method: {low: 1, high: 2}", "is not a list of values"),
    ],
)
def test_mistakes_in_a_space(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        space_of(tmp_path, text)


def test_a_grid_that_cannot_be_listed(tmp_path):
    many = f"[{','.join(map(str, range(1000)))}]"
    with pytest.raises(ConfigError, match="more than 10,000"):
        space_of(tmp_path, f"{{r: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], seed: {many}}}").points()
    with pytest.raises(ConfigError, match="r is a range: list its values"):
        space_of(tmp_path, "r: {low: 0, high: 1}").points()


@pytest.fixture(scope="module")
def registry(zoo):
    base = zoo.base("qwen2_tied")
    return zoo.registry(base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["code", "math"])})


def test_agents_are_pinned(tmp_path, registry):
    space = space_of(tmp_path, "{r: [0, 0.1], weights.math: [0.5, 2.0]}").pinned(registry, None)
    assert merges_of(space)["r=0 weights.math=2"] == {
        "agents": ["code@v1", "math@v1"],
        "r": 0.0,
        "weights": {"math": 2.0},
    }
    # a weight is tried where its agent is merged
    space = space_of(tmp_path, "{agents: [[code], [code, math]], weights: [{}, {math: 2}]}").pinned(registry, None)
    assert list(merges_of(space).values()) == [
        {"agents": ["code@v1"], "weights": {}},
        {"agents": ["code@v1", "math@v1"], "weights": {}},
        {"agents": ["code@v1", "math@v1"], "weights": {"math": 2.0}},
    ]
    for text in ("weights.poet: [1, 2]", "weights: [{poet: 1}]", "{agents: [[code]], weights.math: [1, 2]}"):
        with pytest.raises(ConfigError, match="which is merged nowhere; merged are: code"):
            space_of(tmp_path, text).pinned(registry, None)
    with pytest.raises(AgentNotFoundError):
        space_of(tmp_path, "agents: [[code], [poet]]").pinned(registry, None)
    with pytest.raises(ConfigError, match="leave out --agents"):
        space_of(tmp_path, "agents: [[code], [math]]").pinned(registry, ["code"])
    # those that no subset has are not evaluated
    assert space_of(tmp_path, "agents: [[math]]").pinned(registry, None).agents == ["math@v1"]


def searched(space, score, count, trials=(), higher_is_better=True, seed=0):
    """The trials of a search, after some others, with a score that is known."""
    trials = list(trials)
    while len(trials) < count and (point := propose(space, trials, higher_is_better, seed)) is not None:
        settings = space.settings(point)
        trials.append(Trial(point=point, settings=settings, score=score(settings)))
    return trials


SPACE = """
r: {low: 0.001, high: 10, log: true}
alpha: {low: 0, high: 4, step: 0.5}
method: [ram_plus, average, wudi]
method_options.steps: {low: 10, high: 1000}
weights.math: {low: 0.5, high: 2}
"""


def far(settings):
    """How far a merge is from the best: r=0.1, alpha=3, weight 1."""
    if settings["method"] != "ram_plus":
        return 9.0
    return abs(math.log10(settings["r"]) + 1) + abs(settings["alpha"] - 3) + abs(settings["weights"]["math"] - 1)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_search_finds_what_is_best(tmp_path, higher_is_better):
    trials = searched(
        space_of(tmp_path, SPACE),
        lambda settings: far(settings) * (-1 if higher_is_better else 1),
        40,
        higher_is_better=higher_is_better,
    )
    assert len({json.dumps(trial.settings) for trial in trials}) == 40
    distances = [abs(trial.score) for trial in trials]
    # better than what chance found first, and looked for there
    assert min(distances[20:]) < 0.6 and sum(distances[20:]) < sum(distances[:10])
    for trial in trials:
        assert ("r" in trial.point) == (trial.point["method"] == "ram_plus")
        assert ("method_options" in trial.settings) == (trial.point["method"] == "wudi")
        if trial.point["method"] == "wudi":
            assert trial.point["method_options.steps"].is_integer()


def test_a_search_goes_on_as_if_nothing_had_been(tmp_path):
    def score(settings):
        # what cannot be made has no score
        return None if settings.get("alpha") == 1 else far(settings)

    space = space_of(tmp_path, SPACE)
    whole = searched(space, score, 16)
    write_trials(tmp_path / "trials.json", whole[:11])
    kept = read_trials(tmp_path / "trials.json")
    assert kept == whole[:11] and all(space.holds(trial.point) for trial in kept)
    assert searched(space, score, 16, kept) == whole
    assert searched(space, score, 3, seed=1) != whole[:3]
    (tmp_path / "trials.json").write_text('{"trials": [{"number": 1}]}')
    with pytest.raises(CorruptedFileError, match="does not hold the trials"):
        read_trials(tmp_path / "trials.json")


def test_a_search_learns_from_what_cannot_be_made(tmp_path):
    space = space_of(tmp_path, "{r: {low: 0, high: 1}, alpha: {low: 0, high: 1}}")
    trials = searched(space, lambda settings: None if settings["alpha"] > 0.5 else settings["r"], 40)
    failed = [trial.score is None for trial in trials]
    assert sum(failed[:10]) > 2 and sum(failed[20:]) < 5


def test_a_search_ends_when_all_was_tried(tmp_path):
    space = space_of(tmp_path, "{r: [0.0, 0.1, 0.2], method: [ram_plus, average], alpha: {low: 1, high: 2, step: 1}}")
    trials = searched(space, lambda settings: settings.get("r"), 100)
    # with r=0 alpha says nothing
    assert len(trials) == 6
    assert {space.key(trial.point) for trial in trials} == {space.key(point) for point in space.points()}


def test_a_search_does_not_stop_at_one_merge_that_is_the_best(tmp_path):
    # alone an agent is one merge, whatever r is
    space = space_of(tmp_path, "{agents: [[a], [b], [a, b]], r: {low: 0, high: 1}}")
    trials = searched(space, lambda settings: 2.0 - len(settings["agents"]), 30)
    assert len({space.key(trial.point) for trial in trials}) == 30


def test_trials_of_another_space_are_told_apart(tmp_path):
    space = space_of(tmp_path, "{r: {low: 0, high: 1}, method: [ram_plus, average]}")
    for point, is_its_own in (
        ({"r": 0.5, "method": "ram_plus"}, True),
        ({"method": "average"}, True),
        ({"r": 0.5, "method": "average"}, False),
        ({"r": 1.5, "method": "ram_plus"}, False),
        ({"r": "0.5", "method": "ram_plus"}, False),
        ({"method": "ties"}, False),
        ({"alpha": 1.0, "r": 0.5, "method": "ram_plus"}, False),
        ({"r": 0.5}, False),
    ):
        assert space.holds(point) == is_its_own, point
    stepped = space_of(tmp_path, "r: {low: 0, high: 1, step: 0.1}")
    assert stepped.holds({"r": 0.3}) and not stepped.holds({"r": 0.35})


def content_of(rows, kind="perplexity", metric="perplexity", higher_is_better=False):
    """Content of `evaluation.json` with these scores and intervals."""
    tasks = {
        f"task{at}": {"kind": kind, "metric": metric, "higher_is_better": higher_is_better}
        for at in range(len(next(iter(rows.values()))))
    }
    content = {"tasks": tasks, "rows": {}, "retained_gain": [], "failed": {}}
    for name, row in rows.items():
        estimates = [Estimate(value, *(interval or (None, None)), 4) for value, interval in row]
        cells = {task: {"metrics": {metric: one.to_dict()}} for task, one in zip(tasks, estimates, strict=True)}
        mean = mean_over_tasks(estimates, kind_of(tasks["task0"])).to_dict()
        content["rows"][name] = {"tasks": cells, "mean": mean}
    return content


def test_tasks_that_have_no_common_mean_are_refused():
    check_comparable({"math": HIGHER, "code": HIGHER})
    with pytest.raises(ConfigError, match=r"tasks math \(higher is better\) and wiki \(perplexity, lower is better\)"):
        check_comparable({"math": HIGHER, "wiki": PERPLEXITY, "code": HIGHER})
    one = {"kind": "benchmark", "metric": "word_perplexity,none", "higher_is_better": False}
    check_comparable({"one": kind_of(one), "two": PERPLEXITY})
    with pytest.raises(ConfigError, match="have no common mean"):
        check_comparable({"one": kind_of(one), "two": kind_of({**one, "metric": "bits_per_byte,none"})})


def result_of(space, scores, is_search=False, **options):
    rows = {"base": [(1.0, None), (1.0, None)], **{name: [(score, None)] * 2 for name, score in scores.items()}}
    content = content_of(rows, **options)
    trials = {name: Trial(point={}, settings={"agents": []}, score=score) for name, score in scores.items()}
    return SweepResult(space=space, content=content, trials=trials, is_search=is_search)


def test_names_are_no_markup(tmp_path):
    space = space_of(tmp_path, "r: [0.1]")
    result = result_of(space, {"a|b": 3.0, "<b>*": 2.0, "c": 3.0})
    assert result.best == "<b>*"
    table = result.markdown()
    assert "| a\\|b | <u>3.000</u> | <u>3.000</u> |" in table and "| \\<b\\>\\* | **2.000** |" in table
    assert "| base | 1.000 |" in table


def test_only_agents_of_the_merge_lose_by_it(tmp_path):
    result = result_of(space_of(tmp_path, "r: [0.1]"), {"alone": 2.0})
    result.trials["alone"].settings["agents"] = ["math@v1", "tool@v1"]
    result.content["retained_gain"] += [
        {"row": row, "agent": agent, "value": value, "note": note}
        for row, agent, value, note in (
            ("alone", "math@v1", 0.5, None),
            ("alone", "code@v1", 0.0, None),
            ("alone", "tool@v1", 9.0, "unclear"),
            ("other", "math@v1", 0.1, None),
        )
    ]
    assert result.text().splitlines()[-1].split() == ["alone", "*", "2.000", "2.000", "2.000", "-", "50.0%"]


@pytest.mark.parametrize("is_search", [False, True])
def test_a_merge_without_a_score_is_told_of(tmp_path, is_search):
    result = result_of(space_of(tmp_path, "r: [0.1]"), {"endless": None, "good": 3.0}, is_search)
    assert result.best == "good" and result.unscored == {"endless": "no finite score of task0, task1"}
    assert result.markdown().endswith("Without a score:\n\n- endless: no finite score of task0, task1\n")
    order = [line.split()[0] for line in result.text().splitlines()[1:]]
    assert order == ["base", *(["good", "endless"] if is_search else ["endless", "good"])]
    assert "| endless | - | - | - | - | - |" in result.markdown()
    assert len(draw_sweep(result)) > 1000


def test_a_mean_over_fewer_prompts_wins_nothing(tmp_path):
    result = result_of(space_of(tmp_path, "r: [0.1]"), {"good": 3.0, "choosy": 1.0})
    result.content["rows"]["choosy"]["tasks"]["task1"]["metrics"]["perplexity"]["n"] = 3
    assert score_of(result.content, "choosy") is None and score_of(result.content, "good") is not None
    result.trials["choosy"].score = None
    assert result.best == "good"
    assert result.unscored == {
        "choosy": "some of its prompts have no score, which those of the base have: 3 of 4 in task1"
    }


def test_a_picture_of_many_merges_stays_a_picture(tmp_path):
    result = result_of(space_of(tmp_path, "r: [0.1]"), {f"r={at}": float(at + 1) for at in range(2000)})
    # pixels, from the header of a PNG
    width, height = (int.from_bytes(draw_sweep(result)[at : at + 4], "big") for at in (16, 20))
    assert width == 1350 and height < 3000


@pytest.fixture
def folder(tmp_path):
    texts = [{"prompt": "ab3"[i % 3] * (1 + i * 5 % 13) + f"{i}=", "answer": str(i)} for i in range(23)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    (tmp_path / "stories.json").write_text(json.dumps([{"text": row["prompt"] * 2} for row in texts]))
    reward = {"dataset": str(tmp_path / "texts.json"), "reward_funcs": ["run_evaluating:letters"], "max_new_tokens": 8}
    (tmp_path / "numbers.json").write_text(json.dumps([{"text": f"{at * at} = {at} ."} for at in range(9)]))
    perplexity = {"perplexity": str(tmp_path / "stories.json"), "agent": "math"}
    numbers = {"perplexity": str(tmp_path / "numbers.json")}
    (tmp_path / "reward.yaml").write_text(json.dumps({"math": {**reward, "agent": "math"}, "code": reward}))
    (tmp_path / "perplexity.yaml").write_text(json.dumps({"stories": perplexity, "numbers": numbers}))
    (tmp_path / "both.yaml").write_text(json.dumps({"math": reward, "stories": perplexity}))
    return tmp_path


def words_of(folder, registry, *more, tasks="reward", output="sweep"):
    words = ["--registry", registry.path, "--tasks", folder / f"{tasks}.yaml", "--batch_size", 23]
    return [*map(str, [*words, "--output_dir", folder / output, *more])]


def run(monkeypatch, *arguments, **options):
    """Run the recipe in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", [RECIPE, *words_of(*arguments, **options)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runpy.run_path(RECIPE, run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


def means_of(folder, output="sweep"):
    content = json.loads((folder / output / "evaluation.json").read_text())
    return content, {name: row["mean"]["value"] for name, row in content["rows"].items() if "=" in name}


def test_a_sweep_ends_with_the_best(folder, registry, monkeypatch, capsys):
    (folder / "grid.yaml").write_text("{r: [0.0, 2.0, 8.0], agents: [[math], [math, code]]}")
    assert run(monkeypatch, folder, registry, "--grid", folder / "grid.yaml") == 0
    content, means = means_of(folder)
    assert len(means) == 4 and len(set(means.values())) > 1
    # an agent alone is what comes of it
    assert means["agents=math"] == content["rows"]["math@v1"]["mean"]["value"]
    best = max(means, key=means.__getitem__)
    printed = capsys.readouterr().out
    assert f"best (*) by the mean over the tasks (higher is better): {best}\n" in printed
    assert "retained gain" in printed and f"\n{best} *  " in printed
    assert (folder / "sweep" / "sweep.png").stat().st_size > 1000
    table = (folder / "sweep" / "sweep.md").read_text()
    assert [f"| {name} |" in table for name in ("base", *means)] == [True] * 5 and f"**{means[best]:.3f}**" in table
    options = yaml.safe_load((folder / "sweep" / "best.yaml").read_text())
    label = f"agents={'+'.join(options['agents']).replace('@v1', '')}"
    assert best == (f"r={options['r']:g} {label}" if "r" in options else label)
    config = parse_config(MergeConfig, ["--config", str(folder / "sweep" / "best.yaml"), "--probe_only"])
    assert (config.r, config.agents, config.registry) == (options.get("r", 0.1), options["agents"], str(registry.path))
    assert all(agent.endswith("@v1") for agent in options["agents"])
    # what is merged with it is what was evaluated
    measured = content["rows"][best]["identity"]["settings"]
    arguments = {name: value for name, value in config.merge_arguments().items() if name in measured}
    settings = asdict(MergeSettings(**arguments))
    assert {name: settings[name] for name in measured} == measured

    # with more values, what is finished is kept
    files = {path: path.stat().st_mtime_ns for path in folder.glob("sweep/results/*.json")}
    (folder / "grid.yaml").write_text("{r: [0.0, 1.0, 2.0, 8.0], agents: [[math, code]]}")
    assert run(monkeypatch, folder, registry, "--grid", folder / "grid.yaml") == 0
    _, more = means_of(folder)
    assert len(more) == 4 and more["r=2"] == means["r=2 agents=math+code"]
    # a later search in this directory does not count them as its own
    assert not (folder / "sweep" / "trials.json").exists()
    lines = (folder / "sweep" / "sweep.md").read_text().splitlines()
    assert [line.split()[1] for line in lines if "r=" in line] == ["r=0", "r=1", "r=2", "r=8"]
    new = {path: path.stat().st_mtime_ns for path in folder.glob("sweep/results/*.json")}
    assert len(new) == len(files) + 2 and files.items() <= new.items()


def test_a_sweep_by_perplexity_keeps_the_lowest(folder, registry, zoo, monkeypatch):
    (folder / "grid.yaml").write_text("r: [0.0, 20.0, 4.0]")
    base = os.path.relpath(zoo.base("qwen2_tied"))
    words = ["--grid", folder / "grid.yaml", "--base_model", base]
    assert run(monkeypatch, folder, registry, *words, tasks="perplexity") == 0
    content, rows = means_of(folder)
    means = {
        name: math.prod(task["metrics"]["perplexity"]["value"] for task in content["rows"][name]["tasks"].values())
        ** 0.5
        for name in rows
    }
    assert len(set(means.values())) == 3
    best = min(means, key=means.__getitem__)
    table = (folder / "sweep" / "sweep.md").read_text()
    assert "| geometric mean |" in table and f"| **{means[best]:.3f}** |" in table
    options = yaml.safe_load((folder / "sweep" / "best.yaml").read_text())
    assert f"r={options['r']:g}" == best
    assert options["base_model"] == str(zoo.base("qwen2_tied")) and options["agents"] == ["code@v1", "math@v1"]


def trials_of(folder, output):
    return json.loads((folder / output / "trials.json").read_text())["trials"]


def test_a_search_goes_on_and_processes_share_it(folder, registry, monkeypatch):
    space = "{r: {low: 0, high: 9}, agents: [[math], [math, code]], weights.code: [0.5, 2]}"
    (folder / "space.yaml").write_text(space)
    words = ["--search", folder / "space.yaml", "--seed", 3]
    assert run(monkeypatch, folder, registry, *words, "--num_trials", 4, output="one") == 0
    first = trials_of(folder, "one")
    files = {path: path.stat().st_mtime_ns for path in folder.glob("one/results/*.json")}
    assert run(monkeypatch, folder, registry, *words, "--num_trials", 6, output="one") == 0
    trials = trials_of(folder, "one")
    assert len(trials) == 6 and trials[:4] == first
    assert files.items() <= {path: path.stat().st_mtime_ns for path in folder.glob("one/results/*.json")}.items()
    assert len({json.dumps(trial["settings"]) for trial in trials}) == 6
    table = (folder / "one" / "sweep.md").read_text()
    assert all(f"| {number} " in table for number in range(1, 7))

    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2]
    command += ["--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", 20000 + os.getpid() % 20000, RECIPE]
    command += [*words_of(folder, registry, *words, output="two"), "--num_trials", 6]
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    done = run_shell(shlex.join(map(str, command)), env=environment)
    assert done.returncode == 0, done.stderr
    assert trials_of(folder, "two") == trials
    for name in ("sweep.md", "best.yaml", "sweep.png"):
        assert (folder / "two" / name).read_bytes() == (folder / "one" / name).read_bytes()


def test_an_interrupted_sweep_leaves_something_to_read(folder, registry, monkeypatch, capsys):
    (folder / "stopping_rewards.py").write_text(
        "import os\n\n\ndef letters(completions, **kwargs):\n"
        "    if os.path.exists(os.environ['STOP']):\n        raise RuntimeError('no connection')\n"
        "    return [len(set(completion)) for completion in completions]\n"
    )
    monkeypatch.syspath_prepend(folder)
    # when the first merge has its picture
    monkeypatch.setenv("STOP", str(folder / "sweep" / "sweep.png"))
    tasks = (folder / "reward.yaml").read_text().replace("run_evaluating", "stopping_rewards")
    (folder / "reward.yaml").write_text(tasks)
    (folder / "grid.yaml").write_text("r: [0.0, 2.0, 8.0]")
    assert run(monkeypatch, folder, registry, "--grid", folder / "grid.yaml") == 2
    assert "no connection" in capsys.readouterr().err
    table = (folder / "sweep" / "sweep.md").read_text()
    assert "| r=0 |" in table and "| r=2 |" not in table
    assert yaml.safe_load((folder / "sweep" / "best.yaml").read_text())["r"] == 0
    monkeypatch.setenv("STOP", str(folder / "never"))
    assert run(monkeypatch, folder, registry, "--grid", folder / "grid.yaml") == 0
    assert "| r=8 |" in (folder / "sweep" / "sweep.md").read_text()


def test_a_merge_that_cannot_be_made_is_left_out(folder, zoo, monkeypatch, capsys):
    base = zoo.base("qwen2_tied", torch.float16)
    registry = zoo.registry(base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["a", "math"])})
    (folder / "grid.yaml").write_text("{r: [0.0, 1e6], alpha: [1e6]}")
    words = (folder, registry, "--grid", folder / "grid.yaml")
    assert run(monkeypatch, *words, tasks="perplexity") == 3
    assert "no score: r=1e+06: " in capsys.readouterr().out
    assert "- r=1e+06: " in (folder / "sweep" / "sweep.md").read_text()
    assert yaml.safe_load((folder / "sweep" / "best.yaml").read_text())["r"] == 0
    # of a search it is a trial like another
    (folder / "space.yaml").write_text("{r: [0.0, 1e6], alpha: [1e6]}")
    assert run(monkeypatch, folder, registry, "--search", folder / "space.yaml", tasks="perplexity") == 0
    assert sorted(trial["score"] is None for trial in trials_of(folder, "sweep")) == [False, True]
    # and where there is no other
    (folder / "grid.yaml").write_text("{r: [1e6], alpha: [1e6]}")
    assert run(monkeypatch, *words, tasks="perplexity") == 2
    assert "none of the 1 merges has a score" in capsys.readouterr().err
    assert not (folder / "sweep" / "best.yaml").exists()


def test_an_infinite_perplexity_is_no_score(folder, registry, monkeypatch, capsys):
    (folder / "grid.yaml").write_text("weights.math: [1, 10000]")
    exit_code = run(monkeypatch, folder, registry, "--grid", folder / "grid.yaml", tasks="perplexity")
    assert "no score: weights.math=10000: no finite score of stories" in capsys.readouterr().out and exit_code == 3
    content, _ = means_of(folder)
    assert content["failed"] == {} and "weights.math=10000" in content["rows"]


def test_mistakes_are_told_before_anything_is_measured(folder, registry, monkeypatch, capsys):
    (folder / "grid.yaml").write_text("r: [0.0, 0.1]")
    (folder / "fisher.yaml").write_text("method: [ram_plus, fisher]")
    (folder / "range.yaml").write_text("r: {low: 0, high: 1}")
    (folder / "agents.yaml").write_text("agents: [[math], [math, code]]")
    grid = ["--grid", folder / "grid.yaml"]
    for words, problem in (
        ([], "--grid"),
        ([*grid, "--search", folder / "grid.yaml"], "--grid"),
        ([*grid, "--num_trials", 3], "--num_trials is for --search"),
        (["--search", folder / "grid.yaml", "--num_trials", 0], "num_trials=0"),
        ([*grid, "--r", 0.1], "--r is not for a sweep"),
        ([*grid, "--method", "average"], "--method is not for a sweep"),
        ([*grid, "--merged", "merged"], "--merged is for recipes/evaluate.py"),
        (["--grid", folder / "range.yaml"], "list its values"),
        (["--grid", folder / "fisher.yaml"], "Fisher"),
        (["--grid", folder / "agents.yaml", "--agents", "math"], "agents.yaml has agents"),
        (["--grid", folder / "nothing.yaml"], "nothing.yaml"),
    ):
        assert run(monkeypatch, folder, registry, *words) == 2
        assert problem in capsys.readouterr().err
    assert run(monkeypatch, folder, registry, *grid, tasks="both") == 2
    assert "no common mean to choose by" in capsys.readouterr().err
    assert not (folder / "sweep").exists()
