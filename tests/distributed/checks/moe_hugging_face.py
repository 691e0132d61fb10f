"""What every rank runs for ``test_moe_hugging_face.py``: models with divided experts against whole eager ones."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mycel.errors import UsageError
from mycel.moe import (
    ExpertParallel,
    SwitchLoss,
    Tuner,
    apply,
    clip_grad_norm,
    experts_apart,
    full_state_dict,
    make_dispatcher,
    restore,
)
from mycel.moe.experts import parameters_of_experts
from mycel.moe.hugging_face import applied_to, register_expert_parallel, trainer_callback

_spec = importlib.util.spec_from_file_location(
    "hugging_face_models", Path(__file__).with_name("hugging_face_models.py")
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

#: Sentences of each rank: not equally many.
ROWS = (2, 1, 3, 2)


def mesh_for(dispatcher: str, size: int) -> DeviceMesh:
    if dispatcher == "hierarchical":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("node", "local"))
    return init_device_mesh("cpu", (size,))


def gathered(model: nn.Module, name: str) -> Tensor:
    """A gradient of the whole model: averaged over the ranks, or put together of their experts."""
    parameter = model.get_parameter(name)
    owned = parameters_of_experts(model).get(name)
    gradient = parameter.grad
    assert gradient is not None
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    if owned is None:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()
    path, _, leaf = name.rpartition(".")
    experts: Any = model.get_submodule(path)
    index, shards = experts.shard
    wholes = gradient.new_zeros(shards, models.EXPERTS, *gradient.shape[1:])
    copies = gradient.new_zeros(shards, models.EXPERTS)
    for slot, expert in enumerate(owned):
        if expert >= 0:
            wholes[index, expert], copies[index, expert] = gradient[slot], 1
    dist.all_reduce(wholes)
    dist.all_reduce(copies)  # replicas have the whole gradient each
    joined: Tensor = experts.cuts[leaf].join(
        (wholes / copies.view(*copies.shape, *[1] * (gradient.dim() - 1))).unbind()
    )
    return joined


def mean_gradients(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = [name for name in parts[0] if name not in ("logits", "loss")]
    return {name: torch.stack([part[name] for part in parts]).double().mean(0) for name in names}


def errors_of(
    rank: int, size: int, family: str, dispatcher: str, wrap: str = "", same: int = 1, **options: Any
) -> dict[str, float]:
    """Of logits and gradients of the mean of the ranks' losses, against the eager model in one process.

    With ``wrap``, DDP or FSDP2 averages gradients; ``same`` neighbouring ranks have the same tokens.

    Small gradients that are sums of large terms differ by more than 1e-6 between any two orders of summing in
    float32. Where ours does, it counts by its distance from the eager model in float64, in units of 2e-6 for every
    1e-6 that eager's own float32 result is away from that.
    """
    model = models.make(family)
    shared = dispatcher == "all_reduce"
    batches = [models.tokens(ROWS[r], 10, seed=20 + r) for r in range(1 if shared else size)]
    parts = [models.results(model, batch) for batch in batches]
    mine = 0 if shared else rank // same
    if same > 1:
        parts = parts[: size // same]
    wanted = {"logits": parts[mine]["logits"], **mean_gradients(parts)}
    mesh = mesh_for(dispatcher, size)
    if same > 1:
        mesh = init_device_mesh("cpu", (size // same, same), mesh_dim_names=("data", "tensor"))
        options["replicas"] = mesh["tensor"]
    if wrap == "fsdp":
        two = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "expert"))
        mesh = two["expert"]
    applied = apply(model, parallel=ExpertParallel(mesh, dispatcher=dispatcher, **options))
    if wrap == "fsdp":
        for block in applied.blocks:
            fully_shard(block.experts, mesh=two["data"])
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model.zero_grad()
    run = DistributedDataParallel(model) if wrap == "ddp" else model
    output = run(batches[mine], labels=batches[mine])
    output.loss.backward()
    logits = output.logits.detach()
    got = {"logits": logits} | {name: gathered(model, name) for name in wanted if name != "logits"}
    errors = {name: models.error(got[name], value) for name, value in wanted.items()}
    if max(errors.values()) > 1e-6:
        whole = models.make(family).double()
        exact = mean_gradients([models.results(whole, batch) for batch in batches])
        for name in [name for name in exact if errors[name] > 1e-6]:
            unit = 2 * models.error(wanted[name], exact[name])
            errors[name] = min(errors[name], models.error(got[name], exact[name]) / unit * 1e-6)
    return errors


def families(rank: int, size: int) -> dict[str, float]:
    """The worst error of every family and dispatcher, and whose it is."""
    worst = {}
    for family in models.FAMILIES:
        dispatchers = ["all_to_all"]
        if family in ("gpt_oss", "deepseek_v3"):
            dispatchers += ["all_gather", "all_reduce", *(["hierarchical"] if size == 4 else [])]
        for dispatcher in dispatchers:
            errors = errors_of(rank, size, family, dispatcher)
            name = max(errors, key=lambda n: errors[n])
            worst[f"{family} {dispatcher} {name}"] = errors[name]
    return worst


def sliced(rank: int, size: int, family: str) -> dict[str, Any]:
    """Slices of experts, chunks of tokens: errors by form, and whether the model comes together again bit for bit."""
    form: dict[str, Any] = {"tensor_shards": 2, "degree": 2}
    ways: dict[str, dict[str, Any]] = {
        "plain": form,
        "ddp": form | {"wrap": "ddp"},
        "fsdp": form | {"wrap": "fsdp"},
        "token replicas": form | {"same": 2, "dispatcher": "all_to_all"},
        "four slices": {"tensor_shards": 4},
        "gathered": form | {"dispatcher": "all_gather"},
    }
    errors = {}
    for name, options in ways.items():
        found = errors_of(rank, size, family, **{"dispatcher": "all_to_all"} | options)
        errors[name] = max(found.values())
    model = models.make(family)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = ExpertParallel(init_device_mesh("cpu", (size,)), **form)
    applied = apply(model, parallel=parallel)
    held = {
        name: value.shape[0] for name, value in model.state_dict().items() if name in parameters_of_experts(model)
    }
    numbers = sum(p.numel() for n, p in model.named_parameters() if n in held)
    applied.close()
    out: dict[str, Any] = {"errors": errors}
    out["untouched"] = all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    out["a quarter of the numbers"] = numbers * size == sum(start[name].numel() for name in held)
    try:
        applied.close()
        out["closed twice"] = False
    except UsageError as error:
        out["closed twice"] = "taken back before" in str(error)
    # A step of training, and the whole state of it, which restore gives as well.
    applied = apply(model, parallel=parallel)
    batch = models.tokens(2, 10, seed=50 + rank)
    model(batch, labels=batch).loss.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                if name not in held:
                    dist.all_reduce(gradient)
                parameter -= 0.1 * gradient
    norm, trained = clip_grad_norm(model, 1.0), full_state_dict(model)
    whole = models.make(family)
    for name, parameter in whole.named_parameters():
        parameter.grad = gathered(model, name)
    out["clipped"] = (float(norm), float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])))
    restore(model)
    after = model.state_dict()
    out["trained"] = list(after) == list(start) and all(torch.equal(after[n], trained[n]) for n in start)
    out["changed"] = all(not torch.equal(after[name], start[name]) for name in held)
    out["all ranks alike"] = same_on_all_ranks({name: after[name] for name in held})
    apply(model, parallel=parallel)
    model.load_state_dict(start)
    restore(model)
    out["loaded"] = all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    return out


def tuned(rank: int, size: int, family: str) -> dict[str, Any]:
    """A model whose layers choose their schedules: how far its logits are off while they try, and what they say."""
    model, whole = models.make(family), models.make(family)
    tuner = Tuner(degrees=(1, 2), finalists=3, trials=1)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("node", "local"))
    applied = apply(model, parallel=ExpertParallel(mesh, tensor_shards=2, tuner=tuner))
    batch = models.tokens(2, 10, seed=60 + rank)
    exact = whole(batch).logits
    apart = 0.0
    for _ in range(24):
        output = model(batch, labels=batch)
        apart = max(apart, models.error(output.logits, exact))
        output.loss.backward()
    said = applied.explain()
    tables = [block.experts.mycel_experts.chooser.table for block in applied.blocks]
    tried = [len(choice.measured_s) for table in tables for choice in table.values()]
    restore(model)
    return {"apart": apart, "said": said.replace("\n", " | "), "tried": tried}


def same_on_all_ranks(state: dict[str, Tensor]) -> bool:
    good = True
    for value in state.values():
        of_first = value.clone()
        dist.broadcast(of_first, 0)
        good &= torch.equal(of_first, value)
    return good


def train_and_restore(rank: int, size: int, family: str) -> dict[str, Any]:
    """Three steps with divided experts, clipped, and the model put together again."""
    model, whole = models.make(family), models.make(family)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    apply(model, parallel=init_device_mesh("cpu", (size,)))
    restore(model)
    untouched = all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    apply(model, parallel=init_device_mesh("cpu", (size,)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, whole)]
    norms = []
    for step in range(3):
        batches = [models.tokens(2, 10, seed=40 + step * size + r) for r in range(size)]
        models.results(model, batches[rank])
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name not in parameters_of_experts(model):
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        norm = clip_grad_norm(model, 0.5)
        whole.zero_grad()
        torch.stack([whole(batch, labels=batch).loss for batch in batches]).mean().backward()
        norms.append((float(norm), float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5))))
        for optimizer in optimizers:
            optimizer.step()
    held = {n: p.detach().clone() for n, p in model.named_parameters()}
    owned = parameters_of_experts(model)
    restore(model)
    after = model.state_dict()
    own = all(
        torch.equal(after[n][owned[n].start : owned[n].stop] if n in owned else after[n], p) for n, p in held.items()
    )
    return {
        "untouched": untouched,
        "own experts are what they were": own and len(held) > len(owned) > 0,
        "all ranks alike": same_on_all_ranks(after),
        "names": list(after) == list(start) and all(after[n].shape == v.shape for n, v in start.items()),
        "norms": norms,
        "errors": max(models.error(after[n], value) for n, value in whole.state_dict().items()),
    }


def checkpoints(rank: int, size: int, folder: str) -> dict[str, bool]:
    """States of divided experts, saved and loaded in three ways."""
    from transformers import AutoModelForCausalLM

    found = {}
    mesh = init_device_mesh("cpu", (size,))
    model, other = models.make("gpt_oss"), models.make("gpt_oss", seed=2)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    apply(model, parallel=mesh)
    state = full_state_dict(model)
    found["full"] = state.keys() == wanted.keys() and all(torch.equal(state[n], v) for n, v in wanted.items())
    try:
        model.save_pretrained(folder)
        found["refused"] = False
    except UsageError as error:
        found["refused"] = "full_state_dict" in str(error)
    if rank == 0:
        model.save_pretrained(folder, state_dict=dict(state))  # it empties what it is given
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found["pretrained"] = all(torch.equal(v, wanted[n]) for n, v in loaded.state_dict().items())
    # A whole state into divided experts; each rank takes its own.
    apply(other, parallel=mesh)
    other.load_state_dict(state)
    found["whole into parts"] = all(torch.equal(v, model.state_dict()[n]) for n, v in other.state_dict().items())
    # Distributed checkpoints, expert by expert, into another division.
    dcp.save(experts_apart(model, model.state_dict()), checkpoint_id=f"{folder}/apart")
    whole = models.make("gpt_oss", seed=3)
    apply(whole)
    for block in applied_to(whole).blocks:
        block.experts.owned = range(models.EXPERTS)
    parts = whole.state_dict()
    dcp.load(experts_apart(whole, parts), checkpoint_id=f"{folder}/apart")
    found["apart"] = all(torch.equal(parts[n], v) for n, v in wanted.items())
    return found


def generation(rank: int, size: int) -> bool:
    """Sentences of different lengths on each rank; those that are done go on for the others."""
    model = models.make("qwen3_moe").eval()
    whole = copy.deepcopy(model)
    apply(model, parallel=init_device_mesh("cpu", (size,)))
    options: dict[str, Any] = {"max_new_tokens": 3 + 2 * rank, "do_sample": False}
    prompt = models.tokens(1, 4, seed=rank)
    options["attention_mask"] = torch.ones_like(prompt)
    return torch.equal(model.generate(prompt, synced_gpus=True, **options), whole.generate(prompt, **options))


def trainer(rank: int, size: int, folder: str) -> dict[str, Any]:
    """The ``Trainer`` with divided experts and with whole ones: DDP, clipping and accumulation in both."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    options = {"gradient_accumulation_steps": 2, "optim": "sgd"}
    whole = models.make("deepseek_v3")
    apply(whole, balancing=SwitchLoss(1e-2))
    wanted = models.train(whole, folder, **options)
    restore(whole)
    model = models.make("deepseek_v3")
    apply(model, parallel=init_device_mesh("cpu", (size,)), balancing=SwitchLoss(1e-2))
    said = ""
    try:
        trainer_callback(model).on_train_begin(_arguments("steps"))
    except UsageError as error:
        said = str(error)
    got = models.train(model, folder, callbacks=[trainer_callback(model)], **options)
    sent = applied_to(model).meter.total()
    restore(model)
    final = whole.state_dict()
    error = max(models.error(v, final[n]) for n, v in model.state_dict().items())
    return {
        "wanted": wanted,
        "got": got,
        "error": error,
        "alike": same_on_all_ranks(model.state_dict()),
        "sent": sent,
        "said": said,
    }


