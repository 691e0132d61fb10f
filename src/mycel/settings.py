"""The only reader of the environment.

Each variable is read when it is asked for, never at import, so that tests and launchers can set them late.

========================  ====================================================================
``MYCEL_TOPOLOGY``        file that describes the fabric (JSON or YAML); none: ranks are assumed
                          to sit behind one switch
``MYCEL_WIRING``          file that says at which address each rank, and each physical path, is
                          reached; ``mycel emulate`` writes it
``MYCEL_ADDRESS``         address at which the other ranks reach this one, where the machine has several
``MYCEL_RANKS``           which ranks of ``MYCEL_TOPOLOGY`` this job's ranks are, in order, as ``0-7,12``, where it
                          has fewer; without, they are found by host name
``MYCEL_CONF_FILE``       file of such variables, a line ``NAME=value`` each, for those that the environment does not
                          set; none: ``.mycel.conf`` in the user's home, if there is one
``MYCEL_DEBUG``           ``info``: say once which fabric and addresses a group has, and which schedule serves which
                          size; ``warning`` is the default
``MYCEL_PLACE``           which rank of ``MYCEL_TOPOLOGY`` this process is, where ``RANK`` does not say so
``MYCEL_INTERFACE``       network interface whose address that is; of several (``eth0,ib0``) the first that has one
``MYCEL_SECRET_FILE``     file with the job's secret, which ranks prove to each other before they talk
``MYCEL_SECRET``          the secret itself, where no file is named
``MYCEL_TIMEOUT``         seconds a collective may take, instead of the process group's time-out
``MYCEL_PIECE_BYTES``     bytes of one pipelined piece, overriding the cost model's choice
``MYCEL_PACE``            part of a path's bandwidth at which a connection sends at most (0.97 where a topology
                          file says the bandwidth, and else no limit); 0: no pacing
``MYCEL_FLIGHT_RECORDER`` collectives that are kept to be written down after a failure (2000); 0: none
``MYCEL_FLIGHT_DIR``      folder for what was kept; where it is set, written there when groups close too
``MYCEL_METRICS``         file for Prometheus, ``{rank}`` in its name, that every rank writes now and then
``MYCEL_METRICS_SECONDS`` how often (15)
``MYCEL_LOCAL``           between ranks of one node: ``memory`` that they share (the default), or sockets, ``unix``
                          or ``tcp``
``MYCEL_RELAYS``          1 (the default): long messages between two ranks go through other ranks, too, where the
                          topology file says that there are cables beside the direct ones; 0: they do not
``MYCEL_VERIFY``          what a group proves before it runs: ``programs`` (the default), once a schedule and for
                          every size; ``sizes``: also those of each size; ``schedules``: no programs
``MYCEL_METHODS``         methods to choose schedules from, separated by commas, where they serve a collective
``MYCEL_SCHEDULES``       folder of schedules that every group of as many ranks registers when it is made
``MYCEL_CACHE``           folder for what this machine was measured to need; none: ``mycel`` in the user's cache
                          folder, ``XDG_CACHE_HOME`` or else ``~/.cache``
``MYCEL_NCCL_BELOW``      bytes (4 MiB): collectives of GPU tensors, the largest of which is smaller, are
                          NCCL's own; 0: all that have schedules run over them
``MYCEL_MESH_RANKS``      ranks of a group (64) up to which each has a control connection to every other one; in
                          larger groups to some, which pass on what it says
``MYCEL_ON_LINK_FAILURE`` ``raise`` (the default), or ``replan``: go on without links that have failed
``TORCHELASTIC_RESTART_COUNT`` how often torchrun has started the job again; its store may be the same each time
``MASTER_ADDR``           where the store is, if the store does not say; the route to it tells a rank its own address
========================  ====================================================================

``read_launched`` reads what torchrun, mpirun, srun and ``mycel emulate`` say about a process's rank.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest

__all__ = [
    "FLIGHT_RECORDS",
    "MESH_RANKS",
    "METRICS_EVERY_S",
    "NCCL_BELOW",
    "VARIABLES",
    "Launched",
    "Settings",
    "as_another_rank",
    "is_launched",
    "misspelled_variables",
    "read_gpu",
    "read_launched",
    "read_settings",
]

#: All of ours.
VARIABLES = (
    "MYCEL_ADDRESS",
    "MYCEL_CACHE",
    "MYCEL_CONF_FILE",
    "MYCEL_DEBUG",
    "MYCEL_FLIGHT_DIR",
    "MYCEL_FLIGHT_RECORDER",
    "MYCEL_INTERFACE",
    "MYCEL_LOCAL",
    "MYCEL_MESH_RANKS",
    "MYCEL_METHODS",
    "MYCEL_METRICS",
    "MYCEL_METRICS_SECONDS",
    "MYCEL_NCCL_BELOW",
    "MYCEL_ON_LINK_FAILURE",
    "MYCEL_PACE",
    "MYCEL_PIECE_BYTES",
    "MYCEL_PLACE",
    "MYCEL_RANKS",
    "MYCEL_RELAYS",
    "MYCEL_SCHEDULES",
    "MYCEL_SECRET",
    "MYCEL_SECRET_FILE",
    "MYCEL_TIMEOUT",
    "MYCEL_TOPOLOGY",
    "MYCEL_VERIFY",
    "MYCEL_WIRING",
)
_PREFIX = "MYCEL_"
#: Where launchers say which rank a process is, and of how many: torchrun, Open MPI, MPICH, Slurm.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
#: Where launchers say which of its machine's ranks a process is.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
#: Where the drivers of GPUs are told which ones a process sees.
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
#: Port that torch takes where nobody sets one.
_MASTER_PORT = 29500
#: Bytes below which collectives of GPU tensors are NCCL's own if nobody says otherwise: a schedule is several groups
#: of operations where NCCL's collective is one kernel, so not for what is soon over. Assumed, not measured.
NCCL_BELOW = 1 << 22
#: Ranks of a group up to which each has a control connection to every other one, if nobody says otherwise: so many
#: descriptors are no burden, and one step to everybody is the simplest that can be.
MESH_RANKS = 64
#: Ranks in a range beyond which it is a slip of the pen.
_MOST_RANKS = 1 << 20
#: Collectives that the flight recorder keeps if nobody says otherwise: about 1.5 MB.
FLIGHT_RECORDS = 2000
#: Seconds between two files of metrics if nobody says otherwise: as often as Prometheus usually looks.
METRICS_EVERY_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for; ``None`` where it says nothing."""

    topology: Path | None = None
    wiring: Path | None = None
    address: str | None = None
    interfaces: tuple[str, ...] | None = None
    secret_file: Path | None = None
    secret: str | None = field(default=None, repr=False)
    timeout_s: float | None = None
    master_address: str | None = None
    piece_bytes: int | None = None
    paced: float | None = None
    nccl_below: int = NCCL_BELOW
    flight_records: int = FLIGHT_RECORDS
    flight_folder: Path | None = None
    local: str | None = None
    relays: bool = True
    methods: tuple[str, ...] | None = None
    schedules: Path | None = None
    mesh_ranks: int = MESH_RANKS
    verify: str = "programs"
    cache: Path | None = None
    on_link_failure: str | None = None
    restarts: int = 0
    place: int | None = None
    ranks: tuple[int, ...] | None = None
    debug: str | None = None
    metrics: str | None = None
    metrics_every_s: float = METRICS_EVERY_S

    __repr__ = brief


