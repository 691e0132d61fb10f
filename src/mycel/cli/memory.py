"""``mycel memory``: what a model needs, and chunks of its parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycel.cli import COMMANDS, consoles
from mycel.errors import UsageError
from mycel.units import parse_size

if TYPE_CHECKING:
    from mycel.memory.needs import Needs

__all__ = ["register"]

#: Blocks that are printed.
_MOST_ROWS = 12


def register(app: typer.Typer) -> None:
    """Add the group."""

    @app.callback(help=COMMANDS["memory"], no_args_is_help=True)
    def memory() -> None:
        pass

    @app.command("show", help="What a training step of a model holds, moment by moment, found without a device.")
    def show(
        model: Annotated[
            str,
            typer.Argument(
                help="config.json, a folder with one, a name, or module:function that gives model and arguments.",
                show_default=False,
            ),
        ],
        batch: Annotated[int, typer.Option(help="Sequences of a step, of a language model.")] = 1,
        seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
        dtype: Annotated[str, typer.Option(help="Of parameters.")] = "float32",
        recompute: Annotated[bool, typer.Option("--recompute", help="Every block is computed again.")] = False,
        budget: Annotated[
            str | None, typer.Option(help="Memory that there is, as 40GiB: says whether it fits.", show_default=False)
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
        plot: Annotated[Path | None, typer.Option(help="File that gets the picture, PNG or SVG.")] = None,
    ) -> None:
        from mycel.memory.needs import needs_of, subject

        limit = None if budget is None else parse_size(budget)
        if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
            raise UsageError(f"{plot}: a picture is PNG or SVG; let its name end in .png or .svg")
        wanted = subject(model, batch=batch, seq=seq, dtype=dtype)
        with consoles.doing(f"one step of {wanted.name}"):
            needs = needs_of(wanted.make, wanted.batch, recompute=recompute, name=wanted.name)
        if plot is not None:
            _draw(needs, plot, limit)
        if json_output:
            print(json.dumps(needs.to_json() | ({} if limit is None else {"fits": needs.peak <= limit})))
        else:
            print("\n".join(_told(needs, limit)))
            if plot is not None:
                print(f"{plot}: written")


def _told(needs: Needs, limit: int | None) -> list[str]:
    from mycel.memory.needs import KINDS

    fullest = needs.fullest
    where = f"{fullest.phase} of {fullest.block}" if fullest.block else f"{fullest.phase}, between blocks"
    lines = [f"{needs.name}: {_size(needs.peak)} at most, in {where}; {needs.flops / 1e12:.3g} TFLOP a step"]
    for kind in KINDS:
        most = needs.most(kind)
        if most:
            lines.append(f"  {kind:<12} {_size(getattr(fullest, kind)):>10} then, {_size(most)} at most")
    lines.append("block: parameters, left for backward, input")
    for block in needs.blocks[:_MOST_ROWS]:
        sizes = ", ".join(_size(size) for size in (block.parameters, block.saved, block.input))
        lines.append(f"  {block.name}: {sizes}")
    if len(needs.blocks) > _MOST_ROWS:
        lines.append(f"  ... and {len(needs.blocks) - _MOST_ROWS} more")
    if limit is not None:
        over = needs.peak - limit
        lines.append(
            f"does not fit {_size(limit)}: {_size(over)} too much"
            if over > 0
            else f"fits {_size(limit)}: {_size(-over)} are left"
        )
    return lines


def _draw(needs: Needs, plot: Path, limit: int | None) -> None:
    from mycel.extras import needs as packages

    packages("a picture of memory", "matplotlib")
    from mycel.memory.needs import KINDS
    from mycel.report.memory import draw_memory

    rows: list[dict[str, Any]] = [{kind: getattr(moment, kind) for kind in KINDS} for moment in needs.moments]
    labels = [(moment.phase, moment.block) for moment in needs.moments]
    caption = f"{_size(needs.peak)} at most, in {needs.fullest.phase}"
    try:
        draw_memory(rows, labels, plot, title=needs.name, caption=caption, budget=limit)
    except OSError as error:
        raise UsageError(f"{plot}: cannot be written: {error}") from None


def _size(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes} B"
