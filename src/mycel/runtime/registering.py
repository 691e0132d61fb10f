"""Registering schedules with a group: each rank looks at its own, and all agree that it is the same.

A schedule is verified by every rank, made to run over the group's fabric, and its programs are proved for every size
before anybody hears of it. Then the ranks tell each other what theirs holds, by its hash: one that has another file,
or one that it refuses, is named on all of them, and nobody registers anything. The group stays usable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mycel.collectives.imports import mscclpp, read_content
from mycel.collectives.imports.mycel_schedule import parse
from mycel.collectives.language import Written
from mycel.collectives.plan_programs import PlanTemplate, load_plan
from mycel.collectives.proof import prove_lowering
from mycel.collectives.routes import way_through
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, CollectiveName
from mycel.collectives.verify import program_sums_agree, sums_agree, verify_schedule
from mycel.errors import MismatchError, MycelError, UsageError
from mycel.names import spelled
from mycel.runtime.calls import Call
from mycel.runtime.communicator import Communicator
from mycel.runtime.headers import REGISTRATION
from mycel.runtime.reduce_kernels import DType
from mycel.runtime.registered import Registered
from mycel.topology.model import Topology
from mycel.units import parse_size

__all__ = ["Size", "read_folder", "register_folder", "register_with", "unregister_with"]

_log = logging.getLogger(__name__)

#: Bytes, as a number or as ``"64KB"``; ``None``: no end.
Size = int | str | None
#: What a rank says of what it registers: hash, its name, and what is wrong with it.
_SAID = struct.Struct("=32s96s640s")
#: Hexadecimal digits of the hash in a name.
_DIGITS = 8


def register_with(
    communicator: Communicator,
    schedule: Schedule | Written | Mapping[str, Any] | str | Path,
    *,
    for_: CollectiveName | None = None,
    sizes: tuple[Size, Size] = (0, None),
    always: bool = True,
) -> Registered:
    """Have a schedule serve the calls of a communicator; arguments and errors as for ``mycel.runtime.register``."""
    problem: MycelError | None = None
    made: list[tuple[Registered, Schedule | PlanTemplate]] = []
    try:
        made.append(_made(schedule, communicator.topology, for_, sizes, always=always))
    except MycelError as error:
        problem = error
    _agree(communicator, [registered for registered, _ in made], problem)
    _take(communicator, made)
    return made[0][0]


def unregister_with(communicator: Communicator, registered: Registered | str) -> None:
    """Have it serve no more calls of a communicator; arguments and errors as for ``mycel.runtime.unregister``."""
    method = registered.method if isinstance(registered, Registered) else str(registered)
    registry = communicator.planner.registered
    known = next((one for one in registry if one.method == method), None)
    problem = None
    if known is None:
        names = ", ".join(one.method for one in registry) or "none"
        problem = UsageError(f"no schedule {method!r} is registered with this group; registered: {names}")
    _agree(communicator, [] if known is None else [known], problem)
    registry.remove(method)


def register_folder(communicator: Communicator, folder: Path) -> list[Registered]:
    """Register all schedules of a folder that are for as many ranks as a new group has; every rank does so.

    Args:
        communicator: the group's.
        folder: see ``read_folder``.

    Raises:
        UsageError, ScheduleError: a file cannot be read, or is wrong.
        MismatchError: ranks have found different ones.
    """
    problem: MycelError | None = None
    made: list[tuple[Registered, Schedule | PlanTemplate]] = []
    try:
        for file, schedule, sizes in read_folder(folder):
            if _num_ranks(schedule) != communicator.size:
                continue
            try:
                made.append(_made(schedule, communicator.topology, None, sizes, always=True))
            except MycelError as error:
                raise type(error)(f"MYCEL_SCHEDULES: {file}: {error}") from None
    except MycelError as error:
        problem = error
    _agree(communicator, [registered for registered, _ in made], problem)
    _take(communicator, made)
    return [registered for registered, _ in made]


def _num_ranks(given: Schedule | Mapping[str, Any]) -> int:
    return given.collective.num_ranks if isinstance(given, Schedule) else len(given["gpus"])


def read_folder(folder: Path) -> list[tuple[Path, Schedule | Mapping[str, Any], tuple[Size, Size]]]:
    """The schedules in a folder, in the order of their files' names, and for which sizes each is.

    Args:
        folder: its files ``NAME.json`` and ``NAME.txt`` are schedules or MSCCL++ plans; ``NAME@64KB-16MB.json`` says
            for which sizes, and ``NAME@64KB-.json`` that there is no largest.

    Raises:
        UsageError: there is no such folder, or a file cannot be read.
        ScheduleError: a file holds no schedule.
    """
    if not folder.is_dir():
        raise UsageError(f"MYCEL_SCHEDULES={folder}: no such folder")
    found = []
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".json", ".txt") or file.name.startswith("."):
            continue
        sized = re.fullmatch(r".*@([^@-]*)-([^@-]*)", file.stem)
        sizes: tuple[Size, Size] = (0, None) if sized is None else (sized[1] or 0, sized[2] or None)
        found.append((file, _read(file), sizes))
    return found


def _read(file: Path) -> Schedule | Mapping[str, Any]:
    """A schedule, or a plan as it stands there."""
    content = read_content(file)
    if not mscclpp.is_mine(content):
        return parse(content)
    data: Mapping[str, Any] = content.data
    return data


def _made(
    given: Schedule | Written | Mapping[str, Any] | str | Path,
    topology: Topology,
    for_: CollectiveName | None,
    sizes: tuple[Size, Size],
    *,
    always: bool,
) -> tuple[Registered, Schedule | PlanTemplate]:
    """A schedule that is right, as this group runs it, and what is said of it."""
    wanted: CollectiveName | None = None
    if for_ is not None:
        wanted = spelled(for_, COLLECTIVES, "collective")  # type: ignore[assignment]
    least, most = _sizes(sizes)
    if isinstance(given, (str, Path)):
        given = _read(Path(given))
    if isinstance(given, Mapping):
        return _made_of_plan(given, topology, wanted, (least, most), always=always)
    if isinstance(given, Written):
        schedule = given.on(topology, wanted)
    elif isinstance(given, Schedule):
        schedule = _on(given, topology, wanted)
        verify_schedule(schedule)
    else:
        raise UsageError(
            f"{type(given).__name__} cannot be registered: give a Schedule, a written one, a plan, or its file"
        )
    if not sums_agree(schedule):
        raise UsageError(
            f"{schedule.method}: ranks would form their sums in different orders, and the bits of floating-point "
            "results would differ from rank to rank; let one rank form each sum and send it to the others"
        )
    prove_lowering(schedule)
    collective = schedule.collective
    held = json.dumps(
        [schedule.to_json()["transfers"], schedule.num_units, collective.to_text(), least, most, always]
    )
    digest = hashlib.sha256(held.encode()).hexdigest()
    registered = Registered(
        method=f"{schedule.method}@{digest[:_DIGITS]}",
        name=collective.name,
        digest=digest,
        root=collective.root,
        least_bytes=least,
        most_bytes=most,
        always=always,
    )
    return registered, schedule


def _made_of_plan(
    data: Mapping[str, Any],
    topology: Topology,
    wanted: CollectiveName | None,
    sizes: tuple[int, int | None],
    *,
    always: bool,
) -> tuple[Registered, PlanTemplate]:
    """A plan that is right, over this group's fabric, and what is said of it."""
    template = load_plan(data, topology)
    collective, name = template.collective, template.method
    if wanted is not None and collective.name != wanted:
        raise UsageError(f"{name} carries out {collective.name}, and is to be registered for {wanted}")
    if collective.weights is not None:
        raise UsageError(f"{name} is a sendrecv, which no collective of torch's is; programs_of gives its programs")
    if not always:
        raise UsageError(f"{name} is a plan, of whose time here there is no model; register it with always=True")
    few = template.verified(template.least_elements)
    if not program_sums_agree(few):
        raise UsageError(
            f"{name}: ranks would form their sums in different orders, and the bits of floating-point results would "
            "differ from rank to rank; let one rank form each sum and send it to the others"
        )
    digest = hashlib.sha256(json.dumps([template.digest, *sizes]).encode()).hexdigest()
    registered = Registered(
        method=f"{name}@{digest[:_DIGITS]}",
        name=collective.name,
        digest=digest,
        least_bytes=sizes[0],
        most_bytes=sizes[1],
    )
    return registered, template


