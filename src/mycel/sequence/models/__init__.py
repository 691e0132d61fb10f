"""Unchanged models on divided sequences: torch's own calls, layers of transformers, its trainer."""

from mycel.sequence.models.applied import AppliedSequence, apply
from mycel.sequence.models.context_parallel import ServedContextParallel, serve_context_parallel
from mycel.sequence.models.trainer import SequenceTrainer

__all__ = ["AppliedSequence", "SequenceTrainer", "ServedContextParallel", "apply", "serve_context_parallel"]
