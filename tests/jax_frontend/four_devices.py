"""Attention over meshes of four devices: run by ``test_jax_sharding`` in a process of its own that has them.

Every program is compiled, and its HLO is searched for collectives: a batch or heads that are split stay split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core import backends
from jax_frontend import SeqInfo, append_kv, attention, attention_qkvpacked, linen, nnx, paged_attention
from jax_frontend.bridge import targets
from jax_frontend.dispatch import local_call, ops, partitioning

BACKENDS = ("sdpa_flash", "math", "jax_xla")
BOTH_WAYS = ("math", "jax_xla")
"""A backend behind the bridge, and one of JAX's own operations."""
KINDS = ("Auto", "Explicit")
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 4, 10, 14, 8, 4, 6
_COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")

assert jax.device_count() == 4, "these tests need four devices; test_jax_sharding runs them with as many"


@pytest.fixture(params=KINDS)
def mesh(request: pytest.FixtureRequest) -> Any:
    return made_mesh(request.param)


@pytest.fixture
def auto_mesh() -> Any:
    return made_mesh("Auto")


def made_mesh(kind: str) -> Any:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(heads: int = HEADS, kv_heads: int = KV_HEADS) -> tuple[np.ndarray, ...]:
    sizes = ((Q_LEN, heads), (KV_LEN, kv_heads), (KV_LEN, kv_heads))
    return tuple(normal(seed, BATCH, length, count, DIM) for seed, (length, count) in enumerate(sizes))


def trained(call: Any) -> Any:
    """A function of arrays that gives the output, and the gradient of every array."""

    def run(*arrays: Any) -> Any:
        out, pull = jax.vjp(call, *arrays)
        return out, pull(jnp.cos(out))

    return run


@cache
def call_of(**options: Any) -> Any:
    """``attention`` with options: one object for equal options, so that ``alone`` compiles them once."""
    return partial(attention, **options)


@cache
def _on_one_device(call: Any) -> Any:
    return jax.jit(trained(call))


def alone(call: Any, *arrays: Any) -> Any:
    """What ``trained`` gives on one device. Compiled once for a call and shapes, however often it is asked for."""
    return jax.tree.map(np.asarray, _on_one_device(call)(*map(jnp.asarray, arrays)))


def placed(mesh: Any, arrays: Any, specs: Any) -> list[Any]:
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]


def split(mesh: Any, call: Any, arrays: Any, specs: Any) -> tuple[Any, Counter[str], str]:
    """What ``trained`` gives on arrays of a mesh, how many collectives of each kind it takes, and its HLO."""
    program = jax.jit(trained(call))
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, arrays, specs)
        text = program.lower(*on_mesh).compile().as_text()
        return program(*on_mesh), Counter(_COLLECTIVE.findall(text)), text


def same(found: Any, expected: Any) -> None:
    """Sums of another order differ by rounding alone."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=2e-5, atol=5e-6)


def entries(array: Any) -> tuple[Any, ...]:
    """The array's PartitionSpec with as many entries as it has axes."""
    spec = array.sharding.spec
    return (*spec, *(None,) * (array.ndim - len(spec)))


