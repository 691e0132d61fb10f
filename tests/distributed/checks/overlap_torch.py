"""Overlapped layers where torch's users meet them: styles of tensor parallelism, and compiled programs."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mycel.overlap.compiled as module
from mycel.errors import UsageError
from mycel.overlap import OverlappedColwise, OverlappedRowwise, compile_pass

DIM, HIDDEN = 12, 24


class Mlp(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp(**options: Any) -> Mlp:
    torch.manual_seed(0)
    return Mlp(**options)


def gathered(parameter: Any) -> Tensor:
    whole: Tensor = parameter.grad.full_tensor()
    return whole


def styles(rank: int, size: int, shape: tuple[int, ...], dim: int) -> dict[str, float]:
    """A parallel MLP against the whole one, forwards and in all gradients, in float64."""
    whole = mlp().double()
    mesh = init_device_mesh("cpu", (size,))
    up, down = OverlappedColwise(dim=dim, tiles=2), OverlappedRowwise(dim=dim, tiles=2)
    parallel = parallelize_module(copy.deepcopy(whole), mesh, {"up": up, "down": down})
    assert up.replaced and down.replaced and isinstance(parallel.up, nn.Linear)
    assert set(parallel.state_dict()) == set(whole.state_dict())
    assert copy.deepcopy(parallel.up).in_features == DIM
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(*shape, dtype=torch.float64)
    dist.broadcast(x.detach(), 0)
    dist.broadcast(upstream, 0)
    expected = whole(x)
    expected.backward(upstream)
    own = x.detach().chunk(size, dim)[rank].clone().requires_grad_()
    y = parallel(own)
    y.backward(upstream.chunk(size, dim)[rank])
    errors = {
        "y": float((y - expected.chunk(size, dim)[rank]).detach().abs().max()),
        "x": float((own.grad - x.grad.chunk(size, dim)[rank]).abs().max()),  # type: ignore[union-attr, operator]
    }
    for (name, mine), theirs in zip(parallel.named_parameters(), whole.parameters(), strict=True):
        errors[name] = float((gathered(mine) - theirs.grad).abs().max())
    with pytest.raises(UsageError, match=r"it is for torch\.nn\.Linear"):
        parallelize_module(nn.Sequential(nn.ReLU()), mesh, {"0": OverlappedColwise()})
    return errors


def compiled(
    rank: int, size: int, bias: bool, tiles: int | None, shape: tuple[int, ...] = (16, DIM), other_bits: bool = False
) -> dict[str, Any]:
    """A parallel MLP compiled with and without the pass: what was found, and whether all bits are the same.

    Args:
        rank, size: of the group.
        bias: of both layers.
        tiles: as given to the pass.
        shape: of the input.
        other_bits: rank 0's products in tiles pass for ones with other bits.
    """
    mesh = init_device_mesh("cpu", (size,))
    plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    torch.manual_seed(rank)
    x, upstream = torch.randn(*shape), torch.randn(*shape)
    results = []
    found = None
    for overlapped in (False, True) if tiles else (True,):
        parallel = parallelize_module(mlp(bias=bias), mesh, plan)
        torch._dynamo.reset()
        given = x.clone().requires_grad_()
        if overlapped:
            forced = {"return_value": True} if other_bits and rank == 0 else {"wraps": module._has_other_bits}
            with compile_pass(tiles=tiles) as found, patch.object(module, "_has_other_bits", **forced):
                y = torch.compile(parallel)(given)
                y.backward(upstream)
        else:
            y = torch.compile(parallel)(given)
            y.backward(upstream)
        results.append([y.detach(), given.grad, *(p.grad.to_local() for p in parallel.parameters())])
    assert found is not None
    return {
        "replaced": [f.collective for f in found.found if f.is_replaced],
        "at_once": [f.at_once for f in found.found],
        "left": [f.explain() for f in found.found if not f.is_replaced],
        "same": [torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True)],
        "explained": found.explain(),
    }
