"""Digits that are classified without being seen: the network computes on ciphertexts, on ranks that have no key.

python examples/encrypted_inference/encrypted_digits.py                              # one process has both sides
torchrun --nproc-per-node 4 examples/encrypted_inference/encrypted_digits.py --batch 90
python examples/encrypted_inference/encrypted_digits.py --compare --write            # all layouts of five circuits

Rank 0 has the secret key: it encrypts images and decrypts classes. The network's weights are in the clear, on ranks
that compute on ciphertexts. Layout, parameters and rotation keys follow from a trace of the circuit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from circuits import Convolution, Dense, Matrix, Network
from prices import Candidate, candidates, cheapest
from sealed import Sealed
from sklearn.datasets import load_digits
from torch import nn

from mycel.errors import UsageError

HELD_OUT = 360
TABLE = Path(__file__).with_name("table.md")
#: Networks and images of the comparison.
COMPARED = (("64-10", 1), ("64-16-10", 16), ("64-64-10", 1), ("64-64-10", HELD_OUT), ("4 channels", 1))
#: Runs of one circuit that are timed; where there are more, they are alike.
TIMED = 3


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of 8 x 8, between 0 and 1."""

    images: Matrix
    classes: Any


@cache
def digits() -> tuple[Digits, Digits]:
    """To train with, and held out."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.data))
    held, rest = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(data.data[rest] / 16, data.target[rest]), Digits(data.data[held] / 16, data.target[held])


class Squares(nn.Module):
    """Squares its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Element by element."""
        return x * x


@cache
def train(name: str, steps: int = 250) -> Network:
    """A network by its name: widths of linear layers, or ``4 channels``: a convolution and a linear layer."""
    generator = torch.Generator().manual_seed(0)
    trained, _ = digits()
    x, y = torch.tensor(trained.images, dtype=torch.float32), torch.tensor(trained.classes)
    layers: list[nn.Module] = []
    if name.endswith("channels"):
        channels = int(name.split()[0])
        layers += [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, channels, 3, padding=1), nn.Flatten(), Squares()]
        layers += [nn.Linear(64 * channels, 10)]
    else:
        widths = [int(width) for width in name.split("-")]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [Squares()] if layers else []
            layers += [nn.Linear(inputs, outputs)]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.12, 0.12, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    made: list[Dense | Convolution] = []
    for layer in model:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
            made.append(Convolution(weight[:, 0], bias) if weight.ndim == 4 else Dense(weight, bias))
    return Network(name, tuple(made))


@dataclass(frozen=True, slots=True)
class Classified:
    """What rank 0 knows at the end.

    Attributes:
        logits: ``[images, 10]``.
        seconds: from the first encryption to the last decryption.
        key_bytes: public keys, to each rank.
        text_bytes: ciphertexts of all images, there and back.
    """

    logits: Matrix
    seconds: float
    key_bytes: int
    text_bytes: int


def classify(candidate: Candidate, images: Matrix, batch: int) -> Classified | None:
    """Encrypt on rank 0, compute on all ranks, decrypt on rank 0; ``None`` on the others. All ranks call this.

    Args:
        candidate: layout, parameters and rotations.
        images: ``[n, 64]``; only rank 0's count.
        batch: images a run.

    Raises:
        UsageError: a batch does not fit into the layout or the slots.
    """
    most = candidate.layout.images or candidate.parameters.slots
    if not 1 <= batch <= most:
        raise UsageError(f"a batch of {batch} images: layout {candidate.layout.name!r} takes 1 to {most}")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    keeper = Sealed.with_keys(candidate.parameters, candidate.trace.rotations) if rank == 0 else None
    keys: list[Any] = [keeper.public() if keeper else None]
    if size > 1:
        dist.broadcast_object_list(keys)
    worker = Sealed.from_public(candidate.parameters, keys[0])
    begin = time.perf_counter()
    parts = [images[i : i + batch] for i in range(0, len(images), batch)] if keeper else []
    given: list[list[list[bytes]]] = [[] for _ in range(size)]
    for number, part in enumerate(parts):
        assert keeper is not None
        given[number % size].append([keeper.pack(keeper.encrypt(v)) for v in candidate.layout.pack(part)])
    mine: list[Any] = [given[0]]
    if size > 1:
        dist.scatter_object_list(mine, given if rank == 0 else None)
    results = []
    for job in mine[0]:
        texts = candidate.layout.run(worker, [worker.unpack(data) for data in job])
        results.append([worker.pack(text) for text in texts])
    returned: list[Any] = [results]
    if size > 1:
        returned = [None] * size
        dist.gather_object(results, returned if rank == 0 else None)
    if keeper is None:
        return None
    logits = []
    for number, part in enumerate(parts):
        answer = returned[number % size][number // size]
        vectors = [keeper.decrypt(keeper.unpack(data)) for data in answer]
        logits.append(candidate.layout.unpack(vectors, len(part)))
    taken = time.perf_counter() - begin
    sent = sum(len(data) for jobs in (*given, *returned) for job in jobs for data in job)
    return Classified(np.concatenate(logits), taken, sum(map(len, keys[0])), sent)


def compare(circuits: Sequence[tuple[str, int]] = COMPARED) -> list[dict[str, Any]]:
    """Every layout of some circuits: what the prices say and what it takes; a line each."""
    trained, held = digits()
    lines = []
    for name, count in circuits:
        network = train(name)
        wanted = network(held.images[:count]).argmax(1)
        for candidate in candidates(network, trained.images[:64], count):
            machine = Sealed.with_keys(candidate.parameters, candidate.trace.rotations)
            fits = -(-count // candidate.runs)
            taken, right = [], 0
            for run in range(min(candidate.runs, TIMED)):
                part = held.images[run * fits : (run + 1) * fits][: count - run * fits]
                begin = time.perf_counter()
                logits = candidate.layout.whole(machine, part)
                taken.append(time.perf_counter() - begin)
                right += int((logits.argmax(1) == wanted[run * fits : run * fits + len(part)]).sum())
            lines.append(
                {
                    "circuit": name,
                    "images": count,
                    "layout": candidate.layout.name,
                    "degree": candidate.parameters.degree,
                    "keys": len(candidate.trace.rotations),
                    "modelled_s": candidate.modelled_s(),
                    "measured_s": candidate.runs * statistics.median(taken),
                    "right": right,
                    "compared": min(count, len(taken) * fits),
                }
            )
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown; the layout that was chosen, and the one that was fastest, of each circuit."""
    rows = [
        "| circuit | images | layout | degree | rotation keys | modelled, s | measured, s | same classes | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    hits, circuits = 0, list(dict.fromkeys((line["circuit"], line["images"]) for line in lines))
    for circuit in circuits:
        mine = [line for line in lines if (line["circuit"], line["images"]) == circuit]
        chosen, fastest = (min(mine, key=lambda line, k=k: line[k]) for k in ("modelled_s", "measured_s"))
        hits += chosen is fastest
        for line in mine:
            said = ", ".join(word for word, which in (("chosen", chosen), ("fastest", fastest)) if which is line)
            cells = [line[key] for key in ("circuit", "images", "layout", "degree", "keys")]
            cells += [f"{line['modelled_s']:.2f}", f"{line['measured_s']:.2f}"]
            cells += [f"{line['right']} of {line['compared']}", said]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    rows += ["", f"The chosen layout is the fastest in {hits} of {len(circuits)} circuits."]
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Classify, or compare layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--network", default="64-64-10", help="widths, or '4 channels'")
    parser.add_argument("--images", type=int, default=HELD_OUT)
    parser.add_argument("--batch", type=int, default=None, help="images a run, where the layout takes several")
    parser.add_argument("--compare", action="store_true", help="all layouts of five circuits, in one process")
    parser.add_argument("--write", action="store_true", help=f"with --compare: put the table into {TABLE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.compare:
        made = table(compare())
        print(made, end="")
        if options.write:
            TABLE.write_text(made, encoding="utf-8")
        return
    ranks = "WORLD_SIZE" in os.environ
    if ranks:
        if options.backend == "mycel":
            import mycel.runtime  # noqa: F401  (registers the backend)
        dist.init_process_group(options.backend)
    (trained, held), network = digits(), train(options.network)
    choice: list[Any] = [cheapest(network, trained.images[:64], options.images).layout.name]
    if ranks:
        dist.broadcast_object_list(choice)  # prices differ from rank to rank
    traced = candidates(network, trained.images[:64], options.images)
    candidate = next(c for c in traced if c.layout.name == choice[0])
    images = held.images[: options.images]
    batch = options.batch or min(len(images), candidate.layout.images or candidate.parameters.slots)
    found = classify(candidate, images, batch)
    if found is not None:
        same = int((found.logits.argmax(1) == network(images).argmax(1)).sum())
        off = np.abs(found.logits - network(images)).max()
        accuracy = (found.logits.argmax(1) == held.classes[: len(images)]).mean()
        keys, each = len(candidate.trace.rotations), len(images)
        print(f"layout {candidate.layout.name}, {candidate.parameters}, {keys} rotation keys")
        print(f"{same} of {each} classes as in the clear, logits at most {off:.1e} off, accuracy {accuracy:.1%}")
        print(
            f"{found.seconds:.2f} s, {1e3 * found.seconds / each:.1f} ms an image; {found.key_bytes / 1e6:.1f} MB of "
            f"keys to each rank, {found.text_bytes / each / 1e3:.1f} KB of ciphertext an image"
        )
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
