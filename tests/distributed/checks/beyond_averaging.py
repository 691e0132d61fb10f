"""What every rank runs for ``test_beyond_averaging.py``: games, layers, and references written from the formulas."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from mycel.data_parallel import MASHA, CompressionPolicy, HDPiSSA, Quantised, RandomK, TopK, hd_pissa
from mycel.data_parallel.compress import Compressor, Context

# -- a game -------------------------------------------------------------------------------------------------------

#: Parts of the data, which ranks divide: the game is the same for 1, 2, 3, 4 and 6 ranks.
PARTS, WIDTH, CURVATURE, RATE, CHANCE, SEED = 12, 8, 0.5, 0.1, 0.4, 3
NAMES = ("x", "y")
COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "random_k": lambda: RandomK(0.25, unbiased=True),
    "top_k": lambda: TopK(0.25),
    "int8": lambda: Quantised(8),
}


def parts_of(rank: int, size: int) -> list[int]:
    return list(range(rank, PARTS, size))


def operator(z: Tensor, parts: list[int]) -> Tensor:
    """The mean over these parts; nowhere zero for a single one."""
    total = torch.zeros_like(z)
    x, y = z.chunk(2)
    for part in parts:
        random = torch.Generator().manual_seed(part)
        a = torch.randn(WIDTH, WIDTH, generator=random, dtype=z.dtype)
        b = torch.randn(2 * WIDTH, generator=random, dtype=z.dtype)
        total += torch.cat((a @ y + CURVATURE * x, CURVATURE * y - a.T @ x)) + b
    return total / len(parts)


def make(kind: str, **options: Any) -> tuple[Tensor, MASHA, Callable[[], Tensor]]:
    """Parameters, joined; the optimizer; and the closure: players' loss, whose gradients autograd finds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    z = torch.full((2 * WIDTH,), 1.0 + rank, dtype=torch.float64)  # whoever begins elsewhere is brought into line
    x, y = (nn.Parameter(part) for part in z.chunk(2))
    players = [{"params": [("x", x)]}, {"params": [("y", y)], "maximize": True}]
    optimizer = MASHA(players, COMPRESSORS[kind](), lr=RATE, probability=CHANCE, seed=SEED, **options)
    parts = parts_of(rank, size)

    def closure() -> Tensor:
        loss = x.new_zeros(())
        for part in parts:
            random = torch.Generator().manual_seed(part)
            a = torch.randn(WIDTH, WIDTH, generator=random, dtype=x.dtype)
            b = torch.randn(2 * WIDTH, generator=random, dtype=x.dtype)
            loss = loss + x @ a @ y + CURVATURE / 2 * (x @ x - y @ y) + b[:WIDTH] @ x - b[WIDTH:] @ y
        loss = loss / len(parts)
        loss.backward()
        return loss

    return z, optimizer, closure


def same_bits(tensor: Tensor) -> bool:
    """Whether all ranks have the same."""
    theirs = tensor.detach().clone()
    dist.broadcast(theirs, 0)
    found = torch.tensor([float(torch.equal(theirs, tensor.detach()))])
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def reference(kind: str, size: int, steps: int) -> Tensor:
    """All ranks in one process, for the two compressors that can be written down in a line."""
    z = torch.ones(2 * WIDTH, dtype=torch.float64)
    w, owed = z.clone(), torch.zeros(size, 2 * WIDTH, dtype=torch.float64)
    kept = WIDTH // 4
    for step in range(steps):
        half = (1 - CHANCE) * z + CHANCE * w - RATE * operator(w, list(range(PARTS)))
        z = half.clone()
        for rank in range(size):
            parts = parts_of(rank, size)
            owed[rank] += RATE * (operator(half, parts) - operator(w, parts))
            for name, change, left in zip(NAMES, z.chunk(2), owed[rank].chunk(2), strict=True):
                if kind == "top_k":
                    for place in left.abs().argsort(descending=True)[:kept]:
                        change[place] -= left[place] / size
                        left[place] = 0.0
                else:
                    context = Context(name=name, step=step, seed=SEED)
                    where = COMPRESSORS[kind]().compress(torch.arange(float(WIDTH)), context).long()
                    change[where] -= left[where] * (WIDTH / kept) / size
                    left.zero_()
        if Context(name="MASHA", step=step, seed=SEED).random_seed(shared=True) / 2**63 < CHANCE:
            w = z.clone()
    return z


