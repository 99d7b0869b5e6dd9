"""Masks on disk: every bitmap comes back, and no sequence of bytes does worse than a CorruptedFileError."""

import base64
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiles import ENGINES, computed_by

from ram_trl.arithmetic.masks import bitmap_nbytes, count_ones, decode_mask, encode_mask, pack_bits, unpack_bits
from ram_trl.errors import CorruptedFileError


RAW, BITMAP, GAPS = 0, 1, 2
SIZES = [1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1000, 2**16 + 3]


@pytest.fixture(scope="module", autouse=True, params=ENGINES)
def engine(request):
    with computed_by(request.param):
        yield


def random_mask(seed, numel, density):
    return np.random.default_rng(seed).random(numel) < density


def encoded(mask):
    return encode_mask(pack_bits(mask), len(mask), int(np.count_nonzero(mask)))


def at(positions, numel):
    mask = np.zeros(numel, np.bool_)
    mask[positions] = True
    return mask


def assert_round_trip(mask):
    data = encoded(mask)
    assert type(data) is bytes
    if not mask.any():
        assert data == b""
        return
    bitmap = decode_mask(memoryview(data), len(mask))
    assert bitmap.dtype == np.uint8 and np.array_equal(bitmap, pack_bits(mask))


def test_bits_are_counted_from_the_lowest():
    mask = at([0, 3, 8, 17], 19)
    assert pack_bits(mask).tolist() == [0b1001, 1, 2]
    assert np.array_equal(unpack_bits(pack_bits(mask), 19), mask)
    assert count_ones(pack_bits(mask)) == 4
    assert [bitmap_nbytes(numel) for numel in (0, 1, 8, 9)] == [0, 1, 1, 2]


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.16, 0.17, 0.3, 0.39, 0.41, 0.5, 0.61, 0.9, 1.0])
def test_masks_of_every_density_and_length_come_back(density):
    for seed, numel in enumerate(SIZES):
        assert_round_trip(random_mask(seed, numel, density))


@given(
    seed=st.integers(0, 2**32), numel=st.integers(1, 3000), density=st.sampled_from([0.002, 0.05, 0.25, 0.5, 0.8, 1])
)
@settings(max_examples=100, deadline=None)
def test_random_masks_come_back(seed, numel, density):
    assert_round_trip(random_mask(seed, numel, density))


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 5000])
def test_gaps_about_the_multiples_of_255_come_back(gap):
    for behind in (0, 1, 254, 255, 256):
        assert_round_trip(at([gap, 2 * gap + 1], 2 * gap + 2 + behind))
        assert_round_trip(at([gap], gap + 1 + behind))


def test_first_and_last_element_come_back():
    for numel in SIZES:
        for positions in ([0], [numel - 1], [0, numel - 1]):
            assert_round_trip(at(positions, numel))


def test_smallest_kind_is_chosen():
    rng = np.random.default_rng(0)
    kinds = {density: encoded(rng.random(2**16) < density)[0] for density in (0.01, 0.16, 0.2, 0.38, 0.5, 0.7, 0.95)}
    assert kinds == {0.01: GAPS, 0.16: GAPS, 0.2: BITMAP, 0.38: BITMAP, 0.5: RAW, 0.7: BITMAP, 0.95: BITMAP}
    for density, kind in kinds.items():
        nbytes = len(encoded(random_mask(1, 2**16, density)))
        assert nbytes <= 2**13 + 1 if kind == RAW else nbytes < 2**13
    # too short to be compressed
    assert encoded(at([0, 1], 8)) == bytes([RAW, 0b11])


