"""From a function to an object file: translated, improved and written by LLVM, for the processor that is here."""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType
from typing import Any

from mycel.machine.translate import entry

__all__ = ["emit"]


def emit(symbol: str, function: FunctionType) -> tuple[list[str], bytes]:
    """Symbols that the code needs, and the object file that has it.

    Args:
        symbol: by which it is found there.
        function: of 64-bit integers, as it is written.

    Raises:
        TypeError: it cannot be translated; names the line.
    """
    from llvmlite import binding, ir

    target = _target()
    module = ir.Module(symbol)
    module.triple = target.triple
    module.data_layout = str(target.target_data)
    entry(module, symbol, function)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    builder = binding.create_pass_builder(target, options)
    builder.getModulePassManager().run(parsed, builder)
    needs = [each.name for each in parsed.functions if each.is_declaration and not each.name.startswith("llvm.")]
    return needs, target.emit_object(parsed)


@cache
def _target() -> Any:
    """LLVM's idea of this machine, for code that is loaded anywhere in memory."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    options: dict[str, Any] = {"opt": 2, "codemodel": "jitdefault"}
    if target.name.startswith("x86"):
        options["reloc"] = "static"  # LLVM's loader moves no other code on these
    if "jit" in inspect.signature(target.create_target_machine).parameters:
        options["jit"] = True
    features = binding.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, **options)
