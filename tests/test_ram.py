"""The arithmetic of RAM against the slow oracle of tests/oracle.py."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_average, oracle_lambda, oracle_merge
from tiles import DTYPES, ENGINES, bits, computed_by, context_of

from ram_trl.arithmetic.masks import pack_bits
from ram_trl.arithmetic.methods import METHODS
from ram_trl.arithmetic.ram import (
    OverlapCounts,
    TileUpdate,
    count_overlaps,
    mask_inactive_,
    overlap_ratio,
    rescale_factor,
    selective_merge_tile,
    unique_magnitudes,
)


EPSILON = 1e-5
RESCALING = ["ram_plus", "ram", "ram_plus_soft"]


@pytest.fixture(scope="module", autouse=True, params=ENGINES)
def engine(request):
    """Overlaps are counted by either."""
    with computed_by(request.param):
        yield


def make_model(seed, num_agents, shapes, dtype, epsilon, density=0.5, lacking=0.2):
    """A base and agents as dicts of flat tensors; some agents lack tensors, some deltas are exactly epsilon."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size, scale):
        return torch.randn(size, generator=generator) * scale

    base, agents = {}, [{} for _ in range(num_agents)]
    for name, shape in shapes.items():
        size = math.prod(shape)
        base[name] = normal(size, 0.02).to(dtype)
        # a base of zero: there the delta is exactly the agent's value, also where that is epsilon itself
        for zero in (0.0, -0.0):
            base[name][torch.rand(size, generator=generator) < 0.25] = zero
        for agent in agents:
            if torch.rand((), generator=generator) < lacking:
                continue
            moved = (base[name].float() + normal(size, 2e-3)).to(dtype)
            at_epsilon = torch.where(torch.rand(size, generator=generator) < 0.5, epsilon, -epsilon)
            pick = torch.rand(size, generator=generator)
            value = torch.where(pick < density, moved, base[name])
            agent[name] = torch.where(pick > 0.9, at_epsilon.to(dtype), value)
    return base, agents


def task_vectors(base, agents):
    """Deltas as the paper defines them, in float32, for the oracle."""
    return [{name: (value.float() - base[name].float()).numpy() for name, value in a.items()} for a in agents]


def updates_of(base, agents, name, epsilon, start=0, stop=None):
    """The masked updates of one tile: only of the agents that have the tensor."""
    updates = []
    for position, agent in enumerate(agents):
        if name in agent:
            value = agent[name][start:stop].float()
            update = TileUpdate(position, value.clone(), value - base[name][start:stop].float())
            updates.append(mask_inactive_(update, epsilon))
    return updates


def count(base, agents, epsilon, tile=None):
    counts = OverlapCounts.zeros(len(agents))
    for name, values in base.items():
        step = tile or max(1, len(values))
        for start in range(0, len(values), step):
            stop = min(start + step, len(values))
            updates = updates_of(base, agents, name, epsilon, start, stop)
            masks = {update.agent: pack_bits(update.active.numpy()) for update in updates}
            count_overlaps(masks, stop - start, counts)
    return counts


models = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "num_agents": st.integers(1, 8),
        "shapes": st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3).map(
            lambda shapes: {f"t{i}": shape for i, shape in enumerate(shapes)}
        ),
        "dtype": st.sampled_from(DTYPES),
        "epsilon": st.sampled_from([0.0, EPSILON, 2.0**-10]),
        "density": st.sampled_from([0.0, 0.1, 0.5, 0.9]),
        "lacking": st.sampled_from([0.0, 0.3, 0.9]),
    }
)


