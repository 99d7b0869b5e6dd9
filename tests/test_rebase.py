"""Agents that were trained from a generalist come back to the original base."""

import json
import shutil

import pytest
import torch
from models import Zoo, change_tensor, read_model
from training import assert_same_weights, restored_weights

from ram_trl import AgentRegistry, integrate_agents, merge_agents, rebase_agent, register_agent
from ram_trl.errors import BaseModelError, ConfigError, IncompatibleAgentError


@pytest.fixture
def lineage(zoo: Zoo, tmp_path) -> tuple[AgentRegistry, dict]:
    """A base, a generalist of two agents of it, and an agent that was trained from the generalist."""
    base = zoo.base("qwen2_tied")
    kept = zoo.registry(base, {"code": zoo.agent(base, seed=2), "math": zoo.agent(base, seed=1)})
    registry = AgentRegistry(shutil.copytree(kept.path, tmp_path / "registry"))
    generalist = integrate_agents(registry, "generalist").path
    tools = zoo.agent(generalist, seed=9)
    register_agent(registry, "tools", str(tools), base_model=str(generalist))
    return registry, {"base": base, "generalist": generalist, "tools": tools}


def expected(models: dict) -> tuple[dict, dict]:
    """The sum in float64, and where the bases agree, by tensor."""
    base, generalist, tools = (read_model(models[name]) for name in ("base", "generalist", "tools"))
    sums = {name: base[name].double() + (tools[name].double() - generalist[name].double()) for name in base}
    return sums, {name: base[name] == generalist[name] for name in base}


def test_parameters_in_which_the_bases_agree_keep_their_bits_and_others_are_rounded_once(lineage, tmp_path):
    registry, models = lineage
    agent = rebase_agent(registry, "tools")
    assert str(agent) == "tools@v2" and agent.manifest.training["rebased_from"] == "tools@v1"
    assert agent.manifest.base_model == registry.get("math").manifest.base_model
    back, tools = restored_weights(registry.path, "tools@v2", tmp_path / "back"), read_model(models["tools"])
    sums, agree = expected(models)
    lost = update = 0.0
    for name in sums:
        # in norms, which are near 1, updates of this size are rounded away
        assert "norm" in name or 0.2 < agree[name].double().mean() < 0.9, name
        assert torch.equal(back[name][agree[name]], tools[name][agree[name]]), name
        # twice rounded, to float32 and to bfloat16, is at most one place from the nearest
        error = (back[name].double() - sums[name]).abs()
        nearest = sums[name].to(torch.bfloat16).double()
        assert (error <= (nearest - sums[name]).abs() * (1 + 2**-10) + 1e-12).all(), name
        lost += float(error.sum())
        update += float((read_model(models["base"])[name].double() - sums[name]).abs().sum())
    assert agent.manifest.snapshot.hidden_update == pytest.approx(lost / update, rel=1e-3)
    assert 0 < agent.manifest.snapshot.hidden_update < 0.2


def test_a_rebased_agent_is_merged_with_the_agents_of_the_original_base(lineage, tmp_path):
    registry, _ = lineage
    with pytest.raises(IncompatibleAgentError, match="or carry one over to the other's base with ram-trl rebase"):
        merge_agents(registry, str(tmp_path / "merged"))
    with pytest.raises(ConfigError, match="revision is that of the new base"):
        rebase_agent(registry, "tools", revision="main")
    rebase_agent(registry, "tools")
    report = merge_agents(registry, str(tmp_path / "merged"))
    assert [row["name"] for row in report["agents"]] == ["code", "math", "tools"]
    assert integrate_agents(registry, "generalist").parents == ["code@v1", "math@v1", "tools@v2"]


def test_in_float32_only_the_smallest_changes_are_lost(lineage, tmp_path):
    registry, models = lineage
    agent = rebase_agent(registry, "tools", snapshot_dtype="float32", epsilon=0.0)
    assert agent.manifest.snapshot.dtype == "float32" and agent.manifest.snapshot.hidden_update is None
    back = restored_weights(registry.path, "tools", tmp_path / "back")
    sums, _ = expected(models)
    for name in sums:
        torch.testing.assert_close(back[name].double(), sums[name], rtol=2**-23, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}])
def test_an_adapter_is_carried_over_exactly(zoo: Zoo, lineage, tmp_path, options):
    registry, models = lineage
    adapter = zoo.adapter(models["generalist"], **options)
    register_agent(registry, "law", str(adapter))
    agent = rebase_agent(registry, "law")
    assert agent.manifest.kind == "lora"
    assert_same_weights(read_model(agent.path), read_model(adapter))
    assert agent.adapter_map() == registry.get("law@v1").adapter_map()
    direct = register_agent(registry, "direct", str(adapter), base_model=str(models["base"]))
    assert agent.manifest.base_model == direct.manifest.base_model
    assert_same_weights(
        restored_weights(registry.path, "law", tmp_path / "law"),
        restored_weights(registry.path, "direct", tmp_path / "direct"),
    )


