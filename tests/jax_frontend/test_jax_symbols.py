"""Tests sizes that ``jax.export`` leaves open: one program for all of them, or one error naming the size to fix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import NoBackendError, SeqInfo, Target
from attn_core.errors import ShapeError, SpecError
from attn_core.selection import preference
from jax_frontend import (
    append_kv,
    attention,
    attention_qkvpacked,
    context_parallel_attention,
    dot_product_attention,
    explain,
    paged_attention,
)

pytestmark = pytest.mark.sampled

DENSE = ("b,n,6,8", "b,m,3,8", "b,m,3,8")
PACKED = ("t,6,8", "t,3,8", "t,3,8", "d+1")
LENGTHS = ((2, 5, 7), (1, 300, 9), (3, 1, 260))
"""(batch, q_len, kv_len), some of them longer than a block."""


def symbols(*shapes: str, integers: int = 0) -> list[Any]:
    """Arrays with symbolic shapes of one scope, the last ``integers`` of them int32."""
    scope, floats = jax.export.SymbolicScope(), len(shapes) - integers
    return [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), jnp.float32 if at < floats else jnp.int32)
        for at, shape in enumerate(shapes)
    ]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def dense(batch: int, q_len: int, kv_len: int) -> tuple[jax.Array, ...]:
    return normal(batch, q_len, 6, 8), normal(batch, kv_len, 3, 8), normal(batch, 1 + kv_len, 3, 8)[:, 1:]


def offsets(*lengths: int) -> jax.Array:
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def trained(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The sum of a call's squared output, and its gradients."""
    return jax.value_and_grad(lambda *arrays: (call(*arrays) ** 2).sum(), argnums=tuple(range(count)))


