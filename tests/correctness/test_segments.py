"""Tests segment ids and positions in both frontends: against a mask of all pairs, under transformations, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("jax")
import cpu_meshes
import jax
import jax.numpy as jnp
import torch
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
import torch_frontend
from attn_core import DTypeError, ShapeError, SpecError
from attn_core.call.functions import by_row
from attn_core.call.segments import Segments, Visible, without_segments
from attn_core.expressions import lookup, trace_mask

BATCH, Q_LEN, KV_LEN = 2, 11, 13
TENSORS = [
    np.random.default_rng(seed).normal(size=(BATCH, length, heads, 8)).astype(np.float32)
    for seed, length, heads in ((0, Q_LEN, 4), (1, KV_LEN, 2), (2, KV_LEN, 2))
]


def ids(seed: int, length: int, rows: int = BATCH, most: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, (rows, length), np.int32)


def run(framework: Framework, tensors: Any, **keywords: Any) -> np.ndarray:
    """Returns attention's output as numpy. Arrays in the keywords become the framework's own."""
    return as_numpy(framework.frontend.attention(*map(framework.array, tensors), **framework.arrays(keywords)))


def by_mask(framework: Framework, tensors: Any, mask: np.ndarray) -> np.ndarray:
    return run(framework, tensors, mask=mask[:, None], backend="math")


@pytest.mark.parametrize("framework", BOTH, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_segments_and_positions_match_the_mask_of_all_pairs(framework: Framework, data: Any) -> None:
    """Drawn ids come back later and have equal neighbours; drawn positions are in any order."""
    numbers = st.integers(-2, 3)
    row = lambda length: st.lists(numbers, min_size=length, max_size=length)  # noqa: E731
    draw = lambda length: np.array(data.draw(st.tuples(row(length), row(length))), np.int32)  # noqa: E731
    has_ids, has_positions = data.draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    keywords: dict[str, Any] = {}
    visible = np.ones((BATCH, Q_LEN, KV_LEN), bool)
    causal, window = data.draw(st.sampled_from([(True, None), (True, 2), (False, (1, None)), (False, (0, 2))]))
    keywords |= {"causal": causal, "window": window}
    left, right = (window - 1, 0) if isinstance(window, int) else (None, None) if window is None else window
    distance = np.arange(Q_LEN)[:, None] + (KV_LEN - Q_LEN) - np.arange(KV_LEN)
    if has_ids:
        keywords |= {"q_segment_ids": draw(Q_LEN), "kv_segment_ids": draw(KV_LEN)}
        visible &= keywords["q_segment_ids"][:, :, None] == keywords["kv_segment_ids"][:, None]
    if has_positions:
        keywords |= {"q_positions": draw(Q_LEN), "kv_positions": draw(KV_LEN)}
        distance = keywords["q_positions"][:, :, None] - keywords["kv_positions"][:, None]
    visible &= (left is None) | (distance <= (left or 0))
    visible &= distance >= -(0 if causal else KV_LEN + 9 if right is None else right)
    backend = data.draw(st.sampled_from(["math", "jax_xla"] if framework is JAX else ["math", None]))
    result = run(framework, TENSORS, **keywords, backend=backend)
    np.testing.assert_allclose(result, by_mask(framework, TENSORS, visible), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_ids_of_queries_are_those_of_keys_if_these_are_left_out(framework: Framework) -> None:
    tensors, numbers = [TENSORS[1].repeat(2, 2), *TENSORS[1:]], ids(5, KV_LEN)
    result = run(framework, tensors, q_segment_ids=numbers, causal=True)
    visible = (numbers[:, :, None] == numbers[:, None]) & np.tri(KV_LEN, dtype=bool)
    np.testing.assert_allclose(result, by_mask(framework, tensors, visible), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_mask_function_and_its_arrays_hold_beside_segments(framework: Framework) -> None:
    allowed, marks = ids(7, KV_LEN, 1)[0] > 0, ids(8, Q_LEN, 1)[0]
    captured, given = framework.array(allowed), framework.array(marks)

    def mask_mod(b: Any, h: Any, q: Any, k: Any, marks: Any) -> Any:
        return lookup(captured, k) | (marks[q] == 1)

    keywords = {"q_segment_ids": ids(5, Q_LEN), "kv_segment_ids": ids(6, KV_LEN)}
    visible = keywords["q_segment_ids"][:, :, None] == keywords["kv_segment_ids"][:, None]
    visible = visible & (allowed | (marks[:, None] == 1))
    traced = trace_mask(mask_mod, (given,))
    for function in (mask_mod, traced):
        result = run(framework, TENSORS, **keywords, mask_mod=function, aux=(given,))
        np.testing.assert_allclose(result, by_mask(framework, TENSORS, visible), rtol=2e-5, atol=2e-6)


def test_an_array_of_another_function_keeps_its_number() -> None:
    """A score function's array comes first, and a wrong number would read it as ids."""
    table = jnp.asarray(np.linspace(-1, 1, KV_LEN, dtype=np.float32))
    queries, keys = ids(5, Q_LEN), ids(6, KV_LEN)
    arrays = [jnp.asarray(array) for array in TENSORS]
    result = jax_frontend.attention(
        *arrays,
        q_segment_ids=queries,
        kv_segment_ids=keys,
        score_mod=lambda score, b, h, q, k, t: score + t[k],
        aux=(table,),
    )
    mask = jnp.asarray(queries[:, None, :, None] == keys[:, None, None])
    expected = jax_frontend.attention(*arrays, mask=mask, bias=table[None, None, None])
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_heads_first_and_gradients(framework: Framework) -> None:
    numbers = {"q_segment_ids": ids(5, Q_LEN), "kv_segment_ids": ids(6, KV_LEN)}
    mask = (numbers["q_segment_ids"][:, :, None] == numbers["kv_segment_ids"][:, None])[:, None]
    first = [array.swapaxes(1, 2).copy() for array in TENSORS]
    assert (run(framework, first, **numbers, layout="bhsd").swapaxes(1, 2) == run(framework, TENSORS, **numbers)).all()
    arrays, cotangent = dict(zip("qkv", TENSORS, strict=True)), np.ones((BATCH, Q_LEN, 4, 8), np.float32)

    def squared(tensors: dict[str, Any], keywords: dict[str, Any]) -> Any:
        return framework.frontend.attention(**tensors, **keywords) ** 2

    program = squared if framework is TORCH else jax.jit(squared)  # with traced ids

    def of(**keywords: Any) -> list[np.ndarray]:
        given = framework.arrays(keywords)
        return framework.gradients(lambda **tensors: program(tensors, given), arrays, cotangent)

    ours, theirs = of(**numbers), of(mask=mask)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_one_program_serves_every_batch_under_jit_and_torch_compile() -> None:
    arrays, traces = [jnp.asarray(array) for array in TENSORS], []

    @jax.jit
    def call(queries: Any, keys: Any) -> Any:
        traces.append(1)
        return jax_frontend.attention(*arrays, q_segment_ids=queries, kv_segment_ids=keys)

    tensors = [torch.from_numpy(array) for array in TENSORS]
    compiled = torch.compile(
        lambda queries, keys: torch_frontend.attention(*tensors, q_segment_ids=queries, kv_segment_ids=keys),
        fullgraph=True,
        backend="eager",
    )
    for seed in (1, 2):
        queries, keys = ids(seed, Q_LEN), ids(seed + 9, KV_LEN)
        expected = by_mask(JAX, TENSORS, queries[:, :, None] == keys[:, None])
        np.testing.assert_allclose(call(queries, keys), expected, rtol=2e-5, atol=2e-6)
        result = compiled(torch.from_numpy(queries), torch.from_numpy(keys))
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
    assert len(traces) == 1


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_ids_stay_split_with_the_batch_on_a_mesh_and_under_vmap(backend: str) -> None:
    mesh = cpu_meshes.mesh((2,), ("data",))
    numbers = {"q_segment_ids": ids(5, Q_LEN), "kv_segment_ids": ids(6, KV_LEN)}
    expected = run(JAX, TENSORS, **numbers, backend=backend)
    split = [jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (*TENSORS, *numbers.values())]

    def call(q: Any, k: Any, v: Any, queries: Any, keys: Any) -> Any:
        return jax_frontend.attention(q, k, v, q_segment_ids=queries, kv_segment_ids=keys, backend=backend)

    program = jax.jit(call).lower(*split).compile()
    assert not {"all-gather", "all-reduce", "all-to-all", "collective-permute"} & set(_operations(program.as_text()))
    result = program(*split)
    assert tuple(result.sharding.spec)[:1] == ("data",)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
    rows = [array[:, None] for array in (*map(jnp.asarray, TENSORS), *map(jnp.asarray, numbers.values()))]
    np.testing.assert_allclose(jax.vmap(call)(*rows)[:, 0], expected, rtol=2e-5, atol=2e-6)


