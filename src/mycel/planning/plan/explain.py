"""Why a plan is as it is: what binds, who came second, why each other degree lost, what more of everything would buy.

Nothing here is read off the plan: every answer is a search. What binds is what gains most when it is relaxed and the
search is made again, of memory, links and limits; where none of them gains, it is computation, which always would. A
what-if is the search on the cluster that would then be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.cluster import Cluster
from mycel.planning.cuts import best_cut
from mycel.planning.job import Job
from mycel.planning.plan.record import PlanRecord
from mycel.planning.plan.replay import check_cluster
from mycel.planning.predict import Prediction
from mycel.planning.search import Candidate, Found, Limits, Refusal, search
from mycel.planning.search.places import places_of
from mycel.planning.search.score import candidate_of, pipeline_seconds
from mycel.planning.search.shares import best_shares, shared_chain, with_shares
from mycel.planning.search.stages import stages_of
from mycel.units import format_seconds

__all__ = ["BINDS", "CHANGES", "SEARCH_S", "Change", "Explanation", "Lost", "evaluate", "explain_plan", "ways"]

_GIB = 1 << 30
#: Placements of a job that are tried where only its parts are wanted.
_PLACES = 4
#: Seconds for each of the searches if nobody says.
SEARCH_S = 20.0
#: Gains below this share are none: a search that is not proved may come out so much higher or lower.
_NOTHING = 0.002
#: What is relaxed binds if that gains this share; where nothing does, computation is all that is left.
BINDS = 0.02
#: What a part of a step is to people.
_WORDS = {
    "compute": "computation",
    "head": "the head and the loss",
    "tensor": "exchanges of tensor, context and expert parallelism",
    "bubble": "the pipeline's bubble",
    "boundary": "messages between stages",
    "gradients": "sums of gradients",
    "optimizer": "the optimizer",
    "waiting": "the wait for the slowest replica",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that could be otherwise, and the best step if it were.

    Attributes:
        name: short: ``memory``, ``network``, or the text of a limit.
        told: to people.
        seconds: of a step, by a search; ``None`` where there is none.
        gain: how many times as fast as the plan; for more ranks also what that is a rank.
        job: the best there.
        gap: by how much the search may be above the least where it was stopped; 0 where it came to its end.
    """

    name: str
    told: str
    seconds: float | None
    gain: float
    job: Job | None = None
    gap: float = 0.0

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Why a degree that the plan does not have lost.

    Attributes:
        degree: with its value: ``tp=8``.
        why: ``memory``, ``slower`` or ``limit``.
        told: to people.
        seconds: of the likeliest way with it that fits, where one does.
    """

    degree: str
    why: str
    told: str
    seconds: float = 0.0

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All of it.

    Attributes:
        step: of the plan.
        binding: of memory, links and limits what gains most when it is relaxed; computation where none gains 2 %.
        relaxed: everything that was relaxed, the largest gain first.
        what_ifs: 10 GiB more a rank, one node more, links twice as fast.
        runner_up: the fastest of the others.
        lost: why each other degree is not the plan's.
        is_best: the search finds nothing faster than the plan.
        searched: what the search finds.
    """

    step: Prediction
    binding: Change
    relaxed: tuple[Change, ...]
    what_ifs: tuple[Change, ...]
    runner_up: Candidate | None
    lost: tuple[Lost, ...]
    is_best: bool
    searched: Candidate

    __repr__ = brief

    def sentences(self) -> list[str]:
        """For people, the most important first."""
        said = [_step_told(self.step), f"What binds is {self.binding.told}."]
        if not self.is_best:
            said.append(
                f"A search now finds a faster way: {ways(self.searched.job)}, "
                f"{format_seconds(self.searched.seconds.seconds)}."
            )
        others = [change.told for change in self.relaxed if change is not self.binding]
        if others:
            said.append(f"Beside it: {'; '.join(others)}.")
        if self.runner_up is not None:
            behind = self.runner_up.seconds.seconds / self.step.seconds - 1.0
            inside = ", within the error of the model" if behind <= self.step.error else ""
            said.append(
                f"The runner-up is {ways(self.runner_up.job)}: {format_seconds(self.runner_up.seconds.seconds)}, "
                f"{behind:+.1%}{inside}."
            )
        said += [f"{change.told[:1].upper()}{change.told[1:]}." for change in self.what_ifs]
        said += [f"{lost.degree}: {lost.told}." for lost in self.lost]
        return said

    def to_json(self) -> dict[str, object]:
        """A JSON object of all of it."""

        def change(one: Change) -> dict[str, object]:
            return {
                "name": one.name,
                "told": one.told,
                "seconds": one.seconds,
                "gain": one.gain,
                "job": None if one.job is None else ways(one.job),
                "gap": one.gap,
            }

        runner = self.runner_up
        return {
            "seconds": self.step.seconds,
            "error": self.step.error,
            "parts": self.step.parts,
            "binding": change(self.binding),
            "relaxed": [change(one) for one in self.relaxed],
            "what_ifs": [change(one) for one in self.what_ifs],
            "runner_up": None
            if runner is None
            else {"job": ways(runner.job), "seconds": runner.seconds.seconds, "binding": runner.binding},
            "lost": [
                {"degree": one.degree, "why": one.why, "told": one.told, "seconds": one.seconds} for one in self.lost
            ],
            "is_best": self.is_best,
        }


