"""One safetensors file, read and written by byte range.

Files are read with `pread`, never mapped: a file that is cut short while it is read raises an error, where a mapping
would kill the process. Headers are checked before they are believed.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from ..errors import CorruptedFileError, StorageError


__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "StreamWriter",
    "TensorFile",
    "TensorInfo",
    "build_header",
    "digest_tensor",
    "tensor_bytes",
]

# The format's own bound on a header.
MAX_HEADER_BYTES = 100_000_000
# Over 200,000 tensors. More only make a reader busy for minutes: a header is believed after it was parsed.
_MAX_HEADER_VALUES = 1 << 21
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 48
_READ_BYTES = 1 << 22

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a header describes it.

    Args:
        name (`str`):
            Name of the tensor.
        dtype (`torch.dtype`):
            Type of its elements.
        shape (`tuple[int, ...]`):
            Its shape.
        offset (`int`, *optional*, defaults to `0`):
            Position of its first byte in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFile:
    """A safetensors file open for reading.

    Args:
        path (`Path`):
            The file.

    Raises:
        CorruptedFileError: if the header is not a valid one for a file of this size.
        StorageError: if the file cannot be opened or is not a regular file.
    """

    _fd = -1

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            # O_NONBLOCK: a FIFO in the place of a file must not hang the open
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot open {self.path}: {error.strerror}") from error
        try:
            self.metadata, self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start ... stop - 1` of the flattened tensor, on the CPU."""
        info = self.tensors[name]
        stop = info.numel if stop is None else stop
        data = self.read_bytes(info.offset + start * info.dtype.itemsize, (stop - start) * info.dtype.itemsize)
        if not data:
            return torch.empty(0, dtype=info.dtype)
        return torch.frombuffer(data, dtype=info.dtype)

    def read_bytes(self, offset: int, length: int) -> bytearray:
        """Exactly `length` bytes from `offset`."""
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
            if count == 0:
                raise CorruptedFileError(f"{self.path} ends early: it was cut short or is still being written")
            view = view[count:]
            offset += count
        return data

    def check_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened.

        Raises:
            CorruptedFileError: if its size or time of modification differ.
        """
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != self._state:
            raise CorruptedFileError(f"{self.path} was changed while it was being read: leave it alone and try again")

    def digest(self, name: str) -> str:
        """BLAKE3 of the tensor's bytes, hexadecimal."""
        info, hasher = self.tensors[name], blake3()
        for position in range(0, info.nbytes, _READ_BYTES):
            hasher.update(self.read_bytes(info.offset + position, min(_READ_BYTES, info.nbytes - position)))
        return hasher.hexdigest()

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        status = os.fstat(self._fd)
        self._state = (status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{self.path} is not a regular file")
        if status.st_size < 8:
            raise CorruptedFileError(f"{self.path} is not a safetensors file: it holds {status.st_size} bytes")
        length = int.from_bytes(self.read_bytes(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise CorruptedFileError(f"{self.path} is not a safetensors file: it claims a header of {length} bytes")
        text = self.read_bytes(8, length)
        if sum(text.count(mark) for mark in (b"{", b"[", b",")) > _MAX_HEADER_VALUES:
            raise CorruptedFileError(f"{self.path} has a damaged header: more entries than any model has tensors")
        try:
            header = json.loads(text.decode(), object_pairs_hook=_unique_keys)
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("its __metadata__ does not map names to strings")
            infos = [_parse_entry(name, entry) for name, entry in header.items()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptedFileError(f"{self.path} has a damaged header: {error}") from error
        infos.sort(key=lambda pair: pair[1])
        position = 0
        tensors = {}
        for info, (begin, end) in infos:
            if begin != position or end - begin != info.nbytes:
                raise CorruptedFileError(f"{self.path} has a damaged header: wrong offsets of tensor {info.name!r}")
            tensors[info.name] = TensorInfo(info.name, info.dtype, info.shape, 8 + length + begin)
            position = end
        if 8 + length + position != status.st_size:
            raise CorruptedFileError(
                f"{self.path} holds {status.st_size} bytes, its header describes {8 + length + position}"
            )
        return metadata, tensors


class StreamWriter:
    """Writes a safetensors file whose tensors' sizes become known only as they are written.

    The header comes first in the file, so room for it is kept from the start and padded with spaces at the end.

    Args:
        path (`Path`):
            File to create.
        names (`Iterable[str]`):
            Every name that may be written: bounds the header.
        metadata (`dict[str, str]`):
            Metadata of the file.
    """

    def __init__(self, path: Path, names: Iterable[str], metadata: Mapping[str, str]):
        self.path, self._metadata = path, dict(metadata)
        self._infos: list[TensorInfo] = []
        self._position = 0
        # 160 bytes hold the longest dtype, shape and offsets of an entry
        room = sum(len(json.dumps(name)) + 160 for name in names) + len(json.dumps(self._metadata)) + 64
        self._header_length = -(-room // 8) * 8
        self._file = open(path, "wb")
        self._file.seek(8 + self._header_length)

    def begin(self, name: str, dtype: torch.dtype) -> None:
        """Start a tensor; its parts follow by [`append`]."""
        self._infos.append(TensorInfo(name, dtype, (0,), self._position))

    def append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._position += len(data)

    def end(self, shape: tuple[int, ...] | None = None) -> None:
        """Finish the tensor; without a shape it has one dimension."""
        info = self._infos[-1]
        length = self._position - info.offset
        shape = (length // info.dtype.itemsize,) if shape is None else shape
        self._infos[-1] = TensorInfo(info.name, info.dtype, shape, info.offset)
        assert self._infos[-1].nbytes == length, f"{info.name}: {length} bytes do not fill shape {shape}"

    def cancel(self) -> None:
        """Forget a tensor that was begun and to which nothing was appended."""
        info = self._infos.pop()
        assert info.offset == self._position, f"{info.name}: {self._position - info.offset} bytes were appended"

    def write(self, name: str, tensor: Tensor) -> None:
        """A whole tensor at once."""
        self.begin(name, tensor.dtype)
        self.append(tensor_bytes(tensor))
        self.end(tuple(tensor.shape))

    def close(self) -> None:
        """Write the header and close the file."""
        header = build_header(self._infos, self._metadata, pad_to=self._header_length)
        self._file.seek(0)
        self._file.write(header)
        self._file.close()

    def abort(self) -> None:
        self._file.close()


def build_header(infos: Iterable[TensorInfo], metadata: Mapping[str, str], *, pad_to: int = 0) -> bytes:
    """Header of a file whose tensors lie one after another in the given order, its length field included."""
    header: dict = {"__metadata__": dict(metadata)}
    position = 0
    for info in infos:
        header[info.name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, position + info.nbytes],
        }
        position += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    length = max(pad_to, -(-len(text) // 8) * 8)
    assert len(text) <= length and (not pad_to or length == pad_to)
    return length.to_bytes(8, "little") + text.ljust(length)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row by row."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")


def digest_tensor(tensor: Tensor) -> str:
    """BLAKE3 of the bytes of a CPU tensor, hexadecimal: equal to [`TensorFile.digest`] of the same tensor."""
    return blake3(tensor_bytes(tensor)).hexdigest()


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a name occurs twice")
    return keys


def _parse_entry(name: str, entry: dict) -> tuple[TensorInfo, tuple[int, int]]:
    # a name with half of a surrogate pair could not be written again
    name.encode()
    shape, offsets = entry["shape"], entry["data_offsets"]
    if type(shape) is not list or type(offsets) is not list or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has a shape or offsets that are not short lists")
    begin, end = offsets
    if not all(type(size) is int and size >= 0 for size in [*shape, begin, end]):
        raise ValueError(f"tensor {name!r} has a shape or an offset that is not a natural number")
    if math.prod(size or 1 for size in shape) > _MAX_SIZE:
        raise ValueError(f"tensor {name!r} has a shape that is too large")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} is of dtype {entry['dtype']!r}, which is not supported")
    return TensorInfo(name, DTYPES[entry["dtype"]], tuple(shape)), (begin, end)