def _arguments(strategy: str) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(use_cpu=True, save_strategy=strategy, report_to=[])


def library_parallelism(rank: int, size: int, folder: str) -> dict[str, float]:
    """A model that the library divides while it loads it, its tokens exchanged by mycel."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    whole = models.make("mixtral")
    if rank == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    batches = [models.tokens(2, 10, seed=20 + r) for r in range(size)]
    parts = [models.results(whole, batch) for batch in batches]
    register_expert_parallel("mycel")
    config = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation="mycel")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, attn_implementation="eager")
    output = model(batches[rank], labels=batches[rank])
    output.loss.backward()
    errors = {"logits": models.error(output.logits, parts[rank]["logits"])}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        errors[name] = models.error(gradient, torch.stack([p[name] for p in parts]).mean(0))
    return errors


def codecs(rank: int, size: int) -> dict[str, float]:
    """bf16 on the wire: the bytes of rows halve, the logits stay near."""
    exact = models.make("olmoe")(models.tokens(2, 10)).logits
    found = {}
    for codec in ("identity", "bf16"):
        model = models.make("olmoe")
        applied = apply(model, parallel=ExpertParallel(init_device_mesh("cpu", (size,)), codec=codec))
        found[f"{codec} error"] = models.error(model(models.tokens(2, 10)).logits, exact)
        found[f"{codec} bytes"] = applied.meter.total(["dispatch", "combine"])
    return found


def sharded_further(rank: int, size: int) -> dict[str, Any]:
    """Experts divided over two ranks and sharded over two others by FSDP2, the rest sharded over all."""
    model, whole = models.make("gpt_oss"), models.make("gpt_oss")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [models.tokens(ROWS[r], 10, seed=20 + r) for r in range(size)]
    wanted = mean_gradients([models.results(whole, batch) for batch in batches])
    for name, parameter in whole.named_parameters():
        parameter.grad = wanted[name].float()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "expert"))
    for block in apply(model, parallel=mesh["expert"]).blocks:
        fully_shard(block.experts, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model(batches[rank], labels=batches[rank]).loss.backward()
    errors = {name: models.error(gathered(model, name), value) for name, value in wanted.items()}
    norms = [float(clip_grad_norm(model, 0.1)), float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))]
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        errors[f"{name} clipped"] = models.error(gathered(model, name), parameter.grad)
    state = full_state_dict(model)
    try:
        restore(model)
        said = ""
    except UsageError as error:
        said = str(error)
    same = state.keys() == start.keys() and all(torch.equal(state[name], value) for name, value in start.items())
    return {"errors": errors, "norms": norms, "state": same, "said": said}


def placed(rank: int, size: int) -> dict[str, Any]:
    """Experts in slots of a placement: out of order, one of them on every rank, some slots empty."""
    from mycel.moe.placement import PlacedDispatcher, move_experts
    from mycel.planning.placement import EMPTY, ExpertPlacement

    model = models.make("gpt_oss")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [models.tokens(ROWS[r], 10, seed=20 + r) for r in range(size)]
    parts = [models.results(model, batch) for batch in batches]
    wanted = mean_gradients(parts)
    mesh = init_device_mesh("cpu", (size,))
    held = [[e for e in range(models.EXPERTS) if e % size == r and e != 3] + [3, EMPTY] for r in range(size)]
    width = max(len(some) for some in held)
    slots = tuple(tuple(some + [EMPTY] * (width - len(some))) for some in held)
    placement = ExpertPlacement(num_experts=models.EXPERTS, slots=slots)
    applied = apply(model, parallel=ExpertParallel(mesh, dispatcher=lambda _: PlacedDispatcher(placement, mesh)))
    errors = {}
    moved = ExpertPlacement.contiguous(models.EXPERTS, size, spare=width - -(-models.EXPERTS // size))
    for when, wish in (("before", placement), ("after", moved)):
        if when == "after":
            for block in applied.blocks:
                move_experts(block, wish)
        logits = models.results(model, batches[rank])["logits"]
        errors |= {f"{when} {name}": models.error(gathered(model, name), value) for name, value in wanted.items()}
        errors[f"{when} logits"] = models.error(logits, parts[rank]["logits"])
    restore(model)
    return {
        "errors": errors,
        "restored": all(torch.equal(value, start[name]) for name, value in model.state_dict().items()),
    }


def refusals(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    said = []
    strange, narrow = models.make("gpt_oss"), models.make("olmoe")
    kind: Any = type(strange.model.layers[0].mlp.experts)
    kind._apply_gate = lambda self, z: z.cumsum(-1)[..., 1::2]  # in this process only
    calls: list[tuple[Any, dict[str, Any]]] = [
        (models.make("mixtral", seed=rank), {}),
        (models.make("mixtral"), {"dispatcher": "hierarchical"}),
        (strange, {"tensor_shards": size}),
        (narrow, {"tensor_shards": 3}),
        (models.make("mixtral"), {"dispatcher": make_dispatcher("all_to_all", models.EXPERTS, mesh)}),
    ]
    for model, options in calls:
        try:
            apply(model, parallel=ExpertParallel(mesh, **options))
        except UsageError as error:
            said.append(str(error))
        assert model.config._experts_implementation == "eager"
    return said
