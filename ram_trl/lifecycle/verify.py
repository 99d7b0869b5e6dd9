"""Whether what is in a registry is what was written, and what to do where it is not."""

import functools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..arithmetic.defaults import RESCALING
from ..errors import CorruptedFileError, RamTrlError
from ..progress import Progress, meter
from ..storage.fisher import FisherStore
from ..storage.generalists import Generalist
from ..storage.names import QUARANTINE
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.trash import put_away
from ..storage.versions import VersionStore
from .gc import find_garbage


__all__ = ["Verdict", "hidden_versions", "verify_registry"]

_Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of one thing.

    Args:
        what (`str`):
            What was looked at: `"agent math@v2"`.
        bytes (`int`):
            Bytes of its files.
        problem (`str`, *optional*):
            What is wrong with it, and the cure.
        notes (`tuple[str, ...]`, *optional*):
            What to know about it that is not wrong.
        quarantined (`bool`, *optional*, defaults to `False`):
            Whether it was moved into quarantine.
    """

    what: str
    bytes: int = 0
    problem: str | None = None
    notes: tuple[str, ...] = ()
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """One thing to verify: how large it is, how it is done, what else there is to say, how it goes into quarantine."""

    what: str
    bytes: int
    verify: Callable[[_Advance], None]
    notes: tuple[str, ...] = ()
    quarantine: Callable[[str], object] | None = None


def verify_registry(
    registry: AgentRegistry,
    *,
    agent: str | None = None,
    generalist: str | None = None,
    everything: bool = False,
    quarantine: bool = False,
    progress: Progress | None = None,
) -> list[Verdict]:
    """Compare what is in a registry with its digests.

    Args:
        registry ([`AgentRegistry`]):
            The registry. Nothing is written to it unless `quarantine`.
        agent (`str`, *optional*):
            An agent, `"math"` (all of its versions), `"math@v2"` or `"math@best"`, with its Fisher information.
        generalist (`str`, *optional*):
            A generalist, likewise.
        everything (`bool`, *optional*, defaults to `False`):
            Whether to verify every version, and to note what is out of sight or left behind. Without any of the three
            it is the newest version of every agent and of every generalist.
        quarantine (`bool`, *optional*, defaults to `False`):
            Whether to move into quarantine what fails.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        `list[Verdict]`: one for every version, its Fisher, every label that is damaged or means nothing, and what is
        out of sight. What has no `problem` is intact.

    Raises:
        AgentNotFoundError: if there is no such registry, agent or generalist.
    """
    registry.check_exists()
    # parents of one generalist are those of others too
    generalist_tasks = functools.partial(_generalist_tasks, find_same=functools.cache(registry.find_same))
    kinds = ((registry.store, agent, _agent_tasks), (registry.generalists.store, generalist, generalist_tasks))
    tasks = []
    for store, spec, tasks_of in kinds:
        if everything:
            found = [(name, store.versions(name)) for name in store.names()]
        elif spec is not None:
            found = [store.find(spec)]
        else:
            found = [(name, store.versions(name)[-1:]) for name in store.names() if agent is generalist is None]
        for name, numbers in found:
            tasks += [task for number in numbers for task in tasks_of(registry, name, number)]
            if spec is None or "@" not in spec:
                tasks += _label_tasks(registry, store, name)
    out_of_sight = list(_out_of_sight(registry)) if everything else []
    advance = meter("verify", sum(task.bytes for task in tasks), progress)
    return [*(_judge(task, advance, quarantine) for task in tasks), *out_of_sight]


def _judge(task: _Task, advance: _Advance, quarantine: bool) -> Verdict:
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        advance(nbytes)

    try:
        task.verify(count)
    except RamTrlError as error:
        # what was not read because of the damage
        advance(task.bytes - done)
        # what a newer version wrote, or what cannot be read just now, is not damaged
        is_damaged = isinstance(error, CorruptedFileError)
        if not (quarantine and is_damaged and task.quarantine):
            return Verdict(task.what, task.bytes, str(error), task.notes)
        task.quarantine(str(error))
        return Verdict(task.what, task.bytes, str(error), task.notes, quarantined=True)
    return Verdict(task.what, task.bytes, notes=task.notes)


def _agent_tasks(registry: AgentRegistry, name: str, number: int) -> Iterator[_Task]:
    spec = f"{name}@v{number}"
    quarantine = functools.partial(registry.quarantine, spec)
    try:
        agent = registry.get(spec)
    except RamTrlError as error:
        yield _Task(f"agent {spec}", 0, functools.partial(_fail, error), quarantine=quarantine)
        return
    # first, as it goes with an agent that fails
    if number in registry.fishers.versions(name):
        yield _fisher_task(registry, agent)
    yield _Task(f"agent {spec}", _bytes(agent), agent.verify, quarantine=quarantine)


def _fisher_task(registry: AgentRegistry, agent: RegisteredAgent) -> _Task:
    what = f"Fisher of {agent}"

    def quarantine(reason: str) -> None:
        put_away(registry.fishers, agent.name, agent.version, reason, made_again=True)

    try:
        fisher = FisherStore(registry).get(agent)
    except RamTrlError as error:
        return _Task(what, 0, functools.partial(_fail, error), quarantine=quarantine)
    return _Task(what, _bytes(fisher), fisher.verify, quarantine=quarantine)


def _generalist_tasks(
    registry: AgentRegistry, name: str, number: int, find_same: Callable[[str, str], RegisteredAgent | None]
) -> Iterator[_Task]:
    spec = f"{name}@v{number}"
    what, quarantine = f"generalist {spec}", functools.partial(registry.generalists.quarantine, spec)
    try:
        generalist = registry.generalists.get(spec)
    except RamTrlError as error:
        yield _Task(what, 0, functools.partial(_fail, error), quarantine=quarantine)
        return
    parents = {f"{parent.agent}@v{parent.version}": parent for parent in generalist.manifest.parents}
    agents = {spec: find_same(parent.agent, parent.digest) for spec, parent in parents.items()}
    missing = [spec for spec, agent in agents.items() if agent is None]
    notes = (f"merged of {', '.join(missing)}, which this registry does not have",) if missing else ()

    def verify(advance: _Advance) -> None:
        try:
            generalist.verify(advance)
        except RamTrlError as error:
            again = "" if missing else f"; {_merge_command(registry, generalist, agents)}"
            raise type(error)(f"{error}{again}") from error

    yield _Task(what, _bytes(generalist), verify, notes, quarantine)


def _merge_command(registry: AgentRegistry, generalist: Generalist, agents: dict[str, RegisteredAgent]) -> str:
    """The command that merges the same again, of the same agents, whatever their numbers are now."""
    settings = generalist.manifest.settings
    words = {"registry": [registry.path], "merge_to": [generalist.name], "agents": [*agents.values()]}
    for name, value in settings.items():
        if name == "weights":
            words[name] = [f"{agents.get(spec, spec)}={weight}" for spec, weight in value.items()]
        elif name == "method_options":
            words[name] = [f"{key}={number}" for key, number in value.items()]
        elif name not in ("r", "alpha") or settings.get("method") in RESCALING:
            words[name] = [value]
    options = [f"--{name} {shlex.join(map(str, values))}" for name, values in words.items() if values]
    return f"accelerate launch recipes/merge.py {' '.join(options)}"


def _label_tasks(registry: AgentRegistry, store: VersionStore, name: str) -> Iterator[_Task]:
    labels, numbers = store.labels(name), store.versions(name)
    for alias in labels.alias_names():
        what = f"alias {name}@{alias}"
        try:
            number = labels.read_alias(alias)
        except RamTrlError as error:
            yield _Task(what, 0, functools.partial(_fail, error))
            continue
        if number is not None and number not in numbers:
            yield _Task(what, 0, _pass, (f"means v{number}, which is not there",))
    if store is registry.generalists.store:
        what = f"the latest of generalist {name}"
        try:
            registry.generalists.check_latest(name)
        except RamTrlError as error:
            yield _Task(what, 0, functools.partial(_fail, error))


def _out_of_sight(registry: AgentRegistry) -> Iterator[Verdict]:
    # with gc's own age: what is being written now is none
    for one in find_garbage(registry):
        yield Verdict(str(one.path), one.bytes, notes=(f"{one.what}: ram-trl gc removes it",))
    for store, name, number in hidden_versions(registry, QUARANTINE):
        again = "make it again (recipes/fisher.py)" if store is registry.fishers else "repair it and recover it"
        cure = f"{again}, or empty the quarantine with ram-trl gc --quarantine"
        path = store.hidden(QUARANTINE).version_dir(name, number)
        yield Verdict(str(path), notes=(f"{store.kind} {name}@v{number}, in quarantine: {cure}",))


def hidden_versions(registry: AgentRegistry, place: str) -> Iterator[tuple[VersionStore, str, int]]:
    """What is in the trash or in quarantine (`TRASH`, `QUARANTINE`): store that showed it, name and number.

    Fisher information is left out where its agent is there too: they come back together.
    """
    agents = registry.store.hidden(place)
    for store in (registry.store, registry.generalists.store, registry.fishers):
        hidden = store.hidden(place)
        for name in hidden.names():
            with_agent = agents.versions(name) if store is registry.fishers else []
            yield from ((store, name, number) for number in hidden.versions(name) if number not in with_agent)


def _bytes(version) -> int:
    return sum(record.size for record in version.manifest.files.values())


def _fail(error: Exception, advance: _Advance) -> None:
    raise error


def _pass(advance: _Advance) -> None:
    pass
