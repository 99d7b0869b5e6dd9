"""The compiled loops against their definitions in torch and numpy, bit for bit, with every set of instructions."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tiles import DTYPES, ENGINES, HALVES, all_patterns, bits, computed_by, random_bits, trained

from ram_trl import AgentRegistry, merge_agents, register_agent
from ram_trl.analyzing.statistics import Statistics, Yardstick, measure_tile
from ram_trl.arithmetic import kernels
from ram_trl.arithmetic.codec import DEFAULT_EPSILON, TILE_NUMEL, apply_layer, encode_tile, unpack_layers
from ram_trl.arithmetic.masks import decode_mask, encode_mask, pack_bits
from ram_trl.arithmetic.ram import OverlapCounts, TileUpdate, count_overlaps, set_mask, unique_magnitudes
from ram_trl.arithmetic.rounding import uniform
from ram_trl.arithmetic.selection import BUCKETS, count_lower, count_upper
from ram_trl.arithmetic.tile import Finiteness, PackedUpdate, TileMerge, merge_tile_compiled, merge_tile_eager
from ram_trl.threads import Scratch


if kernels.compiled is None:
    pytest.skip("the loops are not compiled here", allow_module_level=True)

LEVELS = kernels.compiled.LEVELS
# about the sizes of vectors, of a chunk, and a whole tile
SIZES = [1, 7, 8, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025]


@pytest.fixture(params=LEVELS)
def level(request):
    kernels.compiled.use_level(request.param)
    yield request.param
    kernels.compiled.use_level(LEVELS[-1])


def tiles(dtype):
    """Bases and agents that differ a little, everywhere, in single elements, or not at all."""
    for numel in [*SIZES, 5000]:
        base = random_bits(numel, numel, dtype)
        yield base, random_bits(numel + 1, numel, dtype)
        yield base, base
        for seed, scale in enumerate((1e-6, 3e-5, 1e-2)):
            yield trained(seed, numel, dtype, scale)
        moved = base.clone()
        bits(moved)[-1] ^= 1
        yield base, moved
    patterns = all_patterns(dtype)
    for shift in (1, 127, 128, 129, 255, 256, 2**15 - 1, 2**15):
        yield patterns, patterns.roll(shift)


@pytest.mark.parametrize("dtype", HALVES)
def test_tiles_are_encoded_and_applied_as_by_torch(level, dtype):
    for base, agent in tiles(dtype):
        encoded = encode_tile(base, agent)
        with computed_by("torch"):
            assert encode_tile(base, agent) == encoded
        for layer in (encoded.large, encoded.small):
            if not layer.mask:
                continue
            decoded = layer.decode(len(base), base.itemsize)
            values, expected = base.clone(), base.clone()
            apply_layer(values, decoded)
            with computed_by("torch"):
                apply_layer(expected, decoded)
            assert torch.equal(bits(values), bits(expected))


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_are_those_of_torch(level, dtype):
    for base, agent in tiles(dtype):
        encoded = encode_tile(base, agent)
        layers = [layer.decode(len(base), base.itemsize) for layer in (encoded.large, encoded.small) if layer.mask]
        for some in [layers, layers[:1]]:
            if some:
                found = unpack_layers(base, some, dtype, Scratch())
                with computed_by("torch"):
                    expected = unpack_layers(base, some, dtype, Scratch())
                for one, other in zip(found, expected, strict=True):
                    # of NaN any will do
                    assert torch.equal(bits(one)[~other.isnan()], bits(other)[~other.isnan()])
                    assert torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("num_agents", [1, 2, 7])
def test_magnitudes_of_unique_changes_are_those_of_torch(level, num_agents):
    for numel in [*SIZES, 5000]:
        generator = torch.Generator().manual_seed(numel)
        base, written = (torch.randn(numel, generator=generator) for _ in range(2))
        updates = []
        for position in range(num_agents):
            delta = torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < 0.4)
            updates.append(set_mask(TileUpdate(position, delta, delta), 0.5))
        found = unique_magnitudes(base, written.bfloat16(), updates)
        with computed_by("torch"):
            expected = unique_magnitudes(base, written.bfloat16(), updates)
        for pair, expected_pair in zip(found, expected, strict=True):
            assert pair == pytest.approx(expected_pair, rel=1e-5, abs=1e-4)


def test_gaps_are_those_of_numpy(level):
    rng = np.random.default_rng(0)
    for numel, density in itertools.product([*SIZES, 5000], (0.0005, 0.004, 0.05, 0.16)):
        mask = rng.random(numel) < density
        mask[rng.integers(numel)] = True
        bitmap, ones = pack_bits(mask), int(np.count_nonzero(mask))
        data = encode_mask(bitmap, numel, ones)
        decoded = decode_mask(memoryview(data), numel)
        with computed_by("torch"):
            assert encode_mask(bitmap, numel, ones) == data
            assert np.array_equal(decode_mask(memoryview(data), numel), decoded)
        assert np.array_equal(decoded, bitmap)


@pytest.mark.parametrize("num_agents", [0, 1, 3, 8, 33, 70])
def test_overlaps_are_counted_as_by_numpy(level, num_agents):
    rng = np.random.default_rng(num_agents)
    for numel in [*SIZES, 4096, 4097, 10_000]:
        density = rng.choice([0.05, 0.5, 1.0], num_agents)
        masks = {3 * t: pack_bits(rng.random(numel) < density[t]) for t in range(num_agents)}
        compiled, expected = OverlapCounts.zeros(3 * num_agents), OverlapCounts.zeros(3 * num_agents)
        count_overlaps(masks, numel, compiled)
        with computed_by("torch"):
            count_overlaps(masks, numel, expected)
        assert compiled == expected


def make_base(generator, numel, dtype):
    """Weights with zeros of both signs, denormals, and others about the largest numbers of float16."""
    base = (torch.randn(numel, generator=generator) * 0.02).to(dtype)
    tiny = float(torch.finfo(dtype).smallest_normal)
    for value in (0.0, -0.0, tiny / 4, -tiny / 2, 2.0**-24, 3e4):
        base[torch.rand(numel, generator=generator) < 0.03] = value
    return base


def packed_update(position, base, agent, ignored):
    """An agent as it is stored, with its small changes unless they are ignored."""
    encoded = encode_tile(base, agent)
    stored = [encoded.large] if ignored >= DEFAULT_EPSILON else [encoded.large, encoded.small]
    layers = [layer.decode(len(base), base.itemsize) for layer in stored if layer.mask]
    return PackedUpdate(position, layers) if layers else None


def make_update(generator, position, base, kind, epsilon, ignored):
    """One agent, for torch and for the compiled loops: as it is stored, as values, or as deltas of an adapter."""
    numel = len(base)
    moved = torch.rand(numel, generator=generator) < 0.6
    scale = 10.0 ** -torch.randint(2, 7, (numel,), generator=generator).float()
    delta = torch.where(moved, torch.randn(numel, generator=generator) * scale, 0.0)
    # not a change, but for -0.0
    delta[torch.rand(numel, generator=generator) < 0.05] = epsilon
    value = base.float() + delta
    if kind != "adapter":
        stored = value.to(base.dtype)
        stored[torch.rand(numel, generator=generator) < 0.02] = -0.0
        value = stored.float()
        delta = value - base.float()
        if kind == "packed":
            return TileUpdate(position, value, delta), packed_update(position, base, stored, ignored)
    return TileUpdate(position, value, delta), TileUpdate(position, value.clone(), delta.clone())


def both(base, pairs, merge, out_dtype, start=0):
    """What torch and the compiled loops make of a tile; agents without large changes are left out of both."""
    pairs = [pair for pair in pairs if pair[1] is not None]
    eager, compiled = torch.empty(len(base), dtype=out_dtype), torch.empty(len(base), dtype=out_dtype)
    expected = merge_tile_eager(base, [update for update, _ in pairs], merge, "w", start, eager)
    result = merge_tile_compiled(base, [update for _, update in pairs], merge, "w", start, compiled)
    return (expected, eager), (result, compiled)


def assert_same(base, expected, result):
    (expected, eager), (result, compiled) = expected, result
    assert (result.finiteness, result.diverged) == (expected.finiteness, expected.diverged)
    if result.diverged or result.finiteness is Finiteness.NOT_FINITE:
        return
    assert torch.equal(bits(compiled), bits(eager))
    if result.finiteness is Finiteness.FINITE:
        # what rounding moves to and fro may cancel
        tolerance = 1e-6 * float((eager.double() - base.double()).abs().sum()) + 1e-30
        for pair, expected_pair in zip(result.magnitudes, expected.magnitudes, strict=True):
            assert pair == pytest.approx(expected_pair, rel=1e-5, abs=tolerance)


# Numbers of merges of RAM+ and of a sum, with all thresholds and gains.
MANY = range(36)
FEW = [*range(12), *range(18, 30)]


def merges(rounding, numbers):
    """Methods, thresholds, gains and weights in turn; a third of the merges are without gains."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        num_agents = 1 + number % 8
        factors, weights = [1.0] * num_agents, [1.0] * num_agents
        if number % 3:
            factors = (1 + torch.rand(num_agents, generator=generator) * 0.2).tolist()
        if number % 3 == 2:
            weights = (0.25 + torch.rand(num_agents, generator=generator) * 3).tolist()
        merge = TileMerge(
            method="ram_plus" if number < 18 else "task_arithmetic",
            epsilon=(0.0, DEFAULT_EPSILON, 1e-3)[number // 3 % 3],
            factors=factors,
            weights=weights,
            rounding=rounding,
            seed=number * 7919 - 50,
            device=torch.device("cpu"),
            options={"scaling": 0.7 if number % 3 else 1.0},
        )
        yield generator, num_agents, merge


def kinds_for(base):
    """Which updates there are: float32 comes as values."""
    return ["packed", "values", "adapter", "packed"] if base.itemsize == 2 else ["values", "adapter"]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("base_dtype", DTYPES)
def test_tiles_are_merged_as_by_torch(level, base_dtype, out_dtype, rounding):
    finite = []
    for number, (generator, num_agents, merge) in enumerate(merges(rounding, MANY)):
        base = make_base(generator, SIZES[number % len(SIZES)], base_dtype)
        kinds = itertools.cycle(kinds_for(base))
        pairs = [make_update(generator, t, base, next(kinds), merge.epsilon, merge.ignored) for t in range(num_agents)]
        if any(packed is not None for _, packed in pairs):
            expected, result = both(base, pairs, merge, out_dtype, start=number << 3 * number % 41)
            assert_same(base, expected, result)
            finite.append(result[0].finiteness is Finiteness.FINITE)
    assert sum(finite) > 20


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [5, 23])
def test_whole_tiles_are_merged_as_by_torch(level, number, dtype, rounding):
    # both have gains, weights and the default threshold
    generator, num_agents, merge = next(merges(rounding, [number]))
    base = make_base(generator, TILE_NUMEL, dtype)
    kinds = itertools.cycle(kinds_for(base))
    pairs = [make_update(generator, t, base, next(kinds), merge.epsilon, merge.ignored) for t in range(num_agents)]
    assert_same(base, *both(base, pairs, merge, dtype, start=3 * TILE_NUMEL))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("base_dtype", DTYPES)
