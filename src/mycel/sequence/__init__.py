"""Sequences that no rank can hold: attention, scans of states and halos over the ranks of a layout.

::

    layout = mycel.planning.sequence.per_document_zigzag(lengths, num_ranks)
    context = mycel.sequence.SequenceContext(layout, group)
    tokens = context.shard(batch)
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.sequence", "torch")

from mycel.planning.sequence import CAUSAL, FULL, Layout, Mask, Segment
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax import Explanation, Shape, Way, attention, explain, shape_of, tune_attention

__all__ = [
    "CAUSAL",
    "FULL",
    "Explanation",
    "Layout",
    "Mask",
    "Segment",
    "SequenceContext",
    "Shape",
    "Way",
    "attention",
    "explain",
    "shape_of",
    "tune_attention",
]
