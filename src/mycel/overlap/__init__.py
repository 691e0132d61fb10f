"""Products and collectives in one operator, each tile's exchange beside another's computation.

::

    y = mycel.overlap.all_gather_matmul(x, up.weight.t(), group=tensor_ranks)
    z = mycel.overlap.matmul_reduce_scatter(y.relu(), down.weight.t(), residual=x, group=tensor_ranks)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from mycel.overlap.compiled import CompilePass, compile_pass
    from mycel.overlap.styles import OverlappedColwise, OverlappedRowwise

__all__ = [
    "CompilePass",
    "Lamb",
    "Norm",
    "OverlappedColwise",
    "OverlappedRowwise",
    "SlicedOptimizer",
    "Tiling",
    "all_gather_matmul",
    "compile_pass",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "plan_tiles",
    "receive_slices",
    "reduce_scatter_update_all_gather",
    "send_slices",
]

#: What imports torch's compiler or DTensor, which takes seconds: when it is asked for.
_LATER = {
    "CompilePass": "compiled",
    "OverlappedColwise": "styles",
    "OverlappedRowwise": "styles",
    "compile_pass": "compiled",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'mycel.overlap' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"mycel.overlap.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
