"""Agents on their way to the Hub, to S3 and to other places of fsspec, and back; the servers are real, and local."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from blake3 import blake3
from hub_server import OWNER, READER, HubServer
from safetensors.torch import save_file
from sharing import CommandLine, add_agent, files_of, s3_server, visible

from ram_trl import AgentRegistry, merge_agents
from ram_trl.errors import (
    AgentNotFoundError,
    ConfigError,
    CorruptedFileError,
    StorageError,
    UnsupportedModelError,
)
from ram_trl.sharing import open_registry, pull_agents, push_agents
from ram_trl.sharing.remote import hide_secrets
from ram_trl.storage.fisher import FISHER, FisherManifest, FisherStore


HUB = "hf://user/agents"
MB = 1_000_000
S3 = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def ram(server, tmp_path_factory):
    """`ram-trl` in a process that takes the local servers for the Hub and for S3."""
    folder = tmp_path_factory.mktemp("ram")
    environment = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": OWNER,
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        **S3,
    }
    ram = CommandLine(environment)
    yield ram
    ram.close()


@pytest.fixture
def hub(server):
    """The server of the Hub, without repositories, as well behaved as it can be."""
    server.repositories.clear()
    server.large.clear()
    server.tokens_on_storage.clear()
    server.forget()
    server.listing = server.before_commit = server.break_after = server.hold_after = None
    server.breaks = 0
    server.holding.clear()
    server.release.clear()
    return server


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as (address, log):
        yield address, log


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAM_TRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory():
    """A place in the memory of this process."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return files


@pytest.fixture
def registry(zoo, tmp_path):
    """math@v1 and math@v2 (full), tool@v1 (LoRA); math@best is v1, tagged, with Fisher information."""
    base = zoo.base("llama")
    made = zoo.registry(base, {"math": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})
    registry = AgentRegistry(shutil.copytree(made.path, tmp_path / "registry"))
    add_agent(registry, "math", {"delta.safetensors": 3000, "tensors.json": 2000})
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").add_tag(1, "paper")
    agent = registry.get("math@v1")
    with FisherStore(registry).stage(agent) as staged:
        save_file({"weight": torch.ones(8, dtype=torch.bfloat16)}, staged / FISHER)
        manifest = FisherManifest(
            agent=str(agent),
            agent_digest=agent.manifest.to_dict()["digest"],
            examples=4,
            created="2026-01-01T00:00:00+00:00",
            ram_trl_version="0",
        )
        FisherStore(registry).commit(staged, agent, manifest)
    return registry


def check_equal(registry, other, specs=("math@v1", "math@v2", "tool@v1")):
    for spec in specs:
        assert files_of(other, spec) == files_of(registry, spec)
        other.get(spec).verify()


def check_arrived(registry, other):
    """Versions, Fisher information and labels of the fixture are there."""
    check_equal(registry, other)
    assert other.labels("math").aliases() == {"best": 1} and other.labels("math").tags() == {1: ["paper"]}
    FisherStore(other).get(other.get("math@v1")).verify()


def test_the_hub_gets_one_commit_in_a_private_repository_and_gives_it_back(hub, ram, registry, tmp_path):
    code, out, err = ram("push", "--registry", registry.path, "--to", HUB)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"math@v2: 5 kB moved\nmath@v1: \d+ kB moved\ntool@v1: \d+ kB moved\n", out)
    repository = hub.repositories["user/agents"]
    assert repository.private and len(repository.order) == 2
    expected = {name for name in visible(registry.path) if name.startswith(("agents/", "fisher/"))}
    assert set(repository.files) == expected | {".gitattributes"}
    code, out, err = ram("pull", "--from", HUB, "--registry", tmp_path / "two")
    assert (code, err) == (0, "") and out.count("moved") == 3
    check_arrived(registry, AgentRegistry(tmp_path / "two"))
    # the token is for the Hub, not for the storage that it sends readers to
    assert len(hub.tokens_on_storage) >= 6 and set(hub.tokens_on_storage) == {None}


def test_only_what_is_missing_moves(hub, ram, registry, tmp_path):
    ram("push", "--registry", registry.path, "--to", HUB)
    ram("pull", "--from", HUB, "--registry", tmp_path / "two")
    commits = len(hub.repositories["user/agents"].order)
    hub.forget()
    assert ram("push", "--registry", registry.path, "--to", HUB)[1].count("there already") == 3
    assert ram("pull", "--from", HUB, "--registry", tmp_path / "two")[1].count("there already") == 3
    assert not hub.received and len(hub.repositories["user/agents"].order) == commits
    assert {path.rpartition("/")[2] for path in hub.sent} == {"manifest.json", "best.json"}
    # one more version: its files, and no others
    add_agent(registry, "tool", {"delta.safetensors": 5000}, seed=3)
    hub.forget()
    ram("push", "--registry", registry.path, "--to", HUB, "--agents", "tool")
    assert sorted(hub.received.values())[-1] == 5000 and len(hub.received) == 2
    hub.forget()
    _, out, _ = ram("pull", "--from", HUB, "--registry", tmp_path / "two", "--agents", "tool", "--json")
    assert json.loads(out) == [{"agent": "tool@v2", "arrived": "tool@v2", "size": 5000, "moved": 5000, "notes": []}]
    assert sum(hub.sent[path] for path in hub.sent if path.endswith(".safetensors")) == 5000


def test_agents_are_named_by_version_and_alias(hub, ram, registry, tmp_path):
    ram("push", "--registry", registry.path, "--to", HUB)
    hub.forget()
    assert ram("pull", "--from", HUB, "--registry", tmp_path / "two", "--agents", "math@best")[0] == 0
    assert AgentRegistry(tmp_path / "two").versions("math") == [1]
    assert {path for path in hub.sent if "v000002" in path or "tool" in path} == set()
    for spec, problem in (
        ("math@v7", "agent 'math' in hf://user/agents has no v7; it has: v1, v2, best"),
        ("math@nope", "agent 'math' in hf://user/agents has no nope; it has: v1, v2, best"),
        ("law", "no agent 'law' in hf://user/agents; it holds: math, tool"),
        ("../x", "'../x' is not a name for an agent"),
    ):
        code, out, err = ram("pull", "--from", HUB, "--registry", tmp_path / "two", "--agents", spec)
        assert (code, out) == (2, "") and err.startswith(f"error: {problem}")


