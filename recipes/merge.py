"""Merge registered agents into one model with RAM+ (https://huggingface.co/papers/2601.13572).

accelerate launch recipes/merge.py --registry registry --output_dir merged

# continually: the next version of a generalist in the registry, promoted or refused by a gate of your own
accelerate launch recipes/merge.py --registry registry --merge_to generalist --gate gates:keeps_math

# only look: densities, overlaps and rescale factors, nothing is written
python recipes/merge.py --registry registry --probe_only

# options from a file, the command line wins
accelerate launch recipes/merge.py --config recipes/configs/merge.yaml --output_dir merged
"""

import gc

from ram_trl.config import MergeConfig
from ram_trl.options import parse_config
from ram_trl.terminal import exit_on_error, progress_bar


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(MergeConfig, description="Merge registered agents into one model.")
        # imported here: --help and mistakes in the options answer at once
        from ram_trl.distributed import leave_world, start_world
        from ram_trl.merging.integrate import integrate_agents
        from ram_trl.merging.merge import merge_agents
        from ram_trl.merging.report import format_report

        # what was imported stays: the collector need not look through it again and again
        gc.freeze()
        world = start_world(cpu=config.cpu)
        with progress_bar() as progress:
            if config.merge_to is None:
                report = merge_agents(**config.merge_arguments(), world=world, progress=progress)
                outcome = f"merged model: {config.output_dir}"
            else:
                merged = integrate_agents(**config.merge_arguments(), world=world, progress=progress)
                report = merged.report()
                refused = merged.manifest.refused
                outcome = f"{merged} in {merged.path}\n" + (f"not promoted: {refused}" if refused else "promoted")
        if world.is_main:
            print(format_report(report))
            if not config.probe_only:
                print(outcome)
        leave_world(world)


if __name__ == "__main__":
    main()
