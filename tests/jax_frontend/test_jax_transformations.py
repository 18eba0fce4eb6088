"""Tests that jit, grad, vmap, remat, scan and their combinations equal the plain call, on every backend."""

import itertools
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import cpu_meshes
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_frontends import judge
from frameworks import replaced
from jax.sharding import PartitionSpec as P
from spec_strategies import make_call

from attn_core import NoBackendError, SpecError, Target, backends, selection
from attn_core.selection import choice, target
from jax_frontend import (
    SeqInfo,
    append_kv,
    attention,
    attention_qkvpacked,
    context_parallel_attention,
    dot_product_attention,
    nnx,
    paged_attention,
)
from jax_frontend.bridge import targets
from jax_frontend.dispatch import partitioning, plan

pytestmark = pytest.mark.sampled

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 5, 7, 6, 3, 8
BACKENDS = ("sdpa_flash", "math", "jax_xla")


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    shapes = ((BATCH, Q_LEN, HEADS, DIM), (BATCH, KV_LEN, KV_HEADS, DIM), (BATCH, KV_LEN, KV_HEADS, DIM))
    return tuple(jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in shapes)


def loss(q, k, v, **options):
    out = attention(q, k, v, **options)
    return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()


def close(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 2e-5, "atol": 2e-6, **tolerance}), one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 3}, {}], ids=str)
def test_value_and_gradients_are_equal_under_every_transformation(arrays, backend, options):
    plain = partial(loss, **options, backend=backend)
    expected = jax.value_and_grad(plain, argnums=(0, 1, 2))(*arrays)
    close(jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(*arrays), expected)
    close(jax.value_and_grad(jax.jit(plain), argnums=(0, 1, 2))(*arrays), expected)
    close(jax.jit(jax.value_and_grad(jax.checkpoint(plain), argnums=(0, 1, 2)))(*arrays), expected)


@pytest.fixture
def fresh_plans():
    """Empties the caches of plans and traces, so that nothing of a test reaches the next one."""

    def empty_caches():
        for cache in (choice._explained, target.backend_on, plan.plan, plan.backend_of, partitioning.jit_partitionable):
            cache.cache_clear()
        jax.clear_caches()

    yield empty_caches
    empty_caches()


def test_a_backend_without_a_log_sum_exp(arrays, fresh_plans, replace_fields):
    """Like cuDNN through jax.nn: its forward gives no log-sum-exp and its backward needs none."""
    xla = backends.load("jax_xla", "cpu")
    forward, gradients, seen = xla.forward, xla.backward, []

    def without(spec, inputs):
        return forward(spec, inputs)[0], None

    def backward(spec, inputs, out, lse, dout, dlse):
        seen.append((lse, dlse))
        return gradients(spec, inputs, *forward(spec, inputs), dout, None)

    expected = jax.value_and_grad(partial(loss, causal=True, backend="jax_xla"), argnums=(0, 1, 2))(*arrays)
    claims = replace(xla.forward_claims, lse=False, lse_gradient=False)
    replace_fields(xla, forward_claims=claims, forward=without, backward=backward)
    fresh_plans()
    plain = partial(loss, causal=True, backend="jax_xla")
    close(plain(*arrays), expected[0])
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    for function in (plain, jax.jit(plain), jax.checkpoint(plain), jax.checkpoint(plain, policy=policy)):
        close(jax.value_and_grad(function, argnums=(0, 1, 2))(*arrays), expected)
    rows = [jnp.stack([array, array]) for array in arrays]
    actual = jax.vmap(jax.value_and_grad(plain, argnums=(0, 1, 2)))(*rows)
    close(actual, jax.tree.map(lambda one: jnp.stack([one, one]), expected))
    assert set(seen) == {(None, None)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, None, 0)], ids=str)