def test_an_alias_that_is_there_stays_unless_it_is_to_move(registry, memory, tmp_path):
    push_agents(registry, "memory://team")
    registry.labels("math").set_alias("best", 2)
    first = push_agents(registry, "memory://team", ["math"])
    assert first[0].notes == ["alias best stays math@v1 (--overwrite_aliases moves it)"]
    assert [transfer.moved for transfer in push_agents(registry, "memory://team", overwrite_aliases=True)] == [0, 0]
    two = AgentRegistry(tmp_path / "two")
    pull_agents(two, "memory://team")
    assert two.labels("math").aliases() == {"best": 2}
    two.labels("math").set_alias("mine", 2)
    pull_agents(two, "memory://team")
    assert two.labels("math").aliases() == {"best": 2, "mine": 2}


@pytest.mark.parametrize("place", ["memory", "directory", "file_url"])
def test_other_places_hold_the_same(registry, memory, tmp_path, place):
    url = {"memory": "memory://team/x", "directory": str(tmp_path / "t"), "file_url": f"file://{tmp_path}/t"}[place]
    assert all(transfer.moved for transfer in push_agents(registry, url))
    assert not any(transfer.moved for transfer in push_agents(registry, url))
    if place == "memory":
        assert sum(name.endswith(".claim") for name in memory.store) == 4
    else:
        check_arrived(registry, AgentRegistry(tmp_path / "t"))
    two = AgentRegistry(tmp_path / "two")
    assert all(transfer.moved for transfer in pull_agents(two, url))
    assert not any(transfer.moved for transfer in pull_agents(two, url))
    check_arrived(registry, two)
    with pytest.raises(ConfigError, match="is to be filled from itself"):
        pull_agents(two, tmp_path / "two")


def test_a_number_that_is_taken_there_becomes_the_next(registry, memory, tmp_path):
    push_agents(registry, "memory://team")
    other = AgentRegistry(tmp_path / "other")
    agent = add_agent(other, "math", {"delta.safetensors": 100}, seed=9)
    (sent,) = push_agents(other, "memory://team")
    assert (sent.agent, sent.arrived) == ("math@v1", "math@v3")
    assert push_agents(other, "memory://team")[0] == type(sent)("math@v1", "math@v3", 100, 0, [])
    # numbers of versions that were removed, or are being pushed by others, are not free
    (registry.path / "agents" / "law").mkdir()
    memory.pipe("/team/agents/law/v000001.removed", b"")
    memory.pipe("/team/agents/law/v000002.claim", b'{"digest": "of another"}')
    add_agent(other, "law", {"delta.safetensors": 100})
    assert push_agents(other, "memory://team", ["law"])[0].arrived == "law@v3"
    two = AgentRegistry(tmp_path / "two")
    (got,) = pull_agents(two, "memory://team", ["math"])
    assert got.arrived == "math@v3" and two.get("math").manifest == agent.manifest


def test_who_pushes_at_the_same_time_gets_another_number(hub, ram, registry, tmp_path):
    other = AgentRegistry(tmp_path / "other")
    add_agent(other, "math", {"delta.safetensors": 100}, seed=9)
    ram("push", "--registry", other.path, "--to", "hf://user/others")
    theirs = {name: file for name, file in hub.repositories["user/others"].files.items() if name.startswith("agents/")}
    hub.before_commit = lambda repository: repository.commit({**repository.files, **theirs}, "somebody else")
    code, out, err = ram("push", "--registry", registry.path, "--to", HUB, "--agents", "math@v1")
    assert (code, err) == (0, "") and "as math@v2" in out
    for spec, (path, name) in {"math@v1": (other, "math@v1"), "math@v2": (registry, "math@v1")}.items():
        ram("pull", "--from", HUB, "--registry", tmp_path / "two", "--agents", spec)
        assert files_of(AgentRegistry(tmp_path / "two"), spec) == files_of(path, name)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_when(process, event):
    assert event.wait(60)
    process.kill()
    process.communicate(timeout=60)


def test_a_pull_that_was_killed_goes_on(hub, ram, tmp_path):
    registry, two = AgentRegistry(tmp_path / "registry"), AgentRegistry(tmp_path / "two")
    sizes = {"delta.safetensors": 3 * MB, "tensors.json": 6 * MB}
    add_agent(registry, "math", sizes)
    ram("push", "--registry", registry.path, "--to", HUB)
    hub.forget()
    hub.hold_after = 4 * MB
    words = ("pull", "--from", HUB, "--registry", two.path)
    process = ram.start(*words, HF_HUB_DOWNLOAD_TIMEOUT="60")
    wait_until(lambda: any(file.stat().st_size >= 3 * MB for file in two.path.rglob("tensors.json")))
    kill_when(process, hub.holding)
    assert visible(two.path) == []
    hub.hold_after = None
    hub.forget()
    assert ram(*words)[0] == 0
    check_equal(registry, two, ["math@v1"])
    assert hub.sent["agents/math/v000001/delta.safetensors"] == 0
    # 4 MB had been sent; what the reader had not written yet comes again
    assert 2 * MB <= hub.sent["agents/math/v000001/tensors.json"] <= 3 * MB
    assert not list(two.path.rglob(".tmp-*"))