#: What can be relaxed on a cluster, by name: told to people, and the cluster that would be there.
CHANGES: dict[str, tuple[str, Callable[[Cluster], Cluster]]] = {
    "memory": ("memory: with twice as much on every rank", lambda c: _with_memory(c, 2)),
    "inside": ("links inside nodes: twice as fast", lambda c: c.with_faster_links(2, is_inside=True)),
    "network": ("the network: twice as fast", lambda c: c.with_faster_links(2, is_inside=False)),
    "compute": ("computation: on ranks twice as fast", lambda c: _with_faster_ranks(c, 2)),
}
#: What people ask for, likewise.
_WHAT_IFS: dict[str, tuple[str, Callable[[Cluster], Cluster]]] = {
    "10 GiB": ("10 GiB more on every rank", lambda c: c.with_memory(10 * _GIB)),
    "node": ("one more node", lambda c: c.with_another_node()),
    "inside": ("links inside nodes twice as fast", lambda c: c.with_faster_links(2, is_inside=True)),
    "network": ("a network twice as fast", lambda c: c.with_faster_links(2, is_inside=False)),
}


def explain_plan(
    plan: PlanRecord,
    cluster: Cluster,
    *,
    limit_s: float | None = SEARCH_S,
    told: Callable[[str], None] | None = None,
) -> Explanation:
    """Why a plan is as it is.

    Args:
        plan: a right one.
        cluster: that it is for.
        limit_s: seconds for each of the searches, about ten.
        told: called with what is being searched.

    Raises:
        UsageError: the plan is for another cluster, or its limits cannot be read.
    """
    check_cluster(plan, cluster)
    ask = _Asking(plan=plan, limit_s=limit_s, told=told or (lambda _: None))
    limits = Limits.from_text(*plan.limits)
    now = ask.search(cluster, limits, "the plan's own cluster")
    best = min(plan.predicted.seconds, now.best.seconds.seconds)
    relaxed = []
    for name, (words, changed) in CHANGES.items():
        if name in ("inside", "network") and not _has_links(cluster, is_inside=name == "inside"):
            continue
        relaxed.append(ask.change(name, words, changed(cluster), limits, best))
    relaxed += [
        ask.change(text, f"the limit '{text}': without it", cluster, limits.without(text), best)
        for text in limits.texts
    ]
    relaxed.sort(key=lambda change: -change.gain)
    what_ifs = []
    known = {change.name: change for change in relaxed}
    for name, (words, changed) in _WHAT_IFS.items():
        if name in ("inside", "network"):
            if name in known:
                what_ifs.append(replace(known[name], told=_changed_told(words, known[name], best)))
            continue
        what_ifs.append(ask.change(name, words, changed(cluster), limits, best))
    others = [one for one in now.candidates if one.job != plan.job]
    return Explanation(
        step=plan.predicted,
        binding=_binding(relaxed),
        relaxed=tuple(relaxed),
        what_ifs=tuple(what_ifs),
        runner_up=others[0] if others else None,
        lost=tuple(_lost(plan, cluster, now)),
        is_best=now.best.seconds.seconds >= plan.predicted.seconds * (1.0 - _NOTHING),
        searched=now.best,
    )