def test_any_finite_numbers_are_merged_as_by_torch(level, base_dtype, out_dtype, rounding):
    for number, (_, num_agents, merge) in enumerate(merges(rounding, FEW)):
        draws = [random_bits(100 * number + t, 1025, base_dtype) for t in range(num_agents + 1)]
        # no sum of these overflows float32, many overflow float16
        base, *agents = (torch.where(draw.float().abs() < 1e36, draw, 0.0).to(base_dtype) for draw in draws)
        pairs = []
        for position, agent in enumerate(agents):
            update = TileUpdate(position, agent.float(), agent.float() - base.float())
            packed = TileUpdate(position, update.value.clone(), update.delta.clone())
            if base.itemsize == 2:
                packed = packed_update(position, base, agent, merge.ignored)
            pairs.append((update, packed))
        assert_same(base, *both(base, pairs, merge, out_dtype))


def plain(num_agents=1, rounding="nearest", factor=1.0, method="ram"):
    ones = [1.0] * num_agents
    factors = [factor] * num_agents
    cpu = torch.device("cpu")
    return TileMerge(
        method=method, epsilon=DEFAULT_EPSILON, factors=factors, weights=ones, rounding=rounding, seed=0, device=cpu
    )


def updates_of(base, *agents, ignored=DEFAULT_EPSILON):
    """Stored agents for torch and for the compiled loops."""
    pairs = []
    for position, agent in enumerate(agents):
        update = TileUpdate(position, agent.float(), agent.float() - base.float())
        pairs.append((update, packed_update(position, base, agent, ignored)))
    return pairs