def _operations(text: str) -> list[str]:
    return [word.split("(")[0] for word in text.split() if "(" in word]


def test_which_arrays_follow_the_rows_of_a_batch() -> None:
    class Call:
        batch, mask_mod, score_mod = BATCH, None, None
        aux = ()

    def call(mask: Any, *shapes: tuple[int, ...]) -> Any:
        from attn_core.expressions.tracing import Aux

        one = Call()
        one.aux = tuple(Aux(shape, "int32") for shape in shapes)
        one.mask_mod = trace_mask(mask, one.aux).tree
        return by_row(one)

    wide = (BATCH, KV_LEN)
    assert call(lambda b, h, q, k, x: x[b, q] == x[b, k], wide) == (0,)
    assert call(lambda b, h, q, k, x, y: x[b, q] == y[k], wide, (KV_LEN,)) == (0,)
    assert call(lambda b, h, q, k: q < k) == ()
    assert call(lambda b, h, q, k, x: x[b, q] == b, wide) is None
    assert call(lambda b, h, q, k, x: x[b, q] == x[0, k], wide) is None
    assert call(lambda b, h, q, k, x: x[b, b] == q, wide) is None
    assert call(lambda b, h, q, k, x: x[b, q] == k, (BATCH + 1, KV_LEN)) is None
    assert call(lambda b, h, q, k, x: x[q, b] == k, wide) is None


