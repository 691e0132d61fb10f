"""``apply`` and ``restore``: a loaded Hugging Face model gets mycel's experts, and its own ones back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from mycel.comm.groups import flat_group
from mycel.comm.messages import all_gather_single
from mycel.comm.meter import ByteMeter
from mycel.errors import UsageError
from mycel.moe.balance import LoadBalancing, policies_of
from mycel.moe.dispatch import TokenDispatcher
from mycel.moe.experts import take_own
from mycel.moe.hugging_face.backend import ForeignExperts, experts_forward
from mycel.moe.hugging_face.blocks import Block, find_blocks
from mycel.moe.hugging_face.losses import add_losses
from mycel.moe.hugging_face.routers import WatchedRouter, check_policies, unwatch, watch
from mycel.moe.hugging_face.transformers_api import BACKEND, experts_registry
from mycel.moe.parallel import ExpertParallel
from mycel.moe.sharded import is_sharded
from mycel.moe.stacks import gather_stack, keep_own, require_no_graph

__all__ = ["Applied", "applied_to", "apply", "restore"]


@dataclass(slots=True, kw_only=True, repr=False)
class Applied:
    """What ``apply`` did to a model, for those who look, and until it is closed.

    Attributes:
        blocks: mixture-of-experts blocks, in the model's order.
        group: ranks that the experts are divided over; ``None``: they are whole.
    """

    blocks: tuple[Block, ...]
    group: dist.ProcessGroup | None
    _model: nn.Module
    _own_backend: Any
    _handles: list[RemovableHandle] = field(default_factory=list)
    _attributes: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Applied({type(self._model).__name__}, {len(self.blocks)} blocks)"

    @property
    def meter(self) -> ByteMeter:
        """Bytes sent so far by all blocks together; a copy."""
        total = ByteMeter()
        for block in self.blocks:
            total.sent.update(block.dispatcher.meter.sent)
        return total

    def explain(self) -> str:
        """For every block what was chosen for which load, and why; without a tuner, its schedule."""
        foreign = [(block.experts_path, cast(Any, block.experts).mycel_experts) for block in self.blocks]
        return "\n".join(f"{path}: {(f.chooser.explain() if f.chooser else f.routed.default)}" for path, f in foreign)

    def close(self) -> None:
        """Take back what ``apply`` did; see ``restore``.

        Raises:
            UsageError: it was taken back before, or ``fully_shard`` came afterwards.
        """
        if getattr(self._model, "mycel_applied", None) is not self:
            raise UsageError(f"{type(self._model).__name__}: what apply did to it was taken back before")
        _take_back(self._model, self)


def applied_to(model: nn.Module) -> Applied:
    """What was applied to a model, or to the one that a wrapper (DDP, a compiled module) holds.

    Raises:
        UsageError: nothing.
    """
    return _find_applied(model)[1]


def _find_applied(model: nn.Module) -> tuple[nn.Module, Applied]:
    for module in model.modules():
        applied = getattr(module, "mycel_applied", None)
        if isinstance(applied, Applied):
            return module, applied
    raise UsageError(f"{type(model).__name__}: mycel.moe.apply has not been called on it, or restore has")


def apply(
    model: nn.Module,
    *,
    parallel: ExpertParallel | DeviceMesh | None = None,
    balancing: LoadBalancing | Sequence[LoadBalancing] = (),
) -> Applied:
    """Give a loaded Hugging Face model mycel's experts: its own arithmetic, exchanges and balance.

    The model stays the object it is. Its experts compute through a backend called ``mycel`` in the library's own
    registry; with a mesh, each rank keeps its share of every layer's experts, or slices of them, and frees the rest,
    and parameters stay the objects they are. Routers become a subclass of their class. The entries of ``state_dict``
    keep their names.

    Losses of policies are added to ``output.loss`` of training calls with labels, in place of the model's own
    ``router_aux_loss_coef``; ``update_balancing(model)`` after an optimizer step moves biases.

    Call it before wrappers (DDP, ``fully_shard``) and before optimizers have state. DDP then leaves experts alone,
    whatever is wrapped around the model.

    Args:
        model: of ``transformers``, with stacked experts (version 5).
        parallel: how experts are divided over ranks, as for ``mycel.moe.MoE``; a mesh means ``ExpertParallel(mesh)``.
            All ranks hold the same model now.
        balancing: policies; every router gets copies. ``ExpertBias`` moves the router's own
            ``e_score_correction_bias``.

    Returns:
        Its ``blocks``, ``meter`` and ``explain()``; ``close()`` undoes it, as ``restore(model)``.

    Raises:
        UsageError: the model is not understood (says which module, and what was looked for), settings do not fit
            together, or ranks hold different models. The model is then as it was.

    Examples:
        A model is given other experts, and computes what it did::

            model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
            applied = apply(model, parallel=init_device_mesh("cpu", (dist.get_world_size(),)))
            logits = model(tokens).logits
            print(applied.meter.total(), "bytes sent,", len(applied.blocks), "blocks")
            applied.close()
    """
    parallel = ExpertParallel.of(parallel)
    if any(isinstance(getattr(module, "mycel_applied", None), Applied) for module in model.modules()):
        raise UsageError(f"{type(model).__name__}: mycel.moe.apply was called on it before; restore it first")
    set_backend = getattr(model, "set_experts_implementation", None)
    if set_backend is None:
        raise UsageError(
            f"{type(model).__name__} is no Hugging Face model with exchangeable experts: looked for "
            "set_experts_implementation, which those of transformers 5 have; apply before wrapping"
        )
    experts_registry().register(BACKEND, experts_forward)
    policies = policies_of(balancing)
    blocks = find_blocks(model, routers=bool(policies))  # without policies nothing depends on what routers do
    for block in blocks if policies else ():
        check_policies(block, policies)
    if isinstance(parallel.dispatcher, TokenDispatcher) and len(blocks) > 1:
        raise UsageError(f"{len(blocks)} layers cannot share a dispatcher; give what makes one from num_experts")
    foreign = [ForeignExperts(block.experts, block.num_experts, parallel) for block in blocks]
    divided = any(f.routed.layout.num_ranks > 1 or list(f.owned) != list(range(f.num_experts)) for f in foreign)
    group, mesh = None, parallel.mesh
    if divided:
        ranks = foreign[0].routed.layout.num_ranks
        if mesh is None or mesh.size() != ranks:
            raise UsageError(
                f"the dispatchers are for {ranks} ranks, the mesh has {0 if mesh is None else mesh.size()}; give "
                "apply the mesh that they were made for"
            )
        adapted = next((block for block in blocks if block.adapted), None)
        if adapted is not None:
            raise UsageError(
                f"{adapted.experts_path}: adapters stand around experts that are to be divided, and are for all of "
                "them; call apply first, then add adapters, which are then for each rank's own experts"
            )
        for block in blocks:
            require_no_graph(block.experts, block.experts_path)
        group = flat_group(mesh)
        _check_alike(model, blocks, group)

    applied = Applied(blocks=blocks, group=group, _model=model, _own_backend=_backend_of(model))
    set_backend(BACKEND)
    stuck = [block for block in blocks if cast(Any, block.experts).config._experts_implementation != BACKEND]
    if stuck:
        set_backend(applied._own_backend)
        raise UsageError(
            f"{stuck[0].experts_path} ({type(stuck[0].experts).__name__}): model.set_experts_implementation did not "
            "reach it; looked for its config's _experts_implementation"
        )
    for block, held in zip(blocks, foreign, strict=True):
        experts = cast(Any, block.experts)
        experts.mycel_experts, experts.cuts = held, held.cuts
        experts.routed, experts.shard = held.routed, held.routed.shard
        if divided:
            experts.owned = held.owned
            keep_own(block.experts, experts.owned, held.cuts, experts.shard)
            applied._handles.append(experts.register_load_state_dict_pre_hook(take_own))
        if policies:
            watch(block, policies)
    if policies:
        applied._handles += add_losses(model, [cast(WatchedRouter, block.router) for block in blocks])
        if hasattr(model, "router_aux_loss_coef"):
            _set(applied, model, "router_aux_loss_coef", 0.0)
    if divided and hasattr(model, "save_pretrained"):
        save = cast(Any, model).save_pretrained
        _set(applied, model, "save_pretrained", partial(_save_pretrained, model, save))
    if hasattr(model, "enable_input_require_grads"):
        own = cast(Any, model).enable_input_require_grads
        _set(applied, model, "enable_input_require_grads", partial(_require_input_gradients, model, own))
    cast(Any, model).mycel_applied = applied
    return applied


def restore(model: nn.Module) -> None:
    """Take back what ``apply`` did. Where experts were divided, all ranks call it, and get all of them.

    Parameters, their order and names, classes, backends and hooks are what they were; values are those of now.
    Gradients of divided experts are dropped, and optimizers with state for them have to be made anew.

    Args:
        model: to which ``apply`` was applied, or a wrapper around it.

    Raises:
        UsageError: it was not, or ``fully_shard`` came afterwards.

    Examples:
        With all experts here there is nothing to bring together, and the results are the model's own again::

            before = model(tokens).logits
            apply(model)
            restore(model)
            assert torch.equal(model(tokens).logits, before)
    """
    _take_back(*_find_applied(model))


def _take_back(model: nn.Module, applied: Applied) -> None:
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise UsageError(
            f"{type(model).__name__}: fully_shard has replaced its parameters, which restore cannot undo; take "
            "mycel.moe.full_state_dict(model) and load that into a new model"
        )
    for block in applied.blocks:
        experts = cast(Any, block.experts)
        if applied.group is not None:
            for name, parameter in block.experts.named_parameters(recurse=False):
                parameter.grad = None
                parameter.data = gather_stack(experts, name, parameter.data, applied.group)
            del experts.owned
        del experts.mycel_experts, experts.cuts, experts.routed, experts.shard
        if isinstance(block.router, WatchedRouter):
            unwatch(block.router)
    for handle in applied._handles:
        handle.remove()
    for name, value in applied._attributes.items():
        delattr(model, name)
        if value is not _ABSENT:
            setattr(model, name, value)
    cast(Any, model).set_experts_implementation(applied._own_backend)
    del cast(Any, model).mycel_applied


class _ABSENT:
    """In the place of an attribute that was not there; a class, which stays itself in copies and pickles."""


def _set(applied: Applied, model: nn.Module, name: str, value: Any) -> None:
    applied._attributes[name] = model.__dict__.get(name, _ABSENT)
    setattr(model, name, value)


def _backend_of(model: Any) -> Any:
    getter = getattr(model, "get_experts_implementation", None)
    return copy.copy(getter()) if getter is not None else model.config._experts_implementation


def _check_alike(model: nn.Module, blocks: Sequence[Block], group: dist.ProcessGroup) -> None:
    """Each rank keeps a part of what it has: all must have the same. What is by experts stands for the rest."""
    sums = torch.stack([_checksum(_beside(model.get_submodule(block.path), block)) for block in blocks])
    all_sums = sums.new_empty(dist.get_world_size(group) * len(blocks))
    all_gather_single(all_sums, sums, group=group)
    for rank, theirs in enumerate(all_sums.view(-1, len(blocks))):
        for block, mine, other in zip(blocks, sums.tolist(), theirs.tolist(), strict=True):
            if mine != other:
                raise UsageError(
                    f"rank {rank} of the mesh has another router or first expert in {block.path} than rank "
                    f"{dist.get_rank(group)}; load the same model on all ranks before it is divided"
                )


def _beside(module: nn.Module, block: Block) -> list[Tensor]:
    """What of a block has a row for each expert, as routers have, and the first expert's vectors."""
    experts = {id(parameter) for parameter in block.experts.parameters()}
    rows = [p for p in module.parameters() if id(p) not in experts and p.shape[:1] == (block.num_experts,)]
    return [*rows, *(p[0, 0] for p in block.experts.parameters(recurse=False))]


def _checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Of all bits, in integers, which have one sum on every machine."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for parameter in tensors:
        octets = parameter.detach().contiguous().view(-1).view(torch.uint8).long()
        total = total * 31 + (octets * (torch.arange(octets.numel(), device=octets.device) % 251 + 1)).sum()
    return total


def _require_input_gradients(model: Any, own: Callable[[], None]) -> None:
    """The library's own, which activation checkpointing calls, with a hook that pickles in place of a closure."""
    own()
    for handle in getattr(model, "_require_grads_hooks", ()):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _want_gradient


def _want_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _save_pretrained(model: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of a model of which each rank has a part."""
    if kwargs.get("state_dict") is None:
        raise UsageError(
            f"{type(model).__name__}: this rank has a part of the experts, and save_pretrained would write only "
            "that; on all ranks make mycel.moe.full_state_dict(model), then save with "
            "save_pretrained(folder, state_dict=...) on one"
        )
    return save(*args, **kwargs)
