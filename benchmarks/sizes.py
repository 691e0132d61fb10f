"""Every size from 1 KB to 1 GB: our methods beside every classic and a greedy matching by chance, all simulated.

On eleven fabrics without switches and five with, all_gather, reduce_scatter and all_reduce: at each size the best of
our own methods, over the least possible time, and over the best of the others. Every message takes 1 us and its
links' latency; every schedule may cut its chunks as suits it. The greedy baseline matches links with chunks in equal
steps, drawn at random, the best of some draws, as TACOS publishes it (Won et al., MICRO 2024, section IV); it
is for fabrics without switches. Exit 1 where a classic or the baseline is more than 2 % ahead somewhere.

    python benchmarks/sizes.py                               # all, for half an hour on a core and more
    python benchmarks/sizes.py --fabrics torus_4x4,star_8 --sizes 1KB,1MB
    python benchmarks/sizes.py --output FILE                 # appends a JSON line a point
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mycel.collectives.routes import shortest_routes
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import BY_SIZE, candidates_for, synthesize
from mycel.collectives.synth.classics import classics_for
from mycel.collectives.synth.forest import for_sizes
from mycel.collectives.time_bound import bound_seconds
from mycel.errors import SynthesisError
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from mycel.units import format_size, parse_size
from record import append, stamp

_LINKS = "bandwidth=50 GB/s,latency=0.5us"
FABRICS = {
    "ring_8": f"ring:ranks=8,{_LINKS}",
    "ring_16": f"ring:ranks=16,{_LINKS}",
    "torus_2x4": f"torus:dims=2x4,{_LINKS}",
    "torus_3x3": f"torus:dims=3x3,{_LINKS}",
    "torus_4x4": f"torus:dims=4x4,{_LINKS}",
    "mesh_3x3": f"mesh:dims=3x3,{_LINKS}",
    "mesh_4x4": f"mesh:dims=4x4,{_LINKS}",
    "hypercube_8": f"hypercube:dim=3,{_LINKS}",
    "hypercube_16": f"hypercube:dim=4,{_LINKS}",
    "full_mesh_8": f"full_mesh:ranks=8,{_LINKS}",
    "dgx1_v100": "dgx1_v100",
    "star_8": f"star:ranks=8,{_LINKS}",
    "star_16": f"star:ranks=16,{_LINKS}",
    "dgx_h100_x2": "dgx_h100:boxes=2",
    "dgx_a100_x2": "dgx_a100:boxes=2",
    "dragonfly": "dragonfly",
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB,256MB,1GB"
#: Seconds of a message beyond its links' latency.
OVERHEAD_S = 1e-6
#: Into how many pieces the longest chunk is cut, the same for all: with fewer, pipelines of some would not fill.
_PIECES = (1, 4, 16, 64)
_DRAWS = 5


def by_chance(topology: Topology, collective: Collective, parts: int, seed: int) -> Schedule:
    """All links at once in equal steps, each with a chunk that its end lacks, drawn at random."""
    n, chance = collective.num_ranks, random.Random(seed)
    routes = [shortest_routes(topology, rank, relays=False) for rank in range(n)]
    backwards = collective.name == "reduce_scatter"
    plans = ([True] if backwards else [False]) if collective.name != "all_reduce" else [True, False]
    transfers: list[Transfer] = []
    into: dict[tuple[int, int], tuple[int, ...]] = {}
    for turned in plans:
        links = [(b, a) if turned else (a, b) for a in range(n) for b in routes[a]]
        has = [{rank * parts + part for part in range(parts)} for rank in range(n)]
        messages: list[tuple[int, int, int]] = []
        while any(len(mine) < n * parts for mine in has):
            chance.shuffle(links)
            before, got = [set(mine) for mine in has], len(messages)
            for a, b in links:
                if useful := sorted(before[a] - has[b]):
                    chunk = chance.choice(useful)
                    has[b].add(chunk)
                    messages.append((chunk, a, b))
            if got == len(messages):
                raise SynthesisError("some rank gets nothing")
        for chunk, a, b in reversed(messages) if turned else messages:
            src, dst = (b, a) if turned else (a, b)
            after = into.get((chunk, src), ())
            into[chunk, dst] = (*into.get((chunk, dst), ()), len(transfers)) if turned else (len(transfers),)
            path = routes[src][dst].vertices
            transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=turned, path=path, after=after))
    chunks = tuple(Chunk(start=i, stop=i + 1) for i in range(n * parts))
    return Schedule(
        collective=collective,
        topology=topology,
        method="by_chance",
        num_units=n * parts,
        chunks=chunks,
        transfers=tuple(transfers),
        is_timed=True,
    )


def seconds(schedule: Schedule, num_bytes: int) -> float:
    """The schedule's time at a size, in the pieces that suit it best."""
    longest = num_bytes * int((schedule.chunk_stops - schedule.chunk_starts).max()) / schedule.num_units
    sizes = {max(4096, -(-int(longest) // cut)) for cut in _PIECES}
    return min(simulate(schedule, num_bytes, piece_bytes=piece, overhead_s=OVERHEAD_S).seconds for piece in sizes)


def points(name: str, sizes: list[int]) -> list[dict[str, object]]:
    """A record a collective and size of one fabric."""
    topology = load_topology(FABRICS[name])
    records: list[dict[str, object]] = []
    for what in COLLECTIVES:
        collective = Collective(name=what, num_ranks=topology.num_ranks)  # type: ignore[arg-type]
        least = bound_seconds(topology, collective, overhead_s=OVERHEAD_S)
        ours: dict[str, Schedule] = {}
        forests = for_sizes(topology, collective)
        others: dict[str, Schedule] = {}
        for method in (*candidates_for(what), *classics_for(what)):  # type: ignore[arg-type]
            if method == "forest":
                continue
            try:
                (ours if method in candidates_for(what) else others)[method] = synthesize(  # type: ignore[arg-type]
                    topology, collective, method
                )
            except SynthesisError:
                continue
        if not topology.switches:
            for parts in (1, 2, 4):
                for seed in range(_DRAWS):
                    others[f"by_chance {parts} {seed}"] = by_chance(topology, collective, parts, seed)
        for size in sizes:
            planned = {m: synthesize(topology, collective, m, num_bytes=size, overhead_s=OVERHEAD_S) for m in BY_SIZE}
            planned["forest"] = min(forests, key=lambda forest: seconds(forest, size))
            mine, theirs = (
                min((seconds(schedule, size), method) for method, schedule in those.items())
                for those in (ours | planned, others)
            )
            records.append(
                {
                    "fabric": name,
                    "collective": what,
                    "bytes": size,
                    "method": mine[1],
                    "simulated_s": mine[0],
                    "gap": mine[0] / least.seconds(size),
                    "other": theirs[1].split()[0],
                    "other_over_ours": theirs[0] / mine[0],
                }
            )
    return records


def main() -> int:
    """Prints a line a fabric and collective, and what it comes to; 1 if something else is ahead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", default=",".join(FABRICS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--output", type=Path, help="file for JSON lines")
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    records: list[dict[str, object]] = []
    print("time over the least possible (gap), and the best of the others over ours, by size:")
    print(f"{'':30}" + "".join(f"{format_size(size):>18}" for size in sizes))
    for name in options.fabrics.split(","):
        found = points(name, sizes)
        records += found
        for what in COLLECTIVES:
            row = [r for r in found if r["collective"] == what]
            cells = (f"{r['method']!s:.9} {r['gap']:.2f} {r['other_over_ours']:.2f}" for r in row)
            print(f"{name:14} {what:15}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    gaps = [float(str(r["gap"])) for r in records]
    behind = [r for r in records if float(str(r["other_over_ours"])) < 1 / 1.02]
    print(f"{len(records)} points: median gap {median(gaps):.3f}, largest {max(gaps):.2f}; behind at {len(behind)}")
    for record in behind:
        print(json.dumps(record))
    if options.output:
        append(options.output, [record | stamp() for record in records])
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
