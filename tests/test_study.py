"""`recipes/study.py`: what it plans, what it leaves out when it goes on, what it computes, and a tiny run of it."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from training import run_python


RECIPES = Path(__file__).parents[1] / "recipes"
TASKS = ["reverse", "sort", "next", "rotate", "complement"]


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    """Recipes import one another by their names."""
    monkeypatch.syspath_prepend(str(RECIPES))


def options(**changed) -> Namespace:
    """Options of the study."""
    chosen = {"regimes": ["sparse"], "methods": ["ram_plus", "fisher"], "tasks": TASKS, "num_prompts": 10}
    return Namespace(**{**chosen, "pretrain_steps": 5, "max_steps": None, **changed})


# -- what is planned --


def test_every_agent_is_in_as_many_sets_as_the_others():
    from study_merges import agent_sets

    sets = agent_sets(TASKS)
    assert [len(tasks) for tasks in sets] == [2] * 5 + [3] * 5 + [5]
    for size in (2, 3):
        group = [tasks for tasks in sets if len(tasks) == size]
        assert Counter(task for tasks in group for task in tasks) == dict.fromkeys(TASKS, size)
        assert len({frozenset(tasks) for tasks in group}) == 5
    assert agent_sets(TASKS[:2]) == [TASKS[:2]]
    assert [len(tasks) for tasks in agent_sets(TASKS[:3])] == [2, 2, 2, 3]


def test_another_regime_changes_no_step_of_the_first(tmp_path):
    from study import plan_seed

    def commands(plan):
        return {step.job.name: step.job.arguments for steps in plan.values() for step in steps}

    one = commands(plan_seed(tmp_path, 0, options()))
    more = commands(plan_seed(tmp_path, 0, options(regimes=["sparse", "sgd", "lora", "mixed"])))
    assert one.items() <= more.items()
    assert len(one) == 1 + 5 + 5 + 1
    # mixed agents are those of two others
    assert len(more) == 1 + 15 + 15 + 4
    assert commands(plan_seed(tmp_path, 1, options())).keys().isdisjoint(one)


def test_merges_need_their_agents_and_the_fisher_only_where_it_is_asked_for(tmp_path):
    from study import plan_seed

    plan = plan_seed(tmp_path, 3, options(regimes=["mixed"]))
    [merges] = plan["merges"]
    agents = ["reverse-sgd", "sort-lora", "next-sgd", "rotate-lora", "complement-sgd"]
    names = [*(f"agent-3-{agent}" for agent in agents), *(f"fisher-3-{agent}" for agent in agents)]
    assert [need.job.name for need in merges.needs] == names
    by_name = {step.job.name: step.job.arguments for step in plan["agents"]}
    assert "--lora" in by_name["agent-3-sort-lora"]
    assert "--lora" not in by_name["agent-3-next-sgd"]
    plan = plan_seed(tmp_path, 3, options(methods=["average"]))
    assert plan["fisher"] == []
    assert {need.kind for need in plan["merges"][0].needs} == {"agent"}


# -- what is left out when it goes on --


def making(path: Path):
    """A job that makes a directory."""
    from journey import Job

    return Job(path.name, ["-c", f"import os; os.makedirs({str(path)!r})"], path)


def test_only_what_is_missing_or_made_of_something_newer_runs(tmp_path, capsys):
    from journey import Journey
    from study import Step, is_pending, run_stage

    journey = Journey(tmp_path)
    bases = [Step(making(tmp_path / f"base-{seed}"), "base") for seed in range(2)]
    agents = [Step(making(tmp_path / f"agent-{seed}"), "agent", [base]) for seed, base in enumerate(bases)]
    merges = [Step(making(tmp_path / f"merges-{seed}"), "merge", [agent]) for seed, agent in enumerate(agents)]

    def pending() -> list[str]:
        return [step.job.name for step in (*bases, *agents, *merges) if is_pending(journey, step)]

    def run_all() -> None:
        for steps in (bases, agents, merges):
            run_stage(journey, "stage", steps)

    assert len(pending()) == 6
    run_stage(journey, "stage", bases)
    run_stage(journey, "stage", agents[:1])
    assert pending() == ["agent-1", "merges-0", "merges-1"]
    run_all()
    assert pending() == []
    # an agent is trained anew: what was made of it follows, the other seed stays
    journey.marker(agents[1].job).unlink()
    assert pending() == ["agent-1", "merges-1"]
    run_stage(journey, "stage", agents)
    assert pending() == ["merges-1"]
    # a seed that comes later does not touch the others
    run_all()
    (tmp_path / "base-0").rmdir()
    assert pending() == ["base-0", "agent-0", "merges-0"]
    capsys.readouterr()
    run_all()
    assert capsys.readouterr().out.count("stage: 1 of 2 to do") == 3


def test_rows_are_kept_but_for_a_torn_one_and_those_of_other_agents(tmp_path):
    from study_merges import Results, read_rows

    path = tmp_path / "rows" / "0.jsonl"
    results = Results(path, {"agents": 1})
    results.add({"kind": "merge", "method": "ties", "tasks": ["sort"], "scores": {"sort": 0.5}})
    results.add({"kind": "merge", "method": "dare", "tasks": ["sort"], "scores": {"sort": 0.25}})
    path.write_text(path.read_text() + '{"kind": "merge", "method": "wu')
    again = Results(path, {"agents": 1})
    assert again.find(method="dare", tasks=["sort"])["scores"] == {"sort": 0.25}
    assert again.find(method="dare", tasks=["next"]) is None
    assert again.find(method="wudi") is None
    again.add({"kind": "base"})
    assert read_rows(path) == again.rows
    assert [row.get("method") for row in again.rows] == [None, "ties", "dare", None]
    assert Results(path, {"agents": 2}).rows == read_rows(path) == [{"agents": 2}]


# -- what is computed --


def test_the_score_is_the_accuracy_of_greedy_decoding():
    import toy_tasks
    from study_merges import EVALUATION_SEED, draw_batches, score

    torch.manual_seed(0)
    tokenizer = toy_tasks.build_tokenizer(["sort", "next"])
    model = toy_tasks.build_model(tokenizer)
    batches = draw_batches(tokenizer, ["sort", "next"], 0, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # it learns half of the answers by heart
    for _ in range(25):
        for tokens, start in (group for groups in batches.values() for group in groups):
            logits = model(input_ids=tokens[::2, :-1]).logits[:, start - 1 :]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[::2, start:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    scores = score(model, batches)
    assert scores == {task: toy_tasks.accuracy(model, tokenizer, task, 40, EVALUATION_SEED) for task in scores}
    assert all(0.2 < accuracy < 0.9 for accuracy in scores.values())


def test_prompts_for_the_search_are_others():
    import toy_tasks
    from study_merges import draw_batches

    tokenizer = toy_tasks.build_tokenizer(TASKS)

    def prompts(start: int, stop: int) -> set[tuple[int, ...]]:
        batches = draw_batches(tokenizer, TASKS, start, stop)
        return {tuple(row) for groups in batches.values() for tokens, _ in groups for row in tokens.tolist()}

    reported, searched = prompts(0, 50), prompts(50, 70)
    assert (len(reported), len(searched)) == (5 * 50, 5 * 20)
    assert not reported & searched


def row(method: str, scores: list[float], tasks: str) -> dict:
    agents = {task: {"density": {"a": 0.1, "b": 0.3, "c": 0.5}[task]} for task in tasks}
    return {"kind": "merge", "method": method, "tasks": [*tasks], "agents": agents, "scores": by_task(scores)}


def by_task(scores: list[float]) -> dict[str, float]:
    return dict(zip("abc", scores, strict=True))


def cell(merged: float = 0.5) -> list[dict]:
    """One seed: a gains 0.4, b gains 0.2, c gains 0.04, which is too little."""
    agents = {"a": [0.6, 0.2, 0.1], "b": [0.1, 0.4, 0.1], "c": [0.2, 0.2, 0.14]}
    return [
        {"num_prompts": 100, "agents": {}},
        {"kind": "base", "scores": by_task([0.2, 0.2, 0.1])},
        *({"kind": "agent", "task": task, "scores": by_task(scores)} for task, scores in agents.items()),
        row("ram_plus", [merged, 0.4, 0.1], "ab"),
        row("ram_plus", [0.2, 0.3, 0.5], "bc"),
        row("ram_plus", [0.6, 0.1, 0.1], "abc"),
        row("average", [0.3, 0.3, 0.1], "ab"),
        row("average", [0.2, 0.2, 0.1], "abc"),
        {
            **row("ram_plus, best epsilon", [0.2, 0.2, 0.1], "abc"),
            "agents": {task: {"density": 0.0} for task in "abc"},
        },
    ]


def test_figures_of_a_seed_are_those_computed_by_hand():
    from study_summary import summarise_cell

    summary = summarise_cell(cell())
    agents = summary["agents"]
    assert agents["a"] == pytest.approx({"accuracy": 0.6, "gain": 0.4, "others": 0.0, "density": 0.1})
    assert agents["b"] == pytest.approx({"accuracy": 0.4, "gain": 0.2, "others": -0.05, "density": 0.3})
    merges = summary["merges"]
    # ab: (0.3 / 0.4 + 0.2 / 0.2) / 2 = 0.875; bc: b alone, 0.1 / 0.2 = 0.5
    pairs = {"retained": 0.6875, "own": (0.45 + 0.4) / 2, "all": (1.0 / 3 + 1.0 / 3) / 2}
    assert merges["ram_plus"][2] == pytest.approx(pairs)
    assert merges["ram_plus"][3] == pytest.approx({"retained": (1.0 - 0.5) / 2, "own": 0.8 / 3, "all": 0.8 / 3})
    assert merges["average"][2]["retained"] == pytest.approx((0.25 + 0.5) / 2)


def test_means_errors_and_verdicts_over_seeds(tmp_path):
    from study_report import format_markdown
    from study_summary import compare, over_seeds, summarise

    assert over_seeds([0.1, 0.2, 0.6]) == pytest.approx({"mean": 0.3, "error": (0.14 / 2 / 3) ** 0.5, "seeds": 3})
    assert over_seeds([0.4]) == {"mean": 0.4, "error": None, "seeds": 1}
    # differences 0.1, 0.2, 0.3: mean 0.2, error 0.1 / sqrt(3); each alone, the methods spread far more
    ours, theirs = {0: 0.2, 1: 0.6, 2: 1.0, 7: 0.0}, {0: 0.1, 1: 0.4, 2: 0.7}
    assert compare(ours, theirs) == pytest.approx({"mean": 0.2, "error": 0.1 / 3**0.5, "seeds": 3, "verdict": "wins"})
    assert compare(theirs, ours)["verdict"] == "loses"
    assert compare({0: 0.1, 1: 0.5}, {0: 0.2, 1: 0.1})["verdict"] == "no difference"
    assert compare({0: 0.9}, {0: 0.2})["verdict"] == "one seed"

    paths = {}
    for seed, merged in enumerate((0.5, 0.6, 0.55)):
        paths["sparse", seed] = tmp_path / f"{seed}.jsonl"
        paths["sparse", seed].write_text("".join(json.dumps(line) + "\n" for line in cell(merged)))
    timing = {"average": {"seconds": 1.25, "cpu_seconds": 2.5, "peak_bytes": 3e8}}
    results = summarise(paths, ["ram_plus", "average"], timing)
    sparse = results["regimes"]["sparse"]
    # ab: 0.875, 1.0, 0.9375, and bc 0.5 for all
    assert sparse["merges"]["ram_plus"]["retained"][2]["mean"] == pytest.approx((0.9375 + 0.5) / 2)
    assert sparse["merges"]["ram_plus"]["retained"][2]["error"] == pytest.approx(0.03125 / 3**0.5)
    assert sparse["comparisons"][2]["best"] == pytest.approx(
        {"rival": "average", "mean": 0.71875 - 0.375, "error": 0.03125 / 3**0.5, "seeds": 3, "verdict": "wins"}
    )
    assert sparse["left_out"] == 3
    report = format_markdown(results)
    assert "- RAM+ against the best other method at its defaults. wins: sparse N=2, 3." in report
    assert "| `ram_plus` | **71.9 +-1.8** | **25.0 +-0.0** |" in report
    assert "| `average` | 1.2 | 2.5 | 300 |" in report


# -- a run --


def test_a_tiny_study_ends_with_a_report_and_repeats_nothing(tmp_path):
    command = [RECIPES / "study.py", "--output_dir", tmp_path / "study", "--tasks", "sort", "reverse"]
    command += ["--seeds", "0", "--regimes", "sparse", "--methods", "average", "ram_plus", "--num_prompts", "8"]
    command += ["--pretrain_steps", "2", "--max_steps", "1", "--timed_runs", "0"]
    first = run_python(*map(str, command))
    assert first.returncode == 0, first.stdout + first.stderr
    root = tmp_path / "study"
    rows = [json.loads(line) for line in (root / "results" / "0-sparse.jsonl").read_text().splitlines()]
    kinds = [row.get("kind") for row in rows]
    assert kinds == [None, "base", "agent", "agent", "merge", "merge", *["search"] * 6, "merge"]
    assert [(row["method"], row["tasks"]) for row in rows if row.get("kind") == "merge"] == [
        ("ram_plus", ["reverse", "sort"]),
        ("average", ["reverse", "sort"]),
        ("ram_plus, best epsilon", ["reverse", "sort"]),
    ]
    report = (root / "RESULTS.md").read_text()
    assert report in first.stdout
    assert (root / "results.png").stat().st_size > 10_000

    before = {path: path.stat().st_mtime_ns for path in (root / "finished").iterdir()}
    second = run_python(*map(str, command))
    assert second.returncode == 0, second.stdout + second.stderr
    assert "At most about 0 minutes" in second.stdout
    assert {path: path.stat().st_mtime_ns for path in (root / "finished").iterdir()} == before
    assert (root / "RESULTS.md").read_text() == report


def test_another_directory_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = run_python(str(RECIPES / "study.py"), "--output_dir", str(tmp_path))
    assert result.returncode == 2
    assert "choose another --output_dir" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
