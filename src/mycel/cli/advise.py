"""``mycel advise``: started once a rank, says which compression would pay for a model on this cluster."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycel.errors import UsageError
from mycel.extras import needs

if TYPE_CHECKING:
    from mycel.data_parallel.advise import Advice

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("advise")(advise)


def advise(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function; the function returns a module, and a function that takes it and returns the loss "
            "of a new batch."
        ),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Names of compressors, with commas, the most faithful first.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Backend of torch.distributed.")] = "mycel",
    steps: Annotated[int, typer.Option(help="Timed passes of each kind.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Measure every method as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Rank 0 prints one JSON object.")] = False,
) -> None:
    """Say which compression of gradients would pay here: start it once a rank, as a training program.

    Works under torchrun (-m mycel advise) and mycel emulate.
    """
    needs("mycel advise", "torch")
    import torch.distributed as dist

    from mycel.data_parallel.advise import METHODS, measure
    from mycel.data_parallel.advise import advise as weigh
    from mycel.runtime.registration import register

    register()
    names = METHODS if methods is None else tuple(methods.split(","))
    make = _function(model)
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        raise UsageError(
            f"no process group: {error}; start this with torchrun -m mycel advise or mycel emulate"
        ) from None
    try:
        module, loss_of = make()
        advice = weigh(module, loss_of, methods=names, steps=steps)
        measured: dict[str, float] = {}
        if check:
            measured = {p.method: measure(module, loss_of, p.method, steps=steps) for p in advice.predictions}
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
            "methods": [
                {
                    "method": p.method,
                    "predicted_s" if i else "measured_s": p.step_s,
                    **({"measured_s": measured[p.method]} if i and p.method in measured else {}),
                    "compress_s": p.compress_s,
                    "communicate_s": p.communicate_s,
                    "sent_bytes": p.sent_bytes,
                    "error": p.error,
                }
                for i, p in enumerate(advice.predictions)
            ],
        }
        print(json.dumps(document))
        return
    print(f"{'':14}{'predicted ms':>13}{'measured ms':>13}{'compress ms':>13}{'KB sent':>11}{'error':>8}")
    for i, p in enumerate(advice.predictions):
        predicted = f"{1e3 * p.step_s:.1f}" if i else ""
        seen = measured.get(p.method) if i else p.step_s
        print(
            f"{p.method:14}{predicted:>13}{'' if seen is None else f'{1e3 * seen:.1f}':>13}"
            f"{1e3 * p.compress_s:>13.1f}{p.sent_bytes / 1e3:>11.0f}{p.error:>8.2f}"
        )
    print(f"computing alone: {1e3 * advice.compute_s:.1f} ms")
    print(advice.explain())
