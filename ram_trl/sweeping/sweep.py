"""A sweep: many merges of the same agents, each evaluated in memory, and the best of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..distributed import SINGLE, World
from ..evaluating.evaluate import Evaluator
from ..evaluating.rows import make_merge_rows
from ..evaluating.store import write_text
from ..storage.registry import AgentRegistry
from .picture import draw_sweep
from .result import SweepResult, check_comparable, score_of
from .search import Trial, propose, read_trials, write_trials
from .space import Space


__all__ = ["Sweep"]

_TRIALS, _TABLE, _PICTURE, _BEST = "trials.json", "sweep.md", "sweep.png", "best.yaml"


class Sweep:
    """Evaluates the merges of a space, all of them or those that a search proposes.

    All ranks make one and run it. After every merge the output directory has the table (`sweep.md`), the picture
    (`sweep.png`), the best so far as options of `recipes/merge.py` (`best.yaml`), and what was tried (`trials.json`),
    with which a later call goes on.

    Args:
        evaluator ([`~ram_trl.evaluating.evaluate.Evaluator`]):
            Evaluates the merges.
        space ([`~ram_trl.sweeping.space.Space`]):
            The merges, of pinned agents.
        output_dir (`str`):
            Output directory of the evaluator.
        registry ([`AgentRegistry`]):
            The registry.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        num_trials (`int`, *optional*):
            Merges that a search tries, those of earlier calls included; by default all merges of the space are tried.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the search.
        world ([`~ram_trl.distributed.World`], *optional*):
            The processes that evaluate together.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        space: Space,
        output_dir: str,
        *,
        registry: AgentRegistry,
        base_model: str | None = None,
        num_trials: int | None = None,
        seed: int = 0,
        world: World = SINGLE,
    ):
        self._evaluator, self._space, self._root = evaluator, space, Path(output_dir)
        self._registry, self._base_model = registry, base_model
        self._num_trials, self._seed, self._world = num_trials, seed, world
        # in their order; of a search nobody knows them
        self._grid = {} if num_trials is not None else {space.key(point): point for point in space.points()}
        self._others: list[Trial] = []

    def run(self) -> SweepResult:
        """Evaluate what is not finished. All ranks call it, and get the same.

        Raises:
            RamTrlError: naming what is wrong and the cure; what was finished is kept.
        """
        world, evaluate = self._world, self._evaluator.run
        world.run_on_main(self._check_plans)
        content = evaluate()
        check_comparable(content["tasks"])
        trials = world.run_on_main(self._read_trials)
        content = evaluate({name: trial.settings for name, trial in self._named(trials).items()})
        while True:
            result = self._result(trials, content)
            point = world.run_on_main(lambda result=result: self._keep_and_ask(result))
            if point is None:
                return result
            trial = Trial(point=point, settings=self._space.settings(point))
            trials.append(trial)
            content = evaluate({name: t.settings for name, t in self._named(trials).items() if t is trial})

    def _read_trials(self) -> list[Trial]:
        """Trials of earlier calls that are of this space; those of another say nothing here, and stay in the file."""
        trials: list[Trial] = []
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
        """Merges by their names in the table: those of a grid in its order, of a search as they were tried."""
        labels = [self._space.label(trial.point) for trial in trials]
        if not self._grid:
            labels = [f"{number} {label}" for number, label in enumerate(labels, 1)]
            return dict(zip(labels, trials, strict=True))
        named = {self._space.key(trial.point): (label, trial) for label, trial in zip(labels, trials, strict=True)}
        return dict(named[key] for key in self._grid if key in named)

    def _result(self, trials: Sequence[Trial], content: dict[str, Any]) -> SweepResult:
        named = self._named(trials)
        for name, trial in named.items():
            estimate = score_of(content, name)
            trial.score, trial.failed = estimate and estimate.value, content["failed"].get(name)
        return SweepResult(space=self._space, content=content, trials=named, is_search=not self._grid)

    def _keep_and_ask(self, result: SweepResult) -> dict[str, Any] | None:
        """Keep what there is, and say what to try next."""
        trials = list(result.trials.values())
        if trials:
            write_trials(self._root / _TRIALS, [*trials, *self._others])
            write_text(self._root / _TABLE, result.markdown())
            (self._root / _PICTURE).write_bytes(draw_sweep(result))
            if result.best is None:
                (self._root / _BEST).unlink(missing_ok=True)
            else:
                write_text(self._root / _BEST, result.best_options(self._registry, self._base_model))
        if not self._grid:
            is_over = len(trials) >= self._num_trials
            return None if is_over else propose(self._space, trials, result.higher_is_better, self._seed)
        tried = {self._space.key(trial.point) for trial in trials}
        return next((point for key, point in self._grid.items() if key not in tried), None)
