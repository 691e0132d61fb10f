"""The layer: router, dispatcher and experts put together, with plain parameters."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.arguments import the, whole_number
from mycel.errors import UsageError
from mycel.moe.balance import Balanced, LoadBalancing, attach, losses_of, policies_of
from mycel.moe.capacity import CapacityPolicy
from mycel.moe.divided import divided_experts
from mycel.moe.expert_mlp import compute_dtype
from mycel.moe.experts import ExpertCall, Experts, SharedExpert
from mycel.moe.flex.choice import Chooser
from mycel.moe.overlap import Beside
from mycel.moe.parallel import ExpertParallel
from mycel.moe.routed import RoutedExperts
from mycel.moe.routers import make_router
from mycel.moe.schedule import Partition

__all__ = ["MoE", "attach_moe_loss", "expert_parameter_names", "moe_loss", "update_balancing"]


class Factory(TypedDict, total=False):
    """Where parameters are made, and of which type."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class MoE(nn.Module, Balanced):  # FSDP2 makes a class of it, which takes the layout of the first base
    """A mixture of experts in place of a feed-forward network.

    Over a mesh, experts are divided over its ranks and each rank calls the layer with its own tokens. Parameters are
    plain tensors: the router and shared expert whole on every rank, of the experts those that the rank holds.

    Gradients (``gradients="mean"``): after every parameter's gradient is averaged over the ranks that hold it, as DDP
    and FSDP2 do, it is the gradient of the mean over ranks of their losses. The layer divides the experts' gradients
    by the mesh's size for that, since each expert hears from all ranks. ``"sum"`` is for losses that are added up.

    Args:
        dim: width of tokens.
        hidden: width inside an expert.
        num_experts: in the whole layer.
        top_k: experts a token.
        router: a key of ``mycel.moe.routers.ROUTERS``, or a module of their signature.
        activation: a key of ``mycel.moe.activations.ACTIVATIONS``.
        bias: experts add vectors.
        shared_hidden: width of an expert that every token passes; 0: none.
        balancing: policies, in the order in which their losses add up; at most one with a bias for the choice.
        capacity: how many tokens an expert takes; by default all.
        parallel: how experts are divided over ranks; a mesh means ``ExpertParallel(mesh)``.
        factory: ``device`` and ``dtype`` of parameters, as torch's own layers take them; by default those of tensors
            that torch makes just then, as in ``with torch.device("meta"): MoE(...)``.

    Attributes:
        loss: what the balancing policies add to the training loss, of the last call; a scalar.
        dispatcher: its ``meter`` counts bytes.

    Raises:
        UsageError: settings that do not fit together.

    Examples:
        >>> layer = MoE(dim=16, hidden=32, num_experts=4, top_k=2)
        >>> layer(torch.randn(3, 5, 16)).shape
        torch.Size([3, 5, 16])
        >>> layer(torch.randn(3, 5, 16), top_k=1, capacity_factor=1.0).shape
        torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        router: str | nn.Module = "top_k",
        activation: str = "swiglu",
        bias: bool = False,
        shared_hidden: int = 0,
        balancing: LoadBalancing | Sequence[LoadBalancing] = (),
        capacity: CapacityPolicy | None = None,
        parallel: ExpertParallel | DeviceMesh | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        if unknown := factory.keys() - Factory.__annotations__.keys():
            raise TypeError(f"MoE() got an unexpected keyword argument {min(unknown)!r}")
        super().__init__()
        parallel = ExpertParallel.of(parallel)
        dim, hidden = whole_number(dim, "width of tokens", least=1), whole_number(hidden, "hidden width", least=1)
        num_experts = whole_number(num_experts, "number of experts", least=1)
        top_k = whole_number(top_k, "top_k, experts a token", least=1)
        self.dim, self.num_experts = dim, num_experts
        self.top_k = top_k
        hint = f"CapacityPolicy(factor={capacity if isinstance(capacity, int | float) else 1.25})"
        self.capacity = (
            CapacityPolicy() if capacity is None else the(CapacityPolicy, capacity, "a capacity", hint=hint)
        )
        whole_number(shared_hidden, "width of the shared expert", least=0)
        made: nn.Module = make_router(router, dim, num_experts, top_k) if isinstance(router, str) else router
        self.router = made.to(dtype=factory.get("dtype"))
        if getattr(made, "num_experts", num_experts) != num_experts:
            raise UsageError(f"the router chooses among {made.num_experts} experts, the layer has {num_experts}")
        self.routed = RoutedExperts(num_experts, parallel)
        self.dispatcher = self.routed.dispatcher
        self.chooser = None if parallel.tuner is None else Chooser(parallel.tuner, self.routed)
        like: dict[str, Any] = {"activation": activation, "bias": bias, **factory}
        self.experts = Experts(dim, hidden, num_experts, routed=self.routed, **like)
        self.experts.route = self.chooser or self.routed
        device = self.experts.down_proj.device
        self.router.to(device=device)
        self.shared: nn.Module | None = SharedExpert(dim, shared_hidden, **like) if shared_hidden else None
        policies = policies_of(balancing)
        self.balancing = nn.ModuleList(policies).to(device=device)
        biased = sum(policy.selection_bias is not None for policy in policies)
        if biased > 1 or (biased and not getattr(made, "takes_bias", True)):
            raise UsageError(
                f"{biased} policies bias the choice of {type(made).__name__}; expected at most one that can"
            )
        self.start_counting(num_experts)

    def __getstate__(self) -> dict[str, Any]:
        return self.without_graph(super().__getstate__())  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        r: int | None = None,
        degree: int | None = None,
        algorithm: str | None = None,
        partition: Partition | None = None,
    ) -> Tensor:
        """Route, exchange, compute, exchange back.

        The last four are alike on all ranks, may be others at every call, and change the result by rounding only.

        Args:
            x: tokens of this rank, any number, shape ``[..., D]``.
            top_k: experts a token in this call; alike on all ranks.
            capacity_factor: in this call, in place of the capacity's own.
            r: degree of parallelism: 0, experts travel and tokens stay; 1, slices of experts are put together;
                up to ``tensor_shards``, where only tokens travel, a copy to each slice.
            degree: chunks whose exchanges overlap the experts' work on other chunks.
            algorithm: of the exchange, a key of ``mycel.moe.dispatch.DISPATCHERS``.
            partition: a chunk is some ``"tokens"``, or some ``"experts"`` of every rank with all their tokens.

        Returns:
            Shape and type of ``x``.

        Raises:
            UsageError: tokens of another width or kind, there is no such ``r``, or the exchange cannot be used here.
        """
        if not isinstance(x, Tensor):
            raise UsageError(f"expected tokens in a tensor of [..., {self.dim}], got {type(x).__name__}")
        if x.shape[-1:] != (self.dim,) or not x.is_floating_point():
            raise UsageError(f"tokens of {list(x.shape)}, {x.dtype}: expected [..., {self.dim}], floating point")
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD, top_k=top_k, bias=self._selection_bias())
        by_sequence = any(policy.by_sequence for policy in self.policies())
        deferred = self.observe(routing._replace(sequence=_sequences(x)) if by_sequence else routing)
        if deferred is not None:
            routing = routing._replace(top_k_weights=attach(routing.top_k_weights, deferred))
        routing = self.capacity.apply(routing, top_k=self.top_k if top_k is None else top_k, factor=capacity_factor)
        schedule = None
        if (r, degree, algorithm, partition) != (None,) * 4:
            schedule = self.routed.schedule(r=r, degree=degree, algorithm=algorithm, partition=partition)
        # Under autocast the exchange carries what the experts would round to anyway.
        beside = None if self.shared is None else Beside(partial(self.shared, x_TD))
        call = ExpertCall(routing, schedule, beside)
        y_TD: Tensor = self.experts(x_TD.to(compute_dtype(x_TD)), call).to(x.dtype)
        if beside is not None:
            y_TD = y_TD + beside.take().to(x.dtype)
        return y_TD.view(x.shape)

    def explain(self) -> str:
        """What was chosen for which load, and why, in predicted and measured times; or the one schedule."""
        return str(self.routed.default) if self.chooser is None else self.chooser.explain()

    def _selection_bias(self) -> Tensor | None:
        return next((policy.selection_bias for policy in self.policies() if policy.selection_bias is not None), None)

    def policies(self) -> list[LoadBalancing]:
        """See ``Balanced``."""
        return [policy for policy in self.balancing if isinstance(policy, LoadBalancing)]


def _sequences(x: Tensor) -> Tensor | None:
    """Of each token, in ``[..., tokens, width]``, the number of its sequence; ``None``: there is one."""
    if x.dim() < 3:
        return None
    tokens = x.shape[-2]
    return torch.arange(x.numel() // max(1, x.shape[-1]), device=x.device) // max(1, tokens)


def _layers(model: nn.Module) -> list[Balanced]:
    return [module for module in model.modules() if isinstance(module, Balanced)]


def moe_loss(model: nn.Module) -> Tensor:
    """Sum over a model's MoE layers of their balancing losses of the last call; 0 without any.

    Args:
        model: with MoE layers; or of Hugging Face, after ``mycel.moe.apply``, whose ``output.loss`` has it already.

    Returns:
        A scalar, to be added to the training loss; its gradient reaches the routers, also where activation
        checkpointing is reentrant.

    Examples:
        >>> from mycel.moe.balance import SwitchLoss, ZLoss
        >>> model = nn.Sequential(MoE(8, 16, 4, balancing=SwitchLoss()), MoE(8, 16, 4, balancing=ZLoss()))
        >>> y = model(torch.randn(5, 8))
        >>> bool(moe_loss(model) == model[0].loss + model[1].loss)
        True
    """
    return losses_of(_layers(model))


def attach_moe_loss(output: Tensor, model: nn.Module, *, factor: float | Tensor = 1.0) -> Tensor:
    """``output``, through which the gradient of ``moe_loss`` of the same pass reaches the routers as well.

    For a model that has no loss to add it to, as a stage of a pipeline that is not the last: call this at the end of
    its ``forward``, for every micro-batch. Values stay what they are.

    Args:
        output: of the model, or of its last layer.
        model: with MoE layers, whose latest call made ``output``.
        factor: of the losses: that of the scaler, where gradients are scaled; one over the micro-batches, where
            the schedule does not divide.

    Examples:
        >>> class Stage(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = MoE(8, 16, 4, balancing=SwitchLoss())
        ...
        ...     def forward(self, x):
        ...         return attach_moe_loss(self.layer(x), self)
        >>> from mycel.moe.balance import SwitchLoss
        >>> Stage()(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """
    loss = moe_loss(model)
    return attach(output, loss * factor) if loss.requires_grad and output.requires_grad else output


def update_balancing(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """After an optimizer step: add up all ranks' counts, in one all_reduce, and let every layer's policies learn.

    Args:
        model: with MoE layers.
        group: ranks whose tokens count; ``None``: all, if ``torch.distributed`` is initialised.

    Examples:
        >>> from mycel.moe.balance import ExpertBias
        >>> model = MoE(8, 8, 4, 1, balancing=ExpertBias(4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = optimizer.register_step_post_hook(lambda *_: update_balancing(model))
    """
    layers = [layer for layer in _layers(model) if layer.policies()]
    if not layers:
        return
    counts = [layer.take_counts() for layer in layers]
    together = torch.cat(counts)
    if dist.is_initialized():
        dist.all_reduce(together, group=group)
    with torch.no_grad():
        for layer, part in zip(layers, torch.split(together, [c.numel() for c in counts]), strict=True):
            for policy in layer.policies():
                policy.update(part[:-1], part[-1])


def expert_parameter_names(model: nn.Module) -> Iterable[str]:
    """Names of the parameters that differ between ranks: those of divided experts, and of adapters around them.

    For optimizers that treat them otherwise, and for loops that average gradients by themselves. DDP knows.

    Args:
        model: with MoE layers; or of Hugging Face, after ``mycel.moe.apply`` with a mesh.

    Returns:
        Names as ``model.named_parameters()`` has them; none where every rank has all experts.

    Examples:
        Gradients averaged by hand, as DDP does::

            apart = set(expert_parameter_names(model))
            for name, parameter in model.named_parameters():
                if name not in apart and parameter.grad is not None:
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    """
    return [name for divided in divided_experts(model) for name in divided.names]
