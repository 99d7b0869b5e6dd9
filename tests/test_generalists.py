"""Continual integration: generalists are merged, judged, promoted, and kept with their parents."""

import json
import logging
import os
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from models import Zoo
from training import AtStep, assert_same_weights, grpo, restored_weights, run_python, run_shell, saved_weights, train
from transformers import AutoModelForCausalLM

from ram_trl import AgentRegistry, MergeConfig, RAMRegistryCallback, integrate_agents, merge_agents, register_agent
from ram_trl.errors import (
    AgentNotFoundError,
    ConfigError,
    CorruptedFileError,
    IncompatibleAgentError,
    InvalidNameError,
    RamTrlError,
    StorageError,
)
from ram_trl.merging.integrate import Integration
from ram_trl.options import parse_config


MERGE = Path(__file__).parents[1] / "recipes" / "merge.py"
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}


@pytest.fixture
def registry(zoo: Zoo, tmp_path) -> AgentRegistry:
    """Two agents of one base, in a registry that a test may write to."""
    base = zoo.base("qwen2_untied")
    kept = zoo.registry(base, {"code": zoo.agent(base, seed=2), "math": zoo.agent(base, seed=1)})
    return AgentRegistry(shutil.copytree(kept.path, tmp_path / "registry"))


def weights_of(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_a_generalist_is_the_merge_of_the_agents_and_names_its_parents(registry: AgentRegistry, tmp_path):
    generalist = integrate_agents(registry, "generalist", r=0.2, weights={"math": 0.5})
    merge_agents(registry, str(tmp_path / "merged"), r=0.2, weights={"math": 0.5})
    assert weights_of(generalist.path) == weights_of(tmp_path / "merged")
    assert str(generalist) == "generalist@v1" and generalist.parents == ["code@v1", "math@v1"]
    manifest = generalist.manifest
    assert manifest.settings["method"] == "ram_plus" and manifest.settings["r"] == 0.2
    assert manifest.settings["weights"] == {"code@v1": 1.0, "math@v1": 0.5}
    assert [parent.digest for parent in manifest.parents] == [
        json.loads((registry.get(name).path / "manifest.json").read_text())["digest"] for name in ("code", "math")
    ]
    assert manifest.base_model == registry.get("math").manifest.base_model
    assert (manifest.gate, manifest.refused) == (None, None)
    generalist.verify()
    assert registry.generalists.get("generalist") == generalist
    model = AutoModelForCausalLM.from_pretrained(generalist.path, dtype="auto")
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()
    assert "# generalist" in (generalist.path / "README.md").read_text()
    # of the agents nothing is different
    assert registry.names() == ["code", "math"]


def test_every_further_agent_is_integrated_and_earlier_generalists_stay(zoo: Zoo, registry: AgentRegistry):
    first = integrate_agents(registry, "generalist")
    before = weights_of(first.path)
    base = zoo.base("qwen2_untied")
    register_agent(registry, "tools", str(zoo.adapter(base)))
    register_agent(registry, "math", str(zoo.agent(base, seed=7)), base_model=str(base))
    second = integrate_agents(registry, "generalist")
    assert second.parents == ["code@v1", "math@v2", "tools@v1"]
    assert registry.generalists.get("generalist") == second
    assert registry.generalists.get("generalist@v1") == first and weights_of(first.path) == before
    chosen = integrate_agents(registry, "specialist", agents=["math@v1"])
    assert chosen.parents == ["math@v1"]
    assert [str(one) for one in registry.generalists] == ["generalist@v1", "generalist@v2", "specialist@v1"]


# The gate


def test_the_gate_judges_a_model_that_nobody_sees_yet(registry: AgentRegistry):
    seen = {}

    def gate(candidate: Path, report: dict) -> bool:
        model = AutoModelForCausalLM.from_pretrained(candidate, dtype="auto")
        seen["logits"] = model(torch.tensor([[3, 4, 5]])).logits
        seen["agents"] = [row["name"] for row in report["agents"]]
        seen["names"] = registry.generalists.names()
        return True

    generalist = integrate_agents(registry, "generalist", gate=gate)
    assert seen["names"] == [] and seen["agents"] == ["code", "math"]
    model = AutoModelForCausalLM.from_pretrained(generalist.path, dtype="auto")
    assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, seen["logits"])
    assert generalist.manifest.gate.endswith("gate") and generalist.manifest.refused is None


