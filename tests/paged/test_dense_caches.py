"""Tests kv_lengths, kv_starts and cache_index of ``attention``: the rows of a dense cache, in both frontends.

The reference computes each row by itself, in float64, on the slice of the cache that belongs to it. Everything else in
the cache is NaN. Causal, windows and ALiBi of a row are a mask and a bias that the test computes pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from both_frontends import DEVICES, FRAMEWORKS
from frameworks import BOTH, EVERYWHERE, Framework
from frameworks import jax_on as jax_on_device
from oracle_cases import rounded
from own_process import in_its_own_process
from torch._dynamo.testing import CompileCounterWithBackend

import jax_frontend
import torch_frontend
from attn_core import AttentionSpec, DTypeError, NoBackendError, ShapeError, SpecError, Target
from attn_core.call.arguments import ArrayFacts, Arrays
from attn_core.call.cache_rows import CacheRows
from attn_core.call.options import Options, check_options
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy
from attn_core.selection.dense_caches import runs_packed
from torch_frontend.paged import dense_caches

pytestmark = pytest.mark.sampled

BATCH, KV_LEN, CACHE = 3, 23, 5
NAMES = ("kv_lengths", "kv_starts", "cache_index")


@dataclass(frozen=True, eq=False)
class RowsCall:
    """A call on rows of a cache.

    Attributes:
        q, k, v: float64 numbers that the dtype represents; NaN in k and v outside of the rows.
        rows: the arrays that the call passes. lengths, starts, index: what they mean.
        options: other keywords; arrays are numpy's.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rows: dict[str, np.ndarray]
    lengths: list[int]
    starts: list[int]
    index: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def dout(self) -> np.ndarray:
        shape = (*self.q.shape[:3], self.v.shape[3])
        return rounded(np.random.default_rng(9).standard_normal(shape), self.dtype)


def rows_call(
    lengths: Any = None,
    starts: Any = None,
    index: Any = None,
    *,
    q_len: int = 2,
    heads: tuple[int, int, int, int] = (4, 2, 8, 8),
    alibi: int = 0,
    sinks: bool = False,
    poisoned: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    **options: Any,
) -> RowsCall:
    """A call with drawn numbers. ``heads`` has heads, kv heads, head_dim and value_dim."""
    random = np.random.default_rng(seed)
    many, few, dim, value_dim = heads
    batch = next(len(each) for each in (lengths, starts, index) if each is not None)
    rows = {n: np.array(each, np.int32) for n, each in zip(NAMES, (lengths, starts, index)) if each is not None}
    lengths, starts = lengths or [KV_LEN] * batch, starts or [0] * batch
    cache = CACHE if index else batch
    index = index or list(range(batch))
    q = random.standard_normal((batch, q_len, many, dim))
    k, v = (random.standard_normal((cache, KV_LEN, few, width)) for width in (dim, value_dim))
    inside = np.zeros((cache, KV_LEN), bool)
    for row, start, length in zip(index, starts, lengths):
        inside[row, start:length] = True
    q, k, v = (rounded(array, dtype) for array in (q, k, v))
    if poisoned:
        k[~inside] = v[~inside] = np.nan
    if alibi:
        slopes = random.uniform(0, 0.5, (batch, many) if alibi == 2 else many)
        options["alibi_slopes"] = slopes.astype(np.float32)
    if sinks:
        options["sinks"] = random.standard_normal(many).astype(np.float32)
    return RowsCall(q, k, v, rows, lengths, starts, index, options, dtype)


