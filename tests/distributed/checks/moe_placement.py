"""What every rank runs for ``test_moe_placement.py``: placed layers against the reference, experts that move."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.moe import ExpertParallel, MoE, experts_apart
from mycel.moe.placement import PlacedDispatcher, Rebalancer, TraceRecorder, move_experts
from mycel.planning.placement import EMPTY, ExpertPlacement, eplb, flex

_spec = importlib.util.spec_from_file_location("moe_checks", Path(__file__).with_name("moe.py"))
assert _spec is not None and _spec.loader is not None
moe = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(moe)

PLAIN = moe.make_case("top_k", 0.0, "first")
GELU = moe.make_case("top_k", 0.6, "priority", top_k=3, activation="gelu")


def placements(size: int) -> dict[str, ExpertPlacement]:
    """In order with spare slots; mixed; some experts several times, slots empty."""
    nodes = tuple((rank,) for rank in range(size)) if size < 4 else ((0, 1), (2, 3))
    ordered = ExpertPlacement.contiguous(moe.EXPERTS, size, spare=1, nodes=nodes)
    loads = [40.0, 1, 2, 3, 30.0, 4, 5, 6]
    held = [[e for e in range(moe.EXPERTS) if e % size == rank] for rank in range(size)]
    held = [[*reversed(some), *[e for e in (0, 5) if e not in some]] for some in held]
    width = max(len(some) for some in held)
    mixed = ExpertPlacement(
        num_experts=moe.EXPERTS, slots=tuple((*some, *[EMPTY] * (width - len(some))) for some in held), nodes=nodes
    )
    return {"ordered": ordered, "mixed": mixed, "eplb": eplb(loads, ordered)}


def placed_layer(case: dict[str, Any], placement: ExpertPlacement, name: str | None = None, **options: Any) -> MoE:
    size = placement.num_ranks
    shape = (2, size // 2) if name == "hierarchical" else (size,)
    mesh = DeviceMesh("cpu", torch.arange(size).view(shape))
    return moe.make_layer(
        case, parallel=ExpertParallel(dispatcher=PlacedDispatcher(placement, mesh, name=name)), **options
    )


def errors_of(layer: MoE, case: dict[str, Any], rank: int, size: int, degree: int = 1) -> dict[str, float]:
    """How far output and every gradient are from the token-by-token reference; 1 where replicas differ."""
    same = layer.dispatcher.same_tokens
    lengths = moe.LENGTHS[:1] if same else moe.LENGTHS[:size]
    place = 0 if same else rank
    ys, x_grads, wanted = moe.expected(case, moe.make_layer(case), lengths)
    tokens, factors = moe.batch(lengths)
    x = tokens[place].requires_grad_()
    y = layer(x, degree=degree)
    (y * factors[place]).sum().backward()
    out = {"output": moe.error(y, ys[place]), "tokens": moe.error(x.grad, x_grads[place])}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        if not name.startswith("experts."):
            grad = torch.zeros_like(parameter) if grad is None else grad.clone()
            dist.all_reduce(grad)
            out[name] = moe.error(grad / size, wanted[name])
            continue
        assert grad is not None
        rows = [(slot, e) for slot, e in enumerate(layer.experts.owned) if e != EMPTY]
        out[name] = moe.error(grad[[slot for slot, _ in rows]], wanted[name][[e for _, e in rows]])
        every: list[Any] = [None] * size
        dist.all_gather_object(every, {e: grad[slot] for slot, e in rows})
        same_bits = all(
            torch.equal(g, grad[slot]) for some in every for e, g in some.items() for slot, o in rows if o == e
        )
        out[f"{name} of replicas"] = float(not same_bits)
    return out


def every_placement(rank: int, size: int) -> dict[str, dict[str, float]]:
    out = {}
    for kind, placement in placements(size).items():
        for name in ("all_to_all", "all_gather", "all_reduce", *(["hierarchical"] if size == 4 else [])):
            for case, degree in ((PLAIN, 1), (PLAIN, 2), (GELU, 1)):
                layer = placed_layer(case, placement, name)
                label = f"{kind} {name} {case['activation']} {degree}"
                out[label] = errors_of(layer, case, rank, size, degree)
    return out


def train(layer: MoE, rank: int, size: int, steps: int, after: Any = None, dtype: Any = torch.float64) -> list[float]:
    """Losses of all ranks together; ``after`` is called between steps."""
    layer.to(dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.03, weight_decay=0.1)
    generator = torch.Generator().manual_seed(5 + rank)
    losses = []
    for step in range(steps):
        x = torch.randn(6 + rank, moe.DIM, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        loss = (layer(x) - x.flip(1)).square().mean()
        loss.backward()
        for name, parameter in layer.named_parameters():
            if not name.startswith("experts."):
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        if after is not None:
            after(step, optimizer)
    return losses


def losses_with_and_without_moves(rank: int, size: int) -> dict[str, Any]:
    """AdamW's losses: of the layer without a placement, and with experts that move after every step."""
    steps = 6
    mesh = DeviceMesh("cpu", list(range(size)))
    out: dict[str, Any] = {"plain": train(moe.make_layer(PLAIN, parallel=mesh), rank, size, steps)}
    start = ExpertPlacement.contiguous(moe.EXPERTS, size, spare=1)
    rng = torch.Generator().manual_seed(1)
    kinds = [eplb(torch.rand(moe.EXPERTS, generator=rng).square().tolist(), start) for _ in range(steps)]
    moved = []

    def jump(layer: MoE) -> Any:
        def after(step: int, optimizer: Any) -> None:
            moved.append(move_experts(layer, kinds[step], [optimizer]))

        return after

    layer = placed_layer(PLAIN, start)
    out["moved"] = train(layer, rank, size, steps, jump(layer))
    sent = torch.tensor(sum(m.num_bytes for m in moved))
    dist.all_reduce(sent)
    numbers = sum(p[0].numel() for p in layer.experts.parameters())
    out["bytes"] = (int(sent), sum(m.experts for m in moved) * numbers * 8 * 3)  # float64; parameter and two moments
    metered = torch.tensor(layer.dispatcher.meter.total(["move"]))
    dist.all_reduce(metered)
    out["metered"] = int(metered)
    for policy in (eplb, flex):
        layer = placed_layer(PLAIN, start)
        balancer: dict[str, Rebalancer] = {}

        def after(
            step: int, optimizer: Any, layer: MoE = layer, balancer: Any = balancer, policy: Any = policy
        ) -> None:
            if not balancer:
                balancer["it"] = Rebalancer(layer, policy, [optimizer])
            balancer["it"].step()

        out[policy.__name__] = train(layer, rank, size, steps, after)
        out[f"{policy.__name__} placement"] = layer.dispatcher.placement.slots
        layer(moe.batch((3,))[0][0].double())
        counted = dict(balancer["it"].seen)
        balancer["it"].close()
        layer(moe.batch((5,))[0][0].double())
        out[f"{policy.__name__} closed"] = (int(sum(counted[""])), balancer["it"].seen == counted)
    return out


