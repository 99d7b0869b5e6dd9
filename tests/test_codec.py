"""The lossless codec: every bit pattern comes back, and no sequence of bytes does worse than a CorruptedFileError."""

import base64
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ram_trl.arithmetic.codec import (
    FRAME_NUMEL,
    codec_dtype,
    decode_frame,
    encode_frame,
    from_ordered,
    num_frames,
    to_ordered,
)
from ram_trl.errors import CorruptedFileError


HALVES = [torch.bfloat16, torch.float16]
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def all_patterns(dtype):
    """Every one of the 65,536 values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def bits(values):
    return values.view(INTEGER[values.dtype])


def from_bits(patterns, dtype):
    """A tensor from bit patterns written as unsigned numbers."""
    width = 8 * dtype.itemsize
    signed = [p - 2**width if p >= 2 ** (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGER[dtype]).view(dtype)


def random_bits(seed, numel, dtype):
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(INTEGER[dtype])
    return torch.randint(info.min, info.max + 1, (numel,), generator=generator).to(INTEGER[dtype]).view(dtype)


def assert_round_trip(base, agent):
    frame = encode_frame(base, agent)
    assert type(frame) is bytes
    if torch.equal(bits(base), bits(agent)):
        assert frame == b""
        return
    decoded = decode_frame(frame, base)
    assert decoded.dtype == agent.dtype
    assert torch.equal(bits(decoded), bits(agent))


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
    dtype=st.sampled_from([*HALVES, torch.float32]),
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


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_full_frame_comes_back_and_equal_tensors_give_an_empty_frame(dtype):
    base = random_bits(1, FRAME_NUMEL, dtype)
    assert encode_frame(base, base.clone()) == b""
    assert_round_trip(base, random_bits(2, FRAME_NUMEL, dtype))
    moved = base.clone()
    bits(moved)[-1] ^= 1
    assert_round_trip(base, moved)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_zeros_of_different_sign_and_nans_of_different_payload_are_different(dtype):
    width = 8 * dtype.itemsize
    infinity = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}[dtype]
    base = from_bits([0, infinity + 1], dtype)
    agent = from_bits([1 << (width - 1), infinity + 2], dtype)
    assert encode_frame(base, agent) != b""
    assert_round_trip(base, agent)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.filterwarnings("error")
def test_single_element_comes_back_without_a_warning(dtype):
    assert_round_trip(random_bits(1, 1, dtype), random_bits(2, 1, dtype))


def test_inputs_are_not_changed():
    base, agent = random_bits(1, 300, torch.bfloat16), random_bits(2, 300, torch.bfloat16)
    kept = bits(base).clone(), bits(agent).clone()
    decode_frame(encode_frame(base, agent), base)
    assert torch.equal(bits(base), kept[0]) and torch.equal(bits(agent), kept[1])


def test_number_of_frames():
    numbers = [num_frames(n) for n in (0, 1, FRAME_NUMEL - 1, FRAME_NUMEL, FRAME_NUMEL + 1)]
    assert numbers == [0, 1, 1, 1, 2]


def test_codec_dtype_holds_both_tensors_exactly():
    assert codec_dtype(torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert codec_dtype(torch.float16, torch.float16) == torch.float16
    assert codec_dtype(torch.bfloat16, torch.float16) == torch.float32
    assert codec_dtype(torch.bfloat16, torch.float32) == torch.float32
    assert codec_dtype(torch.float64, torch.float64) is None
    assert codec_dtype(torch.bfloat16, torch.int8) is None
    assert codec_dtype(torch.float8_e4m3fn, torch.float8_e4m3fn) is None


# Golden bytes: agents that were stored must stay readable. Compressed bytes may differ from one zstd to the next, so
# the payload is pinned, and a frame that must decode for ever.
GOLDEN_16 = {
    "base": [0x3F80, 0xBF80, 0x0000, 0x8000, 0x7F80, 0x3C00, 0x4000, 0x0001],
    "agent": [0x3F81, 0xBF7F, 0x8000, 0x0000, 0x7FC1, 0x3B00, 0x4000, 0xFF80],
    # codes of one byte, then escapes of two, little-endian: 65, -256 and the wrapped difference of the last pair
    "payload": "01 01 ff 01 41 80 00 80  00ff 7e80",
    "frame": "KLUv/SAMYQAAAQH/AUGAAIAA/36A",
}
GOLDEN_32 = {
    "base": [0x3F800000, 0xBF800000, 0x00000000, 0x7F800000, 0x40000000],
    "agent": [0x3F800001, 0xBF7FFFFE, 0x80000000, 0x7FC12345, 0x40000000],
    # zigzag 2, 4, 1, 0x82468a, 0, the lowest bytes of all first
    "payload": "02 04 01 8a 00  00 00 00 46 00  00 00 00 82 00  00 00 00 00 00",
    "frame": "KLUv/SAUoQAAAgQBigAAAABGAAAAAIIAAAAAAAA=",
}


@pytest.mark.parametrize(
    ("golden", "dtype"), [(GOLDEN_16, torch.bfloat16), (GOLDEN_16, torch.float16), (GOLDEN_32, torch.float32)]
)
def test_golden_bytes(golden, dtype):
    base, agent = from_bits(golden["base"], dtype), from_bits(golden["agent"], dtype)
    payload = bytes.fromhex(golden["payload"])
    frame = encode_frame(base, agent)
    assert zstandard.ZstdDecompressor().decompress(frame).hex() == payload.hex()
    assert zstandard.get_frame_parameters(frame).content_size == len(payload)
    for stored in (frame, base64.b64decode(golden["frame"])):
        assert torch.equal(bits(decode_frame(stored, base)), bits(agent))


# As above with 1,000 elements, so that zstd's entropy coding has a part in it. bfloat16 counts up from 0x3C00; every
# third element is 1 up, every seventh 5 down, every hundredth turned negative.
GOLDEN_COMPRESSED = (
    "KLUv/WD8AhUEAGIEDhfAZzisu9/6932fmtBS4+of//7W7AYyBXyIplgMIQHJORhkSAIFjSzHyXFyvat7V/eu7l3du98zIgALUAH0"
    "IcAAKwD6FqAM0LIAPUCzBagA+g6gAAIA+hagDNCyAD1AMwI0sAaclADB4DBoGAgGh0HDQDA4DBoGgsFh0HCEwgU="
)


def test_golden_compressed_frame_decodes():
    base = torch.arange(0x3C00, 0x3C00 + 1000).to(torch.int16)
    agent = base.clone()
    agent[::3] += 1
    agent[::7] -= 5
    agent[::100] ^= -(2**15)
    decoded = decode_frame(base64.b64decode(GOLDEN_COMPRESSED), base.view(torch.bfloat16))
    assert torch.equal(bits(decoded), agent)


def decodes_or_refuses(frame, base):
    try:
        decoded = decode_frame(frame, base)
    except CorruptedFileError:
        return False
    assert decoded.dtype == base.dtype and decoded.shape == base.shape
    return True


def frames_of_both_kinds():
    for dtype in (torch.bfloat16, torch.float32):
        base = (torch.randn(400, generator=torch.Generator().manual_seed(5)) * 0.02).to(dtype)
        agent = base.clone()
        agent[::3] *= 1.01
        agent[::50] = -7.0
        yield base, encode_frame(base, agent)


def test_every_truncation_is_refused():
    for base, frame in frames_of_both_kinds():
        for length in range(len(frame)):
            with pytest.raises(CorruptedFileError):
                decode_frame(frame[:length], base)


def test_every_changed_byte_decodes_or_is_refused():
    for base, frame in frames_of_both_kinds():
        refused = 0
        for position in range(len(frame)):
            for change in (0x01, 0x80, 0xFF):
                mutated = bytearray(frame)
                mutated[position] ^= change
                refused += not decodes_or_refuses(bytes(mutated), base)
        assert refused > 0


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_mutations_decode_or_are_refused(data):
    base, frame = data.draw(st.sampled_from(list(frames_of_both_kinds())))
    mutated = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(mutated)))
        removed = data.draw(st.integers(0, 4))
        mutated[start : start + removed] = data.draw(st.binary(max_size=4))
    decodes_or_refuses(bytes(mutated), base)


@given(junk=st.binary(max_size=60))
@example(junk=b"")
@example(junk=bytes.fromhex("502a4d18 04000000 00000000"))  # a skippable frame
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_frame_are_refused(junk):
    with pytest.raises(CorruptedFileError):
        decode_frame(junk, torch.zeros(50))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(payload=st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_payloads_of_any_bytes_decode_or_are_refused(dtype, payload):
    decodes_or_refuses(zstandard.ZstdCompressor().compress(payload), torch.zeros(12, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "payload"),
    [
        (torch.bfloat16, "00 00 00"),  # fewer codes than elements
        (torch.bfloat16, "00 00 00 00 00"),  # half an escape
        (torch.bfloat16, "00 00 00 00 00 00"),  # an escape that no code asks for
        (torch.bfloat16, "80 00 00 00"),  # a code that asks for an escape that is not there
        (torch.bfloat16, "80 80 00 00 01 00"),
        (torch.float32, "00" * 15),
        (torch.float32, "00" * 12),
    ],
)
def test_payload_of_a_wrong_length_is_refused(dtype, payload):
    frame = zstandard.ZstdCompressor().compress(bytes.fromhex(payload))
    with pytest.raises(CorruptedFileError):
        decode_frame(frame, torch.zeros(4, dtype=dtype))


def test_frame_for_another_number_of_elements_is_refused():
    base = random_bits(1, 100, torch.float32)
    frame = encode_frame(base, random_bits(2, 100, torch.float32))
    for numel in (1, 99, 101, 1000):
        with pytest.raises(CorruptedFileError):
            decode_frame(frame, torch.zeros(numel))


def bombs():
    """Small frames that claim, or hold, far more than a tile."""
    zeros = bytes(64 << 20)
    yield zstandard.ZstdCompressor().compress(zeros)
    yield zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    for size in (2**31, 2**40, 2**63, 2**64 - 1):
        # magic number, a descriptor that announces 8 bytes of content size, the size, an empty last block
        yield bytes.fromhex("28b52ffd e0") + size.to_bytes(8, "little") + bytes.fromhex("010000")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frame_that_claims_a_huge_size_is_refused_without_allocating_it(dtype):
    base = torch.zeros(1000, dtype=dtype)
    for bomb in bombs():
        tracemalloc.start()
        with pytest.raises(CorruptedFileError):
            decode_frame(bomb, base)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


# facts: weights N(0, 0.02) in bfloat16, updates N(0, s): density of changes, and the size over 2 bytes an element
@pytest.mark.parametrize(
    ("scale", "density", "ratio"),
    [
        (2e-6, 0.024, 0.027),
        (1e-5, 0.116, 0.094),
        (3e-5, 0.32, 0.163),
        (6e-5, 0.53, 0.205),
        (1.2e-4, 0.72, 0.245),
    ],
)
def test_size_of_a_snapshot(scale, density, ratio):
    rng = np.random.default_rng(0)
    weights, moves = (torch.from_numpy(rng.standard_normal(FRAME_NUMEL).astype(np.float32)) for _ in range(2))
    base = (weights * 0.02).bfloat16()
    agent = (base.float() + moves * scale).bfloat16()
    assert float((agent != base).float().mean()) == pytest.approx(density, rel=0.05)
    assert len(encode_frame(base, agent)) / (2 * FRAME_NUMEL) == pytest.approx(ratio, rel=0.15)
