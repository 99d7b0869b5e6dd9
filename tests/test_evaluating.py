"""Means, differences and retained gains; the file of tasks; the table."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ram_trl.errors import ConfigError, InvalidNameError
from ram_trl.evaluating.report import build_evaluation, format_evaluation, markdown_evaluation
from ram_trl.evaluating.rows import Row
from ram_trl.evaluating.statistics import Estimate, Measurement, difference, mean_of, retained_gain
from ram_trl.evaluating.tasks import BenchmarkTask, PerplexityTask, RewardTask, read_tasks


# 97.5 % quantiles of Student's distribution, from a printed table.
T_TABLE = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 29: 2.045, 99: 1.984, 999: 1.962, 9999: 1.960}


@pytest.mark.parametrize("freedom", T_TABLE)
def test_the_interval_of_a_mean_is_students(freedom):
    scores = np.random.default_rng(0).random(freedom + 1).tolist()
    estimate = mean_of(Measurement(scores))
    half_width = T_TABLE[freedom] * np.std(scores, ddof=1) / math.sqrt(len(scores))
    assert estimate.n == freedom + 1
    assert estimate.value == pytest.approx(np.mean(scores))
    assert estimate.high - estimate.value == pytest.approx(half_width, rel=3e-4)
    assert estimate.value - estimate.low == pytest.approx(half_width, rel=3e-4)


def test_prompts_without_a_score_do_not_count():
    measured = Measurement([1.0, None, 0.0, None, 0.5])
    assert mean_of(measured) == mean_of(Measurement([1.0, 0.0, 0.5]))
    other = Measurement([0.5, 1.0, None, None, 0.0])
    # only the first and the last have both
    assert difference(measured, other) == mean_of(Measurement([0.5, 0.5]))
    assert mean_of(Measurement([None, None])) == Estimate(None, None, None, 0)
    assert mean_of(Measurement([0.25])) == Estimate(0.25, None, None, 1)
    assert not mean_of(Measurement([0.25])).is_clear


def test_a_difference_is_paired_by_prompt():
    rng = np.random.default_rng(1)
    hard = rng.random(400)
    base, agent = hard + rng.normal(0, 0.01, 400), hard + 0.02 + rng.normal(0, 0.01, 400)
    paired = difference(Measurement(agent.tolist()), Measurement(base.tolist()))
    assert paired.is_clear and paired.value == pytest.approx(0.02, abs=0.003)
    # the prompts differ far more from each other than the models do
    means = [Measurement(mean=values.mean(), stderr=values.std() / 20, n=400) for values in (agent, base)]
    unpaired = difference(*means)
    assert unpaired.value == pytest.approx(paired.value)
    assert not unpaired.is_clear
    assert unpaired.high - unpaired.value == pytest.approx(1.96 * math.hypot(agent.std(), base.std()) / 20, rel=1e-3)


def test_the_interval_of_a_retained_gain_solves_fiellers_equation():
    rng = np.random.default_rng(2)
    base = rng.random(60)
    agent, merged = base + rng.normal(0.4, 0.3, 60), base + rng.normal(0.3, 0.3, 60)
    gain = retained_gain(*(Measurement(values.tolist()) for values in (merged, agent, base)))
    assert gain.value == pytest.approx((merged - base).mean() / (agent - base).mean())
    # at the ends of the interval merged - base = ratio * (agent - base) is just not refuted
    for ratio in (gain.low, gain.high):
        rest = (merged - base) - ratio * (agent - base)
        assert abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(60)) == pytest.approx(2.0010, abs=1e-3)
    assert gain.low < gain.value < gain.high


def test_the_interval_of_a_retained_gain_holds_in_19_of_20_experiments():
    rng, hits = np.random.default_rng(3), 0
    for _ in range(1000):
        base = (rng.random(40) < 0.3).astype(float)
        own = np.maximum(base, rng.random(40) < 0.5)
        # half of what the agent has gained is kept
        merged = np.where(rng.random(40) < 0.5, own, base)
        gain = retained_gain(*(Measurement(values.tolist()) for values in (merged, own, base)))
        hits += gain.low <= 0.5 <= gain.high
    assert 920 <= hits <= 980


def test_no_gain_of_the_agent_gives_no_interval():
    scores = [0.0, 1.0, 0.0, 1.0]
    assert retained_gain(Measurement(scores), Measurement(scores), Measurement(scores)).value is None
    unclear = retained_gain(Measurement([1.0, 1.0, 0.0, 1.0]), Measurement([1.0, 0.0, 1.0, 1.0]), Measurement(scores))
    assert unclear.value is not None and unclear.low is None
    only_means = [Measurement(mean=mean, stderr=0.01, n=10) for mean in (0.5, 0.7, 0.3)]
    assert retained_gain(*only_means) == Estimate(pytest.approx(0.5), None, None, 10)


def write_tasks(tmp_path, text):
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    return str(path)


def test_tasks_are_read(tmp_path):
    path = write_tasks(
        tmp_path,
        """
        math: {agent: math, dataset: p.jsonl, reward_funcs: [a:b, a:c], reward_weights: [1, 0.5], temperature: 1,
               num_samples: 4, top_p: 9e-1, limit: null, chat_template_kwargs: {enable_thinking: false}}
        gsm8k: {benchmark: gsm8k, metric: exact_match, limit: 5}
        stories: {perplexity: s.jsonl, max_length: 512}
        """,
    )
    math_task, gsm8k, stories = read_tasks(path)
    assert stories == PerplexityTask(name="stories", perplexity="s.jsonl", max_length=512)
    assert math_task == RewardTask(
        name="math",
        agent="math",
        dataset="p.jsonl",
        reward_funcs=["a:b", "a:c"],
        reward_weights=[1.0, 0.5],
        temperature=1.0,
        top_p=0.9,
        num_samples=4,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert gsm8k == BenchmarkTask(name="gsm8k", benchmark="gsm8k", metric="exact_match", limit=5)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "names no task"),
        ("- math", "names no task"),
        ("math: 3", "not of the form NAME"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], speed: 3}", "unknown option 'speed'"),
        ("math: {reward_funcs: [a:b]}", "dataset is missing"),
        ("math: {dataset: p.jsonl, reward_funcs: a:b}", "reward_funcs='a:b' is not of the form"),
        ("math: {dataset: p.jsonl, reward_funcs: []}", "reward_funcs is empty"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], reward_weights: [1, 2]}", "one for each"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], limit: 0}", "at least 1"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], limit: true}", "limit=True"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], num_samples: 2}", "greedy samples are all alike"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], temperature: .nan}", "temperature"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], top_p: 0}", "top_p"),
        ("math: {dataset: p.jsonl, reward_funcs: [a:b], top_p: many}", "top_p='many' is not of the form float"),
        ("math: {benchmark: gsm8k, limit: 1.5}", "limit=1.5"),
        ("math: {benchmark: gsm8k, perplexity: p.jsonl}", "make two tasks of it"),
        ("math: {perplexity: p.jsonl, max_length: 1}", "max_length must be at least 2"),
        ("math: {perplexity: p.jsonl, limit: 0}", "limit must be at least 1"),
        ("math: [", "not valid YAML"),
        ("math: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_of_tasks(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_tasks(write_tasks(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_task_has_a_name_that_is_a_file_name(tmp_path):
    with pytest.raises(InvalidNameError, match="task"):
        read_tasks(write_tasks(tmp_path, "../x: {benchmark: gsm8k}"))
    with pytest.raises(ConfigError, match="is not a file of tasks"):
        read_tasks(str(tmp_path / "absent.yaml"))


def rows_and_results():
    """The base fails, the agent does half of its own task and none of the other, the merge a quarter."""
    tasks = [
        RewardTask(name="math", agent="math", dataset="p", reward_funcs=["a:b"]),
        BenchmarkTask(name="gsm8k", benchmark="gsm8k"),
    ]
    kinds = {"base": ("base", None), "math@v1": ("agent", "math"), "merged": ("merged", None)}
    rows = [Row(name, kind, agent, {}, None, None) for name, (kind, agent) in kinds.items()]
    right = {"base": 0, "math@v1": 50, "merged": 25}
    results = {}
    for row in rows:
        scores = [float(i < right[row.name]) for i in range(100)]
        reward = {"scores": scores, "mean": None, "stderr": None, "n": 0}
        bench = {"scores": None, "mean": 0.5, "stderr": 0.05, "n": 100}
        results[row.name] = {
            "math": {"seconds": 1.0, "completions": "a.jsonl", "metrics": {"reward": reward}},
            "gsm8k": {"seconds": 2.0, "completions": "b.jsonl", "metrics": {"acc,none": bench, "f1,none": bench}},
        }
    return rows, tasks, results


def test_the_tables():
    content = build_evaluation(*rows_and_results(), {"base_model": "b"})
    assert content["rows"]["merged"]["mean"]["value"] == pytest.approx((0.25 + 0.5) / 2)
    [gain] = content["retained_gain"]
    assert (gain["row"], gain["agent"], gain["task"], gain["note"]) == ("merged", "math@v1", "math", None)
    assert gain["value"] == pytest.approx(0.5) and gain["interval"][0] < 0.5 < gain["interval"][1]
    text = format_evaluation(content)
    assert text.splitlines()[:5] == [
        "Score",
        "                   math          gsm8k           mean",
        "base     0.000 +-0.000   0.500 +-0.098  0.250 +-0.049",
        "math@v1  0.500 +-0.100*  0.500 +-0.098  0.500 +-0.070",
        "merged   0.250 +-0.086   0.500 +-0.098  0.375 +-0.065",
    ]
    assert "+0.500 +-0.100*" in text and "acc,none" in text
    assert content["rows"]["merged"]["tasks"]["gsm8k"]["metrics"]["f1,none"]["stderr"] == 0.05
    markdown = markdown_evaluation(content)
    tables = [part for part in markdown.split("\n\n") if part.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_an_agent_without_a_gain_of_its_own_is_noted():
    rows, tasks, results = rows_and_results()
    results["math@v1"]["math"] = results["base"]["math"]
    content = build_evaluation(rows, tasks, results, {"base_model": "b"})
    [gain] = content["retained_gain"]
    assert gain["value"] is None and "not distinguishable from 0" in gain["note"]
    assert "none (a)" in format_evaluation(content) and "(a): the agent's own gain" in format_evaluation(content)


def lower_is_better(results, task, metric):
    for by_task in results.values():
        by_task[task]["metrics"][metric] = {**by_task[task]["metrics"][metric], "higher_is_better": False}


def test_an_agent_worse_than_the_base_has_nothing_to_retain():
    rows, tasks, results = rows_and_results()
    for task, metric in (("math", "reward"), ("gsm8k", "acc,none"), ("gsm8k", "f1,none")):
        lower_is_better(results, task, metric)
    # half of the damage is left: clear, symmetric in sign, and no success
    content = build_evaluation(rows, tasks, results, {"base_model": "b"})
    [gain] = content["retained_gain"]
    assert gain["value"] == pytest.approx(0.5) and gain["interval"] is not None
    assert gain["note"] == "the agent is worse than the base on its own task"
    text = format_evaluation(content)
    assert " (b)" in text and "(b): the agent is worse" in text and "Lower is better: math, gsm8k." in text
    assert content["tasks"]["math"]["higher_is_better"] is False
    assert content["rows"]["merged"]["mean"]["value"] == pytest.approx((0.25 + 0.5) / 2)


def test_an_agent_that_lowers_a_perplexity_has_a_gain():
    rows, tasks, results = rows_and_results()
    lower_is_better(results, "math", "reward")
    scores = {"base": 100, "math@v1": 50, "merged": 75}
    for name, right in scores.items():
        results[name]["math"]["metrics"]["reward"]["scores"] = [float(i < right) for i in range(100)]
    content = build_evaluation(rows, tasks, results, {"base_model": "b"})
    [gain] = content["retained_gain"]
    assert gain["value"] == pytest.approx(0.5) and gain["note"] is None
    # an accuracy and a perplexity have no mean
    for row in content["rows"].values():
        assert row["mean"] == row["mean_difference"] == {"value": None, "interval": None, "n": 0}
    text = format_evaluation(content)
    assert "mean" not in text.splitlines()[1] and "so there is no mean over the tasks" in text


def perplexities():
    """A base and a merge on an easy and on a hard text, 40 examples each."""
    tasks = [PerplexityTask(name=name, perplexity="p") for name in ("easy", "hard")]
    rows = [Row(name, kind, None, {}, None, None) for name, kind in (("base", "base"), ("m", "merged"))]
    rng, results = np.random.default_rng(4), {"base": {}, "m": {}}
    for task, level in (("easy", 2.0), ("hard", 50.0)):
        examples = level * rng.uniform(0.5, 1.5, 40)
        for row, factor in (("base", 1.0), ("m", 0.9)):
            scores = (examples * factor * rng.uniform(0.9, 1.1, 40)).tolist()
            perplexity = {"scores": scores, "higher_is_better": False}
            results[row][task] = {"seconds": 1.0, "completions": "a.jsonl", "metrics": {"perplexity": perplexity}}
    return rows, tasks, results


def test_perplexities_have_a_geometric_mean():
    rows, tasks, results = perplexities()
    content = build_evaluation(rows, tasks, results, {"base_model": "b"})
    scores = {
        row: [np.array(by_task[name]["metrics"]["perplexity"]["scores"]) for name in ("easy", "hard")]
        for row, by_task in results.items()
    }

    def mean(row, left_out=(None, None)):
        of_task = list(scores[row])
        task, example = left_out
        if task is not None:
            of_task[task] = np.delete(of_task[task], example)
        return math.sqrt(of_task[0].mean() * of_task[1].mean())

    def half_width(value):
        """By the jackknife: each example of each task is left out in turn; 2.023 is Student's for 39."""
        parts = [np.array([value((task, example)) for example in range(40)]) for task in range(2)]
        return 2.0227 * math.sqrt(sum(39 / 40 * ((part - part.mean()) ** 2).sum() for part in parts))

    for row in ("base", "m"):
        found = content["rows"][row]["mean"]
        assert found["value"] == pytest.approx(mean(row)) and found["n"] == 80
        low, high = found["interval"]
        logs = half_width(lambda left_out, row=row: math.log(mean(row, left_out)))
        assert math.log(high / low) / 2 == pytest.approx(logs, rel=0.05)
    # of the means, and paired: the examples differ far more from each other than the models do
    gain = content["rows"]["m"]["mean_difference"]
    assert gain["value"] == pytest.approx(mean("m") - mean("base"))
    paired = half_width(lambda left_out: mean("m", left_out) - mean("base", left_out))
    assert gain["interval"][1] - gain["value"] == pytest.approx(paired, rel=0.05) and paired < 0.5
    assert content["rows"]["base"]["mean_difference"]["value"] == 0
    text = format_evaluation(content)
    assert text.splitlines()[1].endswith("geometric mean")
    # of one task the mean is its score
    alone = build_evaluation(rows, tasks[:1], results, {"base_model": "b"})["rows"]["m"]
    assert alone["mean"] == alone["tasks"]["easy"]["metrics"]["perplexity"]
    assert alone["mean_difference"] == alone["tasks"]["easy"]["difference"]["perplexity"]
    # one without a perplexity has no mean, and no difference to it
    results["m"]["hard"]["metrics"]["perplexity"] = {"n": 40, "higher_is_better": False}
    broken = build_evaluation(rows, tasks, results, {"base_model": "b"})["rows"]["m"]
    assert broken["mean"]["value"] is None is broken["mean_difference"]["value"]