def check_split(mesh: Any, call: Any, arrays: Any, specs: Any, gathers: int = 0) -> tuple[Any, Counter[str], str]:
    """The results are those of one device, nothing is gathered, and results are split as their inputs are."""
    expected = alone(call, *arrays)
    (out, gradients), collectives, text = split(mesh, call, arrays, specs)
    same((out, gradients), expected)
    assert collectives["all-gather"] == gathers, collectives
    assert not collectives.keys() & {"all-to-all", "collective-permute", "reduce-scatter"}, collectives
    return (out, gradients), collectives, text


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
        assert entries(array) == (*spec, *(None,) * (4 - len(spec)))
    assert not collectives, "each device has all that it needs"


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize(
    "heads, kv_heads, axes", [(8, 2, ("data", "model")), (6, 3, "model"), (4, 1, "model"), (8, 1, ("data", "model"))]
)
def test_kv_heads_that_the_axis_does_not_divide_stay_whole(mesh, backend, heads, kv_heads, axes):
    """They are on every device anyway; nothing else is gathered for them, and their gradients are one sum."""
    spec = P(None, None, axes)
    (out, gradients), collectives, _ = check_split(
        mesh, call_of(backend=backend), qkv(heads, kv_heads), (spec, P(), P())
    )
    assert entries(out) == entries(gradients[0]) == (None, None, axes, None)
    assert collectives.keys() == {"all-reduce"}


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("spec", [P("data", "model"), P("data", None, None, "model")], ids=["sequence", "channels"])
def test_other_axes_are_gathered_alone(mesh, backend, spec):
    """The batch stays split: what is gathered has half of it."""
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
    expected = alone(call, *arrays)
    found, collectives, _ = split(mesh, call, arrays, specs)
    same(found, expected)
    assert whole or collectives.keys() == {"all-reduce"}


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

    expected = jax.jit(step)(*map(jnp.asarray, (*arrays, *pools)))
    spec, pool_spec = P(None, "model"), P(None, None, "model")
    program = jax.jit(step)
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, (*arrays, *pools), (*(spec,) * 3, *(pool_spec,) * 2))
        text = program.lower(*on_mesh).compile().as_text()
        found = program(*on_mesh)
    same(found, expected)
    assert not _COLLECTIVE.findall(text), "each device has all that it needs"
    assert entries(found[0]) == (None, "model", None) and entries(found[1]) == ("model", None)
    assert all(entries(pool) == (None, None, "model", None) for pool in found[2:])


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
    assert not collectives and entries(gradient)[:4] == tuple(spec)


@cache
def with_dropout():
    return partial(attention, dropout=0.4, dropout_rng=jax.random.key(3))


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")], ids=str)
def test_dropout_drops_the_same_weights_under_any_sharding(mesh, spec):
    check_split(mesh, with_dropout(), qkv(), (spec,) * 3)


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
    """Rows that each hold documents of their own, or (shared) the same ones.

    Args:
        over: what the offsets are split by on a mesh with Explicit axes, where all that vmap maps is split alike.
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
        assert entries(array) == (*spec, *(None,) * (4 - len(spec)))


def test_packed_rows_of_two_vmaps_stay_split(auto_mesh):
    call = jax.vmap(packed_rows("math", True))
    arrays = [normal(seed, 2, BATCH, TOKENS, heads, DIM) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    _, collectives, _ = check_split(auto_mesh, call, arrays, (P("model", "data"),) * 3)
    assert not collectives


@cache
def kept_apart(backend, mapped_too):
    """Sinks and a bias, whose gradients are each mapped element's own; mapped with the rest, or one for all."""

    def call(q, k, v, bias, sinks):
        return attention(q, k, v, bias=bias, sinks=sinks, causal=True, backend=backend)

    own = 0 if mapped_too else None
    return jax.vmap(call, (0, 0, 0, own, own))


