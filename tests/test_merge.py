"""Merging registered agents into a model directory: against the oracle, byte by byte, and what is refused."""

import json
import os
import re
import shutil

import pytest
import torch
from blake3 import blake3
from huggingface_hub import ModelCard
from models import CHAT_TEMPLATE, change_tensor, copy_model, merged_by_peft, read_model
from oracle import oracle_average, oracle_lambda, oracle_merge
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ram_trl import AgentRegistry, MergeConfig, merge_agents, register_agent
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
    StorageError,
)
from ram_trl.merging.model_card import model_card
from ram_trl.options import parse_config
from ram_trl.storage.manifest import FileRecord
from ram_trl.task_vector import open_task_vector


FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def full_delta(base, agent):
    """The task vector of a full fine-tune, from its files."""
    before, after = read_model(base), read_model(agent)
    return {name: (after[name].float() - before[name].float()).numpy() for name in after}


def lora_delta(base, adapter):
    """The task vector of an adapter, from PEFT, where it shows in the base's dtype."""
    before = read_model(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    deltas = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            name = name.removeprefix("base_model.model.") + ".weight"
            delta = module.get_delta_weight("default").detach()
            visible = (before[name].float() + delta).to(before[name].dtype) != before[name]
            deltas[name] = torch.where(visible, delta, 0.0).numpy()
    return deltas


def files_of(folder):
    """Everything in a folder, with its bytes and times."""
    return {path: path.is_file() and (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*")}


def merged(registry, folder, **options):
    report = merge_agents(registry, str(folder / "merged"), **options)
    return report, read_model(folder / "merged")


def three_agents(zoo, base, targets=LINEAR):
    """Two full fine-tunes and a LoRA adapter: name, model, task vector."""
    models = {"code": zoo.agent(base, seed=1, density=0.3), "math": zoo.agent(base, seed=2, density=0.4)}
    models["tool"] = zoo.adapter(base, seed=3, target_modules=targets)
    deltas = [full_delta(base, models["code"]), full_delta(base, models["math"]), lora_delta(base, models["tool"])]
    return zoo.registry(base, models), models, deltas


def shapes_of(base):
    return {name: tuple(tensor.shape) for name, tensor in read_model(base).items()}


def assert_counts(report, expected):
    assert report["total_parameters"] == sum(report["overlap_histogram"]) == sum(expected.histogram)
    assert report["overlap_histogram"] == expected.histogram
    for column in ("changed", "unique", "shared"):
        assert [row[column] for row in report["agents"]] == getattr(expected, column), column
    assert [row["density"] for row in report["agents"]] == [
        changed / report["total_parameters"] for changed in expected.changed
    ]
    assert [row["rho"] for row in report["agents"]] == [
        "inf" if rho == float("inf") else pytest.approx(rho, rel=1e-12) for rho in expected.rho
    ]
    assert [row["lambda"] for row in report["agents"]] == [
        None if factor is None else pytest.approx(factor, rel=1e-12) for factor in expected.factors
    ]


def assert_rounded_sum(found, base, task_vector, dtype, allowed=5):
    """`found` is base + task vector rounded once; a few elements may fall on the other side of a tie."""
    different = total = 0
    for name, before in read_model(base).items():
        exact = torch.from_numpy(before.double().numpy() + task_vector[name])
        assert found[name].dtype == dtype
        bits = (found[name].view(torch.int16).int() - exact.to(dtype).view(torch.int16).int()).abs()
        # a zero may have either sign
        bits[(found[name] == 0) & (exact.to(dtype) == 0)] = 0
        # where base and task vector cancel out, float32 leaves a rest of their size
        rest = (found[name].double() - exact).abs() <= 2.0**-22 * before.double().abs()
        assert ((bits <= 1) | rest).all(), name
        different += int((bits > 0).sum())
        total += found[name].numel()
    print(f"{different} of {total} elements are one place off")
    assert different <= allowed


# Against the oracle


@pytest.mark.parametrize(
    ("kind", "shards", "dtype", "targets"),
    [
        ("qwen2_tied", "5GB", BFLOAT16, LINEAR),
        ("llama", "20KB", BFLOAT16, LINEAR),
        ("qwen2_untied", "5GB", FLOAT16, ["q_proj", "lm_head", "down_proj"]),
        ("qwen3_moe", "30KB", BFLOAT16, ["q_proj", "o_proj"]),
    ],
    ids=["qwen2 tied", "llama sharded", "qwen2 untied float16", "qwen3 moe sharded"],
)
def test_full_and_lora_agents_merge_as_the_paper_says(zoo, tmp_path, kind, shards, dtype, targets):
    base = zoo.base(kind, dtype, shards)
    registry, _, deltas = three_agents(zoo, base, targets)
    weights = [1.0, 0.5, 2.0]
    expected = oracle_merge(
        shapes_of(base), deltas, method="ram_plus", r=0.15, alpha=1.5, epsilon=1e-5, weights=weights
    )
    report, found = merged(
        registry, tmp_path, r=0.15, alpha=1.5, weights={"math": 0.5, "tool@v1": 2}, max_shard_size="25KB"
    )
    assert_counts(report, expected)
    assert [row["weight"] for row in report["agents"]] == weights
    assert_rounded_sum(found, base, expected.merged, dtype)
    assert {1.0} < {*expected.factors, 1.0}, "the case must rescale"


def test_a_tensor_of_several_tiles_merges_as_the_paper_says(zoo, tmp_path):
    base = zoo.base("qwen2_wide")
    models = {"code": zoo.agent(base, seed=1, density=0.3), "math": zoo.agent(base, seed=2, density=0.4)}
    deltas = [full_delta(base, model) for model in models.values()]
    expected = oracle_merge(shapes_of(base), deltas, method="ram_plus", r=0.1, alpha=2.0, epsilon=1e-5)
    report, found = merged(zoo.registry(base, models), tmp_path)
    assert_counts(report, expected)
    assert_rounded_sum(found, base, expected.merged, BFLOAT16, allowed=30)


@pytest.mark.parametrize("method", ["ram", "ram_plus_soft", "average"])
def test_every_method_merges_as_the_paper_says(zoo, tmp_path, method):
    base = zoo.base("qwen2_untied")
    registry, _, deltas = three_agents(zoo, base)
    oracle_method = "ram" if method == "average" else method
    expected = oracle_merge(shapes_of(base), deltas, method=oracle_method, r=0.3, alpha=2.0, epsilon=5e-4)
    report, found = merged(registry, tmp_path, method=method, r=0.3, epsilon=5e-4)
    task_vector = expected.merged
    if method == "average":
        # epsilon is for the counts alone
        task_vector = oracle_average(shapes_of(base), deltas, [1.0, 1.0, 1.0])
        expected.factors = [None] * 3
    assert_counts(report, expected)
    assert_rounded_sum(found, base, task_vector, BFLOAT16)


def test_float32_agents_of_a_bfloat16_base_merge_as_the_paper_says(zoo, tmp_path):
    base = zoo.base("llama")
    models = {f"agent{seed}": zoo.agent(base, seed=seed, density=0.5, scale=1e-3, dtype=FLOAT32) for seed in range(4)}
    deltas = [full_delta(base, model) for model in models.values()]
    expected = oracle_merge(shapes_of(base), deltas, method="ram_plus", r=0.1, alpha=2.0, epsilon=1e-4)
    report, found = merged(zoo.registry(base, models), tmp_path, epsilon=1e-4)
    assert_counts(report, expected)
    assert_rounded_sum(found, base, expected.merged, BFLOAT16)


def test_a_float32_merge_is_the_paper_in_float32(zoo, tmp_path):
    base = zoo.base("llama")
    registry, _, deltas = three_agents(zoo, base)
    expected = oracle_merge(shapes_of(base), deltas, method="ram_plus", r=0.1, alpha=2.0, epsilon=1e-5)
    report, found = merged(registry, tmp_path, output_dtype="float32")
    assert_counts(report, expected)
    for name, before in read_model(base).items():
        exact = (before.double() + torch.from_numpy(expected.merged[name])).float()
        torch.testing.assert_close(found[name], exact, rtol=2e-7, atol=1e-9)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"
    # nothing is lost to rounding
    assert [row["effective_lambda"] for row in report["agents"]] == pytest.approx(expected.factors, rel=1e-5)


def test_where_nothing_is_unique_rho_is_written_as_inf_and_clips(zoo, tmp_path):
    base = zoo.base("llama")
    agent = zoo.agent(base, seed=1)
    registry = zoo.registry(base, {"code": agent, "math": agent})
    _, found = merged(registry, tmp_path, r=0.1, alpha=2.0)
    written = json.loads((tmp_path / "merged" / "merge_report.json").read_text())
    assert [row["rho"] for row in written["agents"]] == ["inf", "inf"]
    assert [row["lambda"] for row in written["agents"]] == [pytest.approx(1.2)] * 2
    assert [row["effective_lambda"] for row in written["agents"]] == [None, None]
    assert "| inf |" in (tmp_path / "merged" / "README.md").read_text()
    assert_rounded_sum(found, base, full_delta(base, agent), BFLOAT16)


def test_rho_is_not_clipped_by_the_soft_method(zoo):
    base = zoo.base("llama")
    agent = zoo.agent(base, seed=1)
    report = merge_agents(zoo.registry(base, {"code": agent, "math": agent}), None, method="ram_plus_soft", r=0.4)
    assert [row["lambda"] for row in report["agents"]] == [oracle_lambda("ram_plus_soft", float("inf"), 0.4, 0)] * 2


# One agent alone


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2_tied", BFLOAT16),
        ("qwen2_wide", BFLOAT16),
        ("llama", FLOAT16),
        ("llama", FLOAT32),
        ("qwen3_moe", BFLOAT16),
    ],
)
def test_one_full_agent_without_rescaling_and_epsilon_comes_back(zoo, tmp_path, kind, dtype):
    base = zoo.base(kind, dtype)
    agent = zoo.agent(base, seed=1)
    report, found = merged(zoo.registry(base, {"math": agent}), tmp_path, r=0.0, epsilon=0.0)
    expected = read_model(agent)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)), name
    assert report["agents"][0]["effective_lambda"] == 1.0


