"""Adapters of every kind, as they are registered: against PEFT's merge and the forward pass of the adapted model."""

import copy
import importlib
import json
import sys
from pathlib import Path

import peft
import pytest
import torch
from models import Zoo, read_model, save_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import config as lora_config
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import assert_same_weights, grpo, restored_weights, run_shell, train
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    ResNetConfig,
    ResNetForImageClassification,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOTrainer

from ram_trl import AgentRegistry, RAMRegistryCallback, register_agent
from ram_trl.distributed import SINGLE
from ram_trl.errors import IncompatibleAgentError, NonFiniteError, UnsupportedModelError
from ram_trl.registering.live import LiveRegistration
from ram_trl.storage.registry import RegisteredAgent


TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
LORA = {**TARGETS, "r": 4, "lora_alpha": 13}
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(base: Path, *configs: peft.PeftConfig, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model with adapters of which every trained parameter has moved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model = get_peft_model(model, configs[0], adapter_name="first")
    for number, config in enumerate(configs[1:]):
        model.add_adapter(f"more{number}", config)
    model.base_model.set_adapter(list(model.peft_config))
    move(model)
    return model.eval()


def move(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)


OPTIONS = {"base_model": None, "revision": None, "snapshot_dtype": "auto", "epsilon": 0.0}


def register(model: PeftModel, base: Path, registry: Path, is_fresh: bool = True, **options) -> RegisteredAgent:
    """Register the model, and see that it is as it was before."""
    options = {**OPTIONS, "base_model": str(base), **options}
    live = LiveRegistration(registry=AgentRegistry(registry), agent="agent", **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    live.check(model, SINGLE, is_fresh=is_fresh)
    registered = live.register(model, SINGLE, None, {})
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return registered


def merged_by_peft(model: PeftModel, path: Path) -> dict[str, Tensor]:
    """What PEFT's own merge makes of a float32 copy of the model, by the names of files."""
    copy.deepcopy(model).float().merge_and_unload().save_pretrained(path)
    return read_model(path)


def rounded(tensors: dict[str, Tensor], base: Path) -> dict[str, Tensor]:
    """In the dtypes of the base."""
    return {name: tensors[name].to(tensor.dtype) for name, tensor in read_model(base).items()}


def logits(model: torch.nn.Module, tokens: Tensor | None = None) -> Tensor:
    tokens = torch.arange(2, 20)[None] if tokens is None else tokens
    with torch.no_grad():
        return model.eval().float()(tokens).logits


def assert_executes_the_same(model: PeftModel, restored: Path) -> None:
    expected = logits(model)
    base = logits(AutoModelForCausalLM.from_pretrained(model.get_base_model().config.name_or_path))
    assert (expected - base).abs().max() > 1e-4
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(restored)), expected, rtol=0, atol=2e-6)


def assert_registered_as_merged(model: PeftModel, base: Path, tmp_path: Path) -> RegisteredAgent:
    """Both as it was trained, in float32, and as it is deployed, in the base's dtype."""
    merged = merged_by_peft(model, tmp_path / "merged")
    register(model, base, tmp_path / "float32", snapshot_dtype="float32")
    assert_same_weights(restored_weights(tmp_path / "float32", "agent", tmp_path / "back"), merged)
    assert_executes_the_same(model, tmp_path / "back")
    agent = register(model, base, tmp_path / "registry")
    assert agent.manifest.kind == "full"
    assert_same_weights(restored_weights(tmp_path / "registry", "agent", tmp_path / "out"), rounded(merged, base))
    return agent


# Whatever PEFT can merge

