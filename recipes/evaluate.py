"""Evaluate the base, the agents of a registry and what they were merged into: rewards, benchmarks, perplexity.

# a directory that recipes/merge.py wrote; tasks.yaml names the tasks (docs/EVALUATION.md)
accelerate launch recipes/evaluate.py --registry registry --tasks tasks.yaml --merged merged --output_dir evaluation

# merged in memory, a row for each method; nothing but the results is written
accelerate launch recipes/evaluate.py --registry registry --tasks tasks.yaml --method ram_plus average \
    --output_dir evaluation

# a model larger than one GPU: one process, all of its GPUs
python recipes/evaluate.py --registry registry --tasks tasks.yaml --device_map auto --output_dir evaluation

The same command goes on where it was interrupted.
"""

import sys

from ram_trl.config import EvaluationConfig
from ram_trl.options import parse_config
from ram_trl.terminal import NOT_EVALUATED, exit_on_error, progress_bar


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(EvaluationConfig, description="Evaluate the base, agents and merged models.")
        arguments = config.evaluation_arguments()
        # imported here: --help and mistakes in the options answer at once
        from ram_trl.distributed import leave_world, start_world
        from ram_trl.evaluating.evaluate import evaluate_models
        from ram_trl.evaluating.report import format_evaluation
        from ram_trl.evaluating.tasks import read_tasks
        from ram_trl.sharing.reading import open_registry

        world = start_world(cpu=config.cpu)
        with progress_bar() as progress:
            arguments["registry"] = open_registry(config.registry, config.agents, world=world, progress=progress)
        with progress_bar(unit=" completions") as progress:
            content = evaluate_models(tasks=read_tasks(config.tasks), **arguments, world=world, progress=progress)
        if world.is_main:
            print(format_evaluation(content))
            print(f"\nevaluation.json, evaluation.md and completions in {config.output_dir}")
            for name, problem in content["failed"].items():
                print(f"error: {name} was not evaluated: {problem}", file=sys.stderr)
        if content["failed"]:
            sys.exit(NOT_EVALUATED)
        leave_world()


if __name__ == "__main__":
    main()