def test_a_float32_agent_alone_comes_back_in_float32_over_a_bfloat16_base(zoo, tmp_path):
    base = zoo.base("llama")
    agent = zoo.agent(base, seed=1, scale=1e-6, dtype=FLOAT32)
    registry = zoo.registry(base, {"math": agent})
    _, found = merged(registry, tmp_path, r=0.0, epsilon=0.0, output_dtype="float32")
    assert all(torch.equal(found[name], tensor) for name, tensor in read_model(agent).items())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2_tied", {"target_modules": LINEAR, "use_rslora": True}),
        ("llama_wide", {"target_modules": ["q_proj", "lm_head"], "rank_pattern": {"q_proj": 2}}),
        ("qwen2_untied", {"modules_to_save": ["lm_head"], "bias": "all"}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    ],
)
def test_one_lora_agent_without_rescaling_and_epsilon_is_what_peft_merges(zoo, tmp_path, kind, options):
    base = zoo.base(kind)
    adapter = zoo.adapter(base, **options)
    _, found = merged(zoo.registry(base, {"math": adapter}), tmp_path, r=0.0, epsilon=0.0)
    expected = merged_by_peft(base, adapter, tmp_path / "by_peft")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), f"{name}: {int((found[name] != tensor).sum())} elements differ"


def test_a_negative_zero_of_the_base_stays_one_where_no_agent_changed_it(zoo, tmp_path):
    base = tmp_path / "base"
    copy_model(zoo.base("qwen2_untied"), base)
    change_tensor(base, "lm_head.weight", lambda tensor: tensor.index_fill(1, torch.arange(8), -0.0))
    agent = tmp_path / "agent"
    copy_model(base, agent)
    change_tensor(agent, "lm_head.weight", lambda tensor: tensor.index_fill(1, torch.arange(8, 16), 0.5))
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(agent), base_model=str(base))
    _, found = merged(registry, tmp_path)
    assert torch.equal(
        found["lm_head.weight"].view(torch.int16), read_model(agent)["lm_head.weight"].view(torch.int16)
    )


