"""From what a search found to a plan: names in place of numbers, and an order in place of counts."""

from __future__ import annotations

import hashlib
import json

from mycel.errors import UsageError
from mycel.pipeline.order import Order
from mycel.planning.cluster import Cluster
from mycel.planning.models.json_format import ModelDescription
from mycel.planning.models.shape import ModelShape
from mycel.planning.plan.modules import cut_modules, digest_of_model, layers_among, layouts_of, module_names
from mycel.planning.plan.plan import Plan
from mycel.planning.plan.record import PlannedCluster, PlannedModel, RunnerUp
from mycel.planning.search import Candidate, Found
from mycel.planning.search.score import order_of
from mycel.topology.device import device_to_json

__all__ = ["digest_of_cluster", "plan_of", "planned_cluster"]

#: Others that a plan remembers.
_RUNNERS_UP = 7


def plan_of(
    found: Found,
    candidate: Candidate | None = None,
    model: ModelDescription | ModelShape | None = None,
    cluster: Cluster | None = None,
    *,
    limits: tuple[str, ...] = (),
    order: Order | None = None,
) -> Plan:
    """The plan of something that a search found.

    Args:
        found: by a search.
        candidate: one of it; the best if not given.
        model: that it was searched for.
        cluster: that it was searched on.
        limits: that the search kept, as people wrote them.
        order: of its stages; 1F1B, or interleaved where a rank has several, if not given.

    Raises:
        UsageError: no model or cluster; a model whose layers cannot be told apart; an order of other stages.
    """
    if model is None or cluster is None:
        raise UsageError("a plan is of a model on a cluster: give both that were searched with")
    chosen = candidate or found.best
    described = model if isinstance(model, ModelDescription) else ModelDescription(shape=model)
    names, layers = module_names(described), layers_among(described)
    job = chosen.job
    order = order or order_of(job.mesh.pp, job.num_micro_batches, job.chunks)
    size = len(chosen.ranks) // job.mesh.pp
    places = [chosen.ranks[place * size : (place + 1) * size] for place in range(job.mesh.pp)]
    return Plan(
        model=PlannedModel(
            shape=described.shape, digest=digest_of_model(described.shape, names), modules=names, layers=layers
        ),
        cluster=planned_cluster(cluster),
        job=job,
        ranks=chosen.ranks,
        cut=cut_modules(names, layers, chosen.cut),
        stage_ranks=tuple(places[place] for place in order.stage_ranks),
        layouts=layouts_of(described) if job.mesh.tp * job.coshard > 1 else (),
        order=order,
        stage_seconds=chosen.stage_seconds,
        predicted=chosen.seconds,
        memory=chosen.memory,
        limits=limits,
        runners_up=tuple(_runner_up(other) for other in found.candidates if other is not chosen)[:_RUNNERS_UP],
        binding=chosen.binding,
        replica_seconds=chosen.replica_seconds,
    )


def planned_cluster(cluster: Cluster) -> PlannedCluster:
    """What a plan says of a cluster.

    Args:
        cluster: that it is for.
    """
    return PlannedCluster(
        name=cluster.name,
        digest=digest_of_cluster(cluster),
        rank_names=cluster.rank_names,
        memory_bytes=cluster.memory_bytes,
        devices=tuple(device.name for device in cluster.devices),
        nodes=cluster.nodes,
    )


def digest_of_cluster(cluster: Cluster) -> str:
    """Twelve letters that differ between clusters of other wires, devices or memory; names are no part.

    Args:
        cluster: of which.
    """
    rates = cluster.machine.rates
    wires: object = (
        [rates.ranks_per_node, rates.link_gbps, rates.network_gbps]
        if cluster.topology is None
        else [[link.src, link.dst, link.capacity, link.latency_s] for link in cluster.topology.links]
    )
    nodes = {node: number for number, node in enumerate(dict.fromkeys(cluster.nodes))}
    kinds = {device: number for number, device in enumerate(dict.fromkeys(cluster.devices))}
    facts = [
        wires,
        cluster.topology.unit if cluster.topology is not None else "",
        [nodes[node] for node in cluster.nodes],
        [device_to_json(device) for device in kinds],
        [kinds[device] for device in cluster.devices],
        list(cluster.memory_bytes),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:12]


def _runner_up(other: Candidate) -> RunnerUp:
    return RunnerUp(
        job=other.job,
        layers=other.cut,
        seconds=other.seconds.seconds,
        memory_bytes=max(other.memory),
        binding=other.binding,
    )
