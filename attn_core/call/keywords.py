"""The keywords of the public functions, as types. Their overloads take the type of the result from what is returned.

An overload repeats every argument of a function, and both frontends have the same ones. So they are listed once, here.
The functions' docstrings say what they mean.
"""

# No `from __future__ import annotations`: it would hide Required from __required_keys__.
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Required, TypedDict, TypeVar

import numpy as np

from attn_core.call.options import Layout
from attn_core.call.seq_info import SeqInfoLike
from attn_core.expressions.tracing import TracedFunction

Array = TypeVar("Array")
Random = TypeVar("Random")
"""What dropout draws from: torch's generator or JAX's key."""
No = Literal[False]
Yes = Literal[True]


class TableKeywords(TypedDict, Generic[Array], total=False):
    """The keywords that every attention has, and every call of a layer."""

    key_ranges: Array | np.ndarray | None
    alibi_slopes: Array | None


class CommonKeywords(TableKeywords[Array], total=False):
    """The keywords that every attention has."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    sinks: Array | None
    backend: str | tuple[str, ...] | None


class RowKeywords(TypedDict, Generic[Array], total=False):
    """The keywords of attention to whole rows, on one device."""

    mask_mod: Callable[..., object] | TracedFunction | None
    score_mod: Callable[..., object] | TracedFunction | None
    aux: Sequence[Array | np.ndarray]
    q_segment_ids: Array | np.ndarray | None
    kv_segment_ids: Array | np.ndarray | None
    q_positions: Array | np.ndarray | None
    kv_positions: Array | np.ndarray | None
    bias: Array | None
    seq_info: SeqInfoLike


class LayerKeywords(TableKeywords[Array], RowKeywords[Array], total=False):
    """The keywords of ``attention`` that a call of an attention layer passes on."""

    mask: Array | None


class EquinoxKeywords(CommonKeywords[Array], RowKeywords[Array], total=False):
    """The keywords of ``attention`` that ``attend`` of ``jax_frontend.equinox`` passes on."""

    alignment: str
    invariant: str | None


class QkvPackedKeywords(EquinoxKeywords[Array], Generic[Array, Random], total=False):
    """The keywords of ``attention_qkvpacked``, without return_lse."""

    mask: Array | None
    dropout: float
    deterministic: bool
    dropout_rng: Random | None


class AttentionKeywords(QkvPackedKeywords[Array, Random], total=False):
    """The keywords of ``attention``, without return_lse and return_max_logit."""

    layout: Layout | None
    kv_lengths: Array | np.ndarray | None
    kv_starts: Array | np.ndarray | None
    cache_index: Array | np.ndarray | None


class ExplainKeywords(AttentionKeywords[Array, Random], total=False):
    """The keywords of ``attention``."""

    return_lse: bool
    return_max_logit: bool


class SpreadKeywords(CommonKeywords[Array], total=False):
    """The keywords that ``explain_context_parallel`` shares with ``context_parallel_attention`` in both frontends."""

    strategy: str | None
    length: int | Sequence[int] | None
    head_groups: int | None
    alignment: str
    mask: Array | None
    bias: Array | None
    seq_info: SeqInfoLike
    dropout: float
    deterministic: bool


class ContextParallelKeywords(SpreadKeywords[Array], total=False):
    """The keywords of ``context_parallel_attention`` that both frontends have, without return_lse."""

    layout: str


class CachedKeywords(CommonKeywords[Array], total=False):
    """The keywords of ``PagedKVCache.attend``, without return_lse."""

    deterministic: bool
    invariant: str | None


class PagesKeywords(CachedKeywords[Array], total=False):
    """The keywords of ``paged_attention`` that a call may leave out, without return_lse."""

    cu_seqlens_q: Array | np.ndarray | None
    max_len_q: int | None
    kv_starts: Array | np.ndarray | None
    k_scales: Array | None
    v_scales: Array | None


class PagedKeywords(PagesKeywords[Array], total=False):
    """The keywords of ``paged_attention``, without return_lse."""

    block_table: Required[Array | np.ndarray]
    seq_lens: Required[Array | np.ndarray]


class ExplainPagedKeywords(PagesKeywords[Array], total=False):
    """The keywords that ``explain_paged`` shares with ``paged_attention``."""

    return_lse: bool
