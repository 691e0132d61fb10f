"""Documents over ranks: who holds which piece, what each needs of the others, and how even that is."""

from mycel.planning.sequence.balanced import balanced
from mycel.planning.sequence.contiguous import contiguous
from mycel.planning.sequence.grouped import grouped
from mycel.planning.sequence.layout import Layout, Segment, agree
from mycel.planning.sequence.mask import CAUSAL, FULL, Mask
from mycel.planning.sequence.needs import (
    Meeting,
    Piece,
    bytes_by_rank,
    imbalance,
    meetings,
    predecessors,
    work_by_rank,
)
from mycel.planning.sequence.per_document import per_document_zigzag
from mycel.planning.sequence.zigzag import zigzag

__all__ = [
    "CAUSAL",
    "FULL",
    "Layout",
    "Mask",
    "Meeting",
    "Piece",
    "Segment",
    "agree",
    "balanced",
    "bytes_by_rank",
    "contiguous",
    "grouped",
    "imbalance",
    "meetings",
    "per_document_zigzag",
    "predecessors",
    "work_by_rank",
    "zigzag",
]
