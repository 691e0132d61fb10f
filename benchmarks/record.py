"""What the benchmarks share: where figures are kept, their stamp, and tables in pages that are made from them."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mycel.bench.measurement import describe_hardware

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "recorded"
CLUSTERS = ROOT / "examples" / "clusters"
BENCHMARKS = ROOT / "benchmarks"
SUITE = ROOT / "tests" / "data" / "topologies"
#: What a run itself rewrites: figures, pages made from them, and plots. They do not change what is measured.
WRITTEN_BY_RUNS = ("benchmarks/recorded", "docs", "README.md")
#: What a page says where there is no figure yet.
NOT_MEASURED = "*Not measured yet.*\n"


def commit() -> str:
    """Short name of the commit; with ``+`` when files that could change a figure differ from it.

    ``unknown`` outside a checkout.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    name = git("describe", "--always")
    changed = git("diff", "--name-only", "HEAD", "--", ".", *(f":(exclude){path}" for path in WRITTEN_BY_RUNS))
    return f"{name}+" if name and changed else name or "unknown"


def stamp() -> dict[str, str]:
    """Commit and time, for a recorded line."""
    return {"commit": commit(), "time": datetime.now(UTC).isoformat(timespec="seconds")}


def cluster_file(name: str) -> Path:
    """The file of an emulated fabric: an example, or one that only benchmarks need."""
    example = CLUSTERS / f"{name}.yaml"
    return example if example.exists() else BENCHMARKS / f"{name}.yaml"


def read(file: Path) -> list[dict[str, Any]]:
    """JSON lines; none where there is no file yet."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def append(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add JSON lines to a file, made with its folder where it is new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; cells as they print."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def with_section(page: str, name: str, text: str) -> str:
    """The page with ``text`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``, or ``NOT_MEASURED``."""
    marks = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not marks.search(page):
        raise SystemExit(f"the page has no place for a table: <!-- {name}:begin --> ... <!-- {name}:end -->")
    return marks.sub(lambda m: m.group(1) + (text or NOT_MEASURED) + m.group(2), page)


def write_section(file: Path, name: str, text: str) -> None:
    """``with_section``, in place."""
    file.write_text(with_section(file.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def conclude(
    output: Path,
    page: Path,
    name: str,
    lines: Iterable[Mapping[str, Any]],
    table: Callable[[list[dict[str, Any]]], str],
    *,
    kind: str | None = None,
) -> None:
    """The end of a claim: lines replace those of the last run, the table made of them is printed and put in a page.

    Args:
        output: the file of its lines.
        page: has a section ``name``.
        lines: get hardware, commit and time.
        table: makes Markdown of the lines that were read back.
        kind: where one part of a claim was run, a key that the lines of this part have, and no others; the other
            parts' lines stay, with the stamps that they have.
    """
    shared = {"hardware": describe_hardware(), **stamp()}
    kept = [] if kind is None else [line for line in read(output) if kind not in line]
    output.unlink(missing_ok=True)
    append(output, kept + [{**line, **shared} for line in lines])
    text = table(read(output))
    print(text)
    write_section(page, name, text)


def sweep_fabrics(
    lines_of: Callable[[str, list[int], int], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], str],
    output: Path,
    page: Path,
    *,
    doc: str | None,
    fabrics: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
) -> None:
    """The command line of a benchmark that goes over fabrics and sizes: lines are printed, or recorded on request.

    Args:
        lines_of: measures a fabric: its name, sizes in bytes, and timed rounds.
        table: makes Markdown of lines.
        output: the file of its lines, named as the section of the page.
        page: has the table.
        doc: of the benchmark.
        fabrics, sizes, rounds: that are taken if none are given.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(fabrics))
    parser.add_argument("--sizes", default=",".join(map(str, sizes)))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    wanted = [int(size) for size in options.sizes.split(",")]
    lines = [line for fabric in options.only.split(",") for line in lines_of(fabric, wanted, options.rounds)]
    if options.record:
        conclude(output, page, output.stem, lines, table)
    else:
        print(table(lines))


def conclude_parts(
    output: Path,
    page: Path,
    sections: Mapping[str, Callable[[list[dict[str, Any]]], str]],
    lines: Sequence[Mapping[str, Any]],
    *,
    key: str = "part",
    quick: bool = False,
) -> None:
    """The end of a claim in several parts, of which some were run: the others' lines stay, and all tables are made.

    Args:
        output: the file of its lines.
        page: has the sections.
        sections: what makes each section's text of all lines; no text where its part is not recorded yet.
        lines: get hardware, commit and time.
        key: of a line, what part it is of.
        quick: nothing is kept; tables of these lines alone are printed.
    """
    if quick:
        print("\n".join(make(list(map(dict, lines))) for make in sections.values()))
        return
    shared, run = {"hardware": describe_hardware(), **stamp()}, {line[key] for line in lines}
    kept = [line for line in read(output) if line[key] not in run]
    output.unlink(missing_ok=True)
    append(output, kept + [{**line, **shared} for line in lines])
    for name, make in sections.items():
        text = make(read(output))
        print(text)
        write_section(page, name, text)
