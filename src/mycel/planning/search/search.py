"""Search over every way to train: jobs by their bounds, places and cuts by theirs, the simulator for what is left.

All jobs of the space get a bound on time and on memory at once, as columns. The rest is best first: whatever has the
least bound is looked at more closely. A job becomes its placements and cuts, with bounds by dynamic programming; a
cut gets the time of a pipeline whose messages hinder nobody, and then that of the simulator. When what comes next has
been simulated, nothing else can be faster, and it is proved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from mycel.errors import UsageError
from mycel.planning.cluster import Cluster
from mycel.planning.cuts import Chain, best_cut, cut_bound, cuts_below, least_flight, one_f_one_b_bound
from mycel.planning.job import Job, Mesh
from mycel.planning.models.shape import ModelShape
from mycel.planning.search.bounds import Room, least_seconds, room_of
from mycel.planning.search.found import Candidate, Found
from mycel.planning.search.limits import Limits
from mycel.planning.search.places import are_all_tried, places_of
from mycel.planning.search.reasons import nothing_fits, reasons
from mycel.planning.search.score import candidate_of, pipeline_seconds, unhindered_seconds
from mycel.planning.search.shares import best_shares, least_of_shares, shared_chain, shares_below, with_shares
from mycel.planning.search.space import Space, space_of
from mycel.planning.search.stages import Stages, stages_of

__all__ = ["Progress", "search"]

#: Cuts of one placement that are looked at, at most.
_MOST_CUTS = 2000
#: Layers times places beyond which only the best cut of a placement is simulated.
_MOST_CHAIN = 150
#: Shares of the batch that are looked at for one cut.
_MOST_SHARES = 256
#: Jobs that are looked at after the best is certain, to fill up the best few.
_MOST_MORE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is.

    Attributes:
        doing: what it does.
        best_s: best time so far; infinite where there is none.
        bound_s: that nothing is faster than.
        done, total: jobs.
    """

    doing: str
    best_s: float
    bound_s: float
    done: int
    total: int