@given(
    model=models,
    method=st.sampled_from(RESCALING),
    r=st.sampled_from([0.0, 0.1, 0.2, 1.0]),
    alpha=st.sampled_from([0.0, 1.0, 2.0]),
    weighted=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_merge_is_that_of_the_paper(model, method, r, alpha, weighted):
    base, agents = make_model(**model)
    rng = np.random.default_rng(model["seed"])
    weights = rng.uniform(0.25, 3.0, len(agents)).tolist() if weighted else [1.0] * len(agents)
    flat = {name: (len(values),) for name, values in base.items()}
    expected = oracle_merge(
        flat,
        task_vectors(base, agents),
        method=method,
        r=r,
        alpha=alpha,
        epsilon=model["epsilon"],
        weights=weights,
    )

    counts = count(base, agents, model["epsilon"])
    assert counts.changed == expected.changed
    assert counts.unique == expected.unique
    assert counts.shared == expected.shared
    assert counts.histogram == expected.histogram
    assert counts.total == sum(len(values) for values in base.values())
    ratios = [overlap_ratio(s, u) for s, u in zip(counts.shared, counts.unique, strict=True)]
    assert ratios == expected.rho
    factors = [rescale_factor(method, rho, r=r, alpha=alpha) for rho in ratios]
    assert factors == pytest.approx(expected.factors, rel=1e-12)

    for name, values in base.items():
        updates = updates_of(base, agents, name, model["epsilon"])
        if not updates:
            continue
        merged = selective_merge_tile(values.float(), updates, factors, weights)
        assert merged.dtype == torch.float32
        reference = values.double().numpy() + expected.merged[name]
        np.testing.assert_allclose(merged.double().numpy(), reference, rtol=1e-6, atol=3e-8)
        # no knowledge: the base, to the bit
        untouched = torch.from_numpy(expected.counts[name] == 0)
        assert torch.equal(bits(merged)[untouched], bits(values.float())[untouched])


@given(model=models)
@settings(max_examples=60, deadline=None)
def test_average_is_the_mean_over_all_agents_zeros_included(model):
    base, agents = make_model(**model)
    weights = np.random.default_rng(model["seed"]).uniform(0.25, 3.0, len(agents)).tolist()
    expected = oracle_average({n: (len(v),) for n, v in base.items()}, task_vectors(base, agents), weights)
    for name, values in base.items():
        updates = [
            TileUpdate(t, a[name].float(), a[name].float() - values.float()) for t, a in enumerate(agents) if name in a
        ]
        context = context_of(METHODS["average"], weights)
        merged = METHODS["average"].merge_tile(values.float(), updates, context)
        np.testing.assert_allclose(merged, values.double().numpy() + expected[name], rtol=1e-6, atol=3e-8)


@given(model=models, tile=st.integers(1, 40), cut=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_counts_add_up_over_tiles_and_processes(model, tile, cut):
    base, agents = make_model(**model)
    whole = count(base, agents, model["epsilon"])
    assert count(base, agents, model["epsilon"], tile) == whole

    names = list(base)
    halves = [count({n: base[n] for n in part}, agents, model["epsilon"]) for part in (names[:cut], names[cut:])]
    summed = [sum(column) for column in zip(*(half.to_list() for half in halves), strict=True)]
    assert OverlapCounts.from_list(summed, len(agents)) == whole


def test_counts_beyond_32_and_53_bits_stay_exact():
    start = OverlapCounts([2**53 + 1, 2**62], [2**53, 2**40], [2**62 + 1, 2**53 + 1, 2**31])
    counts = OverlapCounts.from_list(start.to_list(), 2)
    count_overlaps({0: pack_bits(np.array([True, False, True]))}, 3, counts)
    count_overlaps({}, 2**40 + 1, counts)
    assert counts.changed == [2**53 + 3, 2**62]
    assert counts.unique == [2**53 + 2, 2**40]
    assert counts.histogram == [2**62 + 2**40 + 3, 2**53 + 3, 2**31]
    assert counts.shared == [1, 2**62 - 2**40]


def test_masks_count_for_the_agents_whose_they_are():
    counts = OverlapCounts.zeros(4)
    masks = {3: np.array([0b1011], np.uint8), 1: np.array([0b0110], np.uint8)}
    count_overlaps(masks, 5, counts)
    count_overlaps({2: np.array([0xFF, 0x01], np.uint8)}, 9, counts)
    assert counts.changed == [0, 2, 9, 3]
    assert counts.unique == [0, 1, 9, 2]
    assert counts.histogram == [1, 12, 1, 0, 0]


def test_delta_of_exactly_epsilon_is_unchanged():
    epsilon = torch.tensor(EPSILON)
    above = torch.nextafter(epsilon, torch.tensor(1.0))
    below = torch.nextafter(epsilon, torch.tensor(0.0))
    delta = torch.stack([epsilon, -epsilon, above, -above, below, torch.tensor(0.0)])
    update = mask_inactive_(TileUpdate(0, delta.clone(), delta.clone()), EPSILON)
    assert update.active.tolist() == [False, False, True, True, False, False]
    assert update.delta.tolist() == [0.0, 0.0, float(above), float(-above), 0.0, 0.0]


def test_without_epsilon_the_smallest_difference_is_a_change():
    tiny = 2.0**-149
    update = mask_inactive_(TileUpdate(0, torch.zeros(3), torch.tensor([tiny, -tiny, 0.0])), 0.0)
    assert update.active.tolist() == [True, True, False]


def test_agent_without_unique_elements_has_infinite_ratio_and_the_largest_factor():
    values = {"w": torch.full((4,), 0.5)}
    base = {"w": torch.zeros(4)}
    counts = count(base, [values, values], EPSILON)
    assert counts.unique == [0, 0] and counts.shared == [4, 4] and counts.histogram == [0, 0, 4]
    rho = overlap_ratio(4, 0)
    assert rho == math.inf
    assert rescale_factor("ram_plus", rho, r=0.1, alpha=2.0) == pytest.approx(1.2)
    assert rescale_factor("ram_plus_soft", rho, r=0.1, alpha=2.0) == pytest.approx(1.1)


def test_nothing_changed_gives_ratio_0_factor_1_and_the_base():
    base = {"w": torch.randn(6)}
    counts = count(base, [dict(base), {}], EPSILON)
    assert counts.changed == counts.unique == [0, 0] and counts.histogram == [6, 0, 0]
    assert overlap_ratio(0, 0) == 0.0
    assert [rescale_factor(method, 0.0, r=0.1, alpha=2.0) for method in RESCALING] == [1.0] * 3
    merged = selective_merge_tile(base["w"], updates_of(base, [dict(base), {}], "w", EPSILON), [1.2, 1.2], [1.0, 1.0])
    assert torch.equal(merged, base["w"])


@given(
    method=st.sampled_from(RESCALING),
    shared=st.integers(0, 2**62),
    unique=st.integers(0, 2**62),
    r=st.floats(0.0, 2.0),
    alpha=st.floats(0.0, 10.0),
)
@settings(max_examples=150, deadline=None)
def test_rescale_factor_is_that_of_equations_6_and_8(method, shared, unique, r, alpha):
    rho = overlap_ratio(shared, unique)
    factor = rescale_factor(method, rho, r=r, alpha=alpha)
    assert factor == pytest.approx(oracle_lambda(method, rho, r, alpha), rel=1e-12)
    if method == "ram_plus_soft" and shared + unique:
        # equation 9: rho / (1 + rho) is the share of the shared elements
        assert factor == pytest.approx(1.0 + r * shared / (shared + unique), rel=1e-9)


def test_preset_official_is_the_formula_of_the_authors_release():
    # the script of the release: 1 + (R - 1) * min(rho, 1) with R = 1.2
    for rho in (0.0, 0.25, 1.0, 3.0, math.inf):
        assert rescale_factor("ram_plus", rho, r=0.2, alpha=1.0) == pytest.approx(1 + (1.2 - 1) * min(rho, 1.0))


def test_known_factors():
    assert rescale_factor("ram_plus", 1.5, r=0.1, alpha=2.0) == pytest.approx(1.15)
    assert rescale_factor("ram_plus", 9.0, r=0.1, alpha=2.0) == pytest.approx(1.2)
    assert rescale_factor("ram_plus_soft", 1.0, r=0.1, alpha=2.0) == pytest.approx(1.05)
    assert rescale_factor("ram", 9.0, r=0.1, alpha=2.0) == 1.0


def alone(base, value, weight=1.0, factor=1.0):
    """One agent merged alone, every difference counted, rounded to its own dtype."""
    update = mask_inactive_(TileUpdate(0, value.float(), value.float() - base.float()), 0.0)
    return selective_merge_tile(base.float(), [update], [factor], [weight]).to(value.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_agent_alone_without_rescaling_keeps_its_bits(dtype):
    generator = torch.Generator().manual_seed(1)
    size, integer = 50_000, torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    draws = [torch.randint(info.min, info.max, (size,), generator=generator).to(integer).view(dtype) for _ in "ab"]
    # not so large that the difference overflows float32; NaN and infinity are refused before
    base, value = (torch.where(draw.float().abs() < 1e38, draw, 0.5).to(dtype) for draw in draws)
    merged = alone(base, value)
    # +0 over -0 is no difference
    expected = torch.where(value == base, base, value)
    assert torch.equal(bits(merged), bits(expected))


def test_one_agent_alone_keeps_bits_that_adding_its_delta_to_the_base_would_lose():
    base = torch.tensor([1.0, -3.0, 1.0, 100.0, 1.0, -1e-3])
    value = torch.tensor([1e-9, 1e-12, -7.7e-10, 2.0**-149, -0.0, -0.0])
    assert not torch.equal(base + (value - base), value)
    assert torch.equal(bits(alone(base, value)), bits(value))


def test_weight_scales_an_agents_unique_changes():
    base, value = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])
    assert alone(base, value, weight=2.0, factor=1.5).tolist() == [1.0 + 2.0 * 1.5 * 0.5, 2.0]
    assert alone(base, value, weight=0.5).tolist() == [1.25, 2.0]


def test_shared_changes_are_averaged_by_weight_over_the_active_agents_only():
    base = {"w": torch.zeros(3)}
    agents = [{"w": torch.tensor([1.0, 1.0, 0.0])}, {"w": torch.tensor([3.0, 0.0, 0.0])}, {"w": torch.zeros(3)}]
    updates = updates_of(base, agents, "w", EPSILON)
    assert selective_merge_tile(base["w"], updates, [10.0, 10.0, 10.0], [1.0, 1.0, 1.0]).tolist() == [2.0, 10.0, 0.0]
    assert selective_merge_tile(base["w"], updates, [1.0] * 3, [1.0, 3.0, 5.0]).tolist() == [2.5, 1.0, 0.0]
    average = METHODS["average"]
    assert average.merge_tile(base["w"], updates, context_of(average, [1.0, 1.0, 2.0])).tolist() == [1.0, 0.25, 0.0]


def test_merging_changes_no_input():
    base = {"w": torch.randn(8)}
    agents = [{"w": base["w"] + torch.randn(8)} for _ in range(3)]
    updates = updates_of(base, agents, "w", EPSILON)
    before = [(u.value.clone(), u.delta.clone(), u.active.clone()) for u in updates]
    kept = base["w"].clone()
    selective_merge_tile(base["w"], updates, [1.1] * 3, [1.0, 2.0, 3.0])
    for method in METHODS.values():
        method.merge_tile(base["w"], updates, context_of(method, [1.0, 2.0, 3.0], numel=8))
    unique_magnitudes(base["w"], base["w"], updates)
    assert torch.equal(base["w"], kept)
    for update, (value, delta, active) in zip(updates, before, strict=True):
        assert torch.equal(update.value, value) and torch.equal(update.delta, delta)
        assert torch.equal(update.active, active)


def test_unique_magnitudes_tell_the_factor_that_was_written():
    base = torch.zeros(5)
    agents = [{"w": torch.tensor([1.0, -2.0, 0.0, 0.0, 5.0])}, {"w": torch.tensor([0.0, 0.0, 4.0, 0.0, 5.0])}]
    updates = updates_of({"w": base}, agents, "w", EPSILON)
    written = selective_merge_tile(base, updates, [1.5, 1.25], [1.0, 1.0])
    assert unique_magnitudes(base, written, updates) == [(4.5, 3.0), (5.0, 4.0)]
    # a change that rounding turned round counts against
    assert unique_magnitudes(base, -written, updates)[0] == (-4.5, 3.0)
