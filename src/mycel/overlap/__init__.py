"""Products and collectives in one operator, each tile's exchange beside another's computation.

::

    y = mycel.overlap.all_gather_matmul(x, up.weight.t(), group=tensor_ranks)
    z = mycel.overlap.matmul_reduce_scatter(y.relu(), down.weight.t(), residual=x, group=tensor_ranks)
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.overlap", "torch")

from mycel.overlap.all_gather_matmul import all_gather_matmul
from mycel.overlap.boundary import receive_slices, send_slices
from mycel.overlap.epilogue import Norm
from mycel.overlap.lamb import Lamb
from mycel.overlap.matmul_all_reduce import matmul_all_reduce
from mycel.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from mycel.overlap.tiling import Tiling, plan_tiles
from mycel.overlap.update import SlicedOptimizer, reduce_scatter_update_all_gather

__all__ = [
    "Lamb",
    "Norm",
    "SlicedOptimizer",
    "Tiling",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "plan_tiles",
    "receive_slices",
    "reduce_scatter_update_all_gather",
    "send_slices",
]
