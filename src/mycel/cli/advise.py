"""``mycel advise``: started once a rank, says which compression would pay for a model on this cluster."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycel.cli import consoles
from mycel.errors import UsageError
from mycel.extras import needs

if TYPE_CHECKING:
    from mycel.data_parallel.advise import Advice, Prediction

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("advise")(advise)


def advise(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function; the function returns a module, plain or sharded by fully_shard, and a function "
            "that takes it and returns the loss of a new batch."
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(help="Compressors, with commas, the most faithful first; sharded: w8g8, w8g4, w4g4, too."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Backend of torch.distributed.")] = "mycel",
    steps: Annotated[int, typer.Option(help="Timed passes of each kind.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Measure every method as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rank 0 prints one JSON object.")] = False,
) -> None:
    """Say what would pay here, compression under DDP or FSDP2, or local updates: start it once a rank.

    Works under torchrun (-m mycel advise) and mycel emulate.
    """
    needs("mycel advise", "torch")
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    from mycel.data_parallel.advise import METHODS, measure
    from mycel.data_parallel.advise import advise as weigh
    from mycel.data_parallel.advise_sharded import advise_sharded
    from mycel.runtime.registration import register

    register()
    names = None if methods is None else tuple(methods.split(","))
    make = _function(model)
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        raise UsageError(
            f"no process group: {error}; start this with torchrun -m mycel advise or mycel emulate"
        ) from None
    try:
        module, loss_of = make()
        is_sharded = isinstance(module, FSDPModule)
        measured: dict[str, float] = {}
        with consoles.doing("training some steps with each method", shown=dist.get_rank() == 0) as say:
            if is_sharded:
                advice = advise_sharded(module, loss_of, methods=names, steps=steps)
            else:
                advice = weigh(module, loss_of, methods=names or METHODS, steps=steps)
            for p in advice.predictions if check and not is_sharded else ():  # of sharded models all is measured
                say(f"training {steps} steps with {p.method}")
                measured[p.method] = measure(module, loss_of, p.method, steps=steps)
        if dist.get_rank() == 0:
            _report(advice, measured, as_json=as_json)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _function(name: str) -> Any:
    """The function that ``module:function`` names; modules of the working directory are found too.

    Raises:
        UsageError: there is none.
    """
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise UsageError(f"{name}: give a module and a function in it, such as train:make_model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: {error}") from None
    finally:
        sys.path.pop(0)
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"{name}: module {module_name} has no function {function}")
    return found


def _report(advice: Advice, measured: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        document = {
            "advice": advice.best.method,
            "compute_s": advice.compute_s,
            "overlap": advice.overlap,
            "methods": [_document(p, measured) for p in advice.predictions],
            "local": [_document(p, measured) for p in advice.local],
        }
        print(json.dumps(document))
        return
    print(f"{'':14}{'predicted ms':>13}{'measured ms':>13}{'compress ms':>13}{'KB sent':>11}{'error':>8}")
    for p in (*advice.predictions, *advice.local):
        predicted = "" if p.is_measured else f"{1e3 * p.step_s:.1f}"
        seen = p.step_s if p.is_measured else measured.get(p.method)
        print(
            f"{p.method:14}{predicted:>13}{'' if seen is None else f'{1e3 * seen:.1f}':>13}"
            f"{1e3 * p.compress_s:>13.1f}{p.sent_bytes / 1e3:>11.0f}{p.error:>8.2f}"
        )
    if advice.compute_s is not None:
        print(f"computing alone: {1e3 * advice.compute_s:.1f} ms")
    print(advice.explain())


def _document(p: Prediction, measured: dict[str, float]) -> dict[str, Any]:
    return {
        "method": p.method,
        "measured_s" if p.is_measured else "predicted_s": p.step_s,
        **({"measured_s": measured[p.method]} if not p.is_measured and p.method in measured else {}),
        "compress_s": p.compress_s,
        "communicate_s": p.communicate_s,
        "sent_bytes": p.sent_bytes,
        "error": p.error,
    }
