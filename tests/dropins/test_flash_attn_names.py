"""Tests flash-attn's functions by their own names, in both frontends, beside float64 and beside loops over rows.

flash-attn is not installed here. Its signatures are data, read from its sources: flash-attn 2.8.4, and ``hopper`` and
``flash_attn/cute`` of 15 August 2026.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy
from reference_calls import reference_call

import torch_frontend
from attn_core import DTypeError, NoBackendError, SeqInfo, ShapeError, SpecError
from attn_core.correctness import reference

pytestmark = pytest.mark.sampled

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 5, 7, 6, 2, 8
SCALE = 1 / np.sqrt(DIM)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def module(f: Framework, name: str = "") -> Any:
    return import_module(f"{f.name}_frontend.flash_attn{name}")


def run(f: Framework, function: str, *arrays: Any, of: str = "", **keywords: Any) -> Any:
    """The results of a function, numpy or None in and out."""
    passed = f.arrays(dict(enumerate(arrays))).values()
    results = getattr(module(f, of), function)(*passed, **f.arrays(keywords))
    if not isinstance(results, tuple):
        return as_numpy(results)
    return tuple(None if each is None else as_numpy(each) for each in results)


def expected(
    q: Any, k: Any, v: Any, causal: bool = False, window: Any = (-1, -1), softcap: float = 0.0, slopes: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out, log-sum-exp) of one row in float64: q ``[queries, heads, dim]``, keys likewise, slopes ``[heads]``."""
    options = {"causal": causal, "window": tuple(None if n < 0 else n for n in window), "softcap": softcap or None}
    out, lse = reference.forward(*reference_call(q[None], k[None], v[None], slopes=slopes, **options))
    return out[0], lse[0]


