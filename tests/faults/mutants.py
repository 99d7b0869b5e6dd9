"""Damaged files by the thousand, and what becomes of those who read them. `run_forks.py` runs it in children."""

import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from ram_trl.arithmetic.codec import TILE_NUMEL
from ram_trl.errors import RamTrlError
from ram_trl.merging.plan import MergeSettings, plan_merge
from ram_trl.registering.register import register_agent
from ram_trl.registering.restore import restored_dtype, write_agent
from ram_trl.storage.base_model import open_recorded_base
from ram_trl.storage.registry import AgentRegistry
from ram_trl.storage.tensor_file import TensorInfo
from ram_trl.storage.versions import MANIFEST
from ram_trl.task_vector import open_task_vector


__all__ = ["HEADERS", "reseal", "try_headers", "try_mutants"]

NASTY = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**200,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "x" * 5000,
    "../../outside",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "\n",
    [],
    {},
    [[]],
    [0],
    [2**62, 0],
    [-1],
    ["a"],
    {"a": {}},
    [None],
]


class Bounds:
    """Time and memory that each thing may take."""

    def __init__(self):
        self.seconds, self._memory = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def measure(self, action: Callable[[], Any]) -> None:
        """Do something; what it raises passes."""
        started = time.process_time()
        try:
            action()
        finally:
            self.seconds = max(self.seconds, time.process_time() - started)

    @property
    def megabytes(self) -> float:
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._memory) / 1024


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four changes anywhere: bits, bytes, blocks."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        # half of the changes hit what describes the rest
        at = at if chance.random() < 0.5 else min(at, chance.randrange(512))
        length = chance.choice((1, 1, 2, 4, 8, 64, 512))
        kind = chance.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at : at + length] = chance.randbytes(length)
        elif kind == 2:
            data[at : at + length] = b""
        elif kind == 3:
            data[at:at] = chance.randbytes(length)
        elif kind == 4:
            data[at : at + length] = bytes(length)
        elif kind == 5:
            other = chance.randrange(len(data) + 1)
            data[at : at + length], data[other : other + length] = (
                data[other : other + length],
                data[at : at + length],
            )
        else:
            del data[at:]
    return bytes(data)


def mutate_json(text: bytes, chance: random.Random) -> bytes:
    """A value somewhere becomes another, or goes, or gets another name; or bytes change."""
    if chance.random() < 0.3:
        return mutate_bytes(text, chance)
    content = json.loads(text)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(content))
        parent, key = chance.choice(places)
        kind = chance.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[str(chance.choice(NASTY))] = parent.pop(key)
        elif kind == 2:
            other, place = chance.choice(places)
            parent[key] = json.loads(json.dumps(other[place])) if place in other or isinstance(place, int) else None
        elif kind == 3 and isinstance(parent[key], int):
            parent[key] += chance.choice((-1, 1, 8, 2**32, 2**63))
        else:
            parent[key] = chance.choice(NASTY)
        if not content:
            break
    return json.dumps(content).encode()


def mutate_tensors(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header or bytes are changed."""
    if chance.random() < 0.6:
        return mutate_bytes(data, chance)
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + length], chance)
    claimed = len(header) + chance.choice((0, 0, 0, 0, 1, -1, 2**32, 2**62))
    return (claimed % 2**64).to_bytes(8, "little") + header + data[8 + length :]


def _places(content: Any):
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield content, key
        yield from _places(value)


def reseal(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest with a digest that fits what it says."""
    content = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "digest": blake3(text.encode()).hexdigest()}


def read_deeply(registry: Path, base: str | None = None) -> None:
    """Read all of an agent but do not ask its manifest for digests: what its own readers find remains.

    Raises:
        RamTrlError: if something else comes out than was registered.
    """
    agent = AgentRegistry(registry).get("math")
    opened = open_recorded_base(agent, base)
    vector, records = open_task_vector(agent), agent.tensors()
    for name in vector.changed_tensors & set(opened.tensors):
        info = opened.tensors[name]
        for start in range(0, info.numel, TILE_NUMEL):
            tile = opened.read(name, start, min(start + TILE_NUMEL, info.numel))
            vector.mask(name, start, len(tile), tile, 1e-5)
            vector.update(0, name, start, tile, 1e-5)
    infos = [TensorInfo(i.name, restored_dtype(agent, i, records), i.shape) for i in opened.tensors.values()]
    write_agent(agent, opened, vector, infos, _Nowhere(), None)
    plan_merge(AgentRegistry(registry), ["math"], MergeSettings(), base).close()


class _Nowhere:
    def write(self, name, start, tile):
        pass

    def close(self):
        pass


