"""Linear attention in all its forms over a layout, and any kernel of it that takes and gives a state."""

from mycel.sequence.linear.attention import linear_attention
from mycel.sequence.linear.kernel import parallel_scan

__all__ = ["linear_attention", "parallel_scan"]
