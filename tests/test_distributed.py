"""Several real processes: they agree on every outcome, and one agent comes out of them."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Zoo, read_model
from training import assert_same_weights, restored_weights, run_shell

from ram_trl import AgentRegistry, merge_agents, register_agent
from ram_trl.arithmetic.methods import METHODS
from ram_trl.distributed import all_cores


SCRIPT = Path(__file__).parent / "run_distributed.py"
CORES = len(os.sched_getaffinity(0))


def run_ranks(
    scenario: str, folder: Path, *bases: Path, env: dict[str, str] | None = None, processes: int = 2
) -> list[dict[str, Any]]:
    """Run a scenario in some processes; what each of them saw."""
    names = " ".join(map(str, bases))
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node {processes}"
    result = run_shell(
        f"{torchrun} {SCRIPT} {scenario} {folder} {names}",
        env={"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **(env or {})},
    )
    assert result.returncode == 0, result.stderr
    return [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(processes)]


# The processes agree


@pytest.fixture(scope="module")
def collectives(tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks("collectives", tmp_path_factory.mktemp("collectives"))


def seen(ranks: list[dict[str, Any]], case: str, key: str) -> list[Any]:
    return [rank[case].get(key) for rank in ranks]


def test_what_one_gathers_all_have_by_rank(collectives):
    assert seen(collectives, "gather", "result") == [[{"rank": 0}, {"rank": 1}]] * 2


def test_counts_are_summed_exactly(collectives):
    assert seen(collectives, "sum_counts", "result") == [[2**61 + 1, 1, 0]] * 2


def test_each_rank_runs_an_action_or_only_the_main_one_does(collectives):
    assert seen(collectives, "run", "result") == [0, 1]
    assert seen(collectives, "run_on_main", "result") == [7, 7]
    assert seen(collectives, "agree", "error") == [None, None]


@pytest.mark.parametrize(
    ("case", "errors", "messages"),
    [
        ("fail_on_0", ["StorageError"] * 2, ["disk full", "disk full (rank 0)"]),
        ("fail_on_1", ["StorageError"] * 2, ["disk full (rank 1)", "disk full"]),
        ("fail_on_both", ["StorageError"] * 2, ["disk 0 full", "disk 1 full"]),
        ("main_fails", ["AgentNotFoundError"] * 2, ["no such agent", "no such agent (rank 0)"]),
        ("agree_on_error_of_1", ["AgentNotFoundError"] * 2, ["no such agent (rank 1)", "no such agent"]),
        (
            "foreign_error_on_1",
            ["DistributedError", "ZeroDivisionError"],
            ["ZeroDivisionError: of one (rank 1)", "of one"],
        ),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_within_seconds(collectives, case, errors, messages):
    assert seen(collectives, case, "error") == errors
    assert seen(collectives, case, "message") == messages
    assert max(seen(collectives, case, "seconds")) < 10


def test_after_errors_the_ranks_are_still_in_step(collectives):
    assert seen(collectives, "still_in_step", "result") == [[0, 1]] * 2


def test_ranks_that_find_different_versions_merge_nothing_or_look_again(zoo: Zoo, tmp_path):
    base = zoo.base("llama")
    for rank, seeds in enumerate(((1, 2), (3,))):
        for seed in seeds:
            register_agent(
                str(tmp_path / f"registry-{rank}"), "math", str(zoo.agent(base, seed)), base_model=str(base)
            )
    ranks = run_ranks("moving", tmp_path)
    assert seen(ranks, "apart", "error") == ["DistributedError"] * 2
    for message in seen(ranks, "apart", "message"):
        assert re.search(r"rank 0 finds math@v2 \(.*\) in the registry, rank 1 finds math@v1 \(", message)
    assert not (tmp_path / "apart").exists()
    # one look too early, and both have looked again
    assert seen(ranks, "late", "result") == [[2], [2]]
    assert [rank["looks"] for rank in ranks] == [2, 2]


def test_the_ranks_of_a_run_have_one_group_of_their_own_that_waits_longer_than_the_runs_own(tmp_path):
    ranks = run_ranks("own_group", tmp_path)
    for run in ("first", "second"):
        assert seen(ranks, f"{run} group", "result") == [True, True]
        assert seen(ranks, f"{run} late", "result") == [[0, 1], [0, 1]]
    assert seen(ranks, "none", "result") == [1, 1]


# Pieces of a sharded parameter


@pytest.fixture(scope="module")
def streams(tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks("streams", tmp_path_factory.mktemp("streams"), processes=4)


@pytest.mark.parametrize(
    ("case", "numel"),
    [
        ("even", 16),
        ("uneven", 21),
        ("one rank holds nothing", 5),
        ("one rank holds all", 9),
        ("empty", 0),
        ("held twice", 15),
        ("held twice, side by side", 15),
        # after an error of one rank
        ("still in step", 16),
    ],
)
def test_rank_0_sees_a_parameter_of_which_each_rank_holds_rows_piece_by_piece(streams, case, numel):
    assert seen(streams, case, "error") == [None] * 4
    numbers = [float(number) for number in range(numel)]
    assert streams[0][case]["result"] == [numbers[at : at + 4] for at in range(0, numel, 4)]


@pytest.mark.parametrize("case", ["columns", "rows of columns", "rows of rows", "copies"])
def test_other_parameters_are_needed_whole(streams, case):
    assert seen(streams, case, "result") == ["whole"] * 4
    assert seen(streams, "plain", "result") == [None] * 4


def test_an_error_of_a_rank_that_looks_at_its_part_is_raised_on_all(streams):
    errors = ["DistributedError", "DistributedError", "ZeroDivisionError", "DistributedError"]
    assert seen(streams, "one fails", "error") == errors
    assert max(seen(streams, "one fails", "seconds")) < 10


# Data parallel GRPO


@pytest.fixture(scope="module")
def ddp(zoo: Zoo, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("ddp")
    return run_ranks("grpo_ddp", folder, zoo.base("qwen2_untied")), folder


def test_data_parallel_training_registers_one_version_of_the_saved_weights(ddp, tmp_path):
    ranks, folder = ddp
    assert seen(ranks, "clean", "world_size") == [2, 2]
    assert seen(ranks, "clean", "registered") == ["clean@v1", None]
    assert seen(ranks, "clean", "callback_error") == ["NoneType", "NoneType"]
    registry = AgentRegistry(folder / "registry")
    assert registry.names() == ["clean", "merged"]
    assert registry.versions("clean") == [1]
    assert registry.get("clean").manifest.training["num_processes"] == 2
    back = restored_weights(folder / "registry", "clean", tmp_path / "back")
    assert_same_weights(back, read_model(folder / "saved-clean"))


def test_data_parallel_ranks_merge_what_they_registered(ddp, tmp_path):
    ranks, folder = ddp
    assert seen(ranks, "merged", "callback_error") == ["NoneType", "NoneType"]
    assert seen(ranks, "merged", "generalist") == ["generalist@v1", "generalist@v1"]
    generalist = AgentRegistry(folder / "registry").generalists.get("generalist")
    assert generalist.parents == ["clean@v1", "merged@v1"] and generalist.manifest.gate.endswith("promotes")
    merge_agents(folder / "registry", str(tmp_path / "merged"))
    assert_same_weights(read_model(generalist.path), read_model(tmp_path / "merged"))


def test_a_fault_that_only_the_main_rank_sees_costs_no_rank_the_run(ddp):
    ranks, folder = ddp
    assert seen(ranks, "fault", "result") == [2, 2]
    assert seen(ranks, "fault", "callback_error") == ["StorageError", "StorageError"]
    assert read_model(folder / "saved-fault")


def test_a_fault_that_only_the_main_rank_sees_stops_all_ranks_if_strict(ddp):
    ranks, folder = ddp
    assert seen(ranks, "strict", "error") == ["StorageError", "StorageError"]
    assert seen(ranks, "strict", "callback_error") == ["StorageError", "StorageError"]
    assert read_model(folder / "saved-strict")


def test_what_only_the_main_rank_can_refuse_stops_all_ranks_before_training(ddp):
    ranks, _ = ddp
    assert seen(ranks, "refused", "error") == ["StorageError", "StorageError"]
    assert max(seen(ranks, "refused", "seconds")) < 10


@pytest.fixture(scope="module")
def main_fails(zoo: Zoo, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("main_fails")
    return run_ranks("main_fails", folder, zoo.base("qwen2_untied")), folder


@pytest.mark.parametrize("case", ["conversion", "parameter", "adapter"])
def test_an_error_in_the_main_ranks_reading_of_the_model_is_raised_on_all_within_seconds(main_fails, case):
    ranks, _ = main_fails
    assert seen(ranks, case, "error") == ["ZeroDivisionError", "DistributedError"]
    assert seen(ranks, case, "message") == ["unforeseen", "ZeroDivisionError: unforeseen (rank 0)"]
    assert max(seen(ranks, case, "seconds")) < 10


def test_after_such_an_error_the_ranks_register_together_again_and_nothing_else_is_left(main_fails):
    ranks, folder = main_fails
    assert seen(ranks, "then", "result") == ["then@v1", None]
    assert AgentRegistry(folder / "registry").names() == ["then"]
    assert not list((folder / "registry").rglob(".tmp-*"))


# Sharded models


@pytest.fixture(scope="module")
def fsdp2(zoo: Zoo, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("fsdp2")
    return run_ranks("fsdp2", folder, *map(zoo.base, ("qwen3_moe", "qwen2_tied", "qwen2_untied"))), folder


@pytest.mark.parametrize("kind", ["qwen2_untied", "qwen2_tied", "qwen3_moe"])
def test_an_fsdp2_model_is_registered_as_the_unsharded_one(zoo: Zoo, fsdp2, tmp_path, kind):
    ranks, folder = fsdp2
    agent, base = zoo.base(kind).name, read_model(zoo.base(kind))
    assert seen(ranks, agent, "error") == [None, None]
    assert seen(ranks, agent, "result") == [f"{agent}@v1", None]
    trained = read_model(folder / "saved" / agent)
    assert all(not torch.equal(trained[name], base[name]) for name in base)
    assert_same_weights(restored_weights(folder / "registry", f"{agent}@v1", tmp_path / "back"), trained)


def test_an_fsdp2_adapter_is_registered_as_the_unsharded_one(fsdp2):
    ranks, folder = fsdp2
    assert seen(ranks, "lora", "message") == [None, None]
    agent = AgentRegistry(folder / "registry").get(ranks[0]["lora"]["result"])
    assert agent.manifest.kind == "lora"
    assert_same_weights(read_model(agent.path), read_model(folder / "saved" / "adapter"))


def test_a_nan_in_one_shard_is_refused_on_all_ranks(fsdp2):
    ranks, folder = fsdp2
    assert seen(ranks, "nan", "error") == ["NonFiniteError", "NonFiniteError"]
    assert all("model.layers.0.mlp.down_proj.weight" in message for message in seen(ranks, "nan", "message"))
    assert "nan" not in AgentRegistry(folder / "registry").names()


@pytest.fixture(scope="module")
def fsdp1(zoo: Zoo, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("fsdp1")
    return run_ranks("fsdp1", folder, zoo.base("qwen2_untied")), folder


@pytest.mark.parametrize("case", ["NO_WRAP", "NO_WRAP, flat", "TRANSFORMER_BASED_WRAP"])
def test_an_fsdp1_model_is_refused_with_the_cure_however_it_is_wrapped(fsdp1, case):
    ranks, folder = fsdp1
    assert seen(ranks, case, "error") == ["UnsupportedModelError", "UnsupportedModelError"]
    for message in seen(ranks, case, "message"):
        assert "FSDP1" in message and "fsdp_version: 2" in message and "ram-trl register" in message
    assert not (folder / "registry").exists()


def test_a_zero3_model_is_registered_as_the_unsharded_one(zoo: Zoo, tmp_path):
    pytest.importorskip("deepspeed")
    base = zoo.base("qwen2_untied")
    ranks = run_ranks("zero3", tmp_path, base, env={"DS_ACCELERATOR": "cpu"})
    assert seen(ranks, "registered", "error") == [None, None]
    back = restored_weights(tmp_path / "registry", "math", tmp_path / "back")
    assert_same_weights(back, read_model(tmp_path / "saved"))


def test_every_method_gives_the_same_bytes_and_report_whatever_the_processes_and_threads(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_wide")
    models = {"code": zoo.agent(base, seed=1, density=0.3), "math": zoo.agent(base, seed=2, density=0.4)}
    models["tool"] = zoo.adapter(base, seed=3, target_modules=["q_proj", "down_proj"])
    registry = zoo.registry(base, models)
    own = {"wudi": {"steps": 10}, "dare_ties": {"density": 0.1}}
    cases = {
        name: {"method": name, "method_options": own.get(name, {}), "seed": 5}
        for name, m in METHODS.items()
        if not (m.rescale or m.needs_fisher)
    }
    cases["ties per tensor"] = {"method": "ties", "method_options": {"per_tensor": 1}, "rounding": "stochastic"}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    ranks = run_ranks("methods", tmp_path, registry.path)
    with threads(3):
        for case, options in cases.items():
            report = merge_agents(registry, str(tmp_path / "one" / case), **options)
            assert seen(ranks, case, "message") == [None, None], case
            assert seen(ranks, case, "result") == [report["agents"]] * 2, case
            one, two = (folder / case / "model.safetensors" for folder in (tmp_path / "one", tmp_path / "two"))
            assert one.read_bytes() == two.read_bytes(), case


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, max(1, CORES // 2)),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "999"}, 1),
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, CORES),
        # the user's own choice
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "2"}, min(2, CORES)),
        ({"OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_launched_processes_share_the_cores_unless_the_user_chose_threads(environment, expected):
    script = "import torch, ram_trl.distributed as d; d.start_world(cpu=True); print(torch.get_num_threads())"
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == expected


def test_all_cores_are_given_back(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = torch.get_num_threads()
    with all_cores():
        assert torch.get_num_threads() == CORES
    assert torch.get_num_threads() == before
