"""Hostile names at every entry, and an audit of what is touched meanwhile. `run_forks.py` runs it in children."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ram_trl import cli
from ram_trl.errors import RamTrlError
from ram_trl.lifecycle.archive import export_agent, import_agent
from ram_trl.merging.integrate import integrate_agents
from ram_trl.merging.merge import merge_agents
from ram_trl.registering.rebase import rebase_agent
from ram_trl.registering.register import register_agent
from ram_trl.registering.restore import restore_agent
from ram_trl.storage.checkpoint import INDEX, Checkpoint
from ram_trl.storage.registry import AgentRegistry
from ram_trl.storage.versions import MANIFEST


__all__ = [
    "HOSTILE_NAMES",
    "Audit",
    "try_file_names",
    "try_names",
    "try_pickles",
    "try_shard_names",
    "try_tensor_names",
]

_PIECES = ["..", ".", "/", "//", "\\", "~", "-", "\0", "\n", "\r", "\x1b[2J", "\u202e", "%2e%2e", "$(touch x)", "`x`"]
_PIECES += ["*", "?", ";", "|", "&", "'", '"', " ", "\t", "\ud800", "\uff0f", "\u2024\u2024", "con:", "file:///", ":"]
_FRAMES = ["{}", "{}/outside", "math{}", "math/{}", "{}math", "math@{}", "math@v1{}", "../{}/outside", "{0}{0}{0}"]
HOSTILE_NAMES = sorted({frame.format(piece) for frame in _FRAMES for piece in _PIECES})
HOSTILE_NAMES += [
    "",
    "a" * 97,
    "a" * 70_000,
    "../" * 3000 + "etc/passwd",
    "/etc/passwd",
    "/dev/null",
    "/proc/self/mem",
]
HOSTILE_NAMES += [".tmp-math", "math/v000001", "v000001/../../..", "math@v" + "9" * 5000, "math@v0", "math@../v000001"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink")
_CHANGES += ("os.truncate", "os.utime", "os.mkfifo", "os.mknod", "os.setxattr", "shutil.rmtree", "shutil.move")
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pickle.find_class")
_PICKLED = (".bin", ".pt", ".pth")
_LOOKS = ("open", "os.listdir", "os.scandir")


class Audit:
    """What this process touches outside of some folders.

    Args:
        sandbox (`Path`):
            Folder of which nothing may be read, but what is in one of the next.
        allowed (`list[Path]`):
            Folders that may be written to.
        sources (`list[Path]`):
            Folders in the sandbox that may be read.
    """

    def __init__(self, sandbox: Path, allowed: list[Path], sources: list[Path]):
        self.found: list[str] = []
        self._sandbox, self._allowed, self._sources = map(_real, [sandbox]), list(map(_real, allowed)), sources
        self._sandbox, self._sources = next(self._sandbox), list(map(_real, sources))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        # a name within a directory that is open; how that was opened was heard
        is_relative = event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] != -1
        is_relative |= event == "open" and isinstance(arguments[0], str) and os.sep not in arguments[0]
        if is_relative:
            return
        if event in _NEVER or (event == "open" and str(arguments[0]).endswith(_PICKLED)):
            self.found.append(f"{event} {arguments!r:.200}")
        elif event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING):
            paths = arguments[:2] if event in ("os.rename", "os.link", "os.symlink", "shutil.move") else arguments[:1]
            for path in paths:
                if isinstance(path, str | bytes | os.PathLike) and not self._is_in(path, self._allowed):
                    self.found.append(f"{event} {path!r:.200}")
        elif event in _LOOKS and isinstance(arguments[0], str | bytes | os.PathLike):
            readable = [*self._allowed, *self._sources]
            if self._is_in(arguments[0], [self._sandbox, "/etc/passwd"]) and not self._is_in(arguments[0], readable):
                self.found.append(f"{event} {arguments[0]!r:.200}")

    @staticmethod
    def _is_in(path: Any, folders: list[str]) -> bool:
        real = _real(path)
        return real == "/dev/null" or any(real == folder or real.startswith(f"{folder}/") for folder in folders)


def _real(path: Any) -> str:
    try:
        return os.path.realpath(os.fsdecode(path))
    except (ValueError, OSError):
        return os.path.abspath(os.fsdecode(path).replace("\0", "?"))


def _tried(action: Callable[[], Any]) -> str | None:
    """What an entry made of a name, if it was not a clean refusal or a success."""
    try:
        action()
    except RamTrlError as error:
        return None if str(error).isprintable() else f"a message that is no line: {error!r:.200}"
    except SystemExit as end:
        return None if end.code in (0, 1, 2) else f"exit code {end.code}"
    except BaseException as error:
        return f"{error!r:.200}"
    return None


def _stage(store: Any, name: str) -> None:
    with store.stage(name) as staged:
        (staged / "x").write_text("x")


def _entries(registry: AgentRegistry, sources: Path, out: Path) -> dict[str, Callable[[str], Any]]:
    path, base, model = str(registry.path), str(sources / "base"), str(sources / "model")
    generalists, labels = registry.generalists, registry.labels("math")
    archive = str(sources / "math.tar")
    entries = {
        "stage": lambda name: _stage(registry, name),
        "get": registry.get,
        "versions": registry.versions,
        "labels": registry.labels,
        "remove": lambda name: registry.remove(name) if name not in ("math", "math@v1") else None,
        "recover": registry.recover,
        "quarantine": lambda name: registry.quarantine(name, "x"),
        "register": lambda name: register_agent(registry, name, model, base_model=base),
        "restore": lambda name: restore_agent(registry, name, str(out / "restored")),
        "merge": lambda name: merge_agents(registry, str(out / "merged"), agents=["math", name]),
        "weights": lambda name: merge_agents(registry, None, agents=["math"], weights={name: 1.0}),
        "rebase": lambda name: rebase_agent(registry, name, new_base=base),
        "generalist stage": lambda name: _stage(generalists, name),
        "generalist get": generalists.get,
        "generalist promote": generalists.promote,
        "generalist remove": generalists.remove,
        "generalist labels": generalists.labels,
        "integrate": lambda name: integrate_agents(registry, name),
        "alias": lambda name: labels.set_alias(name, 1),
        "drop alias": labels.drop_alias,
        "read alias": lambda name: registry.get(f"math@{name}"),
        "tag": lambda name: labels.add_tag(1, name),
        "drop tag": lambda name: labels.drop_tag(1, name),
        "export": lambda name: export_agent(registry, name, out / "math.tar"),
        "import": lambda name: import_agent(registry, archive, name),
    }
    commands = {
        "register": ["--model", model, "--base_model", base],
        "restore": ["--output_dir", str(out / "by-command")],
        "export": ["--output", str(out / "by-command.tar")],
        **{name: [] for name in ("show", "verify", "log", "rebase", "isolate", "remove", "recover", "quarantine")},
        "alias": ["--set", "best"],
        "tag": ["--add", "good"],
    }
    for command, options in commands.items():
        words = [command, "--registry", path, *options]
        entries[f"ram-trl {command}"] = lambda name, words=words: cli.main([*words, f"--agent={name}"])
    for option in ("alias --set", "alias --drop", "tag --add", "tag --drop"):
        command, flag = option.split()
        words = [command, "--registry", path, "--agent", "math@v1"]
        entries[f"ram-trl {option}"] = lambda name, w=words, f=flag: cli.main([*w, f"{f}={name}"])
    return entries


def try_names(sandbox: str, names: list[int]):
    """Hostile names through every entry, of a registry with one agent in a sandbox."""
    folder = Path(sandbox)
    out, sources = folder / "out", folder / "sources"
    entries = _entries(AgentRegistry(folder / "deep" / "registry"), sources, out)
    os.chdir(folder / "cwd")
    audit = Audit(folder, [folder / "deep" / "registry", out], [sources])

    def go() -> dict[str, Any]:
        tried, wrong = 0, []
        sys.stdout = sys.stderr = open(os.devnull, "w")
        for entry, action in entries.items():
            for name in map(HOSTILE_NAMES.__getitem__, names):
                problem = _tried(lambda action=action, name=name: action(name))
                tried += 1
                if problem is not None or audit.found:
                    wrong.append(f"{entry}({name!r:.80}): {problem or audit.found[:3]}")
                    audit.found.clear()
        return {"names": len(names), "entries": len(entries), "tried": tried, "wrong": wrong}

    return go


def try_shard_names(sandbox: str):
    """Every hostile name as that of a file in a model's index."""
    folder = Path(sandbox)
    model = folder / "sources" / "sharded"
    model.mkdir()
    audit = Audit(folder, [model], [])

    def go() -> dict[str, Any]:
        wrong = []
        for name in [n + end for n in HOSTILE_NAMES for end in ("", ".safetensors")]:
            (model / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
            problem = _tried(lambda: _refused(lambda: Checkpoint(model)))
            if problem is not None or audit.found:
                wrong.append(f"{name!r:.80}: {problem or audit.found[:3]}")
                audit.found.clear()
        return {"names": 2 * len(HOSTILE_NAMES), "wrong": wrong}

    return go


def try_file_names(sandbox: str, version: str):
    """Every hostile name as that of a file in an agent's manifest, with a digest that fits."""
    from mutants import reseal

    folder, path = Path(sandbox), Path(version) / MANIFEST
    registry = AgentRegistry(folder / "deep" / "registry")
    content = json.loads(path.read_text())
    audit = Audit(folder, [registry.path], [])

    def go() -> dict[str, Any]:
        wrong = []
        for name in HOSTILE_NAMES:
            record = {"size": 1, "blake3": "0" * 64}
            path.write_text(json.dumps(reseal({**content, "files": {**content["files"], name: record}})))
            problem = _tried(lambda: _refused(lambda: registry.get("math").verify()))
            if problem is not None or audit.found:
                wrong.append(f"{name!r:.80}: {problem or audit.found[:3]}")
                audit.found.clear()
        path.write_text(json.dumps(content, indent=2) + "\n")
        return {"names": len(HOSTILE_NAMES), "wrong": wrong}

    return go


def try_tensor_names(sandbox: str):
    """A model whose tensors have hostile names: registered, merged and restored, or refused."""
    folder, out = Path(sandbox), Path(sandbox) / "out"
    # a name with half of a surrogate pair cannot be written, and one that is too long is refused
    names = [name for name in HOSTILE_NAMES if "\ud800" not in name and len(name) < 4096]
    for seed, kind in enumerate(("base", "model")):
        place = folder / "sources" / f"names-{kind}"
        place.mkdir()
        torch.manual_seed(seed)
        tensors = {name: torch.randn(4, 4).bfloat16() for name in names}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text("{}")
    audit = Audit(folder, [out], [folder / "sources"])

    def go() -> dict[str, Any]:
        base, model = str(folder / "sources" / "names-base"), str(folder / "sources" / "names-model")
        register_agent(str(out / "registry"), "math", model, base_model=base).verify()
        merge_agents(str(out / "registry"), str(out / "merged"), max_shard_size="100KB")
        restore_agent(str(out / "registry"), "math", str(out / "restored"))
        same = all(Checkpoint(out / "restored").digest(name) == Checkpoint(Path(model)).digest(name) for name in names)
        return {"names": len(names), "same": same, "wrong": audit.found}

    return go


class _Payload:
    """What a pickle can do to who opens it."""

    def __init__(self, canary: Path):
        self._canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self._canary),)