def test_vmap_equals_a_loop(arrays, backend, in_axes):
    call = partial(attention, causal=True, backend=backend)
    mapped = [
        a if axis is None else jnp.stack([a, a + 1, a * 2], axis) for a, axis in zip(arrays, in_axes, strict=True)
    ]
    row = [
        lambda i, a=a, axis=axis: a if axis is None else jnp.take(a, i, axis)
        for a, axis in zip(mapped, in_axes, strict=True)
    ]
    expected = jnp.stack([call(*(pick(i) for pick in row)) for i in range(3)])
    close(jax.vmap(call, in_axes)(*mapped), expected)

    def gradients(*arguments):
        return jax.grad(lambda *a: call(*a).sum(), argnums=(0, 1, 2))(*arguments)

    of_each = [gradients(*(pick(i) for pick in row)) for i in range(3)]
    close(jax.vmap(gradients, in_axes)(*mapped), jax.tree.map(lambda *g: jnp.stack(g), *of_each))
    through = jax.grad(lambda *a: jax.vmap(call, in_axes)(*a).sum(), argnums=(0, 1, 2))(*mapped)
    for gradient, array in zip(through, mapped, strict=True):
        assert gradient.shape == array.shape


@pytest.mark.parametrize("backend", ("sdpa_flash", "math"))
@pytest.mark.parametrize(
    "extra", ["mask", "shared mask", "key_ranges", "bias", "alibi_slopes", "sinks", "shared sinks", "softcap"]
)
def test_vmap_folds_or_repeats_every_operand(arrays, backend, extra):
    generator = np.random.default_rng(1)
    options, mapped = {}, None
    if extra == "mask":
        mapped = jnp.asarray(generator.random((3, BATCH, 1, Q_LEN, KV_LEN)) > 0.4)
    elif extra == "shared mask":
        options["mask"] = jnp.asarray(generator.random((1, 1, Q_LEN, KV_LEN)) > 0.4)
    elif extra == "key_ranges":
        mapped = jnp.asarray(np.sort(generator.integers(0, Q_LEN + 1, (3, 1, 1, KV_LEN, 2, 2), np.int32), -1))
    elif extra == "shared sinks":
        options["sinks"] = jnp.asarray(generator.standard_normal(HEADS), jnp.float32)
    elif extra == "bias":
        mapped = jnp.asarray(generator.standard_normal((3, 1, HEADS, 1, KV_LEN)), jnp.float32)
    elif extra == "alibi_slopes":
        mapped = jnp.asarray(generator.random((3, HEADS)), jnp.float32)
    elif extra == "sinks":
        mapped = jnp.asarray(generator.standard_normal((3, HEADS)), jnp.float32)
    else:
        options["softcap"] = 2.0
    queries = jnp.stack([arrays[0], arrays[0] + 1, arrays[0] * 2])

    def call(q, table):
        return attention(q, *arrays[1:], backend=backend, **options, **({} if table is None else {extra: table}))

    axes = (0, None if mapped is None else 0)
    if backend == "sdpa_flash" and extra in ("softcap", "key_ranges"):
        with pytest.raises(NoBackendError):
            jax.vmap(call, axes)(queries, mapped)
        return
    got = jax.vmap(call, axes)(queries, mapped)
    expected = jnp.stack([call(queries[i], None if mapped is None else mapped[i]) for i in range(3)])
    close(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_of_packed_calls_equals_a_loop(backend):
    info = SeqInfo.from_lengths([3, 0, 4], array=jnp.asarray)
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((3, 7, HEADS, DIM)), jnp.float32)
    call = lambda x: attention(x, x, x, causal=True, seq_info=info, backend=backend)  # noqa: E731
    close(jax.vmap(call)(rows), jnp.stack([call(row) for row in rows]))
    close(
        jax.vmap(jax.grad(lambda x: call(x).sum()))(rows),
        jnp.stack([jax.grad(lambda x: call(x).sum())(row) for row in rows]),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_scan_over_layers(arrays, backend):
    q = arrays[0]

    def layer(x, _):
        return x + attention(x, x, x, causal=True, backend=backend), None

    def network(x):
        return jax.lax.scan(layer, x, None, length=3)[0].sum()

    expected = q
    for _ in range(3):
        expected, _ = layer(expected, None)
    close(jax.jit(network)(q), expected.sum(), rtol=1e-4)
    close(
        jax.jit(jax.grad(network))(q), jax.grad(lambda x: layer(layer(layer(x, 0)[0], 0)[0], 0)[0].sum())(q), rtol=1e-4
    )


def test_seq_info_is_a_pytree_with_traced_offsets_and_static_lengths():
    traced = []

    @jax.jit
    def call(x, info):
        traced.append(info)
        return attention(x, x, x, causal=True, seq_info=info)

    x = jnp.asarray(np.random.default_rng(3).standard_normal((7, HEADS, DIM)), jnp.float32)
    for lengths in ([3, 4], [4, 3]):
        info = SeqInfo.from_lengths(lengths, array=jnp.asarray)
        expected = jnp.concatenate(
            [attention(part[None], part[None], part[None], causal=True)[0] for part in jnp.split(x, [lengths[0]])]
        )
        close(call(x, info), expected)
    assert len(traced) == 1, "other offsets of the same shape must not trace again"


def test_a_backend_needs_only_the_requested_gradients(arrays):
    bias = jnp.zeros((1, HEADS, Q_LEN, KV_LEN))
    by_query = jax.grad(lambda q: attention(q, *arrays[1:], bias=bias, backend="sdpa_flash").sum())
    assert jnp.isfinite(by_query(arrays[0])).all()
    with pytest.raises(NoBackendError, match="gradient of the bias: the aten CPU flash kernel has none"):
        jax.grad(lambda b: attention(*arrays, bias=b, backend="sdpa_flash").sum())(bias)
    with pytest.raises(NoBackendError, match="takes no gradient of the"):
        jax.grad(lambda q: attention(q, *arrays[1:], return_lse=True, backend="sdpa_flash")[1].sum())(arrays[0])
    with pytest.raises(NoBackendError, match=r"softcap=50\.0: the aten CPU flash kernel has none"):
        jax.jit(partial(attention, softcap=50.0, backend="sdpa_flash")).lower(*arrays)


def test_a_key_decides_what_dropout_drops(arrays):
    call = partial(attention, *arrays, dropout=0.5)
    one, same, other = (call(dropout_rng=jax.random.key(seed)) for seed in (0, 0, 1))
    assert jnp.array_equal(one, same) and not jnp.array_equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_no_elements(arrays, backend):
    call = partial(attention, causal=True, backend=backend)
    none = [jnp.zeros((0, *array.shape)) for array in arrays]
    assert jax.vmap(call)(*none).shape == (0, BATCH, Q_LEN, HEADS, DIM)
    gradients = jax.grad(lambda *a: jax.vmap(call, (0, None, None))(*a).sum(), argnums=(0, 1))(none[0], *arrays[1:])
    assert [g.shape for g in gradients] == [none[0].shape, arrays[1].shape]


# Every transformation against the float64 reference.

SIZES = {"batch": 2, "q_len": 5, "kv_len": 7, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "value_dim": 8}
CASES = {
    "grouped heads": SIZES,
    "causal, window, softcap": {**SIZES, "causal": True, "window": (3, 0), "softcap": 1.5},
    "jax.nn's own window": {**SIZES, "kv_len": 5, "causal": True, "window": (2, 0)},
    "rows that see no key": {**SIZES, "q_len": 9, "causal": True, "sinks": True},
    "packed": {**SIZES, "lengths": ((3, 0, 4, 1), (2, 5, 3, 0)), "causal": True},
    "a bias": {**SIZES, "bias_shape": (1, 6, 1, 7), "bias_gradient": True},
}


def claimed_cases():
    for (label, fields), backend in itertools.product(CASES.items(), BACKENDS):
        call = transformed_calls(fields)[0]
        if not selection.refusals(backend, call.spec, Target.here("jax", "cpu")):
            yield pytest.param(fields, backend, id=f"{label}-{backend}")


def transformed_calls(fields):
    """Two calls with different numbers."""
    return [make_call(seed, **{**fields, "dtype": "float32", "needs_backward": True}) for seed in (0, 1)]


def each(function, arrays, douts):
    pairs = [(jax.tree.map(lambda a, i=i: a[i], arrays), douts[i]) for i in range(len(douts))]
    program = jax.jit(partial(pulled, function))
    results = [program(*pair) for pair in pairs]
    return jax.tree.map(lambda *both: jnp.stack(both), *results)


def pulled(function, arrays, dout):
    out, pull = jax.vjp(function, arrays)
    return out, *pull(dout)


def scanned(function):
    return lambda arrays: jax.lax.scan(lambda _, row: (None, function(row)), None, arrays)[1]


NAMED = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
TRANSFORMED = {
    "eager": lambda f, arrays, douts: jax.tree.map(
        lambda *both: jnp.stack(both), *(pulled(f, jax.tree.map(lambda a, i=i: a[i], arrays), douts[i]) for i in (0, 1))
    ),
    "jit": each,
    "without jit": lambda f, *given: without_jit(jax.vmap(partial(pulled, f)), *given),
    "grad of jit": lambda f, *given: each(jax.jit(f), *given),
    "vmap of grad": lambda f, *given: jax.jit(jax.vmap(partial(pulled, f)))(*given),
    "grad of vmap": lambda f, *given: jax.jit(partial(pulled, jax.vmap(f)))(*given),
    "vmap of vmap": lambda f, arrays, douts: jax.tree.map(
        lambda a: a[0],
        jax.vmap(jax.vmap(partial(pulled, f)))(jax.tree.map(lambda a: a[None], arrays), douts[None]),
    ),
    "remat": lambda f, *given: each(jax.checkpoint(f), *given),
    "remat that saves out and lse": lambda f, *given: each(jax.checkpoint(f, policy=NAMED), *given),
    "grad of scan": lambda f, *given: jax.jit(partial(pulled, scanned(f)))(*given),
    "grad of scan of remat": lambda f, *given: jax.jit(partial(pulled, scanned(jax.checkpoint(f))))(*given),
    "scan of grad": lambda f, *given: jax.lax.scan(lambda _, pair: (None, pulled(f, *pair)), None, given)[1],
    "vmap of linearize": lambda f, *given: jax.vmap(partial(linearized, f))(*given),
}


def without_jit(function, *arguments):
    with jax.disable_jit():
        return function(*arguments)


def linearized(function, arrays, dout):
    out, tangent = jax.linearize(function, arrays)
    return out, *jax.linear_transpose(tangent, arrays)(dout)


@pytest.mark.parametrize("transformation", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("fields, backend", list(claimed_cases()))
def test_every_transformation_matches_the_reference(fields, backend, transformation):
    calls = transformed_calls(fields)
    options, info = calls[0].options, None
    if calls[0].spec.packed:
        inputs, spec = calls[0].inputs, calls[0].spec
        offsets = (jnp.asarray(cu, jnp.int32) for cu in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
        info = SeqInfo(*offsets, spec.max_len_q, spec.max_len_k)
    arrays = {name: jnp.stack([c.arrays()[name] for c in calls]).astype("float32") for name in calls[0].arrays()}
    douts = jnp.stack([c.dout for c in calls]).astype("float32")
    out, gradients = transformation(
        lambda given: attention(**given, **options, seq_info=info, backend=backend), arrays, douts
    )
    for index, call in enumerate(calls):
        results = {"out": out[index], **{f"d{name}": gradients[name][index] for name in call.learned}}
        accuracy = judge("jax", call, {name: np.asarray(array) for name, array in results.items()})
        assert accuracy.ok, accuracy


TABLES = {
    "block_table": jnp.array([[5, 0, 2], [3, 1, -1]], jnp.int32),
    "seq_lens": jnp.array([11, 6], jnp.int32),
    "cu_seqlens_q": jnp.array([0, 2, 5], jnp.int32),
}
WITHOUT_JIT = {
    "forward": lambda q, k, v: attention(q, k, v, causal=True, backend="math", return_lse=True, return_max_logit=True),
    "gradients": lambda *qkv: jax.grad(partial(loss, backend="sdpa_flash"), (0, 1, 2))(*qkv),
    "one array": lambda q, k, v: attention_qkvpacked(jnp.stack((q, q, q), -3), backend="math"),
    "remat": lambda *qkv: jax.grad(jax.checkpoint(partial(loss, causal=True, backend="math")))(*qkv),
    "forward mode": lambda q, *kv: jax.jvp(lambda q: attention(q, *kv, causal=True), (q,), (q,)),
    "dropout": lambda *qkv: jax.grad(partial(loss, dropout=0.4, dropout_rng=jax.random.key(3)))(*qkv),
    "rows of a cache": lambda *qkv: attention(*qkv, causal=True, kv_lengths=jnp.array([3, 6], jnp.int32)),
    "gradients of rows": lambda *qkv: jax.grad(partial(loss, causal=True, kv_lengths=jnp.array([3, 6], jnp.int32)))(
        *qkv
    ),
    "pages": lambda q, k, _: paged_attention(q[0], *pools(k), **TABLES, max_len_q=5, return_lse=True),
    "append": lambda _, k, v: append_kv(*pools(k), k[0, :5], v[0, :5], **TABLES),
    "jax.nn": lambda *qkv: jax.grad(lambda *a: jnp.sum(dot_product_attention(*a, scale=1.0) ** 2))(*qkv),
    "layer": lambda q, *_: nnx.Attention(4, DIM, rngs=flax.nnx.Rngs(0))(q[:, :, 0]),
    "scan": lambda q, *kv: jax.lax.scan(lambda x, _: (attention(x, *kv, backend="math"), 0), q, None, 2),
    "one device of a mesh": lambda q, *kv: jax.shard_map(
        partial(attention, backend="math"), mesh=cpu_meshes.mesh((1,), ("x",)), in_specs=P(), out_specs=P()
    )(q, *kv),
    "context parallelism": lambda q, *_: context_parallel_attention(
        *(q[:, :4],) * 3,
        mesh=cpu_meshes.mesh((1,), ("x",)),
        axis_name="x",
        layout="zigzag",
        causal=True,
        backend="math",
    ),
}


def pools(array):
    """Pools of keys and values, made anew, because an eager append donates them."""
    return [jnp.full((6, 4, *array.shape[2:]), number) for number in (0.5, 0.25)]


@pytest.mark.parametrize("call", WITHOUT_JIT.values(), ids=WITHOUT_JIT)
def test_every_function_runs_without_jit(arrays, call):
    close(without_jit(call, *arrays), jax.tree.map(np.asarray, call(*arrays)), atol=1e-5)


def test_a_program_keeps_its_loops_without_jit(arrays):
    """The kernel's program is traced once: loops that unroll would stay in it for calls of any length."""
    q, k, v = (jnp.tile(array[:1, :1], (1, 2000, 1, 1)) for array in arrays)
    program = without_jit(jax.make_jaxpr(partial(attention, causal=True, backend="jax_xla")), q, k, v)
    assert str(program).count("while[") + str(program).count("scan[") == 4


@contextmanager
def counted_runs(backend="math"):
    """Counts the runs of both halves of a torch kernel."""
    record, runs = backends.load(backend), Counter()

    def watched(half, function):
        def run(*arguments):
            runs[half] += 1
            return function(*arguments)

        return run

    with replaced(record, **{half: watched(half, getattr(record, half)) for half in ("forward", "backward")}):
        yield runs


@pytest.mark.parametrize("policy, forwards", [(None, 6), (NAMED, 3)], ids=["all again", "out and lse saved"])
def test_remat_runs_the_forward_again_unless_its_results_are_saved(arrays, policy, forwards):
    _, k, v = arrays

    def layer(q, _):
        return q + jnp.sin(attention(2 * q, k, v, causal=True, backend="math")), None

    def network(layer, q):
        return jax.lax.scan(layer, q, None, length=3)[0].sum()

    expected = jax.block_until_ready(jax.value_and_grad(partial(network, layer))(arrays[0]))
    step = jax.jit(jax.value_and_grad(partial(network, jax.checkpoint(layer, policy=policy))))
    with counted_runs() as runs:
        close(jax.block_until_ready(step(arrays[0])), expected)
    assert runs == {"forward": forwards, "backward": 3}


def test_equal_steps_trace_and_describe_the_call_once(arrays):
    traces = []

    @jax.jit
    def step(q, k, v):
        traces.append(1)
        return jax.grad(partial(loss, causal=True, softcap=3.0, backend="math"), argnums=(0, 1, 2))(q, k, v)

    step(*arrays)
    known, plans = len(targets._calls), plan.plan.cache_info().currsize
    for scale in (1.0, 2.0, 3.0):
        step(*(scale * array for array in arrays))
    assert len(traces) == 1 and len(targets._calls) == known and plan.plan.cache_info().currsize == plans


# Forward mode.

FORWARD_CASES = {
    **CASES,
    "everything": {
        **{**SIZES, "causal": True, "window": (4, 1), "softcap": 1.5, "mask_shape": (2, 1, 5, 7), "scale": 0.4},
        **{"bias_shape": (2, 6, 5, 7), "bias_gradient": True, "alibi_shape": (2, 6), "sinks": True},
    },
    "blocks": {**SIZES, "batch": 1, "q_len": 263, "kv_len": 269, "causal": True, "value_dim": 3},
}


def in_float64(fields):
    """(a function of the learned arrays that gives out and lse, these arrays, tangents of them)."""
    call = make_call(3, **{**fields, "dtype": "float64", "needs_backward": True, "return_lse": True})
    info = None
    if call.spec.packed:
        offsets = (jnp.asarray(cu, jnp.int32) for cu in (call.inputs.cu_seqlens_q, call.inputs.cu_seqlens_k))
        info = SeqInfo(*offsets, call.spec.max_len_q, call.spec.max_len_k)
    arrays = {name: jnp.asarray(array) for name, array in call.arrays().items()}
    learned = {name: arrays.pop(name) for name in call.learned}
    if "mask" in arrays:
        arrays["mask"] = arrays["mask"].astype(bool)
    generator = np.random.default_rng(4)
    tangents = {name: jnp.asarray(generator.standard_normal(array.shape)) for name, array in learned.items()}

    def function(learned):
        return attention(**learned, **arrays, **call.options, seq_info=info, backend="jax_xla")

    return function, learned, tangents


@pytest.mark.parametrize("fields", FORWARD_CASES.values(), ids=FORWARD_CASES)
def test_forward_mode_on_the_xla_path_is_the_derivative(fields):
    """Against central differences in float64, and against reverse mode: <dout, J t> = <J' dout, t>."""
    with jax.enable_x64(True):
        function, primals, tangents = in_float64(fields)
        results, moved = jax.jit(lambda p, t: jax.jvp(function, (p,), (t,)))(primals, tangents)
        close(results, function(primals), rtol=1e-12, atol=1e-12)
        step = 1e-5
        ahead, behind = (
            function(jax.tree.map(lambda p, t, by=by: p + by * t, primals, tangents)) for by in (step, -step)
        )
        for one, other, actual in zip(ahead, behind, moved, strict=True):
            seen = jnp.isfinite(one)  # the log-sum-exp of an empty row is -inf, and its tangent 0
            desired = jnp.where(seen, (jnp.where(seen, one, 0) - jnp.where(seen, other, 0)) / (2 * step), 0)
            np.testing.assert_allclose(actual, desired, rtol=1e-6, atol=1e-8)
        cotangents = jax.tree.map(jnp.cos, moved)
        (pulled_back,) = jax.vjp(function, primals)[1](cotangents)
        left, right = (
            sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
            for one, other in ((cotangents, moved), (pulled_back, tangents))
        )
        np.testing.assert_allclose(left, right, rtol=1e-10)


@pytest.mark.slow
def test_forward_mode_composes(arrays):
    q, k, v = arrays
    call = lambda q: attention(q, k, v, causal=True, backend="jax_xla")  # noqa: E731
    reverse = jax.jacrev(lambda q: call(q)[0, :2])(q)
    close(jax.jacfwd(lambda q: call(q)[0, :2])(q), reverse)
    tangents = jnp.stack([q, jnp.cos(q), q * q])
    along = lambda t: jax.jvp(call, (q,), (t,))[1]  # noqa: E731
    expected = jnp.stack([along(t) for t in tangents])
    close(jax.vmap(along)(tangents), expected)
    close(jax.vmap(jax.linearize(jax.jit(call), q)[1])(tangents), expected)
    close(jax.jvp(jax.vmap(call), (jnp.stack([q] * 3),), (tangents,))[1], expected)
    close(jax.jvp(jax.checkpoint(call), (q,), (tangents[0],))[1], expected[0])
    once = lambda q: jax.jvp(call, (q,), (tangents[1],))[1]  # noqa: E731
    step = 1e-2
    close(jax.jvp(once, (q,), (q,))[1], (once(q + step * q) - once(q - step * q)) / (2 * step), rtol=1e-2, atol=2e-3)
    gradient = jax.grad(lambda q: (call(q) ** 2).sum())
    product = (gradient(q + step * q) - gradient(q - step * q)) / (2 * step)
    close(jax.jvp(gradient, (q,), (q,))[1], product, rtol=1e-2, atol=2e-3)
    close(jax.linearize(gradient, q)[1](q), product, rtol=1e-2, atol=2e-3)
    every = jax.vmap(lambda t: jax.jvp(gradient, (q,), (t,))[1])(jnp.stack([q, q]))  # only the tangent is mapped
    close(every, jnp.stack([product, product]), rtol=1e-2, atol=2e-3)


@pytest.mark.slow
def test_hessians_equal_those_of_plain_operations(arrays):
    q = arrays[0][:1, :3, :2]
    ours = lambda q: (attention(q, q, q, causal=True, backend="jax_xla") ** 2).sum()  # noqa: E731
    plain = lambda q: (jax.nn.dot_product_attention(q, q, q, is_causal=True) ** 2).sum()  # noqa: E731
    expected = jax.hessian(plain)(q)
    for actual in (jax.hessian(ours), jax.jit(jax.hessian(ours)), jax.jacrev(jax.jacfwd(ours))):
        close(actual(q), expected, rtol=1e-4, atol=1e-4)
    for twice in (jax.jacrev(jax.grad(ours)), jax.jit(jax.jacrev(jax.grad(ours)))):
        with pytest.raises(SpecError, match="backend='jax_xla': expected second derivatives in forward over reverse"):
            twice(q)


FORWARD_WAYS = {
    "jvp": lambda call, q: jax.jvp(call, (q,), (q,))[1],
    "jit of jvp": lambda call, q: jax.jit(lambda q: jax.jvp(call, (q,), (q,)))(q)[1],
    "jvp of jit": lambda call, q: jax.jvp(jax.jit(call), (q,), (q,))[1],
    "linearize": lambda call, q: jax.linearize(call, q)[1](q),
    "jacfwd": lambda call, q: jax.jacfwd(lambda q: call(q)[0, 1, :2])(q),
    "vmap of jvp": lambda call, q: jax.vmap(lambda t: jax.jvp(call, (q,), (t,))[1])(jnp.stack([q, 2 * q])),
    "jvp of vmap": lambda call, q: jax.jvp(jax.vmap(call), (jnp.stack([q, q]),), (jnp.stack([q, 2 * q]),))[1],
    "remat": lambda call, q: jax.jvp(jax.checkpoint(call), (q,), (q,))[1],
}


@pytest.mark.parametrize("way", FORWARD_WAYS)
def test_forward_mode_through_the_bridge(arrays, way):
    """``math`` computes its tangents itself; its numbers are judged in tests/correctness/test_forward_mode.py."""
    q, k, v = arrays
    calls = (partial(attention, k=k, v=v, causal=True, softcap=3.0, backend=name) for name in ("math", "jax_xla"))
    actual, expected = (FORWARD_WAYS[way](lambda q, call=call: call(q), q) for call in calls)
    close(actual, expected, rtol=1e-4, atol=1e-5)


def test_forward_mode_of_one_array_and_of_documents():
    qkv = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, 3, 4, DIM)), jnp.float32)
    info = SeqInfo.from_lengths([4, 0, 5])
    for options in ({}, {"seq_info": info, "window": (2, 1)}):
        calls = (partial(attention_qkvpacked, backend=name, **options) for name in ("math", "jax_xla"))
        (out, moved), (right, other) = (jax.jvp(call, (qkv,), (jnp.cos(qkv),)) for call in calls)
        close(out, right)
        close(moved, other, rtol=1e-4, atol=1e-5)


