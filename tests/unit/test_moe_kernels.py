"""The MoE kernels: in Triton's interpreter beside float64, and compiled for GPUs that need not be there."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import ast
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

from kernel_resources import compile_for
from mycel.errors import UsageError
from mycel.moe import MoE, expert_mlp
from mycel.moe.kernels import chosen_kernels, fused, use_kernels
from mycel.moe.kernels.tiles import choose_tiles
from mycel.triton_kernels import Launch

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).parent / "checks" / "moe_kernels.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_script(*command: str, **environment: str) -> Any:
    """The JSON that a script prints; Triton's switches are read at its import, so each has a process."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = run_script(str(CHECKS), TRITON_INTERPRET="1")
    return found


@needs_triton
def test_experts_in_the_interpreter_equal_float64(interpreted: dict[str, dict[str, float]]) -> None:
    """Output and all gradients: partial tiles, empty experts, a hot one, empty slots, no tokens, every activation."""
    errors = {name: found for name, found in interpreted.items() if name.startswith("experts: ")}
    assert len(errors) == 9
    assert max(max(found.values()) for found in errors.values()) < 1e-6, errors


@needs_triton
def test_half_precision_loses_what_torch_loses(interpreted: dict[str, dict[str, float]]) -> None:
    assert max(interpreted["half precision: float16"].values()) <= 1
    # The interpreter cuts bfloat16 off where GPUs round: twice the error, and all of it in one direction.
    assert max(interpreted["half precision: bfloat16"].values()) <= 2.5


@needs_triton
def test_rows_of_no_group_are_zeros_whatever_they_held(interpreted: dict[str, dict[str, float]]) -> None:
    found = interpreted["rows after the last group"]
    assert found.pop("after") == 0
    assert max(found.values()) < 1e-6


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "same bits again",
        "nothing kept without gradients",
        "slots in order",
        "tiles of groups",
        "best experts of broken logits",
        "layer compiled",
    ],
)
def test_exact_checks_in_the_interpreter(interpreted: dict[str, dict[str, float]], name: str) -> None:
    assert set(interpreted[name].values()) == {0}


@needs_triton
def test_sums_over_slots_in_the_interpreter(interpreted: dict[str, dict[str, float]]) -> None:
    assert max(interpreted["sums over slots"].values()) < 1e-6


@needs_triton
@pytest.mark.parametrize("name", ["softmax", "softmax, biased", "sigmoid", "sigmoid, biased"])
def test_best_experts_in_the_interpreter(interpreted: dict[str, dict[str, float]], name: str) -> None:
    found = interpreted[f"best experts: {name}"]
    assert max(found.pop(key) for key in ("index", "counts")) == 0
    assert max(found.values()) < 1e-6


@needs_triton
@pytest.mark.parametrize("name", ["layer: top_k", "layer: relu", "layer: capacity"])
def test_layers_in_the_interpreter(interpreted: dict[str, dict[str, float]], name: str) -> None:
    """A layer by kernels, six products a step, and by plain torch: output and every gradient."""
    found = interpreted[name]
    assert found.pop("products missing") == 0
    assert max(found.values()) < 1e-6


@needs_triton
@pytest.mark.parametrize(
    ("capability", "num_kernels"), [pytest.param(80, 3, marks=long), (90, 3), pytest.param(90, 11, marks=long)]
)
def test_kernels_compile_without_a_gpu(capability: int, num_kernels: int, tmp_path: Path) -> None:
    """Nothing spills; on Hopper, products are of warp groups. (For Ampere, the products only: the rest is alike.)"""
    products = ("gate_up_kernel", "rows_kernel", "outer_kernel")
    script = str(ROOT / "benchmarks" / "moe_gpu.py")
    command = ["--compile-only", "--once", "--json", "--shapes", "qwen3", "--capability", str(capability)]
    command += ["--kernels", ",".join(products)] if num_kernels == len(products) else []
    rows = run_script(script, *command, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    kernels = {row["kernel"]: row for row in rows}
    assert len(kernels) == num_kernels
    for row in rows:
        assert row["spill_bytes"] == 0 and 0 < row["registers"] <= 255, row
        assert row["shared_bytes"] <= (227 if capability == 90 else 163) << 10, row
    wanted = "HGMMA" if capability == 90 else "HMMA"
    assert all(kernels[name]["instructions"].get(wanted, 0) for name in products)


@pytest.mark.parametrize("router", ["top_k", "relu"])
@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_one_node_in_plain_torch_is_what_its_steps_are(
    router: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What GPUs without Triton compute, here on a CPU."""
    torch.manual_seed(0)
    layer = MoE(8, 12, 4, 2, router=router, activation=activation).double()
    x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)

    def step() -> list[torch.Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    steps = step()
    monkeypatch.setattr(expert_mlp, "_is_fused", lambda weights, kind: True)
    for a, b in zip(step(), steps, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_one_node_keeps_tokens_and_the_first_product() -> None:
    torch.manual_seed(0)
    T, D, F, E, K = 11, 8, 12, 4, 2
    x, weights = torch.randn(T, D, requires_grad=True), torch.rand(T, K, requires_grad=True)
    up, down = torch.randn(E, 2 * F, D, requires_grad=True), torch.randn(E, D, F, requires_grad=True)
    order = fused.sort_slots(torch.randint(0, E, (T, K)), E, full=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        fused.experts_of_tokens(x, order, weights, up, down, "swiglu")
    floating = sorted(tuple(t.shape) for t in kept if t.is_floating_point())
    assert floating == sorted([(T, D), (T * K, 2 * F), (T, K), (E, 2 * F, D), (E, D, F)])


def test_triton_is_imported_where_a_kernel_is_made_only() -> None:
    """In folders called ``device``, and by one module beside each, which nobody imports before a kernel is to run."""
    launching = {"operations", "launches"}
    for file in (ROOT / "src").rglob("*.py"):
        names = set()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        parts = {part for name in names for part in name.split(".")}
        loads = any(
            name.split(".")[0] == "triton" or name.endswith((".kernels.device", ".linear.device")) for name in names
        )
        is_made = file.parent.name == "device" or (file.stem in launching and (file.parent / "device").is_dir())
        assert not loads or is_made, file
        assert not launching & parts, file


def test_kernels_are_chosen_by_name() -> None:
    assert chosen_kernels() == "auto"
    assert use_kernels("grouped_mm") == "auto"
    assert use_kernels("auto") == "grouped_mm"
    with pytest.raises(UsageError, match="no kernels are called 'cutlass'; known: auto"):
        use_kernels("cutlass")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_is_not_forced_where_it_does_not_run() -> None:
    with pytest.raises(UsageError, match="a GPU or its interpreter"):
        use_kernels("triton")


def test_tiles_fit_rows() -> None:
    for capability in (80, 90, 100):
        for each in (1, 31, 32, 1000):
            tiles = choose_tiles(capability, each * 8, 8)
            assert tiles.gate_up.m == tiles.rows.m
            assert tiles.rows.m <= max(16, 2 * each)


def test_arguments_that_kernels_cannot_take_are_named() -> None:
    class Parameter:
        name, is_constexpr, do_not_specialize = "rows", False, False

    class Kernel:
        params = (Parameter(),)

    launch = Launch(kernel=Kernel(), grid=(1,), arguments={"rows": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(UsageError, match="argument 'rows'"):
        compile_for(launch, 90)
