"""Layers of Flax with a context axis, on four devices."""

from __future__ import annotations

import pytest

pytest.importorskip("flax")
from functools import partial
from typing import Any

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_jax_cases import NEAR
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

from attn_core import SeqInfo
from attn_core.errors import SpecError
from jax_frontend import linen, nnx, shard_sequence, unshard_sequence

pytestmark = [pytest.mark.usefixtures("four_devices", "x64"), pytest.mark.sampled]


def rotate(q: Any, k: Any, positions: Any) -> Any:
    """Multiplies q and k by numbers that depend on each place's position, as rotary embeddings do."""
    angle = positions[..., None, None] * 0.3
    return q * jnp.cos(angle), k * jnp.sin(1 + angle)


LAYER = {"num_kv_heads": 2, "head_dim": 5, "causal": True, "sinks": True, "rotary": rotate}
SPREAD = {"context_axis": "cp", "context_strategy": "ring"}
ROWS_OF_LAYERS = {"whole rows": None, "documents": SeqInfo.from_lengths([7, 0, 16])}


def layer_and_parameters(kind: str, **options: Any) -> tuple[Any, Any]:
    """Returns a function of (parameters, x, seq_info), and its parameters."""
    options = {**LAYER, **options, "dtype": jnp.float64, "param_dtype": jnp.float64}
    if kind == "linen":
        layer = linen.Attention(4, **options)
        params = layer.init(jax.random.key(0), jnp.zeros((1, 23, 6)))
        return lambda params, x, info: layer.apply(params, x, seq_info=info), params
    graph, params = flax_nnx.split(nnx.Attention(4, 6, **options, rngs=flax_nnx.Rngs(0)))
    return lambda params, x, info: flax_nnx.merge(graph, params)(x, seq_info=info), params


@pytest.mark.parametrize("info", ROWS_OF_LAYERS.values(), ids=ROWS_OF_LAYERS)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_layer_with_a_context_axis(kind, info):
    """Parameters, results and gradients equal those of the plain layer."""
    mesh = cpu_meshes.mesh((2, 2), ("data", "cp"))
    plain, params = layer_and_parameters(kind)
    apply, alike = layer_and_parameters(kind, **SPREAD, context_length=None if info else 23)
    same = jax.tree.map(lambda one, other: (one == other).all(), params, alike)
    assert jax.tree.all(same)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # sinks and biases of 0 would hide much
    random = np.random.default_rng(0)
    x, dout = (jnp.asarray(random.standard_normal((1 if info else 2, 23, 6))) for _ in range(2))
    row = P(None if info else "data", "cp")
    mapped = jax.shard_map(lambda params, x: apply(params, x, info), mesh=mesh, in_specs=(P(), row), out_specs=row)

    def trained(call: Any, x: Any, dout: Any) -> Any:
        out, pull = jax.vjp(call, params, x)
        dparams, dx = pull(dout)
        return (out, dx), dparams

    (out, dx), dparams = jax.jit(partial(trained, lambda params, x: plain(params, x, info)))(x, dout)
    split = partial(shard_sequence, mesh=mesh, axis_name="cp", seq_info=info)
    found, found_params = jax.jit(partial(trained, mapped))(split(x), split(dout))
    rows = [unshard_sequence(each, mesh, axis_name="cp", length=23, seq_info=info) for each in found]
    for one, other in zip(jax.tree.leaves((rows, found_params)), jax.tree.leaves(([out, dx], dparams)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=NEAR, atol=NEAR)


def test_a_layer_refuses_options_that_context_parallelism_lacks():
    _, params = layer_and_parameters("linen", **SPREAD)
    options = {**LAYER, **SPREAD, "dtype": jnp.float64, "param_dtype": jnp.float64}
    mesh = cpu_meshes.mesh((4,), ("cp",))

    def call(x: Any, more: Any = None, **given: Any) -> Any:
        return linen.Attention(4, **options, **more or {}).apply(params, x, **given)

    def spread_call(**given: Any) -> Any:
        row = P(None, "cp")
        return jax.shard_map(partial(call, **given), mesh=mesh, in_specs=row, out_specs=row)(jnp.zeros((1, 24, 6)))

    with pytest.raises(SpecError, match="mask: expected None in context parallelism"):
        spread_call(mask=jnp.ones((24, 24)))
    dropping = {"more": {"dropout_rate": 0.1}, "deterministic": False, "dropout_rng": jax.random.key(0)}
    with pytest.raises(SpecError, match=r"dropout=0\.1: expected 0 in context parallelism"):
        spread_call(**dropping)
    with pytest.raises(SpecError, match="axis_name='cp': expected axes of the mesh"):
        call(jnp.zeros((1, 24, 6)))