def evaluate(cluster: Cluster, plan: PlanRecord, job: Job) -> Candidate | None:
    """One job with its best cut on the first of its placements, as a search would score it; ``None`` if none fits.

    Of unequal shares of the batch the best for that cut are taken.

    Args:
        cluster: whose ranks.
        plan: of whose model.
        job: any that the cluster has ranks for.
    """
    found: Candidate | None = None
    for ranks in islice(places_of(cluster, job.mesh), _PLACES):
        stages = stages_of(cluster, plan.model.shape, job, ranks, cluster.memory_bytes)
        cut = best_cut(shared_chain(stages) if job.shares else stages.chain())
        if cut is None:
            continue
        if job.shares:
            stages = with_shares(stages, best_shares(stages, cut), cluster.memory_bytes)
            if any(layers > most for layers, most in zip(cut, stages.chain().most, strict=True)):
                continue
        one = candidate_of(stages, cut, pipeline_seconds(stages, cut))
        if found is None or one.seconds.seconds < found.seconds.seconds:
            found = one
    return found


def ways(job: Job) -> str:
    """A job in a few words.

    Args:
        job: any.

    Examples:
        >>> from mycel.planning.job import Job, Mesh
        >>> ways(Job(mesh=Mesh(pp=2, tp=4), global_batch=8, micro_batch=1, seq=128, zero=1))
        'pp 2, tp 4, micro-batch 1, zero 1'
    """
    mesh = job.mesh
    parts = [f"{name} {value}" for name in ("pp", "dp", "cp", "tp", "ep") if (value := getattr(mesh, name)) > 1]
    parts += [f"{job.chunks} chunks"] if job.chunks > 1 else []
    parts.append(f"micro-batch {job.micro_batch}")
    parts += [f"recompute {job.recompute}"] if job.recompute != "none" else []
    parts += [f"zero {job.zero}"] if job.zero else []
    parts += [f"layers in {job.coshard} pieces"] if job.coshard > 1 else []
    parts += [f"shares {' + '.join(map(str, job.shares))}"] if job.shares else []
    return ", ".join(parts + (["offloaded"] if job.is_offloaded else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """Searches for one plan's model and batch."""

    plan: PlanRecord
    limit_s: float | None
    told: Callable[[str], None]

    def search(self, cluster: Cluster, limits: Limits, what: str) -> Found:
        job = self.plan.job
        self.told(what)
        return search(
            cluster,
            self.plan.model.shape,
            batch=job.global_batch,
            seq=job.seq,
            limits=limits,
            base=job,
            top=4,
            limit_s=self.limit_s,
        )

    def change(self, name: str, words: str, cluster: Cluster, limits: Limits, now_s: float) -> Change:
        try:
            found = self.search(cluster, limits, words)
        except UsageError as error:
            return Change(name=name, told=f"{words}: no plan ({error})", seconds=None, gain=0.0)
        seconds = found.best.seconds.seconds
        gap = found.gap if found.interrupted else 0.0
        one = Change(name=name, told="", seconds=seconds, gain=now_s / seconds, job=found.best.job, gap=gap)
        return replace(one, told=_changed_told(words, one, now_s))


def _changed_told(words: str, change: Change, now_s: float) -> str:
    if change.seconds is None or change.job is None:
        return words
    stopped = f"; the search was stopped, at most {change.gap:.0%} above the least" if change.gap else ""
    if abs(change.seconds / now_s - 1.0) < _NOTHING:
        return f"{words}, a step takes as long{stopped}"
    gain = f"{now_s / change.seconds:.2f}x{stopped}"
    return f"{words}, a step takes {format_seconds(change.seconds)} ({gain}) by {ways(change.job)}"


def _step_told(step: Prediction) -> str:
    parts = sorted((step.parts or {}).items(), key=lambda part: -part[1])
    total = sum(seconds for _, seconds in parts) or 1.0
    shown = [f"{seconds / total:.0%} {_WORDS.get(name, name)}" for name, seconds in parts if seconds > 0.01 * total]
    return f"A step takes {step}, modelled: {', '.join(shown)}."


def _binding(relaxed: list[Change]) -> Change:
    """What gains most beside computation, if it gains; else computation."""
    others = [change for change in relaxed if change.name != "compute"]
    if others and others[0].gain >= 1.0 + BINDS:
        return others[0]
    return next(change for change in relaxed if change.name == "compute")


# -- relaxations ------------------------------------------------------------------------------------------------


def _with_memory(cluster: Cluster, times: int) -> Cluster:
    return replace(cluster, memory_bytes=tuple(size * times for size in cluster.memory_bytes))


def _with_faster_ranks(cluster: Cluster, times: int) -> Cluster:
    devices = {
        device: replace(
            device,
            flops=device.flops * times,
            float8_flops=device.float8_flops * times,
            memory_gbps=device.memory_gbps * times,
        )
        for device in set(cluster.devices)
    }
    machine = replace(cluster.machine, device=devices.get(cluster.machine.device, cluster.machine.device))
    return replace(cluster, machine=machine, devices=tuple(devices[device] for device in cluster.devices))


def _has_links(cluster: Cluster, *, is_inside: bool) -> bool:
    sizes = [len(ranks) for ranks in cluster.ranks_by_node.values()]
    return max(sizes) > 1 if is_inside else len(sizes) > 1


# -- why others lost --------------------------------------------------------------------------------------------


def _lost(plan: PlanRecord, cluster: Cluster, now: Found) -> Iterator[Lost]:
    for degree, refusals in now.refused.items():
        if not refusals:
            continue
        slower = next((one for one in refusals if one.reason == "slower"), None)
        memory = next((one for one in refusals if one.reason == "memory"), None)
        if slower is not None:
            yield _slower(plan, cluster, now, degree, slower, memory)
        elif memory is not None:
            nearest = ways(memory.nearest) if memory.nearest is not None else ""
            over = f"{memory.least_bytes / _GIB:.2f} GiB over"
            told = f"none of {memory.count} ways fits; the nearest, {nearest}, is {over}"
            yield Lost(degree=degree, why="memory", told=told)
        else:
            yield Lost(degree=degree, why="limit", told=f"{refusals[0].count} ways are ruled out by that limit")


def _slower(
    plan: PlanRecord, cluster: Cluster, now: Found, degree: str, refusal: Refusal, memory: Refusal | None
) -> Lost:
    others = [one for one in now.candidates if _has(one.job, degree)]
    one = others[0] if others else None
    if one is None and refusal.nearest is not None:
        one = evaluate(cluster, plan, refusal.nearest)
    unfit = ""
    if memory is not None and memory.least_seconds < plan.predicted.seconds:
        # Ways that would be slower anyway are not held back by memory.
        unfit = f"; {memory.count} more do not fit, the nearest by {max(memory.least_bytes / _GIB, 0.01):.2f} GiB"
    if one is None:
        told = f"no way that fits takes less than {format_seconds(refusal.least_seconds)}"
        return Lost(degree=degree, why="slower", told=told + unfit, seconds=refusal.least_seconds)
    seconds = one.seconds.seconds
    behind = seconds / plan.predicted.seconds - 1.0
    why = _more_of(plan.predicted, one, cluster)
    told = f"{ways(one.job)} takes {format_seconds(seconds)} ({behind:+.1%}){f', {why}' if why else ''}{unfit}"
    return Lost(degree=degree, why="slower", told=told, seconds=seconds)


def _has(job: Job, degree: str) -> bool:
    name, _, value = degree.partition("=")
    if name == "offload":
        return job.is_offloaded == (value == "yes")
    if name == "shares":
        return bool(job.shares) == (value == "unequal")
    got = getattr(job.mesh, name) if hasattr(job.mesh, name) else getattr(job, name, None)
    return str(got) == value


def _more_of(mine: Prediction, other: Candidate, cluster: Cluster) -> str:
    """The part of which the other has most more, with the links that it goes over."""
    ours, theirs = mine.parts or {}, other.seconds.parts or {}
    more = {name: theirs[name] - ours.get(name, 0.0) for name in theirs}
    name = max(more, key=lambda part: more[part])
    if more[name] <= 0:
        return ""
    where = ""
    if name in ("tensor", "gradients", "boundary"):
        where = f" over {_links_of(name, other, cluster)}"
    return f"{format_seconds(more[name])} more for {_WORDS.get(name, name)}{where}"


def _links_of(part: str, other: Candidate, cluster: Cluster) -> str:
    mesh = other.job.mesh
    inner = mesh.tp * mesh.cp * (mesh.ep if mesh.ep > 1 else 1)
    size = {"tensor": inner, "gradients": mesh.tp * mesh.cp * mesh.dp, "boundary": len(other.ranks)}[part]
    for first in range(0, len(other.ranks), size):
        if len({cluster.nodes[rank] for rank in other.ranks[first : first + size]}) > 1:
            return "the network"
    return "links inside nodes"