def check(run: Callable[..., Any], given: list[Any], *arguments: tuple[Any, ...]) -> None:
    """Checks that the program with symbolic sizes equals the call with these sizes."""
    exported = jax.export.export(jax.jit(run))(*given)
    assert "attn_core.callback" not in exported.mlir_module()
    for arrays in arguments:
        for actual, expected in zip(
            jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(jax.jit(run)(*arrays)), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softcap": 3.0},
    "top left": {"causal": True, "alignment": "top_left"},
    "window": {"causal": True, "window": 3},
    "a far window": {"window": (2, 2**31 - 1)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_symbolic_batch_and_lengths(name: str) -> None:
    run = trained(partial(attention, **OPTIONS[name]), 3)
    check(run, symbols(*DENSE), *(dense(*lengths) for lengths in LENGTHS))


def test_symbolic_expressions_as_sizes() -> None:
    run = partial(attention, causal=True)
    check(run, symbols("2*b-1,n+3,6,8", "2*b-1,2*n,3,8", "2*b-1,2*n,3,8"), dense(3, 5, 4))


@pytest.mark.parametrize("shapes", [("b,n-1", "b,m"), ("b,n", "b,m-1"), ("b-1,n", "b-1,m")], ids=str)
def test_symbolic_sizes_that_may_be_0(shapes: tuple[str, str]) -> None:
    """For example for shifted tokens. The program is valid for 0, too."""
    queries, keys = (f"{shape},{heads},8" for shape, heads in zip(shapes, (6, 3), strict=True))
    none = tuple(0 if "-" in size else 4 for size in (*shapes[0].split(","), shapes[1].split(",")[1]))
    run = trained(partial(attention, causal=True), 3)
    check(run, symbols(queries, keys, keys), dense(2, 5, 7), dense(*none))


def test_every_extra_array_with_symbolic_sizes() -> None:
    def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, slopes: Any) -> Any:
        return attention(q, k, v, bias=bias, sinks=sinks, mask=mask > 0, alibi_slopes=slopes)

    def extras(batch: int, q_len: int, kv_len: int) -> tuple[Any, ...]:
        bias, mask = normal(batch, 6, q_len, kv_len), normal(batch, 1, 1, kv_len)
        return (*dense(batch, q_len, kv_len), bias, normal(6), mask, abs(normal(batch, 6)))

    given = symbols(*DENSE, "b,6,n,m", "6", "b,1,1,m", "b,6")
    check(trained(call, 5), given, *(extras(*lengths) for lengths in LENGTHS))


@pytest.mark.parametrize("shapes", [PACKED, ("9,6,8", "9,3,8", "9,3,8", "d"), (*PACKED[:3], "4")], ids=str)
def test_packed_rows_and_documents_with_symbolic_sizes(shapes: tuple[str, ...]) -> None:
    def call(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return attention(q, k, v, causal=True, window=4, seq_info=SeqInfo(cu, cu, 9, 9))

    rows = (normal(9, 6, 8), normal(9, 3, 8), -normal(9, 3, 8))
    many = [(4, 0, 5), (2, 6, 1)] + [(9,), (1, 2, 3, 3)] * (shapes[3] != "4")
    check(trained(call, 3), symbols(*shapes, integers=1), *((*rows, offsets(*lengths)) for lengths in many))


def test_symbolic_packed_rows_with_trailing_tokens() -> None:
    """Trailing queries and trailing keys have results of 0, whichever side ends early."""

    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        return attention(q, k, v, causal=True, seq_info=SeqInfo(cu_q, cu_k, 9, 9))

    rows, both = (normal(9, 6, 8), normal(7, 3, 8), -normal(7, 3, 8)), ((3, 2), (4, 1))
    ends = [both, ((3, 6), both[1]), (both[0], (4, 3)), ((0, 0), (0, 0))]
    given = symbols("t,6,8", "s,3,8", "s,3,8", "d", "d", integers=2)
    check(trained(call, 3), given, *((*rows, *(offsets(*side) for side in each)) for each in ends))
    _, gradients = jax.export.export(jax.jit(trained(call, 3)))(*given).call(*rows, *(offsets(*side) for side in both))
    assert all(np.all(np.asarray(actual)[5:] == 0) and np.any(np.asarray(actual)[:5]) for actual in gradients)
    described = explain(*given[:3], seq_info=SeqInfo(*given[3:], 9, 9))
    assert described.backend == "jax_xla", described


def test_host_offsets_with_symbolic_rows() -> None:
    """One program serves rows of every length, because the host cannot compare the offsets with it."""
    call = partial(attention, causal=True, seq_info=SeqInfo.from_lengths([4, 0, 3]))
    rows = ((normal(t, 6, 8), normal(t, 3, 8), -normal(t, 3, 8)) for t in (7, 12))
    check(trained(call, 3), symbols("t,6,8", "t,3,8", "t,3,8"), *rows)


@pytest.mark.slow
def test_transformations_with_symbolic_sizes() -> None:
    causal = partial(attention, causal=True)
    mapped = tuple(f"c,{shape}" for shape in DENSE)
    check(trained(jax.vmap(causal), 3), symbols(*mapped), tuple(jnp.stack([x, -x]) for x in dense(2, 5, 7)))
    check(trained(jax.checkpoint(causal), 3), symbols(*DENSE), dense(2, 5, 7))
    check(
        lambda q, k, v: jax.jvp(lambda q: causal(q, k, v, backend="jax_xla"), (q,), (q,)),
        symbols(*DENSE),
        dense(2, 5, 7),
    )
    drops = partial(attention, dropout=0.3, dropout_rng=jax.random.key(0))
    check(trained(drops, 3), symbols(*DENSE), dense(2, 5, 7))


def test_other_entry_points_with_symbolic_sizes() -> None:
    check(trained(partial(attention_qkvpacked, causal=True), 1), symbols("b,n,3,6,8"), (normal(2, 5, 3, 6, 8),))

    def padded(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)

    check(padded, symbols(*DENSE, "b", integers=1), (*dense(2, 5, 7), jnp.asarray([3, 7], jnp.int32)))


def test_pages_with_symbolic_sizes() -> None:
    def step(q: Any, pool: Any, new: Any, table: Any, lengths: Any, cu: Any) -> Any:
        k, v = append_kv(pool, pool, new, new, block_table=table, seq_lens=lengths, cu_seqlens_q=cu)
        return paged_attention(q, k, v, block_table=table, seq_lens=lengths, cu_seqlens_q=cu, max_len_q=4)

    given = symbols("t,6,8", "p,4,3,8", "t,3,8", "s,w", "s", "s+1", integers=3)
    table, lengths = jnp.asarray([[5, 0, 2], [3, 1, 8]], jnp.int32), jnp.asarray([5, 9], jnp.int32)
    check(step, given, (normal(7, 6, 8), normal(9, 4, 3, 8), normal(7, 3, 8), table, lengths, offsets(3, 4)))


@pytest.mark.parametrize("backend", ("math", "sdpa_flash"))
@pytest.mark.parametrize("train", [False, True])
def test_kernels_refuse_symbolic_sizes_by_name(backend: str, train: bool) -> None:
    pytest.importorskip("torch")  # without it the kernels are refused as not available
    call = partial(attention, backend=backend)
    with pytest.raises(
        NoBackendError, match=rf"(?s)^backend='{backend}' cannot .*q_len=n: .*needs a number, this one is\ssymbolic"
    ):
        jax.export.export(jax.jit(trained(call, 3) if train else call))(*symbols(*DENSE))
    q, k, v = symbols(*DENSE)
    described = explain(q, k, v, needs_backward=True)
    assert described.backend == "jax_xla" and len(described.reasons(backend)) == 3, described


def test_automatic_choice_on_a_gpu_needs_no_sizes() -> None:
    q, k, v = symbols(*DENSE)
    spec = explain(q, k, v).spec
    assert "jax_xla" in preference.order(spec, "jax", "sm90")
    from attn_core.selection import explain as explained

    assert explained(spec, Target("jax", "sm90")).backend == "jax_xla"


@pytest.mark.parametrize("shape", ["b,n,h,8", "b,n,6,d"])
def test_heads_and_channels_must_be_numbers(shape: str) -> None:
    with pytest.raises(ShapeError, match=r"q: expected numbers of heads and channels, got shape \[b, n, "):
        jax.export.export(jax.jit(attention))(*symbols(shape, shape, shape))


def test_different_symbols_are_different_sizes() -> None:
    with pytest.raises(ShapeError, match=r"k: expected the batch of q \(b\), got c"):
        jax.export.export(jax.jit(attention))(*symbols("b,n,6,8", "c,m,3,8", "c,m,3,8"))


def test_context_parallelism_refuses_symbolic_sizes() -> None:
    call = partial(context_parallel_attention, mesh=jax.make_mesh((1,), ("x",)), axis_name="x", layout="zigzag")
    with pytest.raises(SpecError, match="length=n: expected"):
        jax.export.export(jax.jit(call))(*symbols("1,n,6,8", "1,n,3,8", "1,n,3,8"))
