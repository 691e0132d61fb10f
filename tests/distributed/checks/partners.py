"""Ranks of ``test_partners``: sums that every rank forms for itself, as partners add each other's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mycel.runtime.tensor_group import tensor_group


def _checks(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sums(rank: int, size: int) -> list[str]:
    """Digests of what every rank gets, each of the right value; of floats, and of numbers that add exactly."""
    checks = _checks("collectives")
    digests = []
    for n in (1, 3, 1000, 70_001):
        for dtype in (*checks.FLOATS, torch.int32, torch.int64):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
                if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                    continue
                if op == dist.ReduceOp.PRODUCT and dtype == torch.float16:  # beyond its range
                    continue
                given = [torch.randn(n, generator=torch.Generator().manual_seed(s)) * 8 for s in range(size)]
                mine = given[rank].to(dtype, copy=True)
                dist.all_reduce(mine, op)
                exact = torch.stack([one.to(dtype).double() for one in given])
                expected = {
                    dist.ReduceOp.SUM: exact.sum(0),
                    dist.ReduceOp.AVG: exact.mean(0),
                    dist.ReduceOp.MAX: exact.max(0).values,
                    dist.ReduceOp.PRODUCT: exact.prod(0),
                }[op]
                scale = exact.abs().prod(0) if op == dist.ReduceOp.PRODUCT else exact.abs().sum(0)
                unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
                assert ((mine.double() - expected).abs() <= size * unit * scale).all(), (n, dtype, op)
                digests.append(checks.digest(mine))
    return digests


def bits(rank: int, size: int) -> dict[str, Any]:
    """What the engine for sockets gets, what runs for a small array, and whether the other engine has the same."""
    group: Any = tensor_group()
    found: dict[str, Any] = {"digests": _sums(rank, size)}
    found["method"] = group.communicator.planner.choice("all_reduce", None, 64).method
    _checks("devices").as_on_devices(group)
    group._devices.planner.schedules = group.communicator.planner.schedules
    found["alike"] = _sums(rank, size) == found["digests"]
    return found
