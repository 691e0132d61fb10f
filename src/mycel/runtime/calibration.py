"""Calibration: what this machine's processors need for messages, copies and sums, measured once and remembered.

The constants of the cost model were fitted to whole collectives on one machine. Here four small loops are timed, and
the constants are scaled by how much slower or faster they run than they did there: a loop alone, in a warm cache and
with nobody else on the processor, says how machines compare, but not what a message costs in the midst of it all.

Rank 0 measures (some hundredths of a second) or reads what it measured before, and tells the others through the
group's store: all ranks must choose the same schedule, so all choose by the same numbers. They are kept in a file
named by host, processor and versions, in the folder ``MYCEL_CACHE`` or the user's cache folder.

Every figure is the least of several runs, since other programs can only make one slower, and ratios are rounded to
powers of the square root of two: measured again, a machine is the same machine, and sums are added in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from mycel.cost.processors import ADD_S_PER_GB, COPY_S_PER_GB, MESSAGE_S, WAKE_S, Costs
from mycel.errors import UsageError
from mycel.runtime.libc import MSG_NOSIGNAL, recv, send
from mycel.runtime.reduce_kernels import DType, ReduceOp, combine
from mycel.standalone import standalone

__all__ = ["calibration_file", "costs_from_text", "costs_to_text", "kept_costs", "known_costs", "measure_costs"]

_log = logging.getLogger(__name__)

_RUNS = 7
_MESSAGES = 200
_SHORT, _LONG = 64, 1 << 15
#: A file of costs is some 120 bytes long. No machine has more cores, or takes more seconds for a message or a GB.
_LONGEST_TEXT = 1 << 16
_MOST_CORES = 1 << 16
_MOST_S = 1e3
#: What the loops gave on the machine that the constants belong to (Intel Xeon with 2 cores, Linux 6.18): seconds for
#: a message, for waking a thread, and for copying and adding 10^9 bytes.
_THERE = (2.9e-7, 1.1e-6, 0.024, 0.02)


@standalone
def _to_and_fro(first: int, second: int, address: int, length: int, count: int) -> int:
    """Send ``count`` messages into one socket and take each out of the other; bytes moved, or -1."""
    moved = 0
    for _ in range(count):
        if send(first, address, length, MSG_NOSIGNAL) != length:
            return -1
        left = length
        while left > 0:
            n = recv(second, address, left, 0)
            if n <= 0:
                return -1
            left -= n
        moved += length
    return moved


@standalone
def _answer(fd: int, address: int, count: int) -> int:
    """Give back ``count`` messages of ``_SHORT`` bytes; how many came."""
    for number in range(count):
        if recv(fd, address, _SHORT, 0) != _SHORT or send(fd, address, _SHORT, MSG_NOSIGNAL) != _SHORT:
            return number
    return count


@standalone
def _ask(fd: int, address: int, count: int) -> int:
    """Send ``count`` messages of ``_SHORT`` bytes, each after the last one's answer; how many were answered."""
    for number in range(count):
        if send(fd, address, _SHORT, MSG_NOSIGNAL) != _SHORT or recv(fd, address, _SHORT, 0) != _SHORT:
            return number
    return count