@pytest.mark.parametrize("options", [{"modules_to_save": ["up_proj"]}, {"modules_to_save": ["norm"], "r": 2}])
def test_a_module_that_was_trained_in_full_beside_the_factors_is_carried_over(zoo: Zoo, lineage, tmp_path, options):
    registry, models = lineage
    adapter = zoo.adapter(models["generalist"], **options)
    register_agent(registry, "law", str(adapter))
    agent = rebase_agent(registry, "law")
    base, generalist = read_model(models["base"]), read_model(models["generalist"])
    before, after = read_model(adapter), read_model(agent.path)
    replaced = {name: record.replaced_by for name, record in agent.adapter_map().items() if record.replaced_by}
    assert replaced
    for name, key in replaced.items():
        expected = base[name].double() + (before[key].double() - generalist[name].double())
        torch.testing.assert_close(after[key].double(), expected, rtol=2**-8, atol=1e-9)
    assert all(torch.equal(after[key], before[key]) for key in before if key not in replaced.values())
    config = json.loads((agent.path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models["base"])


def test_of_a_float32_agent_nothing_is_lost_that_was_stored(zoo: Zoo, lineage, tmp_path):
    registry, models = lineage
    small = zoo.agent(models["generalist"], seed=4, scale=5e-6, dtype=torch.float32)
    register_agent(registry, "law", str(small), base_model=str(models["generalist"]), epsilon=0.0)
    agent = rebase_agent(registry, "law")
    assert agent.manifest.snapshot.epsilon == 0.0
    back, trained = restored_weights(registry.path, "law", tmp_path / "back"), read_model(small)
    base, generalist = read_model(models["base"]), read_model(models["generalist"])
    for name in back:
        agree = base[name] == generalist[name]
        assert torch.equal(back[name][agree].float(), trained[name][agree]), name


def test_what_was_not_stored_is_not_claimed_to_be_there(zoo: Zoo, lineage):
    registry, models = lineage
    trained = zoo.agent(models["generalist"], seed=4, dtype=torch.float32)
    register_agent(registry, "law", str(trained), base_model=str(models["generalist"]), epsilon=1e-3)
    assert rebase_agent(registry, "law").manifest.snapshot.epsilon == 1e-3
    assert rebase_agent(registry, "law@v1", epsilon=1e-4).manifest.snapshot.epsilon == 1e-3


def test_a_generalist_of_another_dtype_than_its_base_is_no_obstacle(zoo: Zoo, lineage, tmp_path):
    registry, models = lineage
    generalist = integrate_agents(registry, "half", agents=["code", "math"], output_dtype="float16").path
    half = zoo.agent(generalist, seed=3)
    register_agent(registry, "law", str(half), base_model=str(generalist))
    assert rebase_agent(registry, "law").manifest.snapshot.dtype == "bfloat16"
    sums, _ = expected({**models, "generalist": generalist, "tools": half})
    for name, tensor in restored_weights(registry.path, "law", tmp_path / "back").items():
        torch.testing.assert_close(tensor.double(), sums[name], rtol=2**-7, atol=1e-9)


def test_a_base_that_changed_since_the_merge_is_refused(lineage, tmp_path):
    registry, models = lineage
    base = shutil.copytree(models["base"], tmp_path / "base")
    moved = integrate_agents(registry, "moved", agents=["code", "math"], base_model=str(base)).path
    register_agent(registry, "law", str(models["tools"]), base_model=str(moved))
    change_tensor(base, "model.layers.0.mlp.up_proj.weight", lambda tensor: tensor + 1)
    with pytest.raises(BaseModelError, match="is not the base that the generalist was merged over"):
        rebase_agent(registry, "law")
    assert registry.versions("law") == [1]


def test_there_and_back_again_is_the_agent(lineage, tmp_path):
    registry, models = lineage
    rebase_agent(registry, "tools", snapshot_dtype="float32", epsilon=0.0)
    rebase_agent(registry, "tools@v2", new_base=str(models["generalist"]), snapshot_dtype="bfloat16")
    assert_same_weights(restored_weights(registry.path, "tools", tmp_path / "back"), read_model(models["tools"]))


def test_a_base_with_other_tensors_is_refused(zoo: Zoo, lineage):
    registry, _ = lineage
    for other, message in (("llama", "not models of one kind"), ("qwen2_wide", "not models of one kind")):
        with pytest.raises(BaseModelError, match=message):
            rebase_agent(registry, "tools", new_base=str(zoo.base(other)))
    assert registry.versions("tools") == [1]


def test_an_agent_that_was_not_trained_from_a_generalist_needs_the_new_base_named(lineage):
    registry, models = lineage
    with pytest.raises(BaseModelError, match="math@v1 was not trained from a generalist: name the new base"):
        rebase_agent(registry, "math")
    with pytest.raises(ConfigError, match=r"math@v1 has the base .* already"):
        rebase_agent(registry, "math", new_base=str(models["base"]))
    assert registry.versions("math") == [1]


def test_a_present_base_that_is_not_the_recorded_one_is_refused_and_a_moved_one_is_found(lineage, tmp_path):
    registry, models = lineage
    moved = shutil.copytree(models["generalist"], tmp_path / "moved")
    changed = shutil.copytree(models["generalist"], tmp_path / "changed")
    change_tensor(changed, "model.layers.0.mlp.up_proj.weight", lambda tensor: tensor + 1)
    with pytest.raises(BaseModelError, match=r"weights of tensor 'model\.layers\.0\.mlp\.up_proj\.weight' differ"):
        rebase_agent(registry, "tools", base_model=str(changed))
    assert str(rebase_agent(registry, "tools", base_model=str(moved))) == "tools@v2"
