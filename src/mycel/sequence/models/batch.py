"""Batches over ranks: whose documents they are, the tokens of this rank with their positions and shifted labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mycel.errors import MismatchError, UsageError
from mycel.sequence.context import SequenceContext
from mycel.sequence.models.stand_in import rows_of

__all__ = ["IGNORED", "agree_on_content", "check_call", "documents_of", "local_batch", "num_labels", "shifted_labels"]

#: A label that counts for nothing, as torch and Hugging Face have it.
IGNORED = -100

#: What packing says beside positions; layouts say it here.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: What is made anew for the tokens here.
_MADE = ("position_ids", "labels", "shift_labels", "attention_mask", "num_items_in_batch", *_BORDERS)


def documents_of(batch: Mapping[str, Any] | Tensor, dim: int = 1) -> tuple[int, ...]:
    """Tokens of each document of a batch: where ``position_ids`` restart one begins.

    Args:
        batch: tensors by name, or one.
        dim: of the tokens, in a single tensor.

    Raises:
        UsageError: rows have different documents, or positions are of no whole documents.
    """
    if isinstance(batch, Tensor):
        return (batch.shape[dim],)
    positions = batch.get("position_ids")
    if positions is None:
        ends = batch.get("cu_seq_lens_q")
        if ends is not None:
            return tuple(torch.as_tensor(ends).diff().tolist())
        return (main_of(batch).shape[1],)
    if positions.dim() == 1:
        positions = positions[None]
    if positions.dim() != 2:
        raise UsageError(
            f"position_ids of shape {tuple(positions.shape)}: one for each token is understood, [rows, tokens]"
        )
    if positions.shape[1] != main_of(batch).shape[1]:
        raise UsageError(
            f"position_ids of {positions.shape[1]} tokens for {main_of(batch).shape[1]}: give the whole batch on "
            "every rank, which shard cuts"
        )
    if len(positions) > 1 and bool((positions != positions[:1]).any()):
        row = int((positions != positions[:1]).any(1).nonzero()[0])
        raise UsageError(
            f"rows 0 and {row} of position_ids differ: rows of a batch have the same documents; pack them into one"
        )
    first = positions[0].cpu()
    begins = torch.cat([torch.tensor([True]), first.diff() != 1]).nonzero().flatten() if len(first) else first
    wrong = begins[first[begins] != 0]
    if len(wrong):
        raise UsageError(
            f"position_ids restart at token {int(wrong[0])} with {int(first[wrong[0]])}: a document begins with 0"
        )
    return tuple(torch.cat([begins, torch.tensor([len(first)])]).diff().tolist())


def main_of(batch: Mapping[str, Any]) -> Tensor:
    """The tensor of a batch that the model reads."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), Tensor):
            found: Tensor = batch[name]
            return found
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    raise UsageError(f"a batch of {', '.join(batch) or 'nothing'}: none is a tensor of tokens, [rows, tokens, ...]")


def _tensor(batch: Mapping[str, Any], name: str) -> Tensor | None:
    found: Tensor | None = batch.get(name)
    return found


def shifted_labels(batch: Mapping[str, Any], context: SequenceContext) -> Tensor | None:
    """Of each token of this rank the label of the one after it, ``IGNORED`` after the last of a document.

    Raises:
        UsageError: ``shift_labels`` are given and one goes over a border.
    """
    nexts = torch.from_numpy(context.layout.labels(context.rank))
    given, labels = _tensor(batch, "shift_labels"), _tensor(batch, "labels")
    if given is not None:
        here = context.shard(given)
        over = (here[:, (nexts < 0).to(here.device)] != IGNORED).any()
        if bool(over):
            raise UsageError(_over_a_border(context, here, nexts))
        return here
    if labels is None:
        return None
    nexts = nexts.to(labels.device)
    taken = labels.index_select(1, nexts.clamp(min=0)) if labels.shape[1] else labels
    return taken.masked_fill(nexts < 0, IGNORED)


def num_labels(batch: Mapping[str, Any], documents: Sequence[int]) -> Tensor:
    """Labels of a whole batch that count, int64."""
    given, labels = _tensor(batch, "shift_labels"), _tensor(batch, "labels")
    if given is not None:
        return (given != IGNORED).sum()
    if labels is None:
        return torch.tensor(main_of(batch).shape[0] * sum(max(0, tokens - 1) for tokens in documents))
    begins = torch.zeros(labels.shape[1], dtype=torch.bool)
    begins[[first for first, tokens in zip(accumulate([0, *documents]), documents, strict=False) if tokens]] = True
    return ((labels != IGNORED) & ~begins.to(labels.device)).sum()


def local_batch(batch: Mapping[str, Any], context: SequenceContext) -> dict[str, Any]:
    """What this rank calls the model with, except for how many labels count.

    Args:
        batch: whole.
        context: of its documents.

    Raises:
        UsageError: a mask or labels contradict the layout.
    """
    main = main_of(batch)
    check_mask(batch.get("attention_mask"), "the attention mask")
    found: dict[str, Any] = {}
    for name, value in batch.items():
        if name in _MADE:
            continue
        of_tokens = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == main.shape[1]
        found[name] = _with_token(context.shard(value), value, context) if of_tokens else value
    rows, device = main.shape[0], main.device
    positions = context.positions if context.num_tokens else torch.zeros(1, dtype=torch.int64)
    found["position_ids"] = positions.to(device).expand(rows, -1).contiguous()
    shifted = shifted_labels(batch, context)
    if shifted is not None:
        if not context.num_tokens:
            shifted = shifted.new_full((rows, 1), IGNORED)
        found["labels"] = found["shift_labels"] = shifted.contiguous()
    return found