def _sizes(sizes: tuple[Size, Size]) -> tuple[int, int | None]:
    """Bytes from and to."""
    if not isinstance(sizes, tuple) or len(sizes) != 2:
        raise UsageError(f"sizes={sizes!r}: two sizes are needed, from and to, as ('64KB', None)")
    least, most = (parse_size(size) if isinstance(size, str) else size for size in sizes)
    least = 0 if least is None else least
    if least < 0 or (most is not None and most < least):
        raise UsageError(f"sizes={sizes!r}: no array is from {least} to {most} bytes long")
    return least, most


def _on(schedule: Schedule, topology: Topology, wanted: CollectiveName | None) -> Schedule:
    """A schedule as it runs over a group's fabric."""
    collective = schedule.collective
    if wanted is not None and collective.name != wanted:
        raise UsageError(f"{schedule.method} carries out {collective.name}, and is to be registered for {wanted}")
    if collective.weights is not None:
        raise UsageError(f"{schedule.method} is for blocks of different sizes; register one for equal blocks")
    if collective.num_ranks != topology.num_ranks:
        raise UsageError(
            f"{schedule.method} is for {collective.num_ranks} ranks, and this group has {topology.num_ranks}"
        )
    if schedule.num_compute_vertices > collective.num_ranks:
        raise UsageError(f"{schedule.method} adds in switches, and here ranks exchange messages over sockets")
    if topology.fingerprint == schedule.topology.fingerprint:
        return schedule
    transfers, moved = [], 0
    for t in schedule.transfers:
        ends = topology.ranks[t.src], topology.ranks[t.dst]
        is_there = all(hop in topology.capacity for hop in zip(t.path, t.path[1:], strict=False))
        way = t.path if is_there and (t.path[0], t.path[-1]) == ends else way_through(topology, ends)
        if way is None:
            raise UsageError(
                f"{schedule.method} was made for {schedule.topology.name}: it sends from rank {t.src} to {t.dst}, "
                f"between which {topology.name} has no way that passes no other rank; build it for {topology.name}"
            )
        moved += way != t.path
        transfers.append(replace(t, path=way))
    if moved:
        _log.warning(
            "%s was made for %s; %d of its %d messages go other ways on %s",
            *(schedule.method, schedule.topology.name, moved, len(transfers), topology.name),
        )
    return replace(schedule, topology=topology, transfers=tuple(transfers))


