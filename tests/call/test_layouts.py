"""Tests ``layout="bhsd"``, and the warning about tensors that have heads first without it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp
from frameworks import BOTH, JAX, Framework

import torch_frontend
from attn_core import SeqInfo
from attn_core.errors import LayoutWarning, ShapeError, SpecError

everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, top left": {"causal": True, "alignment": "top_left"},
    "window, softcap": {"causal": True, "window": 3, "softcap": 5.0},
    "lse": {"return_lse": True},
    "mask": {"mask": np.random.default_rng(1).random((2, 4, 6, 9)) > 0.3},
    "bias": {"bias": np.random.default_rng(2).standard_normal((1, 4, 6, 9)).astype(np.float32)},
    "sinks": {"sinks": np.zeros(4, np.float32)},
}


def arrays(*lengths: int, batch: tuple[int, ...] = (2,)) -> list[np.ndarray]:
    """Returns q, k and v ``[batch, len, heads, dim]`` with 4 query heads on 2 kv heads."""
    random = np.random.default_rng(0)
    q_len, kv_len = lengths
    shapes = ((*batch, q_len, 4, 8), (*batch, kv_len, 2, 8), (*batch, kv_len, 2, 5))
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def heads_first(array: Any) -> Any:
    return array.swapaxes(-3, -2)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@everywhere
def test_heads_first_computes_the_same(framework: Framework, options: dict[str, Any]) -> None:
    """The output, the log-sum-exp and all gradients."""
    call, rows = partial(framework.frontend.attention, **framework.arrays(options)), dict(zip("qkv", arrays(6, 9)))
    out, *lse, dq, dk, dv = framework.gradients(call, rows)
    swapped = {name: heads_first(array) for name, array in rows.items()}
    found = framework.gradients(partial(call, layout="bhsd"), swapped)
    assert found[0].shape == (2, 4, 6, 5)
    bounds = ({"atol": 1e-6}, *[{"rtol": 0.0}] * len(lse), *[{"atol": 1e-5}] * 3)
    for actual, expected, bound in zip(found, (out, *lse, dq, dk, dv), bounds, strict=True):
        np.testing.assert_allclose(heads_first(actual) if expected.ndim == 4 else actual, expected, **bound)


@pytest.mark.parametrize("row", [(), (1,)])
@everywhere
def test_packed_heads_first(framework: Framework, row: tuple[int, ...]) -> None:
    frontend, convert = framework.frontend, framework.array
    info = SeqInfo.from_lengths([2, 5], array=convert)
    q, k, v = map(convert, arrays(7, 7, batch=row))
    expected = frontend.attention(q, k, v, seq_info=info, causal=True)
    actual = frontend.attention(*map(heads_first, (q, k, v)), seq_info=info, causal=True, layout="bhsd")
    assert actual.shape == (*row, 4, 7, 5)
    np.testing.assert_allclose(np.asarray(heads_first(actual)), np.asarray(expected), atol=1e-6)


def test_a_compiled_call_of_heads_first() -> None:
    q, k, v = (heads_first(torch.from_numpy(array)) for array in arrays(6, 9))

    def call(q: Any, k: Any, v: Any) -> Any:
        return torch_frontend.attention(q, k, v, causal=True, layout="bhsd")

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))


@everywhere
def test_explain_takes_the_layout(framework: Framework) -> None:
    frontend, convert = framework.frontend, framework.array
    q, k, v = map(convert, arrays(6, 9))
    expected = frontend.explain(q, k, v, causal=True).spec
    assert frontend.explain(*map(heads_first, (q, k, v)), causal=True, layout="bhsd").spec == expected
    if framework is JAX:
        shapes = [jax.ShapeDtypeStruct(heads_first(array).shape, array.dtype) for array in (q, k, v)]
        assert frontend.explain(*shapes, causal=True, layout="bhsd").spec == expected


@everywhere
def test_an_unknown_layout_is_named(framework: Framework) -> None:
    frontend, convert = framework.frontend, framework.array
    for function in (frontend.attention, frontend.explain):
        with pytest.raises(SpecError, match="layout='BHSD': expected 'bshd', which is"):
            function(*map(convert, arrays(6, 9)), layout="BHSD")


@pytest.mark.parametrize(
    ("q", "k", "warns"),
    [
        ((1, 32, 4096, 8), (1, 32, 4096, 8), True),  # heads first
        ((1, 32, 64, 8), (1, 8, 64, 8), True),  # heads first with grouped heads
        ((1, 4096, 32, 8), (1, 4096, 8, 8), False),
        ((1, 5, 32, 8), (1, 5, 32, 8), False),  # a short prompt of many heads
        ((2, 1, 32, 8), (2, 300, 32, 8), False),  # decoding
        ((2, 64, 8, 8), (2, 16, 8, 8), False),  # more queries than keys
        ((1, 4, 200, 8), (1, 4, 200, 8), True),
        ((1, 8, 129, 64), (1, 8, 129, 64), True),  # heads first
        # The limit: these may be heads first, or 4, 12 or 8 tokens of a model with many heads.
        ((2, 4, 16, 32), (2, 4, 16, 32), False),
        ((2, 12, 100, 64), (2, 12, 100, 64), False),
        ((1, 8, 128, 64), (1, 8, 128, 64), False),
        ((1, 4096, 256, 8), (1, 4096, 256, 8), False),
    ],
)
@everywhere
def test_shapes_that_suggest_heads_first_warn(framework: Framework, q: Any, k: Any, warns: bool) -> None:
    explain = framework.frontend.explain
    tensors = [torch.empty(shape, device="meta") for shape in (q, k, k)]
    if framework is JAX:
        tensors = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q, k, k)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # a line warns once, however often its call is planned
        explain(*tensors)
        if warns:
            explain(*tensors, layout="bhsd")
    mentioned = [str(one.message) for one in caught if one.category is LayoutWarning]
    assert len(mentioned) == warns
    if warns:
        assert str(list(q)) in mentioned[0] and "layout='bhsd'" in mentioned[0]


@everywhere
def test_an_error_about_heads_names_the_layout(framework: Framework) -> None:
    frontend, convert = framework.frontend, framework.array
    q, k, v = (convert(np.zeros(shape, np.float32)) for shape in ((1, 8, 4, 8), (1, 2, 16, 8), (1, 2, 16, 8)))
    with pytest.raises(
        ShapeError, match=r"k: expected kv heads that divide the 4 query heads, got 16; .*layout='bhsd'"
    ):
        frontend.attention(q, k, v)


def test_torchs_function_has_a_public_name() -> None:
    q, k, v = (heads_first(torch.from_numpy(array)) for array in arrays(6, 9))
    mask = torch.rand(6, 9) > 0.3
    mask[:, 0] = True
    from torch.nn.functional import scaled_dot_product_attention

    for options in ({"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        expected = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        actual = torch_frontend.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(actual, expected)
