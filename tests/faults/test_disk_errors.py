"""Promise 3: what the disk refuses is one error that says where and how much, and nothing of it is ever in sight."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from forks import Forks, calls_of, has_strace, tree

from ram_trl import AgentRegistry, register_agent


ERRORS = {
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EDQUOT": "Disk quota exceeded",
    "EACCES": "Permission denied",
    "EROFS": "Read-only file system",
}
# Calls that change the disk, and what of a message says which bytes were refused.
CALLS = {"write": "bytes", "pwrite64": "bytes", "fallocate": "bytes", "fsync": "flushing", "rename": "", "mkdir": ""}
TRACE = ",".join(CALLS)


@pytest.fixture(scope="module")
def registry(zoo, base, model, tmp_path_factory) -> Path:
    """A registry with two agents."""
    path = tmp_path_factory.mktemp("disk") / "registry"
    register_agent(AgentRegistry(path), "math", str(model), base_model=str(base))
    register_agent(AgentRegistry(path), "code", str(zoo.agent(base, seed=2)), base_model=str(base))
    return path


def job_of(kind: str, registry: Path, zoo, base: Path, model: Path, output: Path) -> tuple[str, dict]:
    if kind == "merge":
        return "merged", {"registry": str(registry), "output_dir": str(output)}
    adapter = str(zoo.adapter(base)) if kind == "live lora" else None
    via = kind.removeprefix("new ")
    arguments = {"registry": str(registry), "agent": "math", "model": str(model), "base": str(base), "via": via}
    return "snapshots", {**arguments, "adapter": adapter}


def assert_refused(outcome: dict, folder: Path, call: str, error: str) -> None:
    """One documented error, with the path and where bytes were refused their number; success was not reported."""
    assert (outcome["status"], outcome.get("error"), outcome["acknowledged"]) == (0, "StorageError", []), outcome
    message = outcome["message"]
    assert "\n" not in message and ERRORS[error] in message
    # PEFT writes its configuration itself, and does not say how long it is
    assert str(folder) in message and (CALLS[call] in message or "adapter_config.json" in message), message


@pytest.mark.parametrize("kind", ["checkpoint", "new checkpoint", "live", "live lora", "merge"])
@pytest.mark.parametrize("how", ["some", pytest.param("all", marks=[pytest.mark.faults, pytest.mark.timeout(3600)])])
def test_a_system_call_that_is_refused(forks: Forks, zoo, base, model, registry, tmp_path, chance, how, kind):
    has_strace()
    places = {}
    for name in ("spare", "real"):
        (tmp_path / name).mkdir()
        places[name] = tmp_path / name / "registry"
        if "new" not in kind:
            shutil.copytree(registry, places[name])
    output = {name: tmp_path / name / "merged" for name in places}
    jobs = {name: job_of(kind, places[name], zoo, base, model, output[name]) for name in places}
    # how often each call comes is counted in another place
    outcome, lines = forks.traced(tmp_path, ["-e", f"trace={TRACE}"], *jobs["spare"])
    assert "error" not in outcome, outcome
    calls = Counter(call for call, _ in calls_of(lines))
    assert calls["fsync"] >= 5 and calls["rename"] == 1
    points = [(call, number, error) for call, number in calls_of(lines) for error in ERRORS]
    if how == "some":
        few = [point for point in points if point[0] in ("fsync", "rename", "mkdir")]
        points = chance.sample(few, 3) + chance.sample(points, 2)
    print(f"{kind}: {len(points)} points, {dict(calls)}")
    before = tree(tmp_path / "real")
    for call, number, error in points:
        # a disk that is full stays so; an error of input or output comes once
        when = f"{number}" if error == "EIO" else f"{number}+"
        options = ["-e", f"trace={TRACE}", "-e", f"inject={call}:error={error}:when={when}"]
        outcome, lines = forks.traced(tmp_path, options, *jobs["real"])
        assert any("(INJECTED)" in line for line in lines), (call, number)
        assert_refused(outcome, tmp_path / "real", call, error)
        assert tree(tmp_path / "real") == before, (call, number, error)


@pytest.mark.parametrize(
    ("levels", "via"),
    [
        (3, "checkpoint"),
        *(pytest.param(20, via, marks=pytest.mark.faults) for via in ("checkpoint", "live", "live lora")),
    ],
)
def test_a_disk_that_is_full(forks: Forks, zoo, base, model, tmp_path, levels, via):
    with forks.mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as folder:
        registry, place = folder / "registry", {"path": str(folder)}
        _, job = job_of(via, registry, zoo, base, model, folder)
        look = {"registry": str(registry), "agent": "math"}
        free = forks.result("free", place)
        assert forks.run("snapshots", job)["acknowledged"] == [1]
        needed = free - forks.result("free", place)
        assert forks.run("snapshots", job)["acknowledged"] == [2]
        before = forks.result("examined", look)
        assert list(before["valid"].values()) == [True, True] and before["left"] == []
        for level in range(levels):
            forks.result("filled", {"path": str(folder / "ballast"), "left": needed * level // (levels + 1)})
            outcome = forks.run("snapshots", job)
            assert_refused(outcome, folder, "write" if level else "mkdir", "ENOSPC")
            assert forks.result("examined", look) == before
        forks.result("filled", {"path": str(folder / "ballast"), "left": -1})
        assert forks.run("snapshots", job)["acknowledged"] == [3]
        print(f"{via}: a snapshot takes {needed} bytes; refused at {levels} levels below")
