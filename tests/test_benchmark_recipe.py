"""`recipes/benchmark.py` as a user runs it, on models of a few hundred thousand parameters and without MergeKit."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import read_model

from ram_trl import merge_agents


RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = [sys.executable, str(RECIPES / "benchmark.py"), "--sizes", "tiny", "--runs", "1", "--mergekit", "none"]
MERGES = ["ours", "plain float32"]


def start(folder: Path, only: str) -> subprocess.Popen:
    command = [*RECIPE, "--output_dir", str(folder), "--only", only, "--agents", "4"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """The directories of two benchmarks, which run side by side and measure half of the sections each."""
    parts = {tmp_path_factory.mktemp("benchmark"): only for only in ("merge,snapshot", "processes,scaling")}
    processes = [start(folder, only) for folder, only in parts.items()]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return list(parts)


@pytest.fixture(scope="module")
def results(folders) -> dict:
    """All the sections of both."""
    sizes = [json.loads((folder / "results.json").read_text())["sizes"]["tiny"] for folder in folders]
    return sizes[0] | sizes[1]


def test_agents_are_as_dense_as_those_of_the_paper(results):
    agents = results["agents"]["agents"]
    assert sorted(agent["name"] for agent in agents) == ["code", "memory", "tool"]
    for agent in agents:
        assert agent["density"] == pytest.approx(agent["paper_density"], abs=0.005)


def test_models_are_the_same_every_time(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["models.py", "--size", "tiny", "--output_dir", str(tmp_path), "--agents", "1"])
    runpy.run_path(str(RECIPES / "benchmarks" / "models.py"), run_name="__main__")
    for name in ("base", "tool"):
        for folder in folders:
            again = (tmp_path / name / "model.safetensors").read_bytes()
            assert (folder / "models" / "tiny" / name / "model.safetensors").read_bytes() == again


def test_every_command_is_measured(results):
    for section in ("merge", "snapshot", "scaling"):
        for name, command in results[section]["commands"].items():
            assert command["failure"] is None, name
            (run,) = command["runs"]
            assert run["status"] == 0
            assert all(run[key] > 0 for key in ("seconds", "cpu_seconds", "peak_bytes", "read_bytes"))
    merges = results["merge"]["commands"]
    for name in MERGES:
        assert merges[name]["runs"][0]["written_bytes"] >= 2 * results["agents"]["parameters"]
    assert set(results["merge"]["phases"]) == {"merge"}
    actions = {"snapshot", "register", "restore", "save_pretrained", "read and digest", "save_pretrained, sync"}
    assert actions == set(results["snapshot"]["inside"]["code"][0])


def test_ours_and_the_plain_merge_see_the_same_rho(results):
    ours, plain = (results["merge"]["commands"][name]["rho"] for name in MERGES)
    assert ours == pytest.approx(plain, rel=1e-12)


def test_ours_and_the_plain_merge_write_the_same_weights(folders, tmp_path, monkeypatch):
    models = folders[0] / "models" / "tiny"
    agents = [str(models / name) for name in ("code", "memory", "tool")]
    options = ["--base_model", str(models / "base"), "--agents", *agents, "--output_dir", str(tmp_path / "plain")]
    monkeypatch.setattr(sys, "argv", ["plain.py", *options])
    runpy.run_path(str(RECIPES / "benchmarks" / "plain.py"), run_name="__main__")
    merge_agents(str(folders[0] / "registries" / "tiny"), str(tmp_path / "ours"))
    ours, plain = read_model(tmp_path / "ours"), read_model(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    steps = torch.cat([(ours[n].view(torch.int16).int() - plain[n].view(torch.int16).int()).flatten() for n in ours])
    # a sum that another order of the operations rounds to the other side of a tie
    assert steps.abs().max() <= 1
    assert steps.count_nonzero() < 1e-4 * len(steps)


def test_several_processes_write_the_same_bytes(results):
    section = results["processes"]
    digests = {name: command.get("sha256") for name, command in section["commands"].items()}
    assert section["identical_bytes"]
    assert len(digests) == 6
    for name in ("1 process, accelerate launch", "2 processes, accelerate launch", "2 processes, torchrun"):
        assert digests[name] == digests["1 process"] is not None


def test_further_agents_are_registered_and_their_checkpoints_removed(folders, results):
    stored = {agent["name"]: agent["bytes"] for agent in results["agents"]["agents"]}
    assert results["scaling"]["stored_bytes"] == {
        "4 agents": pytest.approx(sum(stored.values()) + stored["code"], rel=0.01)
    }
    assert {path.name for path in (folders[1] / "models" / "tiny").iterdir()} == {"base", "code", "memory", "tool"}
    assert not (folders[1] / "scratch").exists()


def test_report(folders):
    reports = [(folder / "report.md").read_text() for folder in folders]
    assert "| plain float32" in reports[0] and "### tiny: snapshot (runs: 1)" in reports[0]
    assert "the same (sha256)" in reports[1] and "## Scaling with agents, tiny" in reports[1]
    assert "## Not measured\n\n0.5B, 1.5B, 7B" in reports[0]


def test_what_is_measured_is_kept(folders):
    before = (folders[0] / "results" / "tiny" / "merge.json").read_bytes()
    process = start(folders[0], "merge")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert "already there" in output
    assert (folders[0] / "results" / "tiny" / "merge.json").read_bytes() == before


def test_another_directory_is_left_alone(tmp_path):
    (tmp_path / "registries").mkdir()
    process = start(tmp_path, "merge")
    assert "holds something that is not a benchmark" in process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["registries"]


@pytest.mark.parametrize(
    ("script", "status"), [("head -c 1000000 /dev/zero > $0", 0), ("exit 3", 3), ("kill -9 $$", -9)]
)
def test_runner_measures_a_command_with_all_its_processes(tmp_path, script, status):
    result = tmp_path / "result.json"
    command = ["sh", "-c", script, str(tmp_path / "written")]
    runner = [
        sys.executable,
        "-I",
        "-S",
        str(RECIPES / "benchmarks" / "runner.py"),
        str(result),
        str(tmp_path / "log"),
    ]
    subprocess.run([*runner, *command], check=True)
    measured = json.loads(result.read_text())
    assert measured["status"] == status
    assert measured["peak_bytes"] < 100e6
    assert (measured["written_bytes"] >= 1000000) == (status == 0)