def test_what_a_broken_pull_left_is_not_believed(hub, ram, tmp_path):
    registry, two = AgentRegistry(tmp_path / "registry"), AgentRegistry(tmp_path / "two")
    agent = add_agent(registry, "math", {"delta.safetensors": 2000, "tensors.json": 2000, "adapter_map.json": 2000})
    ram("push", "--registry", registry.path, "--to", HUB)
    staged = two.path / "agents" / "math" / f".tmp-pull-{agent.manifest.to_dict()['digest']}"
    staged.mkdir(parents=True)
    # complete and wrong; begun and wrong; too long
    (staged / "delta.safetensors").write_bytes(b"x" * 2000)
    (staged / "tensors.json").write_bytes(b"x" * 1000)
    (staged / "adapter_map.json").write_bytes(b"x" * 9000)
    assert ram("pull", "--from", HUB, "--registry", two.path)[0] == 0
    check_equal(registry, two, ["math@v1"])


def test_a_connection_that_breaks_off_is_taken_up_again(hub, ram, tmp_path):
    registry, two = AgentRegistry(tmp_path / "registry"), AgentRegistry(tmp_path / "two")
    add_agent(registry, "math", {"delta.safetensors": 6 * MB})
    ram("push", "--registry", registry.path, "--to", HUB)
    hub.forget()
    hub.break_after, hub.breaks = 5 * MB // 2, 2
    _, _, err = ram("pull", "--from", HUB, "--registry", two.path)
    assert err == ""
    check_equal(registry, two, ["math@v1"])
    assert hub.breaks == 0 and hub.sent["agents/math/v000001/delta.safetensors"] < 9 * MB


def test_a_server_that_stalls_is_asked_again(hub, ram, tmp_path):
    registry, two = AgentRegistry(tmp_path / "registry"), AgentRegistry(tmp_path / "two")
    add_agent(registry, "math", {"delta.safetensors": 6 * MB})
    ram("push", "--registry", registry.path, "--to", HUB)
    hub.hold_after = 5 * MB
    # the rest is less than it stops after
    assert ram("pull", "--from", HUB, "--registry", two.path)[0] == 0
    assert hub.holding.is_set()
    check_equal(registry, two, ["math@v1"])


def test_a_push_that_was_killed_goes_on(hub, ram, tmp_path):
    registry = AgentRegistry(tmp_path / "registry")
    add_agent(registry, "math", {"delta.safetensors": 3 * MB, "tensors.json": 6 * MB})
    hub.hold_after = 4 * MB
    words = ("push", "--registry", registry.path, "--to", HUB)
    process = ram.start(*words)
    wait_until(lambda: hub.large)
    kill_when(process, hub.holding)
    hub.hold_after = None
    hub.release.set()
    repository = hub.repositories["user/agents"]
    assert set(repository.files) == {".gitattributes"}
    assert "holds no agent" in ram("list", "--registry", HUB)[2]
    while any(len(content) == 6 * MB for content in hub.large.values()):
        # it had arrived in the end; the push that goes on is to send it
        hub.large = {digest: content for digest, content in hub.large.items() if len(content) < 6 * MB}
    hub.forget()
    assert ram(*words)[0] == 0
    assert 3 * MB not in hub.received.values() and 6 * MB in hub.received.values()
    assert ram("pull", "--from", HUB, "--registry", tmp_path / "two")[0] == 0
    check_equal(registry, AgentRegistry(tmp_path / "two"), ["math@v1"])


def test_s3_holds_agents_and_moves_what_is_missing(s3, ram, registry, tmp_path):
    address, log = s3
    place, at = "s3://agents/team", {"AWS_ENDPOINT_URL": address}
    code, out, err = ram("push", "--registry", registry.path, "--to", place, **at)
    assert (code, err) == (0, "") and out.count("moved") == 3
    code, out, err = ram("pull", "--from", place, "--registry", tmp_path / "two", **at)
    assert (code, err) == (0, "")
    check_arrived(registry, AgentRegistry(tmp_path / "two"))
    before = len(log.read_text())
    assert ram("push", "--registry", registry.path, "--to", place)[1].count("there already") == 3
    assert ram("pull", "--from", place, "--registry", tmp_path / "two")[1].count("there already") == 3
    asked = log.read_text()[before:]
    assert "manifest.json" in asked and not re.search(r"PUT|POST|safetensors|tensors\.json", asked)
    code, out, err = ram("list", "--registry", place)
    assert (code, err) == (0, "") and "math@v2" in out
    assert "safetensors" not in log.read_text()[before:]


def test_a_push_to_s3_that_was_killed_goes_on(s3, ram, tmp_path):
    address, log = s3
    registry, place = AgentRegistry(tmp_path / "registry"), "s3://agents/killed"
    sizes = {f"part{number}.safetensors": 200_000 for number in range(40)}
    add_agent(registry, "math", sizes)
    at, before = {"AWS_ENDPOINT_URL": address}, len(log.read_text())
    process = ram.start("push", "--registry", registry.path, "--to", place, **at)
    wait_until(lambda: log.read_text()[before:].count("PUT /agents/killed") >= 10)
    process.kill()
    process.communicate(timeout=60)
    time.sleep(0.3)
    sent = re.findall(r"PUT (\S+part\d+\S+) ", log.read_text()[before:])
    assert 9 <= len(sent) < 40
    assert "holds no agent" in ram("list", "--registry", place, **at)[2]
    before = len(log.read_text())
    assert ram("push", "--registry", registry.path, "--to", place)[:2] == (0, "math@v1: 8.0 MB moved\n")
    again = re.findall(r"PUT (\S+part\d+\S+) ", log.read_text()[before:])
    assert len(again) == 40 - len(sent) and not set(again) & set(sent)
    assert ram("pull", "--from", place, "--registry", tmp_path / "two")[0] == 0
    check_equal(registry, AgentRegistry(tmp_path / "two"), ["math@v1"])


