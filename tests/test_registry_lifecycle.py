"""Living with a registry: admitting, naming, removing, recovering, verifying, cleaning up."""

import contextlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError
from test_registry import edit, register, tree

from ram_trl import MergeConfig, integrate_agents
from ram_trl.cli import main
from ram_trl.errors import (
    AgentNotFoundError,
    ConfigError,
    CorruptedFileError,
    InvalidNameError,
    RamTrlError,
    StorageError,
)
from ram_trl.lifecycle.gc import Garbage, collect_garbage, find_garbage
from ram_trl.lifecycle.verify import Verdict, verify_registry
from ram_trl.options import parse_config
from ram_trl.storage.fisher import FISHER, FisherManifest, FisherStore
from ram_trl.storage.generalists import Generalist
from ram_trl.storage.manifest import GeneralistManifest, ParentRecord
from ram_trl.storage.registry import DELTA, AgentRegistry, RegisteredAgent
from ram_trl.storage.trash import note_path


@pytest.fixture
def registry(tmp_path):
    return AgentRegistry(tmp_path / "registry")


@pytest.fixture
def elsewhere(tmp_path):
    """Another registry with math@v1 to math@v3."""
    other = AgentRegistry(tmp_path / "elsewhere")
    for number in range(3):
        register(other, content=bytes([number]))
    return other


def admit(registry: AgentRegistry, agent: RegisteredAgent, number: int | None = None) -> RegisteredAgent:
    with registry.stage(agent.name) as staged:
        shutil.copytree(agent.path, staged, dirs_exist_ok=True)
        return registry.admit(staged, agent.version if number is None else number)


# Versions that come from elsewhere


def test_an_admitted_version_is_the_same_byte_for_byte_and_keeps_its_number(registry, elsewhere):
    source = elsewhere.get("math@v2")
    admitted = admit(registry, source)
    assert str(admitted) == "math@v2" and registry.get("math") == admitted
    assert tree(admitted.path) == tree(source.path)
    admitted.verify()
    # what comes after it has the next number, and an earlier one still finds its place
    assert str(register(registry)) == "math@v3"
    assert str(admit(registry, elsewhere.get("math@v1"))) == "math@v1"
    assert registry.versions("math") == [1, 2, 3]


def test_a_number_that_was_ever_used_here_is_not_taken(registry, elsewhere):
    register(registry, content=b"mine")
    assert str(admit(registry, elsewhere.get("math@v1"))) == "math@v2"
    registry.remove("math@v2")
    assert str(admit(registry, elsewhere.get("math@v2"))) == "math@v3"
    registry.get("math@v1").verify()


@pytest.mark.parametrize("number", [1_000_001, 999_999_999])
def test_a_number_far_ahead_is_not_kept_so_that_later_versions_have_theirs(registry, elsewhere, number):
    assert str(admit(registry, elsewhere.get("math@v1"), number)) == "math@v1"
    assert str(admit(registry, elsewhere.get("math@v2"), 1_000_001)) == "math@v1000001"
    assert str(register(registry)) == "math@v1000002"


def test_after_the_highest_number_there_is_none(registry, elsewhere):
    register(registry, content=b"mine")
    registry.store.mark_used("math", 999_999_999)
    before = tree(registry.path)
    for add in (lambda: register(registry), lambda: admit(registry, elsewhere.get("math@v1"))):
        with pytest.raises(StorageError, match="'math' had v999999999, the highest number there is"):
            add()
    assert tree(registry.path) == before
    # what has a number that is free has it
    assert str(admit(registry, elsewhere.get("math@v2"))) == "math@v2"


def test_what_is_there_already_is_found_whatever_its_number_and_nothing_is_written(registry, elsewhere):
    register(registry, content=b"mine")
    first = admit(registry, elsewhere.get("math@v1"))
    before = tree(registry.path)
    assert admit(registry, elsewhere.get("math@v1")) == first
    assert tree(registry.path) == before


def test_find_same_gives_the_version_of_a_digest(registry, elsewhere):
    assert registry.find_same("math", "00") is None
    agents = [admit(registry, elsewhere.get(f"math@v{number}"), 10 + number) for number in (1, 2, 3)]
    for agent in agents:
        assert registry.find_same("math", agent.digest) == agent
    assert registry.find_same("code", agents[0].digest) is None
    # what is damaged is not the same, and in nobody's way
    (agents[2].path / "manifest.json").write_text("{")
    assert registry.find_same("math", agents[0].digest) == agents[0]
    with pytest.raises(InvalidNameError):
        registry.find_same("../math", "00")


@pytest.mark.parametrize(
    "damage",
    [
        lambda staged: (staged / DELTA).write_bytes(b"other"),
        lambda staged: (staged / DELTA).unlink(),
        lambda staged: (staged / "more").write_bytes(b""),
        lambda staged: (staged / "more").mkdir(),
        lambda staged: (staged / "manifest.json").unlink(),
        lambda staged: (staged / "manifest.json").write_text((staged / "manifest.json").read_text().replace("7", "8")),
        lambda staged: edit(RegisteredAgent("math", 1, staged, None), agent="code"),
        lambda staged: edit(RegisteredAgent("math", 1, staged, None), files={"../math/x": {"size": 0, "blake3": ""}}),
    ],
    ids=["changed", "missing", "more", "folder", "manifestless", "manifest", "other agent", "outside"],
)
def test_what_is_not_what_was_registered_is_not_admitted(registry, elsewhere, damage):
    register(registry)
    before = tree(registry.path)
    with pytest.raises(RamTrlError), registry.stage("math") as staged:
        shutil.copytree(elsewhere.get("math").path, staged, dirs_exist_ok=True)
        damage(staged)
        registry.admit(staged, 5)
    assert tree(registry.path) == before


def test_links_and_pipes_are_no_files_of_a_version(registry, elsewhere):
    def link(staged):
        shutil.move(staged / DELTA, registry.path.parent / "delta")
        (staged / DELTA).symlink_to(registry.path.parent / "delta")

    def pipe(staged):
        (staged / DELTA).unlink()
        os.mkfifo(staged / DELTA)

    for replace in (link, pipe):
        with pytest.raises(CorruptedFileError, match=DELTA), registry.stage("math") as staged:
            shutil.copytree(elsewhere.get("math").path, staged, dirs_exist_ok=True)
            replace(staged)
            registry.admit(staged, 1)
    assert registry.versions("math") == []


