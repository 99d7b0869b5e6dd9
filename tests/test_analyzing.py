"""Comparing agents: every number against definitions over whole vectors, and what is refused."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch
from models import change_tensor, copy_model, read_model
from oracle import oracle_lambda, oracle_rho
from test_memory import write_model
from test_merge import full_delta, lora_delta
from tiles import computed_by

from ram_trl import AgentRegistry, analyze_agents, merge_agents, register_agent
from ram_trl.analyzing.analyze import _grid
from ram_trl.analyzing.places import Place, find_place
from ram_trl.errors import BaseModelError, ConfigError, NonFiniteError


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def flat(names, tensors):
    """Some tensors as one vector, zeros where there is none."""
    return np.concatenate([np.ravel(tensors[name]).astype(np.float64) for name in names])


def merged_delta(registry, base, folder, **options):
    """What a merge by RAM+ adds to the base, from its files."""
    merge_agents(registry, str(folder), **options)
    return full_delta(base, folder)


def whole_vectors(base, deltas, merged):
    names = sorted(merged)
    shapes = {name: merged[name].shape for name in names}
    vectors = [flat(names, {n: delta.get(n, np.zeros(shapes[n])) for n in names}) for delta in deltas]
    return names, shapes, np.array(vectors), flat(names, merged)


def active_beyond(vectors, epsilon):
    return np.abs(vectors) > float(np.float32(epsilon))


def assert_agents(data, vectors, applied):
    """Figures 2, 7 and 8, equations 1, 2 and 6, and magnitudes."""
    total, count = vectors.shape[1], len(vectors)
    active = active_beyond(vectors, data["epsilon"])
    overlap = active.sum(axis=0)
    assert data["total_parameters"] == total
    assert data["overlap_histogram"] == [int((overlap == k).sum()) for k in range(count + 1)]
    for t, row in enumerate(data["agents"]):
        delta, own = vectors[t], active[t]
        unique, shared = own & (overlap == 1), own & (overlap > 1)
        numbers = [int(mask.sum()) for mask in (delta != 0, own, unique, shared)]
        assert [row[key] for key in ("moved", "changed", "unique", "shared")] == numbers
        assert row["density"] == pytest.approx(own.sum() / total, rel=1e-8)
        assert row["shared_with"] == [int((own & (overlap == 1 + k)).sum()) for k in range(count)]
        rho = oracle_rho(numbers[3], numbers[2])
        assert row["rho"] == ("inf" if math.isinf(rho) else pytest.approx(rho, rel=1e-12))
        assert row["lambda"] == pytest.approx(oracle_lambda("ram_plus", rho, data["r"], data["alpha"]), rel=1e-12)
        for part, mask in (("all", delta != 0), ("unique", unique), ("shared", shared)):
            sizes = np.abs(delta[mask])
            assert row["magnitude"][part]["elements"] == len(sizes)
            assert row["magnitude"][part]["l1"] == pytest.approx(sizes.sum(), rel=1e-6)
            assert row["magnitude"][part]["l2"] == pytest.approx(math.sqrt((sizes**2).sum()), rel=1e-6)
            assert row["magnitude"][part]["largest"] == pytest.approx(sizes.max(initial=0.0), rel=1e-5)
            mean = pytest.approx(sizes.mean(), rel=1e-6) if len(sizes) else None
            assert row["magnitude"][part]["mean"] == mean
        if numbers[2]:
            effective = (applied[unique] * np.sign(delta[unique])).sum() / np.abs(delta[unique]).sum()
            assert row["effective_lambda"] == pytest.approx(effective, rel=2e-5)
        else:
            assert row["effective_lambda"] is None
        norm = (delta**2).sum()
        kept = {"ram_plus": applied @ delta, "average": vectors.mean(axis=0) @ delta}
        for method, product in kept.items():
            expected = pytest.approx(product / norm, rel=1e-4, abs=1e-9) if norm else None
            assert row["retained"][method] == expected


def assert_epsilons(data, vectors):
    levels = [step["epsilon"] for step in data["agents"][0]["by_epsilon"]]
    grid = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3]
    assert levels == grid[: len(levels)]
    assert not active_beyond(vectors, grid[len(levels)]).any()
    for level, epsilon in enumerate(levels):
        active = active_beyond(vectors, epsilon)
        overlap = active.sum(axis=0)
        for t, row in enumerate(data["agents"]):
            step, changed = row["by_epsilon"][level], active[t].sum()
            assert step["density"] == pytest.approx(changed / vectors.shape[1], rel=1e-8)
            unique = (active[t] & (overlap == 1)).sum()
            assert step["unique_share"] == (pytest.approx(unique / changed, rel=1e-8) if changed else None)
            sizes = np.abs(vectors[t])
            lost = pytest.approx(sizes[~active[t]].sum() / sizes.sum(), rel=1e-5, abs=1e-8) if sizes.any() else None
            assert step["lost_magnitude"] == lost


@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 1e-8, 1e-7, 1e-5, 2.5e-4, 1e4])
def test_thresholds_begin_at_the_merge_s_own_and_stay_few(epsilon):
    grid = _grid(epsilon)
    assert grid[0] == epsilon and grid[-1] >= 1e3 and len(grid) <= 22
    assert grid == sorted(set(grid)) and all(3e-7 <= level for level in grid[1:])


def assert_pairs(data, vectors, names, shapes):
    active, total = active_beyond(vectors, data["epsilon"]), vectors.shape[1]
    bounds = np.cumsum([0, *(math.prod(shapes[name]) for name in names)])
    labels = [row["label"] for row in data["agents"]]
    assert [pair["agents"] for pair in data["pairs"]] == [list(pair) for pair in itertools.combinations(labels, 2)]
    for pair, (i, j) in zip(data["pairs"], itertools.combinations(range(len(labels)), 2), strict=True):
        both, either = active[i] & active[j], active[i] | active[j]
        assert pair["overlap"] == both.sum()
        assert pair["share_of_first"] == pytest.approx(both.sum() / active[i].sum(), rel=1e-8)
        assert pair["share_of_second"] == pytest.approx(both.sum() / active[j].sum(), rel=1e-8)
        assert pair["jaccard"] == pytest.approx(both.sum() / either.sum(), rel=1e-8)
        densities = active[[i, j]].mean(axis=1)
        assert pair["expected_overlap"] == pytest.approx(densities.prod() * total, rel=1e-8)
        parts = [active[[i, j], a:b].mean(axis=1).prod() * (b - a) for a, b in itertools.pairwise(bounds)]
        assert pair["expected_overlap_by_tensor"] == pytest.approx(sum(parts), rel=1e-8)
        same = (np.sign(vectors[i]) == np.sign(vectors[j]))[both].sum()
        assert pair["same_sign"] == same
        assert pair["sign_agreement"] == pytest.approx(same / both.sum(), rel=1e-8)
        cosine = vectors[i] @ vectors[j] / np.linalg.norm(vectors[i]) / np.linalg.norm(vectors[j])
        assert pair["cosine"] == pytest.approx(cosine, rel=1e-4, abs=1e-8)


def assert_places(data, deltas, shapes):
    """Densities of cells, layers and modules; every name here is of a Llama or Qwen."""
    cells, count = defaultdict(lambda: np.zeros(1 + len(deltas), np.int64)), len(deltas)
    for name, shape in shapes.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight)?", name)
        key = (int(match[1]), match[2]) if match else (None, name.split(".")[-2])
        changed = [int(active_beyond(delta[name], data["epsilon"]).sum()) if name in delta else 0 for delta in deltas]
        cells[key] += [math.prod(shape), *changed]

    def group(keys):
        return np.sum([cells[key] for key in keys], axis=0).tolist()

    assert {(cell["layer"], cell["module"]) for cell in data["cells"]} == set(cells)
    for cell in data["cells"]:
        assert [cell["parameters"], *cell["changed"]] == group([(cell["layer"], cell["module"])])
        assert cell["density"] == pytest.approx([c / cell["parameters"] for c in cell["changed"]], rel=1e-8)
    for layer in data["layers"]:
        assert layer["stack"] == "model.layers"
        assert [layer["parameters"], *layer["changed"]] == group([key for key in cells if key[0] == layer["layer"]])
    assert [layer["layer"] for layer in data["layers"]] == [0, 1]
    for module in data["modules"]:
        assert [module["parameters"], *module["changed"]] == group(
            [key for key in cells if key[1] == module["module"]]
        )
    assert len(data["modules"]) == len({module for _, module in cells})
    sums = np.sum([[cell["parameters"], *cell["changed"]] for cell in data["cells"]], axis=0).tolist()
    assert sums == [data["total_parameters"], *(row["changed"] for row in data["agents"])] and len(sums) == count + 1


@pytest.mark.parametrize("kind", ["llama", "qwen2_wide"])
@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_every_number_is_that_of_its_definition(zoo, tmp_path, kind, engine):
    base = zoo.base(kind)  # the wide one is tied, and has a tensor of two tiles
    models = {
        "code": zoo.agent(base, seed=1, density=0.3),
        "math": zoo.agent(base, seed=2, density=0.4, scale=1e-4),
        "tool": zoo.adapter(base, seed=3, target_modules=LINEAR),
    }
    registry = zoo.registry(base, models)
    deltas = [full_delta(base, models["code"]), full_delta(base, models["math"]), lora_delta(base, models["tool"])]
    with computed_by(engine):
        data = analyze_agents(registry)
        merged = merged_delta(registry, base, tmp_path / "merged")
    names, shapes, vectors, applied = whole_vectors(base, deltas, merged)
    assert_agents(data, vectors, applied)
    assert_epsilons(data, vectors)
    assert_pairs(data, vectors, names, shapes)
    assert_places(data, deltas, shapes)


def test_the_numbers_are_those_of_the_merge(zoo, tmp_path):
    base = zoo.base("llama")
    registry = zoo.registry(base, {"code": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})
    options = {"r": 0.7, "alpha": 0.5, "epsilon": 1e-4}
    data, report = analyze_agents(registry, **options), merge_agents(registry, str(tmp_path / "merged"), **options)
    for row, reported in zip(data["agents"], report["agents"], strict=True):
        for key in ("name", "version", "kind", "changed", "shared", "unique", "rho", "lambda", "effective_lambda"):
            assert row[key] == reported[key], key
    assert data["overlap_histogram"] == report["overlap_histogram"]
    assert data["base_model"] == report["base_model"]


def test_numbers_do_not_depend_on_threads(zoo):
    base = zoo.base("llama_wide")
    registry = zoo.registry(base, {"code": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})
    texts = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        texts.append(json.dumps(analyze_agents(registry)))
    torch.set_num_threads(1)
    assert texts[0] == texts[1] == texts[2]


def test_tied_tensors_count_once_even_if_the_base_stores_both(zoo, tmp_path):
    base = zoo.base("qwen2_tied", stored_head=True)
    copy_model(zoo.agent(base, seed=1), tmp_path / "agent")
    embedding = read_model(tmp_path / "agent")["model.embed_tokens.weight"]
    change_tensor(tmp_path / "agent", "lm_head.weight", lambda _: embedding.clone())
    data = analyze_agents(zoo.registry(base, {"code": tmp_path / "agent"}))
    delta = full_delta(base, tmp_path / "agent")
    del delta["lm_head.weight"]
    assert data["total_parameters"] == sum(values.size for values in delta.values())
    assert data["agents"][0]["changed"] == sum(active_beyond(values, 1e-5).sum() for values in delta.values())
    assert {module["module"] for module in data["modules"]} >= {"embed_tokens", "norm"}


def test_an_agent_alone_and_one_that_changed_nothing(zoo, tmp_path):
    base = zoo.base("llama")
    alone = analyze_agents(zoo.registry(base, {"code": zoo.agent(base, seed=1)}))
    assert (alone["pairs"], alone["order"], alone["groups"]) == ([], ["code"], [["code"]])
    assert alone["agents"][0]["unique_share"] == 1 and alone["agents"][0]["rho"] == 0
    assert "compared with no other" in alone["findings"]["agents"][0]
    copy_model(base, tmp_path / "idle")
    data = analyze_agents(zoo.registry(base, {"code": zoo.agent(base, seed=1), "idle": tmp_path / "idle"}))
    code, idle = data["agents"]
    assert code["magnitude"] == alone["agents"][0]["magnitude"]
    assert (idle["moved"], idle["changed"], idle["density"], idle["rho"], idle["lambda"]) == (0, 0, 0, 0, 1)
    assert idle["unique_share"] is idle["effective_lambda"] is idle["retained"]["ram_plus"] is None
    assert data["pairs"][0]["cosine"] is data["pairs"][0]["sign_agreement"] is None
    assert "idle: changed nothing" in data["findings"]["agents"][1]
    nothing = analyze_agents(zoo.registry(base, {"idle": tmp_path / "idle"}))
    assert nothing["overlap_histogram"] == [nothing["total_parameters"], 0]


def test_float32_agents_as_far_as_they_were_stored(zoo, tmp_path):
    base = zoo.base("llama")
    registry = AgentRegistry(tmp_path / "registry")
    models = [zoo.agent(base, seed, density=0.9, scale=1e-4, dtype=torch.float32) for seed in (1, 2)]
    for name, model in zip(("code", "math"), models, strict=True):
        register_agent(registry, name, str(model), base_model=str(base), epsilon=3e-5)
    with pytest.raises(ConfigError, match="epsilon"):
        analyze_agents(registry, epsilon=1e-5)
    data = analyze_agents(registry, epsilon=3e-5)
    deltas = [full_delta(base, model) for model in models]
    for row, delta in zip(data["agents"], deltas, strict=True):
        assert row["stored_epsilon"] == 3e-5
        changed = sum(int(active_beyond(values, 3e-5).sum()) for values in delta.values())
        assert row["changed"] == row["moved"] == changed
        assert row["by_epsilon"][0]["lost_magnitude"] == 0


def test_versions_of_one_agent_are_told_apart(zoo, tmp_path):
    base = zoo.base("llama")
    for seed in (1, 2):
        register_agent(AgentRegistry(tmp_path), "code", str(zoo.agent(base, seed)), base_model=str(base))
    data = analyze_agents(str(tmp_path), agents=["code@v1", "code@v2"])
    assert [row["label"] for row in data["agents"]] == ["code@v1", "code@v2"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2"])
def test_experts_and_other_names_of_layers(zoo, kind):
    base = zoo.base(kind)
    data = analyze_agents(zoo.registry(base, {"code": zoo.agent(base, seed=1)}))
    assert [layer["layer"] for layer in data["layers"]] == [0, 1]
    inside = {cell["module"] for cell in data["cells"] if cell["layer"] is not None}
    assert not any(part.isdecimal() for module in inside for part in module.split("."))
    assert sum(module["parameters"] for module in data["modules"]) == data["total_parameters"]
    assert data["cells"][0]["module"] in ("embed_tokens", "wpe", "wte")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.7.self_attn.q_proj.weight", Place("model.layers", 7, "self_attn.q_proj")),
        ("model.layers.7.self_attn.q_proj.bias", Place("model.layers", 7, "self_attn.q_proj.bias")),
        ("model.layers.12.mlp.experts.31.up_proj.weight", Place("model.layers", 12, "mlp.experts.up_proj")),
        ("transformer.h.0.attn.c_attn.weight", Place("transformer.h", 0, "attn.c_attn")),
        ("model.embed_tokens.weight", Place("", None, "embed_tokens")),
        ("lm_head.weight", Place("", None, "lm_head")),
        ("model.visual.patch_embed.proj.weight", Place("", None, "visual.patch_embed.proj")),
        ("0.weight", Place("", 0, "weight")),
        ("weight", Place("", None, "weight")),
    ],
)
def test_place_of_a_parameter(name, place):
    assert find_place(name) == place


def test_memory_is_bounded_by_tiles_not_by_the_model(tmp_path):
    # the system's own record of a process begins with the memory of its parent: it is set back before the analysis
    script = """
