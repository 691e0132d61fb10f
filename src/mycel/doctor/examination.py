"""What is looked at, one function a subject; nothing is changed but for what two ranks compile and keep."""

from __future__ import annotations

import os
import platform
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mycel.brief import brief
from mycel.compiled import code_folder
from mycel.doctor.smoke import run_two_ranks
from mycel.emulate.support import can_make_user_namespace, check_support
from mycel.errors import MycelError
from mycel.extras import EXTRAS
from mycel.settings import Settings, misspelled_variables, read_settings
from mycel.topology.addresses import interface_addresses, is_loopback, own_ip, route_to
from mycel.topology.load import load_topology

__all__ = ["Finding", "State", "examine"]

#: ``ok``: as it should be; ``absent``: something that not everybody needs; ``wrong``: to be mended.
State = Literal["ok", "absent", "wrong"]

#: What the core stands on, in the order in which people ask for it.
_CORE = ("numpy", "scipy", "numba", "llvmlite", "pyyaml", "typer", "rich")
#: What packages of the extras are for. Those of EXTRAS that are not here are said without it.
_USES = {
    "torch": "running: the backend, compression, experts",
    "pyroute2": "emulated clusters: mycel emulate, bench and demo",
    "matplotlib": "pictures: mycel draw and the reports of demo",
    "ortools": "exact searches: synth -k, steps, sketches",
    "transformers": "examples, and Hugging Face models under mycel.moe.apply",
    "accelerate": "examples",
    "torchft": "torchft's Manager over mycel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what, in a word or two.
        state: ``"ok"``, ``"absent"`` (something that not everybody needs) or ``"wrong"``.
        value: what was found.
        remedy: what to do about it; empty where nothing is to be done.
    """

    subject: str
    state: State
    value: str
    remedy: str = ""

    __repr__ = brief


def examine(*, smoke: bool = True, timeout_s: float = 180.0) -> Iterator[Finding]:
    """Look at everything, one finding after the other as they come.

    Args:
        smoke: start two ranks, which takes seconds, the first time on a machine a minute.
        timeout_s: seconds that the two ranks may take.

    Examples:
        >>> [finding.subject for finding in examine(smoke=False)][:2]
        ['mycel', 'python']
    """
    yield from _versions()
    yield from _extras()
    yield _compiled_code()
    settings = yield from _settings()
    yield _namespaces()
    yield from _addresses(settings)
    if smoke:
        yield _smoke(timeout_s)


def _versions() -> Iterator[Finding]:
    yield Finding(subject="mycel", state="ok", value=f"{_version_of('mycel')}, in {Path(__file__).parents[1]}")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding(
        subject="python", state="ok", value=f"{platform.python_version()} on {system}, {_cores()} processors"
    )
    yield Finding(subject="core", state="ok", value=", ".join(f"{name} {_version_of(name)}" for name in _CORE))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of an unknown release"


def _extras() -> Iterator[Finding]:
    for name, extra in EXTRAS.items():
        use = _USES.get(name, f"the extra [{extra}]")
        with suppress(ModuleNotFoundError, ValueError):
            if find_spec(name) is not None:
                yield Finding(subject=name, state="ok", value=f"{_version_of(name)} ({use})")
                continue
        remedy = f"pip install 'mycel[{extra}]'"
        yield Finding(subject=name, state="absent", value=f"not installed; for {use}", remedy=remedy)


def _compiled_code() -> Finding:
    folder = code_folder(str(Path(__file__).parents[1] / "runtime" / "engine.py"), "mycel-doctor")
    if folder is None:
        return Finding(
            subject="compiled code",
            state="wrong",
            value="no folder can be written: every process compiles anew, for some seconds",
            remedy="set NUMBA_CACHE_DIR to a folder that can be written",
        )
    return Finding(subject="compiled code", state="ok", value=f"kept in {folder}")


def _settings() -> Generator[Finding, None, Settings]:
    """What ``MYCEL_*`` variables and the topology that they name say; the settings are returned."""
    named = sorted(name for name in os.environ if name.startswith("MYCEL_"))
    shown = ", ".join(name if "SECRET" in name else f"{name}={os.environ[name]}" for name in named)
    try:
        settings = read_settings()
    except MycelError as error:
        yield Finding(subject="settings", state="wrong", value=shown, remedy=str(error))
        return Settings()
    if slips := misspelled_variables():
        yield Finding(subject="settings", state="wrong", value=shown, remedy=f"nobody reads {', '.join(slips)}")
    else:
        yield Finding(subject="settings", state="ok", value=shown or "no MYCEL_ variable is set")
    if settings.topology is not None:
        try:
            topology = load_topology(settings.topology)
            value = f"{topology.name}: {topology.num_ranks} ranks, {len(topology.links)} links"
            yield Finding(subject="topology", state="ok", value=value)
        except MycelError as error:
            yield Finding(subject="topology", state="wrong", value=str(settings.topology), remedy=str(error))
    return settings


def _namespaces() -> Finding:
    try:
        check_support()
    except MycelError as error:
        if can_make_user_namespace():
            value = "emulated clusters run, in a user namespace that the commands make"
            return Finding(subject="emulation", state="ok", value=value)
        return Finding(subject="emulation", state="absent", value="no emulated clusters here", remedy=str(error))
    return Finding(subject="emulation", state="ok", value="network namespaces, veth pairs and htb work")


def _addresses(settings: Settings) -> Iterator[Finding]:
    """Interfaces, and which address ranks of other machines would be given."""
    try:
        interfaces = ", ".join(f"{each.name} {each.text}" for each in interface_addresses(loopback=True))
        yield Finding(subject="interfaces", state="ok", value=interfaces or "none with an address")
        own = own_ip(settings, int(os.environ.get("RANK", "0")))
        source = "as the environment says"
        if own is None:
            host = settings.master_address
            own = route_to(host) if host else next((e.ip for e in interface_addresses()), "127.0.0.1")
            source = f"the route to MASTER_ADDR={host}" if host else "MASTER_ADDR is not set; the first interface's"
    except (MycelError, OSError, ValueError) as error:
        remedy = f"{error}; set MYCEL_INTERFACE or MYCEL_ADDRESS"
        yield Finding(subject="own address", state="wrong", value="none is found", remedy=remedy)
        return
    alone = is_loopback(own)
    yield Finding(
        subject="own address",
        state="ok",
        value=f"{own} ({source}); the Gloo inside, for what has no schedule, listens there too",
        remedy="other machines do not reach it: set MYCEL_INTERFACE or MYCEL_ADDRESS there" if alone else "",
    )


def _smoke(timeout_s: float) -> Finding:
    if find_spec("torch") is None:
        return Finding(
            subject="two ranks",
            state="absent",
            value="not tried: torch is missing",
            remedy="pip install 'mycel[run]'",
        )
    result = run_two_ranks(timeout_s)
    if result.error:
        return Finding(subject="two ranks", state="wrong", value="did not come together", remedy=result.error)
    value = f"summed an array over {result.way}, {result.started_s:.1f} s from their start to their end"
    return Finding(subject="two ranks", state="ok", value=value)