def test_a_backend_with_forward_mode_alone_has_no_reverse_mode(arrays, replace_fields, fresh_plans):
    """As ``triton_jvp`` on a GPU."""
    q, k, v = arrays
    replace_fields(backends.load("math"), backward_claims=None)
    fresh_plans()
    calls = (partial(attention, k=k, v=v, scale=0.123, backend=name) for name in ("math", "jax_xla"))
    actual, expected = (jax.jvp(call, (q,), (q,)) for call in calls)
    close(actual, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NoBackendError, match="backward: the torch math kernel has no gradient"):
        jax.grad(lambda q: attention(q, k, v, scale=0.123, backend="math").sum())(q)


def test_kernels_without_forward_mode_name_an_alternative(arrays):
    q, k, v = arrays
    call = lambda q: attention(q, k, v, backend="sdpa_flash")  # noqa: E731
    says = r"backend='sdpa_flash': expected reverse mode .*no forward mode; backend=\"jax_xla\" has forward mode"
    for forward in FORWARD_WAYS.values():
        with pytest.raises(SpecError, match=says):
            forward(call, q)


@pytest.mark.parametrize("backend", ("sdpa_flash", "math"))
def test_kernels_refuse_second_derivatives(arrays, backend):
    q, k, v = arrays
    call = lambda q: attention(q, k, v, backend=backend)  # noqa: E731
    once = jax.grad(lambda q: call(q).sum())
    says = rf"backend='{backend}': expected reverse mode .* got second derivatives .*; backend=\"jax_xla\" has them"
    for second in (lambda: jax.jvp(once, (q,), (q,)), lambda: jax.grad(lambda q: once(q).sum())(q)):
        with pytest.raises(SpecError, match=says):
            second()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("array", [jnp.asarray, None], ids=["JAX offsets", "numpy offsets"])
def test_batches_with_other_documents_share_one_trace(array, backend):
    """Within static limits on the length and the number of documents."""
    generator, traces = np.random.default_rng(0), []
    q, k, v = (jnp.asarray(generator.standard_normal((9, heads, DIM)), jnp.float32) for heads in (6, 3, 3))

    @jax.jit
    def run(q, k, v, info):
        traces.append(1)
        return jax.value_and_grad(partial(loss, causal=True, seq_info=info, backend=backend), (0, 1, 2))(q, k, v)

    for lengths in ([4, 5], [9], [1, 3, 0, 5], [2, 2, 2, 2, 1]):
        info = SeqInfo.from_lengths(lengths, array=array, max_len=9, max_documents=5)
        plain = SeqInfo.from_lengths(lengths)
        close(run(q, k, v, info), jax.value_and_grad(partial(loss, causal=True, seq_info=plain), (0, 1, 2))(q, k, v))
    assert len(traces) == 1
