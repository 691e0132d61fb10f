"""Steps whose groups of ranks have different degrees: planned ahead, agreed on, carried out side by side."""

from mycel.sequence.grouped.ahead import steps
from mycel.sequence.grouped.step import MicroBatch, SequenceStep, planned_step

__all__ = ["MicroBatch", "SequenceStep", "planned_step", "steps"]
