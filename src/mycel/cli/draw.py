"""``mycel draw``: a picture of the fabric, of the links that bind, and of a tree of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mycel.cli import consoles
from mycel.cli.bound import RootOption, TopologyArgument, make_collective
from mycel.cli.fabric import load_fabric
from mycel.cli.own import load_own
from mycel.collectives.bound import bound
from mycel.collectives.schedule import Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, ROOTED
from mycel.collectives.synth import SYNTHESIZERS, methods_for, synthesize
from mycel.errors import UsageError
from mycel.extras import needs

__all__ = ["register", "tree_from"]

_ENDINGS = (".svg", ".png", ".dot")


def tree_from(schedule: Schedule, root: int | None) -> tuple[tuple[Transfer, ...], int | None]:
    """The widest tree of a schedule: that copies from ``root``, or, where nothing is copied, that reduces to it.

    Args:
        schedule: any.
        root: a rank; ``None`` for the widest tree of all.

    Returns:
        The transfers, none if there is no such tree, and the tree's root.
    """
    for reduce in (False, True):
        trees: dict[int, list[Transfer]] = {}
        for transfer in schedule.transfers:
            if transfer.reduce == reduce:
                trees.setdefault(transfer.chunk, []).append(transfer)
        fitting = [chunk for chunk, steps in trees.items() if root is None or _root(steps, reduce=reduce) == root]
        if fitting:
            widest = max(fitting, key=lambda chunk: (schedule.chunks[chunk].num_units, -chunk))
            return tuple(trees[widest]), _root(trees[widest], reduce=reduce)
    return (), None


def _root(steps: list[Transfer], *, reduce: bool) -> int | None:
    """The rank that only sends (of copies) or only receives (of reductions); ``None`` if there is no single one."""
    senders, receivers = {step.src for step in steps}, {step.dst for step in steps}
    ends = receivers - senders if reduce else senders - receivers
    return ends.pop() if len(ends) == 1 else None


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(
        "draw", help="Draw a fabric; with a collective, also the links that bind and one tree of a schedule."
    )
    def command(
        topology: TopologyArgument,
        output: Annotated[
            Path, typer.Option("-o", "--output", help="Picture; its ending says which kind: .svg, .png or .dot.")
        ],
        collective: Annotated[
            str | None, typer.Option("--collective", "-c", help=f"One of {', '.join(COLLECTIVES)}.")
        ] = None,
        method: Annotated[
            str | None,
            typer.Option(
                help=f"Whose tree: {', '.join(SYNTHESIZERS)}; the first that serves the collective if not given; "
                "'none' for no tree."
            ),
        ] = None,
        root: RootOption = None,
        own: Annotated[
            str | None,
            typer.Option(
                "--schedule", help="Whose tree, instead of a method's: a schedule's file, or FILE.py[:NAME]."
            ),
        ] = None,
    ) -> None:
        if output.suffix.lower() not in _ENDINGS:
            raise UsageError(f"{output}: the name must end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}")
        if output.suffix.lower() != ".dot":
            needs("a picture in .svg or .png, unlike .dot,", "matplotlib")
        fabric = load_fabric(topology)
        tree: tuple[Transfer, ...] = ()
        marked: int | None = None
        cut: tuple[tuple[int, int], ...] = ()
        title, caption = fabric.name, f"{fabric.num_ranks} ranks, {len(fabric.switches)} switches"
        computing = "bold frame: copies and adds" if len(fabric.compute_vertices) > fabric.num_ranks else ""
        given: Schedule | None = None
        if own is not None:
            if method is not None:
                raise UsageError("--method and --schedule both say whose tree to draw: give one of them")
            given = load_own(own, fabric, collective)
            collective, method = given.collective.name, given.method
        if collective is None:
            if root is not None:
                raise UsageError("--root says whose tree to draw: it needs --collective")
        else:
            rooted = collective in ROOTED
            wanted = given.collective if given else make_collective(fabric, collective, root if rooted else None)
            if root is not None and not 0 <= root < fabric.num_ranks:
                raise UsageError(f"root {root} is not among ranks 0..{fabric.num_ranks - 1}")
            with consoles.doing(f"bound of {wanted.name} on {fabric.name}"):
                best = bound(fabric, wanted)
            cut = best.cut
            title = f"{wanted.name} on {fabric.name}: at most {float(best.algbw):.6g} {fabric.unit}"
            caption = "dashed: the links that bind"
            method = method or methods_for(wanted.name)[0]
            if method != "none":
                with consoles.doing(f"{wanted.name} by {method}"):
                    tree, marked = tree_from(given or synthesize(fabric, wanted, method), root)
                if not tree:
                    raise UsageError(f"{wanted.name} by {method} has no tree with root {root}; try another root")
                caption += f"; green: a tree by {method}"
        caption = "; ".join(filter(None, [caption, computing]))
        try:
            if output.suffix.lower() == ".dot":
                from mycel.report.dot import fabric_dot

                output.write_text(fabric_dot(fabric, tree, cut) + "\n", encoding="utf-8")
            else:
                from mycel.report.picture import write_picture

                with consoles.doing(f"drawing {fabric.name}"):
                    write_picture(fabric, output, title=title, caption=caption, tree=tree, root=marked, cut=cut)
        except OSError as error:
            raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
        print(f"written to {output}")
