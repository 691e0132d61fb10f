"""The time of a whole step, in parts: what ranks compute, exchange and wait for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from mycel.cost import Device
from mycel.planning.step.coefficients import Coefficients
from mycel.planning.step.compute import head_seconds, layer_seconds
from mycel.planning.step.links import Links
from mycel.planning.step.points import Numbers, Points

__all__ = [
    "LayerTimes",
    "Times",
    "exchange_seconds",
    "gradient_seconds",
    "layer_times",
    "optimizer_seconds",
    "step_times",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer of one micro-batch with its exchanges, one value a job.

    Attributes:
        forward: of it.
        backward: of it, with what is done again.
        tensor: of both, what exchanges of tensor, context and expert parallelism take.
    """

    forward: Numbers
    backward: Numbers
    tensor: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step, one value a job, in parts that add up.

    Attributes:
        compute: of layers, on the slowest rank, with what recomputation does again.
        head: of the head and the loss.
        tensor: exchanges of tensor, context and expert parallelism that are not hidden.
        bubble: the pipeline fills and empties.
        boundary: messages between stages.
        gradients: sums of gradients and gathers of shards that are not hidden.
        optimizer: the update.
        waiting: for the slowest replica.
        fixed: of a step, whatever its size.
    """

    compute: Numbers
    head: Numbers
    tensor: Numbers
    bubble: Numbers
    boundary: Numbers
    gradients: Numbers
    optimizer: Numbers
    waiting: Numbers
    fixed: Numbers

    @property
    def total(self) -> Numbers:
        """Of the step."""
        parts: Numbers = np.sum([getattr(self, f.name) for f in fields(self)], axis=0)
        return parts


def step_times(points: Points, device: Device, links: Links, coefficients: Coefficients) -> Times:
    """Seconds of a step of many jobs at once.

    A pipeline of stages that take ``F + B`` a micro-batch, the last one ``H`` more for the head, takes
    ``M (F + B + H) + (p - 1)(F + B) / v`` with 1F1B (``v`` chunks a rank when interleaved): the last stage is never
    idle between its first and its last micro-batch, and the first one reaches it after ``p - 1`` stages.

    Args:
        points: jobs.
        device: what they run on.
        links: what they exchange over.
        coefficients: how near both come to what they can do.

    References:
        Narayanan et al., SC 2021, sections 2.2 and 3 (bubble; interleaving; bytes of exchanges);
        Korthikanti et al., MLSys 2023, section 4.2 (sequence parallelism moves the same bytes);
        Rajbhandari et al., "ZeRO", SC 2020, section 7 (bytes of sharded states).
    """
    p, c = points, coefficients
    layer = layer_times(p, device, links, c)
    one = layer.forward + layer.backward
    full_stage = p.stage_layers * one
    mean_stage = p.layers / p.pp * one
    head = head_seconds(p, device, c)
    batches = p.micro_batches
    is_piped = p.pp > 1
    bubble = np.where(is_piped, (p.pp - 1.0) / p.chunks * mean_stage, 0.0)
    message = (
        p.element_bytes * p.tokens * p.hidden / np.where((p.sequence_parallel > 0) | (p.scattered > 0), p.tp, 1.0)
    )
    rate = links.hop(p.tp * p.cp * p.dp, p.pp, c.link_efficiency, c.boundary_efficiency)
    messages = 2.0 * p.chunks * batches + 2.0 * (p.pp - 1.0)
    boundary = np.where(is_piped, messages * (message / rate + c.exchange_s), 0.0)
    busy = batches * (full_stage + head) + bubble + boundary
    tensor = batches * p.stage_layers * layer.tensor
    share = np.minimum(tensor, batches * full_stage)
    replicas = p.dp * p.cp
    return Times(
        compute=batches * full_stage - share,
        head=batches * head,
        tensor=share,
        bubble=bubble,
        boundary=boundary,
        gradients=gradient_seconds(p, links, c, busy),
        optimizer=optimizer_seconds(p, device, c),
        waiting=busy * c.replica_wait * np.sqrt(2.0 * np.log(replicas)),
        fixed=np.full(len(p), c.step_s),
    )


def layer_times(points: Points, device: Device, links: Links, coefficients: Coefficients) -> LayerTimes:
    """Seconds of one layer of many jobs at once.

    Args:
        points: jobs.
        device: what they run on.
        links: what they exchange over.
        coefficients: how near both come to what they can do.
    """
    p, c = points, coefficients
    layer = layer_seconds(p, device, c)
    once, thrice = _tensor(p, links, c)
    exchanged = once * np.where(p.async_tp > 0, c.async_unhidden, 1.0)
    repeated = np.where(p.full > 0, exchanged, 0.0)
    forward = np.maximum(layer.forward + exchanged, layer.host) + thrice
    backward = np.maximum(layer.backward + exchanged, 2.0 * c.backward_launch * layer.host) + 2.0 * thrice
    again = np.where(p.full > 0, np.maximum(layer.again + repeated, layer.host), layer.again)
    return LayerTimes(forward=forward, backward=backward + again, tensor=2.0 * exchanged + repeated + 3.0 * thrice)


def _tensor(p: Points, links: Links, c: Coefficients) -> tuple[Numbers, Numbers]:
    """Exchanges of one layer forward: of tensor parallelism, and of context and expert parallelism.

    Tensor parallelism sums the activations twice; backward, and forward again, are as much.
    """
    size = p.element_bytes * p.tokens * p.hidden
    rate = links.ring(p.tp, np.ones(len(p)), c.link_efficiency, c.network_efficiency)
    steps = 1.0 + np.log2(p.tp)
    tensor = np.where(p.tp > 1, 2.0 * (2.0 * (p.tp - 1.0) / p.tp * size / rate + c.exchange_s * steps), 0.0)
    keys = 2.0 * p.element_bytes * p.tokens * p.kv_heads * p.head_dim / p.tp
    rate = links.ring(p.cp, p.tp, c.link_efficiency, c.network_efficiency)
    context = np.where(p.cp > 1, (p.cp - 1.0) * (keys / rate + c.exchange_s), 0.0)
    rate = links.ring(p.ep, p.tp, c.link_efficiency, c.network_efficiency)
    routed = 2.0 * p.top_k * size / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    experts = np.where(p.ep > 1, p.moe_share * ((p.ep - 1.0) / p.ep * routed / rate + 2.0 * c.exchange_s), 0.0)
    return tensor, context + experts


def gradient_seconds(p: Points, links: Links, c: Coefficients, busy: Numbers) -> Numbers:
    """Sums of gradients and gathers of shards beyond what computation hides.

    Args:
        p: jobs.
        links: what they exchange over.
        c: how near it comes to what it can do.
        busy: seconds of computation.
    """
    each, tied = exchange_seconds(p, links, c)
    exposed: Numbers = c.unhidden * np.minimum(each, busy) + np.maximum(0.0, each - busy) + tied
    return exposed


def exchange_seconds(p: Points, links: Links, c: Coefficients) -> tuple[Numbers, Numbers]:
    """Sums of gradients and gathers of shards, hidden or not; and the sum of a tied embedding's, which nothing hides.

    With FSDP (``zero`` 3) each micro-batch gathers the parameters forward and backward and sums its gradients; in a
    pipeline they stay gathered and are summed once. With ``zero`` 2 they are gathered once a step.

    Args:
        p: jobs.
        links: what they exchange over.
        c: how near it comes to what it can do.
    """
    replicas = p.dp * p.cp
    each = _reduced(p, links, c, p.rank_dense, replicas, p.tp)
    if np.any(p.experts > 0):
        each = each + _reduced(p, links, c, p.rank_experts, replicas / p.ep, p.tp * p.ep)
    # First and last stage sum the gradients of the embedding that both have.
    rate = links.hop(p.tp * replicas, p.pp, c.link_efficiency, c.gradient_efficiency)
    tied = np.where((p.pp > 1) & (p.tied > 0), p.outer_parameters / p.tp * p.gradient_bytes / rate, 0.0)
    return each, tied


def _reduced(p: Points, links: Links, c: Coefficients, count: Numbers, replicas: Numbers, stride: Numbers) -> Numbers:
    """Sums, and gathers where they are sharded, of some parameters that so many ranks, a stride apart, have."""
    wire = (replicas - 1.0) / replicas * count
    rate = links.ring(replicas, stride, c.link_efficiency, c.gradient_efficiency)
    often = np.where(p.pp > 1, 1.0, p.micro_batches)
    gathered = p.element_bytes * wire / rate
    summed = p.gradient_bytes * wire / rate
    seconds: Numbers = np.where(
        p.zero >= 3,
        often * ((1.0 + (p.pp == 1)) * gathered + summed),
        np.where(p.zero == 2, gathered + often * summed, 2.0 * summed),
    )
    return np.where(replicas > 1, seconds, 0.0)


#: 10^9 bytes a second between a host's memory and a device (PCIe 4.0, sixteen lanes, one way, measured about 25).
_HOST_GBPS = 25.0


def optimizer_seconds(p: Points, device: Device, c: Coefficients) -> Numbers:
    """The update of a rank's own parameters; from a state in the host's memory, gradients and parameters travel."""
    replicas = p.dp * p.cp
    sharded = p.rank_dense / replicas + p.rank_experts * p.ep / replicas
    own = np.where(p.zero >= 1, sharded, p.rank_dense + p.rank_experts)
    here = c.optimizer_bytes * own / (device.memory_gbps * 1e9 * c.memory_efficiency)
    there = own * (p.gradient_bytes + p.element_bytes) / (_HOST_GBPS * 1e9)
    seconds: Numbers = np.where(p.offloaded > 0, there + here, here)
    return seconds
