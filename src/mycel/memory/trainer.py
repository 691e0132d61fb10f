"""Transformers' ``Trainer`` within a budget: a callback that calls ``fit`` when training begins."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.sharded import is_fully_sharded
from mycel.errors import UsageError
from mycel.extras import transformers_module
from mycel.memory.fit import Fitted, fit
from mycel.memory.needs import loss_of
from mycel.memory.needs.trace import Batch, Loss
from mycel.memory.tiers import FarMemory, Link

__all__ = ["trainer_callback"]

#: Examples that are looked at for the longest ones.
_LOOKED = 1000


def trainer_callback(
    *,
    budget: int,
    batch: Batch | None = None,
    link: Link | None = None,
    loss: Loss = loss_of,
    far: FarMemory | None = None,
    slots: int | None = None,
) -> Any:
    """A callback for ``transformers.Trainer``, with which it trains any model within a budget of near memory.

    ``fit`` is called when the trainer has its model and optimizer ready, with as many micro-batches as it
    accumulates. Losses are those of training without it. ``callback.fitted`` says what was chosen; it stays at work
    after training, for evaluation and saving, until ``callback.fitted.close()`` or the next training.
    Ranks do not share sequences here, as ``fit`` with ``degrees`` has them do: a trainer calls its model with whole
    batches.

    Args:
        budget: bytes of near memory, of each rank.
        batch: arguments of the model, by name, of the size that a micro-batch has at most; if not given, what the
            trainer collates of the longest of the first 1000 examples.
        link: between near and far memory, as ``fit`` takes it.
        loss: of the model's output, where the trainer computes another than the model's own.
        far: lends far memory.
        slots: of a ring of units, as ``fit`` takes them.

    Raises:
        UsageError: when training begins: an iterable data set without a ``batch``, or several ranks whose model is
            not sharded by FSDP2.

    Examples:
        ::

            callback = trainer_callback(budget=8 << 30)
            Trainer(model, TrainingArguments("out"), train_dataset=data, callbacks=[callback]).train()
            print(callback.fitted.explain())
    """
    base: Any = transformers_module("transformers", "TrainerCallback").TrainerCallback

    class MemoryCallback(base):  # type: ignore[misc]
        fitted: Fitted | None = None

        def on_train_begin(self, args: Any, *_: Any, **given: Any) -> None:
            model = given["model"]
            if dist.is_initialized() and dist.get_world_size() > 1 and not is_fully_sharded(model):
                raise UsageError(
                    f"{type(model).__name__} is trained by {dist.get_world_size()} ranks with all parameters each: "
                    "shard it (fsdp with fsdp_version 2), and a budget is kept on every rank"
                )
            if self.fitted is not None:
                self.fitted.close()
            with _drawing_nothing():
                sample = _longest(given["train_dataloader"], args) if batch is None else batch
                self.fitted = fit(
                    model,
                    _plain(given["optimizer"]),
                    sample,
                    budget=budget,
                    link=link,
                    loss=loss,
                    micro_batches=args.gradient_accumulation_steps,
                    far=far,
                    slots=slots,
                )

    return MemoryCallback()


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Torch's own, of what accelerate has put round it."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else _plain(inner)


def _longest(loader: Any, args: Any) -> dict[str, Any]:
    """A micro-batch of the longest examples, on the device that trains."""
    data = loader.dataset
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise UsageError(
            f"{type(data).__name__} cannot be looked into: give trainer_callback a batch=, of the largest size"
        )
    looked = [data[place] for place in range(min(len(data), _LOOKED))]
    looked.sort(key=_length, reverse=True)
    made = loader.collate_fn(looked[: args.per_device_train_batch_size])
    if not isinstance(made, Mapping):
        raise UsageError(f"batches are {type(made).__name__}, not mappings: give trainer_callback a batch=")
    return {name: value.to(args.device) if isinstance(value, Tensor) else value for name, value in made.items()}


def _length(example: Any) -> int:
    values = example.values() if isinstance(example, Mapping) else [example]
    return sum(value.numel() if isinstance(value, Tensor) else len(value) for value in values if _has_length(value))


def _has_length(value: Any) -> bool:
    return isinstance(value, Sized) and not (isinstance(value, Tensor) and value.dim() == 0)


@contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Whatever is drawn at random inside, training draws as if it had not been."""
    import numpy as np

    state, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(arrays)