def raises(candidate, report):
    raise KeyError("reward")


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (lambda candidate, report: False, "refused it"),
        (lambda candidate, report: "math fell to 0.4", "^math fell to 0.4$"),
        (lambda candidate, report: None, "returned None, not True, False or a reason"),
        (lambda candidate, report: 1.0, "returned 1.0, not True"),
        (raises, "failed: KeyError: 'reward'"),
    ],
    ids=["false", "reason", "none", "number", "error"],
)
def test_a_refused_candidate_is_kept_says_why_and_is_not_the_latest(registry: AgentRegistry, caplog, gate, reason):
    first = integrate_agents(registry, "generalist")
    refused = integrate_agents(registry, "generalist", gate=gate)
    assert refused.manifest.refused is not None
    assert re.search(reason, refused.manifest.refused)
    assert f"generalist@v2 was not promoted: {refused.manifest.refused}" in caplog.text
    assert registry.generalists.get("generalist") == first
    assert registry.generalists.get("generalist@v2") == refused
    refused.verify()
    assert weights_of(refused.path) == weights_of(first.path)


@pytest.mark.parametrize(
    "verdict", [np.bool_(True), np.float64(0.9) > 0.8, torch.tensor(0.9) > 0.8], ids=["bool_", "numpy", "torch"]
)
def test_a_comparison_of_numpys_or_torchs_numbers_promotes(registry: AgentRegistry, verdict):
    assert integrate_agents(registry, "generalist", gate=lambda candidate, report: verdict).manifest.refused is None


def exits(candidate, report):
    sys.exit(1)


def moves_away(candidate, report):
    os.chdir(candidate)
    return "elsewhere"


@pytest.mark.parametrize(("gate", "reason"), [(exits, "failed: SystemExit: 1"), (moves_away, "^elsewhere$")])
def test_a_gate_that_exits_or_changes_the_directory_refuses(registry: AgentRegistry, gate, reason):
    folder = Path.cwd()
    assert re.search(reason, integrate_agents(registry, "generalist", gate=gate).manifest.refused)
    assert Path.cwd() == folder


def test_what_a_gate_adds_is_kept_and_recorded(registry: AgentRegistry):
    def gate(candidate: Path, report: dict) -> str:
        (candidate / "rewards").mkdir()
        (candidate / "rewards" / "math.json").write_text("0.8")
        (candidate / "empty").mkdir()
        (candidate / "manifest.json").write_text("{}")
        return "two lines\nand a \x1b colour"

    generalist = integrate_agents(registry, "generalist", gate=gate)
    assert generalist.manifest.refused == "two lines and a ? colour"
    assert "rewards/math.json" in generalist.manifest.files
    registry.generalists.get("generalist@v1").verify()


def truncates(candidate: Path, report: dict) -> bool:
    os.truncate(candidate / "model.safetensors", 1000)
    return True


def removes(candidate: Path, report: dict) -> bool:
    (candidate / "merge_report.json").unlink()
    return True


def links(candidate: Path, report: dict) -> bool:
    (candidate / "link").symlink_to(candidate.parent)
    return True


def leaves_a_pipe(candidate: Path, report: dict) -> bool:
    os.mkfifo(candidate / "pipe")
    return True


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (truncates, "changed 'model.safetensors' of the candidate"),
        (removes, "changed 'merge_report.json' of the candidate"),
        (links, "left 'link' in the candidate, which is no plain file"),
        (leaves_a_pipe, "left 'pipe' in the candidate"),
    ],
)
def test_a_gate_that_changes_the_candidate_ends_the_merge_and_leaves_nothing(registry: AgentRegistry, gate, message):
    with pytest.raises(ConfigError, match=message):
        integrate_agents(registry, "generalist", gate=gate)
    assert not list(registry.path.glob("generalists/*"))