def test_a_perplexity_and_an_error_rate_have_no_mean():
    rows, tasks, results = perplexities()
    for by_task in results.values():
        rate = {"mean": 0.2, "stderr": 0.01, "n": 40, "higher_is_better": False}
        by_task["gsm8k"] = {**by_task["hard"], "metrics": {"error_rate,none": rate}}
    benchmark = BenchmarkTask(name="gsm8k", benchmark="gsm8k")
    content = build_evaluation(rows, [tasks[0], benchmark], results, {"base_model": "b"})
    for row in content["rows"].values():
        assert row["mean"]["value"] is None is row["mean_difference"]["value"]
    assert "Lower is better: easy, gsm8k; so there is no mean" in format_evaluation(content)
    # a perplexity that the harness measured is of the kind of ours
    for by_task in results.values():
        by_task["gsm8k"]["metrics"] = {"word_perplexity,none": {**rate, "mean": 8.0}}
    content = build_evaluation(rows, [tasks[0], benchmark], results, {"base_model": "b"})
    easy = content["rows"]["m"]["tasks"]["easy"]["metrics"]["perplexity"]["value"]
    assert content["rows"]["m"]["mean"]["value"] == pytest.approx(math.sqrt(8 * easy))


def test_what_intervals_are_by_is_told():
    text = format_evaluation(build_evaluation(*rows_and_results(), {"base_model": "b"}))
    assert "by Student's t over prompts, differences paired by prompt (math); by the harness's standard error" in text
    text = format_evaluation(build_evaluation(*perplexities(), {"base_model": "b"}))
    assert "interval, by the delta method over examples, differences paired by example." in text
    assert "Student" not in text


