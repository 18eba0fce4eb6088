"""JAX's splash attention for TPUs: the Pallas kernels in ``jax.experimental.pallas.ops.tpu.splash_attention``.

This project never ran them on a TPU. They are proven in Pallas's TPU interpret mode on a CPU, and they lower for a TPU.

Limits: bfloat16 and float32, head_dim up to 256; no mask, key ranges, functions, bias, ALiBi, dropout, gradient of the
log-sum-exp or parts of a row; equal bits on every run are not promised. Pages: ``jax_ragged_paged``.
Corrections, each of which the kernel lacks or gets wrong:
- It takes no scale, so q is scaled here. If that rounds bfloat16, the rest is appended to q as further channels, beside
  a second copy of k: the log-sum-exp would err by up to 2^-9 of the largest score otherwise.
- Lengths must be multiples of 128, or the kernel leaves out the last ones: q, k and v are padded, and the mask hides
  the padding. Channels are padded to whole vectors of 128, which a TPU's memory does anyway.
- Rows that see no key are the mean of some values, or NaN. They become 0, with a log-sum-exp of -inf and no gradient.
- The gradient of sinks is summed in the inputs' dtype before jax 0.12. It is computed here, in float32.
- Documents: splash hides pairs of unequal numbers. Their diagonals are on the device, so every block is computed with
  causal or a window. Without documents blocks outside the band are skipped.
The backward is jax.vjp of the forward, which runs the forward once more. XLA can merge the two, because they are equal.
Upstream: jax 0.10 to 0.12.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from attn_core.backends.jax_splash import operands, visibility
from attn_core.backends.jax_splash.visibility import InBand, PackedRows
from attn_core.backends.shared.in_jax.promotion import usual_promotion
from attn_core.backends.shared.in_jax.xla_precision import exact_products
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "jax"
REQUIRES = "jax>=0.10"

FORWARD = Support(
    kernel="JAX's splash attention",
    devices=("tpu",),
    dtypes=("bfloat16", "float32"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    sinks=True,
    packed=True,
    lse=True,
    unproven=True,
)
BACKWARD = replace(FORWARD)

LANES = 128
"""The elements of a TPU's vector. The kernel's blocks and channels are multiples of it."""

BLOCKS = (512, 256, 128)
"""Lengths of the kernel's blocks: the first that divides the padded length. Nobody measured others."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses nothing: every combination of claims works."""
    return ()


def probe() -> str:
    """Imports the kernel's symbols and returns jax's version."""
    import jax

    kernels = _kernels()
    _ = (kernels.SplashAttentionKernel, kernels.make_splash_mha, kernels.SegmentIds, visibility.mask_class())
    return jax.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns how a call becomes one of splash.

    path: "packed"; "band" if causal, a window or padded keys hide something; else "whole".
    lengths: padded. blocks: of queries and keys. widths: padded channels of q and k, and of v. rest: whether q has
    further channels with what scaling rounds away. visible: the mask function, None if there is nothing for it to hide.
    """
    lengths = _whole_lanes(spec.q_len), _whole_lanes(spec.kv_len)
    edge = band(spec)._replace(offset=0) if spec.packed else band(spec)
    # Documents hide padded keys by their numbers, so these need no bound.
    visible: InBand | None = InBand(edge, lengths[1] if spec.packed else spec.kv_len)
    bounded = edge.left is not None or edge.right is not None
    if spec.packed:
        path, visible = "packed", visible if bounded else None
    elif edge.hides_nothing(spec.q_len, spec.kv_len) and spec.kv_len == lengths[1]:
        path, visible = "whole", None
    else:
        path = "band"
    rest = (
        spec.dtype == "bfloat16" and math.frexp(spec.scale or 1.0)[0] != 0.5
    )  # a power of two only moves the exponent
    return {
        "path": path,
        "lengths": lengths,
        "blocks": tuple(next(block for block in BLOCKS if length % block == 0) for length in lengths),
        "widths": (_whole_lanes(spec.head_dim * (2 if rest else 1)), _whole_lanes(spec.value_dim)),
        "scale": spec.scale,
        "rest": rest,
        "softcap": spec.softcap,
        "visible": visible,
    }


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def _kernels() -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """See ``Backend.forward``; traceable."""
    import jax.numpy as jnp

    with usual_promotion(), exact_products(inputs.q.dtype):
        rows = _rows(spec, inputs)
        out, lse = _attend(spec, rows, inputs.sinks)(*operands.of_call(spec, lower(spec), inputs))
        out = operands.tokens_first(out, spec.out_shape)
        lse = jnp.zeros(spec.lse_shape, jnp.float32) if lse is None else lse[:, : spec.q_len].reshape(spec.lse_shape)
        sees = _sees_key(spec, rows)
        if sees is None:
            return out, lse
        return jnp.where(sees[:, None, None], out, jnp.zeros_like(out)), jnp.where(sees, lse, -jnp.inf)


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``; traceable."""
    import jax
    import jax.numpy as jnp

    with usual_promotion(), exact_products(inputs.q.dtype):
        how, rows = lower(spec), _rows(spec, inputs)
        sees = _sees_key(spec, rows)
        # With a gradient of 0 the kernel's own values of a row that sees no key reach no gradient.
        dout = dout if sees is None else jnp.where(sees[:, None, None], dout, jnp.zeros_like(dout))
        attend = _attend(spec, rows, inputs.sinks, differentiated=True)
        _, pull = jax.vjp(lambda *qkv: attend(*qkv)[0], *operands.of_call(spec, lower(spec), inputs))
        dq, dk, dv = pull(operands.heads_first(dout, how["lengths"][0], how["widths"][1]))
        dsinks = None if inputs.sinks is None else operands.sink_gradient(inputs.sinks, out, lse, dout)
        dq, dk, dv = operands.gradients(spec, how, inputs, dq, dk, dv)
        return Gradients(dq, dk, dv, dsinks=dsinks)


