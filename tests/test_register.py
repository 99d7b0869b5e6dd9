"""Registering agents that are on disk and restoring them: full ones bit for bit, LoRA adapters as PEFT merges them."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from models import change_tensor, copy_model, merged_by_peft, read_model, rewrite, save_adapter
from peft import LoraConfig, PeftModel, PromptTuningConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ram_trl import AgentRegistry, merge_agents, register_agent, restore_agent
from ram_trl.errors import (
    AgentNotFoundError,
    BaseModelError,
    ConfigError,
    CorruptedFileError,
    IncompatibleAgentError,
    InvalidNameError,
    NonFiniteError,
    OutputExistsError,
    RamTrlError,
    UnsupportedModelError,
)
from ram_trl.storage.checkpoint import Checkpoint


FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def registered(folder, base, model, **options):
    registry = AgentRegistry(folder / "registry")
    return registry, register_agent(registry, "math", str(model), base_model=str(base), **options)


def restored(folder, registry, **options):
    restore_agent(registry, "math", str(folder / "restored"), **options)
    return read_model(folder / "restored")


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def assert_equal_values(found, expected):
    """Every tensor equal, in dtype too. PEFT's adding turns -0 into +0, so bits are not compared."""
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        different = int((tensor != expected[name]).sum())
        assert different == 0, f"{name}: {different} of {tensor.numel()} elements differ"