def reference(call: RowsCall, row: int, dout: np.ndarray | None = None) -> accuracy.Expected:
    """The results of one row, and gradients for dout."""
    options, start, length = call.options, call.starts[row], call.lengths[row]
    (q_len, heads, dim), (kv_heads, value_dim) = call.q.shape[1:], call.v.shape[2:]
    offset = 0 if options.get("alignment") == "top_left" else length - q_len
    seen = np.ones((1, 1, q_len, length - start), bool)
    added = np.zeros((1, heads, q_len, length - start))
    left, right = options.get("window") or (None, None)
    for i in range(q_len):
        for j in range(start, length):
            distance = j - (i + offset)
            hidden = distance > 0 and options.get("causal", False)
            hidden |= (right is not None and distance > right) or (left is not None and distance < -left)
            seen[0, 0, i, j - start] = not hidden
            if "alibi_slopes" in options:
                slopes = options["alibi_slopes"]
                added[0, :, i, j - start] -= (slopes[row] if slopes.ndim == 2 else slopes) * abs(distance)
    if "mask" in options:
        seen = seen & options["mask"][row : row + 1, ..., start:length]
    if "bias" in options:
        added = added + options["bias"][..., start:length]
    if "key_ranges" in options:
        ranges = options["key_ranges"][0, 0, start:length]
        for i in range(q_len):
            seen[0, 0, i] &= ((ranges[..., 0] <= i) & (i < ranges[..., 1])).any(-1)
    plain = {name: options[name] for name in ("softcap", "scale") if name in options}
    spec = AttentionSpec(
        **{"batch": 1, "q_len": q_len, "kv_len": length - start, "num_heads": heads, "num_kv_heads": kv_heads},
        **{"head_dim": dim, "value_dim": value_dim, "dtype": call.dtype, **plain},
        **{"mask_shape": seen.shape, "bias_shape": added.shape, "bias_dtype": _wide(call.dtype)},
        **{"sinks": "sinks" in options, "return_lse": True, "needs_backward": dout is not None},
    )
    k, v = (array[call.index[row], start:length][None] for array in (call.k, call.v))
    inputs = Inputs(call.q[row : row + 1], k, v, mask=seen, bias=added, sinks=options.get("sinks"))
    return accuracy.expect(spec, inputs, dout=None if dout is None else dout[row : row + 1])


def _wide(dtype: str) -> str | None:
    return "float32" if dtype in ("float16", "bfloat16") else None


def is_right(call: RowsCall, results: dict[str, np.ndarray]) -> bool:
    """Whether results are those of the reference, row by row; gradients outside of the rows must be 0."""
    learned = "dq" in results
    inside = np.zeros(call.k.shape[:2], bool)
    for row, (place, start, length) in enumerate(zip(call.index, call.starts, call.lengths)):
        expected = reference(call, row, call.dout if learned else None)
        gradients = None
        if learned:
            dk, dv = (results[name][place, start:length][None] for name in ("dk", "dv"))
            gradients = Gradients(results["dq"][row : row + 1], dk, dv, expected.truth.get("dbias"))
            gradients = gradients._replace(dsinks=expected.truth.get("dsinks"))
        here = {name: results[name][row : row + 1] for name in ("out", "lse")}
        if not expected.judge(**here, gradients=gradients).ok:
            return False
        inside[place, start:length] = True
    return not learned or all((results[name][~inside] == 0).all() for name in ("dk", "dv"))


def run(
    framework: str,
    call: RowsCall,
    *,
    learned: bool = False,
    device: str = "cpu",
    compiled: Any = False,
    hosted: bool = False,
    **changed: Any,
) -> dict[str, np.ndarray]:
    """out and lse, and with ``learned`` dq, dk and dv. ``changed`` replaces keywords of the call.

    compiled: whether the call is compiled; for torch also the backend of its compiler.
    """
    options = {**call.options, **call.rows, **changed}
    if framework == "torch":
        return _run_torch(call, options, learned, device, compiled, hosted)
    with jax_on_device(device), jax.default_matmul_precision("highest"):
        return _run_jax(call, options, learned, compiled, hosted)


def _run_torch(call: RowsCall, options: Any, learned: bool, device: str, compiled: Any, hosted: bool) -> Any:
    dtype = getattr(torch, call.dtype)
    q, k, v = (torch.tensor(a, dtype=dtype, device=device, requires_grad=learned) for a in (call.q, call.k, call.v))

    def moved(name: str, value: Any) -> Any:
        return (
            torch.tensor(value, device=device)
            if isinstance(value, np.ndarray) and not (hosted and name in NAMES)
            else value
        )

    options = {name: moved(name, value) for name, value in options.items()}

    def attend(q: Any, k: Any, v: Any, options: Any) -> Any:
        return torch_frontend.attention(q, k, v, **options, return_lse=True)

    if compiled:
        compiler = "aot_eager" if compiled is True else compiled
        attend = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=False)
    with torch.set_grad_enabled(learned):
        out, lse = attend(q, k, v, options)
    results = {"out": out, "lse": lse}
    if learned:
        dout = torch.tensor(call.dout, dtype=dtype, device=device)
        results |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))
    return {name: tensor.detach().double().cpu().numpy() for name, tensor in results.items()}


def _run_jax(call: RowsCall, options: Any, learned: bool, compiled: bool, hosted: bool) -> Any:
    arrays = [jnp.asarray(array, call.dtype) for array in (call.q, call.k, call.v)]
    plain = tuple(sorted((n, v) for n, v in options.items() if not isinstance(v, np.ndarray)))
    tables = {
        n: v if hosted and n in NAMES else jnp.asarray(v) for n, v in options.items() if isinstance(v, np.ndarray)
    }
    if compiled and not hosted:
        results = _program(plain, learned)(arrays, tables, jnp.asarray(call.dout, call.dtype))
    else:
        results = _results_in_jax(plain, learned, arrays, tables, jnp.asarray(call.dout, call.dtype))
    return {name: np.asarray(array, np.float64) for name, array in results.items()}