def _rows(spec: AttentionSpec, inputs: Inputs) -> PackedRows | None:
    return visibility.packed_rows(spec, inputs, lower(spec)["lengths"]) if spec.packed else None


def _sees_key(spec: AttentionSpec, rows: PackedRows | None) -> Any:
    """Returns which queries see a key, bool ``[q_len]``; None if all do."""
    return visibility.rows_that_see(spec) if rows is None else rows.sees_key


def _attend(spec: AttentionSpec, rows: PackedRows | None, sinks: Any, *, differentiated: bool = False) -> Any:
    """Returns a function of the kernel's q, k and v that returns (out, lse), padded and heads first; lse may be None.

    Args:
        differentiated: whether JAX differentiates it. The kernel then runs with its log-sum-exp, but returns none.
    """
    import jax
    import jax.numpy as jnp

    with_lse = (spec.return_lse or spec.needs_backward) and not differentiated
    kernel = _kernel(spec, rows, with_lse)
    documents = None if rows is None else _kernels().SegmentIds(rows.queries, rows.keys)
    if sinks is not None:
        sinks = jnp.tile(jax.lax.stop_gradient(sinks).astype(jnp.float32), spec.batch)

    def attend(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        results = kernel(q, k, v, documents, sinks)
        return (results[0], results[1][0]) if with_lse else (results, None)

    return attend


def _kernel(spec: AttentionSpec, rows: PackedRows | None, with_lse: bool) -> Any:
    """Returns splash's kernel of a call."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask, splash_attention_mask_info

    how, kernels = lower(spec), _kernels()
    queries, keys = how["blocks"]
    settings = {
        "block_sizes": kernels.BlockSizes(queries, keys, keys, queries, keys, keys, queries, keys),
        "save_residuals": with_lse,
        "attn_logits_soft_cap": how["softcap"],
    }
    if how["path"] == "band":
        mask = visibility.mask_class()(how["lengths"], how["visible"])
        masks = splash_attention_mask.MultiHeadMask([mask] * (spec.batch * spec.num_heads))
        return kernels.make_splash_mha(masks, head_shards=1, q_seq_shards=1, **settings)
    # Without a map of the blocks the kernel computes each of them, and calls the mask function if there is one.
    positions = None if rows is None or how["visible"] is None else rows.diagonal
    info = splash_attention_mask_info.MaskInfo(None, None, None, None, positions)
    return kernels.SplashAttentionKernel(
        *(info, info, info),
        is_mqa=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        residual_checkpoint_name=None,
        mask_function=how["visible"],
        interpret=False,
        **settings,
    )