def read_settings(environ: dict[str, str] | None = None) -> Settings:
    """Read the ``MYCEL_*`` variables.

    Args:
        environ: mapping to read instead of the process environment.

    Raises:
        UsageError: a variable holds something that is not of its kind.

    Examples:
        >>> read_settings({"MYCEL_TIMEOUT": "30"}).timeout_s
        30.0
    """
    env = _with_file(os.environ if environ is None else environ, at_home=environ is None)
    return Settings(
        topology=Path(env["MYCEL_TOPOLOGY"]) if env.get("MYCEL_TOPOLOGY") else None,
        wiring=Path(env["MYCEL_WIRING"]) if env.get("MYCEL_WIRING") else None,
        address=env.get("MYCEL_ADDRESS") or None,
        interfaces=_names(env.get("MYCEL_INTERFACE"), "MYCEL_INTERFACE"),
        secret_file=Path(env["MYCEL_SECRET_FILE"]) if env.get("MYCEL_SECRET_FILE") else None,
        secret=env.get("MYCEL_SECRET") or None,
        master_address=env.get("MASTER_ADDR") or None,
        timeout_s=_positive(env.get("MYCEL_TIMEOUT"), "MYCEL_TIMEOUT", most=math.inf),
        piece_bytes=_positive_int(env.get("MYCEL_PIECE_BYTES"), "MYCEL_PIECE_BYTES"),
        paced=0.0 if env.get("MYCEL_PACE") == "0" else _positive(env.get("MYCEL_PACE"), "MYCEL_PACE"),
        nccl_below=_count(env.get("MYCEL_NCCL_BELOW"), "MYCEL_NCCL_BELOW", NCCL_BELOW),
        flight_records=_count(env.get("MYCEL_FLIGHT_RECORDER"), "MYCEL_FLIGHT_RECORDER", FLIGHT_RECORDS),
        flight_folder=Path(env["MYCEL_FLIGHT_DIR"]) if env.get("MYCEL_FLIGHT_DIR") else None,
        local=_one_of(("memory", "unix", "tcp"), env.get("MYCEL_LOCAL"), "MYCEL_LOCAL"),
        relays=_one_of(("0", "1"), env.get("MYCEL_RELAYS"), "MYCEL_RELAYS") != "0",
        verify=_one_of(("schedules", "programs", "sizes"), env.get("MYCEL_VERIFY"), "MYCEL_VERIFY") or "programs",
        methods=tuple(part.strip() for part in env["MYCEL_METHODS"].split(",")) if env.get("MYCEL_METHODS") else None,
        schedules=Path(env["MYCEL_SCHEDULES"]) if env.get("MYCEL_SCHEDULES") else None,
        mesh_ranks=_count(env.get("MYCEL_MESH_RANKS"), "MYCEL_MESH_RANKS", MESH_RANKS),
        cache=_cache(env),
        on_link_failure=_one_of(("raise", "replan"), env.get("MYCEL_ON_LINK_FAILURE"), "MYCEL_ON_LINK_FAILURE"),
        restarts=_count(env.get("TORCHELASTIC_RESTART_COUNT"), "TORCHELASTIC_RESTART_COUNT", 0),
        place=_count(env["MYCEL_PLACE"], "MYCEL_PLACE", 0) if env.get("MYCEL_PLACE") else None,
        ranks=_ranges(env.get("MYCEL_RANKS"), "MYCEL_RANKS"),
        debug=_one_of(("info", "warning"), env.get("MYCEL_DEBUG", "").lower(), "MYCEL_DEBUG"),
        metrics=env.get("MYCEL_METRICS") or None,
        metrics_every_s=_positive(env.get("MYCEL_METRICS_SECONDS"), "MYCEL_METRICS_SECONDS") or METRICS_EVERY_S,
    )


