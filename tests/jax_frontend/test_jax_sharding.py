"""Attention in ``jax.jit``, ``jax.vmap`` and ``jax.shard_map`` over meshes of four devices: what stays split, and what
is gathered or summed."""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    BACKENDS,
    BATCH,
    BOTH_WAYS,
    COLLECTIVE,
    DIM,
    HEADS,
    KV_HEADS,
    KV_LEN,
    Q_LEN,
    assert_close,
    call_of,
    check_on,
    check_shard_map,
    check_split,
    check_types,
    normal,
    on_one_device,
    place,
    qkv,
    run_on,
    run_split,
    spec_entries,
    with_gradients,
)

from attn_core import backends
from jax_frontend import SeqInfo, append_kv, attention, attention_qkvpacked, paged_attention
from jax_frontend.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.sampled

SPLITS = {
    "batch": P("data"),
    "heads": P(None, None, "model"),
    "batch and heads": P("data", None, "model"),
    "batch by both": P(("data", "model")),
    "heads by both": P(None, None, ("data", "model")),
}


@pytest.mark.parametrize("spec", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_and_heads_stay_split(mesh, backend, spec):
    call = call_of(causal=True, window=9, backend=backend)
    (out, gradients), collectives, _ = check_split(mesh, call, qkv(), (spec,) * 3)
    for array in (out, *gradients):
        assert spec_entries(array) == (*spec, *(None,) * (4 - len(spec)))
    assert not collectives, "each device has all that it needs"


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize(
    "heads, kv_heads, axes", [(8, 2, ("data", "model")), (6, 3, "model"), (4, 1, "model"), (8, 1, ("data", "model"))]
)
def test_kv_heads_that_the_axis_does_not_divide_stay_whole(mesh, backend, heads, kv_heads, axes):
    """Every device has all kv heads, so no array is gathered. Each of their gradients takes one sum over devices."""
    spec = P(None, None, axes)
    (out, gradients), collectives, _ = check_split(
        mesh, call_of(backend=backend), qkv(heads, kv_heads), (spec, P(), P())
    )
    assert spec_entries(out) == spec_entries(gradients[0]) == (None, None, axes, None)
    assert collectives.keys() == {"all-reduce"}


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("spec", [P("data", "model"), P("data", None, None, "model")], ids=["sequence", "channels"])
def test_other_axes_are_gathered_alone(mesh, backend, spec):
    """The batch stays split: the gathered arrays hold half of the batch."""
    call = call_of(causal=True, backend=backend)
    _, _, text = check_split(mesh, call, qkv(), (spec,) * 3, gathers=3)
    gathered = re.findall(r"f32\[([\d,]+)\][^=]* all-gather", text)
    assert len(gathered) == 3
    for shape in gathered:
        assert sorted(map(int, shape.split(",")))[-1] <= KV_LEN
        assert np.prod(list(map(int, shape.split(",")))) in (
            BATCH // 2 * Q_LEN * HEADS * DIM,
            BATCH // 2 * KV_LEN * KV_HEADS * DIM,
        )


@cache
def with_every_extra(backend):
    mask = normal(7, BATCH, 1, Q_LEN, KV_LEN) > -0.5
    slopes = abs(normal(8, BATCH, HEADS))

    def call(q, k, v, bias, sinks):
        return attention(
            q, k, v, bias=bias, sinks=sinks, mask=jnp.asarray(mask), alibi_slopes=jnp.asarray(slopes), backend=backend
        )

    return call


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize(
    "shape, spec",
    [
        ((1, 1, Q_LEN, KV_LEN), P()),
        ((BATCH, 1, Q_LEN, KV_LEN), P("data")),
        ((1, HEADS, 1, KV_LEN), P(None, "model")),
        ((BATCH, HEADS, Q_LEN, 1), P("data", "model")),
        ((BATCH, HEADS, Q_LEN, KV_LEN), P()),
    ],
    ids=str,
)
def test_gradients_that_sum_over_a_split_axis_are_summed_over_devices(mesh, backend, shape, spec):
    call = with_every_extra(backend)
    arrays = (*qkv(), normal(5, *shape), normal(6, HEADS))
    specs = (P("data", None, "model"),) * 3 + (spec, P("model"))
    whole = shape == (BATCH, HEADS, Q_LEN, KV_LEN)  # its gradient has its type: on an Explicit mesh that is whole
    expected = on_one_device(call, *arrays)
    results, collectives, _ = run_split(mesh, call, arrays, specs)
    assert_close(results, expected)
    assert whole or collectives.keys() == {"all-reduce"}


@cache
def with_key_ranges(backend, rows, heads):
    ranges = np.sort(np.random.default_rng(9).integers(0, Q_LEN + 1, (rows, heads, KV_LEN, 2, 2), np.int32), -1)

    def call(q, k, v):
        return attention(q, k, v, key_ranges=jnp.asarray(ranges), backend=backend)

    return call


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (BATCH, KV_HEADS), (1, KV_HEADS)])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, 1])
def test_key_ranges_are_split_by_batch_and_kv_heads(mesh, backend, rows, heads, kv_heads):
    """With one kv head, which no mesh axis divides, each device picks the ranges of the heads that it reads."""
    call, arrays = with_key_ranges(backend, rows, min(heads, kv_heads)), qkv(kv_heads=kv_heads)
    specs = (P("data", None, "model"), *(P("data", None, "model" if kv_heads > 1 else None),) * 2)
    results, _, _ = run_split(mesh, call, arrays, specs)
    assert_close(results, on_one_device(call, *arrays))


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_key_ranges_of_kv_heads_that_the_mesh_does_not_divide(mesh, backend):
    """Six query heads read three kv heads, and two devices share them: each picks the kv heads of its query heads."""
    ranges = np.sort(np.random.default_rng(9).integers(0, Q_LEN + 1, (1, 3, KV_LEN, 1, 2), np.int32), -1)
    call, arrays = partial(_attend_in, backend, tuple(ranges.ravel().tolist())), qkv(heads=6, kv_heads=3)
    specs = (P("data", None, "model"), P("data"), P("data"))
    results, _, _ = run_split(mesh, call, arrays, specs)
    assert_close(results, on_one_device(call, *arrays))


