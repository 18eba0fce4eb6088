"""Tests tokens behind the last offset of packed documents: out 0, lse -inf, no gradient, and no effect on other
tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import jax
import jax.numpy as jnp
import torch
from both_frontends import FRAMEWORKS, claimed, judged, module_on, only, run, same_bits, target
from frameworks import JAX, TORCH, Framework, as_numpy
from spec_strategies import Call, make_call

import jax_frontend
import torch_frontend
from attn_core import SeqInfo, explain
from attn_core.backends.shared.triton import has_triton
from attn_core.call.seq_info import append_tail, cover_tail, tail_of
from torch_frontend.dispatch import offsets

pytestmark = pytest.mark.sampled

HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "float32"}
LENGTHS = ((5, 0, 7, 3), (4, 3, 9, 2))
TAILS = {"both": (6, 9), "queries": (6, 0), "keys": (0, 9)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "window": {"window": (2, 1), "alignment": "top_left"},
    "slopes": {"causal": True, "alibi_shape": (6,)},
    "sinks": {"causal": True, "sinks": True, "return_lse": True},
    "softcap": {"softcap": 2.0, "return_lse": True},
}


# Definition of the tail

sizes = st.tuples(st.integers(0, 60), st.integers(0, 60))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), min_size=5, max_size=5), sizes)
def test_the_tail_gives_every_token_a_document(queries: list[int], keys: list[int], tail: tuple[int, int]) -> None:
    """Whether the ends are known or not, a document of the tail has queries or keys, never both, and respects the
    limits."""
    info = SeqInfo.from_lengths(queries, keys[: len(queries)])
    ended = (int(info.cu_seqlens_q[-1]), int(info.cu_seqlens_k[-1]))
    tokens, longest = (ended[0] + tail[0], ended[1] + tail[1]), (info.max_len_q, info.max_len_k)
    for known in (ended, None):
        made = tail_of(tokens, longest, len(queries), known)
        if made is None:
            assert tail == (0, 0) if known else tokens == (0, 0)
            continue
        both = zip((info.cu_seqlens_q, info.cu_seqlens_k), made[:2], strict=True)
        cu_q, cu_k = (append_tail(offsets, ends) for offsets, ends in both)
        lengths_q, lengths_k = np.diff(cu_q), np.diff(cu_k)
        assert (cu_q[-1], cu_k[-1]) == tokens and len(cu_q) == len(cu_k)
        assert lengths_q.min() >= 0 and lengths_q.max() <= made.max_len_q
        assert lengths_k.min() >= 0 and lengths_k.max() <= made.max_len_k
        count = len(queries)
        assert lengths_q[:count].tolist() == queries and lengths_k[:count].tolist() == keys[:count]
        assert not (lengths_q[count:] * lengths_k[count:]).any()
        assert not lengths_k[count : count + made.queries].any() and not lengths_q[count + made.queries :].any()
        assert len(lengths_q) <= 3 * count + 4


sides = sizes | st.integers(0, 60).map(lambda size: (size, size))


@given(st.lists(st.integers(-5, 70), min_size=2, max_size=6), sides, sides)
def test_offsets_on_a_device_become_safe_and_complete(
    values: list[int], tokens: tuple[int, int], longest: tuple[int, int]
) -> None:
    """Any values become offsets from 0 that never decrease and end at the token count. Valid ones equal the host's
    result."""
    if tokens == (0, 0):
        return
    info = torch.tensor(values, dtype=torch.int32)
    tail = tail_of(tokens, longest, len(values) - 1)
    assert tail is not None
    made = [row.numpy() for row in offsets._safe(info, info, tail, tokens)]
    right = values[0] == 0 and sorted(values) == values
    for row, last, end in zip(made, tokens, tail[:2], strict=True):
        assert row.dtype == np.int32 and row[0] == 0 and row[-1] == last and (np.diff(row) >= 0).all()
        if right and values[-1] <= last:
            assert row.tolist() == append_tail(np.array(values, np.int32), end).tolist()


@pytest.mark.cuda
def test_offsets_on_a_gpu_are_completed_by_one_kernel() -> None:
    """The results are those of the torch operations, for offsets of any value and any alignment."""
    if not has_triton():
        pytest.skip("no Triton here")
    random = torch.Generator().manual_seed(0)
    for documents, tokens, longest in ((1, (5, 9), (5, 9)), (4, (256, 256), (71, 71)), (2000, (9001, 8000), (5, 7))):
        tail = tail_of(tokens, longest, documents)
        assert tail is not None
        values = torch.randint(-9, 9000, (2, documents + 2), dtype=torch.int32, generator=random).cuda()
        for queries, keys in ((values[0, 1:], values[1, 1:]), (values[0, 1:].sort().values,) * 2):
            actual = offsets._safe(queries, keys, tail, tokens)
            expected = offsets.safe_by_torch(queries, keys, tail, tokens)
            assert all(map(torch.equal, actual, expected))
    assert all(triton_launch is not None for triton_launch in triton_offsets()._launchers.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        offsets._safe(queries, keys, tail, tokens)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) <= 1, kernels


def triton_offsets() -> Any:
    from torch_frontend.dispatch import triton_offsets

    return triton_offsets


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [None, "math", "sdpa_flash"])
def test_cuda_graphs_of_torch_compile_take_offsets_on_a_device(backend: str | None) -> None:
    """torch.compile refuses a call that stores a tensor of the memory in which it prepares a graph."""
    q, k, v = (torch.randn(512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return torch_frontend.attention(q, k, v, causal=True, seq_info=SeqInfo(cu, cu, 200, 200), backend=backend)

    compiled = torch.compile(call, mode="reduce-overhead")
    for ends in ([100, 250, 400], [1, 2, 3], [200, 400, 512]) * 2:  # prepared, captured, and replayed
        cu = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k, v, cu), call(q, k, v, cu))


def test_rows_without_a_tail_are_unchanged() -> None:
    info = SeqInfo.from_lengths([3, 4], [2, 0])
    assert cover_tail(info, (7, 2)) is info
    assert tail_of((0, 0), (0, 0), 1) is None


# Every backend


def padded(backend: str, device: str, framework: str, tail: str, **fields: Any) -> tuple[Call, Call]:
    """A call whose rows continue with NaN behind the last document, and the same call without the tail.

    On a GPU the tail holds another number, because the last tile of a document may hold what follows it
    (test_nan_containment).
    """
    dtypes = module_on(backend, device).forward_claims.dtypes
    fields = {**HEADS, **fields, "lengths": LENGTHS}
    fields["dtype"] = "float32" if "float32" in dtypes else dtypes[0]
    whole, long = (make_call(1, **fields, tail=n, needs_backward=True) for n in ((0, 0), TAILS[tail]))
    where = target(framework, device)
    if explain(whole.spec, where, backend).backend is None:
        whole, long = whole.inference, long.inference
    reasons = explain(whole.spec, where, backend).reasons(backend)
    if reasons:
        pytest.skip(f"{backend} does not run this: {'; '.join(reasons)}")
    inputs = {}
    for name in ("q", "k", "v"):
        array, own = getattr(long.inputs, name), getattr(whole.inputs, name)
        array[: len(own)], array[len(own) :] = own, np.nan if device == "cpu" else 3.0
        inputs[name] = array
    long.dout[: len(whole.dout)], long.dlse[:, : whole.spec.q_len] = whole.dout, whole.dlse
    object.__setattr__(long, "inputs", whole.inputs._replace(**inputs))
    return whole, long


PACKED = [each for each in claimed() if module_on(*each.values[:2]).forward_claims.packed]


# Others have more than "plain". The kernels of JAX alone take the offsets that those of torch take, too.
@pytest.mark.on_gpus(only=lambda case, framework, **_: case == "causal" or (framework == "torch" and case != "plain"))
@pytest.mark.parametrize(
    ("case", "tail"), [*((case, "both") for case in CASES), ("causal", "queries"), ("causal", "keys")]
)
@pytest.mark.parametrize(("backend", "device"), PACKED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trailing_tokens_do_not_change_the_documents(
    framework: str, backend: str, device: str, case: str, tail: str
) -> None:
    """The documents' results equal those of the call without the tail, bit for bit on the CPU; the tail's results
    are 0."""
    if missing := judged(framework, backend, device):
        pytest.skip(missing)
    only((("causal", "both"), ("window", "both")), (case, tail), backend, device)
    if module_on(backend, device).forward_claims.approximate:
        pytest.skip(f"{backend} is approximate")
    whole, long = padded(backend, device, framework, tail, **CASES[case])
    expected, actual = (run(framework, call, backend, device, rounding_matters=False) for call in (whole, long))
    assert expected.keys() == actual.keys()
    own = {"out": len(whole.dout), "dq": len(whole.dout), "dk": whole.spec.kv_len, "dv": whole.spec.kv_len}
    for name, count in own.items():
        if name in actual:
            assert not actual[name][count:].any(), name
            actual[name] = actual[name][:count]
    if "lse" in actual:
        assert (actual["lse"][:, whole.spec.q_len :] == -np.inf).all()
        actual["lse"] = actual["lse"][:, : whole.spec.q_len]
    if backend == "jax_xla" or device == "cuda":  # other blocks
        for name, array in expected.items():
            one, other = (np.asarray(x, np.float64) for x in (actual[name], array))
            np.testing.assert_allclose(one, other, atol=3e-6 if device == "cpu" else 5e-2, rtol=0, err_msg=name)
    else:
        assert same_bits(actual, expected) == []


# Every entry point


CU = np.array([0, 3, 7], np.int32)
TOKENS = 12


def numbers(count: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    q, k, v, dout = (random.standard_normal((TOKENS, 2, 8)).astype(np.float32) for _ in range(4))
    return q[:count], k[:count], v[:count], dout[:count]


INFOS = {
    "numpy": lambda f: SeqInfo(CU, CU, 4, 4),
    "arrays": lambda f: SeqInfo(f(CU), f(CU), 4, 4),
    "an upper bound": lambda f: SeqInfo(f(CU), f(CU), TOKENS, TOKENS),
    "a triple": lambda f: ([3, 4], f(CU), 4),
}


def in_one_array(framework: Framework, **options: Any) -> Any:
    stack = torch.stack if framework is TORCH else jnp.stack
    return lambda *x: framework.frontend.attention_qkvpacked(stack(x, -3), **options)


WAYS: dict[str, dict[str, Callable[[Any, SeqInfo], Any]]] = {
    "torch": {
        "eager": lambda call, info: partial(call, seq_info=info),
        "compiled": lambda call, info: torch.compile(partial(call, seq_info=info), fullgraph=True, backend="aot_eager"),
        "vmap": lambda call, info: lambda *x: torch.func.vmap(partial(call, seq_info=info))(*(y[None] for y in x))[0],
        "one row": lambda call, info: lambda *x: call(*(y[None] for y in x), seq_info=info)[0],
    },
    "jax": {
        "eager": lambda call, info: partial(call, seq_info=info),
        "jit": lambda call, info: jax.jit(partial(call, seq_info=info)),
        "offsets traced": lambda call, info: lambda *x: jax.jit(call)(*x, seq_info=SeqInfo.coerce(info)),
        "vmap": lambda call, info: lambda *x: jax.vmap(partial(call, seq_info=info))(*(y[None] for y in x))[0],
    },
}
"""By framework: a function of q, k and v, made of a call and its documents."""


@pytest.mark.parametrize("kind", INFOS)
@pytest.mark.parametrize(
    ("framework", "way", "backend"),
    [
        *((TORCH, way, None) for way in (*WAYS["torch"], "qkvpacked", "vjp")),
        *((JAX, way, backend) for way in (*WAYS["jax"], "qkvpacked") for backend in ("math", "sdpa_flash", "jax_xla")),
    ],
    ids=str,
)
def test_every_entry_point_with_trailing_tokens(framework: Framework, way: str, backend: str | None, kind: str) -> None:
    info = INFOS[kind](framework.array)
    made = {"causal": backend != "sdpa_flash", "backend": backend}
    call = partial(framework.frontend.attention, **made)

    def pulled(run: Any, count: int) -> list[np.ndarray]:
        *qkv, dout = numbers(count)
        return framework.gradients(lambda q, k, v: run(q, k, v), dict(zip("qkv", qkv, strict=True)), dout)

    expected = pulled(partial(call, seq_info=([3, 4], CU, 4)), 7)
    if way == "vjp":
        *qkv, dout = map(torch.from_numpy, numbers(TOKENS))
        out, pull = torch.func.vjp(partial(call, seq_info=info), *qkv)
        actual = [as_numpy(x) for x in (out, *pull(dout))]
    elif way == "qkvpacked":
        actual = pulled(in_one_array(framework, **made, seq_info=info), TOKENS)
    else:
        actual = pulled(WAYS[framework.name][way](call, info), TOKENS)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one[: CU[-1]], other, atol=2e-6, rtol=0)
        assert not one[CU[-1] :].any()


def test_one_program_serves_offsets_with_any_end() -> None:
    q, k, v, _ = map(jnp.asarray, numbers(TOKENS))
    program = jax.jit(lambda info: jax_frontend.attention(q, k, v, seq_info=info, backend="jax_xla"))
    for end in (7, 9, TOKENS):
        cu = jnp.array([0, 3, end], jnp.int32)
        actual = program(SeqInfo(cu, cu, TOKENS, TOKENS))
        right = jax_frontend.attention(q[:end], k[:end], v[:end], seq_info=SeqInfo(cu, cu, TOKENS, TOKENS))
        np.testing.assert_allclose(actual[:end], right, atol=2e-6, rtol=0)
        assert not actual[end:].any()
    assert program._cache_size() == 1
