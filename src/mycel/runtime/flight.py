"""Flight recorder: the last collectives of this process, written down when one fails, or when somebody asks.

A call adds one tuple to a ring. Everything that is known only later (when the engine began, when it ended, how far it
came) stands in the integers that the engine writes for the run anyway; the ring holds on to those, so the end of a
call costs nothing and a dump in the middle of a hang shows how far every channel has come. The ring keeps neither
tensors nor programs alive.

A dump is a file of JSON lines: one about the process, one about each group with its fabric, programs and what the
kernel counted on each connection, and one about each collective, oldest first. ``mycel report`` reads the dumps of
all ranks.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import Channel
from mycel.errors import CommunicationError
from mycel.runtime import job_fields as j
from mycel.runtime.headers import unpack_kind
from mycel.runtime.prepared import Traffic
from mycel.runtime.transport.tcp_info import tcp_info
from mycel.settings import Settings, read_settings
from mycel.topology.json_format import to_json
from mycel.topology.model import Topology

__all__ = [
    "FORMAT",
    "Entry",
    "FlightLog",
    "FlightRecorder",
    "dump_flight_records",
    "recorder",
    "recorder_of_process",
    "state_of",
]

_log = logging.getLogger(__name__)

#: Version of the lines.
FORMAT = 1

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
Fields = npt.NDArray[np.int64]
#: Number, group, what moves, time of the call, the job's integers.
Entry = tuple[int, "FlightLog", Traffic, int, Fields]


class FlightRecorder:
    """The ring of one process, shared by its groups.

    Args:
        capacity: collectives that are kept.
        rank, world_size: of this process in the whole job.

    Attributes:
        ring: entry ``number`` stands at ``number % capacity``.
        numbers: gives the next entry its number.
    """

    def __init__(self, capacity: int, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.capacity = capacity
        self.ring: list[Entry | None] = [None] * capacity
        self.numbers = itertools.count()  # taking the next number is one step, whichever thread does it

    def entries(self) -> list[Entry]:
        """What the ring holds, oldest first."""
        return sorted((entry for entry in self.ring if entry is not None), key=lambda entry: entry[0])

    def lines(self, why: str) -> list[dict[str, Any]]:
        """The lines of a dump; see the module.

        Args:
            why: what the dump was made for.
        """
        entries = self.entries()
        logs = list(dict.fromkeys(entry[1] for entry in entries))
        programs: dict[Traffic, int] = {}
        calls = [entry[1].line(entry, programs.setdefault(entry[2], len(programs))) for entry in entries]
        head = {
            "mycel_flight": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": socket.gethostname(),
            "clock": _clock_name(),
            "pid": os.getpid(),
            "monotonic_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
            "why": why,
            "recorded": entries[-1][0] + 1 if entries else 0,
            "kept": len(entries),
        }
        shown = [
            {
                "program": number,
                "channels": [{"src": c.src, "dst": c.dst, "path": list(c.path)} for c in traffic.channels],
                "bytes": list(traffic.num_bytes),
                "messages": list(traffic.num_messages),
            }
            for traffic, number in programs.items()
        ]
        return [head, *(log.group_line() for log in logs), *shown, *calls]

    def dump(self, folder: Path, why: str) -> Path:
        """Write ``rank<N>.jsonl`` into a folder, which is made where it is missing.

        Raises:
            OSError: the file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"rank{self.rank}.jsonl"
        unfinished = folder / f".rank{self.rank}.{os.getpid()}.tmp"
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in self.lines(why)), encoding="utf-8")
        unfinished.replace(file)
        return file


