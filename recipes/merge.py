"""Merge registered agents into one model with RAM+ (https://huggingface.co/papers/2601.13572).

accelerate launch recipes/merge.py --registry registry --output_dir merged

# continually: the next version of a generalist in the registry, promoted or refused by a gate of your own
accelerate launch recipes/merge.py --registry registry --merge_to generalist --gate gates:keeps_math

# only look: densities, overlaps and rescale factors, nothing is written
python recipes/merge.py --registry registry --probe_only

# options from a file, the command line wins
accelerate launch recipes/merge.py --config recipes/configs/merge.yaml --output_dir merged

# and evaluate the base, the agents and what came out (docs/EVALUATION.md)
accelerate launch recipes/merge.py --registry registry --output_dir merged --eval tasks.yaml
"""

import gc
import shlex
import sys
import traceback

from ram_trl.config import MergeConfig
from ram_trl.options import parse_config
from ram_trl.terminal import NOT_EVALUATED, exit_on_error, progress_bar


def read_eval_tasks(config):
    """The tasks of --eval, read before the merge: a mistake in them or in a reward function's module is found now."""
    if config.eval is None:
        return []
    from ram_trl.evaluating.tasks import RewardTask, load_reward_functions, read_tasks

    tasks = read_tasks(config.eval)
    for task in tasks:
        if isinstance(task, RewardTask):
            load_reward_functions(task)
    return tasks


def evaluate(config, report, directory, tasks, world):
    """Evaluate what was published. It stays, whatever comes of this; a failure says how to try again."""
    from ram_trl.errors import RamTrlError
    from ram_trl.evaluating.evaluate import evaluate_models
    from ram_trl.evaluating.report import format_evaluation

    output_dir = config.eval_output_dir or f"{config.output_dir.rstrip('/')}-evaluation"
    agents = [f"{row['name']}@v{row['version']}" for row in report["agents"]]
    arguments = {"agents": agents, "merged": [directory], "base_model": config.base_model}
    content = None
    try:
        with progress_bar(unit=" completions") as progress:
            content = evaluate_models(config.registry, tasks, output_dir, **arguments, world=world, progress=progress)
        problem = "; ".join(content["failed"].values())
    except Exception as error:
        # reward functions and benchmarks are others' code
        problem = str(error) if isinstance(error, RamTrlError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, RamTrlError):
            # nobody foresaw it, so its place is told
            traceback.print_exc()
    if world.is_main and content is not None:
        # of a model that cannot be evaluated there is the base and its agents
        print(format_evaluation(content))
        print(f"evaluation: {output_dir}")
    if problem:
        if world.is_main:
            words = ["--registry", config.registry, "--tasks", config.eval, "--output_dir", output_dir]
            words += ["--merged", directory, "--agents", *agents]
            words += ["--base_model", config.base_model] if config.base_model else []
            words += ["--cpu"] if config.cpu else []
            print(f"error: the merged model was not evaluated: {problem}; try again with", file=sys.stderr)
            print(f"  accelerate launch recipes/evaluate.py {shlex.join(words)}", file=sys.stderr)
        sys.exit(NOT_EVALUATED)


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(MergeConfig, description="Merge registered agents into one model.")
        # imported here: --help and mistakes in the options answer at once
        from ram_trl.distributed import leave_world, start_world
        from ram_trl.merging.integrate import integrate_agents
        from ram_trl.merging.merge import merge_agents
        from ram_trl.merging.report import format_report
        from ram_trl.sharing.reading import open_registry

        # what was imported stays: the collector need not look through it again and again
        gc.freeze()
        world = start_world(cpu=config.cpu)
        tasks = read_eval_tasks(config)
        with progress_bar() as progress:
            if config.merge_to is None:
                opened = open_registry(config.registry, config.agents, world=world, progress=progress)
                config.registry = str(opened.path)
                report = merge_agents(**config.merge_arguments(), world=world, progress=progress)
                directory, outcome = config.output_dir, f"merged model: {config.output_dir}"
            else:
                merged = integrate_agents(**config.merge_arguments(), world=world, progress=progress)
                directory, report = str(merged.path), merged.report()
                refused = merged.manifest.refused
                outcome = f"{merged} in {merged.path}\n" + (f"not promoted: {refused}" if refused else "promoted")
        if world.is_main:
            print(format_report(report))
            if not config.probe_only:
                print(outcome)
        if tasks:
            evaluate(config, report, directory, tasks, world)
        leave_world()


if __name__ == "__main__":
    main()