@pytest.mark.parametrize("dtype", HALVES)
def test_one_agent_alone_keeps_its_bits_and_negative_zeros(level, dtype):
    finite = all_patterns(dtype)[all_patterns(dtype).isfinite()]
    for base in (finite.roll(1), finite.flip(0)):
        # differences that float32 holds
        agent = torch.where((finite.float() - base.float()).isfinite(), finite, base)
        expected, (_, merged) = both(base, updates_of(base, agent), plain(), dtype)
        assert torch.equal(bits(merged), bits(expected[1]))
        is_large = (agent.float() - base.float()).abs() > DEFAULT_EPSILON
        assert torch.equal(bits(merged)[is_large], bits(agent)[is_large])
        assert torch.equal(bits(merged)[~is_large], bits(base)[~is_large])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32])
def test_values_beyond_float16_are_told(level, base_dtype, rounding):
    base = torch.zeros(1030, dtype=base_dtype)
    agent = base.clone()
    agent[1029] = 70_000.0
    delta = agent.float()
    pairs = [(TileUpdate(0, delta, delta.clone()), TileUpdate(0, delta.clone(), delta.clone()))]
    expected, result = both(base, pairs, plain(rounding=rounding), torch.float16)
    assert result[0].finiteness is Finiteness.TOO_LARGE
    assert_same(base, expected, result)