def _with_token(here: Tensor, whole: Tensor, context: SequenceContext) -> Tensor:
    if context.num_tokens:
        return here
    if whole.shape[1]:
        return whole[:, :1].contiguous()
    return whole.new_zeros(whole.shape[0], 1, *whole.shape[2:])  # nobody has a token


def check_mask(mask: Any, what: str) -> None:
    """Only masks that change nothing are in keeping with a layout: all of ones, or zeros at the end of rows."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(
            f"{what} ({shape}) contradicts the layout, which says what sees what: give documents by position_ids "
            "that restart, and no mask"
        )
    kept = mask != 0
    holes = kept[:, 1:] & ~kept[:, :-1]
    if bool(holes.any()):
        row, token = (int(n) for n in holes.nonzero()[0])
        raise UsageError(
            f"{what} contradicts the layout: row {row} has nothing at token {token} and something at {token + 1}; "
            "pad at the end of rows, or give documents by position_ids that restart"
        )


def check_call(context: SequenceContext, values: Mapping[str, Any], *, prepared: bool, takes_positions: bool) -> None:
    """Refuse calls of a model that its layout contradicts.

    Args:
        context: of the tokens here.
        values: what the model is called with, by name.
        prepared: whether positions and labels come from ``shard`` as they are.
        takes_positions: whether the model reads ``position_ids``.

    Raises:
        UsageError: positions are absent or others, labels are not shifted, or there is a mask.
    """
    here = rows_of(context)
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(values.get(name), Tensor) and values[name].shape[1] != here:
            raise UsageError(
                f"{name} of {values[name].shape[1]} tokens, and rank {context.rank} holds {here}: call the model "
                "with handle.shard(batch)"
            )
    if prepared:
        return
    if takes_positions:
        _check_positions(context, values.get("position_ids"))
    if values.get("labels") is not None and values.get("shift_labels") is None:
        raise UsageError(
            "labels without shift_labels: the model would shift them within this rank's tokens, and lose those at "
            "borders; call it with handle.shard(batch)"
        )
    shifted = values.get("shift_labels")
    if shifted is not None and context.num_tokens:
        nexts = torch.from_numpy(context.layout.labels(context.rank))
        if shifted.shape[1] != here or bool((shifted[:, (nexts < 0).to(shifted.device)] != IGNORED).any()):
            raise UsageError(_over_a_border(context, shifted, nexts))
    mask = values.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        check_mask(mask if not isinstance(mask, Tensor) or mask.dim() != 2 else None, "the attention mask")
        raise UsageError("the attention mask hides tokens of this rank, which the layout does not: give none")


def _check_positions(context: SequenceContext, positions: Any) -> None:
    if positions is None:
        raise UsageError(
            f"position_ids are absent: the model would count from 0 on rank {context.rank}, whose tokens have other "
            "places in their documents; call it with handle.shard(batch)"
        )
    if not context.num_tokens:
        return
    wanted = context.positions.to(positions.device)
    if positions.shape[-1] != len(wanted):
        raise UsageError(f"position_ids of {positions.shape[-1]} tokens, and rank {context.rank} holds {len(wanted)}")
    wrong = (positions != wanted).reshape(-1, len(wanted)).any(0).nonzero().flatten()
    if not len(wrong):
        return
    row, at = positions.reshape(-1, len(wanted))[0], int(wrong[0])
    if bool((row == torch.arange(len(wanted), device=row.device)).all()):
        raise UsageError(
            f"position_ids count the tokens of rank {context.rank} from 0: they are places in whole documents, such "
            f"as {int(wanted[at])} for token {at}; call the model with handle.shard(batch)"
        )
    restarts = " restart" if int(row[at]) == 0 else " are others"
    raise UsageError(
        f"position_ids{restarts} at token {at} of rank {context.rank} ({int(row[at])}), where the layout has place "
        f"{int(wanted[at])} of document {int(context.documents[at])}: give shard the position_ids of the whole batch"
    )


def _over_a_border(context: SequenceContext, shifted: Tensor, nexts: Tensor) -> str:
    if shifted.shape[1] != len(nexts):
        return f"shift_labels of {shifted.shape[1]} tokens, and rank {context.rank} holds {len(nexts)}"
    last = (nexts < 0).nonzero().flatten()
    wrong = last[(shifted[:, last.to(shifted.device)] != IGNORED).any(0).cpu()]
    at = int(wrong[0])
    return (
        f"labels are not shifted at a border: token {at} of rank {context.rank} is the last of document "
        f"{int(context.documents[at])} and has the label of another; it has none, {IGNORED}"
    )


def agree_on_content(batch: Mapping[str, Any] | Tensor, context: SequenceContext) -> None:
    """Compare the batches of all ranks, which loaders that divide batches over ranks make different.

    Raises:
        MismatchError: some rank has another.
    """
    if context.group is None:
        return
    main = batch if isinstance(batch, Tensor) else main_of(batch)
    sample = main.detach().reshape(-1)[:4096]
    bits = sample.contiguous().view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, len(bits) + 1, device=main.device)
    own = ((bits + 1) * weights).sum().reshape(1)
    size = context.num_ranks
    theirs = torch.cat(context.exchange([own] * size, [1] * size, "agree")).tolist()
    others = [rank for rank, number in enumerate(theirs) if number != theirs[context.rank]]
    if others:
        shown = ", ".join(map(str, others[:4]))
        raise MismatchError(
            f"rank {context.rank} of the sequence's ranks has other tokens than {shown}: all ranks of a group get "
            "the same batches, which shard divides; a loader that divides them too is for data parallel ranks"
        )
