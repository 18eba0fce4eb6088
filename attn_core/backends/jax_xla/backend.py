"""JAX's own attention, compiled by XLA: every feature of the spec, on any device, without torch.

If ``jax.nn.dot_product_attention`` computes exactly what the spec says, the forward is that function. Every other
forward, and every backward, is the blocked maths of ``attention.py``. ``lower`` returns which. jax.nn differs from the
spec as follows (jax 0.10.2, jax/_src/nn/functions.py; the same in 0.12): its causal and window start at the top left, a
row that sees no key becomes the mean of v, its softmax is float32 for float64 inputs too, its float16 does not compile
on CPU, a bias row of -inf gives NaN, its log-sum-exp is rounded to the inputs' dtype, and it stores all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from attn_core.backends.jax_xla import attention, paged, tiles
from attn_core.backends.jax_xla.tiles import BlockSizes
from attn_core.backends.shared import jax_nn
from attn_core.backends.shared.xla_precision import product_precision
from attn_core.backends.support import Build, Support
from attn_core.call.masks import Band, band
from attn_core.call.spec import DTYPES, AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "jax"
REQUIRES = "jax>=0.10"

FORWARD = Support(
    kernel="XLA's attention",
    devices=("cpu", "cuda"),
    dtypes=DTYPES,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    mask=True,
    bias=True,
    bias_gradient=True,
    alibi=True,
    sinks=True,
    packed=True,
    dropout=True,
    portable_dropout=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
    paged=True,
    symbolic=True,
)
BACKWARD = replace(FORWARD, paged=False)

MAX_SCORES = 2**22
"""Scores (batch * heads * q_len * kv_len) above which the blocked maths replaces ``jax.nn``'s full matrix."""

LARGEST_BLOCKS = {"cpu": BlockSizes(256, 256), "cuda": BlockSizes(1024, 1024)}
"""Largest blocks of the blocked maths: sized for a CPU's cache, and to keep a GPU busy (H200: 6 times 256 x 256)."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses nothing. float64 needs jax_enable_x64, but without it no float64 array reaches a spec."""
    return ()


def probe() -> str:
    """Imports the functions that this backend needs and returns jax's version."""
    import jax
    from jax.custom_batching import custom_vmap  # noqa: F401

    jax_nn.jax_function()
    return jax.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns ``path``: the forward's algorithm; ``blocks``: sizes per kind of device; ``jax_nn``: its keywords."""
    blocks = {kind: tiles.block_sizes(spec, largest) for kind, largest in LARGEST_BLOCKS.items()}
    if not _jax_nn_means_it(spec):
        return {"path": "blocked", "blocks": blocks}
    keywords = {"scale": spec.scale, "implementation": "xla", **_edges(spec, band(spec))}
    return {"path": "jax_nn", "blocks": blocks, "jax_nn": keywords}


def forward(spec: AttentionSpec, inputs: Any) -> tuple[Any, Any]:
    """Returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. Traceable."""
    if spec.paged is not None:
        with _usual_promotion():
            return paged.forward(spec, inputs, forward)
    lowered = lower(spec)
    with _usual_promotion():
        if lowered["path"] == "blocked":
            return _where_it_runs(lowered["blocks"], lambda blocks: attention.forward(spec, inputs, blocks))
        return _jax_nn(spec, inputs, lowered["jax_nn"]), attention.log_sum_exp(spec, inputs)


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """Returns the gradients from the saved out and lse. Traceable."""

    def run(blocks: BlockSizes) -> Gradients:
        return attention.backward(spec, inputs, blocks, out, lse, dout, dlse)

    with _usual_promotion():
        return _where_it_runs(lower(spec)["blocks"], run)


@contextmanager
def _usual_promotion() -> Iterator[None]:
    """Sets JAX's default promotion of ranks and dtypes, which the maths relies on, whatever the caller has set."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _where_it_runs(blocks: dict[str, BlockSizes], run: Callable[[BlockSizes], Any]) -> Any:
    """Runs with the block sizes of the device that the program is compiled for, which only the compiler knows."""
    from jax.lax import platform_dependent

    if blocks["cpu"] == blocks["cuda"]:
        return run(blocks["cpu"])
    return platform_dependent(cpu=lambda: run(blocks["cpu"]), default=lambda: run(blocks["cuda"]))


def _jax_nn_means_it(spec: AttentionSpec) -> bool:
    """Returns whether jax.nn computes exactly this spec, and few enough scores to store them all."""
    if spec.symbolic:  # the conditions below compare sizes
        return False
    edge = band(spec)
    # jax.nn's diagonal is top-left, which an offset of 0 means for either alignment.
    aligned = edge.offset == 0 or edge.hides_nothing(spec.q_len, spec.kv_len)
    extras = (spec.softcap, spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.documents)
    return (
        all(extra is None for extra in extras)
        and not (spec.sinks or spec.dropout)
        and spec.value_dim == spec.head_dim
        and spec.dtype in ("float32", "bfloat16")
        and aligned
        and not edge.empties_a_row(spec.q_len, spec.kv_len)
        and spec.batch * spec.num_heads * spec.q_len * spec.kv_len <= MAX_SCORES
    )


def _edges(spec: AttentionSpec, edge: Band) -> dict[str, Any]:
    """Returns jax.nn's keywords for a band with offset 0. A distance that reaches every key replaces None."""
    if edge.hides_nothing(spec.q_len, spec.kv_len):
        return {}
    if edge.left is None and edge.right == 0:
        return {"is_causal": True}
    left = spec.q_len if edge.left is None else edge.left
    return {"local_window_size": (left, spec.kv_len if edge.right is None else edge.right)}


def _jax_nn(spec: AttentionSpec, inputs: Inputs, keywords: dict[str, Any]) -> Any:
    """Runs jax.nn on values without NaN and Inf, then writes NaN into the rows that see one.

    jax.nn would spread ``0 * NaN`` to every row.
    """
    import jax
    import jax.numpy as jnp

    (value,) = tiles.summands(inputs.v)
    precision = product_precision(inputs.q.dtype)
    # jax.nn has no precision argument, so set the default around it: its own would round float32 to TF32 on a GPU.
    with nullcontext() if precision is None else jax.default_matmul_precision("highest"):
        out = jax_nn.dot_product_attention(inputs.q, inputs.k, value.clean, **keywords)
    rows, keys = tiles.rows_of(spec), jnp.arange(spec.kv_len)
    seen = (keys >= rows.first[:, None]) & (keys < rows.stop[:, None])
    grouped = out.reshape(spec.batch, spec.q_len, spec.num_kv_heads, spec.group_size, spec.value_dim)
    seen = jnp.broadcast_to(seen, (spec.group_size, *seen.shape))
    return tiles.contain("gij,bjhe->bihge", grouped, seen, value).reshape(spec.out_shape)
