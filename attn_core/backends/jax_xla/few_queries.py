"""The forward of few queries in plain XLA operations, which reads keys and values where they are in memory.

XLA copies keys and values to multiply head by head, which takes longer than all the rest. So all heads share one
product, or the products take the arrays as they are. Axes in the einsums: as in ``whole.py``; r query rows of all
heads, c channels of all kv heads.
"""

from __future__ import annotations

from typing import Any

from attn_core.backends.jax_xla.finite import all_finite, finite_only
from attn_core.backends.jax_xla.products import product, sum_dtype
from attn_core.backends.jax_xla.tiles import XlaOperands, tokens_first
from attn_core.backends.jax_xla.whole import arrange_whole, logits_of, results, softmax, visible_pairs
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

FEW_QUERIES = 16
"""The most queries of a call whose forward runs here."""

MOST_PRODUCTS = 32
"""The most queries * kv heads for which one product multiplies all heads. It does the work once for each kv head."""


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. Traceable; never called for an empty spec."""
    from jax.lax import platform_dependent

    # On a CPU, one product for all heads has k and v as they are in memory. XLA would copy them to multiply head by
    # head. With bfloat16 it copies them in any case, to float32.
    if spec.dtype == "bfloat16" or spec.q_len * spec.num_kv_heads > MOST_PRODUCTS:
        return _forward(spec, inputs, joint=False)
    return platform_dependent(  # type: ignore[no-any-return]
        cpu=lambda: _forward(spec, inputs, joint=True), default=lambda: _forward(spec, inputs, joint=False)
    )


def _forward(spec: AttentionSpec, inputs: Inputs, joint: bool) -> tuple[Any, Any]:
    import jax.numpy as jnp
    from jax import lax

    call = arrange_whole(spec, inputs)
    seen = visible_pairs(spec, call, inputs)

    def attend(k: Any, v: Any) -> tuple[tuple[Any, Any], Any]:
        """Returns (out, lse) and whether they are finite. Nothing is contained: a hidden NaN makes them NaN."""
        scores = (_joint_scores if joint else _scores)(spec, call, k)
        weights, top, total = softmax(spec, call, logits_of(spec, call, inputs, scores, seen)[0], seen)
        summed = (_joint_sums if joint else _sums)(spec, weights.astype(sum_dtype(spec)), v.astype(sum_dtype(spec)))
        # A NaN in a key of one head is in the joint scores of all heads.
        return results(spec, call, top, total, summed), all_finite(summed, *([scores] if joint else []))

    def contained() -> tuple[Any, Any]:
        out, lse = attend(finite_only(inputs.k), finite_only(inputs.v))[0]
        bad = [~jnp.isfinite(inputs.k).all(-1, keepdims=True), ~jnp.isfinite(inputs.v)]
        here = jnp.ones((), bool) if seen is None else seen
        here = jnp.broadcast_to(here, (*out.shape[:4], spec.kv_len)).astype(jnp.float32)
        met = jnp.einsum("bhgij,bjhe->bhgie", here, jnp.concatenate(bad, -1).astype(jnp.float32)) > 0
        right = jnp.where(met[..., :1] | met[..., 1:], jnp.nan, out), jnp.where(met[..., 0], jnp.nan, lse)
        # XLA may round differently here. Rows that no NaN has reached keep their bits.
        return tuple(jnp.where(jnp.isfinite(a), a, b) for a, b in zip(usual, right, strict=True))  # type: ignore[return-value]

    usual, finite = attend(inputs.k, inputs.v)
    # If every key is visible, so is every NaN.
    out, lse = usual if seen is None and not joint else lax.cond(finite, lambda: usual, contained)
    return tokens_first(spec, out).reshape(spec.out_shape), lse.reshape(spec.lse_shape)


def _scores(spec: AttentionSpec, call: XlaOperands, k: Any) -> Any:
    return product("bhgid,bjhd->bhgij", call.q, k, spec.lse_dtype)


def _sums(spec: AttentionSpec, weights: Any, v: Any) -> Any:
    return product("bhgij,bjhe->bhgie", weights, v, spec.lse_dtype)


def _joint_scores(spec: AttentionSpec, call: XlaOperands, k: Any) -> Any:
    """Returns ``_scores`` from one product: each query has zeros for the channels of the other kv heads."""
    import jax.numpy as jnp
    from jax import lax

    own = jnp.eye(spec.num_kv_heads, dtype=call.q.dtype)
    q = call.q.transpose(0, 1, 4, 2, 3)[:, None] * own[:, :, None, None, None]  # [b, H, h, d, g, i]
    q = q.transpose(0, 1, 3, 2, 4, 5).reshape(spec.batch, spec.num_kv_heads * spec.head_dim, -1)
    # A barrier, because XLA would exchange the factors to save the transpose, and then multiply slowly.
    scores = lax.optimization_barrier(product("bjc,bcr->bjr", k.reshape(*k.shape[:2], -1), q, spec.lse_dtype))
    return scores.swapaxes(1, 2).reshape(*call.q.shape[:4], spec.kv_len)


def _joint_sums(spec: AttentionSpec, weights: Any, v: Any) -> Any:
    """Returns ``_sums`` from one product, which also has each query's sums of the other heads' values."""
    import jax.numpy as jnp

    rows = weights.reshape(spec.batch, -1, spec.kv_len)
    wide = product("brj,bjc->brc", rows, v.reshape(*v.shape[:2], -1), spec.lse_dtype)
    wide = wide.reshape(*weights.shape[:4], spec.num_kv_heads, spec.value_dim)
    return jnp.moveaxis(jnp.diagonal(wide, axis1=1, axis2=4), -1, 1)
