"""Run by the test of going on without a link: trains a model with DDP twice and tells the losses.

The link is broken from outside during the second time. Usage: replan.py STEPS
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mycel.runtime  # noqa: F401  (registers the backend)

steps = int(sys.argv[1])
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("mycel")


def train(name: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.Tanh(), torch.nn.Linear(512, 128))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 128, generator=data)
        loss = (ddp(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        print(json.dumps({"run": name, "rank": rank, "step": step, "loss": mean.item()}), flush=True)


train("whole")
train("broken")
# What a rank has to say when it goes on with another fabric: collectives of the other kinds work as well.
out = torch.empty(dist.get_world_size())
dist.all_gather_into_tensor(out, torch.tensor([float(rank)]))
parts = torch.empty(4 * dist.get_world_size())
dist.all_to_all_single(parts, torch.full((4 * dist.get_world_size(),), float(rank)))
print(json.dumps({"run": "end", "rank": rank, "gathered": out.tolist(), "parts": parts.tolist()}), flush=True)
dist.destroy_process_group()
