"""`ram-trl` from the command line."""

import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from models import copy_model, read_model

from ram_trl import AgentRegistry, integrate_agents
from ram_trl.cli import main


@pytest.fixture
def cli(capsys):
    """Runs `ram-trl` in this process: exit code, stdout, stderr without progress bars."""

    def run(*words):
        capsys.readouterr()
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        lines = [
            line
            for line in re.split(r"[\r\n]", printed.err)
            if not re.match(r"(snapshot|restore|rebase|reading the base): +\d+%", line)
        ]
        return code, printed.out, "\n".join(line for line in lines if line.strip())

    return run


@pytest.fixture
def registry(zoo, tmp_path, cli):
    """A registry with math@v1, math@v2 (full) and tool@v1 (LoRA), all registered by the command line."""
    base = zoo.base("llama")
    path = tmp_path / "registry"
    for words in (
        ["--agent", "math", "--base_model", base, "--model", zoo.agent(base, seed=1)],
        ["--agent", "math", "--base_model", base, "--model", zoo.agent(base, seed=2)],
        ["--agent", "tool", "--model", zoo.adapter(base)],
    ):
        code, _, err = cli("register", "--registry", path, *words)
        assert (code, err) == (0, "")
    return path


def test_register_prints_what_it_registered(zoo, tmp_path, cli):
    base = zoo.base("llama")
    model = zoo.agent(base, seed=1)
    words = ["--registry", tmp_path / "registry", "--agent", "math", "--base_model", base, "--model", model]
    code, out, err = cli("register", *words)
    assert (code, err) == (0, "")
    before, after = read_model(base), read_model(model)
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    total = sum(tensor.numel() for tensor in before.values())
    shown = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("base model"))
    assert shown["agent"] == "math@v1"
    assert shown["changed"] == f"{changed:,} ({changed / total:.2%})"
    assert shown["parameters"] == f"{total:,}"
    code, out, _ = cli("register", *words, "--json")
    assert (json.loads(out)["version"], json.loads(out)["snapshot"]["changed"]) == (2, changed)


def test_options_of_register_reach_the_snapshot(zoo, tmp_path, cli):
    base = zoo.base("llama")
    model = zoo.agent(base, seed=1, density=0.9, scale=1e-4, dtype=torch.float32)
    words = ["--registry", tmp_path / "registry", "--agent", "math", "--base_model", base, "--model", model]
    _, out, _ = cli("register", *words, "--epsilon", "1e-4", "--json")
    assert json.loads(out)["snapshot"]["epsilon"] == 1e-4
    _, out, _ = cli("register", *words, "--epsilon", "1e-4")
    assert re.search(r"^not stored +changes of at most 0.0001$", out, re.MULTILINE)
    _, out, _ = cli("register", *words, "--snapshot_dtype", "bfloat16", "--json")
    assert json.loads(out)["snapshot"]["dtype"] == "bfloat16"
    hidden = json.loads(out)["snapshot"]["hidden_update"]
    _, out, _ = cli("show", "--registry", tmp_path / "registry", "--agent", "math@v3")
    assert re.search(rf"^rounding hid +{hidden:.1%} of the update", out, re.MULTILINE)


def test_list_shows_the_latest_version_of_every_agent(registry, cli):
    code, out, err = cli("list", "--registry", registry)
    assert (code, err) == (0, "")
    header, *rows = [re.split(r" {2,}", line) for line in out.splitlines()]
    assert header == ["agent", "kind", "changed", "size", "created", "base model"]
    assert [row[:2] for row in rows] == [["math@v2", "full"], ["tool@v1", "lora"]]
    assert re.fullmatch(r"\d+\.\d\d%", rows[0][2]) and rows[1][2] == "-"


def test_list_and_show_give_data(registry, cli):
    _, out, _ = cli("list", "--registry", registry, "--json")
    listed = json.loads(out)
    assert [(agent["name"], agent["version"], agent["kind"]) for agent in listed] == [
        ("math", 2, "full"),
        ("tool", 1, "lora"),
    ]
    _, out, _ = cli("show", "--registry", registry, "--agent", "math", "--json")
    shown = json.loads(out)
    assert shown == listed[0]
    manifest = AgentRegistry(registry).get("math").manifest
    assert shown["density"] == manifest.snapshot.changed / manifest.base_model.total_parameters
    assert shown["bytes"] == sum(file.size for file in manifest.files.values())
    _, out, _ = cli("show", "--registry", registry, "--agent", "math@v1", "--json")
    assert json.loads(out)["version"] == 1


