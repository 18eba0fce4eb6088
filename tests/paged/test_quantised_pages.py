"""Quantised pages in both frontends, judged against attention on the numbers ``stored * scale``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantised_numbers as quantised
import torch
from frameworks import BOTH, JAX, TORCH, Framework
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import PagedCall, judge, make_paged, paged_calls, paged_signatures
from quantised_appends import bits
from quantised_cases import KINDS, jax_arguments, quantised_call, run, torch_arguments, torch_pool

import jax_frontend
import torch_frontend
from attn_core import DTypeError, ShapeError, SpecError, Target, explain
from attn_core.backends import load, names
from attn_core.call.spec import BITS, PagedKV, bytes_in_layer
from attn_core.paged import quantised as numbers

pytestmark = pytest.mark.sampled

HALF = {"dtype": "bfloat16", "return_lse": True, "head_dim": 16, "value_dim": 8}
CLAIMS = load("math", "cpu").forward_claims
BACKENDS = ("math", "sdpa_flash")


def even(call: PagedCall, dtype: str) -> bool:
    """Whether a drawn call can have such pages."""
    odd = dtype == "int4" and (call.spec.head_dim % 2 or call.spec.value_dim % 2)
    return not odd and call.spec.dtype != "float64"


def accepted(call: PagedCall, backend: str) -> bool:
    return not explain(call.spec, Target("torch", "cpu"), backend).reasons(backend)


# Attention


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_torch(data: Any) -> None:
    dtype, by = data.draw(st.sampled_from(KINDS))
    plain = data.draw(paged_calls(CLAIMS).filter(lambda call: even(call, dtype)))
    call = quantised_call(replace(plain, spec=replace(plain.spec, return_lse=True)), dtype, by)
    for backend in BACKENDS:
        if accepted(call, backend):
            verdict = judge(call, run("torch", call, backend))
            assert verdict.ok, f"{backend}: {call}\n{verdict}"


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_jax_and_the_bits_of_torch(data: Any) -> None:
    dtype, by = data.draw(st.sampled_from(KINDS))
    plain = data.draw(paged_signatures(CLAIMS).filter(lambda call: even(call, dtype)))
    call = quantised_call(replace(plain, spec=replace(plain.spec, return_lse=True)), dtype, by)
    for backend in (*BACKENDS, "jax_xla"):
        if backend != "jax_xla" and not accepted(call, backend):
            continue
        results = run("jax", call, backend)
        verdict = judge(call, results)
        assert verdict.ok, f"{backend}: {call}\n{verdict}"
        if backend != "jax_xla":
            for name, expected in run("torch", call, backend).items():
                np.testing.assert_array_equal(results[name], expected)


@pytest.mark.cuda
@pytest.mark.on_gpus(
    only=lambda framework, dtype, **_: (framework, dtype) in (("jax", "bfloat16"), ("torch", "float16"))
)
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("backend", ["triton_splitkv", "math"])
def test_on_a_gpu(backend: str, kind: tuple[str, str], dtype: str, framework: str) -> None:
    for new in (None, (5, 0, 1, 40)):
        fields = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "page_size": 16}
        plain = make_paged((300, 1, 33, 600), new, dtype=dtype, return_lse=True, **fields)
        call = quantised_call(plain, *kind)
        results = run(framework, call, backend, "cuda")
        verdict = judge(call, results)
        assert verdict.ok, f"{call}\n{verdict}"
        if framework == "jax":
            np.testing.assert_array_equal(results["out"], run("torch", call, backend, "cuda")["out"])


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_append_on_a_gpu_writes_the_bits_of_a_cpu(kind: tuple[str, str]) -> None:
    call = quantised_call(make_paged((9, 4, 30, 7), (4, 0, 1, 7), seed=4, **HALF), *kind)
    numbers = {n: np.nan_to_num(getattr(call.inputs, n), nan=1.0) for n in ("k_scales", "v_scales")}
    call = replace(call, inputs=call.inputs._replace(**numbers))
    size = torch.exp2(torch.linspace(-90, 90, call.spec.q_len))[:, None, None]
    parts = [(torch.randn(call.spec.q_len, 2, dim) * size).bfloat16() for dim in (16, 8)]
    written = []
    for device in ("cpu", "cuda"):
        (_, *pools), keywords = torch_arguments(call, device)
        new = torch_frontend.append_kv(*pools, *(part.to(device) for part in parts), **keywords)
        written.append([bits(each.cpu()) for each in new])
    (_, *pools), keywords = jax_arguments(call)
    rows = [jnp.asarray(part.float().numpy(), jnp.bfloat16) for part in parts]
    pools, rows, keywords = jax.device_put((pools, rows, keywords), jax.devices("gpu")[0])
    written.append([bits(each) for each in jax_frontend.append_kv(*pools, *rows, **keywords)])
    for cpu, *others in zip(*written, strict=True):
        for other in others:
            np.testing.assert_array_equal(cpu, other)


FAULTS: dict[str, Callable[[PagedCall], Any]] = {
    "k scales of another page": lambda call: call.inputs._replace(k_scales=np.roll(call.inputs.k_scales, 1, 0)),
    "v scales of another page": lambda call: call.inputs._replace(v_scales=np.roll(call.inputs.v_scales, 1, 0)),
    "scales of another slot": lambda call: call.inputs._replace(v_scales=np.roll(call.inputs.v_scales, 1, 1)),
    "scales of another head": lambda call: call.inputs._replace(v_scales=np.flip(call.inputs.v_scales, -1).copy()),
    "page instead of token": lambda call: call.inputs._replace(
        v_scales=np.repeat(call.inputs.v_scales[:, :1], call.inputs.v_scales.shape[1], 1)
    ),
    "k for v": lambda call: call.inputs._replace(v_scales=call.inputs.k_scales),
    "three percent": lambda call: call.inputs._replace(v_scales=call.inputs.v_scales * np.float32(1.03)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", BITS)
def test_planted_faults_are_found(fault: str, dtype: str) -> None:
    plain = make_paged((13, 9, 30), (2, 9, 1), seed=3, **HALF)
    finite = plain.inputs._replace(**{n: np.nan_to_num(getattr(plain.inputs, n), nan=0.3) for n in "kv"})
    # Tokens of very different sizes, so that one token's scale is wrong for another.
    sizes = np.exp2(np.random.default_rng(1).uniform(-2, 2, (*finite.k.shape[:3], 1)))
    finite = finite._replace(k=finite.k * sizes, v=finite.v * sizes[::-1])
    call = quantised_call(replace(plain, inputs=finite), dtype, "token")
    assert judge(call, run("torch", call, "math")).ok
    wrong = replace(call, inputs=FAULTS[fault](call))
    assert not judge(call, run("torch", wrong, "math")).ok


def test_int4_halves_are_not_pairs() -> None:
    rows = np.arange(-7, 9)[None].clip(-7, 7)
    packed = quantised.pack_int4(rows)
    assert packed.dtype == np.uint8 and packed.shape == (1, 8)
    np.testing.assert_array_equal(quantised.unpack_int4(np, packed), rows)
    assert packed[0, 0] == (rows[0, 0] & 15) | ((rows[0, 8] & 15) << 4)


# The bits that append_kv writes


def rows_to_quantise(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((400, 3, 16)) * np.exp2(random.uniform(-130, 120, (400, 3, 1)))
    rows[::3] = np.round(rows[::3] * 2) / 2  # ties
    rows[:6] = np.array([0.0, -0.0, 3.4028235e38, 1e-44, 448.0, 127.0])[:, None, None]
    rows[6, 0, 0], rows[7, 1, 3], rows[8, 2] = np.nan, np.inf, -np.inf
    return rows.astype(np.float32)


@pytest.mark.parametrize("by", ["token", "page"])
@pytest.mark.parametrize("dtype", BITS)
def test_numpy_torch_and_jax_append_to_the_same_bits(dtype: str, by: str) -> None:
    rows = rows_to_quantise(5)
    if by == "token":
        scales, factors = quantised.token_scales(rows, dtype)
        others = numbers.token_scales(torch, torch.from_numpy(rows), dtype)
        programs = jax.jit(lambda rows: numbers.token_scales(jnp, rows, dtype))(rows)
        for one, other, third in zip((scales, factors), others, programs, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))
            np.testing.assert_array_equal(bits(one), bits(third))
    else:
        random = np.random.default_rng(0)
        scales = np.exp2(random.uniform(-40, 40, rows.shape[:2])).astype(np.float32)
        scales[:5, 0] = np.nan, 0.0, -1.0, np.inf, 1e-40
        rows = np.where(np.abs(rows) > 1e30, rows, random.standard_normal(rows.shape) * scales[..., None] * 200)
        rows = rows.astype(np.float32)
        factors = quantised.page_factors(scales)
        np.testing.assert_array_equal(bits(factors), bits(numbers.page_factors(torch, torch.from_numpy(scales))))
        np.testing.assert_array_equal(bits(factors), bits(jax.jit(partial(numbers.page_factors, jnp))(scales)))
    ours = numbers.stored_numbers(torch, torch.from_numpy(rows), torch.from_numpy(factors), dtype)
    theirs = jax.jit(lambda rows, factors: numbers.stored_numbers(jnp, rows, factors, dtype))(rows, factors)
    np.testing.assert_array_equal(bits(ours), bits(theirs))
    expected = quantised.stored_numbers(rows, factors, dtype)
    if dtype == "float8_e4m3fn":
        ours = ours.float()
    np.testing.assert_array_equal(
        quantised.unpack_int4(np, ours.numpy()) if dtype == "int4" else ours.numpy(), expected
    )


@pytest.mark.parametrize("dtype", BITS)
def test_the_largest_number_is_used_and_errors_are_half_a_step(dtype: str) -> None:
    rows = rows_to_quantise(2)[9:]
    scales, factors = quantised.token_scales(rows, dtype)
    stored = quantised.stored_numbers(rows, factors, dtype).astype(np.float64)
    usual = np.abs(rows).max(-1) > 2.0**-100
    assert (scales > 0).all() and (np.abs(stored).max(-1)[usual] == quantised.LARGEST[dtype]).all()
    step = np.maximum(np.abs(stored) / 8, 2.0**-9) if dtype == "float8_e4m3fn" else 1.0
    error = np.abs(stored * scales[..., None] - rows.astype(np.float64)) / scales[..., None]
    assert (error <= 0.5 * step + 2e-3 * np.abs(stored))[usual].all()


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("new", [None, (4, 0, 1, 7)], ids=["decode", "prefill"])
def test_append_writes_equal_bits_in_torch_and_jax(kind: tuple[str, str], new: Any) -> None:
    call = quantised_call(make_paged((9, 4, 30, 7), new, seed=4, **HALF), *kind)
    if kind[1] == "page":
        numbers = {n: np.nan_to_num(getattr(call.inputs, n), nan=1.0) for n in ("k_scales", "v_scales")}
        call = replace(call, inputs=call.inputs._replace(**numbers))
    random = np.random.default_rng(1)
    parts = [random.standard_normal((call.spec.q_len, 2, dim)).astype(np.float32) for dim in (16, 8)]
    (_, *pools), keywords = torch_arguments(call)
    (_, *jax_pools), jax_keywords = jax_arguments(call)
    before = [bits(each).copy() for each in (*pools, keywords["k_scales"])]
    written = torch_frontend.append_kv(*pools, *(torch.from_numpy(part).bfloat16() for part in parts), **keywords)
    others = jax_frontend.append_kv(*jax_pools, *(jnp.asarray(part, jnp.bfloat16) for part in parts), **jax_keywords)
    assert len(written) == len(others) == 4 and written[0] is pools[0] and written[2] is keywords["k_scales"]
    for ours, theirs in zip(written, others, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(theirs))
    changed = [not np.array_equal(bits(each), old) for each, old in zip(written[:3], before, strict=True)]
    assert changed == [True, True, kind[1] == "token"]
    assert all(pool.is_deleted() for pool in jax_pools), "the pools are donated"
    assert jax_keywords["k_scales"].is_deleted() is (kind[1] == "token")


# Bad input

SIZES = {"head_dim": 16, "value_dim": 8, "dtype": "bfloat16"}


def good(dtype: str, by: str = "token") -> PagedCall:
    return quantised_call(make_paged((9, 5), (2, 1), seed=1, **SIZES), dtype, by)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scales": (
        {"k_scales": None},
        SpecError,
        r"^k_scales: expected the scales of pages in int8, float32 of shape .*, got None$",
    ),
    "no v scales": ({"v_scales": None}, SpecError, "^v_scales: expected the scales of pages in int8, .*got None$"),
    "dtype of scales": (
        {"k_scales": lambda array: array.astype(np.float16)},
        DTypeError,
        "^k_scales: expected dtype float32, got float16; cast it$",
    ),
    "shape of scales": (
        {"v_scales": lambda array: array[:, :1]},
        ShapeError,
        r"^v_scales: expected shape \[7, 2\] for scales by page, or \[7, 4, 2\] by token, got \[7, 1, 2\]$",
    ),
    "two kinds": (
        {"v_scales": lambda array: array[:, 0]},
        ShapeError,
        "^v_scales: expected scales by token as k_scales, got scales by page$",
    ),
    "zero": (
        {"k_scales": np.zeros_like},
        SpecError,
        r"^k_scales\[\d, 0, 0\]=0.0: expected a positive, finite scale",
    ),
    "negative": ({"v_scales": lambda array: -array}, SpecError, r"^v_scales\[\d, 0, 0\]=-.*: expected a positive"),
    "NaN": ({"v_scales": lambda array: array * np.nan}, SpecError, r"^v_scales\[\d, 0, 0\]=nan: expected a positive"),
    "infinite": ({"v_scales": lambda array: array * np.inf}, SpecError, r"^v_scales\[\d, 0, 0\]=inf: expected a pos"),
}


def arguments(f: Framework, call: PagedCall) -> Any:
    return (torch_arguments if f is TORCH else jax_arguments)(call)


@pytest.mark.parametrize("f", BOTH, ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_scales_have_one_clear_error(name: str, f: Framework) -> None:
    changes, error, says = BAD[name]
    call = good("int8")
    arrays, keywords = arguments(f, call)
    for key, change in changes.items():
        keywords[key] = None if change is None else f.array(change(getattr(call.inputs, key)))
    with pytest.raises(error, match=says):
        f.frontend.paged_attention(*arrays, **keywords)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_dtypes_that_do_not_go_together(f: Framework) -> None:
    (q, k, v), keywords = arguments(f, good("float8_e4m3fn"))
    frontend = f.frontend
    to = (lambda array, name: array.to(getattr(torch, name))) if f is TORCH else (lambda a, n: a.astype(n))
    with pytest.raises(DTypeError, match=r"^v_pages: expected the dtype of k_pages, float8_e4m3fn, got bfloat16"):
        frontend.paged_attention(q, k, to(v, "bfloat16"), **keywords)
    with pytest.raises(SpecError, match=r"^k_scales: expected None, because pages in bfloat16 have no scales$"):
        frontend.paged_attention(q, to(k, "bfloat16"), to(v, "bfloat16"), **keywords)
    with pytest.raises(DTypeError, match=r"^q: expected one of .* beside quantised pages .*, got int32"):
        frontend.paged_attention(to(q, "int32"), k, v, **keywords)
    new = q[:3, :2], q[:3, :2, :8]
    with pytest.raises(DTypeError, match=r"^k: expected one of .*, got int32; cast it$"):
        frontend.append_kv(k, v, to(new[0], "int32"), new[1], **keywords)
    with pytest.raises(ShapeError, match=r"^v: expected \[tokens, kv_heads, dim\] = \[3, 2, 8\], got \[3, 2, 4\]"):
        frontend.append_kv(k, v, new[0], new[1][..., :4], **keywords)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_append_refuses_page_scales_that_are_not_positive(f: Framework) -> None:
    (q, k, v), keywords = arguments(f, good("int8", "page"))
    before = bits(k).copy()
    with pytest.raises(SpecError, match=r"^v_scales\[\d, 0\]=-?0.0: expected a positive, finite scale"):
        f.frontend.append_kv(k, v, q[:3, :2], q[:3, :2, :8], **{**keywords, "v_scales": keywords["v_scales"] * 0})
    np.testing.assert_array_equal(bits(k), before)


def test_specs_of_quantised_pages() -> None:
    sizes = {"num_pages": 7, "page_size": 4, "width": 3}
    for fields, error, says in (
        ({"dtype": "int2", "scales": "token"}, DTypeError, "^dtype='int2': expected one of float8_e4m3fn, int8, int4"),
        ({"dtype": "int8"}, SpecError, "^scales=None: expected one of page, token"),
        ({"scales": "page"}, SpecError, "^scales='page': expected None without a dtype"),
    ):
        with pytest.raises(error, match=says):
            PagedKV(**sizes, **fields)
    assert bytes_in_layer("int4", 2, (64, 32), 1 / 4) == 2 * (48 + 8 / 4)
    assert repr(PagedKV(**sizes)) == "PagedKV(num_pages=7, page_size=4, width=3)"
    spec = good("int8").spec
    with pytest.raises(DTypeError, match=r"^q: expected bfloat16, float16 or float32 with int8 pages, got float64"):
        replace(spec, dtype="float64")
    with pytest.raises(ShapeError, match=r"^value_dim=7: expected an even number"):
        replace(spec, paged=replace(spec.paged, dtype="int4"), value_dim=7)


def test_other_backends_refuse_by_name() -> None:
    readers = set()
    for name in names():
        claims = load(name, "cuda").forward_claims if name != "sdpa_flash" else load(name, "cpu").forward_claims
        if claims.page_dtypes:
            readers.add(name)
            assert claims.paged and set(claims.page_dtypes) == set(BITS)
    assert readers == {"math", "jax_xla", "sdpa_flash", "triton_splitkv"}
    call = quantised_call(
        make_paged((9, 5), head_dim=64, value_dim=64, dtype="bfloat16", page_size=16), "int8", "token"
    )
    reasons = explain(call.spec, Target("torch", "sm90"), "flash3").reasons("flash3")
    assert any("pages in int8" in reason and "reads no quantised ones" in reason for reason in reasons)
    old = explain(replace(call.spec, paged=replace(call.spec.paged, dtype="float8_e4m3fn")), Target("torch", "sm80"))
    assert any("from sm89 on" in reason for reason in old.reasons("triton_splitkv"))


# Caches, layers and compilers


@pytest.mark.parametrize("dtype", BITS)
def test_caches_of_both_frontends_agree_after_a_fork(dtype: str) -> None:
    sizes = {"num_layers": 1, "num_pages": 8, "page_size": 4, "kv_heads": 2, "head_dim": 16, "kv_dtype": dtype}
    ours = torch_frontend.PagedKVCache(**sizes, dtype=torch.bfloat16)
    theirs = jax_frontend.PagedKVCache(**sizes, dtype=jnp.bfloat16)
    random = np.random.default_rng(0)
    for names_, new in ((["a"], 6), (["a", "b"], 1), (["b"], 3)):
        arrays = [random.standard_normal((new * len(names_), heads, 16)) for heads in (4, 2, 2)]
        outs = []
        for cache in (ours, theirs):
            if len(cache.allocator) == 0:
                cache.add("a")
            elif "b" in names_ and len(cache.allocator) == 1:
                cache.fork("a", "b")  # shares a page that is not full
            step = cache.step(names_, new)
            q, k, v = ((TORCH if cache is ours else JAX).array(each, "bfloat16") for each in arrays)
            cache.update(0, k, v, step)
            outs.append(cache.attend(0, q, step, backend="math"))
        np.testing.assert_array_equal(outs[0].float().numpy(), np.asarray(outs[1], np.float32))
    for one, other in zip((*ours.k_pages, *ours.v_scales), (*theirs.k_pages, *theirs.v_scales), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    assert f"{dtype} with a scale per token and kv head" in repr(ours) and ours.stored == theirs.stored


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_caches_refuse_unknown_dtypes(f: Framework) -> None:
    sizes = {"num_layers": 1, "num_pages": 8, "page_size": 4, "kv_heads": 2, "head_dim": 15}
    for value in ("int2", "fp8", 8):
        with pytest.raises(SpecError, match=r"^kv_dtype=.*: expected one of float8_e4m3fn, int8, int4, or None"):
            f.frontend.PagedKVCache(**sizes, kv_dtype=value)
    with pytest.raises(ShapeError, match=r"^head_dim=15: expected an even number, because int4"):
        f.frontend.PagedKVCache(**sizes, kv_dtype="int4")


def test_caches_take_the_dtypes_of_their_framework() -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "num_pages": 2, "page_size": 4, "kv_heads": 2, "head_dim": 16}
    dtypes = ("float8_e4m3fn", torch.float8_e4m3fn, jnp.float8_e4m3fn), ("int8", torch.int8, jnp.int8)
    for name, in_torch, in_jax in dtypes:
        named = torch_frontend.PagedKVCache(**sizes, kv_dtype=name)
        assert torch_frontend.PagedKVCache(**sizes, kv_dtype=in_torch).stored == named.stored
        assert jax_frontend.PagedKVCache(**sizes, kv_dtype=in_jax).stored == named.stored
    assert jax_frontend.PagedKVCache(**sizes, kv_dtype=jnp.int4).stored.startswith("int4")
    wrong_ones = (torch_frontend, torch.int16), (jax_frontend, jnp.float8_e5m2), (jax_frontend, jnp.array(8))
    for frontend, wrong in wrong_ones:
        with pytest.raises(SpecError, match=r"^kv_dtype=.*: expected one of float8_e4m3fn, int8, int4, or None"):
            frontend.PagedKVCache(**sizes, kv_dtype=wrong)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_layer_decodes_from_quantised_pages(f: Framework) -> None:
    from jax_frontend.linen import Attention
    from torch_frontend.module import Attention as Module

    sizes = {"num_kv_heads": 2, "head_dim": 16, "causal": True}
    x, outs = f.array(np.random.default_rng(0).standard_normal((6, 32)), "float32"), {}
    if f is TORCH:
        layer: Any = torch.no_grad()(Module(num_heads=4, in_features=32, **sizes))
    else:
        linen = Attention(num_heads=4, **sizes)
        layer = partial(linen.apply, linen.init(jax.random.key(1), x[None]))
    for dtype in (None, "int8"):
        cache = f.frontend.PagedKVCache(num_layers=1, num_pages=4, page_size=4, kv_heads=2, head_dim=16, kv_dtype=dtype)
        cache.add("a")
        outs[dtype], pool = layer(x, pages=cache.pages(0, cache.step(["a"], 6)))
        assert len(pool) == (2 if dtype is None else 4)
    assert 0 < abs(outs[None] - outs["int8"]).max() < 0.02


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_mesh_splits_scales_with_their_heads(kind: tuple[str, str], shards: int) -> None:
    """With four devices each one has all kv heads, and picks one with its scales."""
    call = quantised_call(make_paged((9, 5), (2, 1), num_heads=8, num_kv_heads=2, seed=2), *kind)
    (q, k, v), keywords = jax_arguments(call)
    expected = jax_frontend.paged_attention(q, k, v, **keywords, backend="math")
    mesh = jax.make_mesh((shards,), ("heads",), devices=jax.devices()[:shards])
    here = "heads" if shards == 2 else None

    def put(array: Any, *names_: Any) -> Any:
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names_)))

    by = (None, None, here) if kind[1] == "token" else (None, here)
    pools = (put(pool, None, None, here) for pool in (k, v))
    keywords |= {name: put(keywords[name], *by) for name in ("k_scales", "v_scales")}
    program = jax.jit(lambda *arrays, **options: jax_frontend.paged_attention(*arrays, **options, backend="math"))
    actual = program(put(q, None, "heads"), *pools, **keywords)
    assert actual.sharding.is_equivalent_to(put(q, None, "heads").sharding, 3)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", BITS)
def test_a_compiled_step_writes_and_reads_the_same(dtype: str) -> None:
    call = good(dtype)
    (q, *_), keywords = torch_arguments(call)
    new = torch.randn(3, 2, 16).bfloat16(), torch.randn(3, 2, 8).bfloat16()

    def step(q: Any, k_pages: Any, v_pages: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
        torch_frontend.append_kv(k_pages, v_pages, k, v, **keywords)
        return torch_frontend.paged_attention(q, k_pages, v_pages, **keywords, backend="math")

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        own = {name: tensor.clone() for name, tensor in keywords.items()}
        pools = torch_pool(call.inputs.k), torch_pool(call.inputs.v)
        results.append((function(q, *pools, *new, own), bits(pools[0]), own["k_scales"]))
    assert torch.equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    np.testing.assert_array_equal(bits(results[0][2]), bits(results[1][2]))
