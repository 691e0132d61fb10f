"""One program that drives all ranks: handles to what they hold, calls in one order, futures; Monarch is the engine.

::

    with mycel.controller.Controller(4) as cluster:
        model = cluster.mesh.call(build, width=512)       # what ``build`` returns stays on the ranks
        for step in range(100):
            loss = cluster.mesh.call(train, model, step)  # runs ahead: nobody waits
        print(loss.result())                              # one value a rank
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.controller", "torch")

from mycel.controller.controller import Controller
from mycel.controller.credits import Credits
from mycel.controller.current import Current, current
from mycel.controller.mesh import Mesh
from mycel.controller.reference import Reference

__all__ = ["Controller", "Credits", "Current", "Mesh", "Reference", "current"]
