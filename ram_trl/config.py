"""The options of the recipes, as dataclasses; `options.py` reads them. Nothing here imports torch."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .arithmetic.defaults import DEFAULT_EPSILON, RESCALING
from .errors import ConfigError
from .options import load_function


__all__ = ["EvaluationConfig", "MergeConfig", "RegistryConfig"]

# The authors' released script computes lambda = 1 + 0.2 * min(rho, 1).
PRESETS = {"official": {"r": 0.2, "alpha": 1.0}}
_DEFAULTS = {"r": 0.1, "alpha": 2.0}


@dataclass(kw_only=True)
class MergeConfig:
    """Options of `recipes/merge.py`; the fields are described by their help."""

    registry: str = field(metadata={"help": "Directory of the registry, or hf://USER/REPO, or another URL."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Directory for the merged model; must not exist or be empty. Or --merge_to, --probe_only."},
    )
    merge_to: str | None = field(
        default=None, metadata={"help": "Make the merged model the next version of this generalist of the registry."}
    )
    gate: str | None = field(
        default=None,
        metadata={"help": "With --merge_to: MODULE:FUNCTION that promotes or refuses the merged model (docs)."},
    )
    agents: list[str] | None = field(
        default=None,
        metadata={"help": "Agents to merge, NAME, NAME@v2 or NAME@ALIAS. Default: the latest version of every agent."},
    )
    base_model: str | None = field(
        default=None, metadata={"help": "Where the base model is now, if it is not where it was at registration."}
    )
    method: str = field(
        default="ram_plus",
        metadata={
            "help": "ram_plus, ram, ram_plus_soft; average, task_arithmetic, ties, dare, dare_ties, fisher, wudi, "
            "resmerge, interpolation, isolate (docs/METHODS.md)."
        },
    )
    method_options: dict[str, float] | None = field(
        default=None, metadata={"help": "Options of the method, like density=0.1 scaling=0.5 (docs/METHODS.md)."}
    )
    preset: str | None = field(
        default=None, metadata={"help": "official: r and alpha as in the authors' release (r=0.2, alpha=1.0)."}
    )
    r: float | None = field(default=None, metadata={"help": "Rescale strength r (equation 6). Default: 0.1."})
    alpha: float | None = field(default=None, metadata={"help": "Bound alpha on rho (equation 6). Default: 2.0."})
    epsilon: float = field(
        default=DEFAULT_EPSILON,
        metadata={"help": "A parameter counts as changed when it differs from the base by more than this."},
    )
    weights: dict[str, float] | None = field(
        default=None, metadata={"help": "Weights of agents, like math=1.0 code=0.5. Default: 1 for each."}
    )
    output_dtype: str = field(default="auto", metadata={"help": "auto (the base's), float32, bfloat16 or float16."})
    rounding: str = field(
        default="nearest", metadata={"help": "nearest, or stochastic (keeps small rescaled updates)."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of stochastic rounding and of DARE."})
    engine: str = field(
        default="auto",
        metadata={"help": "auto, compiled (loops for the CPU) or eager (torch, on a GPU if there is one)."},
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest size of a weight file."})
    probe_only: bool = field(default=False, metadata={"help": "Count overlaps and print the report; write nothing."})
    cpu: bool = field(
        default=False,
        metadata={"help": "Where torch merges (--engine eager, most methods): on the CPU even if there is a GPU."},
    )
    eval: str | None = field(
        default=None, metadata={"help": "YAML file of tasks to evaluate the merged model on (docs/EVALUATION.md)."}
    )
    eval_output_dir: str | None = field(
        default=None, metadata={"help": "With --eval: directory for the results. Default: OUTPUT_DIR-evaluation."}
    )

    def __post_init__(self):
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"preset={self.preset!r} is not one of {', '.join(PRESETS)}")
        if [self.output_dir is not None, self.merge_to is not None, self.probe_only].count(True) == 0:
            raise ConfigError("no --output_dir was given (or --merge_to, or --probe_only to look without merging)")
        if self.merge_to is not None and (self.output_dir is not None or self.probe_only):
            raise ConfigError("--merge_to writes into the registry: leave out --output_dir and --probe_only")
        if self.gate is not None and self.merge_to is None:
            raise ConfigError("--gate judges a generalist: name one with --merge_to")
        if self.eval is not None and self.probe_only:
            raise ConfigError("--eval evaluates what was merged: leave out --probe_only")
        if self.eval is not None and self.merge_to is not None and self.eval_output_dir is None:
            raise ConfigError("--eval with --merge_to needs --eval_output_dir, a directory for the results")
        if self.eval_output_dir is not None and self.eval is None:
            raise ConfigError("--eval_output_dir is for --eval: name a YAML file of tasks")
        if self.method not in RESCALING:
            if given := [name for name in ("preset", *_DEFAULTS) if getattr(self, name) is not None]:
                raise ConfigError(f"method={self.method} has no {given[0]}, which is for {', '.join(RESCALING)}")
            return
        for name, value in {**_DEFAULTS, **PRESETS.get(self.preset, {})}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def merge_arguments(self) -> dict[str, Any]:
        """Keyword arguments of [`merge_agents`], or of [`integrate_agents`] if there is a generalist to merge to."""
        arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for option in ("preset", "probe_only", "cpu", "merge_to", "gate", "eval", "eval_output_dir"):
            del arguments[option]
        if self.method not in RESCALING:
            del arguments["r"], arguments["alpha"]
        for option in ("weights", "method_options"):
            arguments[option] = arguments[option] or {}
        if self.probe_only:
            arguments["output_dir"] = None
        if self.merge_to is not None:
            del arguments["output_dir"]
            arguments["generalist"] = self.merge_to
            arguments["gate"] = None if self.gate is None else load_function(self.gate, "gate")
        return arguments


@dataclass(kw_only=True)
class RegistryConfig:
    """Options of `recipes/train_grpo.py` beside TRL's own; the fields are described by their help."""

    registry: str = field(metadata={"help": "Directory of the registry."})
    agent: str = field(metadata={"help": "Name to register the agent under."})
    reward_funcs: list[str] = field(metadata={"help": "Reward functions with TRL's signature, each MODULE:FUNCTION."})
    registry_base_model: str | None = field(
        default=None, metadata={"help": "Base model of the agent. Default: the model that training starts from."}
    )
    snapshot_dtype: str = field(
        default="auto", metadata={"help": "auto (what rollouts execute), bfloat16, float16 or float32."}
    )
    snapshot_epsilon: float = field(
        default=DEFAULT_EPSILON, metadata={"help": "Smallest change that is stored of weights kept in float32."}
    )
    merge_to: str | None = field(
        default=None,
        metadata={"help": "After registering, merge the agents into the next version of this generalist."},
    )
    merge_config: str | None = field(
        default=None, metadata={"help": "YAML file with options of recipes/merge.py for --merge_to (agents, gate, r)."}
    )
    strict: bool = field(default=False, metadata={"help": "Fail at the end if the agent cannot be registered."})
    provenance: str = field(
        default="full",
        metadata={"help": "full, or minimal: do not record options, names of rewards, data, git commit, paths."},
    )