METHODS = {
    "ADALORA": (peft.AdaLoraConfig, {"total_step": 10}),
    "BEFT": (peft.BeftConfig, {}),
    "BOFT": (peft.BOFTConfig, {"boft_block_size": 4}),
    "C3A": (peft.C3AConfig, {"block_size": 4}),
    "DEFT": (peft.DeftConfig, {}),
    "DELORA": (peft.DeloraConfig, {}),
    "FOURIERFT": (peft.FourierFTConfig, {"n_frequency": 50}),
    "FROD": (peft.FrodConfig, {}),
    "GLORA": (peft.GloraConfig, {}),
    "GRALORA": (peft.GraloraConfig, {}),
    "HIRA": (peft.HiraConfig, {}),
    "HRA": (peft.HRAConfig, {}),
    "IA3": (peft.IA3Config, {"feedforward_modules": []}),
    "LN_TUNING": (peft.LNTuningConfig, {"target_modules": ["input_layernorm"]}),
    "LOHA": (peft.LoHaConfig, {}),
    "LOKR": (peft.LoKrConfig, {}),
    "MISS": (peft.MissConfig, {"r": 4}),
    "OFT": (peft.OFTConfig, {"oft_block_size": 4}),
    "OSF": (peft.OSFConfig, {}),
    "PEANUT": (peft.PeanutConfig, {}),
    "PSOFT": (peft.PsoftConfig, {"r": 4}),
    "PVERA": (peft.PveraConfig, {}),
    "RANDLORA": (peft.RandLoraConfig, {}),
    "ROAD": (peft.RoadConfig, {"group_size": 8}),
    "SHIRA": (peft.ShiraConfig, {"r": 4}),
    "SUPERTUNING": (peft.SupertuningConfig, {}),
    "TINYLORA": (peft.TinyLoraConfig, {}),
    "TRAINABLE_TOKENS": (
        peft.TrainableTokensConfig,
        {"target_modules": ["embed_tokens"], "token_indices": [3, 5]},
    ),
    "UNILORA": (peft.UniLoraConfig, {}),
    "VBLORA": (peft.VBLoRAConfig, {"vector_length": 16, "num_vectors": 20}),
    "VERA": (peft.VeraConfig, {}),
    "WAVEFT": (peft.WaveFTConfig, {"n_frequency": 64}),
}


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_of_another_method_is_registered_as_peft_merges_it(zoo: Zoo, tmp_path, method):
    config, options = METHODS[method]
    base = zoo.base("qwen2_untied")
    agent = assert_registered_as_merged(adapted(base, config(**{**TARGETS, **options})), base, tmp_path)
    assert agent.manifest.training["adapter"] == {"type": method, "features": [method]}


