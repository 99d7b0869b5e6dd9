"""The registry: versions appear whole or not at all, names stay inside, and damage is found."""

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from ram_trl.errors import (
    AgentNotFoundError,
    ConfigError,
    CorruptedFileError,
    InvalidNameError,
    RamTrlError,
    StorageError,
    UnsupportedModelError,
)
from ram_trl.lifecycle.gc import collect_garbage
from ram_trl.storage.manifest import FORMAT_VERSION, BaseRecord, LoraRecord, Manifest, SnapshotRecord, TensorRecord
from ram_trl.storage.registry import ADAPTER_MAP, DELTA, TENSORS, AgentRegistry, check_agent_name, write_records


RECORDS = {
    "model.embed.weight": TensorRecord(dtype="BF16", shape=[4, 2], base="ab", stored="BF16", agent="cd"),
    "lm_head.weight": TensorRecord(dtype="BF16", shape=[4, 2], base="ab", tied_to="model.embed.weight"),
    "model.norm.weight": TensorRecord(dtype="F32", shape=[], base="ef"),
}
LORA_RECORDS = {
    "model.q.weight": LoraRecord(factor_a="q.A", factor_b="q.B", scaling=2.0, transposed=True),
    "lm_head.weight": LoraRecord(replaced_by="head"),
}


def make_manifest(name="math", kind="full", **changes):
    return Manifest(
        agent=name,
        kind=kind,
        created="2026-01-01T00:00:00+00:00",
        ram_trl_version="0",
        base_model=BaseRecord(name="base", revision=None, digest="00", total_parameters=9),
        snapshot=SnapshotRecord(dtype="bfloat16", changed=3),
        training={"steps": 7},
        **changes,
    )