@standalone
def _add(dtype: int, op: int, destination: int, operand: int, length: int, count: int) -> int:
    for _ in range(count):
        combine(dtype, op, destination, destination, operand, length // 4)
    return count


def measure_costs() -> Costs:
    """Measure, in a tenth of a second at most on an idle machine."""
    ours, theirs = socket.socketpair()
    mine, other = (np.zeros(_LONG, dtype=np.uint8) for _ in range(2))
    here, there = mine.ctypes.data, other.ctypes.data
    with ours, theirs:
        # The first call loads or compiles.
        _to_and_fro(ours.fileno(), theirs.fileno(), here, _SHORT, 1)
        add = partial(_add, int(DType.FLOAT32), int(ReduceOp.SUM), here, there)
        add(_SHORT, 1)
        short = _least(lambda: _to_and_fro(ours.fileno(), theirs.fileno(), here, _SHORT, _MESSAGES))
        long = _least(lambda: _to_and_fro(ours.fileno(), theirs.fileno(), here, _LONG, _MESSAGES))
        added = _least(lambda: add(_LONG, _MESSAGES))
        answering = threading.Thread(
            target=_answer, args=(theirs.fileno(), there, (_RUNS + 1) * _MESSAGES), daemon=True
        )
        answering.start()
        _ask(ours.fileno(), here, _MESSAGES)
        trip = _least(lambda: _ask(ours.fileno(), here, _MESSAGES))
        answering.join()
    message_s = short / _MESSAGES / 2
    wake_s = max(0.0, trip / _MESSAGES / 2 - 2 * message_s)
    copy_s_per_gb = max(0.0, (long - short) / _MESSAGES / 2 / (_LONG - _SHORT) * 1e9)
    here_s = (message_s, wake_s, copy_s_per_gb, added / _MESSAGES / _LONG * 1e9)
    message, wake, copy, adding = (_ratio(now / then) for now, then in zip(here_s, _THERE, strict=True))
    return Costs(
        message_s=MESSAGE_S * message,
        wake_s=WAKE_S * wake,
        copy_s_per_gb=COPY_S_PER_GB * copy,
        add_s_per_gb=ADD_S_PER_GB * adding,
        cores=len(os.sched_getaffinity(0)),
    )


def _ratio(value: float) -> float:
    """Rounded to a power of the square root of two, from 1/4 to 4.

    Examples:
        >>> [round(_ratio(value), 3) for value in (0.0, 0.9, 1.1, 1.3, 2.1, 100.0)]
        [0.25, 1.0, 1.0, 1.414, 2.0, 4.0]
    """
    power = round(2 * math.log2(max(value, 1e-9)))
    return float(2.0 ** (max(-4, min(4, power)) / 2))


def _least(run: Callable[[], int]) -> float:
    """Seconds of the fastest of some runs."""
    best = float("inf")
    for _ in range(_RUNS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def calibration_file(cache: Path | None) -> Path:
    """Where this machine's costs are kept.

    Args:
        cache: folder to use instead of the one in the user's home, ``Settings.cache``.

    Raises:
        OSError: the user has no home folder.
    """
    if cache is not None:
        folder = cache
    else:
        try:
            folder = Path.home() / ".cache" / "mycel"
        except RuntimeError as error:  # a container's user without a name
            raise OSError(str(error)) from None
    cores = len(os.sched_getaffinity(0))
    versions = (_version("mycel"), _version("torch"))
    marks = (socket.gethostname(), platform.machine(), platform.release(), cores, *versions, *_THERE)
    digest = hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:16]
    return folder / f"costs-{digest}.json"


@functools.cache  # it reads files
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def known_costs(cache: Path | None = None) -> Costs:
    """This machine's costs, from the file or measured now and kept there.

    A file that holds anything else, or is no file, and a folder that refuses are no errors.
    """
    kept = kept_costs(cache)
    if kept is not None:
        return kept
    costs = measure_costs()
    _log.info("calibrated: %s", costs)
    try:
        file = calibration_file(cache)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(costs_to_text(costs), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        _log.debug("costs are not kept: %s", error)
    return costs


def kept_costs(cache: Path | None = None) -> Costs | None:
    """This machine's costs as they were measured before; ``None`` where they were not, or cannot be read."""
    try:
        return costs_from_text(_read(calibration_file(cache)))
    except (OSError, UsageError):
        return None


def _read(file: Path) -> str:
    """What a file holds, as far as costs can reach; ``OSError`` where it is none, as a pipe is, which would wait."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file} is not a file")
        return os.read(descriptor, _LONGEST_TEXT).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def costs_to_text(costs: Costs) -> str:
    """One line of JSON.

    Examples:
        >>> costs_from_text(costs_to_text(Costs(cores=3))).cores
        3
    """
    return json.dumps(asdict(costs))


def costs_from_text(text: str) -> Costs:
    """What ``costs_to_text`` wrote.

    Raises:
        UsageError: it did not.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    names = {field.name for field in fields(Costs)}
    if not isinstance(data, dict) or set(data) != names or not all(_is_sane(*item) for item in data.items()):
        raise UsageError(f"not costs of a machine: {text[:80]!r}")
    return Costs(**data)


def _is_sane(name: str, value: object) -> bool:
    """Whether a number can be one of a machine: a whole one of cores, or seconds; neither endless nor absurd."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "cores":
        return isinstance(value, int) and 1 <= value <= _MOST_CORES
    return 0 <= value <= _MOST_S
