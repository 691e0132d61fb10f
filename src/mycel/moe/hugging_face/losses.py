"""Balancing losses in the model's own output: ``outputs.loss`` has them, so that any training loop does, too."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mycel.errors import UsageError
from mycel.moe.hugging_face.routers import ALL, WatchedRouter
from mycel.moe.layer import moe_loss

__all__ = ["add_losses"]

#: Arguments of models that say how long sequences are, and how many dimensions they have.
_SHAPED = {"input_ids": 2, "inputs_embeds": 3}


def add_losses(model: nn.Module, routers: Sequence[WatchedRouter]) -> list[RemovableHandle]:
    """Before each call: what padding is, and no old losses. After a training call with labels: the losses added.

    With ``num_items_in_batch``, as ``Trainer`` passes it when gradients are accumulated over several calls, a call's
    losses count by its share of the tokens; the sum over calls is their weighted mean.
    """
    # Objects of this module and no closures: applied models pickle.
    return [
        model.register_forward_pre_hook(_Before(tuple(routers)), with_kwargs=True),
        model.register_forward_hook(_with_losses, with_kwargs=True),
    ]


class _Before:
    def __init__(self, routers: tuple[WatchedRouter, ...]) -> None:
        self.routers = routers

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = _argument(model, "attention_mask", args, kwargs)
        counted = None
        by_sequence = any(policy.by_sequence for router in self.routers for policy in router.mycel_policies)
        sequence = _sequences(model, mask, args, kwargs) if by_sequence else None
        if model.training and torch.is_grad_enabled() and isinstance(mask, Tensor) and mask.dim() == 2:
            counted = mask.reshape(-1).bool()
            counted = None if bool(counted.all()) else counted
        tokens = ALL if counted is None and sequence is None else (counted, sequence)
        for router in self.routers:
            router.mycel_tokens = tokens
            router.loss = router.loss.new_zeros(())


def _sequences(model: nn.Module, mask: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Of each token of a training call the number of its sequence, by the shape of what has one.

    Raises:
        UsageError: nothing has.
    """
    if not (model.training and torch.is_grad_enabled()):
        return None
    shaped = [(mask, 2), *((_argument(model, name, args, kwargs), dim) for name, dim in _SHAPED.items())]
    for like, dim in shaped:
        if isinstance(like, Tensor) and like.dim() == dim:
            return torch.arange(like.shape[0], device=like.device).repeat_interleave(like.shape[1])
    raise UsageError(
        f"{type(model).__name__}: a policy of balance looks at sequences, and the call has none of attention_mask "
        "and input_ids [batch, tokens] or inputs_embeds [batch, tokens, width] that would tell them"
    )


def _with_losses(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    labels = _argument(model, "labels", args, kwargs)
    if not (model.training and torch.is_grad_enabled() and isinstance(labels, Tensor)):
        return output
    task = getattr(output, "loss", None)
    if task is None:
        raise UsageError(
            f"{type(model).__name__}: labels were given and there is no output.loss to add balancing losses to; "
            "call it with return_dict=True"
        )
    balance = moe_loss(model)
    shifted = kwargs.get("shift_labels")
    counted = labels[..., 1:] if shifted is None else shifted  # labels of causal models are shifted by one
    output.loss = task + (balance * _share(counted, kwargs.get("num_items_in_batch"))).to(task)
    if hasattr(output, "aux_loss"):
        output.aux_loss = balance
    return output


def _argument(model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs or not args:
        return kwargs.get(name)
    return inspect.signature(model.forward).bind_partial(*args).arguments.get(name)


def _share(labels: Tensor, num_items: Any) -> Any:
    """Of this call in the tokens of a step, by its shifted labels."""
    if num_items is None:
        return 1.0
    counted = labels.ne(-100).sum()
    return counted / (num_items.to(counted.device) if isinstance(num_items, Tensor) else num_items)