def test_who_pushes_to_s3_at_the_same_time_gets_another_number(s3, tmp_path, monkeypatch):
    address, _ = s3
    for name, value in {**S3, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    registries = [AgentRegistry(tmp_path / f"registry{number}") for number in range(4)]
    for seed, registry in enumerate(registries):
        add_agent(registry, "math", {"delta.safetensors": 20_000, "tensors.json": 10_000}, seed=seed)
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda registry: push_agents(registry, "s3://agents/race")[0], registries))
    assert sorted(transfer.arrived for transfer in got) == ["math@v1", "math@v2", "math@v3", "math@v4"]
    two = AgentRegistry(tmp_path / "two")
    pull_agents(two, "s3://agents/race", [transfer.arrived for transfer in got])
    for registry, transfer in zip(registries, got, strict=True):
        assert files_of(two, transfer.arrived) == files_of(registry, "math@v1")


def flip(content):
    return content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]


def test_a_changed_byte_on_the_hub_is_refused(hub, ram, registry, tmp_path):
    ram("push", "--registry", registry.path, "--to", HUB, "--agents", "math@v2", "tool")
    repository, path = hub.repositories["user/agents"], "agents/math/v000002/delta.safetensors"
    good = repository.files[path][0]
    repository.replace(path, flip(good))
    words = ("pull", "--from", HUB, "--registry", tmp_path / "two")
    for command in (words, ("restore", "--registry", HUB, "--agent", "math", "--output_dir", tmp_path / "out")):
        code, out, err = ram(*command)
        assert (code, out) == (2, "")
        assert re.fullmatch(f"error: {HUB}: {path} is not the file that was registered: .*pull again, and .*", err)
        assert visible(tmp_path / "two") == [] and not (tmp_path / "out").exists()
    repository.replace(path, good)
    assert ram(*words)[0] == 0
    check_equal(registry, AgentRegistry(tmp_path / "two"), ["math@v2", "tool@v1"])


def test_a_changed_byte_anywhere_is_refused(registry, memory, tmp_path, monkeypatch):
    push_agents(registry, "memory://team")
    labels = ("best.json", "paper", ".claim")
    names = [name for name in memory.store if not name.endswith(labels) and "fisher" not in name]
    assert len(names) == 11
    for number, name in enumerate(names):
        good = memory.cat(name)
        memory.pipe(name, good[:100] + bytes([good[100] ^ 1]) + good[101:])
        two = AgentRegistry(tmp_path / f"two{number}")
        with pytest.raises(CorruptedFileError, match="memory://team: "):
            pull_agents(two, "memory://team")
        assert not [file for file in visible(two.path) if file.startswith("/".join(name.split("/")[2:5]))]
        monkeypatch.setenv("RAM_TRL_CACHE", str(tmp_path / f"cache{number}"))
        with pytest.raises(CorruptedFileError, match="memory://team: "):
            open_registry("memory://team", ["math@v1", "math@v2", "tool"])
        memory.pipe(name, good)
    pull_agents(AgentRegistry(tmp_path / "whole"), "memory://team")


def test_a_damaged_agent_is_not_pushed(registry, memory):
    path = registry.get("math@v2").path / "delta.safetensors"
    path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(CorruptedFileError, match=r"math@v2: .* is not the file that was registered"):
        push_agents(registry, "memory://team")
    assert not memory.store


def entry(path, size=4):
    return {"type": "file", "path": path, "size": size, "oid": "0" * 40}


HOSTILE_LISTS = [
    (entry("agents/../../etc/passwd"), "lists 'agents/../../etc/passwd', which is no file of a registry"),
    (entry("/etc/passwd"), "lists '/etc/passwd', which is no file of a registry"),
    (entry("elsewhere/x"), "lists 'elsewhere/x', which is no file of a registry"),
    (entry("agents/math/v000002/./x"), "which is no file of a registry"),
    (entry("agents//v000002/x"), "which is no file of a registry"),
    (entry("agents/math/v000002/a\\b"), "which is no file of a registry"),
    (entry("agents/math/v000002/a\nb"), "which is no file of a registry"),
    (entry("agents/math/v000002/a\u202eb"), "which is no file of a registry"),
    (entry("agents/math/v000002/more.safetensors"), "agents/math/v000002 has an unrecorded file more.safetensors"),
    (entry("agents/math/v000002/sub/x"), "agents/math/v000002 has an unrecorded file sub/x"),
    (entry("agents/math/v000002/delta.safetensors", 1 << 60), "has 1,152,921,504,606,846,976 bytes, and 3,000 are"),
    (entry("agents/math/v000002/manifest.json", 1 << 60), "which is too long"),
    (entry("agents/math/v000002/manifest.json", 10), "is not valid JSON"),
    (entry("agents/math/aliases/best.json", 1 << 40), "which is too long"),
    (entry("agents/math/v000002/tensors.json", -1), "with a size of -1"),
    (entry("agents/math/v000002/tensors.json", "9"), "with a size of '9'"),
    (entry("agents/math/v000002/tensors.json", None), "with a size of None"),
]


def test_a_list_of_files_is_not_believed(hub, ram, registry, tmp_path):
    ram("push", "--registry", registry.path, "--to", HUB)
    for extra, problem in HOSTILE_LISTS:
        hub.listing = lambda entries, extra=extra: [one for one in entries if one["path"] != extra["path"]] + [extra]
        hub.forget()
        code, out, err = ram("pull", "--from", HUB, "--registry", tmp_path / "two")
        assert (code, out) == (2, ""), extra
        assert err.startswith(f"error: {HUB}") and problem in err and "\n" not in err
        assert visible(tmp_path / "two") == [] and not any(path.endswith("safetensors") for path in hub.sent)


