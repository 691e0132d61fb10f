"""Combiners of tasks: a rank, or a group of ranks, holds a task, and the tasks' gradients become one. One a file."""

from __future__ import annotations

from mycel.data_parallel.combine.tasks.aligned_mtl import AlignedMTL
from mycel.data_parallel.combine.tasks.base import TaskCombiner
from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.by_loss import ByLoss
from mycel.data_parallel.combine.tasks.cagrad import CAGrad
from mycel.data_parallel.combine.tasks.famo import FAMO
from mycel.data_parallel.combine.tasks.grad_norm import GradNorm
from mycel.data_parallel.combine.tasks.gradvac import GradVac
from mycel.data_parallel.combine.tasks.imtl_g import IMTLG
from mycel.data_parallel.combine.tasks.mgda import MGDA
from mycel.data_parallel.combine.tasks.nash_mtl import NashMTL
from mycel.data_parallel.combine.tasks.pcgrad import PCGrad
from mycel.data_parallel.combine.tasks.uncertainty import UncertaintyWeighting
from mycel.data_parallel.combine.tasks.upgrad import UPGrad

__all__ = [
    "FAMO",
    "IMTLG",
    "MGDA",
    "AlignedMTL",
    "ByGram",
    "ByLoss",
    "CAGrad",
    "GradNorm",
    "GradVac",
    "NashMTL",
    "PCGrad",
    "TaskCombiner",
    "UPGrad",
    "UncertaintyWeighting",
]
