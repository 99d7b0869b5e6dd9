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

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from ..errors import CorruptedFileError, StorageError
from .durable import unique_keys


__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "PIECE_NUMEL",
    "TensorFile",
    "TensorInfo",
    "build_header",
    "digest_piece",
    "join_digests",
    "num_pieces",
    "read_tensors",
    "tensor_bytes",
]

# The format's own bound on a header.
MAX_HEADER_BYTES = 100_000_000
# Over 200,000 tensors. More only make a reader busy for minutes: a header is believed after it was parsed.
_MAX_HEADER_VALUES = 1 << 21
_MAX_DIMENSIONS = 64
_MAX_NAME = 4096
_MAX_SIZE = 1 << 48

# Elements of a tensor that are digested on their own.
PIECE_NUMEL = 1 << 20

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

    def read(self, name: str, start: int = 0, stop: int | None = None, into: np.ndarray | None = None) -> Tensor:
        """Elements `start ... stop - 1` of the flattened tensor, on the CPU; in the memory `into`, if it is given."""
        info = self.tensors[name]
        stop = info.numel if stop is None else stop
        if not 0 <= start <= stop <= info.numel:
            raise CorruptedFileError(f"{self.path}: tensor {name!r} has {info.numel} elements, more were asked for")
        nbytes = (stop - start) * info.dtype.itemsize
        data = np.empty(nbytes, np.uint8) if into is None else into
        assert len(data) == nbytes, f"{name}: {nbytes} bytes do not fill {len(data)}"
        self.read_into(info.offset + start * info.dtype.itemsize, data)
        # numpy gives an empty array a stride with which torch cannot view it as another dtype
        return torch.from_numpy(data).view(info.dtype) if nbytes else torch.empty(0, dtype=info.dtype)

    def read_into(self, offset: int, data: np.ndarray | bytearray) -> None:
        """Fill `data` with the bytes from `offset` on."""
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

    def check_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened, or that another one has replaced.

        Raises:
            CorruptedFileError: if its size or time of modification differ, or another file has its name.
        """
        status = os.fstat(self._fd)
        try:
            is_there = os.path.samestat(status, os.stat(self.path))
        except OSError:
            is_there = False
        if not is_there or (status.st_size, status.st_mtime_ns) != self._state:
            raise CorruptedFileError(f"{self.path} was changed while it was being read: leave it alone and try again")

    def digest(self, name: str) -> str:
        """Digest of the tensor, as [`join_digests`] defines it."""
        numel = self.tensors[name].numel
        starts = range(0, numel, PIECE_NUMEL)
        return join_digests(digest_piece(self.read(name, at, min(at + PIECE_NUMEL, numel))) for at in starts)

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        status = os.fstat(self._fd)
        self._state = (status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{self.path} is not a regular file")
        if status.st_size < 8:
            raise CorruptedFileError(f"{self.path} is not a safetensors file: it holds {status.st_size} bytes")
        text = bytearray(8)
        self.read_into(0, text)
        length = int.from_bytes(text, "little")
        if length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise CorruptedFileError(f"{self.path} is not a safetensors file: it claims a header of {length} bytes")
        text = bytearray(length)
        self.read_into(8, text)
        if sum(text.count(mark) for mark in (b"{", b"[", b",")) > _MAX_HEADER_VALUES:
            raise CorruptedFileError(f"{self.path} has a damaged header: more entries than any model has tensors")
        try:
            header = json.loads(text.decode(), object_pairs_hook=unique_keys)
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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small file, by name.

    Raises:
        CorruptedFileError: if its header is not a valid one for a file of its size.
        StorageError: if it cannot be read.
    """
    with TensorFile(path) as file:
        return {name: file.read(name).view(info.shape) for name, info in file.tensors.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row by row."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")


def num_pieces(numel: int) -> int:
    """Number of pieces in which a tensor is digested."""
    return -(-numel // PIECE_NUMEL)


def digest_piece(piece: Tensor) -> bytes:
    """BLAKE3 of the bytes of at most `PIECE_NUMEL` elements, flat, on the CPU."""
    return blake3(tensor_bytes(piece)).digest()


def join_digests(pieces: Iterable[bytes]) -> str:
    """Digest of a tensor, hexadecimal: BLAKE3 of the digests of its pieces, so that several threads can compute it."""
    return blake3(b"".join(pieces)).hexdigest()


def _parse_entry(name: str, entry: dict) -> tuple[TensorInfo, tuple[int, int]]:
    if len(name) > _MAX_NAME:
        raise ValueError(f"a name has {len(name)} letters")
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
