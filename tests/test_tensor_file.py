"""Reading and writing safetensors files, against safetensors itself and against files made to do harm."""

import json
import os
import time

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ram_trl.errors import CorruptedFileError, StorageError
from ram_trl.storage.stream_writer import StreamWriter
from ram_trl.storage.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    PIECE_NUMEL,
    TensorFile,
    TensorInfo,
    build_header,
    digest_piece,
    join_digests,
    num_pieces,
    tensor_bytes,
)


NAMES = [
    "model.layers.0.weight",
    "\u043a\u043b\u044e\u0447",
    "\u91cd\u307f",
    "with space",
    'quote"d',
    "back\\slash",
    "new\nline",
    "",
    "\U0001f600",
]


def random_tensor(dtype, shape, seed=0):
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return (torch.rand(numel, generator=generator) < 0.5).view(shape)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator).to(torch.uint8)
    return data.view(dtype).view(shape)


def raw(tensor):
    return bytes(tensor_bytes(tensor))


def digest_of(data, itemsize):
    """The definition: BLAKE3 of the digests of pieces of 2**20 elements, one after another."""
    step = 2**20 * itemsize
    pieces = [blake3(data[start : start + step]).digest() for start in range(0, len(data), step)]
    return blake3(b"".join(pieces)).hexdigest()


def assert_same(file, tensors):
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        info = file.tensors[name]
        assert (info.name, info.dtype, info.shape) == (name, tensor.dtype, tuple(tensor.shape))
        assert (info.numel, info.nbytes) == (tensor.numel(), tensor.numel() * tensor.itemsize)
        read = file.read(name)
        assert read.dtype == tensor.dtype and read.shape == (tensor.numel(),)
        assert raw(read) == raw(tensor)
        assert file.digest(name) == digest_of(raw(tensor), tensor.itemsize)


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {f"{dtype}".lower(): random_tensor(torch_dtype, (3, 5)) for dtype, torch_dtype in DTYPES.items()}
    tensors |= {f"{dtype}.scalar": random_tensor(torch_dtype, ()) for dtype, torch_dtype in DTYPES.items()}
    tensors |= {f"{dtype}.empty": random_tensor(torch_dtype, (0, 4)) for dtype, torch_dtype in DTYPES.items()}
    tensors |= {name: random_tensor(torch.bfloat16, (2,), seed) for seed, name in enumerate(NAMES)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "\u00e9": "\u00fc"})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.metadata == {"format": "pt", "\u00e9": "\u00fc"}
        assert_same(file, tensors)