def fill(staged, content=b"delta"):
    """The files of a tiny agent."""
    write_records(staged / TENSORS, RECORDS)
    write_records(staged / ADAPTER_MAP, LORA_RECORDS)
    save_file({"codes/a": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, staged / DELTA)


def register(registry, name="math", content=b"delta"):
    with registry.stage(name) as staged:
        fill(staged, content)
        return registry.commit(staged, make_manifest(name))


@pytest.fixture
def registry(tmp_path):
    return AgentRegistry(tmp_path / "deep" / "registry")


def tree(path):
    """Everything below a directory: kinds, modes and contents."""
    return {
        str(entry.relative_to(path)): (entry.lstat().st_mode, entry.read_bytes() if entry.is_file() else None)
        for entry in path.rglob("*")
    }


def test_committed_agent_is_found_again(registry):
    agent = register(registry)
    assert str(agent) == "math@v1"
    assert agent.path == registry.path / "agents" / "math" / "v000001"
    found = AgentRegistry(str(registry.path)).get("math")
    assert found == agent
    assert found.manifest == agent.manifest
    assert found.manifest.training == {"steps": 7} and found.manifest.format_version == FORMAT_VERSION
    assert set(found.manifest.files) == {TENSORS, DELTA, ADAPTER_MAP}
    assert found.tensors() == RECORDS
    assert found.adapter_map() == LORA_RECORDS
    with found.open_weights() as file:
        assert bytes(file.read("codes/a").tolist()) == b"delta"
    found.verify()
    assert sorted(entry.name for entry in (registry.path / "agents" / "math").iterdir()) == ["v000001"]


def test_versions_are_numbered_and_named_with_at(registry):
    for number in range(1, 4):
        assert register(registry, content=bytes([number])).version == number
    register(registry, "code-1.5_b")
    assert registry.versions("math") == [1, 2, 3]
    assert registry.names() == ["code-1.5_b", "math"]
    assert [str(agent) for agent in registry] == ["code-1.5_b@v1", "math@v3"]
    assert registry.get("math").version == 3
    for number in (1, 2, 3):
        with registry.get(f"math@v{number}").open_weights() as file:
            assert file.read("codes/a").tolist() == [number]


def test_versions_beyond_six_digits_are_found(registry):
    register(registry)
    folder = registry.path / "agents" / "math"
    (folder / "v000001").rename(folder / "v999999")
    assert register(registry).version == 1_000_000
    assert registry.versions("math") == [999_999, 1_000_000]
    assert registry.get("math").path.name == "v1000000"


def test_what_is_missing_is_named_with_what_there_is(registry, tmp_path):
    with pytest.raises(AgentNotFoundError, match="is not a registry"):
        registry.get("math")
    assert not registry.exists()
    assert registry.versions("math") == []
    assert not registry.path.exists()
    register(registry)
    with pytest.raises(AgentNotFoundError, match="it holds: math"):
        registry.get("code")
    with pytest.raises(AgentNotFoundError, match="no version v2; it has: v1"):
        registry.get("math@v2")
    with pytest.raises(AgentNotFoundError):
        registry.remove("code")
    with pytest.raises(AgentNotFoundError):
        registry.remove("math@v2")
    assert registry.versions("math") == [1]


def test_registry_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    registry = AgentRegistry(tmp_path / "file")
    with pytest.raises(StorageError):
        registry.check_writable()
    with pytest.raises(StorageError), registry.stage("math"):
        pass
    with pytest.raises(RamTrlError):
        registry.names()
    assert (tmp_path / "file").read_text() == "x"


def test_check_writable_leaves_nothing_but_the_registry(registry):
    registry.check_writable()
    assert registry.exists() and registry.names() == []
    assert list((registry.path / "agents").iterdir()) == []


BAD_NAMES = [
    "",
    ".",
    "..",
    "...",
    "/",
    "//",
    "\\",
    "~",
    "~root",
    "-",
    "-rf",
    "_",
    "_math",
    ".math",
    ".tmp-math",
    "../math",
    "../../math",
    "../../../etc/passwd",
    "math/..",
    "math/../..",
    "math/../../outside",
    "math/v000001",
    "./math",
    "math/",
    "/math",
    "/etc/passwd",
    "/tmp/outside",
    "a/b",
    "a\\b",
    "..\\..\\outside",
    "C:\\outside",
    "C:outside",
    "file:///etc/passwd",
    "%2e%2e%2foutside",
    "math\0",
    "\0",
    "math\0/../outside",
    "math\n",
    "\nmath",
    "math\r\n",
    "ma\tth",
    "math ",
    " math",
    "ma th",
    "math\x7f",
    "math\x1b[31m",
    "math\x85",
    "m\u00e4th",
    "math\u0301",
    "\u043cath",
    "math\u202egnp",
    "math\u200b",
    "\ufeffmath",
    "\uff0e\uff0e\uff0foutside",
    "math\u2215outside",
    "\u0661\u0662",
    "math\u0661",
    "\U0001f600",
    "\ud800",
    "math*",
    "math?",
    "[math]",
    "{math}",
    "$HOME",
    "$(touch outside)",
    "`touch outside`",
    "math;ls",
    "math|ls",
    "math&",
    "math:v1",
    "math#1",
    "math=1",
    "math,code",
    "math'",
    'math"',
    "math<",
    "math!",
    "a" * 97,
    "a" * 300,
    "a" * 100_000,
    "a/" * 5_000,
    "../" * 5_000,
]
# '@' parts a version off: these are bad as names and as specifications
BAD_SPECS = [
    "@",
    "@v1",
    "@@",
    "math@",
    "math@@v1",
    "math@1",
    "math@v",
    "math@v0",
    "math@v01",
    "math@v000001",
    "math@V1",
    "math@v-1",
    "math@v+1",
    "math@v1.0",
    "math@v1 ",
    "math@ v1",
    "math@v1\n",
    "math@v1\0",
    "math@v1@v2",
    "math@v1/..",
    "math@v1/../../outside",
    "math@../outside",
    "math@latest",
    "math@v1e3",
    "math@v1_0",
    "math@v\u0661",
    "math@v1\u0661",
    "math@v\uff11",
    "math@v" + "1" * 10,
    "math@v" + "1" * 5_000,
    "../math@v1",
    "math\n@v1",
]


def test_there_are_enough_hostile_names():
    assert len(set(BAD_NAMES)) == len(BAD_NAMES) >= 60
    assert len(set(BAD_SPECS)) == len(BAD_SPECS) >= 30


def test_hostile_names_are_refused_and_touch_nothing(tmp_path, registry, monkeypatch):
    monkeypatch.chdir(tmp_path)
    register(registry)
    for folder in (tmp_path / "deep", registry.path, registry.path / "agents"):
        (folder / "outside").mkdir()
        (folder / "outside" / "manifest.json").write_text("{}")
    before = tree(tmp_path)

    def stage(name):
        with registry.stage(name) as staged:
            (staged / "x").write_text("x")

    for name in BAD_NAMES + BAD_SPECS:
        for action in (stage, registry.versions, check_agent_name, registry.get, registry.remove):
            with pytest.raises(InvalidNameError) as caught:
                action(name)
            # said in one line, without control characters
            assert str(caught.value).isprintable()
    for name in ("math@v1", "math@v2"):
        for action in (stage, registry.versions, check_agent_name):
            with pytest.raises(InvalidNameError):
                action(name)
    assert tree(tmp_path) == before


def test_manifest_for_a_hostile_name_is_not_committed(tmp_path, registry):
    for name in ("../outside", "..", "", "math/../../outside"):
        with pytest.raises(InvalidNameError), registry.stage("math") as staged:
            fill(staged)
            registry.commit(staged, make_manifest(name))
    assert tree(tmp_path) == {}


def test_longest_and_strangest_names_that_are_allowed(registry):
    names = sorted(["a" * 96, "0", "A.b-c_d", "a..", "v000001", "agents", "con", "manifest.json"])
    for name in names:
        register(registry, name)
    assert registry.names() == names
    assert all(registry.get(name).name == name for name in names)


def commit_many(path, number):
    registry = AgentRegistry(path)
    return [register(registry, content=bytes([number])).version for _ in range(20)]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_commits_at_once_get_distinct_consecutive_versions(registry, kind):
    if kind == "threads":
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(commit_many, [registry.path] * 8, range(8)))
    else:
        with multiprocessing.get_context("forkserver").Pool(8) as pool:
            results = pool.starmap(commit_many, [(registry.path, number) for number in range(8)])
    # each process saw its own versions grow, and none was given twice or left out
    assert all(result == sorted(result) for result in results)
    assert sorted(version for result in results for version in result) == list(range(1, 161))
    assert registry.versions("math") == list(range(1, 161))
    # the version that a process was told holds what it wrote
    for number, result in enumerate(results):
        with registry.get(f"math@v{result[-1]}").open_weights() as file:
            assert file.read("codes/a").tolist() == [number]
    assert len(list((registry.path / "agents" / "math").iterdir())) == 160


