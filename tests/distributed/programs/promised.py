"""Run by the flight tests on every rank: collectives on a fabric that is not what the topology file promises.

Usage: promised.py TOPOLOGY LATE_RANK
"""

from __future__ import annotations

import os
import sys
import time

os.environ["MYCEL_TOPOLOGY"] = sys.argv[1]

import torch
import torch.distributed as dist

import mycel.runtime  # noqa: F401  (registers the backend)

dist.init_process_group("mycel")
store = dist.PrefixStore("promised", dist.distributed_c10d._get_default_store())
data = torch.ones(1 << 19)
for step in range(6):
    if dist.get_rank() == int(sys.argv[2]):
        # Late for certain, and by how much does not matter: the others are in the collective already.
        store.wait([f"{step}/{rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()])
        time.sleep(0.1)
    else:
        store.set(f"{step}/{dist.get_rank()}", "called")
    dist.all_reduce(data)
dist.destroy_process_group()
