"""Tests calls on pages under torch.compile, export, CUDA graphs and JAX's transformations: traced once, always
correct."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from both_frontends import DEVICES
from paged_cases import PagedCall, jax_arguments, jax_on, judge, make_paged, run, torch_arguments
from torch._dynamo.testing import CompileCounter

import jax_frontend
import torch_frontend
from attn_core import SpecError
from attn_core.call.options import Options
from attn_core.call.tensors import PagedInputs
from attn_core.correctness.reference import append
from torch_frontend.dispatch.op_arguments import OpOptions

WIDTH, PAGES, PAGE_SIZE = 9, 20, 8
SIZES = {"page_size": PAGE_SIZE, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "bound": 4}
"""Different numbers, because torch treats axes of one size as one axis."""
STEPS = (((3, 9, 1, 6), (1, 4, 0, 2)), ((17, 2, 23, 7), (3, 1, 3, 0)), ((4, 4, 12, 1), (1, 1, 4, 1)))
"""(lengths, new tokens) of calls with equal shapes."""


def steps(**fields: Any) -> list[PagedCall]:
    """The calls of STEPS on tables of one width and pools of one size, with finite numbers everywhere."""
    calls = []
    for seed, (lengths, new) in enumerate(STEPS):
        counts = [-(-n // PAGE_SIZE) for n in lengths]
        sizes = {"wider": WIDTH - max(counts), "spare": PAGES - sum(counts), "seed": seed}
        calls.append(make_paged(lengths, new, return_lse=True, **SIZES, **sizes, **fields))
    return calls


def with_append(f: Any, options: dict[str, Any]) -> Any:
    """One step of a model's layer: the append, then the attention; returns (out, lse, k_pages, v_pages)."""

    def step(q: Any, k_pages: Any, v_pages: Any, k: Any, v: Any, tables: dict[str, Any]) -> Any:
        pools = f.append_kv(k_pages, v_pages, k, v, **tables)
        return *f.paged_attention(q, *pools, **tables, **options), *pools

    return step


def without_new_tokens(call: PagedCall) -> tuple[PagedCall, list[np.ndarray]]:
    """The call before the append of its newest tokens, and those tokens."""
    random, spec = np.random.default_rng(call.seed + 7), call.spec
    new = [
        random.standard_normal((spec.q_len, spec.num_kv_heads, dim)).astype(np.float16).astype(np.float64)
        for dim in (spec.head_dim, spec.value_dim)
    ]
    cu = call.inputs.cu_seqlens_q
    tables = call.inputs.block_table, call.inputs.seq_lens, np.arange(spec.documents + 1) if cu is None else cu
    k, v = (append(pool, part, *tables) for pool, part in zip(call.inputs[1:3], new))
    return PagedCall(call.spec, call.inputs._replace(k=k, v=v), call.window, call.bound), new


def check(call: PagedCall, out: Any, lse: Any) -> None:
    numbers = {"out": np.asarray(out, np.float64), "lse": np.asarray(lse, np.float64)}
    verdict = judge(call, numbers)
    assert verdict.ok, verdict


# torch


@pytest.mark.parametrize("backend", [None, "math"])
@pytest.mark.parametrize("device", DEVICES)
def test_torch_compiles_a_step_once(device: str, backend: str | None) -> None:
    """One graph serves all lengths and tables: other values compile nothing, and other shapes only once."""
    torch._dynamo.reset()
    counter = CompileCounter()
    calls = steps(window=9, softcap=3.0)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(q: Any, k_pages: Any, v_pages: Any, k: Any, v: Any, tables: dict[str, Any], max_len_q: int) -> Any:
        pools = torch_frontend.append_kv(k_pages, v_pages, k, v, **tables)
        options = {"window": 9, "softcap": 3.0, "return_lse": True, "backend": backend}
        return *torch_frontend.paged_attention(q, *pools, **tables, **options, max_len_q=max_len_q), *pools

    for call in calls:
        (q, *pools), tables = torch_arguments(call, device)
        expected, new = without_new_tokens(call)
        k, v = (torch.tensor(part, dtype=torch.float32, device=device) for part in new)
        out, lse, *after = step(q, *pools, k, v, tables, call.bound)
        check(expected, out.cpu(), lse.cpu())
        assert [pool.data_ptr() for pool in after] == [pool.data_ptr() for pool in pools]
        for pool, right in zip(pools, expected.inputs[1:3]):
            np.testing.assert_array_equal(pool.cpu(), right.astype(np.float32))
    assert counter.frame_count == 1
    wider = make_paged((30, 2, 5), (1, 2, 2), return_lse=True, window=9, softcap=3.0, **{**SIZES, "bound": 3})
    (q, *pools), tables = torch_arguments(wider, device)
    expected, new = without_new_tokens(wider)
    k, v = (torch.tensor(part, dtype=torch.float32, device=device) for part in new)
    check(expected, *(array.cpu() for array in step(q, *pools, k, v, tables, 3)[:2]))
    assert counter.frame_count == 1, "other sizes are other values of the same symbols"


