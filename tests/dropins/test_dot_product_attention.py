"""Tests dot_product_attention against jax.nn's: equal values and gradients for every argument, or a refusal by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch_first import torch_first  # noqa: F401 (a fixture)

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from frameworks import registered, spied
from hypothesis import given, settings
from hypothesis import strategies as st
from own_process import in_its_own_process

from attn_core import NoBackendError, backends
from attn_core.errors import DTypeError, ShapeError, SpecError
from jax_frontend import dot_product_attention, explain, use_backend

pytestmark = pytest.mark.sampled

HOST = partial(jax.nn.dot_product_attention, implementation="xla")
MODULE: Any = import_module("jax_frontend.dot_product_attention")
BACKENDS = (("sdpa_flash", "math"), "math", "jax_xla")
"""Of each pair the first that can run: torch's flash kernel has no gradient of a bias or with a log-sum-exp."""

SIZES = ((2, 5, 7, 6, 3, 11), (1, 13, 11, 3, 1, 5))
"""(batch, q_len, kv_len, heads, kv_heads, head_dim); only a few, because every new shape is compiled."""
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = SIZES[0]


class Case(NamedTuple):
    """A call by jax.nn's keywords: the arrays with gradients (floats), the others, and the visible set computed by
    loops."""

    learned: dict[str, np.ndarray]
    keywords: dict[str, Any]
    seen: np.ndarray
    """bool ``[batch, heads, q_len, kv_len]``; False for queries past the end of their row."""
    past_end: np.ndarray
    """bool ``[batch, q_len]``."""

    @property
    def blind(self) -> np.ndarray:
        """bool ``[batch, q_len, heads]``: queries within their row that see no key."""
        return ~self.seen.any(-1).swapaxes(1, 2) & ~self.past_end[:, :, None]

    @property
    def has_residual(self) -> bool:
        return bool(self.keywords.get("return_residual"))


