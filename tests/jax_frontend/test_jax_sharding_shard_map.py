"""Attention inside ``jax.shard_map`` over four devices: results, gradients, and what varies between devices."""

from __future__ import annotations

from functools import partial

import jax
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    BACKENDS,
    BOTH_WAYS,
    HEADS,
    KV_LEN,
    assert_close,
    call_of,
    check_shard_map,
    normal,
    on_one_device,
    qkv,
    run_split,
    with_gradients,
)

from jax_frontend import attention

pytestmark = pytest.mark.sampled

IN_SHARD_MAP = {"batch": P("data"), "heads": P(None, None, "model"), "both": P("data", None, "model")}


@pytest.mark.parametrize("spec", IN_SHARD_MAP.values(), ids=IN_SHARD_MAP)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shard_map_checks_what_varies_and_gradients_pass(auto_mesh, backend, spec):
    check_shard_map(auto_mesh, backend, spec)


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_what_is_equal_on_every_device_gets_a_summed_gradient_inside_shard_map(auto_mesh, backend):
    """Queries split along the sequence read whole keys, sinks and bias."""

    def call(q, k, v, sinks, bias):
        return attention(q, k, v, sinks=sinks, bias=bias, backend=backend)

    arrays = (*qkv(), normal(5, HEADS), normal(6, 1, 1, 1, KV_LEN))
    expected = on_one_device(call, *arrays)
    specs, row = (P(None, "data"), *(P(),) * 4), P(None, "data")
    mapped = jax.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=row)
    assert_close(jax.jit(with_gradients(mapped))(*arrays), expected)
    inside = jax.shard_map(with_gradients(call), mesh=auto_mesh, in_specs=specs, out_specs=(row, specs))
    assert_close(jax.jit(inside)(*arrays), expected)


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_a_result_that_varies_is_not_taken_for_one_that_does_not(auto_mesh, backend):
    call = partial(attention, return_lse=True, backend=backend)
    specs = (P("data"),) * 3
    for out_specs in ((P(), P("data")), (P("data"), P())):
        with pytest.raises(ValueError, match="out_specs"):
            jax.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=out_specs)(*qkv())
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(
            jax.grad(lambda q, k, v: attention(q, k, v, backend=backend).sum()),
            mesh=auto_mesh,
            in_specs=specs,
            out_specs=P(),
        )(*qkv())


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_vmap_inside_shard_map(auto_mesh, backend):
    call = jax.vmap(partial(attention, causal=True, backend=backend), (0, None, 0))
    arrays = (normal(0, 3, *qkv()[0].shape), qkv()[1], normal(2, 3, *qkv()[2].shape))
    spec = P(None, "data")
    specs = (spec, P("data"), spec)
    mapped = jax.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=spec)
    assert_close(jax.jit(with_gradients(mapped))(*arrays), on_one_device(call, *arrays))


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_a_shard_map_over_some_axes(mesh, backend):
    call = call_of(causal=True, backend=backend)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"})
    expected = on_one_device(call, *qkv())
    check, collectives, _ = run_split(mesh, mapped, qkv(), (P("data"),) * 3)
    assert_close(check, expected)
    assert not collectives or backend == "jax_xla"
    heads_too = (P("data", None, "model"),) * 3
    if backend == "jax_xla":
        assert_close(run_split(mesh, mapped, qkv(), heads_too)[0], expected)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="q: expected to be whole along every mesh axis that"):
        run_split(mesh, mapped, qkv(), heads_too)


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_one_kv_head_in_a_shard_map_over_some_axes(mesh, backend, heads):
    call = call_of(causal=True, backend=backend)
    specs = (P("data"),) * 3
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data"), axis_names={"data"})
    assert_close(run_split(mesh, mapped, qkv(heads, 1), specs)[0], on_one_device(call, *qkv(heads, 1)))
