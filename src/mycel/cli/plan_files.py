"""What the commands of plans read and write: clusters, models, limits, plans, pages."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mycel.errors import UsageError
from mycel.pipeline.simulate import Run
from mycel.planning.cluster import Cluster, load_cluster
from mycel.planning.plan import Plan
from mycel.planning.search import Limits

__all__ = ["cluster_of", "limits_of", "simulated", "write_page", "write_text"]

#: Actions beyond which a pipeline is not simulated for a picture.
_MOST_ACTIONS = 8192


def limits_of(texts: list[str], file: Path | None) -> Limits:
    """Limits of the command line after those of a file.

    Args:
        texts: of the command line.
        file: of YAML, if any.
    """
    limits = Limits() if file is None else Limits.from_file(file)
    return limits.with_more(Limits.from_text(*texts))


def cluster_of(plan: Plan, source: str | None, machine: str | None) -> Cluster:
    """The cluster that is named, or the one that the plan's own name means.

    Args:
        plan: that is for it.
        source: of the command line, if it has one.
        machine: likewise.

    Raises:
        UsageError: none is named, and the plan's is no preset; or the plan is for another.
    """
    if source is None:
        kind, _, nodes = plan.cluster.name.rpartition("_x")
        if not (kind and nodes.isdecimal()):
            raise UsageError(f"the plan is for {plan.cluster.name}: give its file, 'mycel plan explain PLAN CLUSTER'")
        count = max(1, plan.cluster.num_ranks // int(nodes)) if int(nodes) else 1
        source = f"{kind}:nodes={nodes},ranks_per_node={count}"
    return load_cluster(source, machine=machine)


def simulated(plan: Plan, cluster: Cluster | None) -> Run | None:
    """The plan's pipeline in simulation, where it is one and short enough for a picture.

    Args:
        plan: a right one.
        cluster: that it is for, if it is known.
    """
    if plan.order.ranks < 2 or sum(map(len, plan.order.rows)) > _MOST_ACTIONS:
        return None
    return plan.simulate(cluster)


def write_page(plan: Plan, file: Path, cluster: Cluster | None, sentences: list[str]) -> None:
    """The plan's page.

    Args:
        plan: a right one.
        file: that gets it.
        cluster: that it is for.
        sentences: that explain it.
    """
    from mycel.report.plan import render_plan

    write_text(render_plan(plan, run=simulated(plan, cluster), sentences=sentences), file)


def write_text(text: str, file: Path) -> None:
    """A file, whole or not at all.

    Args:
        text: of it.
        file: its name; what was there is replaced.

    Raises:
        UsageError: it cannot be written.
    """
    half = file.with_name(f".{file.name}.part")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(file)
    except OSError as error:
        with suppress(OSError):
            half.unlink()
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