def test_restore_writes_the_version_that_was_named(zoo, registry, cli, tmp_path):
    base = zoo.base("llama")
    for agent, seed in (("math@v1", 1), ("math", 2)):
        words = ["--registry", registry, "--agent", agent, "--output_dir", tmp_path / agent]
        code, out, err = cli("restore", *words, "--max_shard_size", "30KB")
        assert (code, err) == (0, "")
        assert out.endswith(f"restored to {tmp_path / agent}\n")
        found, expected = read_model(tmp_path / agent), read_model(zoo.agent(base, seed=seed))
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert len(list((tmp_path / agent).glob("model-*.safetensors"))) > 1


def test_remove_takes_one_version_or_all(registry, cli):
    code, out, err = cli("remove", "--registry", registry, "--agent", "math@v2")
    brought_back = "into the trash: ram-trl recover brings it back, ram-trl gc empties the trash"
    assert (code, out, err) == (0, f"math@v2 removed, {brought_back}\n", "")
    assert AgentRegistry(registry).versions("math") == [1]
    code, out, _ = cli("remove", "--registry", registry, "--agent", "tool")
    assert out == f"tool@v1 removed, {brought_back}\n"
    assert AgentRegistry(registry).names() == ["math"]
    assert cli("show", "--registry", registry, "--agent", "tool")[0] == 2


def test_a_number_of_a_removed_version_is_not_used_again(zoo, registry, cli):
    base = zoo.base("llama")
    cli("remove", "--registry", registry, "--agent", "math")
    words = ["--agent", "math", "--base_model", base, "--model", zoo.agent(base, seed=1)]
    _, out, _ = cli("register", "--registry", registry, *words, "--json")
    assert json.loads(out)["version"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--registry", "NOTHING"], "is not a registry: no agent was ever registered there"),
        (["show", "--registry", "REGISTRY", "--agent", "code"], "no agent 'code' in .*; it holds: math, tool"),
        (["show", "--registry", "REGISTRY", "--agent", "math@v9"], "agent 'math' has no version v9; it has: v1, v2"),
        (["show", "--registry", "REGISTRY", "--agent", "math@2"], "does not name a version: write it like math@v2"),
        (["show", "--registry", "REGISTRY", "--agent", "../x"], "is not a name for an agent"),
        (["remove", "--registry", "REGISTRY", "--agent", "code"], "no agent 'code'"),
        (
            ["restore", "--registry", "REGISTRY", "--agent", "math", "--output_dir", "REGISTRY"],
            "not an empty directory",
        ),
        (
            ["register", "--registry", "NOTHING", "--agent", "a/b", "--model", "BASE", "--base_model", "BASE"],
            "not a name",
        ),
        (["register", "--registry", "NOTHING", "--agent", "a", "--model", "BASE"], "no base model was named"),
        (
            ["register", "--registry", "NOTHING", "--agent", "a", "--model", "NAN", "--base_model", "BASE"],
            "NaN or inf",
        ),
        (
            ["register", "--registry", "NOTHING", "--agent", "a", "--model", "PICKLE", "--base_model", "BASE"],
            "pickled",
        ),
        (
            ["register", "--registry", "NOTHING", "--agent", "a", "--model", "NOTHING", "--base_model", "BASE"],
            "NOTHING",
        ),
        (["register", "--registry", "NOTHING"], "arguments are required: --agent, --model"),
        (["register", "--epsilon", "small"], "argument --epsilon: invalid float value"),
        (["forget"], "invalid choice: 'forget'"),
        ([], "arguments are required: COMMAND"),
    ],
    ids=lambda value: "-".join(value)[:60] if isinstance(value, list) else "",
)
def test_an_error_is_one_line_and_exit_code_2_and_leaves_nothing_behind(zoo, registry, cli, tmp_path, words, message):
    base = zoo.base("llama")
    copy_model(zoo.agent(base, seed=1, scale=float("nan")), tmp_path / "NAN")
    copy_model(base, tmp_path / "PICKLE")
    (tmp_path / "PICKLE" / "model.safetensors").rename(tmp_path / "PICKLE" / "model.bin")
    places = {"REGISTRY": registry, "NOTHING": tmp_path / "NOTHING", "BASE": base}
    places |= {name: tmp_path / name for name in ("NAN", "PICKLE")}
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli(*(places.get(word, word) for word in words))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert re.match(f"error: .*{message}", err)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("target", ["empty", "nowhere"], ids=["link to an empty directory", "dangling link"])
def test_restoring_to_a_link_is_refused_and_leaves_nothing_behind(registry, cli, tmp_path, target):
    (tmp_path / "empty").mkdir()
    (tmp_path / "restored").symlink_to(tmp_path / target)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli("restore", "--registry", registry, "--agent", "math", "--output_dir", tmp_path / "restored")
    assert (code, out) == (2, "")
    assert re.fullmatch("error: .*restored is a link or a mount point: .* as --output_dir", err)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "restored").readlink() == tmp_path / target


