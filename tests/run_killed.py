"""GRPO runs that get a signal; `test_lifecycle.py` and `test_faults.py` start it.

python run_killed.py sigterm|sigkill FOLDER BASE
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from training import BF16, AtStep, grpo, saved_weights, train

from ram_trl import RAMRegistryCallback
from ram_trl.registering.snapshot import FullSnapshot


def sigterm(folder: Path, base: str) -> None:
    """Trains until it is asked to end, as a cluster's scheduler does, and says what was registered."""
    callback = RAMRegistryCallback(folder / "registry", agent="math")
    callbacks = [callback, AtStep(1, lambda model: (folder / "training").touch())]
    options = {"max_steps": 100_000, "enable_jit_checkpoint": True, **BF16}
    trainer = train(grpo(base, folder / "out", callbacks, **options))
    saved_weights(trainer, folder / "saved")
    [checkpoint] = (folder / "out").glob("checkpoint-*")
    outcome = {
        "registered": str(callback.registered),
        "step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "checkpoint": int(checkpoint.name.removeprefix("checkpoint-")),
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))


def sigkill(folder: Path, base: str) -> None:
    """Is killed when it has written two tensors of the snapshot."""
    add, calls = FullSnapshot.add, []

    def add_or_die(snapshot: FullSnapshot, tensor) -> None:
        calls.append(tensor)
        if len(calls) == 3:
            snapshot.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        add(snapshot, tensor)

    FullSnapshot.add = add_or_die
    callback = RAMRegistryCallback(folder / "registry", agent="math")
    train(grpo(base, folder / "out", [callback], save_strategy="steps", save_steps=1, **BF16))


if __name__ == "__main__":
    logging.basicConfig()
    {"sigterm": sigterm, "sigkill": sigkill}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