def test_what_a_hostile_place_holds_is_refused(registry, memory, tmp_path):
    push_agents(registry, "memory://team", ["math", "tool"])
    folder = "/team/agents/math/v000002"
    whole = dict(memory.store)
    sealed = registry.get("math@v2").manifest

    def resealed(**changes):
        fields = sealed.to_dict()
        del fields["digest"]
        fields["files"] = {**fields["files"], **changes.pop("files", {})}
        content = json.dumps({**fields, **changes}, sort_keys=True, separators=(",", ":"))
        digest = blake3(content.encode()).hexdigest()
        return json.dumps({**fields, **changes, "digest": digest}).encode()

    record = {"size": 1, "blake3": "0" * 64}
    for name, content, problem in [
        (
            "manifest.json",
            memory.cat("/team/agents/tool/v000001/manifest.json"),
            "is not the manifest of agent 'math'",
        ),
        ("manifest.json", resealed(agent="tool"), "is not the manifest of agent 'math'"),
        ("manifest.json", resealed(kind="pickle"), "is not the manifest of agent 'math'"),
        ("manifest.json", resealed(format_version=9), "pip install --upgrade ram_trl"),
        ("manifest.json", b"[1]", "no JSON object"),
        ("manifest.json", b"{" * 5000, "is not valid JSON"),
        ("manifest.json", b'{"agent": 1, "agent": 2}', "a name occurs twice"),
        ("manifest.json", resealed(files={"../../x": record}), "records '../../x', which is no file of a version"),
        ("manifest.json", resealed(files={"/etc/passwd": record}), "which is no file of a version"),
        ("manifest.json", resealed(files={".hidden": record}), "which is no file of a version"),
        ("manifest.json", resealed(files={"manifest.json": record}), "which is no file of a version"),
        ("manifest.json", resealed(files={"a": {"size": "1", "blake3": "0" * 64}}), "size cannot be '1'"),
        ("manifest.json", resealed(files={"a": {"size": 1, "blake3": 7}}), "blake3 cannot be 7"),
        ("manifest.json", resealed(files={"a": record}), "lacks its file a"),
        # what a link is in a repository: a small file with a path in it
        ("delta.safetensors", b"../../../../etc/passwd", "has 22 bytes, and 3,000 are recorded"),
        ("tensors.json", None, "lacks its file tensors.json"),
        ("run.py", b"x", "has an unrecorded file run.py"),
    ]:
        memory.store.clear()
        memory.store.update(whole)
        memory.rm(f"{folder}/{name}") if content is None else memory.pipe(f"{folder}/{name}", content)
        two = AgentRegistry(tmp_path / "two")
        with pytest.raises((CorruptedFileError, UnsupportedModelError), match=f"memory://team.*{re.escape(problem)}"):
            pull_agents(two, "memory://team")
        assert visible(tmp_path) == [name for name in visible(tmp_path) if name.startswith("registry/")]


def test_many_who_pull_the_same_at_once_get_it_once(registry, tmp_path):
    add_agent(registry, "law", {"delta.safetensors": 8 * MB})
    two = AgentRegistry(tmp_path / "two")
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda _: pull_agents(two, registry.path, ["law"]), range(4)))
    assert sorted(transfer.moved for (transfer,) in got) == [0, 0, 0, 8 * MB]
    assert {transfer.arrived for (transfer,) in got} == {"law@v1"} and two.versions("law") == [1]
    check_equal(registry, two, ["law@v1"])


def test_fisher_information_that_came_later_follows_its_agent(registry, memory, tmp_path):
    place = FisherStore(registry).directory(registry.get("math@v1"))
    hidden = place.rename(tmp_path / "hidden")
    two = AgentRegistry(tmp_path / "two")
    push_agents(registry, "memory://team")
    pull_agents(two, "memory://team")
    hidden.rename(place)
    size = (place / FISHER).stat().st_size
    assert [transfer.moved for transfer in push_agents(registry, "memory://team")] == [0, size, 0]
    assert [transfer.moved for transfer in pull_agents(two, "memory://team")] == [0, size, 0]
    check_arrived(registry, two)
    # what is left of another, which was pushed and made again meanwhile, is not taken for this one
    memory.rm("/team/fisher/math/v000001/manifest.json")
    memory.pipe("/team/fisher/math/v000001/fisher.safetensors", b"x" * size)
    memory.pipe("/team/fisher/math/v000001.claim", b'{"digest": "of the other"}')
    assert [transfer.moved for transfer in push_agents(registry, "memory://team")] == [0, size, 0]
    shutil.rmtree(two.path / "fisher")
    pull_agents(two, "memory://team")
    check_arrived(registry, two)
    # that of another version with this number is not either
    manifest = json.loads(memory.cat("/team/fisher/math/v000001/manifest.json"))
    memory.pipe("/team/fisher/math/v000001/manifest.json", json.dumps({**manifest, "agent_digest": "0"}).encode())
    three = AgentRegistry(tmp_path / "three")
    pull_agents(three, "memory://team")
    assert not (three.path / "fisher").exists()


def test_labels_that_mean_nothing_are_left_out(registry, memory, tmp_path):
    push_agents(registry, "memory://team")
    for name, content in {
        "aliases/v3.json": b'{"version": 1}',
        "aliases/latest.json": b'{"version": 1}',
        "aliases/far.json": b'{"version": 77}',
        "aliases/odd.json": b'{"version": "1"}',
        "aliases/-x.json": b'{"version": 1}',
        "tags/v000077/x": b"",
        "tags/v000001/.x": b"",
        "tags/v000001/v2": b"",
        ".tmp-left/x": b"",
    }.items():
        memory.pipe(f"/team/agents/math/{name}", content)
    memory.pipe("/team/agents/.tmp-left/v000001/manifest.json", b"")
    memory.pipe("/team/README.md", b"")
    two = AgentRegistry(tmp_path / "two")
    pull_agents(two, "memory://team")
    check_arrived(registry, two)
    assert visible(two.path) == [name for name in visible(registry.path) if name.startswith(("agents", "fisher"))]


def test_what_does_not_fit_is_not_begun(registry, memory, tmp_path, monkeypatch):
    push_agents(registry, "memory://team")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7000))
    with pytest.raises(StorageError, match=r"math@v2, math@v1, tool@v1 need \d+,\d+ bytes and the disk of"):
        pull_agents(tmp_path / "two", "memory://team")
    assert not (tmp_path / "two").exists()