def test_random_numbers_that_equal_the_probability_decide_as_in_torch(level):
    drawn = uniform(20_000, seed=0, name="w", start=0, device=torch.device("cpu"))
    # float32 has 16 places behind those of bfloat16
    is_equal = (drawn * 2**16 == (drawn * 2**16).floor()) & (drawn < 0.5) & (drawn > 0)
    assert is_equal.sum() > 10
    base = torch.zeros(20_000)
    value = torch.where(is_equal, 1.0 + drawn * 2.0**-7, 1.0)
    pairs = [(TileUpdate(0, value, value.clone()), TileUpdate(0, value.clone(), value.clone()))]
    expected, result = both(base, pairs, plain(rounding="stochastic"), torch.bfloat16)
    assert_same(base, expected, result)
    assert (result[1] == 1.0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["ram", "average"])
def test_agents_that_are_not_finite_are_named(level, method, dtype, bad):
    base, good = trained(1, 1100, dtype, 1e-3)
    # in the mask of equation 1 a NaN is no change: it comes as values
    for position, kind in itertools.product((0, 1027, 1099), ("values", "packed")):
        if kind == "packed" and (dtype == torch.float32 or bad != bad):
            continue
        diverged = good.clone()
        diverged[position] = bad
        agents = [good, diverged, good]
        pairs = [(TileUpdate(t, a.float(), a.float() - base.float()),) * 2 for t, a in enumerate(agents)]
        if kind == "packed":
            pairs = updates_of(base, *agents)
        compiled = [(TileUpdate(e.agent, e.value, e.delta.clone()), c) for e, c in pairs]
        expected, result = both(base, compiled, plain(3, method=method), dtype)
        assert expected[0].diverged == result[0].diverged == [1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("method", ["ram", "average"])
def test_base_that_is_not_finite_is_told(level, method, out_dtype, bad):
    base, agent = trained(1, 1100, torch.float32, 1e-3)
    base[1050] = bad
    delta = torch.where(torch.arange(1100) == 1050, 0.0, agent - base)
    pairs = [(TileUpdate(0, agent, delta), TileUpdate(0, agent.clone(), delta.clone()))]
    _, (result, _) = both(base, pairs, plain(method=method), out_dtype)
    assert result.finiteness is Finiteness.NOT_FINITE and result.diverged == []


def test_difference_beyond_float32_is_refused_as_by_torch():
    base, agent = torch.full((20,), -3e38, dtype=torch.bfloat16), torch.full((20,), 3e38, dtype=torch.bfloat16)
    expected, result = both(base, updates_of(base, agent), plain(), torch.bfloat16)
    assert result[0].diverged == expected[0].diverged == [0]


def test_denormal_numbers_survive_where_the_processor_flushes_them():
    base = torch.tensor([2.0**-24, 3 * 2.0**-24, 1.0] * 10).half()
    agent = torch.where(base == 1.0, 2.0, base.float()).half()
    pairs = updates_of(base, agent)
    # as a library that was compiled with -ffast-math does
    assert torch.set_flush_denormal(True)
    try:
        expected, result = both(base, pairs, plain(), torch.float16)
    finally:
        torch.set_flush_denormal(False)
    assert_same(base, expected, result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [5, 23])
def test_the_sums_are_the_same_bits_with_every_set_of_instructions(number, dtype):
    generator, num_agents, merge = next(merges("nearest", [number]))
    base = make_base(generator, 5000, dtype)
    # packed updates alone have loops of their own on some processors
    kind = "packed" if dtype in HALVES else "values"
    updates = [make_update(generator, t, base, kind, merge.epsilon, merge.ignored)[1] for t in range(num_agents)]
    sums = []
    for name in LEVELS:
        kernels.compiled.use_level(name)
        out = torch.empty(len(base), dtype=dtype)
        sums.append(merge_tile_compiled(base, updates, merge, "w", 0, out).magnitudes)
    assert all(min(pair) > 0 for pair in sums[0]) and all(found == sums[0] for found in sums)


def test_random_numbers_are_those_of_torch(level):
    for numel, start in itertools.product([*SIZES, 5000], (0, 1, 2**40)):
        stream = {"seed": numel, "name": "w", "start": start, "device": torch.device("cpu")}
        drawn = uniform(numel, **stream)
        with computed_by("torch"):
            assert torch.equal(drawn, uniform(numel, **stream))


def measured(updates, base, merged, num_agents, epsilons):
    statistics = Statistics.zeros(num_agents, len(epsilons))
    # what is there already is added to
    for _ in range(2):
        measure_tile(updates, base, merged, Yardstick(epsilons, [1.0] * num_agents), statistics)
    return {field.name: getattr(statistics, field.name) for field in dataclasses.fields(statistics)}


def tiles_to_measure(numel):
    """Updates of some of the agents of an analysis, a base and a merged tile, and thresholds."""
    grids = [[1e-5], [0.0, 1e-5, 1e-4, 1e-3, 1e3], [3e38]]
    for number, (num_agents, epsilons) in enumerate(itertools.product((1, 2, 5), grids)):
        generator = torch.Generator().manual_seed(numel + number)
        base = torch.randn(numel, generator=generator) * 0.02
        updates = []
        for position in range(num_agents):
            delta = torch.randn(numel, generator=generator) * 10.0 ** (-5 + position)
            # few, half, and nearly all of them; and one agent that changes nothing that counts
            delta[torch.rand(numel, generator=generator) > (0.01, 0.5, 0.99)[position % 3]] = 0.0
            updates.append(TileUpdate(2 * position, base + delta, delta if position != 4 else delta * 1e-30))
        merged = base + sum(update.delta for update in updates)
        yield updates, base, merged, 2 * num_agents, epsilons


def test_statistics_are_those_of_numpy(level):
    for numel in [*SIZES, 5000]:
        for tile in tiles_to_measure(numel):
            found = measured(*tile)
            with computed_by("torch"):
                expected = measured(*tile)
            for name, values in expected.items():
                if values.dtype == np.int64 or name == "largest":
                    assert np.array_equal(found[name], values), name
                else:
                    # products of both signs nearly cancel
                    scale = np.abs(values).max() if name == "products" else 0.0
                    np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12 * scale, err_msg=name)


