"""Writes the measured table of README.md from recorded JSON lines, so that no figure there is typed by hand.

    python benchmarks/readme_table.py [FILE.jsonl ...]

Without files, everything in ``benchmarks/recorded/`` is read: what is committed there is what README shows, and a
test compares the two. A line is a ``Measurement`` with any further keys; of several of one case the last counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from mycel.bench.measurement import Measurement
from mycel.errors import UsageError
from mycel.units import format_seconds, format_size

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "recorded"
BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->"
NOTHING = "No figures have been recorded here yet.\n"
BASELINE = "gloo"


def read_lines(files: Iterable[Path]) -> list[Measurement]:
    """Measurements in the files, in order.

    Raises:
        UsageError: a line is no measurement, or is one of a wrong result; the message names file and line.
    """
    known = {field.name for field in fields(Measurement)}
    found = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                data = json.loads(line)
                measured = Measurement.from_json({key: value for key, value in data.items() if key in known})
            except (json.JSONDecodeError, AttributeError, UsageError) as error:
                raise UsageError(f"{file}:{number}: {error}") from None
            if not measured.correct:
                raise UsageError(f"{file}:{number}: {measured.collective} over {measured.backend} gave wrong results")
            found.append(measured)
    return found


def table(measurements: Iterable[Measurement]) -> str:
    """Markdown: a row a case that was measured over both backends, and what it was measured on."""
    last = {(m.topology, m.world_size, m.mode, m.collective, m.bytes, m.backend): m for m in measurements}
    cases = list(dict.fromkeys(key[:-1] for key in last))
    rows = []
    sources = {}
    for case in cases:
        base, ours = last.get((*case, BASELINE)), last.get((*case, "mycel"))
        if base is None or ours is None:
            continue
        bound = "" if ours.fraction_of_bound is None else f"{ours.fraction_of_bound:.2f}"
        where = ours.topology if ours.emulated else f"{ours.topology} (not emulated)"
        mode = "" if ours.mode == "blocking" else f", {ours.mode}"
        rows.append(
            f"| {where}, {ours.world_size} ranks | {ours.collective}{mode} | {format_size(ours.bytes)} "
            f"| {format_seconds(base.median_s)} | {format_seconds(ours.median_s)} "
            f"| {base.median_s / ours.median_s:.2f}x | {bound} |"
        )
        software = ", ".join(f"{name} {version}" for name, version in ours.versions.items())
        sources[f"{ours.hardware}; {software}"] = None
    if not rows:
        return NOTHING
    head = [
        "| fabric | collective | size | Gloo | mycel | faster by | mycel, of the bound |",
        "|---|---|---|---|---|---|---|",
    ]
    note = "Medians; a time is that of the slowest rank; both backends in turns in the same run. Measured on: "
    return "\n".join([*head, *rows, "", note + "; and ".join(sources) + "."]) + "\n"


def with_table(page: str, text: str) -> str:
    """The page with ``text`` between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UsageError(f"README.md has no place for the table ({BEGIN.strip()} ... {END})")
    return before + BEGIN + text + end + after


def main() -> None:
    """Rewrite README.md."""
    files = [Path(name) for name in sys.argv[1:]] or sorted(RECORDED.glob("*.jsonl"))
    readme = ROOT / "README.md"
    text = table(read_lines(files))
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        sys.exit(f"readme_table: {error}")
