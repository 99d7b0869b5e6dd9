"""What an analysis says, draws and writes: findings, pictures, the page, the command line."""

import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from models import copy_model, rewrite
from test_analyzing import active_beyond
from test_merge import full_delta

from ram_trl import AgentRegistry, analyze_agents, register_agent
from ram_trl.analyzing.page import analysis_page
from ram_trl.analyzing.pictures import PICTURES, draw
from ram_trl.cli import main
from ram_trl.errors import ConfigError, OutputExistsError


def make_agent(base, path, change, dtype=None):
    """An agent whose update of every tensor is `change(shape)`, float32."""
    copy_model(base, path)
    for file in path.glob("*.safetensors"):
        rewrite(file, lambda name, tensor: (tensor.float() + change(tensor.shape)).to(dtype or tensor.dtype))
    return path


def noise(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    return lambda shape: scale * torch.randn(shape, generator=generator)


def registered(folder, base, dtype=None, **changes):
    registry = AgentRegistry(folder / "registry")
    for name, change in changes.items():
        model = make_agent(base, folder / name, change, dtype)
        register_agent(registry, name, str(model), base_model=str(base), epsilon=0.0)
    return registry


@pytest.fixture
def cli(capsys):
    def run(*words):
        capsys.readouterr()
        code = 0
        try:
            main(["analyze", *map(str, words)])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def pair(zoo):
    base = zoo.base("llama")
    return zoo.registry(base, {"code": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})


# Findings


def test_agents_that_learned_alike_belong_together_and_opposed_ones_are_named(zoo, tmp_path):
    def alike(shape):
        return noise(7, 1e-3)(shape)

    registry = registered(
        tmp_path,
        zoo.base("llama"),
        ant=noise(1, 1e-3),
        bee=lambda shape: alike(shape) + 0.3 * noise(2, 1e-3)(shape),
        cat=noise(3, 1e-3),
        dog=alike,
        eel=lambda shape: -alike(shape),
    )
    data = analyze_agents(registry)
    assert ["bee", "dog"] in [sorted(group) for group in data["groups"]]
    assert abs(data["order"].index("bee") - data["order"].index("dog")) == 1
    assert sorted(data["order"]) == ["ant", "bee", "cat", "dog", "eel"]
    text = " ".join(data["findings"]["summary"])
    assert re.search(r"(bee and dog|dog and bee) belong together.*9\d % of what they share moved the same way", text)
    assert "bee and eel pull against each other" in text and "dog and eel pull against" in text
    assert "ant and" not in text.split("pull against")[0].split("belong together")[0]


def test_agents_that_learned_different_things_are_said_to(zoo):
    base = zoo.base("qwen2_wide")
    agents = {"code": zoo.agent(base, seed=1), "math": zoo.agent(base, seed=2)}
    data = analyze_agents(zoo.registry(base, agents))
    assert data["groups"] == [["code"], ["math"]]
    assert data["findings"]["summary"][0].startswith("No two agents point in related directions")
    assert data["epsilon_suggestion"]["epsilon"] == 1e-5
    assert "Epsilon 1e-05 is fine" in " ".join(data["findings"]["summary"])
    assert re.fullmatch(
        r"code: changed \d+ % of the model, \d+ % of that alone. Along its own direction RAM\+ keeps \d+ % of its "
        r"update, a plain average \d+ %.",
        data["findings"]["agents"][0],
    )


def test_dense_float32_agents_get_a_higher_epsilon_and_hear_what_it_costs(zoo, tmp_path):
    base = zoo.base("llama")

    def trained(seed):
        small, mask = noise(seed, 2e-4), noise(seed + 10, 1.0)
        return lambda shape: small(shape) + 1e-2 * (mask(shape) > 1.0)

    registry = registered(tmp_path, base, torch.float32, code=trained(1), math=trained(2))
    data = analyze_agents(registry)
    deltas = [full_delta(base, tmp_path / name) for name in ("code", "math")]
    vectors = np.array([np.concatenate([delta[n].ravel() for n in sorted(delta)]) for delta in deltas])
    # the rule: the smallest step at which every agent has more than 5 % to itself
    for epsilon in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3):
        active = active_beyond(vectors, epsilon)
        if (1 - (active.sum(axis=0) > 1).sum() / active.sum(axis=1) >= 0.05).all():
            break
    assert epsilon > 1e-5
    sizes = np.abs(vectors.astype(np.float64))
    lost = max(1 - (own * size).sum() / size.sum() for own, size in zip(active, sizes, strict=True))
    suggestion = data["epsilon_suggestion"]
    assert suggestion["epsilon"] == epsilon
    assert suggestion["lost_magnitude"] == pytest.approx(lost, rel=1e-4)
    assert f"Try --epsilon {epsilon:g}" in suggestion["reason"] and "% of the magnitude" in suggestion["reason"]


