"""GRPO runs whose disk fills up during training; prints as JSON what became of them.

`test_faults.py` runs it in a file system of its own (`tmpfs`), or, where it may not mount one, with a limit on the
size of files (`limit`).

python run_on_full_disk.py FOLDER BASE AGENT tmpfs|limit
"""

import contextlib
import json
import os
import resource
import sys
from pathlib import Path

from models import read_model
from training import AtStep, grpo, registered_files, restored_weights, saved_weights, train

from ram_trl import AgentRegistry, RAMRegistryCallback, register_agent


class Disk:
    """A disk that can be filled up to some bytes."""

    def __init__(self, folder: Path, means: str):
        self._ballast, self._means = folder / "ballast", means

    def fill(self, left: int) -> None:
        if self._means == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
            return
        with open(self._ballast, "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
            file.truncate(file.tell() - left)

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._ballast.unlink(missing_ok=True)


def open_deleted_files(folder: Path) -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        # the listing has a descriptor of its own
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith(str(folder)) and link.endswith("(deleted)")]


def main() -> None:
    folder, base, agent, means = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    registry, disk, outcomes = folder / "registry", Disk(folder, means), []
    register_agent(AgentRegistry(registry), "math", str(agent), base_model=str(base))
    files = registered_files(registry)
    options = {"model_init_kwargs": {"dtype": "bfloat16"}}
    # on the disk: at the first byte, within the deltas, within the records
    for left in (0, 8192, 32768) if means == "tmpfs" else (0, 4096, 16384):
        callback = RAMRegistryCallback(registry, agent="math")
        trainer = grpo(base, folder / "out", [callback, AtStep(2, lambda model, n=left: disk.fill(n))], **options)
        train(trainer)
        outcome = {
            "error": type(callback.error).__name__,
            "message": str(callback.error),
            "untouched": registered_files(registry) == files,
            "open": open_deleted_files(registry),
        }
        disk.free()
        saved_weights(trainer, folder / f"saved-{left}")
        outcomes.append(outcome)
    callback = RAMRegistryCallback(registry, agent="math")
    trainer = train(grpo(base, folder / "out", [callback], **options))
    AgentRegistry(registry).get("math@v1").verify()
    saved, back = saved_weights(trainer, folder / "saved"), restored_weights(registry, "math@v2", folder / "back")
    same = all((back[name] == saved[name]).all().item() for name in read_model(base))
    print(json.dumps({"failed": outcomes, "then": str(callback.registered), "same": same}))


if __name__ == "__main__":
    main()