def assert_refused(folder, error_type, message, base, model, **options):
    """Registering fails with one line that matches, and the folder is as it was."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(error_type, match=message) as caught:
        register_agent(
            AgentRegistry(folder / "registry"), "math", str(model), base_model=base and str(base), **options
        )
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RamTrlError)
    assert sorted(folder.rglob("*")) == before


# Full fine-tunes


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen2_untied", "qwen3_moe"])
def test_an_agent_of_the_base_dtype_comes_back_bit_for_bit(zoo, tmp_path, kind, dtype):
    base = zoo.base(kind, dtype)
    agent = zoo.agent(base, seed=1)
    registry, registration = registered(tmp_path, base, agent, epsilon=0.0)
    assert_same_bits(restored(tmp_path, registry), read_model(agent))
    before, after = read_model(base), read_model(agent)
    assert registration.manifest.snapshot.changed == sum(int((after[n] != before[n]).sum()) for n in before)
    assert registration.manifest.snapshot.dtype == str(dtype).removeprefix("torch.")
    assert registration.manifest.base_model.total_parameters == sum(tensor.numel() for tensor in before.values())


@pytest.mark.parametrize("kind", ["qwen2_wide", "llama_wide"])
def test_tensors_longer_than_a_tile_come_back_bit_for_bit(zoo, tmp_path, kind):
    base = zoo.base(kind)
    agent = zoo.agent(base, seed=1)
    registry, _ = registered(tmp_path, base, agent)
    assert max(tensor.numel() for tensor in read_model(agent).values()) > 2**19
    assert_same_bits(restored(tmp_path, registry), read_model(agent))


def test_shards_of_the_agent_and_of_what_is_restored_may_differ_from_those_of_the_base(zoo, tmp_path):
    base, agent = zoo.base("llama", shards="20KB"), tmp_path / "agent"
    model = AutoModelForCausalLM.from_pretrained(zoo.agent(base, seed=1), dtype="auto")
    model.save_pretrained(agent, max_shard_size="15KB")
    assert len(list(base.glob("*.safetensors"))) < len(list(agent.glob("*.safetensors")))
    registry, _ = registered(tmp_path, base, agent)
    tensors = restored(tmp_path, registry, max_shard_size="30KB")
    expected = read_model(agent)
    assert_same_bits(dict(sorted(tensors.items())), dict(sorted(expected.items())))
    files = list((tmp_path / "restored").glob("*.safetensors"))
    assert 1 < len(files) < len(list(agent.glob("*.safetensors")))
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 30_000 for file in files)
    index = json.loads((tmp_path / "restored" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert set(index["weight_map"]) == set(expected)


def test_a_restored_agent_loads_in_transformers_with_its_tokenizer(zoo, tmp_path):
    base = zoo.base("qwen3_moe")
    agent = zoo.agent(base, seed=1)
    registry, _ = registered(tmp_path, base, agent)
    restore_agent(registry, "math", str(tmp_path / "restored"))
    found, expected = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (tmp_path / "restored", agent)
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "restored")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    inputs = tokenizer("abc=", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(found(input_ids=inputs["input_ids"]).logits, expected(input_ids=inputs["input_ids"]).logits)


def test_every_bit_pattern_comes_back(zoo, tmp_path):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(base, agent)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    patterns = patterns[patterns.isfinite()][: 64 * 32]
    special = torch.cat([patterns[:1000], -patterns[:1000], torch.tensor([0.0, -0.0] * 24, dtype=BFLOAT16)])
    change_tensor(agent, "lm_head.weight", lambda tensor: special.view(64, 32))
    registry, _ = registered(tmp_path, base, agent)
    assert_same_bits(restored(tmp_path, registry), read_model(agent))


def test_a_float32_agent_of_a_bfloat16_base_comes_back_bit_for_bit_without_epsilon(zoo, tmp_path):
    base = zoo.base("llama")
    agent = zoo.agent(base, seed=1, scale=1e-5, dtype=FLOAT32)
    registry, registration = registered(tmp_path, base, agent, epsilon=0.0)
    assert registration.manifest.snapshot.epsilon == 0.0
    assert_same_bits(restored(tmp_path, registry), read_model(agent))
    assert json.loads((tmp_path / "restored" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["over bfloat16", "over float32"])
def test_a_float32_agent_loses_changes_of_at_most_epsilon_and_nothing_else(zoo, tmp_path, dtype):
    base = zoo.base("llama", dtype)
    agent = zoo.agent(base, seed=1, density=0.9, scale=1e-5, dtype=FLOAT32)
    # a sweep's number is one of numpy's
    registry, registration = registered(tmp_path, base, agent, epsilon=np.float64(1e-5))
    assert registration.manifest.snapshot.epsilon == 1e-5
    expected, changed = {}, 0
    for name, tensor in read_model(agent).items():
        before = read_model(base)[name].float()
        kept = (tensor - before).abs() > 1e-5
        expected[name] = torch.where(kept, tensor, before)
        changed += int(kept.sum())
    assert 0 < changed < sum(tensor.numel() for tensor in expected.values())
    assert registration.manifest.snapshot.changed == changed
    assert_same_bits(restored(tmp_path, registry), expected)


def test_a_float32_agent_without_small_changes_is_exact_at_any_merge_epsilon(zoo, tmp_path):
    base = zoo.base("qwen2_untied", FLOAT32)
    agent = tmp_path / "agent"
    copy_model(base, agent)
    change_tensor(agent, "lm_head.weight", lambda tensor: tensor + 0.5)
    registry, registration = registered(tmp_path, base, agent)
    assert registration.manifest.snapshot.epsilon == 0.0
    assert_same_bits(restored(tmp_path, registry), read_model(agent))


def test_tensors_that_the_agent_kept_in_float32_come_back_in_float32(zoo, tmp_path):
    # as TRL's cast_lm_head_to_fp32 leaves them
    base, agent = zoo.base("llama"), tmp_path / "agent"
    copy_model(zoo.agent(base, seed=1), agent)
    change_tensor(agent, "lm_head.weight", lambda tensor: tensor.float() + 1e-3)
    registry, _ = registered(tmp_path, base, agent, epsilon=0.0)
    assert_same_bits(restored(tmp_path, registry), read_model(agent))


@pytest.mark.parametrize("wanted", ["bfloat16", "float16"])
def test_rounding_a_float32_agent_reports_what_it_hides(zoo, tmp_path, wanted):
    dtype = getattr(torch, wanted)
    base = zoo.base("qwen2_tied", dtype)
    agent = zoo.agent(base, seed=3, density=0.5, scale=1e-4, dtype=FLOAT32)
    registry, registration = registered(tmp_path, base, agent, snapshot_dtype=wanted)
    before, after = read_model(base), read_model(agent)
    updates = {name: after[name].double() - before[name].double() for name in before}
    rounded = {name: tensor.to(dtype) for name, tensor in after.items()}
    hidden = sum(float((after[name].double() - rounded[name].double()).abs().sum()) for name in before)
    snapshot = registration.manifest.snapshot
    assert snapshot.dtype == wanted and snapshot.epsilon == 0.0
    assert snapshot.changed_by_training == sum(int((update != 0).sum()) for update in updates.values())
    assert snapshot.changed == sum(int((rounded[name] != before[name]).sum()) for name in before)
    assert 0 < snapshot.changed < snapshot.changed_by_training
    assert snapshot.hidden_update == pytest.approx(hidden / sum(float(u.abs().sum()) for u in updates.values()))
    assert merge_agents(registry, None)["agents"][0]["hidden_update"] == snapshot.hidden_update
    assert_same_bits(restored(tmp_path, registry), rounded)


def test_an_agent_of_the_base_dtype_hides_nothing(zoo, tmp_path):
    base = zoo.base("qwen2_tied")
    _, registration = registered(tmp_path, base, zoo.agent(base, seed=1), snapshot_dtype="bfloat16")
    assert registration.manifest.snapshot.hidden_update is None
    assert registration.manifest.snapshot.changed_by_training is None


def test_an_agent_that_changed_nothing_is_the_base(zoo, tmp_path):
    base = zoo.base("qwen2_tied")
    registry, registration = registered(tmp_path, base, base)
    assert registration.manifest.snapshot.changed == 0
    assert_same_bits(restored(tmp_path, registry), read_model(base))


def test_snapshots_of_sparse_bfloat16_agents_are_smaller_than_the_agents(zoo, tmp_path):
    base = zoo.base("qwen2_wide")
    agent = zoo.agent(base, seed=1, density=0.1)
    _, registration = registered(tmp_path, base, agent)
    assert registration.manifest.files["delta.safetensors"].size < 0.25 * (agent / "model.safetensors").stat().st_size


def test_an_agent_may_save_the_tied_output_head_beside_the_embedding(zoo, tmp_path):
    base, agent = zoo.base("qwen2_tied"), tmp_path / "agent"
    copy_model(zoo.agent(base, seed=1), agent)
    expected = read_model(agent)
    head = expected["model.embed_tokens.weight"].clone()
    save_file({**expected, "lm_head.weight": head}, agent / "model.safetensors", metadata={"format": "pt"})
    registry, _ = registered(tmp_path, base, agent)
    assert_same_bits(restored(tmp_path, registry), expected)


@pytest.mark.parametrize("agent_stores_head", [True, False])
def test_a_base_may_hold_both_tied_tensors_in_its_files(zoo, tmp_path, agent_stores_head):
    base, agent = zoo.base("qwen2_tied", stored_head=True), tmp_path / "agent"
    copy_model(zoo.agent(zoo.base("qwen2_tied"), seed=1), agent)
    tensors = read_model(agent)
    both = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), **tensors}
    if agent_stores_head:
        save_file(both, agent / "model.safetensors", metadata={"format": "pt"})
    registry, registration = registered(tmp_path, base, agent)
    assert registration.manifest.base_model.total_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert registration.tensors()["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert_same_bits(restored(tmp_path, registry), both)


@pytest.mark.parametrize("stored_head", [True, False], ids=["base stores both", "base stores one"])
def test_an_agent_that_untied_the_output_head_is_refused(zoo, tmp_path, stored_head):
    base, agent = zoo.base("qwen2_tied", stored_head=stored_head), tmp_path / "agent"
    copy_model(zoo.agent(zoo.base("qwen2_tied"), seed=1), agent)
    tensors = read_model(agent)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.25
    save_file(tensors, agent / "model.safetensors", metadata={"format": "pt"})
    assert_refused(tmp_path, IncompatibleAgentError, r"its own 'lm_head.weight'.*untie the base", base, agent)


def test_a_resized_vocabulary_is_refused_with_the_cure(zoo, tmp_path):
    base, agent = zoo.base("qwen2_tied"), tmp_path / "agent"
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.resize_token_embeddings(66)
    model.save_pretrained(agent)
    message = r"'model.embed_tokens.weight' has shape \[66, 32\].*\[64, 32\].*resize the base in the same way"
    assert_refused(tmp_path, IncompatibleAgentError, message, base, agent)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_and_its_tensor_named(zoo, tmp_path, value):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(zoo.agent(base, seed=1), agent)
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensor(agent, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    assert_refused(tmp_path, NonFiniteError, f"tensor '{re.escape(name)}' .*NaN or infinity", base, agent)


def test_an_extra_tensor_is_refused(zoo, tmp_path):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(base, agent)
    tensors = {**read_model(base), "score.weight": torch.zeros(1, 32)}
    save_file(tensors, agent / "model.safetensors", metadata={"format": "pt"})
    assert_refused(tmp_path, IncompatibleAgentError, "tensor 'score.weight', which the base .* lacks", base, agent)


def test_a_tensor_of_another_shape_is_refused(zoo, tmp_path):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(base, agent)
    change_tensor(agent, "model.layers.0.self_attn.q_proj.weight", lambda tensor: tensor[:, :16])
    message = r"'model.layers.0.self_attn.q_proj.weight' has shape \[32, 16\], in the base .* it has \[32, 32\]$"
    assert_refused(tmp_path, IncompatibleAgentError, message, base, agent)


def test_a_missing_tensor_counts_as_unchanged_and_is_said(zoo, tmp_path, caplog):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(zoo.agent(base, seed=1), agent)
    rewrite(agent / "model.safetensors", lambda name, tensor: None if name == "lm_head.weight" else tensor)
    registry, _ = registered(tmp_path, base, agent)
    assert "1 base tensors are not in the agent and count as unchanged: lm_head.weight" in caplog.text
    expected = {**read_model(agent), "lm_head.weight": read_model(base)["lm_head.weight"]}
    assert_same_bits(dict(sorted(restored(tmp_path, registry).items())), dict(sorted(expected.items())))


def test_a_model_of_another_architecture_is_refused(zoo, tmp_path):
    agent = zoo.base("gpt2")
    assert_refused(tmp_path, IncompatibleAgentError, "no tensor in common", zoo.base("qwen2_untied"), agent)


def test_a_model_without_the_tensors_of_the_base_is_refused(zoo, tmp_path):
    message = "which the base .* lacks"
    assert_refused(tmp_path, IncompatibleAgentError, message, zoo.base("llama"), zoo.base("qwen3_moe"))


@pytest.mark.parametrize("file_name", ["pytorch_model.bin", "adapter_model.bin"])
def test_pickled_weights_are_refused_unread(zoo, tmp_path, file_name):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(base, agent)
    (agent / "model.safetensors").unlink()
    (agent / file_name).write_bytes(b"this would not unpickle")
    assert_refused(tmp_path, UnsupportedModelError, f"pickled weights \\({file_name}\\)", base, agent)


def test_a_directory_without_weights_is_refused(zoo, tmp_path):
    (tmp_path / "agent").mkdir()
    message = "holds no safetensors weights"
    assert_refused(tmp_path, BaseModelError, message, zoo.base("qwen2_untied"), tmp_path / "agent")


def with_stale_index(model, target, shards):
    """A copy of a model of one file, with the index of the shards that it had before, and perhaps the shards."""
    copy_model(model, target)
    before = target.with_name(f"{target.name}-before")
    older = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(1)
    older.save_pretrained(before, max_shard_size="20KB")
    files = [before / "model.safetensors.index.json", *(before.glob("model-*.safetensors") if shards else ())]
    for file in files:
        shutil.copyfile(file, target / file.name)
    assert len(files) > 2 or not shards
    return target


@pytest.mark.parametrize("shards", [True, False], ids=["with the shards", "without the shards"])
def test_a_single_file_is_read_and_not_the_shards_of_a_stale_index(zoo, tmp_path, shards):
    base, agent = zoo.base("qwen2_untied"), zoo.agent(zoo.base("qwen2_untied"), seed=1)
    stale_base = with_stale_index(base, tmp_path / "base", shards)
    stale_agent = with_stale_index(agent, tmp_path / "agent", shards)
    loaded = AutoModelForCausalLM.from_pretrained(stale_agent, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in read_model(agent).items())
    registry, registration = registered(tmp_path, stale_base, stale_agent)
    reference = register_agent(registry, "reference", str(agent), base_model=str(base))
    assert registration.manifest.snapshot == reference.manifest.snapshot
    assert registration.manifest.base_model.digest == reference.manifest.base_model.digest
    assert_same_bits(restored(tmp_path, registry), read_model(agent))
    assert not (tmp_path / "restored" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("wanted", ["bfloat16", "float16"])
def test_a_forced_dtype_that_the_base_does_not_have_is_refused(zoo, tmp_path, wanted):
    base = zoo.base("qwen2_untied", FLOAT32)
    message = f"snapshot_dtype is torch.{wanted}, but no tensor of the base .* is: use auto or float32"
    assert_refused(tmp_path, ConfigError, message, base, zoo.agent(base, seed=1), snapshot_dtype=wanted)


@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=["float64", "float8"])
def test_a_dtype_that_cannot_be_merged_is_refused_and_the_tensor_named(zoo, tmp_path, dtype, wanted):
    base, agent = zoo.base("qwen2_untied"), tmp_path / "agent"
    copy_model(zoo.agent(base, seed=1), agent)
    change_tensor(agent, "model.layers.1.mlp.up_proj.weight", lambda tensor: tensor.to(dtype))
    message = f"'model.layers.1.mlp.up_proj.weight' of the agent is {dtype}: save the agent in bfloat16"
    assert_refused(tmp_path, UnsupportedModelError, message, base, agent, snapshot_dtype=wanted)
    rewrite(agent / "model.safetensors", lambda name, tensor: tensor.to(dtype))
    assert_refused(tmp_path, UnsupportedModelError, f"' of the agent is {dtype}", base, agent, snapshot_dtype=wanted)


def test_an_unknown_path_is_refused(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    assert_refused(tmp_path, BaseModelError, "no-such-model is n.* directory", base, "no-such-model")
    assert_refused(
        tmp_path, BaseModelError, "no/such/model is neither a directory nor a Hub id", base, "no/such/model"
    )
    assert_refused(tmp_path, BaseModelError, "is n.* directory", tmp_path / "no" / "base", base)
    assert_refused(tmp_path, BaseModelError, "is a file", base, base / "config.json")


def test_a_full_fine_tune_needs_its_base_named(zoo, tmp_path):
    agent = zoo.agent(zoo.base("qwen2_untied"), seed=1)
    assert_refused(tmp_path, BaseModelError, "no base model was named: pass --base_model", None, agent)


@pytest.mark.parametrize("name", ["../math", "a/b", "", ".math", "a b", "x" * 97, "math@v2"])
def test_a_name_with_a_path_in_it_is_refused(zoo, tmp_path, name):
    base = zoo.base("qwen2_untied")
    with pytest.raises(InvalidNameError, match="is not a name for an agent"):
        register_agent(AgentRegistry(tmp_path / "registry"), name, str(base), base_model=str(base))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_dtype": "int8"}, "snapshot_dtype='int8' is not one of"),
        ({"epsilon": -1e-5}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": float("inf")}, "epsilon"),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_refused(zoo, tmp_path, options, message):
    base = zoo.base("qwen2_untied")
    assert_refused(tmp_path, ConfigError, message, base, base, **options)


def test_a_failed_registration_leaves_the_agents_other_versions_alone(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    registry, _ = registered(tmp_path, base, zoo.agent(base, seed=1))
    assert_refused(tmp_path, IncompatibleAgentError, "no tensor in common", base, zoo.base("gpt2"))
    _, second = registered(tmp_path, base, zoo.agent(base, seed=2))
    assert (second.name, second.version, registry.versions("math")) == ("math", 2, [1, 2])


def test_registering_does_not_need_the_agent_afterwards_but_restoring_needs_the_base(zoo, tmp_path):
    base, agent = tmp_path / "base", tmp_path / "agent"
    copy_model(zoo.base("qwen2_untied"), base)
    copy_model(zoo.agent(zoo.base("qwen2_untied"), seed=1), agent)
    expected = read_model(agent)
    registry, _ = registered(tmp_path, base, agent)
    shutil.rmtree(agent)
    base.rename(tmp_path / "moved")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BaseModelError, match=r"the base of agent math@v1 cannot be opened.*--base_model"):
        restored(tmp_path, registry)
    assert sorted(tmp_path.rglob("*")) == before
    assert_same_bits(restored(tmp_path, registry, base_model=str(tmp_path / "moved")), expected)


def test_restoring_over_a_changed_base_is_refused_and_the_tensor_named(zoo, tmp_path):
    base = tmp_path / "base"
    copy_model(zoo.base("qwen2_untied"), base)
    registry, _ = registered(tmp_path, base, zoo.agent(zoo.base("qwen2_untied"), seed=1))
    change_tensor(base, "model.norm.weight", lambda tensor: tensor * 2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BaseModelError, match=r"the weights of tensor 'model.norm.weight' differ"):
        restore_agent(registry, "math", str(tmp_path / "new" / "restored"))
    assert sorted(tmp_path.rglob("*")) == before


def test_restoring_a_damaged_agent_is_refused(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    registry, registration = registered(tmp_path, base, zoo.agent(base, seed=1))
    with open(registration.path / "delta.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptedFileError, match=r"agent math@v1: .*delta.safetensors is not the file"):
        restore_agent(registry, "math", str(tmp_path / "new" / "restored"))
    assert sorted(tmp_path.rglob("*")) == before


def test_restoring_what_is_not_there_or_to_a_full_directory_is_refused(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    registry, _ = registered(tmp_path, base, zoo.agent(base, seed=1))
    before = sorted(tmp_path.rglob("*"))
    target = str(tmp_path / "new" / "restored")
    with pytest.raises(AgentNotFoundError, match=r"no agent 'code' in .*; it holds: math"):
        restore_agent(registry, "code", target)
    with pytest.raises(AgentNotFoundError, match="no version v2; it has: v1"):
        restore_agent(registry, "math@v2", target)
    with pytest.raises(AgentNotFoundError, match="is not a registry"):
        restore_agent(AgentRegistry(tmp_path / "nothing"), "math", target)
    with pytest.raises(OutputExistsError, match="is not an empty directory"):
        restore_agent(registry, "math", str(tmp_path / "registry"))
    with pytest.raises(ConfigError, match="'5 apples' is not a size"):
        restore_agent(registry, "math", target, max_shard_size="5 apples")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_registry_may_be_named_by_its_path(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    agent = zoo.agent(base, seed=1)
    registration = register_agent(str(tmp_path / "registry"), "math", str(agent), base_model=str(base))
    assert registration.path == AgentRegistry(tmp_path / "registry").get("math").path
    for registry in (str(tmp_path / "registry"), tmp_path / "registry", AgentRegistry(tmp_path / "registry")):
        output = tmp_path / type(registry).__name__
        assert str(restore_agent(registry, "math", str(output))) == "math@v1"
        assert_same_bits(read_model(output), read_model(agent))


# LoRA

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "plain": ("qwen2_tied", {"target_modules": LINEAR}),
    "rslora": ("llama", {"target_modules": LINEAR, "use_rslora": True, "lora_alpha": 3}),
    "patterns": (
        "llama",
        {
            "target_modules": LINEAR,
            "rank_pattern": {"q_proj": 2, r"layers\.1\..*\.up_proj": 7},
            "alpha_pattern": {"layers.0.self_attn.v_proj": 32, "down_proj": 1},
        },
    ),
    "patterns and rslora": (
        "llama",
        {"target_modules": LINEAR, "use_rslora": True, "rank_pattern": {".*_proj": 2}, "alpha_pattern": {"o_proj": 5}},
    ),
    "output head": ("llama_wide", {"target_modules": ["lm_head", "q_proj"]}),
    "modules_to_save": ("qwen2_untied", {"modules_to_save": ["lm_head", "norm"]}),
    "all biases": ("qwen2_untied", {"bias": "all"}),
    "biases of targets": ("qwen2_untied", {"bias": "lora_only"}),
    "one module in one layer": ("llama", {"target_modules": ["down_proj"], "layers_to_transform": [1]}),
    "gaussian": ("llama", {"init_lora_weights": "gaussian"}),
    "orthogonal": ("llama", {"init_lora_weights": "orthogonal"}),
    "fan_in_fan_out": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts' attention": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    "router": ("qwen3_moe", {"modules_to_save": ["gate"]}),
}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("feature", ADAPTERS)
def test_a_restored_lora_agent_is_what_peft_merges(zoo, tmp_path, feature, dtype):
    kind, options = ADAPTERS[feature]
    base = zoo.base(kind, dtype)
    adapter = zoo.adapter(base, **options)
    registry, registration = registered(tmp_path, base, adapter)
    assert registration.manifest.kind == "lora"
    found, before = restored(tmp_path, registry), read_model(base)
    assert set(found) == set(before)
    assert any(not torch.equal(found[name], before[name]) for name in found)
    assert_equal_values(found, merged_by_peft(base, adapter, tmp_path / "by_peft"))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("targets", [["attn.c_proj", "lm_head"], ["attn.c_proj"], ["lm_head"], ["c_attn", "lm_head"]])
def test_layers_of_both_orientations_in_one_adapter_are_what_peft_merges(zoo, tmp_path, targets, dtype):
    base = zoo.base("gpt2_untied", dtype)
    adapter = zoo.adapter(base, target_modules=targets)
    # PEFT saves what holds for the last layer that it made: a square Conv1D before a Linear cannot be told by it
    assert LoraConfig.from_pretrained(adapter).fan_in_fan_out == ("lm_head" not in targets)
    registry, registration = registered(tmp_path, base, adapter)
    transposed = {name: record.transposed for name, record in registration.adapter_map().items()}
    assert transposed == {name: name != "lm_head.weight" for name in transposed}
    assert_equal_values(restored(tmp_path, registry), merged_by_peft(base, adapter, tmp_path / "by_peft"))


def test_embedding_factors_are_added_without_rounding_the_delta_first(zoo, tmp_path):
    # PEFT's Embedding.merge, other than its Linear.merge, rounds the delta to the base's dtype before it adds it.
    base = zoo.base("llama_wide")
    adapter = zoo.adapter(base, target_modules=["embed_tokens"])
    registry, registration = registered(tmp_path, base, adapter)
    name = "model.embed_tokens.weight"
    found, before, by_peft = (
        tensors[name]
        for tensors in (
            restored(tmp_path, registry),
            read_model(base),
            merged_by_peft(base, adapter, tmp_path / "by_peft"),
        )
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    layer = model.get_submodule("base_model.model.model.embed_tokens")
    delta = layer.get_delta_weight("default").detach()
    assert registration.adapter_map()[name].scaling == layer.scaling["default"]
    assert torch.equal(by_peft, before + delta.to(BFLOAT16))
    assert torch.equal(found, (before.float() + delta).to(BFLOAT16))


def test_embedding_factors_over_a_float32_base_are_what_peft_merges(zoo, tmp_path):
    base = zoo.base("llama_wide", FLOAT32)
    adapter = zoo.adapter(base, target_modules=["embed_tokens", "lm_head"])
    registry, _ = registered(tmp_path, base, adapter)
    assert_equal_values(restored(tmp_path, registry), merged_by_peft(base, adapter, tmp_path / "by_peft"))


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
@pytest.mark.parametrize("stored_head", [True, False])
def test_an_adapter_on_the_embedding_of_a_tied_base_is_refused(zoo, tmp_path, options, stored_head):
    adapter = zoo.adapter(zoo.base("qwen2_tied"), **options)
    message = "'model.embed_tokens.weight', which the base ties to its output head.*untie the base"
    assert_refused(tmp_path, UnsupportedModelError, message, zoo.base("qwen2_tied", stored_head=stored_head), adapter)


def test_scaling_is_the_one_that_peft_computes(zoo, tmp_path):
    for feature in ("plain", "rslora", "patterns", "patterns and rslora", "fan_in_fan_out"):
        kind, options = ADAPTERS[feature]
        base = zoo.base(kind)
        adapter = zoo.adapter(base, **options)
        _, registration = registered(tmp_path, base, adapter)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
        expected = {
            name.removeprefix("base_model.model.") + ".weight": module.scaling["default"]
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        assert {name: record.scaling for name, record in registration.adapter_map().items()} == expected, feature


def test_a_registered_adapter_is_a_directory_that_peft_loads(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    adapter = zoo.adapter(base, modules_to_save=["lm_head"])
    _, registration = registered(tmp_path, base, adapter)
    from_registry = merged_by_peft(base, registration.path, tmp_path / "from_registry")
    assert_same_bits(from_registry, merged_by_peft(base, adapter, tmp_path / "from_adapter"))
    assert (registration.path / "adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()


def test_an_adapter_names_its_base_itself(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    registry = AgentRegistry(tmp_path / "registry")
    registration = register_agent(registry, "math", str(zoo.adapter(base)))
    assert registration.manifest.base_model.name == str(base.resolve())


REFUSED_ADAPTERS = {
    "init_lora_weights='pissa' changed the base's weights": ("llama", {"init_lora_weights": "pissa"}),
    "init_lora_weights='olora' changed the base's weights": ("llama", {"init_lora_weights": "olora"}),
    "aLoRA, which acts on some tokens only, cannot be merged": ("llama", {"alora_invocation_tokens": [3, 4]}),
    "layer_replication": ("llama", {"layer_replication": [(0, 2), (1, 2)]}),
    "'lm_head.weight', which the base ties": ("qwen2_tied", {"target_modules": ["q_proj", "lm_head"]}),
}


@pytest.mark.parametrize("feature", REFUSED_ADAPTERS)
def test_an_adapter_that_cannot_be_registered_is_refused_and_the_feature_named(zoo, tmp_path, feature):
    kind, options = REFUSED_ADAPTERS[feature]
    base = zoo.base(kind)
    adapter = zoo.adapter(base, **options)
    assert_refused(tmp_path, UnsupportedModelError, re.escape(feature), base, adapter)


def test_an_adapter_that_is_no_change_of_the_weights_is_refused_and_its_method_named(zoo, tmp_path):
    base, adapter = zoo.base("llama"), tmp_path / "adapter"
    save_adapter(base, adapter, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert_refused(tmp_path, UnsupportedModelError, "type PROMPT_TUNING cannot be merged", base, adapter)


def test_an_output_head_saved_in_full_beside_a_tied_base_is_refused(zoo, tmp_path):
    base = zoo.base("qwen2_tied")
    adapter = zoo.adapter(base, modules_to_save=["lm_head"])
    assert_refused(tmp_path, UnsupportedModelError, "'lm_head.weight', which the base ties", base, adapter)


def test_an_adapter_of_another_base_is_refused(zoo, tmp_path):
    adapter = zoo.adapter(zoo.base("llama"))
    message = "the factors of .* have shapes .* the base has"
    assert_refused(tmp_path, IncompatibleAgentError, message, zoo.base("llama_wide"), adapter)
    message = "which the base .* does not have"
    assert_refused(tmp_path, IncompatibleAgentError, message, zoo.base("gpt2"), adapter)


def test_an_adapter_with_nan_or_half_of_its_factors_is_refused(zoo, tmp_path):
    base, adapter = zoo.base("llama"), tmp_path / "adapter"
    copy_model(zoo.adapter(base), adapter)
    file, name = (
        adapter / "adapter_model.safetensors",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
    )
    rewrite(file, lambda key, tensor: tensor * float("nan") if key == name else tensor)
    assert_refused(tmp_path, NonFiniteError, re.escape(name), base, adapter)
    rewrite(file, lambda key, tensor: None if key == name else tensor)
    assert_refused(tmp_path, IncompatibleAgentError, "only one of the two factors", base, adapter)


def test_factors_in_bfloat16_are_multiplied_in_float32(zoo, tmp_path):
    base, adapter = zoo.base("llama"), tmp_path / "adapter"
    copy_model(zoo.adapter(base), adapter)
    rewrite(adapter / "adapter_model.safetensors", lambda name, tensor: tensor.to(BFLOAT16))
    config = LoraConfig.from_pretrained(adapter)
    registry, registration = registered(tmp_path, base, adapter)
    assert registration.manifest.snapshot.dtype == "bfloat16"
    assert config.lora_alpha / config.r == next(iter(registration.adapter_map().values())).scaling
    assert_equal_values(restored(tmp_path, registry), merged_by_peft(base, adapter, tmp_path / "by_peft"))


def test_an_index_that_promises_a_tensor_which_no_file_holds_is_refused(zoo, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(zoo.base("llama", shards="20KB"), base)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.more.weight"] = next(iter(index["weight_map"].values()))
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptedFileError, match=r"promises tensor 'model\.more\.weight'"):
        Checkpoint.open(base)


def test_a_tied_head_is_tied_to_the_embedding_among_tensors_that_look_alike(tmp_path):
    weight = torch.ones(4, 2, dtype=torch.bfloat16)
    names = ("lm_head.weight", "a.weight", "model.embed_tokens.weight")
    write_tensors(tmp_path / "base", dict.fromkeys(names, weight))
    values = dict(zip(names, (3.0, 4.0, 3.0), strict=True))
    write_tensors(tmp_path / "agent", {name: weight * value for name, value in values.items()})
    assert Checkpoint.open(tmp_path / "base").tied == {"lm_head.weight": "model.embed_tokens.weight"}
    register_agent(tmp_path / "registry", "math", str(tmp_path / "agent"), base_model=str(tmp_path / "base"))
    restore_agent(tmp_path / "registry", "math", tmp_path / "back")
    restored = read_model(tmp_path / "back")
    assert {name: float(restored[name][0, 0]) for name in names} == values


@pytest.mark.parametrize(
    "change",
    [{"alpha_pattern": {"(": 3}}, {"alpha_pattern": [1]}, {"lora_alpha": None}, {"lora_alpha": "4"}],
    ids=str,
)
def test_an_adapter_configuration_with_unusable_values_is_refused(zoo, tmp_path, change):
    base = zoo.base("llama")
    adapter = tmp_path / "adapter"
    shutil.copytree(zoo.adapter(base), adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedModelError, match="the adapter's configuration has"):
        register_agent(tmp_path / "registry", "tool", str(adapter), base_model=str(base))


def write_tensors(folder, tensors):
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
