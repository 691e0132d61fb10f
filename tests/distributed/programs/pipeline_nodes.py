"""Run on every rank of an emulated cluster: orders against one process, over its links.

Usage: pipeline_nodes.py BACKEND
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mycel.runtime  # noqa: F401  (registers the backend)

sys.path.append(str(Path(__file__).parents[3]))

from tests.distributed.checks import pipelines

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
pipelines.torchs(rank, size)
pipelines.unlike(rank, size)
dist.destroy_process_group()
print("right", flush=True)
