"""Softmax attention over the ranks of a layout: ring, all_gather in slices, needed tokens, Ulysses, and both."""

from mycel.sequence.softmax.attention import attention
from mycel.sequence.softmax.choose import Explanation, explain, shape_of, tune_attention
from mycel.sequence.softmax.predict import Shape
from mycel.sequence.softmax.ways import Way

__all__ = ["Explanation", "Shape", "Way", "attention", "explain", "shape_of", "tune_attention"]
