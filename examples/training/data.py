"""Real text as batches, in numpy: paragraphs of Python's own documentation, packed into rows of bytes.

The text is what ``help()`` shows of the language reference (``pydoc_data.topics``), which comes with Python under its
licence. Nothing is downloaded, and nothing of it is kept here. A token is a byte, or BEGIN.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attn_core import SeqInfo

BEGIN = 256
"""The token before a document's first byte."""
SHORTEST = 64
"""Bytes of the shortest paragraph that is used; it bounds how many documents a row can hold."""


class Batch(NamedTuple):
    """What a step is given, numpy or a framework's arrays.

    Attributes:
        tokens: int32 ``[rows, length]``.
        targets: int32 ``[rows, length]``: the token that follows.
        counted: float32 ``[rows, length]``: 0 where a document ends, for what follows is another document; else 1.
        seq_info: where the documents of the one row are; None when each row is one document.
    """

    tokens: Any
    targets: Any
    counted: Any
    seq_info: SeqInfo | None = None


@dataclass(frozen=True)
class Text:
    """Paragraphs as tokens, uint16 arrays that begin with BEGIN; ``digest`` tells one Python release's text from
    another's."""

    paragraphs: tuple[np.ndarray, ...]
    digest: str

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.paragraphs))


def python_documentation() -> Text:
    """Every paragraph of the language reference with SHORTEST bytes or more, once, with single spaces."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for topic in sorted(topics):
        found |= dict.fromkeys(" ".join(part.split()) for part in re.split(r"\n\s*\n", topics[topic]))
    chosen = [data for paragraph in found if len(data := paragraph.encode()) >= SHORTEST]
    paragraphs = tuple(np.concatenate([[BEGIN], np.frombuffer(data, np.uint8)]).astype(np.uint16) for data in chosen)
    return Text(paragraphs, hashlib.sha256(b"\n".join(chosen)).hexdigest()[:12])


def packed_batches(text: Text, length: int, longest: int, seed: int) -> Iterator[Batch]:
    """Endless batches of one row of ``length`` tokens: paragraphs, cut at ``longest`` tokens and at the row's end.

    Every batch has as many offsets as the fullest row could need, the spare ones naming empty documents, and the same
    bound on their length: to XLA all batches have one shape.
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


def dense_batches(text: Text, rows: int, length: int, seed: int) -> Iterator[Batch]:
    """Endless batches ``[rows, length]`` of running text, each row one document to the model."""
    order = _endless(text, np.random.default_rng(seed))
    held = np.empty(0, np.uint16)
    while True:
        while len(held) < rows * length:
            held = np.concatenate([held, next(order)])
        tokens, held = held[: rows * length].astype(np.int32).reshape(rows, length), held[rows * length :]
        yield _batch(tokens, np.array([length - 1]), None)


def _batch(tokens: np.ndarray, ends: np.ndarray, seq_info: SeqInfo | None) -> Batch:
    """tokens ``[rows, length]``; ends: the columns with which documents end, int ``[documents]``."""
    counted = np.ones(tokens.shape, np.float32)
    counted[:, ends] = 0.0
    return Batch(tokens, np.roll(tokens, -1, axis=1), counted, seq_info)


def _endless(text: Text, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """All paragraphs in a random order, then in another, and so on."""
    while True:
        for index in generator.permutation(len(text.paragraphs)):
            yield text.paragraphs[index]
