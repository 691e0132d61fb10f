"""Compiles what ranks need ahead of time, so that many of them starting at once find it in numba's cache."""

from __future__ import annotations

import numpy as np

from mycel.collectives.lower import RankTemplate
from mycel.collectives.proof import prove_lowering
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import verify_schedule
from mycel.runtime import engine as e
from mycel.runtime.calibration import measure_costs
from mycel.runtime.forms import Form
from mycel.topology.builders import loopback

__all__ = ["warm"]


def warm() -> None:
    """Compile what ranks need, or load it from numba's cache; some seconds the first time on a machine.

    Examples:
        Once on each node, before all of its ranks start::

            python -c "import mycel.runtime; mycel.runtime.warm()"
            torchrun --nproc-per-node 8 train.py
    """
    fields = np.zeros(e.JOB_FIELDS, dtype=np.int64)
    spare = np.zeros(64, dtype=np.int64)
    for address in (
        e.J_ROWS,
        e.J_PENDING0,
        e.J_PENDING,
        e.J_DEPENDENT_START,
        e.J_DEPENDENTS,
        e.J_QUEUE_START,
        e.J_QUEUE,
        e.J_CHANNELS,
        e.J_POLL,
        e.J_EXTRAS,
    ):
        fields[address] = spare.ctypes.data
    fields[e.J_WORK] = fields.ctypes.data + (e.J_WORK + 1) * 8
    e.execute(fields.ctypes.data)
    ring = np.zeros(e.RING_SLOTS + e.RING_CAPACITY, dtype=np.int64)
    ring[e.RING_STOP] = 1
    e.submit(ring.ctypes.data, fields.ctypes.data)
    ring[e.RING_COMPLETED] = ring[e.RING_SUBMITTED]
    e.serve(ring.ctypes.data, 0, 0)
    measure_costs()
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        schedule = synthesize(loopback(num_ranks=3), Collective(name=name, num_ranks=3))
        verify_schedule(schedule)
        prove_lowering(schedule)
        plan = RankTemplate(schedule, 0)
        Form(plan, [-1] * len(plan.channels), spare[:1]).prepare(schedule.collective.total_weight, 1, 4)
