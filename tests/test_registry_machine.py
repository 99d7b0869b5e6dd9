"""A registry against a model of it in plain dictionaries: whatever is done to it, in whatever order, and interrupted.

A few seconds of it run with the other tests, half an hour with `pytest -m faults tests/test_registry_machine.py` (and
`make test-faults`), or as many minutes as RAM_TRL_MACHINE_MINUTES says.
"""

import collections
import copy
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ram_trl import AgentRegistry, integrate_agents
from ram_trl.errors import ConfigError, CorruptedFileError
from ram_trl.lifecycle.archive import export_agent, import_agent
from ram_trl.lifecycle.gc import collect_garbage, find_garbage
from ram_trl.lifecycle.verify import verify_registry
from ram_trl.storage.registry import DELTA
from ram_trl.storage.versions import MANIFEST


AGENTS, GENERALISTS, LABELS = ["math", "code"], ["generalist", "other"], ["best", "paper"]
FOLDERS = {"agents": "agent", "generalists": "generalist"}
# Where a version is.
THERE, TRASH, QUARANTINE = "", "trash", "quarantine"
# Before a call of these a process is killed.
CALLS = ["rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "open"]
# A digest that is not known beforehand.
ANY = object()
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass
class Operation:
    """Something that is done to a registry.

    Args:
        run (`Callable`):
            Does it.
        after (`dict`):
            What is there afterwards.
        error (`type`, *optional*):
            What it raises; nothing changes then.
    """

    run: Callable[[AgentRegistry], Any]
    after: dict
    error: type[Exception] | None = None


def observe(path: Path) -> dict:
    """What is in a registry, read from the disk without the registry's code.

    Of a version `(place, digest of its manifest)`, of an alias and of what is the latest a number, of a tag and of the
    mark of a used number `True`.
    """
    facts = {}
    for place in (THERE, TRASH, QUARANTINE):
        for folder, kind in FOLDERS.items():
            for directory in sorted((path / place / folder).glob("*/v*")):
                name = directory.parent.name
                if match := re.fullmatch(r"v(\d{6})", directory.name):
                    assert directory.is_dir()
                    digest = json.loads((directory / MANIFEST).read_text())["digest"]
                    assert (kind, name, int(match[1])) not in facts, "a version is in two places"
                    facts[kind, name, int(match[1])] = (place, digest)
                elif match := re.fullmatch(r"v(\d{6})\.removed", directory.name):
                    facts["used", kind, name, int(match[1])] = True
    for folder, kind in FOLDERS.items():
        for file in (path / folder).glob("*/aliases/*.json"):
            facts["alias", kind, file.parts[-3], file.stem] = json.loads(file.read_text())["version"]
        for file in (path / folder).glob("*/tags/v*/*"):
            facts["tag", kind, file.parts[-4], int(file.parts[-2][1:]), file.name] = True
        for file in (path / folder).glob("*/latest.json"):
            facts["latest", file.parts[-2]] = json.loads(file.read_text())["version"]
    return facts


def is_same(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple) and isinstance(expected, tuple) and expected[1] is ANY:
        return found[0] == expected[0]
    return found == expected


class RegistryMachine(RuleBasedStateMachine):
    """Rules draw an operation, which is done as a whole, or by a process that is killed while it does it."""

    template: Path
    done: collections.Counter = collections.Counter()

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.registry = AgentRegistry(self.folder / "registry")
        self.facts: dict = {}
        self.damaged: set[tuple] = set()
        # parents of generalists, by digest of their manifest, and archives, by name of their file
        self.parents: dict[str, list[tuple[str, str]]] = {}
        self.archives: dict[str, tuple[str, int, str]] = {}
        self.number = 0
        # it comes into being with its first agent
        self._do(self._register("math"), None)

    def teardown(self):
        collect_garbage(self.registry, min_age=0)
        assert not list(self.folder.rglob(".tmp-*"))
        assert find_garbage(self.registry, min_age=0) == []
        shutil.rmtree(self.folder)

    # What there is to draw from

    def _versions(self, kind: str, *places: str) -> list[tuple[str, int]]:
        found = [key[1:] for key, value in self.facts.items() if key[0] == kind and value[0] in (places or (THERE,))]
        return sorted(found)

    def _next(self, kind: str, name: str) -> int:
        used = {n for known, n in self._versions(kind) if known == name}
        used |= {key[3] for key in self.facts if key[:3] == ("used", kind, name)}
        return 1 + max([*used, self.facts.get(("latest", name), 0) if kind == "generalist" else 0])

    def _moved(self, kind: str, name: str, numbers: list[int], place: str) -> dict:
        after = dict(self.facts)
        for number in numbers:
            after[kind, name, number] = (place, self.facts[kind, name, number][1])
            after["used", kind, name, number] = True
        return after

    # Operations

    def _register(self, name: str) -> Operation:
        manifest = copy.deepcopy(AgentRegistry(self.template).get("full").manifest)
        source = self.template / "agents" / "full" / "v000001"
        self.number += 1
        manifest.agent, manifest.training = name, {"run": self.number}
        digest = manifest.to_dict()["digest"]

        def run(registry):
            with registry.stage(name) as staged:
                for file in manifest.files:
                    shutil.copyfile(source / file, staged / file)
                return registry.commit(staged, copy.deepcopy(manifest))

        return Operation(run, {**self.facts, ("agent", name, self._next("agent", name)): (THERE, digest)})

    def _admit_archive(self, archive: str) -> Operation:
        name, number, digest = self.archives[archive]
        here = [n for known, n in self._versions("agent") if known == name]
        after = dict(self.facts)
        if all(self.facts["agent", name, n][1] != digest for n in here):
            is_free = number not in here and ("used", "agent", name, number) not in self.facts
            after["agent", name, number if is_free else self._next("agent", name)] = (THERE, digest)
        return Operation(lambda registry: import_agent(registry, self.folder / archive), after)

    def _remove(self, kind: str, name: str, number: int | None, force: bool) -> Operation:
        there = [n for known, n in self._versions(kind) if known == name]
        numbers = there if number is None else [number]
        spec = name if number is None else f"{name}@v{number}"
        after = self._moved(kind, name, numbers, TRASH)
        if kind == "generalist":
            is_latest = number is not None and self.facts.get(("latest", name)) == number and there != [number]
            return Operation(
                lambda registry: registry.generalists.remove(spec), after, ConfigError if is_latest else None
            )
        digests = {(name, self.facts[kind, name, n][1]) for n in numbers}
        merged = [self.facts["generalist", known, n][1] for known, n in self._versions("generalist")]
        is_parent = any(digests & set(self.parents[digest]) for digest in merged)
        error = ConfigError if is_parent and not force else None
        return Operation(lambda registry: registry.remove(spec, force=force), after, error)

    def _store(self, registry: AgentRegistry, kind: str) -> Any:
        return registry if kind == "agent" else registry.generalists

    def _merge(self, name: str, agents: list[tuple[str, int]]) -> Operation:
        number = self._next("generalist", name)
        after = {**self.facts, ("generalist", name, number): (THERE, ANY)}
        after["latest", name] = max(number, self.facts.get(("latest", name), 0))
        specs = [f"{agent}@v{n}" for agent, n in agents]
        error = CorruptedFileError if {("agent", *key) for key in agents} & self.damaged else None
        return Operation(lambda registry: integrate_agents(registry, name, agents=specs), after, error)

    def _gc(self, quarantine: bool) -> Operation:
        emptied = (TRASH, QUARANTINE) if quarantine else (TRASH,)
        after = {
            key: value
            for key, value in self.facts.items()
            if key[0] not in FOLDERS.values() or value[0] not in emptied
        }
        left = {key[:2] for key in after if key[0] == "generalist"}
        for key, value in self.facts.items():
            is_label = key[0] in ("alias", "tag")
            number = value if key[0] == "alias" else key[3] if key[0] == "tag" else None
            if (is_label and (*key[1:3], number) not in after) or (
                key[0] == "latest" and ("generalist", key[1]) not in left
            ):
                del after[key]
        return Operation(lambda registry: collect_garbage(registry, min_age=0, quarantine=quarantine), after)

    def _draw(self, data) -> Operation:
        """An operation that can be done now."""

        def choose(values):
            return data.draw(st.sampled_from(values))

        kind = choose(["agent", "agent", "generalist"])
        there, away = self._versions(kind), self._versions(kind, TRASH, QUARANTINE)
        possible = {
            "register": True,
            "gc": True,
            "import": self.archives,
            "merge": self._versions("agent"),
            "promote": self._versions("generalist"),
            "recover": away,
            **dict.fromkeys(("remove", "quarantine", "alias", "tag"), there),
        }
        what = choose([name for name, values in possible.items() if values])
        if what == "register":
            return self._register(choose(AGENTS))
        if what == "gc":
            return self._gc(choose([False, True]))
        if what == "import":
            return self._admit_archive(choose(sorted(self.archives)))
        if what == "merge":
            agents = st.sampled_from(possible[what])
            chosen = data.draw(st.lists(agents, min_size=1, max_size=2, unique_by=lambda key: key[0]))
            return self._merge(choose(GENERALISTS), sorted(chosen))
        if what == "promote":
            name, number = choose(possible[what])
            error = CorruptedFileError if ("generalist", name, number) in self.damaged else None
            after = {**self.facts, ("latest", name): number}
            return Operation(lambda registry: registry.generalists.promote(f"{name}@v{number}"), after, error)
        name, number = choose(possible[what])
        spec = f"{name}@v{number}"
        if what == "recover":
            is_damaged = self.facts[kind, name, number][0] == QUARANTINE and (kind, name, number) in self.damaged
            after = self._moved(kind, name, [number], THERE)
            error = CorruptedFileError if is_damaged else None
            return Operation(lambda registry: self._store(registry, kind).recover(spec), after, error)
        if what == "remove":
            return self._remove(kind, name, choose([number, None]), choose([False, True]))
        if what == "quarantine":
            after = self._moved(kind, name, [number], QUARANTINE)
            return Operation(lambda registry: self._store(registry, kind).quarantine(spec, "why"), after)
        return self._label(what, kind, name, number, choose(LABELS))

    def _label(self, what: str, kind: str, name: str, number: int, label: str) -> Operation:
        """Set it, or take it away if it is set."""
        key = (what, kind, name, label) if what == "alias" else (what, kind, name, number, label)
        value = number if what == "alias" else True
        after = dict(self.facts)
        is_set = self.facts.get(key) == value
        if is_set:
            del after[key]
        else:
            after[key] = value

        def run(registry):
            labels = self._store(registry, kind).labels(name)
            if what == "alias":
                return labels.drop_alias(label) if is_set else labels.set_alias(label, number)
            return labels.drop_tag(number, label) if is_set else labels.add_tag(number, label)

        return Operation(run, after)

    # Rules

    def _do(self, operation: Operation, killed_at: tuple[str, int] | None) -> None:
        before, after = self.facts, operation.after if operation.error is None else self.facts
        if killed_at is not None:
            was_killed = self._run_and_kill(operation, *killed_at)
        elif operation.error is not None:
            was_killed = False
            with pytest.raises(operation.error):
                operation.run(self.registry)
        else:
            was_killed = False
            operation.run(self.registry)
        found = observe(self.registry.path)
        for key in {*before, *after, *found}:
            allowed = [after.get(key), *([before.get(key)] if was_killed else [])]
            assert any(is_same(found.get(key), value) for value in allowed), (key, found.get(key), allowed)
        for key in set(found) - set(before):
            if key[0] == "generalist":
                merged = self.registry.generalists.get(f"{key[1]}@v{key[2]}")
                merged.verify()
                self.parents[found[key][1]] = [(parent.agent, parent.digest) for parent in merged.manifest.parents]
        self.facts = found
        self.damaged &= set(found)
        self.done["killed" if was_killed else "refused" if operation.error else "done"] += 1

    def _run_and_kill(self, operation: Operation, call: str, number: int) -> bool:
        """Do it in a process that is killed before a call; whether it was."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                original, calls = getattr(os, call), []

                def maybe_die(*arguments, **options):
                    calls.append(call)
                    if len(calls) == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*arguments, **options)

                setattr(os, call, maybe_die)
                try:
                    operation.run(self.registry)
                    code = 0 if operation.error is None else 1
                except Exception as error:
                    code = 0 if operation.error and isinstance(error, operation.error) else 1
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        assert status == 0 or os.WIFSIGNALED(status), "it failed in another way"
        return os.WIFSIGNALED(status)

    @rule(data=st.data())
    def do(self, data):
        self._do(self._draw(data), None)

    @rule(data=st.data(), call=st.sampled_from(CALLS), number=st.integers(1, 8))
    def do_and_be_killed(self, data, call, number):
        self._do(self._draw(data), (call, number))

    @rule(data=st.data())
    def export(self, data):
        if not (agents := self._versions("agent")):
            return
        name, number = data.draw(st.sampled_from(agents))
        archive = f"{name}-{number}-{len(self.archives)}.tar"
        if ("agent", name, number) in self.damaged:
            with pytest.raises(CorruptedFileError):
                export_agent(self.registry, f"{name}@v{number}", self.folder / archive)
            assert not (self.folder / archive).exists()
        else:
            export_agent(self.registry, f"{name}@v{number}", self.folder / archive)
            self.archives[archive] = (name, number, self.facts["agent", name, number][1])

    @rule(data=st.data())
    def damage_or_repair(self, data):
        keys = [("agent", *key) for key in self._versions("agent", THERE, TRASH, QUARANTINE)]
        keys += [("generalist", *key) for key in self._versions("generalist", THERE, TRASH, QUARANTINE)]
        if not keys:
            return
        kind, name, number = data.draw(st.sampled_from(keys))
        place = self.facts[kind, name, number][0]
        file = DELTA if kind == "agent" else "model.safetensors"
        path = self.registry.path / place / f"{kind}s" / name / f"v{number:06d}" / file
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        self.damaged ^= {(kind, name, number)}

    @rule(quarantine=st.booleans())
    def verify(self, quarantine):
        verdicts = verify_registry(self.registry, everything=True, quarantine=quarantine)
        there = {(kind, *key) for kind in FOLDERS.values() for key in self._versions(kind)}
        expected = {f"{kind} {name}@v{number}" for kind, name, number in self.damaged & there}
        shown = {name for name, _ in self._versions("generalist")}
        for (_, name), number in [fact for fact in self.facts.items() if fact[0][0] == "latest"]:
            if name in shown and ("generalist", name, number) not in there:
                expected.add(f"the latest of generalist {name}")
        assert {verdict.what for verdict in verdicts if verdict.problem} == expected
        if quarantine:
            for key in self.damaged & there:
                self.facts = self._moved(key[0], key[1], [key[2]], QUARANTINE)

    @invariant()
    def the_registry_shows_what_is_there(self):
        assert observe(self.registry.path) == self.facts
        for kind in FOLDERS.values():
            store = self._store(self.registry, kind)
            found = [(name, number) for name in store.names() for number in store.versions(name)]
            assert found == self._versions(kind)


@pytest.fixture(scope="module")
def machine(zoo) -> type[RegistryMachine]:
    """The machine, with a real agent that it registers copies of."""
    base = zoo.base("llama")
    registry = zoo.registry(base, {"full": zoo.agent(base, seed=1)})
    return type("Machine", (RegistryMachine,), {"template": registry.path, "done": collections.Counter()})


OPTIONS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def test_a_registry_behaves_as_its_model(machine):
    start = time.monotonic()
    options = settings(**OPTIONS, max_examples=6, stateful_step_count=30, database=None)
    run_state_machine_as_test(seed(0)(machine), settings=options)
    # how many of them a kill meets depends on the machine
    assert machine.done["done"] > 20 and machine.done["killed"] > 5 and machine.done["refused"] > 0
    print(f"{dict(machine.done)} in {time.monotonic() - start:.0f} s")


@pytest.mark.faults
@pytest.mark.timeout(0)
def test_a_registry_behaves_as_its_model_for_long(machine):
    minutes = float(os.environ.get("RAM_TRL_MACHINE_MINUTES", "30"))
    start, number = time.monotonic(), 0
    while time.monotonic() - start < 60 * minutes:
        options = settings(**OPTIONS, max_examples=10, stateful_step_count=50, database=None)
        run_state_machine_as_test(seed(number := number + 1)(machine), settings=options)
        print(f"{dict(machine.done)} in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