def test_mistakes_are_one_line_with_the_cure(hub, ram, registry, tmp_path):
    def refused(*words, **environment):
        code, out, err = ram(*words, **{"HF_TOKEN": OWNER, **environment})
        assert (code, out) == (2, "") and err.startswith("error: ") and "\n" not in err
        assert "hf_" not in err.replace("hf_***", "")
        return err.removeprefix("error: ")

    push = ("push", "--registry", registry.path, "--to")
    pull = ("pull", "--registry", tmp_path / "two", "--from")
    unknown = f"{HUB}: there is no such repository, or none that you may see: check its name, then hf auth login"
    assert refused(*pull, HUB).startswith(unknown)
    assert refused("push", "--registry", tmp_path / "no", "--to", HUB).startswith(f"{tmp_path}/no is not a registry")
    no_token = f"{HUB}: the Hub refuses your token, or got none: hf auth login, or set HF_TOKEN"
    assert refused(*push, HUB, HF_TOKEN="") == no_token
    assert refused(*push, HUB, HF_TOKEN=READER).startswith(
        f"{HUB}: making it is not permitted: use a token with write"
    )
    assert refused(*push, "hf://other/agents").startswith("hf://other/agents: making it is not permitted")
    assert ram(*push, HUB, HF_TOKEN=OWNER)[0] == 0
    assert refused(*pull, HUB, HF_TOKEN="").startswith(unknown)
    assert refused(*pull, HUB, HF_TOKEN="hf_wrongwrongwrong") == no_token
    add_agent(registry, "law", {"delta.safetensors": 10})
    assert refused(*push, HUB, HF_TOKEN=READER).startswith(f"{HUB}: writing to it is not permitted: use a token with")
    assert refused(*pull, f"{HUB}@nosuch") == f"{HUB}@nosuch: there is no revision nosuch: name another"
    for url, problem in {
        "hf://agents": "names no model repository: write hf://USER/REPO",
        "hf://datasets/user/agents": "names no model repository",
        "https://huggingface.co/user/agents": "is a page: write hf://USER/REPO",
        "nosuch://x": "cannot be opened: Protocol not known",
        "gs://bucket/x": "needs a library that is not installed: pip install gcsfs",
        "memory://empty": "holds no agent: check the URL",
    }.items():
        assert refused(*pull, url).startswith(f"{url} {problem}")
    assert not (tmp_path / "two").exists()


def test_a_public_repository_is_made_on_demand_and_told_of(hub, ram, registry):
    code, _, err = ram(
        "push", "--registry", registry.path, "--to", HUB, "--agents", "tool", "--public", HF_TOKEN=OWNER
    )
    assert err == ""
    assert not hub.repositories["user/agents"].private
    code, _, err = ram("push", "--registry", registry.path, "--to", HUB)
    assert code == 0 and f"{HUB} is public: everybody can read what is pushed there" in err


def test_without_a_network_the_error_says_so(registry, tmp_path):
    script = "import sys; from ram_trl.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", script, "list", "--registry", "hf://user/agents"]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    with pytest.raises(StorageError, match=r"^hf://user/agents: HF_HUB_OFFLINE forbids to reach the Hub: unset it$"):
        open_registry("hf://user/agents")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(r"^error: hf://user/agents: reading it failed: ConnectError: .*: check the network", done.stderr)


def test_secrets_of_a_url_are_not_printed(s3, ram, monkeypatch):
    address, _ = s3
    secret = "wJalrXUtnFEMI"
    for url in (
        f"s3://AKIAOTHER:{secret}@agents/team",
        f"sftp://me:{secret}@127.0.0.1:9/x",
        f"nosuch://{secret}@x/?sig={secret}",
    ):
        code, out, err = ram("list", "--registry", url, AWS_ENDPOINT_URL=address)
        assert (code, out) == (2, "") and err.startswith("error: ") and "***@" in err
        assert secret not in err and "AKIAOTHER" not in err
    assert hide_secrets("at sftp://me:p@ss@host/x") == "at sftp://***@host/x"
    assert "p@ss" not in hide_secrets("p@ss was refused", "sftp://me:p@ss@host/x")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "an-account-key")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    assert hide_secrets("an-account-key sk-0123456789") == "*** ***"
    assert hide_secrets("https://b.s3/x?X-Amz-Signature=abc at hf_abcdefghij") == "https://b.s3/x?*** at hf_***"


def test_a_place_is_opened_like_a_registry(registry, memory, cache):
    push_agents(registry, "memory://team")
    opened = open_registry("memory://team")
    assert opened.versions("math") == [2] and files_of(opened, "math") == files_of(registry, "math")
    opened = open_registry("memory://team", ["math@best", "tool"])
    assert str(opened.get("math@best")) == "math@v1" and opened.labels("math").tags() == {1: ["paper"]}
    check_equal(registry, opened, ["math@v1", "tool@v1"])
    FisherStore(opened).get(opened.get("math@v1")).verify()
    assert open_registry("memory://team", ["math@best", "tool"]).path == opened.path
    listed = open_registry("memory://team", weights=False)
    assert listed.versions("math") == [1, 2] and [str(agent) for agent in listed] == ["math@v2", "tool@v1"]
    assert [file.name for file in listed.get("math").path.iterdir()] == ["manifest.json"]
    assert open_registry(registry.path).path == registry.path and open_registry(registry).path == registry.path
    assert open_registry(f"file://{registry.path}").path == registry.path
    with pytest.raises(AgentNotFoundError, match="no agent 'law' in memory://team"):
        open_registry("memory://team", ["law"])
    # what a version holds is kept once, and fetched once
    inodes = {file.stat().st_ino for file in cache.rglob("delta.safetensors")}
    assert len(inodes) == 2


def test_what_is_read_is_what_the_place_holds_now(registry, memory):
    push_agents(registry, "memory://team")
    before = open_registry("memory://team")
    # somebody starts anew: the same number is another version, and what was the latest is gone
    memory.rm("/team", recursive=True)
    for number in range(2):
        shutil.rmtree(registry.path / "agents" / "math", ignore_errors=True)
        add_agent(registry, "math", {"delta.safetensors": 500}, seed=20 + number)
    push_agents(registry, "memory://team")
    after = open_registry("memory://team")
    assert after.versions("math") == [1] and files_of(after, "math") == files_of(registry, "math")
    # who began before goes on with what he saw
    assert before.versions("math") == [2]
    before.get("math").verify()


