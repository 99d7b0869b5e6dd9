"""What a registry says of its past: search, log, compare."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import Zoo, read_model

from ram_trl import AgentRegistry, integrate_agents, rebase_agent, register_agent
from ram_trl.analyzing.compare import compare_agents, format_comparison
from ram_trl.arithmetic import kernels
from ram_trl.cli import main
from ram_trl.errors import AgentNotFoundError, ConfigError
from ram_trl.lifecycle.lineage import lineage
from ram_trl.lifecycle.search import Query, search_agents
from ram_trl.storage.manifest import _seal


def dated(version: Path, **fields) -> None:
    """Give a version another date, or change other fields of its manifest, and seal it again."""
    file = version / "manifest.json"
    content = json.loads(file.read_text())
    del content["digest"]
    file.write_text(json.dumps(_seal({**content, **fields})))


@pytest.fixture(scope="module")
def registry(zoo: Zoo, tmp_path_factory) -> AgentRegistry:
    """math@v1, math@v2 (of two runs), tool@v1 (LoRA), and far@v1 of another base. Do not write to it."""
    base, other = zoo.base("llama"), zoo.base("qwen2_untied")
    registry = AgentRegistry(tmp_path_factory.mktemp("history") / "registry")
    run = {"step": 100, "max_steps": 100, "arguments": "GRPOConfig", "config": {"beta": 0.1, "run_name": "Night Run"}}
    for name, model, of, training in (
        ("math", zoo.agent(base, 1, 0.1), base, {**run, "metrics": {"reward": 0.4, "rewards/exact/mean": 0.4}}),
        ("math", zoo.agent(base, 2, 0.3), base, {**run, "config": {}, "metrics": {"reward": 0.75, "kl": 0.01}}),
        ("tool", zoo.adapter(base), base, {"metrics": {"reward": 0.9}}),
        ("far", zoo.agent(other, 3), other, {"metrics": {"reward": float(10)}}),
    ):
        register_agent(registry, name, str(model), base_model=str(of), training=training)
    for version, day in (("math@v1", 1), ("math@v2", 2), ("tool", 3), ("far", 4)):
        dated(registry.get(version).path, created=f"2026-03-{day:02d}T23:30:00+00:00")
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").add_tag(2, "paper")
    registry.labels("math").add_tag(2, "draft")
    registry.labels("tool").add_tag(1, "paper")
    return registry


# Search

EVERY = ["far@v1", "math@v1", "math@v2", "tool@v1"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, EVERY),
        ({"latest": True}, ["far@v1", "math@v2", "tool@v1"]),
        ({"kind": "lora"}, ["tool@v1"]),
        ({"kind": "full", "latest": True}, ["far@v1", "math@v2"]),
        ({"tags": ["paper"]}, ["math@v2", "tool@v1"]),
        ({"tags": ["paper", "draft"]}, ["math@v2"]),
        ({"tags": ["nothing"]}, []),
        ({"alias": "best"}, ["math@v1"]),
        ({"alias": "best", "latest": True}, []),
        ({"min_density": 0.05, "max_density": 0.2}, ["far@v1", "math@v1"]),
        ({"min_density": 0.0}, ["far@v1", "math@v1", "math@v2"]),
        ({"max_density": 0.0}, []),
        ({"since": "2026-03-02"}, ["far@v1", "math@v2", "tool@v1"]),
        ({"until": "2026-03-02"}, ["math@v1", "math@v2"]),
        ({"since": "2026-03-02", "until": "2026-03-03"}, ["math@v2", "tool@v1"]),
        ({"since": "2026-03-02T23:30:00Z"}, ["far@v1", "math@v2", "tool@v1"]),
        ({"since": "2026-03-02T23:30:00-01:00"}, ["far@v1", "tool@v1"]),
        ({"until": "2026-03-02T23:29"}, ["math@v1"]),
        ({"metrics": ["reward>0.75"]}, ["far@v1", "tool@v1"]),
        ({"metrics": ["reward >= 0.75"]}, ["far@v1", "math@v2", "tool@v1"]),
        ({"metrics": ["reward<0.75"]}, ["math@v1"]),
        ({"metrics": ["reward<=0.75"]}, ["math@v1", "math@v2"]),
        ({"metrics": ["reward==0.75"]}, ["math@v2"]),
        ({"metrics": ["reward=7.5e-1"]}, ["math@v2"]),
        ({"metrics": ["reward!=0.75"]}, ["far@v1", "math@v1", "tool@v1"]),
        ({"metrics": ["reward>0.5", "kl<1"]}, ["math@v2"]),
        ({"metrics": ["rewards/exact/mean>0"]}, ["math@v1"]),
        ({"metrics": ["nothing>-1"]}, []),
        ({"text": "night run"}, ["math@v1"]),
        ({"text": "run_name"}, []),
        ({"text": "nothing at all"}, []),
    ],
    ids=str,
)
def test_search_finds_what_is_meant(registry, query, expected):
    found = search_agents(registry, Query(**query))
    assert [str(one.agent) for one in found] == expected


def test_search_finds_by_the_base(registry, zoo):
    digest = registry.get("far").manifest.base_model.digest
    for base in (zoo.base("qwen2_untied").name.upper(), str(zoo.base("qwen2_untied")), digest, digest[:6]):
        assert [str(one.agent) for one in search_agents(registry, Query(base=base))] == ["far@v1"]
    # too short for a digest
    assert search_agents(registry, Query(base=digest[:4])) == []


@pytest.mark.parametrize(
    ("query", "match"),
    [
        ({"kind": "dora"}, "kind='dora' is not one of full, lora"),
        *(
            ({"metrics": [text]}, "is not a condition like")
            for text in ("reward", "reward>", ">1", "a>b", "a>1>2", "")
        ),
        *(({"since": text}, "is not a date like") for text in ("yesterday", "2026-13-01", "", "99999-01-01")),
        ({"until": "0001-01-01T00:00:00+14:00"}, "is not a date like"),
    ],
    ids=str,
)
def test_a_search_that_makes_no_sense_is_refused(query, match):
    with pytest.raises(ConfigError, match=match):
        Query(**query)


def test_a_damaged_version_is_left_out_and_said_so(registry, tmp_path, caplog):
    copy = AgentRegistry(shutil.copytree(registry.path, tmp_path / "registry"))
    (copy.get("math@v1").path / "manifest.json").write_text("{}")
    assert [str(one.agent) for one in search_agents(copy, Query())] == ["far@v1", "math@v2", "tool@v1"]
    assert caplog.text.count("left out") == 1
    assert [event.version for event in lineage(copy)] == ["math@v2", "tool@v1", "far@v1"]


def test_the_command_line_searches(registry, capsys):
    words = ["search", "--registry", str(registry.path), "--metric", "reward>0.5", "reward<5"]
    main(words)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["agent", "kind", "changed", "size", "created", "reward", "tags", "base", "model"]
    assert [row.split()[0] for row in rows] == ["math@v2", "tool@v1"]
    assert " 0.75 " in rows[0] and " draft paper " in rows[0] and " 0.9 " in rows[1]
    main([*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["version"], one["tags"]) for one in printed] == [
        ("math", 2, ["draft", "paper"]),
        ("tool", 1, ["paper"]),
    ]
    main(["search", "--registry", str(registry.path), "--text", "nothing at all"])
    assert len(capsys.readouterr().out.splitlines()) == 1


# Log


@pytest.fixture(scope="module")
def family(zoo: Zoo, tmp_path_factory) -> AgentRegistry:
    """math and code make family@v1; sort is trained from that, carried over, and joins in family@v2, refused."""
    base = zoo.base("llama")
    registry = AgentRegistry(tmp_path_factory.mktemp("family") / "registry")
    # another thing of the same name
    for seed, name in enumerate(("math", "code", "family"), 1):
        register_agent(registry, name, str(zoo.agent(base, seed)), base_model=str(base), training={"step": 1200})
    first = integrate_agents(registry, "family", agents=["math", "code"])
    register_agent(registry, "sort", str(zoo.agent(first.path, 5)), base_model=str(first.path))
    rebase_agent(registry, "sort")
    integrate_agents(registry, "family", agents=["math", "sort"], gate=lambda candidate, report: "sort forgot")
    registry.labels("math").set_alias("best", 1)
    registry.labels("math").add_tag(1, "paper")
    return registry


def test_the_log_says_what_came_of_what(family):
    events = {(event.kind, event.version): event for event in lineage(family)}
    assert [event.version for event in events.values()] == [
        *("code@v1", "family@v1", "math@v1"),
        *("family@v1", "sort@v1", "sort@v2", "family@v2"),
    ]
    math, first, sort = (
        events[key] for key in (("agent", "math@v1"), ("generalist", "family@v1"), ("agent", "sort@v1"))
    )
    assert (math.parents, math.children, math.how) == ([], ["family@v1", "family@v2"], "full, 1,200 steps")
    assert (math.is_latest, math.aliases, math.tags) == (True, ["best"], ["paper"])
    assert (first.parents, first.children) == (["math@v1", "code@v1"], ["sort@v1"])
    assert (first.verdict, first.is_latest, first.how) == ("accepted", True, "merged by ram_plus")
    assert (sort.parents, sort.children, sort.is_latest) == (["family@v1"], ["sort@v2"], False)
    carried, second = events["agent", "sort@v2"], events["generalist", "family@v2"]
    assert (carried.parents, carried.children) == (["sort@v1"], ["family@v2"])
    assert carried.how == "full, carried over"
    assert (second.verdict, second.is_latest) == ("refused: sort forgot", False)
    # the agent of the generalist's name has nothing to do with it
    assert (events["agent", "family@v1"].children, events["agent", "family@v1"].parents) == ([], [])
    assert all(event.missing == [] for event in events.values())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("code", ["code@v1", "family@v1", "sort@v1", "sort@v2", "family@v2"]),
        ("sort@v1", ["code@v1", "math@v1", "family@v1", "sort@v1", "sort@v2", "family@v2"]),
        ("math@best", ["math@v1", "family@v1", "sort@v1", "sort@v2", "family@v2"]),
    ],
)
def test_the_log_of_one_is_what_it_came_from_and_what_came_of_it(family, spec, expected):
    assert [event.version for event in lineage(family, spec)] == expected


@pytest.mark.parametrize("name", ["/{}", "/{}/generalists/family/v000001"])
def test_a_base_that_cannot_be_looked_at_is_in_nobodys_way(family, tmp_path, name):
    # what the file system refuses to look at: here by its length, elsewhere by the owner of a folder
    copy = AgentRegistry(shutil.copytree(family.path, tmp_path / "registry"))
    file = copy.get("math").path
    base = json.loads((file / "manifest.json").read_text())["base_model"]
    dated(file, base_model={**base, "name": name.format("x" * 300)})
    assert "math@v1" in [event.version for event in lineage(copy)]


def test_an_origin_that_names_no_version_is_left_out(family, tmp_path):
    copy = AgentRegistry(shutil.copytree(family.path, tmp_path / "registry"))
    for origin in ("code", "code@best"):
        dated(copy.get("math").path, training={"rebased_from": origin})
        assert [event.parents for event in lineage(copy) if event.version == "math@v1"] == [[]]


def test_the_log_of_what_is_not_there_is_refused(family, tmp_path):
    for spec in ("nobody", "math@v9"):
        with pytest.raises(AgentNotFoundError, match=f"no agent and no generalist '{spec}'"):
            lineage(family, spec)
    with pytest.raises(AgentNotFoundError, match="is not a registry"):
        lineage(tmp_path)


def test_the_log_is_in_the_order_of_time(registry):
    assert [event.version for event in lineage(registry)] == ["math@v1", "math@v2", "tool@v1", "far@v1"]


def test_a_registry_that_moved_has_the_same_history_and_says_what_is_gone(family, tmp_path):
    def history(registry):
        return [(event.version, event.parents, event.missing, event.children) for event in lineage(registry)]

    moved = AgentRegistry(shutil.copytree(family.path, tmp_path / "moved"))
    shutil.move(family.path, tmp_path / "away")
    try:
        assert history(moved) == history(tmp_path / "away")
    finally:
        shutil.move(tmp_path / "away", family.path)
    # where the old place is still there, its models are those of another registry
    assert [event.parents for event in lineage(moved) if event.version == "sort@v1"] == [[]]

    moved.remove("code", force=True)
    shutil.rmtree(moved.path / "generalists" / "family" / "v000001")
    events = {event.version: event for event in lineage(moved)}
    assert events["family@v2"].missing == [] and "code@v1" not in events
    # another version took the number
    shutil.rmtree(moved.path / "agents" / "math")
    shutil.copytree(moved.path / "agents" / "family" / "v000001", moved.path / "agents" / "math" / "v000001")
    dated(moved.path / "agents" / "math" / "v000001", agent="math")
    events = {event.version: event for event in lineage(moved)}
    assert events["family@v2"].missing == ["math@v1"] and events["math@v1"].children == []


def test_the_command_line_prints_the_log(family, capsys):
    main(["log", "--registry", str(family.path), "math"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["created", "version", "from", "how"]
    assert [row.split()[1] for row in rows] == ["math@v1", "family@v1", "sort@v1", "sort@v2", "family@v2"]
    assert rows[0].endswith("latest, best, #paper")
    assert " ".join(rows[1].split()[1:]) == "family@v1 math@v1 code@v1 merged by ram_plus latest, accepted"
    assert rows[-1].endswith("refused: sort forgot")
    main(["log", "--registry", str(family.path), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) == 7 and printed[-1]["parents"] == ["math@v1", "sort@v2"]


# Compare


@pytest.mark.parametrize("engine", ["compiled", "eager"])
def test_what_two_agents_changed_is_what_a_slow_count_finds(registry, zoo, monkeypatch, engine):
    if engine == "eager":
        monkeypatch.setattr(kernels, "compiled", None)
    base = read_model(zoo.base("llama"))
    deltas = [
        {name: tensor.double() - base[name].double() for name, tensor in read_model(zoo.agent(*agent)).items()}
        for agent in ((zoo.base("llama"), 1, 0.1), (zoo.base("llama"), 2, 0.3))
    ]
    flat = [torch.cat([delta[name].flatten() for name in base]) for delta in deltas]
    changed = [update.abs() > 1e-5 for update in flat]
    both = changed[0] & changed[1]
    changes = compare_agents(registry, "math@v1", "math@v2")["changes"]
    total = flat[0].numel()
    assert changes["total_parameters"] == total
    assert changes["changed"] == [int(mask.sum()) for mask in changed]
    assert changes["density"] == pytest.approx([int(mask.sum()) / total for mask in changed], rel=1e-6)
    assert changes["overlap"] == int(both.sum())
    assert changes["share_of_first"] == pytest.approx(int(both.sum()) / int(changed[0].sum()), rel=1e-6)
    assert changes["share_of_second"] == pytest.approx(int(both.sum()) / int(changed[1].sum()), rel=1e-6)
    same = int((flat[0].sign() == flat[1].sign())[both].sum())
    assert changes["sign_agreement"] == pytest.approx(same / int(both.sum()), rel=1e-6)
    cosine = torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0)
    assert changes["cosine"] == pytest.approx(float(cosine), abs=1e-6)
    assert changes["norm"] == pytest.approx([float(update.norm()) for update in flat], rel=1e-5)
    by_module: dict[str, list[int]] = {}
    for name in base:
        if ".self_attn.q_proj." in name:
            counts = by_module.setdefault("self_attn.q_proj", [0, 0, 0])
            for at, delta in enumerate(deltas):
                counts[at] += int((delta[name].abs() > 1e-5).sum())
            counts[2] += base[name].numel()
    [module] = [module for module in changes["modules"] if module["module"] == "self_attn.q_proj"]
    *counts, size = by_module["self_attn.q_proj"]
    assert (module["changed"], module["parameters"]) == (counts, size)
    assert module["difference"] == pytest.approx((counts[1] - counts[0]) / size, rel=1e-6)
    differences = [abs(module["difference"]) for module in changes["modules"]]
    assert differences == sorted(differences, reverse=True)


def test_what_differs_in_the_records_is_said(registry):
    data = compare_agents(registry, "math@v1", "math@v2", records_only=True)
    records = data["records"]
    assert (data["agents"], data["changes"]) == (["math@v1", "math@v2"], None)
    assert records["training.config.beta"] == [0.1, None]
    assert records["training.metrics.reward"] == [0.4, 0.75]
    assert records["created"] == ["2026-03-01T23:30:00+00:00", "2026-03-02T23:30:00+00:00"]
    assert not [key for key in records if key.startswith(("base_model", "files", "digest")) or "step" in key]
    text = format_comparison(data)
    assert "What they changed is not compared: only the records were asked for." in text
    assert "1 more metrics differ" in text and "training.metrics.kl" not in text


def test_agents_of_different_bases_are_compared_by_their_records_alone(registry, zoo):
    data = compare_agents(registry, "math", "far")
    assert data["changes"] is None and data["no_changes"].startswith("they have different base models")
    assert data["records"]["base_model.name"] == [str(zoo.base("llama")), str(zoo.base("qwen2_untied"))]
    assert "not compared: they have different base models" in format_comparison(data)


def test_lora_and_full_agents_are_compared(registry):
    changes = compare_agents(registry, "math", "tool")["changes"]
    assert changes["changed"][1] > 0 and 0 < changes["share_of_second"] < 1


def test_an_agent_is_not_compared_with_itself(registry):
    with pytest.raises(ConfigError, match="are the same version, math@v2"):
        compare_agents(registry, "math", "math@v2")


def test_the_epsilon_is_that_of_what_was_stored(registry, zoo, tmp_path):
    base = zoo.base("llama")
    for name, seed in (("a", 1), ("b", 2)):
        model = zoo.agent(base, seed, 0.9, 1e-4, torch.float32)
        register_agent(str(tmp_path), name, str(model), base_model=str(base), epsilon=1e-4 if name == "a" else 0.0)
    assert compare_agents(str(tmp_path), "a", "b")["changes"]["epsilon"] == 1e-4
    with pytest.raises(ConfigError, match="epsilon"):
        compare_agents(str(tmp_path), "a", "b", epsilon=1e-5)


def test_the_command_line_compares(registry, capsys):
    main(["compare", "--registry", str(registry.path), "math@best", "math"])
    printed = capsys.readouterr().out
    changes = compare_agents(registry, "math@v1", "math@v2")["changes"]
    for expected in (
        f"{changes['overlap']:,} parameters were changed by both, {changes['sign_agreement']:.2%} of them",
        f"cosine of the updates {changes['cosine']:.4f}",
        changes["modules"][0]["module"],
        "training.config.run_name",
    ):
        assert expected in printed
    main(["compare", "--registry", str(registry.path), "math", "far", "--json"])
    assert json.loads(capsys.readouterr().out)["changes"] is None


def test_records_that_somebody_made_up_are_shown_all_the_same(registry, tmp_path, capsys):
    copy = AgentRegistry(shutil.copytree(registry.path, tmp_path / "registry"))
    odd = [1, "x", [], {}, None, 1e300, True]
    keys = ("step", "max_steps", "metrics", "dataset", "git", "versions", "reward_functions", "rebased_from", "config")
    for value in odd:
        dated(copy.get("math@v1").path, training=dict.fromkeys(keys, value), created="yesterday")
        for words in (
            ["show", "--agent", "math@v1"],
            ["search", "--text", "zz"],
            ["search", "--metric", "x>1"],
            ["log"],
        ):
            main([words[0], "--registry", str(copy.path), *words[1:]])
        main(["compare", "--registry", str(copy.path), "math@v1", "math", "--records_only"])
        main(["search", "--registry", str(copy.path), "--since", "2000-01-01", "--json"])
    metrics = {"reward\x1b[2J": 1.0, "reward\nagent": 2.0, "rewards": [1]}
    dated(copy.get("math@v1").path, training={"metrics": metrics, "rebased_from": "../x@v1"})
    capsys.readouterr()
    main(["show", "--registry", str(copy.path), "--agent", "math@v1"])
    main(["log", "--registry", str(copy.path)])
    main(["compare", "--registry", str(copy.path), "math@v1", "math", "--records_only"])
    printed = capsys.readouterr().out
    assert "reward?[2J" in printed and "\x1b" not in printed and "\nagent  " not in printed
