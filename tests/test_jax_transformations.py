"""jit, grad, vmap, remat, scan and their combinations mean the same as the plain call, on every backend."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_core import NoBackendError, SpecError
from jax_frontend import SeqInfo, attention

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
def test_value_and_gradients_survive_every_transformation(arrays, backend, options):
    plain = partial(loss, **options, backend=backend)
    expected = jax.value_and_grad(plain, argnums=(0, 1, 2))(*arrays)
    close(jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(*arrays), expected)
    close(jax.value_and_grad(jax.jit(plain), argnums=(0, 1, 2))(*arrays), expected)
    close(jax.jit(jax.value_and_grad(jax.checkpoint(plain), argnums=(0, 1, 2)))(*arrays), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, None, 0)], ids=str)
def test_vmap_is_a_loop(arrays, backend, in_axes):
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
@pytest.mark.parametrize("extra", ["mask", "shared mask", "bias", "alibi_slopes", "sinks", "shared sinks", "softcap"])
def test_vmap_folds_or_repeats_every_operand(arrays, backend, extra):
    generator = np.random.default_rng(1)
    options, mapped = {}, None
    if extra == "mask":
        mapped = jnp.asarray(generator.random((3, BATCH, 1, Q_LEN, KV_LEN)) > 0.4)
    elif extra == "shared mask":
        options["mask"] = jnp.asarray(generator.random((1, 1, Q_LEN, KV_LEN)) > 0.4)
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
    if backend == "sdpa_flash" and extra in ("alibi_slopes", "sinks", "shared sinks", "softcap"):
        with pytest.raises(NoBackendError):
            attention(*arrays, backend=backend, **options, **({} if mapped is None else {extra: mapped[0]}))
        return
    queries = jnp.stack([arrays[0], arrays[0] + 1, arrays[0] * 2])

    def call(q, table):
        return attention(q, *arrays[1:], backend=backend, **options, **({} if table is None else {extra: table}))

    got = jax.vmap(call, (0, None if mapped is None else 0))(queries, mapped)
    expected = jnp.stack([call(queries[i], None if mapped is None else mapped[i]) for i in range(3)])
    close(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_calls_map_one_after_another(backend):
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


def test_only_asked_gradients_decide_what_a_backend_must_do(arrays):
    bias = jnp.zeros((1, HEADS, Q_LEN, KV_LEN))
    by_query = jax.grad(lambda q: attention(q, *arrays[1:], bias=bias, backend="sdpa_flash").sum())
    assert jnp.isfinite(by_query(arrays[0])).all()
    with pytest.raises(NoBackendError, match="gradient of the bias: the aten CPU flash kernel has none"):
        jax.grad(lambda b: attention(*arrays, bias=b, backend="sdpa_flash").sum())(bias)
    with pytest.raises(SpecError, match="alibi_slopes: expected no gradient"):
        jax.grad(lambda s: attention(*arrays, alibi_slopes=s).sum())(jnp.ones(HEADS))


def test_refusals_come_at_trace_time_as_python_errors(arrays):
    with pytest.raises(NoBackendError, match=r"softcap=50\.0: the aten CPU flash kernel has none"):
        jax.jit(partial(attention, softcap=50.0, backend="sdpa_flash")).lower(*arrays)
    with pytest.raises(NoBackendError, match="backward: FlexAttention on CPU has no gradient"):
        jax.grad(lambda q: attention(q, *arrays[1:], backend="flex").sum())(arrays[0])


def test_a_gradient_of_the_log_sum_exp_flows(arrays):
    def merged(q, k, v, backend):
        out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
        return (out.sum(-1).swapaxes(1, 2) * jax.nn.sigmoid(lse)).sum()

    found = [
        jax.jit(jax.grad(partial(merged, backend=name), argnums=(0, 1, 2)))(*arrays) for name in ("math", "jax_xla")
    ]
    close(found[0], found[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(NoBackendError, match="takes no gradient of the log-sum-exp"):
        jax.grad(partial(merged, backend="sdpa_flash"))(*arrays)


def test_dropout_in_jax_is_the_xla_path_and_needs_a_key(arrays):
    call = partial(attention, *arrays, dropout=0.5)
    one, same, other = (call(dropout_rng=jax.random.key(seed)) for seed in (0, 0, 1))
    assert jnp.array_equal(one, same) and not jnp.array_equal(one, other)
    with pytest.raises(SpecError, match="dropout_rng"):
        call()
    with pytest.raises(NoBackendError, match=r"dropout=0\.5: in JAX only the XLA path has dropout"):
        call(dropout_rng=jax.random.key(0), backend="math")


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_nothing_is_nothing(arrays, backend):
    call = partial(attention, causal=True, backend=backend)
    none = [jnp.zeros((0, *array.shape)) for array in arrays]
    assert jax.vmap(call)(*none).shape == (0, BATCH, Q_LEN, HEADS, DIM)
    gradients = jax.grad(lambda *a: jax.vmap(call, (0, None, None))(*a).sum(), argnums=(0, 1))(none[0], *arrays[1:])
    assert [g.shape for g in gradients] == [none[0].shape, arrays[1].shape]