def test_torch_keeps_the_append_before_the_attention() -> None:
    """Decoding through aot autograd, which moves mutations out of graphs: the append stays before the attention."""
    torch._dynamo.reset()
    call = make_paged((5, 9), return_lse=True)
    step = torch.compile(with_append(torch_frontend, call.options), fullgraph=True, backend="aot_eager")
    (q, *pools), tables = torch_arguments(call)
    expected, new = without_new_tokens(call)
    k, v = (torch.tensor(part, dtype=torch.float32) for part in new)
    out, lse, *_ = step(q, *pools, k, v, tables)
    check(expected, out, lse)
    for pool, right in zip(pools, expected.inputs[1:3]):
        np.testing.assert_array_equal(pool, right.astype(np.float32))


def test_torch_exports_a_step() -> None:
    call = steps()[0]
    step = with_append(torch_frontend, call.options)

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k_pages: Any, v_pages: Any, k: Any, v: Any, tables: dict[str, Any]) -> Any:
            return step(q, k_pages, v_pages, k, v, tables)[:2]

    def arguments(call: PagedCall) -> tuple[Any, ...]:
        (q, *pools), tables = torch_arguments(call)
        _, new = without_new_tokens(call)
        return (q, *pools, *(torch.tensor(part, dtype=torch.float32) for part in new), tables)

    program = torch.export.export(Layer(), arguments(call)).module()
    for call in steps():
        check(without_new_tokens(call)[0], *program(*arguments(call)))