import re, sys, torch
from ram_trl import analyze_agents
torch.set_num_threads(2)
analyze_agents(sys.argv[1] + "/1/registry")
open("/proc/self/clear_refs", "w").write("5")
analyze_agents(sys.argv[1] + "/" + sys.argv[2] + "/registry")
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
    # large pieces go back to the system at once: what the allocator keeps in store differs from run to run
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    peaks = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        write_model(folder / "base", layers)
        for agent, update in (("a", 2e-5), ("b", 3e-5)):
            write_model(folder / agent, layers, update)
            register_agent(folder / "registry", agent, str(folder / agent), base_model=str(folder / "base"))
        command = [sys.executable, "-c", script, str(tmp_path), str(layers)]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True, env=environment).stdout) / 1024)
    assert peaks[1] - peaks[0] < 20, f"{peaks[1] - peaks[0]:.0f} MiB more for a model that is 32 MiB larger"


# What is refused


@pytest.fixture
def own(zoo, tmp_path):
    """A base, two agents and their registry that a test may damage."""
    copy_model(zoo.base("llama"), tmp_path / "base")
    registry = AgentRegistry(tmp_path / "registry")
    for seed, name in enumerate(("code", "math")):
        agent = zoo.agent(zoo.base("llama"), seed=seed)
        register_agent(registry, name, str(agent), base_model=str(tmp_path / "base"))
    return registry


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_a_base_with_one_weight_changed_is_refused_and_the_tensor_named(own, tmp_path, value):
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensor(tmp_path / "base", name, lambda tensor: tensor.index_fill(1, torch.tensor([5]), value))
    with pytest.raises(BaseModelError, match=f"the weights of tensor '{re.escape(name)}' differ"):
        analyze_agents(own, str(tmp_path / "analysis"))
    assert not (tmp_path / "analysis").exists()


