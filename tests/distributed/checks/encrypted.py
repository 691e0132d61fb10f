"""What every rank runs for ``test_encrypted_sums.py``: training with encrypted sums, beside sums in the clear."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel import CompressionPolicy, Encrypted, IntegerSum, Quantised, SumKey, compress
from mycel.errors import UsageError

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))


def train(method: Any, rank: int) -> tuple[Tensor, float, float]:
    """All weights after some steps, bytes that were metered a step, and those of the formula."""
    ddp = DistributedDataParallel(model())
    handle = compress(ddp, method)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 40, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), torch.arange(8)).backward()
        optimizer.step()
    metered = handle.stats.sent_bytes / STEPS
    formula = handle.bytes_per_step()
    handle.close()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]), metered, formula


def in_training(rank: int, size: int, key_file: str) -> dict[str, bool]:
    """Bit for bit what integer sums give, for every rank alike."""
    clear = IntegerSum(8)
    plain, _, _ = train(CompressionPolicy(clear, rules={"*": clear}), rank)
    sealed, metered, formula = train(Encrypted(Quantised(bits=8), key=key_file), rank)
    every = [torch.empty_like(sealed) for _ in range(size)]
    dist.all_gather(every, sealed)
    fingerprint = 2 * (size - 1) / size * 16 / STEPS  # once, whether all have one key
    return {
        "equal": torch.equal(plain, sealed),
        "alike": all(torch.equal(one, sealed) for one in every),
        "bytes": abs(metered - formula - fingerprint) < 1,
        "trained": not torch.equal(sealed, torch.cat([p.detach().reshape(-1) for p in model().parameters()])),
    }


def refused(rank: int, size: int, key_file: str) -> list[str]:
    """What every rank is told: of another key, of gradients that are not finite, of a model that is sharded."""
    told = []
    for wrong in ("key", "gradient"):
        key = SumKey.make() if wrong == "key" and rank == 1 else SumKey.load(key_file)
        ddp = DistributedDataParallel(model())
        handle = compress(ddp, Encrypted(Quantised(bits=8), key=key))
        x = torch.ones(2, 40) * (float("inf") if wrong == "gradient" and rank == 1 else 1.0)
        try:
            ddp(x).square().sum().backward()
        except (UsageError, RuntimeError) as error:
            told.append(str(error))
        handle.close()
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(model(), mesh=dist.init_device_mesh("cpu", (size,)))
    try:
        compress(sharded, Encrypted(Quantised(bits=8), key=key_file))
    except UsageError as error:
        told.append(str(error))
    return told
