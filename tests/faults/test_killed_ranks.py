"""Promise 7: a merge of which one process is killed comes to nothing, soon, on all of them."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from forks import Forks, tree
from ranks import FIRSTS, POINTS, pretend

from ram_trl import AgentRegistry, merge_agents, register_agent


RECIPE = str(Path(__file__).parents[2] / "recipes" / "merge.py")
SECONDS = 60


@pytest.fixture(scope="module")
def registry(zoo, base, tmp_path_factory) -> Path:
    """A registry of three agents."""
    path = tmp_path_factory.mktemp("ranks") / "registry"
    for seed, name in enumerate(("code", "math", "tool")):
        model = zoo.agent(base, seed=seed + 1, density=0.4)
        register_agent(AgentRegistry(path), name, str(model), base_model=str(base))
    return path


@pytest.fixture(scope="module")
def whole(registry, tmp_path_factory) -> dict:
    """What the merge gives if nobody dies."""
    merge_agents(registry, str(tmp_path_factory.mktemp("whole") / "merged"))
    return weights(next(tmp_path_factory.getbasetemp().glob("whole*/merged")))


def weights(merged: Path) -> dict:
    """A merged directory, the report aside, which tells how it was made."""
    return {name: content for name, content in tree(merged).items() if name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("size", "points"),
    [
        (2, 3),
        *(pytest.param(size, 50, marks=[pytest.mark.faults, pytest.mark.timeout(7200)]) for size in (1, 2, 4, 8)),
    ],
)
def test_one_rank_is_killed(forks: Forks, registry, whole, tmp_path, chance, points, size):
    place = tmp_path / "place"
    place.mkdir()
    output, before = place / "merged", tree(registry)
    arguments = {"size": size, "registry": str(registry), "output_dir": str(output)}
    clean = forks.result("merges", arguments)
    assert clean["codes"] == [0] * size and weights(output) == whole
    named = list(POINTS) if size > 1 else [name for name in POINTS if not name.startswith("join")]
    cases = [(name, rank) for name in named for rank in sorted({0, size - 1})]
    # only rank 0 lays out, finishes and publishes
    cases = [(n, rank) for n, rank in cases if rank == 0 or n not in ("laying out", "finishing", "publishing")]
    cases = chance.sample(cases, 2) if points == 3 else cases
    # who dies before all have met is waited for
    arguments["join"] = 4 if points == 3 else None
    cases += [(chance.uniform(0, clean["length"]), chance.randrange(size)) for _ in range(points - len(cases))]
    outcomes, slowest = Counter(), 0.0
    for point, victim in cases:
        shutil.rmtree(output, ignore_errors=True)
        found = forks.result("merges", {**arguments, "victim": victim, "point": point})
        where = (point, victim, found)
        assert found["hanging"] == [] and found["seconds"] < SECONDS, where
        assert tree(registry) == before, where
        slowest = max(slowest, found["seconds"])
        if output.exists():
            # it was published before the rank was killed
            assert isinstance(point, float) and weights(output) == whole, where
            outcomes["published before"] += 1
            continue
        assert 0 not in found["codes"] and found["codes"][victim] == -9, where
        assert not [name for name in found["left"] if victim != 0], where
        outcomes["came to nothing"] += 1
        for name in found["left"]:
            assert name.startswith(".tmp-"), where
            shutil.rmtree(place / name)
    print(f"{size} processes, {len(cases)} kills: {dict(outcomes)}, the others ended within {slowest:.1f} s")
    assert outcomes["came to nothing"] > len(cases) / 2


def test_a_first_process_that_comes_to_nothing_is_waited_for_no_longer_than_a_moment(forks: Forks):
    ended = forks.result("joins", {"join": 3})
    assert {way: found["code"] for way, found in ended.items()} == dict.fromkeys(FIRSTS, 2)
    # it may take a moment until a child has begun
    assert max(found["seconds"] for found in ended.values()) < 3 + 3, ended


def test_a_process_that_waited_in_vain_ends_by_itself(registry, tmp_path):
    program = (
        "import runpy, sys, ram_trl.distributed; ram_trl.distributed.JOIN_SECONDS = 2; "
        f"sys.argv[0] = {RECIPE!r}; runpy.run_path({RECIPE!r}, run_name='__main__')"
    )
    words = ["--registry", str(registry), "--output_dir", str(tmp_path / "merged")]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=pretend, args=(listening, "is mute"), daemon=True).start()
        port = str(listening.getsockname()[1])
        environment = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    # only rank 0 says why
    assert (done.returncode, done.stderr) == (2, "") and list(tmp_path.iterdir()) == []


def test_a_rank_that_works_for_longer_than_they_wait_at_the_start_is_waited_for(
    forks: Forks, registry, whole, tmp_path
):
    output = tmp_path / "place" / "merged"
    output.parent.mkdir()
    arguments = {"size": 2, "registry": str(registry), "output_dir": str(output), "join": 2, "slow": 5}
    assert forks.result("merges", arguments)["codes"] == [0, 0]
    assert weights(output) == whole
