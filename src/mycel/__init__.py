"""mycel: provably optimal collective communication on the cluster you really have.

The plan side (topologies, bounds, schedules, verification) is imported from here and needs no torch; the run side
is ``mycel.runtime``: importing it registers the ``torch.distributed`` backend ``mycel``.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
