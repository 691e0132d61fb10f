"""What the ranks of a running job can do, for planning: products, memory, messages; written as a machine.

Products of square matrices, large and small, give a rate and the number of rows at which half of it is left; a large
addition gives the memory's; pairs of ranks inside and between nodes send to each other all at once, as the stages of
a pipeline do. No step is measured, so predictions made of it carry the error that is assumed of such.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from mycel.cost import Device
from mycel.errors import UsageError
from mycel.planning.machines import Fit, Machine
from mycel.planning.step.coefficients import Coefficients, limits
from mycel.planning.step.links import Rates

__all__ = ["RankRates", "machine_of", "measure_links", "measure_rank"]

#: Operations on the host that a transformer layer comes to, forward.
_LAYER_OPERATIONS = 25
#: Of steps that a measurement of parts predicts: assumed.
_ERROR = 0.3
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """What one rank was seen to do.

    Attributes:
        node: name of its node.
        flops: operations a second in large products.
        half_rows: rows of a product at which half of that is left.
        memory_gbps: 10^9 bytes a second read and written.
        operation_s: of the smallest operation.
        memory_bytes: of the device, or of the machine for each of its ranks.
    """

    node: str
    flops: float
    half_rows: float
    memory_gbps: float
    operation_s: float
    memory_bytes: int


def measure_rank(device: torch.device, *, size: int = 1024, ranks_of_node: int = 1) -> RankRates:
    """Measure this rank; all ranks at once, as they compute at once in training.

    Args:
        device: where it computes.
        size: of the large product's matrices.
        ranks_of_node: that share a machine's memory, where the device is a processor.

    Raises:
        UsageError: a size that is too small to tell rates by.
    """
    if size < 64:
        raise UsageError(f"products of {size} rows tell no rate; expected a size from 64 on")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    few = matrix[: max(8, size // 64)].contiguous()
    large = _seconds(lambda: matrix @ matrix, device)
    small = _seconds(lambda: few @ matrix, device)
    rate = 2.0 * size**3 / large
    # Rows r at which a product takes (1 + half / r) times what the rate says.
    ideal = 2.0 * len(few) * size**2 / rate
    half_rows = max(0.0, (small / ideal - 1.0) * len(few))
    whole = torch.randn(1 << 22, device=device, dtype=dtype)
    other = torch.empty_like(whole)
    added = _seconds(lambda: torch.add(whole, 1.0, out=other), device)
    tiny = torch.zeros(8, device=device, dtype=dtype)
    return RankRates(
        node=os.environ.get("GROUP_RANK", "0"),
        flops=rate,
        half_rows=half_rows,
        memory_gbps=2.0 * whole.numel() * whole.element_size() / added / 1e9,
        operation_s=_seconds(lambda: tiny.add_(1.0), device, calls=200),
        memory_bytes=_memory(device) // max(1, ranks_of_node),
    )


def measure_links(nodes: Sequence[str], *, num_bytes: int = 1 << 22) -> tuple[float, float, float]:
    """Messages between ranks of the default group: inside nodes, between them, and how long a short one takes.

    Args:
        nodes: name of the node of every rank.
        num_bytes: of a long message.

    Returns:
        10^9 bytes a second of one rank inside a node (0 where no node has two), between nodes (0 where there is one),
        and seconds of a message of 8 bytes; the same on all ranks: those of the slowest pair.
    """
    inside, between = _pairs(nodes, is_inside=True), _pairs(nodes, is_inside=False)
    found = []
    for pairs in (inside, between):
        seconds = _exchanged(pairs, num_bytes) if pairs else 0.0
        found.append(num_bytes / seconds / 1e9 if seconds else 0.0)
    short = _exchanged(inside or between, 8) if inside or between else 0.0
    return found[0], found[1], short


def machine_of(
    name: str, ranks: Sequence[RankRates], link_gbps: float, network_gbps: float, short_s: float
) -> Machine:
    """A machine for ``mycel plan search --machine FILE``: the slowest rank's device, and the links.

    Args:
        name: of it.
        ranks: what each was seen to do.
        link_gbps: inside a node; 0 where it was not measured.
        network_gbps: between nodes; 0 where it was not measured.
        short_s: of a short message.
    """
    most = {key: limit.high for key, limit in limits().items()}
    least = {key: limit.low for key, limit in limits().items()}

    def allowed(key: str, value: float) -> float:
        return min(most[key], max(least[key], value))

    slowest = min(ranks, key=lambda rank: rank.flops)
    per_node = max([rank.node for rank in ranks].count(rank.node) for rank in ranks)
    wire = {key: most[key] for key in ("link_efficiency", "network_efficiency", "boundary_efficiency")}
    inside, outside = link_gbps or network_gbps, network_gbps or link_gbps
    values = {
        "matmul_efficiency": most["matmul_efficiency"],
        "memory_efficiency": most["memory_efficiency"],
        "matmul_rows": allowed("matmul_rows", slowest.half_rows),
        "launch_s": allowed("launch_s", _LAYER_OPERATIONS * slowest.operation_s),
        "exchange_s": allowed("exchange_s", short_s),
        **wire,
    }
    fit = Fit(
        name="measured",
        coefficients=Coefficients().with_values(values),
        fitted=tuple(values),
        mean_error=_ERROR,
        median_error=_ERROR,
        max_error=2 * _ERROR,
        num_rows=0,
        source=f"{len(ranks)} ranks measured: products, memory, messages; no step",
    )
    return Machine(
        name=name,
        # What is measured is reached: the data sheet's figure is what gives that at the highest efficiency there is.
        device=Device(
            name=f"measured {name}",
            flops=slowest.flops / most["matmul_efficiency"],
            memory_bytes=min(rank.memory_bytes for rank in ranks),
            memory_gbps=min(rank.memory_gbps for rank in ranks) / most["memory_efficiency"],
            source="measured",
        ),
        rates=Rates(
            ranks_per_node=per_node,
            link_gbps=(inside or 1.0) / most["link_efficiency"],
            network_gbps=(outside or 1.0) / most["network_efficiency"],
        ),
        fits=(fit,),
    )


def _pairs(nodes: Sequence[str], *, is_inside: bool) -> list[tuple[int, int]]:
    """Disjoint pairs of ranks of one node, or of different nodes."""
    free = set(range(len(nodes)))
    pairs = []
    for rank in range(len(nodes)):
        if rank not in free:
            continue
        other = next((r for r in sorted(free - {rank}) if (nodes[r] == nodes[rank]) == is_inside), None)
        if other is not None:
            pairs.append((rank, other))
            free -= {rank, other}
    return pairs


def _exchanged(pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
    """Seconds until every first rank of a pair has sent to its second, of the slowest pair."""
    rank = dist.get_rank()
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    reply = torch.zeros(1, dtype=torch.uint8, device=device)
    own = next((pair for pair in pairs if rank in pair), None)
    spent = []
    for turn in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        if own is not None and rank == own[0]:
            dist.send(message, own[1])
            dist.recv(reply, own[1])
        elif own is not None:
            dist.recv(message, own[0])
            dist.send(reply, own[0])
        if turn:
            spent.append(time.perf_counter() - begin)
    slowest = torch.tensor([median(spent) if own is not None else 0.0], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _seconds(call: Callable[[], object], device: torch.device, *, calls: int = 1) -> float:
    """Median seconds of a call."""
    spent = []
    for turn in range(_REPEATS + 1):
        _finish(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        _finish(device)
        if turn:
            spent.append((time.perf_counter() - begin) / calls)
    return max(median(spent), 1e-9)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
