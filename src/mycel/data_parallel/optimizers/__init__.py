"""Optimizers for which little travels: Dion's factors of low rank, Muon's work divided among ranks."""

from __future__ import annotations

from mycel.data_parallel.optimizers.attach import Attached
from mycel.data_parallel.optimizers.groups import matrix_groups
from mycel.data_parallel.optimizers.matrix import Dion, MatrixOptimizer, Muon

__all__ = ["Attached", "Dion", "MatrixOptimizer", "Muon", "matrix_groups"]
