"""Direct feedback alignment for stages on ranks: one broadcast in place of a pipeline's backward pass."""

from __future__ import annotations

from mycel.parallel.direct_feedback.errors import feedback_bytes, feedback_matrix
from mycel.parallel.direct_feedback.step import DirectFeedback

__all__ = ["DirectFeedback", "feedback_bytes", "feedback_matrix"]
