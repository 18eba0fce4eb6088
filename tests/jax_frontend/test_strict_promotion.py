"""Tests every JAX call once under strict promotion: of dtypes (``jax_numpy_dtype_promotion="strict"``) and of ranks.

A dtype or rank that one of our expressions leaves to JAX is an error there, and the caller cannot fix it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
import cpu_meshes
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from unsloth_rows import attend_as_unsloth

import jax_frontend
from jax_frontend import attention, context_parallel_attention, shard_sequence, unshard_sequence

pytestmark = pytest.mark.sampled

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 8, 6
BACKENDS = ("jax_xla", "math")


def normal(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def rows(batch: int = 2, tokens: int = TOKENS, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """q, k and v of padded rows."""
    return tuple(normal(batch, tokens, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))


def packed(dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """q, k and v of packed documents."""
    return tuple(array[0] for array in rows(1, dtype=dtype))


OFFSETS = np.array([0, 2, 2, TOKENS], np.int32)
HIDDEN = np.arange(TOKENS) < 4  # [kv_len]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "alignment": "top_left"},
    "window": {"causal": True, "window": 3, "softcap": 2.0, "scale": 0.3},
    "mask": {"mask": jnp.asarray(HIDDEN)[None, None, None]},
    "bias": {"bias": normal(1, HEADS, TOKENS, TOKENS)},
    "alibi": {"alibi_slopes": normal(HEADS), "sinks": normal(HEADS), "causal": True},
    "lse": {"return_lse": True},
}
DOCUMENTS = {
    "numpy": (None, OFFSETS, 4),
    "jax": (None, jnp.asarray(OFFSETS), 4),
}


def gradients(call: Callable[..., Any], *arrays: Any) -> Any:
    """A call's results and the gradients of their sum, eager and under jit."""

    def total(*arrays: Any) -> Any:
        leaves = jax.tree.leaves(call(*arrays))
        return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves), jnp.float32(0.0))

    return call(*arrays), jax.jit(jax.grad(total, tuple(range(len(arrays)))))(*arrays)


def dense(options: dict[str, Any], backend: str, dtype: Any = jnp.float32) -> Any:
    return gradients(partial(jax_frontend.attention, backend=backend, **options), *rows(dtype=dtype))


def documents(info: Any, backend: str, dtype: Any = jnp.float32) -> Any:
    call = partial(jax_frontend.attention, causal=True, seq_info=info, backend=backend)
    return gradients(call, *packed(dtype))


def traced_documents(backend: str) -> Any:
    def call(offsets: Any, *arrays: Any) -> Any:
        return jax_frontend.attention(*arrays, causal=True, seq_info=(None, offsets, 4), backend=backend)

    return jax.jit(call)(jnp.asarray(OFFSETS), *packed())


def dropping() -> Any:
    call = partial(jax_frontend.attention, dropout=0.5, dropout_rng=jax.random.key(0), backend="jax_xla")
    return gradients(call, *rows())


def mapped(backend: str) -> Any:
    call = partial(jax_frontend.attention, causal=True, backend=backend)
    return gradients(jax.vmap(call), *(jnp.stack([array, array]) for array in rows(1)))


def forward_mode() -> Any:
    call, arrays = partial(jax_frontend.attention, causal=True, softcap=2.0, backend="jax_xla"), rows()
    return jax.jvp(call, arrays, arrays)


def as_jax_nn(backend: str) -> Any:
    call = partial(
        jax_frontend.dot_product_attention,
        mask=jnp.asarray(HIDDEN)[None, None, None],
        local_window_size=2,
        query_seq_lengths=jnp.asarray([3, 5], jnp.int32),
        key_value_seq_lengths=jnp.asarray([4, 2], jnp.int32),
        return_residual=True,
        backend=backend,
    )
    return gradients(call, *rows())


def one_array() -> Any:
    call = partial(jax_frontend.attention_qkvpacked, causal=True, backend="math")
    return gradients(call, normal(2, TOKENS, 3, HEADS, DIM))


def in_pages(backend: str) -> Any:
    cache = jax_frontend.PagedKVCache(num_layers=1, num_pages=8, page_size=3, kv_heads=KV_HEADS, head_dim=DIM)
    results = []
    cache.add("a")
    cache.add("b")
    for new in ([4, 2], [1, 1]):
        step = cache.step(["a", "b"], new)
        q, k, v = (array[: sum(new)] for array in packed())
        cache.update(0, k, v, step)
        results.append(cache.attend(0, q, step, backend=backend))
    return results


def heads_first() -> Any:
    call = partial(jax_frontend.attention, mask=jnp.asarray(HIDDEN)[None, None, None], layout="bhsd")
    return gradients(call, *(array.swapaxes(1, 2) for array in rows()))


def as_unsloth(info: Any, mask: Any) -> Any:
    return attend_as_unsloth(jax_frontend, *rows(2 if info is None else 1), seq_info=info, attention_mask=mask)


def in_linen(masked: Any, info: Any = None) -> Any:
    from jax_frontend.linen import Attention

    layer = Attention(num_heads=HEADS, head_dim=DIM, num_kv_heads=KV_HEADS, causal=True, rotary=turned)
    x = normal(1, TOKENS, HEADS * DIM)
    parameters = layer.init(jax.random.key(0), x)
    return layer.apply(parameters, x, mask=masked, seq_info=info)


