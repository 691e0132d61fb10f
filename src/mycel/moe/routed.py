"""The way of a token: to the ranks of its experts, through them, and back, by the schedule of the call."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mycel.comm.groups import flat_group, is_in_order, subgroup
from mycel.comm.sharing import shared_pass
from mycel.errors import UsageError
from mycel.moe.dispatch import DISPATCHERS, LocalDispatcher, TokenDispatcher, make_dispatcher
from mycel.moe.dispatch.token_replicas import TokenReplicas
from mycel.moe.divided import leave_alone, refuse_shards
from mycel.moe.expert_mlp import ApartWeights, ExpertKind, ExpertWeights, expert_mlp, tokens_mlp
from mycel.moe.overlap import Beside, overlapped_experts, overlapped_tokens, overlapped_whole
from mycel.moe.parallel import ExpertParallel
from mycel.moe.schedule import ExpertSchedule, Partition
from mycel.moe.slices import WeightGather, WeightUse
from mycel.moe.slots import RoutingResult, count_tokens, spread_over_slices
from mycel.planning.placement import ExpertLayout
from mycel.untraced import untraced
from mycel.wire import IdentityCodec, make_codec

__all__ = ["HeldExperts", "RoutedExperts"]

#: ``torch.compile`` traces what lies between exchanges. In torch 2.11 it fails there; 2.12 was not tried.
TRACED_OVER_RANKS = torch.__version__ >= "2.13"  # compares releases, not letters


class HeldExperts(Protocol):
    """The experts that one rank holds, whoever made them: a layer, a Hugging Face model, or a far memory."""

    @property
    def owned(self) -> Sequence[int]:
        """Which experts of the layer they are."""

    @property
    def kind(self) -> ExpertKind:
        """What they compute beside the two maps."""

    def weights(self, use: WeightUse) -> ExpertWeights | ApartWeights:
        """Of one call. The only place where shards, gathers, tied copies, far memory and foreign weights differ."""


class RoutedExperts:
    """Dispatch, compute, combine: one layer's experts over the ranks of a description.

    Args:
        num_experts: of the layer.
        parallel: how they are divided.

    Attributes:
        layout: which rank has what.
        rank: in the layout.
        dispatcher: of the default schedule.
        default: the schedule of calls that say nothing.
        gradient_scale: factor of the experts' gradients.

    Raises:
        UsageError: settings that do not fit together.
    """

    def __init__(self, num_experts: int, parallel: ExpertParallel) -> None:
        mesh, self.mesh = parallel.mesh, parallel.mesh
        self.codec = make_codec(parallel.codec) if isinstance(parallel.codec, str) else parallel.codec
        self._gathers: dict[int, WeightGather] = {}
        wanted, shards = parallel.dispatcher, parallel.tensor_shards
        #: The only one, if it was made elsewhere.
        self._given = wanted is not None and not isinstance(wanted, str)
        if wanted is None or isinstance(wanted, str):
            ranks = 1 if mesh is None else mesh.size()
            if shards is None:
                shards = ranks // num_experts if num_experts < ranks and ranks % num_experts == 0 else 1
            self.layout = ExpertLayout(num_experts=num_experts, num_ranks=ranks, tensor_shards=shards)
            self.dispatcher = make_dispatcher(wanted, self.layout.num_slots, mesh, codec=self.codec)
            name = next(key for key, (_, kind) in DISPATCHERS.items() if isinstance(self.dispatcher, kind))
            self.rank = 0 if mesh is None else _place(mesh)
        else:
            if shards is not None and shards > 1:
                raise UsageError("a dispatcher that was made before knows whole experts only; give its name instead")
            self.dispatcher = wanted if isinstance(wanted, TokenDispatcher) else wanted(num_experts)
            name, self.rank = "given", 0
            self.layout = ExpertLayout(num_experts=num_experts, num_ranks=self.dispatcher.num_ranks)
        self.meter = self.dispatcher.meter
        self._made = {name: self.dispatcher}
        self._local = LocalDispatcher(num_experts)
        self.default = ExpertSchedule(r=self.layout.tensor_shards, degree=parallel.degree, algorithm=name)
        same, replicas = self.dispatcher.same_tokens, parallel.replicas
        self.replicas = None if replicas is None else TokenReplicas(replicas.get_group(), self.meter)
        if self.replicas is not None and same:
            raise UsageError(f"dispatcher {name!r} has the same tokens on all ranks already")
        if self.layout.num_ranks > 1:
            leave_alone()
        self._looked = False  # whether FSDP2 shards the experts further, and over which ranks
        num_senders = self.layout.num_ranks // (1 if self.replicas is None else self.replicas.size)
        self.gradient_scale = 1.0 if same or parallel.gradients == "sum" else 1.0 / num_senders

    def __call__(
        self,
        experts: HeldExperts,
        x_TD: Tensor,
        routing: RoutingResult,
        schedule: ExpertSchedule | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        """Tokens through their experts.

        Args:
            experts: those of this rank.
            x_TD: this rank's tokens, in the type that is computed in.
            routing: of them.
            schedule: alike on all ranks; ``None``: the default one.
            beside: what else is to be computed, while tokens travel if they do.

        Returns:
            Shape and type of ``x``.
        """
        alone = self.layout.num_ranks == 1 and self.replicas is None
        if not alone and shared_pass() is not None:
            self._refuse_other_tokens()
        module = getattr(experts, "module", experts)  # those of Hugging Face stand beside it
        if not (alone or self._looked) and getattr(module, "_is_fsdp_managed_module", False):
            refuse_shards(module, self.mesh)
            self._looked = True
        run = self._run if alone or TRACED_OVER_RANKS else self._run_apart
        if torch.compiler.is_compiling():  # whose graph is put in an order of its own
            beside = None
        return run(experts, x_TD, routing, schedule or self.default, beside)

    def _run(
        self,
        experts: HeldExperts,
        x_TD: Tensor,
        routing: RoutingResult,
        schedule: ExpertSchedule,
        beside: Beside | None,
    ) -> Tensor:
        num_tokens = x_TD.shape[0]
        if self.replicas is not None:  # each sends its share
            x_TD, weights_TK = self.replicas.drop([x_TD, routing.top_k_weights])
            index_TK = self.replicas.own(routing.top_k_index)
            counts_E = count_tokens(index_TK, routing.num_experts)
            routing = routing._replace(top_k_index=index_TK, top_k_weights=weights_TK, tokens_per_expert=counts_E)
        kind, weights = experts.kind, experts.weights(self._use(x_TD, schedule))
        dispatcher: TokenDispatcher = self._local  # r = 0: all experts came here
        if schedule.r:
            dispatcher = self._named(schedule.algorithm)
            same = dispatcher.same_tokens
            routing = spread_over_slices(self.layout, routing, r=schedule.r, rank=self.rank, same_tokens=same)
        if schedule.r and schedule.degree > 1:
            if schedule.partition == "tokens":
                y_TD = overlapped_tokens(dispatcher, x_TD, routing, weights, kind, schedule.degree, beside)
            else:
                chunks = self.layout.width, schedule.degree
                y_TD = overlapped_experts(dispatcher, x_TD, routing, weights, kind, *chunks, beside)
        else:
            at_once = tokens_mlp(x_TD, routing, weights, kind) if isinstance(dispatcher, LocalDispatcher) else None
            if at_once is not None:
                y_TD = at_once
            elif beside is not None and not isinstance(dispatcher, LocalDispatcher):
                y_TD = overlapped_whole(dispatcher, x_TD, routing, weights, kind, beside)
            else:
                arrived = dispatcher.dispatch(x_TD, routing)
                rows_RD = expert_mlp(arrived.rows, arrived.tokens_per_expert, weights, kind)
                y_TD = dispatcher.combine(rows_RD, arrived)
        return y_TD if self.replicas is None else self.replicas.gather(y_TD, num_tokens)

    @untraced
    def _run_apart(self, *arguments: Any) -> Tensor:
        return self._run(*arguments)

    @untraced
    def _refuse_other_tokens(self) -> None:
        """Where a sequence is divided over ranks, they have other tokens, and none of them is a copy.

        Raises:
            UsageError: this layer takes some of them for ranks with the same tokens.
        """
        shared = shared_pass()
        same = self.group if self.dispatcher.same_tokens else None
        group = same if self.replicas is None else self.replicas.group
        if shared is None or shared.group is None or group is None:
            return
        wants = f"dispatcher={self.default.algorithm!r}" if self.replicas is None else "replicas="
        common = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(shared.group))
        if len(common) > 1:
            raise UsageError(
                f"ranks {', '.join(map(str, sorted(common)))} share a sequence and have other tokens of it, and "
                f"{wants} is for ranks with the same tokens: divide experts over them with ExpertParallel(mesh) alone"
            )

    # -- which rank has what ------------------------------------------------------------------------------------

    @property
    def owned(self) -> Sequence[int]:
        """Experts of this rank."""
        return self.dispatcher.experts if self._given else self.layout.of(self.rank)

    @property
    def shard(self) -> tuple[int, int]:
        """Which slice of them this rank has, of how many."""
        return self.rank % self.layout.tensor_shards, self.layout.tensor_shards

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that the experts are divided over; ``None``: they are whole, or a dispatcher made elsewhere hides it.

        The first use may make a group: all of them make it.
        """
        if self.layout.num_ranks == 1:
            return None
        return getattr(self.dispatcher, "group", None) if self.mesh is None else flat_group(self.mesh)

    def team(self) -> DeviceMesh:
        """Ranks that share experts with this one. The first call may make a group: all of them make it."""
        if self.mesh is None:
            raise UsageError("experts without a mesh are whole")
        group = subgroup(flat_group(self.mesh), self.layout.members(self.rank, r=1))
        return DeviceMesh.from_group(group, self.mesh.device_type)

    # -- schedules ----------------------------------------------------------------------------------------------

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Exchanges that a call can choose between."""
        if self.mesh is None or self._given or self.dispatcher.same_tokens or not is_in_order(self.mesh):
            return (self.default.algorithm,)
        plain = isinstance(self.codec, IdentityCodec)
        two = self.mesh.ndim == 2
        return ("all_to_all", *(("hierarchical",) if two else ()), *(("all_gather",) if plain else ()))

    def schedule(
        self,
        base: ExpertSchedule | None = None,
        *,
        r: int | None = None,
        degree: int | None = None,
        algorithm: str | None = None,
        partition: Partition | None = None,
    ) -> ExpertSchedule:
        """A schedule, by default the default one, with what a call wants otherwise.

        Raises:
            UsageError: there is no such ``r``, or the exchange cannot be used here.
        """
        base = base or self.default
        if (r, degree, algorithm, partition) == (None,) * 4 and base is self.default:
            return base
        wanted = ExpertSchedule(
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
        if self._given and wanted.r != 1:
            raise UsageError("a dispatcher that was made before knows whole experts only: r = 1")
        if wanted.partition == "experts" and wanted.degree > 1 and not isinstance(self.dispatcher.experts, range):
            raise UsageError("experts in slots of a placement cannot be taken in parts; partition by tokens")
        if self.mesh is not None and wanted.r != self.layout.tensor_shards and not is_in_order(self.mesh):
            raise UsageError(f"r = {wanted.r} wants a mesh whose ranks ascend, row by row")
        return wanted

    # -- what a schedule needs ----------------------------------------------------------------------------------

    def _named(self, algorithm: str) -> TokenDispatcher:
        if algorithm not in self._made:
            like: dict[str, Any] = {"codec": self.codec, "meter": self.meter}
            self._made[algorithm] = make_dispatcher(algorithm, self.layout.num_slots, self.mesh, **like)
        return self._made[algorithm]

    def _use(self, x_TD: Tensor, schedule: ExpertSchedule) -> WeightUse:
        scale = self.gradient_scale
        if schedule.r == 0 and self.dispatcher.same_tokens:  # every rank hears what all others hear
            scale /= self.layout.num_ranks
        return WeightUse(x_TD.dtype, scale, self._gather(schedule.r), self.dispatcher.tie)

    def _gather(self, r: int) -> WeightGather | None:
        """What brings the weights of other ranks, if any travel. The first call of an ``r`` may make a group."""
        if self.mesh is None or self.layout.num_ranks == 1 or r == self.layout.tensor_shards:
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
