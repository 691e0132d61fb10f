"""What ranks do with plans: register them, and compare what they compute with what it should be."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mycel
from mycel.runtime import register, tensor_group, unregister

EXAMPLES = Path(__file__).parents[3] / "examples" / "plans.py"
SIZES = (1, 17, 48, 1000, 70_001)


def examples() -> Any:
    spec = importlib.util.spec_from_file_location("plan_examples", EXAMPLES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def given(size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What all ranks have, a row each: whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(-1000, 1000, (size, length), generator=generator).to(dtype)


def compute(rank: int, size: int, name: str, length: int, dtype: torch.dtype) -> None:
    every = given(size, length * size, dtype)
    mine = every[rank].clone()
    if name == "all_reduce":
        dist.all_reduce(mine)
        assert torch.equal(mine, every.sum(0))
        again = every[rank].double()
        dist.all_reduce(again, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(again, every.double().sum(0) / size)
        dist.all_reduce(mine.copy_(every[rank]), op=dist.ReduceOp.MAX)
        assert torch.equal(mine, every.max(0).values)
    elif name == "all_gather":
        out = torch.empty(length * size, dtype=dtype)
        dist.all_gather_into_tensor(out, mine[:length])
        assert torch.equal(out, every[:, :length].reshape(-1))
        inside = torch.zeros(length * size, dtype=dtype)
        own = inside[rank * length : (rank + 1) * length]
        own.copy_(mine[:length])
        dist.all_gather_into_tensor(inside, own)
        assert torch.equal(inside, out)
    else:
        part = torch.empty(length, dtype=dtype)
        dist.reduce_scatter_tensor(part, mine)
        assert torch.equal(part, every.sum(0)[rank * length : (rank + 1) * length])


def serves(rank: int, size: int) -> list[str]:
    """Every example, at lengths that divide into its chunks and at others."""
    methods = []
    for make in examples().PLANS:
        plan = make(size).build()
        if plan["collective"] == "sendrecv":
            continue
        registered = register(plan)
        name = registered.name
        for length in SIZES:
            for dtype in (torch.int64, torch.float32):
                communicator = tensor_group(None).communicator
                assert communicator is not None
                assert communicator.planner.choice(name, None, length * 8).method == registered.method
                compute(rank, size, name, length, dtype)
        unregister(registered)
        methods.append(registered.method)
    return methods


def refused(rank: int, size: int) -> list[str]:
    """A wrong plan, one for other ranks, a sendrecv, and one that ranks do not share."""
    module, found = examples(), []
    wrong = module.pairs(size).build()
    wrong["gpus"][0]["threadblocks"][0]["ops"].pop(3)
    for plan, error, more in (
        (wrong, mycel.VerificationError, {}),
        (module.pairs(size + 1).build(), mycel.UsageError, {}),
        (module.shift(size).build(), mycel.UsageError, {}),
        (module.pairs(size).build(), mycel.UsageError, {"always": False}),
        (module.pairs(size).build(), mycel.UsageError, {"for_": "all_reduce"}),
        ((module.packets if rank else module.switch)(size).build(), mycel.MismatchError, {}),
    ):
        with pytest.raises(error) as caught:
            register(plan, **more)  # type: ignore[arg-type]
        found.append(str(caught.value))
        dist.barrier()
    return found


def from_a_folder(rank: int, size: int, file: str) -> str:
    """A plan in a file, as another's would be."""
    registered = register(file, sizes=("1KB", None))
    compute(rank, size, registered.name, 5000, torch.float32)
    return registered.method
