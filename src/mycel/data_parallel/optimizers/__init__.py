"""Optimizers for which little travels: Dion's factors, Muon's shares, DeMo's frequencies, signs of 1-bit Adam."""

from __future__ import annotations

from mycel.data_parallel.optimizers.attach import Attached
from mycel.data_parallel.optimizers.groups import matrix_groups
from mycel.data_parallel.optimizers.matrix import Dion, MatrixOptimizer, Muon
from mycel.data_parallel.optimizers.momentum import DeMo, OneBitAdam

__all__ = ["Attached", "DeMo", "Dion", "MatrixOptimizer", "Muon", "OneBitAdam", "matrix_groups"]
