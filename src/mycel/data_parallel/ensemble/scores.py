"""How good an ensemble is: together, at best, and whether it is as right as it is sure.

References:
    C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, arXiv 1706.04599, section 2 (expected
    calibration error).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.brief import brief

__all__ = ["EnsembleScores", "score"]

_BINS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleScores:
    """What an ensemble is worth on some examples.

    Attributes:
        num_examples: how many.
        top1_error: share that is wrong by the mean of the members' probabilities.
        oracle_error: share that every member is wrong about.
        calibration_error: mean distance between how sure the mean is and how often it is right, in 15 bins.
        member_errors: share that each member is wrong about, alone.

    Examples:
        >>> EnsembleScores(
        ...     num_examples=2, top1_error=0.5, oracle_error=0.0, calibration_error=0.1, member_errors=(0.5, 0.5)
        ... ).top1_error
        0.5
    """

    num_examples: int
    top1_error: float
    oracle_error: float
    calibration_error: float
    member_errors: tuple[float, ...]

    __repr__ = brief


def score(probabilities: Tensor, targets: Tensor) -> EnsembleScores:
    """Scores of members whose probabilities are all here.

    Args:
        probabilities: of all members, ``[M, B, C]``.
        targets: right classes, ``[B]``.

    Examples:
        >>> both = torch.tensor([[[0.9, 0.1], [0.9, 0.1]], [[0.2, 0.8], [0.4, 0.6]]])
        >>> found = score(both, torch.tensor([0, 1]))
        >>> found.top1_error, found.oracle_error, found.member_errors
        (0.5, 0.0, (0.5, 0.5))
    """
    exact = probabilities.double()
    is_right = exact.argmax(2) == targets
    mean = exact.mean(0)
    sure, said = mean.max(1)
    right = (said == targets).double()
    bins = (sure * _BINS).long().clamp_max(_BINS - 1)
    apart = torch.zeros(_BINS, dtype=torch.float64, device=mean.device).scatter_add_(0, bins, right - sure)
    count = len(targets)
    return EnsembleScores(
        num_examples=count,
        top1_error=1 - float(right.mean()),
        oracle_error=1 - float(is_right.any(0).double().mean()),
        calibration_error=float(apart.abs().sum()) / count,
        member_errors=tuple(1 - float(each) for each in is_right.double().mean(1)),
    )
