"""What happens before ranks meet: little is imported, and compressors speak with themselves, leaving no trace."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from mycel.data_parallel.compress import COMPRESSORS, Context, make_compressor
from mycel.data_parallel.compress.rounds import AllGather, AllReduce, AllToAll, Item
from mycel.data_parallel.rehearsal import alone, rehearse


def test_neither_wing_imports_sharded_tensors_or_the_compiler() -> None:
    code = (
        "import json, sys, torch.nn.parallel; before = set(sys.modules)\n"
        "import mycel.moe, mycel.data_parallel; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(json.loads(done.stdout.splitlines()[-1]))
    assert "mycel.data_parallel.entry" in found
    assert not found & {"sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "numba"}


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_every_compressor_can_speak_with_itself(name: str) -> None:
    tensor = torch.linspace(-1.0, 1.0, 64 * 64).view(64, 64)
    compressor = make_compressor(name)
    item = Item(tensor=tensor.clone(), context=Context(name="w", world_size=2))
    (outcome,), asked = alone(compressor.converse([item], keep_residual=True), 2)
    assert asked and all(isinstance(request, AllGather | AllReduce | AllToAll) for request in asked)
    assert outcome.mean.shape == tensor.shape and bool(outcome.mean.isfinite().all())
    assert 0 < float(outcome.mean.abs().max()) < 100.0


def test_rehearsals_leave_no_trace() -> None:
    compressor = make_compressor("powersgd", rank=2)
    rehearse([compressor], torch.device("cpu"), "int8")
    compressor.settle(keep=True)
    assert compressor.state_dict() == {}
