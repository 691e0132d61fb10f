"""What a rank holds, and how those who come get it: the model, its optimizer, and the step they have come to.

A step is committed in two phases. Every rank computes its gradients; then all add up the step's loss, and only who
has the sum takes the optimizer's step. Whoever has it knows that all have their gradients. So when ranks are lost on
the way, the others are at most one step apart, and those that are behind hold what they need to follow: no step that
anybody took is ever undone, and none is taken twice. Shape suffixes: B batch, T positions.
"""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

#: Every byte is a token.
VOCABULARY = 256
#: What AdamW keeps of a parameter, beside the number of its steps.
_KEPT = ("exp_avg", "exp_avg_sq")


class Embedding(nn.Module):
    """The bytes of a window as one vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_byte = nn.Embedding(VOCABULARY, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.of_byte(tokens_BT).flatten(1).clone()  # FSDP2 warns of views


def make_model(length: int, width: int, seed: int) -> nn.Sequential:
    """Guesses the byte after a window; in double precision, so that rounding stays far below 1e-5 for long."""
    torch.manual_seed(seed)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(8 * width, 8 * width), nn.Tanh())]
    into = [Embedding(width), nn.Linear(length * width, 8 * width), nn.Tanh()]
    return nn.Sequential(*into, *hidden, nn.Linear(8 * width, VOCABULARY)).double()


class Training:
    """A rank's part of the training, over whichever default group there is.

    Args:
        length, width: of windows, and of the model.
        shards: ranks that share one copy of the model (HSDP); 1: each has all of it (DDP).
        seed: of the model and the samples.
        learning_rate: of AdamW.

    Attributes:
        step: steps that were taken.
        pending: the gradients of the next step are complete, and whether it was taken elsewhere is not known.
        has_state: it has been in a group before.
    """

    def __init__(self, *, length: int, width: int, shards: int, seed: int, learning_rate: float) -> None:
        self.length, self.width, self.shards, self.seed = length, width, shards, seed
        self.learning_rate = learning_rate
        self.step = 0
        self.pending = self.has_state = False
        #: This rank's state while it joins: a new model has none, and a rank may be lost before it is given it.
        self._held: Tensor | None = None
        self._wrap(None)

    # -- a step -------------------------------------------------------------------------------------------

    def gradients(self, inputs: Tensor, targets: Tensor) -> float:
        """Compute them for this rank's part of a batch; its part of the batch's loss.

        Args:
            inputs, targets: of all ranks, ``[samples, length]`` and ``[samples]``.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = slice(rank, None, size)
        self._optimizer.zero_grad()
        total = functional.cross_entropy(self._model(inputs[mine]), targets[mine], reduction="sum") / len(inputs)
        (total * size).backward()  # DDP and FSDP2 average over ranks
        self.pending = True
        return float(total.detach())

    def take_step(self) -> None:
        """Take the step whose gradients are complete."""
        self._optimizer.step()
        self.pending = False
        self.step += 1

    # -- a new group --------------------------------------------------------------------------------------

    def join(self) -> int:
        """Come to the same step as the others of the default group, which has just been formed.

        Returns:
            How many ranks were given their state.

        Raises:
            RuntimeError: a part of the newest state is held by none of the members.
        """
        own = torch.tensor([self.step, int(self.pending)])
        everyones = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, own)
        steps = [said.tolist() for said in everyones]
        newest = max(step for step, _ in steps)
        has_it = [step == newest or (step == newest - 1 and bool(pending)) for step, pending in steps]
        if self.step == newest - 1 and self.pending:
            self.take_step()
        self.pending = False
        if self._held is None and self.step:
            self._held = self._pack()
        mesh = self._mesh()
        self._wrap(mesh)
        kept = self._held if self.step == newest else None
        if newest and not all(has_it):
            kept = self._share(kept, has_it, mesh)
        if newest and kept is not None:
            self._unpack(kept, newest)
        self.step, self.has_state, self._held = newest, True, None
        return has_it.count(False)

    def _mesh(self) -> DeviceMesh | None:
        if self.shards == 1:
            return None
        shape = (dist.get_world_size() // self.shards, self.shards)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))

    def _wrap(self, mesh: DeviceMesh | None) -> None:
        """Make model and optimizer for the default group."""
        model = make_model(self.length, self.width, self.seed)
        self._model: nn.Module = model
        if mesh is not None:
            for layer in model:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            self._model = fully_shard(model, mesh=mesh)
        elif dist.get_world_size() > 1:
            self._model = DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, foreach=False)

    def _share(self, kept: Tensor | None, has_it: list[bool], mesh: DeviceMesh | None) -> Tensor:
        """Have those without the state get it from one who holds the same part."""
        holders = list(range(dist.get_world_size()))
        group = None
        if mesh is not None:
            holders, group = holders[dist.get_rank() % self.shards :: self.shards], mesh.get_group("replica")
        source = next((number for number, rank in enumerate(holders) if has_it[rank]), None)
        if source is None:
            raise RuntimeError(f"none of ranks {holders} holds the newest state; begin from a checkpoint")
        like = self._pack(empty=True)
        vector = like if kept is None else kept
        if not all(has_it[rank] for rank in holders):
            dist.broadcast(vector, group=group, group_src=source)
        return vector

    # -- state as one vector: parameters, then what the optimizer keeps of each --------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        """This rank's own, as the optimizer has them.

        The model itself shows whole ones, gathered from all shards, of the layer that FSDP computes with, and keeps
        them when a rank is lost there.
        """
        own: list[nn.Parameter] = self._optimizer.param_groups[0]["params"]
        return own

    def _pack(self, *, empty: bool = False) -> Tensor:
        parts: list[Tensor] = []
        for parameter in self._parameters():
            own = _local(parameter.detach())
            state = {} if empty else self._optimizer.state[parameter]
            kept = [_local(state[key]) if key in state else torch.zeros_like(own) for key in _KEPT]
            parts += [part.flatten() for part in (own, *kept)]
        return torch.cat(parts).clone()

    @torch.no_grad()
    def _unpack(self, vector: Tensor, step: int) -> None:
        parameters = self._parameters()
        lengths = [3 * _local(parameter).numel() for parameter in parameters]
        for parameter, part in zip(parameters, vector.split(lengths), strict=True):  # of no other length than this
            own = _local(parameter)
            pieces = part.view(3, *own.shape)
            own.copy_(pieces[0])
            state = {key: _as(parameter, pieces[number].clone()) for number, key in enumerate(_KEPT, start=1)}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(parameter: Tensor, own: Tensor) -> Tensor:
    """This rank's part of a tensor that is shared out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return own
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
