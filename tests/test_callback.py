"""The callback in real GRPO runs: what it registers, and what it refuses to start."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from models import CONFIGS, Zoo, copy_model, read_model, save_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from training import (
    BF16,
    LORA,
    AtStep,
    assert_same_weights,
    grpo,
    printed_command,
    restored_weights,
    saved_weights,
    train,
)
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState
from trl import GRPOConfig

from ram_trl import AgentRegistry, RAMRegistryCallback, register_agent
from ram_trl.distributed import SINGLE
from ram_trl.errors import (
    BaseModelError,
    ConfigError,
    IncompatibleAgentError,
    InvalidNameError,
    StorageError,
    UnsupportedModelError,
)
from ram_trl.registering.live import LiveRegistration


# What is registered


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("qwen2_tied", "5GB"),
        ("qwen2_untied", "5GB"),
        ("llama_wide", "300KB"),
        ("qwen2_wide", "5GB"),
        ("qwen3_moe", "50KB"),
    ],
)
def test_trained_16_bit_weights_come_back_bit_for_bit(zoo: Zoo, tmp_path, kind, shards):
    base = zoo.base(kind, shards=shards)
    callback = RAMRegistryCallback(tmp_path / "not" / "yet" / "there", agent="math")
    trainer = train(grpo(base, tmp_path / "out", [callback], **BF16))

    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "not" / "yet" / "there", "math", tmp_path / "back"), trained)
    assert callback.error is None
    assert (callback.registered.name, callback.registered.version) == ("math", 1)
    manifest = callback.registered.manifest
    changed = sum(int(torch.count_nonzero(tensor != trained[name])) for name, tensor in read_model(base).items())
    assert changed > 0.1 * manifest.base_model.total_parameters
    assert manifest.snapshot.changed == changed
    assert manifest.snapshot.dtype == "bfloat16"
    assert manifest.snapshot.hidden_update is None
    assert manifest.base_model.name == str(base)


def test_fused_experts_of_the_model_in_memory_are_registered_one_by_one(zoo: Zoo, tmp_path):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="moe")
    trainer = train(grpo(zoo.base("qwen3_moe"), tmp_path / "out", [callback], **BF16))

    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(trainer.model.named_parameters())
    changed = {name for name, record in callback.registered.tensors().items() if record.agent is not None}
    assert {f"model.layers.1.mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("gate", "up", "down")} <= (
        changed
    )


@pytest.fixture(scope="module")
def autocast_run(zoo: Zoo, tmp_path_factory):
    """TRL's defaults: float32 weights, computed in bfloat16, over a bfloat16 base."""
    path = tmp_path_factory.mktemp("autocast")
    callback = RAMRegistryCallback(path / "registry", agent="math")
    trainer = train(grpo(zoo.base("qwen2_untied"), path / "out", [callback], bf16=True, learning_rate=1e-4))
    return callback, saved_weights(trainer, path / "saved"), path


def test_a_run_under_autocast_is_registered_as_it_executes(autocast_run):
    callback, trained, path = autocast_run
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    rounded = {name: tensor.bfloat16() for name, tensor in trained.items()}
    assert_same_weights(restored_weights(path / "registry", "math", path / "back"), rounded)
    assert callback.registered.manifest.snapshot.dtype == "bfloat16"


def test_a_run_under_autocast_reports_what_the_rounding_hid(zoo: Zoo, autocast_run):
    callback, trained, _ = autocast_run
    base = read_model(zoo.base("qwen2_untied"))
    update = sum(float((trained[name].double() - base[name].double()).abs().sum()) for name in base)
    hidden = sum(float((trained[name].double() - trained[name].bfloat16().double()).abs().sum()) for name in base)
    snapshot = callback.registered.manifest.snapshot
    assert 0 < hidden < update
    assert snapshot.hidden_update == pytest.approx(hidden / update, rel=1e-6)
    assert snapshot.changed_by_training == sum(int(torch.count_nonzero(trained[name] != base[name])) for name in base)
    assert snapshot.changed == sum(int(torch.count_nonzero(trained[name].bfloat16() != base[name])) for name in base)
    assert snapshot.changed < snapshot.changed_by_training