def test_a_generalist_of_which_every_version_was_refused_has_no_latest(registry: AgentRegistry):
    integrate_agents(registry, "generalist", gate=lambda candidate, report: False)
    with pytest.raises(AgentNotFoundError, match=r"no version of generalist 'generalist' was promoted: .*@v1"):
        registry.generalists.get("generalist")


def test_a_version_is_promoted_by_hand_and_the_next_merge_goes_on_from_there(registry: AgentRegistry):
    for _ in range(2):
        integrate_agents(registry, "generalist")
    integrate_agents(registry, "generalist", gate=lambda candidate, report: False)
    store = registry.generalists
    assert store.promote("generalist@v1") == store.get("generalist") == store.get("generalist@v1")
    assert store.promote("generalist@v3") == store.get("generalist")
    store.promote("generalist@v2")
    integrate_agents(registry, "generalist")
    assert store.latest("generalist") == 4
    with pytest.raises(ConfigError, match="promote a version: generalist@v2"):
        store.promote("generalist")
    with pytest.raises(AgentNotFoundError, match="has no version v9"):
        store.promote("generalist@v9")
    assert store.latest("generalist") == 4
    assert not list(registry.path.rglob(".tmp-*"))


def test_versions_are_removed_and_their_numbers_not_used_again(registry: AgentRegistry):
    for _ in range(3):
        integrate_agents(registry, "generalist")
    store = registry.generalists
    with pytest.raises(ConfigError, match="generalist@v3 is the latest of generalist: promote another"):
        store.remove("generalist@v3")
    assert store.remove("generalist@v2") == ["generalist@v2"] and store.versions("generalist") == [1, 3]
    # by hand, which leaves the alias behind
    shutil.rmtree(store.get("generalist@v3").path)
    refused = integrate_agents(registry, "generalist", gate=lambda candidate, report: False)
    assert refused.version == 4
    with pytest.raises(CorruptedFileError, match="names v3, which is not there"):
        store.get("generalist")
    assert store.remove("generalist") == ["generalist@v1", "generalist@v4"]
    assert integrate_agents(registry, "generalist") == store.get("generalist@v5") == store.get("generalist")


def test_of_merges_at_once_the_newest_is_the_latest(registry: AgentRegistry):
    with ThreadPoolExecutor(4) as pool:
        merged = list(pool.map(lambda _: integrate_agents(registry, "generalist"), range(12)))
    assert sorted(one.version for one in merged) == list(range(1, 13))
    assert registry.generalists.get("generalist").version == 12


def test_a_generalist_of_a_generalists_agents_is_whole_and_has_a_manifest_of_its_own(
    zoo: Zoo, registry: AgentRegistry, tmp_path
):
    first = integrate_agents(registry, "generalist")
    register_agent(registry, "tools", str(zoo.agent(first.path, seed=5)), base_model=str(first.path))
    second = integrate_agents(registry, "second", agents=["tools"])
    second.verify()
    assert registry.generalists.get("second").parents == ["tools@v1"]
    merge_agents(registry, str(tmp_path / "merged"), agents=["tools"])
    assert not (tmp_path / "merged" / "manifest.json").exists()


# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"generalist": "../out"}, InvalidNameError, "not a name for a generalist"),
        ({"method": "best"}, ConfigError, "method='best' is not one of"),
        ({"rho": 1.0}, ConfigError, "'rho' is no option of a merge; there are agents, base_model, gate"),
        ({"gate": "gates:ok"}, ConfigError, "is not a function"),
        ({"max_shard_size": "big"}, ConfigError, "'big' is not a size"),
        ({"agents": ["nobody"]}, AgentNotFoundError, "no agent 'nobody'"),
        ({"base_model": "/nowhere"}, RamTrlError, "/nowhere"),
    ],
)
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(registry: AgentRegistry, arguments, error, message):
    with pytest.raises(error, match=message):
        integrate_agents(**{"registry": registry, "generalist": "generalist", **arguments})
    assert not list(registry.path.glob("generalists/*"))


