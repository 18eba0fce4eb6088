"""The tensors of a call, and of its gradients, of whatever framework the backend speaks."""

from __future__ import annotations

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """The tensors of one call, of whatever framework the backend speaks.

    Shapes: q ``[batch, q_len, heads, head_dim]``, k ``[batch, kv_len, kv_heads, head_dim]``, v ``[batch, kv_len,
    kv_heads, value_dim]``; packed: no batch axis. mask (bool) and bias 4-D as the spec says; alibi_slopes and sinks
    float; cu_seqlens int32 ``[documents + 1]``; rng two integer words (seed, offset), given when dropout > 0.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    rng: Any = None


class PagedInputs(NamedTuple):
    """The tensors of a call whose keys and values are in pages: what ``forward`` gets where ``spec.paged``.

    Shapes: q ``[tokens, heads, head_dim]``, k and v pools ``[num_pages, page_size, kv_heads, dim]``, block_table int32
    ``[documents, width]``, seq_lens int32 ``[documents]``, cu_seqlens_q int32 ``[documents + 1]`` or None where every
    sequence has one query. Values of these three on a GPU may say anything, and must not lead out of a pool.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any = None
    sinks: Any = None


class Gradients(NamedTuple):
    """dq, dk, dv in the dtypes and shapes of q, k, v; dbias when ``spec.bias_gradient``, dsinks when ``spec.sinks``."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None