def test_statistics_are_the_same_bits_with_every_set_of_instructions():
    tile = next(itertools.islice(tiles_to_measure(5000), 7, None))
    results = []
    for name in LEVELS:
        kernels.compiled.use_level(name)
        results.append(measured(*tile))
    assert results[0]["products"].any() and results[0]["l1"].all(axis=0).any()
    for found in results:
        assert all(np.array_equal(found[name], values) for name, values in results[0].items())


@pytest.mark.parametrize("kind", ["any bits", "trained"])
def test_magnitudes_are_counted_as_by_numpy(level, kind):
    for numel in [*SIZES, 5000]:
        values = random_bits(numel, numel, torch.float32)
        if kind == "trained":
            base, agent = trained(numel, numel, torch.bfloat16, 1e-4)
            values = agent.float() - base.float()
        # what is there already is added to
        found, expected = (np.full((3, BUCKETS), 2**40) for _ in range(2))
        upper = int(bits(values)[0] & 0x7FFFFFFF) >> 16
        for counts, engine in zip((found, expected), ENGINES, strict=True):
            with computed_by(engine):
                count_upper(values, counts[0])
                count_lower(values, upper, counts[1])
                count_lower(values, 0, counts[2])
        assert np.array_equal(found, expected)
        assert found[0].sum() - BUCKETS * 2**40 == np.count_nonzero(values.numpy() != 0)