class FlightLog:
    """What one group adds to the recorder.

    Args:
        recorder: the process's.
        identity: the same on every rank of the group, and different for every group that ever was.
        name: what torch calls the group.
        ranks: global ranks of its members, in group order.
        topology: the fabric between them.
        described: the user has described it; else it is assumed, and its capacities mean little.
        dtype_name: name of an element type's code.
        folder: where dumps go; ``None``: a folder of this user's among the temporary files, on failures only.

    Attributes:
        links_lost: links that the group goes on without.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        *,
        identity: str,
        name: str,
        ranks: tuple[int, ...],
        topology: Topology,
        described: bool,
        dtype_name: Callable[[int], str],
        folder: Path | None,
    ) -> None:
        self._recorder = recorder
        self._ring, self._numbers, self._capacity = recorder.ring, recorder.numbers, recorder.capacity
        self._identity, self._name, self._ranks = identity, name, ranks
        self._is_closed = False
        self.links_lost = 0
        self._topology, self._described = topology, described
        self._dtype_name = dtype_name
        self._folder = folder
        self._descriptors: Mapping[Channel, int] = {}
        self._links: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # SIGUSR2 may come while this very thread holds it
        self._told = False

    @property
    def identity(self) -> str:
        """The same on every rank of the group, and different for every group that ever was."""
        return self._identity

    @property
    def name(self) -> str:
        """What torch calls the group."""
        return self._name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of its members, in group order."""
        return self._ranks

    @property
    def has_failed(self) -> bool:
        """Whether it ended in an error."""
        return self._told

    @property
    def is_closed(self) -> bool:
        """Whether its sockets were read for the last time."""
        return self._is_closed

    @property
    def capacity(self) -> int:
        """Records that are kept: the fields of so many calls must stay as they are."""
        return self._capacity

    def watch(self, descriptors: Mapping[Channel, int]) -> None:
        """The group's sockets by channel: a mapping that may grow until ``close``."""
        self._descriptors = descriptors

    def note(self, traffic: Traffic, called_ns: int, fields: Fields) -> None:
        """A collective was called. This runs at every call, so it is one tuple and no more.

        Args:
            traffic: of its program.
            called_ns: CLOCK_MONOTONIC time of the call.
            fields: the integers of the job, whose times and state the engine writes.
        """
        number = next(self._numbers)
        self._ring[number % self._capacity] = (number, self, traffic, called_ns, fields)

    def failed(self, error: CommunicationError) -> None:
        """Write everything down, once a group; the error gets a note that says where."""
        with self._lock:
            if self._told:
                return
            self._told = True
        folder = (self._folder or _own_temporary_folder()) / f"failed-{self._identity}"
        try:
            _check_owner(folder)
            file = self._recorder.dump(folder, f"{type(error).__name__}: {error}")
        except OSError as trouble:
            _log.warning("flight records could not be written: %s", trouble)
            return
        error.add_note(f"flight records of this rank: {file} (of all ranks: mycel report {folder})")
        _log.error("rank %d: flight records were written to %s", self._recorder.rank, file)

    def close(self) -> None:
        """The group ends: read its sockets for the last time, and write everything down where that is asked for."""
        with self._lock:
            self._links = self._read_links()
            self._descriptors = {}
            self._is_closed = True
        if self._folder is not None:
            _dump_or_warn(self._recorder, self._folder, "the group was closed")

    # -- lines --------------------------------------------------------------------------------------------

    def group_line(self) -> dict[str, Any]:
        """The group, its fabric, and its connections as they are now (or were, when it was closed)."""
        links = self.connections()
        return {
            "group": self._identity,
            "name": self._name,
            "ranks": list(self._ranks),
            "topology": to_json(self._topology),
            "described": self._described,
            "connections": links,
        }

    def connections(self) -> list[dict[str, Any]]:
        """What the kernel has counted on those that this rank sends on, a line each."""
        with self._lock:
            return self._read_links() if self._descriptors else self._links

    def _read_links(self) -> list[dict[str, Any]]:
        own = self._ranks.index(self._recorder.rank)
        found = []
        for channel, descriptor in tuple(self._descriptors.items()):
            info = tcp_info(descriptor) if channel.src == own else None
            if info is not None:
                found.append({"src": channel.src, "dst": channel.dst, "path": list(channel.path), **asdict(info)})
        return found

    def line(self, entry: Entry, program: int) -> dict[str, Any]:
        """One collective."""
        number, _, traffic, called_ns, fields = entry
        state, origin = state_of(fields), traffic.origin
        title, dtype, op = unpack_kind(int(fields[j.J_HEADER + 2]))
        made = {
            "number": number,
            "group": self._identity,
            "sequence": int(fields[j.J_HEADER + 1]),
            "what": title,
            "collective": title if origin is None else origin.collective,
            "root": None if origin is None else origin.root,
            "bytes": int(fields[j.J_HEADER + 3]),
            "dtype": self._dtype_name(dtype),
            "op": op if origin is not None and origin.collective in _REDUCING else None,
            "even": origin is not None and origin.even,
            "method": None if origin is None else origin.method,
            "piece_bytes": None if origin is None else origin.piece_bytes,
            "program": program,
            "state": state,
            "called_ns": called_ns,
            "started_ns": None if state == "queued" else int(fields[j.J_STARTED_NS]),
            "ended_ns": int(fields[j.J_ENDED_NS]) if state == "done" else None,
        }
        rows = traffic.state()
        if state == "running" and rows is not None:
            made["messages_done"] = [int(done) for done in rows[:, j.C_HEAD]]
        return made


