"""What a training loop needs where each rank has a part of the experts: whole states, norms over all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mycel.errors import UsageError
from mycel.moe.experts import parameters_of_experts
from mycel.moe.hugging_face.applied import applied_to
from mycel.moe.hugging_face.stacks import gather_stack
from mycel.moe.hugging_face.transformers_api import trainer_callback_class
from mycel.moe.layer import update_balancing

__all__ = ["clip_grad_norm", "full_state_dict", "trainer_callback"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of the whole model, on every rank: what ``save_pretrained(folder, state_dict=...)`` wants.

    All ranks call it. A state of this rank's experts alone is ``model.state_dict()``;
    ``mycel.moe.experts_apart`` makes entries for distributed checkpoints of it.

    Args:
        model: to which ``mycel.moe.apply`` was applied.

    Raises:
        UsageError: it was not.
    """
    applied = applied_to(model)
    state = {name: _plain(v) if isinstance(v, Tensor) else v for name, v in model.state_dict().items()}
    if applied.group is None:
        return state
    for path in parameters_of_experts(model):
        parent, _, name = path.rpartition(".")
        state[path] = gather_stack(model.get_submodule(parent), name, state[path].detach(), applied.group)
    return state


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for models whose experts are divided: one norm, over all ranks' experts.

    Torch's own takes each rank's norm for the whole, scales every rank's gradients differently, and parameters that
    all ranks have drift apart. All ranks call this one. Replicas of an expert count once.

    Args:
        model: to which ``mycel.moe.apply`` was applied.
        max_norm: of all gradients together, in the Euclidean norm.

    Returns:
        The norm before.

    Raises:
        UsageError: ``apply`` was not called on it.
    """
    applied = applied_to(model)
    stacks = {id(p) for b in applied.blocks for p in b.experts.parameters(recurse=False)} if applied.group else set()
    dense = [p for p in model.parameters() if id(p) not in stacks]
    norm = _plain(torch.nn.utils.get_total_norm([p.grad for p in dense if p.grad is not None]))
    if applied.group is not None:
        squares = torch.cat([_squares(b.experts, b.num_experts) for b in applied.blocks])
        dist.all_reduce(squares, group=applied.group)
        of_experts = (squares[:, 0] / squares[:, 1].clamp_min(1)).sum()
        norm = (norm.double().square() + of_experts).sqrt().float()
    # One after the other: FSDP2 may have sharded them over different meshes, which no operator takes together.
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
    torch.nn.utils.clip_grads_with_norm_([p for p in model.parameters() if id(p) in stacks], max_norm, norm)
    return norm


def _squares(experts: Any, num_experts: int) -> Tensor:
    """For each expert of the layer its squared norm here and how often it is here, shape ``[E, 2]``."""
    parameters = list(experts.parameters(recurse=False))
    found = torch.zeros(num_experts, 2, dtype=torch.float64, device=parameters[0].device)
    grads = [p.grad.detach().double().flatten(1).square().sum(dim=1) for p in parameters if p.grad is not None]
    rows = sum((_plain(grad) for grad in grads), start=found.new_zeros(len(experts.owned)))
    for slot, expert in enumerate(experts.owned):
        if expert >= 0:
            found[expert] += torch.stack([rows[slot], found.new_tensor(1 / experts.shard[1])])  # slices make one
    return found


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trainer_callback(model: nn.Module) -> Any:
    """A callback for ``transformers.Trainer``: ``update_balancing`` after each step, and norms over all ranks.

    It takes ``max_grad_norm`` from the trainer's arguments for the time of training, because the trainer would clip
    each rank by a norm of its own.

    Args:
        model: to which ``mycel.moe.apply`` was applied, and which the trainer trains.

    Raises:
        UsageError: ``apply`` was not called on it; when training begins, if the trainer is to write checkpoints,
            which would be of one rank's experts.
    """
    applied = applied_to(model)
    base: Any = trainer_callback_class()

    class MoECallback(base):  # type: ignore[misc]
        max_norm: float | None = None

        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            if applied.group is None:
                return
            if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
                raise UsageError(
                    f"save_strategy={args.save_strategy!r}: the trainer writes the experts of one rank only; set it "
                    "to 'no', and save full_state_dict(model) or restore the model before it is saved"
                )
            self.max_norm, args.max_grad_norm = args.max_grad_norm, 0.0

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if self.max_norm:
                clip_grad_norm(model, self.max_norm)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            update_balancing(model)

        def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
            if self.max_norm is not None:
                args.max_grad_norm, self.max_norm = self.max_norm, None

    return MoECallback()
