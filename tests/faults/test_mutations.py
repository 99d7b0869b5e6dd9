"""Promise 5: no damaged file is believed, and none does harm to who reads it."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from forks import Forks
from mutants import HEADERS

from ram_trl import AgentRegistry, register_agent


BATCH = 250
# How a file is damaged and read, and which one it is. The first are believed only if they are what they were; a file
# that is being registered is new, and who can write a digest that fits can write any: those must only do no harm.
WEIGHTS = {
    "delta": ("full", "delta.safetensors"),
    "adapter": ("lora", "adapter_model.safetensors"),
    "base": ("full", "base/model.safetensors"),
    "resealed delta": ("full", "delta.safetensors"),
    "resealed adapter": ("lora", "adapter_model.safetensors"),
    "registering": ("full", "model/model.safetensors"),
    "registering adapter": ("lora", "adapter/adapter_model.safetensors"),
}
RECORDS = {
    "json": ("full", "manifest.json"),
    "json tensors": ("full", "tensors.json"),
    "json map": ("lora", "adapter_map.json"),
    "resealed json": ("full", "manifest.json"),
    "resealed json tensors": ("full", "tensors.json"),
    "resealed json map": ("lora", "adapter_map.json"),
    "base json": ("full", "base/config.json"),
    "registering json": ("lora", "adapter/adapter_config.json"),
}


@pytest.fixture(scope="module")
def place(zoo, tmp_path_factory) -> Path:
    """A registry with a full agent and one with an adapter, and copies of what they come from."""
    folder, base = tmp_path_factory.mktemp("mutations"), zoo.base("qwen2_untied")
    sources = {"base": base, "model": zoo.agent(base, seed=1), "adapter": zoo.adapter(base)}
    for name, source in sources.items():
        shutil.copytree(source, folder / name)
    for kind, source in (("full", "model"), ("lora", "adapter")):
        register_agent(AgentRegistry(folder / kind), "math", str(folder / source), base_model=str(folder / "base"))
    return folder


def harm(forks: Forks, place: Path, kind: str, source: tuple[str, str], count: int, chance: random.Random) -> Counter:
    """Have a file damaged and read so many times; how that ended, by the class of the error."""
    registry, name = source
    version = place / registry / "agents" / "math" / "v000001"
    victim = place / name if "/" in name else version / name
    outcomes: Counter[str] = Counter()
    for begun in range(0, count, BATCH):
        shutil.rmtree(place / "scratch", ignore_errors=True)
        arguments = {
            "kind": kind,
            "registry": str(place / registry),
            "victim": str(victim),
            "base": str(place / "base"),
            "seed": chance.randrange(2**32),
            "count": min(BATCH, count - begun),
            "scratch": str(place / "scratch"),
        }
        found = forks.result("try_mutants", arguments)
        assert found["foreign"] == [], (kind, arguments["seed"])
        assert found["seconds"] < 2 and found["megabytes"] < 200, (kind, found)
        outcomes.update(found["outcomes"])
    if kind in ("delta", "adapter", "json tensors", "json map"):
        assert outcomes["accepted"] == 0
    return outcomes


@pytest.mark.parametrize("files", [WEIGHTS, RECORDS], ids=["weights", "records"])
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.faults, pytest.mark.timeout(7200)])])
def test_damaged_files(forks, place, chance, files, count):
    outcomes = {}
    for kind, source in files.items():
        outcomes[kind] = harm(forks, place, kind, source, -(-count // len(files)), chance)
    print(json.dumps(outcomes, indent=2))
    # most are refused, and the whole files were fine
    assert sum(found["accepted"] for found in outcomes.values()) < count / 2
    for registry in ("full", "lora"):
        AgentRegistry(place / registry).get("math").verify()


@pytest.mark.parametrize("share", [4, pytest.param(len(HEADERS), marks=pytest.mark.faults)])
def test_hostile_headers_are_refused_within_a_second_and_200_megabytes(forks: Forks, place, chance, share):
    slowest = largest = 0.0
    for name in chance.sample(list(HEADERS), share):
        arguments = {"registry": str(place / "full"), "base": str(place / "base"), "scratch": str(place / "hostile")}
        found = forks.result("try_headers", {**arguments, "name": name})
        assert set(found["outcomes"].values()) == {"refused"}, (name, found)
        assert found["seconds"] < 1 and found["megabytes"] < 200, (name, found)
        slowest, largest = max(slowest, found["seconds"]), max(largest, found["megabytes"])
    print(f"{share} hostile headers at 4 entries: at most {slowest:.2f} s and {largest:.0f} MB")
