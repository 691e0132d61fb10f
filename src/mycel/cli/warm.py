"""``mycel warm``: compiles what ranks need, before any starts."""

from __future__ import annotations

import time

import typer

from mycel.extras import needs

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("warm")(warm)


def warm() -> None:
    """Compile what ranks need, before any starts.

    The engine of collectives, and the loops of compressors. Once on a machine, or when an image is built; no job
    waits for it then. Some seconds, or where it was done before one or two.
    """
    needs("mycel warm", "torch")
    import torch

    from mycel.compiled import code_folder
    from mycel.data_parallel import COMPRESSORS, make_compressor
    from mycel.data_parallel.rehearsal import rehearse
    from mycel.runtime import engine
    from mycel.runtime import warm as compile_all

    begin = time.monotonic()
    compile_all()
    rehearse([make_compressor(name) for name in COMPRESSORS], torch.device("cpu"), "int8")
    folder = code_folder(str(engine.__file__), "mycel-warm")
    kept = "nowhere: no folder can be written (set NUMBA_CACHE_DIR)" if folder is None else f"in {folder}"
    print(f"ready after {time.monotonic() - begin:.1f} s; compiled code is kept {kept}")