@dataclass(kw_only=True)
class EvaluationConfig:
    """Options of `recipes/evaluate.py`; the fields are described by their help."""

    registry: str = field(metadata={"help": "Directory of the registry, or hf://USER/REPO, or another URL."})
    tasks: str = field(metadata={"help": "YAML file that names the tasks (docs/EVALUATION.md)."})
    output_dir: str = field(
        metadata={"help": "Directory for evaluation.json, evaluation.md and what is finished; a second call goes on."}
    )
    agents: list[str] | None = field(
        default=None,
        metadata={"help": "Agents to evaluate and to merge, NAME or NAME@v2. Default: the latest of every agent."},
    )
    merged: list[str] | None = field(
        default=None, metadata={"help": "Directories of merged models to evaluate, DIR or NAME=DIR."}
    )
    method: list[str] | None = field(
        default=None,
        metadata={"help": "Methods to merge the agents with in memory, a row each, like ram_plus average."},
    )
    r: float | None = field(default=None, metadata={"help": "With --method: rescale strength r."})
    alpha: float | None = field(default=None, metadata={"help": "With --method: bound alpha on rho."})
    epsilon: float | None = field(default=None, metadata={"help": "With --method: threshold of a change."})
    weights: dict[str, float] | None = field(
        default=None, metadata={"help": "With --method: weights of agents, like math=1.0 code=0.5."}
    )
    method_options: dict[str, float] | None = field(
        default=None, metadata={"help": "With one --method: its options, like density=0.1."}
    )
    base_model: str | None = field(
        default=None, metadata={"help": "Where the base model is now, if it is not where it was at registration."}
    )
    dtype: str = field(
        default="auto", metadata={"help": "Dtype in memory: auto (the base's), float32, bfloat16 or float16."}
    )
    device_map: str | None = field(
        default=None, metadata={"help": "auto: spread the model over the GPUs of one process."}
    )
    batch_size: int = field(default=16, metadata={"help": "Completions, or questions, at a time."})
    seed: int = field(default=0, metadata={"help": "Seed of sampling and of the choice of examples."})
    backend: str = field(
        default="transformers", metadata={"help": "transformers, or vllm (one process, for tasks by reward)."}
    )
    num_gpus: int = field(default=1, metadata={"help": "With --backend vllm: GPUs that share a model."})
    cpu: bool = field(default=False, metadata={"help": "On the CPU even if there is a GPU."})

    def evaluation_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `ram_trl.evaluating.evaluate.evaluate_models`, without its tasks."""
        settings = {name: getattr(self, name) for name in ("r", "alpha", "epsilon", "weights", "method_options")}
        settings = {name: value for name, value in settings.items() if value is not None}
        if settings and not self.method:
            raise ConfigError(f"--{next(iter(settings))} is for a merge in memory: name a --method")
        if self.method_options and len(self.method) > 1:
            raise ConfigError("--method_options are of one method: name it alone with --method")
        names = (
            "registry",
            "output_dir",
            "agents",
            "base_model",
            "dtype",
            "device_map",
            "batch_size",
            "seed",
            "backend",
            "num_gpus",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "merges": {method: {"method": method, **settings} for method in self.method or ()},
            "merged": self.merged or (),
        }
