"""A rank of ``python -m tests.soak --unrest``: unrest_rank SEED STOP READY."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.soak.__main__ import soak

import mycel.runtime  # noqa: F401  (registers the backend)

#: Calls in peace, with which most of what is to come is planned, and calls before memory is noted for the first time.
PEACEFUL, COUNT = 300, 4000


def main() -> None:
    seed, stop, ready = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=120))
    soak(PEACEFUL, seed + 1)
    dist.barrier()
    ready.touch()
    counted = soak(COUNT, seed, stop)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main()
