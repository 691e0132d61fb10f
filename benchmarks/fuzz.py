"""Files with mistakes in them, for every reader: an error of one line or a result, never a traceback, never a hang.

Every file of the kinds that mycel reads (fabrics in all formats, schedules of ours and of others, sketches) is
broken in many ways: bytes changed, cut, doubled; lines lost, moved; numbers made huge, negative or no numbers;
values of JSON replaced by values of another kind. Prints a line a reader and each failure with what reproduces it;
exit 1 if there was one.

    python benchmarks/fuzz.py                        # 6,000 inputs
    python benchmarks/fuzz.py --count 500 --seed 7
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mycel.collectives.export import FORMATS, export
from mycel.collectives.imports import check_file
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.sketch.reader import read_sketch
from mycel.errors import MycelError
from mycel.topology import load_topology
from mycel.topology.builders import full_mesh, two_boxes
from mycel.topology.load import FORMATS as TOPOLOGIES
from mycel.topology.load import FileFormat

ROOT = Path(__file__).resolve().parents[1]
#: CPU seconds that reading one small file may take.
SLOW_S = 1.0
#: After so many seconds it is stopped.
_STOP_S = 20

Outcome = str


@dataclass(frozen=True, slots=True)
class Seed:
    """A right file: the reader it is for, its name and its bytes."""

    reader: str
    name: str
    data: bytes


READERS: dict[str, Callable[[Path], object]] = {
    "topology": load_topology,
    "schedule": check_file,
    "sketch": read_sketch,
}


def seeds() -> list[Seed]:
    """Right files of every format."""
    found = []
    for pattern in ("tests/data/formats/*", "tests/data/topologies/*.json", "examples/clusters/*.yaml"):
        files = sorted(ROOT.glob(pattern))
        found += [Seed("topology", f.name, f.read_bytes()) for f in files if f.stat().st_size < 40_000]
    found = [seed for seed in found if seed.name not in ("golden.json", "expected.json")]
    examples = [known for known in TOPOLOGIES if known.example]
    found += [Seed("topology", _file_name(known), known.example.encode()) for known in examples]
    found += [Seed("sketch", f.name, f.read_bytes()) for f in sorted(ROOT.glob("examples/sketches/*_x*.json"))]
    found += [Seed("schedule", f.name, f.read_bytes()) for f in sorted(ROOT.glob("tests/data/msccl/*.xml"))]
    for topology, name in ((full_mesh(num_ranks=3), "all_reduce"), (two_boxes(num_ranks=4), "all_gather")):
        schedule = synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks), "forest")  # type: ignore[arg-type]
        forms = {"s.json": json.dumps(schedule.to_json()), "s.txt": schedule.to_text()}
        for form, suffix in (("msccl_xml", "s.xml"), ("mscclpp_json", "s.plan.json")):
            if form in FORMATS:
                forms[suffix] = str(export(schedule, form))
        found += [Seed("schedule", f"{name}_{file}", text.encode()) for file, text in forms.items()]
    return found


def _file_name(known: FileFormat) -> str:
    return re.sub(r"\W+", "_", known.name) + known.suffixes[0]


# -- mistakes -------------------------------------------------------------------------------------------------

_WORDS = (
    b"-1", b"0", b"1e999", b"99999999999999999999", b"1" * 400, b"nan", b"null", b"true", b"[]", b"{}", b'""',
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"<", b">", b"&", b"&#0;", b'"', b"'", b":", b"- ", b"\n", b"\t", b"{",
    b"}", b"[", b"]", b"*", b"&a", b"<<: *a", b"!!python/object:os.system", b"%", b"#", b"\xe2\x80\xa8",
    b"\xd9\xa3", b"1_000", b"0x10",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 1.5, float("inf"), 10**9, 10**30, "", "x", "1", [], {}, [[]], [1, 2, 3], {"a": 1}
)  # fmt: skip


def break_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four mistakes in the text."""
    out = data
    for _ in range(chance.choice((1, 1, 2, 4))):
        kind = chance.randrange(8)
        at = chance.randrange(len(out) + 1) if out else 0
        until = min(len(out), at + chance.choice((1, 2, 8, 40, 300)))
        numbers = list(re.finditer(rb"\d+(\.\d+)?", out))
        lines = out.split(b"\n")
        if kind == 0:
            out = out[:at] + chance.choice(_WORDS) + out[at:]
        elif kind == 1:
            out = out[:at] + out[until:]
        elif kind == 2:
            out = out[:at] + out[at:until] + out[at:]
        elif kind == 3 and numbers:
            m = chance.choice(numbers)
            out = out[: m.start()] + chance.choice(_WORDS[:10]) + out[m.end() :]
        elif kind == 4 and numbers:
            m = chance.choice(numbers)
            new = chance.choice((b"1", b"2", b"7", b"33", b"64", b"1000", b"70000", b"1000000000"))
            out = out[: m.start()] + new + out[m.end() :]
        elif kind == 5:
            del lines[chance.randrange(len(lines))]
            out = b"\n".join(lines)
        elif kind == 6:
            a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
            lines[a], lines[b] = lines[b], lines[a]
            out = b"\n".join(lines)
        elif out:
            out = out[: at - 1] + bytes([chance.randrange(256)]) + out[at:]
    return out[: chance.randrange(len(out))] if out and chance.random() < 0.05 else out


