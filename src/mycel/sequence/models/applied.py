"""``apply``: an unchanged model computes on sequences that are divided over ranks, until its handle is closed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from mycel.comm import flat_group
from mycel.comm.handle import Handle
from mycel.errors import UsageError
from mycel.planning.sequence import Layout, balanced, contiguous, per_document_zigzag, zigzag
from mycel.sequence.context import SequenceContext
from mycel.sequence.models.active import Binding
from mycel.sequence.models.attach import Attached, find_attached
from mycel.sequence.models.batch import agree_on_content, check_call, documents_of, local_batch, num_labels
from mycel.sequence.models.layers import replace_forward
from mycel.sequence.models.registered import attend, no_mask
from mycel.sequence.models.stand_in import without_stand_in
from mycel.sequence.models.torch_calls import SequenceCalls
from mycel.sequence.models.transformers_api import is_pretrained, own_configs, register_attention
from mycel.sequence.softmax import Explanation, Way
from mycel.sequence.softmax.attention import WayName

__all__ = ["AppliedSequence", "apply"]

#: Layouts by name, of the lengths of documents and the number of ranks.
LAYOUTS: dict[str, Callable[[Sequence[int], int], Layout]] = {
    "per_document_zigzag": per_document_zigzag,
    "zigzag": zigzag,
    "contiguous": contiguous,
    "balanced": balanced,
}


class AppliedSequence(Handle):
    """A model at work on divided sequences; ``close()``, or the end of a ``with`` block, gives it back as it was.

    Attributes:
        attached: modules that are answered over ranks.
        group: ranks that share a sequence; ``None``: one process alone.
        num_averaged: ranks over whose losses gradients are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        averaged: dist.ProcessGroup | None,
        layout: str | Callable[[Sequence[int], int], Layout],
        way: Way | WayName,
    ) -> None:
        self.attached: tuple[Attached, ...] = find_attached(model)
        self.group = group
        self.num_averaged = 1 if averaged is None else averaged.size()
        self._averaged = averaged
        self._model = model
        self._layout = _layout_named(layout)
        self._contexts: dict[tuple[int, ...], SequenceContext] = {}
        self._parameters = inspect.signature(model.forward).parameters
        self._binding = Binding(type(model).__name__, way, SequenceCalls, self._checked, averaged)
        self._undo: list[Callable[[], None]] = []
        self._hooks: list[RemovableHandle] = []
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise

    def __repr__(self) -> str:
        return f"AppliedSequence({self._binding.name}, {len(self.attached)} modules, {self.num_ranks} ranks)"

    @property
    def num_ranks(self) -> int:
        """That share a sequence."""
        return 1 if self.group is None else self.group.size()

    @cached_property
    def replica(self) -> int:
        """Which of the groups that share sequences this rank is in, counted by their first ranks. All ranks ask."""
        if self.group is None or self._averaged is None or self.num_averaged == self.num_ranks:
            return 0
        own = dist.get_process_group_ranks(self.group)[0]
        firsts: list[Any] = [None] * self.num_averaged
        dist.all_gather_object(firsts, own, group=self._averaged)
        return sorted(set(firsts)).index(own)

    @property
    def is_averaged_by_all_that_share(self) -> bool:
        """Whether the ranks that share sequences are all over whose losses gradients are averaged."""
        return self.num_averaged == self.num_ranks

    @property
    def device(self) -> torch.device:
        """Of the model's parameters."""
        return next((p.device for p in self._model.parameters()), torch.device("cpu"))

    def layout_of(self, documents: Sequence[int], num_ranks: int) -> Layout:
        """The layout of documents over some ranks, by the rule that ``apply`` was given.

        Args:
            documents: tokens of each.
            num_ranks: that share them.
        """
        return self._layout(documents, num_ranks)

    @property
    def context(self) -> SequenceContext:
        """Of the batch that was prepared last.

        Raises:
            UsageError: none was.
        """
        if self._binding.context is None:
            raise UsageError(f"{self._binding.name}: no batch was prepared yet; call shard(batch)")
        return self._binding.context

    # -- batches --------------------------------------------------------------------------------------------------

    def shard(
        self,
        batch: Any,
        *,
        documents: Sequence[int] | None = None,
        num_labels_of_step: Tensor | float | None = None,
        dim: int = 1,
    ) -> Any:
        """What this rank calls the model with, of a batch that all ranks of the group have whole.

        For a dict: tokens of this rank of every tensor [rows, tokens, ...], ``position_ids`` in whole documents,
        ``shift_labels`` that know what comes after a border, and ``num_items_in_batch`` so that the mean of the
        ranks' losses, which is what DDP and FSDP take of gradients, is the loss of the whole step.

        Args:
            batch: a dict as for the model, or one tensor.
            documents: tokens of each document in a row, if ``position_ids`` do not say it.
            num_labels_of_step: labels that count, of all batches of all ranks until the optimizer's step; those of
                this batch, and of other sequences in the mesh, if not given.
            dim: of tokens in a single tensor.

        Raises:
            UsageError: rows have different documents, a mask contradicts them, labels are not shifted at a border.
            MismatchError: ranks have different batches.
        """
        self._check_open()
        lengths = tuple(documents) if documents is not None else documents_of(batch, dim)
        main = batch if isinstance(batch, Tensor) else next(t for t in batch.values() if isinstance(t, Tensor))
        context = self._context_of(lengths)
        context.agree(main.device)
        agree_on_content(batch, context)
        return self.shard_by(context, batch, num_labels_of_step=num_labels_of_step, dim=dim)

    def shard_by(
        self, context: SequenceContext, batch: Any, *, num_labels_of_step: Tensor | float | None = None, dim: int = 1
    ) -> Any:
        """As ``shard``, under a layout that is there already and that ranks have agreed on.

        Args:
            context: of the documents.
            batch, num_labels_of_step, dim: as for ``shard``.
        """
        self._check_open()
        self._binding.context = context
        if isinstance(batch, Tensor):
            here = context.shard(batch, dim)
            if not context.num_tokens:
                token = batch if batch.shape[dim] else torch.cat([batch, batch.new_zeros(*_one_at(batch, dim))], dim)
                here = token.narrow(dim, 0, 1).contiguous()
            self.prepared(here, context)
            return here
        made = local_batch(batch, context)
        if "shift_labels" in made:
            count = num_labels_of_step
            if count is None:
                count = self.count_labels(batch, context.layout.documents)
            if isinstance(count, Tensor):
                count = count.to(made["shift_labels"].device).double()
            made["num_items_in_batch"] = count / self.num_averaged  # a number stays one: no wrapper rounds it
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters.values()):
            made = {name: value for name, value in made.items() if name in self._parameters or name in batch}
        self.prepared(made, context)
        return made

    def prepared(self, made: Any, context: SequenceContext) -> None:
        """Take what stands for a batch that ``shard_by`` gave, such as fake tensors, for one that it gave.

        Args:
            made: a dict or one tensor.
            context: of the documents.
        """
        for value in made.values() if isinstance(made, Mapping) else (made,):
            if isinstance(value, Tensor):
                self._binding.prepared(value, context)

    def count_labels(self, batch: Mapping[str, Any], documents: Sequence[int] | None = None) -> Tensor:
        """Labels that count of a whole batch, and of those of other sequences in the mesh.

        Args:
            batch: whole.
            documents: tokens of each, if ``position_ids`` do not say it.
        """
        lengths = documents_of(batch) if documents is None else documents
        count = num_labels(batch, lengths).double()
        if self.num_averaged > self.num_ranks:
            dist.all_reduce(count, group=self._averaged)
            count = count / self.num_ranks
        return count

    def unshard(self, here: Tensor, dim: int = 1) -> Tensor:
        """What all ranks have of something with a row for each token, on all of them; gradients go back.

        Args:
            here: of the batch that was prepared last.
            dim: of the tokens.
        """
        return self.context.unshard(without_stand_in(here, self.context, dim), dim)

    def mean(self, losses: Tensor, num_tokens: float) -> Tensor:
        """The loss whose mean over ranks is that of the whole step.

        Args:
            losses: of tokens here, 0 for those that do not count; of a stand-in they do not.
            num_tokens: that count in the whole step, on all ranks.
        """
        there = losses if self.context.num_tokens else losses * 0.0
        return there.sum() * (self.num_averaged / num_tokens)

    def average(self, loss: Tensor) -> Tensor:
        """The mean of all ranks' losses, which is that of the whole step, without gradients.

        Args:
            loss: of the tokens here.
        """
        averaged = loss.detach().clone()
        if self._averaged is not None and self.num_averaged > 1:
            dist.all_reduce(averaged, group=self._averaged)
        return averaged / self.num_averaged

    # -- what it did ----------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Which modules are answered over ranks; of the last batch its layout, what was sent, which way and why."""
        kinds: dict[str, list[str]] = {}
        for module in self.attached:
            kinds.setdefault(module.kind, []).append(module.path or type(module.module).__name__)
        lines = [f"{self._binding.name} over {self.num_ranks} ranks"]
        lines += [
            f"{_KINDS[kind]}: {len(paths)} ({paths[0]}{', ...' if paths[1:] else ''})"
            for kind, paths in kinds.items()
        ]
        context = self._binding.context
        if context is not None:
            layout = context.layout
            lines.append(f"tokens by rank: {', '.join(map(str, layout.tokens))} of {len(layout.documents)} documents")
            lines += [f"sent {name}: {bytes_} bytes" for name, bytes_ in sorted(context.meter.sent.items())]
            lines += self._way_of(context)
        return "\n".join(lines)

    def _way_of(self, context: SequenceContext) -> list[str]:
        """How attention went, and why."""
        way = self._binding.way
        if way != "auto":
            return [f"attention goes by {way.name if isinstance(way, Way) else way}, as apply was told"]
        found = context.remembered("attention explained")  # by shape and mask; what was measured since comes later
        latest = {key[1:3]: str(value) for key, value in found.items() if isinstance(value, Explanation)}
        return [line for text in latest.values() for line in text.splitlines()]

    def at_work(self, module: nn.Module) -> AbstractContextManager[None]:
        """Have what is done inside go over the ranks as in a call of a module of the model.

        For those who call a module's ``forward`` by itself, such as a checkpoint that computes it again.

        Args:
            module: of the model.
        """
        return self._binding.at_work(module)

    def frame_forwards(self) -> None:
        """From now on ``forward`` of an attached module goes over ranks where it is called without the module, too.

        So it is called where the module's own ``forward`` was replaced by one that computes it again.
        """
        for attached in self.attached:
            module = attached.module
            before = module.__dict__.get("forward")
            module.__dict__["forward"] = _Framed(self._binding, module, module.forward)
            self._undo.append(partial(_put_back, module, before))

    def close(self) -> None:
        """Give the model back as it was, between steps. May be called again."""
        self._detach()

    # -- underneath -----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        model = self._model
        for attached in self.attached:
            if attached.kind in ("state", "convolution", "lightning"):
                self._undo.append(replace_forward(attached.module, attached.kind))
        if is_pretrained(model) or any(a.kind == "attention" for a in self.attached):
            register_attention(attend, no_mask)
            self._undo.append(own_configs(model))
        self._hooks = self._binding.attach(model)
        model.__dict__["mycel_sequence"] = self._binding

    def _detach(self) -> None:
        self._binding.is_closed = True
        for hook in self._hooks:
            hook.remove()
        for undo in reversed(self._undo):
            undo()
        self._hooks, self._undo = [], []
        self._model.__dict__.pop("mycel_sequence", None)

    def _check_open(self) -> None:
        if self._binding.is_closed:
            raise UsageError(f"{self._binding.name}: its handle is closed; call mycel.sequence.apply again")

    def _context_of(self, documents: tuple[int, ...]) -> SequenceContext:
        if documents not in self._contexts:
            if len(self._contexts) >= _MOST_LAYOUTS:
                self._contexts.pop(next(iter(self._contexts)))
            self._contexts[documents] = SequenceContext(self._layout(documents, self.num_ranks), self.group)
        return self._contexts[documents]

    def _checked(self, context: SequenceContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        for name in ("past_key_values", "cache_params"):
            if kwargs.get(name) is not None:
                raise UsageError(
                    f"{self._binding.name}: {name} over ranks is not there; close() the handle to generate"
                )
        values = [kwargs.get(name) for name in ("position_ids", "labels", "shift_labels")]
        prepared = kwargs.get("attention_mask") is None and all(
            self._binding.is_prepared(v) if isinstance(v, Tensor) else v is None for v in values
        )
        takes_positions = "position_ids" in self._parameters
        if (takes_positions and values[0] is None) or (values[1] is not None and values[2] is None):
            prepared = False  # what came from shard, but not all of it
        check_call(context, kwargs, prepared=prepared, takes_positions=takes_positions)
        return kwargs | {"use_cache": False} if "use_cache" in self._parameters else kwargs


class _Framed:
    """A module's ``forward`` as the module's own work; a copy of the module has a copy of it."""

    def __init__(self, binding: Binding, module: nn.Module, inner: Callable[..., Any]) -> None:
        self._binding, self._module, self._inner = binding, module, inner
        update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._binding.at_work(self._module):
            return self._inner(*args, **kwargs)


def _put_back(module: nn.Module, before: Any) -> None:
    module.__dict__.pop("forward", None)
    if before is not None:
        module.__dict__["forward"] = before


#: Layouts that are kept for batches to come.
_MOST_LAYOUTS = 64

_KINDS = {
    "attention": "attention of transformers",
    "torch": "attention or convolutions of torch",
    "state": "layers with a state",
    "lightning": "lightning attention",
    "convolution": "short convolutions",
}


def _one_at(batch: Tensor, dim: int) -> list[int]:
    """The shape of a batch with one token."""
    shape = list(batch.shape)
    shape[dim] = 1
    return shape


def _layout_named(layout: str | Callable[[Sequence[int], int], Layout]) -> Callable[[Sequence[int], int], Layout]:
    if callable(layout):
        return layout
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r}: one of {', '.join(LAYOUTS)}, or a function of lengths and ranks")
    return LAYOUTS[layout]


