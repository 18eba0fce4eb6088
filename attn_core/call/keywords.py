"""The keywords of the public functions, as types. Their overloads take the type of the result from what is returned.

An overload repeats every argument of a function, and both frontends have the same ones. So they are listed once, here.
The functions' docstrings say what they mean.
"""

# No `from __future__ import annotations`: it would hide Required from __required_keys__.
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Required, TypedDict, TypeVar

from attn_core.call.layouts import Layout
from attn_core.expressions.tracing import TracedFunction

Array = TypeVar("Array")
Random = TypeVar("Random")
"""What dropout draws from: torch's generator or JAX's key."""
No = Literal[False]
Yes = Literal[True]


class QkvPackedKeywords(TypedDict, Generic[Array, Random], total=False):
    """The keywords of ``attention_qkvpacked``, without return_lse."""

    causal: bool
    alignment: str
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    mask: Array | None
    key_ranges: Any
    mask_mod: Callable[..., Any] | TracedFunction | None
    score_mod: Callable[..., Any] | TracedFunction | None
    aux: Sequence[Any]
    q_segment_ids: Any
    kv_segment_ids: Any
    q_positions: Any
    kv_positions: Any
    bias: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    seq_info: Any
    dropout: float
    deterministic: bool
    backend: str | tuple[str, ...] | None
    dropout_rng: Random | None
    invariant: str | None


class AttentionKeywords(QkvPackedKeywords[Array, Random], total=False):
    """The keywords of ``attention``, without return_lse and return_max_logit."""

    layout: Layout
    kv_lengths: Any
    kv_starts: Any
    cache_index: Any


class ContextParallelKeywords(TypedDict, Generic[Array], total=False):
    """The keywords of ``context_parallel_attention`` that both frontends have, without return_lse."""

    strategy: str | None
    layout: str
    length: int | Sequence[int] | None
    head_groups: int | None
    causal: bool
    alignment: str
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    mask: Array | None
    key_ranges: Any
    bias: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    seq_info: Any
    dropout: float
    deterministic: bool
    backend: str | tuple[str, ...] | None


class CachedKeywords(TypedDict, Generic[Array], total=False):
    """The keywords of ``PagedKVCache.attend``, without return_lse."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    key_ranges: Any
    softcap: float | None
    sinks: Array | None
    scale: float | None
    deterministic: bool
    backend: str | tuple[str, ...] | None
    alibi_slopes: Array | None
    invariant: str | None


class PagedKeywords(CachedKeywords[Array], total=False):
    """The keywords of ``paged_attention``, without return_lse."""

    block_table: Required[Any]
    seq_lens: Required[Any]
    cu_seqlens_q: Any
    max_len_q: int | None
    kv_starts: Any
    k_scales: Array | None
    v_scales: Array | None
