"""What a training loop needs where each rank has a part of the experts: one norm, and the whole state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.divided import DividedExperts, divided_experts
from mycel.moe.sharded import mesh_of, plain, trained
from mycel.moe.stacks import gather_stack

__all__ = ["clip_grad_norm", "full_state_dict", "grad_norm"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of the whole model, on every rank: experts of all ranks, and what FSDP2 sharded, put together.

    All ranks call it; it is what ``save_pretrained(folder, state_dict=...)`` wants. A state of this rank's experts
    alone is ``model.state_dict()``; ``mycel.moe.experts_apart`` makes entries for distributed checkpoints of it.

    Args:
        model: with MoE layers; or of Hugging Face, after ``mycel.moe.apply``; or a wrapper around it.

    Raises:
        UsageError: experts that are divided have adapters, each of which belongs to the experts of one rank.

    Examples:
        >>> from mycel.moe import MoE
        >>> layer = MoE(dim=4, hidden=8, num_experts=2)
        >>> list(full_state_dict(layer)) == list(layer.state_dict())
        True
    """
    state = {name: plain(v) if isinstance(v, Tensor) else v for name, v in model.state_dict().items()}
    for divided in divided_experts(model):
        if divided.adapters:
            raise UsageError(
                f"{divided.adapters[0]} adapts the experts of this rank alone, and no other rank has such; save "
                "each rank's model.state_dict(), or merge adapters into the experts first"
            )
        for name, stack in divided.stacks.items():
            state[name] = gather_stack(divided.experts, stack, state[name].detach(), divided.group)
    return state


@torch.no_grad()
def grad_norm(model: nn.Module) -> Tensor:
    """Euclidean norm of all gradients of a model, the same on all ranks, however its parameters are divided.

    Parameters that all ranks have count once, those that FSDP2 or tensor parallelism shards by all their shards, over
    any meshes, and every expert of every rank once, whether it is cut into slices or has replicas. All ranks call it.

    Args:
        model: with MoE layers; or of Hugging Face, after ``mycel.moe.apply``; or a wrapper around it.

    Returns:
        A scalar; 0 without gradients.

    Raises:
        UsageError: a dispatcher made elsewhere does not say over which ranks experts are divided.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> grad_norm(model)
        tensor(5.)
    """
    divided = list(divided_experts(model))
    apart = {name for one in divided for name in one.names}
    shared = [trained(p) for name, p in model.named_parameters() if name not in apart]
    dense = [p.grad for p in shared if p.grad is not None]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for some in _by_mesh(dense):
        squares += plain(torch.nn.utils.get_total_norm(some)).double().square()
    for of_experts in _squares_of_groups(model, divided):
        squares += of_experts.to(device)
    wide = torch.float64 if any(g.dtype == torch.float64 for g in dense) else torch.float32
    return squares.sqrt().to(wide)


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for models whose parameters are divided: one norm, ``grad_norm``.

    Torch's own takes each rank's norm for the whole, scales every rank's gradients differently, and parameters that
    all ranks have drift apart. All ranks call this one, after gradients were averaged (and after a scaler's
    ``unscale_``).

    Args:
        model: with MoE layers; or of Hugging Face, after ``mycel.moe.apply``; or a wrapper around it.
        max_norm: of all gradients together, in the Euclidean norm.

    Returns:
        The norm before.

    Raises:
        UsageError: as ``grad_norm``.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> clip_grad_norm(model, 0.5), model.weight.grad
        (tensor(5.), tensor([[0.3000, 0.4000]]))
    """
    norm = grad_norm(model)
    with torch.no_grad():
        # One after the other: no operator takes tensors of several meshes together.
        for some in _by_mesh([p for p in map(trained, model.parameters()) if p.grad is not None]):
            torch.nn.utils.clip_grads_with_norm_(some, max_norm, norm)
    return norm


def _by_mesh(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """In the order of the first of each: the same on all ranks."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(mesh_of(tensor), []).append(tensor)
    return found.values()


def _squares_of_groups(model: nn.Module, divided: Sequence[DividedExperts]) -> Iterable[Tensor]:
    """Squared norms of the layers that each group divides, in one all_reduce a group."""
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for one in divided:
        groups.setdefault(one.group, []).append(_squares(model, one))
    for group, found in groups.items():
        together = torch.cat(found)
        dist.all_reduce(together, group=group)
        yield (together[:, 0] / together[:, 1].clamp_min(1)).sum()


def _squares(model: nn.Module, divided: DividedExperts) -> Tensor:
    """For each expert of the layer, and last for adapters, the squared norm here and how often it counts here."""
    experts: Any = divided.experts
    stacks = [trained(model.get_parameter(name)) for name in divided.stacks]
    near = next(iter(divided.stacks))
    found = torch.zeros(experts.num_experts + 1, 2, dtype=torch.float64, device=model.get_parameter(near).device)
    grads = [p.grad.detach().double().flatten(1).square().sum(dim=1) for p in stacks if p.grad is not None]
    rows = sum((plain(grad).to(found.device) for grad in grads), start=found.new_zeros(len(experts.owned)))
    for slot, expert in enumerate(experts.owned):
        if expert >= 0:
            found[expert] += torch.stack([rows[slot], found.new_tensor(1 / experts.shard[1])])  # slices make one
    for name in divided.adapters:  # each rank has its own
        grad = model.get_parameter(name).grad
        if grad is not None:
            found[-1, 0] += plain(grad.detach().double().square().sum())
    return found
