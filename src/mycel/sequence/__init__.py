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
from mycel.sequence.convolution import LocalizedFiltering, causal_conv1d
from mycel.sequence.degrees import SequenceDegrees
from mycel.sequence.grouped import MicroBatch, SequenceStep, planned_step, steps
from mycel.sequence.halo import halo
from mycel.sequence.linear import linear_attention, parallel_scan
from mycel.sequence.models import (
    AppliedSequence,
    SequenceTrainer,
    ServedContextParallel,
    apply,
    serve_context_parallel,
)
from mycel.sequence.scan import explain_scan, scan
from mycel.sequence.softmax import Explanation, Shape, Way, attention, explain, shape_of, tune_attention

__all__ = [
    "CAUSAL",
    "FULL",
    "AppliedSequence",
    "Explanation",
    "Layout",
    "LocalizedFiltering",
    "Mask",
    "MicroBatch",
    "Segment",
    "SequenceContext",
    "SequenceDegrees",
    "SequenceStep",
    "SequenceTrainer",
    "ServedContextParallel",
    "Shape",
    "Way",
    "apply",
    "attention",
    "causal_conv1d",
    "explain",
    "explain_scan",
    "halo",
    "linear_attention",
    "parallel_scan",
    "planned_step",
    "scan",
    "serve_context_parallel",
    "shape_of",
    "steps",
    "tune_attention",
]