def test_a_base_that_is_another_is_found_on_the_way_and_leaves_nothing(zoo: Zoo, registry: AgentRegistry):
    other = zoo.agent(zoo.base("qwen2_untied"), seed=5)
    with pytest.raises(RamTrlError, match="is not the recorded base model"):
        integrate_agents(registry, "generalist", base_model=str(other))
    assert registry.generalists.names() == [] and not list(registry.path.glob("generalists/*"))


def test_damage_to_a_generalist_is_found(registry: AgentRegistry):
    generalist = integrate_agents(registry, "generalist")
    weights = generalist.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CorruptedFileError, match=r"generalist generalist@v1: .*model\.safetensors is not the"):
        generalist.verify()
    with pytest.raises(CorruptedFileError):
        registry.generalists.promote("generalist@v1")
    (generalist.path / "manifest.json").write_text('{"format_version": 1, "digest": "00"}')
    with pytest.raises(CorruptedFileError, match="its digest differs"):
        registry.generalists.get("generalist")


@pytest.mark.parametrize("content", ['{"version": "1"}', "{}", "[]", "", '{"version": -1}'])
def test_a_damaged_alias_is_an_error_and_a_promotion_mends_it(registry: AgentRegistry, content):
    integrate_agents(registry, "generalist")
    (registry.path / "generalists" / "generalist" / "latest.json").write_text(content)
    with pytest.raises(CorruptedFileError, match=r"latest\.json"):
        registry.generalists.get("generalist")
    # a merge would end with a version that cannot become the latest
    with pytest.raises(CorruptedFileError, match=r"latest\.json"):
        integrate_agents(registry, "generalist")
    assert registry.generalists.versions("generalist") == [1]
    registry.generalists.promote("generalist@v1")
    assert registry.generalists.get("generalist").version == 1


def test_a_registry_that_is_none_is_not_made_by_a_merge(tmp_path):
    with pytest.raises(AgentNotFoundError, match="is not a registry"):
        integrate_agents(tmp_path / "typo", "generalist")
    assert not (tmp_path / "typo").exists()


def test_a_registry_without_generalists_has_none(registry: AgentRegistry):
    assert registry.generalists.names() == [] and list(registry.generalists) == []
    with pytest.raises(AgentNotFoundError, match=r"no generalist 'generalist' in .*; it holds: none"):
        registry.generalists.get("generalist")


# The recipe


