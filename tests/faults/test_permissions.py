"""Promise 9: modes follow the umask, a registry may be read-only, and it may be anywhere."""

import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from forks import Forks, tree

from ram_trl import AgentRegistry, merge_agents, register_agent


JOBS = ["checkpoint", "live", "live lora"]


def modes(folder: Path) -> set[tuple[bool, int]]:
    """Modes of all directories and files."""
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002, 0o077])
def test_modes_follow_the_umask(forks: Forks, zoo, tmp_path, umask):
    base = zoo.base("qwen2_untied")
    registry, out = tmp_path / "registry", tmp_path / "merged"
    job = {"registry": str(registry), "model": str(zoo.agent(base, seed=1)), "base": str(base)}
    for number, via in enumerate(JOBS):
        arguments = {**job, "agent": f"a{number}", "via": via, "adapter": str(zoo.adapter(base))}
        assert forks.run("snapshots", arguments, umask=umask)["acknowledged"] == [1]
    # a source that only its owner may read does not make a merged model that only its owner may read
    forks.result("merged", {"registry": str(registry), "output_dir": str(out)}, umask=umask)
    forks.result("integrated", {"registry": str(registry), "generalist": "all"}, umask=umask)
    expected = {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}
    assert modes(registry) == expected
    assert modes(out) == expected


@pytest.fixture(scope="module")
def registry(zoo, tmp_path_factory) -> Path:
    """A registry of two full agents and an adapter."""
    path, base = tmp_path_factory.mktemp("place") / "registry", zoo.base("qwen2_untied")
    for name, model in (("math", zoo.agent(base, seed=1)), ("code", zoo.agent(base, seed=2))):
        register_agent(AgentRegistry(path), name, str(model), base_model=str(base))
    register_agent(AgentRegistry(path), "tool", str(zoo.adapter(base)), base_model=str(base))
    return path


def test_a_read_only_registry_is_merged_and_verified_and_refuses_the_rest(forks: Forks, zoo, registry, tmp_path):
    before, base = tree(registry), zoo.base("qwen2_untied")
    with forks.mounted(tmp_path / "read-only", "--bind", str(registry)) as place:
        # not even root may write to it
        forks.mount(place, "-o", "remount,ro,bind")
        forks.result("merged", {"registry": str(place), "output_dir": str(tmp_path / "merged")})
        assert (tmp_path / "merged" / "model.safetensors").exists()
        assert forks.result("examined", {"registry": str(place), "agent": "math"})["valid"] == {"1": True}
        forks.result("restored", {"registry": str(place), "agent": "tool", "output_dir": str(tmp_path / "restored")})
        job = {"registry": str(place), "agent": "math", "model": str(zoo.agent(base, seed=1)), "base": str(base)}
        refused = [forks.run("snapshots", job)]
        refused.append(forks.run("integrated", {"registry": str(place), "generalist": "all"}))
    for outcome in refused:
        assert outcome["error"] == "StorageError" and "Read-only file system" in outcome["message"], outcome
        assert str(place) in outcome["message"]
    assert tree(registry) == before


def copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def copied_by_cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)


def through_a_tar(source: Path, target: Path) -> None:
    target.mkdir()
    archive = target.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(source), "-cf", str(archive), "."], check=True)
    subprocess.run(["tar", "-C", str(target), "-xf", str(archive)], check=True)


def moved(source: Path, target: Path) -> None:
    shutil.copytree(source, target.with_suffix(".old"))
    target.with_suffix(".old").rename(target)


def linked(source: Path, target: Path) -> None:
    target.symlink_to(source)


@pytest.mark.parametrize("how", [copied, copied_by_cp, through_a_tar, moved, linked], ids=lambda how: how.__name__)
def test_a_registry_in_another_place_verifies_and_merges_to_the_same_bytes(registry, zoo, tmp_path, how):
    # times of modification, modes and owners are not part of what was registered
    place = tmp_path / "elsewhere" / "registry"
    place.parent.mkdir()
    source = shutil.copytree(registry, tmp_path / "source")
    how(source, place)
    for agent in AgentRegistry(place):
        agent.verify()
    for name, path in (("there", registry), ("here", place)):
        merge_agents(str(path), str(tmp_path / name))
    there, here = (tmp_path / name / "model.safetensors" for name in ("there", "here"))
    assert there.read_bytes() == here.read_bytes()
    base = zoo.base("qwen2_untied")
    again = register_agent(str(place), "math", str(zoo.agent(base, seed=3)), base_model=str(base))
    assert str(again) == "math@v2" and AgentRegistry(source).versions("math") == ([1, 2] if how is linked else [1])
    AgentRegistry(place).get("math").verify()
