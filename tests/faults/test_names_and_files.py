"""Promise 6: no name leads out of the registry, and what is no file of its own is refused or reported."""

import shutil
from pathlib import Path

import pytest
from forks import Forks, tree
from names import HOSTILE_NAMES
from special_files import KINDS

from ram_trl import AgentRegistry, register_agent
from ram_trl.lifecycle.archive import export_agent


@pytest.fixture
def sandbox(zoo, tmp_path) -> Path:
    """A registry with one agent, among things that nobody may touch."""
    folder, base = tmp_path / "sandbox", zoo.base("qwen2_untied")
    for name in ("out", "cwd", "deep/registry/agents", "sources"):
        (folder / name).mkdir(parents=True)
    for place in (folder, folder / "deep", folder / "cwd"):
        (place / "outside").mkdir()
        (place / "outside" / "manifest.json").write_text("{}")
        (place / "outside.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        (place / "math").write_text("x")
    shutil.copytree(base, folder / "sources" / "base")
    shutil.copytree(zoo.agent(base, seed=1), folder / "sources" / "model")
    registry = AgentRegistry(folder / "deep" / "registry")
    register_agent(registry, "math", str(folder / "sources" / "model"), base_model=str(folder / "sources" / "base"))
    export_agent(registry, "math", folder / "sources" / "math.tar")
    return folder


def outside(sandbox: Path) -> dict:
    """All that is not the registry's, nor was asked for."""
    mine = ("deep/registry", "out", "sources/sharded", "sources/names")
    return {name: entry for name, entry in tree(sandbox).items() if not name.startswith(mine)}


@pytest.mark.parametrize("share", [0.05, pytest.param(1, marks=[pytest.mark.faults, pytest.mark.timeout(3600)])])
def test_hostile_names_at_every_entry(forks: Forks, sandbox, chance, share):
    before = outside(sandbox)
    assert len(HOSTILE_NAMES) >= 200
    names = chance.sample(range(len(HOSTILE_NAMES)), int(share * len(HOSTILE_NAMES)))
    found = forks.result("try_names", {"sandbox": str(sandbox), "names": names})
    print(f"{found['names']} names at {found['entries']} entries: {found['tried']} attempts")
    assert found["wrong"] == []
    assert found["entries"] >= 30
    assert outside(sandbox) == before
    AgentRegistry(sandbox / "deep" / "registry").get("math@v1").verify()


def test_hostile_names_in_files(forks: Forks, sandbox):
    version = sandbox / "deep" / "registry" / "agents" / "math" / "v000001"
    for action, arguments in (
        ("try_shard_names", {}),
        ("try_file_names", {"version": str(version)}),
        ("try_tensor_names", {}),
    ):
        before = outside(sandbox)
        found = forks.result(action, {"sandbox": str(sandbox), **arguments})
        print(f"{action}: {found['names']} names")
        assert found["wrong"] == [] and found["names"] >= 200 and found.get("same", True)
        assert outside(sandbox) == before


def test_no_pickle_is_opened(forks: Forks, sandbox):
    found = forks.result("try_pickles", {"sandbox": str(sandbox)})
    assert found["wrong"] == [] and not found["canary"]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_is_no_file_of_its_own(forks: Forks, zoo, sandbox, tmp_path, kind):
    registry, base = sandbox / "deep" / "registry", sandbox / "sources" / "base"
    if kind == "lora":
        register_agent(
            AgentRegistry(registry), "tool", str(zoo.adapter(zoo.base("qwen2_untied"))), base_model=str(base)
        )
    agent = "math" if kind == "full" else "tool"
    arguments = {"registry": str(registry), "agent": agent, "base": str(base), "out": str(sandbox / "out")}
    outcomes = forks.result("try_special_files", arguments)
    print(f"{kind}: {len(outcomes)} files x {len(KINDS)} kinds")
    for name, found in outcomes.items():
        is_base = name in ("model.safetensors", "config.json")
        for case, outcome in found.items():
            what, action = case.split(": ")
            # the same bytes under two names are the same bytes; links of a user's own are how the Hub's cache works
            harmless = what == "hard link" or (is_base and what == "symlink") or (is_base and action == "verify")
            # the base alone is registered here
            harmless |= action == "register" and not is_base
            assert outcome == "refused" or (harmless and outcome == "accepted"), (name, case, outcome)
    AgentRegistry(registry).get(agent).verify()


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("seconds", [2, pytest.param(120, marks=[pytest.mark.faults, pytest.mark.timeout(1200)])])
def test_files_that_change_while_they_are_read(forks: Forks, zoo, sandbox, chance, seconds, kind):
    registry, base = sandbox / "deep" / "registry", sandbox / "sources" / "base"
    if kind == "lora":
        register_agent(
            AgentRegistry(registry), "tool", str(zoo.adapter(zoo.base("qwen2_untied"))), base_model=str(base)
        )
    arguments = {
        "registry": str(registry),
        "agent": "math" if kind == "full" else "tool",
        "base": str(base),
        "out": str(sandbox / "out"),
        "seed": chance.randrange(2**32),
        "seconds": seconds,
    }
    found = forks.result("racing", arguments)
    print(f"{kind}, {seconds} s: {found['outcomes']}")
    assert found["foreign"] == [] and "CHANGED" not in found["outcomes"]
    assert sum(found["outcomes"].values()) > found["outcomes"].get("whole", 0) > 0