def masha_follows_its_algorithm(rank: int, size: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """By compressor: difference from the reference after 9 steps, what is left at the end, and bytes over formula."""
    out = {}
    for kind in COMPRESSORS:
        z, optimizer, closure = make(kind)
        references = 1
        for step in range(9):
            optimizer.step(closure)
            references += Context(name="MASHA", step=step, seed=SEED).random_seed(shared=True) / 2**63 < CHANCE
        early = 0.0 if kind == "int8" else float((z - reference(kind, size, 9)).abs().max())
        per_step = COMPRESSORS[kind]().sent_bytes([(WIDTH,), (WIDTH,)], rank=rank, world_size=size)
        formula = 9 * per_step + references * 2 * (size - 1) / size * 16 * WIDTH
        sent = optimizer.stats.sent_bytes / formula if size > 1 else 1.0
        for _ in range(steps):
            optimizer.step(closure)
        assert same_bits(z)
        out[kind] = early, float(operator(z.detach(), list(range(PARTS))).norm()), sent
    return out


def masha_goes_on(rank: int, size: int, kind: str) -> bool:
    """Whether a run that is saved and loaded in the middle ends with the same bits."""
    z, optimizer, closure = make(kind)
    for _ in range(7):
        optimizer.step(closure)
    file = io.BytesIO()
    torch.save({"z": z, "optimizer": optimizer.state_dict(own=True)}, file)
    for _ in range(7):
        optimizer.step(closure)
    again, other, other_closure = make(kind)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        again.copy_(saved["z"])
    for _ in range(7):
        other.step(other_closure)
    return torch.equal(z, again) and same_bits(z) and other.steps == 14


def masha_part_of_a_run(rank: int, size: int, kind: str, file: str, steps: int, first: bool) -> float:
    """A part of a run by these ranks; how far from the solution it ends."""
    z, optimizer, closure = make(kind)
    if not first:
        saved = torch.load(file, weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            z.copy_(saved["z"])
    for _ in range(steps):
        optimizer.step(closure)
    state = {"z": z, "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    return float(operator(z.detach(), list(range(PARTS))).norm())


def masha_options(rank: int, size: int) -> dict[str, float]:
    """A network's game under a policy: which bytes travel, and how often the reference moves by default."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to(torch.bfloat16)
    net[1].bias.requires_grad_(False)
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    policy = CompressionPolicy(Quantised(4), rules={"1.*": None})
    optimizer = MASHA(trained, policy, lr=0.01)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank), dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.step(lambda: net(x).square().mean().backward())
    assert all(same_bits(p) for p in net.parameters())
    return {"probability": optimizer.probability, "ratio": optimizer.stats.ratio, "steps": optimizer.stats.steps}


# -- layers -------------------------------------------------------------------------------------------------------

DIRECTIONS, LEARNING_RATE, BETAS, EPSILON = 2, 1e-2, (0.9, 0.999), 1e-8


class Net(nn.Module):
    """Linear layers in every circumstance: first, tied, frozen, used by one rank alone, before work in place."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.weight.requires_grad_(False)
        self.seldom = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, *, seldom: bool) -> Tensor:
        x = functional.relu(self.first(x), inplace=True)
        x = self.norm(x + torch.tanh(self.tied(x)))
        x = self.again(input=self.frozen(x))
        if seldom:
            x = x + self.seldom(x)
        return self.head(x)


def network(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(5)
    return Net().to(dtype)


def loss_of(net: nn.Module, worker: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + worker)
    dtype = next(net.parameters()).dtype
    x = torch.randn(4, 2, 6, generator=random, dtype=torch.float64).to(dtype)
    target = torch.stack((x[..., 0] * x[..., 1], x[..., 2], x[..., 3].abs()), dim=-1)
    return functional.mse_loss(net(x, seldom=worker == 0), target)


def tuned(net: nn.Module, **options: Any) -> HDPiSSA:
    make_optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)
    return hd_pissa(net, make_optimizer, **{"rank": DIRECTIONS, **options})


def train(net: nn.Module, handle: HDPiSSA, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(net, rank, step)
        handle.optimizer.zero_grad()
        loss.backward()
        handle.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def owner(direction: int, count: int, workers: int) -> int:
    """Whose a direction is: the first workers have one more where they do not divide."""
    for worker in range(workers):
        direction -= count // workers + (worker < count % workers)
        if direction < 0:
            return worker
    raise AssertionError("more directions than there are")


TRAINED = ("first.weight", "tied.weight", "seldom.weight", "head.weight")


def simulate(workers: int, steps: int) -> dict[str, Tensor]:
    """All workers of a run, from the formulas: whole gradients, singular vectors, Adam, sums."""
    net = network()
    weights = {name: dict(net.named_parameters())[name] for name in TRAINED}
    slices: dict[tuple[str, int], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        u, s, vh = torch.linalg.svd(weight.detach())
        count = min(DIRECTIONS * workers, len(s))
        for worker in range(workers):
            mine = [d for d in range(count) if owner(d, count, workers) == worker]
            a, b = s[mine].sqrt()[:, None] * vh[mine], u[:, mine] * s[mine].sqrt()
            zeros = {f"{m}{x}": torch.zeros_like(t) for x, t in (("a", a), ("b", b)) for m in "mv"}
            slices[name, worker] = {"a": a, "b": b, **zeros}
    for step in range(steps):
        sums = {name: torch.zeros_like(w) for name, w in weights.items()}
        for worker in range(workers):
            net.zero_grad()
            loss_of(net, worker, step).backward()
            for name, weight in weights.items():
                one = slices[name, worker]
                whole = torch.zeros_like(weight) if weight.grad is None else weight.grad
                change = {}
                for x, gradient in (("a", one["b"].T @ whole), ("b", whole @ one["a"].T)):
                    one["m" + x] = BETAS[0] * one["m" + x] + (1 - BETAS[0]) * gradient
                    one["v" + x] = BETAS[1] * one["v" + x] + (1 - BETAS[1]) * gradient**2
                    m, v = one["m" + x] / (1 - BETAS[0] ** (step + 1)), one["v" + x] / (1 - BETAS[1] ** (step + 1))
                    change[x] = LEARNING_RATE * m / (v.sqrt() + EPSILON)
                sums[name] += change["b"] @ one["a"] + one["b"] @ change["a"] - change["b"] @ change["a"]
        with torch.no_grad():
            for name, weight in weights.items():
                weight -= sums[name]
    return {name: p.detach() for name, p in net.named_parameters()}


def digest(net: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in net.parameters():
        found.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def hd_pissa_equals_its_formula(rank: int, size: int) -> dict[str, Any]:
    """Difference from the reference, bits of the model, bytes over their formula, and what has a gradient."""
    net = network()
    if rank:  # whoever begins elsewhere is brought into line
        with torch.no_grad():
            net.tied.weight += 1.0
    before = {name: p.detach().clone() for name, p in network().named_parameters()}
    handle = tuned(net)
    train(net, handle, rank, range(5))
    want = simulate(size, 5)
    shapes = [(20, 6), (20, 20), (20, 20), (3, 20)]
    rows = [-(-min(DIRECTIONS * size, *shape) // size) for shape in shapes]
    formula = 5 * (size - 1) * sum(8 * r * sum(shape) for r, shape in zip(rows, shapes, strict=True))
    found = {
        "difference": max(float((p - want[name]).abs().max()) for name, p in net.named_parameters()),
        "moved": [name for name, p in net.named_parameters() if not torch.equal(p, before[name])],
        "bits": digest(net),
        "bytes": handle.stats.sent_bytes == formula and handle.stats.steps == 5,
        "gradients": [name for name, p in net.named_parameters() if p.requires_grad or p.grad is not None],
        "names": sorted(net.state_dict()),
    }
    handle.close()
    loss_of(net, 0, 0).backward()
    found["after"] = [name for name, p in net.named_parameters() if p.grad is None]
    return found


def hd_pissa_ranks(rank: int, size: int) -> tuple[list[float], int]:
    """Singular values of what a small learning rate has changed of a matrix, and how many matrices are trained."""
    net = network()
    before = net.tied.weight.detach().clone()
    make_optimizer = partial(torch.optim.Adam, lr=1e-7)
    handle = hd_pissa(net, make_optimizer, rank=1, layers=["tied"])
    train(net, handle, rank, range(8))
    return torch.linalg.svdvals(net.tied.weight.detach() - before).tolist(), len(list(handle.parameters()))


def hd_pissa_goes_on(rank: int, size: int) -> tuple[bool, str]:
    """Whether a run that is saved and loaded in the middle ends with the same bits, in bfloat16 too."""
    same = True
    for dtype in (torch.float64, torch.bfloat16):
        net = network(dtype)
        handle = tuned(net)
        train(net, handle, rank, range(4))
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "tuned": handle.state_dict()}, file)
        train(net, handle, rank, range(4, 8))
        other = network(dtype)
        again = tuned(other)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        other.load_state_dict(saved["net"])
        again.load_state_dict(saved["tuned"])
        train(other, again, rank, range(4, 8))
        same &= digest(net) == digest(other)
    return same, digest(net)


def hd_pissa_part_of_a_run(rank: int, size: int, file: str, begin: int, end: int) -> dict[str, Any]:
    """A part of a run by these ranks: losses, and what was loaded and saved."""
    net = network()
    handle = tuned(net)
    loaded: dict[str, Any] = {}
    if begin:
        saved = torch.load(file, weights_only=True)
        net.load_state_dict(saved["net"])
        handle.load_state_dict(saved["tuned"])
        loaded = saved["tuned"]
    again = handle.state_dict()
    kept = all(torch.equal(again["directions"][name], d) for name, d in loaded.get("directions", {}).items())
    for name, entry in loaded.get("optimizer", {}).get("state", {}).items():
        kept &= all(torch.equal(again["optimizer"]["state"][name][key], value) for key, value in entry.items())
    losses = train(net, handle, rank, range(begin, end))
    state = {"net": net.state_dict(), "tuned": handle.state_dict()}
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    return {"losses": losses, "kept": kept, "bits": digest(net), "rows": [len(p) for p in handle.parameters()]}


def hd_pissa_refusals(rank: int, size: int) -> list[str]:
    """What is said where it cannot work."""
    said = []

    def wrapped() -> None:
        hd_pissa(nn.parallel.DistributedDataParallel(network()), torch.optim.SGD)

    def other_model() -> None:
        tuned(network(), layers=["tied"]).load_state_dict(tuned(network(), layers=["first"]).state_dict())

    def other_shapes() -> None:
        handle = hd_pissa(network(), partial(torch.optim.Adafactor, lr=1e-3), rank=2, layers="tied")
        train(network(), handle, rank, range(1))
        handle.state_dict()

    for attempt in (wrapped, other_model, other_shapes):
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
