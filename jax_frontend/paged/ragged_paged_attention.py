"""ragged_paged_attention: the function of that name in jax.experimental.pallas.ops.tpu, on every kernel.

Signature, defaults and meaning are those of jax 0.10 to 0.12: the kernel's reference there, with exact masks. Later
kernels of TPU libraries under the same name (vLLM's, with ``distribution`` and a cache that they update) take other
arguments, which are refused by Python itself.
"""

from __future__ import annotations

from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.foreign_keywords import hide_unknown, refuse_keywords
from attn_core.call.kinds import check_size
from attn_core.call.options import check_number
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged.layouts import views_of_one
from jax_frontend.dispatch import plan
from jax_frontend.paged.attention import paged_attention

Array = jax.Array

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)
HIDDEN = -1e30
"""From here on, what the host adds to the score of a hidden key leaves it no weight in float32."""

_OURS = {"block_table": "page_indices", "seq_lens": "kv_lens", "cu_seqlens_q": "cu_q_lens", "k_pages": "kv_pages"}
_OURS |= {"v_pages": "kv_pages", "window": "sliding_window", "softcap": "soft_cap", "scale": "sm_scale"}
"""Our names of arguments, and the caller's."""


@hide_unknown
def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    max_len_q: int | None = None,
    backend: str | tuple[str, ...] | None = None,
    **unknown: Never,
) -> Array:
    """Computes causal attention of new tokens to keys and values in pages, prefill and decoding mixed.

    The slices of keys and values are copies of the pool, except inside ``jit`` on ``jax_xla``, where XLA reads them in
    place. A program that owns its cache should have one pool of keys and one of values, and call ``paged_attention``.

    Args:
        q: ``[tokens, heads, head_dim]``, the new tokens of all sequences end to end.
        kv_pages: ``[pages, page_size, 2 * kv_heads, head_dim]``: the keys of head h at 2h, its values at 2h + 1; the
            dtype of q.
        kv_lens: int32 ``[max_num_seqs]``: tokens of each sequence, the new ones included.
        page_indices: int32 ``[max_num_seqs, pages_per_seq]``.
        cu_q_lens: int32 ``[max_num_seqs + 1]``: the offsets of the sequences in q.
        num_seqs: int32 ``[1]``: only so many sequences count; what the tables say of others is ignored.
        sm_scale: the scale of scores. Mind the default of 1, which is the host's.
        sliding_window: so many keys are visible, the token's own included.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
        mask_value: hidden keys have no weight here, so only numbers with that effect are accepted: -1e30 and less.
        k_scale, v_scale: factors of all keys, and of all values.
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: they tune the host's kernel and do not change
            its result. They are checked as there, and have no effect.
        max_len_q: ours: the most new tokens of a sequence, an int. Without it kernels plan for ``tokens``.
        backend: ours, as in ``paged_attention``.

    Returns:
        ``[tokens, heads, head_dim]`` in q's dtype; 0 for tokens behind the last sequence, where the host's result is
        undefined.

    Raises:
        ShapeError, DTypeError, SpecError: for invalid arguments, by the names above.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
    """
    if unknown:
        refuse_keywords(ragged_paged_attention, unknown)
    plan.check_array("q", q)
    plan.check_array("kv_pages", kv_pages)
    kv_lens, page_indices, cu_q_lens, num_seqs = _tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    if kv_pages.dtype != q.dtype:
        raise DTypeError(f"kv_pages: expected the dtype of q, {q.dtype}, got {kv_pages.dtype}; cast it")
    tuning = {"num_kv_pages_per_block": num_kv_pages_per_block, "num_queries_per_block": num_queries_per_block}
    for name, value in {**tuning, "vmem_limit_bytes": vmem_limit_bytes}.items():
        if value is not None:
            check_size(name, value, 1)
    keys, values = _scales(k_scale, v_scale, mask_value)
    in_keys, in_values = views_of_one("interleaved", tuple(kv_pages.shape), "kv_pages")
    batch = page_indices.shape[0]
    count = jnp.clip(num_seqs[0], 0, batch)
    sequence = jnp.arange(batch + 1, dtype=jnp.int32)
    try:
        out = paged_attention(
            q,
            kv_pages[in_keys.part],
            kv_pages[in_values.part],
            block_table=page_indices,
            seq_lens=jnp.where(sequence[:-1] < count, kv_lens, 0),
            cu_seqlens_q=jnp.where(sequence <= count, cu_q_lens, cu_q_lens[count]),
            max_len_q=max_len_q,
            window=sliding_window,
            softcap=soft_cap,
            scale=_scaled(sm_scale, keys),
            backend=backend,
        )
    except SpecError as error:
        raise type(error)(_in_callers_words(str(error))) from None
    return out if values == 1 else (out.astype(jnp.float32) * values).astype(out.dtype)


def _tables(kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> list[Array]:
    """Returns the tables as JAX arrays. Raises DTypeError or ShapeError for other dtypes and shapes than the host's."""
    named = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    for name, table in named.items():
        if not isinstance(table, np.ndarray):
            plan.check_array(name, table)
        if table.dtype != np.int32:
            raise DTypeError(f"{name}: expected dtype int32, got {table.dtype}; cast it")
    if page_indices.ndim != 2:
        expected = "[max_num_seqs, pages_per_seq]"
        raise ShapeError(f"page_indices: expected shape {expected}, got {list(page_indices.shape)}")
    batch = page_indices.shape[0]
    shapes = {"kv_lens": (kv_lens, (batch,)), "cu_q_lens": (cu_q_lens, (batch + 1,)), "num_seqs": (num_seqs, (1,))}
    for name, (table, shape) in shapes.items():
        if tuple(table.shape) != shape:
            raise ShapeError(f"{name}: expected shape {list(shape)}, got {list(table.shape)}")
    return [plan.moved_array(*each) for each in named.items()]


def _scales(k_scale: Any, v_scale: Any, mask_value: Any) -> tuple[float, float]:
    """Returns the factors of keys and of values. Raises SpecError for numbers that cannot be honoured."""
    hidden = check_number("mask_value", mask_value)
    if hidden is not None and not hidden <= HIDDEN:
        raise SpecError(
            f"mask_value={hidden}: expected None, or {HIDDEN} or less, because hidden keys have no weight here"
        )
    factors = []
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        factor = check_number(name, value)
        if factor is not None and not 0 < factor < float("inf"):
            raise SpecError(f"{name}={factor}: expected a finite number above 0, or None")
        factors.append(1.0 if factor is None else factor)
    return factors[0], factors[1]


def _scaled(sm_scale: Any, keys: float) -> float:
    """Returns the scale of scores with the factor of keys in it. Raises SpecError naming sm_scale."""
    scale = check_number("sm_scale", sm_scale)
    if scale is None or not 0 < scale < float("inf"):
        raise SpecError(f"sm_scale={sm_scale}: expected a finite number above 0; the host's default is 1.0")
    return scale * keys


def _in_callers_words(message: str) -> str:
    """Returns the message of an error with the caller's name of the argument that it begins with."""
    for ours, name in _OURS.items():
        if message.startswith((f"{ours}:", f"{ours}=", f"{ours}[")):
            return name + message[len(ours) :]
    return message