def _attend_in(backend, numbers, q, k, v):
    ranges = jnp.asarray(numbers, jnp.int32).reshape(1, 3, KV_LEN, 1, 2)
    return attention(q, k, v, key_ranges=ranges, backend=backend)


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_pages_split_by_kv_heads(mesh, backend):
    """A step of a cache whose pools are split by heads: nothing is gathered, and the pools stay split."""
    tables = {
        "block_table": jnp.array([[5, 0, 2], [3, 1, -1]], jnp.int32),
        "seq_lens": jnp.array([11, 6], jnp.int32),
        "cu_seqlens_q": jnp.array([0, 4, 6], jnp.int32),
    }
    arrays = [normal(seed, 6, heads, DIM) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    pools = [normal(seed, 7, 4, KV_HEADS, DIM) for seed in (3, 4)]

    def step(q, k, v, k_pages, v_pages):
        pools = append_kv(k_pages, v_pages, k, v, **tables)
        out, lse = paged_attention(q, *pools, **tables, window=5, max_len_q=4, return_lse=True, backend=backend)
        return out, lse, *pools

    spec, pool_spec = P(None, "model"), P(None, None, "model")
    results, text, _ = check_on(mesh, step, (*arrays, *pools), (*(spec,) * 3, *(pool_spec,) * 2))
    assert not COLLECTIVE.findall(text), "each device has all that it needs"
    assert spec_entries(results[0]) == (None, "model", None) and spec_entries(results[1]) == ("model", None)
    assert all(spec_entries(pool) == (None, None, "model", None) for pool in results[2:])


@cache
def of_documents(backend):
    return partial(
        attention, causal=True, seq_info=SeqInfo.from_lengths([3, 0, 5, 4], array=jnp.asarray), backend=backend
    )


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("one_row", [False, True])
def test_packed_documents_split_by_heads(mesh, backend, one_row):
    call = of_documents(backend)
    arrays = [normal(seed, *(1,) * one_row, 12, heads, DIM) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    _, collectives, _ = check_split(mesh, call, arrays, (P(*(None,) * one_row, None, "model"),) * 3)
    assert not collectives
    if not one_row:  # tokens are not split
        check_split(mesh, call, arrays, (P("data", "model"),) * 3, gathers=3)


@cache
def in_one_array(backend):
    return partial(attention_qkvpacked, causal=True, window=3, backend=backend)


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_q_k_and_v_in_one_array_split(mesh, backend):
    call = in_one_array(backend)
    spec = P("data", None, None, "model")
    (_, (gradient,)), collectives, _ = check_split(mesh, call, [normal(0, BATCH, Q_LEN, 3, HEADS, DIM)], [spec])
    assert not collectives and spec_entries(gradient)[:4] == tuple(spec)


@cache
def with_dropout():
    return partial(attention, dropout=0.4, dropout_rng=jax.random.key(3))


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")], ids=str)
def test_dropout_drops_the_same_weights_under_any_sharding(mesh, spec):
    check_split(mesh, with_dropout(), qkv(), (spec,) * 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_device_runs_its_own_part(auto_mesh, backend, replace_fields):
    """The kernel sees a quarter of the call; jit without a mesh in the context is enough."""
    seen: list[tuple[int, ...]] = []
    record = backends.load(backend)
    forward = record.forward

    def spy(spec, *rest):
        seen.append((spec.batch, spec.num_heads, spec.num_kv_heads))
        return forward(spec, *rest)

    replace_fields(record, forward=spy)
    whole = (normal(seed, 2, 7, heads, 5) for seed, heads in enumerate((4, 2, 2)))
    arrays = place(auto_mesh, whole, (P("data", None, "model"),) * 3)
    jax.jit(partial(attention, backend=backend))(*arrays).block_until_ready()
    assert (1, 2, 1) in seen
    if backend != "jax_xla":  # whose function is traced: once whole, once for a part
        assert seen == [(1, 2, 1)] * 4


def test_a_part_that_the_backend_cannot_run_is_refused_with_its_reason(auto_mesh, replace_fields):
    record = backends.load("math")
    refuses = record.refuses

    def no_odd_batch(spec, *rest):
        return (*refuses(spec, *rest), *(["batch=1: planted"] if spec.batch == 1 else []))

    replace_fields(record, refuses=no_odd_batch)
    arrays = place(auto_mesh, (normal(seed, 2, 3, 2, 5) for seed in range(3)), (P("data"),) * 3)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"sharding: expected a part that math can run.*batch=1: planted"
    ):
        jax.jit(partial(attention, backend="math"))(*arrays)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("spec", [None, P(), P("model"), P("data")], ids=str)
def test_rows_without_keys_have_their_sinks(mesh, spec, jit):
    """Compares the log-sum-exp and all gradients, for sinks without a mesh (None) and for sinks on this mesh."""
    arrays = (*(normal(seed, BATCH, n, HEADS, DIM) for seed, n in enumerate((Q_LEN, 3, 3))), normal(5, HEADS))

    def call(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, causal=True, return_lse=True, backend="jax_xla")

    def loss(*arrays):
        out, lse = call(*arrays)
        return out.sum() + jnp.sin(lse).sum()

    both = [call, jax.grad(loss, (0, 1, 2, 3))]
    (_, lse), gradients = (f(*map(jnp.asarray, arrays)) for f in both)
    assert (lse[..., : Q_LEN - 3] == arrays[3][:, None]).all()
    with jax.set_mesh(mesh):
        split = [jax.device_put(array, NamedSharding(mesh, P("data", None, "model"))) for array in arrays[:3]]
        sinks = jnp.asarray(arrays[3]) if spec is None else jax.device_put(arrays[3], NamedSharding(mesh, spec))
        (_, split_lse), learned = ((jax.jit(f) if jit else f)(*split, sinks) for f in both)
    np.testing.assert_allclose(split_lse, lse, atol=1e-5)
    for one, other in zip(learned, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("keys", [0, KV_LEN])
def test_results_without_keys_have_the_types_of_results_with_keys(mesh, backend, keys):
    """Without keys, or in a vmap over no elements, results are constants. A scan can carry them only if types agree."""
    query = jnp.asarray(normal(0, BATCH, KV_LEN, HEADS, DIM))
    keys = jnp.asarray(normal(1, BATCH, keys, HEADS, DIM))
    call = partial(attention, backend=backend)

    def carried(q, k):
        out = jax.lax.scan(lambda last, _: (call(last, k, k), None), q, None, length=2)[0]
        (_, lse), pull = jax.vjp(lambda q: call(q, k, k, return_lse=True), q)
        return out, pull((q, lse * 0 if k.shape[1] else jnp.zeros_like(lse)))

    def over_nothing(q):
        none = jnp.stack([q])[:0]
        return jax.lax.scan(lambda last, _: (jax.vmap(lambda x: call(x, x, x))(last), None), none, None, length=2)[0]

    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P("data"))
        placed = [jax.device_put(array, split) for array in (query, keys)]
        jax.block_until_ready(jax.jit(carried)(*placed))
        assert jax.jit(over_nothing)(placed[0]).shape == (0, *query.shape)
        if "Auto" in str(mesh.axis_types):
            body = jax.shard_map(lambda q, k: (carried(q, k), over_nothing(q)), in_specs=P("data"), out_specs=P("data"))
            jax.jit(body).lower(*placed)  # not compiled: XLA of jax 0.11 crashes on loops that carry an empty array


@pytest.mark.parametrize("backend", ["sdpa_flash", "jax_xla"])
def test_largest_logits_stay_split(mesh, auto_mesh, backend):
    """By a pass of its own, and by the forward of the output."""
    call, arrays = call_of(causal=True, return_max_logit=True, backend=backend), qkv()
    spec = P("data", None, "model")
    expected = jax.tree.map(np.asarray, jax.jit(call)(*map(jnp.asarray, arrays)))
    results, text, _ = run_on(mesh, call, arrays, (spec,) * 3)
    assert_close(results, expected)
    assert not COLLECTIVE.findall(text)
    assert spec_entries(results[1]) == ("data", "model")
    mapped = jax.shard_map(call, mesh=auto_mesh, in_specs=(spec,) * 3, out_specs=(spec, P("data", "model")))
    assert_close(jax.jit(mapped)(*map(jnp.asarray, arrays)), expected)


CACHE_SPLITS = {**SPLITS, "queries": P(None, "data")}
ROWS = {
    "lengths": {"kv_lengths": [14, 3, 9, 0]},
    "starts": {"kv_starts": [0, 2, 13, 5], "alignment": "top_left"},
    "places": {"kv_lengths": [14, 3, 9, 2], "cache_index": [2, 0, 3, 1]},
    "slopes, sinks": {"kv_lengths": [14, 3, 9, 2], "alibi_slopes": [0.5] * HEADS, "sinks": [0.1] * HEADS},
    "bias, ranges": {
        "kv_lengths": [14, 3, 9, 2],
        "bias": np.full((BATCH, 1, Q_LEN, KV_LEN), 0.5),
        "key_ranges": np.full((1, KV_HEADS, KV_LEN, 1, 2), (0, 7), np.int32),
    },
}


@cache
def rows_call(rows, grad_of_jit):
    """Returns a function of q, k, v and the arrays of ROWS: the results, and the gradients of q, k and v."""
    options = ROWS[rows]
    names = [name for name in options if name != "alignment"]
    alignment = options.get("alignment", "bottom_right")

    def call(q, k, v, *arrays):
        named = dict(zip(names, arrays, strict=True))
        return attention(q, k, v, causal=True, alignment=alignment, return_lse=True, **named)

    def loss(*arrays):
        out, lse = (jax.jit(call) if grad_of_jit else call)(*arrays)
        return jnp.sum(out**2) + jnp.sum(jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)))

    both = (lambda f: f) if grad_of_jit else jax.jit
    results, gradients = both(call), both(jax.grad(loss, (0, 1, 2)))
    return lambda *arrays: (results(*arrays), gradients(*arrays))


