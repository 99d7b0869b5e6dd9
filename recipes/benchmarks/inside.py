"""
Measures what one process does, without its start-up, and prints the times as JSON.

```sh
# the phases of a merge
python recipes/benchmarks/inside.py merge --registry registry --output_dir merged --runs 5
# the snapshot of each agent in memory, registering it from disk, restoring it, save_pretrained of the same model
python recipes/benchmarks/inside.py snapshot --base_model base --models code tool --output_dir snapshots --runs 5
```
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from models import WEIGHTS

from ram_trl import AgentRegistry, merge_agents, register_agent, restore_agent
from ram_trl.distributed import SINGLE
from ram_trl.registering.live import LiveRegistration


# Bytes that one thread reads or digests at a time.
PIECE = 1 << 20


def merge_phases(registry: str, output_dir: Path) -> dict[str, float]:
    """Seconds of each phase of a merge, as its progress tells; what comes after the last one is `finish`."""
    moments = {"start": time.perf_counter()}

    def note(doing: str, done: int, total: int) -> None:
        moments[doing] = time.perf_counter()

    merge_agents(registry, str(output_dir), progress=note)
    moments["finish"] = time.perf_counter()
    names, times = list(moments), list(moments.values())
    return {name: end - begin for name, begin, end in zip(names[1:], times, times[1:], strict=False)}


def merge_times(registry: str, output_dir: Path, runs: int) -> list[dict[str, float]]:
    """Seconds of the phases of several merges; the first one does not count."""
    rounds = []
    for _ in range(runs + (runs > 1)):
        shutil.rmtree(output_dir, ignore_errors=True)
        rounds.append(merge_phases(registry, output_dir))
    return rounds[-runs:]


def seconds_of(action: Callable[[], Any]) -> float:
    # What was written before is not to slow this action down.
    os.sync()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def read_and_digest(path: Path, values: Iterable[torch.Tensor]) -> None:
    """The least that a snapshot does which checks what it compares: reads a file, digests it and the live values."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, path.open("rb") as file:
        starts = range(0, path.stat().st_size, PIECE)
        tasks = [pool.submit(lambda start: blake3(os.pread(file.fileno(), PIECE, start)).digest(), s) for s in starts]
        for value in values:
            live = value.detach().view(-1).view(torch.uint8)
            tasks += [pool.submit(lambda piece: blake3(piece.numpy()).digest(), piece) for piece in live.split(PIECE)]
        for task in tasks:
            task.result()


def snapshot_times(base_model: str, model: str, output_dir: Path, runs: int) -> list[dict[str, float]]:
    """Seconds of the actions, which take turns; the first of several rounds does not count."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    registry, restored, saved = (str(output_dir / name) for name in ("registry", "restored", "saved"))
    live = LiveRegistration(
        registry=AgentRegistry(registry),
        agent="live",
        base_model=base_model,
        revision=None,
        snapshot_dtype="auto",
        epsilon=1e-5,
    )
    actions = {
        # what the callback does when training ends
        "snapshot": lambda: live.register(loaded, SINGLE, None, {}),
        "register": lambda: register_agent(registry, "agent", model, base_model=base_model),
        "restore": lambda: restore_agent(registry, "agent", restored),
        "save_pretrained": lambda: loaded.save_pretrained(saved),
        "read and digest": lambda: read_and_digest(Path(base_model, WEIGHTS), loaded.parameters()),
        # ours do not return before what they wrote is on the disk
        "save_pretrained, sync": lambda: (loaded.save_pretrained(saved), os.sync()),
    }
    rounds = []
    for _ in range(runs + (runs > 1)):
        shutil.rmtree(output_dir, ignore_errors=True)
        output_dir.mkdir(parents=True)
        rounds.append({name: seconds_of(action) for name, action in actions.items()})
    return rounds[-runs:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["merge", "snapshot"], help="what to measure")
    parser.add_argument("--registry", help="registry to merge")
    parser.add_argument("--base_model", help="base of the agents")
    parser.add_argument("--models", type=Path, nargs="+", help="directories of the agents")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory to write to; emptied for each run")
    parser.add_argument("--runs", type=int, default=5, help="how often to measure")
    args = parser.parse_args()
    if args.what == "snapshot":
        times = {
            path.name: snapshot_times(args.base_model, str(path), args.output_dir, args.runs) for path in args.models
        }
    else:
        times = {"merge": merge_times(args.registry, args.output_dir, args.runs)}
    shutil.rmtree(args.output_dir)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