def test_an_epsilon_is_named_that_leaves_out_some_two_fifths(zoo, tmp_path):
    # sizes in threes, so that every step leaves out something more
    def trained(seed):
        size, kind = noise(seed, 1.0), noise(seed + 10, 1.0)
        return lambda shape: size(shape).sign() * 10.0 ** (-4 + kind(shape).clamp(-1.5, 1.5))

    registry = registered(tmp_path, zoo.base("llama"), torch.float32, code=trained(1), math=trained(2))
    data = analyze_agents(registry)
    deltas = [full_delta(zoo.base("llama"), tmp_path / name) for name in ("code", "math")]
    sizes = [np.abs(np.concatenate([delta[n].ravel() for n in sorted(delta)])).astype(np.float64) for delta in deltas]
    lost = {
        epsilon: np.mean([own[own <= float(np.float32(epsilon))].sum() / own.sum() for own in sizes])
        for epsilon in (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    }
    epsilon = min(lost, key=lambda step: abs(lost[step] - 0.4))
    assert 0.1 < lost[epsilon] < 0.6
    compared = data["epsilon_suggestion"]["compare"]
    assert compared == {"epsilon": epsilon, "lost_magnitude": pytest.approx(lost[epsilon], rel=1e-5)}
    assert f"Compare it with --epsilon {epsilon:g}" in data["findings"]["summary"][-1]


def test_no_epsilon_is_suggested_that_would_lose_the_update_or_help_nobody(zoo, tmp_path):
    # changes of one size, everywhere: only beyond it they differ
    uniform = registered(
        tmp_path / "uniform",
        zoo.base("llama"),
        torch.float32,
        **{name: (lambda seed: lambda shape: noise(seed, 1.0)(shape).sign() * 2e-3)(s) for s, name in enumerate("ab")},
    )
    same = registered(tmp_path / "same", zoo.base("llama"), a=noise(1, 1e-3), b=noise(1, 1e-3))
    for registry in (uniform, same):
        data = analyze_agents(registry)
        assert [agent["rho"] for agent in data["agents"]] == ["inf", "inf"]
        suggestion = data["epsilon_suggestion"]
        assert suggestion["epsilon"] == 1e-5 and "No epsilon helps" in suggestion["reason"]
        assert suggestion["compare"] is None
    too_high = analyze_agents(same, epsilon=2e-3)["epsilon_suggestion"]
    assert too_high["epsilon"] is None and too_high["lost_magnitude"] > 0.8
    assert re.search(
        r"ignores 8\d % of the magnitude of [ab]'s update: analyze again with a lower", too_high["reason"]
    )


def test_a_rescaling_that_rounding_swallows_is_reported(zoo, tmp_path):
    base = zoo.base("llama")
    small = analyze_agents(zoo.registry(base, {n: zoo.agent(base, s, 0.5, 2e-5) for s, n in enumerate("ab")}))
    large = analyze_agents(zoo.registry(base, {n: zoo.agent(base, s, 0.5, 0.5) for s, n in enumerate("ab")}))
    swallowed = ["Rounding to the base's dtype" in " ".join(data["findings"]["summary"]) for data in (small, large)]
    assert swallowed == [True, False]


# Files


def test_files_of_an_analysis(pair, tmp_path):
    data = analyze_agents(pair, str(tmp_path / "analysis"))
    written = {path.name: path.read_bytes() for path in (tmp_path / "analysis").iterdir()}
    pictures = {f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    assert set(written) == {"analysis.json", "index.html", *pictures}
    assert json.loads(written["analysis.json"]) == json.loads(json.dumps(data))
    for name, content in written.items():
        if name in pictures:
            assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    analyze_agents(pair, str(tmp_path / "again"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == written
    analyze_agents(pair, str(tmp_path / "alone"), agents=["code"])
    assert set(written) - {path.name for path in (tmp_path / "alone").iterdir()} == {"pairs.png", "pairs.svg"}


def test_output_directory(pair, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    analyze_agents(pair, str(tmp_path / "empty"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExistsError, match="not an empty directory"):
        analyze_agents(pair, str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="inside the registry"):
        analyze_agents(pair, str(pair.path / "analysis"))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("ram_trl.analyzing.report.analysis_page", fail)
    with pytest.raises(OSError, match="disk full"):
        analyze_agents(pair, str(tmp_path / "new" / "analysis"))
    assert sorted(tmp_path.rglob("*")) == before


class Page(HTMLParser):
    """Tags, text and addresses of a page; complains if tags do not match."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        assert not any(name.startswith("on") for name, _ in attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_nothing_beside_itself_and_shows_names_as_they_are(zoo, tmp_path):
    base = copy_model(zoo.base("llama"), tmp_path / "<b>&\"'base")
    registry = AgentRegistry(tmp_path / "registry")
    for seed, name in enumerate(("code", "math")):
        register_agent(registry, name, str(zoo.agent(zoo.base("llama"), seed)), base_model=str(base))
    data = analyze_agents(registry, str(tmp_path / "analysis"))
    page = Page((tmp_path / "analysis" / "index.html").read_text())
    assert {"script", "img", "link", "iframe", "image", "b"} & set(page.tags) == set()
    assert page.tags.count("svg") == len(PICTURES)
    assert all(address == "analysis.json" or address.startswith("#") for address in page.addresses)
    assert str(base) in page.words
    text = " ".join(page.words).replace("\N{NO-BREAK SPACE}", " ")
    for sentence in data["findings"]["summary"]:
        assert sentence in text
    assert f"{data['agents'][1]['changed']:,}" in page.words


def test_names_of_tensors_and_agents_are_no_markup_and_no_formulas(pair):
    hostile = "<script>alert('$x^2$ & \"')</script>"
    text = json.dumps(analyze_agents(pair)).replace('"code"', json.dumps(hostile))
    data = json.loads(text.replace('"self_attn.q_proj"', json.dumps(hostile + "q")))
    pictures = {name: draw(data, name)["svg"].decode() for name in PICTURES}
    page = Page(analysis_page(data, pictures, [hostile]))
    assert "script" not in page.tags
    assert hostile in page.words and any(hostile + "q" in word for word in page.words)


@pytest.mark.parametrize("number", [1, 9])
def test_pictures_of_few_and_many_agents(pair, number):
    data = analyze_agents(pair)
    first = data["agents"][0]
    data["agents"] = [{**first, "label": f"agent-{n}", "shared_with": [1] * number} for n in range(number)]
    data["order"] = [agent["label"] for agent in data["agents"]]
    data["pairs"] = [{**data["pairs"][0], "agents": two} for two in itertools.combinations(data["order"], 2)]
    for group in (*data["cells"], *data["layers"], *data["modules"]):
        group["density"] = [0.5] * number
    pictures = {name: draw(data, name)["svg"].decode() for name in PICTURES}
    for name, picture in pictures.items():
        assert all(f">agent-{n}<" in picture for n in range(number)), name


# Command line


def test_command_line(pair, tmp_path, cli):
    code, out, _ = cli("--registry", pair.path, "--output_dir", tmp_path / "analysis")
    assert code == 0
    data = json.loads((tmp_path / "analysis" / "analysis.json").read_text())
    lines = out.splitlines()
    assert lines[0].startswith("2 agents of ")
    assert lines[2].split()[:3] == ["code@v1", "full", f"{data['agents'][0]['density']:.2%}"]
    assert all(sentence in lines for part in data["findings"].values() for sentence in part)
    assert lines[-1] == f"to read on: {tmp_path / 'analysis'}/index.html"
    code, out, _ = cli("--registry", pair.path, "--agents", "code", "--epsilon", "1e-3", "--json")
    assert code == 0
    assert [agent["label"] for agent in json.loads(out)["agents"]] == ["code"] and json.loads(out)["epsilon"] == 1e-3


def test_mistakes_are_one_line(pair, tmp_path, cli):
    for words, message in (
        (["--registry", tmp_path], "is not a registry"),
        (["--registry", pair.path, "--agents", "cook"], "cook"),
        (["--registry", pair.path, "--r", "-1"], "r=-1.0"),
        (["--registry", pair.path, "--output_dir", pair.path], "--output_dir"),
    ):
        code, out, err = cli(*words)
        assert (code, out) == (2, "")
        assert message in err.splitlines()[-1] and "Traceback" not in err


def test_without_matplotlib_the_numbers_are_there_and_the_rest_is_named(pair, tmp_path):
    script = "import sys; sys.modules['matplotlib'] = None; from ram_trl.cli import main; main()"
    words = ["analyze", "--registry", str(pair.path), "--output_dir", str(tmp_path / "analysis")]
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert "the pictures were left out" in result.stderr and "pip install ram_trl[analysis]" in result.stderr
    assert "code: changed" in result.stdout
    assert sorted(path.name for path in (tmp_path / "analysis").iterdir()) == ["analysis.json", "index.html"]
    page = Page((tmp_path / "analysis" / "index.html").read_text())
    assert "svg" not in page.tags and any("the pictures were left out" in word for word in page.words)


def test_no_model_and_no_trainer_is_loaded(pair):
    script = (
        "import sys\nfrom ram_trl import analyze_agents\nanalyze_agents(sys.argv[1])\n"
        "print(*sorted({'trl', 'peft', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", script, str(pair.path)], capture_output=True, text=True, check=True)
    assert output.stdout.split() == []
