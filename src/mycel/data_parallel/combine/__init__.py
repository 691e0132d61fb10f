"""Combiners: how replicas' gradients, or the changes they have made to a model, become one. One kind a file."""

from __future__ import annotations

from mycel.data_parallel.combine.adasum import Adasum
from mycel.data_parallel.combine.base import Combiner
from mycel.data_parallel.combine.ddp import CombinedGradients, combine_gradients
from mycel.data_parallel.combine.mean import Mean, Sum
from mycel.data_parallel.combine.model_combiner import ModelCombiner
from mycel.data_parallel.combine.now import combine_now, combine_tasks
from mycel.data_parallel.combine.rows import combine_rows
from mycel.data_parallel.combine.tasks import (
    FAMO,
    IMTLG,
    MGDA,
    AlignedMTL,
    CAGrad,
    GradNorm,
    GradVac,
    NashMTL,
    PCGrad,
    UncertaintyWeighting,
    UPGrad,
)

__all__ = [
    "FAMO",
    "IMTLG",
    "MGDA",
    "Adasum",
    "AlignedMTL",
    "CAGrad",
    "CombinedGradients",
    "Combiner",
    "GradNorm",
    "GradVac",
    "Mean",
    "ModelCombiner",
    "NashMTL",
    "PCGrad",
    "Sum",
    "UPGrad",
    "UncertaintyWeighting",
    "combine_gradients",
    "combine_now",
    "combine_rows",
    "combine_tasks",
]
