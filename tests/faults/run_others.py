"""The tests of promises 1, 4 and 5 on MLflow's file store and on plain `save_file`, for the record.

python tests/faults/run_others.py mlflow|save_file FOLDER [SEED]

MLflow goes into an environment of its own (`pip install mlflow-skinny`); the other one needs torch and safetensors.
Prints what docs/RELIABILITY.md quotes, as JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


KILLS, PROCESSES, TIMES, ROUNDS, MUTANTS = 200, 8, 50, 5, 10_000
# eight of its processes take seconds for a version when it has some hundred
MLFLOW_ROUNDS, MLFLOW_TIMES = 2, 12
BLOCK = bytes(range(256)) * 1024


def forked(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def mutate(data: bytes, chance: random.Random) -> bytes:
    """As `mutants.mutate_bytes`, which this environment cannot import."""
    changed = bytearray(data)
    while bytes(changed) == data:
        at, length = chance.randrange(len(data)), chance.choice((1, 1, 2, 4, 8, 64, 512))
        at = at if chance.random() < 0.5 else min(at, chance.randrange(512))
        kind = chance.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at : at + length] = chance.randbytes(length)
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = chance.randbytes(length)
        elif kind == 4:
            changed[at : at + length] = bytes(length)
        else:
            del changed[at:]
    return bytes(changed)


def kills(
    once: Callable[[Path], None], check: Callable[[Path], list[str]], folder: Path, chance: random.Random
) -> Any:
    """Kill what registers, and count what is wrong with what is then in sight."""
    started = time.perf_counter()
    for _ in range(3):
        os.waitpid(forked(lambda: once(folder)), 0)
    length, wrong = (time.perf_counter() - started) / 3, Counter()
    for _ in range(KILLS):

        def many() -> None:
            while True:
                once(folder)

        pid = forked(many)
        time.sleep(chance.uniform(0, 2 * length))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        problems = check(folder)
        wrong["kills after which something in sight is broken"] += bool(problems)
        wrong.update(problems)
    return dict(wrong)


def mlflow(folder: Path, chance: random.Random) -> dict[str, Any]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    source = folder / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(BLOCK)

    def client(store: Path) -> MlflowClient:
        return MlflowClient(tracking_uri=str(store), registry_uri=str(store))

    def prepare(store: Path) -> None:
        client(store).create_registered_model("math")
        client(store).create_experiment("training")

    def once(store: Path) -> str:
        here = client(store)
        run = here.create_run(here.get_experiment_by_name("training").experiment_id)
        here.log_artifacts(run.info.run_id, str(source), "model")
        where = f"{run.info.artifact_uri}/model"
        return here.create_model_version("math", source=where, run_id=run.info.run_id).version

    def check(store: Path) -> list[str]:
        problems = []
        seen = {path.name for path in (store / "models" / "math").glob("version-*")}
        for name in sorted(seen):
            try:
                version = client(store).get_model_version("math", name.removeprefix("version-"))
                if Path(version.source.removeprefix("file://"), "weights.bin").read_bytes() != BLOCK:
                    problems.append("a version in sight whose files are not whole")
            except Exception as error:
                problems.append(f"a version in sight that cannot be read: {type(error).__name__}")
                shutil.rmtree(store / "models" / "math" / name)
        try:
            client(store).search_runs(["0"])
            once(store)
        except Exception as error:
            problems.append(f"the next registration fails: {type(error).__name__}")
            shutil.rmtree(store, ignore_errors=True)
            prepare(store)
        return problems

    store = folder / "kills"
    prepare(store)
    results: dict[str, Any] = {"kills": kills(once, check, store, chance)}

    print(json.dumps(results), file=sys.stderr)
    rounds = []
    for number in range(MLFLOW_ROUNDS):
        store = folder / f"round-{number}"
        prepare(store)
        pipes = []
        for _ in range(PROCESSES):
            reading, writing = os.pipe()

            def many(store=store, writing=writing) -> None:
                given, failed = [], 0
                for _ in range(MLFLOW_TIMES):
                    try:
                        given.append(once(store))
                    except Exception:
                        failed += 1
                with open(writing, "w") as pipe:
                    json.dump({"given": given, "failed": failed}, pipe)

            forked(many)
            os.close(writing)
            pipes.append(reading)
        outcomes = [json.loads(open(pipe).read()) for pipe in pipes]
        for _ in range(PROCESSES):
            os.wait()
        given = [version for outcome in outcomes for version in outcome["given"]]
        failed = sum(outcome["failed"] for outcome in outcomes)
        rounds.append(
            {"asked": PROCESSES * MLFLOW_TIMES, "failed": failed, "told": len(given), "distinct": len(set(given))}
        )
    results["writers"] = rounds
    print(json.dumps(results), file=sys.stderr)

    store = folder / "mutants"
    prepare(store)
    version = once(store)
    found = client(store).get_model_version("math", version)
    artifact = Path(found.source.removeprefix("file://"), "weights.bin")
    record = store / "models" / "math" / f"version-{version}" / "meta.yaml"
    outcomes = {}
    for name, path in (("weights", artifact), ("records", record)):
        original, counted = path.read_bytes(), Counter()
        for _ in range(MUTANTS if name == "records" else 1000):
            path.write_bytes(mutate(original, chance))
            try:
                got = client(store).get_model_version("math", version)
                if name == "weights":
                    local = client(store).download_artifacts(got.run_id, "model", str(folder))
                    counted["accepted, bytes changed"] += Path(local, "weights.bin").read_bytes() != BLOCK
                else:
                    same = dict(got) == dict(found)
                    counted["accepted, content the same" if same else "accepted, content changed"] += 1
            except MlflowException:
                counted["refused"] += 1
            except Exception as error:
                counted[f"another error: {type(error).__name__}"] += 1
        path.write_bytes(original)
        outcomes[name] = dict(counted)
    results["mutants"] = outcomes
    return results


def save_file(folder: Path, chance: random.Random) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save

    torch.set_num_threads(1)
    tensors = {f"layers.{number}.weight": torch.arange(64 * 1024.0).view(64, 1024) for number in range(20)}

    def once(place: Path) -> None:
        place.mkdir(exist_ok=True)
        save(tensors, place / "model.safetensors")

    def check(place: Path) -> list[str]:
        try:
            loaded = load_file(place / "model.safetensors")
        except FileNotFoundError:
            return ["the file is gone"]
        except SafetensorError:
            return ["the file in sight cannot be read"]
        same = loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        return [] if same else ["the file in sight reads, with other numbers"]

    results: dict[str, Any] = {"kills": kills(once, check, folder / "kills", chance)}

    rounds = []
    for number in range(ROUNDS):
        place = folder / f"round-{number}"
        place.mkdir()

        def many(process: int, place=place) -> None:
            for _ in range(TIMES):
                # what a script does that wants the next number
                version = 1 + max([int(path.stem[1:]) for path in place.glob("v*.safetensors")], default=0)
                save({"writer": torch.tensor([process])}, place / f"v{version}.safetensors")

        for process in range(PROCESSES):
            forked(lambda process=process: many(process))
        for _ in range(PROCESSES):
            os.wait()
        rounds.append({"asked": PROCESSES * TIMES, "distinct": len(list(place.glob("v*.safetensors")))})
    results["writers"] = rounds

    path = folder / "mutants.safetensors"
    small = {f"layers.{number}.weight": torch.arange(64.0) + number for number in range(20)}
    save(small, path)
    original, counted = path.read_bytes(), Counter()
    for _ in range(MUTANTS):
        path.write_bytes(mutate(original, chance))
        try:
            loaded = load_file(path)
            same = loaded.keys() == small.keys() and all(torch.equal(loaded[name], small[name]) for name in small)
            counted["accepted, numbers the same" if same else "accepted, numbers changed"] += 1
        except SafetensorError:
            counted["refused"] += 1
        except Exception as error:
            counted[f"another error: {type(error).__name__}"] += 1
    results["mutants"] = dict(counted)
    return results


if __name__ == "__main__":
    place = Path(sys.argv[2])
    place.mkdir(parents=True)
    chosen = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(2**32)
    outcome = {"mlflow": mlflow, "save_file": save_file}[sys.argv[1]](place, random.Random(chosen))
    print(json.dumps({"seed": chosen, **outcome}, indent=2))
