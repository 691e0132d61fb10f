"""What a step really asked the allocator for: counted by torch's profiler, not what the system says is resident."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

__all__ = ["counted_peak"]


def counted_peak(step: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator held at most while something ran, beyond what it held before.

    Only the calling thread is heard: what another one takes or gives back does not count. What nobody refers to any
    more is collected first, lest it be given back meanwhile.

    Args:
        step: what runs.

    Examples:
        >>> import torch
        >>> x = torch.ones(1000)
        >>> counted_peak(lambda: x.exp().exp())
        8000
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results = profiled.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