# The directory that is written


@pytest.fixture(scope="module")
def published(zoo, tmp_path_factory):
    """One merge for all tests that only look at it: its directory, its report, its base."""
    base = zoo.base("llama", shards="20KB")
    registry, _, _ = three_agents(zoo, base)
    folder = tmp_path_factory.mktemp("published")
    progress = []
    report = merge_agents(
        registry,
        str(folder / "new" / "my-merge"),
        max_shard_size="30KB",
        weights={"code": 1 / 3},
        progress=lambda *state: progress.append(state),
    )
    return folder / "new" / "my-merge", report, base, registry, progress


def test_a_merged_model_loads_in_transformers_and_generates(published):
    path, _, _, _, _ = published
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.dtype == BFLOAT16
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, read_model(path)[name]), name
    assert tokenizer.chat_template == CHAT_TEMPLATE
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]) == "u:ab="
    output = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert output.shape[1] == inputs["input_ids"].shape[1] + 3


def test_a_merged_model_has_the_tensors_and_files_of_its_base(published):
    path, _, base, _, _ = published
    before, after = read_model(base), read_model(path)
    assert set(after) == set(before)
    assert all(after[name].shape == before[name].shape and after[name].dtype == BFLOAT16 for name in before)
    kept = {file.name for file in base.iterdir() if not file.name.startswith("model")}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= kept
    for name in kept - {"config.json"}:
        assert (path / name).read_bytes() == (base / name).read_bytes(), name
    assert json.loads((path / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    written = {file.name for file in path.iterdir() if not file.name.startswith("model")}
    assert written == kept | {"README.md", "merge_report.json"}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_shards_of_a_merged_model_are_as_large_as_asked_for_and_indexed(published):
    path, _, base, _, _ = published
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 1
    assert all(sum(t.nbytes for t in load_file(path / file).values()) <= 30_000 for file in files)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in files for name in load_file(path / file)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_model(base).values())


def test_the_report_has_all_its_fields_and_is_what_was_returned(published):
    path, report, base, registry, _ = published
    assert json.loads((path / "merge_report.json").read_text()) == report
    fields = "method r alpha epsilon seed base_model total_parameters agents overlap_histogram rounding output_dtype"
    assert set(fields.split()) <= set(report)
    columns = "name version kind changed shared unique density rho lambda effective_lambda weight".split()
    columns.append("hidden_update")
    assert [list(row) for row in report["agents"]] and all(set(columns) <= set(row) for row in report["agents"])
    assert [(row["name"], row["version"], row["kind"]) for row in report["agents"]] == [
        ("code", 1, "full"),
        ("math", 1, "full"),
        ("tool", 1, "lora"),
    ]
    recorded = registry.get("code").manifest.base_model
    assert report["base_model"] == {"name": str(base.resolve()), "revision": None, "digest": recorded.digest}
    assert report["total_parameters"] == sum(tensor.numel() for tensor in read_model(base).values())
    assert sum(report["overlap_histogram"]) == report["total_parameters"]
    assert sum(row["unique"] for row in report["agents"]) == report["overlap_histogram"][1]
    assert all(row["effective_lambda"] == pytest.approx(row["lambda"], rel=0.1) for row in report["agents"])


def test_the_model_card_is_one_that_the_hub_reads(published):
    path, report, *_ = published
    card = ModelCard.load(path / "README.md")
    # the Hub would refuse a card that names a directory
    assert card.data.base_model is None
    assert {"merge", "ram"} <= set(card.data.tags)
    assert card.data.library_name == "transformers"
    for row in report["agents"]:
        line = f"| {row['name']}@v1 | {row['kind']} | {row['changed']:,} | {row['density']:.2%} |"
        assert line in card.text
        assert f"| {row['lambda']:.4f} | {row['effective_lambda']:.4f} |" in card.text
    assert "# my-merge\n" in card.text


def test_the_model_card_names_a_base_of_the_hub(published):
    _, report, *_ = published
    base_model = {"name": "Qwen/Qwen2.5-0.5B-Instruct", "revision": "1234abc", "digest": "00"}
    card = ModelCard(model_card({**report, "base_model": base_model}, "my-merge"))
    assert card.data.base_model == ["Qwen/Qwen2.5-0.5B-Instruct"]
    assert card.data.to_dict()["base_model_relation"] == "merge"
    assert "`Qwen/Qwen2.5-0.5B-Instruct` at revision `1234abc`" in card.text


def test_the_command_on_the_model_card_gives_the_same_weights(published, tmp_path):
    path, _, _, registry, _ = published
    command = re.search(r"accelerate launch recipes/merge.py (.+)", (path / "README.md").read_text())[1]
    words = command.replace("REGISTRY", str(registry.path)).replace("OUTPUT", str(tmp_path / "again")).split()
    merge_agents(**parse_config(MergeConfig, words).merge_arguments())
    found, expected = read_model(tmp_path / "again"), read_model(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_progress_ends_at_the_whole_model_in_every_stage(published):
    _, report, base, registry, progress = published
    model = sum(tensor.nbytes for tensor in read_model(base).values())
    agents = [registry.get(row["name"]) for row in report["agents"]]
    files = sum(file.size for agent in agents for file in agent.manifest.files.values())
    for doing, total in (("check", files), ("probe", model), ("merge", model)):
        steps = [(done, of) for what, done, of in progress if what == doing]
        assert steps == sorted(steps) and steps[-1] == (total, total)


def test_the_base_may_hold_the_tied_output_head_twice(zoo, tmp_path):
    base = zoo.base("qwen2_tied", stored_head=True)
    agents = {"code": zoo.agent(base, seed=1), "math": zoo.agent(base, seed=1, density=0.3)}
    for name, agent in agents.items():
        copy_model(agent, tmp_path / name)
        embedding = read_model(agent)["model.embed_tokens.weight"]
        change_tensor(tmp_path / name, "lm_head.weight", lambda tensor, embedding=embedding: embedding.clone())
    models = {name: tmp_path / name for name in agents}
    report, found = merged(zoo.registry(base, models), tmp_path)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], read_model(base)["lm_head.weight"])
    assert report["total_parameters"] == sum(t.numel() for n, t in found.items() if n != "lm_head.weight")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_output_dtype_holds_for_weights_and_configuration(zoo, tmp_path, dtype):
    base = zoo.base("qwen2_tied")
    _, found = merged(zoo.registry(base, {"math": zoo.agent(base, seed=1)}), tmp_path, output_dtype=dtype)
    assert {tensor.dtype for tensor in found.values()} == {getattr(torch, dtype)}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == getattr(torch, dtype)


