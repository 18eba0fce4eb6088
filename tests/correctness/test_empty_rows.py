"""Tests sinks in rows that see no key: the log-sum-exp is the sink, so partial results of a row merge by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import jax
import jax.numpy as jnp
import torch

import jax_frontend
import torch_frontend
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
EACH = [(framework, backend) for framework, backends in BACKENDS.items() for backend in backends]


def results(framework: str, call: Any, arrays: dict[str, np.ndarray], dout: np.ndarray, dlse: np.ndarray) -> list[Any]:
    """Returns out, lse and the gradients of the arrays; ``call(frontend, namespace, **arrays)`` gives (out, lse)."""
    if framework == "torch":
        leaves = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
        outputs = call(torch_frontend, torch, **leaves)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), (torch.tensor(dout), torch.tensor(dlse)))
        return [each.detach().numpy() for each in (*outputs, *gradients)]
    outputs, pull = jax.vjp(
        lambda leaves: call(jax_frontend, jnp, **leaves), {name: jnp.asarray(array) for name, array in arrays.items()}
    )
    (gradients,) = pull((jnp.asarray(dout), jnp.asarray(dlse)))
    return [np.asarray(each) for each in (*outputs, *(gradients[name] for name in arrays))]


def merged(of: Any, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Merges two partial results of the same rows, as a user would write it."""
    lse = of.logaddexp(one[1], other[1])
    base = of.where(lse == -np.inf, 0.0, lse)
    return sum(of.swapaxes(of.exp(part[1] - base), 1, 2)[..., None] * part[0] for part in (one, other)), lse


