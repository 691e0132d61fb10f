"""Kernels of linear attention: in Triton's interpreter beside float64, and compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.effort import long

from mycel.planning.sequence import contiguous
from mycel.sequence import SequenceContext, linear_attention
from mycel.sequence.linear import fused

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_script(*command: str, **environment: str) -> Any:
    """The JSON that a script prints; Triton's switches are read at its import, so each has a process."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("more", [[], pytest.param(["--all"], marks=long)], ids=["some", "all"])
def test_kernels_in_the_interpreter_lose_what_torch_loses(more: list[str]) -> None:
    """Maps, outputs and all gradients, at most twice plain torch's error; attention over documents through them."""
    found = run_script(str(Path(__file__).parent / "checks" / "sequence_kernels.py"), *more, TRITON_INTERPRET="1")
    assert max(found.pop("linear attention").values()) < 1e-5
    assert len(found) == (4 if more else 2)
    assert max(max(errors.values()) for errors in found.values()) <= 1.0, found


@needs_triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=long), 90])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path: Path) -> None:
    """Nothing spills, and shared memory suffices, with as many keys as kernels take."""
    command = [
        str(ROOT / "benchmarks" / "sequence_gpu.py"),
        "--compile-only",
        "--json",
        "--capability",
        str(capability),
    ]
    rows = run_script(*command, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert {row["kernel"] for row in rows} == {
        f"{name}_kernel" for name in ("maps", "maps_back", "outputs", "outputs_back")
    }
    for row in rows:
        assert row["spill_bytes"] == 0 and 0 < row["registers"] <= 255, row
        assert row["shared_bytes"] <= (227 if capability == 90 else 163) << 10, row


def test_a_processor_computes_in_plain_torch() -> None:
    k = torch.zeros(1, 1, 1, 16, 8)
    assert not fused.is_taken(k, k, k)
    assert not fused.is_taken(k, k, k[..., 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_gives_what_a_processor_gives() -> None:
    torch.manual_seed(0)
    context = SequenceContext(contiguous([100, 3, 60], 1))
    inputs = [torch.randn(1, 2, 163, 64, dtype=torch.float64) for _ in range(3)]
    inputs.append(-torch.rand(1, 2, 163, 64, dtype=torch.float64))
    found = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        q, k, v, g = (x.to(device, dtype).requires_grad_() for x in inputs)
        out = linear_attention(q, k, v, context, decay=g)
        found.append(
            [x.cpu().double() for x in (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, g)))]
        )
    for one, wanted in zip(*found, strict=True):
        assert (one - wanted).abs().max() < 1e-4 * wanted.abs().max()