PICKLES = (
    "pytorch_model.bin",
    "adapter_model.bin",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
)


def try_pickles(sandbox: str):
    """Pickles in the place of weights, and beside them: none is opened, whatever is done with the model."""
    folder, out = Path(sandbox), Path(sandbox) / "out"
    payload = pickle.dumps(_Payload(folder / "canary"))
    cases = []
    for replaced in ("model.safetensors", None):
        for name in (*PICKLES, "model.safetensors"):
            model = shutil.copytree(folder / "sources" / "model", folder / "sources" / f"pickles-{len(cases)}")
            if replaced:
                (model / replaced).unlink()
            (model / name).write_bytes(payload)
            cases.append(str(model))
    base = str(folder / "sources" / "base")
    audit = Audit(folder, [out], [folder / "sources"])

    def go() -> dict[str, Any]:
        wrong = []
        for number, model in enumerate(cases):
            registry = str(out / f"pickles-{number}")
            problems = [_tried(lambda m=model, r=registry: register_agent(r, "math", m, base_model=base))]
            problems.append(_tried(lambda m=model, r=registry: register_agent(r, "code", base, base_model=m)))
            problems.append(_tried(lambda r=registry: merge_agents(r, f"{r}-merged")))
            wrong += [problem for problem in problems if problem is not None]
        return {"names": len(cases), "wrong": wrong + audit.found, "canary": (folder / "canary").exists()}

    return go


def _refused(action: Callable[[], Any]) -> None:
    """Do what must be refused."""
    action()
    raise AssertionError("it was accepted")
