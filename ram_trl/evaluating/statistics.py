"""Means, differences and retained gains, with 95 % confidence intervals over prompts.

Where every prompt has a score they are Student t intervals: of the mean over the prompts; of the mean of the
differences prompt by prompt, where two models answered the same prompts; and for the ratio of two such differences by
Fieller's theorem, which takes their correlation into account and gives no interval where the denominator may be zero.
Scores of perplexity are its linearisation by example (`perplexity.py`), so that the same holds for it to first order.
Where only a mean and its standard error are known, they are normal, of differences as of independent samples.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


__all__ = ["Estimate", "Measurement", "difference", "mean_of", "retained_gain"]

# Beyond it Student's distribution is the normal one, to three digits.
_MANY = 5000
_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % confidence interval.

    Args:
        value (`float`, *optional*):
            The number; `None` if there is nothing to compute it from.
        low, high (`float`, *optional*):
            The interval; `None` if there is none.
        n (`int`):
            Prompts that it is computed from.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def to_dict(self) -> dict:
        interval = None if self.low is None else [self.low, self.high]
        return {"value": self.value, "interval": interval, "n": self.n}


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a model did on a task.

    Args:
        scores (`list[float | None]`, *optional*):
            Score of every prompt, `None` where there is none; `None` if only the mean is known.
        mean (`float`, *optional*):
            The score, if it is not the mean of `scores`.
        stderr (`float`, *optional*):
            Standard error of `mean`.
        n (`int`, *optional*, defaults to `0`):
            Prompts behind `mean`.
        higher_is_better (`bool`, *optional*, defaults to `True`):
            Whether a higher score is a better one; of perplexity it is not.
    """

    scores: list[float | None] | None = None
    mean: float | None = None
    stderr: float | None = None
    n: int = 0
    higher_is_better: bool = True


def mean_of(measured: Measurement) -> Estimate:
    """Mean score."""
    if measured.scores is not None:
        return _mean([score for score in measured.scores if score is not None])
    return _normal(measured.mean, measured.stderr, measured.n)


def difference(measured: Measurement, reference: Measurement) -> Estimate:
    """Mean score less that of a reference: paired by prompt, or as of independent samples if only means are known."""
    if measured.scores is not None and reference.scores is not None:
        return _mean([one - other for one, other in _pairs(measured.scores, reference.scores)])
    one, other = mean_of(measured), mean_of(reference)
    if one.value is None or other.value is None:
        return Estimate(None, None, None, 0)
    half_widths = [estimate.high - estimate.value for estimate in (one, other) if estimate.high is not None]
    stderr = math.hypot(*half_widths) / _NORMAL if len(half_widths) == 2 else None
    return _normal(one.value - other.value, stderr, min(one.n, other.n))


def retained_gain(merged: Measurement, agent: Measurement, base: Measurement) -> Estimate:
    """(merged - base) / (agent - base) on the agent's own task, with Fieller's interval.

    The interval is `None` where the agent's own gain is not distinguishable from zero, or only means are known.
    """
    if merged.scores is None or agent.scores is None or base.scores is None:
        gain, own = difference(merged, base), difference(agent, base)
        if gain.value is None or not own.value:
            return Estimate(None, None, None, gain.n)
        return Estimate(gain.value / own.value, None, None, gain.n)
    triples = [
        (one - zero, own - zero)
        for one, own, zero in zip(merged.scores, agent.scores, base.scores, strict=True)
        if one is not None and own is not None and zero is not None
    ]
    if not triples:
        return Estimate(None, None, None, 0)
    gains, n = np.array(triples, np.float64), len(triples)
    gain, own = gains.mean(axis=0).tolist()
    if own == 0:
        return Estimate(None, None, None, n)
    ratio = gain / own
    if n < 2:
        return Estimate(ratio, None, None, n)
    # of the means; t * t times them
    (var_gain, covariance), (_, var_own) = (np.cov(gains, rowvar=False) / n * _quantile(n - 1) ** 2).tolist()
    a, b, c = own * own - var_own, own * gain - covariance, gain * gain - var_gain
    if a <= 0:
        return Estimate(ratio, None, None, n)
    root = math.sqrt(max(0.0, b * b - a * c))
    return Estimate(ratio, (b - root) / a, (b + root) / a, n)


def _pairs(scores: Sequence[float | None], others: Sequence[float | None]) -> list[tuple[float, float]]:
    pairs = zip(scores, others, strict=True)
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def _mean(values: list[float]) -> Estimate:
    n = len(values)
    if not n:
        return Estimate(None, None, None, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half_width = _quantile(n - 1) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half_width, mean + half_width, n)


def _normal(mean: float | None, stderr: float | None, n: int) -> Estimate:
    if mean is None or stderr is None:
        return Estimate(mean, None, None, n)
    return Estimate(mean, mean - _NORMAL * stderr, mean + _NORMAL * stderr, n)


@functools.cache
def _quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t distribution."""
    if freedom > _MANY:
        return _NORMAL
    # With t = sqrt(freedom) * tan(angle) the density is cos(angle) ** (freedom - 1), over angles of 0 to 90 degrees.
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(0.95, below / below[-1], angles))
