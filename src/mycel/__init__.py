"""mycel: provably optimal collective communication on the cluster you really have.

The plan side is here and needs no torch::

    import mycel

    fabric = mycel.load_topology("two_boxes:ranks=8,inside=400 Mbit/s,between=50 Mbit/s")
    print(mycel.bound(fabric, "all_gather").explain())
    schedule = mycel.synthesize(fabric, "all_gather")
    mycel.verify_schedule(schedule)

The run side is ``mycel.runtime``: importing it registers the ``torch.distributed`` backend ``mycel``.

Functions, values and packages are imported when they are first asked for: ``import mycel`` itself imports nothing
heavier than the exceptions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mycel.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    EmulationError,
    MismatchError,
    MissingExtraError,
    MycelError,
    PeerLostError,
    ScheduleError,
    SynthesisError,
    TopologyError,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from mycel import (
        bench,
        data_parallel,
        demo,
        elastic,
        emulate,
        moe,
        overlap,
        parallel,
        pipeline,
        probe,
        report,
        runtime,
        sequence,
    )
    from mycel.collectives.bound import Bound, bound
    from mycel.collectives.export import export
    from mycel.collectives.lower import lower
    from mycel.collectives.program import Program
    from mycel.collectives.schedule import Schedule
    from mycel.collectives.select import Selection, select
    from mycel.collectives.simulate import Simulation, simulate
    from mycel.collectives.spec import Collective
    from mycel.collectives.synth import synthesize
    from mycel.collectives.verify import verify_programs, verify_schedule
    from mycel.runtime.arena import empty
    from mycel.topology.load import load_topology
    from mycel.topology.model import Link, Topology, Vertex

#: The only place where the version is written: the build reads it from here.
__version__ = "0.1.0"
__all__ = [
    "Bound",
    "Collective",
    "CollectiveTimeoutError",
    "CommunicationError",
    "EmulationError",
    "Link",
    "MismatchError",
    "MissingExtraError",
    "MycelError",
    "PeerLostError",
    "Program",
    "Schedule",
    "ScheduleError",
    "Selection",
    "Simulation",
    "SynthesisError",
    "Topology",
    "TopologyError",
    "UsageError",
    "VerificationError",
    "Vertex",
    "__version__",
    "bench",
    "bound",
    "data_parallel",
    "demo",
    "elastic",
    "empty",
    "emulate",
    "export",
    "load_topology",
    "lower",
    "moe",
    "overlap",
    "parallel",
    "pipeline",
    "probe",
    "report",
    "runtime",
    "select",
    "sequence",
    "simulate",
    "synthesize",
    "verify_programs",
    "verify_schedule",
]

_PACKAGES = (
    "bench",
    "data_parallel",
    "demo",
    "elastic",
    "emulate",
    "moe",
    "overlap",
    "parallel",
    "pipeline",
    "probe",
    "report",
    "runtime",
    "sequence",
)
_HOMES = {
    "collectives.bound": ("Bound", "bound"),
    "collectives.export": ("export",),
    "collectives.lower": ("lower",),
    "collectives.program": ("Program",),
    "collectives.schedule": ("Schedule",),
    "collectives.select": ("Selection", "select"),
    "collectives.simulate": ("Simulation", "simulate"),
    "collectives.spec": ("Collective",),
    "collectives.synth": ("synthesize",),
    "collectives.verify": ("verify_programs", "verify_schedule"),
    "runtime.arena": ("empty",),
    "topology.load": ("load_topology",),
    "topology.model": ("Link", "Topology", "Vertex"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None and name not in _PACKAGES:
        raise AttributeError(f"module 'mycel' has no attribute {name!r}")
    try:
        found = import_module(f"mycel.{home or name}")
    except ModuleNotFoundError as error:
        from mycel.extras import without

        raise without(error, f"mycel.{name}") or error from None
    if home is None:
        return found
    value = globals()[name] = getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
