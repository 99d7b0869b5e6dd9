"""
Evaluates the base, the agents and every merge of them, of one seed and one regime: a step of `study.py`.

One model is loaded; agents and merges are put into it in memory (`ram_trl.apply_merge`), and taken out again. Every
result is a line of JSON, written when it is there, and not computed again by a later run with the same agents.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from toy_tasks import TASKS, prompts_with_answers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import ram_trl


EVALUATION_SEED = 0
NUM_SEARCH_PROMPTS = 200

# Task -> token ids of prompts of one length with their answers, and the index at which the answers begin.
Batches = dict[str, list[tuple[torch.Tensor, int]]]


@dataclass(frozen=True)
class Search:
    """
    A method once more, with the best value of one setting: chosen for each set of agents, on other prompts than those
    that are reported.

    Args:
        method (`str`):
            The method.
        name (`str`):
            Its name in the tables.
        settings (`dict[float, dict[str, Any]]`):
            Value -> settings of the merge.
    """

    method: str
    name: str
    settings: dict[float, dict[str, Any]]


SEARCHES = [
    # the range that RAM's paper searched (appendix D.2)
    Search(
        "task_arithmetic",
        "task_arithmetic, best scaling",
        {scaling: {"method_options": {"scaling": scaling}} for scaling in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)},
    ),
    # from the default to the size of the updates
    Search(
        "ram_plus",
        "ram_plus, best epsilon",
        {epsilon: {"epsilon": epsilon} for epsilon in (1e-5, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3)},
    ),
]


class Results:
    """
    Rows in a file of JSON lines. What another run left there is kept if it was made of the same.

    Args:
        path (`Path`):
            The file.
        header (`dict[str, Any]`):
            What the rows are made of: its first line.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.rows = read_rows(path)
        if self.rows[:1] != [header]:
            self.rows = [header]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        partial.replace(path)
        self.path = path

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row that has these values."""
        return next((row for row in self.rows if row.items() >= key.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without a last one that was not written whole."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def draw_batches(tokenizer: PreTrainedTokenizerFast, task_names: list[str], start: int, stop: int) -> Batches:
    """Held-out prompts of every task, from number `start` to number `stop`, grouped by their length."""
    batches: Batches = {}
    for task in task_names:
        groups: dict[int, list[str]] = {}
        for row in prompts_with_answers(task, stop, EVALUATION_SEED, held_out=True)[start:]:
            groups.setdefault(len(row["prompt"]), []).append(row["prompt"] + row["answer"])
        # a token for each character
        batches[task] = [
            (torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]), length)
            for length, texts in groups.items()
        ]
    return batches


@torch.no_grad()
def score(model: torch.nn.Module, batches: Batches) -> dict[str, float]:
    """
    Greedy exact match by task, without generating.

    Greedy decoding gives the right answer exactly if each of its tokens is the most probable one after those before
    it, so one forward pass over the right answers tells.
    """
    scores = {}
    for task, groups in batches.items():
        right = 0
        for tokens, start in groups:
            best = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, start - 1 :].argmax(-1)
            right += int((best == tokens[:, start:]).all(1).sum())
        scores[task] = right / sum(len(tokens) for tokens, _ in groups)
    return scores


def agent_sets(task_names: list[str]) -> list[list[str]]:
    """Two, three and all of the agents, each in as many sets as the others: neighbours in a circle."""
    number = len(task_names)
    sets = [
        [task_names[(first + step) % number] for step in range(size)]
        for size in (2, 3)
        if size < number
        for first in range(number)
    ]
    return [*sets, task_names]


def mean_over(scores: dict[str, float], tasks: list[str]) -> float:
    return sum(scores[task] for task in tasks) / len(tasks)


class Evaluation:
    """
    One seed and regime: the loaded model, the prompts and the results so far.

    Args:
        args (`argparse.Namespace`):
            The options.
    """

    def __init__(self, args: argparse.Namespace):
        self.registry, self.base_model = args.registry, args.base_model
        self.agents = dict(pair.split("=") for pair in args.agents)
        self.tasks, self.methods = list(self.agents), args.methods
        tokenizer = AutoTokenizer.from_pretrained(args.base_model)
        self.model = AutoModelForCausalLM.from_pretrained(args.base_model, dtype=torch.float32).eval()
        self.prompts = draw_batches(tokenizer, self.tasks, 0, args.num_prompts)
        self.search_prompts = draw_batches(
            tokenizer, self.tasks, args.num_prompts, args.num_prompts + NUM_SEARCH_PROMPTS
        )
        registry = ram_trl.AgentRegistry(args.registry)
        digests = {name: registry.get(name).manifest.to_dict()["digest"] for name in self.agents.values()}
        self.results = Results(Path(args.output), {"agents": digests, "num_prompts": args.num_prompts})

    def run(self) -> None:
        sets = agent_sets(self.tasks)
        searches = [search for search in SEARCHES if search.method in self.methods]
        merges = len(self.methods) + sum(len(search.settings) + 1 for search in searches)
        total = 1 + len(self.tasks) + len(sets) * merges
        with tqdm(total=total, mininterval=1) as progress:
            self.add("base", progress, lambda: {"scores": score(self.model, self.prompts)})
            for task, agent in self.agents.items():
                self.add("agent", progress, lambda agent=agent: self.evaluate_agent(agent), task=task, agent=agent)
            for tasks in sets:
                for method in self.methods:
                    self.add_merge(progress, method, method, tasks)
                for search in searches:
                    self.search(progress, search, tasks)

    def add(self, kind, progress, evaluate, **key) -> None:
        """Adds a row, unless it is there."""
        key["kind"] = kind
        if self.results.find(**key) is None:
            self.results.add(key | evaluate())
        progress.update()

    def evaluate_agent(self, agent: str) -> dict[str, Any]:
        with ram_trl.apply_agent(self.model, self.registry, agent, base_model=self.base_model):
            return {"scores": score(self.model, self.prompts)}

    def add_merge(self, progress, name: str, method: str, tasks: list[str], **settings: Any) -> None:
        def evaluate() -> dict[str, Any]:
            with self.merged(method, tasks, settings) as report:
                scores = score(self.model, self.prompts)
            by_agent = {agent["name"]: agent for agent in report["agents"]}
            columns = ("density", "rho", "lambda", "effective_lambda")
            agents = {task: {column: by_agent[self.agents[task]][column] for column in columns} for task in tasks}
            return {"settings": settings, "scores": scores, "agents": agents}

        self.add("merge", progress, evaluate, method=name, tasks=tasks)

    def search(self, progress, search: Search, tasks: list[str]) -> None:
        """Evaluates the values on the prompts for that, and the best of them as all else."""
        means = {}
        for value, settings in search.settings.items():

            def evaluate(settings: dict[str, Any] = settings) -> dict[str, Any]:
                with self.merged(search.method, tasks, settings):
                    return {"scores": score(self.model, {task: self.search_prompts[task] for task in tasks})}

            key = {"method": search.name, "value": value, "tasks": tasks}
            self.add("search", progress, evaluate, **key)
            means[value] = mean_over(self.results.find(kind="search", **key)["scores"], tasks)
        best = max(means, key=means.get)
        self.add_merge(progress, search.name, search.method, tasks, **search.settings[best])

    def merged(self, method: str, tasks: list[str], settings: dict[str, Any]):
        return ram_trl.apply_merge(
            self.model,
            self.registry,
            agents=[self.agents[task] for task in tasks],
            base_model=self.base_model,
            method=method,
            **settings,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_model", required=True, help="directory of the base model")
    parser.add_argument("--registry", required=True, help="registry of the agents")
    parser.add_argument("--agents", nargs="+", required=True, metavar="TASK=AGENT", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--methods", nargs="+", required=True, help="merge methods")
    parser.add_argument("--num_prompts", type=int, required=True, help="held-out prompts of each task")
    parser.add_argument("--output", required=True, help="file of JSON lines")
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    Evaluation(args).run()


if __name__ == "__main__":
    main()
