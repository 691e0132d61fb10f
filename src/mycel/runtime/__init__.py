"""The run side. Importing it registers the ``torch.distributed`` backend ``mycel``::

import torch.distributed as dist
import mycel.runtime

dist.init_process_group("mycel")
"""

from __future__ import annotations

import torch.distributed as dist

from mycel.runtime.flight import dump_flight_records
from mycel.runtime.membership import monitored_barrier
from mycel.runtime.process_group import MycelProcessGroup, create_process_group
from mycel.runtime.warm import warm

__all__ = ["MycelProcessGroup", "dump_flight_records", "monitored_barrier", "warm"]

if "mycel" not in dist.Backend.backend_list:
    dist.Backend.register_backend("mycel", create_process_group, extended_api=True, devices=["cpu", "cuda"])
