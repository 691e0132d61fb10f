"""``mycel plan check``: proves the plan or order in a file right, or says what is wrong with it and where."""

from __future__ import annotations

import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.errors import MycelError, ScheduleError, UsageError, VerificationError
from mycel.pipeline.check import Memory, check, check_mesh
from mycel.pipeline.order import Order
from mycel.pipeline.replay import Replay, replay
from mycel.planning.cluster import load_cluster
from mycel.planning.models import load_model
from mycel.planning.plan import read_plan
from mycel.planning.plan.explain import ways
from mycel.units import format_size, parse_size

__all__ = ["read_order", "register"]

#: Bytes of a file that is read: an order of a thousand ranks and a thousand micro-batches.
_LONGEST_FILE = 1 << 26
_PLAN = re.compile(rb'"format"\s*:\s*"mycel\.plan"')


def read_order(file: Path) -> Order:
    """The order in a file, in CSV or JSON.

    Args:
        file: its name.

    Raises:
        UsageError: the file cannot be read.
        ScheduleError: it holds no order; the message names the file and the place in it.
    """
    try:
        if file.stat().st_size > _LONGEST_FILE:
            raise UsageError(f"{file}: more than {format_size(_LONGEST_FILE)}, which no order takes")
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return Order.from_text(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ScheduleError(f"{file}: no order: neither CSV nor JSON in UTF-8") from None
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from None


def _amounts(text: str | None, option: str, *, in_bytes: bool) -> tuple[Fraction, ...] | None:
    """Amounts in a list: bytes such as 24GB, or plain numbers of micro-batches."""
    if text is None:
        return None
    if in_bytes:
        return tuple(Fraction(parse_size(part.strip())) for part in text.split(","))
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if re.fullmatch(r"\d{1,9}(\.\d{1,6})?", part, re.ASCII) is None:
            raise UsageError(
                f"{option} {text!r}: {part!r} is no number of micro-batches; bytes need --activation beside them"
            )
    return tuple(Fraction(part) for part in parts)


def _mesh(text: str | None) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"\s*([a-z]{1,16})=(\d{1,9})\s*", part, re.ASCII)
        if found is None or found[1] in axes:
            raise UsageError(f"--mesh {text!r}: {part!r} is no axis such as pp=4, or is there twice")
        axes[found[1]] = int(found[2])
    return axes


def _stage_ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII) is None:
        raise UsageError(f"--stage-ranks {text!r}: expected the rank of each stage, such as 0,1,1,0")
    return tuple(map(int, text.split(",")))


def _told(order: Order, record: dict[str, Any], timed: Replay, in_bytes: bool) -> str:
    """The facts in words."""
    peaks = record["peaks"]
    unit = "bytes" if in_bytes else "micro-batches"
    shown = ", ".join(f"{peak:g}" for peak in peaks[:16]) + (", ..." if len(peaks) > 16 else "")
    lines = [
        f"right{f' ({order.name})' if order.name else ''}: {order.ranks} ranks, {order.num_stages} stages, "
        f"{order.num_micro_batches} micro-batches, "
        + ("with communication" if order.has_communication else "computations only"),
        f"makespan {float(timed.makespan):g} at unit times, bubble {float(timed.bubble):g} "
        f"({float(timed.bubble / timed.makespan):.1%}); most held, by rank: {shown} {unit}",
    ]
    if record["relies_on_buffering"]:
        lines.append("sends have to be buffered: without, " + record["buffering"])
    return "\n".join([*lines, *record["notes"]])


def _is_plan(file: Path) -> bool:
    """Whether a file says of itself, near its beginning, that it is a plan."""
    try:
        with file.open("rb") as opened:
            return _PLAN.search(opened.read(4096)) is not None
    except OSError:
        return False  # who reads it whole says why it cannot be read


