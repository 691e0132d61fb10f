"""Carries a plan out on a model: pipelines of stages in any order.

::

    planned = mycel.parallel.apply(model, plan, optimizer=torch.optim.AdamW)
    planned.step(batch, target)

    pipeline = mycel.parallel.Pipeline(order, {stage: module}, loss)
    pipeline.step(batch, target=target)
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.parallel", "torch")

from mycel.parallel.controller import Controller, Gang, Job, serve
from mycel.parallel.description import describe
from mycel.parallel.pipeline import Pipeline
from mycel.parallel.planned import Paced, Planned, apply, paced
from mycel.parallel.record import ActionTime, Flight, planned_times
from mycel.parallel.shared import SharedBlock, Step

__all__ = [
    "ActionTime",
    "Controller",
    "Flight",
    "Gang",
    "Job",
    "Paced",
    "Pipeline",
    "Planned",
    "SharedBlock",
    "Step",
    "apply",
    "describe",
    "paced",
    "planned_times",
    "serve",
]