def test_the_output_directory_may_exist_if_it_is_empty(zoo, tmp_path):
    base = zoo.base("qwen2_tied")
    (tmp_path / "merged").mkdir()
    merged(zoo.registry(base, {"math": zoo.agent(base, seed=1)}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


# Choice of agents and options


def test_agents_are_merged_in_the_order_and_versions_that_were_asked_for(zoo, tmp_path):
    base = zoo.base("qwen2_untied")
    registry = AgentRegistry(tmp_path / "registry")
    for name, seed in (("math", 1), ("math", 2), ("code", 3)):
        register_agent(registry, name, str(zoo.agent(base, seed=seed)), base_model=str(base))
    latest = merge_agents(registry, None)
    assert [(row["name"], row["version"]) for row in latest["agents"]] == [("code", 1), ("math", 2)]
    chosen = merge_agents(registry, None, agents=["math@v1", "code"])
    assert [(row["name"], row["version"]) for row in chosen["agents"]] == [("math", 1), ("code", 1)]
    versions = merge_agents(registry, None, agents=["math@v1", "math"], weights={"math": 2, "math@v1": 3})
    assert [row["weight"] for row in versions["agents"]] == [3.0, 2.0]


def test_the_official_preset_is_the_authors_release(zoo):
    assert MergeConfig(registry="r", output_dir="o").merge_arguments().items() >= {"r": 0.1, "alpha": 2.0}.items()
    arguments = MergeConfig(registry="r", output_dir="o", preset="official").merge_arguments()
    assert (arguments["r"], arguments["alpha"]) == (0.2, 1.0)
    arguments = MergeConfig(registry="r", output_dir="o", preset="official", alpha=1.5).merge_arguments()
    assert (arguments["r"], arguments["alpha"]) == (0.2, 1.5)
    base = zoo.base("llama")
    registry, _, _ = three_agents(zoo, base)
    report = merge_agents(registry, None, r=0.2, alpha=1.0)
    for row in report["agents"]:
        assert row["lambda"] == pytest.approx(1 + 0.2 * min(row["rho"], 1))


def test_a_probe_writes_nothing_and_counts_what_the_merge_counts(zoo, tmp_path):
    base = zoo.base("llama")
    registry, _, _ = three_agents(zoo, base)
    before = files_of(registry.path), files_of(base)
    probe = merge_agents(registry, None)
    assert (files_of(registry.path), files_of(base)) == before
    report, _ = merged(registry, tmp_path)
    for row in report["agents"]:
        del row["effective_lambda"]
    assert probe == report


def test_a_merge_changes_neither_the_registry_nor_the_base(zoo, tmp_path):
    base, registry = tmp_path / "base", tmp_path / "registry"
    copy_model(zoo.base("llama"), base)
    shutil.copytree(three_agents(zoo, zoo.base("llama"))[0].path, registry)
    before = files_of(base), files_of(registry)
    merged(str(registry), tmp_path, base_model=str(base))
    assert (files_of(base), files_of(registry)) == before
    assert {path.name for path in tmp_path.iterdir()} == {"base", "registry", "merged"}


def test_stochastic_rounding_depends_on_the_seed_alone_and_keeps_more_of_lambda(zoo, tmp_path):
    base = zoo.base("qwen2_wide")
    agents = {name: zoo.agent(base, seed=seed, scale=3e-4) for name, seed in (("code", 1), ("math", 2))}
    registry, runs = zoo.registry(base, agents), {}
    for run, options in {
        "nearest": {"rounding": "nearest"},
        "first": {"rounding": "stochastic", "seed": 1},
        "again": {"rounding": "stochastic", "seed": 1, "max_shard_size": "100KB"},
        "other": {"rounding": "stochastic", "seed": 2},
    }.items():
        runs[run] = merged(registry, tmp_path / run, r=0.2, **options)
    first, again, other, nearest = (runs[run][1] for run in ("first", "again", "other", "nearest"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    for name in first:
        steps = (first[name].view(torch.int16).int() - nearest[name].view(torch.int16).int()).abs()
        assert steps.max() <= 1
    for stochastic, rounded in zip(runs["first"][0]["agents"], runs["nearest"][0]["agents"], strict=True):
        nominal = stochastic["lambda"]
        assert abs(stochastic["effective_lambda"] - nominal) < abs(rounded["effective_lambda"] - nominal)
        assert stochastic["effective_lambda"] == pytest.approx(nominal, abs=2e-3)


def test_stochastic_rounding_leaves_unchanged_parameters_alone(zoo, tmp_path):
    base = zoo.base("llama")
    agents = {name: zoo.agent(base, seed=seed) for name, seed in (("code", 1), ("math", 2))}
    _, found = merged(zoo.registry(base, agents), tmp_path, rounding="stochastic")
    changed = [full_delta(base, agent) for agent in agents.values()]
    for name, before in read_model(base).items():
        untouched = torch.from_numpy((changed[0][name] == 0) & (changed[1][name] == 0))
        assert untouched.any()
        assert torch.equal(found[name][untouched], before[untouched])


def test_a_merge_of_agents_that_share_nearly_all_warns_with_the_cure(zoo, tmp_path, caplog):
    base = zoo.base("llama")
    dense = {
        name: zoo.agent(base, seed=seed, density=0.99, dtype=FLOAT32) for name, seed in (("code", 1), ("math", 2))
    }
    report, _ = merged(zoo.registry(base, dense), tmp_path)
    assert len(report["warnings"]) == 2
    for row, warning in zip(report["agents"], report["warnings"], strict=True):
        assert row["shared"] / row["changed"] > 0.95
        assert re.match(rf"\d+\.\d% of the changes of agent {row['name']} are shared .* raise --epsilon", warning)
        assert warning in caplog.text
        assert warning in (tmp_path / "merged" / "README.md").read_text()


def test_a_merge_in_the_papers_regime_warns_of_nothing(zoo, caplog):
    registry, _, _ = three_agents(zoo, zoo.base("llama"))
    assert merge_agents(registry, None)["warnings"] == []
    assert caplog.text == ""


def test_an_agent_that_changed_nothing_is_said(zoo, caplog):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"idle": base, "math": zoo.agent(base, seed=1)})
    report = merge_agents(registry, None)
    assert "agent idle changed nothing by more than epsilon=1e-05" in caplog.text
    assert report["agents"][0]["rho"] == 0.0 and report["agents"][0]["lambda"] == 1.0


@pytest.mark.parametrize(("step", "said"), [(0, "0 of 1,500 steps"), (1200, "1,200 of 1,500 steps"), (1500, None)])
def test_an_agent_whose_training_stopped_early_is_said(zoo, tmp_path, caplog, step, said):
    base, registry = zoo.base("llama"), AgentRegistry(tmp_path / "registry")
    for name, seed, training in (("code", 1, {}), ("math", 2, {"step": step, "max_steps": 1500})):
        register_agent(registry, name, str(zoo.agent(base, seed=seed)), base_model=str(base), training=training)
    report, _ = merged(registry, tmp_path)
    if said is None:
        assert report["warnings"] == []
    else:
        [warning] = report["warnings"]
        assert warning.startswith(f"agent math@v1 was registered after {said} of its training")
        assert warning in caplog.text
        assert warning in (tmp_path / "merged" / "README.md").read_text()
        assert json.loads((tmp_path / "merged" / "merge_report.json").read_text())["warnings"] == [warning]


# What is refused


def assert_refused(folder, error_type, message, registry, output="new/merged", **options):
    """The merge fails with one line that matches, and the folder is as it was: no output, no hidden directory."""
    before = files_of(folder)
    with pytest.raises(error_type, match=message) as caught:
        merge_agents(registry, f"{folder}/{output}", **options)
    assert isinstance(caught.value, RamTrlError)
    assert "\n" not in str(caught.value)
    assert files_of(folder) == before


@pytest.fixture
def own(zoo, tmp_path):
    """A base, two agents and their registry that a test may damage."""
    copy_model(zoo.base("qwen2_tied", stored_head=True), tmp_path / "base")
    registry = AgentRegistry(tmp_path / "registry")
    for seed, name in enumerate(("code", "math")):
        agent = zoo.agent(zoo.base("qwen2_tied"), seed=seed)
        register_agent(registry, name, str(agent), base_model=str(tmp_path / "base"))
    return registry


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_base_with_one_weight_changed_is_refused_and_the_tensor_named(own, tmp_path, name):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[5] += 1e-3
        return tensor

    change_tensor(tmp_path / "base", name, change)
    message = rf"the weights of tensor '{re.escape(name)}' differ.*--base_model"
    assert_refused(tmp_path, BaseModelError, message, own)


def test_a_wrong_base_over_which_an_agent_seems_to_have_diverged_is_called_wrong(own, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensor(tmp_path / "base", name, lambda tensor: torch.full_like(tensor, torch.inf))
    for epsilon in (1e-5, 0.0):
        message = f"the weights of tensor '{re.escape(name)}' differ"
        assert_refused(tmp_path, BaseModelError, message, own, agents=["code"], epsilon=epsilon)


@pytest.mark.parametrize("damage", ["old names", "ends of another kind", "ends of fewer tiles"])
def test_a_registered_file_of_another_layout_is_refused_and_the_agent_named(own, damage):
    agent = own.get("code")
    path = agent.path / "delta.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.startswith("ends/"))
    if damage == "old names":
        tensors = {
            key.replace("delta/", "codes/").replace("ends/", "frames/"): value for key, value in tensors.items()
        }
    else:
        tensors[name] = tensors[name].float() if damage == "ends of another kind" else tensors[name][:-1]
    save_file(tensors, path)
    base = torch.zeros(10, dtype=torch.bfloat16)
    with pytest.raises(CorruptedFileError, match=r"agent code@v1"):
        open_task_vector(agent).update(0, name.removeprefix("ends/"), 0, base)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tied_to", "model.norm.weight", "ties .* to 'model.norm.weight', which is not the same tensor"),
        ("tied_to", "nowhere", "which is not the same tensor"),
        ("tied_to", ["x"], "tied_to cannot be"),
        ("base", "0" * 64, "records another base in its manifest"),
        ("stored", None, "does not hold the tensors that it records"),
    ],
)
def test_records_that_contradict_each_other_are_refused_though_the_digests_fit(own, tmp_path, field, value, message):
    agent = own.get("math")
    records = json.loads((agent.path / "tensors.json").read_text())
    records["model.layers.0.mlp.up_proj.weight"][field] = value
    (agent.path / "tensors.json").write_text(json.dumps(records))
    manifest = agent.manifest
    data = (agent.path / "tensors.json").read_bytes()
    manifest.files["tensors.json"] = FileRecord(size=len(data), blake3=blake3(data).hexdigest())
    (agent.path / "manifest.json").write_text(json.dumps(manifest.to_dict()))
    assert_refused(tmp_path, CorruptedFileError, message, own)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_tiles_with_small_changes_only_are_rounded_like_all_others_by_every_engine(zoo, tmp_path, rounding):
    base = zoo.base("qwen2_wide")
    models = {"small": zoo.agent(base, seed=1, scale=1e-7), "math": zoo.agent(base, seed=2, density=1e-4)}
    arguments = {"rounding": rounding, "output_dtype": "float16", "seed": 3}
    for engine in ("compiled", "eager"):
        merge_agents(zoo.registry(base, models), str(tmp_path / engine), engine=engine, **arguments)
    compiled, eager = read_model(tmp_path / "compiled"), read_model(tmp_path / "eager")
    assert all(torch.equal(compiled[name], tensor) for name, tensor in eager.items())


def test_a_changed_tensor_that_no_agent_touched_is_noticed_too(zoo, tmp_path):
    base, name = tmp_path / "base", "model.layers.0.mlp.up_proj.weight"
    copy_model(zoo.base("llama"), base)
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "tool", str(zoo.adapter(zoo.base("llama"))), base_model=str(base))
    change_tensor(base, name, lambda tensor: tensor * 1.01)
    assert_refused(tmp_path, BaseModelError, re.escape(name), registry)


