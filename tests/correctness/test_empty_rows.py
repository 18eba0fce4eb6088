"""Tests sinks in rows that see no key: the log-sum-exp is the sink, so partial results of a row merge by it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import jax
import torch
from frameworks import BOTH, Framework, as_numpy

from attn_core import SeqInfo

pytestmark = pytest.mark.sampled

random = np.random.default_rng(0)
Q, DOUT = (random.standard_normal((2, 6, 4, 8)).astype(np.float32) for _ in range(2))
K, V = (random.standard_normal((2, 7, 2, 8)).astype(np.float32) for _ in range(2))
SINKS = random.standard_normal(4).astype(np.float32)
DLSE = random.standard_normal((2, 4, 6)).astype(np.float32)
SPLIT = 4
MASK = random.random((2, 1, 6, 7)) < 0.5
MASK[:, :, 1, :SPLIT] = False  # sees nothing of the first part
MASK[:, :, 2, SPLIT:] = False  # sees nothing of the second part
MASK[:, :, 3] = False  # sees nothing of either part
NOBODYS = 3
BACKENDS = {"torch": (None, "math"), "jax": (None, "jax_xla", "math")}
EACH = [pytest.param(each, backend, id=f"{each}-{backend}") for each in BOTH for backend in BACKENDS[each.name]]


def merged(of: Any, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Merges two partial results of the same rows, as a user would write it."""
    lse = of.logaddexp(one[1], other[1])
    base = of.where(lse == -np.inf, 0.0, lse)
    return sum(of.swapaxes(of.exp(part[1] - base), 1, 2)[..., None] * part[0] for part in (one, other)), lse