def visible(sizes: tuple[int, ...], keywords: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """``Case.seen`` and ``Case.past_end``, by loops over queries and keys that follow jax.nn's documentation."""
    batch, q_len, kv_len, heads = sizes[:4]
    seen = np.ones((batch, heads, q_len, kv_len), bool)
    window = keywords.get("local_window_size")
    left, right = (window, window) if isinstance(window, int) or window is None else window
    for i in range(q_len):
        for j in range(kv_len):
            causal = not keywords.get("is_causal") or j <= i
            near = window is None or i - left <= j <= i + right
            seen[:, :, i, j] = causal and near
    if keywords.get("mask") is not None:
        seen &= keywords["mask"]
    past_end = np.zeros((batch, q_len), bool)
    for row in range(batch):
        if keywords.get("key_value_seq_lengths") is not None:
            seen[row, :, :, keywords["key_value_seq_lengths"][row] :] = False
        if keywords.get("query_seq_lengths") is not None:
            past_end[row, keywords["query_seq_lengths"][row] :] = True
    return seen & ~past_end[:, None, :, None], past_end


def build(sizes: tuple[int, ...] = SIZES[0], *, unbatched: bool = False, bias: Any = None, **keywords: Any) -> Case:
    """A case with standard normal values; a mask or bias may be given as a shape."""
    batch, q_len, kv_len, heads, kv_heads, dim = sizes
    generator = np.random.default_rng(0)
    shapes = {"query": (q_len, heads, dim), "key": (kv_len, kv_heads, dim), "value": (kv_len, kv_heads, dim)}
    learned = {name: generator.standard_normal((batch, *shape), np.float32) for name, shape in shapes.items()}
    if bias is not None:
        learned["bias"] = generator.standard_normal(bias, np.float32)
    if isinstance(keywords.get("mask"), tuple):
        keywords["mask"] = generator.random(keywords["mask"]) < 0.6
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in keywords:
            keywords[name] = np.asarray(keywords[name], np.int32)
    seen, past_end = visible(sizes, keywords)
    if unbatched:
        learned = {name: array if name == "bias" else array[0] for name, array in learned.items()}
    return Case(learned, keywords, seen, past_end)


def run(function: Callable[..., Any], case: Case) -> dict[str, np.ndarray]:
    """The results and gradients of a case, with the batch axis; the cotangent is 0 in rows that see nothing."""

    def forward(learned: dict[str, Any]) -> tuple[Any, Any]:
        actual = function(**learned, **case.keywords)
        return actual if case.has_residual else (actual, None)

    out, pull, residual = jax.vjp(
        forward, {name: jnp.array(array) for name, array in case.learned.items()}, has_aux=True
    )
    dout = np.random.default_rng(1).standard_normal((*case.blind.shape, out.shape[-1]), np.float32)
    dout = np.where(case.blind[..., None], 0, dout)
    (gradients,) = pull(jnp.array(dout.reshape(out.shape)))
    assert out.shape == case.learned["query"].shape
    results = {"out": out.reshape(dout.shape)} | {f"d{name}": gradient for name, gradient in gradients.items()}
    if case.has_residual:
        assert residual.shape == case.learned["query"].shape[:-1]
        results["residual"] = residual.reshape(case.blind.shape)
    return {name: np.asarray(result) for name, result in results.items()}


def check(case: Case, function: Callable[..., Any]) -> None:
    """Checks that a function computes what jax.nn does for a case, and 0 in rows that see nothing."""
    expected, got = run(HOST, case), run(function, case)
    assert expected.keys() == got.keys()
    assert (got["out"][case.blind] == 0).all()
    expected["out"] = np.where(case.blind[..., None], 0, expected["out"])
    if case.has_residual:
        dark = case.blind | case.past_end[:, :, None]
        assert (got["residual"][dark] == -np.inf).all() and (expected["residual"][dark] < -1e38).all()
        expected["residual"] = np.where(dark, -np.inf, expected["residual"])
    for name, result in got.items():
        np.testing.assert_allclose(result, expected[name], rtol=2e-5, atol=5e-6, err_msg=name)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments for ``build``: every argument of jax.nn present or absent, in every form."""
    sizes = draw(st.sampled_from(SIZES))
    batch, q_len, kv_len, heads, *_ = sizes
    shape = st.tuples(*(st.sampled_from(sorted({1, full})) for full in (batch, heads, q_len, kv_len)))
    ranked = shape.flatmap(lambda full: st.sampled_from([full[cut:] for cut in range(4) if set(full[:cut]) <= {1}]))
    distance = st.integers(0, 6)
    options = {
        "mask": ranked,
        "bias": ranked,
        "is_causal": st.just(True),
        "local_window_size": st.one_of(distance, st.tuples(distance, distance)),
        "query_seq_lengths": st.lists(st.integers(0, q_len + 1), min_size=batch, max_size=batch),
        "key_value_seq_lengths": st.lists(st.integers(0, kv_len + 1), min_size=batch, max_size=batch),
        "scale": st.sampled_from([0.25, 1.5]),
        "return_residual": st.just(True),
    }
    chosen = draw(st.fixed_dictionaries({}, optional=options))
    return {"sizes": sizes, "unbatched": batch == 1 and draw(st.booleans()), **chosen}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_values_and_gradients_are_those_of_jax_nn(backend: Any) -> None:
    @settings(max_examples=settings().max_examples // (10 if backend == "jax_xla" else 3))  # XLA compiles each example
    @given(calls())
    def compare(call: dict[str, Any]) -> None:
        check(build(**call), partial(dot_product_attention, backend=backend))

    compare()


LENGTHS = {"query_seq_lengths": [3, 5], "key_value_seq_lengths": [6, 2]}
"""For SIZES[0]: both rows have positions past their end."""
FULL = (BATCH, HEADS, Q_LEN, KV_LEN)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_argument_at_once(backend: Any) -> None:
    everything = {"bias": (1, HEADS, 1, KV_LEN), "mask": FULL, "is_causal": True, "local_window_size": (3, 1)}
    case = build(**everything, **LENGTHS, scale=0.4, return_residual=True)
    assert case.blind.any() and case.past_end.any() and case.seen.any()
    check(case, partial(dot_product_attention, backend=backend))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (2, 1)}], ids=str)
def test_the_xla_implementation_equals_jax_nn_itself(options: dict[str, Any]) -> None:
    check(build(**options), partial(dot_product_attention, implementation="xla"))


def test_as_many_kv_heads_as_heads_and_equal_lengths() -> None:
    lengths = {"query_seq_lengths": [7, 0, 4], "key_value_seq_lengths": [7, 0, 4]}
    check(build((3, 7, 7, 2, 2, 3), **lengths, bias=(2, 1, 7), is_causal=True), dot_product_attention)


def _with(**changed: Any) -> Callable[..., Any]:
    """dot_product_attention with changed keywords."""
    return lambda **keywords: dot_product_attention(**{**keywords, **changed})


def _shifted(name: str, by: int) -> Callable[..., Any]:
    return lambda **keywords: dot_product_attention(**{**keywords, name: np.asarray(keywords[name], np.int32) + by})


def _other_heads(*, key: Any, value: Any, **keywords: Any) -> Any:
    """Reads kv head ``h % kv_heads``."""
    tiled = (jnp.tile(array, (1, 1, HEADS // KV_HEADS, 1)) for array in (key, value))
    return dot_product_attention(**keywords, **dict(zip(("key", "value"), tiled)))


def _in_bits(**keywords: Any) -> Any:
    out, residual = dot_product_attention(**keywords)
    return out, residual / np.log(2, dtype=np.float32)


def _only_set_to_zero(**keywords: Any) -> Any:
    """Sets padded rows to 0 only in the output; their gradients stay."""
    out = dot_product_attention(**{**keywords, "query_seq_lengths": None})
    return out - jax.lax.stop_gradient(out - dot_product_attention(**keywords))


FAULTS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "causal dropped": ({"is_causal": True}, _with(is_causal=False)),
    "one key more to the left": ({"local_window_size": (2, 1)}, _with(local_window_size=(3, 1))),
    "one key more to the right": ({"local_window_size": (2, 1)}, _with(local_window_size=(2, 2))),
    "an int window that counts self": ({"local_window_size": 2}, _with(local_window_size=1)),
    "an int window to the left alone": ({"local_window_size": 2}, _with(local_window_size=(2, 0))),
    "scale": ({}, _with(scale=1.01 / np.sqrt(DIM))),
    "mask dropped beside lengths": ({"mask": FULL, **LENGTHS}, _with(mask=None)),
    "one key past the end": (LENGTHS, _shifted("key_value_seq_lengths", 1)),
    "one query past the end": (LENGTHS, _shifted("query_seq_lengths", 1)),
    "a query too few": (LENGTHS, _shifted("query_seq_lengths", -1)),
    "gradients of padded queries": (LENGTHS, _only_set_to_zero),
    "another map of heads": ({}, _other_heads),
    "bias dropped": ({"bias": (HEADS, 1, KV_LEN)}, _with(bias=None)),
    "a residual in bits": ({"return_residual": True}, _in_bits),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_planted_faults(fault: str) -> None:
    options, faulty = FAULTS[fault]
    case = build(**options)
    check(case, dot_product_attention)
    with pytest.raises(AssertionError, match=r"Not equal|assert"):
        check(case, faulty)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"local_window_size": (2, 1)}, {"local_window_size": 1}], ids=str
)
def test_the_comparison_finds_the_other_alignment(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    case, right = build(**options), MODULE.attention
    check(case, dot_product_attention)
    monkeypatch.setattr(MODULE, "attention", lambda *qkv, **how: right(*qkv, **{**how, "alignment": "bottom_right"}))
    with pytest.raises(AssertionError, match="Not equal"):
        check(case, dot_product_attention)


def test_the_signature_is_jax_nn_s_and_backend() -> None:
    host = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    assert list(ours) == [*host, "backend"]
    for name, parameter in host.items():
        assert (parameter.kind, parameter.default) == (ours[name].kind, ours[name].default), name
    assert ours["backend"].kind is inspect.Parameter.KEYWORD_ONLY and ours["backend"].default is None


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_query_without_keys_gives_zero_but_in_jax_nn_the_mean(backend: Any) -> None:
    case = build(mask=FULL, key_value_seq_lengths=[KV_LEN, 0])
    case.keywords["mask"][0, :, 1] = False
    call = partial(dot_product_attention, **case.keywords, backend=backend)
    arrays = [jnp.asarray(array) for array in case.learned.values()]
    out, pull = jax.vjp(call, *arrays)
    mean = np.repeat(case.learned["value"].mean(1), HEADS // KV_HEADS, axis=1)  # [batch, heads, head_dim]
    theirs = HOST(*arrays, **case.keywords)
    for row, query in ((0, 1), (1, 0), (1, 4)):
        assert (out[row, query] == 0).all()
        np.testing.assert_allclose(theirs[row, query], mean[row], rtol=1e-5, atol=1e-6)
    dq, dk, dv = pull(jnp.ones_like(out))
    assert (dq[0, 1] == 0).all() and not np.any([(part[1] != 0).any() for part in (dq, dk, dv)])
    bias = jnp.full((KV_LEN,), -jnp.inf)
    assert (dot_product_attention(*arrays, bias=bias) == 0).all() and np.isnan(HOST(*arrays, bias=bias)).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_jit_grad_and_vmap_with_traced_lengths(backend: Any) -> None:
    case = build((3, *SIZES[0][1:]))
    arrays = [jnp.stack([array, 2 * array]) for array in case.learned.values()]  # [2, batch, length, heads, head_dim]
    q_lengths, kv_lengths = (
        jnp.asarray([[3, 5, 0], [1, 2, 4]], jnp.int32),
        jnp.asarray([[6, 2, 7], [1, 5, 7]], jnp.int32),
    )

    def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(q: Any, k: Any, v: Any, q_length: Any, kv_length: Any) -> Any:
            lengths = {"query_seq_lengths": q_length, "key_value_seq_lengths": kv_length}
            out = function(q, k, v, **lengths, is_causal=True)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

        return jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2))))

    expected = gradients(HOST)(*arrays, q_lengths, kv_lengths)
    got = gradients(partial(dot_product_attention, backend=backend))(*arrays, q_lengths, kv_lengths)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=5e-5, atol=1e-5), got, expected)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that ``attention`` receives, in order."""
    seen: list[Any] = []
    right = MODULE.attention
    monkeypatch.setattr(MODULE, "attention", lambda *qkv, **how: seen.append(how["mask"]) or right(*qkv, **how))
    return seen


@pytest.mark.parametrize(
    ("given_mask", "made"),
    [
        (None, (BATCH, 1, 1, KV_LEN)),
        ((1, HEADS, 1, KV_LEN), (BATCH, HEADS, 1, KV_LEN)),
        ((Q_LEN, KV_LEN), (BATCH, 1, Q_LEN, KV_LEN)),
    ],
)
def test_lengths_build_no_mask_of_queries_and_keys(masks: list[Any], given_mask: Any, made: Any) -> None:
    more = {} if given_mask is None else {"mask": given_mask}
    check(build(**LENGTHS, **more, is_causal=True, local_window_size=3), dot_product_attention)
    assert [mask.shape for mask in masks] == [made]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", [{}, {"local_window_size": (1, 2)}, {"return_residual": True}], ids=str)
def test_one_array_for_both_lengths_needs_no_mask_beside_causal(masks: list[Any], causal: bool, more: Any) -> None:
    lengths = np.asarray([3, 5], np.int32)
    case = build(query_seq_lengths=lengths, key_value_seq_lengths=lengths, is_causal=causal, **more)
    check(case, dot_product_attention)
    assert [mask is None for mask in masks] == [causal]
    traced = jax.jit(
        lambda n: dot_product_attention(**case.learned, query_seq_lengths=n, key_value_seq_lengths=n, is_causal=causal)
    )
    jax.block_until_ready(traced(lengths))
    assert [mask is None for mask in masks] == [causal, causal]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_its_residual(dtype: str) -> None:
    case = build(**LENGTHS)
    arrays = [jnp.asarray(array, dtype) for array in case.learned.values()]
    out, residual = dot_product_attention(*arrays, **case.keywords, return_residual=True)
    expected, theirs = HOST(*arrays, **case.keywords, return_residual=True)
    assert (out.dtype, residual.dtype) == (expected.dtype, theirs.dtype) == (arrays[0].dtype, arrays[0].dtype)
    np.testing.assert_allclose(np.float32(out), np.float32(expected), rtol=0.02, atol=0.01)
    there = ~np.broadcast_to(case.past_end[:, :, None], residual.shape)
    np.testing.assert_allclose(np.float32(residual)[there], np.float32(theirs)[there], rtol=0.01)
    assert (np.float32(residual)[~there] == -np.inf).all()


def test_the_residual_has_no_gradient() -> None:
    arrays = [jnp.asarray(array) for array in build().learned.values()]
    for function in (HOST, dot_product_attention):
        dq = jax.grad(lambda q: function(q, *arrays[1:], return_residual=True)[1].sum())(arrays[0])  # noqa: B023
        assert (dq == 0).all()


def test_float64_matches_jax_nn() -> None:
    with jax.enable_x64(True):
        arrays = [jnp.asarray(array, jnp.float64) for array in build().learned.values()]
        out, residual = dot_product_attention(*arrays, is_causal=True, return_residual=True)
        expected, theirs = HOST(*arrays, is_causal=True, return_residual=True)
        assert out.dtype == residual.dtype == theirs.dtype == jnp.float64
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)  # jax.nn computes its softmax in float32


