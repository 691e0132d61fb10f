"""How a call is carried out over ranks: which weights and tokens travel, by which exchange, in which chunks."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.comm.groups import flat_group, is_in_order, subgroup
from mycel.errors import UsageError
from mycel.moe.dispatch import DISPATCHERS, LocalDispatcher, TokenDispatcher, make_dispatcher
from mycel.moe.dispatch.duplicates import Duplicates
from mycel.moe.experts import Compute, Work
from mycel.moe.flex.layout import ExpertLayout
from mycel.moe.flex.plan import Partition, Plan
from mycel.moe.flex.weights import WeightGather
from mycel.moe.pipeline import parts_of_experts, pipelined, pipelined_by_experts
from mycel.moe.routing import RoutingResult, count_tokens
from mycel.untraced import untraced
from mycel.wire import IdentityCodec, WireCodec

__all__ = ["ExpertParallel"]

#: ``torch.compile`` traces what lies between exchanges. In torch 2.11 it fails there; 2.12 was not tried.
TRACED_OVER_RANKS = torch.__version__ >= "2.13"  # compares releases, not letters


class ExpertParallel:
    """Experts over the ranks of a mesh.

    Args:
        num_experts: of the layer.
        mesh: the ranks, in one dimension or two (nodes, ranks of a node); ``None``: only this one.
        dispatcher: by name, or ``None`` for what the mesh suggests; or one made before, which then is the only one.
        codec: of rows on the wire.
        shards: ranks that share an expert; ``None``: W/E where there are fewer experts than ranks and that is whole.
        duplicates: ranks of the mesh that have the same tokens.

    Attributes:
        layout: which rank has what.
        rank: in the layout.
        dispatcher: of the default plan.
        default: the plan of calls that say nothing.

    Raises:
        UsageError: settings that do not fit together.
    """

    def __init__(
        self,
        num_experts: int,
        mesh: DeviceMesh | None,
        dispatcher: str | TokenDispatcher | None,
        codec: WireCodec,
        *,
        shards: int | None = None,
        duplicates: DeviceMesh | None = None,
    ) -> None:
        self.mesh, self.codec = mesh, codec
        self._made: dict[str, TokenDispatcher] = {}
        self._gathers: dict[int, WeightGather] = {}
        if isinstance(dispatcher, TokenDispatcher):
            if shards is not None and shards > 1:
                raise UsageError("a dispatcher that was made before knows whole experts only; give its name instead")
            self.dispatcher = dispatcher
            name = "given"
            self.layout = ExpertLayout(num_experts=num_experts, num_ranks=dispatcher.num_ranks)
            self.rank = 0
            self.meter = dispatcher.meter
        else:
            ranks = 1 if mesh is None else mesh.size()
            if shards is None:
                shards = ranks // num_experts if num_experts < ranks and ranks % num_experts == 0 else 1
            self.layout = ExpertLayout(num_experts=num_experts, num_ranks=ranks, shards=shards)
            self.dispatcher = make_dispatcher(dispatcher, self.layout.num_slots, mesh, codec=codec)
            name = next(key for key, (_, kind) in DISPATCHERS.items() if isinstance(self.dispatcher, kind))
            self.rank = 0 if mesh is None else _place(mesh)
            self.meter = self.dispatcher.meter
        self._made[name] = self.dispatcher
        self._local = LocalDispatcher(num_experts)
        self.default = Plan(r=self.layout.shards, degree=1, algorithm=name)
        self.duplicates = None if duplicates is None else Duplicates(duplicates.get_group(), self.meter)
        if self.duplicates is not None and self.dispatcher.same_tokens:
            raise UsageError(f"dispatcher {name!r} has the same tokens on all ranks already")

    @property
    def num_senders(self) -> int:
        """Ranks with tokens of their own."""
        return self.layout.num_ranks // (1 if self.duplicates is None else self.duplicates.size)

    @property
    def owned(self) -> Any:
        """Experts of this rank."""
        return self.dispatcher.experts if "given" in self._made else self.layout.of(self.rank)

    @property
    def shard(self) -> tuple[int, int]:
        """Which slice of them this rank has, of how many."""
        return self.rank % self.layout.shards, self.layout.shards

    def team(self) -> DeviceMesh:
        """Ranks that share experts with this one. The first call may make a group: all of them make it."""
        if self.mesh is None:
            raise UsageError("experts without a mesh are whole")
        group = subgroup(flat_group(self.mesh), self.layout.members(self.rank, r=1))
        return DeviceMesh.from_group(group, self.mesh.device_type)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Exchanges that a call can choose between."""
        if self.mesh is None or "given" in self._made or self.dispatcher.same_tokens or not is_in_order(self.mesh):
            return (self.default.algorithm,)
        plain = isinstance(self.codec, IdentityCodec)
        two = self.mesh.ndim == 2
        return ("all_to_all", *(("hierarchical",) if two else ()), *(("all_gather",) if plain else ()))

    def plan(
        self,
        base: Plan | None = None,
        *,
        r: int | None = None,
        degree: int | None = None,
        algorithm: str | None = None,
        partition: Partition | None = None,
    ) -> Plan:
        """A plan, by default the default one, with what a call wants otherwise.

        Raises:
            UsageError: there is no such ``r``, or the exchange cannot be used here.
        """
        base = base or self.default
        if (r, degree, algorithm, partition) == (None,) * 4 and base is self.default:
            return base
        wanted = Plan(
            r=base.r if r is None else self.layout.checked(r),
            degree=base.degree if degree is None else degree,
            algorithm=base.algorithm if algorithm is None else algorithm,
            partition=base.partition if partition is None else partition,
        )
        if wanted.algorithm not in self.algorithms:
            raise UsageError(
                f"exchange {wanted.algorithm!r} cannot be used by this layer; expected one of "
                f"{', '.join(self.algorithms)}"
            )
        if "given" in self._made and wanted.r != 1:
            raise UsageError("a dispatcher that was made before knows whole experts only: r = 1")
        if wanted.partition == "experts" and wanted.degree > 1 and not isinstance(self.dispatcher.experts, range):
            raise UsageError("experts in slots of a placement cannot be taken in parts; partition by tokens")
        if self.mesh is not None and wanted.r != self.layout.shards and not is_in_order(self.mesh):
            raise UsageError(f"r = {wanted.r} wants a mesh whose ranks ascend, row by row")
        return wanted

    def run(
        self, experts: nn.Module, x_TD: Tensor, routing: RoutingResult, plan: Plan, *, gradient_scale: float
    ) -> Tensor:
        """Tokens through their experts.

        Args:
            experts: as ``mycel.moe.experts.Experts``.
            x_TD: this rank's tokens.
            routing: of them.
            plan: alike on all ranks.
            gradient_scale: factor of the experts' gradients.
        """
        alone = self.layout.num_ranks == 1 and self.duplicates is None
        run = self._run if alone or TRACED_OVER_RANKS else self._run_apart
        return run(experts, x_TD, routing, plan, gradient_scale)

    def _run(
        self, experts: nn.Module, x_TD: Tensor, routing: RoutingResult, plan: Plan, gradient_scale: float
    ) -> Tensor:
        num_tokens = x_TD.shape[0]
        if self.duplicates is not None:
            x_TD, weights_TK = self.duplicates.drop([x_TD, routing.top_k_weights])
            index_TK = self.duplicates.own(routing.top_k_index)
            counts_E = count_tokens(index_TK, routing.num_experts)
            routing = routing._replace(top_k_index=index_TK, top_k_weights=weights_TK, tokens_per_expert=counts_E)
        work, options = self._work(routing, plan, gradient_scale)
        y_TD: Tensor = experts(x_TD, work, **options)
        return y_TD if self.duplicates is None else self.duplicates.gather(y_TD, num_tokens)

    @untraced
    def _run_apart(self, *arguments: Any) -> Tensor:
        return self._run(*arguments)

    def _work(self, routing: RoutingResult, plan: Plan, gradient_scale: float) -> tuple[Work, dict[str, Any]]:
        options: dict[str, Any] = {"gradient_scale": gradient_scale}
        gather = self._gather(plan.r)
        if gather is not None:
            options["gather"] = gather
        if plan.r == 0:
            if self.dispatcher.same_tokens:  # every rank hears what all others hear
                options["gradient_scale"] /= self.layout.num_ranks
            return partial(_whole, self._local, routing), options
        dispatcher = self._named(plan.algorithm)
        routing = self.layout.spread(routing, r=plan.r, rank=self.rank, same_tokens=dispatcher.same_tokens)
        if plan.partition == "tokens" or plan.degree == 1:
            return partial(_chunked, dispatcher, routing, plan.degree), options
        options["parts"] = parts = parts_of_experts(self.layout.width, plan.degree)
        return partial(_by_experts, dispatcher, routing, parts), options

    def _named(self, algorithm: str) -> TokenDispatcher:
        if algorithm not in self._made:
            like: dict[str, Any] = {"codec": self.codec, "meter": self.meter}
            self._made[algorithm] = make_dispatcher(algorithm, self.layout.num_slots, self.mesh, **like)
        return self._made[algorithm]

    def _gather(self, r: int) -> WeightGather | None:
        """What brings the weights of other ranks, if any travel. The first call of an ``r`` may make a group."""
        if self.mesh is None or self.layout.num_ranks == 1 or r == self.layout.shards:
            return None
        if r not in self._gathers:
            group = subgroup(flat_group(self.mesh), self.layout.members(self.rank, r=r))
            self._gathers[r] = WeightGather(layout=self.layout, rank=self.rank, r=r, group=group, meter=self.meter)
        return self._gathers[r]


def _place(mesh: DeviceMesh) -> int:
    """Of this rank, among those that experts are divided over; in two dimensions, row by row."""
    if mesh.ndim == 1:
        return dist.get_rank(mesh.get_group())
    return int(mesh.mesh.flatten().tolist().index(dist.get_rank()))


def _chunked(
    dispatcher: TokenDispatcher, routing: RoutingResult, degree: int, x_TD: Tensor, computes: Sequence[Compute]
) -> Tensor:
    return pipelined(dispatcher, x_TD, routing, computes[0], degree)


def _whole(dispatcher: TokenDispatcher, routing: RoutingResult, x_TD: Tensor, computes: Sequence[Compute]) -> Tensor:
    return pipelined(dispatcher, x_TD, routing, computes[0], 1)


def _by_experts(
    dispatcher: TokenDispatcher,
    routing: RoutingResult,
    parts: Sequence[range],
    x_TD: Tensor,
    computes: Sequence[Compute],
) -> Tensor:
    return pipelined_by_experts(dispatcher, x_TD, routing, computes, parts)