def test_the_recipe_merges_by_hand_with_one_and_two_processes(registry: AgentRegistry, tmp_path):
    (tmp_path / "gates.py").write_text(
        "def keeps_two(candidate, report):\n    return len(report['agents']) == 2\n\n"
        "def refuses(candidate, report):\n    return 'too few agents'\n"
    )
    common = ("--registry", registry.path, "--merge_to", "generalist")
    first = run_python(MERGE, *common, "--gate", "gates:keeps_two", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "generalist@v1 in " in first.stdout and "\npromoted" in first.stdout and "math@v1" in first.stdout
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2"
    words = " ".join(map(str, (MERGE, *common, "--gate", "gates:refuses")))
    second = run_shell(f"python {torchrun} {words}", cwd=tmp_path, env={"ACCELERATE_USE_CPU": "true"})
    assert second.returncode == 0, second.stderr
    assert "not promoted: too few agents" in second.stdout
    store = registry.generalists
    assert store.get("generalist").manifest.gate == "gates:keeps_two"
    assert weights_of(store.get("generalist@v1").path) == weights_of(store.get("generalist@v2").path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--merge_to", "generalist", "--output_dir", "out"], "--merge_to writes into the registry: leave out"),
        (["--gate", "gates:ok", "--output_dir", "out"], "--gate judges a generalist: name one with --merge_to"),
        (["--merge_to", "generalist", "--gate", "nowhere:ok"], "gate: 'nowhere:ok' is not a MODULE:FUNCTION"),
        (["--merge_to", "generalist", "--gate", "json:__name__"], "gate: 'json:__name__' is not a function"),
        (["--merge_to", ".."], "'..' is not a name for a generalist"),
    ],
)
def test_the_recipe_refuses_in_one_line(registry: AgentRegistry, tmp_path, words, message):
    result = run_python(MERGE, "--registry", registry.path, *words, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert registry.generalists.names() == []


# The callback


def promotes(candidate: Path, report: dict) -> bool:
    return (candidate / "config.json").exists()


def test_after_every_run_the_agent_is_integrated(zoo: Zoo, tmp_path):
    base, registry = zoo.base("qwen2_untied"), AgentRegistry(tmp_path / "registry")
    for agent, seed in (("math", 1), ("code", 2)):
        callback = RAMRegistryCallback(
            registry.path,
            agent=agent,
            merge_to="generalist",
            merge_config={"r": 0.2, "gate": "test_generalists:promotes"},
        )
        train(grpo(base, tmp_path / agent, [callback], seed=seed, **BF16))
        assert callback.error is None
    assert str(callback.generalist) == "generalist@v2" and callback.generalist.parents == ["code@v1", "math@v1"]
    assert callback.generalist.manifest.settings["r"] == 0.2
    assert callback.generalist.manifest.gate == "test_generalists:promotes"
    assert registry.generalists.get("generalist@v1").parents == ["math@v1"]
    merge_agents(registry, str(tmp_path / "merged"), r=0.2)
    assert weights_of(callback.generalist.path) == weights_of(tmp_path / "merged")


@pytest.mark.parametrize("strict", [False, True])
def test_a_merge_that_fails_costs_neither_the_run_nor_the_agent(zoo: Zoo, tmp_path, caplog, strict):
    base, other = zoo.base("qwen2_untied"), zoo.base("llama")
    registry = AgentRegistry(tmp_path / "registry")
    callback = RAMRegistryCallback(
        registry.path, agent="math", merge_to="generalist", merge_config={"weights": {"math": 2.0}}, strict=strict
    )

    def meanwhile(model):
        register_agent(registry, "law", str(zoo.agent(other, seed=1)), base_model=str(other))

    trainer = grpo(base, tmp_path / "out", [callback, AtStep(1, meanwhile)], **BF16)
    with caplog.at_level(logging.ERROR):
        if strict:
            with pytest.raises(IncompatibleAgentError, match="different base models"):
                train(trainer)
        else:
            train(trainer)
    assert str(callback.registered) == "math@v1" and callback.generalist is None
    assert isinstance(callback.error, IncompatibleAgentError)
    assert "math@v1 is registered, but generalist 'generalist' was NOT merged" in caplog.text
    assert registry.generalists.names() == []
    command = f"accelerate launch recipes/merge.py --registry {registry.path} --merge_to generalist --weights math=2.0"
    assert f"Merge it later with:\n  {command}\n" in f"{caplog.text}\n"
    assert saved_weights(trainer, tmp_path / "saved")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"merge_to": "a/b"}, InvalidNameError, "not a name for a generalist"),
        ({"merge_to": "g", "merge_config": {"r": -1.0}}, ConfigError, "r=-1.0 must be"),
        ({"merge_to": "g", "merge_config": {"r": "much"}}, ConfigError, "a value of the wrong type"),
        ({"merge_to": "g", "merge_config": {"strength": 1}}, ConfigError, "'strength' is no option of a merge"),
        (
            {"merge_to": "g", "merge_config": {"gate": "nowhere:f"}},
            ConfigError,
            "'nowhere:f' is not a MODULE:FUNCTION",
        ),
        ({"merge_config": {"r": 0.2}}, ConfigError, "options for merge_to: name a generalist"),
        ({"merge_to": "g", "merge_config": "merge.yaml"}, ConfigError, "merge_config is a mapping"),
        ({"merge_to": "g", "merge_config": {"agents": "math"}}, ConfigError, "agents='math' is not a list of names"),
        ({"merge_to": "g", "merge_config": {"seed": 1.5}}, ConfigError, "a value of the wrong type"),
        ({"merge_to": 5}, InvalidNameError, "5 is not a name for a generalist"),
    ],
)
def test_a_mistake_in_the_merge_is_refused_before_there_is_a_run(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        RAMRegistryCallback(tmp_path / "registry", agent="math", **arguments)


def test_a_place_for_generalists_that_cannot_be_written_is_refused_before_the_first_step(zoo: Zoo, tmp_path):
    (tmp_path / "registry" / "agents").mkdir(parents=True)
    (tmp_path / "registry" / "generalists").write_text("notes")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", merge_to="generalist")

    def never(model):
        raise AssertionError("a step was trained")

    trainer = grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback, AtStep(1, never)], **BF16)
    with pytest.raises(StorageError, match="generalists"):
        train(trainer)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (None, IncompatibleAgentError, "agent code@v1 has another base .* than this run .* or carry it over"),
        ({"agents": ["code"]}, ConfigError, "the agents to merge are code: 'math', which is trained, is left out"),
        ({"agents": ["math", "cod"]}, AgentNotFoundError, "no agent 'cod'"),
        ({"agents": ["math"], "weights": {"code": 2.0}}, ConfigError, "weights has 'code', which will not be merged"),
    ],
)
def test_what_cannot_be_merged_in_the_end_is_refused_before_the_first_step(
    zoo: Zoo, registry: AgentRegistry, tmp_path, config, error, message
):
    generalist = integrate_agents(registry, "generalist")
    callback = RAMRegistryCallback(registry.path, agent="math", merge_to="generalist", merge_config=config)

    def never(model):
        raise AssertionError("a step was trained")

    with pytest.raises(error, match=message):
        train(grpo(generalist.path, tmp_path / "out", [callback, AtStep(1, never)], **BF16))


