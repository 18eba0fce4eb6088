"""Attention in ``jax.vmap`` over meshes of four devices: mapped axes, the batch and the heads stay split."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    BACKENDS,
    BATCH,
    BOTH_WAYS,
    DIM,
    HEADS,
    KV_HEADS,
    KV_LEN,
    Q_LEN,
    check_split,
    normal,
    qkv,
    spec_entries,
)

from jax_frontend import SeqInfo, attention

pytestmark = pytest.mark.sampled


@cache
def mapped_twice(backend):
    return jax.vmap(jax.vmap(partial(attention, causal=True, backend=backend), (0, None, 0)), (0, 0, 0))


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("spec", [P(None, "data", None, "model"), P("data", None, None, "model")], ids=str)
def test_vmap_keeps_both_the_mapped_axis_and_the_batch_split(mesh, backend, spec):
    call = mapped_twice(backend)
    arrays = [normal(0, 2, 3, BATCH, Q_LEN, HEADS, DIM)]
    arrays += [normal(1, 2, BATCH, Q_LEN, KV_HEADS, DIM), normal(2, 2, 3, BATCH, Q_LEN, KV_HEADS, DIM)]
    inner = P(spec[0], None, *spec[1:])
    _, collectives, _ = check_split(mesh, call, arrays, (inner, spec, inner))
    assert not collectives


@cache
def mapped(backend, **options):
    return jax.vmap(partial(attention, backend=backend, **options), (0, None, 0))


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_vmap_of_kv_heads_that_stay_whole(mesh, backend):
    call = mapped(backend)
    q, k, v = qkv(6, 3)
    q, v = np.stack([q, 2 * q, -q]), np.stack([v, v + 1, 2 * v])
    _, collectives, _ = check_split(mesh, call, (q, k, v), (P(None, "data", None, "model"), P("data"), P(None, "data")))
    assert collectives.keys() == {"all-reduce"}


TOKENS, DOCUMENTS = 12, ((3, 0, 5, 4), (12, 0, 0, 0), (1, 2, 3, 6), (6, 6, 0, 0))
"""The lengths of the documents of BATCH rows."""


@cache
def packed_rows(backend, shared, over=None):
    """Returns a call of rows. Each row has documents of its own, or all rows share theirs.

    Args:
        over: mesh axes of the offsets on a mesh with Explicit axes, where vmap needs all mapped arrays split alike.
    """
    offsets = np.stack([SeqInfo.from_lengths(lengths).cu_seqlens_q for lengths in DOCUMENTS])

    def row(cu, *arrays):
        return attention(*arrays, causal=True, seq_info=SeqInfo(cu, cu, TOKENS, TOKENS), backend=backend)

    def call(*arrays):
        cu = jnp.asarray(offsets[0] if shared else offsets)
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types and not shared:
            cu = jax.sharding.reshard(cu, P(over))
        return jax.vmap(row, (None if shared else 0, 0, 0, 0))(cu, *arrays)

    return call


@pytest.mark.parametrize("shared", [False, True], ids=["own documents", "shared documents"])
@pytest.mark.parametrize("spec", [P("data"), P(("data", "model")), P("data", None, "model")], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_of_a_vmap_stay_split(mesh, backend, spec, shared):
    """Each device runs its own rows, forward and backward."""
    arrays = [normal(seed, BATCH, TOKENS, heads, DIM) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    (out, gradients), collectives, _ = check_split(mesh, packed_rows(backend, shared, spec[0]), arrays, (spec,) * 3)
    assert not collectives, "each device has all that it needs"
    for array in (out, *gradients):
        assert spec_entries(array) == (*spec, *(None,) * (4 - len(spec)))


def test_packed_rows_of_two_vmaps_stay_split(auto_mesh):
    call = jax.vmap(packed_rows("math", True))
    arrays = [normal(seed, 2, BATCH, TOKENS, heads, DIM) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    _, collectives, _ = check_split(auto_mesh, call, arrays, (P("model", "data"),) * 3)
    assert not collectives


@cache
def with_sinks_and_bias(backend, mapped_too):
    """Returns a mapped call with sinks and a bias, which are mapped, too, or shared by all elements."""

    def call(q, k, v, bias, sinks):
        return attention(q, k, v, bias=bias, sinks=sinks, causal=True, backend=backend)

    own = 0 if mapped_too else None
    return jax.vmap(call, (0, 0, 0, own, own))


@pytest.mark.parametrize("mapped_too", [False, True], ids=["shared", "mapped"])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data", None, "model"), P("model", "data")], ids=str)
@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_sinks_and_bias_of_a_vmap_stay_split(mesh, backend, spec, mapped_too):
    arrays = [np.stack([array, 2 * array]) for array in qkv()]
    lead = (2,) * mapped_too
    arrays += [normal(5, *lead, BATCH, HEADS, Q_LEN, KV_LEN), normal(6, *lead, HEADS)]
    mapped_by, batch, heads = (*spec, *(None,) * (4 - len(spec)))[0], *(*spec, None, None, None)[1:4:2]
    own = (mapped_by,) * mapped_too
    specs = (spec,) * 3 + (P(*own, batch, heads), P(*own, heads))
    _, collectives, _ = check_split(mesh, with_sinks_and_bias(backend, mapped_too), arrays, specs)
    assert collectives.keys() <= {"all-reduce"}