def test_a_base_with_other_tensors_or_shapes_is_refused(own, zoo, tmp_path):
    message = "is not the base of agent code@v1: it lacks tensor 'lm_head.weight'"
    assert_refused(tmp_path, BaseModelError, message, own, base_model=str(zoo.base("qwen2_tied")))
    message = (
        r"is not the base of agent code@v1: tensor 'lm_head.weight' is F16 \[64, 32\], recorded was BF16 \[64, 32\]"
    )
    assert_refused(
        tmp_path, BaseModelError, message, own, base_model=str(zoo.base("qwen2_tied", FLOAT16, stored_head=True))
    )


def test_a_base_that_is_gone_is_refused_and_may_be_named_anew(own, tmp_path):
    (tmp_path / "base").rename(tmp_path / "moved")
    assert_refused(tmp_path, BaseModelError, r"the base of agent code@v1 cannot be opened.*--base_model", own)
    merged(own, tmp_path, base_model=str(tmp_path / "moved"))


def test_agents_of_different_bases_are_refused(own, zoo, tmp_path):
    other = zoo.base("llama")
    register_agent(own, "tool", str(zoo.agent(other, seed=1)), base_model=str(other))
    message = "agents code@v1 and tool@v1 have different base models: .* and .*--agents"
    assert_refused(tmp_path, IncompatibleAgentError, message, own)
    assert_refused(tmp_path, IncompatibleAgentError, "different base models", own, agents=["tool", "math"])
    merged(own, tmp_path, agents=["tool"])


