"""Unchanged models on divided sequences: torch's own calls, layers of transformers, its trainer."""

from mycel.sequence.models.applied import AppliedSequence, apply
from mycel.sequence.models.trainer import SequenceTrainer

__all__ = ["AppliedSequence", "SequenceTrainer", "apply"]
