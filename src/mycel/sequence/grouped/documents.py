"""Documents of a step: how long each is, which labels count, and those of one group packed into a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.sequence.models.batch import IGNORED

__all__ = ["Document", "length_of", "lengths_of", "loaded", "num_labels_of", "packed"]

#: Tokens along the first dimension: a tensor, tensors by name, or only how many there are.
Document = Tensor | Mapping[str, Any] | int


def length_of(document: Document) -> int:
    """Tokens of a document.

    Args:
        document: as a step has it.

    Raises:
        UsageError: it is none.

    Examples:
        >>> length_of({"input_ids": [5, 6, 7]}), length_of(torch.zeros(4, 2)), length_of(9)
        (3, 4, 9)
    """
    if isinstance(document, bool):
        raise UsageError("a document is True or False: give tokens, or how many there are")
    if isinstance(document, int):
        return document
    if isinstance(document, Tensor):
        if not document.dim():
            raise UsageError("a document is a tensor without dimensions: tokens are along the first")
        return document.shape[0]
    if isinstance(document, Mapping) and document:
        sizes = {name: len(value) for name, value in document.items()}
        if len(set(sizes.values())) != 1:
            raise UsageError(f"a document has {sizes} tokens: everything of one has as many")
        return next(iter(sizes.values()))
    raise UsageError(
        f"a document is {type(document).__name__}: give a tensor [tokens, ...], such tensors by name, or a number of "
        "tokens with load="
    )


def lengths_of(documents: Sequence[Document]) -> tuple[int, ...]:
    """Tokens of each document of a step.

    Args:
        documents: of the step.

    Raises:
        UsageError: there is none, or one has no token; the message says which.
    """
    lengths = []
    for index, document in enumerate(documents):
        try:
            length = length_of(document)
        except UsageError as error:
            raise UsageError(f"document {index}: {error}") from None
        if length < 1:
            raise UsageError(f"document {index} has {length} tokens: leave out what is empty")
        lengths.append(length)
    if not lengths:
        raise UsageError("a step without documents: leave it out on all ranks")
    return tuple(lengths)


def loaded(
    documents: Sequence[Document], wanted: Sequence[int], load: Callable[[int], Document] | None
) -> dict[int, Tensor | dict[str, Tensor]]:
    """Some documents with their tokens, by index.

    Args:
        documents: of the step.
        wanted: indices.
        load: gives a document of which only the length was given.

    Raises:
        UsageError: it has another length, or nothing loads it.
    """
    found: dict[int, Tensor | dict[str, Tensor]] = {}
    for index in wanted:
        document = documents[index]
        if isinstance(document, int):
            if load is None:
                raise UsageError(f"document {index} is a number of tokens: give load=, which brings them")
            length, document = document, load(index)
            if isinstance(document, int) or length_of(document) != length:
                raise UsageError(
                    f"document {index} has {length_of(document)} tokens when loaded, and {length} were said"
                )
        found[index] = (
            document
            if isinstance(document, Tensor)
            else {name: torch.as_tensor(value) for name, value in document.items()}
        )
    return found


def num_labels_of(document: Document) -> int:
    """Labels of a document that count: those after its first token; where it has none, as if tokens were labels.

    Args:
        document: as a step has it.
    """
    if isinstance(document, Mapping):
        if "shift_labels" in document:
            return int((torch.as_tensor(document["shift_labels"]) != IGNORED).sum())
        if "labels" in document:
            return int((torch.as_tensor(document["labels"])[1:] != IGNORED).sum())
    return max(0, length_of(document) - 1)


def packed(documents: Sequence[Tensor | dict[str, Tensor]], *, empty: bool = False) -> Tensor | dict[str, Tensor]:
    """Documents one after the other in one row: tensors [1, tokens, ...].

    Args:
        documents: alike.
        empty: none of their tokens, but everything else that says what a batch is.

    Raises:
        UsageError: some have other names than others.
    """
    if empty:
        documents = [
            document[:0] if isinstance(document, Tensor) else {name: value[:0] for name, value in document.items()}
            for document in documents[:1]
        ]
    first = documents[0]
    if isinstance(first, Tensor):
        return torch.cat([d for d in documents if isinstance(d, Tensor)])[None]
    for document in documents:
        if isinstance(document, Tensor) or set(document) != set(first):
            names = "a tensor" if isinstance(document, Tensor) else ", ".join(sorted(document))
            raise UsageError(f"documents of one step differ: {', '.join(sorted(first))}, and {names}")
    return {name: torch.cat([d[name] for d in documents if not isinstance(d, Tensor)])[None] for name in first}
