"""A safetensors file that is written while the sizes of its tensors are still unknown."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .durable import start_writeback
from .tensor_file import TensorInfo, build_header, tensor_bytes


__all__ = ["StreamWriter"]


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
        self._file.flush()
        start_writeback(self._file.fileno(), 8 + self._header_length + info.offset, length)

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