def test_number_of_a_removed_version_is_not_used_again(registry):
    for _ in range(3):
        register(registry)
    assert [str(agent) for agent in registry.remove("math@v3")] == ["math@v3"]
    assert registry.versions("math") == [1, 2]
    assert registry.get("math").version == 2
    assert register(registry).version == 4
    assert [str(agent) for agent in registry.remove("math")] == ["math@v1", "math@v2", "math@v4"]
    assert registry.names() == []
    with pytest.raises(AgentNotFoundError):
        registry.get("math")
    assert register(registry).version == 5
    assert registry.versions("math") == [5]


def test_removing_frees_the_files_and_leaves_other_agents(registry):
    register(registry)
    register(registry, "code")
    registry.remove("math")
    assert registry.names() == ["code"]
    left = [path for path in (registry.path / "agents" / "math").rglob("*") if path.is_file() and path.stat().st_size]
    assert left == []
    collect_garbage(registry)
    assert not list((registry.path / "trash").rglob("v*"))
    registry.get("code").verify()


def change_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    with open(path, "ab") as file:
        file.write(b"\0")


def empty(path):
    path.write_bytes(b"")


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [TENSORS, DELTA, ADAPTER_MAP])
@pytest.mark.parametrize("damage", [change_byte, truncate, lengthen, empty, os.unlink, replace_by_folder])
def test_verify_finds_damage(registry, name, damage):
    agent = register(registry)
    registry.get("math").verify()
    damage(agent.path / name)
    with pytest.raises(RamTrlError, match=name) as caught:
        registry.get("math").verify()
    assert "math@v1" in str(caught.value) or isinstance(caught.value, StorageError)
    if damage is not replace_by_folder:
        assert isinstance(caught.value, CorruptedFileError)
        assert "register it again" in str(caught.value)