def state_of(fields: Any) -> str:
    """``queued``, ``running`` or ``done``: how far a call is, by the integers of its job."""
    if fields[j.J_STATUS] == j.DONE:
        return "done"
    return "queued" if fields[j.J_STATUS] == j.UNUSED or fields[j.J_REMAINING] < 0 else "running"


# -- the process's recorder ---------------------------------------------------------------------------------------

_recorder: FlightRecorder | None = None
_making = threading.Lock()


def recorder(settings: Settings, *, rank: int, world_size: int) -> FlightRecorder | None:
    """The recorder of this process, made at the first call; ``None`` where the user wants none.

    Where ``MYCEL_FLIGHT_DIR`` is set, it is also written down when the process ends, and on SIGUSR2 unless the
    program handles that itself.
    """
    global _recorder
    capacity = settings.flight_records
    if capacity == 0:
        return None
    with _making:
        if _recorder is None or (_recorder.rank, _recorder.world_size) != (rank, world_size):
            is_first = _recorder is None
            _recorder = FlightRecorder(capacity, rank=rank, world_size=world_size)
            if is_first and settings.flight_folder is not None:
                _write_on_request(settings.flight_folder)
        return _recorder


def recorder_of_process() -> FlightRecorder | None:
    """The recorder of this process; ``None`` where no group has been made yet, or the user wants none."""
    return _recorder


def dump_flight_records(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Write down the last collectives of this rank, as ``rank<N>.jsonl`` in a folder.

    Every rank may name the same folder; ``mycel report FOLDER`` then reads them all.

    Args:
        folder: made where it is missing; without one, ``MYCEL_FLIGHT_DIR``, or else a folder of this user's among
            the temporary files.

    Returns:
        The file; ``None`` where no group has been made yet, or the recorder is off.

    Raises:
        OSError: the file cannot be written.

    Examples:
        In a training loop, on every rank::

            if step_s > 60:
                mycel.runtime.dump_flight_records("flight")  # flight/rank0.jsonl on rank 0, and so on
    """
    if _recorder is None:
        return None
    if folder is not None:
        return _recorder.dump(Path(folder), "asked for by the program")
    chosen = read_settings().flight_folder or _own_temporary_folder()
    _check_owner(chosen)
    return _recorder.dump(chosen, "asked for by the program")


def _write_on_request(folder: Path) -> None:
    process = os.getpid()

    def at_exit() -> None:
        if _recorder is not None and os.getpid() == process:  # a forked child has nothing to tell
            _dump_or_warn(_recorder, folder, "the process ended")

    def on_signal(number: int, frame: FrameType | None) -> None:
        if _recorder is not None:
            _dump_or_warn(_recorder, folder, "SIGUSR2")

    atexit.register(at_exit)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, on_signal)


def _dump_or_warn(made: FlightRecorder, folder: Path, why: str) -> None:
    try:
        made.dump(folder, why)
    except OSError as trouble:
        _log.warning("flight records could not be written: %s", trouble)


def _own_temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"mycel-flight-{os.getuid()}"


def _check_owner(folder: Path) -> None:
    """Nobody else may have put the folder, or the one it is in, among the temporary files before us."""
    for place in _existing((folder.parent, folder)):
        if place.is_relative_to(_own_temporary_folder()) and (
            place.is_symlink() or place.stat().st_uid != os.getuid()
        ):
            raise PermissionError(f"{place} belongs to somebody else; set MYCEL_FLIGHT_DIR to another folder")


def _existing(places: Iterable[Path]) -> list[Path]:
    return [place for place in places if place.is_symlink() or place.exists()]


def _clock_name() -> str:
    """The same text wherever two processes read the same CLOCK_MONOTONIC: one boot, one time namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    parts = [boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()]
    if space.is_symlink():
        parts.append(str(space.readlink()))
    return "/".join(parts)
