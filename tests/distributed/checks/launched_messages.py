"""A long message between two ranks of an emulated cluster; rank 0 tells what each connection carried."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mycel.runtime import tensor_group
from mycel.runtime.p2p_routes import parts_of
from mycel.runtime.transport.tcp_info import tcp_info

NUM_BYTES = 4 << 20


def main() -> None:
    dist.init_process_group("mycel")
    rank = dist.get_rank()
    message = torch.arange(NUM_BYTES // 4, dtype=torch.float32)
    if rank == 1:
        came = torch.zeros(NUM_BYTES // 4)
        dist.recv(came, 0)
        assert torch.equal(came, message)
    if rank == 0:
        dist.send(message, 1)
        group: Any = tensor_group()
        outlet = group._messages._endpoint._exchange.outlets[1]
        dist.barrier()  # it has been received, so it has been acknowledged
        carried = []
        for connection in outlet.connections:
            facts = tcp_info(connection.descriptor)
            assert facts is not None
            carried.append(facts.sent_bytes)
        parts = [end - begin for begin, end in parts_of(NUM_BYTES, outlet.routes)]
        answer = {"routes": len(outlet.routes), "carried": carried, "parts": parts}
        Path(sys.argv[1], "rank0.json").write_text(json.dumps(answer))
    else:
        dist.barrier()
    dist.destroy_process_group()


main()