def test_it_accepts_the_arrays_that_jax_nn_accepts() -> None:
    arrays = list(build().learned.values())
    options = {"mask": [True] * 3 + [False] * (KV_LEN - 3), "bias": np.float32(2), "key_value_seq_lengths": [6, 2]}
    np.testing.assert_allclose(
        dot_product_attention(*arrays, **options), HOST(*arrays, **options), rtol=2e-5, atol=5e-6
    )
    one_row = [arrays[0][0], arrays[1][:1], arrays[2][:1]]  # query without the batch axis, key and value with it
    out = dot_product_attention(*one_row)
    assert out.shape == (Q_LEN, HEADS, DIM)
    np.testing.assert_allclose(out, HOST(*one_row), rtol=2e-5, atol=5e-6)


def test_it_works_under_strict_promotion() -> None:
    case = build(mask=(KV_LEN,), bias=(1, HEADS, 1, KV_LEN), **LENGTHS, return_residual=True)
    expected = run(dot_product_attention, case)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = run(dot_product_attention, case)
    for name, result in got.items():
        np.testing.assert_array_equal(result, expected[name])


@pytest.mark.parametrize("unbatched", [False, True])
def test_values_may_have_another_head_dim(unbatched: bool) -> None:
    query, key, value = (jnp.asarray(array) for array in build(SIZES[1], unbatched=unbatched).learned.values())
    out, residual = dot_product_attention(query, key, value[..., :3], query_seq_lengths=[4], return_residual=True)
    assert out.shape == (*query.shape[:-1], 3) and residual.shape == query.shape[:-1]
    np.testing.assert_allclose(out, HOST(query, key, value, query_seq_lengths=[4])[..., :3], rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_zero_sizes_give_zeros(empty: str) -> None:
    sizes = (
        tuple(0 if name == empty else size for name, size in zip(("batch", "queries", "keys"), SIZES[0])) + SIZES[0][3:]
    )
    lengths = np.zeros((sizes[0],), np.int32)
    case = build(sizes, query_seq_lengths=lengths, key_value_seq_lengths=lengths, return_residual=True)
    out, residual = dot_product_attention(**case.learned, **case.keywords)
    assert out.shape == case.learned["query"].shape and (out == 0).all()
    assert residual.shape == out.shape[:-1] and (residual == -jnp.inf).all()


@pytest.mark.usefixtures("torch_first")
@pytest.mark.parametrize(
    ("dim", "words", "ran"),
    [
        (12, {}, "sdpa_flash"),
        (13, LENGTHS, "sdpa_flash"),
        (14, {"implementation": "xla"}, "jax_xla"),
        (15, {"implementation": "xla", "backend": "jax_xla"}, "jax_xla"),
        (16, {"implementation": "xla", "backend": ("jax_xla",)}, "jax_xla"),
        (17, {"backend": "math"}, "math"),
        (18, {"backend": ("sage", "math")}, "math"),
    ],
)
def test_the_implementation_argument_chooses_the_kernel(dim: int, words: dict[str, Any], ran: str) -> None:
    case = build((*SIZES[0][:5], dim))  # a width that no other test has, so that no traced program serves it
    lengths = {name: np.asarray(value, np.int32) for name, value in words.items() if name in LENGTHS}
    with spied() as seen:
        jax.block_until_ready(dot_product_attention(**case.learned, **{**words, **lengths}))
    assert set(seen) == {ran}


def test_use_backend_applies_if_no_implementation_is_named() -> None:
    case = build((*SIZES[0][:5], 19))
    with spied() as seen, use_backend("math"):
        jax.block_until_ready(dot_product_attention(**case.learned))
        jax.block_until_ready(dot_product_attention(**case.learned, implementation="xla"))
    assert list(dict.fromkeys(seen)) == ["math", "jax_xla"]


def test_a_plug_in_that_is_also_called_xla_is_not_what_jax_nn_means() -> None:
    plug_in = replace(backends.load("jax_xla"), name="my_kernel", also_called={"xla": 1})
    case = build((*SIZES[0][:5], 20))
    with registered(plug_in), spied() as seen:
        jax.block_until_ready(dot_product_attention(**case.learned, implementation="xla"))
    assert set(seen) == {"jax_xla"}


def test_an_implementation_that_cannot_run_names_the_reason() -> None:
    case = build()
    with pytest.raises(NoBackendError, match="jax_cudnn"):
        dot_product_attention(**case.learned, implementation="cudnn")
    query, key, value = (jnp.asarray(array) for array in case.learned.values())
    assert explain(query, key, value, alignment="top_left", backend="jax_cudnn").reasons("jax_cudnn")


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.array(np.ones(shape, jnp.dtype(dtype)))  # jnp.ones would compile a program for each shape


QKV = {
    "query": normal(BATCH, Q_LEN, HEADS, DIM),
    "key": normal(BATCH, KV_LEN, KV_HEADS, DIM),
    "value": normal(BATCH, KV_LEN, KV_HEADS, DIM),
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": normal(HEADS, DIM)}, ShapeError, r"query: expected \[batch, length.*got \[6, 11\]"),
    ({"key": normal(1, 1, 1, 1, 1)}, ShapeError, r"key: expected \[batch, length"),
    ({"query": normal(1, Q_LEN, HEADS, DIM)}, ShapeError, r"key: expected the batch of query \(1\), got 2"),
    ({"value": normal(3, KV_LEN, KV_HEADS, DIM)}, ShapeError, r"value: expected the batch of query \(2\), got 3"),
    ({"key": normal(BATCH, KV_LEN, KV_HEADS, 5)}, ShapeError, r"key: expected the head_dim of query \(11\), got 5"),
    ({"value": normal(BATCH, 3, KV_HEADS, DIM)}, ShapeError, r"value: expected the length of key \(7\), got 3"),
    ({"query": normal(BATCH, Q_LEN, 5, DIM)}, ShapeError, "key: expected kv heads that divide the 5 query heads"),
    (
        {"value": normal(BATCH, KV_LEN, KV_HEADS, DIM, dtype="float16")},
        DTypeError,
        "value: expected the dtype of query",
    ),
    ({"key": normal(BATCH, KV_LEN, KV_HEADS, DIM, dtype="int32")}, DTypeError, "key: expected the dtype of query"),
    (
        {name: array.astype("int32") for name, array in QKV.items()},
        DTypeError,
        "query: expected one of .*int32",
    ),
    ({"query": torch.zeros(BATCH, Q_LEN, HEADS, DIM)}, TypeError, "query: expected a jax.Array, got torch.Tensor"),
    ({"mask": torch.ones(KV_LEN, dtype=torch.bool)}, TypeError, "mask: expected a jax.Array, got torch.Tensor"),
    ({"mask": normal(KV_LEN)}, DTypeError, "mask: expected dtype bool .*float32"),
    ({"mask": normal(KV_LEN), "key_value_seq_lengths": [1, 2]}, DTypeError, "mask: expected dtype bool .*float32"),
    (
        {"mask": normal(2, 1, 1, 6, dtype="bool")},
        ShapeError,
        r"mask: .*broadcastable.*\[2, 6, 5, 7\], got \[2, 1, 1, 6\]",
    ),
    (
        {"mask": normal(3, 1, 7, dtype="bool"), "key_value_seq_lengths": [1, 2]},
        ShapeError,
        r"mask: .*broadcastable.*\[2, 6, 5, 7\], got \[3, 1, 7\]",
    ),
    (
        {"mask": normal(1, 1, 1, 1, 1, dtype="bool"), "key_value_seq_lengths": [1, 2]},
        ShapeError,
        r"mask: .*broadcastable.*got \[1, 1, 1, 1, 1\]",
    ),
    ({"bias": normal(2, 2, 1, 7)}, ShapeError, "bias: expected a shape broadcastable"),
    ({"bias": normal(KV_LEN, dtype="bool")}, DTypeError, "bias: .*pass a boolean mask as mask="),
    ({"bias": normal(KV_LEN, dtype="int32")}, DTypeError, "bias: expected one of .*int32"),
    ({"scale": 0.0}, SpecError, "scale=0.0: expected a finite number above 0"),
    ({"scale": -1.0}, SpecError, "scale=-1.0: expected a finite number above 0"),
    ({"scale": jnp.ones(2)}, ShapeError, r"scale: expected a number.*got shape \[2\]"),
    ({"scale": jnp.int32(2)}, DTypeError, "scale: expected dtype float, got int32"),
    ({"is_causal": 1}, SpecError, "is_causal=1: expected True or False"),
    ({"return_residual": 1}, SpecError, "return_residual=1: expected True or False"),
    ({"query_seq_lengths": [1.0, 2.0]}, DTypeError, "query_seq_lengths: expected dtype int32, got float32"),
    ({"query_seq_lengths": jnp.int32(3)}, ShapeError, r"query_seq_lengths: .*shape \[2\], got \[\]"),
    ({"key_value_seq_lengths": [1, 2, 3]}, ShapeError, r"key_value_seq_lengths: .*shape \[2\], got \[3\]"),
    ({"local_window_size": -1}, SpecError, "local_window_size=-1: expected an int or a pair"),
    ({"local_window_size": (1, -1)}, SpecError, r"local_window_size=\(1, -1\): expected"),
    ({"local_window_size": (1, None)}, SpecError, r"local_window_size=\(1, None\): expected"),
    ({"local_window_size": (1, 2, 3)}, SpecError, r"local_window_size=\(1, 2, 3\): expected"),
    ({"local_window_size": 1.5}, SpecError, "local_window_size=1.5: expected"),
    ({"local_window_size": True}, SpecError, "local_window_size=True: expected"),
    ({"implementation": "flash2"}, SpecError, "implementation='flash2': expected 'xla', 'cudnn' or None.*backend="),
    ({"implementation": "xla", "backend": "math"}, SpecError, "implementation='xla' with backend='math'"),
    ({"implementation": "cudnn", "backend": ("jax_cudnn", "math")}, SpecError, "implementation='cudnn' with backend="),
    ({"backend": "flash"}, SpecError, "backend='flash': unknown backend"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED, ids=[message[:60] for *_, message in REFUSED])
def test_unsupported_arguments_are_refused_by_name(changed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dot_product_attention(**{**QKV, **changed})


def test_a_traced_window_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"local_window_size=.*known on the host"):
        jax.jit(lambda number: dot_product_attention(**QKV, local_window_size=number))(2)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit, jax.grad, jax.value_and_grad], ids=["", "jit", "grad", "value"])
@pytest.mark.parametrize("number", [0.4, jnp.float32(0.4)], ids=["float", "array"])
def test_a_traced_scale_is_as_in_jax_nn(way: Any, number: Any) -> None:
    arrays = build().learned
    results = [way(lambda s, f=f: (f(**arrays, scale=s) ** 2).sum())(number) for f in (dot_product_attention, HOST)]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4), *results)


