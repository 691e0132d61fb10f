"""Compiles what ranks need before anybody waits for them, or loads it where that has been done on the machine."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from mycel.collectives.lower import RankTemplate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.runtime import engine as e
from mycel.runtime import job_fields as j
from mycel.runtime import job_ring, p2p_carry, p2p_stream
from mycel.runtime.calibration import measure_costs
from mycel.runtime.forms import Form
from mycel.runtime.prepared import Line, asking
from mycel.topology.builders import loopback

__all__ = ["load", "warm"]

Ints = npt.NDArray[np.int64]


def warm() -> None:
    """Compile what ranks need, or load it from the disk; some seconds the first time on a machine.

    Ranks do so when their first group is made, where one of a machine compiles and the others wait for it. Before
    that, it is done for all that start later, and for those that are forked.

    Examples:
        Once on each node, before all of its ranks start::

            python -c "import mycel.runtime; mycel.runtime.warm()"
            torchrun --nproc-per-node 8 train.py
    """
    fields = _run_an_empty_job()
    ring = np.zeros(job_ring.RING_SLOTS + job_ring.RING_CAPACITY, dtype=np.int64)
    ring[job_ring.RING_STOP] = 1
    job_ring.submit(ring.ctypes.data, fields.ctypes.data)
    ring[job_ring.RING_COMPLETED] = ring[job_ring.RING_SUBMITTED]
    job_ring.serve(ring.ctypes.data, 0, 0)
    pattern = fields.copy()  # of a job that is done
    e.again(pattern.ctypes.data, fields.ctypes.data, 0, 0)
    p2p_stream.load()
    p2p_carry.load()
    schedule = synthesize(loopback(num_ranks=2), Collective(name="all_reduce", num_ranks=2))
    plan = RankTemplate(schedule, 0)
    lines, extras = [Line(-1)] * len(plan.channels), np.full(1, -1, dtype=np.int64)
    Form(plan, lines, extras, asking(1, -1)).prepare(plan.schedule.collective.total_weight, 1, 4)
    measure_costs()


def load() -> None:
    """Have the engine ready, before anything with a deadline begins: all of it compiled, where it was not.

    What the first call does not need is loaded when it is needed, from the disk, which takes milliseconds.
    """
    _run_an_empty_job()
    if e.execute.was_compiled:  # type: ignore[attr-defined]  # of a standalone function
        _warm_once()


@cache
def _warm_once() -> None:
    """For the first group of the process that compiles; not for those that follow, nor for its children."""
    warm()


def _run_an_empty_job() -> Ints:
    fields = np.zeros(j.JOB_FIELDS, dtype=np.int64)
    spare = np.zeros(64, dtype=np.int64)
    for address in (
        j.J_ROWS,
        j.J_PENDING0,
        j.J_PENDING,
        j.J_DEPENDENT_START,
        j.J_DEPENDENTS,
        j.J_QUEUE_START,
        j.J_QUEUE,
        j.J_CHANNELS,
        j.J_POLL,
        j.J_EXTRAS,
        j.J_ASKING,
    ):
        fields[address] = spare.ctypes.data
    fields[j.J_WORK] = fields.ctypes.data + (j.J_WORK + 1) * 8
    e.execute(fields.ctypes.data)
    return fields
