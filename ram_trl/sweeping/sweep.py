"""A sweep: many merges of the same agents, each evaluated in memory, and the best of them."""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..distributed import SINGLE, World
from ..evaluating.evaluate import Evaluator
from ..evaluating.report import HIGHER, PERPLEXITY, kind_of
from ..evaluating.rows import make_merge_rows
from ..evaluating.store import write_bytes, write_text
from ..evaluating.tasks import BenchmarkTask, PerplexityTask, Task
from ..storage.registry import AgentRegistry
from .picture import draw_sweep
from .result import SweepResult, check_comparable, score_of
from .search import Trial, propose, read_trials, write_trials
from .space import Space


__all__ = ["Sweep"]

_TRIALS, _TABLE, _PICTURE, _BEST = "trials.json", "sweep.md", "sweep.png", "best.yaml"
# Seconds from one picture to the next: merges that were evaluated by an earlier call come faster than pictures.
_PAUSE = 5.0


class Sweep:
    """Evaluates the merges of a space, all of them or those that a search proposes.

    All ranks make one and run it. After every merge the output directory has the table (`sweep.md`), the picture
    (`sweep.png`) and the best so far as options of `recipes/merge.py` (`best.yaml`); of a search what was tried
    (`trials.json`), with which a later call goes on.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        tasks (`Sequence[Task]`):
            Tasks, from [`~ram_trl.evaluating.tasks.read_tasks`].
        space ([`~ram_trl.sweeping.space.Space`]):
            The merges, from [`~ram_trl.sweeping.space_file.read_space`].
        output_dir (`str`):
            Output directory; it may hold a sweep to go on with.
        agents (`Sequence[str]`, *optional*):
            Agents, where the space does not name them; by default the latest version of every agent.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        num_trials (`int`, *optional*):
            Merges that a search tries, those of earlier calls included; by default all merges of the space are tried.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the search and of the evaluation.
        world ([`~ram_trl.distributed.World`], *optional*):
            The processes that evaluate together.
        **options:
            `dtype`, `batch_size`, `progress`, ...: see [`~ram_trl.evaluating.evaluate.Evaluator`].

    Raises:
        RamTrlError: naming what is wrong and the cure.
    """

    def __init__(
        self,
        registry: AgentRegistry | str,
        tasks: Sequence[Task],
        space: Space,
        output_dir: str,
        *,
        agents: Sequence[str] | None = None,
        base_model: str | None = None,
        num_trials: int | None = None,
        seed: int = 0,
        world: World = SINGLE,
        **options: Any,
    ):
        # a benchmark's is known when it has run
        known = [task for task in tasks if not isinstance(task, BenchmarkTask)]
        check_comparable({task.name: PERPLEXITY if isinstance(task, PerplexityTask) else HIGHER for task in known})
        self._registry, self._root, self._base_model = AgentRegistry(registry), Path(output_dir), base_model
        self._num_trials, self._seed, self._world = num_trials, seed, world
        # the agents that there are now, on all ranks, whatever is registered meanwhile
        self._space = world.run_on_main(lambda: space.pinned(self._registry, agents))
        self._grid = self._space.points() if num_trials is None else None
        arguments = {"agents": self._space.agents, "base_model": base_model, "seed": seed, "world": world, **options}
        self._evaluator = Evaluator(self._registry, tasks, output_dir, **arguments)
        self._others: list[Trial] = []
        self._drawn = -math.inf

    def run(self) -> SweepResult:
        """Evaluate what is not finished. All ranks call it, and get the same.

        Raises:
            RamTrlError: naming what is wrong and the cure; what was finished is kept.
        """
        world, evaluate = self._world, self._evaluator.run
        world.run_on_main(self._check_plans)
        content = evaluate()
        check_comparable({name: kind_of(task) for name, task in content["tasks"].items()})
        trials = world.run_on_main(self._read_trials)
        content = evaluate({name: trial.settings for name, trial in self._named(trials).items()})
        while True:
            result = self._result(trials, content)
            point = world.run_on_main(partial(self._next, result))
            world.run_on_main(partial(self._keep, result, is_over=point is None))
            if point is None:
                return result
            trials.append(Trial(point=point, settings=self._space.settings(point)))
            content = evaluate({name: t.settings for name, t in self._named(trials).items() if t is trials[-1]})

    def _next(self, result: SweepResult) -> dict[str, Any] | None:
        """What to try next, if anything."""
        trials = list(result.trials.values())
        if self._grid is not None:
            return self._grid[len(trials)] if len(trials) < len(self._grid) else None
        if len(trials) >= self._num_trials:
            return None
        return propose(self._space, trials, result.higher_is_better, self._seed)

    def _keep(self, result: SweepResult, is_over: bool) -> None:
        if not result.trials:
            return
        if result.is_search:
            write_trials(self._root / _TRIALS, [*result.trials.values(), *self._others])
        write_text(self._root / _TABLE, result.markdown())
        if is_over or time.monotonic() > self._drawn + _PAUSE:
            write_bytes(self._root / _PICTURE, draw_sweep(result))
            self._drawn = time.monotonic()
        if result.best is None:
            (self._root / _BEST).unlink(missing_ok=True)
        else:
            write_text(self._root / _BEST, result.best_options(self._registry, self._base_model))

    def _read_trials(self) -> list[Trial]:
        """Trials of earlier searches in this space; those of another say nothing here, and stay in the file."""
        trials: list[Trial] = []
        if self._grid is not None:
            return trials
        for trial in read_trials(self._root / _TRIALS):
            is_known = any(trial.settings == other.settings for other in trials)
            is_ours = self._space.holds(trial.point) and self._space.settings(trial.point) == trial.settings
            (trials if is_ours and not is_known else self._others).append(trial)
        return trials

    def _check_plans(self) -> None:
        """Refuse what no plan can be made of before anything is measured."""
        corners = {str(number): settings for number, settings in enumerate(self._space.corners())}
        make_merge_rows(self._registry, self._space.agents, corners, self._base_model)

    def _named(self, trials: Sequence[Trial]) -> dict[str, Trial]:
        """Merges by their names in the table; those of a search are numbered."""
        labels = [self._space.label(trial.point) for trial in trials]
        if self._grid is None:
            labels = [f"{number} {label}" for number, label in enumerate(labels, 1)]
        return dict(zip(labels, trials, strict=True))

    def _result(self, trials: Sequence[Trial], content: dict[str, Any]) -> SweepResult:
        named = self._named(trials)
        for name, trial in named.items():
            estimate = score_of(content, name)
            trial.score = estimate and estimate.value
        return SweepResult(space=self._space, content=content, trials=named, is_search=self._grid is None)