def _results_in_jax(plain: Any, learned: bool, arrays: Any, tables: Any, dout: Any) -> Any:
    def attend(*arrays: Any) -> Any:
        return jax_frontend.attention(*arrays, **tables, **dict(plain), return_lse=True)

    if not learned:
        return dict(zip(("out", "lse"), attend(*arrays), strict=True))
    (out, lse), pull = jax.vjp(attend, *arrays)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), pull((dout, jnp.zeros_like(lse))), strict=True))


@lru_cache(maxsize=64)
def _program(plain: Any, learned: bool) -> Any:
    return jax.jit(lambda arrays, tables, dout: _results_in_jax(plain, learned, arrays, tables, dout))


# Values

SIGNATURES: tuple[dict[str, Any], ...] = (
    {"q_len": 1},
    {"q_len": 3, "causal": True},
    {"q_len": 2, "window": (4, 1), "sinks": True},
    {"q_len": 2, "causal": True, "window": (6, None), "softcap": 0.7, "scale": 0.4},
    {"q_len": 3, "causal": True, "alibi": 1},
    {"q_len": 1, "alibi": 2},
    {"q_len": KV_LEN, "causal": True, "alignment": "top_left", "heads": (3, 1, 5, 7)},
    {"q_len": 4, "window": (2, 0), "alignment": "top_left", "alibi": 1},
    {"q_len": 2, "alibi": 2, "window": (None, 0)},
)
"""Calls with constant shapes, for programs that are compiled for each."""
LEARNED_ON_GPUS = {"torch": SIGNATURES[2:5], "jax": SIGNATURES[4:5]}
"""Those with gradients in a GPU's suite: every option once. They run as key ranges, for which kernels compile."""


@st.composite
def drawn_calls(draw: Any, learned: bool) -> RowsCall:
    """A call of one of SIGNATURES; gradients need rows of the cache of their own."""
    has = draw(st.sampled_from(["l", "ls", "lsi", "li", "s", "i"]), label="arrays")
    lengths = draw(st.lists(st.integers(0, KV_LEN), min_size=BATCH, max_size=BATCH)) if "l" in has else None
    starts = [draw(st.integers(0, n)) for n in lengths or [KV_LEN] * BATCH] if "s" in has else None
    index = (
        draw(st.lists(st.integers(0, CACHE - 1), min_size=BATCH, max_size=BATCH, unique=True)) if "i" in has else None
    )
    fields = draw(st.sampled_from(SIGNATURES))
    return rows_call(lengths, starts, index, **fields, seed=draw(st.integers(0, 99), label="seed"))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_drawn_calls(framework: str, learned: bool) -> None:
    @settings(max_examples=40 if framework == "torch" else 25)
    @given(drawn_calls(learned), st.booleans())
    def every_call(call: RowsCall, hosted: bool) -> None:
        results = run(framework, call, learned=learned, hosted=hosted, compiled=framework == "jax")
        assert is_right(call, results), call

    every_call()


