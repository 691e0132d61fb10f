"""Compression for a model that ``torch.distributed.fsdp.fully_shard`` has sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.comm.handle import Handle
from mycel.data_parallel.compress import Compressor
from mycel.data_parallel.feedback import ErrorFeedback, Scaler, check_residuals
from mycel.data_parallel.fsdp.layout import Unit, units_of
from mycel.data_parallel.fsdp.qsdp import QSDP
from mycel.data_parallel.fsdp.replicas import ReplicaMean
from mycel.data_parallel.fsdp.route import Route, nodes_between
from mycel.data_parallel.fsdp.steps import Steps
from mycel.data_parallel.lgreco import LGreCo
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.rehearsal import rehearse
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["FSDPCompression", "attach"]


class FSDPCompression(Handle):
    """Compression at work on a model; made by ``attach``.

    Attributes:
        units: what ``fully_shard`` made, in the order of modules.
        feedback: this rank's residuals, in ``memory``; ``None`` keeps none.
        stats: steps, and bytes that have left this rank, as the collectives' direct form sends them, without headers:
            of gathers and reductions, or of means over replicas.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = fully_shard(nn.Linear(64, 64), mesh=dist.init_device_mesh("cpu", (1,)))
        >>> with attach(model, QSDP(weight_bits=8, gradient_bits=4)) as compression:
        ...     model(torch.ones(1, 64)).sum().backward()
        >>> len(compression.units), compression.bytes_per_step()  # one rank has nobody to send to
        (1, 0)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        route: Route,
        policy: CompressionPolicy | None,
        feedback: ErrorFeedback | None,
    ) -> None:
        self.units, self.feedback = units, feedback
        self.stats = route.stats
        self._steps = Steps(model, policy, feedback, units[0].group, route.stats)
        self._route = route
        self._hooks: dict[str, ReplicaMean] = {}
        self._gathers: dict[str, Any] = {}
        self._reducers: dict[str, Any] = {}
        self._before = [(u, u.param_group._all_gather_comm, u.param_group._reduce_scatter_comm) for u in units]

    @property
    def inside_bytes(self) -> int:
        """Bytes that have left this rank in full precision inside its node, or to those with whom it shares weights
        between the passes (``reshard_after_forward`` as a number)."""
        return self._route.inside.total()

    def bytes_per_step(self) -> int:
        """Compressed bytes that one rank sends in a step such as the last one, by the formula.

        A unit sends ``n - 1`` rows of a gather before its forward pass, as many again before its backward pass
        where it is resharded over all ranks between (which torch decides in the first forward pass), and ``n - 1``
        rows of its gradients; ``n`` is the number of ranks or, where bytes are compressed between nodes, of nodes.
        """
        total = 0
        for unit in self.units:
            if unit.name in self._gathers:
                again = unit.param_group._reshard_after_forward and not unit.param_group._use_post_forward_mesh
                total += self._gathers[unit.name].row_bytes * (2 if again else 1)
            if unit.name in self._reducers:
                total += self._reducers[unit.name].row_bytes
        return total * (self._route.num_sent - 1)

    def rescale(self, factor: float) -> None:
        """Multiply what is remembered: losses are scaled by so many times as much from the next step on.

        For whoever scales losses without a ``scaler`` that was given to ``compress``; every rank calls it, between
        steps.

        Raises:
            UsageError: the factor is not a positive number.
        """
        if self.feedback is not None:
            self.feedback.rescale(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Steps by unit and, with error feedback, residuals by parameter and the scale of their losses.

        Every rank calls it and gets the same. Tensors only, so that ``torch.load(weights_only=True)`` reads it.
        """
        state = {} if self.feedback is None else {"scale": torch.tensor(self.feedback.scale, dtype=torch.float64)}
        for name, hook in self._steppers().items():
            state[f"step.{name}"] = torch.tensor(hook.step)
            if self.feedback is not None:
                kept = hook.residual_rows().state_dict(self.feedback)
                state |= {f"residual.{owner}": residual for owner, residual in kept.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a state back, of any number of ranks.

        Raises:
            UsageError: it is of another model, or of compression with error feedback where there is none now.
        """
        if set(state) != set(expected := self._keys()):
            odd = sorted(set(state) ^ set(expected))
            raise UsageError(f"the state is of other parameters or another method: {', '.join(odd[:4])}")
        kept = {key.removeprefix("residual."): value for key, value in state.items() if key.startswith("residual.")}
        for name, hook in self._steppers().items():
            hook.step = int(state[f"step.{name}"])
            if self.feedback is not None:
                hook.residual_rows().load_state_dict(self.feedback, kept)
        if self.feedback is not None:
            self.feedback.scale = float(state["scale"])

    def steps(self) -> int:
        """Steps that have been reduced so far; of those since the start of this process where nothing is."""
        return max((hook.step for hook in self._steppers().values()), default=0)

    def close(self) -> None:
        """Have FSDP2 communicate as it did before; twice is as good as once."""
        self._steps.close()
        for unit in self.units if self._hooks else ():
            unit.module.set_all_reduce_hook(None)
        for unit, gather, reducer in self._before:
            unit.module.set_custom_all_gather(gather)
            unit.module.set_custom_reduce_scatter(reducer)

    def _steppers(self) -> dict[str, ReplicaMean | Any]:
        """What counts steps and has residuals, by unit."""
        return {**self._hooks, **self._reducers}

    def _keys(self) -> list[str]:
        keys = [f"step.{name}" for name in self._steppers()]
        keys += ["scale"] if self.feedback is not None else []
        for unit in self.units if self.feedback is not None else ():
            if unit.name in self._steppers():
                keys += [f"residual.{segment.name}" for segment in unit.segments if segment.trainable]
        return keys


def attach(
    model: nn.Module,
    method: QSDP | Compressor | CompressionPolicy,
    *,
    topology: Topology | None = None,
    replicas: dist.ProcessGroup | None = None,
    exact: Sequence[str] = (),
    feedback: bool | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    scaler: Scaler | None = None,
    residuals: Literal["float32", "int8"] = "float32",
) -> FSDPCompression:
    """Compress what the FSDP2 units of a model gather and reduce. Every rank calls it.

    Args:
        model: the root, after ``fully_shard`` of it and its parts; sharded over a mesh of one dimension.
        method: ``QSDP``, for weights and gradients; or a compressor or a policy, for gradients alone. Vectors and
            tiny parameters always travel as they are.
        topology: where it has nodes of several ranks, bytes inside a node travel in full precision and only those
            between nodes are compressed. Without, all are.
        replicas: the ranks that hold the same shards, where the model is sharded inside nodes and replicated between
            them (HSDP). Only the mean of gradients over them is compressed, by any compressor; ``fully_shard`` has
            been given the inner dimension of the mesh alone.
        exact: patterns, as of file names, of parameters that travel as they are too.
        feedback: remember residuals, which takes a whole model's gradients on each rank; by default for compressors
            that are not unbiased.
        seed: of rounding by chance.
        timeout_s: of the groups that are made for nodes; by default the backend's.
        scaler: the ``GradScaler`` that scales the losses, whose scale the residuals then follow; without it, call
            ``rescale`` where a scale changes.
        residuals: how they are kept: ``"int8"``, rounded by chance, takes a quarter of the memory.

    Returns:
        A handle: bytes, state, and ``close()``.

    Raises:
        UsageError: the model is not fully sharded, or over meshes that are not supported; the compressor needs
            several rounds; torch has not what this needs.
    """
    from mycel.data_parallel.fsdp.comms import CompressedAllGather, CompressedReduceScatter, CountedReduceScatter

    weights, gradients = _policies(method, exact)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for policy in (weights, gradients):
        rehearse(() if policy is None else policy.compressors(), device, residuals)
    if replicas is not None:
        kept = _feedback(gradients, feedback, scaler, residuals)
        return _between_replicas(model, gradients, replicas, topology, kept, seed)
    for compressor in () if gradients is None else gradients.compressors():
        # Payloads that the network adds need as many rounds as their sums; element by element they can be cut too.
        if compressor.aggregation.adds_payloads and not compressor.is_elementwise:
            raise UsageError(
                f"{compressor.name} compresses in several rounds of sums that the network adds up, a reduce-scatter "
                "has one; for sharded gradients take a compressor whose payloads are scattered or gathered, or one "
                "that works element by element; between replicas, replicas=..., all work"
            )
    units = units_of(model)
    if len({dist.get_process_group_ranks(unit.group)[0] for unit in units}) > 1:
        raise UsageError("the model's modules are sharded over different groups of ranks")
    route = Route(
        units[0].group, CommStats(), None if topology is None else nodes_between(topology), timeout_s=timeout_s
    )
    made = FSDPCompression(model, units, route, gradients, _feedback(gradients, feedback, scaler, residuals))
    if isinstance(gradients, LGreCo):
        gradients.sharded(units[0].group)
    for unit in units:
        if gradients is not None:
            reducer = CompressedReduceScatter(unit, gradients, route, seed, made._steps)
            unit.module.set_custom_reduce_scatter(reducer)
            if hasattr(unit.module, "set_force_sum_reduction_for_comms"):
                unit.module.set_force_sum_reduction_for_comms(True)  # any factor to divide by, torch divides then
            made._reducers[unit.name] = reducer
        else:
            counted = CountedReduceScatter(unit.param_group._reduce_scatter_comm, made._steps)
            unit.module.set_custom_reduce_scatter(counted)
        if weights is not None:
            gather = CompressedAllGather(unit, weights, route, seed, made.steps)
            unit.module.set_custom_all_gather(gather)
            made._gathers[unit.name] = gather
    return made


def _between_replicas(
    model: nn.Module,
    policy: CompressionPolicy | None,
    replicas: dist.ProcessGroup,
    topology: Topology | None,
    feedback: ErrorFeedback | None,
    seed: int,
) -> FSDPCompression:
    if policy is None or topology is not None:
        raise UsageError(
            "between replicas, gradients are compressed and nothing else: leave out what is not for them"
        )
    units = units_of(model)
    shared = set(dist.get_process_group_ranks(units[0].group)) & set(dist.get_process_group_ranks(replicas))
    if shared != {dist.get_rank()}:
        raise UsageError(f"ranks {sorted(shared)} are shards of one model and replicas as well; want only this rank")
    if isinstance(policy, LGreCo):
        policy.sharded(units[0].group)
    route = Route(units[0].group, CommStats())
    made = FSDPCompression(model, units, route, policy, feedback)
    for unit in units:
        hook = ReplicaMean(unit, policy, replicas, made._steps, route.stats, seed)
        unit.module.set_all_reduce_hook(hook)
        made._hooks[unit.name] = hook
    return made


def _feedback(
    policy: CompressionPolicy | None,
    wanted: bool | None,
    scaler: Scaler | None,
    precision: Literal["float32", "int8"],
) -> ErrorFeedback | None:
    check_residuals([] if policy is None else policy.compressors(), wanted, precision)
    if policy is None:
        return None
    keeps = any(c.wants_feedback for c in policy.compressors()) if wanted is None else wanted
    return ErrorFeedback(scaler=scaler, precision=precision) if keeps else None


def _policies(
    method: QSDP | Compressor | CompressionPolicy, exact: Sequence[str]
) -> tuple[CompressionPolicy | None, CompressionPolicy | None]:
    """For weights and for gradients."""
    if isinstance(method, CompressionPolicy):
        if exact:
            raise UsageError("patterns of exact parameters belong to the policy's rules")
        return None, method
    pair = (method.weights, method.gradients) if isinstance(method, QSDP) else (None, method)
    rules = dict.fromkeys(exact)
    weights, gradients = (None if c is None else CompressionPolicy(c, rules=rules) for c in pair)
    return weights, gradients
