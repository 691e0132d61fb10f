"""Carries a plan out on a model: pipelines of stages in any order.

::

    pipeline = mycel.parallel.Pipeline(order, {stage: module}, loss)
    pipeline.step(batch, target=target)
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.parallel", "torch")

from mycel.parallel.pipeline import Pipeline
from mycel.parallel.record import ActionTime, Flight
from mycel.parallel.shared import SharedBlock, Step

__all__ = ["ActionTime", "Flight", "Pipeline", "SharedBlock", "Step"]