def _check_plan(file: Path, cluster: str | None, model: str | None, *, json_output: bool) -> None:
    plan = read_plan(file)
    where = None if cluster is None else load_cluster(cluster)
    plan.validate(None if model is None else load_model(model), cluster=where)
    seconds, fullest = plan.predicted.seconds, max(plan.memory)
    if json_output:
        facts = {"ok": True, "model": plan.model.shape.name, "cluster": plan.cluster.name, "ranks": len(plan.ranks)}
        print(json.dumps({**facts, "seconds": seconds, "memory": list(plan.memory)}))
        return
    print(
        f"right: {plan.model.shape.name} on {plan.cluster.name}, {ways(plan.job)}; {plan.predicted} a step, "
        f"modelled; {fullest / 2**30:.1f} GiB on the fullest of {len(plan.ranks)} ranks"
    )


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("check", help="Prove the plan or order in a file right: exit 0, or 2 with what is wrong and where.")
    def plan_check(
        file: Annotated[Path, typer.Argument(help="Plan; or order, as torch's CSV or as JSON.", show_default=False)],
        ranks: Annotated[int | None, typer.Option(help="Ranks of the group that is to run it.")] = None,
        micro_batches: Annotated[int | None, typer.Option(help="Micro-batches that the job cuts.")] = None,
        executor: Annotated[
            str, typer.Option(help="Who runs it: torch reads losses by position, mycel by micro-batch.")
        ] = "torch",
        limit: Annotated[
            str | None,
            typer.Option(help="What a rank may hold, or a list, one a rank: micro-batches; bytes with --activation."),
        ] = None,
        activation: Annotated[
            str | None, typer.Option(help="Bytes of a micro-batch's activations, or a list, one a stage.")
        ] = None,
        message: Annotated[str | None, typer.Option(help="Bytes of a tensor received, held until used.")] = None,
        fixed: Annotated[str | None, typer.Option(help="Bytes held all the time, or a list, one a rank.")] = None,
        stage_ranks: Annotated[
            str | None, typer.Option(help="Ranks on which the stages have been built, such as 0,1,1,0.")
        ] = None,
        mesh: Annotated[str | None, typer.Option(help="Axes of the job, such as pp=4,dp=2,tp=2.")] = None,
        world_size: Annotated[int | None, typer.Option(help="Ranks of the whole job.")] = None,
        batch: Annotated[int | None, typer.Option(help="Samples a step, over all replicas.")] = None,
        layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
        heads: Annotated[int | None, typer.Option(help="Heads of its attention.")] = None,
        cluster: Annotated[str | None, typer.Option(help="Of a plan: the cluster that it is to run on.")] = None,
        model: Annotated[str | None, typer.Option(help="Of a plan: the model that is to be trained.")] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        try:
            if _is_plan(file):
                _check_plan(file, cluster, model, json_output=json_output)
                return
            if cluster is not None or model is not None:
                raise UsageError(f"{file}: --cluster and --model go with plans, and this is an order")
            order = read_order(file)
            in_bytes = activation is not None
            if (message or fixed) and not in_bytes:
                raise UsageError("--message and --fixed are in bytes, and need --activation beside them")
            memory = Memory(
                activation=_amounts(activation, "--activation", in_bytes=True),
                limit=_amounts(limit, "--limit", in_bytes=in_bytes),
                fixed=_amounts(fixed, "--fixed", in_bytes=True) or (Fraction(0),),
                message=(_amounts(message, "--message", in_bytes=True) or (Fraction(0),))[0],
            )
            check_mesh(
                order,
                ranks=ranks,
                micro_batches=micro_batches,
                mesh=_mesh(mesh),
                world_size=world_size,
                batch=batch,
                layers=layers,
                heads=heads,
            )
            if executor not in ("torch", "mycel"):
                raise UsageError(f"--executor {executor}: torch and mycel are known")
            report = check(
                order,
                executor="torch" if executor == "torch" else "mycel",
                memory=memory,
                stage_ranks=_stage_ranks(stage_ranks),
            )
        except MycelError as error:
            grid = error.grid if isinstance(error, VerificationError) else ""
            if json_output:
                print(json.dumps({"ok": False, "error": str(error), "grid": grid}))
            else:
                print(f"mycel: {error}" + (f"\n\n{grid}" if grid else ""), file=sys.stderr)
            raise typer.Exit(2) from None
        timed = replay(order)
        record = report.to_json()
        if json_output:
            times = {"makespan": float(timed.makespan), "bubble": float(timed.bubble)}
            print(json.dumps({"ok": True, "name": order.name, **record, **times}))
        else:
            print(_told(order, record, timed, in_bytes))
