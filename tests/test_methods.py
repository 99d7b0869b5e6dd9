"""The methods beside RAM: each against its oracle through the whole merge, and what their options mean."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import change_tensor, copy_model, read_model
from oracle import ORACLES, is_matrix, oracle_method, resmerge_matrix
from test_merge import LINEAR, full_delta, lora_delta, merged, shapes_of, three_agents
from tiles import ENGINES, computed_by, context_of

from ram_trl import AgentRegistry, MergeConfig, integrate_agents, merge_agents, register_agent
from ram_trl.arithmetic.defaults import RESCALING
from ram_trl.arithmetic.methods import METHODS
from ram_trl.arithmetic.methods.matrices import is_linear_layer, leading_vector
from ram_trl.arithmetic.ram import TileUpdate, set_mask, unique_magnitudes
from ram_trl.arithmetic.selection import BUCKETS, count_lower, count_upper, find_bucket, magnitude_of
from ram_trl.cli import main
from ram_trl.errors import BaseModelError, ConfigError
from ram_trl.merging.plan import MergeSettings
from ram_trl.options import parse_config


FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# Every method with options of its own that are not the defaults.
CASES = {
    "average": {},
    "interpolation": {"t": 0.3},
    "task_arithmetic": {"scaling": 0.7},
    "ties": {"density": 0.15, "scaling": 0.9},
    "ties per tensor": {"density": 0.15, "scaling": 1.0, "per_tensor": 1},
    "dare": {"drop_rate": 0.4, "scaling": 0.7},
    "dare_ties": {"drop_rate": 0.3, "density": 0.1, "scaling": 1.0},
    "dare_ties untrimmed": {"drop_rate": 0.3, "density": 1.0, "scaling": 1.0},
    "isolate": {"scaling": 1 / 3},
    "wudi": {"steps": 20, "learning_rate": 1e-4},
    "resmerge": {"beta_min": 0.5, "beta_max": 0.9, "head": 0.3},
}
SEED, EPSILON = 3, 1e-4


def expected_of(case, shapes, deltas, weights, labels):
    method, options = case.split()[0], dict(CASES[case])
    if method.startswith("dare"):
        options |= {"labels": labels, "seed": SEED}
    if method == "isolate":
        options["epsilon"] = EPSILON
    return oracle_method(method, shapes, deltas, weights, **options)


def assert_merged(found, base, expected, case, dtype):
    """Float32 arithmetic, rounded once; WUDI takes steps of a fixed length however small the gradient is."""
    loose = 3 * CASES[case]["learning_rate"] if case == "wudi" else 0.0
    worst = 0.0
    for name, before in read_model(base).items():
        exact = torch.from_numpy(before.double().numpy() + expected[name])
        error = (found[name].double() - exact).abs()
        # of base and delta where they cancel out; float16 is as coarse as its smallest number
        info = torch.finfo(dtype)
        rounding = (exact.abs() + before.double().abs()) * info.eps + info.smallest_normal * info.eps + 2e-9 + loose
        assert found[name].dtype == dtype
        assert (error <= rounding).all(), f"{name}: {(error / rounding).max()}"
        worst = max(worst, float(error.mean()))
    if dtype == FLOAT32:
        assert worst < 1e-7 + loose / 300


def test_every_method_has_an_oracle_a_case_and_a_row_in_the_docs():
    rescaling = {name for name, method in METHODS.items() if method.rescale}
    assert rescaling == set(RESCALING)
    # that of the agents' Fisher information is in test_fisher.py
    assert set(METHODS) - rescaling - {"fisher"} == set(ORACLES) == {case.split()[0] for case in CASES}
    text = (Path(__file__).parents[1] / "docs" / "METHODS.md").read_text()
    for name, method in METHODS.items():
        assert method.name == name and re.fullmatch(r"\d{4}\.\d{5}", method.paper) and method.summary.endswith(".")
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        for option, values in method.options.items():
            assert f"`{option}={values.default:g}`" in row, (name, option)
        assert name in MergeConfig.__dataclass_fields__["method"].metadata["help"]


@pytest.mark.parametrize("case", CASES)
def test_full_and_lora_agents_merge_as_the_methods_paper_says(zoo, tmp_path, case):
    base = zoo.base("qwen2_tied")
    registry, _, deltas = three_agents(zoo, base, LINEAR)
    weights, labels = [1.0, 0.5, 2.0], ["code@v1", "math@v1", "tool@v1"]
    report, found = merged(
        registry,
        tmp_path,
        method=case.split()[0],
        method_options=CASES[case],
        weights={"math": 0.5, "tool": 2.0},
        output_dtype="float32",
        seed=SEED,
        epsilon=EPSILON,
    )
    assert_merged(found, base, expected_of(case, shapes_of(base), deltas, weights, labels), case, FLOAT32)
    assert [row["lambda"] for row in report["agents"]] == [None] * 3
    rows = [
        line.split(" | ") for line in (tmp_path / "merged" / "README.md").read_text().splitlines() if "@v1 |" in line
    ]
    assert [row[7] for row in rows] == ["-"] * 3


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("case", ["ties", "dare_ties", "wudi", "resmerge", "isolate"])
def test_full_agents_of_any_dtype_merge_as_the_methods_paper_says(zoo, tmp_path, case, dtype):
    base = zoo.base("llama", dtype, "20KB")
    models = {name: zoo.agent(base, seed=seed, density=0.3) for seed, name in enumerate(("a", "b"))}
    deltas, labels = [full_delta(base, model) for model in models.values()], ["a@v1", "b@v1"]
    _, found = merged(
        zoo.registry(base, models),
        tmp_path,
        method=case.split()[0],
        method_options=CASES[case],
        seed=SEED,
        epsilon=EPSILON,
    )
    assert_merged(found, base, expected_of(case, shapes_of(base), deltas, [1.0, 1.0], labels), case, dtype)


@pytest.mark.parametrize("case", ["ties", "resmerge"])
def test_tensors_that_only_some_agents_change_merge_as_the_methods_paper_says(zoo, tmp_path, case):
    base = zoo.base("qwen3_moe", FLOAT32)
    registry, _, deltas = three_agents(zoo, base, ["q_proj"])
    assert len(deltas[2]) < len(deltas[0])
    labels = ["code@v1", "math@v1", "tool@v1"]
    _, found = merged(registry, tmp_path, method=case, method_options=CASES[case], seed=SEED)
    assert_merged(found, base, expected_of(case, shapes_of(base), deltas, [1.0] * 3, labels), case, FLOAT32)


@pytest.mark.parametrize(
    ("kind", "case"), [("qwen2_wide", "wudi"), ("qwen2_wide", "resmerge"), ("llama_tall", "resmerge")]
)
def test_layers_of_several_panels_tiles_and_blocks_merge_as_the_methods_paper_says(zoo, tmp_path, kind, case):
    base = zoo.base(kind)
    models = {"a": zoo.agent(base, seed=1, density=0.3), "b": zoo.adapter(base, seed=2, target_modules=["down_proj"])}
    deltas = [full_delta(base, models["a"]), lora_delta(base, models["b"])]
    registry, before = zoo.registry(base, models), torch.get_num_threads()
    found = {}
    for threads in (1, 3):
        torch.set_num_threads(threads)
        _, found[threads] = merged(
            registry,
            tmp_path / str(threads),
            method=case,
            method_options=CASES[case],
            output_dtype="float32",
        )
        torch.set_num_threads(before)
    assert_merged(found[1], base, expected_of(case, shapes_of(base), deltas, [1.0, 1.0], list("ab")), case, FLOAT32)
    assert all(torch.equal(found[3][name], tensor) for name, tensor in found[1].items())


# What the report says


def test_the_effective_column_shows_dilution(zoo, tmp_path):
    base = zoo.base("llama", FLOAT32)
    models = {name: zoo.agent(base, seed=seed, density=0.2) for seed, name in enumerate("abc")}
    registry = zoo.registry(base, models)
    expected = {
        "average": 1 / 3,
        "task_arithmetic": 0.4,
        "interpolation": 1 / 6,
        "ram": 1.0,
    }

    def effective(method, **options):
        report = merge_agents(registry, str(tmp_path / method), method=method, epsilon=0.0, method_options=options)
        assert all(row["unique"] + row["shared"] == row["changed"] > 0 for row in report["agents"])
        return [row["effective_lambda"] for row in report["agents"]]

    for method, left in expected.items():
        assert effective(method) == pytest.approx([left] * 3, rel=1e-4), method
    assert effective("isolate") == pytest.approx([1.0, 0.0, 0.0], rel=1e-5)
    # trimming keeps the largest changes of the densest places
    assert all(0.9 < left <= 1.0001 for left in effective("ties", density=0.15))
    # right on average
    assert effective("dare", scaling=1.0) == pytest.approx([1.0] * 3, rel=0.05)


def test_a_small_change_where_another_agent_changed_much_is_not_called_unique():
    base = torch.zeros(4)
    deltas = torch.tensor([[1e-3, 1e-3, 0.0, 0.0], [1e-6, -1e-6, 1e-3, 1e-3]])
    updates = [set_mask(TileUpdate(position, delta, delta), 1e-5) for position, delta in enumerate(deltas)]
    for applied, intended in unique_magnitudes(base, deltas.mean(dim=0), updates):
        assert applied / intended == pytest.approx(0.5, rel=1e-6)


def test_methods_that_merge_every_change_tell_of_agents_that_were_stored_without_small_ones(zoo, tmp_path):
    base = zoo.base("llama", FLOAT32)
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "a", str(zoo.agent(base, seed=1, density=0.2)), base_model=str(base), epsilon=1e-5)
    for method, told in (("average", True), ("ties", True), ("ram_plus", False)):
        warnings = merge_agents(registry, str(tmp_path / method), method=method)["warnings"]
        assert any("stored without changes of at most 1e-05" in warning for warning in warnings) == told
    # nothing is beyond this epsilon, and all of it is merged
    report = merge_agents(registry, str(tmp_path / "all"), method="average", epsilon=1.0)
    assert not any("adds nothing" in warning for warning in report["warnings"])


def test_options_are_recorded_with_the_defaults_filled_in_and_reproduce_the_merge(zoo, tmp_path):
    base = zoo.base("llama")
    models = {name: zoo.agent(base, seed=seed) for seed, name in enumerate("ab")}
    registry = zoo.registry(base, models)
    words = ["--registry", str(registry.path), "--output_dir", str(tmp_path / "one"), "--method", "dare_ties"]
    words += ["--method_options", "density=0.5", "drop_rate=0.25", "--seed", "7"]
    report = merge_agents(**parse_config(MergeConfig, words).merge_arguments())
    options = {"drop_rate": 0.25, "density": 0.5, "scaling": 1.0, "per_tensor": 0.0}
    assert report["method_options"] == options
    card = (tmp_path / "one" / "README.md").read_text()
    assert " --r " not in card and " --alpha " not in card
    assert "[DARE + TIES](https://huggingface.co/papers/2311.03099) (drop_rate = 0.25, density = 0.5" in card
    command = re.search(r"accelerate launch recipes/merge.py (.+)", card)[1]
    words = command.replace("REGISTRY", str(registry.path)).replace("OUTPUT", str(tmp_path / "two")).split()
    assert merge_agents(**parse_config(MergeConfig, words).merge_arguments())["method_options"] == options
    first, second = read_model(tmp_path / "one"), read_model(tmp_path / "two")
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_a_generalist_records_the_options_of_its_method(zoo, tmp_path):
    from ram_trl import AgentRegistry, register_agent

    base = zoo.base("llama")
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(zoo.agent(base, seed=1)), base_model=str(base))
    generalist = integrate_agents(registry, "all", method="task_arithmetic", method_options={"scaling": 0.6})
    again = registry.generalists.get(str(generalist))
    assert again.manifest.settings["method_options"] == {"scaling": 0.6}
    assert "r" in again.manifest.settings
    with pytest.raises(ConfigError, match="method=ties has no r, which is for ram_plus, ram, ram_plus_soft"):
        integrate_agents(registry, "all", method="ties", r=0.5)


def test_r_and_alpha_are_refused_with_a_method_that_has_none():
    words = ["--registry", "r", "--output_dir", "o", "--method", "ties"]
    for more in (["--r", "0.5"], ["--alpha", "1"], ["--preset", "official"]):
        with pytest.raises(ConfigError, match=f"method=ties has no {more[0][2:]}, which is for ram_plus, ram,"):
            parse_config(MergeConfig, [*words, *more])
    assert not {"r", "alpha"} & set(parse_config(MergeConfig, words).merge_arguments())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ties", {"desity": 0.1}, "'desity' is no option of method=ties: it has density=0.2, scaling=1, per_tensor=0"),
        ("ties", {"density": 0.0}, "density=0 must be a number from 1e-06 to 1"),
        ("ties", {"density": float("nan")}, "density=nan must be a number from"),
        ("ties", {"per_tensor": 0.5}, "per_tensor=0.5 must be an integer from 0 to 1"),
        ("dare", {"drop_rate": 1.0}, "drop_rate=1 must be a number from 0 to 0.999"),
        ("interpolation", {"t": 1.5}, "t=1.5 must be a number from 0 to 1"),
        ("average", {"t": 1.0}, "'t' is no option of method=average: it has none"),
        ("ram_plus", {"r": 0.1}, "r and alpha are options of their own"),
        ("wudi", {"steps": -1}, "steps=-1 must be an integer from 0"),
        ("resmerge", {"beta_min": 1.0, "beta_max": 0.5}, "beta_min=1 must be at most beta_max=0.5"),
        ("resmerge", {"beta_max": 0.5}, "beta_min=0.7 must be at most beta_max=0.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(method, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        MergeSettings(method=method, method_options=options)
    with pytest.raises(ConfigError, match="wrong type"):
        MergeSettings(method=method, method_options={"t": "much"})


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.is_compiled])
def test_the_compiled_engine_is_refused_where_there_are_no_loops(method):
    with pytest.raises(ConfigError, match=f"engine=compiled is not for method={method}: merge with --engine auto"):
        MergeSettings(method=method, engine="compiled")


# Parts


@pytest.mark.parametrize("engine", ENGINES)
@given(
    numel=st.integers(1, 400),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["normal", "few values", "mostly zero", "tiny", "zero"]),
    share=st.floats(0.001, 1.0),
    cuts=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_the_streaming_selection_is_that_of_sorting(engine, numel, seed, kind, share, cuts):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values = {
        "normal": values,
        "few values": (values * 2).round() * 1e-5,
        "mostly zero": values * (torch.rand(numel, generator=generator) < 0.1),
        # denormal numbers, and such as differ in the lowest bits only
        "tiny": values * 1e-44,
        "zero": values * -0.0,
    }[kind]
    rank = max(1, int(share * numel))
    expected = float(torch.sort(values.abs(), descending=True).values[rank - 1])
    pieces = values.chunk(cuts)
    uppers, lowers = np.zeros((2, BUCKETS), np.int64)
    with computed_by(engine):
        for piece in pieces:
            count_upper(piece, uppers)
        place = find_bucket(uppers, rank)
        if expected == 0.0:
            assert place is None
            return
        for piece in pieces:
            count_lower(piece, place[0], lowers)
    lower, _ = find_bucket(lowers, place[1])
    assert magnitude_of(place[0], lower) == expected


def random_updates(seed, numel, num_agents):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(numel, generator=generator) * 0.02
    updates = []
    for agent in range(num_agents):
        delta = torch.randn(numel, generator=generator) * 1e-3 * (torch.rand(numel, generator=generator) < 0.5)
        updates.append(set_mask(TileUpdate(agent, base + delta, delta), 1e-5))
    return base, updates


@pytest.mark.parametrize("method", METHODS)
def test_a_tile_may_be_cut_anywhere(method):
    base, updates = random_updates(0, 1000, 3)
    method, thresholds = METHODS[method], [5e-4, 1e-4, 0.0]
    whole = method.merge_tile(
        base, updates, context_of(method, [1.0, 0.5, 2.0], thresholds=thresholds, start=64, numel=1000)
    )
    pieces = []
    for start, stop in ((0, 7), (7, 512), (512, 1000)):
        part = [
            dataclasses.replace(
                update,
                value=update.value[start:stop].clone(),
                delta=update.delta[start:stop].clone(),
                active=update.active[start:stop].clone(),
            )
            for update in updates
        ]
        cut = {"start": 64 + start, "numel": stop - start}
        context = context_of(method, [1.0, 0.5, 2.0], thresholds=thresholds, **cut)
        pieces.append(method.merge_tile(base[start:stop], part, context))
    assert torch.equal(torch.cat(pieces), whole)


def test_ties_keeps_all_of_several_equal_magnitudes_and_elects_no_sign_where_the_sum_is_0():
    ties, base = METHODS["ties"], torch.ones(5)
    first = TileUpdate(0, base, torch.tensor([2.0, -1.0, 1.0, 3.0, 0.0]))
    second = TileUpdate(1, base, torch.tensor([-2.0, 1.0, 0.5, 1.0, -4.0]))
    context = context_of(ties, [1.0, 1.0], thresholds=[1.0, 1.0])
    assert ties.merge_tile(base, [first, second], context).tolist() == [1.0, 1.0, 2.0, 3.0, -3.0]
    # the heavier agent decides
    context = context_of(ties, [1.0, 3.0], thresholds=[1.0, 1.0])
    assert ties.merge_tile(base, [first, second], context).tolist() == [-1.0, 2.0, 2.0, 1.0 + 6 / 4, -3.0]


def test_dare_drops_its_rate_keeps_the_mean_and_depends_on_agent_seed_and_tensor_alone():
    dare, numel = METHODS["dare"], 200_000
    base = torch.zeros(numel)
    updates = [TileUpdate(agent, base + 1.0, base + 1.0) for agent in range(2)]

    def left(agent, **where):
        context = context_of(dare, [1.0, 1.0], drop_rate=0.9, scaling=1.0, **where)
        return dare.merge_tile(base, [updates[agent]], context)

    one = left(0)
    assert set(one.unique().tolist()) == {0.0, float(np.float32(1.0 / (1.0 - 0.9)))}
    assert float((one == 0).double().mean()) == pytest.approx(0.9, abs=0.003)
    assert float(one.double().mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(left(0), one)
    for other in (left(1), left(0, seed=1), left(0, name="v")):
        # as often equal as independent draws are
        assert float(((other == 0) == (one == 0)).double().mean()) == pytest.approx(0.9**2 + 0.1**2, abs=0.005)


def test_dare_ties_trims_the_changes_as_they_are_stored():
    # divided by 1 - p some would be a place off on other processors, and a tie fall below its own threshold
    method, delta = METHODS["dare_ties"], torch.linspace(-1e-3, 1e-3, 1000)
    update, context = TileUpdate(0, delta, delta), context_of(METHODS["dare_ties"], [1.0], drop_rate=0.2)
    left = method.trimmed_from(update, context)
    kept = left != 0
    assert 750 < int(kept.sum()) < 850 and torch.equal(left[kept], delta[kept])
    for threshold in left[kept].abs().sort().values[::50].tolist():
        context = context_of(method, [1.0], drop_rate=0.2, thresholds=[threshold])
        trimmed = method.merge_tile(torch.zeros(1000), [update], context)
        assert torch.equal(trimmed != 0, left.abs() >= threshold)
        torch.testing.assert_close(trimmed, left * (left.abs() >= threshold) / 0.8, rtol=1e-6, atol=0.0)


def test_one_agent_alone_is_kept_by_the_methods_that_promise_it(zoo, tmp_path):
    base = zoo.base("llama")
    agent = zoo.agent(base, seed=1)
    registry, expected = zoo.registry(base, {"math": agent}), read_model(agent)
    alone = {"average": {}, "interpolation": {"t": 1.0}, "task_arithmetic": {"scaling": 1.0}, "ties": {"density": 1.0}}
    alone |= {"dare": {"drop_rate": 0.0, "scaling": 1.0}, "isolate": {}}
    for method, options in alone.items():
        _, found = merged(registry, tmp_path / method, method=method, method_options=options, epsilon=0.0)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), method


def test_resmerge_keeps_of_one_agent_alone_all_but_the_leading_directions(zoo, tmp_path):
    base = zoo.base("llama")
    agent = zoo.agent(base, seed=1)
    deltas = full_delta(base, agent)
    options = {"method": "resmerge", "method_options": {"head": 0.0}, "output_dtype": "float32"}
    _, found = merged(zoo.registry(base, {"math": agent}), tmp_path, **options)
    for name, before in read_model(base).items():
        left = resmerge_matrix([deltas[name]], [1.0], 0.7, 1.0, 0.0) if is_matrix(name, deltas[name]) else deltas[name]
        exact = torch.from_numpy(before.double().numpy() + left)
        torch.testing.assert_close(found[name].double(), exact, rtol=1e-7, atol=1e-8)


def test_linear_layers_are_told_from_tables_and_norms():
    shape = (4, 4)
    for name in ("model.layers.0.self_attn.q_proj.weight", "transformer.h.0.mlp.c_fc.weight", "mlp.experts.3.up_proj"):
        assert is_linear_layer(name, shape)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight", "model.norm.weight"):
        assert not is_linear_layer(name, shape)
    assert not is_linear_layer("q_proj.bias", (4,)) and not is_linear_layer("experts.gate_up_proj", (2, 4, 4))


def test_the_unique_part_of_an_agent_is_written_by_the_command_line(zoo, tmp_path, capsys):
    base = zoo.base("llama")
    models = {name: zoo.agent(base, seed=seed, density=0.4) for seed, name in enumerate(("a", "b", "c"))}
    registry = zoo.registry(base, models)
    deltas = [full_delta(base, models[name]) for name in ("b", "a", "c")]
    words = ["isolate", "--registry", str(registry.path), "--agent", "b"]
    main([*words, "--output_dir", str(tmp_path / "all")])
    assert "what b@v1 alone changed" in capsys.readouterr().out
    main([*words, "--others", "c", "--scaling", "0.5", "--epsilon", "1e-3", "--output_dir", str(tmp_path / "two")])
    for name, others, epsilon, scaling in (("all", deltas, 1e-5, 1.0), ("two", [deltas[0], deltas[2]], 1e-3, 0.5)):
        expected = oracle_method(
            "isolate", shapes_of(base), others, [1.0] * len(others), epsilon=epsilon, scaling=scaling
        )
        found = read_model(tmp_path / name)
        for tensor, before in read_model(base).items():
            exact = (before.double() + torch.from_numpy(expected[tensor])).to(BFLOAT16)
            assert torch.equal(found[tensor], exact), tensor


def test_the_unique_part_is_among_agents_of_one_base(zoo, tmp_path, capsys):
    base, other = zoo.base("llama"), zoo.base("qwen2_untied")
    registry = AgentRegistry(tmp_path / "registry")
    for name, of, seed in (("a", base, 1), ("b", base, 2), ("c", other, 3)):
        register_agent(registry, name, str(zoo.agent(of, seed=seed, density=0.4)), base_model=str(of))
    words = ["isolate", "--registry", str(registry.path), "--agent", "b", "--output_dir"]
    main([*words, str(tmp_path / "default")])
    main([*words, str(tmp_path / "named"), "--others", "a", "a@v1"])
    assert (tmp_path / "default" / "model.safetensors").read_bytes() == (
        tmp_path / "named" / "model.safetensors"
    ).read_bytes()
    capsys.readouterr()
    for others, message in (
        (["a", "b@v1"], "--others names agent b@v1 itself, whose changes are all its own: leave it out"),
        (["c"], "agent c@v1 has another base model than b@v1: leave it out of --others"),
    ):
        with pytest.raises(SystemExit):
            main([*words, str(tmp_path / "refused"), "--others", *others])
        assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("case", ["rank one", "equal", "opposite", "disjoint", "one agent", "untouched", "tall"])
def test_resmerge_of_matrices_at_the_edges_of_its_formulas(case):
    generator = torch.Generator().manual_seed(1)
    first, second, third = (torch.randn(12, 20, generator=generator) * 1e-3 for _ in range(3))
    half = (torch.rand(12, 20, generator=generator) < 0.5).float()
    deltas = {
        "rank one": [first, torch.outer(second[:, 0], third[0])],
        "equal": [first, first.clone(), first * 2],
        "opposite": [first, -first],
        # their heads are not, so neither are their residuals
        "disjoint": [first * half, second * (1 - half)],
        "one agent": [first],
        "untouched": [first, torch.zeros(12, 20), second],
        "tall": [first.T.contiguous(), second.T.contiguous()],
    }[case]
    weights = [1.0, 0.5, 2.0][: len(deltas)]
    method = METHODS["resmerge"]
    touching = [(position, delta) for position, delta in enumerate(deltas) if delta.any()]
    found = method.merge_matrix(iter(touching), context_of(method, weights))
    expected = resmerge_matrix([delta.double().numpy() for delta in deltas], weights, 0.7, 1.0, 0.2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("case", ["noise", "head", "two equal", "rank one", "one column", "zero", "tiny"])
def test_the_leading_vector_is_that_of_a_full_decomposition_whatever_the_threads(case):
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(700, 300, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(noise, full_matrices=False)
    values = {
        "noise": values,
        "head": values.clone().index_fill_(0, torch.tensor([0]), 100.0),
        "two equal": values.clone().index_fill_(0, torch.tensor([1]), float(values[0])),
        "rank one": values * (torch.arange(300) == 0),
        "one column": values,
        "zero": values * 0,
        "tiny": values * 1e-12,
    }[case]
    matrix = (left * values @ right).float()
    if case == "one column":
        matrix = matrix[:, :1].contiguous()
    found, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(leading_vector(matrix))
        torch.set_num_threads(before)
    if case == "zero":
        assert found == [None, None]
        return
    vector, gram = found[0], matrix.double().T @ matrix.double()
    assert torch.equal(vector, found[1])
    largest = torch.linalg.eigvalsh(gram)[-1]
    assert float((gram @ vector - largest * vector).norm()) < 1e-11 * float(largest)
    assert float(vector.norm()) == pytest.approx(1.0, abs=1e-12)


def test_wudi_ends_where_each_agent_is_disturbed_least():
    generator = torch.Generator().manual_seed(1)
    # agents whose layers see inputs of their own
    inputs = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q
    deltas = [torch.randn(12, 6, generator=generator) @ inputs[:, 6 * at : 6 * at + 6].T * 1e-3 for at in range(3)]
    method, context = METHODS["wudi"], context_of(METHODS["wudi"], [1.0] * 3, learning_rate=1e-5)
    found = method.merge_matrix(enumerate(deltas), context)
    for delta in deltas:
        own = delta / delta.norm()
        assert float(((found - delta) @ own.T).norm()) < 0.01 * float((delta @ own.T).norm())


@pytest.mark.parametrize("method", ["ties", "dare_ties", "resmerge", "wudi"])
@pytest.mark.parametrize("value", [0.5, float("inf")])
def test_a_wrong_base_is_refused_by_every_kind_of_pass(zoo, tmp_path, method, value):
    base, name = zoo.base("llama"), "model.layers.1.mlp.up_proj.weight"
    registry = zoo.registry(base, {seed: zoo.agent(base, seed=int(seed)) for seed in "12"})
    wrong = copy_model(base, tmp_path / "wrong")
    change_tensor(wrong, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    with pytest.raises(BaseModelError, match=re.escape(name)):
        merge_agents(registry, str(tmp_path / "out"), method=method, base_model=str(wrong))
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]