@pytest.mark.parametrize("number", [0, -1, 10**9, True, 1.0, "1", None])
def test_a_number_that_is_none_is_refused(registry, elsewhere, number):
    with pytest.raises(InvalidNameError, match="is not the number of a version"), registry.stage("math") as staged:
        shutil.copytree(elsewhere.get("math").path, staged, dirs_exist_ok=True)
        registry.admit(staged, number)


def admit_all(path: Path, source: Path) -> list[int]:
    return [admit(AgentRegistry(path), AgentRegistry(source).get(f"math@v{number}")).version for number in (1, 2, 3)]


def test_of_one_version_that_many_admit_at_once_there_is_one(registry, elsewhere):
    register(registry, content=b"mine")
    with multiprocessing.get_context("fork").Pool(6) as pool:
        results = pool.starmap(admit_all, [(registry.path, elsewhere.path)] * 6)
    assert all(result == results[0] for result in results) and len(set(results[0])) == 3
    assert registry.versions("math") == sorted([1, *results[0]])
    for number in registry.versions("math"):
        registry.get(f"math@v{number}").verify()


# Names for versions


def test_an_alias_is_a_version_wherever_a_version_is_named_and_moves(registry):
    for number in range(3):
        register(registry, content=bytes([number]))
    labels = registry.labels("math")
    labels.set_alias("best", 2)
    assert str(registry.get("math@best")) == "math@v2" and str(registry.get("math")) == "math@v3"
    registry.labels("math").set_alias("best", 1)
    labels.set_alias("prod", 3)
    assert labels.aliases() == {"best": 1, "prod": 3} and str(registry.get("math@best")) == "math@v1"
    assert registry.remove("math@prod") == ["math@v3"]
    with pytest.raises(AgentNotFoundError, match=r"math@prod means v3: .* math@v3 is in the trash: ram-trl recover"):
        registry.get("math@prod")
    # it says nothing while its version is not there
    assert registry.labels("math").aliases() == {"best": 1}
    assert registry.recover("math@prod") == ["math@v3"] and str(registry.get("math@prod")) == "math@v3"
    registry.labels("math").drop_alias("prod")
    with pytest.raises(AgentNotFoundError, match="agent 'math' has no alias 'prod'; it has: best"):
        registry.get("math@prod")
    with pytest.raises(AgentNotFoundError, match="no alias 'prod'; it has: best"):
        registry.labels("math").drop_alias("prod")


def test_tags_are_on_versions(registry):
    for _ in range(2):
        register(registry)
    labels = registry.labels("math")
    for number, tag in ((1, "paper"), (2, "paper"), (2, "a.b-c_d"), (2, "paper")):
        labels.add_tag(number, tag)
    assert labels.tags() == {1: ["paper"], 2: ["a.b-c_d", "paper"]}
    labels.drop_tag(2, "paper")
    with pytest.raises(AgentNotFoundError, match=r"math@v2 has no tag 'paper'; it has: a\.b-c_d"):
        labels.drop_tag(2, "paper")
    registry.remove("math@v2")
    assert registry.labels("math").tags() == {1: ["paper"]}
    registry.recover("math@v2")
    assert registry.labels("math").tags() == {1: ["paper"], 2: ["a.b-c_d"]}


def test_labels_are_only_of_versions_that_are_there(registry):
    register(registry)
    labels = registry.labels("math")
    for action in (lambda: labels.set_alias("best", 2), lambda: labels.add_tag(2, "paper")):
        with pytest.raises(AgentNotFoundError, match="'math' has no version v2"):
            action()
    assert sorted(entry.name for entry in (registry.path / "agents" / "math").iterdir()) == ["v000001"]


BAD_LABELS = [
    "", "v1", "V12", "v", "v-1", "latest", "1", "-a", ".a", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "é", "a" * 65,
    "v000001", "@", "a@b", "~", "*", None, 1, ["a"], b"a", "a:b", "con\u202e",
]  # fmt: skip


@pytest.mark.parametrize("label", BAD_LABELS, ids=repr)
def test_a_label_that_is_none_is_refused_and_touches_nothing(registry, label):
    register(registry)
    before, labels = tree(registry.path), registry.labels("math")
    for action in (
        lambda: labels.set_alias(label, 1),
        lambda: labels.drop_alias(label),
        lambda: labels.read_alias(label),
        lambda: labels.add_tag(1, label),
        lambda: labels.drop_tag(1, label),
    ):
        with pytest.raises(InvalidNameError) as caught:
            action()
        assert str(caught.value).isprintable()
    assert tree(registry.path) == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 0}', '{"version": 1000000000}', '{"version": "1"}', '{"version": true}', "{}"],
)
def test_a_damaged_alias_is_refused_with_the_cure_and_can_be_set_again(registry, content):
    register(registry)
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").set_alias("good", 1)
    (registry.path / "agents/math/aliases/best.json").write_text(content)
    with pytest.raises(CorruptedFileError, match=r"best\.json .*: set the alias again"):
        registry.get("math@best")
    assert registry.labels("math").aliases() == {"good": 1}
    registry.labels("math").set_alias("best", 1)
    assert str(registry.get("math@best")) == "math@v1"


def test_what_else_lies_among_labels_is_left_alone(registry):
    register(registry)
    folder = registry.path / "agents" / "math"
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").add_tag(1, "paper")
    for name in (
        "aliases/v1.json",
        "aliases/x",
        "aliases/\n.json",
        "tags/v1",
        "tags/v000001/.tmp-x",
        "tags/v000001/1",
    ):
        (folder / name).write_text("x")
    (folder / "aliases" / "loop.json").symlink_to("loop.json")
    assert registry.labels("math").aliases() == {"best": 1}
    assert registry.labels("math").tags() == {1: ["paper"]}


def test_an_alias_is_flushed_before_it_appears(registry, monkeypatch):
    register(registry)
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    registry.labels("math").set_alias("best", 1)
    folder = registry.path / "agents" / "math"
    made, renamed = calls.index(str(folder)), calls.index("replace")
    assert made < renamed and Path(calls[renamed - 1]).parent == folder / "aliases"
    assert calls[renamed + 1 :] == [str(folder / "aliases")]


