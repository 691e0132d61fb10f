"""Two resources that work side by side: when the last chunk is done."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["makespan"]


def makespan(
    stages: Sequence[tuple[float, float]], degree: int, *, beside_s: float = 0.0, hidden: float = 1.0
) -> float:
    """When the last of ``degree`` alike chunks is done.

    Args:
        stages: of a chunk: seconds of the host, then seconds of the network, which the next stage waits for. The
            network takes one thing at a time in the order it was given; the host goes over the chunks stage by stage.
        degree: chunks.
        beside_s: seconds of the host for something else, which it does when the first stage is under way.
        hidden: of what host and network could save by working at the same time, the share that they do save: less
            than 1 where what moves bytes needs processors that compute.

    Examples:
        >>> makespan([(0.0, 1.0), (2.0, 1.0)], degree=1)
        4.0
        >>> makespan([(0.0, 0.5), (1.0, 0.5)], degree=2)  # the same in halves
        3.0
        >>> makespan([(0.0, 1.0), (2.0, 0.0)], degree=1, beside_s=0.5)  # while the network works
        3.0
        >>> makespan([(0.0, 0.5), (1.0, 0.5)], degree=2, hidden=0.5)  # of 1 s only half is saved
        3.5
    """
    host = network = 0.0
    ready = [0.0] * degree
    for number, (host_s, network_s) in enumerate(stages):
        if number == 1:
            host += beside_s
        for chunk in range(degree):
            host = max(host, ready[chunk]) + host_s
            network = max(network, host) + network_s
            ready[chunk] = network
    alone = degree * sum(host_s + network_s for host_s, network_s in stages) + beside_s
    return alone - hidden * (alone - max(ready))