FEATURES = {
    "DoRA": ("qwen2_untied", {"use_dora": True}),
    "DoRA beside a module in full": ("qwen2_untied", {"use_dora": True, "modules_to_save": ["lm_head"]}),
    "DoRA and biases": ("qwen2_untied", {"use_dora": True, "bias": "all"}),
    "DoRA on embeddings": ("qwen2_untied", {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}),
    "DoRA on Conv1D": ("gpt2_untied", {"use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "KaSA": ("qwen2_untied", {"kasa_config": lora_config.KasaConfig()}),
    "VeLoRA": ("qwen2_untied", {"velora_config": lora_config.VeloraConfig()}),
    "MonteCLoRA": ("qwen2_untied", {"monteclora_config": lora_config.MontecloraConfig()}),
    "QA-LoRA": ("qwen2_untied", {"use_qalora": True}),
    "lora_bias": ("qwen2_untied", {"lora_bias": True}),
    "trainable_token_indices": ("qwen2_untied", {"trainable_token_indices": [3, 5]}),
    "trainable_token_indices, tied": ("qwen2_tied", {"trainable_token_indices": [3, 5]}),
    "target_parameters": ("qwen3_moe", EXPERTS),
    "target_parameters and modules": ("qwen3_moe", {**EXPERTS, "target_modules": ["q_proj"], "use_rslora": True}),
    "init_lora_weights='pissa'": ("qwen2_untied", {"init_lora_weights": "pissa", "use_dora": True}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_lora_that_is_no_plain_one_is_registered_as_peft_merges_it(zoo: Zoo, tmp_path, feature):
    kind, options = FEATURES[feature]
    base = zoo.base(kind)
    agent = assert_registered_as_merged(adapted(base, LoraConfig(**{**LORA, **options})), base, tmp_path)
    assert agent.manifest.training["adapter"]["type"] == "LORA"
    assert (
        feature.split(",")[0].split(" and")[0].split(" on")[0].split(" beside")[0]
        in (agent.manifest.training["adapter"]["features"])
    )


def test_several_active_adapters_are_registered_as_their_sum(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    other = LoraConfig(**{**LORA, "r": 2, "target_modules": ["q_proj", "up_proj"]})
    agent = assert_registered_as_merged(adapted(base, LoraConfig(**LORA), other), base, tmp_path)
    assert agent.manifest.training["adapter"] == {"type": "LORA", "features": ["2 active adapters"]}


def test_what_is_trained_beside_an_adapter_is_registered_with_it(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    model = adapted(base, LoraConfig(**LORA))
    model.get_base_model().model.norm.weight.requires_grad = True
    move(model)
    agent = assert_registered_as_merged(model, base, tmp_path)
    assert agent.manifest.training["adapter"]["features"] == ["model.norm.weight trained beside the adapter"]


def test_a_convolution_is_registered_as_peft_merges_it(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=4)
    base = ResNetForImageClassification(config).eval()
    base.save_pretrained(tmp_path / "base")
    model = ResNetForImageClassification.from_pretrained(tmp_path / "base")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["convolution"], modules_to_save=["classifier"]))
    move(model.eval())
    agent = register(model, tmp_path / "base", tmp_path / "registry")
    assert agent.manifest.training["adapter"] == {"type": "LORA", "features": ["LoRA on convolutions"]}
    merged = merged_by_peft(model, tmp_path / "merged")
    assert_same_weights(restored_weights(tmp_path / "registry", "agent", tmp_path / "back"), merged)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(images).logits
        actual = ResNetForImageClassification.from_pretrained(tmp_path / "back")(images).logits
        assert (expected - base(images).logits).abs().max() > 1e-4
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


def test_what_repeated_merging_left_in_the_base_is_not_taken_for_training(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    model = adapted(base, LoraConfig(**LORA, use_dora=True), dtype=torch.bfloat16)
    merged = merged_by_peft(model, tmp_path / "merged")
    for _ in range(30):
        # as TRL does before every generation with vLLM
        model.merge_adapter()
        model.unmerge_adapter()
    drifted = merged_by_peft(model, tmp_path / "drifted")
    assert any(not torch.equal(drifted[name], merged[name]) for name in merged)
    register(model, base, tmp_path / "registry", is_fresh=False)
    actual = restored_weights(tmp_path / "registry", "agent", tmp_path / "back")
    assert_same_weights(actual, rounded(merged, base))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_on_a_model_that_is_not_its_base_is_refused(zoo: Zoo, tmp_path, dora):
    base = zoo.base("qwen2_untied")
    # what was trained before, merged in memory: the model still has the name of the base
    before = adapted(base, LoraConfig(**LORA)).merge_and_unload()
    before.save_pretrained(tmp_path / "saved")
    model = get_peft_model(before, LoraConfig(**LORA, use_dora=dora))
    with pytest.raises(IncompatibleAgentError, match=r"whose '.*q_proj.weight' is not that of the base .*: save that"):
        register(model, base, tmp_path / "registry")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), LoraConfig(**LORA, use_dora=dora))
    register(model, tmp_path / "saved", tmp_path / "registry")


@pytest.mark.parametrize("init", [True, "pissa"])
def test_a_model_that_is_merged_just_now_is_registered_all_the_same(zoo: Zoo, tmp_path, init):
    base = zoo.base("qwen2_untied")
    model = adapted(base, LoraConfig(**LORA, use_dora=True, init_lora_weights=init))
    merged = merged_by_peft(model, tmp_path / "merged")
    model.merge_adapter()
    register(model, base, tmp_path / "registry", is_fresh=False, snapshot_dtype="float32")
    assert_same_weights(restored_weights(tmp_path / "registry", "agent", tmp_path / "back"), merged)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        {"trainable_token_indices": [3, 5]},
    ],
    ids=["lora", "modules_to_save", "token indices"],
)
def test_adapters_of_tied_tensors_that_share_their_weights_change_both_once(zoo: Zoo, tmp_path, options):
    base = zoo.base("qwen2_tied")
    model = adapted(base, LoraConfig(**{**LORA, **options}))
    # PEFT's own merge adds a tied LoRA twice, so the forward pass alone is the measure
    register(model, base, tmp_path / "registry", snapshot_dtype="float32")
    restored_weights(tmp_path / "registry", "agent", tmp_path / "back")
    assert_executes_the_same(model, tmp_path / "back")


# What is refused before the first step

REFUSED = {
    "prompt tuning": ("llama", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
    "prefix tuning": ("llama", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PREFIX_TUNING"),
    "p-tuning": ("llama", peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "P_TUNING"),
    "Lily": ("llama", peft.LilyConfig(**TARGETS), "LILY cannot be merged"),
    "Poly": ("llama", peft.PolyConfig(**TARGETS), "POLY cannot be merged"),
    "aLoRA": ("llama", LoraConfig(**LORA, alora_invocation_tokens=[3, 4]), "aLoRA, which acts on some tokens only"),
    "layer replication": ("llama", LoraConfig(**LORA, layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
    "a bias that the base lacks": ("llama", LoraConfig(**LORA, lora_bias=True), "q_proj' cannot be merged.*no bias"),
    "BEFT without biases": ("llama", peft.BeftConfig(**TARGETS), "q_proj' cannot be merged.*no bias"),
    "DoRA on tied embeddings": (
        "qwen2_tied",
        LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]}, use_dora=True),
        "embed_tokens.weight', which the base ties to its output head",
    ),
    "LoRA on tied embeddings": (
        "qwen2_tied",
        LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "lm_head"]}),
        "embed_tokens.weight', which the base ties to its output head",
    ),
    "DoRA on a tied head": (
        "qwen2_tied",
        LoraConfig(**{**LORA, "target_modules": ["lm_head"]}, use_dora=True),
        "lm_head.weight', which the base ties to another",
    ),
    "LoHa on a tied head": (
        "qwen2_tied",
        peft.LoHaConfig(**{**TARGETS, "target_modules": ["lm_head"]}),
        "lm_head.weight', which the base ties to another",
    ),
    "a token's row in one of two tied tensors": (
        "qwen2_tied",
        peft.TrainableTokensConfig(target_modules=["lm_head"], token_indices=[3]),
        "lm_head.weight', which the base ties to another",
    ),
    "KaSA in 16 bits": ("llama", LoraConfig(**LORA, kasa_config=lora_config.KasaConfig()), "KaSA.*float32"),
    "PiSSA and DoRA in 16 bits": (
        "llama",
        LoraConfig(**LORA, init_lora_weights="pissa", use_dora=True),
        "DoRA, init_lora_weights='pissa'.*float32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_cannot_be_registered_is_refused_by_name_before_training(zoo: Zoo, tmp_path, case):
    kind, config, message = REFUSED[case]
    base = zoo.base(kind)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent", base_model=str(base))
    with pytest.raises(UnsupportedModelError, match=message):
        callback.on_train_begin(TrainingArguments(tmp_path / "out"), TrainerState(), TrainerControl(), model=model)
    assert not (tmp_path / "registry").exists()


def test_an_adapter_that_is_merged_is_refused_where_parameters_are_sharded_and_a_plain_one_is_not(zoo: Zoo, tmp_path):
    base = zoo.base("llama")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for options in ({}, {"use_dora": True}):
            model = adapted(base, LoraConfig(**LORA, **options))
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            live = LiveRegistration(registry=AgentRegistry(tmp_path / "registry"), agent="agent", **OPTIONS)
            if options:
                with pytest.raises(UnsupportedModelError, match=r"DoRA: .* sharded: train with DDP or on one"):
                    live.check(model, SINGLE)
            else:
                live.check(model, SINGLE)
    finally:
        torch.distributed.destroy_process_group()


# Real runs


def assert_run_is_registered_as_merged(
    run: GRPOTrainer, callback: RAMRegistryCallback, base: Path, path: Path
) -> None:
    """Against PEFT's merge of the trained model in float32, rounded once."""
    assert callback.error is None
    merged = rounded(merged_by_peft(run.model, path / "merged"), base)
    original = read_model(base)
    assert any(not torch.equal(merged[name], original[name]) for name in original)
    assert_same_weights(restored_weights(callback.registered.path.parents[2], "agent", path / "back"), merged)


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("qwen2_tied", LoraConfig(**LORA, use_dora=True), {}),
        ("qwen2_untied", peft.OFTConfig(**TARGETS, oft_block_size=4), {"model_init_kwargs": {"dtype": "bfloat16"}}),
        ("qwen3_moe", LoraConfig(**{**LORA, **EXPERTS}), {}),
    ],
    ids=["DoRA", "OFT in bfloat16", "experts"],
)
def test_a_run_is_registered_as_peft_merges_its_adapter(zoo: Zoo, tmp_path, kind, config, options):
    base = zoo.base(kind)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent")
    trainer = train(grpo(base, tmp_path / "out", [callback], config, **options))
    assert_run_is_registered_as_merged(trainer, callback, base, tmp_path)
    snapshot = callback.registered.manifest.snapshot
    assert 0 < snapshot.changed < snapshot.changed_by_training


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["plain", "DoRA"])
def test_a_pretrained_adapter_is_registered_with_what_it_was_trained_before(zoo: Zoo, tmp_path, options):
    base = zoo.base("qwen2_untied")
    save_adapter(base, tmp_path / "pretrained", LoraConfig(**LORA, **options))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tmp_path / "pretrained", is_trainable=True)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent")
    # TRL puts the reference policy beside it, as an adapter "ref"
    trainer = train(grpo(model, tmp_path / "out", [callback], beta=0.04))
    trainer.model.delete_adapter("ref")
    assert callback.registered.manifest.kind == ("full" if options else "lora")
    assert_run_is_registered_as_merged(trainer, callback, base, tmp_path)