@pytest.mark.on_gpus(only=lambda fields, learned, framework, **_: not learned or fields in LEARNED_ON_GPUS[framework])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("fields", SIGNATURES, ids=str)
def test_each_signature(fields: dict[str, Any], learned: bool, framework: str, device: str) -> None:
    wide = {"heads": (4, 2, 64, 64), "dtype": "float16"} if device == "cuda" else {}
    call = rows_call([7, KV_LEN, 4], [2, 0, 4], [4, 0, 2], **{**fields, **wide})
    assert is_right(call, run(framework, call, learned=learned, device=device, compiled=framework == "jax"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_may_read_one_row_of_the_cache(framework: str) -> None:
    call = rows_call([7, 9, 9, 1], [2, 0, 0, 0], [3, 3, 3, 0], q_len=2, causal=True)
    assert is_right(call, run(framework, call))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("learned", [False, True])
def test_masks_biases_and_ranges_hold_beside_lengths(learned: bool, framework: str) -> None:
    random, sizes = np.random.default_rng(3), {"lengths": [7, 19, 11], "starts": [2, 0, 5], "index": [4, 0, 2]}
    mask, bias = random.random((BATCH, 1, 3, KV_LEN)) > 0.4, random.standard_normal((1, 4, 3, KV_LEN))
    ranges = np.sort(random.integers(0, 4, (1, 1, KV_LEN, 2, 2)), -1).astype(np.int32)
    for more in ({"mask": mask}, {"bias": bias.astype(np.float32)}, {"key_ranges": ranges}):
        call = rows_call(**sizes, q_len=3, causal=True, **more)
        assert is_right(call, run(framework, call, learned=learned)), list(more)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("fault", ["longer", "shorter", "start ignored", "later start", "index ignored", "top left"])
def test_a_fault_is_found(fault: str, learned: bool, framework: str) -> None:
    fields = {"q_len": 2, "causal": True, "poisoned": False}
    call = rows_call([7, 19, 11], [2, 0, 5], [4, 0, 2], **fields)
    lengths, starts = call.rows["kv_lengths"], call.rows["kv_starts"]
    wrong: dict[str, Any] = {
        "longer": {"kv_lengths": lengths + 1},
        "shorter": {"kv_lengths": lengths - 1},
        "start ignored": {"kv_starts": None},
        "later start": {"kv_starts": starts + 1},
        "index ignored": {"cache_index": np.arange(BATCH, dtype=np.int32)},
        "top left": {"alignment": "top_left"},
    }[fault]
    assert is_right(call, run(framework, call, learned=learned))
    assert not is_right(call, run(framework, call, learned=learned, **wrong))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_heads_first(framework: str) -> None:
    call = rows_call([7, 19, 11], [2, 0, 5], causal=True)
    expected = run(framework, call)
    first = RowsCall(*(a.swapaxes(1, 2) for a in (call.q, call.k, call.v)), call.rows, *[[]] * 3, call.options)
    results = run(framework, first, layout="bhsd")
    assert np.array_equal(results["out"].swapaxes(1, 2), expected["out"])
    assert np.array_equal(results["lse"], expected["lse"])


# Programs


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("learned", [False, True])
def test_one_program_serves_all_lengths(learned: bool, framework: str) -> None:
    torch._dynamo.reset()
    _program.cache_clear()
    counted = CompileCounterWithBackend("aot_eager")
    for seed, lengths in enumerate(([7, 19, 11], [23, 0, 5], [1, 2, 3])):
        call = rows_call(lengths, [0, 0, 1], [4, 0, 2], causal=True, seed=seed)
        compiled = counted if framework == "torch" else True
        assert is_right(call, run(framework, call, learned=learned, compiled=compiled))
    program = _program((("causal", True),), learned)
    assert (counted.frame_count if framework == "torch" else program._cache_size()) == 1


@pytest.mark.parametrize("fields", SIGNATURES, ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_torch_compiles_each_signature(learned: bool, fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    call = rows_call([7, 19, 11], [2, 0, 5], [4, 0, 2], **fields)
    assert is_right(call, run("torch", call, learned=learned, compiled=True))


COMPILED_BY_NAME = """
import torch
import torch_frontend

def attend(q, k, v, lengths, backend):
    return torch_frontend.attention(q, k, v, kv_lengths=lengths, backend=backend)

program = torch.compile(attend, fullgraph=True, backend="aot_eager")
q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
lengths = torch.tensor([3, 9], dtype=torch.int32)
for backend in ("math", ("flex", "sdpa_flash")):
    assert torch.equal(program(q, k, v, lengths, backend), attend(q, k, v, lengths, backend))
"""


def test_torch_compiles_a_call_with_named_backends_first_of_all() -> None:
    """In a process that has loaded no backend yet, where Dynamo would trace how one is loaded."""
    process = in_its_own_process(COMPILED_BY_NAME)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize("backend", ["nope", ("math", "nope")])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_unknown_backend_is_refused_by_name(compiled: bool, backend: Any) -> None:
    def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return torch_frontend.attention(q, k, v, kv_lengths=lengths, backend=backend)

    call = rows_call([7, 19, 11])
    q, k, v = (torch.tensor(array, dtype=torch.float32) for array in (call.q, call.k, call.v))
    attend = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    with pytest.raises(SpecError, match="backend='nope': unknown backend"):
        attend(q, k, v, torch.tensor([7, 19, 11], dtype=torch.int32))


def test_jax_transforms() -> None:
    """vmap over caches, remat, scan over layers and forward mode."""
    call = rows_call([7, 19, 11], [2, 0, 5], causal=True, poisoned=False)
    q, k, v = (jnp.asarray(array, jnp.float32) for array in (call.q, call.k, call.v))
    rows = {name: jnp.asarray(array) for name, array in call.rows.items()}
    attend = lambda q, k, v: jax_frontend.attention(q, k, v, **rows, causal=True)  # noqa: E731
    expected = attend(q, k, v)
    many = jax.vmap(attend)(*(jnp.stack([array, 2 * array]) for array in (q, k, v)))
    np.testing.assert_allclose(many[0], expected, atol=1e-6)
    np.testing.assert_allclose(many[1], attend(2 * q, 2 * k, 2 * v), atol=1e-5)
    loss = lambda q, f: (f(q, k, v) ** 2).sum()  # noqa: E731
    plain, again = (jax.grad(loss)(q, f) for f in (attend, jax.checkpoint(attend)))
    np.testing.assert_allclose(plain, again, atol=1e-6)
    _, over_layers = jax.lax.scan(lambda c, x: (c, attend(x, k, v)), 0, jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(over_layers[0], expected, atol=1e-6)
    _, moved = jax.jvp(lambda q: attend(q, k, v), (q,), (q,))
    step = 1e-3
    slope = (attend(q * (1 + step), k, v) - attend(q * (1 - step), k, v)) / (2 * step)
    np.testing.assert_allclose(moved, slope, atol=2e-3)


def test_torch_transforms() -> None:
    call = rows_call([7, 19, 11], [2, 0, 5], causal=True, poisoned=False)
    q, k, v = (torch.tensor(array, dtype=torch.float32) for array in (call.q, call.k, call.v))
    rows = {name: torch.tensor(array) for name, array in call.rows.items()}
    attend = lambda q, k, v: torch_frontend.attention(q, k, v, **rows, causal=True)  # noqa: E731
    many = torch.func.vmap(attend)(*(torch.stack([tensor, 2 * tensor]) for tensor in (q, k, v)))
    torch.testing.assert_close(many[1], attend(2 * q, 2 * k, 2 * v))
    gradient = torch.func.grad(lambda q: (attend(q, k, v) ** 2).sum())(q)
    learned = q.clone().requires_grad_()
    (attend(learned, k, v) ** 2).sum().backward()
    torch.testing.assert_close(gradient, learned.grad)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert attend(q, k, v).dtype == torch.bfloat16


@pytest.mark.cuda
def test_a_cuda_graph_reads_new_lengths() -> None:
    call = rows_call([7, 19, 11], [2, 0, 5], [4, 0, 2], heads=(8, 2, 64, 64), dtype="float16", causal=True)
    q, k, v = (torch.tensor(array, dtype=torch.float16, device="cuda") for array in (call.q, call.k, call.v))
    rows = {name: torch.tensor(array, device="cuda") for name, array in call.rows.items()}
    attend = lambda: torch_frontend.attention(q, k, v, **rows, causal=True, return_lse=True)  # noqa: E731
    with torch.no_grad():
        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attend()
        for lengths in ([7, 19, 11], [3, 1, 8]):
            again = rows_call(lengths, [2, 0, 5], [4, 0, 2], heads=(8, 2, 64, 64), dtype="float16", causal=True)
            rows["kv_lengths"].copy_(torch.tensor(lengths))
            graph.replay()
            torch.cuda.synchronize()
            assert is_right(again, {"out": out.double().cpu().numpy(), "lse": lse.double().cpu().numpy()})


# Many queries


DOCUMENTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and sinks": {"causal": True, "window": (6, 0), "sinks": True},
    "slopes": {"alibi": 1, "causal": True, "softcap": 3.0},
    "no diagonal": {},
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("starts", [None, [2, 0, 4]])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_queries_may_run_as_documents(
    framework: str, starts: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More queries than some rows have keys, a row without keys, and a cache with more rows than the call."""
    calls = []
    runs_packed = "attn_core.selection.dense_caches.runs_packed"
    monkeypatch.setattr(runs_packed, lambda *facts: calls.append(facts) or True)
    monkeypatch.setattr("torch_frontend.paged.dense_caches.prepare", lambda _: None)
    call = rows_call([7, KV_LEN, 4], starts, None, q_len=19, **DOCUMENTS[name])
    assert is_right(call, run(framework, call))
    assert calls
    f = next(each for each in BOTH if each.name == framework)
    q, k, v = (f.array(each, "float32") for each in (call.q, call.k, call.v))
    spec = f.frontend.explain(q, k, v, **f.arrays(call.rows), causal=True).spec
    assert spec.paged is None and (spec.documents or 0) > 2 * BATCH and spec.max_len_q == 19


@pytest.mark.parametrize("starts", [None, [2, 0, 4]])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_queries_of_a_device(framework: str, starts: Any, device: str) -> None:
    """In half precision, between keys of NaN; on a GPU without FlashAttention 3 and 4 the rows are documents."""
    call = rows_call([7, KV_LEN, 4], starts, q_len=19, causal=True, heads=(4, 2, 64, 64), dtype="float16")
    for _ in range(2):
        assert is_right(call, run(framework, call, device=device, compiled=framework == "jax"))


@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        ({}, True),
        ({"names": ("sdpa_flash",)}, True),
        ({"names": None}, False),
        ({"names": ("flash3",)}, False),
        ({"names": ("flash4",)}, False),
        ({"q_len": 16}, False),
        ({"rows": CacheRows(1, None, 1)}, False),
        ({"slopes": (3, 8)}, False),
        ({"device": "cpu"}, False),
        ({"names": ("triton_splitkv", "flash2")}, False),
        ({"names": ("flex",)}, False),
        ({"dtype": "float32"}, False),
    ],
    ids=str,
)
def test_which_calls_run_as_documents(changes: dict[str, Any], packed: bool) -> None:
    sizes = {"q_len": 512, "rows": CacheRows(1), "slopes": None, "device": "sm90", "dtype": "bfloat16"}
    sizes |= {"names": ("flash2",), **changes}
    where = sizes["dtype"], "cuda:0"
    shapes = [(3, sizes["q_len"], 8, 64), *2 * [(3, 4096, 2, 64)]]
    slopes = None if sizes["slopes"] is None else ArrayFacts(sizes["slopes"], "float32", where[1])
    arrays = Arrays(*[ArrayFacts(shape, *where) for shape in shapes], alibi_slopes=slopes)
    target = Target("torch", sizes["device"])
    assert runs_packed(sizes["rows"], arrays, check_options(Options(causal=True)), target, sizes["names"]) == packed


# Choice and errors


@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_explain_shows_the_form(framework: Framework) -> None:
    def explained(**options: Any) -> Any:
        q, k, v = framework.zeros(2, 1, 4, 64), framework.zeros(2, 9, 2, 64), framework.zeros(2, 9, 2, 64)
        return framework.frontend.explain(q, k, v, kv_lengths=framework.array([3, 4], "int32"), **options)

    pages = explained(causal=True).spec
    assert pages.paged is not None and (pages.paged.num_pages, pages.paged.page_size, pages.paged.width) == (2, 9, 1)
    assert explained(kv_starts=framework.array([0, 1], "int32")).spec.paged.starts
    for options in (
        {"needs_backward": True},
        {"mask": framework.array(np.ones((2, 1, 1, 9), bool))},
        {"causal": True, "alignment": "top_left"},
        {"backend": "flex"},  # it reads no pages
    ):
        spec = explained(**options).spec
        assert spec.paged is None and spec.key_ranges_shape == (2, 1, 9, 1, 2) and not spec.causal


@pytest.mark.parametrize("fields", [{"q_len": 1}, {"q_len": 3, "causal": True, "sinks": True, "alibi": 2}], ids=str)
def test_a_decoding_call_skips_the_general_path(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any) -> None:
        raise AssertionError("the general path ran")

    for at in range(2):  # the second call finds the plan of the first
        call = rows_call([7, 19 - at, 11], [2, 0, 5], [4, 0, 2], **fields, seed=at)
        with monkeypatch.context() as patch:
            patch.setattr(dense_caches, "attend", unexpected)
            assert is_right(call, run("torch", call))
        for wrong in ({"mask": np.ones((BATCH, 1, 1, KV_LEN), bool)}, {"causal": 1}, {"dropout": 0.1}):
            with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the general path ran"):
                patch.setattr(dense_caches, "attend", unexpected)
                run("torch", call, **wrong)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_invariance_counts_on_every_call(framework: Framework) -> None:
    """A backend that keeps no promise is refused, also after an equal call without one."""
    q, k = (framework.array(np.ones(shape, np.float32)) for shape in ((2, 1, 4, 16), (2, 20, 2, 16)))
    lengths = framework.array(np.array([20, 7], np.int32))
    for invariant in (None, "prefix", "prefix", None, "prefix"):
        how = {"causal": True, "window": (3, 0), "kv_lengths": lengths, "backend": "sdpa_flash", "invariant": invariant}
        if invariant is None:
            framework.frontend.attention(q, k, k, **how)
            continue
        with pytest.raises(
            NoBackendError, match="invariant='prefix': the aten CPU flash kernel promises no equal bits"
        ):
            framework.frontend.attention(q, k, k, **how)


def test_sdpa_kernel_counts() -> None:
    call = rows_call([7, 19, 11], [2, 0, 5], [4, 0, 2], causal=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert is_right(call, run("torch", call))
        q, k, v = (torch.tensor(array) for array in (call.q, call.k, call.v))
        rows = {name: torch.tensor(array) for name, array in call.rows.items()}
        selection = torch_frontend.explain(q, k, v, **rows)
        assert selection.backend == "math" and selection.spec.paged is None
    assert torch_frontend.explain(q, k, v, **rows).spec.paged is not None


def test_named_backends_give_equal_bits_in_both_frameworks() -> None:
    call = rows_call([7, 19, 11], [2, 0, 5], [4, 0, 2], causal=True, sinks=True)
    for backend in ("math", "sdpa_flash"):
        ours, theirs = (run(framework, call, backend=backend) for framework in FRAMEWORKS)
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


Q, K = (2, 3, 4, 8), (2, 7, 2, 8)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "long": ({"kv_lengths": [3, 8]}, SpecError, "kv_lengths[1]=8: expected 0 to 7"),
    "negative": ({"kv_lengths": [-1, 8]}, SpecError, "kv_lengths[0]=-1: expected 0 to 7"),
    "padded rows": (
        {"kv_lengths": [7, 3], "q": (2, 7, 4, 8), "causal": True},
        SpecError,
        "kv_lengths[1]=3: expected 7 or 0 with alignment='bottom_right' and the 7 queries of q",
    ),
    "late start": ({"kv_lengths": [3, 4], "kv_starts": [0, 5]}, SpecError, "kv_starts[1]=5: expected 0 to 4"),
    "start alone": ({"kv_starts": [0, 8]}, SpecError, "kv_starts[1]=8: expected 0 to 7"),
    "index": ({"cache_index": [2, 0]}, SpecError, "cache_index[0]=2: expected 0 to 1, the last row of k"),
    "shape": ({"kv_lengths": [3, 4, 5]}, ShapeError, "kv_lengths: expected one number per row of q, shape [2]"),
    "dtype": ({"kv_lengths": np.array([3.0, 4.0])}, DTypeError, "kv_lengths: expected dtype int32, got "),
    "int64": ({"cache_index": np.array([0, 1], np.int64)}, DTypeError, "cache_index: expected dtype int32, got "),
    "no array": ({"kv_starts": "zero"}, TypeError, "kv_starts: expected a "),
    "rows": (
        {"kv_lengths": [3, 4], "k": (3, 7, 2, 8), "v": (3, 7, 2, 8)},
        ShapeError,
        "k: expected the batch of q (2) with kv_lengths, got 3; for rows of a larger cache pass cache_index",
    ),
    "cache": ({"cache_index": [0, 1], "v": (3, 7, 2, 8)}, ShapeError, "v: expected the rows of k (2), got 3"),
    "packed": (
        {"kv_lengths": [3, 4], "q": (3, 4, 8)},
        ShapeError,
        "q: expected [batch, seq, heads, head_dim] with kv_l",
    ),
    "width": ({"kv_lengths": [3, 4], "k": (2, 7, 2, 9)}, ShapeError, "k: expected the head_dim of q (8), got 9"),
    "sinks": (
        {"kv_lengths": [3, 4], "sinks": np.zeros(3, "f")},
        ShapeError,
        "sinks: expected one logit per query head",
    ),
    "slopes": ({"kv_lengths": [3, 4], "alibi_slopes": np.zeros(3, "f")}, ShapeError, "alibi_slopes: expected shape"),
    "documents": ({"kv_lengths": [3, 4], "seq_info": ([3], [0, 3], 3)}, SpecError, "seq_info: expected None with kv_l"),
    "segments": (
        {"kv_lengths": [3, 4], "q_segment_ids": np.zeros((2, 3), np.int32)},
        SpecError,
        "q_segment_ids: expected None with kv_lengths, kv_starts or cache_index, because ids",
    ),
    "positions": (
        {"kv_starts": [0, 1], "q_positions": np.zeros((2, 3), np.int32), "causal": True},
        SpecError,
        "q_positions: expected None with kv_lengths, kv_starts or cache_index, because the lengths say",
    ),
    "ranges": (
        {"kv_lengths": [3, 4], "key_ranges": np.full((1, 1, 7, 1, 2), 4, np.int32)},
        SpecError,
        "key_ranges: expected 0 <= start <= stop <= q_len (3), got start 4 and stop 4",
    ),
    "window": ({"kv_lengths": [3, 4], "window": 3}, SpecError, "window=3: expected causal=True"),
    "functions": (
        {"kv_lengths": [3, 4], "alibi_slopes": np.zeros(4, "f"), "score_mod": lambda s, b, h, q, k: s},
        SpecError,
        "alibi_slopes: expected None with kv_lengths and mask_mod or score_mod",
    ),
}


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("f", BOTH, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_bad_input(name: str, f: Framework, hosted: bool) -> None:
    keywords, kind, message = WRONG[name]
    shapes = {"q": Q, "k": K, "v": K}
    tensors = [f.zeros(*keywords.get(each, shapes[each])) for each in "qkv"]
    options = {word: value for word, value in keywords.items() if word not in shapes}
    options |= {n: np.array(v, np.int32) for n, v in options.items() if n in NAMES and isinstance(v, list)}
    stays = {word: value for word, value in options.items() if hosted and word in (*NAMES, "key_ranges")}
    with jax.enable_x64(True):  # else JAX has no int64
        for function in (f.frontend.attention, f.frontend.explain):
            with pytest.raises(kind) as raised:
                function(*tensors, **f.arrays(options) | stays)
            assert str(raised.value).startswith(message), str(raised.value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("learned", [False, True])
def test_rows_padded_on_the_right_need_the_top_left(learned: bool, framework: str) -> None:
    """With the default alignment their queries would be shifted, and the first ones would see no key."""
    diagonals: dict[str, Any] = {"causal": {"causal": True}, "window": {"window": (2, 1)}, "alibi": {"alibi": 1}}
    for options in diagonals.values():
        run(framework, rows_call([KV_LEN, 0, KV_LEN], q_len=KV_LEN, **options), learned=learned)  # nothing is shifted
        padded = rows_call([KV_LEN, 0, 9], q_len=KV_LEN, **options)
        with pytest.raises(SpecError, match=r"kv_lengths\[2\]=9: .* padded on the right pass alignment='top_left'"):
            run(framework, padded, learned=learned)
        padded = rows_call([KV_LEN, 0, 9], q_len=KV_LEN, alignment="top_left", **options)
        assert is_right(padded, run(framework, padded, learned=learned))
    run(framework, rows_call([KV_LEN, 0, 9], q_len=KV_LEN), learned=learned)  # without a diagonal


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_backend_without_pages_and_ranges_is_refused_with_reasons(framework: str) -> None:
    call = rows_call([7, 19, 11])
    with pytest.raises(NoBackendError, match="key_ranges of shape"):
        run(framework, call, learned=True, backend="sdpa_flash")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_compiled_programs_clamp(framework: str) -> None:
    """Values that no host saw are clamped, on every device."""
    call = rows_call([KV_LEN, 0, 11], [0, 0, 11], [4, 0, 2], causal=True)
    wild = {"kv_lengths": [KV_LEN + 9, -3, 11], "kv_starts": [-4, 2, 99], "cache_index": [77, -1, 2]}
    wrong = {name: np.array(values, np.int32) for name, values in wild.items()}
    for learned in (False, True):
        torch._dynamo.reset()
        assert is_right(call, run(framework, call, learned=learned, compiled=True, **wrong))


@pytest.mark.parametrize("alibi", [1, 2])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slopes_of_float64_keep_their_digits(framework: str, alibi: int) -> None:
    call = rows_call([7, 19, 11], alibi=alibi, dtype="float64", causal=True)
    call.options["alibi_slopes"] = call.options["alibi_slopes"] + 1 / np.float64(3)
    with jax.enable_x64(True):
        for changed in ({}, {"learned": True}, {"mask": np.ones((2, KV_LEN), bool)}, {"compiled": True}):
            torch._dynamo.reset()
            assert is_right(call, run(framework, call, **changed))


def test_slopes_have_no_gradient() -> None:
    call = rows_call([7, 19, 11], alibi=1)
    tensors = [torch.tensor(array, dtype=torch.float32) for array in (call.q, call.k, call.v)]
    lengths, slopes = torch.tensor(call.rows["kv_lengths"]), torch.tensor(call.options["alibi_slopes"])
    of = lambda slopes: torch_frontend.attention(*tensors, kv_lengths=lengths, alibi_slopes=slopes).sum()  # noqa: E731
    with pytest.raises(SpecError, match="alibi_slopes: expected no tangent"):
        torch.func.jvp(of, (slopes,), (slopes,))
    with pytest.raises(SpecError, match="alibi_slopes: expected requires_grad=False"):
        torch.func.grad(of)(slopes)
    for function in (of, torch.compile(of, backend="aot_eager")):
        with pytest.raises(Exception, match="alibi_slopes: expected requires_grad=False"):
            function(slopes.requires_grad_())
    arrays = [jnp.asarray(tensor.numpy()) for tensor in tensors]

    def loss(slopes: Any) -> Any:
        return jax_frontend.attention(*arrays, kv_lengths=jnp.asarray(lengths.numpy()), alibi_slopes=slopes).sum()

    with pytest.raises(SpecError, match="alibi_slopes: expected no gradient"):
        jax.grad(loss)(jnp.asarray(slopes.detach().numpy()))