def test_the_cache_mends_itself(registry, memory):
    push_agents(registry, "memory://team")
    opened = open_registry("memory://team")
    for damage in (
        lambda path: (path / "delta.safetensors").write_bytes(flip((path / "delta.safetensors").read_bytes())),
        lambda path: (path / "manifest.json").write_text("{}"),
        lambda path: (path / "tensors.json").unlink(),
    ):
        damage(opened.path / "agents" / "math" / "v000002")
        assert open_registry("memory://team").path == opened.path
        check_equal(registry, opened, ["math@v2"])


def test_nothing_is_written_to_a_url(ram, registry, tmp_path):
    words = {
        "register": ["--agent", "law", "--model", "x"],
        "rebase": ["--agent", "math"],
        "generalists": [],
        "promote": ["--generalist", "g@v1"],
        "remove": ["--agent", "math"],
        "pull": ["--from", registry.path],
    }
    for command, more in words.items():
        code, out, err = ram(command, "--registry", "s3://agents/team", *more)
        assert (code, out) == (2, "")
        assert err.startswith("error: a s3:// URL is no directory, and here one is needed: ram-trl pull fetches")
    with pytest.raises(ConfigError, match="a memory:// URL is no directory"):
        AgentRegistry("memory://x")
    with pytest.raises(ConfigError, match="a s3:// URL is no directory"):
        AgentRegistry(Path("s3://x/y"))


OPENING = """
import os, sys
from pathlib import Path
from ram_trl import merge_agents
from ram_trl.distributed import leave_world, start_world
from ram_trl.sharing import open_registry

folder, place = Path(sys.argv[1]), sys.argv[2]
world = start_world(cpu=True)
os.environ["RAM_TRL_CACHE"] = str(folder / "shared")
registry = open_registry(place, world=world)
merge_agents(registry, str(folder / "merged"), world=world)
# two machines: what the first fetches the second does not see
os.environ["RAM_TRL_CACHE"] = str(folder / f"machine{world.rank}")
open_registry(place, ["tool"], world=world).get("tool").verify()
leave_world()
"""


def test_processes_open_a_place_together(hub, ram, zoo, tmp_path):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"math": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})
    ram("push", "--registry", registry.path, "--to", HUB, HF_TOKEN=OWNER)
    merge_agents(registry, str(tmp_path / "expected"))
    hub.forget()
    (tmp_path / "opening.py").write_text(OPENING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = ram.run(*torchrun, tmp_path / "opening.py", tmp_path, HUB, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert read_bytes(tmp_path / "merged") == read_bytes(tmp_path / "expected")
    sizes = {agent.name: (agent.path / WEIGHTS[agent.name]).stat().st_size for agent in registry}
    assert hub.sent["agents/math/v000001/delta.safetensors"] == sizes["math"]
    # once for the shared cache, and once for each of the two machines
    assert hub.sent["agents/tool/v000001/adapter_model.safetensors"] == 3 * sizes["tool"]


WEIGHTS = {"math": "delta.safetensors", "tool": "adapter_model.safetensors"}


def test_the_recipe_merges_what_is_on_the_hub(hub, ram, zoo, tmp_path):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"math": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})
    registry = AgentRegistry(shutil.copytree(registry.path, tmp_path / "registry"))
    registry.labels("math").set_alias("best", 1)
    ram("push", "--registry", registry.path, "--to", HUB, HF_TOKEN=OWNER)
    merge_agents(registry, str(tmp_path / "expected"))
    recipe = Path(__file__).parent.parent / "recipes" / "merge.py"
    words = ["--registry", HUB, "--agents", "math@best", "tool", "--output_dir", tmp_path / "merged"]
    done = ram.run(sys.executable, recipe, *words, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert read_bytes(tmp_path / "merged") == read_bytes(tmp_path / "expected")


def read_bytes(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def test_a_registry_in_a_directory_needs_no_library_of_the_network(registry, tmp_path):
    script = """
import sys
import ram_trl, ram_trl.cli
from ram_trl.sharing.reading import open_registry
import ram_trl.sharing.push, ram_trl.sharing.pull
registry = open_registry(sys.argv[1])
ram_trl.merge_agents(registry, sys.argv[2], agents=["math@v1", "tool"])
ram_trl.sharing.push_agents(registry, sys.argv[3])
print(*sorted({"fsspec", "huggingface_hub", "s3fs", "httpx2", "requests"} & set(sys.modules)))
"""
    words = [registry.path, tmp_path / "merged", tmp_path / "two"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_a_version_that_is_damaged_there_is_made_whole_and_stops_no_other(hub, ram, registry, memory):
    push_agents(registry, "memory://team", ["math@v1", "math@v2"])
    # the next one, whose manifest has the same size
    add_agent(registry, "math", {"delta.safetensors": 3000, "tensors.json": 2000}, seed=3)
    memory.rm("/team/agents/math/v000002/delta.safetensors")
    (sent,) = push_agents(registry, "memory://team", ["math@v3"])
    assert (sent.arrived, sent.moved) == ("math@v3", 5000)
    assert push_agents(registry, "memory://team", ["math@v2"])[0].arrived == "math@v2"
    check_equal(registry, open_registry("memory://team", ["math@v2", "math@v3"]), ["math@v2", "math@v3"])
    # what nobody may remove from there cannot be made whole: another number
    memory.pipe("/team/agents/math/v000003/more", b"x")
    assert push_agents(registry, "memory://team", ["math@v3"])[0].arrived == "math@v4"
    assert push_agents(registry, "memory://team", ["math@v3"])[0].moved == 0
    # the Hub, which has no claims
    words = ("push", "--registry", registry.path, "--to", HUB, "--agents")
    ram(*words, "math@v2")
    repository = hub.repositories["user/agents"]
    repository.commit({k: v for k, v in repository.files.items() if not k.endswith("v000002/tensors.json")}, "lost")
    assert ram(*words, "math@v3")[:2] == (0, "math@v3: 5 kB moved\n")
    assert ram(*words, "math@v2")[:2] == (0, "math@v2: 5 kB moved\n")
    assert "agents/math/v000002/tensors.json" in repository.files


def test_what_a_broken_pull_left_needs_no_more_space(registry, memory, tmp_path, monkeypatch):
    push_agents(registry, "memory://team", ["math@v2"])
    two, held = AgentRegistry(tmp_path / "two"), registry.get("math@v2")
    staged = f".tmp-pull-{held.manifest.to_dict()['digest']}"
    for folder in (two.path / "agents" / "math", tmp_path / "cache" / "versions" / "agents"):
        (folder / staged).mkdir(parents=True)
        shutil.copy(held.path / "delta.safetensors", folder / staged)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1999))
    with pytest.raises(StorageError, match=r"math@v2 need 2,000 bytes and the disk of .* has 1,999"):
        pull_agents(two, "memory://team")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2000))
    assert [transfer.moved for transfer in pull_agents(two, "memory://team")] == [2000]
    check_equal(registry, two, ["math@v2"])
    check_equal(registry, open_registry("memory://team"), ["math@v2"])