def apply(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    dim: str | None = None,
    layout: str | Callable[[Sequence[int], int], Layout] = "per_document_zigzag",
    way: Way | WayName = "auto",
) -> AppliedSequence:
    """Have a model compute on sequences that are divided over ranks. The model stays the object it is.

    What mixes tokens goes over the ranks: ``scaled_dot_product_attention``, ``nn.MultiheadAttention`` and causal
    ``conv1d`` in any torch model; in models of transformers attention of every family in the library's registry, and
    layers with a state or a convolution (lightning attention, gated delta rule, KDA, Mamba2, short convolutions).
    Everything else runs on each rank's own tokens as it did. Call it before wrappers (DDP, ``fully_shard``).

    Args:
        model: as it would be trained in one process; the same on all ranks.
        mesh: the ranks: a mesh, a group whose ranks share sequences, or all ranks if not given. Losses are averaged
            over all ranks of a mesh, or of the job.
        dim: of a mesh with several dimensions, the one whose ranks share sequences.
        layout: who gets which tokens: ``per_document_zigzag``, ``zigzag``, ``contiguous``, ``balanced``, or a
            function of the lengths of documents and the number of ranks.
        way: of attention, as for ``mycel.sequence.attention``.

    Returns:
        ``shard(batch)`` for every batch, ``explain()`` and ``close()``.

    Raises:
        UsageError: the model has nothing to attach to, a layer whose state is not understood (which is named), or is
            applied already; the mesh has no such dimension.

    Examples:
        A Hugging Face model on documents that no rank holds whole::

            model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-Next-80B-A3B-Instruct")
            handle = mycel.sequence.apply(model)
            model = DistributedDataParallel(model)
            for batch in batches:  # the same on all ranks
                model(**handle.shard(batch)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    for path, module in model.named_modules():
        if isinstance(vars(module).get("mycel_sequence"), Binding):
            where = f" (at {path})" if path else ""
            raise UsageError(
                f"{type(model).__name__}: apply was called on it before{where}; close() that handle first"
            )
    group, averaged = _groups(mesh, dim)
    return AppliedSequence(model, group, averaged, layout, way)


def _groups(
    mesh: DeviceMesh | dist.ProcessGroup | None, dim: str | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if dim is not None and dim not in names:
            raise UsageError(f"the mesh has no dimension {dim!r}: its dimensions are {', '.join(names) or 'unnamed'}")
        if dim is None and mesh.ndim > 1:
            raise UsageError(
                f"a mesh of {mesh.ndim} dimensions ({', '.join(names) or 'unnamed'}): say with dim= whose ranks "
                "share sequences"
            )
        return mesh.get_group(dim), flat_group(mesh)
    if dim is not None:
        raise UsageError(f"dim={dim!r} is of a mesh, and {'none' if mesh is None else 'a group'} was given")
    if not dist.is_initialized():
        return mesh, mesh
    world = dist.distributed_c10d._get_default_group()
    return (world if mesh is None else mesh), world
