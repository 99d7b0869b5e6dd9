"""
Continual integration on a CPU, in minutes: four agents one after another, merged into a generalist after each.

```sh
python recipes/continual.py
```

Three agents are trained from the base, one a task; the callback merges after every run (`merge_to`, with a gate). The
fourth is trained from the generalist of the three, on the task that it answers worst, carried over to the base
(`ram-trl rebase`) and merged by hand (`merge.py --merge_to`). Everything is in `<output_dir>`; a later run repeats no
finished step, `--fresh` starts over.
"""

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

from journey import Job, Journey, console, open_root
from rich import box
from rich.table import Table

from ram_trl import AgentRegistry


RECIPES = Path(__file__).resolve().parent
TASK_NAMES = ["reverse", "sort", "next"]
LORA_AGENT = "sort"
GENERALIST, GATE = "generalist", "toy_gate:no_task_below_base"
NUM_PROMPTS = 1000
EVALUATION_SEED = 0
# Only what is named here is ever removed from the directory.
MADE = ("base", "registry", "runs", "logs", "finished")
COLOURS = {"reverse": "#0072B2", "sort": "#E69F00", "next": "#009E73", "mean": "#000000"}


def training(root: Path, agent: str, task: str, start_from: Path, seed: int, *options: str) -> Job:
    """Plans the training of one agent."""
    command = [str(RECIPES / "toy_agent.py"), "--task", task, "--agent", agent, "--base_model", str(start_from)]
    command += ["--registry", str(root / "registry"), "--output_dir", str(root / "runs" / agent)]
    command += ["--seed", str(seed), *options]
    return Job(f"agent-{agent}", command, root / "runs" / agent, root / "registry" / "agents" / agent)


def command_line(name: str, command: list[str], root: Path) -> Job:
    """Plans a step that adds to the registry and makes no directory of its own."""
    return Job(name, command, root / "runs" / name, root / "registry")


def evaluate(path: Path) -> dict[str, float]:
    """Rewards of a model on the held-out prompts of every task, and their mean."""
    import torch
    from toy_tasks import accuracy
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    scores = {task: accuracy(model, tokenizer, task, NUM_PROMPTS, EVALUATION_SEED) for task in TASK_NAMES}
    return scores | {"mean": sum(scores.values()) / len(scores)}


def run(root: Path, seed: int) -> dict[str, Any]:
    """Runs every step that is not finished yet; the rewards of the base and of each version of the generalist."""
    journey, base, registry = Journey(root), root / "base", ["--registry", str(root / "registry")]
    pretraining = [str(RECIPES / "toy_tasks.py"), "--output_dir", str(base), "--seed", str(seed)]
    job = Job("base", pretraining, base)
    if not journey.is_finished(job):
        # agents of another base are of no use
        for name in ("registry", "runs"):
            shutil.rmtree(root / name, ignore_errors=True)
    journey.run("Pre-train the base", [job])
    rows = [{"model": "base", "parents": [], "rewards": evaluate(base)}]

    store = AgentRegistry(root / "registry").generalists

    def show(number: int) -> Path:
        """The generalist of so many agents."""
        one = [one for one in store if len(one.parents) == number][-1]
        rewards = evaluate(one.path)
        rows.append({"model": str(one), "parents": one.parents, "refused": one.manifest.refused, "rewards": rewards})
        console.print(f"  {one} of {', '.join(one.parents)}: mean reward {rewards['mean']:.3f}")
        return one.path

    for number, task in enumerate(TASK_NAMES, start=1):
        options = ["--merge_to", GENERALIST, "--gate", GATE, *["--lora"] * (task == LORA_AGENT)]
        job = training(root, task, task, base, seed, *options)
        journey.run(f"{number}/4 Train an agent on {task!r} from the base; the callback merges", [job])
        newest = show(number)
    worst = min(TASK_NAMES, key=lambda task: rows[-1]["rewards"][task])
    agent = f"{worst}-2"
    journey.run(
        f"4/4 Train an agent on {worst!r} from {GENERALIST} {newest.name}",
        [training(root, agent, worst, newest, seed + 1)],
    )
    rebase = ["-m", "ram_trl", "rebase", *registry, "--agent", f"{agent}@v1"]
    journey.run("    Carry it over to the base", [command_line("rebase", rebase, root)])
    merge = [str(RECIPES / "merge.py"), *registry, "--merge_to", GENERALIST, "--gate", GATE]
    journey.run("    Merge all four", [command_line("merge", merge, root)])
    show(4)
    rebased = AgentRegistry(root / "registry").get(agent).manifest.snapshot
    return {"seed": seed, "num_prompts": NUM_PROMPTS, "rows": rows, "hidden_update": rebased.hidden_update}


def print_table(results: dict[str, Any]) -> None:
    """Prints the rewards after every integration."""
    table = Table(
        box=box.SIMPLE_HEAD, title="Reward on held-out prompts after every integration", padding=(0, 0, 0, 1)
    )
    for column in ("model", "merged of", *TASK_NAMES, "mean", "gate"):
        table.add_column(column, justify="right" if column in (*TASK_NAMES, "mean") else "left")
    for row in results["rows"]:
        verdict = "" if not row["parents"] else row["refused"] or "promoted"
        cells = [f"{reward:.3f}" for reward in row["rewards"].values()]
        table.add_row(row["model"], ", ".join(row["parents"]), *cells, verdict)
    console.print(table)
    console.print(
        f"95 % confidence: at most +-{1.96 * (0.25 / results['num_prompts']) ** 0.5:.3f} on a task. To carry the "
        f"fourth agent over to the base, rounding took {results['hidden_update']:.1%} of its update."
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the reward of every task after every integration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = results["rows"]
    for task, colour in COLOURS.items():
        rewards = [row["rewards"][task] for row in rows]
        axes.plot(range(len(rows)), rewards, "o-", color=colour, label=task, linewidth=3 if task == "mean" else 1.5)
    labels = ["base"]
    for before, after in itertools.pairwise(rows):
        added = [parent.split("@")[0] for parent in after["parents"] if parent not in before["parents"]]
        labels.append(f"v{after['model'].rpartition('v')[2]}\n+ {', '.join(added)}")
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("reward (greedy exact match)")
    axes.set_title("A generalist after every agent, on held-out prompts", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="continual", help="directory of everything that is made")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pre-training and of the agents")
    parser.add_argument("--fresh", action="store_true", help="remove what earlier runs have finished and start over")
    args = parser.parse_args()
    started = time.monotonic()
    root = open_root(args.output_dir, "demonstration", MADE, args.fresh)
    results = run(root, args.seed)
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, root / "results.png")
    print_table(results)
    console.print(f"results.json, results.png, registry in {root} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