def move_alias(path: Path, number: int) -> None:
    for _ in range(50):
        AgentRegistry(path).labels("math").set_alias("best", number)
        assert AgentRegistry(path).get("math@best").version in (1, 2, 3)
        AgentRegistry(path).labels("math").add_tag(number, f"t{number}")


def test_many_who_set_one_alias_at_once_need_no_locks(registry):
    for _ in range(3):
        register(registry)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(move_alias, [(registry.path, number) for number in (1, 2, 3)])
    assert registry.labels("math").tags() == {1: ["t1"], 2: ["t2"], 3: ["t3"]}
    assert sorted(path.name for path in (registry.path / "agents/math/aliases").iterdir()) == ["best.json"]


# Out of sight, and back


def test_what_was_removed_is_in_the_trash_and_comes_back_byte_for_byte(registry):
    for number in range(3):
        register(registry, content=bytes([number]))
    before = tree(registry.path / "agents")
    assert registry.remove("math@v2") == ["math@v2"]
    assert registry.versions("math") == [1, 3]
    with pytest.raises(
        AgentNotFoundError, match="it has: v1, v3; math@v2 is in the trash: ram-trl recover --registry"
    ):
        registry.get("math@v2")
    assert registry.recover("math@v2") == ["math@v2"]
    after = tree(registry.path / "agents")
    # what stays says that the number was used
    assert after.pop("math/v000002.removed")[1] == b""
    assert after == before
    registry.get("math@v2").verify()
    assert register(registry).version == 4


def test_all_versions_go_and_come_back(registry):
    for _ in range(3):
        register(registry)
    register(registry, "code")
    registry.remove("math@v2")
    assert registry.remove("math") == ["math@v1", "math@v3"]
    with pytest.raises(AgentNotFoundError, match=r"no agent 'math' in .* it holds: code; math@v3 is in the trash"):
        registry.get("math")
    assert registry.recover("math") == ["math@v1", "math@v2", "math@v3"]
    assert registry.versions("math") == [1, 2, 3]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math@v1", "agent math@v1 is there: there is nothing to recover"),
        ("math@v3", "no agent math@v3 to recover; there is: math@v2 in the trash"),
        ("code", "no agent code to recover; there is: nothing"),
        ("code@v1", "no agent code@v1 to recover; there is: nothing"),
        ("math@best", "no agent math@best to recover"),
    ],
)
def test_what_is_not_there_cannot_be_recovered(registry, spec, message):
    register(registry)
    register(registry)
    registry.remove("math@v2")
    with pytest.raises(AgentNotFoundError, match=message):
        registry.recover(spec)


def test_what_is_damaged_goes_into_quarantine_with_a_reason_and_comes_back_repaired(registry):
    register(registry, content=b"first")
    agent = register(registry, content=b"other")
    content = (agent.path / DELTA).read_bytes()
    (agent.path / DELTA).write_bytes(b"x" + content[1:])
    assert registry.quarantine("math@v2", "a bit fell over") == "math@v2"
    assert str(registry.get("math")) == "math@v1"
    hidden = registry.path / "quarantine" / "agents" / "math" / "v000002"
    assert hidden.is_dir() and json.loads(note_path(hidden).read_text())["reason"] == "a bit fell over"
    with pytest.raises(AgentNotFoundError, match="math@v2 is in the quarantine: ram-trl recover"):
        registry.get("math@v2")
    with pytest.raises(CorruptedFileError, match=f"it stays in quarantine: repair {hidden}"):
        registry.recover("math@v2")
    with pytest.raises(AgentNotFoundError, match="there is: math@v2 in the quarantine"):
        registry.recover("math")
    (hidden / DELTA).write_bytes(content)
    assert registry.recover("math@v2") == ["math@v2"]
    registry.get("math@v2").verify()
    assert not note_path(hidden).exists()
    with pytest.raises(ConfigError, match="name the version to quarantine: math@v2"):
        registry.quarantine("math", "why")


def test_a_version_with_a_damaged_manifest_goes_and_stays_away(registry):
    for _ in range(2):
        agent = register(registry)
    (agent.path / "manifest.json").write_text("{")
    with pytest.raises(
        CorruptedFileError, match=r"ram-trl quarantine --registry \S+ --agent math@v2\) and register it"
    ):
        registry.get("math")
    registry.quarantine("math@v2", "no manifest")
    assert str(registry.get("math")) == "math@v1"
    with pytest.raises(CorruptedFileError, match="it stays in quarantine"):
        registry.recover("math@v2")


def test_nothing_is_moved_over_what_is_there(registry):
    register(registry)
    registry.remove("math@v1")
    # as somebody might do who copies registries by hand
    shutil.copytree(registry.path / "trash/agents/math/v000001", registry.path / "agents/math/v000001")
    before = tree(registry.path)
    with pytest.raises(ConfigError, match="is in the way of"):
        registry.remove("math@v1")
    with pytest.raises(ConfigError, match="is in the way of"):
        registry.recover("math@v1")
    assert tree(registry.path) == before


def test_a_link_in_the_place_of_a_version_is_moved_and_not_followed(registry, tmp_path):
    register(registry)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    (registry.path / "agents/math/v000002").symlink_to(tmp_path / "outside")
    registry.remove("math@v2")
    collect_garbage(registry)
    assert (tmp_path / "outside" / "file").read_text() == "x"
    assert registry.versions("math") == [1]


def test_every_step_of_a_removal_is_on_disk_before_the_next(registry, monkeypatch):
    register(registry)
    calls, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda *paths: (calls.append("rename"), rename(*paths)))
    registry.remove("math@v1")
    folder, trash = registry.path / "agents" / "math", registry.path / "trash" / "agents" / "math"
    renamed = calls.index("rename")
    assert calls[0] == str(folder)  # the mark
    assert {str(registry.path), str(trash.parent), str(trash.parent.parent)} <= set(calls[:renamed])
    assert calls[renamed + 1 :] == [str(trash), str(folder)]


