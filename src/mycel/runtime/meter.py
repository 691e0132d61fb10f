"""Metrics of a run: calls, bytes and seconds by group and collective, for Prometheus, TensorBoard and whoever asks.

Nothing is counted where collectives run. A reading goes through the flight recorder's ring and adds up what has ended
since the one before; what fell out of the ring between two readings is not lost without a word but is in ``unread``.
With ``MYCEL_METRICS`` a thread reads often enough for that to stay 0, and writes a file now and then.

References:
    Prometheus, "Exposition formats" (text format 0.0.4), and node_exporter's textfile collector, which reads files
    whose names end in ``.prom`` and wants them to be replaced, not written to.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from mycel.errors import UsageError
from mycel.runtime import flight as f
from mycel.runtime import job_fields as j
from mycel.runtime.headers import unpack_kind
from mycel.settings import Settings

__all__ = ["Meter", "keep_writing", "log_metrics", "metrics", "write_metrics"]

_log = logging.getLogger(__name__)

#: Seconds between two readings, at most and at least; in between, as often as the ring fills by a quarter.
_LONGEST_S, _SHORTEST_S = 1.0, 0.01


def _known_as(name: str) -> str:
    """A group's name in metrics: torch's, but for the default group, which is 0 or nothing there."""
    return "default" if name in ("", "0") else name


@lru_cache(maxsize=1024)
def _title(kind: int) -> str:
    """What a call is called, by its kind in headers."""
    return unpack_kind(kind)[0]


class ScalarWriter(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object: ...


@dataclass(slots=True)
class _Counts:
    """Of one collective in one group."""

    calls: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    queued_seconds: float = 0.0


@dataclass(slots=True)
class _Connections:
    """Sums over the TCP connections on which this rank sends."""

    acknowledged_bytes: int = 0
    busy_seconds: float = 0.0
    receiver_full_seconds: float = 0.0
    retransmitted_packets: int = 0

    def add(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self.acknowledged_bytes += line["sent_bytes"]
            self.busy_seconds += line["busy_s"]
            self.receiver_full_seconds += line["receiver_full_s"]
            self.retransmitted_packets += line["retransmitted"]


@dataclass(slots=True)
class _Group:
    """What is known of the groups of one name."""

    ranks: int
    collectives: dict[str, _Counts] = field(default_factory=dict)
    closed: _Connections = field(default_factory=_Connections)
    open: dict[str, f.FlightLog] = field(default_factory=dict)
    failures: int = 0
    links_lost: int = 0

    def connections(self) -> _Connections:
        found = _Connections(**asdict(self.closed))
        for log in self.open.values():
            found.add(log.connections())
        return found


class Meter:
    """Adds up what a flight recorder has held.

    Args:
        recorder: of this process.

    Attributes:
        unread: calls that had left the ring before a reading came.
        under_way: calls that had not ended at the last reading.
    """

    def __init__(self, recorder: f.FlightRecorder) -> None:
        self.recorder = recorder
        self.unread = self.under_way = 0
        self._counted = 0
        self._seen: set[int] = set()
        self._groups: dict[str, _Group] = {}
        self._folded: weakref.WeakSet[f.FlightLog] = weakref.WeakSet()
        self._lock = threading.RLock()

    def read(self) -> int:
        """Count what has ended since the last reading; how many calls were new in the ring."""
        with self._lock:
            entries = self.recorder.entries()
            held = {entry[0] for entry in entries}
            # An entry that has not ended, or was written late by another thread, is simply looked at again.
            fresh = [entry for entry in entries if entry[0] not in self._seen]
            done = [entry for entry in fresh if f.state_of(entry[4]) == "done"]
            sent: dict[Any, int] = {}
            for entry in done:
                self._count(entry, sent)
            self._counted += len(done)
            self._seen = (self._seen | {entry[0] for entry in done}) & held
            self.under_way = len(fresh) - len(done)
            called = max(held, default=-1) + 1
            self.unread = max(0, called - self._counted - self.under_way)
            for group in self._groups.values():
                for identity, log in list(group.open.items()):
                    if log.is_closed:
                        group.closed.add(log.connections())
                        group.failures += log.has_failed
                        group.links_lost += log.links_lost
                        self._folded.add(log)
                        del group.open[identity]
            return len(done)

    def _count(self, entry: f.Entry, sent: dict[Any, int]) -> None:
        """Add one call; ``sent`` keeps what each group's programs send, for most calls are of few programs."""
        _, log, traffic, called_ns, numbers = entry
        fields = numbers.tolist()  # one by one, numbers out of an array cost as much each
        name = _known_as(log.name)
        if (group := self._groups.get(name)) is None:
            group = self._groups[name] = _Group(ranks=len(log.ranks))
        if log not in self._folded:
            group.open.setdefault(log.identity, log)
        counts = group.collectives.setdefault(_title(fields[j.J_HEADER + 2]), _Counts())
        began_ns, ended_ns = fields[j.J_STARTED_NS], fields[j.J_ENDED_NS]
        counts.calls += 1
        counts.bytes += fields[j.J_HEADER + 3]
        key = (traffic, log)
        if key not in sent:
            own = log.ranks.index(self.recorder.rank)
            each = zip(traffic.channels, traffic.num_bytes, strict=True)
            sent[key] = sum(size for channel, size in each if channel.src == own)
        counts.sent_bytes += sent[key]
        counts.seconds += max(0, ended_ns - began_ns) / 1e9
        counts.queued_seconds += max(0, began_ns - called_ns) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """What was counted, see ``metrics``."""
        self.read()
        with self._lock:
            groups = {
                name: {
                    "ranks": group.ranks,
                    "collectives": {what: asdict(counts) for what, counts in sorted(group.collectives.items())},
                    "connections": asdict(group.connections()),
                    "failures": group.failures + sum(log.has_failed for log in group.open.values()),
                    "links_lost": group.links_lost + sum(log.links_lost for log in group.open.values()),
                }
                for name, group in self._groups.items()
            }
            return {
                "rank": self.recorder.rank,
                "world_size": self.recorder.world_size,
                "groups": groups,
                "under_way": self.under_way,
                "unread": self.unread,
            }


