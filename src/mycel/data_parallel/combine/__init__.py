"""Combiners: how replicas' gradients, or the changes they have made to a model, become one. One kind a file."""

from __future__ import annotations

from mycel.data_parallel.combine.adasum import Adasum
from mycel.data_parallel.combine.base import Combiner
from mycel.data_parallel.combine.ddp import CombinedGradients, combine_gradients
from mycel.data_parallel.combine.mean import Mean, Sum
from mycel.data_parallel.combine.model_combiner import ModelCombiner
from mycel.data_parallel.combine.rows import combine_rows

__all__ = [
    "Adasum",
    "CombinedGradients",
    "Combiner",
    "Mean",
    "ModelCombiner",
    "Sum",
    "combine_gradients",
    "combine_rows",
]
