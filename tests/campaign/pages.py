"""Lays the keys and values of packed documents out in pages, for the entries that read pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.cli.trial import Trial
from tests.campaign.case import is_banded
from tests.campaign.entries import without

OPTIONS = ("causal", "window", "softcap", "scale", "deterministic", "return_lse", "invariant")
"""The plain options of ``paged_attention`` that a campaign draws."""
TABLES = ("block_table", "seq_lens", "cu_seqlens_q")


class Pages(NamedTuple):
    """The arguments of ``paged_attention`` other than q.

    Attributes:
        k, v: ``[num_pages, page_size, kv_heads, dim]``, float64; places that belong to no document hold NaN.
        block_table: int32 ``[documents, width]``.
        seq_lens: int32 ``[documents]``.
        cu_seqlens_q: int32 ``[documents + 1]``.
        max_len_q: at least the most new tokens of a document.
    """

    k: np.ndarray
    v: np.ndarray
    block_table: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    max_len_q: int

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """The arguments that are arrays of integers."""
        return {name: getattr(self, name) for name in TABLES}


def pages_of(trial: Trial) -> Pages:
    """Returns the documents of a trial in pages of a random size and in a random order."""
    spec, inputs, random = trial.spec, trial.inputs, np.random.default_rng(trial.seed)
    page_size = int(random.choice((1, 4, 16)))
    lengths = np.diff(inputs.cu_seqlens_k)
    counts = -(-lengths // page_size)
    spare = 3
    order = random.permutation(int(counts.sum()) + spare).astype(np.int32)
    table = np.full((len(lengths), max(int(counts.max(initial=0)), 1)), -1, np.int32)
    pools = [np.full((len(order), page_size, *array.shape[1:]), np.nan) for array in (inputs.k, inputs.v)]
    used = 0
    for document, (length, count) in enumerate(zip(lengths, counts)):
        table[document, :count] = order[used : used + count]
        used += count
        start = int(inputs.cu_seqlens_k[document])
        for place in range(length):
            page, slot = table[document, place // page_size], place % page_size
            for pool, array in zip(pools, (inputs.k, inputs.v)):
                pool[page, slot] = array[start + place]
    return Pages(pools[0], pools[1], table, lengths.astype(np.int32), inputs.cu_seqlens_q, spec.max_len_q or 0)


def refuses(spec: AttentionSpec) -> str | None:
    """Returns why a spec is no call on pages, or None."""
    if not spec.packed:
        return "packed documents alone"
    if spec.alignment != "bottom_right" and (is_banded(spec)):
        return "bottom-right alone"
    return without("mask", "bias", "alibi", "dropout", "gradients")(spec)
