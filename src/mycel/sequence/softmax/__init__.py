"""Softmax attention over the ranks of a layout: ring, all_gather in slices, needed tokens, Ulysses, and both."""

from mycel.sequence.softmax.attention import attention
from mycel.sequence.softmax.ways import Way

__all__ = ["Way", "attention"]
