"""The few numbers of a step's time that no data sheet has, each with its unit and the limits that physics sets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["Coefficients", "Limit", "limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a coefficient may be.

    Attributes:
        low: least.
        high: most: no efficiency reaches 1, since what is left out of a formula would be hidden there.
        unit: of the number.
    """

    low: float
    high: float
    unit: str


def _number(default: float, low: float, high: float, unit: str) -> Any:
    return field(default=default, metadata={"limit": Limit(low=low, high=high, unit=unit)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """How near one way of running a model comes to what its machine can do.

    Attributes:
        matmul_efficiency: of the peak that large matrix products reach.
        matmul_rows: rows of a product at which its time is twice what the efficiency says (small ones are slower).
        attention_efficiency: of the peak, in attention that keeps its scores on the chip.
        memory_efficiency: of the memory's bandwidth.
        layer_elements: elements of the residual stream's size that a layer reads and writes forward, outside of
            products and scores; half of them on every tensor-parallel rank unless sequence parallelism shares them.
        softmax_elements: elements of the scores' size that a layer reads and writes forward where attention writes
            its scores to memory.
        logit_bytes: read and written for one logit, loss and its gradient.
        unsplit_head: times that the head's products take where one rank has all of it.
        launch_s: of the host for one layer forward: no layer is faster.
        backward_launch: the host's time for one layer backward, in units of twice that.
        unfused_launch: what is added to the host's time, as a share, where the scores' kernel cannot be fused: heads
            of a micro-batch on a rank that are no multiple of 4.
        link_efficiency: of the rate of links inside a node.
        exchange_s: of one exchange of a tensor-parallel group of two, before any byte; it grows with the logarithm.
        network_efficiency: of the network's rate, in tensor and context parallelism and in gathers of shards.
        boundary_efficiency: of the same, in messages between stages.
        gradient_efficiency: of the same, in sums of gradients.
        unhidden: share of gathers and sums of gradients that takes time beside computation; more than computation
            lasts is never hidden.
        async_unhidden: share of tensor parallelism's exchanges that takes time where they are asynchronous.
        optimizer_bytes: read and written for one parameter in its update.
        replica_wait: how unlike replicas are: they wait for the slowest, ``sqrt(2 ln dp)`` of these over the mean.
        float8_speedup: of products in 8 bits over those in 16, of the two that the data sheet says.
        compiled_elements: share of ``layer_elements`` that is left after fusion by a compiler.
        step_s: of a step, whatever its size.

    References:
        Williams et al., "Roofline", CACM 2009; Isaev et al., "Calculon", SC 2023 (efficiencies as the free numbers);
        Korthikanti et al., MLSys 2023, section 4 (what a layer reads and writes); for the wait, the expected largest
        of n normal numbers.
    """

    matmul_efficiency: float = _number(0.75, 0.3, 0.92, "of peak")
    matmul_rows: float = _number(0.0, 0.0, 3000.0, "rows")
    attention_efficiency: float = _number(0.4, 0.1, 0.9, "of peak")
    memory_efficiency: float = _number(0.8, 0.3, 0.95, "of bandwidth")
    layer_elements: float = _number(20.0, 2.0, 60.0, "elements")
    softmax_elements: float = _number(5.0, 1.0, 12.0, "elements")
    logit_bytes: float = _number(52.0, 12.0, 80.0, "bytes")
    unsplit_head: float = _number(1.0, 1.0, 4.0, "times")
    launch_s: float = _number(2e-4, 1e-5, 4e-3, "s")
    backward_launch: float = _number(1.0, 0.2, 2.0, "of twice launch_s")
    unfused_launch: float = _number(0.0, 0.0, 2.0, "of launch_s")
    link_efficiency: float = _number(0.75, 0.2, 0.85, "of rate")
    exchange_s: float = _number(1e-5, 1e-6, 5e-4, "s")
    network_efficiency: float = _number(0.8, 0.1, 0.95, "of rate")
    boundary_efficiency: float = _number(0.8, 0.05, 0.95, "of rate")
    gradient_efficiency: float = _number(0.7, 0.1, 0.95, "of rate")
    unhidden: float = _number(1.0, 0.0, 1.0, "of time")
    async_unhidden: float = _number(0.3, 0.0, 1.0, "of time")
    optimizer_bytes: float = _number(40.0, 5.0, 80.0, "bytes")
    replica_wait: float = _number(0.0, 0.0, 0.2, "of time")
    float8_speedup: float = _number(0.7, 0.4, 1.0, "of the data sheet's")
    compiled_elements: float = _number(0.5, 0.1, 1.0, "of layer_elements")
    step_s: float = _number(1e-3, 0.0, 0.1, "s")

    def __post_init__(self) -> None:
        for name, limit in limits().items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not limit.low <= value <= limit.high:
                raise UsageError(
                    f"coefficient {name} is {value!r} {limit.unit}; physics allows {limit.low} to {limit.high}"
                )

    def with_values(self, values: Mapping[str, float]) -> Coefficients:
        """The same with other values.

        Raises:
            UsageError: a name that is not known, or a value out of its limits.
        """
        known = limits()
        for name in values:
            if name not in known:
                raise UsageError(f"unknown coefficient {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        return replace(self, **dict(values))


def limits() -> dict[str, Limit]:
    """What each coefficient may be, by name.

    Examples:
        >>> limits()["matmul_efficiency"]
        Limit(low=0.3, high=0.92, unit='of peak')
    """
    return {f.name: f.metadata["limit"] for f in fields(Coefficients)}