@pytest.mark.parametrize("mapped_too", [False, True], ids=["shared", "mapped"])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data", None, "model"), P("model", "data")], ids=str)
@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_what_vmap_keeps_apart_stays_split(mesh, backend, spec, mapped_too):
    arrays = [np.stack([array, 2 * array]) for array in qkv()]
    lead = (2,) * mapped_too
    arrays += [normal(5, *lead, BATCH, HEADS, Q_LEN, KV_LEN), normal(6, *lead, HEADS)]
    mapped_by, batch, heads = (*spec, *(None,) * (4 - len(spec)))[0], *(*spec, None, None, None)[1:4:2]
    own = (mapped_by,) * mapped_too
    specs = (spec,) * 3 + (P(*own, batch, heads), P(*own, heads))
    _, collectives, _ = check_split(mesh, kept_apart(backend, mapped_too), arrays, specs)
    assert collectives.keys() <= {"all-reduce"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_device_runs_its_own_part(auto_mesh, backend, monkeypatch):
    """The kernel sees a quarter of the call; jit without a mesh in the context is enough."""
    seen: list[tuple[int, ...]] = []
    module: Any = backends.load(backend)
    forward = module.forward

    def spy(spec, *rest):
        seen.append((spec.batch, spec.num_heads, spec.num_kv_heads))
        return forward(spec, *rest)

    monkeypatch.setattr(module, "forward", spy)
    monkeypatch.setattr(targets, "_callbacks", {})
    whole = (normal(seed, 2, 7, heads, 5) for seed, heads in enumerate((4, 2, 2)))
    arrays = placed(auto_mesh, whole, (P("data", None, "model"),) * 3)
    jax.jit(partial(attention, backend=backend))(*arrays).block_until_ready()
    assert (1, 2, 1) in seen
    if backend != "jax_xla":  # whose function is traced: once whole, once for a part
        assert seen == [(1, 2, 1)] * 4


IN_SHARD_MAP = {"batch": P("data"), "heads": P(None, None, "model"), "both": P("data", None, "model")}


@pytest.mark.parametrize("spec", IN_SHARD_MAP.values(), ids=IN_SHARD_MAP)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shard_map_checks_what_varies_and_gradients_pass(auto_mesh, backend, spec):
    call = call_of(causal=True, backend=backend)
    expected, arrays = alone(call, *qkv()), [jnp.asarray(array) for array in qkv()]
    mapped = jax.shard_map(call, mesh=auto_mesh, in_specs=(spec,) * 3, out_specs=spec)
    same(jax.jit(trained(mapped))(*arrays), expected)  # the gradient of a mapped function
    inside = jax.shard_map(trained(call), mesh=auto_mesh, in_specs=(spec,) * 3, out_specs=(spec, (spec,) * 3))
    same(jax.jit(inside)(*arrays), expected)  # a mapped gradient


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_what_is_equal_on_every_device_gets_a_summed_gradient_inside_shard_map(auto_mesh, backend):
    """Queries split along the sequence read whole keys, sinks and bias."""

    def call(q, k, v, sinks, bias):
        return attention(q, k, v, sinks=sinks, bias=bias, backend=backend)

    arrays = (*qkv(), normal(5, HEADS), normal(6, 1, 1, 1, KV_LEN))
    expected = alone(call, *arrays)
    specs, row = (P(None, "data"), *(P(),) * 4), P(None, "data")
    mapped = jax.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=row)
    same(jax.jit(trained(mapped))(*arrays), expected)
    inside = jax.shard_map(trained(call), mesh=auto_mesh, in_specs=specs, out_specs=(row, specs))
    same(jax.jit(inside)(*arrays), expected)


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
    same(jax.jit(trained(mapped))(*arrays), alone(call, *arrays))


@pytest.mark.parametrize("backend", BOTH_WAYS)
def test_a_shard_map_over_some_axes(mesh, backend):
    call = call_of(causal=True, backend=backend)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"})
    expected = alone(call, *qkv())
    check, collectives, _ = split(mesh, mapped, qkv(), (P("data"),) * 3)
    same(check, expected)
    assert not collectives or backend == "jax_xla"
    heads_too = (P("data", None, "model"),) * 3
    if backend == "jax_xla":
        same(split(mesh, mapped, qkv(), heads_too)[0], expected)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="q: expected to be whole along every mesh axis that"):
        split(mesh, mapped, qkv(), heads_too)


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_one_kv_head_in_a_shard_map_over_some_axes(mesh, backend, heads):
    call = call_of(causal=True, backend=backend)
    specs = (P("data"),) * 3
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data"), axis_names={"data"})
    same(split(mesh, mapped, qkv(heads, 1), specs)[0], alone(call, *qkv(heads, 1)))


def test_a_part_that_the_backend_cannot_run_is_refused_with_its_reason(auto_mesh, monkeypatch):
    module: Any = backends.load("math")
    refuses = module.refuses

    def no_odd_batch(spec, *rest):
        return (*refuses(spec, *rest), *(["batch=1: planted"] if spec.batch == 1 else []))

    monkeypatch.setattr(module, "refuses", no_odd_batch)
    arrays = placed(auto_mesh, (normal(seed, 2, 3, 2, 5) for seed in range(3)), (P("data"),) * 3)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"sharding: expected a part that math can run.*batch=1: planted"
    ):
        jax.jit(partial(attention, backend="math"))(*arrays)


