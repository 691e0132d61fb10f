"""Training by a plan: what a rank's part of the model is, how it is shared, and the steps of training."""

from mycel.parallel.planned.apply import Planned, apply
from mycel.parallel.planned.pace import Paced, paced

__all__ = ["Paced", "Planned", "apply", "paced"]
