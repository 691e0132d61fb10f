"""Transformers' ``Trainer`` on divided sequences: one class beside it in the bases of one's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.errors import UsageError
from mycel.sequence.models.applied import AppliedSequence

__all__ = ["SequenceTrainer"]


class SequenceTrainer:
    """What ``transformers.Trainer`` does otherwise where ranks share sequences; stands before it among the bases.

    Ranks of a group get the same batches, each computes on its own tokens, and what the trainer counts and logs
    (tokens seen, losses, examples of a step) is of whole batches. Evaluation gives losses; logits of whole sequences
    are on no rank.

    Args:
        sequence: what ``mycel.sequence.apply`` gave for the trainer's model.

    Raises:
        UsageError: the trainer is to compute metrics of logits, to smooth labels, or to find losses by a function; or
            it does not know that there are other ranks.

    Examples:
        A trainer as any other, on sequences over all ranks::

            class LongTrainer(SequenceTrainer, Trainer):
                pass


            handle = mycel.sequence.apply(model)
            LongTrainer(model, TrainingArguments("out"), train_dataset=data, sequence=handle).train()
    """

    def __init__(self, *args: Any, sequence: AppliedSequence, **kwargs: Any) -> None:
        self.sequence = sequence
        super().__init__(*args, **kwargs)
        base: Any = self
        if base.compute_metrics is not None or base.label_smoother is not None or base.compute_loss_func is not None:
            raise UsageError(
                "SequenceTrainer: compute_metrics, label_smoothing_factor and compute_loss_func look at logits of "
                "whole sequences, which are on no rank; use the model's own loss"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self._accelerator.num_processes != ranks:
            raise UsageError(
                f"SequenceTrainer: the trainer takes itself for one of {self._accelerator.num_processes} processes, "
                f"and the group has {ranks}: gradients would not be averaged; start ranks with torchrun, or set "
                "LOCAL_RANK, RANK and WORLD_SIZE as it does"
            )

    def get_cp_size(self) -> int:
        """Ranks that have the same batches."""
        return self.sequence.num_ranks

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The library's loader, which divides batches over groups of ranks instead of over ranks."""
        base: Any = super()
        accelerator = self._accelerator
        accelerator.prepare_data_loader = lambda loader, *_, **__: self._prepared(loader)
        try:
            return base._get_dataloader(*args, **kwargs)
        finally:
            del accelerator.prepare_data_loader  # of this object; that of its class is there again

    @property
    def _accelerator(self) -> Any:
        me: Any = self
        return me.accelerator

    def _prepared(self, loader: Any) -> Any:
        accelerator, size = self._accelerator, self.sequence.num_ranks
        prepare = importlib.import_module("accelerate.data_loader").prepare_data_loader
        made = prepare(
            loader,
            accelerator.device,
            num_processes=accelerator.num_processes // size,
            process_index=self.sequence.replica,
            put_on_device=True,
            rng_types=list(accelerator.rng_types),
            dispatch_batches=False,  # every rank reads what it needs
            even_batches=True,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
        )
        accelerator._dataloaders.append(made)
        return made

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Labels that count of all batches until the optimizer's step, none of them over a border."""
        if not batch_samples or "labels" not in batch_samples[0]:
            raise UsageError(
                "SequenceTrainer needs batches with labels, from which each rank takes its part of the loss"
            )
        counts = [self.sequence.count_labels(batch) for batch in batch_samples]
        return torch.stack(counts).sum().to(device)

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of this rank's tokens, whose mean over ranks is that of the step."""
        made = self.sequence.shard(dict(inputs), num_labels_of_step=num_items_in_batch)
        outputs = model(**made)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, None, None]:
        """Losses alone."""
        me: Any = self
        inputs = me._prepare_inputs(inputs)
        with torch.no_grad():
            return self.sequence.average(me.compute_loss(model, inputs)), None, None

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Each token once, though all ranks of a group have it."""
        base: Any = super()
        state = self._state
        before = state.num_input_tokens_seen
        base._track_num_input_tokens(inputs)
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self.sequence.num_ranks

    @property
    def _state(self) -> Any:
        me: Any = self
        return me.state
