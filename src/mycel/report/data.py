"""What a report is made of: two training runs, bandwidth measurements, the fabric and one schedule on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mycel.bench.measurement import Measurement
from mycel.brief import brief
from mycel.collectives.schedule import Schedule
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["Evaluation", "Report", "Step", "TrainingRun"]

#: Relative difference of the final losses up to which two runs count as having trained the same model.
SAME_LOSS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step.

    Attributes:
        step: counted from 1.
        loss: nats a byte on the batch, mean over ranks.
        step_s: seconds on the slowest rank.
        elapsed_s: since training began.
    """

    step: int
    loss: float
    step_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One look at the held-out text.

    Attributes:
        step: steps done before it.
        bits_per_byte: cross entropy on text that is never trained on.
        elapsed_s: since training began.
    """

    step: int
    bits_per_byte: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training over one backend.

    Attributes:
        backend: name given to ``init_process_group``.
        settings: what rank 0 said at the start: sizes of model, batch and gradient.
        alone_s: seconds of forward and backward without communication, with all ranks at work.
    """

    backend: str
    settings: Mapping[str, Any]
    alone_s: tuple[float, ...]
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]

    __repr__ = brief

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> TrainingRun:
        """A run from the records its rank 0 printed.

        Raises:
            UsageError: the run did not get as far as a step and an evaluation.
        """
        settings: dict[str, Any] = {}
        alone: tuple[float, ...] = ()
        steps, evaluations = [], []
        for record in records:
            fields = {key: value for key, value in record.items() if key != "event"}
            match record.get("event"):
                case "start":
                    settings = fields
                case "alone":
                    alone = tuple(fields["seconds"])
                case "step":
                    steps.append(Step(**fields))
                case "eval":
                    evaluations.append(Evaluation(**fields))
        if not settings or not alone or not steps or not evaluations:
            raise UsageError("the records of the training run are incomplete: it ended before its first steps")
        return cls(
            backend=settings["backend"],
            settings=settings,
            alone_s=alone,
            steps=tuple(steps),
            evaluations=tuple(evaluations),
        )

    @property
    def median_step_s(self) -> float:
        """Seconds a step, median."""
        return statistics.median(step.step_s for step in self.steps)

    @property
    def alone_step_s(self) -> float:
        """Seconds of forward and backward without communication, median."""
        return statistics.median(self.alone_s)

    @property
    def total_s(self) -> float:
        """Seconds from the first step to the last."""
        return self.steps[-1].elapsed_s

    @property
    def final_loss(self) -> float:
        """Held-out loss at the end, nats a byte."""
        return self.evaluations[-1].bits_per_byte * math.log(2)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with everything."""
        return {
            "backend": self.backend,
            "settings": dict(self.settings),
            "alone_s": list(self.alone_s),
            "median_step_s": self.median_step_s,
            "final_bits_per_byte": self.evaluations[-1].bits_per_byte,
            "steps": [asdict(step) for step in self.steps],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a report says.

    Attributes:
        topology: the fabric; on loopback, the one that could not be emulated.
        emulated: whether its links were shaped. If not, no figure here says anything about the fabric.
        why_not_emulated: in words; empty where it was.
        schedule: whose first tree is drawn; ``None`` draws the fabric alone.
        baseline, ours: two runs of the same training.
        measurements: bandwidths, measured; never simulated.
        bounds: algorithm bandwidth that no schedule exceeds, by collective, in the topology's unit.
        hardware, versions: of this machine.
    """

    topology: Topology
    emulated: bool
    why_not_emulated: str
    schedule: Schedule | None
    baseline: TrainingRun
    ours: TrainingRun
    measurements: tuple[Measurement, ...]
    bounds: Mapping[str, float]
    hardware: str
    versions: Mapping[str, str]

    __repr__ = brief

    @property
    def speedup(self) -> float:
        """Median step of the baseline over median step of ours."""
        return self.baseline.median_step_s / self.ours.median_step_s

    @property
    def loss_difference(self) -> float:
        """Relative difference of the final held-out losses."""
        return abs(self.ours.final_loss - self.baseline.final_loss) / abs(self.baseline.final_loss)

    @property
    def headline(self) -> str:
        """One sentence that says what was measured."""
        names = f"{self.ours.backend} over {self.baseline.backend.capitalize()}"
        if not self.emulated:
            return f"Same training, {names}, on loopback: no fabric was emulated"
        if self.speedup >= 1.05:
            same = "same loss, " if self.loss_difference <= SAME_LOSS else ""
            return f"Same training, {same}steps {self.speedup:.1f}x faster: {names}"
        return f"Same training, {names}: steps take {1 / self.speedup:.2f}x the time"

    @property
    def loss_sentence(self) -> str:
        """Whether the two runs computed the same thing, in numbers."""
        difference = self.loss_difference
        if difference == 0:
            return "final held-out losses are identical"
        agree = "agree" if difference <= SAME_LOSS else "do not agree"
        return f"final held-out losses {agree} to {difference:.1e}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object with everything but the schedule."""
        return {
            "topology": self.topology.name,
            "fingerprint": self.topology.fingerprint,
            "unit": self.topology.unit,
            "world_size": self.topology.num_ranks,
            "emulated": self.emulated,
            "why_not_emulated": self.why_not_emulated,
            "speedup": self.speedup,
            "loss_relative_difference": self.loss_difference,
            "baseline": self.baseline.to_json(),
            "ours": self.ours.to_json(),
            "bounds": dict(self.bounds),
            "rows": [m.to_json() for m in self.measurements],
            "hardware": self.hardware,
            "versions": dict(self.versions),
        }
