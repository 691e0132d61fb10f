"""Elastic experts: one set of weights at many widths, chosen by memory, load or a latency target.

::

    elastic = elastic_experts(model)
    with elastic.observe():
        model(calibration)
    elastic.sort()
    elastic.use(elastic.num_neurons[0] // 4)
"""

from __future__ import annotations

from mycel.moe.elastic.budgets import width_for_load, width_for_memory
from mycel.moe.elastic.elastic import ElasticExperts, elastic_experts
from mycel.moe.elastic.latency import LatencyTable, measure_latencies
from mycel.moe.elastic.router import WidthRouter, train_width_router

__all__ = [
    "ElasticExperts",
    "LatencyTable",
    "WidthRouter",
    "elastic_experts",
    "measure_latencies",
    "train_width_router",
    "width_for_load",
    "width_for_memory",
]
