"""A safetensors file that is written while the sizes of its tensors are still unknown."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .durable import explain_os_errors, start_writeback
from .tensor_file import TensorInfo, build_header, tensor_bytes


__all__ = ["StreamWriter", "write_tensors"]


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
        self._file: BinaryIO
        with self._explained():
            self._file = open(path, "wb")
            self._file.seek(8 + self._header_length)

    def begin(self, name: str, dtype: torch.dtype) -> None:
        """Start a tensor; its parts follow by [`append`]."""
        self._infos.append(TensorInfo(name, dtype, (0,), self._position))

    def append(self, data: bytes | memoryview) -> None:
        with self._explained():
            self._file.write(data)
        self._position += len(data)

    def end(self, shape: tuple[int, ...] | None = None) -> None:
        """Finish the tensor; without a shape it has one dimension."""
        info = self._infos[-1]
        length = self._position - info.offset
        shape = (length // info.dtype.itemsize,) if shape is None else shape
        self._infos[-1] = TensorInfo(info.name, info.dtype, shape, info.offset)
        assert self._infos[-1].nbytes == length, f"{info.name}: {length} bytes do not fill shape {shape}"
        with self._explained():
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
        with self._explained():
            self._file.seek(0)
            self._file.write(header)
            self._file.close()

    def abort(self) -> None:
        """Close the file, whatever is in it; nothing happens after [`close`]."""
        # what a full disk does not take is not wanted any more
        with contextlib.suppress(OSError):
            self._file.close()

    def _explained(self) -> AbstractContextManager[None]:
        end = 8 + self._header_length + self._position
        return explain_os_errors(f"writing the first {end} bytes of {self.path}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors as PEFT writes adapters; unlike safetensors' own writer it raises our errors.

    Raises:
        StorageError: if the file system refuses.
    """
    # the widest first, so that all are aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    writer = StreamWriter(path, names, {"format": "pt"})
    try:
        for name in names:
            writer.write(name, tensors[name].detach().cpu())
        writer.close()
    finally:
        writer.abort()