def rows(*, batch: int = BATCH, q_len: int = Q_LEN, kv_len: int = KV_LEN) -> tuple[np.ndarray, ...]:
    shapes = ((q_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    return tuple(draw(batch, *shape, DIM, seed=number) for number, shape in enumerate(shapes))


def close(actual: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(actual, right, rtol=2e-5, atol=2e-6)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window and softcap": {"causal": True, "window_size": (2, -1), "softcap": 1.5},
    "two sides": {"window_size": (1, 2)},
    "slopes": {"alibi_slopes": abs(draw(HEADS, seed=7)), "causal": True},
    "slopes of rows": {"alibi_slopes": abs(draw(BATCH, HEADS, seed=8))},
    "softcap below 0": {"softcap": -1.0, "deterministic": True},
    "scale": {"softmax_scale": SCALE},
}


def right_of(arrays: Any, call: dict[str, Any], row: int) -> tuple[np.ndarray, np.ndarray]:
    slopes = call.get("alibi_slopes")
    slopes = slopes[row] if slopes is not None and slopes.ndim == 2 else slopes
    softcap = max(call.get("softcap", 0.0), 0.0)
    return expected(*arrays, call.get("causal", False), call.get("window_size", (-1, -1)), softcap, slopes)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_dense_calls(f: Framework, name: str) -> None:
    q, k, v = rows()
    out, lse, dropped = run(f, "flash_attn_func", q, k, v, **CALLS[name], return_attn_probs=True)
    assert dropped.shape == (0,)
    for row in range(BATCH):
        right, right_lse = right_of((q[row], k[row], v[row]), CALLS[name], row)
        close(out[row], right)
        close(lse[row], right_lse)
    alone = run(f, "flash_attn_func", q, k, v, **CALLS[name])
    close(alone, out)
    close(run(f, "flash_attn_kvpacked_func", q, np.stack((k, v), 2), **CALLS[name]), out)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_packed_forms(f: Framework) -> None:
    qkv = draw(BATCH, Q_LEN, 3, HEADS, DIM)
    out, lse, _ = run(f, "flash_attn_qkvpacked_func", qkv, causal=True, return_attn_probs=True)
    for row in range(BATCH):
        right, right_lse = expected(*qkv[row].swapaxes(0, 1), causal=True)
        close(out[row], right)
        close(lse[row], right_lse)
    offsets = ints(0, 2, 2, 5)
    packed = run(f, "flash_attn_varlen_qkvpacked_func", qkv[0], offsets, 3, causal=True)
    for start, stop in pairwise(offsets):
        close(packed[start:stop], expected(*qkv[0, start:stop].swapaxes(0, 1), causal=True)[0])


OFFSETS_Q, OFFSETS_K = ints(0, 3, 5, 5, 11), ints(0, 2, 2, 4, 13)
"""Four documents: with fewer keys than queries, without keys, without queries, and with more keys than queries."""


@pytest.mark.parametrize("name", [name for name in CALLS if name != "slopes of rows"] + ["slopes of documents"])
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_documents(f: Framework, name: str) -> None:
    call = CALLS.get(name) or {"alibi_slopes": abs(draw(4, HEADS, seed=9)), "causal": True}
    call = {} if name == "plain" else call
    q, k, v = (array[0] for array in rows(batch=1, q_len=11, kv_len=13))
    lengths = (OFFSETS_Q, OFFSETS_K, 6, 9)
    out, lse, _ = run(f, "flash_attn_varlen_func", q, k, v, *lengths, **call, return_attn_probs=True)
    assert lse.shape == (HEADS, 11)
    for document in range(4):
        mine, keys = (slice(*offsets[document : document + 2]) for offsets in (OFFSETS_Q, OFFSETS_K))
        right, right_lse = right_of((q[mine], k[keys], v[keys]), call, document)
        close(out[mine], right)
        close(lse[:, mine], np.where(right_lse == -np.inf, np.inf, right_lse))
    close(run(f, "flash_attn_varlen_kvpacked_func", q, np.stack((k, v), 1), *lengths, **call), out)
    # The same keys in pages of 4 tokens, laid in the pool in another order.
    pools = np.full((2, 6, 4, KV_HEADS, DIM), np.nan, np.float32)
    table, free = np.full((4, 3), -1, np.int32), [4, 0, 5, 2, 1]
    for document in range(4):
        start, stop = OFFSETS_K[document : document + 2]
        for column, first in enumerate(range(start, stop, 4)):
            table[document, column] = page = free.pop(0)
            for pool, tokens in zip(pools, (k, v), strict=True):
                pool[page, : min(4, stop - first)] = tokens[first : min(first + 4, stop)]
    close(run(f, "flash_attn_varlen_func", q, *pools, *lengths, **call, block_table=table), out)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_gradients(f: Framework) -> None:
    arrays = dict(zip("qkv", rows(), strict=True))
    spec, inputs = reference_call(*arrays.values(), causal=True, needs_backward=True)
    out, lse = reference.forward(spec, inputs)
    found = f.gradients(partial(module(f).flash_attn_func, causal=True), arrays)
    for actual, exact in zip(found, (out, *reference.backward(spec, inputs, out, lse, out)[:3]), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=2e-5, atol=5e-6)

    qkv, offsets = draw(5, 3, HEADS, DIM), f.array(ints(0, 2, 5))
    packed = lambda qkv: module(f).flash_attn_varlen_qkvpacked_func(qkv, offsets, 3, causal=True)  # noqa: E731
    alone = partial(module(f).flash_attn_qkvpacked_func, causal=True)
    parts = [f.gradients(alone, {"qkv": part[None]}) for part in (qkv[:2], qkv[2:])]
    for actual, *exact in zip(f.gradients(packed, {"qkv": qkv}), *parts, strict=True):
        np.testing.assert_allclose(actual, np.concatenate([each[0] for each in exact]), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_slopes_of_documents_in_float64_keep_their_digits(f: Framework) -> None:
    q, k, v = (each[0].astype(np.float64) for each in rows(batch=1, q_len=11, kv_len=13))
    slopes = abs(draw(4, HEADS, seed=8)) + 1 / np.float64(3)
    with jax.enable_x64(True):
        out = run(f, "flash_attn_varlen_func", q, k, v, OFFSETS_Q, OFFSETS_K, 6, 9, alibi_slopes=slopes, causal=True)
    for document in range(4):
        mine, keys = (slice(*offsets[document : document + 2]) for offsets in (OFFSETS_Q, OFFSETS_K))
        right, _ = expected(q[mine], k[keys], v[keys], True, slopes=slopes[document])
        np.testing.assert_allclose(out[mine], right, rtol=1e-12, atol=1e-12)


PACKED: dict[str, tuple[str, Any]] = {
    "flash_attn_varlen_func": ("", lambda q, k: (q, k, k, OFFSETS_Q, OFFSETS_K)),
    "flash_attn_varlen_kvpacked_func": ("", lambda q, k: (q, np.stack((k, k), 1), OFFSETS_Q, OFFSETS_K)),
    "flash_attn_varlen_qkvpacked_func": ("", lambda q, k: (np.stack((q, q, q), 1), OFFSETS_Q)),
    "hopper": (".hopper", lambda q, k: (q, k, k, OFFSETS_Q, OFFSETS_K)),
    "cute": (".cute", lambda q, k: (q, k, k, None, OFFSETS_Q, OFFSETS_K)),
    "pages": (".hopper", lambda q, k: (q, *(k[None].repeat(4, 0),) * 2)),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_longest_sequence_may_be_an_array_on_the_cpu(f: Framework, name: str) -> None:
    """Many programs pass ``(cu_seqlens[1:] - cu_seqlens[:-1]).max()``; on the CPU reading it waits for nothing."""
    of, arrays = PACKED[name]
    q, k = (each[0] for each in rows(batch=1, q_len=11, kv_len=13)[:2])
    function = name if not of else "flash_attn_varlen_func"
    how: dict[str, Any] = {"return_lse": True} if name == "cute" else {}
    if name == "pages":
        function = "flash_attn_with_kvcache"
        how = {"cache_seqlens": ints(3, 4, 5, 6), "page_table": ints(0, 1, 2, 3)[:, None], "cu_seqlens_q": OFFSETS_Q}
    longest = (
        ("max_seqlen_q",) if name == "pages" else ("max_seqlen",) if "qkv" in name else ("max_seqlen_q", "max_seqlen_k")
    )
    given = dict(zip(longest, (6, 9), strict=False))
    first = lambda results: results[0] if isinstance(results, tuple) else results  # noqa: E731
    right = first(run(f, function, *arrays(q, k), of=of, **how, **given))
    for kind in (np.int64, np.array, lambda number: np.array(number, np.int32)):
        passed = {key: kind(number) for key, number in given.items()}
        np.testing.assert_array_equal(first(run(f, function, *arrays(q, k), of=of, **how, **passed)), right)
    limits = ", from 0 to 2147483647$"  # as for an int, because the array was read
    for wrong, says, end in (
        (np.array(6.0), "Array|Tensor", ""),
        (np.array(-1), "-1", limits),
        (-1, "-1", limits),
        (np.array([6]), "Array|Tensor", ""),
    ):
        message = f"^{longest[0]}=.*({says}).*: expected the longest sequence .* on the host{end}"
        with pytest.raises(SpecError, match=message):
            run(f, function, *arrays(q, k), of=of, **how, **given | {longest[0]: wrong})


def test_a_longest_sequence_on_a_device_is_refused_with_the_way_out() -> None:
    q, k, v = (torch.from_numpy(each[0]) for each in rows(batch=1, q_len=11, kv_len=13))
    offsets = (torch.from_numpy(each) for each in (OFFSETS_Q, OFFSETS_K))
    with pytest.raises(SpecError, match=r"^max_seqlen_q=.*would wait for it; pass int\(max_seqlen_q\), computed once"):
        module(TORCH).flash_attn_varlen_func(q, k, v, *offsets, torch.tensor(6, device="meta"), 9)


def cached(function: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A call on a cache, and its tensors with numbers by name."""
    q, k, v = (torch.from_numpy(array) for array in rows(q_len=1))
    new, angles, slopes = k[:, :1].clone(), torch.ones(KV_LEN, 2), torch.ones(HEADS)
    lengths, table = torch.from_numpy(ints(3, 4)), torch.from_numpy(TABLE)
    one, keys = torch.from_numpy(ints(0, 1, 2)), torch.from_numpy(ints(0, 4, 8))
    cache = {"q": q, "k_cache": k, "v_cache": v, "k": new, "v": new.clone()}
    if function == "flash_attn_varlen_func":
        how = {"cu_seqlens_q": one, "cu_seqlens_k": keys, "max_seqlen_q": 1, "max_seqlen_k": 4, "block_table": table}
        return partial(module(TORCH).flash_attn_varlen_func, **how), {"q": q[:, 0], "k": k, "v": v}
    if function == "cute":
        of = partial(module(TORCH, ".cute").flash_attn_varlen_func, page_table=table, seqused_k=lengths)
        return lambda **given: of(**given)[0], {"q": q, "k": k, "v": v, "learnable_sink": torch.zeros(HEADS)}
    if function == "hopper":
        return partial(module(TORCH, ".hopper").flash_attn_with_kvcache, cache_seqlens=lengths), cache
    more = {"rotary_cos": angles, "rotary_sin": angles.clone(), "alibi_slopes": slopes}
    return partial(module(TORCH).flash_attn_with_kvcache, cache_seqlens=lengths), cache | more


@pytest.mark.parametrize("how", ["eager", "compiled", "torch.func.grad", "torch.func.jvp"])
@pytest.mark.parametrize("function", ["kvcache", "hopper", "cute", "flash_attn_varlen_func"])
def test_a_cache_loses_no_gradient_in_silence(function: str, how: str) -> None:
    """Whichever tensor is trained: the results are those of inference, and the error names it."""
    call, tensors = cached(function)
    plain = call(**{name: tensor.clone() for name, tensor in tensors.items()})
    for name in tensors:
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        alone = lambda x: call(**given | {name: x}).sum()  # noqa: B023, E731
        refused = pytest.raises(SpecError, match=f"^{name}: a cache and pages have no gradient; call .*no_grad")
        if how == "torch.func.grad":
            with refused:
                torch.func.grad(alone)(given[name])
        elif how == "torch.func.jvp":
            with refused:
                torch.func.jvp(alone, (given[name],), (given[name],))
        else:
            torch._dynamo.reset()
            given[name].requires_grad_()
            out = (torch.compile(call, backend="aot_eager", fullgraph=True) if how == "compiled" else call)(**given)
            torch.testing.assert_close(out.detach(), plain, rtol=0, atol=0)
            with refused:
                out.sum().backward()


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_dropped_weights_say_what_the_output_is(f: Framework, packed: bool) -> None:
    q, k, v = rows(batch=1, q_len=11, kv_len=13)
    rate, how = 0.3, {"dropout_rng": torch.Generator().manual_seed(3) if f is TORCH else jax.random.key(3)}
    how |= {"return_attn_probs": True, "causal": True}
    if packed:
        arrays = (q[0], k[0], v[0], OFFSETS_Q, OFFSETS_K, 6, 9)
        out, _, signed = run(f, "flash_attn_varlen_func", *arrays, rate, **how)
        documents = [(OFFSETS_Q[d : d + 2], OFFSETS_K[d : d + 2]) for d in range(4)]
    else:
        out, _, signed = run(f, "flash_attn_func", q, k, v, rate, **how)
        out, documents = out[0], [((0, 11), (0, 13))]
    assert signed.shape == ((4, HEADS, 6, 9) if packed else (1, HEADS, 11, 13))
    for weights, (mine, keys) in zip(signed, documents, strict=True):
        weights = weights[:, : mine[1] - mine[0], : keys[1] - keys[0]]
        total = abs(weights).sum(-1, keepdims=True)
        left = np.where(weights > 0, weights, 0) / np.where(total == 0, 1, total) / (1 - rate)
        values = np.repeat(v[0, keys[0] : keys[1]], HEADS // KV_HEADS, 1)
        close(out[mine[0] : mine[1]], np.einsum("hqk,khd->qhd", left, values))
    assert 0.1 < (signed < 0).sum() / (signed != 0).sum() < 0.5


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, places: np.ndarray, interleaved: bool) -> np.ndarray:
    """x ``[tokens, heads, dim]`` turned by the angles of its places, pair by pair."""
    turned = x.astype(np.float64)
    half = cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[places, i][:, None], sin[places, i][:, None]
        turned[..., a], turned[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return turned


CACHES: dict[str, dict[str, Any]] = {
    "one token": {"q_len": 1, "new": 1, "causal": True},
    "chunk": {"q_len": 3, "new": 3, "causal": True, "rotary": True},
    "interleaved": {
        "q_len": 3,
        "new": 2,
        "causal": True,
        "rotary": True,
        "rotary_interleaved": False,
        "window": (4, -1),
    },
    "every query at one place": {"q_len": 3, "new": 3, "rotary": True},
    "nothing new": {"q_len": 2, "new": 0, "softcap": 2.0},
    "slopes": {"q_len": 2, "new": 2, "causal": True, "alibi_slopes": abs(draw(BATCH, HEADS, seed=5))},
    "more queries than keys": {"q_len": 5, "new": 1, "causal": True},
}


@pytest.mark.parametrize("form", ["rows", "index", "leftpad", "pages"])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_caches(f: Framework, name: str, form: str) -> None:
    call = dict(CACHES[name])
    q_len, new, window = call.pop("q_len"), call.pop("new"), call.pop("window", (-1, -1))
    length, size, before = 12, 4, ints(1 if name == "more queries than keys" else 4, 7)
    q = draw(BATCH, q_len, HEADS, DIM, seed=1)
    # What is not in use is NaN: it must reach no result.
    stored = draw(2, BATCH, length, KV_HEADS, DIM, seed=2)
    fresh = draw(2, BATCH, max(new, 1), KV_HEADS, DIM, seed=3)
    places = np.arange(length)
    for cache in stored:
        cache[places >= before[:, None]] = np.nan
    how: dict[str, Any] = {"cache_seqlens": before, "window_size": window, "return_softmax_lse": True, **call}
    leftpad = ints(1, 3) if form == "leftpad" else ints(0, 0)
    where: Any = (np.arange(BATCH)[:, None], places)  # the cache's place of each token
    caches = stored.copy()
    if form == "leftpad":
        how["cache_leftpad"] = leftpad
    if form == "index":
        index = ints(3, 1)
        caches = np.full((2, 5, length, KV_HEADS, DIM), np.nan, np.float32)
        caches[:, index] = stored
        how["cache_batch_idx"], where = index, (index[:, None], places)
    if form == "pages":
        table = ints((4, 0, 6), (1, 5, 2))
        caches = np.full((2, 7, size, KV_HEADS, DIM), np.nan, np.float32)
        where = (table[:, places // size], places % size)
        caches[:, where[0], where[1]] = stored
        how["block_table"] = table
    angles = draw(length + 5, 2, seed=4)
    cos, sin = np.cos(angles), np.sin(angles)
    interleaved = call.get("rotary_interleaved", True)
    if how.pop("rotary", False):
        how |= {"rotary_cos": cos, "rotary_sin": sin}
    pair = [f.array(cache) for cache in caches]
    tokens = {"k": fresh[0], "v": fresh[1]} if new else {}
    results = module(f).flash_attn_with_kvcache(f.array(q), *pair, **f.arrays({**tokens, **how}))
    out, lse = map(as_numpy, results[:2])
    after = [as_numpy(each)[where] for each in (pair if f is TORCH else results[2:])]
    for row in range(BATCH):
        mine = q[row]
        keys, values = (cache[row].astype(np.float64) for cache in stored)
        added = fresh[0, row]
        if "rotary_cos" in how:
            at = before[row] + np.arange(max(q_len, new))
            added = rotated(added, cos, sin, at[:new], interleaved)
            banded = call.get("causal", False) or window != (-1, -1)
            mine = rotated(mine, cos, sin, at[:q_len] if banded else np.full(q_len, before[row]), interleaved)
        stop = before[row] + new
        if new:
            keys[before[row] : stop], values[before[row] : stop] = added, fresh[1, row]
            close(after[0][row, :stop], keys[:stop])
            close(after[1][row, :stop], values[:stop])
        slopes = None if call.get("alibi_slopes") is None else call["alibi_slopes"][row]
        inside = slice(leftpad[row], stop)
        options = (call.get("causal", False), window, call.get("softcap", 0.0), slopes)
        right, right_lse = expected(mine, keys[inside], values[inside], *options)
        close(out[row], right)
        close(lse[row], np.where(right_lse == -np.inf, np.inf, right_lse))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_whole_cache_and_one_length(f: Framework) -> None:
    q, k, v = rows()
    for how, stop in (({}, KV_LEN), ({"cache_seqlens": 4}, 4)):
        results = module(f).flash_attn_with_kvcache(*map(f.array, (q, k, v)), causal=True, **how)
        out = as_numpy(results if f is TORCH else results[0])
        for row in range(BATCH):
            close(out[row], expected(q[row], k[row, :stop], v[row, :stop], True)[0])


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_the_functions_of_hopper(f: Framework) -> None:
    q, k, v = rows()
    results = run(f, "flash_attn_func", q, k, v, None, True, of=".hopper", return_attn_probs=True, pack_gqa=True)
    assert len(results) == 2
    close(results[0][1], expected(q[1], k[1], v[1], True)[0])
    packed = np.concatenate((q[:, :, :4], k[:, :Q_LEN], v[:, :Q_LEN]), 2)
    out = run(f, "flash_attn_qkvpacked_func", packed, of=".hopper", num_heads_q=4, causal=True)
    close(out[0], expected(q[0, :, :4], k[0, :Q_LEN], v[0, :Q_LEN], True)[0])
    q, k, v = (array[0] for array in rows(batch=1, q_len=11, kv_len=13))
    arrays = (q, k, v, OFFSETS_Q, OFFSETS_K, 6, 9)
    out, lse = run(f, "flash_attn_varlen_func", *arrays, of=".hopper", causal=True, return_attn_probs=True)
    close(out[5:11], expected(q[5:11], k[4:13], v[4:13], True)[0])
    assert (lse[:, 3:5] == -np.inf).all()  # a document without keys, in the convention of FlashAttention 3

    q, k, v = draw(5, HEADS, DIM), *draw(2, 3, 12, KV_HEADS, DIM)
    how = {"cache_seqlens": ints(4, 7), "cu_seqlens_q": ints(0, 2, 5), "max_seqlen_q": 3, "causal": True}
    results = run(f, "flash_attn_with_kvcache", q, k, v, of=".hopper", **how, return_softmax_lse=True)
    assert [each.shape for each in results[:4]] == [q.shape, (HEADS, 5), (0,), (0,)]
    close(results[0][2:], expected(q[2:], k[1, :7], v[1, :7], True)[0])


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_the_functions_of_cute(f: Framework) -> None:
    call = partial(run, f, of=".cute")
    q, k, v = rows()
    out, lse = call("flash_attn_func", q, k, v, causal=True)
    assert lse is None
    close(out[0], expected(q[0], k[0], v[0], True)[0])
    sink = draw(HEADS, seed=6)
    out, lse = call("flash_attn_func", q, k, v, learnable_sink=sink, window_size=(2, None), return_lse=True)
    right, right_lse = expected(q[1], k[1], v[1], window=(2, -1))
    with_sink = np.logaddexp(right_lse, sink[:, None])
    close(lse[1], with_sink)
    close(out[1], right * np.exp(right_lse - with_sink).T[..., None])

    out, _ = call("flash_attn_varlen_func", q, k, v, seqused_k=ints(3, 6), causal=True)
    close(out[0], expected(q[0], k[0, :3], v[0, :3], True)[0])
    tables = {"seqused_k": ints(3, 6), "page_table": ints([1], [0]), "causal": True}
    out, _ = call("flash_attn_varlen_func", q, k, v, **tables)
    close(out[0], expected(q[0], k[1, :3], v[1, :3], True)[0])
    q, k, v = (array[0] for array in rows(batch=1, q_len=11, kv_len=13))
    out, lse = call("flash_attn_varlen_func", q, k, v, None, OFFSETS_Q, OFFSETS_K, 6, 9, causal=True, return_lse=True)
    close(out[5:11], expected(q[5:11], k[4:13], v[4:13], True)[0])
    assert lse.shape == (HEADS, 11)


SHIFTED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap, without a diagonal": {"softcap": 1.5},
}


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_rows_padded_on_the_right_are_shifted_as_flash_attn_does(f: Framework, name: str) -> None:
    """``attention`` refuses these lengths on a host. flash-attn puts the last query at the row's last key."""
    lengths, how = ints(KV_LEN, 3, 0, KV_LEN - 1), SHIFTED[name]
    arrays = q, k, v = rows(batch=len(lengths), q_len=KV_LEN)
    cached = {"cache_seqlens": lengths, **how, "return_softmax_lse": True}
    out, lse, *_ = run(f, "flash_attn_with_kvcache", *arrays, **cached)
    found = [
        (out, np.where(lse == np.inf, -np.inf, lse)),  # flash-attn 2.8 has inf for a query that sees no key
        run(f, "flash_attn_with_kvcache", *arrays, of=".hopper", **cached),
        run(f, "flash_attn_varlen_func", *arrays, of=".cute", seqused_k=lengths, **how, return_lse=True),
    ]
    rest = how.get("causal", False), how.get("window_size", (-1, -1)), how.get("softcap", 0.0)
    for row, length in enumerate(lengths):
        right, right_lse = expected(q[row], k[row, :length], v[row, :length], *rest)
        for out, lse, *_ in found:
            close(out[row], right)
            close(lse[row], right_lse)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_rows_padded_on_the_right_have_the_gradients_of_shifted_ones(f: Framework) -> None:
    lengths, arrays = ints(KV_LEN, 3), dict(zip("qkv", rows(q_len=KV_LEN), strict=True))
    attend = partial(module(f, ".cute").flash_attn_varlen_func, seqused_k=f.array(lengths), causal=True)
    found = f.gradients(lambda **arrays: attend(**arrays)[0], arrays)
    for row, length in enumerate(lengths):
        q, k, v = (array[row : row + 1, : None if name == "q" else length] for name, array in arrays.items())
        spec, inputs = reference_call(q, k, v, causal=True, needs_backward=True)
        out, lse = reference.forward(spec, inputs)
        right = out, *reference.backward(spec, inputs, out, lse, out)[:3]
        for actual, exact in zip(found, right, strict=True):
            np.testing.assert_allclose(actual[row, : exact.shape[1]], exact[0], rtol=2e-5, atol=5e-6)
            assert not actual[row, exact.shape[1] :].any()  # the padding


def test_under_jit_a_program_serves_every_length() -> None:
    q, k, v = draw(BATCH, 1, HEADS, DIM), *draw(2, BATCH, 9, KV_HEADS, DIM)
    new = draw(2, BATCH, 1, KV_HEADS, DIM, seed=1)

    @jax.jit
    def step(lengths: Any) -> Any:
        arrays = map(JAX.array, (q, k, v, *new))
        return module(JAX).flash_attn_with_kvcache(*arrays, cache_seqlens=lengths, causal=True)

    for lengths in (ints(2, 5), ints(0, 8)):
        out, k_after, _ = step(JAX.array(lengths))
        eager = run(JAX, "flash_attn_with_kvcache", q, k, v, *new, cache_seqlens=lengths, causal=True)
        np.testing.assert_array_equal(out, eager[0])
        np.testing.assert_array_equal(k_after, eager[1])
    assert step._cache_size() == 1


FA2 = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None"
FA2 += " deterministic=False return_attn_probs=False"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SCALES = "q_descale=None k_descale=None v_descale=None"
FA3 = f"softmax_scale=None causal=False qv=None {SCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1"
FA3 += " pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
CACHE = "cache_seqlens=None cache_batch_idx=None cache_leftpad=None"
TUNING = "num_splits=1 pack_gqa=None deterministic=False score_mod=None score_mod_bwd=None mask_mod=None"
SIGNATURES = {
    "": {
        "flash_attn_func": f"q k v {FA2}",
        "flash_attn_kvpacked_func": f"q kv {FA2}",
        "flash_attn_qkvpacked_func": f"qkv {FA2}",
        "flash_attn_varlen_func": f"q k v {LENGTHS} {FA2} block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {FA2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {FA2}",
        "flash_attn_with_kvcache": f"q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None {CACHE} "
        "block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
        "alibi_slopes=None num_splits=0 return_softmax_lse=False",
    },
    ".hopper": {
        "flash_attn_func": f"q k v {FA3}",
        "flash_attn_qkvpacked_func": f"qkv softmax_scale=None causal=False {SCALES} window_size=(-1,-1) "
        "attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
        "flash_attn_varlen_func": f"q k v {LENGTHS} seqused_q=None seqused_k=None {FA3}",
        "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
        f"{CACHE} page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
        f"{SCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
        "return_softmax_lse=False",
    },
    ".cute": {
        "flash_attn_func": "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False "
        f"window_size=(None,None) learnable_sink=None softcap=0.0 {TUNING} aux_tensors=None aux_scalars=None "
        "block_sparse_tensors=None block_sparse_tensors_bwd=None return_lse=False",
        "flash_attn_varlen_func": "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None "
        "max_seqlen_k=None min_seqlen_k=None seqused_q=None seqused_k=None gather_kv_indices=None page_table=None "
        f"softmax_scale=None causal=False window_size=(None,None) learnable_sink=None softcap=0.0 {TUNING} "
        "block_sparse_tensors=None aux_tensors=None aux_scalars=None return_lse=False scheduler_metadata=None "
        "seqlen_k_per_split=None disable_scheduler_metadata=False",
    },
}
"""The parameters and defaults of flash-attn 2.8.4, of hopper and of cute, in their order."""


@pytest.mark.parametrize("f", BOTH, ids=str)
@pytest.mark.parametrize("of", SIGNATURES)
def test_signatures(f: Framework, of: str) -> None:
    assert sorted(module(f, of).__all__) == sorted(SIGNATURES[of])
    for name, right in SIGNATURES[of].items():
        parameters = inspect.signature(getattr(module(f, of), name)).parameters.values()
        shown = [
            p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "")
            for p in parameters
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        assert " ".join(shown) == right
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] in ([], ["dropout_rng"])


def new(count: int = 1) -> dict[str, np.ndarray]:
    return dict(zip("kv", draw(2, BATCH, count, KV_HEADS, DIM), strict=True))


def angles(width: int, rotations: int = 9) -> dict[str, np.ndarray]:
    return {"rotary_cos": draw(rotations, width), "rotary_sin": draw(rotations, width)}


TABLE = ints([0], [1])


@pytest.mark.parametrize("more", [{}, {"alibi_slopes": draw(HEADS)}, {"cache_leftpad": ints(1, 0)}], ids=str)
def test_a_call_that_no_backend_can_run_writes_nothing(more: dict[str, Any]) -> None:
    """Before and after the same call ran on another backend, whose checks are not made again."""
    caches = [torch.from_numpy(draw(BATCH, KV_LEN, KV_HEADS, DIM, seed=seed)) for seed in (1, 2)]
    tensors = [torch.from_numpy(draw(BATCH, 1, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    named = {name: torch.from_numpy(value) for name, value in {"cache_seqlens": ints(3, 4), **more}.items()}
    before = [cache.clone() for cache in caches]
    call = partial(module(TORCH).flash_attn_with_kvcache, tensors[0], *caches, *tensors[1:], causal=True, **named)
    for _ in range(2):
        with torch_frontend.use_backend("triton_splitkv"), pytest.raises(NoBackendError):
            call()
        assert all(map(torch.equal, caches, before))
        call()
        assert not any(map(torch.equal, caches, before))
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)


BAD_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": new()["k"], "cache_seqlens": 3}, SpecError, r"^v: expected the new tokens beside k, got None"),
    (new(), SpecError, r"^cache_seqlens: expected the tokens in the cache"),
    (angles(4), SpecError, r"^rotary_cos: expected k and v with it"),
    ({**new(), "cache_seqlens": 3, "rotary_cos": draw(9, 4)}, SpecError, r"^rotary_sin: expected an array beside"),
    ({**new(), "cache_seqlens": 3, **angles(5)}, ShapeError, r"^rotary_cos: .*head_dim of 8, got 5"),
    (
        {**new(), "cache_seqlens": ints(3, 5), **angles(4, 5)},
        SpecError,
        r"^cache_seqlens\[1\]=5: expected 0 to 4, .* has 5 positions",
    ),
    ({"cache_seqlens": ints(3, 8)}, SpecError, r"^cache_seqlens\[1\]=8: expected 0 to 7 tokens"),
    ({**new(2), "cache_seqlens": ints(-1, 3)}, SpecError, r"^cache_seqlens\[0\]=-1: expected 0 to 5 .*2 new"),
    ({**new(2), "cache_seqlens": 6}, SpecError, r"^cache_seqlens=6: expected 0 to 5 tokens beside 2 new ones"),
    ({"cache_seqlens": ints(3, 4).astype(np.float32)}, DTypeError, r"^cache_seqlens: expected dtype int32"),
    ({"cache_seqlens": ints(3)}, ShapeError, r"^cache_seqlens: expected shape \[2\], got \[1\]"),
    ({"cache_batch_idx": ints(0, 2)}, SpecError, r"^cache_batch_idx\[1\]=2: expected 0 to 1, the last row"),
    ({**new(), "cache_seqlens": 3, "cache_batch_idx": ints(1, 1)}, SpecError, r"^cache_batch_idx=\[1, 1\]: .*differ"),
    ({"cache_leftpad": ints(0, 4), "cache_seqlens": 3}, SpecError, r"^cache_leftpad\[1\]=4: expected 0 to 3"),
    ({"block_table": TABLE, "cache_batch_idx": ints(0, 1)}, SpecError, r"^cache_batch_idx: expected None with block_"),
    ({"block_table": TABLE, "cache_leftpad": ints(0, 1)}, SpecError, r"^cache_leftpad: expected None with block_table"),
    ({"block_table": ints([0], [9])}, SpecError, r"^block_table\[1, 0\]=9: expected a page"),
    ({"window_size": (-2, 3)}, SpecError, r"^window_size=\(-2, 3\): expected a pair .*-1 without limit"),
    ({"softmax_scale": -1.0}, SpecError, r"^softmax_scale=-1.0: expected a finite number above 0"),
    ({"alibi_slopes": draw(5)}, ShapeError, r"^alibi_slopes: expected \[heads\] = \[6\] or"),
    ({"num_splits": "two"}, SpecError, r"^num_splits='two': expected an int"),
    ({"return_softmax_lse": 1}, SpecError, r"^return_softmax_lse=1: expected True or False"),
]
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window_size": (3, -2)}, SpecError, r"^window_size=\(3, -2\)"),
    ({"window_size": 4}, SpecError, r"^window_size=4: expected a pair"),
    ({"dropout_p": 1.0}, SpecError, r"^dropout_p=1.0"),
    ({"softmax_scale": 0.0}, SpecError, r"^softmax_scale=0.0"),
    ({"softcap": "no"}, SpecError, r"^softcap='no'"),
    ({"alibi_slopes": draw(4, 4)}, ShapeError, r"^alibi_slopes"),
    ({"return_attn_probs": 1}, SpecError, r"^return_attn_probs=1"),
    ({"k": draw(BATCH, KV_LEN, 4, DIM)}, ShapeError, r"^v: expected the heads of k"),
]
PAGES = np.zeros((6, 4, KV_HEADS, DIM), np.int8)
INT8 = {"k": PAGES, "v": PAGES, "block_table": np.zeros((4, 3), np.int32)}
BAD_DOCUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_seqlen_q": 2.0}, SpecError, r"^max_seqlen_q=2.0: expected .* an int32 on the host"),
    ({"max_seqlen_k": 3}, SpecError, r"^(max_seqlen_k|cu_seqlens_k)"),
    ({"cu_seqlens_q": ints(0, 3, 2, 5, 11)}, SpecError, r"^cu_seqlens_q"),
    ({"cu_seqlens_k": ints(0, 2)}, SpecError, r"^cu_seqlens_k"),
    (
        {"dropout_p": 0.5, "block_table": np.zeros((4, 1), np.int32)},
        SpecError,
        r"^dropout_p=0.5: expected 0 with block_table",
    ),
    (
        {"alibi_slopes": draw(3, HEADS)},
        SpecError,
        r"^alibi_slopes: expected .*\[documents, heads\] = \[4, 6\], got \[3, 6\]",
    ),
    (INT8, DTypeError, r"^k: expected the dtype of q, .*float32, got .*int8; cast it"),
]
DOCUMENTS = dict(zip("qkv", (array[0] for array in rows(batch=1, q_len=11, kv_len=13)), strict=True))
DOCUMENTS |= {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K, "max_seqlen_q": 6, "max_seqlen_k": 9}
BAD: dict[str, tuple[dict[str, Any], list[Any]]] = {
    # by the function: a good call, and what makes it a bad one
    "flash_attn_with_kvcache": (dict(zip(("q", "k_cache", "v_cache"), rows(q_len=1), strict=True)), BAD_CACHES),
    "flash_attn_func": (dict(zip("qkv", rows(), strict=True)), BAD_CALLS),
    "flash_attn_varlen_func": (DOCUMENTS, BAD_DOCUMENTS),
}


@pytest.mark.parametrize(
    ("function", "how", "error", "says"),
    [(function, *change) for function, (_, changes) in BAD.items() for change in changes],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_bad_arguments_write_nothing(f: Framework, function: str, how: Any, error: Any, says: str) -> None:
    given = BAD[function][0] | how
    named = f.arrays(given)
    with pytest.raises(error, match=says) as raised:
        getattr(module(f), function)(**named)
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    for key, value in named.items():
        np.testing.assert_array_equal(as_numpy(value) if isinstance(given[key], np.ndarray) else value, given[key])


REFUSED = {
    ".hopper": ("qv", "q_descale", "k_descale", "v_descale", "attention_chunk"),
    ".cute": (
        *("qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars"),
        *("block_sparse_tensors", "block_sparse_tensors_bwd"),
    ),
}


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in REFUSED.items() for name in names])
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_what_has_no_kernel_is_refused_by_name(f: Framework, of: str, name: str) -> None:
    takes = f is TORCH and name.endswith("_descale")  # a tensor, see test_float8_tensors_are_refused_with_the_reason
    words = f"{name}: expected a torch.Tensor" if takes else f"{name}(: expected None|=2: expected 0)"
    with pytest.raises(TypeError if takes else SpecError, match=f"^{words}"):
        run(f, "flash_attn_func", *rows(), of=of, **{name: 2})


def chunked(q: np.ndarray, k: np.ndarray, v: np.ndarray, size: int) -> np.ndarray:
    """One causal row with chunks in float64. The last query stands at the last key, as in FlashAttention 3."""
    at = np.arange(len(q)) + len(k) - len(q)
    rows = [(k[place // size * size : place + 1], v[place // size * size : place + 1]) for place in at]
    return np.concatenate([expected(each[None], *seen)[0] for each, seen in zip(q, rows)])


CHUNKED = {"rows": "flash_attn_func", "documents": "flash_attn_varlen_func", "cache": "flash_attn_with_kvcache"}


@pytest.mark.parametrize("of", CHUNKED)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_the_advice_for_chunks_computes_them(f: Framework, of: str) -> None:
    queries, keys = [5, 5], [14, 9] if of == "cache" else [14, 14]
    if of == "documents":
        queries, keys = [2, 6, 3], [5, 6, 8]
    rows = [(draw(n, HEADS, DIM), *draw(2, m, KV_HEADS, DIM, seed=m)) for n, m in zip(queries, keys)]
    named: dict[str, Any] = {"n": 3, "seqlen_q": 5, "seqlen_k": 14, "lengths": f.array(ints(*keys))}
    given: dict[str, Any] = {"cache_seqlens": ints(*keys)} if of == "cache" else {}
    call: dict[str, Any] = {"kv_lengths": named["lengths"]} if of == "cache" else {}
    if of == "documents":
        q, k, v = map(np.concatenate, zip(*rows))
        given = {"cu_seqlens_q": ints(0, *np.cumsum(queries)), "cu_seqlens_k": ints(0, *np.cumsum(keys))}
        given |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
        call = {"seq_info": SeqInfo.from_lengths(queries, keys)}
        named["at_q"] = f.array(ints(*np.concatenate([np.arange(m - n, m) for n, m in zip(queries, keys)])))
        named["at_k"] = f.array(ints(*np.concatenate([np.arange(m) for m in keys])))
    else:
        padded = [[np.resize(array, (n, *array.shape[1:])) for array, n in zip(row, (5, 14, 14))] for row in rows]
        q, k, v = map(np.stack, zip(*padded))
    with pytest.raises(SpecError, match="attention_chunk=3: expected 0; ") as refused:
        run(f, CHUNKED[of], q, k, v, of=".hopper", attention_chunk=3, **given)
    advised = re.search(r"attention\((.*)\) hides keys", str(refused.value))
    options = eval(f"dict({advised[1] if advised else ''})", named)
    out = as_numpy(f.frontend.attention(*map(f.array, (q, k, v)), causal=True, **call, **options))
    wanted = [chunked(*row, 3) for row in rows]
    np.testing.assert_allclose(out, np.concatenate(wanted) if of == "documents" else np.stack(wanted), 1e-4, 1e-5)


@pytest.mark.parametrize("hint", ["num_splits", "pack_gqa", "sm_margin"])
def test_hints_change_no_result(hint: str) -> None:
    q, k, v = rows()
    plain = run(TORCH, "flash_attn_func", q, k, v, of=".hopper", causal=True)
    hinted = run(TORCH, "flash_attn_func", q, k, v, of=".hopper", causal=True, **{hint: 3})
    np.testing.assert_array_equal(plain, hinted)


def test_a_window_may_be_a_tensor_on_the_host() -> None:
    q, k, v = rows()
    plain = run(TORCH, "flash_attn_func", q, k, v, window_size=(2, 1))
    arrays = map(torch.from_numpy, (q, k, v))
    out = module(TORCH).flash_attn_func(*arrays, window_size=torch.tensor([2, 1]))
    np.testing.assert_array_equal(out, plain)


def test_the_package_may_stand_in_for_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "flash_attn", module(TORCH))
    from flash_attn import flash_attn_func

    assert flash_attn_func is module(TORCH).flash_attn_func


def test_float8_tensors_are_refused_with_the_reason() -> None:
    """Without a GPU. ``test_flash3.py`` runs such calls on a stand-in for the kernel."""
    tensors = [torch.zeros(2, 5, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2)]
    function, factors = module(TORCH, ".hopper").flash_attn_func, torch.ones(2, 2)
    for given in ({}, {"q_descale": factors}):
        with pytest.raises(
            SpecError, match=r"^q: float8_e4m3fn cannot run here: device cpu: .*needs sm90; pass bfloat16"
        ):
            function(*tensors, **given)
    with pytest.raises(DTypeError, match=r"^k: expected float8_e4m3fn"):
        function(tensors[0], tensors[1].float(), tensors[2], k_descale=factors)
    with pytest.raises(TypeError, match=r"^v_descale: expected a torch.Tensor"):
        function(*tensors, v_descale=2)