def test_float32_training_keeps_the_changes_above_epsilon_exactly(zoo: Zoo, tmp_path):
    epsilon = 1.2e-5
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", epsilon=epsilon)
    trainer = train(grpo(base, tmp_path / "out", [callback], learning_rate=1e-5))

    trained, expected, num_kept, num_dropped = saved_weights(trainer, tmp_path / "saved"), {}, 0, 0
    for name, tensor in read_model(base).items():
        kept = (trained[name] - tensor.float()).abs() > epsilon
        expected[name] = torch.where(kept, trained[name], tensor.float())
        num_kept += int(kept.sum())
        num_dropped += int((~kept & (trained[name] != tensor.float())).sum())
    assert num_kept > 100
    assert num_dropped > 100
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), expected)
    snapshot = callback.registered.manifest.snapshot
    assert (snapshot.dtype, snapshot.epsilon, snapshot.changed) == ("float32", epsilon, num_kept)


@pytest.mark.parametrize(("snapshot_dtype", "autocast"), [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_snapshot_dtype_forces_what_is_stored(zoo: Zoo, tmp_path, snapshot_dtype, autocast):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", snapshot_dtype=snapshot_dtype, epsilon=0.0)
    trainer = train(grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback], bf16=autocast))

    dtype = getattr(torch, snapshot_dtype)
    trained = {name: tensor.to(dtype) for name, tensor in saved_weights(trainer, tmp_path / "saved").items()}
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)


def test_a_model_object_is_registered_against_the_directory_it_came_from(zoo: Zoo, tmp_path):
    base = zoo.base("llama")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    callback = RAMRegistryCallback(str(tmp_path / "registry"), agent="math")
    trainer = train(grpo(model, tmp_path / "out", [callback]))

    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)
    assert callback.registered.manifest.base_model.name == str(base)


def test_training_goes_on_from_a_fine_tune_against_the_named_base(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", base_model=base)
    trainer = train(grpo(zoo.agent(base, seed=5), tmp_path / "out", [callback], **BF16))

    trained = saved_weights(trainer, tmp_path / "saved")
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)
    assert callback.registered.manifest.base_model.name == str(base)


COMMITS = {"main": "1" * 40, "before": "2" * 40}


