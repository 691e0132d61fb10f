"""Ensembles with a member a rank: who learns an example, what the members know together, and how well."""

from __future__ import annotations

from mycel.data_parallel.ensemble.choice import MultipleChoice
from mycel.data_parallel.ensemble.members import Ensemble
from mycel.data_parallel.ensemble.scores import EnsembleScores

__all__ = ["Ensemble", "EnsembleScores", "MultipleChoice"]