def break_json(data: bytes, chance: random.Random) -> bytes:
    """One or two values of the JSON replaced, lost or doubled."""
    value = json.loads(data)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(value))
        if not places:
            break
        holder, key = chance.choice(places)
        kind = chance.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif kind == 2:
            other, where = chance.choice(places)
            if other is not holder and isinstance(other[where], int | str | float):
                holder[key] = other[where]
        else:
            holder[key] = chance.choice(_VALUES)
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


# -- running --------------------------------------------------------------------------------------------------


def try_file(reader: str, file: Path) -> Outcome:
    """``result``, ``error``, or what went wrong."""
    started = time.process_time()
    try:
        READERS[reader](file)
        outcome = "result"
    except MycelError as error:
        text = str(error)
        one_line = text and "\n" not in text and len(text) < 2_000
        outcome = "error" if one_line else f"not one line: {text[:200]!r}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]}"
    except _StoppedError:
        outcome = f"hangs: stopped after {_STOP_S} s"
    finally:
        signal.alarm(0)
    seconds = time.process_time() - started
    return outcome if seconds <= SLOW_S or outcome.startswith("hangs") else f"slow: {seconds:.1f} s"


class _StoppedError(BaseException):
    """Raised by the alarm; no reader catches it."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _StoppedError


def run(count: int, seed: int, *, keep: Path | None = None) -> dict[tuple[str, str], dict[str, int]]:
    """Outcomes by reader and file, of ``count`` inputs; failures are printed, and kept as files if asked for."""
    chance = random.Random(seed)
    known = seeds()
    outcomes: dict[tuple[str, str], dict[str, int]] = {}
    before = signal.signal(signal.SIGALRM, _stop)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(count):
                right = known[number % len(known)]
                is_json = right.data.lstrip()[:1] == b"{"
                structured = is_json and chance.random() < 0.6
                data = (break_json if structured else break_bytes)(right.data, chance)
                file = Path(folder) / right.name
                file.write_bytes(data)
                signal.alarm(_STOP_S)
                outcome = try_file(right.reader, file)
                counts = outcomes.setdefault((right.reader, right.name), {})
                kind = outcome if outcome in ("result", "error") else "failed"
                counts[kind] = counts.get(kind, 0) + 1
                if kind == "failed":
                    print(f"FAILED: {right.reader} {right.name}, input {number} of seed {seed}: {outcome}")
                    if keep is not None:
                        (keep / f"{number}_{right.name}").write_bytes(data)
    finally:
        signal.signal(signal.SIGALRM, before)
    return outcomes


def main() -> int:
    """Runs and prints; 1 if a reader failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for inputs that make a reader fail")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    started = time.perf_counter()
    outcomes = run(options.count, options.seed, keep=options.keep)
    seconds = time.perf_counter() - started
    print("| reader | file | results | errors | failed |\n|---|---|---:|---:|---:|")
    for (reader, name), counts in sorted(outcomes.items()):
        print(
            f"| {reader} | {name} | "
            + " | ".join(str(counts.get(k, 0)) for k in ("result", "error", "failed"))
            + " |"
        )
    failed = sum(counts.get("failed", 0) for counts in outcomes.values())
    print(f"\n{options.count:,} inputs in {seconds:.0f} s: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