DAMAGES = {
    "last byte changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "middle byte changed": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
    "a byte of the header changed": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "cut short": lambda data: data[:-10],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "missing": None,
}


@pytest.mark.parametrize(
    ("file_name", "damage"),
    [
        (file_name, damage)
        for file_name in ("delta.safetensors", "tensors.json", "manifest.json")
        for damage in DAMAGES
        # the manifest holds the digests of the others and has none itself
        if file_name != "manifest.json" or "changed" not in damage
    ],
)
def test_a_damaged_file_of_an_agent_is_refused_and_named(own, tmp_path, file_name, damage):
    path = own.get("math").path / file_name
    if DAMAGES[damage] is None:
        path.unlink()
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert_refused(tmp_path, (CorruptedFileError, StorageError), f"math.*{re.escape(file_name)}", own)


@pytest.mark.parametrize("file_name", ["adapter_model.safetensors", "adapter_map.json", "adapter_config.json"])
def test_a_damaged_adapter_is_refused_and_named(zoo, tmp_path, file_name):
    registry = AgentRegistry(tmp_path / "registry")
    agent = register_agent(registry, "tool", str(zoo.adapter(zoo.base("llama"))))
    path = agent.path / file_name
    path.write_bytes(DAMAGES["middle byte changed"](path.read_bytes()))
    assert_refused(tmp_path, CorruptedFileError, re.escape(file_name), registry)