QUERIES, KEYS = ids(5, Q_LEN), ids(6, KV_LEN)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no keys": ({"q_segment_ids": QUERIES}, SpecError, "kv_segment_ids: .* 11 tokens and k has 13"),
    "no queries": ({"kv_segment_ids": KEYS}, SpecError, "q_segment_ids: .* None"),
    "rows": (
        {"q_segment_ids": QUERIES[:1], "kv_segment_ids": KEYS},
        ShapeError,
        r"q_segment_ids: .* \[2, 11\], .* got \[1, 11\]",
    ),
    "length": (
        {"q_positions": QUERIES, "kv_positions": KEYS[:, 1:], "causal": True},
        ShapeError,
        r"kv_positions: .* \[2, 13\], .* got \[2, 12\]",
    ),
    "dtype": (
        {"q_segment_ids": QUERIES, "kv_segment_ids": KEYS.astype(np.int16)},
        DTypeError,
        "kv_segment_ids: .*int32",
    ),
    "list": ({"q_segment_ids": [[1]], "kv_segment_ids": KEYS}, TypeError, "q_segment_ids: .* list"),
    "no band": ({"q_positions": QUERIES, "kv_positions": KEYS}, SpecError, "q_positions, kv_positions: .* causal=True"),
    "slopes": (
        {"q_positions": QUERIES, "kv_positions": KEYS, "causal": True, "alibi_slopes": np.ones(4, np.float32)},
        SpecError,
        "alibi_slopes: .* positions",
    ),
    "documents": (
        {"q_segment_ids": QUERIES, "kv_segment_ids": KEYS, "seq_info": object()},
        SpecError,
        "seq_info: .* q_segment_ids",
    ),
    "window": (
        {"q_positions": QUERIES, "kv_positions": KEYS, "window": 3},
        SpecError,
        "window=3: expected causal=True",
    ),
    "too many": (
        {
            "q_segment_ids": QUERIES,
            "kv_segment_ids": KEYS,
            "q_positions": QUERIES,
            "kv_positions": KEYS,
            "causal": True,
            "score_mod": lambda score, b, h, q, k, x: score + x[b],
            "aux": (np.ones(2, np.float32),),
        },
        SpecError,
        "aux: expected at most 4 arrays",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_bad_argument_is_named(framework: Framework, case: str) -> None:
    keywords, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        run(framework, TENSORS, **keywords)


@pytest.mark.parametrize("case", [name for name, (keywords, *_) in WRONG.items() if name not in ("list", "documents")])
def test_a_bad_argument_is_named_at_trace_time(case: str) -> None:
    """With tracers in the place of every array, before there is a program."""
    keywords, error, message = WRONG[case]
    arrays = {name: value for name, value in keywords.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in keywords.items() if name not in arrays}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda qkv, arrays: jax_frontend.attention(*qkv, **arrays, **others), TENSORS, arrays)


def test_rows_without_a_batch_axis_are_refused() -> None:
    shapes = ((Q_LEN, 4, 8), (KV_LEN, 2, 8))
    with pytest.raises(ShapeError, match=r"q_segment_ids: expected q of \[batch"):
        without_segments(Segments(QUERIES[0], KEYS[0]), Visible(False, None, None, ()), shapes, {})
