"""Sweeps: the grid, the table, the best configuration, as `recipes/sweep.py` makes them."""

import json
import runpy
import signal
import sys
from pathlib import Path

import pytest
import yaml

from ram_trl.config import MergeConfig
from ram_trl.errors import ConfigError
from ram_trl.evaluating.sweep import read_grid
from ram_trl.options import parse_config


RECIPE = str(Path(__file__).parent.parent / "recipes" / "sweep.py")


def test_a_grid_is_all_combinations(tmp_path):
    (tmp_path / "grid.yaml").write_text(
        "{method: [ram_plus], r: [0, 0.1], agents: [[a, b], [a]], weights: [{a: 0.5}]}"
    )
    merges = read_grid(str(tmp_path / "grid.yaml"))
    assert list(merges) == ["r=0 agents=a+b", "r=0 agents=a", "r=0.1 agents=a+b", "r=0.1 agents=a"]
    assert merges["r=0.1 agents=a"] == {"method": "ram_plus", "r": 0.1, "agents": ["a"], "weights": {"a": 0.5}}


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no options"),
        ("r: 0.1", "is not a list of values"),
        ("r: []", "is not a list of values"),
        ("speed: [1]", "unknown option 'speed'"),
        ("r: [-1]", "r=-1"),
        ("method: [rem]", "method='rem'"),
        ("agents: [math]", "is not a list of names"),
        ("r: [", "cannot be read"),
        (
            "{r: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], seed: [" + ",".join(map(str, range(1000))) + "]}",
            "more than 10,000",
        ),
    ],
)
def test_mistakes_in_a_grid(tmp_path, text, words):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_grid(str(tmp_path / "grid.yaml"))


def test_a_sweep_ends_with_the_best(zoo, tmp_path, monkeypatch, capsys):
    base = zoo.base("qwen2_tied")
    registry = zoo.registry(
        base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["code", "math"])}
    )
    rows = [{"prompt": "ab3"[i % 3] * (1 + i * 5 % 13) + f"{i}=", "answer": str(i)} for i in range(23)]
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    task = {"dataset": str(tmp_path / "texts.json"), "reward_funcs": ["run_evaluating:letters"], "max_new_tokens": 8}
    (tmp_path / "tasks.yaml").write_text(json.dumps({"math": {**task, "agent": "math"}, "code": task}))
    (tmp_path / "grid.yaml").write_text("{r: [0.0, 2.0, 8.0], agents: [[math], [math, code]]}")
    words = ["--registry", str(registry.path), "--tasks", str(tmp_path / "tasks.yaml"), "--batch_size", "23"]
    words += ["--grid", str(tmp_path / "grid.yaml"), "--output_dir", str(tmp_path / "sweep")]
    monkeypatch.setattr(sys, "argv", [RECIPE, *words])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runpy.run_path(RECIPE, run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, handler)
    content = json.loads((tmp_path / "sweep" / "evaluation.json").read_text())
    means = {name: row["mean"]["value"] for name, row in content["rows"].items() if "r=" in name}
    assert len(means) == 6 and len(set(means.values())) > 1
    # r says nothing of an agent alone, all of whose changes are unique
    assert means["r=0 agents=math"] == means["r=8 agents=math"] == content["rows"]["math@v1"]["mean"]["value"]
    best = max(means, key=means.__getitem__)
    printed = capsys.readouterr().out
    assert f"best (*): {best};" in printed and "retained gain" in printed
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 1000
    assert (tmp_path / "sweep" / "sweep.md").read_text().count("\n") == 8
    options = yaml.safe_load((tmp_path / "sweep" / "best.yaml").read_text())
    assert best == f"r={options['r']:g} agents={'+'.join(options['agents'])}"
    config = parse_config(MergeConfig, ["--config", str(tmp_path / "sweep" / "best.yaml"), "--probe_only"])
    assert (config.r, config.agents, config.registry) == (options["r"], options["agents"], str(registry.path))
