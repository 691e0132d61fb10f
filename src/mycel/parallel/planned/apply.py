"""Trains a model by a plan: ``apply(model, plan, optimizer=...)`` and ``step(batch, target)``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mycel.comm.start import group_or_all
from mycel.errors import UsageError
from mycel.parallel.gradients import sum_gradients
from mycel.parallel.pipeline import Pipeline
from mycel.parallel.planned import state
from mycel.parallel.planned.boundary import InShares, Shares
from mycel.parallel.planned.context import SharedSequences
from mycel.parallel.planned.coshard import coshard
from mycel.parallel.planned.experts import SharedExperts
from mycel.parallel.planned.fit import check_fit, example_of
from mycel.parallel.planned.mesh import Groups, groups_of, order_of_group
from mycel.parallel.planned.parts import StageModule, part_of
from mycel.parallel.planned.recompute import recompute
from mycel.parallel.planned.replicas import clip_gradients, shard_stage
from mycel.parallel.planned.sequence import share_sequences
from mycel.parallel.planned.tensor import on_shares, share_matrices
from mycel.parallel.planned.times import planned_actions
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Order
from mycel.planning.plan import Plan
from mycel.topology.model import Topology

__all__ = ["Planned", "apply"]

_Optimizer = torch.optim.Optimizer


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], _Optimizer] | None = None,
    example: Tensor | tuple[Tensor, ...] | None = None,
    device: torch.device | str | None = None,
    wrap: Callable[[int, nn.Module], nn.Module] | None = None,
    topology: Topology | None = None,
    max_norm: float | None = None,
    timeout_s: float | None = None,
) -> Planned:
    """Train a model by a plan: its mesh, stages, shards, shared matrices, recomputation and order.

    Every rank of the job gives the same model with the same numbers, and the same plan. The model is changed in
    place: this rank's stages are trained, and what belongs to other stages can be freed with the model.

    Args:
        model: the whole; a Hugging Face causal language model as it comes, or any module that passes its input
            through the plan's modules one after the other.
        plan: found by ``mycel plan search``, for as many ranks as the job has.
        loss: of the model's result and a micro-batch's target, a mean over it; ``None``: cross entropy of the last
            dimension, which is what language models have. With context parallelism both are of this rank's tokens,
            and every token counts: a mean over some of them would weigh ranks alike that have unlike many.
        optimizer: makes one for a list of parameters, once a stage; ``None``: ``step`` leaves gradients alone.
        example: arguments of a forward on one micro-batch; ``None``: tokens, as many as the plan says.
        device: where stages compute; ``None``: where the model's parameters are.
        wrap: called with each stage's number and module, gives what the pipeline runs in its place.
        topology: for the flight record's planned times; ``None``: messages are planned to take no time.
        max_norm: that all gradients together are scaled down to where they are larger; ``None``: they stay.
        timeout_s: longest wait for one message; ``None``: as long as the group waits.

    Returns:
        What trains.

    Raises:
        UsageError: a plan for another model or another number of ranks, or something that cannot be run; nothing
            has been changed then.

    Examples:
        On every rank, with as many ranks as ``plan.json`` was searched for::

            plan = mycel.planning.plan.read_plan("plan.json")
            trained = mycel.parallel.apply(model, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
            for tokens, targets in batches:
                loss = trained.step(tokens, targets)
    """
    group_or_all(None, "apply")
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm!r}; expected a number above 0")
    where = torch.device(device) if device is not None else _device_of(model)
    given = (example,) if isinstance(example, Tensor) else example or example_of(plan)
    check_fit(model, plan, dist.get_world_size(), where, given)
    in_parts = on_shares(model, plan.layouts, given) if plan.job.mesh.tp > 1 else frozenset()
    groups = groups_of(plan, where.type)
    stages: dict[int, nn.Module] = {}
    parts: dict[int, nn.Module] = {}
    experts, sequences = None, None
    if groups is not None:
        if groups.experts is not None:
            experts = SharedExperts(model, groups.experts)
        if groups.context is not None:
            sequences = SharedSequences(model, plan.job.seq, groups.context, groups.contexts, where)
        for stage in plan.order.stages_of(groups.place):
            parts[stage], stages[stage] = _stage(model, plan, stage, groups, where, wrap, sequences, experts)
    pipeline = None
    if groups is not None:
        pipeline = Pipeline(
            _order(plan, groups),
            stages,
            loss or _cross_entropy,
            group=groups.pipe,
            device=where,
            timeout_s=timeout_s,
            planned=planned_actions(plan, topology, replica=groups.replica, shard=groups.shard),
            scale_grads=_counted(plan),
        )
    return Planned(plan, groups, parts, pipeline, optimizer, in_parts, max_norm, sequences, experts)


def _order(plan: Plan, groups: Groups) -> Order:
    """The plan's order as the group numbers its ranks; up to ZeRO-2 parameters stay gathered until a step's end."""
    order = order_of_group(plan.order_of(groups.data), groups.pipe_places)
    if plan.job.zero in (1, 2) and _replicas(plan) > 1 and not order.has_communication:
        order = lower(order, most_gathered=plan.num_stages)
    return order


def _counted(plan: Plan) -> bool | float:
    """What each replica divides its gradients by, before the mean over replicas.

    Where they have unlike many micro-batches, each of these counts alike: the mean of them, on all replicas.
    """
    shares = plan.job.shares
    return sum(shares) / len(shares) if shares else True


def _replicas(plan: Plan) -> int:
    """Ranks that hold the same parameters; those that share sequences do as well."""
    return plan.job.mesh.dp * plan.job.mesh.cp


def _stage(
    model: nn.Module,
    plan: Plan,
    stage: int,
    groups: Groups,
    device: torch.device,
    wrap: Callable[[int, nn.Module], nn.Module] | None,
    sequences: SharedSequences | None,
    experts: SharedExperts | None,
) -> tuple[nn.Module, nn.Module]:
    job, names = plan.job, plan.cut[stage]
    part = part_of(model, names, [name for other in plan.cut for name in other if other is not names])
    if any(tensor.is_meta for tensor in part.parameters()):
        part.to_empty(device=device)
    else:
        part.to(device)
    layers = [name for name in names if name in plan.model.layers]
    if job.mesh.tp > 1:
        divided = layers if job.is_sequence_parallel else []
        share_sequences(part, divided, plan.layouts, groups.tp)
        share_matrices(part, [name for name in names if name not in divided], plan.layouts, groups.tp)
    if job.coshard > 1:
        coshard(part, layers, plan.layouts, job.coshard)
    at_work, options = (None, None) if sequences is None else (sequences.at_work, sequences.options)
    recompute(part, layers, job.recompute, at_work, exchanges=job.mesh.cp > 1 or job.mesh.ep > 1)
    module: nn.Module = StageModule(part, options)
    if job.is_scattered and job.mesh.tp > 1:
        shares = Shares(groups.tp.get_group(), groups.shards)
        module = InShares(module, shares, gathers=stage > 0, splits=stage < plan.num_stages - 1)
    if wrap is not None:
        module = wrap(stage, module)
    if job.zero and _replicas(plan) > 1:
        alone = None if experts is None else set(experts.among(part.named_parameters()))
        shard_stage(module, part, names, job.zero, groups.dp, alone)
    return part, module


class Planned:
    """A model that is trained by a plan; what ``apply`` gives.

    Attributes:
        plan: by which.
        parts: this rank's parts of the model by stage; names of parameters are the whole model's.
        optimizers: by stage; none where ``apply`` was given none.
        pipeline: of this rank; ``None`` where the plan does not use it.
        norm: of the last step's gradients, before they were scaled; ``None`` without ``max_norm``.

    Examples:
        Checkpoints have the whole model's names and load under another plan::

            torch.distributed.checkpoint.save(trained.state_dict(), checkpoint_id=folder)
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups | None,
        parts: Mapping[int, nn.Module],
        pipeline: Pipeline | None,
        optimizer: Callable[[list[nn.Parameter]], _Optimizer] | None,
        in_parts: frozenset[str],
        max_norm: float | None,
        sequences: SharedSequences | None,
        experts: SharedExperts | None,
    ) -> None:
        self.plan, self.parts, self.pipeline = plan, dict(parts), pipeline
        self._groups, self._max_norm = groups, max_norm
        self._sequences, self._experts = sequences, experts
        self.optimizers: dict[int, _Optimizer] = {}
        if optimizer is not None:
            made = {stage: optimizer(list(part.parameters())) for stage, part in self.parts.items()}
            self.optimizers = made
        self._in_parts = [parameter for name, parameter in self.named_parameters() if name in in_parts]
        self._seconds: list[float] = []
        self.norm: float | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages."""
        for part in self.parts.values():
            yield from part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages, by the whole model's names."""
        for part in self.parts.values():
            yield from part.named_parameters()

    def step(self, batch: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        """One step of training on a global batch.

        Args:
            batch: the global batch, on every rank: this one takes its replica's part.
            target: of the global batch, likewise.
            kwargs: for the model's forward, divided along the first dimension as the batch is.

        Returns:
            The mean loss of the global batch, on every rank.

        Raises:
            UsageError: a batch of another size than the plan's.
            PeerLostError: a rank is gone; the message names what of it was awaited.
        """
        begin = time.perf_counter()
        self._run(batch, target, kwargs, trains=True)
        self._sum_gradients()
        if self._max_norm is not None:
            ranks_of_place = _replicas(self.plan) * self.plan.job.mesh.tp
            mine, experts = list(self.parameters()), self._experts
            divided = set() if experts is None else set(experts.among(self.named_parameters()))
            degree = 1 if experts is None else experts.degree
            self.norm = clip_gradients(mine, self._max_norm, ranks_of_place, divided, degree)
        for each in self.optimizers.values():
            each.step()
            each.zero_grad()
        loss = self._mean_loss()
        self._seconds.append(time.perf_counter() - begin)
        return loss

    def eval(self, batch: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        """The mean loss of a global batch, forwards only.

        Args:
            batch: as of ``step``.
            target: as of ``step``.
            kwargs: as of ``step``.
        """
        self._run(batch, target, kwargs, trains=False)
        return self._mean_loss()

    def _run(self, batch: Tensor, target: Tensor, kwargs: Mapping[str, Any], *, trains: bool) -> None:
        job = self.plan.job
        for what, value in (("batch", batch), ("target", target)):
            if not value.dim() or value.shape[0] != job.global_batch:
                size = value.shape[0] if value.dim() else "no"
                raise UsageError(
                    f"the plan is for a global batch of {job.global_batch} sequences, and the {what} has {size}: "
                    f"give {job.global_batch} on every rank, or search with --batch {size}"
                )
        if self.pipeline is None or self._groups is None:
            return
        mine = [self._own_part(value) for value in (batch, target)]
        more: dict[str, Any] = {n: self._own_part(v) if isinstance(v, Tensor) else v for n, v in kwargs.items()}
        if self._sequences is not None:
            mine = [self._sequences.own(v, what) for v, what in zip(mine, ("the batch", "the target"), strict=True)]
            more = {name: self._sequences.own_option(value) for name, value in more.items()}
        first, last = 0 in self.parts, self.plan.num_stages - 1 in self.parts
        inputs: tuple[Any, ...] = (mine[0],) if first else ()
        aim = mine[1] if last else None
        if trains:
            self.pipeline.step(*inputs, target=aim, return_outputs=False, **more)
        else:
            self.pipeline.eval(*inputs, target=aim, **more)

    def _sum_gradients(self) -> None:
        """Over what the pipeline does not sum: shares of whole parameters, and replicas that nothing shards."""
        if self._groups is None:
            return
        for parameter in self.parameters():  # of norms on shared positions each rank has a part
            grad = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
                continue
            if grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        if self._in_parts:
            sum_gradients(self._in_parts, self._groups.tp.get_group())
        replicas = _replicas(self.plan)
        if self._experts is not None:
            self._experts.sum_gradients(self.named_parameters())
        if replicas > 1 and not self.plan.job.zero:
            apart = set() if self._experts is None else set(self._experts.among(self.named_parameters()))
            alike = [parameter for parameter in self.parameters() if parameter not in apart]
            sum_gradients(alike, self._groups.dp.get_group(), divisor=replicas)

    def _own_part(self, value: Tensor) -> Tensor:
        assert self._groups is not None
        job, replica = self.plan.job, self._groups.data
        begin = job.micro_batch * sum(map(job.batches_of, range(replica)))
        return value[begin : begin + job.micro_batch * job.batches_of(replica)]

    def _mean_loss(self) -> Tensor:
        """Over all micro-batches of all replicas; ranks that do not have it learn it."""
        total, job = torch.zeros(1, dtype=torch.float64), self.plan.job
        if self.pipeline is not None and self._groups is not None and not self._groups.shard and self.pipeline.losses:
            losses = torch.stack([_whole(loss) for loss in self.pipeline.losses.values()]).double()
            total += losses.mean().cpu() * (losses.numel() * job.mesh.dp * job.micro_batch / job.global_batch)
        if dist.get_backend() == "nccl":
            total = total.cuda()
        dist.all_reduce(total)
        return (total / _replicas(self.plan)).squeeze(0)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters, buffers and optimizer state, by the names of the model without a plan.

        ``torch.distributed.checkpoint`` saves it, and loads it under any other plan of the model.
        """
        return state.state_of(self.parts, self.optimizers, self._experts)

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Take over what ``torch.distributed.checkpoint`` has loaded into ``state_dict()``.

        Args:
            states: of the form that ``state_dict`` gives.
        """
        state.load_state(self.parts, self.optimizers, states, self._experts)

    # -- what was seen --------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What this rank has measured, beside what the plan predicts; the two are named apart.

        Returns:
            ``steps``, ``measured_s`` (median of steps after the first), ``predicted_s``, ``parameter_bytes`` that
            this rank holds, ``sequence_bytes`` that it sent so that tokens see those of other ranks, and the buffers
            of its last step.
        """
        later = sorted(self._seconds[1:] or self._seconds)
        held = sum(_local(p).numel() * _local(p).element_size() for p in self.parameters())
        return {
            "steps": len(self._seconds),
            "measured_s": later[len(later) // 2] if later else None,
            "predicted_s": self.plan.predicted.seconds,
            "parameter_bytes": held,
            "sequence_bytes": self._sequences.sent_bytes if self._sequences is not None else 0,
            "buffers": dict(self.pipeline.buffers()) if self.pipeline is not None and self._seconds else {},
        }

    def write_flight(self, folder: Path | str) -> Path | None:
        """Write when each action of the last step was planned and when it was, for ``mycel report``.

        Args:
            folder: of all ranks' records.

        Returns:
            The file; ``None`` on ranks of other pipelines than the first.
        """
        if self.pipeline is None or self._groups is None or self._groups.replica or self._groups.shard:
            return None
        return self.pipeline.write_flight(folder)

    def close(self) -> None:
        """Give back the groups that are of this plan alone; nothing can be trained afterwards."""
        if self._groups is not None and self.pipeline is not None:
            dist.destroy_process_group(self._groups.pipe)
            if self._sequences is not None:
                self._sequences.close()
        self.pipeline = self._sequences = None

    def __enter__(self) -> Planned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _whole(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _device_of(model: nn.Module) -> torch.device:
    found = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if found.type == "meta" else found