def test_damaged_fisher_information_stays_behind_and_its_agent_does_not(registry, memory, tmp_path):
    push_agents(registry, "memory://team")
    path = FisherStore(registry).directory(registry.get("math@v1")) / FISHER
    good, problem = path.read_bytes(), "its Fisher information stays behind: "
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for number, place in enumerate(("memory://two", tmp_path / "two")):
        sent = push_agents(registry, place)
        assert [len(transfer.notes) for transfer in sent] == [0, 1, 0] and sent[1].notes[0].startswith(problem)
        two = AgentRegistry(place) if number else pulled(place, tmp_path / "pulled")
        check_equal(registry, two)
        assert two.labels("math").aliases() == {"best": 1} and not visible(two.path / "fisher")
    # damaged there: the bytes, or the manifest
    for number, name in enumerate((FISHER, "manifest.json")):
        there = f"/team/fisher/math/v000001/{name}"
        memory.pipe(there, memory.cat(there)[:-1] + b"!")
        three = AgentRegistry(tmp_path / f"three{number}")
        got = pull_agents(three, "memory://team")
        assert [len(transfer.notes) for transfer in got] == [0, 1, 0] and got[1].notes[0].startswith(problem)
        check_equal(registry, three)
        assert three.labels("math").tags() == {1: ["paper"]} and not visible(three.path / "fisher")
        opened = open_registry("memory://team", ["math@v1", "tool"])
        check_equal(registry, opened, ["math@v1", "tool@v1"])
        assert not visible(opened.path / "fisher")


def pulled(place, path):
    pull_agents(path, place)
    return AgentRegistry(path)


def test_what_others_do_in_the_registry_stops_no_push(registry, memory, monkeypatch):
    folder, lstat, looked = registry.path / "agents" / "math", os.lstat, []
    (folder / ".tmp-register").mkdir()
    (folder / ".tmp-register" / "delta.safetensors").write_bytes(b"x")
    moved, dropped, later = (folder / "aliases" / f"{name}.json" for name in ("best", "gone", "later"))
    dropped.write_text('{"version": 1}')
    later.write_text('{"version": 1}')

    def look(path):
        # one alias goes between the list of a folder and the look at its files, one after it; one gets a longer text
        looked.append(str(path))
        if str(path) == str(dropped):
            dropped.unlink()
        found = lstat(path)
        if str(path) == str(later):
            later.unlink()
        if str(path) == str(moved):
            moved.write_text('{"version":                    1}')
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", look)
        (sent,) = push_agents(registry, "memory://team", ["math@v2"])
    assert sent.moved == 5000 and not any(".tmp-" in path for path in looked)
    assert {str(moved), str(dropped), str(later)} <= set(looked)


def test_after_the_highest_number_there_is_none(registry, memory):
    memory.pipe("/team/agents/math/v999999999.claim", b"{}")
    assert push_agents(registry, "memory://team", ["math@v2"])[0].arrived == "math@v2"
    memory.pipe("/team/agents/math/v000001.removed", b"")
    with pytest.raises(StorageError, match="math holds v999999999, after which there is no number: remove it"):
        push_agents(registry, "memory://team", ["math@v1"])
    assert not [name for name in memory.store if "1000000000" in name]


def test_folders_made_in_a_console_are_none(s3, ram, registry, tmp_path):
    address, _ = s3
    at = {"AWS_ENDPOINT_URL": address}
    for name in ("agents/", "agents/math/", "agents/math/v000002/", "fisher/"):
        url = f"{address}/agents/console/{name}"
        urllib.request.urlopen(urllib.request.Request(url, data=b"", method="PUT")).close()
    assert ram("push", "--registry", registry.path, "--to", "s3://agents/console", **at)[0] == 0
    assert ram("pull", "--from", "s3://agents/console", "--registry", tmp_path / "two", **at)[0] == 0
    check_arrived(registry, AgentRegistry(tmp_path / "two"))


def test_who_lost_the_place_to_another_takes_the_next(registry, memory):
    taken = []

    def progress(doing, done, total):
        # what storage does that creates a file also if there is one
        if not taken:
            taken.append(memory.cat("/team/agents/math/v000002.claim"))
            memory.pipe("/team/agents/math/v000002.claim", b'{"digest": "of another"}')

    (sent,) = push_agents(registry, "memory://team", ["math@v2"], progress=progress)
    assert taken and sent.arrived == "math@v3"
    assert not memory.exists("/team/agents/math/v000002/manifest.json")
    assert files_of(open_registry("memory://team", ["math@v3"]), "math@v3") == files_of(registry, "math@v2")
