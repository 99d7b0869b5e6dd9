"""
The whole journey on a CPU, in minutes: a tiny base, three agents trained with GRPO, and their merge with RAM+.

```sh
python recipes/quickstart.py
```

Every step is a command that a user could type, its output is in `<output_dir>/logs`. A later run does not repeat a
finished step, unless its command has changed or something that it builds on was made anew; `--fresh` starts over.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from journey import Job, Journey, console, open_root
from rich import box
from rich.table import Table


RECIPES = Path(__file__).resolve().parent
TASK_NAMES = ["reverse", "sort", "next"]
LORA_AGENT = "sort"
# Row of the table -> method of recipes/merge.py.
MERGES = {"average": "average", "RAM": "ram", "RAM+": "ram_plus"}
# The paper's: nothing about the merge is tuned to these agents.
EPSILON = 1e-5
NUM_PROMPTS = 1000
EVALUATION_SEED = 0
# Only what is named here is ever removed from the directory.
MADE = ("base", "registry", "runs", "models", "logs", "finished")

# Okabe and Ito's palette, made for all kinds of colour vision.
COLOURS = ["#999999", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#CC79A7", "#0072B2"]


def plan_jobs(root: Path, seed: int) -> tuple[list[Job], list[Job], list[Job]]:
    """Plans the three stages that run as subprocesses: the base, the agents, and what is evaluated in the end."""
    base, registry, models = root / "base", ["--registry", str(root / "registry")], root / "models"
    pretraining = [str(RECIPES / "toy_tasks.py"), "--output_dir", str(base), "--seed", str(seed)]
    agents = []
    for task in TASK_NAMES:
        command = [str(RECIPES / "toy_agent.py"), "--task", task, "--agent", task, "--base_model", str(base)]
        command += [*registry, "--output_dir", str(root / "runs" / task), "--seed", str(seed)]
        command += ["--lora"] * (task == LORA_AGENT)
        agents.append(Job(f"agent-{task}", command, root / "runs" / task, root / "registry" / "agents" / task))
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(RECIPES.parent / "accelerate_configs/cpu.yaml")]
    final = []
    for method in MERGES.values():
        command = [*launch, str(RECIPES / "merge.py"), *registry, "--output_dir", str(models / method)]
        command += ["--method", method, "--epsilon", str(EPSILON)]
        final.append(Job(f"merge-{method}", command, models / method))
    for task in TASK_NAMES:
        # An agent is evaluated as the registry gives it back, not as the trainer left it.
        command = ["-m", "ram_trl", "restore", *registry, "--agent", task, "--output_dir", str(models / task)]
        final.append(Job(f"restore-{task}", command, models / task))
    return [Job("base", pretraining, base)], agents, final


def evaluate(root: Path) -> dict[str, Any]:
    """Evaluates the base, the agents and the merged models on the held-out prompts of all the tasks."""
    import torch
    from toy_tasks import accuracy
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    paths = {"base": root / "base"} | {f"{task} agent": root / "models" / task for task in TASK_NAMES}
    paths |= {name: root / "models" / method for name, method in MERGES.items()}
    accuracies = {}
    for name, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        scores = {task: accuracy(model, tokenizer, task, NUM_PROMPTS, EVALUATION_SEED) for task in TASK_NAMES}
        accuracies[name] = scores | {"mean": sum(scores.values()) / len(scores)}
        console.print(f"  [green]done[/] {name:<16} mean {accuracies[name]['mean']:.1%}")
    report = json.loads((root / "models" / MERGES["RAM+"] / "merge_report.json").read_text())
    agents = {f"{agent['name']} agent": agent for agent in report["agents"]}
    markers = sorted((root / "finished").glob("*.json"))
    seconds = {marker.stem: json.loads(marker.read_text())["seconds"] for marker in markers}
    settings = {"epsilon": EPSILON, "num_prompts": NUM_PROMPTS, "evaluation_seed": EVALUATION_SEED}
    return settings | {"accuracies": accuracies, "agents": agents, "seconds": seconds}


def print_table(results: dict[str, Any]) -> None:
    """Prints accuracies with their differences to the base, and each agent's density and rho."""
    title = "Greedy exact match on held-out prompts, %, and the difference to the base"
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 0, 0, 1))
    for column in ("", *TASK_NAMES, "mean", "density", "rho"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    base = results["accuracies"]["base"]
    for name, scores in results["accuracies"].items():
        cells = []
        for column, score in scores.items():
            difference = "" if name == "base" else f" {100 * (score - base[column]):+5.1f}"
            style = "bold green" if name == f"{column} agent" else "bold" if name == "RAM+" else "default"
            cells.append(f"[{style}]{100 * score:.1f}{difference}[/]")
        if name in results["agents"]:
            agent = results["agents"][name]
            cells += [f"{agent['density']:.1%}", f"{float(agent['rho']):.2f}"]
        table.add_row(name, *cells, end_section=name in ("base", f"{TASK_NAMES[-1]} agent"))
    console.print(table)
    half_width = 196 * (0.25 / results["num_prompts"]) ** 0.5
    console.print(
        f"95 % confidence: at most +-{half_width:.1f} on a task ({results['num_prompts']} prompts), "
        f"+-{half_width / len(TASK_NAMES) ** 0.5:.1f} on the mean.\n"
        f"[bold green]Green[/]: an agent on its own task; the {LORA_AGENT} agent is a LoRA adapter.\n"
        f"Density: parameters changed by more than {results['epsilon']:g}; rho: shared / unique changes."
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the table as bars, a group for each task and one for the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    groups, width = [*TASK_NAMES, "mean"], 0.8 / len(results["accuracies"])
    for index, (name, scores) in enumerate(results["accuracies"].items()):
        positions = [group + (index + 0.5) * width - 0.4 for group in range(len(groups))]
        heights = [100 * scores[group] for group in groups]
        bars = axes.bar(positions, heights, 0.92 * width, label=name, color=COLOURS[index])
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 109)
    axes.set_ylabel("greedy exact match, %")
    axes.set_title("Three GRPO agents and their merges, on held-out prompts", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="quickstart", help="directory of everything that is made")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pre-training and of the agents")
    parser.add_argument("--fresh", action="store_true", help="remove what earlier runs have finished and start over")
    args = parser.parse_args()
    started = time.monotonic()
    root = open_root(args.output_dir, "quickstart", MADE, args.fresh)
    journey = Journey(root)
    pretraining, agents, final = plan_jobs(root, args.seed)
    journey.run("1/4 Pre-train the base", pretraining)
    journey.run("2/4 Train the agents with GRPO", agents)
    journey.run("3/4 Merge, and restore each agent", final)
    console.print(f"[bold]4/4 Evaluate on {NUM_PROMPTS} held-out prompts per task[/]")
    results = evaluate(root)
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, root / "results.png")
    print_table(results)
    console.print(f"results.json, results.png, models/ram_plus in {root} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