def test_verify_finds_an_additional_file_and_folder(registry):
    agent = register(registry)
    (agent.path / "extra.bin").write_bytes(b"x")
    with pytest.raises(CorruptedFileError, match=r"unrecorded file extra\.bin"):
        agent.verify()
    (agent.path / "extra.bin").unlink()
    (agent.path / "folder").mkdir()
    with pytest.raises(CorruptedFileError, match="folder"):
        agent.verify()
    (agent.path / "folder").rmdir()
    agent.verify()


def test_verify_of_an_agent_that_was_removed_meanwhile_raises_an_error_of_this_package(registry):
    agent = register(registry)
    registry.remove("math")
    with pytest.raises(StorageError):
        agent.verify()


def test_manifest_cannot_name_files_elsewhere(registry, tmp_path):
    agent = register(registry)
    (tmp_path / "secret").write_text("x")
    edit(agent, files={**manifest_of(agent)["files"], "../../../../../secret": {"size": 1, "blake3": "0"}})
    with pytest.raises(CorruptedFileError, match="lacks its file"):
        registry.get("math").verify()


def manifest_of(agent):
    return json.loads((agent.path / "manifest.json").read_text())


def edit(agent, drop=(), /, **changes):
    """Change fields of a manifest, with a digest to match."""
    content = {key: value for key, value in {**manifest_of(agent), **changes}.items() if key not in ("digest", *drop)}
    if "digest" not in drop:
        content["digest"] = blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (agent.path / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("change", [{"agent": "code"}, {"kind": "lora"}, {"training": {}}, {"digest": "00"}])
def test_manifest_that_was_changed_by_hand_is_refused(registry, change):
    agent = register(registry)
    (agent.path / "manifest.json").write_text(json.dumps({**manifest_of(agent), **change}))
    with pytest.raises(CorruptedFileError, match="its digest differs"):
        registry.get("math")


@pytest.mark.parametrize(
    "training",
    [
        {2: "a", 10: "b"},
        {1: "a", "1": "b"},
        {"\ud800": 1},
        {("a", "b"): 1},
        {"options": {1, 2}},
        {"loss": float("nan")},
        {"step": 10**400},
        {"step": 10**5000},
        {"log": "x" * 16_000_000},
    ],
    ids=range(9),
)
def test_what_could_not_be_read_again_is_not_committed(registry, training):
    register(registry)
    before = tree(registry.path)
    manifest = make_manifest()
    manifest.training = training
    with pytest.raises(ConfigError, match="could not be read again"), registry.stage("math") as staged:
        fill(staged)
        registry.commit(staged, manifest)
    assert tree(registry.path) == before


def test_newer_format_is_refused_with_the_cure(registry):
    agent = register(registry)
    # whatever else the newer format changed
    edit(agent, format_version=FORMAT_VERSION + 1, base_model="elsewhere", novelty={})
    with pytest.raises(UnsupportedModelError, match="pip install --upgrade ram_trl") as caught:
        registry.get("math")
    assert f"format version {FORMAT_VERSION + 1}" in str(caught.value)
    assert str(agent.path / "manifest.json") in str(caught.value)


@pytest.mark.parametrize("field", [*make_manifest().to_dict()])
def test_manifest_that_lacks_a_field_is_refused(registry, field):
    agent = register(registry)
    edit(agent, [field])
    with pytest.raises(CorruptedFileError, match=r"manifest\.json"):
        registry.get("math")


@pytest.mark.parametrize(
    "changes",
    [
        {"novelty": 1},
        {"base_model": {**make_manifest().to_dict()["base_model"], "novelty": 1}},
        {"base_model": {"name": "base"}},
        {"base_model": None},
        {"base_model": []},
        {"base_model": "base"},
        {"snapshot": {"dtype": "bfloat16", "novelty": 1}},
        {"snapshot": {}},
        {"snapshot": None},
        {"snapshot": {**make_manifest().to_dict()["snapshot"], "changed": 1 << 63}},
        {"training": {"metrics": [10**400]}},
        {"training": {"metrics": {"loss": float("nan")}}},
        {"files": None},
        {"files": []},
        {"files": {"a": {"size": 1 << 63, "blake3": "0"}}},
        {"files": {"a": None}},
        {"files": {"a": {"size": 1}}},
        {"files": {"a": {"size": 1, "blake3": "0", "novelty": 1}}},
        {"agent": "code"},
        {"agent": None},
        {"agent": ["math"]},
        {"kind": "half"},
        {"kind": None},
        {"kind": []},
        {"format_version": None},
        {"format_version": "1"},
        {"format_version": 1.0},
        {"format_version": True},
        {"format_version": 0},
        {"format_version": -1},
    ],
    ids=str,
)
def test_manifest_with_a_wrong_field_is_refused(registry, changes):
    agent = register(registry)
    edit(agent, **changes)
    with pytest.raises(CorruptedFileError, match=r"manifest\.json"):
        registry.get("math")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\0" * 100, b"[" * 100_000, b'{"a":' * 100_000],
    ids=range(10),
)
def test_manifest_that_is_no_json_object_is_refused(registry, content):
    agent = register(registry)
    (agent.path / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptedFileError, match=r"manifest\.json"):
        registry.get("math")


def test_version_without_a_manifest_is_refused(registry):
    agent = register(registry)
    (agent.path / "manifest.json").unlink()
    with pytest.raises(RamTrlError, match=r"manifest\.json"):
        registry.get("math")


@pytest.mark.parametrize(
    "content", [b"{}}", b"[]", b'{"w": 1}', b'{"w": {}}', b'{"w": {"dtype": "F32", "novelty": 1}}']
)
def test_records_that_are_damaged_are_refused(registry, content):
    with registry.stage("math") as staged:
        fill(staged)
        (staged / TENSORS).write_bytes(content)
        agent = registry.commit(staged, make_manifest())
    with pytest.raises(CorruptedFileError, match=r"tensors\.json"):
        agent.tensors()


def test_foreign_entries_are_no_versions(registry):
    register(registry)
    folder = registry.path / "agents" / "math"
    for name in ("v2", "v0000002", "V000002", "v000002.bak", "v000002 ", "v\u0660\u0660\u0660\u0660\u0660\u0662", "x"):
        (folder / name).mkdir()
    (registry.path / "agents" / ".tmp-abc").mkdir()
    (registry.path / "agents" / "empty").mkdir()
    (registry.path / "agents" / "notes.txt").write_text("")
    assert registry.versions("math") == [1]
    assert registry.names() == ["math"]
    assert register(registry).version == 2


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_the_umask(registry, umask):
    previous = os.umask(umask)
    try:
        agent = register(registry)
    finally:
        os.umask(previous)
    for path in [agent.path, *agent.path.parents][:4]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask
    for path in agent.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("error", [RuntimeError("x"), OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("earlier", [0, 1])
def test_failed_stage_leaves_nothing(tmp_path, registry, error, earlier):
    for _ in range(earlier):
        register(registry)
    before = tree(tmp_path)
    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), registry.stage("math") as staged:
        fill(staged)
        raise error
    assert tree(tmp_path) == before
    assert registry.versions("math") == [1] * earlier


def test_stage_that_is_not_committed_leaves_no_version(registry):
    with registry.stage("math") as staged:
        fill(staged)
        assert staged.is_dir() and registry.versions("math") == []
    assert not staged.exists()
    assert registry.names() == []


def test_failed_commit_leaves_nothing(registry, monkeypatch):
    register(registry)
    before = tree(registry.path)

    def fail(*_):
        raise OSError(5, "Input/output error")

    for call in ("fsync", "rename", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StorageError, match="Input/output error"):
                register(registry)
        assert tree(registry.path) == before
    assert register(registry).version == 2


def test_every_file_and_folder_is_flushed_before_the_version_appears(registry, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.rename

    def record_fsync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def record_rename(source, target):
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    with registry.stage("math") as staged:
        fill(staged)
        agent = registry.commit(staged, make_manifest())
    appeared = calls.index("rename")
    files = {str(staged / entry.name) for entry in agent.path.iterdir()}
    assert len(files) == 4
    assert files | {str(staged)} <= set(calls[:appeared])
    # the folder itself after all that is in it, and the parent when it has the new name
    assert max(map(calls.index, files)) < calls.index(str(staged))
    assert calls[appeared + 1 :] == [str(agent.path.parent)]
    # the registry's own folders, which were new
    own = {str(registry.path), str(registry.path / "agents")}
    assert {str(registry.path.parent), *own} <= set(calls[:appeared])
    # and again where they were there: who made them may have been killed before they were on disk
    calls.clear()
    register(registry)
    assert own <= set(calls[: calls.index("rename")])


def test_kill_while_staging_leaves_nothing_visible(registry):
    register(registry)
    script = """
import sys, time
from pathlib import Path
from ram_trl.storage.registry import AgentRegistry

for name in ("math", "code"):
    context = AgentRegistry(sys.argv[1]).stage(name)
    staged = context.__enter__()
    (staged / "delta.safetensors").write_bytes(bytes(1000))
    (staged / "manifest.json").write_text("{}")
    globals()[name] = context
print("staged", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(registry.path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "staged\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert registry.names() == ["math"]
    assert registry.versions("math") == [1] and registry.versions("code") == []
    registry.get("math").verify()
    assert register(registry).version == 2 and register(registry, "code").version == 1


def killed_at(registry, call, number):
    """Register in a process that is killed just before the given call of a function of `os`; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            original, calls = getattr(os, call), []

            def maybe_die(*arguments):
                calls.append(arguments)
                if len(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments)

            setattr(os, call, maybe_die)
            register(registry)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("call", ["fsync", "rename", "chmod"])
def test_kill_at_any_moment_of_a_commit_leaves_whole_versions_only(registry, call):
    number = 1
    while killed_at(registry, call, number):
        for version in registry.versions("math"):
            registry.get(f"math@v{version}").verify()
        number += 1
    # the last ran to its end, and it or one killed after the rename took the next number
    versions = registry.versions("math")
    assert number > 1 and versions and versions == list(range(1, len(versions) + 1))
    registry.get("math").verify()


def test_a_version_with_a_damaged_manifest_can_be_removed(registry):
    register(registry, "math")
    register(registry, "math")
    (registry.path / "agents/math/v000002/manifest.json").write_text("{")
    with pytest.raises(CorruptedFileError):
        registry.get("math")
    assert registry.remove("math@v2") == ["math@v2"]
    assert str(registry.get("math")) == "math@v1"


def test_a_fifo_in_the_place_of_a_manifest_is_refused_at_once(registry):
    agent = register(registry, "math")
    (agent.path / "manifest.json").unlink()
    os.mkfifo(agent.path / "manifest.json")
    with pytest.raises(CorruptedFileError, match="not a regular file"):
        registry.get("math")