def test_torch_opcheck_of_the_paged_ops() -> None:
    """torch's own checks of an op: its schema, its fake results, and its behaviour under tracing."""
    (q, *pools), tables = torch_arguments(make_paged((5, 3), (3, 1)))
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    passed = [tables[name] for name in names]
    options = Options(causal=True, window=(None, None), max_len_q=3, return_lse=True)
    how, given = OpOptions(options, False, False, "math"), PagedInputs(q, *pools, *passed)
    torch.library.opcheck(torch.ops.attn.paged_forward.default, (*given, *how.arguments))
    new = [torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)]
    none = (None,) * 2
    by_tables = *passed, *none, *none, False, *none
    torch.library.opcheck(torch.ops.attn.append_kv.default, (*pools, *new, *by_tables))
    angles, places = (torch.zeros(9, 4), torch.ones(9, 4)), torch.tensor([5, -1, 0, 9])
    torch.library.opcheck(torch.ops.attn.append_kv.default, (*pools, *new, *passed, None, *angles, None, True, *none))
    by_slots = (None, None, None, places, *angles, torch.arange(4), False, *none)
    torch.library.opcheck(torch.ops.attn.append_kv.default, (*pools, *new, *by_slots))
    torch.library.opcheck(torch.ops.attn.apply_rotary.default, (new[0], *angles, torch.arange(4), False))


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["flash3", "flash4", "triton_splitkv", "math", None])
def test_a_cuda_graph_replays_other_lengths(backend: str | None) -> None:
    """A step is captured once. Then the tables in its buffers change, and the replay is correct."""
    calls = steps(dtype="float16")
    chosen = torch_frontend.explain_paged(
        *torch_arguments(calls[0], "cuda")[0],
        **torch_arguments(calls[0], "cuda")[1],
        **calls[0].options,
        backend=backend,
    )
    if chosen.backend is None:
        pytest.skip("; ".join(chosen.reasons(backend or "")))
    step = with_append(torch_frontend, {**calls[0].options, "backend": backend})

    def arguments(call: PagedCall) -> tuple[Any, ...]:
        (q, *pools), tables = torch_arguments(call, "cuda")
        new = (torch.tensor(part, dtype=torch.float16, device="cuda") for part in without_new_tokens(call)[1])
        return (q, *pools, *new, tables)

    static = arguments(calls[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *_ = step(*static)
    for call in calls:
        *tensors, tables = arguments(call)
        for place, tensor in zip(static[:-1], tensors):
            place.copy_(tensor)
        for name, table in tables.items():
            static[-1][name].copy_(table)
        graph.replay()
        torch.cuda.synchronize()
        check(without_new_tokens(call)[0], out.cpu(), lse.cpu())


# JAX


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_jit_traces_a_step_once(backend: str, device: str) -> None:
    traces = []
    calls = steps(window=9)
    plain_step = with_append(jax_frontend, {**calls[0].options, "backend": backend})

    def counted(*arguments: Any) -> Any:
        traces.append(1)
        return plain_step(*arguments)

    step = jax.jit(counted, donate_argnums=(1, 2))
    for call in calls:
        with jax_on(call, device):
            (q, *pools), tables = jax_arguments(call)
            expected, new = without_new_tokens(call)
            places = [pool.unsafe_buffer_pointer() for pool in pools]
            out, lse, *after = step(q, *pools, *(jnp.asarray(part, jnp.float32) for part in new), tables)
            check(expected, out, lse)
            assert [pool.unsafe_buffer_pointer() for pool in after] == places, "a donated pool stays where it is"
            for pool, right in zip(after, expected.inputs[1:3]):
                np.testing.assert_array_equal(pool, right.astype(np.float32))
    assert len(traces) == 1


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_scan_over_layers_on_one_table(backend: str) -> None:
    """The pools have a leading axis of layers; one table serves all."""
    calls = [make_paged((7, 3), (2, 1), seed=seed) for seed in range(3)]
    (_, *_), tables = jax_arguments(calls[0])
    inputs = calls[0].inputs
    layers = [call.inputs._replace(**{n: getattr(inputs, n) for n in ("block_table", "seq_lens")}) for call in calls]
    held = np.isfinite(inputs.k[..., :1, :1])
    random = np.random.default_rng(0)
    pools = [np.where(held, random.standard_normal((3, *pool.shape)), np.nan) for pool in inputs[1:3]]
    q = np.stack([layer.q for layer in layers])

    def layer(total: Any, arrays: Any) -> Any:
        out = jax_frontend.paged_attention(*arrays, **tables, backend=backend)
        return total + out.sum(), out

    total, outs = jax.jit(lambda *arrays: jax.lax.scan(layer, 0.0, arrays))(*(jnp.asarray(x) for x in (q, *pools)))
    for at, out in enumerate(outs):
        call = PagedCall(calls[0].spec, inputs._replace(q=q[at], k=pools[0][at], v=pools[1][at]))
        verdict = judge(call, {"out": np.asarray(out)})
        assert verdict.ok, verdict
    np.testing.assert_allclose(total, np.sum(outs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_vmap_over_queries_and_over_tables(backend: str) -> None:
    """Over queries of several models on one pool, and over tables of several batches."""
    calls = [make_paged((7, 3), (2, 1), seed=seed) for seed in range(2)]
    (q, k, v), tables = jax_arguments(calls[0])
    many = jnp.stack([q, 2 * q, -q])

    def one(q: Any) -> Any:
        return jax_frontend.paged_attention(q, k, v, **tables, backend=backend)

    actual = jax.vmap(one)(many)
    for row, out in zip(many, actual):
        np.testing.assert_allclose(out, one(row), rtol=1e-5, atol=1e-6)
    both = jnp.stack([tables["block_table"], tables["block_table"][::-1]])
    lengths = jnp.stack([tables["seq_lens"], jnp.array([2, 5], jnp.int32)])
    finite = [jnp.nan_to_num(pool) for pool in (k, v)]
    rest = {"cu_seqlens_q": tables["cu_seqlens_q"], "backend": backend}

    def other(table: Any, lengths: Any) -> Any:
        table = jnp.maximum(table, 0)
        return jax_frontend.paged_attention(q, *finite, block_table=table, seq_lens=lengths, **rest)

    actual = jax.vmap(other)(both, lengths)
    for at in range(2):
        np.testing.assert_allclose(actual[at], other(both[at], lengths[at]), rtol=1e-5, atol=1e-6)


def test_vmap_of_an_append_over_layers() -> None:
    """Layers of pools on one table."""
    call = make_paged((5, 3), (3, 1))
    (_, k_pages, v_pages), tables = jax_arguments(call)
    new = jnp.arange(4.0).reshape(4, 1, 1) * jnp.ones((2, 4, 2, 8))
    pools = [jnp.stack([pool, pool]) for pool in (k_pages, v_pages)]
    actual = jax.vmap(lambda *arrays: jax_frontend.append_kv(*arrays, **tables))(*pools, new, -new)
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    for layer in range(2):
        for pool, before, part in zip(actual, call.inputs[1:3], (new, -new)):
            right = append(before, np.asarray(part[layer]), *(call.tables[name] for name in names))
            np.testing.assert_array_equal(pool[layer], right.astype(np.float32))


def test_a_while_loop_decodes() -> None:
    """Decoding inside one program: each step appends the key of its query, and reads everything appended before."""
    random = np.random.default_rng(0)
    start = jnp.asarray(random.standard_normal((2, 2, 8)), jnp.float32)
    table = jnp.array([[0, 2, 4], [5, 3, 1]], jnp.int32)

    def decode(pools: Any, lengths: Any, x: Any) -> Any:
        pools = jax_frontend.append_kv(*pools, x, x, block_table=table, seq_lens=lengths + 1)
        out = jax_frontend.paged_attention(x, *pools, block_table=table, seq_lens=lengths + 1, backend="math")
        return pools, lengths + 1, out

    empty = (jnp.full((6, 3, 2, 8), jnp.nan), jnp.full((6, 3, 2, 8), jnp.nan))
    state = (empty, jnp.zeros(2, jnp.int32), start)
    _, lengths, out = jax.jit(lambda state: jax.lax.fori_loop(0, 8, lambda _, s: decode(*s), state))(state)
    seen = [np.asarray(start, np.float64)]
    for _ in range(8):
        keys = np.stack(seen)  # [steps, batch, heads, dim]
        weights = np.exp(np.einsum("bhd,sbhd->sbh", seen[-1], keys) / np.sqrt(8))
        seen.append(np.einsum("sbh,sbhd->bhd", weights / weights.sum(0), keys))
    assert lengths.tolist() == [8, 8]
    np.testing.assert_allclose(out, seen[-1], rtol=1e-4, atol=1e-5)


def test_explain_needs_only_shapes() -> None:
    call = make_paged((7, 3), (2, 1))
    arrays, tables = jax_arguments(call)
    shapes = jax.eval_shape(lambda *x: x, *arrays)
    offsets = {name: jax.ShapeDtypeStruct(table.shape, table.dtype) for name, table in tables.items()}
    assert (
        jax_frontend.explain_paged(*shapes, **offsets).backend == jax_frontend.explain_paged(*arrays, **tables).backend
    )
    made = jax.eval_shape(lambda *x: jax_frontend.paged_attention(*x, **tables), *arrays)
    assert made.shape == (3, 4, 8)


def test_a_gradient_is_refused_inside_scan() -> None:
    (q, k, v), tables = jax_arguments(make_paged((7, 3), (2, 1)))

    def total(q: Any) -> Any:
        return jax.lax.scan(
            lambda s, x: (s + jax_frontend.paged_attention(x, k, v, **tables).sum(), None), 0.0, q[None]
        )[0]

    with pytest.raises(SpecError, match=r"^paged: keys and values in pages are for inference"):
        jax.grad(total)(q)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_same_call_gives_the_same_bits(framework: str) -> None:
    call = make_paged((7, 300, 3), (2, 9, 1), return_lse=True)
    first, *others = (run(framework, call, "math") for _ in range(3))
    for other in others:
        assert all((first[name] == other[name]).all() for name in first)