# LoRA that was taken out of the base's weights

PATTERNS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 5}}
OUT_OF_BASE = {
    "PiSSA": ("qwen2_untied", {"init_lora_weights": "pissa"}),
    "PiSSA with rsLoRA": ("llama", {"init_lora_weights": "pissa_niter_4", "use_rslora": True}),
    "PiSSA on Conv1D": (
        "gpt2_untied",
        {"init_lora_weights": "pissa", "target_modules": ["c_attn"], "fan_in_fan_out": True},
    ),
    "PiSSA beside a module in full": (
        "qwen2_untied",
        {"init_lora_weights": "pissa", "modules_to_save": ["lm_head"], "bias": "lora_only"},
    ),
    "OLoRA with patterns": ("qwen2_untied", {"init_lora_weights": "olora", **PATTERNS}),
    "OLoRA with patterns and rsLoRA": ("llama", {"init_lora_weights": "olora", "use_rslora": True, **PATTERNS}),
    "CorDA": ("llama", {"init_lora_weights": "corda", "corda_config": lora_config.CordaConfig()}),
    "LoRA-GA": ("llama", {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()}),
}


def prepared(base: Path, config: LoraConfig) -> PeftModel:
    """A model with the adapter, after what CorDA and LoRA-GA want to see of the model first."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.randint(2, 40, (8, 20))
    if config.init_lora_weights == "corda":
        # PEFT imports it there and does not ask for it
        pytest.importorskip("attr")
        corda = importlib.import_module("peft.tuners.lora.corda")
        corda.preprocess_corda(model, config, run_model=lambda: logits(model, tokens[:1]))
    if config.init_lora_weights == "lora_ga":
        peft.preprocess_loraga(model, config, lambda: model(tokens, labels=tokens).loss.backward())
    return get_peft_model(model, config)


@pytest.mark.parametrize("case", OUT_OF_BASE)
def test_a_lora_taken_out_of_the_base_is_registered_as_its_change(zoo: Zoo, tmp_path, case):
    kind, options = OUT_OF_BASE[case]
    base = zoo.base(kind)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent")
    model = prepared(base, LoraConfig(**{**LORA, **options}))
    trainer = train(grpo(model, tmp_path / "out", [callback]))
    assert callback.error is None
    assert callback.registered.manifest.kind == "lora"
    assert (tmp_path / "out" / "ram_trl_initial_factors.safetensors").exists()

    # over the original base, with PEFT and without it, what the run executed
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before, expected = logits(model), logits(trainer.model)
    assert (expected - before).abs().max() > 1e-3
    loaded = PeftModel.from_pretrained(model, callback.registered.path)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=2e-5)
    merged = merged_by_peft(loaded, tmp_path / "merged")
    assert_same_weights(restored_weights(tmp_path / "registry", "agent", tmp_path / "back"), rounded(merged, base))


@pytest.mark.parametrize("init", ["eva", "mica"])
def test_an_initialisation_that_leaves_the_base_alone_is_a_plain_lora(zoo: Zoo, tmp_path, init):
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent")
    model = prepared(base, LoraConfig(**LORA, init_lora_weights=init))
    if init == "eva":
        batches = [{"input_ids": torch.randint(2, 40, (8, 20)), "attention_mask": torch.ones(8, 20)} for _ in range(4)]
        peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    trainer = train(grpo(model, tmp_path / "out", [callback]))
    assert callback.registered.manifest.kind == "lora"
    assert not (tmp_path / "out" / "ram_trl_initial_factors.safetensors").exists()
    assert_run_is_registered_as_merged(trainer, callback, base, tmp_path)


def test_a_resumed_run_finds_what_was_taken_out_of_the_base(zoo: Zoo, tmp_path):
    base, config = zoo.base("qwen2_untied"), LoraConfig(**LORA, init_lora_weights="pissa")
    callbacks = [RAMRegistryCallback(tmp_path / "registry", agent=name) for name in ("whole", "resumed", "lost")]
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "model_init_kwargs": {"dtype": "bfloat16"}}
    train(grpo(base, tmp_path / "out", [callbacks[0]], config, **saved))
    resumed = grpo(base, tmp_path / "out", [callbacks[1]], config, **saved)
    train(resumed, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    factors = [read_model(callback.registered.path) for callback in callbacks[:2]]
    assert_same_weights(factors[1], factors[0])
    # and so does a registration from the checkpoint, later
    agent = register_agent(tmp_path / "registry", "later", tmp_path / "out" / "checkpoint-2", base_model=str(base))
    assert agent.manifest.kind == "lora"
    assert_same_weights(read_model(agent.path), factors[0])
    assert agent.adapter_map() == callbacks[0].registered.adapter_map()

    (tmp_path / "out" / "ram_trl_initial_factors.safetensors").unlink()
    lost = grpo(base, tmp_path / "out", [callbacks[2]], config, **saved)
    with pytest.raises(UnsupportedModelError, match=r"pissa.*put ram_trl_initial_factors\.safetensors of the run"):
        train(lost, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    with pytest.raises(UnsupportedModelError, match=r"pissa.*put ram_trl_initial_factors\.safetensors from the"):
        register_agent(tmp_path / "registry", "never", tmp_path / "out" / "checkpoint-2", base_model=str(base))
    assert "never" not in AgentRegistry(tmp_path / "registry").names()


def test_training_twice_starts_from_the_same_initial_factors(zoo: Zoo, tmp_path):
    base, config = zoo.base("qwen2_untied"), LoraConfig(**LORA, init_lora_weights="pissa")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent")
    trainer = train(train(grpo(base, tmp_path / "out", [callback], config)))
    assert callback.registered.version == 2
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), callback.registered.path
    )
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0, atol=2e-5)


def test_an_adapter_taken_out_of_the_base_and_trained_before_is_registered_as_it_is_merged(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    model = adapted(base, LoraConfig(**LORA, init_lora_weights="pissa"))
    agent = assert_registered_as_merged(model, base, tmp_path)
    assert agent.manifest.training["adapter"]["features"] == ["init_lora_weights='pissa'"]


# Quantised bases


def quantised(base: Path, config: LoraConfig, **options) -> PeftModel:
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**options))
    return get_peft_model(peft.prepare_model_for_kbit_training(model), config)


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_lora_over_a_quantised_model_belongs_to_the_original_base(zoo: Zoo, tmp_path, bits):
    base = zoo.base("llama")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="agent")
    trainer = train(grpo(quantised(base, LoraConfig(**LORA), **{bits: True}), tmp_path / "out", [callback]))
    assert callback.error is None
    assert callback.registered.manifest.base_model.name == str(base)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(loaded, callback.registered.path)
    trained = {name: tensor for name, tensor in trainer.model.named_parameters() if "lora_" in name}
    assert any(tensor.abs().max() > 0 for name, tensor in trained.items() if "lora_B" in name)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.named_parameters() if "lora_" in name)
    merged = rounded(merged_by_peft(loaded, tmp_path / "merged"), base)
    assert_same_weights(restored_weights(tmp_path / "registry", "agent", tmp_path / "back"), merged)


def test_an_adapter_that_is_merged_is_refused_over_quantised_weights(zoo: Zoo, tmp_path):
    base = zoo.base("llama")
    model = quantised(base, LoraConfig(**LORA, use_dora=True), load_in_4bit=True)
    live = LiveRegistration(registry=AgentRegistry(tmp_path / "registry"), agent="agent", **OPTIONS)
    with pytest.raises(UnsupportedModelError, match=r"DoRA: .* not done over quantised weights"):
        live.check(model, SINGLE)


def test_an_adapter_with_nan_is_not_registered_and_the_model_is_unharmed(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    model = adapted(base, LoraConfig(**LORA, use_dora=True))
    with torch.no_grad():
        model.get_base_model().model.layers[1].self_attn.v_proj.lora_B["first"].weight[3] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        register(model, base, tmp_path / "registry")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert not AgentRegistry(tmp_path / "registry").names()


# Adapters on disk

SAVED = {
    "DoRA": ("qwen2_tied", LoraConfig(**LORA, use_dora=True, bias="all")),
    "IA3": ("llama", peft.IA3Config(**TARGETS, feedforward_modules=[])),
    "VeRA": ("llama", peft.VeraConfig(**TARGETS)),
    "experts": ("qwen3_moe", LoraConfig(**{**LORA, **EXPERTS})),
    "tokens": ("qwen2_tied", LoraConfig(**LORA, trainable_token_indices=[3, 5])),
    "module in full": ("llama", LoraConfig(**LORA, use_dora=True, modules_to_save=["lm_head"])),
}


@pytest.mark.parametrize("case", SAVED)
def test_an_adapter_on_disk_is_registered_as_in_memory(zoo: Zoo, tmp_path, case):
    kind, config = SAVED[case]
    base = zoo.base(kind)
    model = adapted(base, config)
    model.save_pretrained(tmp_path / "saved")
    agent = register_agent(tmp_path / "registry", "saved", tmp_path / "saved" / "first")
    assert_same_deltas(agent, register(model, base, tmp_path / "registry", epsilon=1e-5))
    assert agent.manifest.training["adapter"]["type"] == str(config.peft_type).rpartition(".")[2]


def assert_same_deltas(agent: RegisteredAgent, other: RegisteredAgent) -> None:
    [records, other_records] = [{name: record.agent for name, record in a.tensors().items()} for a in (agent, other)]
    assert records == other_records
    assert any(records.values())


def test_two_processes_register_what_they_trained_together(zoo: Zoo, tmp_path):
    base, script = zoo.base("qwen2_untied"), Path(__file__).parent / "run_adapters.py"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"
    result = run_shell(
        f"{torchrun} {script} {tmp_path} {base}", {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    kinds = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert kinds == [{"dora": "full", "pissa": "lora"}, {"dora": None, "pissa": None}]
    for name in kinds[0]:
        merged = rounded(load_file(tmp_path / f"{name}.safetensors"), base)
        restored = restored_weights(tmp_path / "registry", name, tmp_path / f"{name}-back")
        if name == "dora":
            assert_same_weights(restored, merged)
        else:
            # PEFT adds to the base that is left what was taken out of it
            different = sum(int((restored[key] != merged[key]).sum()) for key in merged)
            assert different < 0.001 * sum(tensor.numel() for tensor in merged.values())


def test_a_callback_of_several_runs_takes_each_runs_own_initial_factors(zoo: Zoo, tmp_path):
    base, callback = zoo.base("qwen2_untied"), RAMRegistryCallback(tmp_path / "registry", agent="agent")
    for options in ({"r": 4}, {"r": 2}, {"r": 2, "target_modules": ["q_proj"]}):
        config = LoraConfig(**{**LORA, **options}, init_lora_weights="pissa")
        trainer = train(grpo(base, tmp_path / "out", [callback], config))
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(model, callback.registered.path)
        torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0, atol=2e-5)
