"""Training by a plan: what a rank's part of the model is, how it is shared, and the steps of training."""

from mycel.parallel.planned.apply import Planned, apply

__all__ = ["Planned", "apply"]
