"""The lossless codec: every bit pattern comes back, and no sequence of bytes does worse than a CorruptedFileError."""

import base64
import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiles import DTYPES, ENGINES, HALVES, all_patterns, bits, computed_by, from_bits, random_bits, trained

from ram_trl.arithmetic.codec import (
    DEFAULT_EPSILON,
    TILE_NUMEL,
    EncodedLayer,
    apply_layer,
    codec_dtype,
    encode_tile,
    from_ordered,
    is_finite,
    is_mergeable,
    to_ordered,
)
from ram_trl.arithmetic.masks import unpack_bits
from ram_trl.errors import CorruptedFileError


@pytest.fixture(scope="module", autouse=True, params=ENGINES)
def engine(request):
    with computed_by(request.param):
        yield


def decoded(base, *layers):
    """The values that layers make of a base."""
    values = base.clone()
    for layer in layers:
        if layer.mask:
            apply_layer(values, layer.decode(len(base), base.itemsize))
    return values


def assert_round_trip(base, agent):
    tile = encode_tile(base, agent)
    differing = bits(base) != bits(agent)
    assert tile.changed == int(differing.sum())
    # what a merge reads is what changed by more than epsilon, and only that
    large = (agent.float() - base.float()).abs() > DEFAULT_EPSILON
    for layer, mask in ((tile.large, large), (tile.small, differing & ~large)):
        assert type(layer.mask) is type(layer.codes) is bytes
        assert bool(layer.mask) == bool(layer.codes) == bool(mask.any())
        if layer.mask:
            bitmap = layer.decode(len(base), base.itemsize).bitmap
            assert torch.equal(torch.from_numpy(unpack_bits(bitmap, len(base))), mask)
    for layers in ((tile.large, tile.small), (tile.small, tile.large)):
        assert torch.equal(bits(decoded(base, *layers)), bits(agent))
    expected = torch.where(large, bits(agent), bits(base))
    assert torch.equal(bits(decoded(base, tile.large)), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_all_16_bit_patterns_come_back_over_many_bases(dtype):
    agent = all_patterns(dtype)
    one_base_each = [
        0x0000,  # 0
        0x8000,  # -0
        0x0001,  # smallest denormal
        0x8001,
        0x3F80,  # 1 in bfloat16
        0xBC00,  # -1 in float16
        0x7F7F,  # largest bfloat16
        0x7F80,  # infinity in bfloat16
        0xFF80,
        0x7BFF,  # largest float16
        0x7C00,  # infinity in float16
        0xFC00,
        0x7FC1,  # NaN with a payload
        0x7FFF,
        0xFFFF,
    ]
    for pattern in one_base_each:
        assert_round_trip(from_bits([pattern], dtype).expand(2**16).contiguous(), agent)
    for seed in range(20):
        base = agent[torch.randperm(2**16, generator=torch.Generator().manual_seed(seed))]
        assert_round_trip(base, agent)
        assert_round_trip(agent.roll(seed), agent)


@pytest.mark.parametrize("dtype", HALVES)
def test_order_of_integers_is_the_order_of_numbers(dtype):
    values = all_patterns(dtype)
    finite = values[~values.isnan()]
    in_order = finite[to_ordered(finite).argsort()]
    assert (in_order.float().diff() >= 0).all()
    assert to_ordered(from_bits([0x8001, 0x8000, 0x0000, 0x0001], dtype)).tolist() == [-2, -1, 0, 1]
    assert torch.equal(bits(from_ordered(to_ordered(values), dtype)), bits(values))


def test_order_of_integers_is_the_order_of_numbers_in_float32():
    values = random_bits(3, 100_000, torch.float32)
    finite = values[~values.isnan()]
    assert (finite[to_ordered(finite).argsort()].double().diff() >= 0).all()
    assert to_ordered(from_bits([0x80000001, 0x80000000, 0, 1], torch.float32)).tolist() == [-2, -1, 0, 1]
    assert torch.equal(bits(from_ordered(to_ordered(values), torch.float32)), bits(values))


@given(
    seed=st.integers(0, 2**32),
    numel=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    equal=st.sampled_from([0.0, 0.5, 0.99]),
)
@settings(max_examples=150, deadline=None)
def test_random_bit_patterns_come_back(seed, numel, dtype, equal):
    base, agent = random_bits(seed, numel, dtype), random_bits(seed + 1, numel, dtype)
    keep = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < equal
    assert_round_trip(base, torch.where(keep, bits(base), bits(agent)).view(dtype))


SPECIAL = {
    "positive": [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF],
    "negative": [0x80000000, 0x80000001, 0xFF7FFFFF, 0xFF800000, 0xFFC12345, 0xFFFFFFFF],
}
special_bits = st.sampled_from([*SPECIAL["positive"], *SPECIAL["negative"]])


@given(pairs=st.lists(st.tuples(special_bits, special_bits | st.integers(0, 2**32 - 1)), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_special_float32_patterns_come_back(pairs):
    base, agent = (from_bits(column, torch.float32) for column in zip(*pairs, strict=True))
    assert_round_trip(base, agent)


@pytest.mark.parametrize("difference", [127, -127, 128, -128, 129, -129, 2**15 - 1, -(2**15)])
def test_differences_about_the_bounds_of_int8_and_int16_come_back(difference):
    ordered = torch.tensor([0, 5, 0, -9, 0], dtype=torch.int16)
    moved = ordered + torch.tensor([0, difference, 1, difference, -1], dtype=torch.int16)
    for dtype in HALVES:
        assert_round_trip(from_ordered(ordered, dtype), from_ordered(moved, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_tile_comes_back_and_equal_tensors_give_nothing(dtype):
    base = random_bits(1, TILE_NUMEL, dtype)
    nothing = encode_tile(base, base.clone())
    assert nothing.changed == 0 and nothing.large == nothing.small == EncodedLayer(b"", b"")
    assert_round_trip(base, random_bits(2, TILE_NUMEL, dtype))
    assert_round_trip(*trained(3, TILE_NUMEL, dtype, 1e-5))
    moved = base.clone()
    bits(moved)[-1] ^= 1
    assert_round_trip(base, moved)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_different_sign_and_nans_of_different_payload_are_different(dtype):
    width = 8 * dtype.itemsize
    infinity = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}[dtype]
    base = from_bits([0, infinity + 1], dtype)
    agent = from_bits([1 << (width - 1), infinity + 2], dtype)
    assert encode_tile(base, agent).changed == 2
    assert_round_trip(base, agent)


def test_changes_of_epsilon_are_small_and_those_above_are_large():
    epsilon = torch.tensor(DEFAULT_EPSILON)
    above = torch.nextafter(epsilon, torch.tensor(1.0))
    agent = torch.stack([epsilon, -epsilon, above, -above, epsilon / 2, torch.tensor(0.0)])
    tile = encode_tile(torch.zeros(6), agent)
    large, small = (unpack_bits(layer.decode(6, 4).bitmap, 6).tolist() for layer in (tile.large, tile.small))
    assert large == [False, False, True, True, False, False]
    assert small == [True, True, False, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("error")
def test_single_element_comes_back_without_a_warning(dtype):
    assert_round_trip(random_bits(1, 1, dtype), random_bits(2, 1, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_not_changed(dtype):
    base, agent = random_bits(1, 300, dtype), random_bits(2, 300, dtype)
    kept = bits(base).clone(), bits(agent).clone()
    encode_tile(base, agent)
    assert torch.equal(bits(base), kept[0]) and torch.equal(bits(agent), kept[1])


def test_codec_dtype_holds_both_tensors_exactly():
    assert codec_dtype(torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert codec_dtype(torch.float16, torch.float16) == torch.float16
    assert codec_dtype(torch.bfloat16, torch.float16) == torch.float32
    assert codec_dtype(torch.bfloat16, torch.float32) == torch.float32
    assert codec_dtype(torch.float64, torch.float64) is None
    assert codec_dtype(torch.bfloat16, torch.int8) is None
    assert codec_dtype(torch.float8_e4m3fn, torch.float8_e4m3fn) is None
    assert [is_mergeable(dtype) for dtype in (*DTYPES, torch.float64, torch.int8)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_are_told_from_others(dtype):
    info = torch.finfo(dtype)
    finite = torch.tensor(
        [0.0, -0.0, info.max, info.min, info.smallest_normal, -info.smallest_normal / 2], dtype=dtype
    )
    assert is_finite(finite)
    for bad in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        assert not is_finite(torch.cat([finite, torch.tensor([bad], dtype=dtype), finite]))


# Golden bytes: agents that were stored must stay readable. Compressed bytes may differ from one zstd to the next, so
# the codes are pinned, and frames that must decode for ever. A mask of so few elements is 0 and its bits.
GOLDEN = {
    torch.bfloat16: {
        "base": [0x3F80, 0xBF80, 0x0000, 0x8000, 0x7F80, 0x3C00, 0x4000, 0x0001, 0x3800, 0x0000],
        "agent": [0x3F81, 0xBF7F, 0x8000, 0x0000, 0x7FC1, 0x3B00, 0x4000, 0xFF80, 0x3801, 0xC000],
        # codes of a byte: 1, 1 and three that say 0; escapes of two: -256, -32642 wrapped, -16385; little-endian
        "large": ("00 a302", "01 01 00 00 00  00ff 7e80 ffbf", "KLUv/SALWQAAAQEAAAAA/36A/78="),
        # -0 is 1 below 0; infinity and a NaN are 65 apart
        "small": ("00 1c01", "ff 01 41 01", "KLUv/SAEIQAA/wFBAQ=="),
    },
    torch.float16: {
        "base": [0x3C00, 0xBC00, 0x0000, 0x8000, 0x7C00, 0x0001, 0x4000, 0xFC00],
        "agent": [0x3C01, 0xBBFF, 0x8000, 0x0000, 0x7E01, 0x0002, 0x4000, 0x3C00],
        "large": ("00 83", "01 01 00  01b8", "KLUv/SAFKQAAAQEAAbg="),
        "small": ("00 3c", "ff 01 00 01  0102", "KLUv/SAGMQAA/wEAAQEC"),
    },
    torch.float32: {
        "base": [0x3F800000, 0xBF800000, 0x00000000, 0x7F800000, 0x40000000, 0x3F800000, 0xC0000000],
        "agent": [0x3F800001, 0xBF7FFFFE, 0x80000000, 0x7FC12345, 0x40000000, 0x40000000, 0x40000000],
        # zigzag 0x1000000 and 0xfffffffd, the lowest bytes of all first
        "large": ("00 60", "00 fd  00 ff  00 ff  01 ff", "KLUv/SAIQQAAAP0A/wD/Af8="),
        # zigzag 2, 4, 1, 0x82468a
        "small": (
            "00 0f",
            "02 04 01 8a  00 00 00 46  00 00 00 82  00 00 00 00",
            "KLUv/SAQgQAAAgQBigAAAEYAAACCAAAAAA==",
        ),
    },
}


@pytest.mark.parametrize("dtype", GOLDEN)
def test_golden_bytes(dtype):
    golden = GOLDEN[dtype]
    base, agent = from_bits(golden["base"], dtype), from_bits(golden["agent"], dtype)
    tile = encode_tile(base, agent)
    for layer, (mask, codes, _) in ((tile.large, golden["large"]), (tile.small, golden["small"])):
        assert layer.mask.hex() == bytes.fromhex(mask).hex()
        assert zstandard.decompress(layer.codes).hex() == bytes.fromhex(codes).hex()
        assert zstandard.get_frame_parameters(layer.codes).content_size == len(bytes.fromhex(codes))
    stored = [
        EncodedLayer(bytes.fromhex(mask), base64.b64decode(frame))
        for mask, _, frame in (golden["large"], golden["small"])
    ]
    assert torch.equal(bits(decoded(base, *stored)), bits(agent))


# As above with 1,000 elements, so that zstd's entropy coding and the other kinds of masks have a part in it. bfloat16
# counts up from 0x3600; elements from 100 on are 1 up, every seventh is 300 down, every hundredth turns negative.
GOLDEN_COMPRESSED = [
    "Aii1L/0gZQUBAJjIYyoGAAUGAgMGBAEGAQQGAwIGBhAA3OBGOLjBR0YE",
    "KLUv/WAvAE0BAKAAAG6SppHV/t6Q1f4WTo+yvo32jAgAgMGAQXAzwLSgbgFskkMKSAEW",
    "ASi1L/0gfXUCALQDgUAgEAgEAoFAIBAI9P/+/+//////f7/f7/f7/X6+3+/3+/1+v9/v9/vtfr/f7/f6/fv9fr/ebt/v9/sHAIAIYCjgDOQ3zozBbg2gBA==",
    "KLUv/WCSAs0CACKFCA7gWQ7g3ABgBwBzBg4lGVNEGDLAtm3btm3btm3btm3b9hUlIODHBxLJJjAKNyz4cMOCAx9uWPDDDQs+3LDgww0LPmy4YcGHGxZ8uGHBhzUs+HBb5IEF",
]


def test_golden_compressed_tile_decodes():
    base = torch.arange(0x3600, 0x3600 + 1000).to(torch.int16)
    agent = base.clone()
    agent[100:] += 1
    agent[::7] -= 300
    agent[::100] ^= -(2**15)
    base = base.view(torch.bfloat16)
    parts = [base64.b64decode(text) for text in GOLDEN_COMPRESSED]
    stored = [EncodedLayer(*parts[:2]), EncodedLayer(*parts[2:])]
    assert torch.equal(bits(decoded(base, *stored)), agent)
    tile = encode_tile(base, agent.view(torch.bfloat16))
    assert [layer.mask[0] for layer in (tile.large, tile.small)] == [part[0] for part in parts[::2]] == [2, 1]
    assert [zstandard.decompress(layer.codes) for layer in (tile.large, tile.small)] == [
        zstandard.decompress(part) for part in parts[1::2]
    ]


def decodes_or_refuses(layer, base):
    try:
        values = decoded(base, layer)
    except CorruptedFileError:
        return False
    assert values.dtype == base.dtype and values.shape == base.shape
    return True


def layers_of_both_widths():
    for dtype in (torch.bfloat16, torch.float32):
        base, agent = trained(5, 400, dtype, 1e-4)
        agent[::50] = -7.0
        yield base, encode_tile(base, agent).large


def test_every_truncation_is_refused():
    for base, layer in layers_of_both_widths():
        for length in range(len(layer.codes)):
            assert not decodes_or_refuses(EncodedLayer(layer.mask, layer.codes[:length]), base)
        for length in range(1, len(layer.mask)):
            assert not decodes_or_refuses(EncodedLayer(layer.mask[:length], layer.codes), base)


def test_every_changed_byte_decodes_or_is_refused():
    for base, layer in layers_of_both_widths():
        for part in ("mask", "codes"):
            refused, data = 0, getattr(layer, part)
            for position in range(len(data)):
                for change in (0x01, 0x80, 0xFF):
                    mutated = bytearray(data)
                    mutated[position] ^= change
                    parts = {"mask": layer.mask, "codes": layer.codes, part: bytes(mutated)}
                    refused += not decodes_or_refuses(EncodedLayer(**parts), base)
            assert refused > 0


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_mutations_decode_or_are_refused(data):
    base, layer = data.draw(st.sampled_from(list(layers_of_both_widths())))
    parts = [bytearray(layer.mask), bytearray(layer.codes)]
    for _ in range(data.draw(st.integers(1, 6))):
        mutated = data.draw(st.sampled_from(parts))
        start = data.draw(st.integers(0, len(mutated)))
        removed = data.draw(st.integers(0, 4))
        mutated[start : start + removed] = data.draw(st.binary(max_size=4))
    decodes_or_refuses(EncodedLayer(*map(bytes, parts)), base)


ALL_50 = b"\0" + b"\xff" * 6 + b"\x03"


@given(junk=st.binary(max_size=60))
@example(junk=b"")
@example(junk=bytes.fromhex("502a4d18 04000000 00000000"))  # a skippable frame
@example(junk=bytes.fromhex("28b52ffd 20 00 010000"))  # a frame of nothing
@settings(max_examples=100, deadline=None)
def test_codes_that_are_no_frame_are_refused(junk):
    for base in (torch.zeros(50), torch.zeros(50, dtype=torch.bfloat16)):
        assert not decodes_or_refuses(EncodedLayer(ALL_50, junk), base)


@pytest.mark.parametrize("dtype", DTYPES)
@given(mask=st.integers(0, 2**12 - 1), payload=st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_payloads_of_any_bytes_decode_or_are_refused(dtype, mask, payload):
    layer = EncodedLayer(b"\0" + mask.to_bytes(2, "little"), zstandard.compress(payload))
    decodes_or_refuses(layer, torch.zeros(12, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "payload"),
    [
        (torch.bfloat16, ""),
        (torch.bfloat16, "01 01 01"),  # fewer codes than changes
        (torch.bfloat16, "01 01 01 01 01"),  # half an escape
        (torch.bfloat16, "01 01 01 01 01 00"),  # an escape that no code asks for
        (torch.bfloat16, "00 01 01 01"),  # a code that asks for an escape that is not there
        (torch.bfloat16, "00 00 01 01 01 00"),
        (torch.float32, ""),
        (torch.float32, "00" * 15),
        (torch.float32, "00" * 12),
        (torch.float32, "00" * 20),
    ],
)
def test_payload_of_a_wrong_length_is_refused(dtype, payload):
    codes = zstandard.compress(bytes.fromhex(payload))
    assert not decodes_or_refuses(EncodedLayer(b"\0\x0f", codes), torch.zeros(4, dtype=dtype))
    # more elements, of which as many changed
    assert not decodes_or_refuses(EncodedLayer(b"\0\x0f\0", codes), torch.zeros(9, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_for_another_number_of_elements_is_refused(dtype):
    layer = encode_tile(torch.zeros(100, dtype=dtype), torch.ones(100, dtype=dtype)).large
    for numel in (1, 92, 99, 105, 1000):
        assert not decodes_or_refuses(layer, torch.zeros(numel, dtype=dtype))


def bombs():
    """Small frames that claim, or hold, far more than a tile."""
    zeros = bytes(64 << 20)
    yield zstandard.compress(zeros)
    yield zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    for size in (2**31, 2**40, 2**63, 2**64 - 1):
        # magic number, a descriptor that announces 8 bytes of content size, the size, an empty last block
        yield bytes.fromhex("28b52ffd e0") + size.to_bytes(8, "little") + bytes.fromhex("010000")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frame_that_claims_a_huge_size_is_refused_without_allocating_it(dtype):
    base = torch.zeros(1000, dtype=dtype)
    for bomb in bombs():
        tracemalloc.start()
        assert not decodes_or_refuses(EncodedLayer(b"\0" + b"\xff" * 125, bomb), base)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


# facts: weights N(0, 0.02) in bfloat16, updates N(0, s): density of changes, and what a snapshot may take at most over
# 2 bytes an element
@pytest.mark.parametrize(
    ("scale", "density", "bar"),
    [(2e-6, 0.024, 0.03), (1e-5, 0.116, 0.1), (3e-5, 0.32, 0.165), (6e-5, 0.53, 0.21), (1.2e-4, 0.72, 0.25)],
)
def test_size_of_a_snapshot(scale, density, bar):
    base, agent = trained(0, TILE_NUMEL, torch.bfloat16, scale)
    tile = encode_tile(base, agent)
    assert tile.changed / TILE_NUMEL == pytest.approx(density, rel=0.05)
    parts = [tile.large.mask, tile.large.codes, tile.small.mask, tile.small.codes]
    # each with the 8 bytes that say where it ends
    assert sum(len(part) + 8 for part in parts) <= bar * 2 * TILE_NUMEL