_meter: Meter | None = None
_making = threading.Lock()


def _meter_of_process() -> Meter | None:
    global _meter
    recorder = f.recorder_of_process()
    with _making:
        if recorder is not None and (_meter is None or _meter.recorder is not recorder):
            _meter = Meter(recorder)
        return _meter


def metrics(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What this rank's collectives over mycel have come to since the process began.

    Args:
        group: one alone; all of this process's if not given.

    Returns:
        ``rank``, ``world_size``, ``under_way`` (calls that have not ended), ``unread`` (calls that could not be
        counted: more were made between two readings than the flight recorder keeps, see ``MYCEL_FLIGHT_RECORDER``)
        and ``groups``: by torch's name of the group, or ``default``

        - ``ranks``: how many it has,
        - ``collectives``: by name ``calls``, ``bytes`` (of the arrays), ``sent_bytes`` (that this rank handed to its
          connections and to shared memory), ``seconds`` (from its beginning here to its end, the wait for late ranks
          included) and ``queued_seconds`` (before that, behind earlier calls),
        - ``connections``: ``acknowledged_bytes``, ``busy_seconds``, ``receiver_full_seconds`` and
          ``retransmitted_packets``, which the kernel counts for the TCP connections that this rank sends on,
        - ``failures``, ``links_lost``: whether it ended in an error, and links that it goes on without.

        A group has an entry from its first collective over mycel on; there are none where the flight recorder is off.

    Examples:
        On any rank, at any time::

            total = mycel.runtime.metrics()["groups"]["default"]["collectives"]["all_reduce"]
            print(total["calls"], total["bytes"] / total["seconds"])
    """
    meter = _meter_of_process()
    if meter is None:
        return {"rank": 0, "world_size": 1, "groups": {}, "under_way": 0, "unread": 0}
    found = meter.as_dict()
    if group is not None:
        name = _known_as(str(group.group_name))
        found["groups"] = {n: counted for n, counted in found["groups"].items() if n == name}
    return found


def write_metrics(path: str | os.PathLike[str]) -> Path | None:
    """Write ``metrics`` as a text file for Prometheus' node_exporter, all at once or not at all.

    Args:
        path: of the file, whose name the collector wants to end in ``.prom``; ``{rank}`` in it becomes this rank.

    Returns:
        The file; ``None`` where no group was made yet, or the flight recorder is off.

    Raises:
        UsageError: several ranks would write to one file, or it cannot be written.

    Examples:
        In a training loop, on every rank::

            mycel.runtime.write_metrics("mycel-{rank}.prom")  # mycel-0.prom on rank 0, and so on
    """
    meter = _meter_of_process()
    if meter is None:
        return None
    file = _file_of(path, meter.recorder.rank, meter.recorder.world_size)
    try:
        _write(meter, file)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    return file


#: What was written to a writer last; it shows what came since.
_written: weakref.WeakKeyDictionary[Any, dict[str, float]] = weakref.WeakKeyDictionary()


def log_metrics(writer: ScalarWriter, step: int) -> None:
    """Add what the collectives since the last call came to, as scalars: to TensorBoard, or whatever looks like it.

    Args:
        writer: ``torch.utils.tensorboard.SummaryWriter``, or another object with its ``add_scalar``.
        step: of training.

    Examples:
        In a training loop::

            writer = SummaryWriter(f"runs/rank{dist.get_rank()}")
            for step, batch in enumerate(batches):
                train(batch)
                if step % 100 == 0:
                    mycel.runtime.log_metrics(writer, step)  # mycel/default/all_reduce/seconds, and so on
    """
    before = _written.get(writer, {})
    now = {f"mycel/{tag}": value for tag, value in _scalars(metrics())}
    for tag, value in now.items():
        writer.add_scalar(tag, value - before.get(tag, 0.0), step)
    _written[writer] = now


def _scalars(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield "unread", float(found["unread"])
    for name, group in found["groups"].items():
        for what, counts in group["collectives"].items():
            yield from ((f"{name}/{what}/{key}", float(value)) for key, value in counts.items())
        yield from ((f"{name}/connections/{key}", float(value)) for key, value in group["connections"].items())
        yield from ((f"{name}/{key}", float(group[key])) for key in ("failures", "links_lost"))


# -- the file -----------------------------------------------------------------------------------------------------

_OF_COLLECTIVES = {
    "calls": ("collectives_total", "Collectives that have ended."),
    "bytes": ("collective_bytes_total", "Bytes of the arrays of collectives that have ended."),
    "sent_bytes": ("sent_bytes_total", "Bytes that this rank sent for them."),
    "seconds": ("collective_seconds_total", "Seconds from beginning to end, the wait for late ranks included."),
    "queued_seconds": ("queued_seconds_total", "Seconds between call and beginning."),
}
_OF_CONNECTIONS = {
    "acknowledged_bytes": ("connection_bytes_total", "Bytes acknowledged on TCP connections."),
    "busy_seconds": ("connection_busy_seconds_total", "Seconds in which a connection had something to send."),
    "receiver_full_seconds": ("receiver_full_seconds_total", "Those in which the receiver had no room."),
    "retransmitted_packets": ("retransmitted_packets_total", "Packets sent again."),
}


def prometheus_text(found: Mapping[str, Any]) -> str:
    """What ``metrics`` gave, in Prometheus' text format.

    Examples:
        >>> print(prometheus_text({"rank": 1, "world_size": 2, "groups": {}, "under_way": 0, "unread": 3}), end="")
        # HELP mycel_calls_under_way Collectives that have not ended.
        # TYPE mycel_calls_under_way gauge
        mycel_calls_under_way{rank="1"} 0
        # HELP mycel_calls_unread_total Collectives that were over and overwritten before anybody counted them.
        # TYPE mycel_calls_unread_total counter
        mycel_calls_unread_total{rank="1"} 3
    """
    rank = {"rank": str(found["rank"])}
    series: dict[tuple[str, str, str], list[tuple[dict[str, str], float]]] = {
        ("calls_under_way", "gauge", "Collectives that have not ended."): [(rank, found["under_way"])],
        (
            "calls_unread_total",
            "counter",
            "Collectives that were over and overwritten before anybody counted them.",
        ): [(rank, found["unread"])],
    }

    def add(name: str, text: str, labels: dict[str, str], value: float) -> None:
        series.setdefault((name, "counter", text), []).append((rank | labels, value))

    for name, group in found["groups"].items():
        labels = {"group": name}
        for what, counts in group["collectives"].items():
            for key, (metric, text) in _OF_COLLECTIVES.items():
                add(metric, text, labels | {"collective": what}, counts[key])
        for key, (metric, text) in _OF_CONNECTIONS.items():
            add(metric, text, labels, group["connections"][key])
        add("failures_total", "Groups that ended in an error.", labels, group["failures"])
        add("links_lost_total", "Links that a group goes on without.", labels, group["links_lost"])
    lines = []
    for (name, kind, text), values in series.items():
        lines += [f"# HELP mycel_{name} {text}", f"# TYPE mycel_{name} {kind}"]
        lines += [f"mycel_{name}{{{_labels(labels)}}} {value:.12g}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return ",".join(f'{name}="{value.translate(escaped)}"' for name, value in labels.items())


def _file_of(path: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    text = os.fspath(path)
    if world_size > 1 and "{rank}" not in text:
        raise UsageError(f"{text}: each of {world_size} ranks writes a file of its own; put {{rank}} into the name")
    return Path(text.replace("{rank}", str(rank)))


def _write(meter: Meter, file: Path) -> None:
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")  # no name that a collector reads
    unfinished.write_text(prometheus_text(meter.as_dict()), encoding="utf-8")
    unfinished.replace(file)


# -- the thread ---------------------------------------------------------------------------------------------------

_writing: dict[tuple[f.FlightRecorder, Path], threading.Thread] = {}


def keep_writing(recorder: f.FlightRecorder, settings: Settings) -> None:
    """Read, and write ``MYCEL_METRICS``, from now to the end of the process; nothing where nobody asks for it.

    Raises:
        UsageError: several ranks would write to one file, or its folder is not there.
    """
    if settings.metrics is None:
        return
    file = _file_of(settings.metrics, recorder.rank, recorder.world_size)
    if not file.absolute().parent.is_dir():
        raise UsageError(f"MYCEL_METRICS={settings.metrics}: there is no folder {file.parent}")
    meter = _meter_of_process()
    with _making:
        if meter is None or (recorder, file) in _writing:
            return
        ended, process = threading.Event(), os.getpid()

        def last() -> None:
            if os.getpid() == process:  # a forked child has counted nothing
                ended.set()
                _write_or_warn(meter, file)

        arguments = (meter, file, settings.metrics_every_s, ended)
        thread = threading.Thread(target=_run, args=arguments, name="mycel metrics", daemon=True)
        _writing[recorder, file] = thread
        atexit.register(last)
        thread.start()


def _run(meter: Meter, file: Path, every_s: float, ended: threading.Event) -> None:
    pause_s, since_s = _LONGEST_S, every_s
    while not ended.wait(min(pause_s, every_s)):
        since_s += min(pause_s, every_s)
        new = meter.read()
        if new > meter.recorder.capacity // 4:
            pause_s = max(_SHORTEST_S, pause_s / 2)
        elif new < meter.recorder.capacity // 16:
            pause_s = min(_LONGEST_S, pause_s * 2)
        if since_s >= every_s:
            since_s = 0.0
            _write_or_warn(meter, file)


def _write_or_warn(meter: Meter, file: Path) -> None:
    """A disk that is full ends no training."""
    try:
        _write(meter, file)
    except OSError as trouble:
        _log.warning("metrics could not be written: %s", trouble)
