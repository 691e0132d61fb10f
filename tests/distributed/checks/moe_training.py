"""What every rank runs for ``test_moe_training.py``: divided experts within wrappers, adapters, norms, passes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from mycel.errors import UsageError
from mycel.moe import (
    ExpertParallel,
    MoE,
    TiledOptimizer,
    Tuner,
    apply,
    clip_grad_norm,
    expert_parameter_names,
    full_state_dict,
)
from mycel.moe.memory import EmulatedLink, Offload, TrainingOffload, pre_gate
from mycel.moe.placement import PlacedDispatcher
from mycel.planning.placement import ExpertPlacement

EXPERTS, DIM, RANK = 8, 6, 2


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Wrapped(nn.Module):
    """Something between DDP and the layer, as PEFT, value heads and people's own models are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def wrapped(parallel: Any = None, **options: Any) -> Wrapped:
    torch.manual_seed(4)
    return Wrapped(nn.Sequential(nn.Linear(DIM, DIM), MoE(DIM, 8, EXPERTS, 2, parallel=parallel, **options)))


def rows(rank: int, seed: int = 0) -> Tensor:
    return torch.randn(9, DIM, generator=torch.Generator().manual_seed(100 * seed + rank))


def held(whole: Tensor, owned: Any) -> Tensor:
    return whole[[max(0, expert) for expert in owned]]


def experts_stay(rank: int, size: int) -> dict[str, Any]:
    """Within any wrapper DDP neither broadcasts nor averages experts, and all gradients are those of one process."""
    model, whole = wrapped(DeviceMesh("cpu", list(range(size)))), wrapped()
    before = model.inner[1].experts.gate_up_proj.detach().clone()
    ddp = DistributedDataParallel(model)
    stayed = torch.equal(model.inner[1].experts.gate_up_proj, before)
    ddp(rows(rank)).square().mean().backward()
    torch.stack([whole(rows(r)).square().mean() for r in range(size)]).mean().backward()
    errors = {}
    for name, parameter in model.named_parameters():
        wanted = whole.get_parameter(name).grad
        assert wanted is not None and parameter.grad is not None
        wanted = held(wanted, model.inner[1].experts.owned) if ".experts." in name else wanted
        errors[name] = float((parameter.grad - wanted).norm() / wanted.norm())
    return {"stayed": stayed, "names": expert_parameter_names(ddp), "errors": errors}


def refused(rank: int, size: int) -> list[str]:
    """DDP where it can neither average experts nor leave them, and where nothing is left to average."""
    pairs = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "expert"))
    said = []
    only = wrapped(DeviceMesh("cpu", list(range(size))))
    for name, parameter in only.named_parameters():
        parameter.requires_grad_(".experts." in name)
    for model in (wrapped(pairs["expert"]), only):
        try:
            DistributedDataParallel(model)
        except UsageError as error:
            said.append(str(error))
    copies = wrapped(pairs["expert"])
    with torch.no_grad():
        copies.inner[1].experts.down_proj.add_(rank)
    DistributedDataParallel(copies, process_group=pairs.get_group("data"))  # over copies it is right
    gathered = [torch.empty_like(copies.inner[1].experts.down_proj) for _ in range(size)]
    dist.all_gather(gathered, copies.inner[1].experts.down_proj.detach())
    same = torch.equal(gathered[0], gathered[2]) and torch.equal(gathered[1], gathered[3])
    return [*said, f"copies alike: {same}"]


# -- adapters --------------------------------------------------------------------------------------------------


class Delta(nn.Module):
    """A low-rank change of stacked weights, for ``torch.nn.utils.parametrize``."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Around(nn.Module):
    """Stands in the place of experts and changes them while they are called, as PEFT's ``target_parameters`` do."""

    def __init__(self, base_layer: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base_layer, self.lora = base_layer, Delta(a, b)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parametrize.register_parametrization(self.base_layer, "down_proj", self.lora)
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "down_proj", leave_parametrized=False)


class Lora(nn.Module):
    def __init__(self, base_layer: Any, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base_layer, self.lora = base_layer, Delta(a, b)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.lora(self.base_layer.weight))