def test_an_abbreviated_option_is_refused(registry, cli):
    code, out, err = cli("show", "--registry", registry, "--age", "math")
    assert (code, out) == (2, "")
    assert err == "error: the following arguments are required: --agent (see ram-trl show --help)"
    code, out, err = cli("show", "--reg", registry, "--registry", registry, "--agent", "math")
    assert (code, out) == (2, "")
    assert err.startswith("error: unrecognized arguments: --reg ")


def test_the_module_is_the_same_command(registry, tmp_path):
    command = [sys.executable, "-m", "ram_trl", "show", "--registry", str(registry), "--agent"]
    done = subprocess.run([*command, "math@v1", "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "math"
    done = subprocess.run([*command, "code"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no agent 'code' in ") and len(done.stderr.splitlines()) == 1


def test_a_terminated_restore_leaves_nothing_behind(registry, tmp_path):
    words = ["restore", "--registry", str(registry), "--agent", "math", "--output_dir", str(tmp_path / "out" / "math")]
    script = f"""
import os, signal
import ram_trl.registering.restore as restore
copy = restore.copy_model_files
restore.copy_model_files = lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM)
from ram_trl.cli import main
main({words!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_generalists_are_listed_with_their_parents_and_verdicts_and_promoted(registry, cli):
    code, out, err = cli("generalists", "--registry", registry)
    assert (code, out.split(), err) == (0, ["generalist", "merged", "of", "method", "created", "verdict"], "")
    integrate_agents(str(registry), "generalist")
    integrate_agents(str(registry), "generalist", agents=["math"], gate=lambda candidate, report: "too few agents")
    lines = cli("generalists", "--registry", registry)[1].splitlines()[1:]
    assert re.fullmatch(r"generalist@v1 +math@v2 tool@v1 +ram_plus +\S+ +latest, accepted", lines[0])
    assert re.fullmatch(r"generalist@v2 +math@v2 +ram_plus +\S+ +refused: too few agents", lines[1])
    code, out, err = cli("promote", "--registry", registry, "--generalist", "generalist@v2")
    path = registry / "generalists" / "generalist" / "v000002"
    assert (code, out, err) == (0, f"generalist@v2 is the latest of generalist, in {path}\n", "")
    remove = ("remove", "--registry", registry)
    assert "error: generalist@v2 is the latest" in cli(*remove, "--generalist", "generalist@v2")[2]
    code, out, _ = cli(*remove, "--generalist", "generalist@v1")
    assert code == 0 and out.startswith("generalist@v1 removed")
    assert "error: name what it is about: --agent or --generalist" in cli(*remove)[2]
    assert "is not a registry" in cli("generalists", "--registry", registry / "typo")[2]
    [second] = json.loads(cli("generalists", "--registry", registry, "--json")[1])
    assert second["latest"] and [parent["agent"] for parent in second["parents"]] == ["math"]
    code, out, err = cli("promote", "--registry", registry, "--generalist", "generalist@v3")
    assert (code, out) == (2, "") and "error: generalist 'generalist' has no version v3; it has: v2" in err


def test_an_agent_of_a_generalist_is_rebased(zoo, registry, cli):
    generalist = integrate_agents(str(registry), "generalist").path
    words = ["--registry", registry, "--agent", "law"]
    assert cli("register", *words, "--base_model", generalist, "--model", zoo.agent(generalist, seed=5))[0] == 0
    code, out, err = cli("rebase", *words)
    assert (code, err) == (0, "")
    assert re.search(r"^agent +law@v2$", out, flags=re.MULTILINE)
    assert re.search(rf"^base model +{zoo.base('llama')}$", out, flags=re.MULTILINE)
    assert re.search(r"^rounding hid +\d+\.\d% of the update's magnitude$", out, flags=re.MULTILINE)
    code, out, err = cli("rebase", *words)
    assert (code, out) == (2, "") and "law@v2 was not trained from a generalist: name the new base" in err
