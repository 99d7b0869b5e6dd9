"""The floors of the house: imports go downward only (docs/ARCHITECTURE.md). Read from the source, nothing is run."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ram_trl


ROOT = Path(ram_trl.__file__).parent
RECIPES = ROOT.parent / "recipes"
MAX_LINES = 320
HEAVY = ("accelerate", "datasets", "deepspeed", "peft", "torch", "transformers", "trl")

# Who may know whom. A name ending in a dot is a package with all its modules.
GROUND = ("errors", "version")
ARITHMETIC = (*GROUND, "threads", "arithmetic.")
STORAGE = (*GROUND, "storage.")
MIDDLE = (*GROUND, "arithmetic.", "storage.", "task_vector", "distributed", "sharded")
EVERYTHING_BELOW_THE_ROOF = (
    *MIDDLE,
    "progress",
    "table",
    "picture_style",
    "threads",
    "lifecycle.",
    "sharing.",
    "registering.",
    "merging.",
    "analyzing.",
    "evaluating.",
    "sweeping.",
    "provenance",
    "callbacks",
    "options",
    "config",
    "terminal",
    "cli.",
)
FLOORS = {
    "errors": (),
    "version": (),
    "progress": (),
    "table": (),
    "picture_style": (),
    "threads": (),
    "arithmetic.": ARITHMETIC,
    "storage.": STORAGE,
    "task_vector": (*ARITHMETIC, *STORAGE),
    "distributed": GROUND,
    "sharded": (*GROUND, "distributed"),
    "sharing.": (*STORAGE, "distributed", "progress", "sharing."),
    "lifecycle.": (*STORAGE, "arithmetic.defaults", "progress", "table", "lifecycle."),
    "registering.": (*MIDDLE, "progress", "threads", "registering."),
    "merging.": (*MIDDLE, "progress", "table", "threads", "merging."),
    "analyzing.": (*MIDDLE, "progress", "table", "picture_style", "threads", "merging.", "analyzing."),
    "evaluating.": (*MIDDLE, "progress", "table", "threads", "options", "registering.", "merging.", "evaluating."),
    "sweeping.": (*MIDDLE, "table", "picture_style", "options", "merging.", "evaluating.", "sweeping."),
    "provenance": (*GROUND, "registering."),
    "callbacks": EVERYTHING_BELOW_THE_ROOF,
    "options": GROUND,
    "config": EVERYTHING_BELOW_THE_ROOF,
    "terminal": EVERYTHING_BELOW_THE_ROOF,
    "cli.": EVERYTHING_BELOW_THE_ROOF,
    "__main__": EVERYTHING_BELOW_THE_ROOF,
    "": GROUND,  # ram_trl/__init__.py
}


def module_name(path):
    """`storage.registry` of ram_trl/storage/registry.py; a package is named like `storage.` and ram_trl itself ``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((*parts[:-1], "")) if parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def resolve(dotted):
    """Module of ram_trl for a dotted path below it, which may end in a name of that module."""
    for candidate in (dotted, f"{dotted}." if dotted else "", dotted.rpartition(".")[0]):
        if candidate in MODULES:
            return candidate
    parent = dotted.rpartition(".")[0]
    return f"{parent}." if parent and f"{parent}." in MODULES else ""


