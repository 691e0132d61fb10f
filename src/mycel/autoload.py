"""What torch runs of mycel at every ``import torch``: it makes the name ``mycel`` known, and nothing more.

Torch loads the entry points of the group ``torch.backends`` when it is imported (RFC 122468 of its tracker), so this
module imports neither numba nor the runtime: those come with the first group. An error here would be an error of
``import torch``, hence nothing here raises.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

__all__ = ["register_name"]

_MARK = "mycel_looks"


def register_name() -> None:
    """Let ``init_process_group("mycel")`` find the backend without an import.

    With ``MYCEL_TOPOLOGY`` set, a default group of another backend is warned of: launchers that take the backend from
    an argument or variable of their own drop one they do not know, and train over Gloo without a word. On an emulated
    cluster, which sets it for every program, baselines are other backends on purpose.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if "mycel" not in dist.Backend.backend_list:
            dist.Backend.register_backend("mycel", _create, extended_api=True, devices=["cpu", "cuda"])
        if os.environ.get("MYCEL_TOPOLOGY") and not os.environ.get("MYCEL_WIRING"):
            _watch_default_group()
    except Exception as error:  # whatever a torch of tomorrow changes: ``import mycel.runtime`` remains
        warnings.warn(f"backend mycel is not registered with torch: {error}", RuntimeWarning, stacklevel=2)


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make a group of the backend; the runtime is imported here, with the first one."""
    from mycel.runtime.registration import create

    return create(options, backend_options)


def _watch_default_group() -> None:
    """Have the default group looked at when torch sets it; torch has no hook for that. Without the name: nothing."""
    from torch.distributed import distributed_c10d as c10d

    update = getattr(c10d, "_update_default_pg", None)
    if update is None or hasattr(update, _MARK):  # two installations of the name, say
        return

    def update_and_look(group: Any) -> Any:
        found = update(group)
        if group is not None:
            _look_at_default_group()
        return found

    setattr(update_and_look, _MARK, True)
    setattr(c10d, "_update_default_pg", update_and_look)  # noqa: B010 - a function that torch types as itself


def _look_at_default_group() -> None:
    import torch.distributed as dist

    try:
        backend = str(dist.get_backend())
    except Exception:  # a group that torch's tables do not know is not ours to judge
        return
    if "mycel" not in backend:
        warnings.warn(
            f"MYCEL_TOPOLOGY is set, but the default process group is {backend}: collectives do not run over mycel. "
            'Ask for it by name, init_process_group("mycel"), or unset MYCEL_TOPOLOGY',
            RuntimeWarning,
            stacklevel=6,
        )