class PerExpert(torch.optim.Optimizer):
    """Second moments of an expert, and of its rows: states whose rows have shapes of their own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            squares = parameter.grad.square()
            dims = tuple(range(1, parameter.dim()))
            new = [squares.mean(dims, keepdim=True), squares.mean(-1), squares.mean(dims)]
            state = self.state[parameter]
            kept = state.setdefault("moments", {"of": [torch.zeros_like(one) for one in new]})["of"]
            for old, one in zip(kept, new, strict=True):
                old.mul_(0.9).add_(one, alpha=0.1)
            shape = (-1, *[1] * (parameter.dim() - 1))
            scale = kept[0] + kept[1].unsqueeze(-1) + kept[2].view(shape)
            parameter.add_(parameter.grad / (scale.sqrt() + 1e-6), alpha=-1e-2)


def factored_states(rank: int, size: int) -> dict[str, Any]:
    """Losses with and without moves, and what is said of states that several experts share."""
    mesh = DeviceMesh("cpu", list(range(size)))
    start = ExpertPlacement.contiguous(moe.EXPERTS, size)
    flat = [expert for some in start.slots for expert in some]
    found: dict[str, Any] = {}
    for move in (False, True):
        torch.manual_seed(0)
        parallel = ExpertParallel(mesh, dispatcher=PlacedDispatcher(start, mesh))
        layer = MoE(6, 6, moe.EXPERTS, 2, bias=True, parallel=parallel).double()
        optimizer, losses = PerExpert(list(layer.experts.parameters())), []
        for step in range(6):
            x = torch.randn(40, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            optimizer.zero_grad()
            loss = (layer(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total))
            if move:
                by = 3 * (step + 1) % len(flat)
                turned = flat[by:] + flat[:by]
                width = start.slots_per_rank
                slots = tuple(tuple(turned[r * width : (r + 1) * width]) for r in range(size))
                move_experts(layer, ExpertPlacement(num_experts=moe.EXPERTS, slots=slots), [optimizer])
        found["moved" if move else "still"] = losses
    optimizer.state[layer.experts.down_proj]["shared"] = torch.zeros(3)
    before = layer.dispatcher.placement
    try:
        move_experts(layer, start, [optimizer])
    except UsageError as error:
        found["said"] = str(error)
    found["unmoved"] = layer.dispatcher.placement == before
    return found


def moves_alone_change_no_bit(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Without replicas, in float32: an expert computes the same wherever it is."""
    start = ExpertPlacement.contiguous(moe.EXPERTS, size)
    still = train(placed_layer(PLAIN, start), rank, size, 5, dtype=torch.float32)
    layer = placed_layer(PLAIN, start)

    def after(step: int, optimizer: Any) -> None:
        flat = [e for held in layer.dispatcher.placement.slots for e in held]
        flat = flat[3:] + flat[:3]
        width = start.slots_per_rank
        slots = tuple(tuple(flat[r * width : (r + 1) * width]) for r in range(size))
        move_experts(layer, ExpertPlacement(num_experts=moe.EXPERTS, slots=slots), [optimizer])

    return still, train(layer, rank, size, 5, after, dtype=torch.float32)