def turned(q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
    factor = positions.astype(q.dtype)[:, :, None, None] + jnp.ones((1, 1, 1, 1), q.dtype)
    return q * factor, k * factor


def in_flax(module: str, masked: Any) -> Any:
    from flax import linen, nnx

    from jax_frontend.flax.hook import attention_fn

    x = normal(1, TOKENS, HEADS * DIM)
    if module == "linen":
        layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn(causal=True))
        return layer.apply(layer.init(jax.random.key(0), x), x, mask=masked)
    made = nnx.MultiHeadAttention(
        HEADS, HEADS * DIM, attention_fn=attention_fn(causal=True), decode=False, rngs=nnx.Rngs(0)
    )
    return made(x, mask=masked)


def in_equinox(masked: Any) -> Any:
    import equinox as eqx

    from jax_frontend.equinox import attend

    layer = eqx.nn.MultiheadAttention(HEADS, HEADS * DIM, key=jax.random.key(0))
    x = normal(TOKENS, HEADS * DIM)
    return attend(layer, x, x, x, mask=masked, causal=True)


TABLE = np.tri(TOKENS, dtype=bool)
MASKS = {str(dtype): jnp.asarray(TABLE, dtype) for dtype in ("bool", "float32", "int32")}
CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"{name}-{backend}": partial(dense, options, backend)
        for name, options in OPTIONS.items()
        for backend in BACKENDS
    },
    "half": partial(dense, {"causal": True, "bias": OPTIONS["bias"]["bias"]}, "jax_xla", jnp.bfloat16),
    **{f"documents-{name}-{b}": partial(documents, info, b) for name, info in DOCUMENTS.items() for b in BACKENDS},
    "documents-half": partial(documents, DOCUMENTS["jax"], "jax_xla", jnp.bfloat16),
    **{f"traced-{backend}": partial(traced_documents, backend) for backend in BACKENDS},
    **{f"vmap-{backend}": partial(mapped, backend) for backend in BACKENDS},
    **{f"jax.nn-{backend}": partial(as_jax_nn, backend) for backend in BACKENDS},
    **{f"pages-{backend}": partial(in_pages, backend) for backend in BACKENDS},
    "dropout": dropping,
    "jvp": forward_mode,
    "qkvpacked": one_array,
    "heads-first": heads_first,
    "unsloth": partial(as_unsloth, None, None),
    "unsloth-documents": partial(as_unsloth, DOCUMENTS["jax"], None),
    **{
        f"unsloth-mask-{dtype}": partial(as_unsloth, None, jnp.asarray(np.stack([HIDDEN, HIDDEN]), dtype))
        for dtype in ("bool", "int32")
    },
    **{f"ours-{name}": partial(in_linen, mask[None, None]) for name, mask in MASKS.items()},
    "ours-documents": partial(in_linen, None, DOCUMENTS["jax"]),
    **{
        f"{host}-{name}": partial(in_flax, host, mask[None, None])
        for host in ("linen", "nnx")
        for name, mask in MASKS.items()
    },
    **{f"equinox-{name}": partial(in_equinox, mask) for name, mask in MASKS.items()},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_work_under_strict_promotion(name: str) -> None:
    if name.startswith(("ours", "linen", "nnx")):
        pytest.importorskip("flax")
    if name.startswith("equinox"):
        pytest.importorskip("equinox")
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        actual = CALLS[name]()
    assert all(np.asarray(leaf).size for leaf in jax.tree.leaves(actual))


@pytest.mark.parametrize("options", [{}, {"sinks": np.ones(2, np.float32)}], ids=["plain", "sinks"])
@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("backend", ["jax_xla", "math"])
def test_context_parallelism_works_under_strict_promotion(
    backend: str, strategy: str, options: dict[str, Any], four_devices: None
) -> None:
    mesh = cpu_meshes.mesh((2,), ("x",))

    def loss(x: Any, options: dict[str, Any]) -> Any:
        rows = shard_sequence(x, mesh=mesh)
        out = context_parallel_attention(
            rows, rows, rows, mesh=mesh, strategy=strategy, layout="zigzag", causal=True, backend=backend, **options
        )
        return unshard_sequence(out, mesh=mesh, length=x.shape[1]).sum()

    with jax.numpy_dtype_promotion("strict"):
        arrays = {name: jnp.asarray(array) for name, array in options.items()}
        gradient = jax.grad(loss)(jnp.ones((2, 8, 2, 8)), arrays)
    assert np.isfinite(np.asarray(gradient)).all()


@pytest.mark.parametrize("backend", ["jax_xla", "math"])
def test_sharded_calls_work_under_strict_promotion(backend: str, four_devices: None) -> None:
    sharding = NamedSharding(cpu_meshes.mesh((2,), ("x",)), PartitionSpec("x"))
    with jax.numpy_dtype_promotion("strict"):
        x = jax.device_put(jnp.ones((2, 8, 2, 8)), sharding)
        gradient = jax.jit(jax.grad(lambda x: attention(x, x, x, causal=True, backend=backend).sum()))(x)
    assert np.isfinite(np.asarray(gradient)).all()