def try_mutants(kind: str, registry: str, victim: str, base: str, seed: int, count: int, scratch: str, **options):
    """Damage one file again and again, and have it read.

    Args:
        kind (`str`):
            How it is damaged and read.
        registry (`str`):
            A registry with one agent, `math`.
        victim (`str`):
            The file that is damaged, and whole again at the end.
        base (`str`):
            Directory of the base.
        seed (`int`):
            Seed of the damage.
        count (`int`):
            How many times.
        scratch (`str`):
            A directory for what is written.
    """
    path, chance = Path(victim), random.Random(seed)
    original, opened = path.read_bytes(), AgentRegistry(registry)
    agent = opened.get("math")
    manifest = json.loads((agent.path / MANIFEST).read_text())

    def damage() -> bytes:
        while True:
            if "json" in kind:
                changed = mutate_json(original, chance)
            else:
                changed = mutate_tensors(original, chance)
            if "resealed" in kind:
                # whoever can write a digest can write any
                if path.name == MANIFEST:
                    try:
                        changed = json.dumps(reseal(json.loads(changed))).encode()
                    except (ValueError, AttributeError, UnicodeEncodeError):
                        continue
                else:
                    record = {"size": len(changed), "blake3": blake3(changed).hexdigest()}
                    files = {**manifest["files"], path.name: record}
                    (agent.path / MANIFEST).write_text(json.dumps(reseal({**manifest, "files": files})))
            if changed != original:
                return changed

    def read() -> None:
        if kind.startswith("registering"):
            # what a user registers has no digest yet: the point is that nothing breaks
            target = AgentRegistry(Path(scratch, "new"))
            register_agent(target, "math", str(path.parent), base_model=base)
            target.get("math").verify()
            return
        if "resealed" in kind:
            opened.get("math").verify()
            read_deeply(Path(registry), base)
            return
        found = opened.get("math")
        found.verify()
        if kind.startswith("base"):
            read_deeply(Path(registry), base)
        # what passes has to be what it was
        assert found == agent, "a manifest that says something else was accepted"

    outcomes: Counter[str] = Counter()
    foreign: list[str] = []
    bounds = Bounds()

    def go() -> dict[str, Any]:
        try:
            for number in range(count):
                path.write_bytes(damage())
                try:
                    bounds.measure(read)
                    outcomes["accepted"] += 1
                except RamTrlError as error:
                    outcomes[type(error).__name__] += 1
                    if not str(error).isprintable():
                        foreign.append(f"{number}: the message is no line: {error!r:.300}")
                except Exception as error:
                    foreign.append(f"{number}: {error!r:.300}")
        finally:
            path.write_bytes(original)
            (agent.path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        return {
            "outcomes": dict(outcomes),
            "foreign": foreign,
            "seconds": bounds.seconds,
            "megabytes": bounds.megabytes,
        }

    return go


_ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
# Each is a header; too much of everything, and what other readers take.
HEADERS: dict[str, Callable[[], bytes]] = {
    "60 MB of a million tensors": lambda: (
        b"{"
        + b",".join(b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(1_000_000))
        + b"}"
    ),
    "60 MB of lists": lambda: b'{"w":[' + b",".join([b"[" * 500 + b"]" * 500] * 60_000) + b"]}",
    "60 MB of objects": lambda: b'{"w":' + b'{"a":' * 12_000_000 + b"1" + b"}" * 12_000_001,
    "60 MB of numbers": lambda: b'{"w":{"dtype":"F32","data_offsets":[0,8],"shape":[1' + b",1" * 30_000_000 + b"]}}",
    "60 MB of one name": lambda: b'{"' + b"w" * 60_000_000 + b'":' + _ENTRY + b"}",
    "60 MB of escapes": lambda: b'{"' + b"\\u0077" * 10_000_000 + b'":' + _ENTRY + b"}",
    "60 MB of spaces": lambda: b'{"w":' + _ENTRY + b"}" + b" " * 60_000_000,
    "60 MB of metadata": lambda: b'{"__metadata__":{"a":"' + b"x" * 60_000_000 + b'"},"w":' + _ENTRY + b"}",
    "a number of a million digits": lambda: _ENTRY.replace(b"[2]", b"[" + b"9" * 1_000_000 + b"]"),
    "nested lists": lambda: b"[" * 200_000 + b"]" * 200_000,
    "duplicate names": lambda: b'{"w":' + _ENTRY + b',"w":' + _ENTRY + b"}",
    "shape [2^62, 0]": lambda: b'{"w":{"dtype":"F32","shape":[4611686018427387904,0],"data_offsets":[0,0]}}',
    "overlapping offsets": lambda: b'{"a":' + _ENTRY + b',"b":' + _ENTRY.replace(b"[0,8]", b"[4,12]") + b"}",
    "backward offsets": lambda: b'{"w":' + _ENTRY.replace(b"[0,8]", b"[8,0]") + b"}",
    "__metadata__ as a tensor": lambda: b'{"__metadata__":' + _ENTRY + b"}",
}


def try_headers(registry: str, base: str, scratch: str, name: str):
    """A hostile header in the place of an agent's deltas, of the base, and of what is to be registered."""
    header = HEADERS[name]()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    # what this process needed to make it is not what reading it takes
    Path(scratch).mkdir(exist_ok=True)
    path = Path(scratch, "model.safetensors")
    path.write_bytes(content)
    del header, content
    opened, target = AgentRegistry(registry), AgentRegistry(Path(scratch, "new"))

    def deltas() -> None:
        agent = opened.get("math")
        weights = agent.path / "delta.safetensors"
        weights.rename(Path(scratch, "whole"))
        path.rename(weights)
        try:
            open_task_vector(agent)
        finally:
            weights.rename(path)
            Path(scratch, "whole").rename(weights)

    entries = {
        "deltas": deltas,
        "base": lambda: open_recorded_base(opened.get("math"), scratch),
        "registered": lambda: register_agent(target, "math", scratch, base_model=base),
        "registered against": lambda: register_agent(target, "math", base, base_model=scratch),
    }

    def go() -> dict[str, Any]:
        outcomes, bounds = {}, Bounds()
        for entry, action in entries.items():
            try:
                bounds.measure(action)
                outcomes[entry] = "accepted"
            except RamTrlError:
                outcomes[entry] = "refused"
            except Exception as error:
                outcomes[entry] = f"{error!r:.200}"
        path.unlink()
        return {"outcomes": outcomes, "seconds": bounds.seconds, "megabytes": bounds.megabytes}

    return go