@pytest.mark.parametrize("with_sinks", [0, 1], ids=["sinks in the first part", "sinks in the second part"])
@pytest.mark.parametrize(("framework", "backend"), EACH)
def test_parts_of_a_row_merge_by_their_log_sum_exp(framework: Framework, backend: str | None, with_sinks: int) -> None:
    """Keys in two parts, with rows that do not see one of them and sinks in one part: results and gradients are the
    whole's."""
    arrays = {"q": Q, "k": K, "v": V, "sinks": SINKS}

    def attend(where: slice, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        options = {"mask": framework.array(MASK[..., where]), "sinks": sinks, "return_lse": True, "backend": backend}
        return framework.frontend.attention(q, k[:, where], v[:, where], **options)

    def parts(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        halves = enumerate((slice(SPLIT), slice(SPLIT, None)))
        outputs = [attend(where, q, k, v, sinks if at == with_sinks else None) for at, where in halves]
        return merged(framework.namespace, *outputs)

    calls = (partial(attend, slice(None)), parts)
    expected, outputs = (framework.gradients(call, arrays, DOUT, DLSE) for call in calls)
    assert (expected[1][..., 3] == SINKS[:, None][None, :, 0]).all() and not expected[0][:, 3].any()
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6, rtol=1e-5)


def function_of(way: str, framework: Framework, options: dict[str, Any]) -> Any:
    """A function of q, k, v and sinks that gives out and lse, run in one of several ways."""
    options = options | {"return_lse": True}

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return framework.frontend.attention(q, k, v, sinks=sinks, **options)

    def one_tensor(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        qkv = framework.namespace.stack((q, k, v), -3)
        return framework.frontend.attention_qkvpacked(qkv, sinks=sinks, **options)

    def mapped(*arrays: Any) -> list[Any]:
        vmap = torch.func.vmap if framework.name == "torch" else jax.vmap
        return [each[0] for each in vmap(call)(*(array[None] for array in arrays))]

    compile = partial(torch.compile, fullgraph=True, backend="aot_eager") if framework.name == "torch" else jax.jit
    return {"eager": call, "compiled": compile(call), "vmap": mapped, "qkvpacked": one_tensor}[way]


@pytest.mark.parametrize("way", ["eager", "compiled", "vmap", "qkvpacked"])
@pytest.mark.parametrize("packed", [False, True], ids=["mask", "packed"])
@pytest.mark.parametrize(("framework", "backend"), EACH)
def test_the_log_sum_exp_of_a_row_without_keys_is_its_sink(
    framework: Framework, backend: str | None, packed: bool, way: str
) -> None:
    """Its gradient comes from dlse alone, whatever dout is. Tokens of no document have -inf and give sinks no
    gradient."""
    tokens = 12
    q, k, v, dout = (random.standard_normal((tokens, 4, 8)).astype(np.float32) for _ in range(4))
    dlse = random.standard_normal((4, tokens)).astype(np.float32)
    options: dict[str, Any] = {"backend": backend}
    if packed:  # queries of the first document have no keys
        offsets = ([0, 3, tokens - NOBODYS], [0, 0, tokens])
        offsets = (framework.array(each, "int32") for each in offsets)
        options["seq_info"] = SeqInfo(*offsets, tokens, tokens)
        empty, nobodys, axis = slice(0, 3), slice(tokens - NOBODYS, tokens), (...,)
    else:
        mask = np.ones((1, 1, tokens, tokens), bool)
        mask[..., 4:7, :] = False
        options["mask"] = framework.array(mask)
        empty, nobodys, axis = slice(4, 7), slice(0, 0), (None, ...)
    arrays = {"q": q[axis], "k": k[axis], "v": v[axis], "sinks": SINKS}
    dout[empty], dout[nobodys], dlse[:, nobodys] = np.nan, np.nan, np.nan
    run = function_of(way, framework, options)

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return run(q, k, v, sinks)

    outputs = framework.gradients(call, arrays, dout[axis], dlse[axis])
    out, lse = (each if packed else each[0] for each in outputs[:2])
    assert (lse[:, empty] == SINKS[:, None]).all() and (lse[:, nobodys] == -np.inf).all()
    assert not out[empty].any() and not out[nobodys].any()
    assert all(np.isfinite(gradient).all() for gradient in outputs[2:])
    dlse[:, empty] += 1.0
    more = framework.gradients(call, arrays, dout[axis], dlse[axis])
    np.testing.assert_allclose(more[5] - outputs[5], np.full(4, 3.0), atol=1e-5)
    for one, other in zip(more[2:5], outputs[2:5], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_sink_of_minus_infinity_counts_as_no_sink(framework: Framework) -> None:
    call = partial(framework.frontend.attention, causal=True, window=2, return_lse=True)
    queries = {"q": Q, "k": K[:, :3], "v": V[:, :3]}
    sunk = queries | {"sinks": np.full(4, -np.inf, np.float32)}
    without, outputs = (framework.gradients(call, each, DOUT, DLSE) for each in (queries, sunk))
    assert (outputs[1][..., :3] == -np.inf).all() and not outputs[5].any()
    for one, other in zip(outputs, without):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_every_row_of_a_call_without_keys_has_its_sink(framework: Framework) -> None:
    arrays = {"q": Q, "k": K[:, :0], "v": V[:, :0], "sinks": SINKS}
    out, lse, *gradients = framework.gradients(
        partial(framework.frontend.attention, return_lse=True), arrays, DOUT, DLSE
    )
    assert not out.any() and (lse == SINKS[:, None]).all()
    np.testing.assert_allclose(gradients[3], DLSE.sum((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_paged_rows_without_keys_have_their_sink(framework: Framework) -> None:
    """A query of a sequence without a key has its sink; a query behind the last offset has none."""
    array = framework.array
    pages = [array(random.standard_normal((4, 2, 2, 8)), "float32") for _ in range(2)]
    tables = {"block_table": array([[0, 1], [-1, -1]], "int32"), "seq_lens": array([3, 0], "int32")}

    def call(q: np.ndarray, **more: Any) -> list[np.ndarray]:
        options = {"sinks": array(SINKS), "return_lse": True, **tables, **more}
        return list(map(as_numpy, framework.frontend.paged_attention(array(q), *pages, **options)))

    out, lse = call(Q[0, :2])
    assert not out[1].any() and (lse[:, 1] == SINKS).all() and out[0].all() and (lse[:, 0] > SINKS).all()
    out, lse = call(Q[0], cu_seqlens_q=array([0, 3, 3], "int32"))
    assert (lse[:, 3:] == -np.inf).all() and not out[3:].any() and (lse[:, :3] > SINKS[:, None]).all()