def low_rank(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    like: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.randn(*shape[:-2], RANK, shape[-1], **like) * 0.1, torch.randn(*shape[:-1], RANK, **like) * 0.1


def with_adapters(model: nn.Module, num_experts: int) -> None:
    """LoRA on attention and on both maps of the experts, of which a rank takes those of the experts that it holds."""
    generator = torch.Generator().manual_seed(5)
    model.requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, block = layer.self_attn, layer.mlp
        for name in ("q_proj", "v_proj"):
            base = getattr(attention, name)
            setattr(attention, name, Lora(base, *low_rank(tuple(base.weight.shape), generator)))
        owned = getattr(block.experts, "owned", range(num_experts))
        first, second = (
            [held(t, owned) for t in low_rank((num_experts, *getattr(block.experts, name).shape[1:]), generator)]
            for name in ("gate_up_proj", "down_proj")
        )
        parametrize.register_parametrization(block.experts, "gate_up_proj", Delta(*first))
        block.experts = Around(block.experts, *second)


def lora(rank: int, size: int) -> dict[str, Any]:
    """A Mixtral-like model, divided and under DDP, against one process."""
    models = loaded("hugging_face_models")
    model, whole = models.make("mixtral").double().train(), models.make("mixtral").double().train()
    apply(model, parallel=DeviceMesh("cpu", list(range(size))))
    with_adapters(model, models.EXPERTS)
    with_adapters(whole, models.EXPERTS)
    owned = model.model.layers[0].mlp.experts.base_layer.owned
    apart = expert_parameter_names(model)
    before = {name: model.get_parameter(name).detach().clone() for name in apart}
    ddp = DistributedDataParallel(Outer(model))
    stayed = all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, whole)]
    losses = []
    for step in range(3):
        batches = [models.tokens(2, 10, seed=40 + step * size + r) for r in range(size)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = ddp(batches[rank])
        loss.backward()
        wanted = torch.stack([whole(batch, labels=batch).loss for batch in batches])
        wanted.mean().backward()
        losses.append(abs(float(loss / wanted[rank]) - 1))
        norms = [float(clip_grad_norm(model, 0.5)), float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5))]
        losses.append(abs(norms[0] / norms[1] - 1))
        for optimizer in optimizers:
            optimizer.step()
    far = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            other = whole.get_parameter(name).detach()
            other = held(other, owned) if name in apart else other
            far[name] = float((parameter - other).norm() / other.norm())
    try:
        full_state_dict(model)
        said = ""
    except UsageError as error:
        said = str(error)
    return {"stayed": stayed, "apart": len(apart), "losses": losses, "far": far, "said": said}


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens, labels=tokens).loss
        return loss


# -- one norm --------------------------------------------------------------------------------------------------


def divisions(size: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", list(range(size)))
    placement = ExpertPlacement.contiguous(EXPERTS, size, spare=1)
    slots = tuple((*some[:-1], 0 if 0 not in some else -1) for some in placement.slots)  # expert 0 is everywhere
    placed = PlacedDispatcher(ExpertPlacement(num_experts=EXPERTS, slots=slots), mesh)
    return {
        "whole": ExpertParallel(mesh),
        "slices": ExpertParallel(mesh, tensor_shards=2),
        "replicas": ExpertParallel(dispatcher=placed),
    }


def one_norm(rank: int, size: int) -> dict[str, Any]:
    """Clipped by the norm that one process would clip by, however parameters are divided; and states put together."""
    whole = wrapped()
    torch.stack([whole(rows(r)).square().mean() for r in range(size)]).mean().backward()
    wanted = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.01))
    pairs = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "expert"))
    found: dict[str, Any] = {}
    for kind, parallel in {**divisions(size), "sharded": pairs["expert"], "nowhere": None}.items():
        model = wrapped(parallel)
        run: Any = model
        if kind == "sharded":  # over two meshes, the head over none
            fully_shard(model.inner[1].experts, mesh=pairs["data"])
            fully_shard(model.inner, mesh=init_device_mesh("cpu", (size,)))
            run(rows(rank)).square().mean().backward()
            for parameter in model.head.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        else:
            run = DistributedDataParallel(model)
            run(rows(rank)).square().mean().backward()
        norm = float(clip_grad_norm(run, 0.01))
        scale = whole.head.weight.grad
        assert scale is not None and model.head.weight.grad is not None
        clipped = float((model.head.weight.grad - scale).norm() / scale.norm())
        full = full_state_dict(model)
        put_together = all(torch.equal(full[name], value) for name, value in wrapped().state_dict().items())
        found[kind] = (abs(norm / wanted - 1), clipped, put_together)
    return found


# -- recomputation ---------------------------------------------------------------------------------------------


