"""The text of an MSCCL++ execution plan: JSON in which every operation is a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["plan_text"]


def plan_text(plan: Mapping[str, Any]) -> str:
    """JSON text of a plan that is a JSON object.

    Args:
        plan: with the key ``gpus``, each of which has ``threadblocks`` with ``ops``.
    """
    lines = ["{", *(f" {json.dumps(key)}: {json.dumps(plan[key])}," for key in plan if key != "gpus"), ' "gpus": [']
    for gpu in plan["gpus"]:
        lines.append("  {")
        lines += [f"   {json.dumps(key)}: {json.dumps(gpu[key])}," for key in gpu if key != "threadblocks"]
        lines.append('   "threadblocks": [')
        for block in gpu["threadblocks"]:
            lines.append(f'    {{"id": {block["id"]},')
            lines += [
                f"     {json.dumps(key)}: {json.dumps(block[key])}," for key in ("channels", "remote_buffer_refs")
            ]
            lines.append('     "ops": [')
            lines += _joined([f"      {json.dumps(op)}" for op in block["ops"]])
            lines.append("     ]}" + ("," if block is not gpu["threadblocks"][-1] else ""))
        lines.append("   ]")
        lines.append("  }" + ("," if gpu is not plan["gpus"][-1] else ""))
    return "\n".join([*lines, " ]", "}"]) + "\n"


def _joined(lines: list[str]) -> list[str]:
    return [*(line + "," for line in lines[:-1]), *lines[-1:]]
