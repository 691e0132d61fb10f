"""Refine: measured trials of a search's best few, led by the model, until no other can be expected to win."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mycel.arguments import whole_number
from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.job import RECOMPUTE
from mycel.planning.search.found import Candidate, Found
from mycel.planning.search.guide import Guide

__all__ = ["Failure", "Refined", "Trial", "features_of", "refine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A trial that gave no time.

    Attributes:
        reason: why, such as ``out of memory``.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial.

    Attributes:
        candidate: that was run.
        seconds: measured; 0 where it failed.
        predicted_s: by the model, before any trial.
        failure: why it gave no time; empty where it did.
    """

    candidate: Candidate
    seconds: float
    predicted_s: float
    failure: str = ""

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """Result of measured trials.

    Attributes:
        best: the fastest that was measured.
        seconds: of a step of it, measured.
        trials: all of them, in order.
        num_failures: of those, that gave no time.
        is_settled: no other candidate can be expected to win; else the trials ran out.
        corrected_s: what each candidate is expected to take now, in their order.
    """

    best: Candidate
    seconds: float
    trials: tuple[Trial, ...]
    num_failures: int
    is_settled: bool
    corrected_s: tuple[float, ...]

    __repr__ = brief


def refine(
    found: Found | Sequence[Candidate],
    run: Callable[[Candidate], float | Failure],
    *,
    max_trials: int | None = None,
    told: Callable[[Trial], None] | None = None,
) -> Refined:
    """Measure the candidates that may be the fastest, correcting the model by each trial.

    Args:
        found: a search's result, or candidates.
        run: measures one: seconds of a step, or why there are none.
        max_trials: at most; all candidates if not given.
        told: called after every trial.

    Raises:
        UsageError: no candidates, no trial gave a time, or a time that is not above 0.

    References:
        Dash et al., "Optimizing Distributed Training on Frontier for Large Language Models", 2023, section IV
        (measured search over the same parameters, failures counted); here the model takes the place of random trials.
    """
    candidates = tuple(found.candidates if isinstance(found, Found) else found)
    if not candidates:
        raise UsageError("there are no candidates to measure: search first")
    most = len(candidates) if max_trials is None else whole_number(max_trials, "max_trials", least=1)
    guide = Guide(
        features=features_of(candidates),
        predicted=np.array([one.seconds.seconds for one in candidates]),
        error=max(one.seconds.error for one in candidates),
        memory=np.array([float(max(one.memory)) for one in candidates]),
    )
    trials: list[Trial] = []
    is_settled = False
    while len(trials) < most:
        row = guide.next()
        if row is None:
            is_settled = True
            break
        result = run(candidates[row])
        predicted = candidates[row].seconds.seconds
        if isinstance(result, Failure):
            guide.has_failed(row)
            trials.append(Trial(candidate=candidates[row], seconds=0.0, predicted_s=predicted, failure=result.reason))
        else:
            if not 0 < result < float("inf"):
                raise UsageError(f"a trial took {result!r} s; a time is a number above 0, what fails is a Failure")
            guide.measured(row, result)
            trials.append(Trial(candidate=candidates[row], seconds=result, predicted_s=predicted))
        if told is not None:
            told(trials[-1])
    else:
        is_settled = guide.next() is None
    best = guide.best
    if best is None:
        reasons = ", ".join(sorted({trial.failure for trial in trials}))
        raise UsageError(f"none of {len(trials)} trials gave a time: {reasons}")
    mean, _ = guide.corrected()
    return Refined(
        best=candidates[best],
        seconds=guide.seconds[best],
        trials=tuple(trials),
        num_failures=len(guide.failed),
        is_settled=is_settled,
        corrected_s=tuple(float(value) for value in np.exp(mean)),
    )


def features_of(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """By what candidates are alike: degrees, micro-batch, chunks, pieces in powers of two, recomputation, sharding.

    Args:
        candidates: one row each.
    """
    rows = []
    for one in candidates:
        job, mesh = one.job, one.job.mesh
        sizes = (mesh.pp, mesh.dp, mesh.tp, mesh.cp, mesh.ep, job.micro_batch, job.chunks, job.coshard)
        policy = [2.0 * (job.recompute == name) for name in RECOMPUTE]
        rows.append([*np.log2(sizes), *policy, float(job.zero >= 2), 2.0 * job.is_offloaded])
    return np.array(rows, dtype=float)
