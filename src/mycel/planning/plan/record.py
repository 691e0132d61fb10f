"""What a plan says: which rank holds what, in what order stages work, what it costs; and whether that has a form.

A plan says all that a run needs and nothing that it could look up differently elsewhere: ranks are explicit, stages
are lists of module names, the order is a list of actions. Beside that stand the predictions that it was chosen by,
so that whoever reads it later can compare.

Construction checks the form. Whether a plan is *right* is for ``mycel.planning.plan.validate`` to say, which looks at
nothing but the plan, and at the cluster and model that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.pipeline.order import Order
from mycel.planning.job import Job
from mycel.planning.models.shape import ModelShape
from mycel.planning.predict import Prediction

__all__ = ["PLAN_VERSION", "PlanRecord", "PlannedCluster", "PlannedModel", "RunnerUp"]

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The model that a plan is for.

    Attributes:
        shape: its sizes.
        digest: of sizes and module names (``digest_of_model``); two models with one digest can share a plan.
        modules: names of what a pipeline may be cut between, in order of execution.
        layers: those of them that are transformer layers.
    """

    shape: ModelShape
    digest: str
    modules: tuple[str, ...]
    layers: tuple[str, ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.modules or len(set(self.modules)) < len(self.modules):
            raise UsageError(f"model {self.shape.name!r}: its modules must have names, each of them once")
        chosen = set(self.layers)
        if len(self.layers) != self.shape.num_layers or self.layers != tuple(m for m in self.modules if m in chosen):
            raise UsageError(
                f"model {self.shape.name!r}: {len(self.layers)} modules are named as its {self.shape.num_layers} "
                "layers; they must be as many, in the order of the modules"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """The cluster that a plan is for.

    Attributes:
        name: what people call it.
        digest: of its fabric and devices (``digest_of_cluster``).
        rank_names: of every rank, by number.
        memory_bytes: of every rank's device.
        devices: names of the ranks' devices.
        nodes: names of the ranks' nodes.
    """

    name: str
    digest: str
    rank_names: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    devices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.rank_names or len(self.rank_names) != len(self.memory_bytes):
            raise UsageError(
                f"cluster {self.name!r}: {len(self.rank_names)} names of ranks and {len(self.memory_bytes)} sizes of "
                "memory; each rank has one of both"
            )
        for what, names in (("devices", self.devices), ("nodes", self.nodes)):
            if names and len(names) != len(self.rank_names):
                raise UsageError(
                    f"cluster {self.name!r}: {len(names)} {what} for {len(self.rank_names)} ranks; name one for each"
                )

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return len(self.rank_names)

    def node_of(self, rank: int) -> str:
        """Name of a rank's node; its own where nodes are not known.

        Args:
            rank: from 0 on.
        """
        return self.nodes[rank] if self.nodes else self.rank_names[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A way to train that lost against the plan.

    Attributes:
        job: degrees, batch and policy.
        layers: of each stage.
        seconds: that a step is expected to take.
        memory_bytes: of its fullest rank.
        binding: what keeps it from being faster.
    """

    job: Job
    layers: tuple[int, ...]
    seconds: float
    memory_bytes: int
    binding: str = ""

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The fields of a plan, for what examines and writes them; people have a ``Plan``, which is one.

    Attributes:
        model: that is trained.
        cluster: that it is trained on.
        job: degrees, batch, recomputation, sharding, offloading.
        ranks: of the cluster at every place of the mesh: tensor parallelism is innermost, then context, data, and
            the pipeline outermost.
        cut: names of the modules of every stage, in order of execution.
        stage_ranks: ranks that hold each stage, in the order of the mesh.
        layouts: pattern of module names (``*`` is a number) and how tensor parallelism shares the modules that it
            names, one of ``mycel.planning.models.json_format.LAYOUTS``; empty without tensor parallelism.
        order: what every place of the pipeline does, one row each; of a replica that has fewer micro-batches than
            another, as many of them as it has.
        stage_seconds: forward and backward of one micro-batch on each stage, with its exchanges, on the slowest of
            its ranks.
        predicted: time of a step.
        memory: bytes that each rank of the cluster is expected to hold; 0 for one that the plan does not use.
        limits: that the user wrote and the search kept.
        runners_up: what lost, the fastest first.
        binding: what keeps it from being faster, as the search saw it.
        replica_seconds: ``stage_seconds`` of each replica, where they have unlike many micro-batches; else empty.
        version: of this form.

    Raises:
        UsageError: parts that do not go together: a mesh that does not multiply to its ranks, lists whose lengths
            differ.
    """

    model: PlannedModel
    cluster: PlannedCluster
    job: Job
    ranks: tuple[int, ...]
    cut: tuple[tuple[str, ...], ...]
    stage_ranks: tuple[tuple[int, ...], ...]
    layouts: tuple[tuple[str, str], ...]
    order: Order
    stage_seconds: tuple[tuple[float, float], ...]
    predicted: Prediction
    memory: tuple[int, ...]
    limits: tuple[str, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    binding: str = ""
    replica_seconds: tuple[tuple[tuple[float, float], ...], ...] = ()
    version: int = field(default=PLAN_VERSION)

    __repr__ = brief

    def __post_init__(self) -> None:
        mesh = self.job.mesh
        if len(self.ranks) != mesh.num_ranks:
            raise UsageError(
                f"the mesh pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x tp {mesh.tp} has {mesh.num_ranks} ranks, and "
                f"the plan names {len(self.ranks)}; their product must be equal"
            )
        stages = mesh.pp * self.job.chunks
        for what, got in (
            ("lists of modules", len(self.cut)),
            ("lists of ranks", len(self.stage_ranks)),
            ("pairs of seconds", len(self.stage_seconds)),
        ):
            if got != stages:
                raise UsageError(f"{stages} stages (pp {mesh.pp} x {self.job.chunks} chunks), and {got} {what}")
        if len(self.memory) != self.cluster.num_ranks:
            raise UsageError(f"memory of {len(self.memory)} ranks, and the cluster has {self.cluster.num_ranks}")
        if len(self.replica_seconds) != len(self.job.shares):
            raise UsageError(
                f"replica_seconds of {len(self.replica_seconds)} replicas, and {len(self.job.shares)} have shares of "
                "their own of the batch; each of these has both"
            )
        for replica, seconds in enumerate(self.replica_seconds):
            if len(seconds) != stages:
                raise UsageError(f"replica_seconds of replica {replica}: {len(seconds)} pairs for {stages} stages")

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, all chunks."""
        return len(self.cut)

    @property
    def stage_places(self) -> tuple[int, ...]:
        """Place in the pipeline, which is the row of the order, of each stage."""
        return self.order.stage_ranks

    def group(self, place: int) -> tuple[int, ...]:
        """Ranks of one place of the pipeline, in the order of the mesh.

        Args:
            place: from 0 to ``pp - 1``.
        """
        size = len(self.ranks) // self.job.mesh.pp
        return self.ranks[place * size : (place + 1) * size]

    def replica_of(self, rank: int) -> int | None:
        """Which part of the batch a rank of the cluster works on; ``None`` where the plan does not use it.

        Args:
            rank: of the cluster.
        """
        place = self.place_of(rank)
        if place is None:
            return None
        return self.group(place).index(rank) // (self.job.mesh.cp * self.job.mesh.tp)

    def seconds_of(self, replica: int) -> tuple[tuple[float, float], ...]:
        """Forward and backward of one micro-batch on each stage of a replica.

        Args:
            replica: from 0 to ``dp - 1``.
        """
        return self.replica_seconds[replica] if self.replica_seconds else self.stage_seconds

    def order_of(self, replica: int) -> Order:
        """What every place of a replica's pipeline does.

        Args:
            replica: from 0 to ``dp - 1``.
        """
        return self.order.of_first(self.job.batches_of(replica))

    def place_of(self, rank: int) -> int | None:
        """Place in the pipeline of a rank of the cluster; ``None`` where the plan does not use it.

        Args:
            rank: of the cluster.
        """
        if rank not in self.ranks:
            return None
        return self.ranks.index(rank) // (len(self.ranks) // self.job.mesh.pp)
