"""JAX's paged attention for TPUs: the Pallas kernel in ``jax.experimental.pallas.ops.tpu.ragged_paged_attention``.

This project never ran it on a TPU. It is proven in Pallas's interpret mode on a CPU, and it lowers for a TPU.

Limits: paged calls only, forward only; bfloat16 and float32, head_dim up to 256; causal, or one query a sequence;
windows that end at the diagonal, softcap; no log-sum-exp, sinks, ALiBi, key ranges, quantised pages or first visible
keys; equal bits on every run are not promised.
The kernel reads one pool, in which heads of keys and of values alternate. **Each call copies both pools into such a
pool**: it reads and writes all pages once, also those of no sequence. Block tables must fit a TPU's scalar memory.
Corrections, each of which the kernel lacks or gets wrong:
- Channels are padded to whole vectors of 128, and kv heads to numbers that the kernel can tile.
- A sequence without keys shifts the pages of all later ones: it gets one key, which no result shows.
- Sequences without queries at the end would end the second block of heads before it starts: they are left out.
- Rows that see no key and tokens behind the last sequence hold any numbers. They become 0.
Page numbers, lengths and offsets are clamped on the device.
Upstream: jax 0.10 to 0.12.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.shared.in_jax.offsets import document_numbers, safe_offsets
from attn_core.backends.shared.in_jax.promotion import usual_promotion
from attn_core.backends.shared.in_jax.xla_precision import exact_products
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, PagedInputs

FRAMEWORK = "jax"
REQUIRES = "jax>=0.10"

NAME = "JAX's ragged paged attention"
FORWARD = Support(
    kernel=NAME,
    devices=("tpu",),
    dtypes=("bfloat16", "float32"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    softcap=True,
    packed=True,
    paged=True,
    unproven=True,
)
BACKWARD = None
PAGES_ALONE = True

LANES = 128
"""The elements of a TPU's vector. Channels are a multiple of it."""
KEYS, ROWS, QUERIES = 512, 1024, 32
"""About the keys of a block, the most rows of scores (queries times heads of a group), and the most queries. Nobody
measured others, and the kernel's own table knows a TPU alone."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses calls without pages, and calls in which a query sees keys after its own."""
    reasons = []
    if spec.paged is None:
        reasons.append(f"keys and values not in pages: {NAME} reads only pages")
    if band(spec).right != 0 and (spec.max_len_q or spec.q_len) > 1:
        reasons.append(
            f"causal={spec.causal}, window={spec.window}: {NAME} is causal if a sequence has several queries"
        )
    return tuple(reasons)


def probe() -> str:
    """Imports the kernel and returns jax's version."""
    import jax

    _ = _kernel()
    return jax.__version__


def _kernel() -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns how a call becomes one of the kernel.

    kv_heads, width: padded, of the pool. settings: the kernel's own keywords.
    """
    assert spec.paged is not None
    left, queries = band(spec).left, min(QUERIES, max(1, ROWS // spec.group_size))
    return {
        "kv_heads": _tiled_heads(spec.num_kv_heads, 8 if spec.dtype == "bfloat16" else 4),
        "width": -(-max(spec.head_dim, spec.value_dim) // LANES) * LANES,
        "settings": {
            "sm_scale": spec.scale,
            "sliding_window": None if left is None else left + 1,
            "soft_cap": spec.softcap,
            "num_kv_pages_per_block": min(spec.paged.width, max(1, KEYS // spec.paged.page_size)),
            "num_queries_per_block": min(spec.q_len, queries),
        },
    }


def _tiled_heads(heads: int, tile: int) -> int:
    """Returns the fewest kv heads, at least ``heads``, whose keys and values fill tiles: 1, 2, 4 or whole tiles."""
    return next((count for count in (1, 2, 4) if heads <= count), -(-heads // tile) * tile)


def forward(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Any, Any]:
    """See ``Backend.forward``; traceable."""
    import jax.numpy as jnp

    how, paged = lower(spec), spec.paged
    assert paged is not None
    with usual_promotion(), exact_products(inputs.q.dtype):
        rows = _rows(spec, inputs)
        q = inputs.q.reshape(spec.q_len, spec.num_kv_heads, spec.group_size, spec.head_dim)
        more = how["kv_heads"] - spec.num_kv_heads
        q = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, how["width"] - spec.head_dim)))
        out = _kernel()(
            q.reshape(spec.q_len, -1, how["width"]),
            _one_pool(inputs, how["kv_heads"], how["width"]),
            jnp.maximum(rows.lengths, 1),
            jnp.clip(inputs.block_table.astype(jnp.int32), 0, paged.num_pages - 1),
            rows.offsets,
            rows.count,
            **how["settings"],
        )
        out = out[:, : spec.num_heads, : spec.value_dim]
        return jnp.where(rows.sees_key[:, None, None], out, jnp.zeros_like(out)), jnp.zeros(spec.lse_shape, "float32")


class _Rows(NamedTuple):
    """Where the tokens of q belong.

    Attributes:
        lengths: int32 ``[documents]``, the keys of each sequence. offsets: int32 ``[documents + 1]``.
        count: int32 ``[1]``, the sequences up to the last one with a query, at least 1.
        sees_key: bool ``[q_len]``.
    """

    lengths: Any
    offsets: Any
    count: Any
    sees_key: Any


def _rows(spec: AttentionSpec, inputs: PagedInputs) -> _Rows:
    import jax.numpy as jnp

    documents = spec.documents or 0
    assert spec.paged is not None
    lengths = jnp.clip(inputs.seq_lens.astype(jnp.int32), 0, spec.paged.capacity)
    number = jnp.arange(documents + 1, dtype=jnp.int32)
    offsets = number if inputs.cu_seqlens_q is None else safe_offsets(inputs.cu_seqlens_q, spec.q_len, whole=False)
    ends = offsets[1:]
    of_token = document_numbers(ends, spec.q_len)
    token = jnp.arange(spec.q_len, dtype=jnp.int32)
    # The last query of a sequence is at its last key.
    place = token + (lengths - ends)[jnp.minimum(of_token, documents - 1)]
    count = jnp.max(jnp.where(ends > offsets[:-1], number[1:], 1))
    # Without any query the kernel would fetch a page that it never waits for, so the first sequence gets one query.
    offsets = jnp.where(ends[-1] == 0, jnp.minimum(number, 1), offsets)
    return _Rows(lengths, offsets, count[None], (of_token < documents) & (place >= 0))


def _one_pool(inputs: PagedInputs, heads: int, width: int) -> Any:
    """Returns both pools as one, ``[num_pages, page_size, 2 * heads, width]``: keys and values of a head in turn."""
    import jax.numpy as jnp

    def padded(pool: Any) -> Any:
        return jnp.pad(pool, ((0, 0), (0, 0), (0, heads - pool.shape[2]), (0, width - pool.shape[3])))

    pool = jnp.stack((padded(inputs.k), padded(inputs.v)), axis=3)
    return pool.reshape(*pool.shape[:2], 2 * heads, width)


def backward(spec: AttentionSpec, inputs: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """Raises: paged keys and values are for inference."""
    raise NotImplementedError(f"backward: {NAME} has no gradient")