def test_a_file_that_was_put_beside_an_agents_own_is_refused(own, tmp_path):
    (own.get("math").path / "more.safetensors").write_bytes(b"")
    assert_refused(tmp_path, CorruptedFileError, "agent math@v1 has an unrecorded file more.safetensors", own)


def test_a_newer_format_is_refused_with_the_cure(own, tmp_path):
    manifest = own.get("math").path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 99'))
    assert_refused(tmp_path, NotImplementedError, "format version 99.*pip install --upgrade", own)


def test_what_is_not_registered_is_refused(own, tmp_path):
    assert_refused(tmp_path, AgentNotFoundError, r"no agent 'tool' in .*; it holds: code, math", own, agents=["tool"])
    assert_refused(tmp_path, AgentNotFoundError, "no version v7; it has: v1", own, agents=["math@v7"])
    assert_refused(tmp_path, AgentNotFoundError, "is not a registry", str(tmp_path / "nothing"))
    assert_refused(tmp_path, InvalidNameError, "is not a name for an agent", own, agents=["../code"])
    assert_refused(tmp_path, InvalidNameError, "does not name a version", own, agents=["math@2"])
    assert_refused(tmp_path, ConfigError, "agent math@v1 is named twice", own, agents=["math", "math@v1"])
    assert_refused(tmp_path, ConfigError, "no agent", own, agents=[])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method='best' is not one of ram_plus"),
        ({"rounding": "up"}, "rounding='up' is not one of"),
        ({"output_dtype": "int8"}, "output_dtype='int8' is not one of"),
        ({"r": -0.1}, "r=-0.1 must be"),
        ({"alpha": float("inf")}, "alpha=inf must be"),
        ({"epsilon": float("nan")}, "epsilon=nan must be"),
        ({"weights": {"math": 0.0}}, "weight math=0.0 must be"),
        ({"weights": {"tool": 1.0}}, "--weights names 'tool', which is not merged; merged are: code, code@v1, math"),
        ({"max_shard_size": "0GB"}, "'0GB' is not a size"),
        ({"max_shard_size": "lots"}, "'lots' is not a size"),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_refused(own, tmp_path, options, message):
    assert_refused(tmp_path, ConfigError, re.escape(message), own, **options)