def bytes_of_replicas(rank: int, size: int) -> tuple[int, int]:
    """Metered, and ``2 (n-1)/n`` of an expert for each replica, over all ranks."""
    placement = placements(size)["mixed"]
    layer = placed_layer(PLAIN, placement)
    tokens, _ = moe.batch(moe.LENGTHS[:size])
    layer(tokens[rank]).sum().backward()
    sent = torch.tensor(layer.dispatcher.meter.total(["replicas"]))
    dist.all_reduce(sent)
    numbers = sum(p[0].numel() for p in layer.experts.parameters())
    counts = [len(placement.replicas(e)) for e in range(moe.EXPERTS)]
    return int(sent), sum(n * 2 * (n - 1) * -(-numbers // n) * 4 for n in counts if n > 1)


def recorded_over_ranks(rank: int, size: int) -> tuple[list[Any], list[int]]:
    """A trace of all ranks' tokens, and what each rank's router chose, added up."""
    layer = placed_layer(PLAIN, ExpertPlacement.contiguous(moe.EXPERTS, size))
    x = moe.batch(moe.LENGTHS[:size])[0][rank]
    with TraceRecorder(layer, group=dist.group.WORLD) as recorder:
        layer(x)
    wanted = layer.router(x).tokens_per_expert
    dist.all_reduce(wanted)
    return recorder.trace().counts.tolist(), wanted.tolist()


def reload(rank: int, size: int, folder: str) -> bool:
    """A checkpoint of one placement, loaded into others and into a whole layer."""
    kinds = placements(size)
    saved = placed_layer(PLAIN, kinds["mixed"])
    dcp.save(experts_apart(saved, saved.state_dict()), checkpoint_id=folder)
    whole = moe.make_layer(PLAIN)
    good = True
    for placement in kinds.values():
        layer = placed_layer(PLAIN, placement)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(-2.0)
        state = layer.state_dict()
        dcp.load(experts_apart(layer, state), checkpoint_id=folder)
        other = placed_layer(PLAIN, placement)
        other.load_state_dict(whole.state_dict())  # a rank takes its own experts
        for mine in (layer, other):
            for name, parameter in mine.experts.named_parameters():
                for slot, expert in enumerate(mine.experts.owned):
                    good &= expert == EMPTY or torch.equal(parameter[slot], whole.experts.get_parameter(name)[expert])
    return good


def wrong_moves(rank: int, size: int) -> list[str]:
    """What is said about moves that cannot be made."""
    mesh = DeviceMesh("cpu", list(range(size)))
    start = ExpertPlacement.contiguous(4, size, spare=1)
    layer = MoE(4, 4, 4, parallel=ExpertParallel(dispatcher=PlacedDispatcher(start, mesh)))
    said = []
    for attempt in (
        lambda: move_experts(MoE(4, 4, 4), start),
        lambda: move_experts(layer, ExpertPlacement.contiguous(4, size)),
        lambda: PlacedDispatcher(ExpertPlacement.contiguous(4, 1), mesh),
        lambda: Rebalancer(MoE(4, 4, 4), "flex"),
        lambda: layer(torch.zeros(2, 4), degree=2, partition="experts"),
    ):
        try:
            attempt()
        except UsageError as error:
            said.append(str(error))
    return said
