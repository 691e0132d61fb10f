"""The word vectors of examples/word2vec: learned alike on all ranks, and judged by what they know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scores
from words import read_words

RunRanks = Callable[..., list[Any]]


def test_ranks_learn_the_same_and_what_belongs_together(run_ranks: RunRanks) -> None:
    results = run_ranks(2, "word2vec", "two_topics", "model")
    assert results[0] == results[1]
    assert results[0][1] > 0.5


def test_scores_of_vectors_that_know_everything_and_nothing() -> None:
    words = sorted({word for kind in scores.KINDS[:4] for word in kind.split()})
    number = {word: index for index, word in enumerate(words)}
    knowing = np.array([[float(word in kind.split()) for kind in scores.KINDS[:4]] for word in words], np.float32)
    assert scores.similarity(knowing, number) == 100.0
    random = np.random.default_rng(0).normal(size=(len(words), 64)).astype(np.float32)
    assert 35 < scores.similarity(random, number) < 65
    stems = [f"stem{i}" for i in range(30)]
    forms = {word: index for index, word in enumerate([*stems, *(s + "s" for s in stems)])}
    base = np.random.default_rng(1).normal(size=(30, 64))
    ending = np.random.default_rng(2).normal(size=64) * 2
    assert scores.analogies(np.concatenate([base, base + ending]).astype(np.float32), forms) > 95
    assert scores.analogies(np.random.default_rng(3).normal(size=(60, 64)).astype(np.float32), forms) < 50


def test_names_become_words() -> None:
    words = read_words(max_bytes=1 << 18, least=5)
    assert {"self", "return"} <= set(words.vocabulary)
    assert (words.counts[:-1] >= words.counts[1:]).all()
    assert words.counts.sum() == (words.text >= 0).sum()
