"""Layers that are solved for: ridge layers whose parts merge exactly over ranks and over time, in one exchange.

::

    parts = closed_form.merge_over_ranks(closed_form.ridge_parts(x, targets))
    layer = closed_form.ridge_linear(parts, ridge=1.0)
"""

from __future__ import annotations

from mycel.data_parallel.closed_form.over_ranks import exchange_numbers, merge_over_ranks
from mycel.data_parallel.closed_form.parts import RidgeParts, merge_parts, ridge_parts
from mycel.data_parallel.closed_form.probe import linear_probe
from mycel.data_parallel.closed_form.solve import oriented, principal_directions, ridge_linear, solve_ridge

__all__ = [
    "RidgeParts",
    "exchange_numbers",
    "linear_probe",
    "merge_over_ranks",
    "merge_parts",
    "oriented",
    "principal_directions",
    "ridge_linear",
    "ridge_parts",
    "solve_ridge",
]
