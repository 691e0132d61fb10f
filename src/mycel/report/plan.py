"""One page a plan: the cluster with stages on it, memory by rank against the limit, the timeline, the runners-up."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from mycel.pipeline.simulate import Run
from mycel.pipeline.timeline import svg
from mycel.planning.job import Job
from mycel.planning.plan.record import PlanRecord
from mycel.report.elements import page, render_cards, table
from mycel.units import format_seconds

__all__ = ["render_plan", "write_plan_page"]

GIB = float(1 << 30)
#: Ranks and actions that are drawn one by one; of more there is a line of text.
_MOST_RANKS, _MOST_ACTIONS = 2048, 8192
_STYLE = """<style>
.nodes { display: flex; flex-wrap: wrap; gap: .7rem; margin: .6rem 0 2.6rem; }
.node { border: 1px solid var(--hairline); border-radius: .6rem; padding: .5rem .6rem; background: var(--panel);
  max-width: 100%; }
.node > b { display: block; font-size: .8rem; font-weight: 500; color: var(--muted); margin: 0 0 .35rem; }
.ranks { display: flex; flex-wrap: wrap; gap: .3rem; }
.rank { min-width: 2.6rem; padding: .2rem .35rem; border-radius: .35rem; font-size: .78rem; line-height: 1.25;
  text-align: center; font-variant-numeric: tabular-nums; background: hsl(var(--hue) 45% 84%); color: #1b2420; }
.rank.idle { background: none; border: 1px dashed var(--link); color: var(--muted); }
.rank small { display: block; font-size: .68rem; }
.bars { margin: .6rem 0 2.6rem; max-width: 46rem; }
.bar { display: grid; grid-template-columns: 10rem minmax(0, 1fr) 5.5rem; gap: .6rem; align-items: center;
  font-size: .85rem; font-variant-numeric: tabular-nums; margin: .22rem 0; }
.bar > span:first-child { color: var(--muted); overflow-wrap: anywhere; }
.bar > span:last-child { text-align: right; white-space: nowrap; }
.track { height: .95rem; background: var(--hairline); border-radius: .25rem; overflow: hidden; }
.fill { height: 100%; background: hsl(var(--hue) 40% 58%); }
.fill.over { background: #b3541e; }
.said { margin: .5rem 0 2.6rem; padding-left: 1.2rem; max-width: 56rem; } .said li { margin: .25rem 0; }
.actions svg { min-width: 1300px; }
@media (max-width: 560px) {
  .bar { grid-template-columns: minmax(0, 1fr) 5rem; } .bar > span:first-child { grid-column: 1 / -1; }
}
</style>"""


def write_plan_page(plan: PlanRecord, file: Path, *, run: Run | None = None, sentences: Sequence[str] = ()) -> None:
    """Writes the page; nothing in it refers to another file or host.

    Args:
        plan: a right one.
        file: where to.
        run: of it in simulation, for the timeline.
        sentences: that explain it.
    """
    file.write_text(render_plan(plan, run=run, sentences=sentences), encoding="utf-8")


def render_plan(plan: PlanRecord, *, run: Run | None = None, sentences: Sequence[str] = ()) -> str:
    """The page as text.

    Args:
        plan: a right one.
        run: of it in simulation, for the timeline.
        sentences: that explain it, the most important first.
    """
    return page(
        f"{plan.model.shape.name} on {plan.cluster.name}",
        [
            _STYLE,
            f'<p class="lead">{escape(_lead(plan))}</p>',
            _cards(plan, run),
            _cluster(plan),
            _memory(plan),
            _timeline(run),
            _sentences(sentences),
            _stages(plan),
            _runners_up(plan),
            _footer(plan),
        ],
    )


def _lead(plan: PlanRecord) -> str:
    job, mesh = plan.job, plan.job.mesh
    parts = [f"{name} {value}" for name in ("pp", "dp", "cp", "tp", "ep") if (value := getattr(mesh, name)) > 1]
    words = [
        f"{mesh.num_ranks} of {plan.cluster.num_ranks} ranks"
        if mesh.num_ranks < plan.cluster.num_ranks
        else f"{mesh.num_ranks} ranks",
        ", ".join(parts) or "no parallelism",
        f"{job.global_batch} sequences of {job.seq} tokens a step in micro-batches of {job.micro_batch}",
        f"of which replicas do {', '.join(map(str, job.shares))}" if job.shares else "",
        f"{job.chunks} stages a rank" if job.chunks > 1 else "",
        {"none": "nothing is recomputed"}.get(job.recompute, f"recomputed: {job.recompute}"),
        f"layers in {job.coshard} pieces, one after the other" if job.coshard > 1 else "",
        ("", "optimizer sharded", "optimizer and gradients sharded", "parameters sharded (FSDP)")[job.zero],
        "optimizer in the host's memory" if job.is_offloaded else "",
    ]
    return "; ".join(word for word in words if word) + "."


def _cards(plan: PlanRecord, run: Run | None) -> str:
    step = plan.predicted
    fullest = max(plan.ranks, key=lambda rank: plan.memory[rank] / plan.cluster.memory_bytes[rank])
    tokens = plan.job.global_batch * plan.job.seq / step.seconds if step.seconds else 0.0
    cards = [
        ("ours", format_seconds(step.seconds), f"a step, modelled, +- {step.error * 100:.2g} %"),
        ("", f"{tokens:,.0f}", "tokens a second, modelled"),
        (
            "",
            f"{plan.memory[fullest] / GIB:.1f} GiB",
            f"on the fullest rank, of {plan.cluster.memory_bytes[fullest] / GIB:.1f}",
        ),
    ]
    if run is not None and run.order.ranks > 1:
        idle = 1.0 - sum(run.busy) / len(run.busy)
        cards.append(("", f"{idle * 100:.1f} %", "of the pipeline's time idle, simulated"))
    return render_cards(cards)


def _sentences(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    rows = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<section><h2>Why this plan</h2><ul class="said">{rows}</ul></section>'


def _hue(place: int, count: int) -> int:
    return (150 + round(place * 360 / max(1, count))) % 360


def _cluster(plan: PlanRecord) -> str:
    note = "Every rank with its stages; ranks of one colour hold the same."
    note += " Replicas have unlike many micro-batches (mb)." if plan.job.shares else ""
    if plan.cluster.num_ranks > _MOST_RANKS:
        return (
            f'<section><h2>Cluster</h2><p class="note">{plan.cluster.num_ranks} ranks are too many to be drawn; '
            "the table of stages below says where each is.</p></section>"
        )
    places = {rank: place for place in range(plan.job.mesh.pp) for rank in plan.group(place)}
    nodes: dict[str, list[int]] = {}
    for rank in range(plan.cluster.num_ranks):
        nodes.setdefault(plan.cluster.node_of(rank), []).append(rank)
    boxes = []
    for node, ranks in nodes.items():
        cells = "".join(_rank(plan, rank, places.get(rank)) for rank in ranks)
        boxes.append(f'<div class="node"><b>{escape(node)}</b><div class="ranks">{cells}</div></div>')
    return f'<section><h2>Cluster</h2><p class="note">{note}</p><div class="nodes">{"".join(boxes)}</div></section>'


def _rank(plan: PlanRecord, rank: int, place: int | None) -> str:
    name = escape(plan.cluster.rank_names[rank].rpartition("/")[2] or str(rank))
    device = escape(plan.cluster.devices[rank]) if plan.cluster.devices else ""
    if place is None:
        return f'<div class="rank idle" title="{device}">{name}<small>idle</small></div>'
    stages = ", ".join(map(str, plan.order.stages_of(place)))
    replica = plan.replica_of(rank) or 0
    share = f"<small>{plan.job.batches_of(replica)} mb</small>" if plan.job.shares else ""
    return (
        f'<div class="rank" style="--hue: {_hue(place, plan.job.mesh.pp)}" title="{device}">{name}'
        f"<small>stage {stages}</small>{share}</div>"
    )


def _memory(plan: PlanRecord) -> str:
    """A bar a rank; where several ranks of one place hold the same of as much, one bar for them all."""
    rows: dict[tuple[int, int, int], list[int]] = {}
    for place in range(plan.job.mesh.pp):
        for rank in plan.group(place):
            rows.setdefault((place, plan.memory[rank], plan.cluster.memory_bytes[rank]), []).append(rank)
    bars = []
    for (place, held, limit), ranks in rows.items():
        name = plan.cluster.rank_names[ranks[0]] + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
        share = 100.0 * held / limit
        bars.append(
            f'<div class="bar" style="--hue: {_hue(place, plan.job.mesh.pp)}"><span title="{escape(name)}">'
            f'{escape(name)}</span><div class="track"><div class="fill{" over" if share > 100 else ""}" '
            f'style="width: {min(share, 100):.1f}%"></div></div>'
            f"<span>{held / GIB:.1f} of {limit / GIB:.0f}</span></div>"
        )
    note = "GiB that each rank is modelled to hold at the fullest moment, against what it has."
    return f'<section><h2>Memory</h2><p class="note">{note}</p><div class="bars">{"".join(bars)}</div></section>'


def _timeline(run: Run | None) -> str:
    if run is None or run.order.ranks < 2:
        return ""
    count = sum(map(len, run.order.rows))
    if count > _MOST_ACTIONS:
        return (
            f'<section><h2>Timeline</h2><p class="note">{count} actions are too many to be drawn; '
            "mycel plan export --to csv writes them.</p></section>"
        )
    name = run.order.name or "order"
    caption = f"{name}: {run.order.num_micro_batches} micro-batches, {format_seconds(run.makespan)}, simulated"
    return (
        '<section><h2>Timeline</h2><p class="note">One replica\'s pipeline, in simulation: forwards blue, backwards '
        "orange or in two halves, messages as lines. Sums of gradients and the optimizer come after it.</p>"
        f'<div class="scroll actions" tabindex="0" role="region" aria-label="Timeline">{svg(run, caption=caption)}'
        "</div></section>"
    )


def _stages(plan: PlanRecord) -> str:
    layers = set(plan.model.layers)
    rows = []
    for stage, (modules, ranks, seconds) in enumerate(
        zip(plan.cut, plan.stage_ranks, plan.stage_seconds, strict=True)
    ):
        ends = modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}"
        shown = ", ".join(map(str, ranks[:6])) + (f", ... ({len(ranks)})" if len(ranks) > 6 else "")
        count = sum(name in layers for name in modules)
        rows.append(("", [str(stage), ends, shown, str(count), *(format_seconds(each) for each in seconds)]))
    return table(
        "Stages",
        "Modules of each stage, the ranks that hold it, and the modelled time of one micro-batch there.",
        ["stage", "modules", "ranks", "layers", "forward", "backward"],
        rows,
        num_text=3,
    )


def _runners_up(plan: PlanRecord) -> str:
    best = plan.predicted.seconds
    rows = [("ours", [*_cells(plan.job), format_seconds(best), "", plan.binding])]
    for other in plan.runners_up:
        behind = f"{(other.seconds / best - 1) * 100:+.1f} %" if best else ""
        rows.append(("", [*_cells(other.job), format_seconds(other.seconds), behind, other.binding]))
    return table(
        "Runners-up",
        "What lost, the fastest first; all modelled, so that differences below the error are none.",
        ["pp", "dp", "cp", "tp", "micro-batch", "recompute", "zero", "step", "behind", "binding"],
        rows,
        num_text=0,
    )


def _cells(job: Job) -> list[str]:
    degrees = [str(getattr(job.mesh, name)) for name in ("pp", "dp", "cp", "tp")]
    degrees[0] += f" x {job.chunks}" if job.chunks > 1 else ""
    degrees[1] += f" ({' + '.join(map(str, job.shares))})" if job.shares else ""
    again = f"{job.recompute}, {job.coshard} pieces" if job.coshard > 1 else job.recompute
    return [*degrees, str(job.micro_batch), again, str(job.zero)]


def _footer(plan: PlanRecord) -> str:
    source = f"; fitted to {plan.predicted.num_rows} measured steps" if plan.predicted.num_rows else ""
    limits = f"; limits: {', '.join(plan.limits)}" if plan.limits else ""
    return (
        f"<footer>model {escape(plan.model.digest)}, cluster {escape(plan.cluster.digest)}{escape(source)}"
        f"{escape(limits)}. All times and sizes are modelled or simulated; none is measured.</footer>"
    )
