"""Model directories: sharded safetensors, read lazily and written in place by several processes."""

import functools
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from ..errors import BaseModelError, ConfigError, CorruptedFileError, UnsupportedModelError
from .durable import explain_os_errors, read_json, start_writeback, write_json
from .tensor_file import TensorFile, TensorInfo, build_header, tensor_bytes


__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "TensorWriter",
    "copy_model_files",
    "is_adapter",
    "model_files",
    "parse_size",
    "plan_shards",
]

# The only tensor that transformers' decoder models tie.
OUTPUT_HEAD = "lm_head.weight"
INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What a model directory holds besides its weights and is wanted in a merged model too.
_MODEL_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.py",
    "additional_chat_templates/*",
    "LICENSE*",
    "NOTICE*",
)
_NOT_MODEL_FILES = (
    ADAPTER_CONFIG,
    INDEX,
    "trainer_state.json",
    "merge_report.json",
    "all_results.json",
    # of a generalist; what is made of it is another thing
    "manifest.json",
)
_DOWNLOADED = ("*.safetensors", *_MODEL_FILES)
# Second copies of the weights in other layouts.
_NOT_DOWNLOADED = ("original/*", "consolidated*")
_SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Checkpoint:
    """A model or adapter directory open for reading: headers only, tensors by range on demand.

    Args:
        path (`Path`):
            Directory with `config.json` and safetensors files, or a PEFT adapter directory.
        name (`str`, *optional*):
            Hub id or path as the user gave it; defaults to the path.
        revision (`str`, *optional*):
            Commit of the Hub repository.

    Raises:
        BaseModelError: if there are no safetensors weights in the directory.
        UnsupportedModelError: if its weights are pickles.
    """

    def __init__(self, path: Path, name: str | None = None, revision: str | None = None):
        self.path = Path(path)
        self.name, self.revision = name or str(path), revision
        # a link to nowhere is damage, and no model without a configuration
        self.config = read_json(self.path / "config.json") if os.path.lexists(self.path / "config.json") else {}
        self._file_of: dict[str, TensorFile] = {}
        self._promised: set[str] = set()
        self.tensors: dict[str, TensorInfo] = {}
        for file_name in self._weight_files():
            file = TensorFile(self.path / file_name)
            for info in file.tensors.values():
                if info.name in self.tensors:
                    raise CorruptedFileError(f"{self.path}: tensor {info.name!r} is in two files")
                self.tensors[info.name] = info
                self._file_of[info.name] = file
        if missing := sorted(self._promised - set(self.tensors)):
            raise CorruptedFileError(f"{self.path / INDEX} promises tensor {missing[0]!r}, which no file holds")

    @classmethod
    def open(cls, name_or_path: str | os.PathLike, revision: str | None = None) -> "Checkpoint":
        """Open a directory, or a Hub id through the Hub's cache."""
        name = os.fspath(name_or_path)
        if not name:
            raise BaseModelError("no model was named: pass base_model=... (a directory or a Hub id)")
        path = Path(name)
        if path.is_dir():
            return cls(path, name=str(path.resolve()))
        if path.exists():
            raise BaseModelError(f"{name} is a file: pass the model's directory or a Hub id")
        path = Path(_download(name, revision))
        # The Hub's cache names a snapshot's folder after its commit.
        return cls(path, name=name, revision=path.name)

    def read(self, name: str, start: int = 0, stop: int | None = None, into: np.ndarray | None = None) -> Tensor:
        """Elements `start ... stop - 1` of a flattened tensor, on the CPU; in the memory `into`, if it is given."""
        return self._file_of[name].read(name, start, stop, into)

    def digest(self, name: str) -> str:
        """Digest of a tensor, as [`~ram_trl.storage.tensor_file.join_digests`] defines it."""
        return self._file_of[name].digest(name)

    def check_unchanged(self) -> None:
        """Refuse weights that were written to since they were opened."""
        for file in set(self._file_of.values()):
            file.check_unchanged()

    @property
    def ties_embeddings(self) -> bool:
        """Whether the configuration ties the output head to the input embeddings (transformers' default)."""
        text_config = self.config.get("text_config")
        text_config = text_config if isinstance(text_config, dict) else {}
        return self.config.get("tie_word_embeddings", text_config.get("tie_word_embeddings", True)) is not False

    @functools.cached_property
    def tied(self) -> dict[str, str]:
        """Tensors that repeat another one because the model ties its output head, by name: `{repeat: original}`."""
        if not self.ties_embeddings or OUTPUT_HEAD not in self.tensors:
            return {}
        head = self.tensors[OUTPUT_HEAD]
        alike = [info for info in self.tensors.values() if (info.shape, info.dtype) == (head.shape, head.dtype)]
        # Several can be equal, in a model that was never trained: then it is the embedding.
        alike.sort(key=lambda info: not info.name.endswith(INPUT_EMBEDDINGS))
        digest = self.digest(head.name)
        for info in alike:
            if info.name != head.name and self.digest(info.name) == digest:
                return {head.name: info.name}
        return {}

    def _weight_files(self) -> list[str]:
        # In transformers' order: a single file wins over the index of shards that were there before it.
        single = ADAPTER_WEIGHTS if is_adapter(self.path) else SINGLE
        if (self.path / single).exists():
            return [single]
        if (self.path / INDEX).exists():
            weight_map = read_json(self.path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CorruptedFileError(f"{self.path / INDEX} has no usable weight_map")
            self._promised = set(weight_map)
            names = sorted(set(weight_map.values()))
            for name in names:
                if os.path.basename(name) != name or not name.endswith(".safetensors") or not name.isprintable():
                    raise CorruptedFileError(f"{self.path / INDEX} names {name!r}, which is not a file beside it")
            return names
        pickles = sorted(file.name for file in self.path.iterdir() if file.suffix in _PICKLES)
        if pickles:
            raise UnsupportedModelError(
                f"{self.path} holds pickled weights ({pickles[0]}), which can run code when read: convert them with "
                "model.save_pretrained(...), which writes safetensors"
            )
        raise BaseModelError(f"{self.path} holds no safetensors weights (model.safetensors or {INDEX})")


class TensorWriter(Protocol):
    """What a merged model, or an agent, is written to."""

    def write(self, name: str, start: int, tile: Tensor) -> None:
        """Write a tile of a tensor from element `start` on. Threads call it; the tile is theirs afterwards."""

    def close(self) -> None:
        """Nothing more will be written."""


class CheckpointWriter:
    """Writes a checkpoint whose layout is known beforehand, any range at any time, from several processes at once.

    Args:
        path (`Path`):
            Directory of the checkpoint.
        shards (`list[list[TensorInfo]]`):
            Tensors of each file, in their order.
    """

    def __init__(self, path: Path, shards: list[list[TensorInfo]]):
        self.path, self._shards = path, shards
        self._place: dict[str, tuple[int, int]] = {}
        self._descriptors: dict[int, int] = {}

    def create(self) -> None:
        """Create the files at their full size, with headers, and the index."""
        weight_map, total = {}, 0
        for number, infos in enumerate(self._shards):
            header = build_header(infos, {"format": "pt"})
            size = len(header) + sum(info.nbytes for info in infos)
            with explain_os_errors(f"writing {size} bytes to {self.path / self._name(number)}"):
                with open(self.path / self._name(number), "wb") as file:
                    file.write(header)
                    file.flush()
                    # a full disk is found here, before the work
                    os.posix_fallocate(file.fileno(), 0, size)
            weight_map.update({info.name: self._name(number) for info in infos})
            total += size - len(header)
        if len(self._shards) > 1:
            write_json(self.path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def open(self) -> None:
        """Open the files that some process created."""
        for number, infos in enumerate(self._shards):
            position = len(build_header(infos, {"format": "pt"}))
            with explain_os_errors(f"opening the output (all processes need the same file system) {self.path}"):
                self._descriptors[number] = os.open(self.path / self._name(number), os.O_RDWR | os.O_CLOEXEC)
            for info in infos:
                self._place[info.name] = (number, position)
                position += info.nbytes

    def write(self, name: str, start: int, tile: Tensor) -> None:
        """Write a tile of a tensor from element `start` on."""
        number, position = self._place[name]
        data, position = tensor_bytes(tile), position + start * tile.dtype.itemsize
        descriptor, begin = self._descriptors[number], position
        path = self.path / self._name(number)
        with explain_os_errors(f"writing {len(data)} bytes of tensor {name!r} to {path}"):
            while data:
                count = os.pwrite(descriptor, data, position)
                data, position = data[count:], position + count
            start_writeback(descriptor, begin, position - begin)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _name(self, number: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"


def plan_shards(infos: Iterable[TensorInfo], max_shard_size: int) -> list[list[TensorInfo]]:
    """Cut tensors into files of at most `max_shard_size` bytes, in order; a larger tensor gets a file of its own."""
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if shards[-1] and size + info.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += info.nbytes
    return shards


def parse_size(size: str | int) -> int:
    """Bytes of a size like `"5GB"` (powers of ten, as in transformers) or `"512MiB"`."""
    match = re.fullmatch(r"(\d{1,18})\s*([A-Za-z]*)", str(size).strip())
    if not match or match[2].upper() not in _SIZE_UNITS or int(match[1]) == 0:
        raise ConfigError(f"{size!r} is not a size: write it like 5GB or 500MB")
    return int(match[1]) * _SIZE_UNITS[match[2].upper()]


def model_files(path: Path) -> list[Path]:
    """Files of a model directory besides its weights: configuration, tokenizer, chat template, code, licence."""
    files = {file for pattern in _MODEL_FILES for file in path.glob(pattern)}
    return [
        file
        for file in sorted(files)
        if file.name not in _NOT_MODEL_FILES and not file.name.endswith(".index.json") and file.is_file()
    ]


def copy_model_files(source: Path, target: Path, weights: Iterable[TensorInfo]) -> None:
    """Copy configuration, tokenizer and chat template, everything but weights.

    Args:
        source (`Path`):
            Model directory.
        target (`Path`):
            Directory to copy to.
        weights (`Iterable[TensorInfo]`):
            Weights in the target. If they are of one floating dtype, the copied `config.json` declares it.
    """
    for file in model_files(source):
        destination = target / file.relative_to(source)
        destination.parent.mkdir(exist_ok=True)
        with explain_os_errors(f"copying the {file.stat().st_size} bytes of {file} to {destination}"):
            shutil.copyfile(file, destination)
    dtypes = {info.dtype for info in weights if info.dtype.is_floating_point}
    if len(dtypes) == 1 and (target / "config.json").exists():
        config = read_json(target / "config.json")
        config.pop("torch_dtype", None)
        write_json(target / "config.json", {**config, "dtype": str(dtypes.pop()).removeprefix("torch.")})


def is_adapter(path: Path) -> bool:
    """Whether a directory is a PEFT adapter rather than a model."""
    return (path / ADAPTER_CONFIG).exists()


def _download(name: str, revision: str | None) -> str:
    # imported here: a merge of local models starts without the Hub's client
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return snapshot_download(
            name, revision=revision, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_NOT_DOWNLOADED)
        )
    except HFValidationError as error:
        raise BaseModelError(f"{name} is neither a directory nor a Hub id") from error
    except Exception as error:
        # The client raises errors of several libraries; what the user needs is the name and the reason.
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise BaseModelError(f"{name} is not a directory and could not be had from the Hub: {reason}") from error
