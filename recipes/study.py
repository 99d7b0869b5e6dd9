"""
Every merge method on agents that were really trained with GRPO, on a CPU: five tasks, three seeds, 2, 3 and 5 agents.

```sh
python recipes/study.py                                    # everything; by estimate 80 minutes on 2 idle cores
python recipes/study.py --seeds 0 --regimes sparse lora    # less of it
```

Every step is a command that a user could type, its output is in `<output_dir>/logs`. What is finished is kept, and
what is interrupted goes on: the same command, or one for more seeds, regimes or methods, does only what is missing.
docs/RESULTS.md says what came out, and what was measured how.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import study_report
import study_summary
from journey import Job, Journey, console, open_root
from toy_tasks import TASKS, prompts_with_answers

from benchmarks.process import Command, Stopwatch, kept
from ram_trl.terminal import exit_on_error


RECIPES = Path(__file__).resolve().parent

# How agents are trained: options of toy_agent.py.
REGIMES = {
    # bfloat16 weights, a low learning rate: an update of less than half a unit in the last place leaves a weight as
    # it was, and most are. Lower rates need more steps.
    "sparse": ["--optim", "adamw_torch", "--learning_rate", "5e-5", "--dtype", "bfloat16", "--max_steps", "150"],
    # TRL's default: float32 weights and AdamW, which moves nearly every one of them.
    "dense": ["--optim", "adamw_torch", "--learning_rate", "1e-4"],
    # LoRA, and the full agents as the quickstart has them.
    "lora": ["--lora"],
    "sgd": [],
}
# Full agents and LoRA agents together: no training of its own.
MIXED, MIXED_FULL, MIXED_LORA = "mixed", "sgd", {"sort", "rotate"}
DEFAULT_REGIMES = ["sparse", "sgd", "dense", "lora"]

PRETRAIN_STEPS = 1000
NUM_PROMPTS = 500
# The smallest number of RAM's paper (appendix D.2).
NUM_FISHER_EXAMPLES = 256
TIMED_RUNS = 3
# Only what is named here is ever removed from the directory.
MADE = ("seeds", "results", "timing", "logs", "finished")
STAGES = {
    "base": "Pre-train a base for each seed",
    "agents": "Train the agents with GRPO",
    "fisher": "Estimate their Fisher information",
    "merges": "Merge and evaluate",
}
# Seconds of one step on a core that does nothing else, for the estimate: a base, an agent, its Fisher information, a
# merge with its evaluation.
SECONDS = {"base": 230.0, "agent": 65.0, "fisher": 12.0, "merge": 2.0}


@dataclass(frozen=True)
class Step:
    """
    A job, and what it is made of.

    Args:
        job (`Job`):
            The job.
        kind (`str`):
            Key of `SECONDS`.
        needs (`list[Step]`, *optional*):
            Steps that come before.
        amount (`int`, *optional*, defaults to `1`):
            How often it takes these seconds.
    """

    job: Job
    kind: str
    needs: list["Step"] = field(default_factory=list)
    amount: int = 1


def parse_args() -> argparse.Namespace:
    from ram_trl.arithmetic.methods import METHODS

    methods = [name for name in METHODS if name != "isolate"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="study", help="directory of everything that is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="each a base and its agents")
    known = [*REGIMES, MIXED]
    parser.add_argument("--regimes", nargs="+", choices=known, default=DEFAULT_REGIMES, help="how agents are trained")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, help="merge methods")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="an agent for each")
    parser.add_argument("--num_prompts", type=int, default=NUM_PROMPTS, help="held-out prompts of each task")
    parser.add_argument("--pretrain_steps", type=int, default=PRETRAIN_STEPS, help="optimizer steps of a base")
    parser.add_argument("--max_steps", type=int, help="optimizer steps of an agent (default: the regime's)")
    parser.add_argument("--timed_runs", type=int, default=TIMED_RUNS, help="times that a merge is timed; 0: not timed")
    parser.add_argument("--fresh", action="store_true", help="remove what earlier runs have finished and start over")
    args = parser.parse_args()
    if len(set(args.tasks)) < 2:
        parser.error("--tasks: at least two, there is nothing to merge of one")
    # the same steps however they were typed
    args.tasks = [task for task in TASKS if task in args.tasks]
    args.methods = [method for method in methods if method in args.methods]
    args.seeds = sorted(set(args.seeds))
    args.regimes = [regime for regime in known if regime in args.regimes]
    return args


def agents_of(regime: str, tasks: list[str]) -> dict[str, str]:
    """The agent of every task in a regime."""
    if regime == MIXED:
        return {task: f"{task}-{'lora' if task in MIXED_LORA else MIXED_FULL}" for task in tasks}
    return {task: f"{task}-{regime}" for task in tasks}


def plan_seed(root: Path, seed: int, args: argparse.Namespace) -> dict[str, list[Step]]:
    """Plans the steps of one seed by stage."""
    folder = root / "seeds" / str(seed)
    base, registry = folder / "base", folder / "registry"
    pretraining = [str(RECIPES / "toy_tasks.py"), "--output_dir", str(base), "--seed", str(seed)]
    pretraining += ["--tasks", *args.tasks, "--num_steps", str(args.pretrain_steps)]
    base_step = Step(Job(f"base-{seed}", pretraining, base), "base")

    agents: dict[str, Step] = {}
    fishers: dict[str, Step] = {}
    merges = []
    for regime in args.regimes:
        names = agents_of(regime, args.tasks)
        for task, agent in names.items():
            if agent not in agents:
                agents[agent] = plan_agent(folder, seed, task, agent, base_step, args.max_steps)
                if "fisher" in args.methods:
                    fishers[agent] = plan_fisher(folder, seed, task, agent, agents[agent])
        output = root / "results" / f"{seed}-{regime}.jsonl"
        command = [str(RECIPES / "study_merges.py"), "--base_model", str(base), "--registry", str(registry)]
        command += ["--agents", *(f"{task}={agent}" for task, agent in names.items())]
        command += ["--methods", *args.methods, "--num_prompts", str(args.num_prompts), "--output", str(output)]
        needs = [steps[agent] for steps in (agents, fishers) for agent in names.values() if agent in steps]
        # it makes no directory, and goes on with its own file
        job = Job(f"merges-{seed}-{regime}", command, folder / "merges" / regime, output)
        sets = 2 * len(args.tasks) + 1
        merges.append(Step(job, "merge", needs, sets * (len(args.methods) + 8)))
    return {"base": [base_step], "agents": [*agents.values()], "fisher": [*fishers.values()], "merges": merges}


def plan_agent(folder: Path, seed: int, task: str, agent: str, base: Step, max_steps: int | None) -> Step:
    """Plans the training of one agent."""
    registry = folder / "registry"
    command = [str(RECIPES / "toy_agent.py"), "--task", task, "--agent", agent, "--registry", str(registry)]
    command += ["--base_model", str(base.job.output_dir), "--output_dir", str(folder / "runs" / agent)]
    command += ["--seed", str(seed), *REGIMES[agent.removeprefix(f"{task}-")]]
    command += ["--max_steps", str(max_steps)] if max_steps else []
    job = Job(f"agent-{seed}-{agent}", command, folder / "runs" / agent, registry / "agents" / agent)
    return Step(job, "agent", [base])


def plan_fisher(folder: Path, seed: int, task: str, agent: str, training: Step) -> Step:
    """Plans the estimate of the Fisher information of one agent."""
    registry = folder / "registry"
    command = [str(RECIPES / "fisher.py"), "--registry", str(registry), "--agent", agent, "--cpu"]
    command += ["--dataset", str(examples_of(folder, task)), "--num_examples", str(NUM_FISHER_EXAMPLES)]
    return Step(Job(f"fisher-{seed}-{agent}", command, registry / "fisher" / agent), "fisher", [training])


def examples_of(folder: Path, task: str) -> Path:
    return folder / "examples" / f"{task}.jsonl"


def write_examples(folder: Path, seed: int, tasks: list[str]) -> None:
    """Writes the first prompts that an agent of each task was trained on, with the right answers, for its Fisher."""
    for task in tasks:
        rows = prompts_with_answers(task, NUM_FISHER_EXAMPLES, seed, held_out=False)
        # the end of an answer is a part of it
        pairs = [{"prompt": row["prompt"], "completion": f"{row['answer']}<eos>"} for row in rows]
        path = examples_of(folder, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def is_pending(journey: Journey, step: Step) -> bool:
    """Whether a step is to be run: it is not finished, or something that it is made of will be or was made anew."""
    if any(is_pending(journey, need) for need in step.needs):
        return True
    times = [json.loads(journey.marker(need.job).read_text())["finished"] for need in step.needs]
    journey.built_on = max(times, default=0.0)
    return not journey.is_finished(step.job)


def run_stage(journey: Journey, title: str, steps: list[Step]) -> None:
    """Runs those steps that are pending."""
    pending = [step.job for step in steps if is_pending(journey, step)]
    console.print(f"[bold]{title}[/]: {len(pending)} of {len(steps)} to do")
    if pending:
        journey.run_jobs(pending)


def estimate(journey: Journey, steps: list[Step]) -> float:
    """Seconds for the pending steps on the idle cores of this machine."""
    seconds = sum(SECONDS[step.kind] * step.amount for step in steps if is_pending(journey, step))
    return seconds / (os.cpu_count() or 1)


def time_merges(root: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Times the merge of all agents of the first seed and regime with every method, as whole processes."""
    registry = root / "seeds" / str(args.seeds[0]) / "registry"
    agents = [*agents_of(args.regimes[0], args.tasks).values()]
    output_dir = root / "timing" / "merged"

    def measure() -> dict[str, Any]:
        merge = [sys.executable, str(RECIPES / "merge.py"), "--registry", str(registry), "--agents", *agents]
        commands = [
            Command(name, [*merge, "--output_dir", str(output_dir), "--method", name], output_dir)
            for name in args.methods
        ]
        return {"commands": Stopwatch(root / "timing", args.timed_runs).take_turns(commands)}

    settings = {"registry": str(registry), "agents": agents, "methods": args.methods, "runs": args.timed_runs}
    commands = kept(root / "results" / "timing.json", settings, measure)["commands"]
    return {
        name: {key: median(run[key] for run in command["runs"]) for key in ("seconds", "cpu_seconds", "peak_bytes")}
        for name, command in commands.items()
        if command["failure"] is None
    }


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    root = open_root(args.output_dir, "study", MADE, args.fresh)
    journey = Journey(root)
    plans = {seed: plan_seed(root, seed, args) for seed in args.seeds}
    stages = {stage: [step for plan in plans.values() for step in plan[stage]] for stage in STAGES}
    seconds = estimate(journey, [step for steps in stages.values() for step in steps])
    console.print(f"At most about {seconds / 60:.0f} minutes on {os.cpu_count()} idle cores, in {root}")
    for seed, plan in plans.items():
        folder = root / "seeds" / str(seed)
        if is_pending(journey, plan["base"][0]):
            # agents of another base are of no use
            shutil.rmtree(folder, ignore_errors=True)
        write_examples(folder, seed, args.tasks)
    for number, (stage, title) in enumerate(STAGES.items(), start=1):
        run_stage(journey, f"{number}/5 {title}", stages[stage])
    console.print("[bold]5/5 Time the merges[/]")
    timing = time_merges(root, args) if args.timed_runs else {}
    paths = {(regime, seed): root / "results" / f"{seed}-{regime}.jsonl" for regime in args.regimes for seed in plans}
    results = study_summary.summarise(paths, args.methods, timing)
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    report = study_report.format_markdown(results)
    (root / "RESULTS.md").write_text(report)
    study_report.plot(results, root / "results.png")
    print(report)
    console.print(f"RESULTS.md, results.json, results.png in {root} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    # a termination ends what it started, as an interruption from the keyboard does
    with exit_on_error():
        main()
