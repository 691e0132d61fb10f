"""Messages between the stages of a pipeline: buffers just in time, sends let go when they are through, deadlines.

Between two ranks messages arrive in the order in which they are sent, and nothing else says which is which: an order
has the receives of each pair of ranks in the sequence of its sends. What is received, its shape and type, is said
once by a header before the first message from stage to stage; a receive that cannot know it yet is put off, with all
that come after it from the same rank, until somebody needs one of them. So no stage is run just to learn shapes.

A receive buffer exists from when the order posts the receive until the backward that uses it has let go of it. A sent
tensor is let go when the backend says that it is through. Gloo says so only to who waits; there it is let go when
something has come back that its receiver made after it had used it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mycel.errors import ScheduleError, UsageError
from mycel.pipeline.order import Action, Kind

__all__ = ["Alive", "Messages", "Shape"]

#: Whole numbers of a header, and the types that it can name, by their place.
_HEADER = 256
_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What has to be known of a tensor before it can be received.

    Attributes:
        sizes: of its dimensions.
        dtype: of its elements.
        wants_grad: whether a gradient goes back for it.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Of a stage's output."""
        return cls(sizes=tuple(tensor.shape), dtype=tensor.dtype, wants_grad=tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.sizes))}]"


class Alive:
    """How many tensors exist of those that were counted, and how many there were at once; by their memory, not by
    the program's opinion of it.

    Attributes:
        now: how many exist.
        most: the most at once.
        num_bytes: of those that exist.
        most_bytes: the most at once.
    """

    def __init__(self) -> None:
        self.now = self.most = self.num_bytes = self.most_bytes = 0

    def count(self, tensor: Tensor) -> Tensor:
        """Count a new tensor until its memory is given back."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.now += 1
        self.num_bytes += size
        self.most, self.most_bytes = max(self.most, self.now), max(self.most_bytes, self.num_bytes)
        weakref.finalize(storage, self._gone, size).atexit = False
        return tensor

    def _gone(self, size: int) -> None:
        self.now -= 1
        self.num_bytes -= size

    def restart(self) -> None:
        """Forget what was the most, and begin with what exists."""
        self.most, self.most_bytes = self.now, self.num_bytes


@dataclass(slots=True)
class _Sent:
    action: Action
    works: list[dist.Work]
    tensors: list[Tensor]


#: From one stage to another; the messages of one such pair all look alike.
_Edge = tuple[int, int]


class Messages:
    """What one rank sends and receives while it carries out an order.

    Args:
        group: the ranks of the pipeline.
        device: where buffers are made.
        answered: by an action that receives: how many of the messages sent to that rank are certainly used there when
            it has come.
        timeout_s: for each wait; ``None``: the group's own.

    Attributes:
        received: receive buffers in existence.
        sent: messages that are not known to be through, now and at most.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        answered: Mapping[Action, int],
        timeout_s: float | None,
    ) -> None:
        self._group, self._device, self._answered = group, device, answered
        self._limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._shapes: dict[tuple[_Edge, bool], tuple[Shape, ...]] = {}
        self._posted: dict[Action, tuple[list[dist.Work], tuple[Tensor | None, ...]]] = {}
        self._put_off: defaultdict[int, deque[tuple[Action, _Edge]]] = defaultdict(deque)
        self._on_the_way: defaultdict[int, deque[_Sent]] = defaultdict(deque)
        self._let_go: defaultdict[int, int] = defaultdict(int)
        self._tells = device.type != "cpu" or "gloo" not in dist.get_backend(group)
        self.received, self.sent, self.most_sent = Alive(), 0, 0

    def restart(self) -> None:
        """Before a step: what the last one has left counts no more."""
        self._posted.clear()
        self._put_off.clear()
        self._on_the_way.clear()
        self._let_go.clear()
        self.received.restart()
        self.sent = self.most_sent = 0

    # -- sending --------------------------------------------------------------------------------------------

    def send_outputs(
        self, action: Action, edge: _Edge, rank: int, outputs: Sequence[Tensor], *, trains: bool
    ) -> None:
        """Begin to send a stage's outputs, with a header the first time.

        Args:
            action: whose turn it is.
            edge: from which stage to which.
            rank: that has the other stage.
            outputs: of the stage.
            trains: whether gradients will come back.

        Raises:
            UsageError: what cannot be sent, or is of another shape than in the first step.
        """
        shapes = tuple(self._shape(action, position, value) for position, value in enumerate(outputs))
        known = self._shapes.get((edge, trains))
        works = []
        tensors = []
        if known is None:
            header = _header_of(action, shapes).to(self._device)
            tensors.append(header)
            works.append(self._begin(dist.isend, header, rank))
            self._shapes[edge, trains] = shapes
        elif known != shapes:
            raise UsageError(
                f"{action}: sends {', '.join(map(str, shapes))}, and sent {', '.join(map(str, known))} in the first "
                "step; all micro-batches have the same shape: leave a smaller batch out, or make a new Pipeline"
            )
        for output in outputs:
            tensors.append(output.detach().contiguous())
            works.append(self._begin(dist.isend, tensors[-1], rank))
        self._keep(rank, _Sent(action, works, tensors))

    def send_grads(self, action: Action, rank: int, inputs: Sequence[Shape], grads: Sequence[Tensor | None]) -> None:
        """Begin to send the gradients of a stage's inputs; zeros of those that nothing has depended on.

        Args:
            action: whose turn it is.
            rank: that has the stage before.
            inputs: of the stage.
            grads: of the inputs.
        """
        tensors = []
        for shape, grad in zip(inputs, grads or [None] * len(inputs), strict=True):
            if shape.wants_grad:
                own = torch.zeros(shape.sizes, dtype=shape.dtype, device=self._device) if grad is None else grad
                tensors.append(own.detach().contiguous())
        self._keep(rank, _Sent(action, [self._begin(dist.isend, each, rank) for each in tensors], tensors))

    def _shape(self, action: Action, position: int, value: object) -> Shape:
        if isinstance(value, DTensor):
            raise UsageError(
                f"{action}: output {position} is a DTensor; between stages go plain tensors: end the stage with "
                "to_local(), or parallelize its last layer with use_local_output=True"
            )
        if not isinstance(value, Tensor):
            raise UsageError(f"{action}: output {position} is a {type(value).__name__}; stages hand on tensors")
        if value.dtype not in _TYPES:
            raise UsageError(f"{action}: output {position} is of {value.dtype}, which no message is made for")
        return Shape.of(value)

    def _begin(self, operation: Callable[..., dist.Work | None], tensor: Tensor, rank: int) -> dist.Work:
        key = "group_dst" if operation is dist.isend else "group_src"
        work = operation(tensor, group=self._group, **{key: rank})
        if work is None:
            raise UsageError("this rank is not among those of the pipeline's group")
        return work

    def _keep(self, rank: int, sent: _Sent) -> None:
        self._on_the_way[rank].append(sent)
        self.sent += 1
        self.most_sent = max(self.most_sent, self.sent)

    def let_go(self) -> None:
        """Forget what is through, so that its memory can be used again."""
        if self._tells:
            for waiting in self._on_the_way.values():
                while waiting and all(work.is_completed() for work in waiting[0].works):
                    self._finish(waiting)

    def _finish(self, waiting: deque[_Sent]) -> None:
        sent = waiting.popleft()
        for work in sent.works:
            self._wait(work)
        self.sent -= 1

    def _has_answered(self, action: Action, rank: int) -> None:
        """With this message it is known that so many of ours to its sender were used."""
        waiting = self._on_the_way[rank]
        count = self._answered.get(action, 0)
        while self._let_go[rank] < count and waiting:
            self._let_go[rank] += 1
            if not self._tells:
                self._finish(waiting)

    def finish(self) -> None:
        """At a step's end: return when everything that was sent is through."""
        for waiting in self._on_the_way.values():
            while waiting:
                self._finish(waiting)

    @property
    def unfinished(self) -> Iterable[tuple[int, Action]]:
        """Messages that are not known to be through, with the ranks they go to."""
        return [(rank, sent.action) for rank, waiting in self._on_the_way.items() for sent in waiting]

    # -- receiving ------------------------------------------------------------------------------------------

    def post(self, action: Action, edge: _Edge, rank: int, *, trains: bool) -> None:
        """Make a buffer and begin to receive, as soon as it is known what will come.

        Args:
            action: whose turn it is.
            edge: from which stage to which, in the direction of forwards, also of what comes back.
            rank: that sends.
            trains: whether gradients go back.
        """
        self._put_off[rank].append((action, edge))
        self._advance(rank, trains=trains)

    def _advance(self, rank: int, *, trains: bool, until: Action | None = None) -> None:
        """Post what can be; up to ``until``, which somebody needs now, also what a header has to be awaited for."""
        waiting = self._put_off[rank]
        while waiting:
            action, edge = waiting[0]
            is_forward = action.kind is Kind.RECV_F
            found = self._shapes.get((edge, trains))
            if found is None:
                if until is None:
                    return
                if not is_forward:
                    raise ScheduleError(
                        f"{until} is sent after {action} by rank {rank}, and that after what this rank has not sent"
                    )
                header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
                self._wait(self._begin(dist.irecv, header, rank))
                found = self._shapes[edge, trains] = _shapes_of(header)
            waiting.popleft()
            wanted = [is_forward or shape.wants_grad for shape in found]
            tensors = tuple(
                self.received.count(torch.empty(shape.sizes, dtype=shape.dtype, device=self._device))
                if some
                else None
                for shape, some in zip(found, wanted, strict=True)
            )
            works = [self._begin(dist.irecv, each, rank) for each in tensors if each is not None]
            self._posted[action] = works, tensors
            if action == until:
                until = None

    def take(self, action: Action, rank: int, *, trains: bool) -> tuple[Tensor | None, ...]:
        """Wait for what a receive was posted for.

        Args:
            action: that posted it.
            rank: that sends.
            trains: whether gradients go back.
        """
        if action not in self._posted:
            self._advance(rank, trains=trains, until=action)
        works, tensors = self._posted.pop(action)
        for work in works:
            self._wait(work)
        self._has_answered(action, rank)
        return tensors

    def shapes_from(self, edge: _Edge, *, trains: bool) -> tuple[Shape, ...]:
        """Of the outputs that have come, or gone, from a stage to another."""
        return self._shapes[edge, trains]

    def _wait(self, work: dist.Work) -> None:
        if self._limit is None:
            work.wait()
        else:
            work.wait(self._limit)


def _header_of(action: Action, shapes: Sequence[Shape]) -> Tensor:
    numbers = [len(shapes)]
    for shape in shapes:
        numbers += [_TYPES.index(shape.dtype), int(shape.wants_grad), len(shape.sizes), *shape.sizes]
    if len(numbers) > _HEADER:
        raise UsageError(f"{action}: {len(shapes)} outputs of a stage are more than a header has room for")
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _shapes_of(header: Tensor) -> tuple[Shape, ...]:
    numbers = iter(header.tolist())
    found = []
    for _ in range(next(numbers)):
        dtype, wants_grad, dims = _TYPES[next(numbers)], bool(next(numbers)), next(numbers)
        found.append(Shape(sizes=tuple(next(numbers) for _ in range(dims)), dtype=dtype, wants_grad=wants_grad))
    return tuple(found)