def test_an_output_directory_that_holds_something_is_refused(own, tmp_path):
    assert_refused(tmp_path, OutputExistsError, "base exists and is not an empty directory", own, output="base")
    assert_refused(tmp_path, OutputExistsError, "not an empty directory", own, output="base/config.json")
    assert_refused(tmp_path, (OutputExistsError, StorageError), "config.json", own, output="base/config.json/merged")


@pytest.mark.parametrize("target", ["empty", "nowhere"], ids=["link to an empty directory", "dangling link"])
def test_an_output_directory_that_is_a_link_is_refused_before_any_work(own, tmp_path, target):
    (tmp_path / "empty").mkdir()
    (tmp_path / "merged").symlink_to(tmp_path / target)
    done = []
    for output in ("merged", "merged/", "merged/."):
        message = "merged is a link or a mount point: choose a directory inside of it"
        options = {"progress": lambda *numbers: done.append(numbers)}
        assert_refused(tmp_path, OutputExistsError, message, own, output=output, **options)
    assert done == []
    assert (tmp_path / "merged").readlink() == tmp_path / target
    # as the message says
    if target == "empty":
        merge_agents(own, str(tmp_path / "merged" / "inside"))
        assert read_model(tmp_path / "empty" / "inside")


def test_an_epsilon_below_that_of_a_snapshot_is_refused(zoo, tmp_path):
    base = zoo.base("llama")
    registry = AgentRegistry(tmp_path / "registry")
    agent = zoo.agent(base, seed=1, scale=2e-5, dtype=FLOAT32)
    register_agent(registry, "math", str(agent), base_model=str(base))
    message = "agent math@v1 was stored without changes of at most 1e-05: merge with --epsilon 1e-05 or more"
    assert_refused(tmp_path, ConfigError, message, registry, epsilon=1e-6)
    assert_refused(tmp_path, ConfigError, message, registry, epsilon=0.0)
    merged(registry, tmp_path, epsilon=1e-5)


def test_values_beyond_the_output_dtype_are_refused_and_the_tensor_named(zoo, tmp_path):
    base = tmp_path / "base"
    copy_model(zoo.base("llama"), base)
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensor(base, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), 1e6))
    registry = AgentRegistry(tmp_path / "registry")
    agent = tmp_path / "agent"
    copy_model(base, agent)
    change_tensor(agent, "model.norm.weight", lambda tensor: tensor * 2)
    register_agent(registry, "math", str(agent), base_model=str(base))
    assert_refused(tmp_path, NonFiniteError, re.escape(name), registry, output_dtype="float16")


@pytest.mark.parametrize("stage", ["merge_tensors", "copy_model_files", "write_json", "model_card"])
@pytest.mark.parametrize("error", [StorageError("no space left on device"), OSError("gone"), KeyboardInterrupt()])
def test_a_merge_that_fails_on_the_way_leaves_nothing_behind(own, tmp_path, monkeypatch, stage, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(f"ram_trl.merging.merge.{stage}", fail)
    before = files_of(tmp_path)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError
    with pytest.raises(expected):
        merge_agents(own, str(tmp_path / "new" / "merged"))
    assert files_of(tmp_path) == before


def test_an_output_inside_the_registry_or_in_the_place_of_the_working_directory_is_refused(zoo, tmp_path, monkeypatch):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"math": zoo.agent(base, seed=1)})
    before = sorted(registry.path.rglob("*"))
    with pytest.raises(ConfigError, match="is inside the registry"):
        merge_agents(registry, registry.path / "agents" / "math" / "v000009")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputExistsError, match="is the working directory"):
        merge_agents(registry, ".")
    assert sorted(registry.path.rglob("*")) == before


def test_a_base_that_is_written_to_during_the_merge_is_noticed_before_publication(zoo, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(zoo.base("llama"), base)
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(zoo.agent(zoo.base("llama"), seed=1)), base_model=str(base))
    weights = base / "model.safetensors"

    def write(doing, done, total):
        if doing == "merge" and done == total:
            with open(weights, "r+b") as file:
                file.seek(-2, os.SEEK_END)
                file.write(b"\x01\x02")

    with pytest.raises(CorruptedFileError, match="was changed while it was being read"):
        merge_agents(registry, tmp_path / "merged", progress=write)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "registry"]


@pytest.mark.parametrize(
    "options", [{"r": 1e38}, {"weights": {"math": 1e39}}, {"weights": {"math": 1e-46}}, {"alpha": 1e7}]
)
def test_numbers_that_float32_arithmetic_cannot_carry_are_refused(zoo, tmp_path, options):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"math": zoo.agent(base, seed=1)})
    with pytest.raises(ConfigError, match="must be a number from"):
        merge_agents(registry, tmp_path / "merged", **options)
