"""Orders found by search: the shortest period of a placement, and the shortest schedule of a batch, with proofs."""

from __future__ import annotations

from mycel.pipeline.search.batch import Batch, find_batch
from mycel.pipeline.search.modulo import Repetend
from mycel.pipeline.search.progress import Progress
from mycel.pipeline.search.steady import Steady, find_steady

__all__ = ["Batch", "Progress", "Repetend", "Steady", "find_batch", "find_steady"]
