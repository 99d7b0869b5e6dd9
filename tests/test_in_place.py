"""`apply_merge`, `apply_agent`: a loaded base is another model for a while, and then the base again, bit for bit."""

import _thread
import signal

import pytest
import torch
from accelerate import dispatch_model
from models import change_tensor, copy_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

from ram_trl import AgentRegistry, apply_agent, apply_merge, merge_agents, register_agent, restore_agent
from ram_trl.errors import BaseModelError, ConfigError, CorruptedFileError, UnsupportedModelError
from ram_trl.evaluating.in_place import _HeldModel, apply_directory
from ram_trl.evaluating.rows import make_rows
from ram_trl.storage.base_model import open_recorded_base
from ram_trl.storage.tensor_file import digest_piece


# Tied and untied, fused experts, tensors of several tiles, transposed linear layers.
KINDS = ["qwen2_tied", "qwen2_wide", "llama", "qwen3_moe", "gpt2"]
DTYPES = [torch.bfloat16, torch.float32]


def load(path, dtype=torch.bfloat16, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


def bits(model):
    """A copy of everything that the model holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(model, expected):
    held = model.state_dict()
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def registry_of(zoo, kind):
    base = zoo.base(kind)
    models = {"code": zoo.agent(base, seed=1), "math": zoo.agent(base, seed=2)}
    if kind != "gpt2":
        models["tool"] = zoo.adapter(base, seed=3)
    return base, zoo.registry(base, models)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_in_memory_is_the_merge_on_disk(zoo, tmp_path, kind, dtype):
    base, registry = registry_of(zoo, kind)
    written = merge_agents(registry, str(tmp_path / "merged"), r=0.3)
    model, merged = load(base, dtype), bits(load(tmp_path / "merged", dtype))
    before = bits(model)
    with apply_merge(model, registry, r=0.3) as report:
        assert_same(model, merged)
        assert report == written
    assert_same(model, before)
    with apply_directory(model, registry.get("code"), str(tmp_path / "merged")):
        assert_same(model, merged)
    assert_same(model, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_in_memory_is_the_restored_one(zoo, tmp_path, kind, dtype):
    base, registry = registry_of(zoo, kind)
    model = load(base, dtype)
    before = bits(model)
    for name in registry.names():
        restore_agent(registry, name, str(tmp_path / name))
        with apply_agent(model, registry, name) as agent:
            assert agent.name == name
            assert_same(model, bits(load(tmp_path / name, dtype)))
        assert_same(model, before)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "average"},
        {"method": "ties"},
        {"method": "resmerge"},
        {"output_dtype": "float32"},
        {"output_dtype": "float16", "weights": {"math": 0.5}},
        {"rounding": "stochastic", "seed": 7, "agents": ["math", "tool"]},
    ],
    ids=str,
)
def test_every_setting_of_a_merge_holds_in_memory(zoo, tmp_path, settings):
    base, registry = registry_of(zoo, "qwen2_tied")
    merge_agents(registry, str(tmp_path / "merged"), **settings)
    for dtype in DTYPES:
        model = load(base, dtype)
        before = bits(model)
        with apply_merge(model, registry, **settings):
            assert_same(model, bits(load(tmp_path / "merged", dtype)))
        assert_same(model, before)


def test_agents_that_ran_in_float32_over_a_base_in_16_bits(zoo, tmp_path):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"math": zoo.agent(base, seed=5, dtype=torch.float32)})
    restore_agent(registry, "math", str(tmp_path / "math"))
    for dtype in DTYPES:
        model = load(base, dtype)
        with apply_agent(model, registry, "math"):
            assert_same(model, bits(load(tmp_path / "math", dtype)))


def test_a_head_that_is_stored_and_tied(zoo, tmp_path):
    base = zoo.base("qwen2_tied", stored_head=True)
    agent = copy_model(base, tmp_path / "agent")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        change_tensor(agent, name, lambda tensor: tensor * 1.5)
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(agent), base_model=str(base))
    merge_agents(registry, str(tmp_path / "merged"))
    model = load(base)
    before = bits(model)
    with apply_merge(model, registry):
        assert_same(model, bits(load(tmp_path / "merged")))
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert_same(model, before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_base_is_back_after_an_exception(zoo, error):
    base, registry = registry_of(zoo, "qwen3_moe")
    model = load(base)
    before = bits(model)
    with pytest.raises(error), apply_merge(model, registry):
        assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
        raise error
    assert_same(model, before)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_one_wrong_value_is_found_and_everything_is_left_as_it_was(zoo, kind):
    base, registry = registry_of(zoo, kind)
    # at both ends of what is written: nothing is overwritten yet, or nearly everything
    for name in load(base).state_dict().keys() & {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"}:
        model = load(base)
        with torch.no_grad():
            model.state_dict()[name].view(-1)[-1] += 1
        before = bits(model)
        for context in (
            lambda model: apply_merge(model, registry),
            lambda model: apply_agent(model, registry, "math"),
        ):
            with pytest.raises(BaseModelError, match=f"not its base .*{name}.*load the base itself"):
                with context(model):
                    pytest.fail("applied to a model that is not the base")
            assert_same(model, before)


def test_minus_zero_is_not_zero(zoo, tmp_path):
    base = copy_model(zoo.base("llama"), tmp_path / "base")
    change_tensor(base, "model.norm.weight", lambda tensor: torch.zeros_like(tensor))
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(zoo.agent(base, seed=1)), base_model=str(base))
    model = load(base)
    with torch.no_grad():
        model.model.norm.weight.neg_()
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight"), apply_merge(model, registry):
        pass


def test_a_model_that_is_a_merge_already_is_refused(zoo):
    base, registry = registry_of(zoo, "qwen2_tied")
    model = load(base)
    before = bits(model)
    with apply_agent(model, registry, "math"):
        inside = bits(model)
        with pytest.raises(BaseModelError, match="load the base itself"), apply_merge(model, registry):
            pass
        assert_same(model, inside)
    assert_same(model, before)


def test_another_model_is_refused_by_name(zoo, tmp_path):
    _, registry = registry_of(zoo, "llama")
    for other, words in (
        (load(zoo.base("llama_wide")), "embed_tokens.*neither quantised nor resized"),
        (load(zoo.base("gpt2")), "transformer"),
        (AutoModel.from_pretrained(zoo.base("llama")), "AutoModelForCausalLM"),
    ):
        before = bits(other)
        with pytest.raises(UnsupportedModelError, match=words), apply_merge(other, registry):
            pass
        assert_same(other, before)


def test_a_directory_of_another_architecture_is_refused(zoo):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    with pytest.raises(UnsupportedModelError, match="is no model of the base"):
        with apply_directory(model, registry.get("math"), str(zoo.base("llama_wide"))):
            pass


def test_a_base_that_is_overwritten_meanwhile_cannot_be_given_back(zoo, tmp_path):
    base = copy_model(zoo.base("llama"), tmp_path / "base")
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(zoo.agent(base, seed=1)), base_model=str(base))
    model = load(base)
    with pytest.raises((BaseModelError, CorruptedFileError), match=r"cannot become the base again|changed"):
        with apply_merge(model, registry):
            # in place, so that the open file changes too
            file = base / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-4096:] = bytes(4096)
            with open(file, "r+b") as opened:
                opened.write(data)


def test_a_base_that_is_not_the_recorded_one_is_refused(zoo, tmp_path):
    base, registry = registry_of(zoo, "llama")
    other = copy_model(base, tmp_path / "other")
    change_tensor(other, "model.norm.weight", lambda tensor: tensor + 1)
    model = load(other)
    before = bits(model)
    with pytest.raises(BaseModelError, match=r"not the recorded base.*model\.norm\.weight"):
        with apply_merge(model, registry, base_model=str(other)):
            pass
    assert_same(model, before)


def test_the_row_of_the_base_is_of_the_recorded_base_or_of_none(zoo, tmp_path):
    base, registry = registry_of(zoo, "llama")
    other = copy_model(base, tmp_path / "other")
    change_tensor(other, "model.norm.weight", lambda tensor: tensor + 1)
    for path, is_recorded in ((base, True), (other, False)):
        rows, _ = make_rows(AgentRegistry(registry), None, [], str(path))
        assert rows[0].kind == "base"
        if is_recorded:
            with rows[0].apply(load(path)):
                pass
            assert rows[0].write(tmp_path / "unused") == path
        else:
            with pytest.raises(BaseModelError, match=r"not the recorded base.*model\.norm\.weight"):
                rows[0].apply(load(path)).__enter__()
            with pytest.raises(BaseModelError, match="not the recorded base"):
                rows[0].write(tmp_path / "unused")


def test_adapters_must_be_taken_off(zoo):
    base, registry = registry_of(zoo, "qwen2_tied")
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    for attached in (model, model.get_base_model()):
        with pytest.raises(UnsupportedModelError, match="adapters attached"), apply_merge(attached, registry):
            pass


def test_devices_of_accelerate(zoo, tmp_path):
    base, registry = registry_of(zoo, "llama")
    modules = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    placed = dispatch_model(load(base), dict.fromkeys(modules, "cpu"), force_hooks=True)
    assert len(placed.hf_device_map) == len(modules)
    before = bits(placed)
    with apply_merge(placed, registry):
        assert not torch.equal(placed.lm_head.weight, before["lm_head.weight"])
    assert_same(placed, before)
    places = {module: "disk" if module == "model.layers.1" else "cpu" for module in modules}
    offloaded = load(base, device_map=places, offload_folder=str(tmp_path / "offload"))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1.*is offloaded"):
        with apply_merge(offloaded, registry):
            pass


def test_mistakes_in_the_settings_touch_nothing(zoo):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    before = bits(model)
    with pytest.raises(ConfigError, match="method='rem'"), apply_merge(model, registry, method="rem"):
        pass
    assert_same(model, before)


def test_ctrl_c_while_the_base_is_given_back_is_heard_afterwards(zoo, monkeypatch):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    before = bits(model)
    pressed = []
    # what runs in the background of a shell ignores it
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def impatient(piece):
        # a user presses it again and again
        if len(pressed) < 3:
            pressed.append(1)
            _thread.interrupt_main()
        return digest_piece(piece)

    try:
        with pytest.raises(KeyboardInterrupt), apply_merge(model, registry):
            monkeypatch.setattr("ram_trl.evaluating.in_place.digest_piece", impatient)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(pressed) == 3
    assert_same(model, before)


def test_a_thread_that_is_late_changes_nothing(zoo):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    before = bits(model)
    agent = registry.get("math")
    held = _HeldModel(model, open_recorded_base(agent), agent, ["model.norm.weight"])
    changed = before["model.norm.weight"] + 1
    with held.restored():
        held.write("model.norm.weight", 0, changed)
        assert torch.equal(model.model.norm.weight, changed)
    assert_same(model, before)
    # as of a merge that a second Ctrl-C has left without waiting for its threads
    with pytest.raises(BaseModelError, match="becoming the base again"):
        held.write("model.norm.weight", 0, changed)
    assert_same(model, before)


def test_parameters_of_inference_mode_are_refused(zoo):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    with torch.inference_mode():
        # transformers loads in threads of its own, which are not in this mode
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
    before = bits(model)
    with pytest.raises(UnsupportedModelError, match=r"torch\.inference_mode"), apply_merge(model, registry):
        pass
    assert_same(model, before)


def test_quantised_parameters_are_refused_as_such(zoo):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    # as bitsandbytes holds them: of the same shape
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight' is quantised"), apply_merge(model, registry):
        pass


def test_a_parameter_of_a_compiled_layer_that_the_files_do_not_have(zoo):
    base, registry = registry_of(zoo, "llama")
    model = load(base)
    model.model.layers[0].register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    model.model.layers[0] = torch.compile(model.model.layers[0])
    with pytest.raises(UnsupportedModelError, match=r"no tensor 'model\.layers\.0\.extra'"):
        with apply_merge(model, registry):
            pass
