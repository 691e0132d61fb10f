"""A layout bound to the ranks that hold its pieces: what each operation along the sequence moves goes through it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mycel.comm import ByteMeter, Pending, all_gather_rows, group_or_all, there_and_back
from mycel.comm.exchange import start_permute, start_swap
from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.pending import communicate
from mycel.errors import UsageError
from mycel.planning.sequence import Layout, Segment
from mycel.planning.sequence import agree as same_digest

__all__ = ["SequenceContext", "for_good"]

T = TypeVar("T")


def for_good(make: Callable[[], T]) -> T:
    """What a layout says, as real numbers also where tensors are fake, since it is kept for when they are not.

    Args:
        make: makes it, of the layout alone.
    """
    with _disable_current_modes():
        return make()


class SequenceContext:
    """Documents over the ranks of a group. Cheap to make, one for each layout; no group is made, nothing is sent.

    All rows of a batch have the same layout. Every rank calls every operation, in one order, also one that holds no
    token.

    Attributes:
        layout: of the documents.
        group: the ranks; ``None`` where the layout has one and there are no processes.
        rank: this one, counted within the group.
        meter: bytes that this rank sent, by name of the exchange.

    Args:
        layout: of the documents; the same on all ranks, which ``agree`` makes sure of.
        group: as many ranks as the layout has; all if not given.
        alone: this rank shares with nobody, though there are others; the layout has one rank.

    Raises:
        UsageError: the group has more or fewer ranks than the layout, or there is none.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> context = SequenceContext(contiguous([3, 2], 1))
        >>> context.positions.tolist(), context.borders
        ([0, 1, 2, 0, 1], (0, 3, 5))
        >>> context.shard(torch.tensor([[5, 6, 7, 8, 9]])).tolist()
        [[5, 6, 7, 8, 9]]
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        if alone and group is not None:
            raise UsageError(f"a rank alone and a group of {group.size()}: give one of them")
        alone = alone or (layout.num_ranks == 1 and group is None and not dist.is_initialized())
        self.layout = layout
        self.group = None if alone else group_or_all(group, "a layout over ranks")
        size = 1 if self.group is None else self.group.size()
        if size != layout.num_ranks:
            raise UsageError(
                f"the layout has {layout.num_ranks} ranks and the group {size}: make the layout for {size}, or give "
                f"a group of {layout.num_ranks}"
            )
        self.rank = 0 if self.group is None else self.group.rank()
        self.meter = ByteMeter()
        self._remembered: dict[Hashable, object] = {}

    def __repr__(self) -> str:
        return f"SequenceContext({self.layout}, rank {self.rank} of {self.num_ranks})"

    @property
    def num_ranks(self) -> int:
        """How many share the documents."""
        return self.layout.num_ranks

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of this rank, in the order of its tokens; some may be empty."""
        return self.layout.ranks[self.rank]

    @property
    def num_tokens(self) -> int:
        """That this rank holds."""
        return self.layout.tokens[self.rank]

    @cached_property
    def positions(self) -> Tensor:
        """Of each token here the place in its document, int64 of shape (tokens here,)."""
        return for_good(lambda: torch.from_numpy(self.layout.positions(self.rank)))

    @cached_property
    def documents(self) -> Tensor:
        """Of each token here its document, int64 of shape (tokens here,)."""
        return for_good(lambda: torch.from_numpy(self.layout.documents_of(self.rank)))

    @cached_property
    def indices(self) -> Tensor:
        """Of each token here its place among all tokens, documents in order, int64 of shape (tokens here,)."""
        return for_good(lambda: torch.from_numpy(self.layout.indices(self.rank)))

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where segments begin and end among the tokens here; one more than there are segments."""
        return tuple(self.layout.borders(self.rank).tolist())

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an operation works out once for this layout, under a key of its own.

        Args:
            key: names it, with everything that it depends on besides the layout and the rank.
            make: works it out, the first time.
        """
        if key not in self._remembered:
            self._remembered[key] = for_good(make)
        return self._remembered[key]  # type: ignore[return-value]

    def remembered(self, name: str) -> dict[tuple[Hashable, ...], object]:
        """What operations worked out, by keys that begin with a name.

        Args:
            name: the first part of the key.
        """
        return {k: value for k, value in self._remembered.items() if isinstance(k, tuple) and k[:1] == (name,)}

    # -- what moves -----------------------------------------------------------------------------------------------

    def start_exchange(
        self, parts: Sequence[Tensor], receive: Sequence[int], name: str = "exchange"
    ) -> Pending[tuple[Tensor, ...]]:
        """Begin to send rows to every rank, without gradients.

        Args:
            parts: for each rank what it gets, of shape (rows, ...); rows may be none.
            receive: rows that come from each rank.
            name: under which ``meter`` counts the bytes.

        Returns:
            What came from each rank.
        """
        self._check(parts, receive)
        sent = torch.cat([part.detach() for part in parts])
        under_way = self._start(sent, list(receive), [len(part) for part in parts], name)
        return Pending(lambda: tuple(under_way.wait().split_with_sizes(list(receive))))

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int], name: str = "exchange") -> tuple[Tensor, ...]:
        """As ``start_exchange``, and wait."""
        return self.start_exchange(parts, receive, name).wait()

    def start_permute(
        self, rows: Tensor, targets: Sequence[int | None], lengths: Sequence[int], name: str = "permute"
    ) -> Pending[Tensor]:
        """Begin to send rows from each rank to one other, over all links that can help, without gradients.

        Args:
            rows: of this rank, shape (rows, ...); of one width on all ranks.
            targets: of each rank the one that gets its rows; ``None``: none does.
            lengths: rows of each rank.
            name: under which ``meter`` counts the bytes.
        """
        if self.group is None:
            return Pending.done(rows[:0].clone())
        return start_permute(rows.detach(), targets, lengths, self.group, self.meter, name)

    def exchange_with_gradient(
        self, parts: Sequence[Tensor], receive: Sequence[int], name: str = "exchange"
    ) -> tuple[Tensor, ...]:
        """As ``exchange``; gradients travel back the same way, and every rank has to join that too.

        A rank whose own parts need no gradient joins the way back only if what it received is used with gradients,
        as it is where all ranks run the same model.
        """
        self._check(parts, receive)
        gets, gives = list(receive), [len(part) for part in parts]

        def there(x: Tensor) -> Tensor:
            return self._start(x.detach(), gets, gives, name).wait()

        def back(gradient: Tensor) -> Tensor:
            return self._start(gradient, gives, gets, f"{name}.backward").wait()

        (received,) = there_and_back([torch.cat(list(parts))], there, back)
        return tuple(received.split_with_sizes(gets))

    def start_gather(self, rows: Tensor, name: str = "gather") -> Pending[Tensor]:
        """Begin to collect equally many rows of every rank, those of rank 0 first, without gradients.

        Args:
            rows: of this rank, shape (rows, ...).
            name: under which ``meter`` counts the bytes.
        """
        group, sent = self.group, rows.detach().contiguous()
        if group is None:
            return Pending.done(sent.clone())

        def launch() -> Pending[Tensor]:
            gathered = sent.new_empty(len(sent) * self.num_ranks, *sent.shape[1:])
            work = all_gather_single(gathered, sent, group=group, async_op=True)
            self.meter.add_even(name, sent.numel() * sent.element_size(), group)
            return _awaited(work, gathered)

        return communicate(launch)

    def start_scatter(self, rows: Tensor, name: str = "scatter") -> Pending[Tensor]:
        """Begin to add up over ranks, without gradients; this rank gets its part of the sum.

        Args:
            rows: equally many for each rank, those for rank 0 first, shape (ranks * rows, ...).
            name: under which ``meter`` counts the bytes.
        """
        sent = rows.detach().contiguous()
        if self.group is None:
            return Pending.done(sent.clone())
        summed = sent.new_empty(len(sent) // self.num_ranks, *sent.shape[1:])
        work = reduce_scatter_single(summed, sent, group=self.group, async_op=True)
        self.meter.add_even(name, summed.numel() * summed.element_size(), self.group)
        return _awaited(work, summed)

    def gather(self, x: Tensor, dim: int = 0, name: str = "gather") -> tuple[Tensor, ...]:
        """What every rank holds of something that has the tokens here along a dimension; gradients are added up.

        Args:
            x: the tokens here along ``dim``.
            dim: which.
            name: under which ``meter`` counts the bytes.

        Returns:
            Of each rank its tokens along ``dim``.
        """
        if x.shape[dim] != self.num_tokens:
            raise UsageError(
                f"a tensor has {x.shape[dim]} tokens in dimension {dim}; this rank holds {self.num_tokens}"
            )
        if self.group is None:
            return (x,)
        tokens, most = self.layout.tokens, max(self.layout.tokens)
        rows = x.movedim(dim, 0)
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        (gathered,) = all_gather_rows([padded], self.group, self.meter, name)
        parts = gathered.split_with_sizes([most] * self.num_ranks)
        return tuple(part[:count].movedim(0, dim) for part, count in zip(parts, tokens, strict=True))

    # -- batches --------------------------------------------------------------------------------------------------

    def shard(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The tokens of this rank, of a batch that every rank has whole.

        Args:
            whole: all tokens along ``dim``, documents in order.
            dim: which.
        """
        if whole.shape[dim] != self.layout.num_tokens:
            raise UsageError(
                f"a batch has {whole.shape[dim]} tokens in dimension {dim}; the layout has {self.layout.num_tokens}"
            )
        return whole.index_select(dim, self.indices.to(whole.device))

    def unshard(self, here: Tensor, dim: int = 1) -> Tensor:
        """The whole batch on every rank, documents in order; gradients are added up over ranks.

        Args:
            here: the tokens of this rank along ``dim``.
            dim: which.
        """
        by_rank = torch.cat(self.gather(here, dim, "unshard"), dim)
        place = torch.empty(self.layout.num_tokens, dtype=torch.int64)
        place[torch.from_numpy(self.layout.order)] = torch.arange(self.layout.num_tokens)
        return by_rank.index_select(dim, place.to(here.device))

    def agree(self, device: torch.device | str = "cpu") -> None:
        """Compare the layouts of all ranks, once.

        Args:
            device: of tensors that the group can exchange.

        Raises:
            MismatchError: some have another; the message says which.
        """
        if self.group is None:
            return
        own = int.from_bytes(bytes.fromhex(self.layout.digest), "big", signed=True)
        sent = torch.tensor([own] * self.num_ranks, dtype=torch.int64, device=device)
        received = self._start(sent, [1] * self.num_ranks, [1] * self.num_ranks, "agree").wait()
        same_digest([number.to_bytes(8, "big", signed=True).hex() for number in received.tolist()])

    # -- underneath -----------------------------------------------------------------------------------------------

    def _start(self, rows: Tensor, gets: list[int], gives: list[int], name: str) -> Pending[Tensor]:
        if self.group is None:
            return Pending.done(rows.clone())
        return start_swap(rows, gets, gives, self.group, self.meter, name)

    def _check(self, parts: Sequence[Tensor], receive: Sequence[int]) -> None:
        if len(parts) != self.num_ranks or len(receive) != self.num_ranks:
            raise UsageError(
                f"{len(parts)} parts to send and {len(receive)} to receive: one for each of {self.num_ranks} ranks"
            )


def _awaited(work: dist.Work, brought: Tensor) -> Pending[Tensor]:
    def finish() -> Tensor:
        work.wait()
        return brought

    return Pending(finish)