def test_a_metric_that_one_row_does_not_have():
    rows, tasks, results = rows_and_results()
    metrics = results["merged"]["gsm8k"]["metrics"]
    # of a broken model: infinite, or not there at all
    metrics["acc,none"] = {"scores": None, "mean": None, "stderr": None, "n": 100}
    infinite = build_evaluation(rows, tasks, results, {"base_model": "b"})
    assert infinite["tasks"]["gsm8k"]["metric"] == "acc,none"
    del metrics["acc,none"]
    without = build_evaluation(rows, tasks, results, {"base_model": "b"})
    for content in (infinite, without):
        cell = content["rows"]["merged"]["tasks"]["gsm8k"]
        assert cell["metrics"]["acc,none"]["value"] is None is cell["difference"]["acc,none"]["value"]
        assert content["rows"]["merged"]["mean"]["value"] is None
        line = next(line for line in format_evaluation(content).splitlines() if line.startswith("merged"))
        assert line.split()[-2:] == ["-", "-"]


def test_the_metric_of_a_task_is_chosen_when_it_is_shown():
    rows, tasks, results = rows_and_results()
    for metric, name in (("f1", "f1,none"), ("acc,none", "acc,none")):
        content = build_evaluation(rows, [tasks[0], replace(tasks[1], metric=metric)], results, {"base_model": "b"})
        assert content["tasks"]["gsm8k"]["metric"] == name
    with pytest.raises(ConfigError, match="task gsm8k: metric 'elo' is none of acc,none, f1,none"):
        build_evaluation(rows, [tasks[0], replace(tasks[1], metric="elo")], results, {"base_model": "b"})


def test_the_gain_is_clear_or_not_on_the_prompts_that_all_three_answered():
    rows, tasks, results = rows_and_results()
    # the merge answered only where the agent gained nothing
    results["merged"]["math"]["metrics"]["reward"]["scores"] = [None] * 50 + [0.0] * 50
    [gain] = build_evaluation(rows, tasks, results, {"base_model": "b"})["retained_gain"]
    assert gain["interval"] is None and "not distinguishable" in gain["note"]