def plans_of_passes(rank: int, size: int) -> dict[str, float]:
    """Passes under way while a tuner tries plans, computed again in any order: each by its own plan."""
    torch.manual_seed(3)
    mesh = DeviceMesh("cpu", list(range(size)))
    tuner = Tuner(degrees=(1, 2, 4), trials=3)
    layers = [MoE(DIM, 8, EXPERTS, 2, parallel=p) for p in (mesh, ExpertParallel(mesh, tuner=tuner))]
    layers[1].load_state_dict(layers[0].state_dict())
    found = []
    for wants in (False, True):  # tokens that need no gradient, as with frozen layers below, and others
        grads: list[list[Tensor]] = []
        for layer in layers:
            layer.zero_grad()
            waiting: list[Tensor] = []
            for step in range(14):
                x = rows(rank, step).requires_grad_(wants)
                waiting.append(checkpoint(layer, x, use_reentrant=False).square().sum() * (step + 1))
                if len(waiting) == 3:
                    waiting.pop(step % 3).backward()
            torch.stack(waiting).sum().backward()
            grads.append([p.grad for p in layer.parameters() if p.grad is not None])
        found.append(max(float((a - b).norm() / b.norm()) for a, b in zip(grads[1], grads[0], strict=True)))
    tried = max(len(choice.measured_s) for choice in layers[1].chooser.table.values())
    return {"frozen": found[0], "wanted": found[1], "tried": tried}


class Deep(nn.Module):
    """Blocks whose experts are divided, one after the other."""

    def __init__(self, parallel: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(MoE(DIM, 8, EXPERTS, 2, shared_hidden=4, parallel=parallel) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def far(rank: int, size: int) -> dict[str, Any]:
    """Divided experts in far memory: inference with gates ahead, and training under DDP."""
    mesh = DeviceMesh("cpu", list(range(size)))
    link, x = EmulatedLink(bandwidth_gbps=100), rows(rank)
    whole, divided = Deep(), Deep(mesh)
    pre_gate(whole)
    gated = pre_gate(divided)
    with torch.inference_mode():
        wanted = whole(x)
        with Offload(divided, link, "pre_gated") as offload:
            inference = [float((divided(x) - wanted).norm() / wanted.norm())]
            store = offload.store
            found = {"near": store.peak, "of": store.num_experts, "fetched": store.fetched}
    gated.close()
    model = loaded("hugging_face_models").make("mixtral").eval()
    apply(model)
    pre_gate(model)
    tokens = torch.arange(2, 14).view(2, 6) + rank
    with torch.inference_mode():
        wanted = model(tokens).logits
        other = loaded("hugging_face_models").make("mixtral").eval()
        apply(other, parallel=mesh)
        pre_gate(other)
        with Offload(other, link, "pre_gated"):
            inference.append(float((other(tokens).logits - wanted).norm() / wanted.norm()))
    trained, norms = [], []
    for is_far in (False, True):
        inner = Deep(mesh)
        ddp = DistributedDataParallel(inner)
        offload = TrainingOffload(ddp, link) if is_far else None
        optimizer = torch.optim.AdamW(ddp.parameters() if offload is None else offload.parameters(), lr=0.01)
        for step in range(3):
            ddp(rows(rank, step)).square().mean().backward()
            norms.append(clip_grad_norm(ddp, 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
        whole_state = full_state_dict(ddp)
        if offload is not None:
            offload.close()
        trained.append(list(whole_state.values()))
    link.close()
    same = all(torch.equal(a, b) for a, b in zip(*trained, strict=True)) and norms[:3] == norms[3:]
    return {**found, "inference": inference, "same": same}


def tiled(rank: int, size: int) -> bool:
    """Steps in tiles over FSDP2's shards, which some ranks have none of: the bits of torch's own."""
    mesh = init_device_mesh("cpu", (size,))
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(6)
        models.append(nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 1)))
        fully_shard(models[-1], mesh=mesh)
    own = TiledOptimizer(models[0].parameters(), torch.optim.AdamW, tile=256, lr=0.01)
    optimizers = [own, torch.optim.AdamW(models[1].parameters(), lr=0.01)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(7, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same = []
    for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
        moments = [o.state[p]["exp_avg"].to_local() for o, p in zip(optimizers, (mine, theirs), strict=True)]
        same += [torch.equal(mine.to_local(), theirs.to_local()), torch.equal(*moments)]
    return all(same)
