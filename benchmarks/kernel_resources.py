"""What a Triton kernel takes of a GPU: compiled for one that need not be there, and read from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mycel.errors import UsageError
from mycel.triton_kernels import Launch

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel takes of a multiprocessor.

    Attributes:
        kernel: its name.
        capability: the GPU it was compiled for, as 80 or 90.
        registers: of a thread; the hardware has 255.
        spill_bytes: of a thread, what did not fit into registers.
        shared_bytes: of a block.
        num_warps: of a block.
        instructions: kinds of tensor core instructions it has (``HGMMA`` works on a warp group's tile in shared
            memory, ``HMMA`` on registers of a warp), with their number.
    """

    kernel: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: Mapping[str, int]


def compile_for(launch: Launch, capability: int) -> Resources:
    """Compile a call for a GPU, which need not be there, as Triton would for these arguments.

    Args:
        capability: 80 for an A100, 90 for an H100 or H200.

    Raises:
        UsageError: an argument that kernels cannot take, or Triton's interpreter is on.
    """
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, compile  # type: ignore[import-untyped]

    if not hasattr(launch.kernel, "params"):
        raise UsageError("kernels cannot be compiled while TRITON_INTERPRET is set")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        # As Triton specialises: what is 1, and what divides by 16 (tensors begin at such addresses).
        special = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(parameter.name, value)
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    return _read_resources(launch.kernel.__name__, capability, compiled)


def _type_of(name: str, value: object) -> str:
    if isinstance(value, torch.Tensor) and value.dtype in _TYPES:
        return _TYPES[value.dtype]
    if type(value) is float:
        return "fp32"
    if type(value) is int:
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise UsageError(f"argument {name!r} is {value!r}; kernels take tensors of {list(_TYPES)}, int and float")


def _read_resources(name: str, capability: int, compiled: Any) -> Resources:
    """From the machine code, by the tools that come with Triton."""
    from triton import knobs  # type: ignore[import-untyped]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
        ).stdout
        disassembler = knobs.nvidia.nvdisasm.path
        code = subprocess.run([disassembler, str(file)], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    found = re.findall(r"\b(HGMMA|HMMA|IGMMA|IMMA)\b", code)
    return Resources(
        kernel=name,
        capability=capability,
        registers=numbers["REG"],
        spill_bytes=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=int(compiled.metadata.shared),
        num_warps=int(compiled.metadata.num_warps),
        instructions={kind: found.count(kind) for kind in sorted(set(found))},
    )