def _with_file(env: Mapping[str, str], *, at_home: bool) -> Mapping[str, str]:
    """The environment, and beneath it what the user's file says."""
    named = env.get("MYCEL_CONF_FILE")
    if not named and not at_home:
        return env
    try:
        file = Path(named).expanduser() if named else Path.home() / ".mycel.conf"
        text = file.read_text(encoding="utf-8")
    except RuntimeError:  # a container's user without a home
        return env
    except (OSError, UnicodeDecodeError) as error:
        if not named:
            return env
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"MYCEL_CONF_FILE={named}: cannot be read: {reason}") from None
    return _of_lines(text, file) | dict(env)


def _of_lines(text: str, file: Path) -> dict[str, str]:
    """Variables of a file, a line ``NAME=value`` each; what follows ``#`` is said to people."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        said = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
        if not said:
            continue
        name, equals, value = (part.strip() for part in said.partition("="))
        if not equals:
            raise UsageError(f"{file}:{number}: expected NAME=value, got {said!r}")
        if name not in VARIABLES:
            raise UsageError(f"{file}:{number}: no variable {name!r}{nearest(name, VARIABLES)}")
        if name in found:
            raise UsageError(f"{file}:{number}: {name} is given twice")
        found[name] = value
    return found


def misspelled_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables of the environment that are nearly one of ours, each with the one that may have been meant.

    Others that begin with ``MYCEL_`` are somebody's own.

    Args:
        environ: mapping to read instead of the process environment.

    Examples:
        >>> misspelled_variables(dict(MYCEL_TIMOUT="30", MYCEL_HOME="/opt/mycel"))
        ['MYCEL_TIMOUT (MYCEL_TIMEOUT?)']
    """
    env = os.environ if environ is None else environ
    ours = {name.removeprefix(_PREFIX): name for name in VARIABLES}
    strange = sorted(name for name in env if name.startswith(_PREFIX) and name not in VARIABLES)
    near = {name: get_close_matches(name.removeprefix(_PREFIX), ours, n=1, cutoff=0.75) for name in strange}
    return [f"{name} ({ours[found[0]]}?)" for name, found in near.items() if found]


def _cache(env: Mapping[str, str]) -> Path | None:
    if env.get("MYCEL_CACHE"):
        return Path(env["MYCEL_CACHE"])
    return Path(env["XDG_CACHE_HOME"]) / "mycel" if env.get("XDG_CACHE_HOME") else None


def _names(text: str | None, name: str) -> tuple[str, ...] | None:
    if not text:
        return None
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise UsageError(f"{name}={text!r}: expected names separated by commas")
    return names


def _ranges(text: str | None, name: str) -> tuple[int, ...] | None:
    """Numbers and ranges of them, as ``0-3,8``; each once."""
    if not text:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"{name}={text!r}: expected ranks and ranges of them, as 0-3,8")
        if int(last or first) - int(first) >= _MOST_RANKS:
            raise UsageError(f"{name}={text!r}: {part.strip()} is more than {_MOST_RANKS} ranks")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) < len(found):
        raise UsageError(f"{name}={text!r} names a rank twice")
    return tuple(found)


