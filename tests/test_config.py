"""Options: every kind of field from the command line and from YAML, presets, and the examples that are shipped."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from ram_trl.config import MergeConfig, RegistryConfig
from ram_trl.errors import ConfigError
from ram_trl.options import parse_config


CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"


@dataclass(kw_only=True)
class Options:
    """One field of every kind, needed, with a default, or optional."""

    text: str = field(metadata={"help": "A text."})
    maybe_text: str | None = field(default=None, metadata={"help": "A text or none."})
    number: int = field(default=7, metadata={"help": "A whole number."})
    maybe_number: int | None = field(default=None, metadata={"help": "A whole number or none."})
    real: float = field(default=0.5, metadata={"help": "A number."})
    maybe_real: float | None = field(default=None, metadata={"help": "A number or none."})
    quick: bool = field(default=False, metadata={"help": "Off by default."})
    checked: bool = field(default=True, metadata={"help": "On by default."})
    names: list[str] | None = field(default=None, metadata={"help": "Names or none."})
    pairs: dict[str, float] | None = field(default=None, metadata={"help": "Weights or none."})


DEFAULTS = Options(text="t")


def parsed(tmp_path, content, *words):
    """Parse these words after the options of a YAML file."""
    (tmp_path / "options.yaml").write_text(content)
    return parse_config(Options, ["--config", str(tmp_path / "options.yaml"), *words])


def test_what_is_not_given_has_its_default():
    assert parse_config(Options, ["--text", "t"]) == DEFAULTS


def test_what_is_needed_must_be_given(tmp_path):
    with pytest.raises(ConfigError, match=r"^no --text was given$"):
        parse_config(Options, [])
    with pytest.raises(ConfigError, match=r"^no --text was given$"):
        parsed(tmp_path, "number: 3\ntext: null\n")


CASES = [
    ("text", ["--text", "a b"], "text: a b", "a b"),
    ("text", ["--text", "3"], "text: 3", "3"),
    ("text", ["--text", "1.0"], "text: '1.0'", "1.0"),
    ("text", ["--text="], "text: ''", ""),
    ("maybe_text", ["--maybe_text", "x"], "maybe_text: x", "x"),
    ("number", ["--number", "-12"], "number: -12", -12),
    ("number", ["--number", "12"], "number: '12'", 12),
    ("maybe_number", ["--maybe_number", "0"], "maybe_number: 0", 0),
    ("real", ["--real", "1e-5"], "real: 1e-5", 1e-5),
    ("real", ["--real", "1e-5"], "real: 1.0e-5", 1e-5),
    ("real", ["--real", "2"], "real: 2", 2.0),
    ("maybe_real", ["--maybe_real", "0"], "maybe_real: 0", 0.0),
    ("quick", ["--quick"], "quick: true", True),
    ("quick", ["--no-quick"], "quick: false", False),
    ("checked", ["--no-checked"], "checked: no", False),
    ("checked", ["--checked"], "checked: true", True),
    ("names", ["--names", "math"], "names: [math]", ["math"]),
    ("names", ["--names", "math", "code@v2", "3"], "names:\n- math\n- code@v2\n- 3\n", ["math", "code@v2", "3"]),
    ("pairs", ["--pairs", "math=1e-1", "code=2"], "pairs: {math: 1e-1, code: 2}", {"math": 0.1, "code": 2.0}),
    ("pairs", ["--pairs", "a=b=0.5"], "pairs: ['a=b=0.5']", {"a=b": 0.5}),
    ("pairs", ["--pairs", "3=1"], "pairs: {3: 1}", {"3": 1.0}),
]


@pytest.mark.parametrize(("name", "words", "content", "value"), CASES, ids=[case[2] for case in CASES])
def test_every_kind_is_read_from_the_command_line_and_from_yaml(tmp_path, name, words, content, value):
    needed = [] if name == "text" else ["--text", "t"]
    from_words, from_yaml = parse_config(Options, [*needed, *words]), parsed(tmp_path, content, *needed)
    assert from_words == from_yaml
    found = getattr(from_words, name)
    assert (found, type(found)) == (value, type(value))
    others = {other: getattr(DEFAULTS, other) for other in vars(DEFAULTS) if other not in (name, "text")}
    assert {other: getattr(from_words, other) for other in others} == others


WRONG_WORDS = [
    (["--number", "1.5"], "argument --number: invalid int value: '1.5'"),
    (["--real", "small"], "argument --real: invalid float value: 'small'"),
    (["--quick", "true"], "unrecognized arguments: true"),
    (["--names"], "argument --names: expected at least one argument"),
    (["--pairs", "math"], "pairs=['math'] is not of the form NAME=WEIGHT ..."),
    (["--pairs", "math=heavy"], "pairs=['math=heavy'] is not of the form NAME=WEIGHT ..."),
    (["--rescale", "1"], "unrecognized arguments: --rescale 1"),
    (["--config", "nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory"),
    (["--config", "/"], "cannot read /: Is a directory"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS, ids=[" ".join(words) for words, _ in WRONG_WORDS])
def test_a_mistake_on_the_command_line_is_one_line(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_config(Options, ["--text", "t", *words])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["text: a\ntext: b\n", "text: a\npairs: {b: 1, b: 2}\n"])
def test_a_name_that_is_there_twice_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match=r"is not valid YAML: '(text|b)' is there twice"):
        parsed(tmp_path, content)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    content = "text: file\nnumber: 1\nchecked: false\nquick: true\nnames: [a, b]\npairs: {a: 1, b: 2}\nmaybe_real: 3\n"
    words = ["--number", "2", "--checked", "--no-quick", "--names", "c", "--pairs", "c=3"]
    options = parsed(tmp_path, content, *words)
    expected = Options(text="file", number=2, checked=True, quick=False, maybe_real=3.0)
    # lists and weights are replaced, not added to
    expected.names, expected.pairs = ["c"], {"c": 3.0}
    assert options == expected


def test_an_option_of_the_file_that_is_set_to_nothing_is_not_set(tmp_path):
    assert parsed(tmp_path, "text: t\nnumber:\nreal: null\nnames: ~\nchecked:\n") == DEFAULTS


@pytest.mark.parametrize(
    ("config_class", "words", "message"),
    [
        # the one is an option of training, the other of merging
        (MergeConfig, ["--agent", "math"], "unrecognized arguments: --agent math"),
        (MergeConfig, ["--output", "merged"], "unrecognized arguments: --output merged"),
        (MergeConfig, ["--weight", "math=1"], "unrecognized arguments: --weight math=1"),
        (MergeConfig, ["--conf", "merge.yaml"], "unrecognized arguments: --conf merge.yaml"),
        (Options, ["--maybe_t", "x"], "unrecognized arguments: --maybe_t x"),
        (Options, ["--no-quic"], "unrecognized arguments: --no-quic"),
    ],
)
def test_an_abbreviation_is_not_taken_for_an_option(config_class, words, message):
    needed = ["--registry", "r", "--probe_only"] if config_class is MergeConfig else ["--text", "t"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(config_class, [*needed, *words])


# The merge


@pytest.mark.parametrize(
    ("words", "r", "alpha"),
    [
        ([], 0.1, 2.0),
        (["--preset", "official"], 0.2, 1.0),
        (["--preset", "official", "--r", "0.3"], 0.3, 1.0),
        (["--alpha", "0", "--preset", "official"], 0.2, 0.0),
        (["--r", "0"], 0.0, 2.0),
    ],
)
def test_a_preset_gives_what_was_not_given(words, r, alpha):
    options = parse_config(MergeConfig, ["--registry", "r", "--probe_only", *words])
    assert (options.r, options.alpha) == (r, alpha)


def test_a_preset_of_the_command_line_does_not_replace_what_the_file_gives(tmp_path):
    (tmp_path / "merge.yaml").write_text("registry: r\nprobe_only: true\nr: 0.4\n")
    options = parse_config(MergeConfig, ["--config", str(tmp_path / "merge.yaml"), "--preset", "official"])
    assert (options.r, options.alpha) == (0.4, 1.0)


def test_a_merge_needs_a_place_and_a_probe_does_not():
    with pytest.raises(ConfigError, match="no --output_dir was given"):
        parse_config(MergeConfig, ["--registry", "r"])
    words = ["--registry", "r", "--output_dir", "merged"]
    assert parse_config(MergeConfig, words).merge_arguments()["output_dir"] == "merged"
    assert parse_config(MergeConfig, [*words, "--probe_only"]).merge_arguments()["output_dir"] is None


# The examples


def test_all_examples_are_tested_here():
    assert {path.name for path in CONFIGS.iterdir()} == {"merge.yaml", "paper_qwen2.5_7b.yaml", "train_grpo.yaml"}


@pytest.mark.parametrize(
    ("name", "agents"),
    [("merge.yaml", ["math", "code", "tools"]), ("paper_qwen2.5_7b.yaml", ["coding", "tool", "memory"])],
)
def test_the_examples_of_a_merge_are_the_papers_settings(name, agents):
    options = parse_config(MergeConfig, ["--config", str(CONFIGS / name), "--output_dir", "merged"])
    assert options == MergeConfig(registry="registry", output_dir="merged", agents=agents)
    assert (options.method, options.r, options.alpha, options.epsilon) == ("ram_plus", 0.1, 2.0, 1e-5)


def test_the_weights_in_the_comment_of_an_example_can_be_uncommented(tmp_path):
    content = (CONFIGS / "merge.yaml").read_text()
    assert "\n# weights: {tools: 0.5}\n" in content
    (tmp_path / "merge.yaml").write_text(content.replace("# weights:", "weights:"))
    options = parse_config(MergeConfig, ["--config", str(tmp_path / "merge.yaml"), "--output_dir", "merged"])
    assert options.weights == {"tools": 0.5}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_example_of_training_is_read_by_trls_parser(tmp_path, adapter):
    from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config

    content = (CONFIGS / "train_grpo.yaml").read_text()
    if adapter:
        content = re.sub(r"^# (use_peft|lora_\w+):", r"\1:", content, flags=re.MULTILINE)
        assert yaml.safe_load(content)["use_peft"] is True
    (tmp_path / "train.yaml").write_text(content)
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RegistryConfig))
    # bfloat16 without a GPU has to be asked for
    words = ["--config", str(tmp_path / "train.yaml"), "--use_cpu", "--agent", "code"]
    script, training, model, registry = parser.parse_args_and_config(words)
    assert (script.dataset_name, model.model_name_or_path) == ("prompts.jsonl", "Qwen/Qwen2.5-0.5B-Instruct")
    assert (model.dtype, training.bf16, training.learning_rate, training.max_steps) == ("bfloat16", True, 1e-6, 500)
    assert (registry.registry, registry.agent) == ("registry", "code")
    assert registry.reward_funcs == ["rewards:exact_match"]
    assert (registry.snapshot_dtype, registry.snapshot_epsilon, registry.strict) == ("auto", 1e-5, False)
    config = get_peft_config(model)
    assert (config is not None) == adapter
    if adapter:
        assert (config.r, config.lora_alpha, config.target_modules) == (32, 32, "all-linear")
