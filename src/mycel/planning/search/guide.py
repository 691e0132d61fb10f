"""Which trial to make next: the model's prediction, corrected by what trials have shown so far, with its uncertainty.

What a trial takes is the model's prediction times a factor, and the factors of similar ways to train are alike: their
logarithms are a Gaussian process over the degrees (in powers of two), about 0 and as wide as the error that the model
was seen to make. Trials condition it. The next is the one that may be the fastest, at ``posterior mean - spread``;
when not even that is below the best measured one, no other can be expected to win.

References:
    Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006, equations 2.22 to 2.24; Srinivas et al.,
    "Gaussian Process Optimization in the Bandit Setting", ICML 2010 (the lower bound as what to try).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Guide", "posterior"]

Numbers = NDArray[np.float64]
#: Distance in features (doublings) over which factors are alike, and what repeated trials differ by, relative.
_LENGTH, _NOISE = 1.0, 0.01
#: Of the spread, what is set against the mean in choosing, and in stopping: 97.5 of 100 are below the latter.
_TRY, _STOP = 0.5, 2.0


def posterior(features: Numbers, rows: NDArray[np.int_], values: Numbers, scale: float) -> tuple[Numbers, Numbers]:
    """Mean and spread of a Gaussian process about 0 at all rows, after its values at some.

    Args:
        features: of all rows, one column a feature.
        rows: that are known.
        values: there.
        scale: spread before anything is known.
    """
    count = len(features)
    if not len(rows):
        return np.zeros(count), np.full(count, scale)
    gaps = ((features[:, None, :] - features[None, rows, :]) ** 2).sum(axis=2)
    alike = scale**2 * np.exp(-0.5 * gaps / _LENGTH**2)
    known = alike[rows] + _NOISE**2 * np.eye(len(rows))
    weights = np.linalg.solve(known, alike.T).T
    mean = weights @ values
    spread = np.sqrt(np.maximum(scale**2 - (weights * alike).sum(axis=1), 0.0))
    return mean, spread


@dataclass(kw_only=True)
class Guide:
    """Ways to train, what the model says of each, and the trials made so far.

    Attributes:
        features: one row a way: degrees in powers of two and the like.
        predicted: seconds by the model.
        error: relative, that its predictions were seen to have.
        memory: bytes of the fullest rank of each way; 0 where it is not known.

    Examples:
        >>> guide = Guide(features=np.arange(3.0)[:, None], predicted=np.array([1.0, 1.1, 3.0]), error=0.2)
        >>> guide.next()
        0
        >>> guide.measured(0, 1.0); guide.next(), guide.measured(1, 0.9), guide.next()
        (1, None, None)
    """

    features: Numbers
    predicted: Numbers
    error: float
    memory: Numbers | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    @property
    def best(self) -> int | None:
        """The fastest trial; ``None`` before any."""
        return min(self.seconds, key=lambda row: self.seconds[row]) if self.seconds else None

    def corrected(self) -> tuple[Numbers, Numbers]:
        """Logarithms of seconds as they are expected now, and the spread of them."""
        rows = np.array(sorted(self.seconds), dtype=int)
        ratios = np.array([np.log(self.seconds[row] / self.predicted[row]) for row in rows])
        # What all trials have in common is the model's, not the ways': it changes no order.
        common = float(np.median(ratios)) if len(ratios) else 0.0
        mean, spread = posterior(self.features, rows, ratios - common, max(self.error, 1e-3))
        return np.log(self.predicted) + common + mean, spread

    def next(self, *, is_endless: bool = False) -> int | None:
        """The way to try next; ``None`` when no other can be expected to win.

        Args:
            is_endless: until all have been tried.
        """
        mean, spread = self.corrected()
        left = np.ones(len(self.predicted), dtype=bool)
        left[[*self.seconds, *self.failed]] = False
        if self.memory is not None and self.failed:
            # What holds at least as much as something that ran out of memory comes last.
            least = min(self.memory[row] for row in self.failed)
            is_large = (self.memory >= least) & (self.memory > 0)
            left &= ~is_large | bool(np.all(is_large[left]))
        if not left.any():
            return None
        hope = np.where(left, mean - _TRY * spread, np.inf)
        best = None if is_endless else self.best
        if best is not None and np.min(np.where(left, mean - _STOP * spread, np.inf)) >= np.log(self.seconds[best]):
            return None
        return int(np.argmin(hope))

    def measured(self, row: int, seconds: float) -> None:
        """A trial's result."""
        self.seconds[row] = seconds

    def has_failed(self, row: int) -> None:
        """A trial that gave none, such as one that ran out of memory."""
        self.failed.add(row)