# Planted faults: the checks above must see them.


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def forget() -> None:
        jax.clear_caches()
        for cached in (partitioning.make_partitionable, ops._jit_partitionable):
            cached.cache_clear()

    forget()
    yield monkeypatch
    forget()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("spec", [None, P(), P("model"), P("data")], ids=str)
def test_rows_without_keys_have_their_sinks(mesh, spec, jit):
    """Of no mesh (None) and of this one, split as the heads are or otherwise: the log-sum-exp and every gradient."""
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
        (_, found), learned = ((jax.jit(f) if jit else f)(*split, sinks) for f in both)
    np.testing.assert_allclose(found, lse, atol=1e-5)
    for one, other in zip(learned, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_planted_a_partition_that_keeps_the_heads_whole_gathers(auto_mesh, planted):
    right = partitioning.split_of
    planted.setattr(partitioning, "split_of", lambda *known: right(*known)._replace(heads=(), kv_heads=()))
    with pytest.raises(AssertionError, match="all-gather"):
        check_split(auto_mesh, partial(attention, backend="math"), qkv(8, 8), (P(None, None, "model"),) * 3)


def test_planted_a_sum_over_devices_left_out(auto_mesh, planted):
    planted.setattr(partitioning, "_broadcast_axes", lambda *_: ())
    call = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, backend="math")  # noqa: E731
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_split(auto_mesh, call, (*qkv(), normal(5, HEADS)), (*(P("data"),) * 3, P()))


def test_planted_the_kv_heads_of_another_device(auto_mesh, planted):
    own = partitioning._own_kv_heads
    planted.setattr(partitioning, "_own_kv_heads", lambda part: own(part)[::-1] * 0)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_split(auto_mesh, partial(attention, backend="math"), qkv(6, 3), (P(None, None, "model"), P(), P()))


def test_planted_results_that_do_not_vary(auto_mesh, planted):
    types = local_call.result_types
    forgetful = lambda call, *arrays: tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types(call, *arrays))  # noqa: E731
    planted.setattr(local_call, "result_types", forgetful)
    with pytest.raises(Exception, match=r"(?i)vary|varying|cotangent|V:data"):
        test_shard_map_checks_what_varies_and_gradients_pass(auto_mesh, "math", P("data"))


# Layers of Flax on a mesh.

FEATURES, LAYERS = HEADS * DIM, 3


class LinenBlock(flax_linen.Module):
    """A layer of a residual stream, as scan takes it."""

    backend: str

    @flax_linen.compact
    def __call__(self, x, _):
        heads = {"num_kv_heads": KV_HEADS, "head_dim": DIM}
        return x + linen.Attention(HEADS, causal=True, backend=self.backend, name="attention", **heads)(x), None


class NnxBlock(flax_nnx.Module):
    """The same for NNX."""

    def __init__(self, backend, rngs):
        heads = {"num_kv_heads": KV_HEADS, "head_dim": DIM}
        self.attention = nnx.Attention(HEADS, FEATURES, causal=True, backend=backend, rngs=rngs, **heads)

    def __call__(self, x):
        return x + self.attention(x)


def by_heads(path: Any, leaf: Any) -> P:
    """How tensor parallelism splits a stack of projections: all by heads, ``[layers, ...]``."""
    keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    where = {"kernel": {"out": 1}, "bias": {"out": None}}[next(key for key in keys if key in ("kernel", "bias"))]
    axis = where.get("out" if "out" in keys else "", leaf.ndim - 2)
    return P() if axis is None else P(*(None,) * axis, "model")


def spread(mesh: Any, tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(leaf, NamedSharding(mesh, by_heads(path, leaf))), tree
    )


def check_layers(mesh: Any, loss: Any, params: Any, x: Any) -> None:
    """Gradients are those of one device, and three equal steps trace once."""
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
        found = step(*on_mesh)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
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


@pytest.mark.parametrize("backend", BOTH_WAYS)
@pytest.mark.parametrize("keys", [0, KV_LEN])
def test_nothing_to_see_has_the_types_of_what_is_seen(mesh, backend, keys):
    """No keys, and a vmap over no elements: constants, which a scan must be able to carry on."""
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