def _agree(communicator: Communicator, mine: Sequence[Registered], problem: MycelError | None) -> None:
    """Return if all ranks have come with the same; raise on all of them otherwise."""
    digest = hashlib.sha256("".join(one.digest for one in mine).encode()).digest()
    name = ", ".join(one.method for one in mine) or "nothing"
    own = _SAID.pack(digest, name.encode()[:96], b"" if problem is None else str(problem).encode()[:640])
    given = np.frombuffer(own, dtype=np.uint8).copy()
    taken = np.zeros(communicator.size * _SAID.size, dtype=np.uint8)
    communicator.run(
        Call(
            name="all_gather",
            title=REGISTRATION,
            num_elements=len(taken),
            item_bytes=1,
            input_address=given.ctypes.data,
            output_address=taken.ctypes.data,
            dtype=DType.UINT8,
            keep=(given, taken),
        )
    )
    if problem is not None:
        raise problem
    said = [_SAID.unpack_from(taken.tobytes(), rank * _SAID.size) for rank in range(communicator.size)]
    texts = [[part.rstrip(b"\0").decode(errors="replace") for part in one[1:]] for one in said]
    refused = [f"rank {rank}: {text[1]}" for rank, text in enumerate(texts) if text[1]]
    if refused:
        raise MismatchError(f"no schedule is registered, for not all ranks can: {'; '.join(refused)}")
    if len({one[0] for one in said}) > 1:
        which: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            which.setdefault(text[0], []).append(rank)
        parts = [f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {name}" for name, r in which.items()]
        raise MismatchError(
            f"no schedule is registered, for ranks have come with different ones: {'; '.join(parts)}; give the same "
            "file to all"
        )


def _take(communicator: Communicator, made: Sequence[tuple[Registered, Schedule | PlanTemplate]]) -> None:
    for registered, schedule in made:
        communicator.planner.registered.add(registered, schedule)
        if communicator.rank == 0:
            _log.info("registered: %s", registered)