def test_reads_files_without_tensors_and_without_metadata(tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    with TensorFile(tmp_path / "none.safetensors") as file:
        assert file.tensors == {} and file.metadata == {}


@given(start=st.integers(0, 24), stop=st.integers(0, 24), dtype=st.sampled_from(list(DTYPES.values())))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reads_any_range(tmp_path, start, stop, dtype):
    start, stop = sorted((start, stop))
    tensor = random_tensor(dtype, (4, 6))
    save_file({"before": torch.zeros(3), "w": tensor, "z": torch.ones(2)}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert raw(file.read("w", start, stop)) == raw(tensor.reshape(-1)[start:stop])
        assert raw(file.read("w", start)) == raw(tensor.reshape(-1)[start:])


def test_what_is_read_can_be_written_to_without_changing_the_file(tmp_path):
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        file.read("w").add_(1.0)
        assert file.read("w").tolist() == [0.0] * 4


def test_ranges_are_read_into_the_memory_that_is_given(tmp_path):
    save_file({"a": torch.zeros(3), "w": torch.arange(24, dtype=torch.int16)}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        memory = np.zeros(14, np.uint8)
        read = file.read("w", 5, 10, into=memory[2:12])
        assert read.dtype == torch.int16 and read.tolist() == [5, 6, 7, 8, 9]
        assert memory[2:12].view(np.int16).tolist() == [5, 6, 7, 8, 9]
        assert memory[:2].tolist() == memory[12:].tolist() == [0, 0]
        # the same memory, not a copy
        memory[2] = 77
        assert read[0] == 77
        assert file.read("w", 4, 4, into=memory[:0]).tolist() == []
        with pytest.raises(AssertionError, match="do not fill"):
            file.read("w", 5, 10, into=memory)


@pytest.mark.parametrize("memory", [bytearray(9), np.zeros(9, np.uint8)])
def test_bytes_are_read_from_anywhere(tmp_path, memory):
    save_file({"w": torch.arange(40, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        file.read_into(file.tensors["w"].offset + 5, memory)
        assert list(memory) == list(range(5, 14))
        file.read_into(0, memory)
        assert bytes(memory) == (tmp_path / "a.safetensors").read_bytes()[:9]
        with pytest.raises(CorruptedFileError, match="ends early"):
            file.read_into(file.tensors["w"].offset + 32, memory)


@pytest.mark.parametrize("numel", [0, 1, PIECE_NUMEL - 1, PIECE_NUMEL, PIECE_NUMEL + 1, 3 * PIECE_NUMEL])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_digest_is_that_of_the_digests_of_pieces(tmp_path, dtype, numel):
    tensor = torch.arange(numel, dtype=torch.int32).to(dtype)
    save_file({"before": torch.zeros(3), "w": tensor}, tmp_path / "a.safetensors")
    expected = digest_of(tensor.numpy().tobytes(), dtype.itemsize)
    pieces = tensor.split(PIECE_NUMEL) if numel else ()
    assert num_pieces(numel) == len(pieces)
    assert join_digests(digest_piece(piece) for piece in pieces) == expected
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.digest("w") == expected


def test_digest_of_a_piece_is_that_of_its_elements_in_their_order():
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    assert digest_piece(tensor.T) == digest_piece(tensor.T.contiguous()) != digest_piece(tensor)
    assert digest_piece(tensor[:, 1]) == blake3(raw(torch.tensor([1, 5, 9], dtype=torch.bfloat16))).digest()


def test_digests_are_pinned():
    # of nothing, and of 0 ... 3 as float32: what registries recorded must be found again
    assert join_digests([]) == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert (
        join_digests([digest_piece(torch.arange(4.0))])
        == "642d7064756a4db41a80a9c27690bbf1c45c3d7b8370f6ccd3e4cb99a0d115fc"
    )


def write_stream(path, tensors, metadata, names=None):
    writer = StreamWriter(path, tensors if names is None else names, metadata)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()


def test_stream_writer_is_read_by_safetensors(tmp_path):
    tensors = {
        f"{name}.{dtype}": random_tensor(torch_dtype, (2, 3))
        for name in NAMES
        for dtype, torch_dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 7), "cut": torch.arange(12).view(3, 4).T}
    path = tmp_path / "a.safetensors"
    write_stream(path, tensors, {"format": "ram_trl.delta", "\u00e9": '"'})
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "ram_trl.delta", "\u00e9": '"'}
    with TensorFile(path) as file:
        assert_same(file, tensors)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_stream_writer_takes_parts_and_forgets_what_was_cancelled(tmp_path):
    path = tmp_path / "a.safetensors"
    writer = StreamWriter(path, ["parts", "gone", "shaped", "unused"], {})
    writer.begin("parts", torch.uint8)
    for part in (b"ab", b"", memoryview(b"cde")):
        writer.append(part)
    writer.end()
    writer.begin("gone", torch.float32)
    writer.cancel()
    writer.begin("shaped", torch.int16)
    writer.append(bytes(12))
    writer.end((3, 2))
    writer.close()
    loaded = load_file(path)
    assert set(loaded) == {"parts", "shaped"}
    assert bytes(loaded["parts"].tolist()) == b"abcde"
    assert loaded["shaped"].shape == (3, 2)


def test_stream_writer_keeps_room_for_the_longest_headers(tmp_path):
    names = ["\U0001f600" * 40 + str(number) for number in range(50)]
    tensors = {name: torch.zeros((1,) * 8 + (2,), dtype=torch.float8_e4m3fn) for name in names}
    write_stream(tmp_path / "a.safetensors", tensors, {"\n" * 100: "\u00e9" * 1000})
    assert set(load_file(tmp_path / "a.safetensors")) == set(names)


def test_stream_writer_of_nothing(tmp_path):
    write_stream(tmp_path / "a.safetensors", {}, {}, names=["a", "b"])
    assert load_file(tmp_path / "a.safetensors") == {}


def test_header_alone_with_zeros_behind_it_is_a_valid_file(tmp_path):
    infos = [TensorInfo(f"t{i}", dtype, (i, 3)) for i, dtype in enumerate(DTYPES.values())]
    header = build_header(infos, {"format": "pt"})
    assert len(header) % 8 == 0
    (tmp_path / "a.safetensors").write_bytes(header + bytes(sum(info.nbytes for info in infos)))
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == {info.name for info in infos}
        for info in infos:
            assert tuple(file.get_slice(info.name).get_shape()) == info.shape
            assert file.get_slice(info.name).get_dtype() == DTYPE_NAMES[info.dtype]
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert [(i.name, i.dtype, i.shape) for i in file.tensors.values()] == [
            (i.name, i.dtype, i.shape) for i in infos
        ]


@given(
    layout=st.lists(
        st.tuples(
            st.text(max_size=12), st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=4)
        ),
        max_size=6,
        unique_by=lambda item: item[0],
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_layouts_are_read_by_safetensors_and_by_tensor_file(tmp_path, layout):
    tensors = {name: random_tensor(dtype, shape) for name, dtype, shape in layout if _encodes(name)}
    path = tmp_path / "a.safetensors"
    write_stream(path, tensors, {})
    assert {name: raw(tensor) for name, tensor in load_file(path).items()} == {n: raw(t) for n, t in tensors.items()}
    with TensorFile(path) as file:
        assert_same(file, tensors)


def _encodes(name):
    return name != "__metadata__" and not any(0xD800 <= ord(letter) < 0xE000 for letter in name)


# Files made to do harm. None may take more processor time than this, whatever it claims.
SECONDS = 1.0


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\x02\0\0\0\0\0\0",
    "no header": bytes(8),
    "header beyond the file": (100).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1 bytes": b"\xff" * 8 + b"{}",
    "header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "not JSON": file_of(b"{nonsense}"),
    "half of a JSON object": file_of(b'{"w":'),
    "two JSON objects": file_of(b"{}{}"),
    "pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtin\x94.",
    "zip": b"PK\x03\x04" + bytes(60),
    "UTF-16": file_of(json.dumps({"w": entry()}).encode("utf-16"), EIGHT),
    "UTF-8 cut short": file_of(b'{"\xe9": 1}'),
    "half of a surrogate pair in a name": file_of(json.dumps({"\ud800": entry()}).encode(), EIGHT),
    "list": file_of([]),
    "string": file_of(b'"w"'),
    "number": file_of(b"1"),
    "null": file_of(b"null"),
    "deep lists": file_of(b"[" * 200_000 + b"]" * 200_000),
    "deep objects": file_of(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "deep list in an entry": file_of(b'{"w":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "same name twice": file_of(b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2), EIGHT),
    "same name twice, written differently": file_of(
        b'{"w":%b,"\\u0077":%b}' % ((json.dumps(entry()).encode(),) * 2), EIGHT
    ),
    "same key twice in an entry": file_of(
        b'{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT
    ),
    "metadata twice": file_of(b'{"__metadata__":{},"__metadata__":{}}'),
    "overlap": file_of({"a": entry((2,), (0, 8)), "b": entry((2,), (4, 12))}, bytes(12)),
    "same bytes twice": file_of({"a": entry(), "b": entry()}, EIGHT),
    "gap": file_of({"a": entry((1,), (0, 4)), "b": entry((1,), (8, 12))}, bytes(12)),
    "gap, unsorted": file_of({"b": entry((1,), (8, 12)), "a": entry((1,), (0, 4))}, bytes(12)),
    "gap at the start": file_of({"a": entry((1,), (4, 8))}, EIGHT),
    "too few bytes for the shape": file_of({"w": entry((3,), (0, 8))}, EIGHT),
    "too many bytes for the shape": file_of({"w": entry((1,), (0, 8))}, EIGHT),
    "empty tensor with bytes": file_of({"w": entry((0,), (0, 8))}, EIGHT),
    "offsets backwards": file_of({"w": entry((2,), (8, 0))}, EIGHT),
    "shape [2**62, 0]": file_of({"w": entry((2**62, 0), (0, 0))}),
    "shape [0, 2**64]": file_of({"w": entry((0, 2**64), (0, 0))}),
    "shape [2**32, 2**32, 0]": file_of({"w": entry((2**32, 2**32, 0), (0, 0))}),
    "shape [2**32, 2**32]": file_of({"w": entry((2**32, 2**32), (0, 8))}, EIGHT),
    "shape of 400,000 huge sizes": file_of({"w": entry([2**47] * 400_000, (0, 8))}, EIGHT),
    "shape of 10,000 ones": file_of({"w": entry([1] * 10_000 + [2], (0, 8))}, EIGHT),
    "number of 5,000 digits": file_of(
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', EIGHT
    ),
    "negative size": file_of({"w": entry((-2,), (0, 8))}, EIGHT),
    "two negative sizes": file_of({"w": entry((-2, -1), (0, 8))}, EIGHT),
    "negative offset": file_of({"w": entry((2,), (-8, 0))}, EIGHT),
    "float size": file_of({"w": entry((2.0,), (0, 8))}, EIGHT),
    "float offset": file_of({"w": entry((2,), (0, 8.0))}, EIGHT),
    "bool size": file_of({"w": entry((2, True), (0, 8))}, EIGHT),
    "bool offset": file_of({"w": entry((2,), (False, 8))}, EIGHT),
    "string size": file_of({"w": entry(("2",), (0, 8))}, EIGHT),
    "NaN size": file_of(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', EIGHT),
    "infinite size": file_of(b'{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', EIGHT),
    "1e999 as a size": file_of(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', EIGHT),
    "null size": file_of({"w": entry((None,), (0, 8))}, EIGHT),
    "shape is a number": file_of({"w": entry(2, (0, 8))}, EIGHT),
    "shape is a string": file_of({"w": entry("", (0, 4))}, bytes(4)),
    "shape is an object": file_of({"w": entry({}, (0, 4))}, bytes(4)),
    "shape is nested": file_of({"w": entry([[2]], (0, 8))}, EIGHT),
    "one offset": file_of({"w": entry((2,), (0,))}, EIGHT),
    "three offsets": file_of({"w": entry((2,), (0, 8, 8))}, EIGHT),
    "offsets are an object": file_of({"w": entry((2,), {"0": 0, "8": 8})}, EIGHT),
    "offsets are null": file_of({"w": entry((2,), None)}, EIGHT),
    "unknown dtype": file_of({"w": entry(dtype="F33")}, EIGHT),
    "dtype in small letters": file_of({"w": entry(dtype="f32")}, EIGHT),
    "dtype is a list": file_of({"w": entry(dtype=["F32"])}, EIGHT),
    "dtype is null": file_of({"w": entry(dtype=None)}, EIGHT),
    "no dtype": file_of({"w": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "no shape": file_of({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT),
    "no offsets": file_of({"w": {"dtype": "F32", "shape": [2]}}, EIGHT),
    "entry is a list": file_of({"w": ["F32", [2], [0, 8]]}, EIGHT),
    "entry is a string": file_of({"w": "F32"}, EIGHT),
    "entry is null": file_of({"w": None}, EIGHT),
    "bytes behind the tensors": file_of({"w": entry()}, bytes(9)),
    "bytes behind no tensors": file_of({}, b"x"),
    "cut short": file_of({"w": entry()}, bytes(7)),
    "metadata is a list": file_of({"__metadata__": [], "w": entry()}, EIGHT),
    "metadata is a string": file_of({"__metadata__": "pt", "w": entry()}, EIGHT),
    "metadata is null": file_of({"__metadata__": None, "w": entry()}, EIGHT),
    "metadata holds a number": file_of({"__metadata__": {"format": 1}, "w": entry()}, EIGHT),
    "metadata holds an object": file_of({"__metadata__": {"format": {}}, "w": entry()}, EIGHT),
    "tensor that is named __metadata__": file_of({"__metadata__": entry()}, EIGHT),
}


def assert_refused(path):
    started = time.process_time()
    with pytest.raises((CorruptedFileError, StorageError)) as caught:
        TensorFile(path)
    assert time.process_time() - started < SECONDS
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(tmp_path, case):
    path = tmp_path / "a.safetensors"
    path.write_bytes(HOSTILE[case])
    assert_refused(path)


def test_harmless_relatives_of_the_hostile_files_are_read(tmp_path):
    path = tmp_path / "a.safetensors"
    harmless = [
        (file_of({"b": entry((1,), (4, 8)), "a": entry((1,), (0, 4))}, EIGHT), ["a", "b"]),  # unsorted, without a gap
        (file_of({"a": entry((0,), (0, 0)), "b": entry(), "c": entry((0, 9), (8, 8))}, EIGHT), ["a", "b", "c"]),
        (file_of(json.dumps({"w": entry()}).encode() + b"  \n ", EIGHT), ["w"]),
        (file_of({"w": entry() | {"note": "unknown keys are left alone"}}, EIGHT), ["w"]),
        (file_of({"../../etc/passwd": entry()}, EIGHT), ["../../etc/passwd"]),
    ]
    for content, names in harmless:
        path.write_bytes(content)
        with TensorFile(path) as file:
            assert list(file.tensors) == names


@pytest.mark.parametrize("kind", ["a million entries", "millions of lists", "millions of numbers", "one long name"])
def test_header_of_60_megabytes_is_refused_at_once(tmp_path, kind):
    # not by json.dumps, which takes longer than all the rest
    if kind == "a million entries":
        text = b",".join(b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(1_000_000))
        text = b"{" + text + b"}"
    elif kind == "millions of lists":
        text = b'{"w":[' + b",".join([b"[" * 500 + b"]" * 500] * 60_000) + b"]}"
    elif kind == "millions of numbers":
        text = b'{"w":{"dtype":"F32","data_offsets":[0,8],"shape":[1' + b",1" * 30_000_000 + b"]}}"
    else:
        text = b'{"' + b"w" * 60_000_000 + b'":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(text, EIGHT))
    started = time.process_time()
    with pytest.raises(CorruptedFileError):
        TensorFile(path)
    assert time.process_time() - started < SECONDS


def test_header_of_a_very_large_model_is_read(tmp_path):
    # 60 layers of 384 experts of three matrices, as the largest open models have them
    infos = [
        TensorInfo(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", torch.bfloat16, (0, 7168))
        for layer in range(60)
        for expert in range(384)
        for name in ("gate", "up", "down")
    ]
    (tmp_path / "a.safetensors").write_bytes(build_header(infos, {"format": "pt"}))
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert len(file.tensors) == len(infos) == 69_120


@pytest.mark.timeout(20)
def test_missing_file_fifo_directory_and_device_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("missing", "dangling", "loop"):
        with pytest.raises(StorageError, match="cannot open"):
            TensorFile(tmp_path / name)
    for path in (tmp_path / "fifo", tmp_path / "folder", "/dev/zero"):
        with pytest.raises(StorageError, match="not a regular file"):
            TensorFile(path)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_failing_to_open_leaves_no_noise_and_no_descriptor(tmp_path):
    (tmp_path / "bad").write_bytes(HOSTILE["gap"])
    before = len(os.listdir("/proc/self/fd"))
    for name in ("missing", "bad", "bad", "bad"):
        with pytest.raises((CorruptedFileError, StorageError)):
            TensorFile(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_that_is_cut_short_after_opening_raises_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(100_000), "v": torch.ones(10)}, path)
    with TensorFile(path) as file:
        os.truncate(path, 50_000)
        with pytest.raises(CorruptedFileError, match="ends early"):
            file.read("w")
        with pytest.raises(CorruptedFileError, match="ends early"):
            file.digest("w")
        os.truncate(path, 0)
        with pytest.raises(CorruptedFileError):
            file.read("w", 0, 1)


def test_reading_after_close_raises_an_error(tmp_path):
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    file.close()
    file.close()
    with pytest.raises(StorageError):
        file.read("w")


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_are_refused_or_keep_within_their_bounds(tmp_path, data):
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.empty(0)}
    write_stream(path, tensors, {"format": "pt"})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path.write_bytes(content)
    try:
        file = TensorFile(path)
    except CorruptedFileError:
        return
    with file:
        for name, info in file.tensors.items():
            assert file.read(name).shape == (info.numel,)