# Golden bytes: what is stored must stay readable. The first byte is the kind; two kinds are zstd frames behind it.
GOLDEN = {
    "raw": (at([0, 1, 5, 7, 9], 10), "AKMC"),
    "bitmap": (np.arange(1000) % 5 < 4, "ASi1L/0gfWUAACjvvffeewEAFWnRAg=="),
    "gaps": (at([0, 255, 511, 1022, 1024], 2000), "Aii1L/0gCEEAAAD+/wD//wAB"),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes_decode(kind):
    mask, text = GOLDEN[kind]
    data = base64.b64decode(text)
    assert data[0] == list(GOLDEN).index(kind) == encoded(mask)[0]
    assert np.array_equal(unpack_bits(decode_mask(memoryview(data), len(mask)), len(mask)), mask)


def test_golden_bytes_before_compression():
    assert encoded(GOLDEN["raw"][0]) == bytes([RAW, 0xA3, 0x02])
    bitmap = encoded(GOLDEN["bitmap"][0])
    assert zstandard.decompress(bitmap[1:]) == (bytes.fromhex("ef bd f7 de 7b") * 25)
    gaps = encoded(GOLDEN["gaps"][0])
    assert zstandard.decompress(gaps[1:]).hex(" ") == "00 fe ff 00 ff ff 00 01"
    for data in (bitmap, gaps):
        assert zstandard.get_frame_parameters(data[1:]).content_size == len(zstandard.decompress(data[1:]))


def decodes_or_refuses(data, numel):
    try:
        bitmap = decode_mask(memoryview(data), numel)
    except CorruptedFileError:
        return False
    assert len(bitmap) == bitmap_nbytes(numel)
    assert numel % 8 == 0 or bitmap[-1] >> numel % 8 == 0
    return True


def masks_of_every_kind():
    masks = [random_mask(3, 403, density) for density in (0.5, 0.8, 0.1)]
    masks[1][:300] = True
    assert [encoded(mask)[0] for mask in masks] == [RAW, BITMAP, GAPS]
    return masks


@pytest.mark.parametrize("kind", [RAW, BITMAP, GAPS])
def test_every_truncation_and_every_other_length_is_refused(kind):
    mask = masks_of_every_kind()[kind]
    data = encoded(mask)
    for length in range(1, len(data)):
        assert not decodes_or_refuses(data[:length], len(mask))
    last = int(np.flatnonzero(mask)[-1])
    for numel in (1, 8, last):
        assert not decodes_or_refuses(data, numel)
    if kind != GAPS:
        assert not decodes_or_refuses(data, len(mask) + 8)


@pytest.mark.parametrize("kind", [RAW, BITMAP, GAPS])
def test_every_changed_byte_decodes_or_is_refused(kind):
    mask = masks_of_every_kind()[kind]
    data, refused = encoded(mask), 0
    for position in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            mutated = bytearray(data)
            mutated[position] ^= change
            refused += not decodes_or_refuses(bytes(mutated), len(mask))
    assert refused > 0


@given(kind=st.integers(0, 255), junk=st.binary(max_size=60), numel=st.integers(1, 200))
@example(kind=GAPS, junk=bytes.fromhex("502a4d18 04000000 00000000"), numel=50)  # a skippable frame
@settings(max_examples=150, deadline=None)
def test_junk_decodes_or_is_refused(kind, junk, numel):
    decodes_or_refuses(bytes([kind]) + junk, numel)


@given(kind=st.sampled_from([BITMAP, GAPS]), content=st.binary(max_size=60), numel=st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_frames_of_any_bytes_decode_or_are_refused(kind, content, numel):
    decodes_or_refuses(bytes([kind]) + zstandard.compress(content), numel)


@pytest.mark.parametrize(
    ("kind", "content", "numel"),
    [
        (RAW, "", 1),
        (RAW, "01 00", 8),
        (RAW, "02", 1),  # a bit beyond the last element
        (BITMAP, "", 8),
        (BITMAP, "ff", 7),
        (BITMAP, "ff", 9),
        (GAPS, "08", 8),
        (GAPS, "07", 7),
        (GAPS, "00 00", 1),
        (GAPS, "ff 00", 255),
        (GAPS, "00 00 00", 1),  # more bytes than such a mask can have
        (3, "ff", 8),
        (255, "ff", 8),
    ],
)
def test_masks_of_a_wrong_length_or_kind_are_refused(kind, content, numel):
    content = bytes.fromhex(content)
    assert not decodes_or_refuses(bytes([kind]) + (zstandard.compress(content) if kind else content), numel)


@pytest.mark.parametrize("kind", [BITMAP, GAPS])
def test_frame_that_holds_or_claims_a_huge_size_is_refused_without_allocating_it(kind):
    zeros = bytes(16 << 20)
    bombs = [zstandard.compress(zeros), zstandard.ZstdCompressor(write_content_size=False).compress(zeros)]
    # magic number, a descriptor that announces 8 bytes of content size, the size, an empty last block
    bombs += [
        bytes.fromhex("28b52ffd e0") + size.to_bytes(8, "little") + bytes.fromhex("010000")
        for size in (2**31, 2**63, 2**64 - 1)
    ]
    for bomb in bombs:
        tracemalloc.start()
        assert not decodes_or_refuses(bytes([kind]) + bomb, 1000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20