def test_the_printed_command_is_read_back_as_what_was_asked_for(registry: AgentRegistry):
    options = {
        "agents": ["math", "code@v1"],
        "weights": {"math": 0.5},
        "r": 0.2,
        "gate": promotes,
        "base_model": "a b",
    }
    words = shlex.split(Integration("generalist", options).command(registry))
    assert words[:3] == ["accelerate", "launch", "recipes/merge.py"]
    config = parse_config(MergeConfig, words[3:])
    assert (config.merge_to, config.agents, config.weights) == ("generalist", ["math", "code@v1"], {"math": 0.5})
    assert (config.r, config.gate, config.base_model) == (0.2, "test_generalists:promotes", "a b")
    empty = parse_config(MergeConfig, ["--registry", "r", "--merge_to", "generalist"]).merge_arguments()
    options = {name: value for name, value in empty.items() if name not in ("registry", "generalist")}
    assert "--weights" not in Integration("generalist", options).command(registry)


def test_what_is_trained_from_a_generalist_has_it_as_its_base(zoo: Zoo, registry: AgentRegistry, tmp_path):
    generalist = integrate_agents(registry, "generalist")
    callback = RAMRegistryCallback(registry.path, agent="tools")
    trainer = train(grpo(generalist.path, tmp_path / "out", [callback], **BF16))
    assert callback.registered.manifest.base_model.name == str(generalist.path.resolve())
    assert callback.registered.manifest.base_model.digest != registry.get("math").manifest.base_model.digest
    generalist.verify()
    back = restored_weights(registry.path, "tools", tmp_path / "back")
    assert_same_weights(back, saved_weights(trainer, tmp_path / "saved"))
