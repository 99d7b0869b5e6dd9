"""What is written of an agent that is being registered: its manifest, an adapter's own files and those beside them."""

import copy
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..progress import Progress
from ..storage.checkpoint import ADAPTER_CONFIG, Checkpoint
from ..storage.durable import explain_os_errors
from ..storage.manifest import BaseRecord, LoraRecord, Manifest, SnapshotRecord, TensorRecord
from ..storage.registry import ADAPTER, ADAPTER_MAP, TENSORS, write_records
from ..storage.stream_writer import write_tensors
from ..version import __version__
from .snapshot import base_records, total_parameters


if TYPE_CHECKING:
    # a registration that needs no PEFT does not load it
    from peft import PeftConfig

__all__ = ["build_manifest", "save_adapter", "write_lora_records"]


def build_manifest(
    kind: str, base: Checkpoint, records: dict[str, TensorRecord], snapshot: SnapshotRecord
) -> Manifest:
    """Manifest of an agent that is being registered; its name, training and files are still to be filled in."""
    return Manifest(
        agent="",
        kind=kind,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ram_trl_version=__version__,
        base_model=BaseRecord(
            name=base.name,
            revision=base.revision,
            digest=BaseRecord.digest_of(records),
            total_parameters=total_parameters(records),
        ),
        snapshot=snapshot,
    )


def save_adapter(staged: Path, config: "PeftConfig", state: dict[str, Tensor], base: str) -> None:
    """Write an adapter as PEFT does."""
    config = copy.copy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base
    with explain_os_errors(f"writing the configuration to {staged / ADAPTER_CONFIG}"):
        config.save_pretrained(staged)
    write_tensors(staged / ADAPTER, state)


def write_lora_records(
    staged: Path, base: Checkpoint, lora: dict[str, LoraRecord], dtype: torch.dtype, progress: Progress | None
) -> Manifest:
    """Write what is recorded beside an adapter's own two files."""
    records: dict[str, TensorRecord] = {}
    done, total = 0, sum(info.nbytes for info in base.tensors.values())
    for info in base.tensors.values():
        records.update(base_records(base, [info.name]))
        done += info.nbytes
        if progress:
            progress("reading the base", done, total)
    write_records(staged / TENSORS, records)
    write_records(staged / ADAPTER_MAP, lora)
    return build_manifest("lora", base, records, SnapshotRecord(dtype=str(dtype).removeprefix("torch.")))