def rows_arrays(rows):
    numbers = [np.asarray(value) for name, value in ROWS[rows].items() if name != "alignment"]
    return (*qkv(), *(a.astype(np.float32 if a.dtype == np.float64 else np.int32) for a in numbers))


@cache
def rows_on_one_device(rows):
    return jax.tree.map(np.asarray, rows_call(rows, False)(*map(jnp.array, rows_arrays(rows))))


@jax.jit
def dense_call(q, k, v):
    return attention(q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("grad_of_jit", [False, True], ids=["jit", "grad of jit"])
@pytest.mark.parametrize("spec", CACHE_SPLITS.values(), ids=CACHE_SPLITS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_a_cache_on_a_mesh(mesh, rows, spec, grad_of_jit):
    """The numbers and gradients of one device; on Explicit axes also the types of a dense call's results."""
    arrays, of_rows = rows_arrays(rows), P(spec[0])
    others = [of_rows if array.shape[0] == BATCH else P() for array in arrays[3:]]
    with jax.set_mesh(mesh):
        on_mesh = place(mesh, arrays, (spec,) * 3 + tuple(others))
        results, gradients = rows_call(rows, grad_of_jit)(*on_mesh)
        dense = dense_call(*on_mesh[:3])
    assert_close((results, gradients), rows_on_one_device(rows))
    check_types(mesh, (*results, *gradients), (*dense, *on_mesh[:3]))


POOL_SPLITS = {
    "pages": (P("data"), P(), P()),
    "slots": (P(None, "data"), P(), P()),
    "tokens": (P(), P("model"), P()),
    "tables": (P(), P(), P("data")),
    "all": (P("data", None, "model"), P("data", "model"), P("data")),
}


@pytest.mark.parametrize(("pool", "tokens", "tables"), POOL_SPLITS.values(), ids=POOL_SPLITS)
@pytest.mark.parametrize("by_slots", [False, True], ids=["tables", "slots"])
def test_appends_on_a_mesh(mesh, pool, tokens, tables, by_slots):
    """Any axis of the pool and of the tokens may be split; the pools keep their types."""
    where = {"block_table": jnp.array([[5, 0, 2], [3, 1, -1]], jnp.int32), "seq_lens": jnp.array([11, 6], jnp.int32)}
    cu = jnp.array([0, 4, 6], jnp.int32)
    slots = jnp.array([3, 9, -1, 20, 21, 0], jnp.int32)
    k, v, *angles = (normal(seed, *shape) for seed, shape in enumerate(((6, 2, 4), (6, 2, 4), (12, 2), (12, 2))))
    pools = [normal(seed, 8, 4, 2, 4) for seed in (5, 6)]

    def step(k_pages, v_pages, k, v, table, lengths):
        to = {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": cu, "rotary": tuple(map(jnp.asarray, angles))}
        return append_kv(k_pages, v_pages, k, v, **({"slot_mapping": slots} if by_slots else to))

    arrays, specs = (*pools, k, v, *where.values()), (pool, pool, tokens, tokens, tables, tables)
    results, _, on_mesh = check_on(mesh, step, arrays, specs)
    check_types(mesh, results, on_mesh[:2])


@pytest.mark.parametrize("spec", CACHE_SPLITS.values(), ids=CACHE_SPLITS)
def test_the_cache_of_flash_attn_on_a_mesh(mesh, spec):
    """Appends, rotates and attends; the results are split as q is, but for the queries."""
    q, k, v = (normal(seed, BATCH, 2, 4, DIM) for seed in range(3))
    caches = [normal(seed, BATCH, 8, 4, DIM) for seed in (3, 4)]
    cos, sin = (normal(seed, 8, DIM // 2) for seed in (5, 6))
    lengths = np.array([3, 0, 6, 1], np.int32)

    def step(q, k, v, k_cache, v_cache, lengths):
        given = {"rotary_cos": jnp.asarray(cos), "rotary_sin": jnp.asarray(sin), "causal": True}
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **given)

    (out, *written), _, on_mesh = check_on(mesh, step, (q, k, v, *caches, lengths), (*(spec,) * 5, P(spec[0])))
    check_types(mesh, written, on_mesh[3:5])
    if "Explicit" in str(mesh.axis_types):
        entries = (*spec, *(None,) * (4 - len(spec)))
        assert spec_entries(out) == (entries[0], None, *entries[2:])


# vmap: mapped axes, the batch and the heads stay split


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


# Inside jax.shard_map: results, gradients, and what varies between devices


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