def _one_of(allowed: tuple[str, ...], text: str | None, name: str) -> str | None:
    if not text:
        return None
    if text not in allowed:
        raise UsageError(f"{name}={text!r} is not one of: {', '.join(allowed)}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What the launcher says about this process.

    Attributes:
        rank: of this process.
        world_size: how many there are.
        master_address: where rank 0 is.
        master_port: a port there that is free for us, or that torchrun's store has.
        agent_store: whether torchrun's agent holds a store at that port.
        restarts: how often torchrun has started the ranks again.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    agent_store: bool = False
    restarts: int = 0

    __repr__ = brief


@contextmanager
def as_another_rank() -> Iterator[None]:
    """A ``with`` block in which the launchers' variables say that this process is another rank.

    Examples:
        >>> with as_another_rank():
        ...     os.environ["RANK"] == os.environ["LOCAL_RANK"]
        True
    """
    names = [*(rank for rank, _ in _RANKS), *_LOCAL_RANKS]
    kept = {name: os.environ.get(name) for name in names}
    here = kept["RANK"] or ""
    other = str(int(here) + 1) if here.isdecimal() else "1"
    os.environ.update(dict.fromkeys(names, other))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_launched(environ: dict[str, str] | None = None) -> bool:
    """Whether a launcher has started this process as one rank of several.

    Args:
        environ: mapping to read instead of the process environment.

    Examples:
        >>> is_launched({}), is_launched({"RANK": "0", "WORLD_SIZE": "2"})
        (False, True)
    """
    env = os.environ if environ is None else environ
    return any(env.get(rank) and env.get(size) for rank, size in _RANKS)


def read_gpu(environ: dict[str, str] | None = None) -> int | None:
    """Index of the GPU that this process uses, as programs choose it: by local rank among those that it sees.

    Args:
        environ: mapping to read instead of the process environment.

    Returns:
        The index, or ``None`` where no launcher says which of its machine's ranks this is.

    Examples:
        >>> read_gpu({"LOCAL_RANK": "1"}), read_gpu({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"}), read_gpu({})
        (1, 5, None)
    """
    env = os.environ if environ is None else environ
    local = next((int(env[name]) for name in _LOCAL_RANKS if env.get(name, "").isdecimal()), None)
    for name in _VISIBLE_GPUS:
        visible = [part.strip() for part in env.get(name, "").split(",")]
        if local is not None and all(part.isdecimal() for part in visible):
            return int(visible[local] if local < len(visible) else visible[0])
    return local


def read_launched(environ: dict[str, str] | None = None) -> Launched:
    """Read which rank this process is from the variables of torchrun, Open MPI, MPICH or Slurm.

    Args:
        environ: mapping to read instead of the process environment.

    Raises:
        UsageError: no launcher has set them, or one holds something that is not of its kind.

    Examples:
        >>> read_launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "node0"}).rank
        1
    """
    env = os.environ if environ is None else environ
    names = next((pair for pair in _RANKS if env.get(pair[0]) and env.get(pair[1])), None)
    if names is None:
        raise UsageError(
            "no rank: RANK and WORLD_SIZE are not set; start with torchrun, mpirun, srun or 'mycel emulate'"
        )
    rank, size = _whole(env, names[0]), _whole(env, names[1])
    if not rank < size:
        raise UsageError(f"{names[0]}={rank} is not below {names[1]}={size}")
    local = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") or env.get("LOCAL_WORLD_SIZE")
    master = env.get("MASTER_ADDR") or ("127.0.0.1" if local == str(size) else None)
    if master is None:
        raise UsageError("MASTER_ADDR is not set: say on which machine rank 0 runs (mpirun: -x MASTER_ADDR=node0)")
    return Launched(
        rank=rank,
        world_size=size,
        master_address=master,
        master_port=_whole(env, "MASTER_PORT") if env.get("MASTER_PORT") else _MASTER_PORT,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_count(env.get("TORCHELASTIC_RESTART_COUNT"), "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} is not a whole number")
    return int(text)


def _positive(text: str | None, name: str, most: float = sys.float_info.max) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None
    if not 0 < value <= most:
        raise UsageError(f"{name}={text!r} must be positive" + ("" if most == math.inf else " and finite"))
    return value


def _count(text: str | None, name: str, default: int) -> int:
    return 0 if text == "0" else _positive_int(text, name) or default


def _positive_int(text: str | None, name: str) -> int | None:
    value = _positive(text, name)
    if value is None:
        return None
    if value != int(value):
        raise UsageError(f"{name}={text!r} must be a whole number")
    return int(value)
