"""Looking for the best merge of a space with Optuna, one trial after the other.

A proposal is a function of the space, the trials before it, the seed and the version of Optuna alone: a search that
was interrupted goes on with the very trials that it would have had otherwise.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CorruptedFileError
from ..evaluating.store import write_text
from ..storage.durable import read_json
from .space import Choices, Range, Space


if TYPE_CHECKING:
    import optuna


__all__ = ["Trial", "propose", "read_trials", "write_trials"]

# Optuna is asked so often for a merge that was not tried yet, before one is drawn; so often at most.
_ATTEMPTS, _DRAWS = 20, 1000


@dataclass(kw_only=True, slots=True)
class Trial:
    """A merge that was tried.

    Args:
        point (`dict`):
            Where it is in the space.
        settings (`dict`):
            Arguments of [`apply_merge`] there.
        score (`float`, *optional*):
            Its score; `None` if it has none.
    """

    point: dict[str, Any]
    settings: dict[str, Any]
    score: float | None = None


def propose(space: Space, trials: Sequence[Trial], higher_is_better: bool, seed: int) -> dict[str, Any] | None:
    """The next point to try, by the tree-structured Parzen estimator.

    Args:
        space ([`~ram_trl.sweeping.space.Space`]):
            Where to look.
        trials (`Sequence[Trial]`):
            What was tried, in its order.
        higher_is_better (`bool`):
            Whether a higher score is a better one.
        seed (`int`):
            Seed of the search.

    Returns:
        `dict`: a point of a merge that was not tried yet; `None` if there is none, or none was found.
    """
    import optuna

    tried = {space.key(trial.point) for trial in trials}
    generator = random.Random(f"{seed}/{len(trials)}")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            direction="maximize" if higher_is_better else "minimize",
            # what a new version of Optuna may have other defaults for
            sampler=optuna.samplers.TPESampler(seed=generator.getrandbits(32), multivariate=True, constant_liar=True),
        )
        for trial in trials:
            study.add_trial(_frozen(space, trial))
        for attempt in range(_ATTEMPTS + _DRAWS):
            if attempt == _ATTEMPTS:
                # what is best may be one merge alone, which Optuna proposes again and again
                if space.is_countable:
                    rest = [point for point in space.points() if space.key(point) not in tried]
                    return generator.choice(rest) if rest else None
                study.sampler = optuna.samplers.RandomSampler(seed=generator.getrandbits(32))
            point = _asked(space, study.ask())
            if space.key(point) not in tried:
                return point
    finally:
        optuna.logging.set_verbosity(verbosity)
    return None


def read_trials(path: Path) -> list[Trial]:
    """What earlier calls tried.

    Raises:
        CorruptedFileError: if the file is not what [`write_trials`] wrote.
    """
    if not path.exists():
        return []
    try:
        trials = [Trial(**trial) for trial in read_json(path)["trials"]]
        is_sound = all(isinstance(fields, dict) for trial in trials for fields in (trial.point, trial.settings))
    except (KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise CorruptedFileError(f"{path} does not hold the trials of a sweep: remove it")
    return trials


def write_trials(path: Path, trials: Sequence[Trial]) -> None:
    """Keep what was tried, as JSON."""
    content = {"trials": [asdict(trial) for trial in trials]}
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _asked(space: Space, trial: "optuna.Trial") -> dict[str, Any]:
    """A point that Optuna suggests, option by option: which of them say something depends on agents and method."""
    point: dict[str, Any] = {}
    for name in sorted(space.options, key=lambda name: name not in ("agents", "method")):
        if space.applies(name, point):
            option = space.options[name]
            known = _distribution(option)
            if isinstance(option, Choices):
                point[name] = trial.suggest_categorical(name, known.choices)
            else:
                suggest = trial.suggest_int if option.is_whole else trial.suggest_float
                point[name] = option.tidy(suggest(name, known.low, known.high, step=known.step, log=known.log))
    return {name: point[name] for name in space.options if name in point}


def _frozen(space: Space, trial: Trial) -> "optuna.trial.FrozenTrial":
    """A trial as Optuna keeps it."""
    from optuna.trial import TrialState, create_trial

    return create_trial(
        # Optuna learns nothing of what has failed, and proposes more of its kind; what was given up is the worst
        state=TrialState.PRUNED if trial.score is None else TrialState.COMPLETE,
        value=trial.score,
        params=trial.point,
        distributions={name: _distribution(space.options[name]) for name in trial.point},
    )


def _distribution(option: Choices | Range) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(option, Choices):
        return CategoricalDistribution(option.labels())
    if option.is_whole:
        return IntDistribution(int(option.low), int(option.high), log=option.log, step=int(option.step or 1))
    return FloatDistribution(option.low, option.high, log=option.log, step=option.step)
