"""The run side. Importing it registers the ``torch.distributed`` backend ``mycel``::

import torch.distributed as dist
import mycel.runtime

dist.init_process_group("mycel")

Where mycel is installed, the name alone does, without the import (``mycel.autoload``).
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.runtime", "torch")

from mycel.runtime.flight import dump_flight_records
from mycel.runtime.membership import monitored_barrier
from mycel.runtime.meter import log_metrics, metrics, write_metrics
from mycel.runtime.registered import Registered
from mycel.runtime.registration import register as _register_backend
from mycel.runtime.schedules import register, unregister
from mycel.runtime.tensor_group import TensorGroup, tensor_group
from mycel.runtime.warm import warm

__all__ = [
    "Registered",
    "TensorGroup",
    "dump_flight_records",
    "log_metrics",
    "metrics",
    "monitored_barrier",
    "register",
    "tensor_group",
    "unregister",
    "warm",
    "write_metrics",
]

_register_backend()
