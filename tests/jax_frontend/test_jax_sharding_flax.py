"""Layers of Flax under scan, remat and grad on a mesh of four devices."""

from __future__ import annotations

import pytest

pytest.importorskip("flax")
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import BATCH, BOTH_WAYS, DIM, HEADS, KV_HEADS, Q_LEN, normal

from jax_frontend import linen, nnx

pytestmark = pytest.mark.sampled

FEATURES, LAYERS = HEADS * DIM, 3


class LinenBlock(flax_linen.Module):
    """A layer of a residual stream with the signature that ``scan`` needs."""

    backend: str

    @flax_linen.compact
    def __call__(self, x, _):
        heads = {"num_kv_heads": KV_HEADS, "head_dim": DIM}
        return x + linen.Attention(HEADS, causal=True, backend=self.backend, name="attention", **heads)(x), None


class NnxBlock(flax_nnx.Module):
    """A layer of a residual stream for NNX."""

    def __init__(self, backend, rngs):
        heads = {"num_kv_heads": KV_HEADS, "head_dim": DIM}
        self.attention = nnx.Attention(HEADS, FEATURES, causal=True, backend=backend, rngs=rngs, **heads)

    def __call__(self, x):
        return x + self.attention(x)


def by_heads(path: Any, leaf: Any) -> P:
    """Returns the PartitionSpec of a parameter ``[layers, ...]``: tensor parallelism splits projections by heads."""
    keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    where = {"kernel": {"out": 1}, "bias": {"out": None}}[next(key for key in keys if key in ("kernel", "bias"))]
    axis = where.get("out" if "out" in keys else "", leaf.ndim - 2)
    return P() if axis is None else P(*(None,) * axis, "model")


def spread(mesh: Any, tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(leaf, NamedSharding(mesh, by_heads(path, leaf))), tree
    )


def check_layers(mesh: Any, loss: Any, params: Any, x: Any) -> None:
    """Checks that gradients equal those of one device, and that three equal steps trace once."""
    traces = []

    def counted(params, x):
        traces.append(1)
        return jax.value_and_grad(loss)(params, x)

    expected = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(params, x))
    step = jax.jit(counted)
    on_mesh = spread(mesh, params), jax.device_put(x, NamedSharding(mesh, P("data")))
    text = step.lower(*on_mesh).compile().as_text()
    assert not re.search(r" all-gather(?:-start)?\(", text)
    for _ in range(3):
        result = step(*on_mesh)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=2e-4, atol=2e-4)
    assert len(traces) == 1


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_linen_layers_under_scan_remat_and_grad_on_a_mesh(auto_mesh, backend):
    stack = flax_linen.scan(
        flax_linen.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
    )(backend)
    x = jnp.asarray(normal(0, BATCH, Q_LEN, FEATURES))
    params = stack.init(jax.random.key(0), x, None)
    check_layers(auto_mesh, lambda params, x: (stack.apply(params, x, None)[0] ** 2).mean(), params, x)


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_nnx_layers_under_scan_remat_and_grad_on_a_mesh(auto_mesh, backend):
    @flax_nnx.split_rngs(splits=LAYERS)
    @flax_nnx.vmap(in_axes=(0,), out_axes=0)
    def blocks(rngs):
        return NnxBlock(backend, rngs)

    graph, params = flax_nnx.split(blocks(flax_nnx.Rngs(0)))

    def loss(params, x):
        @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
        @flax_nnx.remat
        def forward(block, x):
            return block(x)

        return (forward(flax_nnx.merge(graph, params), x) ** 2).mean()

    check_layers(auto_mesh, loss, params, jnp.asarray(normal(0, BATCH, Q_LEN, FEATURES)))


def test_a_cache_stays_split_over_a_mesh(auto_mesh):
    heads = {"num_kv_heads": KV_HEADS, "head_dim": DIM}
    layer = linen.Attention(HEADS, causal=True, window=3, backend="jax_xla", **heads)
    decoder, x = layer.clone(decode=True), jnp.asarray(normal(0, BATCH, Q_LEN, FEATURES))
    variables = decoder.init(jax.random.key(0), x)
    expected = layer.apply({"params": variables["params"]}, x)
    split = NamedSharding(auto_mesh, P("data", None, "model"))
    cache = {name: jax.device_put(each, split) if each.ndim else each for name, each in variables["cache"].items()}
    params = spread(auto_mesh, {"params": variables["params"]})

    @jax.jit
    def step(params, cache, x):
        return decoder.apply({**params, "cache": cache}, x, mutable=["cache"])

    on_mesh = [jax.device_put(part, NamedSharding(auto_mesh, P("data"))) for part in (x[:, :4], x[:, 4:5])]
    assert not re.search(r" all-gather(?:-start)?\(", step.lower(params, cache, on_mesh[1]).compile().as_text())
    start = 0
    for part in on_mesh:
        out, updates = step(params, cache, part)
        np.testing.assert_allclose(out, expected[:, start : start + part.shape[1]], rtol=1e-4, atol=1e-5)
        cache, start = updates["cache"], start + part.shape[1]
        assert cache["cached_key"].sharding.is_equivalent_to(split, 4)