def killed_while(action, registry, call, number):
    """Whether a process that acts was killed just before a call of a function of `os`."""
    child = os.fork()
    if child == 0:
        try:
            original, calls = getattr(os, call), []

            def maybe_die(*arguments, **options):
                calls.append(arguments)
                if len(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            setattr(os, call, maybe_die)
            action(registry)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


ACTIONS = {
    "trash": lambda registry: registry.remove("math@v2"),
    "quarantine": lambda registry: registry.quarantine("math@v2", "reason"),
}


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("place", ACTIONS)
def test_whoever_is_killed_while_a_version_goes_or_comes_leaves_all_of_it_somewhere(tmp_path, call, place):
    def is_there(registry, content):
        there, away = registry.versions("math"), registry.store.hidden(place).versions("math")
        assert sorted(there + away) == [1, 2]
        store = registry.store if 2 in there else registry.store.hidden(place)
        assert tree(store.version_dir("math", 2)) == content
        # its Fisher is on one side too
        fishers = [store.versions("math") for store in (registry.fishers, registry.fishers.hidden(place))]
        assert sorted(fishers) == [[], [2]]
        return 2 in there

    number, num_killed, killed = 1, 0, [True]
    while any(killed):
        registry = AgentRegistry(tmp_path / f"{number}")
        register(registry)
        agent = register(registry)
        content = tree(agent.path)
        make_fisher(registry, agent)
        killed = [killed_while(ACTIONS[place], registry, call, number)]
        if is_there(registry, content):
            ACTIONS[place](registry)
        assert not is_there(registry, content)
        killed.append(killed_while(lambda registry: registry.recover("math@v2"), registry, call, number))
        if not is_there(registry, content):
            registry.recover("math@v2")
        assert is_there(registry, content)
        registry.get("math@v2").verify()
        FisherStore(registry).get(registry.get("math@v2")).verify()
        assert register(registry).version == 3
        num_killed, number = num_killed + sum(killed), number + 1
    assert num_killed >= 3


def make_fisher(registry: AgentRegistry, agent: RegisteredAgent) -> FisherStore:
    """Fisher information, so to speak."""
    store = FisherStore(registry)
    with store.stage(agent) as staged:
        (staged / FISHER).write_bytes(b"fisher")
        record = {"examples": 4, "created": "", "ram_trl_version": ""}
        store.commit(staged, agent, FisherManifest(agent=str(agent), agent_digest=agent.digest, **record))
    return store


def test_fisher_information_goes_and_comes_with_its_agent(registry):
    for _ in range(2):
        agent = register(registry)
        make_fisher(registry, agent)
    registry.remove("math@v2")
    assert registry.fishers.versions("math") == [1]
    assert registry.fishers.hidden("trash").versions("math") == [2]
    registry.recover("math@v2")
    FisherStore(registry).get(registry.get("math@v2")).verify()


# Agents that generalists were merged of


def make_generalist(registry: AgentRegistry, agents: list[RegisteredAgent], name: str = "generalist") -> Generalist:
    """A merged model, so to speak."""
    manifest = GeneralistManifest(
        generalist=name,
        created="2026-01-02T00:00:00+00:00",
        ram_trl_version="0",
        base_model=agents[0].manifest.base_model,
        parents=[ParentRecord(agent=agent.name, version=agent.version, digest=agent.digest) for agent in agents],
        settings={
            "method": "ram_plus",
            "method_options": {},
            "r": 0.1,
            "weights": {str(agent): 1.0 for agent in agents},
        },
    )
    with registry.generalists.stage(name) as staged:
        (staged / "model.safetensors").write_bytes(b"model")
        return registry.generalists.commit(staged, manifest)


def test_what_a_generalist_was_merged_of_is_not_removed_by_mistake(registry):
    agents = [register(registry, content=bytes([number])) for number in range(3)]
    make_generalist(registry, [agents[1]])
    make_generalist(registry, [agents[1], agents[2]])
    before = tree(registry.path)
    message = r"^generalist@v1, generalist@v2 was merged of math@v2: --force removes it all the same, into the trash$"
    with pytest.raises(ConfigError, match=message):
        registry.remove("math@v2")
    with pytest.raises(ConfigError, match="generalist@v2 was merged of math@v3"):
        registry.remove("math")
    assert tree(registry.path) == before
    assert registry.remove("math@v1") == ["math@v1"]
    assert registry.remove("math@v2", force=True) == ["math@v2"]
    # it has not to be the latest generalist, but one that is there
    registry.generalists.remove("generalist")
    assert registry.remove("math@v3") == ["math@v3"]


def test_it_is_the_content_that_a_generalist_descends_from_not_the_number(registry, elsewhere):
    make_generalist(elsewhere, [elsewhere.get("math@v1")])
    register(registry, content=b"mine")
    admitted = admit(registry, elsewhere.get("math@v1"))
    shutil.copytree(elsewhere.path / "generalists", registry.path / "generalists")
    assert str(admitted) == "math@v2"
    assert registry.remove("math@v1") == ["math@v1"]
    with pytest.raises(ConfigError, match="was merged of math@v2"):
        registry.remove("math@v2")
    # where the content cannot be read the number has to do
    (elsewhere.get("math@v1").path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="was merged of math@v1"):
        elsewhere.remove("math@v1")


def test_generalists_go_and_come_back_as_they_were(registry):
    agent = register(registry)
    made = [make_generalist(registry, [agent]) for _ in range(3)]
    store = registry.generalists
    assert store.remove("generalist") == [str(one) for one in made]
    assert store.names() == []
    assert store.recover("generalist@v2") == ["generalist@v2"]
    # which was not the latest
    with pytest.raises(CorruptedFileError, match=r"names v3, which is not there: promote another \(ram-trl promote"):
        store.get("generalist")
    assert str(store.get("generalist@v2")) == "generalist@v2"
    assert store.recover("generalist") == ["generalist@v1", "generalist@v3"]
    assert store.get("generalist") == made[2]
    store.labels("generalist").set_alias("best", 1)
    assert store.get("generalist@best") == made[0]
    made[0].verify()


def test_what_goes_while_it_is_verified_is_not_promoted(registry, monkeypatch):
    agent = register(registry)
    made = [make_generalist(registry, [agent]) for _ in range(2)]
    verify = Generalist.verify

    def verify_slowly(generalist, *arguments):
        verify(generalist, *arguments)
        registry.generalists.remove(str(generalist))

    monkeypatch.setattr(Generalist, "verify", verify_slowly)
    with pytest.raises(AgentNotFoundError, match="has no version v1"):
        registry.generalists.promote("generalist@v1")
    assert registry.generalists.get("generalist") == made[1]


# Cleaning up


def names_of(garbage: list[Garbage], registry: AgentRegistry) -> list[str]:
    return sorted(str(one.path.relative_to(registry.path)) for one in garbage)


def full_registry(registry: AgentRegistry) -> list[str]:
    """A registry with everything that may be in one; what of it is garbage."""
    for number in range(4):
        make_fisher(registry, register(registry, content=bytes([number])))
    register(registry, "code")
    labels = registry.labels("math")
    for number, name in ((1, "kept"), (2, "gone"), (3, "quarantined")):
        labels.set_alias(name, number)
        labels.add_tag(number, name)
    generalists = [make_generalist(registry, [registry.get("code")]) for _ in range(2)]
    make_generalist(registry, [registry.get("code")], "specialist")
    registry.remove("math@v2")
    registry.quarantine("math@v3", "damaged")
    registry.generalists.remove(str(generalists[0]))
    registry.generalists.remove("specialist")
    folders = [".", "agents", "agents/math", "agents/math/aliases", "generalists/generalist", "fisher/math", "fisher"]
    folders.append("agents/math/tags")
    for number, folder in enumerate([*folders, "trash/agents/math"]):
        left = registry.path / folder / f".tmp-{number}"
        left.mkdir()
        (left / "weights").write_bytes(bytes(1000))
    for number in (1, 2, 3, 7):
        (registry.path / f"agents/math/v00000{number}.sig").write_text("signature")
    # a Fisher that was left behind when its agent went
    shutil.copytree(registry.path / "fisher/math/v000004", registry.path / "fisher/math/v000002")
    return sorted(
        [
            *(f"{folder}/.tmp-{number}".removeprefix("./") for number, folder in enumerate(folders)),
            "trash/agents/math/.tmp-8",
            "trash/agents/math/v000002",
            "trash/fisher/math/v000002",
            "trash/generalists/generalist/v000001",
            "trash/generalists/specialist/v000001",
            "generalists/specialist/latest.json",
            "agents/math/aliases/gone.json",
            "agents/math/tags/v000002",
            "agents/math/v000002.sig",
            "fisher/math/v000002",
        ]
    )


def test_garbage_is_found_and_removed_and_all_else_stays(registry):
    expected = full_registry(registry)
    before = tree(registry.path)
    garbage = find_garbage(registry, min_age=0)
    assert names_of(garbage, registry) == expected
    assert tree(registry.path) == before
    seen = []
    removed = collect_garbage(registry, min_age=0, progress=lambda *step: seen.append(step))
    assert names_of(removed, registry) == expected
    assert seen[-1][1] == seen[-1][2] == sum(one.bytes for one in garbage) > 8000
    gone = tuple(f"{path}/" for path in expected)
    left = {path: entry for path, entry in before.items() if path not in expected and not path.startswith(gone)}
    assert tree(registry.path) == left
    assert find_garbage(registry, min_age=0) == []
    assert registry.versions("math") == [1, 4] and registry.fishers.versions("math") == [1, 4]
    assert registry.labels("math").aliases() == {"kept": 1}
    # what is in quarantine comes back as it was
    registry.recover("math@v3")
    assert registry.labels("math").aliases() == {"kept": 1, "quarantined": 3}
    assert registry.fishers.versions("math") == [1, 3, 4]
    with pytest.raises(AgentNotFoundError, match="nothing"):
        registry.recover("math@v2")
    assert register(registry).version == 5


def test_the_quarantine_is_emptied_on_request_only(registry):
    full_registry(registry)
    collect_garbage(registry, min_age=0)
    expected = [
        "agents/math/aliases/quarantined.json",
        "agents/math/tags/v000003",
        "agents/math/v000003.sig",
        "quarantine/agents/math/v000003",
        "quarantine/agents/math/v000003.json",
        "quarantine/fisher/math/v000003",
        "quarantine/fisher/math/v000003.json",
    ]
    assert names_of(collect_garbage(registry, quarantine=True), registry) == expected
    assert find_garbage(registry, quarantine=True, min_age=0) == []


def test_what_is_being_written_is_not_garbage(registry):
    register(registry)
    with registry.stage("math") as staged:
        (staged / "weights").write_bytes(b"x")
        assert find_garbage(registry) == []
        # the directory is old, a file in it is not
        day = 24 * 3600
        os.utime(staged, (0, time.time() - 2 * day))
        assert find_garbage(registry) == []
        os.utime(staged / "weights", (0, time.time() - 2 * day))
        assert names_of(find_garbage(registry), registry) == [str(staged.relative_to(registry.path))]
        assert find_garbage(registry, min_age=49) == []
        assert [one.bytes for one in find_garbage(registry, min_age=0)] == [1]


@pytest.mark.parametrize("min_age", [-1.0, float("nan")])
def test_an_age_that_is_none_is_refused(registry, min_age):
    register(registry)
    with pytest.raises(ConfigError, match="is no number of hours"):
        find_garbage(registry, min_age=min_age)


def test_links_lead_gc_nowhere(registry, tmp_path):
    register(registry)
    outside = tmp_path / "outside"
    for folder in ("v000001", ".tmp-x", "math/v000001", "agents/math/v000001"):
        (outside / folder).mkdir(parents=True)
        (outside / folder / "file").write_text("x")
    before = tree(outside)
    (registry.path / "trash").symlink_to(outside)
    assert collect_garbage(registry, min_age=0) == []
    (registry.path / "trash").unlink()
    (registry.path / "trash").mkdir()
    (registry.path / "trash" / "agents").symlink_to(outside)
    (registry.path / "agents" / "linked").symlink_to(outside)
    (registry.path / "fisher").mkdir()
    (registry.path / "fisher" / "gone").symlink_to(outside)
    (registry.path / ".tmp-link").symlink_to(outside)
    assert names_of(collect_garbage(registry, min_age=0), registry) == [".tmp-link"]
    assert tree(outside) == before


@pytest.mark.parametrize(
    "link", ["agents", "agents/math/aliases", "agents/math/tags", "trash", "trash/agents", "agents/math/.tmp-link"]
)
def test_gc_removes_nothing_behind_a_link(registry, tmp_path, link):
    register(registry)
    register(registry, content=b"other")
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").add_tag(1, "paper")
    registry.remove("math@v1")
    for folder in (".", "math", "math/aliases", "aliases", "tags"):
        (registry.path / "trash/agents" / folder / ".tmp-x").mkdir(parents=True)
        (registry.path / "agents" / folder / ".tmp-x").mkdir(parents=True)
    outside, path = tmp_path / "outside", registry.path / link
    if path.exists():
        path.rename(outside)
    else:
        outside.mkdir()
        (outside / "file").write_bytes(bytes(5000))
    path.symlink_to(outside)
    before = tree(outside)
    removed = collect_garbage(registry, min_age=0)
    assert removed and tree(outside) == before
    # of what a link leads to not even the size is looked at
    assert all(one.bytes < 5000 for one in removed if one.path == path)


def test_a_registry_behind_a_link_is_cleaned_up(registry, tmp_path):
    register(registry)
    (registry.path / ".tmp-x").mkdir()
    (registry.path / "agents" / "math" / ".tmp-x").mkdir()
    (tmp_path / "link").symlink_to(registry.path)
    assert len(collect_garbage(AgentRegistry(tmp_path / "link"), min_age=0)) == 2


def test_what_comes_back_while_gc_is_at_work_keeps_what_belongs_to_it(registry, monkeypatch):
    agent = register(registry)
    make_fisher(registry, agent)
    make_generalist(registry, [agent])
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").add_tag(1, "paper")
    (registry.path / "agents/math/v000001.sig").write_text("signature")
    before = tree(registry.path)
    registry.remove("math", force=True)
    registry.generalists.remove("generalist")
    garbage = find_garbage(registry)
    assert len(garbage) == 7
    monkeypatch.setattr("ram_trl.lifecycle.gc.find_garbage", lambda *args, **options: garbage)
    registry.recover("math")
    registry.generalists.recover("generalist")
    assert collect_garbage(registry) == []
    after = tree(registry.path)
    assert {path: after[path] for path in before} == before


def clean(path: Path) -> int:
    return len([collect_garbage(AgentRegistry(path), min_age=0) for _ in range(20)])


def test_gc_by_many_at_once_and_while_versions_come_and_go(registry):
    registry.check_writable()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        done = pool.map_async(clean, [registry.path] * 2)
        while not done.ready():
            for _ in range(3):
                # what is staged just now may be taken for left behind at an age of 0
                with contextlib.suppress(StorageError, SafetensorError):
                    register(registry)
            for version in registry.versions("math")[:2]:
                registry.get(f"math@v{version}").verify()
            if len(registry.versions("math")) > 2:
                registry.remove(f"math@v{registry.versions('math')[0]}")
        assert done.get() == [20, 20]
    collect_garbage(registry, min_age=0)
    assert find_garbage(registry, min_age=0) == []


# Whether all is what was written


def verdicts_of(registry: AgentRegistry, **options) -> dict[str, Verdict]:
    return {verdict.what: verdict for verdict in verify_registry(registry, **options)}


def test_an_intact_registry_is_intact_wherever_it_is(registry, tmp_path):
    agents = [register(registry, content=bytes([number])) for number in range(3)]
    register(registry, "code")
    make_fisher(registry, agents[0])
    make_generalist(registry, agents[:2])
    registry.labels("math").set_alias("best", 2)
    before = tree(registry.path)
    everything = ["Fisher of math@v1", "agent code@v1", *map("agent {}".format, agents), "generalist generalist@v1"]
    moved = AgentRegistry(shutil.copytree(registry.path, tmp_path / "a place" / "copy"))
    for one in (registry, moved):
        for options, expected in (
            ({"everything": True}, everything),
            ({}, ["agent code@v1", "agent math@v3", "generalist generalist@v1"]),
            ({"agent": "math"}, everything[:1] + everything[2:5]),
            ({"agent": "math@best"}, ["agent math@v2"]),
            ({"generalist": "generalist"}, everything[5:]),
            ({"generalist": "generalist@v1", "agent": "code"}, ["agent code@v1", "generalist generalist@v1"]),
        ):
            verdicts = verdicts_of(one, **options)
            assert sorted(verdicts) == expected
            assert all(verdict.problem is None and verdict.bytes > 0 for verdict in verdicts.values())
    assert tree(registry.path) == before
    steps = []
    verify_registry(registry, everything=True, progress=lambda *step: steps.append(step))
    assert steps[-1][1] == steps[-1][2] == sum(verdict.bytes for verdict in verdicts_of(one, everything=True).values())
    for options in ({"agent": "tools"}, {"generalist": "generalist@v2"}):
        with pytest.raises(AgentNotFoundError):
            verify_registry(registry, **options)


def damaged_registry(registry: AgentRegistry) -> dict[str, str]:
    """A registry in which a lot is wrong: what, and how it is said."""
    for number in range(4):
        make_fisher(registry, register(registry, content=bytes([number])))
    (registry.path / "agents/math/v000002" / DELTA).write_bytes(b"x")
    (registry.path / "agents/math/v000003/manifest.json").unlink()
    (registry.path / "fisher/math/v000004" / FISHER).write_bytes(b"FISHER")
    make_generalist(registry, [registry.get("math@v1")])
    merged = make_generalist(registry, [registry.get("math@v4"), registry.get("math@v1")])
    (merged.path / "model.safetensors").write_bytes(b"MODEL")
    (registry.path / "generalists/generalist/latest.json").write_text("{}")
    labels = registry.labels("math")
    labels.set_alias("best", 1)
    (registry.path / "agents/math/aliases/best.json").write_text("[]")
    quarantine = r"put it out of the way \(ram-trl quarantine --registry \S+ --agent math@v"
    merge = r"merge it again .*; accelerate launch recipes/merge.py --registry \S+ --merge_to generalist "
    return {
        "agent math@v2": f"{DELTA} is not the file that was registered: {quarantine}2",
        "agent math@v3": f"manifest.json is missing: {quarantine}3",
        "Fisher of math@v4": "is not the file that was registered: remove .*accelerate launch recipes/fisher.py",
        "generalist generalist@v2": rf"{merge}--agents math@v4 math@v1 --method ram_plus --r 0.1 --weights math@v4=1",
        "alias math@best": "does not hold a JSON object: set the alias again",
        "the latest of generalist generalist": "does not name a version: promote a version",
    }


def test_whatever_is_damaged_is_named_with_the_cure(registry):
    problems = damaged_registry(registry)
    before = tree(registry.path)
    verdicts = verdicts_of(registry, everything=True)
    assert {what for what, verdict in verdicts.items() if verdict.problem} == set(problems)
    for what, message in problems.items():
        assert re.search(message, verdicts[what].problem), verdicts[what].problem
        assert not verdicts[what].quarantined
    # the Fisher of an agent that cannot be read is not looked at
    intact = ["Fisher of math@v1", "Fisher of math@v2", "agent math@v1", "agent math@v4", "generalist generalist@v1"]
    assert sorted(what for what, verdict in verdicts.items() if not verdict.problem) == intact
    assert tree(registry.path) == before


def test_what_is_damaged_goes_into_quarantine_and_the_rest_is_intact(registry):
    problems = damaged_registry(registry)
    verdicts = verdicts_of(registry, everything=True, quarantine=True)
    movable = {what for what in problems if what.startswith(("agent", "Fisher", "generalist"))}
    assert {what for what, verdict in verdicts.items() if verdict.quarantined} == movable
    assert registry.versions("math") == [1, 4] and registry.fishers.versions("math") == [1]
    assert registry.fishers.hidden("quarantine").versions("math") == [2, 3, 4]
    for what in sorted(movable):
        kind, _, spec = what.replace("Fisher of", "fisher").partition(" ")
        name, number = spec.split("@v")
        folder = registry.path / "quarantine" / f"{kind}s".replace("fishers", "fisher") / name
        assert json.loads((folder / f"v00000{number}.json").read_text())["reason"] == verdicts[what].problem
    registry.labels("math").set_alias("best", 1)
    registry.generalists.promote("generalist@v1")
    verdicts = verdicts_of(registry, everything=True)
    assert [verdict for verdict in verdicts.values() if verdict.problem] == []
    quarantine = registry.path / "quarantine/agents/math/v000002"
    assert verdicts[str(quarantine)].notes[0].startswith("agent math@v2, in quarantine: repair it")


def test_what_a_newer_version_wrote_is_not_put_away(registry):
    agent = register(registry)
    edit(agent, format_version=99)
    [verdict] = verify_registry(registry, quarantine=True)
    assert "pip install --upgrade ram_trl" in verdict.problem and not verdict.quarantined
    assert registry.versions("math") == [1]


def test_what_is_not_wrong_but_good_to_know_is_noted(registry):
    agent = register(registry)
    register(registry, content=b"other")
    make_generalist(registry, [agent])
    registry.labels("math").set_alias("best", 1)
    registry.remove("math@v1", force=True)
    verdicts = verdicts_of(registry, everything=True)
    assert verdicts["generalist generalist@v1"].notes == ("merged of math@v1, which this registry does not have",)
    assert verdicts["alias math@best"].notes == ("means v1, which is not there",)
    [trash] = [verdict for what, verdict in verdicts.items() if "trash" in what]
    assert trash.notes == ("agent math@v1, removed: ram-trl gc removes it",)
    assert [verdict.what for verdict in verdicts.values() if verdict.problem] == []


def test_a_registration_under_way_is_not_said_to_be_garbage(registry):
    register(registry)
    with registry.stage("math") as staged:
        (staged / "weights").write_bytes(b"x")
        assert list(verdicts_of(registry, everything=True)) == ["agent math@v1"]
        os.utime(staged / "weights", (0, 0))
        os.utime(staged, (0, 0))
        assert verdicts_of(registry, everything=True)[str(staged)].notes == ("left behind: ram-trl gc removes it",)


@pytest.mark.skipif(os.getuid() != 0, reason="takes root, to become somebody who may not write")
def test_a_registry_that_may_only_be_read_is_read_and_verified(tmp_path):
    registry = AgentRegistry(tmp_path / "registry")
    agent = register(registry)
    make_generalist(registry, [agent])
    registry.labels("math").set_alias("best", 1)
    for path in [*tmp_path.parents, tmp_path]:
        path.chmod(path.stat().st_mode | 0o055)
    before = tree(registry.path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            registry.get("math@best").verify()
            assert all(verdict.problem is None for verdict in verify_registry(registry, everything=True))
            for action in (
                lambda: registry.remove("math", force=True),
                lambda: registry.labels("math").set_alias("best", 1),
                lambda: registry.labels("math").add_tag(1, "x"),
                registry.check_writable,
            ):
                with pytest.raises(StorageError, match="Permission denied"):
                    action()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tree(registry.path) == before


# The command line


@pytest.fixture
def cli(capsys):
    """Runs `ram-trl` in this process: exit code, and the lines of stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), [line for line in printed.err.splitlines() if "%|" not in line]

    return run


def test_verify_says_with_its_exit_code(registry, cli):
    words = ("verify", "--registry", registry.path)
    assert cli(*words)[0] == 2
    register(registry)
    agent = register(registry)
    assert cli(*words)[:2] == (0, ["intact  agent math@v2", "1 intact, 0 failed"])
    (agent.path / "more\n\x1b[31m").write_text("")
    code, out, _ = cli(*words, "--all")
    assert (code, len(out)) == (1, 3)
    assert out[0] == "intact  agent math@v1" and out[2] == "1 intact, 1 failed"
    assert out[1].startswith(r"FAILED  agent math@v2: has an unrecorded file more\n\x1b[31m: put it out of the way")
    assert cli(*words, "--agent", "math@v1")[0] == 0
    code, out, _ = cli(*words, "--quarantine", "--json")
    assert code == 1 and [verdict["quarantined"] for verdict in json.loads("\n".join(out))] == [True]
    assert cli(*words, "--all")[:2] == (
        0,
        [
            "intact  agent math@v1",
            f"note    {registry.path}/quarantine/agents/math/v000002: agent math@v2, in quarantine: repair it and "
            "recover it, or empty the quarantine with ram-trl gc --quarantine",
            "1 intact, 0 failed",
        ],
    )
    assert cli(*words, "--agent", "code")[0] == 2


def test_versions_are_labelled_from_the_command_line(registry, cli):
    for _ in range(2):
        register(registry)
    where = ("--registry", registry.path, "--agent")
    assert cli("alias", *where, "math@v1", "--set", "best") == (0, ["math@best is math@v1"], [])
    assert cli("alias", *where, "math", "--set", "newest")[1] == ["math@newest is math@v2"]
    assert cli("alias", *where, "math")[1] == ["alias        version", "math@best    v1", "math@newest  v2"]
    assert cli("alias", *where, "math", "--drop", "newest")[1] == ["math@newest means nothing any more"]
    assert cli("tag", *where, "math@best", "--add", "paper", "seed1")[1] == ["version  tags", "math@v1  paper seed1"]
    assert cli("tag", *where, "math@best", "--drop", "seed1")[1] == ["version  tags", "math@v1  paper"]
    assert cli("tag", *where, "math")[1] == ["version  tags", "math@v1  paper", "math@v2  -"]
    for words in (("alias", "--set"), ("tag", "--add")):
        code, out, err = cli(words[0], *where, "math", words[1], "v3")
        assert (code, out) == (2, []) and "'v3' is not a name for " in err[0]
    assert cli("show", *where, "math@best")[0] == 0
    code, out, err = cli("alias", "--registry", registry.path)
    assert (code, out, err) == (2, [], ["error: name what it is about: --agent or --generalist"])


def test_versions_are_removed_listed_recovered_and_cleaned_up(registry, cli):
    agents = [register(registry, content=bytes([number])) for number in range(3)]
    make_generalist(registry, agents[1:2])
    where = ("--registry", registry.path)
    assert cli("remove", *where, "--agent", "math@v1")[1][0].startswith("math@v1 removed, into the trash: ram-trl rec")
    code, _, err = cli("remove", *where, "--agent", "math")
    assert code == 2 and err[0].startswith("error: generalist@v1 was merged of math@v2: --force removes it")
    assert cli("remove", *where, "--agent", "math@v2", "--force")[0] == 0
    code, _, err = cli("quarantine", *where, "--agent", "math@v3")
    assert code == 2 and "math@v3 is intact: say why with --reason" in err[0]
    assert cli("quarantine", *where, "--agent", "math@v3", "--reason", "bad\nseed")[1] == [
        "math@v3 is in quarantine: bad?seed"
    ]
    assert cli("recover", *where)[1] == [
        "what   version  where       why",
        "agent  math@v1  trash       removed",
        "agent  math@v2  trash       removed",
        "agent  math@v3  quarantine  bad?seed",
    ]
    assert cli("recover", *where, "--agent", "math@v2")[1] == ["math@v2 is there again"]
    code, out, _ = cli("gc", *where, "--dry_run")
    assert code == 0 and re.match(r"\S+/trash/agents/math/v000001 \(agent math@v1, removed, \d kB\)", out[0])
    assert re.fullmatch(r"1 would be removed, \d kB", out[1])
    assert cli("gc", *where)[1][1].startswith("1 removed")
    assert cli("gc", *where)[1] == ["0 removed, 0 kB"]
    assert cli("gc", *where, "--min_age", "-1")[0] == 2
    code, _, err = cli("recover", *where, "--agent", "math@v1")
    assert code == 2 and err == ["error: no agent math@v1 to recover; there is: math@v3 in the quarantine"]
    assert cli("recover", *where, "--agent", "math@v3")[0] == 0
    assert cli("remove", *where, "--generalist", "generalist")[0] == 0
    assert cli("recover", *where, "--generalist", "generalist")[1] == ["generalist@v1 is there again"]


def test_only_damage_is_put_away_without_a_reason(registry, cli):
    agent = register(registry)
    edit(agent, format_version=99)
    where = ("--registry", registry.path, "--agent", "math@v1")
    code, out, err = cli("quarantine", *where)
    assert (code, out) == (2, []) and "pip install --upgrade ram_trl" in err[0]
    assert registry.versions("math") == [1]
    agent = register(registry)
    (agent.path / DELTA).unlink()
    assert cli("quarantine", *where[:3], "math@v2")[0] == 0
    assert registry.versions("math") == [1]


def test_fisher_information_in_quarantine_is_not_lost_from_sight(registry, cli):
    agent = register(registry)
    make_fisher(registry, agent)
    (registry.path / "fisher/math/v000001" / FISHER).write_bytes(b"FISHER")
    where = ("--registry", registry.path)
    assert cli("verify", *where, "--all", "--quarantine")[0] == 1
    rows = cli("recover", *where)[1]
    assert len(rows) == 2 and re.match("Fisher +math@v1 +quarantine +the Fisher of agent math@v1: ", rows[1])
    [note] = [verdict.notes[0] for what, verdict in verdicts_of(registry, everything=True).items() if "/" in what]
    assert note.startswith("Fisher math@v1, in quarantine: ") and "recipes/fisher.py" in note
    # with its agent it is not listed twice
    registry.quarantine("math@v1", "bad seed")
    assert len(cli("recover", *where)[1]) == 2


def test_an_alias_names_an_agent_of_a_merge_and_its_weight(zoo, tmp_path):
    base = zoo.base("llama")
    kept = zoo.registry(base, {"code": zoo.agent(base, seed=2), "math": zoo.agent(base, seed=1)})
    registry = AgentRegistry(shutil.copytree(kept.path, tmp_path / "registry"))
    registry.labels("math").set_alias("best", 1)
    with_alias = integrate_agents(registry, "generalist", agents=["code", "math@best"], weights={"math@best": 0.5})
    plain = integrate_agents(registry, "generalist", agents=["code@v1", "math@v1"], weights={"math": 0.5})
    assert with_alias.manifest.settings == plain.manifest.settings
    assert with_alias.manifest.parents == plain.manifest.parents
    # what verify says to merge a damaged one again is what made it
    path = plain.path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    [problem] = [verdict.problem for verdict in verify_registry(registry, generalist="generalist") if verdict.problem]
    command = problem.partition("accelerate launch recipes/merge.py")[2]
    config = parse_config(MergeConfig, shlex.split(command))
    settings = {name: getattr(config, name) for name in plain.manifest.settings}
    again = integrate_agents(registry, config.merge_to, agents=config.agents, **settings)
    assert (again.path / "model.safetensors").read_bytes() == content
    assert again.manifest.settings == plain.manifest.settings