def test_a_merge_beyond_the_dtype_is_refused_and_the_tensor_named(zoo, tmp_path):
    copy_model(zoo.base("llama", torch.float16), tmp_path / "base")
    registry, name = AgentRegistry(tmp_path / "registry"), "model.layers.0.mlp.up_proj.weight"
    change_tensor(tmp_path / "base", name, lambda tensor: torch.full_like(tensor, 6e4))
    for agent, rows in (("code", [0, 1, 2]), ("math", [1, 2, 3])):
        copy_model(tmp_path / "base", tmp_path / agent)
        change_tensor(tmp_path / agent, name, lambda t, rows=rows: t.index_fill(0, torch.tensor(rows), 6.4e4))
        register_agent(registry, agent, str(tmp_path / agent), base_model=str(tmp_path / "base"))
    assert analyze_agents(registry)["agents"][0]["rho"] == 2
    with pytest.raises(NonFiniteError, match=f"{re.escape(name)}.*float16.*lower r"):
        analyze_agents(registry, r=1.0)


def test_without_agents_and_outside_of_ranges(own):
    with pytest.raises(ConfigError, match="no agent"):
        analyze_agents(own, agents=[])
    with pytest.raises(ConfigError, match="epsilon"):
        analyze_agents(own, epsilon=-1.0)
    with pytest.raises(ConfigError, match="named twice"):
        analyze_agents(own, agents=["code", "code@v1"])
