"""Real text as batches, in numpy: paragraphs of Python's own documentation, packed into rows of bytes.

The text is the language reference that ``help()`` shows (``pydoc_data.topics``). It comes with Python under Python's
licence; nothing is downloaded, and the repository contains no part of it. A token is a byte, or BEGIN.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attn_core import SeqInfo

BEGIN = 256
"""The token before a document's first byte."""
SHORTEST = 64
"""Bytes of the shortest paragraph that is used, which bounds the number of documents in a row."""


class Batch(NamedTuple):
    """The input of a step, as numpy arrays or a framework's arrays.

    Attributes:
        tokens: int32 ``[rows, length]``.
        targets: int32 ``[rows, length]``: the token that follows.
        counted: float32 ``[rows, length]``: 0 at the last token of a document, which predicts no token; otherwise 1.
        seq_info: the documents of the only row; None if each row is one document.
    """

    tokens: Any
    targets: Any
    counted: Any
    seq_info: SeqInfo | None = None


@dataclass(frozen=True)
class Text:
    """Paragraphs as tokens: uint16 arrays that begin with BEGIN. ``digest`` identifies the text of a Python release."""

    paragraphs: tuple[np.ndarray, ...]
    digest: str

    @property
    def size(self) -> int:
        """The number of all tokens."""
        return sum(map(len, self.paragraphs))


def python_documentation() -> Text:
    """Returns every paragraph of the language reference with SHORTEST bytes or more, without duplicates."""
    from pydoc_data.topics import topics

    unique: dict[str, None] = {}
    for topic in sorted(topics):
        unique |= dict.fromkeys(" ".join(part.split()) for part in re.split(r"\n\s*\n", topics[topic]))
    chosen = [data for paragraph in unique if len(data := paragraph.encode()) >= SHORTEST]
    paragraphs = tuple(np.concatenate([[BEGIN], np.frombuffer(data, np.uint8)]).astype(np.uint16) for data in chosen)
    return Text(paragraphs, hashlib.sha256(b"\n".join(chosen)).hexdigest()[:12])


def packed_batches(text: Text, length: int, longest: int, seed: int) -> Iterator[Batch]:
    """Yields batches of one row of ``length`` tokens: paragraphs, cut at ``longest`` tokens and at the row's end.

    All batches have the same shapes for XLA: the number of offsets that the fullest row could need, where unused
    offsets describe empty documents, and the same bound on a document's length.
    """
    generator = np.random.default_rng(seed)
    order = _endless(text, generator)
    documents = -(-length // min(SHORTEST + 1, longest))
    while True:
        row: list[np.ndarray] = []
        lengths: list[int] = []
        while (room := length - sum(lengths)) > 0:
            row.append(next(order)[: min(room, longest)])
            lengths.append(len(row[-1]))
        ends = np.cumsum(lengths) - 1
        offsets = np.full(documents + 1, length, np.int32)
        offsets[: len(lengths) + 1] = [0, *(ends + 1)]
        tokens = np.concatenate(row).astype(np.int32)[None]  # [1, length]
        yield _batch(tokens, ends, SeqInfo(offsets, offsets, longest, longest))


def document_batches(text: Text, packings: Sequence[Sequence[int]], seed: int) -> Iterator[Batch]:
    """Yields batches of one row: running text, cut into documents of the first packing's lengths, then the second's.

    The lengths of documents are part of a plan over ranks, and JAX compiles every plan, so there are few packings.
    """
    order = _endless(text, np.random.default_rng(seed))
    pending = np.empty(0, np.uint16)
    for lengths in itertools.cycle(packings):
        while len(pending) < sum(lengths):
            pending = np.concatenate([pending, next(order)])
        tokens, pending = pending[: sum(lengths)].astype(np.int32)[None], pending[sum(lengths) :]  # [1, length]
        ends = np.cumsum(lengths) - 1
        tokens[0, [0, *(ends[:-1] + 1)]] = BEGIN
        yield _batch(tokens, ends, SeqInfo.from_lengths(lengths))


def dense_batches(text: Text, rows: int, length: int, seed: int) -> Iterator[Batch]:
    """Yields batches ``[rows, length]`` of running text; each row is one document to the model."""
    order = _endless(text, np.random.default_rng(seed))
    pending = np.empty(0, np.uint16)
    while True:
        while len(pending) < rows * length:
            pending = np.concatenate([pending, next(order)])
        tokens, pending = pending[: rows * length].astype(np.int32).reshape(rows, length), pending[rows * length :]
        yield _batch(tokens, np.array([length - 1]), None)


def _batch(tokens: np.ndarray, ends: np.ndarray, seq_info: SeqInfo | None) -> Batch:
    """Returns a batch of tokens ``[rows, length]``; ends: the last columns of the documents, int ``[documents]``."""
    counted = np.ones(tokens.shape, np.float32)
    counted[:, ends] = 0.0
    return Batch(tokens, np.roll(tokens, -1, axis=1), counted, seq_info)


def _endless(text: Text, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields all paragraphs in a random order, then in another random order, and so on."""
    while True:
        for index in generator.permutation(len(text.paragraphs)):
            yield text.paragraphs[index]
