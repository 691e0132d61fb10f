"""What serves torch's ``context_parallel`` is in its table while somebody asks for it, and no longer."""

from __future__ import annotations

import pytest
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_own

from mycel.errors import UsageError
from mycel.sequence import serve_context_parallel
from mycel.sequence.models import context_parallel as ours


def test_answers_are_there_until_the_last_handle_is_closed() -> None:
    own = dict(torch_own.custom_ops)
    first, second = serve_context_parallel(), serve_context_parallel()
    assert len(torch_own.custom_ops) == len(own) + 2
    second.close()
    second.close()
    assert len(torch_own.custom_ops) == len(own) + 2
    with serve_context_parallel():
        first.close()
        assert len(torch_own.custom_ops) == len(own) + 2
    assert torch_own.custom_ops == own


def test_answers_of_torchs_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> None:
        """Of a later release, say."""

    with serve_context_parallel() as handle:
        (op, *_) = handle._answers
    monkeypatch.setitem(torch_own.custom_ops, op, answer)
    with serve_context_parallel():
        assert torch_own.custom_ops[op] is answer
    assert torch_own.custom_ops[op] is answer


def test_a_torch_that_has_it_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_TORCH", "torch.distributed.nowhere")
    with pytest.raises(UsageError, match=r"keeps its context parallelism elsewhere .*mycel\.sequence\.apply"):
        serve_context_parallel()
