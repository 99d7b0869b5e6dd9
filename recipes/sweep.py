"""Evaluate many merges of the same agents, in the memory of one model, and keep the best as a file for merge.py.

accelerate launch recipes/sweep.py --registry registry --tasks tasks.yaml --grid grid.yaml --output_dir sweep
accelerate launch recipes/merge.py --config sweep/best.yaml --output_dir merged

grid.yaml has a list of values for each option that varies, and all combinations are evaluated:

r: [0.0, 0.05, 0.1, 0.15, 0.2]
agents: [[math, code], [math, code, tool]]

The same command goes on where it was interrupted. Choose on other prompts than those that you report on.
"""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ram_trl.config import EvaluationConfig
from ram_trl.errors import ConfigError
from ram_trl.options import parse_config
from ram_trl.terminal import exit_on_error, progress_bar


@dataclass(kw_only=True)
class SweepConfig(EvaluationConfig):
    """Options of recipes/evaluate.py, and the grid."""

    grid: str = field(metadata={"help": "YAML file with a list of values for each option of the merge that varies."})

    def __post_init__(self):
        if self.method or self.merged:
            raise ConfigError("a sweep evaluates what its --grid says: put the methods there, leave out --merged")


def plot(content, merges, path):
    """The mean of every merge with its interval, beside the base."""
    from matplotlib.figure import Figure

    rows = [content["rows"][name] for name in merges]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        mean, interval = row["mean"]["value"], row["mean"]["interval"]
        if mean is not None:
            error = [[mean - interval[0]], [interval[1] - mean]] if interval else None
            axes.errorbar(mean, position, xerr=error, fmt="o", color="#0072B2", capsize=3)
    axes.axvline(content["rows"]["base"]["mean"]["value"], color="#999999", linestyle="--", label="base")
    axes.set_yticks(range(len(rows)), list(merges))
    axes.invert_yaxis()
    axes.set_xlabel("mean score over the tasks, with the 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center")
    figure.savefig(path, dpi=150)


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(SweepConfig, description="Evaluate many merges, and keep the best.")
        # imported here: --help and mistakes in the options answer at once
        from ram_trl.distributed import leave_world, start_world
        from ram_trl.evaluating.evaluate import evaluate_models
        from ram_trl.evaluating.sweep import best_configuration, format_sweep, markdown_sweep, read_grid, sweep_lines
        from ram_trl.evaluating.tasks import read_tasks

        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"a sweep ends with a picture: pip install 'ram_trl[analysis]' ({error})") from error

        world = start_world(cpu=config.cpu)
        arguments = {**config.evaluation_arguments(), "merges": read_grid(config.grid)}
        with progress_bar(unit=" completions") as progress:
            content = evaluate_models(tasks=read_tasks(config.tasks), **arguments, world=world, progress=progress)
        if world.is_main:
            merges, folder = arguments["merges"], Path(config.output_dir)
            lines, best = sweep_lines(content, merges), best_configuration(content, merges)
            agents = {"agents": config.agents} if config.agents else {}
            (folder / "sweep.md").write_text(markdown_sweep(lines), encoding="utf-8")
            (folder / "best.yaml").write_text(
                yaml.safe_dump({"registry": config.registry, **agents, **merges[best]}, sort_keys=False)
            )
            plot(content, merges, folder / "sweep.png")
            print(format_sweep(lines))
            print(f"best (*): {best}; merge it with recipes/merge.py --config {folder / 'best.yaml'} --output_dir DIR")
        leave_world()


if __name__ == "__main__":
    main()
