"""Rows of tokens in blocks of one size: a row's bits then do not depend on the rows beside it. Plain numpy.

Linear layers, norms and activations compute each row of ``[tokens, channels]`` by itself, but their libraries choose a
kernel by the number of rows, and compute the last elements of a tensor in another way. Here a layer always gets a block
of ROWS rows. A token is in the row of its block that its position in its document says. So in a prompt, in a chunk of
it, alone and packed between other documents, the same kernel computes it at the same place. Rows without a token are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

ROWS = 16
"""Rows of a block. Fewer waste less in decoding, and more make products of many tokens faster."""


class Rows(NamedTuple):
    """Where the tokens of a call are.

    Attributes:
        slots: int64 ``[tokens]``: each token's row.
        count: all rows, a multiple of ``size``.
        size: the rows of a block.
    """

    slots: np.ndarray
    count: int
    size: int

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.count // self.size

    @property
    def whole(self) -> bool:
        """Whether all tokens are one block, in their order, without other rows."""
        return self.count == self.size and np.array_equal(self.slots, np.arange(self.count))

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Returns ``[count]`` with the tokens' values ``[tokens]`` in their rows and 0 elsewhere."""
        spread = np.zeros(self.count, values.dtype)
        spread[self.slots] = values
        return spread


def in_blocks(positions: np.ndarray, size: int = ROWS) -> Rows:
    """Returns rows such that position p of a document is in row ``p % size`` of a block, in as few blocks as possible.

    Args:
        positions: int ``[tokens]``, the position of each token in its document.
    """
    row = np.asarray(positions, np.int64) % size
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=size)
    block = np.empty_like(row)
    block[order] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, ... in each row
    return Rows(block * size + row, int(counts.max(initial=0)) * size, size)


def as_they_are(positions: np.ndarray) -> Rows:
    """Returns all tokens in one block without other rows, as models usually compute them."""
    return Rows(np.arange(len(positions)), len(positions), len(positions))


class Batch(NamedTuple):
    """Samples to score: documents end to end, without the last token of each, which predicts nothing.

    Attributes:
        tokens: int32 ``[tokens]``; positions: int32 ``[tokens]``, in the document.
        lengths: tokens of each document.
        scored: int64 ``[sampled]``: the tokens before each sampled one; targets: int64 ``[sampled]``, the sampled ones.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: list[int]
    scored: np.ndarray
    targets: np.ndarray


def packed(samples: Any) -> Batch:
    """Returns the samples, each a ``sampling.Sample``, as one packed row."""
    inputs = [[*sample.prompt, *sample.answer[:-1]] for sample in samples]
    lengths = [len(each) for each in inputs]
    starts = np.cumsum([0, *lengths[:-1]])
    firsts = [start + len(sample.prompt) - 1 for start, sample in zip(starts, samples, strict=True)]
    return Batch(
        np.concatenate(inputs).astype(np.int32),
        np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        lengths,
        np.concatenate([first + np.arange(len(each.answer)) for first, each in zip(firsts, samples, strict=True)]),
        np.concatenate([np.asarray(each.answer, np.int64) for each in samples]),
    )