def files_of(folder, pattern):
    return {path.name: path.read_bytes() for path in folder.rglob(pattern)}


CASES = [
    {},
    {"epsilon": 0.0, "rounding": "stochastic"},
    {"method": "average"},
    {"method": "task_arithmetic", "rounding": "stochastic", "epsilon": 1e-4},
    {"method": "dare_ties", "method_options": {"density": 0.1}},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CASES)
def test_models_registered_and_merged_without_the_loops_are_the_same_bytes(zoo, tmp_path, dtype, options):
    base = zoo.base("qwen2_wide", dtype)
    agents = {f"a{seed}": zoo.agent(base, seed=seed, density=0.1 + 0.2 * seed) for seed in range(3)}
    stored, merged = [], []
    for engine in ENGINES:
        with computed_by(engine):
            for name, model in agents.items():
                register_agent(str(tmp_path / engine), name, str(model), base_model=str(base), epsilon=0.0)
        for name in agents:
            folder = AgentRegistry(tmp_path / engine).get(name).path
            stored.append((name, engine, files_of(folder, "delta.safetensors") | files_of(folder, "tensors.json")))
    for registry, engine in itertools.product(ENGINES, ENGINES):
        with computed_by(engine):
            merge_agents(str(tmp_path / registry), str(tmp_path / f"{registry}-{engine}"), **options)
        merged.append(files_of(tmp_path / f"{registry}-{engine}", "*.safetensors"))
    for (name, _, files), (other, _, other_files) in zip(stored[:3], stored[3:], strict=True):
        assert name == other and len(files) == 2 and files == other_files
    assert merged[0] and all(files == merged[0] for files in merged)