@pytest.fixture
def hub(zoo: Zoo, tmp_path, monkeypatch) -> dict[str, Path]:
    """`toys/base` in the cache of the Hub, in two revisions with different weights: the folder of each."""
    cache = tmp_path / "cache"
    folder, base = cache / "models--toys--base", zoo.base("qwen2_untied")
    (folder / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(COMMITS.items(), 50):
        (folder / "refs" / revision).write_text(commit)
        copy_model(zoo.agent(base, seed=seed), folder / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return {revision: folder / "snapshots" / commit for revision, commit in COMMITS.items()}


@pytest.mark.parametrize(
    ("of_model", "of_callback", "expected"),
    [
        (None, {}, "main"),
        ("before", {}, "before"),
        (COMMITS["before"], {}, "before"),
        ("before", {"revision": "main"}, "main"),
        ("before", {"base_model": "toys/base"}, "main"),
        ("before", {"base_model": "toys/base", "revision": "before"}, "before"),
    ],
)
def test_the_revision_that_training_starts_from_is_the_base(hub, tmp_path, of_model, of_callback, expected):
    options = {"dtype": "bfloat16", **({} if of_model is None else {"revision": of_model})}
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", **of_callback)
    trainer = train(grpo("toys/base", tmp_path / "out", [callback], model_init_kwargs=options))

    assert callback.error is None
    manifest = callback.registered.manifest
    assert (manifest.base_model.name, manifest.base_model.revision) == ("toys/base", hub[expected].name)
    trained, base = saved_weights(trainer, tmp_path / "saved"), read_model(hub[expected])
    assert manifest.snapshot.changed == sum(int((trained[name] != base[name]).sum()) for name in base)
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)


def test_a_callback_of_several_trainers_forgets_the_revision_of_the_one_before(hub, tmp_path):
    callback, bases = RAMRegistryCallback(tmp_path / "registry", agent="math"), []
    for number, revision in enumerate(("before", None, "before")):
        options = {"dtype": "bfloat16", **({} if revision is None else {"revision": revision})}
        train(grpo("toys/base", tmp_path / f"out{number}", [callback], model_init_kwargs=options))
        bases.append(callback.registered.manifest.base_model.revision)
    assert bases == [COMMITS["before"], COMMITS["main"], COMMITS["before"]]


def test_the_printed_command_names_the_revision_that_training_started_from(hub, tmp_path, caplog):
    def lose_registry(model):
        shutil.move(tmp_path / "registry", tmp_path / "away")
        (tmp_path / "registry").write_text("")

    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    options = {"dtype": "bfloat16", "revision": "before"}
    callbacks = [callback, AtStep(1, lose_registry)]
    register_agent(str(tmp_path / "registry"), "other", str(hub["main"]), base_model=str(hub["main"]))
    train(grpo("toys/base", tmp_path / "out", callbacks, model_init_kwargs=options))
    assert isinstance(callback.error, StorageError)
    assert "--base_model toys/base --revision before " in printed_command(caplog.text)


def test_where_an_agent_comes_from_is_recorded(autocast_run):
    callback, _, _ = autocast_run
    training = callback.registered.manifest.training
    assert (training["arguments"], training["step"], training["max_steps"]) == ("GRPOConfig", 2, 2)
    assert (training["learning_rate"], training["mixed_precision"], training["num_processes"]) == (1e-4, "bf16", 1)
    assert 0 < training["metrics"]["reward"] < 1
    assert training["versions"]["torch"] == torch.__version__
    json.dumps(training, allow_nan=False)


# LoRA


def merged_by_peft(model: PeftModel, path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What PEFT itself makes in `dtype` of the adapter in memory, in bfloat16, by the names of files."""
    merged = copy.deepcopy(model)
    for layer in merged.modules():
        # factors stay in float32
        if isinstance(layer, BaseTunerLayer):
            layer.get_base_layer().to(dtype)
    merged.merge_and_unload().bfloat16().save_pretrained(path)
    return read_model(path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2_tied", {}),
        ("llama", {"target_modules": "all-linear", "lora_alpha": 13}),
        ("qwen2_untied", {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 5}}),
        ("qwen2_untied", {"modules_to_save": ["lm_head"]}),
        ("qwen2_untied", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("qwen2_untied", {"bias": "lora_only"}),
        ("qwen3_moe", {}),
    ],
    ids=["tied", "all_linear", "patterns", "modules_to_save", "embedding", "bias", "moe"],
)
def test_a_registered_adapter_restores_to_what_peft_merges(zoo: Zoo, tmp_path, kind, options):
    base = zoo.base(kind)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(grpo(base, tmp_path / "out", [callback], LoraConfig(**{**LORA, **options}), **BF16))

    assert callback.error is None
    assert callback.registered.manifest.kind == "lora"
    # PEFT rounds the delta of an embedding before it adds it: there its merge in float32 is the measure
    dtype = torch.float32 if "embed_tokens" in options.get("target_modules", []) else torch.bfloat16
    merged = merged_by_peft(trainer.model, tmp_path / "merged", dtype)
    original = read_model(base)
    assert any(not torch.equal(merged[name], original[name]) for name in original)
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)


def test_a_registered_adapter_loads_with_peft_as_it_was_trained(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(grpo(base, tmp_path / "out", [callback], LoraConfig(**LORA), **BF16))

    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), callback.registered.path
    )
    factors = {name: tensor for name, tensor in trainer.model.named_parameters() if "lora_" in name}
    assert any(tensor.abs().max() > 0 for name, tensor in factors.items() if "lora_B" in name)
    for name, tensor in loaded.named_parameters():
        if "lora_" in name:
            assert torch.equal(tensor, factors.pop(name)), name
    assert not factors
    prompt = torch.arange(3, 13)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(prompt).logits, trainer.model.eval()(prompt).logits)


def test_a_live_adapter_of_layers_of_both_orientations_restores_to_what_peft_merges(zoo: Zoo, tmp_path):
    # TRL trains no adapter on an output head, so this one is not trained by it
    base = zoo.base("gpt2_untied")
    torch.manual_seed(0)
    config = LoraConfig(**{**LORA, "target_modules": ["attn.c_proj", "lm_head"], "init_lora_weights": False})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    # what holds for the last layer that PEFT made: no square Conv1D can be told by it
    assert not model.peft_config["default"].fan_in_fan_out
    live = LiveRegistration(
        registry=AgentRegistry(tmp_path / "registry"),
        agent="lora",
        base_model=None,
        revision=None,
        snapshot_dtype="auto",
        epsilon=1e-5,
    )
    live.check(model, SINGLE)
    agent = live.register(model, SINGLE, None, {})
    assert {name: record.transposed for name, record in agent.adapter_map().items()} == {
        "transformer.h.0.attn.c_proj.weight": True,
        "transformer.h.1.attn.c_proj.weight": True,
        "lm_head.weight": False,
    }
    merged = merged_by_peft(model, tmp_path / "merged")
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lora", {}),
        ("lora", {"modules_to_save": ["lm_head"]}),
        ("m", {}),
        ("m", {"modules_to_save": ["lm_head"]}),
        # PEFT itself saves modules under wrong names if the adapter's is "weight"
        ("weight", {}),
        ("module", {"modules_to_save": ["lm_head"]}),
        ("base_layer", {}),
        ("q_proj", {"modules_to_save": ["lm_head"]}),
    ],
)
def test_an_adapter_may_have_any_name(zoo: Zoo, tmp_path, name, options):
    base = zoo.base("qwen2_untied")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(**LORA, **options), adapter_name=name)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(grpo(model, tmp_path / "out", [callback]))

    assert callback.error is None
    expected = zoo.adapter(base, **options)
    assert read_model(callback.registered.path).keys() == read_model(expected).keys()
    merged = merged_by_peft(trainer.model, tmp_path / "merged")
    assert any(not torch.equal(merged[key], tensor) for key, tensor in read_model(base).items())
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)


def test_of_several_adapters_the_active_one_is_registered(zoo: Zoo, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_untied"), dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(**LORA), adapter_name="m")
    # larger, so that no other can be taken for it
    model.add_adapter("lora", LoraConfig(**{**LORA, "r": 8, "lora_alpha": 24}))
    model.set_adapter("lora")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(grpo(model, tmp_path / "out", [callback]))

    assert callback.error is None
    shapes = {tuple(tensor.shape) for name, tensor in read_model(callback.registered.path).items() if "lora_A" in name}
    assert shapes == {(8, 32)}
    merged = merged_by_peft(trainer.model, tmp_path / "merged")
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)


def test_the_reference_adapter_that_trl_adds_is_not_registered(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    save_adapter(base, tmp_path / "pretrained", LoraConfig(**LORA))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), tmp_path / "pretrained", is_trainable=True
    )
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(grpo(model, tmp_path / "out", [callback], beta=0.04))

    assert "ref" in trainer.model.peft_config
    names = read_model(callback.registered.path).keys()
    assert names == read_model(tmp_path / "pretrained").keys()
    trainer.model.delete_adapter("ref")
    merged = merged_by_peft(trainer.model, tmp_path / "merged")
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)


# What is refused before the first step


def never(model) -> None:
    raise AssertionError("a step was trained")


def with_larger_vocabulary(base: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.resize_token_embeddings(72)
    return model


REFUSALS = {
    "agent name": ({"agent": "../math"}, {}, InvalidNameError, "not a name for an agent"),
    "snapshot dtype": ({"snapshot_dtype": "int8"}, {}, ConfigError, "snapshot_dtype='int8' is not one of auto"),
    "epsilon": ({"epsilon": float("nan")}, {}, ConfigError, "epsilon=nan must be"),
    "no base": ({"base_model": "/nowhere/base"}, {}, BaseModelError, "/nowhere/base is neither a directory nor"),
    "aLoRA": (
        {},
        {"peft_config": LoraConfig(**LORA, alora_invocation_tokens=[3, 4])},
        UnsupportedModelError,
        "aLoRA, which acts on some tokens only, cannot be merged",
    ),
    "LoRA biases": (
        {},
        {"peft_config": LoraConfig(**{**LORA, "target_modules": ["o_proj"]}, lora_bias=True)},
        UnsupportedModelError,
        "o_proj' cannot be merged.*the base layer has no bias",
    ),
    "vocabulary": (
        {},
        {"model": with_larger_vocabulary},
        IncompatibleAgentError,
        "vocabulary was resized; resize",
    ),
    "no name": (
        {},
        {"model": lambda base: AutoModelForCausalLM.from_config(CONFIGS["qwen2_untied"]())},
        BaseModelError,
        "pass base_model=",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_registered_is_refused_before_the_first_step(zoo: Zoo, tmp_path, case):
    arguments, options, error, message = REFUSALS[case]
    options = dict(options)
    base = zoo.base("qwen2_untied")
    model = options.pop("model", lambda base: base)(base)
    with pytest.raises(error, match=message):
        callback = RAMRegistryCallback(**{"registry": tmp_path / "registry", "agent": "math", **arguments})
        train(grpo(model, tmp_path / "out", [callback, AtStep(1, never)], **options))
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama", "q_proj.bias', which the base .* lacks"),
        ("llama_wide", "has shape .* it has"),
        ("qwen2_tied", "trains its own 'lm_head.weight', which the base .* ties to its embeddings: untie the base"),
    ],
)
def test_another_architecture_or_size_than_the_base_is_refused_before_the_first_step(
    zoo: Zoo, tmp_path, kind, message
):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", base_model=zoo.base(kind))
    trainer = grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback, AtStep(1, never)], **BF16)
    with pytest.raises(IncompatibleAgentError, match=message):
        train(trainer)


def test_a_trained_head_beside_an_adapter_of_a_tied_base_is_refused_before_the_first_step(zoo: Zoo, tmp_path):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    config = LoraConfig(**LORA, modules_to_save=["lm_head"])
    trainer = grpo(zoo.base("qwen2_tied"), tmp_path / "out", [callback, AtStep(1, never)], config, **BF16)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight.*ties"):
        train(trainer)


def test_a_registry_that_is_a_file_is_refused_before_the_first_step(zoo: Zoo, tmp_path):
    (tmp_path / "registry").write_text("notes")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback, AtStep(1, never)], **BF16)
    with pytest.raises(StorageError, match="writing to the registry"):
        train(trainer)
    assert (tmp_path / "registry").read_text() == "notes"


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_too_little_disk_space_is_refused_before_the_first_step(zoo: Zoo, tmp_path, monkeypatch, peft_config):
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    callbacks = [callback, AtStep(1, never)]
    trainer = grpo(zoo.base("qwen2_untied"), tmp_path / "out", callbacks, peft_config, **BF16)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match="free space"):
        train(trainer)


def test_space_is_asked_for_what_will_be_stored(zoo: Zoo, tmp_path, monkeypatch):
    base = zoo.base("qwen2_untied")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    numel = sum(tensor.numel() for tensor in read_model(base).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=numel))
    live = LiveRegistration(
        registry=AgentRegistry(tmp_path / "registry"),
        agent="math",
        base_model=str(base),
        revision=None,
        snapshot_dtype="auto",
        epsilon=1e-5,
    )
    live.check(model, SINGLE, torch.bfloat16)
    live.check(model.to(torch.bfloat16), SINGLE)
    with pytest.raises(StorageError, match="free space"):
        live.check(model.to(torch.float32), SINGLE)


# What is said


def test_a_whole_run_warns_of_nothing(zoo: Zoo, tmp_path, caplog):
    callback = RAMRegistryCallback(tmp_path / "out" / "registry", agent="math")
    train(grpo(zoo.base("qwen2_untied"), tmp_path / "out", [callback], **BF16))
    assert callback.registered
    assert [record for record in caplog.records if record.name.startswith("ram_trl")] == []


@pytest.mark.parametrize(
    ("registry", "push_to_hub", "warns"),
    [
        ("out/registry", True, True),
        ("out/deep/registry", True, True),
        ("elsewhere/../out/registry", True, True),
        ("link/registry", True, True),
        ("out/registry", False, False),
        ("registry", True, False),
        ("out-registry", True, False),
    ],
)
def test_a_registry_that_would_be_pushed_to_the_hub_is_said(zoo: Zoo, tmp_path, caplog, registry, push_to_hub, warns):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    # no trainer: that would create the repository
    model = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_untied"), dtype=torch.bfloat16)
    options = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "report_to": "none"}
    args = GRPOConfig(push_to_hub=push_to_hub, **options)
    callback = RAMRegistryCallback(f"{tmp_path}/{registry}", agent="math")
    callback.on_train_begin(args, TrainerState(), TrainerControl(), model=model)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("ram_trl")]
    assert len(messages) == warns
    assert all("is inside output_dir and would be pushed too" in message for message in messages)