def search(
    cluster: Cluster,
    shape: ModelShape,
    *,
    batch: int,
    seq: int,
    limits: Limits | None = None,
    base: Job | None = None,
    top: int = 8,
    limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Found:
    """The fastest way to train a model on a cluster that fits and keeps the limits.

    Ctrl-C and the time limit end it with the best so far and its distance from the bound; where nothing is known yet,
    the likeliest way is looked at first.

    Args:
        cluster: all of whose ranks are used.
        shape: the model.
        batch: sequences of a step.
        seq: tokens of a sequence.
        limits: of the user.
        base: job whose other fields (compiler, 8 bits, executor, fused loss) all have; its mesh and batch do not
            matter.
        top: how many of the best are kept, each of another mesh or number of chunks.
        limit_s: seconds for all of it.
        progress: called as it goes on.

    Raises:
        UsageError: nothing divides, nothing fits (with the smallest overshoot and ways to save it), or limits
            contradict each other.

    References:
        Narayanan et al., SC 2021, section 3 (which degree does what); Zheng et al., "Alpa", OSDI 2022, section 5 and
        Lin et al., "nnScaler", OSDI 2024, section 4 (dynamic programming over stages; constraints).

    Examples:
        >>> from mycel.planning.cluster import load_cluster
        >>> from mycel.planning.models import named
        >>> found = search(load_cluster("h100"), named("llama3-8b"), batch=16, seq=8192)
        >>> found.best.job.mesh.num_ranks, found.is_proved, sum(found.best.cut)
        (8, True, 32)
    """
    until = float("inf") if limit_s is None else time.monotonic() + limit_s
    limits = limits or Limits()
    limits.check(cluster)
    base = _base(base, batch, seq)
    is_offload_tried = any(limit.allows("yes") for limit in limits.of("offload"))
    space = space_of(cluster, shape, base, limits, is_offload_tried=is_offload_tried)
    run = _Run(
        cluster=cluster,
        shape=shape,
        limits=limits,
        memory_bytes=limits.memory(cluster),
        top=max(1, top),
        until=until,
        progress=progress,
    )
    return run.over(space)


def _base(base: Job | None, batch: int, seq: int) -> Job:
    plain = Job(mesh=Mesh(), global_batch=batch, micro_batch=1, seq=seq)
    if base is None:
        return plain
    return replace(
        base,
        mesh=Mesh(),
        global_batch=batch,
        micro_batch=1,
        seq=seq,
        chunks=1,
        zero=0,
        recompute="none",
        shares=(),
        coshard=1,
    )


def _are_alike(one: Job, other: Job) -> bool:
    """Jobs of the same mesh and chunks: the best few have one of each."""
    return one.mesh == other.mesh and one.chunks == other.chunks


class _Level(IntEnum):
    """How much is known of an entry; of equal bounds the one of which more is known comes first."""

    EXACT = 0
    PLAYED = 1
    CUT = 2
    SHARES = 3
    JOB = 4


@dataclass(kw_only=True)
class _Run:
    """One search as it goes on: entries by their bounds, of which the least is looked at more closely."""

    cluster: Cluster
    shape: ModelShape
    limits: Limits
    memory_bytes: tuple[int, ...]
    top: int
    until: float
    progress: Callable[[Progress], None] | None
    heap: list[tuple[float, _Level, int, object]] = field(default_factory=list)
    kept: list[Candidate] = field(default_factory=list)
    known: Candidate | None = None  # the best whose time is known, though something may yet be better
    broken: dict[str, int] = field(default_factory=dict)
    loose_s: float = float("inf")  # least bound of what was not looked at whole
    simulated: int = 0
    visited: int = 0
    numbers: Iterator[int] = field(default_factory=count)
    placed: dict[tuple[int, int, int], tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def over(self, space: Space) -> Found:
        """Look at all jobs, the least bound first."""
        points = space.points(self.shape)
        room = room_of(points, max(self.memory_bytes))
        bounds = least_seconds(points, self.cluster, room.fullest_layers)
        rows = np.flatnonzero(room.fits)
        self.heap = [(float(bounds[row]), _Level.JOB, next(self.numbers), int(row)) for row in rows]
        heapify(self.heap)
        interrupted = False
        try:
            self._best_first(space)
        except (KeyboardInterrupt, TimeoutError):
            interrupted = True
            self.until = float("inf")
            self._hurry(space)
        if not self.kept and self.known is not None:
            self.kept = [self.known]
        if not self.kept:
            raise UsageError(self._why_none(space, room))
        best = self.kept[0]
        left = min(self.heap[0][0] if self.heap else float("inf"), self.loose_s)
        return Found(
            best=best,
            candidates=tuple(self.kept),
            refused=reasons(space, room, bounds, best, self.broken),
            visited=self.visited,
            simulated=self.simulated,
            bound_s=min(left, best.seconds.seconds),
            is_proved=left >= best.seconds.seconds,
            interrupted=interrupted,
        )

    def _best_first(self, space: Space) -> None:
        more = 0
        while self.heap and len(self.kept) < self.top and more < _MOST_MORE:
            bound, level, _, what = heappop(self.heap)
            try:
                self._check_clock()
                if level is _Level.JOB:
                    assert isinstance(what, int)
                    more += bool(self.kept)
                    self._tell("jobs", bound, len(space))
                    self._expand(space.job(what), bound)
                    self.visited += 1
                elif level is _Level.EXACT:
                    assert isinstance(what, Candidate)
                    if not any(_are_alike(one.job, what.job) for one in self.kept):
                        self.kept.append(what)
                else:
                    assert isinstance(what, tuple)
                    if any(_are_alike(one.job, what[0].job) for one in self.kept):  # another cut of it is better
                        continue
                    if level is _Level.SHARES:
                        stages, cut = what
                        self._share(stages, cut, bound)
                    else:
                        self._play(level, *what)
            except (KeyboardInterrupt, TimeoutError):
                self._push(bound, level, what)
                raise

    def _hurry(self, space: Space) -> None:
        """Where time is over and nothing is known yet, one way is looked at nevertheless: of the likeliest, one."""
        while self.known is None and self.heap:
            cuts = [entry for entry in self.heap if entry[1] is not _Level.JOB]
            entry = min(cuts or self.heap)
            self.heap.remove(entry)
            bound, level, _, what = entry
            self.loose_s = min(self.loose_s, bound)
            if level is _Level.JOB:
                assert isinstance(what, int)
                self._first(space.job(what), self.broken)
                continue
            assert isinstance(what, tuple)
            stages, cut = what
            self._play_best(stages, cut, is_shared=level is _Level.SHARES)
        heapify(self.heap)

    def _first(self, job: Job, broken: dict[str, int] | None = None) -> None:
        """Of a job one way at once, so that a time is known: the best cut of the first placement that has one."""
        for stages in self._stages(job, broken):
            cut = best_cut(shared_chain(stages) if job.shares else stages.chain())
            played = self.simulated
            if cut is not None:
                self._play_best(stages, cut, is_shared=bool(job.shares))
            if self.simulated > played:
                return

    def _play_best(self, stages: Stages, cut: tuple[int, ...], *, is_shared: bool) -> None:
        if is_shared:
            self._give(stages, cut, best_shares(stages, cut), is_played=True)
        else:
            self._play(_Level.PLAYED, stages, cut)

    def _check_clock(self) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError

    def _tell(self, doing: str, bound: float, total: int) -> None:
        if self.progress is not None:
            best = self.known.seconds.seconds if self.known else float("inf")
            self.progress(Progress(doing=doing, best_s=best, bound_s=bound, done=self.visited, total=total))

    def _push(self, bound: float, level: _Level, what: object) -> None:
        heappush(self.heap, (bound, level, next(self.numbers), what))

    def _expand(self, job: Job, bound: float) -> None:
        """Every placement and every cut of a job that may win, by its bound."""
        if not are_all_tried(self.cluster):
            self.loose_s = min(self.loose_s, bound)
        if job.shares and not self.kept and not are_all_tried(self.cluster):
            self._first(job)  # cuts with all their shares are many: only those that may be better than something
        goal = self.known.seconds.seconds if self.known else float("inf")
        if self.kept:
            goal = float("inf")
        expand = self._expand_shares if job.shares else self._expand_equal
        for stages in self._stages(job, self.broken):
            expand(stages, bound, goal)

    def _stages(self, job: Job, broken: dict[str, int] | None = None) -> Iterator[Stages]:
        """A job on each of its placements that keeps the limits; the others are counted in ``broken``."""
        for ranks in self._places(job):
            self._check_clock()
            text = self.limits.broken_by_ranks(self.cluster, job, ranks)
            if text is None:
                stages = stages_of(self.cluster, self.shape, job, ranks, self.memory_bytes)
                if not job.shares or len(stages.replicas) > 1:  # equally fast replicas are best loaded alike
                    yield stages
            elif broken is not None:
                broken[text] = broken.get(text, 0) + 1

    def _expand_equal(self, stages: Stages, bound: float, goal: float) -> None:
        """Every cut of replicas with equally many micro-batches that may win."""
        chain = stages.chain()
        self._push_cuts(
            _Level.CUT,
            stages,
            chain,
            bound,
            goal,
            least=lambda cut: one_f_one_b_bound(chain, cut),
            # Another cut may be up to what messages and chunks make of the best one faster than it.
            any_cut=lambda cut: max(cut_bound(chain, cut), least_flight(chain)),
        )

    def _expand_shares(self, stages: Stages, bound: float, goal: float) -> None:
        """Every cut of replicas with unlike many micro-batches that may win, whatever the shares."""
        chain = shared_chain(stages)
        self._push_cuts(
            _Level.SHARES,
            stages,
            chain,
            bound,
            goal,
            least=lambda cut: least_of_shares(stages, cut),
            any_cut=lambda cut: cut_bound(chain, cut),
        )

    def _push_cuts(
        self,
        level: _Level,
        stages: Stages,
        chain: Chain,
        bound: float,
        goal: float,
        *,
        least: Callable[[tuple[int, ...]], float],
        any_cut: Callable[[tuple[int, ...]], float],
    ) -> None:
        """The cuts of a placement that may win: of a long chain the best one, and what any other takes at least."""
        if chain.num_layers * len(chain.layer_s) > _MOST_CHAIN:
            best = best_cut(chain)
            if best is not None:
                self._push(self._with_ending(stages, best, least(best)), level, (stages, best))
                if len(best) > 1:
                    self.loose_s = min(self.loose_s, self._with_ending(stages, best, any_cut(best)))
            return
        for number, (_, cut) in enumerate(cuts_below(chain, goal)):
            self._check_clock()
            if number >= _MOST_CUTS:
                self.loose_s = min(self.loose_s, bound)
                break
            seconds = self._with_ending(stages, cut, least(cut))
            if seconds < goal:
                self._push(seconds, level, (stages, cut))

    def _share(self, stages: Stages, cut: tuple[int, ...], bound: float) -> None:
        """A cut with all shares of the batch that may win; before anything is known, with the likeliest."""
        is_best_enough = bool(self.kept) or not are_all_tried(self.cluster)
        if self.known is None or is_best_enough:
            self._give(stages, cut, best_shares(stages, cut), is_played=self.known is None)
            if is_best_enough:
                return
        known = self.known.seconds.seconds if self.known else float("inf")
        most = known - self._with_ending(stages, cut, 0.0)
        for number, shares in enumerate(shares_below(stages, cut, most)):
            self._check_clock()
            if number >= _MOST_SHARES:
                self.loose_s = min(self.loose_s, bound)
                break
            self._give(stages, cut, shares)

    def _give(
        self, stages: Stages, cut: tuple[int, ...], shares: tuple[int, ...], *, is_played: bool = False
    ) -> None:
        if len(set(shares)) == 1:
            return  # that is a job of its own
        shared = with_shares(stages, shares, self.memory_bytes)
        most = shared.chain().most
        fits = all(layers <= room for layers, room in zip(cut, most, strict=True))
        if not fits or self.limits.broken_by(shared.job) is not None:
            return
        if is_played:
            self._play(_Level.PLAYED, shared, cut)
            return
        least = max(one_f_one_b_bound(one.chain(), cut) for one in shared.replicas)
        self._push(self._with_ending(shared, cut, least), _Level.CUT, (shared, cut))

    def _places(self, job: Job) -> tuple[tuple[int, ...], ...]:
        mesh = job.mesh
        key = (mesh.pp, mesh.dp * mesh.cp, mesh.tp)
        if key not in self.placed:
            self.placed[key] = places_of(self.cluster, mesh)
        return self.placed[key]

    def _play(self, level: _Level, stages: Stages, cut: tuple[int, ...]) -> None:
        """The next better answer about a cut: as if messages hindered nobody, then in simulation."""
        if level is _Level.CUT and len(cut) > 1 and self.cluster.topology is not None:
            least = self._with_ending(stages, cut, unhindered_seconds(stages, cut))
            self._push(least, _Level.PLAYED, (stages, cut))
            return
        self.simulated += 1
        found = candidate_of(stages, cut, pipeline_seconds(stages, cut))
        if self.known is None or found.seconds.seconds < self.known.seconds.seconds:
            self.known = found
        self._push(found.seconds.seconds, _Level.EXACT, found)

    def _with_ending(self, stages: Stages, cut: tuple[int, ...], pipeline_s: float) -> float:
        return pipeline_s + sum(stages.ending(cut, pipeline_s)) + self.cluster.fit.coefficients.step_s

    def _why_none(self, space: Space, room: Room) -> str:
        if not self.broken:
            return nothing_fits(self.cluster, self.shape, space, room, self.memory_bytes, self.limits)
        worst = max(self.broken, key=lambda text: self.broken[text])
        return (
            f"nothing keeps the limit '{worst}' on {self.cluster.name}: it rules out {self.broken[worst]} placements "
            "and leaves none that fits; leave it out or choose another node"
        )