def test_it_can_replace_jax_nns_function(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(is_causal=True)
    call = partial(dot_product_attention, is_causal=True, backend="jax_xla")
    expected = np.asarray(call(**case.learned))
    jax.clear_caches()  # a program traced before would not look up jax.nn's function again
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    actual = jax.nn.dot_product_attention(**case.learned, is_causal=True, implementation="xla")
    assert np.array_equal(np.asarray(actual), expected)
    # The forward of a gradient is another program of XLA, so its last bits may differ.
    actual, pull = jax.vjp(call, *case.learned.values())
    np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-6)
    assert len(pull(actual)) == len(case.learned)


def test_it_can_replace_jax_nns_function_before_our_import() -> None:
    script = """
import jax, jax.numpy as jnp
real = jax.nn.dot_product_attention
ours = []
jax.nn.dot_product_attention = lambda *arrays, **keywords: ours[0](*arrays, **keywords)
from jax_frontend import dot_product_attention
ours.append(dot_product_attention)
x = jnp.arange(160, dtype=jnp.float32).reshape(1, 5, 2, 16) / 160
found = jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="xla"))(x)
assert jnp.allclose(found, real(x, x, x)), "another result"
print("ok")
"""
    actual = in_its_own_process(script)
    assert actual.stdout.strip() == "ok", actual.stderr