@pytest.mark.parametrize("with_sinks", [0, 1], ids=["sinks in the first part", "sinks in the second part"])
@pytest.mark.parametrize(("framework", "backend"), EACH)
def test_parts_of_a_row_merge_by_their_log_sum_exp(framework: str, backend: str | None, with_sinks: int) -> None:
    """Keys in two parts, with rows that do not see one of them and sinks in one part: results and gradients are the
    whole's."""
    arrays = {"q": Q, "k": K, "v": V, "sinks": SINKS}

    def attend(frontend: Any, of: Any, where: slice, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        mask = torch.tensor(MASK[..., where]) if of is torch else jnp.asarray(MASK[..., where])
        k, v = k[:, where], v[:, where]
        return frontend.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend)

    def whole(frontend: Any, of: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attend(frontend, of, slice(None), q, k, v, sinks)

    def parts(frontend: Any, of: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        outputs = [
            attend(frontend, of, where, q, k, v, sinks if at == with_sinks else None)
            for at, where in enumerate((slice(SPLIT), slice(SPLIT, None)))
        ]
        return merged(of, *outputs)

    expected, outputs = (results(framework, call, arrays, DOUT, DLSE) for call in (whole, parts))
    assert (expected[1][..., 3] == SINKS[:, None][None, :, 0]).all() and not expected[0][:, 3].any()
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6, rtol=1e-5)


def function_of(way: str, frontend: Any, options: dict[str, Any]) -> Any:
    """A function of q, k, v and sinks that gives out and lse, run in one of several ways."""

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return frontend.attention(q, k, v, sinks=sinks, return_lse=True, **options)

    def one_tensor(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        of = torch if frontend is torch_frontend else jnp
        qkv = of.stack((q, k, v), -3)
        return frontend.attention_qkvpacked(qkv, sinks=sinks, return_lse=True, **options)

    if way == "compiled":
        return torch.compile(call, fullgraph=True, backend="aot_eager") if frontend is torch_frontend else jax.jit(call)
    if way == "vmap":
        vmap = torch.func.vmap if frontend is torch_frontend else jax.vmap
        mapped = vmap(lambda q, k, v, sinks: call(q, k, v, sinks))
        return lambda *arrays: [each[0] for each in mapped(*(array[None] for array in arrays))]
    return one_tensor if way == "qkvpacked" else call


@pytest.mark.parametrize("way", ["eager", "compiled", "vmap", "qkvpacked"])
@pytest.mark.parametrize("packed", [False, True], ids=["mask", "packed"])
@pytest.mark.parametrize(("framework", "backend"), EACH)
def test_the_log_sum_exp_of_a_row_without_keys_is_its_sink(
    framework: str, backend: str | None, packed: bool, way: str
) -> None:
    """Its gradient comes from dlse alone, whatever dout is. Tokens of no document have -inf and give sinks no
    gradient."""
    tokens = 12
    q, k, v, dout = (random.standard_normal((tokens, 4, 8)).astype(np.float32) for _ in range(4))
    dlse = random.standard_normal((4, tokens)).astype(np.float32)
    options: dict[str, Any] = {"backend": backend}
    if packed:  # queries of the first document have no keys
        cu_q, cu_k = np.array([0, 3, tokens - NOBODYS], np.int32), np.array([0, 0, tokens], np.int32)
        array = torch.from_numpy if framework == "torch" else jnp.asarray
        options["seq_info"] = SeqInfo(array(cu_q), array(cu_k), tokens, tokens)
        empty, nobodys, axis = slice(0, 3), slice(tokens - NOBODYS, tokens), (...,)
    else:
        mask = np.ones((1, 1, tokens, tokens), bool)
        mask[..., 4:7, :] = False
        options["mask"] = torch.tensor(mask) if framework == "torch" else jnp.asarray(mask)
        empty, nobodys, axis = slice(4, 7), slice(0, 0), (None, ...)
    arrays = {name: array[axis] for name, array in {"q": q, "k": k, "v": v}.items()} | {"sinks": SINKS}
    dout[empty], dout[nobodys], dlse[:, nobodys] = np.nan, np.nan, np.nan
    frontend = torch_frontend if framework == "torch" else jax_frontend
    run = function_of(way, frontend, options)

    def call(_: Any, of: Any, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, ...]:
        return tuple(run(q, k, v, sinks))

    outputs = results(framework, call, arrays, dout[axis], dlse[axis])
    out, lse = (each if packed else each[0] for each in outputs[:2])
    assert (lse[:, empty] == SINKS[:, None]).all() and (lse[:, nobodys] == -np.inf).all()
    assert not out[empty].any() and not out[nobodys].any()
    assert all(np.isfinite(gradient).all() for gradient in outputs[2:])
    dlse[:, empty] += 1.0
    more = results(framework, call, arrays, dout[axis], dlse[axis])
    np.testing.assert_allclose(more[5] - outputs[5], np.full(4, 3.0), atol=1e-5)
    for one, other in zip(more[2:5], outputs[2:5], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("framework", BACKENDS)
def test_a_sink_of_minus_infinity_counts_as_no_sink(framework: str) -> None:
    sinks, arrays = np.full(4, -np.inf, np.float32), {"q": Q, "k": K, "v": V}
    call = lambda frontend, of, **leaves: frontend.attention(**leaves, causal=True, window=2, return_lse=True)  # noqa: E731
    queries = {**arrays, "k": K[:, :3], "v": V[:, :3]}
    without, outputs = (results(framework, call, each, DOUT, DLSE) for each in (queries, {**queries, "sinks": sinks}))
    assert (outputs[1][..., :3] == -np.inf).all() and not outputs[5].any()
    for one, other in zip(outputs, without):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("framework", BACKENDS)
def test_every_row_of_a_call_without_keys_has_its_sink(framework: str) -> None:
    arrays = {"q": Q, "k": K[:, :0], "v": V[:, :0], "sinks": SINKS}
    call = lambda frontend, of, **leaves: frontend.attention(**leaves, return_lse=True)  # noqa: E731
    out, lse, *gradients = results(framework, call, arrays, DOUT, DLSE)
    assert not out.any() and (lse == SINKS[:, None]).all()
    np.testing.assert_allclose(gradients[3], DLSE.sum((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("framework", BACKENDS)
def test_paged_rows_without_keys_have_their_sink(framework: str) -> None:
    """A query of a sequence without a key has its sink; a query behind the last offset has none."""
    array = torch.tensor if framework == "torch" else jnp.asarray
    frontend = torch_frontend if framework == "torch" else jax_frontend
    pages = [array(random.standard_normal((4, 2, 2, 8)).astype(np.float32)) for _ in range(2)]
    tables = {
        "block_table": array(np.array([[0, 1], [-1, -1]], np.int32)),
        "seq_lens": array(np.array([3, 0], np.int32)),
    }

    def call(q: np.ndarray, **more: Any) -> list[np.ndarray]:
        outputs = frontend.paged_attention(array(q), *pages, **tables, sinks=array(SINKS), return_lse=True, **more)
        return [np.asarray(each) for each in outputs]

    out, lse = call(Q[0, :2])
    assert not out[1].any() and (lse[:, 1] == SINKS).all() and out[0].all() and (lse[:, 0] > SINKS).all()
    out, lse = call(Q[0], cu_seqlens_q=array(np.array([0, 3, 3], np.int32)))
    assert (lse[:, 3:] == -np.inf).all() and not out[3:].any() and (lse[:, :3] > SINKS[:, None]).all()