def imports_of(path, package):
    """Every module of ram_trl that a file imports, wherever in the file, for types only or not."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = package[: len(package) - node.level + 1]
                assert len(above) == len(package) - node.level + 1 > 0, f"{path} imports from outside the package"
                base = ".".join((*above, *([node.module] if node.module else [])))
            else:
                base = node.module
            dotted = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {
            resolve(name.removeprefix("ram_trl").lstrip(".")) for name in dotted if name.split(".")[0] == "ram_trl"
        }
    return found


def imports_of_module(name):
    package = ("ram_trl", *name.split(".")[:-1])
    return imports_of(MODULES[name], package) - {name}


def imported_libraries(path):
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names


def floor_of(name):
    return next((floor for floor in FLOORS if name == floor or (floor.endswith(".") and name.startswith(floor))), None)


def may_know(name, other):
    return any(other == known or (known.endswith(".") and other.startswith(known)) for known in FLOORS[floor_of(name)])


def test_the_walk_sees_the_imports():
    assert len(MODULES) > 25
    assert {"arithmetic.ram", "storage.", "storage.registry", "", "__main__"} <= set(MODULES)
    assert imports_of_module("__main__") == {"cli."}
    assert {"arithmetic.codec", "storage.registry", "errors"} <= imports_of_module("task_vector")
    assert "storage.registry" in imports_of_module("cli.agents")  # inside a function
    assert resolve("storage.registry.AgentRegistry") == "storage.registry"
    assert resolve("AgentRegistry") == "" and resolve("storage") == "storage."


def test_every_module_has_a_floor():
    assert [name for name in MODULES if floor_of(name) is None] == []


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_from_its_own_floor_and_below_only(name):
    forbidden = {other for other in imports_of_module(name) if not may_know(name, other)}
    assert forbidden == set(), f"{MODULES[name]} must not know {sorted(forbidden)}"


def test_imports_have_no_cycle():
    graph = {name: imports_of_module(name) for name in MODULES}
    done, path = set(), []

    def visit(name):
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in graph:
        visit(name)
    assert done == set(MODULES)


def test_nobody_imports_the_recipes():
    recipes = {path.stem for path in RECIPES.glob("*.py")} | {"recipes"}
    for path in MODULES.values():
        assert not imported_libraries(path) & recipes, path


def test_arithmetic_knows_tensors_only():
    allowed = {"numpy", "torch", "zstandard"}
    for name, path in MODULES.items():
        if name.startswith("arithmetic."):
            foreign = {library for library in imported_libraries(path) if library not in sys.stdlib_module_names}
            assert foreign <= allowed, path
            assert not imported_libraries(path) & {"os", "pathlib", "shutil", "io", "json", "tempfile"}, path


def test_only_distributed_knows_ranks():
    ranks = "|".join([r"\bdist\.", "import distributed", "get_rank", "get_world_size", "all_gather", "all_reduce"])
    ranks += "|PartialState|WORLD_SIZE|LOCAL_RANK"
    assert re.search(ranks, MODULES["distributed"].read_text(encoding="utf-8"))
    for name, path in MODULES.items():
        found = re.search(ranks, path.read_text(encoding="utf-8"))
        # lm-evaluation-harness asks its model for the ranks
        allowed = name in ("distributed", "sharded", "evaluating.benchmark")
        assert allowed or not found, f"{path}: {found[0]}"


@pytest.mark.parametrize("path", [*MODULES.values(), *RECIPES.glob("*.py")], ids=lambda path: path.name)
def test_file_is_short_enough_to_be_read(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_module_says_what_it_is_and_what_it_offers(name):
    tree = parse(MODULES[name])
    assert ast.get_docstring(tree), f"{MODULES[name]} has no docstring"
    defined, offered = set(), None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in filter(None, targets):
            names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            defined |= names
            if "__all__" in names:
                offered = ast.literal_eval(node.value)
    if name.endswith(".") or name == "__main__":
        return
    if any(not public.startswith("_") for public in defined):
        assert offered is not None, f"{MODULES[name]} has no __all__"
        assert len(set(offered)) == len(offered)
        assert set(offered) <= defined, f"{MODULES[name]} offers what it does not define"
        assert not any(public.startswith("_") for public in offered)
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        unlisted = {public for public in functions if not public.startswith("_")} - set(offered)
        assert unlisted == set(), f"{MODULES[name]} defines public names that its __all__ lacks"


def test_nothing_here_reads_or_writes_pickles():
    for path in MODULES.values():
        assert not imported_libraries(path) & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}, path
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, path
            if isinstance(node, ast.keyword):
                assert node.arg not in {"allow_pickle", "weights_only"}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "__import__"}, path


def test_public_names():
    assert ram_trl.__all__ == [
        "__version__",
        "AgentRegistry",
        "MergeConfig",
        "RAMRegistryCallback",
        "RamTrlError",
        "analyze_agents",
        "apply_agent",
        "apply_merge",
        "integrate_agents",
        "merge_agents",
        "rebase_agent",
        "register_agent",
        "restore_agent",
    ]
    assert dir(ram_trl) == sorted(ram_trl.__all__)
    for name in ram_trl.__all__:
        assert getattr(ram_trl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'merge_everything'"):
        _ = ram_trl.merge_everything


@pytest.mark.parametrize("statement", ["import ram_trl", "import ram_trl.config", "import ram_trl.cli"])
def test_import_is_light(statement):
    script = f"import sys\n{statement}\nprint(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_merging_is_imported_without_the_trainers_libraries():
    script = "import sys, ram_trl\nram_trl.merge_agents\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(result.stdout.split()) & (set(HEAVY) - {"torch"})
