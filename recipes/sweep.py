"""Evaluate many merges of the same agents, in the memory of one model, and keep the best as a file for merge.py.

# every combination of some values
accelerate launch recipes/sweep.py --registry registry --tasks tasks.yaml --grid grid.yaml --output_dir sweep

# so many merges that Optuna proposes, each after looking at those before it
accelerate launch recipes/sweep.py --registry registry --tasks tasks.yaml --search space.yaml --num_trials 50 \
    --output_dir search

accelerate launch recipes/merge.py --config sweep/best.yaml --output_dir merged

grid.yaml has a list of values for each option of the merge that varies; space.yaml may have ranges too:

r: {low: 0.0, high: 0.5}                      # or step: 0.05, or log: true
agents: [[math, code], [math, code, tool]]

The same command goes on where it was interrupted. Choose on other prompts than those that you report on.
"""

import sys
from dataclasses import dataclass, field

from ram_trl.config import EvaluationConfig
from ram_trl.errors import ConfigError
from ram_trl.options import parse_config
from ram_trl.terminal import NOT_EVALUATED, exit_on_error, progress_bar


# Merges that a search tries if nobody says how many.
NUM_TRIALS = 30


@dataclass(kw_only=True)
class SweepConfig(EvaluationConfig):
    """Options of recipes/evaluate.py, and what is tried."""

    grid: str | None = field(
        default=None, metadata={"help": "YAML file with a list of values for options of the merge: all are tried."}
    )
    search: str | None = field(
        default=None,
        metadata={"help": "YAML file with values or ranges for options of the merge: Optuna proposes what is tried."},
    )
    num_trials: int | None = field(
        default=None,
        metadata={"help": f"With --search: merges to try, those of earlier calls included. Default: {NUM_TRIALS}."},
    )

    def __post_init__(self):
        if (self.grid is None) == (self.search is None):
            raise ConfigError("name what to try, with --grid (all combinations) or with --search (Optuna proposes)")
        for name in ("method", "r", "alpha", "epsilon", "weights", "method_options"):
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name} is not for a sweep, which tries what its file says: put {name} there")
        if self.merged:
            raise ConfigError("--merged is for recipes/evaluate.py: a sweep merges in memory")
        if self.num_trials is not None and self.search is None:
            raise ConfigError("--num_trials is for --search: a grid is tried as a whole")
        if self.search is not None:
            self.num_trials = NUM_TRIALS if self.num_trials is None else self.num_trials
            if self.num_trials < 1:
                raise ConfigError(f"num_trials={self.num_trials} must be at least 1")


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(SweepConfig, description="Evaluate many merges, and keep the best.")
        # imported here: --help and mistakes in the options answer at once
        try:
            import matplotlib  # noqa: F401

            if config.search is not None:
                import optuna  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"a sweep needs more libraries: pip install 'ram_trl[sweep]' ({error})") from error
        from ram_trl.distributed import leave_world, start_world
        from ram_trl.evaluating.tasks import read_tasks
        from ram_trl.sharing.reading import open_registry
        from ram_trl.sweeping.space_file import read_space
        from ram_trl.sweeping.sweep import Sweep

        world, arguments = start_world(cpu=config.cpu), config.evaluation_arguments()
        # it tries merges of its own
        del arguments["merges"]
        arguments |= {"tasks": read_tasks(config.tasks), "space": read_space(config.grid or config.search)}
        with progress_bar() as progress:
            arguments["registry"] = open_registry(config.registry, config.agents, world=world, progress=progress)
        with progress_bar(unit=" completions") as progress:
            result = Sweep(**arguments, num_trials=config.num_trials, world=world, progress=progress).run()
        if result.best is None:
            problem = next(iter(result.unscored.values()))
            raise ConfigError(f"none of the {len(result.trials)} merges has a score: {problem}")
        if world.is_main:
            print(result.text())
            for name, problem in result.unscored.items():
                print(f"no score: {name}: {problem}")
            if config.search is not None and len(result.trials) < config.num_trials:
                print(f"ended after {len(result.trials)} trials: no other merge was found")
            print(f"best (*) by the {result.measure}: {result.best}")
            print(f"merge it with recipes/merge.py --config {config.output_dir}/best.yaml --output_dir DIR")
        if result.unscored and config.grid is not None:
            sys.exit(NOT_EVALUATED)
        leave_world()


if __name__ == "__main__":
    main()
