"""The time of a step with its uncertainty: what a planner compares, and what it prints."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mycel.errors import UsageError
from mycel.planning.job import Job
from mycel.planning.machines.machine import Fit, Machine
from mycel.planning.models.shape import ModelShape
from mycel.planning.step.links import Links
from mycel.planning.step.points import Points
from mycel.planning.step.times import Times, step_times
from mycel.units import format_seconds

__all__ = ["Prediction", "predict_step", "predict_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds that something is expected to take, and how wrong such predictions were.

    Attributes:
        seconds: expected.
        error: relative, the mean about measured steps that a fit had not seen; an assumption where ``num_rows`` is 0.
        parts: seconds by part, which add up; empty where there are none.
        num_rows: measured steps that the fit was made of.
        source: which.

    Raises:
        UsageError: seconds or an error below 0.

    Examples:
        >>> print(Prediction(seconds=2.0, error=0.05))
        2 s +- 5 %
        >>> Prediction(seconds=2.0, error=0.05).low
        1.9
    """

    seconds: float
    error: float
    parts: dict[str, float] | None = None
    num_rows: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.error >= 0):
            raise UsageError(f"a prediction of {self.seconds} s with an error of {self.error}: both must be from 0")

    @property
    def low(self) -> float:
        """Seconds less the error."""
        return self.seconds * (1.0 - self.error)

    @property
    def high(self) -> float:
        """Seconds and the error."""
        return self.seconds * (1.0 + self.error)

    def __str__(self) -> str:
        return f"{format_seconds(self.seconds)} +- {self.error * 100:.3g} %"


def predict_step(
    shape: ModelShape, job: Job, machine: Machine, *, way: str | None = None, links: Links | None = None
) -> Prediction:
    """The time of one step of a job.

    Args:
        shape: the model.
        job: how it is trained.
        machine: what it runs on.
        way: of running models, by the name of one of the machine's fits; the usual one if not given.
        links: the wires, where a topology is given (``mycel.planning.step.wires.Wires``); else the machine's rates.

    Raises:
        UsageError: the model cannot be shared so, or the machine has no such fit.

    Examples:
        >>> from mycel.planning.job import Mesh
        >>> from mycel.planning.machines import load_machine
        >>> from mycel.planning.models import named
        >>> job = Job(mesh=Mesh(dp=8), global_batch=16, micro_batch=2, seq=8192, recompute="alternate", zero=3)
        >>> step = predict_step(named("llama3-8b"), job, load_machine("h100"))
        >>> step.num_rows, 2 < step.seconds < 4, sum(step.parts.values()) == step.seconds
        (15, True, True)
    """
    return predict_steps([(shape, job)], machine, way=way, links=links)[0]


def predict_steps(
    jobs: list[tuple[ModelShape, Job]], machine: Machine, *, way: str | None = None, links: Links | None = None
) -> list[Prediction]:
    """The times of many jobs at once; see ``predict_step``.

    Raises:
        UsageError: a model cannot be shared so, or the machine has no such fit.
    """
    for shape, job in jobs:
        job.check(shape)
    fit = machine.fit(way)
    times = step_times(Points.of(jobs), machine.device, links or machine.rates, fit.coefficients)
    return [_prediction(times, row, fit) for row in range(len(jobs))]


def _prediction(times: Times, row: int, fit: Fit) -> Prediction:
    parts = {f.name: float(getattr(times, f.name)[row]) for f in fields(Times)}
    return Prediction(
        seconds=sum(parts.values()), error=fit.mean_error, parts=parts, num_rows=fit.num_rows, source=fit.source
    )
