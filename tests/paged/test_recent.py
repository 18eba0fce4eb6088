"""Rings of exact newest tokens beside quantised pages, judged against attention on what each key was read as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from append_cases import make_append
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import PagedCall, judge, make_paged, paged_calls, paged_signatures
from quantised_appends import bits, expected_rings, pools_of, rings_of
from quantised_cases import KINDS, jax_arguments, quantised_call, run, torch_arguments, torch_pool
from ring_cases import with_rings

import jax_frontend
import torch_frontend
from attn_core import DTypeError, ShapeError, SpecError, Target, explain
from attn_core.backends import load
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call.pages import PagedKV

pytestmark = pytest.mark.sampled

CLAIMS = load("math", "cpu").FORWARD
HALF = {"dtype": "bfloat16", "return_lse": True, "head_dim": 16, "value_dim": 8}
FRAMEWORKS = {
    "torch": (torch_frontend, torch_arguments, lambda array: torch.from_numpy(np.array(array))),
    "jax": (jax_frontend, jax_arguments, jnp.asarray),
}


def drawn(data: Any, calls: Any) -> PagedCall:
    dtype, by = data.draw(st.sampled_from(KINDS))
    odd = dtype == "int4"
    fits = calls.filter(lambda call: call.spec.dtype != "float64").filter(
        lambda call: not (odd and (call.spec.head_dim % 2 or call.spec.value_dim % 2))
    )
    plain = data.draw(fits)
    call = quantised_call(replace(plain, spec=replace(plain.spec, return_lse=True)), dtype, by)
    return with_rings(call, data.draw(st.sampled_from((1, 2, 7, 16, 50)), label="recent"), plain.seed)


def accepted(call: PagedCall, backend: str) -> bool:
    return not explain(call.spec, Target("torch", "cpu"), backend).reasons(backend)


# Attention


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_torch(data: Any) -> None:
    call = drawn(data, paged_calls(CLAIMS))
    for backend in ("math", "sdpa_flash"):
        if accepted(call, backend):
            verdict = judge(call, run("torch", call, backend))
            assert verdict.ok, f"{backend}: {call}\n{verdict}"


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_jax_and_the_bits_of_torch(data: Any) -> None:
    call = drawn(data, paged_signatures(CLAIMS))
    for backend in ("jax_xla", "math", "sdpa_flash"):
        if backend != "jax_xla" and not accepted(call, backend):
            continue
        results = run("jax", call, backend)
        verdict = judge(call, results)
        assert verdict.ok, f"{backend}: {call}\n{verdict}"
        if backend != "jax_xla":
            for name, wanted in run("torch", call, backend).items():
                np.testing.assert_array_equal(results[name], wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_on_a_gpu(kind: tuple[str, str], framework: str) -> None:
    for new in (None, (5, 0, 1, 40)):
        fields = {**HALF, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "page_size": 16}
        call = with_rings(quantised_call(make_paged((300, 1, 33, 600), new, **fields), *kind), 64, seed=2)
        for backend in (None, "math", "triton_splitkv"):
            results = run(framework, call, backend, "cuda")
            verdict = judge(call, results)
            assert verdict.ok, f"{backend}: {call}\n{verdict}"
        if framework == "jax":
            for name, expected in run("torch", call, "triton_splitkv", "cuda").items():
                np.testing.assert_array_equal(results[name], expected)


@pytest.mark.cuda
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_wrong_rings_on_a_gpu_count_as_none(framework: str) -> None:
    fields = {**HALF, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "page_size": 16}
    call = with_rings(quantised_call(make_paged((300, 33, 600), None, **fields), "int4", "token"), 64)
    outs = []
    for rows in ([(-1, 0)] * 3, [(5, 0), (2**31 - 1, 0), (-9, 0)], [(1, 2**31 - 1), (-(2**31), -1), (0, 600)]):
        wrong = replace(call, inputs=call.inputs._replace(recent_rows=np.array(rows, np.int32)))
        outs.append(run(framework, wrong, "triton_splitkv", "cuda")["out"])
    assert np.isfinite(outs[0]).all()
    for other in outs[1:]:
        np.testing.assert_array_equal(other, outs[0])


def good(kind: tuple[str, str] = ("int4", "token"), **fields: Any) -> PagedCall:
    """Rings 1, 0 and -1 of five tokens; the second sequence is good from position 6 on."""
    call = with_rings(quantised_call(make_paged((13, 9, 30), (2, 9, 1), seed=3, **{**HALF, **fields}), *kind), 5)
    random, rows = np.random.default_rng(7), np.array([[1, 0], [0, 6], [-1, 0]], np.int32)
    rings = [np.full((2, 5, 2, dim), np.nan) for dim in (16, 8)]
    for ring, positions in ((1, range(8, 13)), (0, range(6, 9))):
        for position in positions:
            for array in rings:
                array[ring, position % 5] = random.integers(-8, 8, array.shape[2:]) / 4
    return replace(call, inputs=call.inputs._replace(k_recent=rings[0], v_recent=rings[1], recent_rows=rows))


def rolled(call: PagedCall, name: str, by: int = 1) -> Any:
    return np.roll(np.nan_to_num(getattr(call.inputs, name), nan=0.3), by, 1)


FAULTS: dict[str, Callable[[PagedCall], dict[str, Any]]] = {
    "keys off by one": lambda call: {"k_recent": rolled(call, "k_recent")},
    "values off by one": lambda call: {"v_recent": rolled(call, "v_recent", -1)},
    "another ring": lambda call: {"recent_rows": call.inputs.recent_rows[[1, 0, 2]]},
    "no ring": lambda call: {"recent_rows": np.array([[-1, 0]] * 3, np.int32)},
    "stale slots": lambda call: {"recent_rows": np.array([[1, 0], [0, 4], [-1, 0]], np.int32)},
    "one exact token less": lambda call: {"recent_rows": np.array([[1, 0], [0, 7], [-1, 0]], np.int32)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    call = good()
    assert judge(call, run("torch", call, "math")).ok
    wrong = replace(call, inputs=call.inputs._replace(**FAULTS[fault](call)))
    assert not judge(call, run("torch", wrong, "math")).ok


def test_wrong_values_on_a_device_read_the_pages() -> None:
    """Values that are traced are not checked by jax_xla: as on a GPU, they must be safe."""
    call = good()
    (q, k, v), keywords = jax_arguments(call)
    program = jax.jit(
        lambda rows: jax_frontend.paged_attention(q, k, v, **{**keywords, "recent_rows": rows}, backend="jax_xla")
    )

    def out(*first: int) -> np.ndarray:
        return np.asarray(program(jnp.asarray([first, (0, 6), (-1, 0)], jnp.int32)), np.float32)

    for ring, first in ((2, 0), (2**31 - 1, 0), (-9, 0), (1, 2**31 - 1)):
        np.testing.assert_array_equal(out(ring, first), out(-1, 0))
    np.testing.assert_array_equal(out(1, -5), out(1, 0))
    assert not np.array_equal(out(1, 0), out(-1, 0))


# Appending

APPENDS = {
    "decode": make_append([5, 9, 1, 30], None, rotary_dim=6, dtype="bfloat16"),
    "prompts": make_append([5, 30, 7, 12], [5, 19, 0, 1], dtype="bfloat16", interleaved=True),
}


def arrays_of(framework: str, call: Any, kind: tuple[str, str], rings: Any, rotates: bool) -> tuple[Any, Any]:
    """(pools, k and v), and the keywords, of an append."""
    pools, cast = pools_of(call, *kind), FRAMEWORKS[framework][2]
    own = pools.tensors if framework == "torch" else [jnp.array(each) for each in (*pools.pages, *pools.scales)]

    def rows(tensor: torch.Tensor) -> Any:
        return tensor.clone() if framework == "torch" else jnp.asarray(tensor.float().numpy(), str(tensor.dtype)[6:])

    keywords = {name: cast(table) for name, table in call.tables.items() if table is not None}
    keywords |= {"k_scales": own[2], "v_scales": own[3], "recent_rows": cast(rings[2])}
    keywords |= {"k_recent": rows(rings[0]), "v_recent": rows(rings[1])}
    if rotates:
        keywords["rotary"] = rows(call.cos), rows(call.sin)
    return [*own[:2], rows(call.k), rows(call.v)], keywords


@pytest.mark.parametrize("recent", [3, 16])
@pytest.mark.parametrize("rotates", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("name", APPENDS)
def test_append_writes_equal_bits_in_torch_and_jax(name: str, rotates: bool, recent: int) -> None:
    """A prompt longer than the ring leaves its newest tokens there."""
    call, kind = APPENDS[name], ("int4", "token") if recent == 3 else ("int8", "page")
    rings = rings_of(call, recent)
    flags = {"rotary_interleaved": True} if rotates and call.interleaved else {}
    written = {}
    for framework in FRAMEWORKS:
        arrays, keywords = arrays_of(framework, call, kind, rings, rotates)
        written[framework] = FRAMEWORKS[framework][0].append_kv(*arrays, **keywords, **flags)
        assert len(written[framework]) == 6
        if framework == "torch":
            assert written["torch"][4] is keywords["k_recent"]
        else:
            assert keywords["k_recent"].is_deleted() and keywords["v_recent"].is_deleted()
    for ours, theirs in zip(written["torch"], written["jax"], strict=True):
        np.testing.assert_array_equal(_bits(ours), _bits(theirs))
    for found, wanted in zip(written["torch"][4:], expected_rings(call, rings, rotates), strict=True):
        assert torch.equal(found, wanted)


def _bits(array: Any) -> np.ndarray:
    if "bfloat16" in str(array.dtype):
        array = array.float() if isinstance(array, torch.Tensor) else np.asarray(array, np.float32)
    return bits(array)


# Bad input

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no rows": (
        {"recent_rows": None},
        SpecError,
        "^recent_rows: expected an array because k_recent is one, got None; pass k_recent, v_recent, recent_rows$",
    ),
    "no values": ({"v_recent": None}, SpecError, "^v_recent: expected an array because k_recent is one, got None"),
    "only rows": (
        {"k_recent": None, "v_recent": None},
        SpecError,
        "^k_recent: expected an array because recent_rows is one, got None",
    ),
    "heads": (
        {"k_recent": np.zeros((2, 5, 3, 16))},
        ShapeError,
        r"^k_recent: expected shape \[rings, recent, 2, 16\], both 1 or more, got \[2, 5, 3, 16\]$",
    ),
    "no slots": ({"k_recent": np.zeros((2, 0, 2, 16))}, ShapeError, r"^k_recent: .*, got \[2, 0, 2, 16\]$"),
    "other rings": (
        {"v_recent": np.zeros((2, 6, 2, 8))},
        ShapeError,
        r"^v_recent: expected the rings of k_recent, \[2, 5\], got \[2, 6\]$",
    ),
    "shape of rows": (
        {"recent_rows": np.zeros((3,), np.int32)},
        ShapeError,
        r"^recent_rows: expected shape \[3, 2\], got \[3\]$",
    ),
    "dtype of rows": (
        {"recent_rows": np.zeros((3, 2), np.int16)},
        DTypeError,
        "^recent_rows: expected dtype int32, got int16; cast it to int32$",
    ),
    "ring": (
        {"recent_rows": np.array([[0, 0], [2, 0], [1, 0]], np.int32)},
        SpecError,
        r"^recent_rows\[1, 0\]=2: expected 0 to 1, because k_recent has 2 rings, or -1 for a sequence without one$",
    ),
    "first": (
        {"recent_rows": np.array([[0, 0], [1, 10], [-1, 0]], np.int32)},
        SpecError,
        r"^recent_rows\[1, 1\]=10: expected 0 to 9, the length of the sequence; its ring is good from this",
    ),
}


def bad_arguments(framework: str, changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    frontend, arguments, cast = FRAMEWORKS[framework]
    arrays, keywords = arguments(good())
    for name, value in changes.items():
        ring = name != "recent_rows" and value is not None
        keywords[name] = value if value is None else cast(np.asarray(value, np.float32) if ring else value)
        if ring:
            keywords[name] = keywords[name].bfloat16() if framework == "torch" else keywords[name].astype("bfloat16")
    return frontend, arrays, keywords


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", BAD)
def test_bad_rings_have_one_clear_error(name: str, framework: str) -> None:
    changes, error, says = BAD[name]
    frontend, arrays, keywords = bad_arguments(framework, changes)
    with pytest.raises(error, match=says):
        frontend.paged_attention(*arrays, **keywords)
    with pytest.raises(error, match=says):
        new = arrays[0][:, :2], arrays[0][:, :2, :8]
        frontend.append_kv(*arrays[1:], *new, **keywords)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rings_that_do_not_go_together_with_a_call(framework: str) -> None:
    frontend, (q, *pools), keywords = bad_arguments(framework, {})
    k, v = q[:, :2], q[:, :2, :8]
    wide = {name: keywords[name].float() if framework == "torch" else keywords[name].astype("float32") for name in RING}
    with pytest.raises(DTypeError, match=r"^k_recent: expected the dtype of q, bfloat16, got float32; cast it$"):
        frontend.paged_attention(q, *pools, **{**keywords, **wide})
    with pytest.raises(DTypeError, match=r"^v_recent: expected the dtype of v, bfloat16, got float32; cast it$"):
        frontend.append_kv(*pools, k, v, **{**keywords, "v_recent": wide["v_recent"]})
    twice = FRAMEWORKS[framework][2](np.array([[1, 0], [1, 0], [-1, 0]], np.int32))
    with pytest.raises(SpecError, match=r"^recent_rows: expected a ring of its own .* but ring 1 has 2$"):
        frontend.append_kv(*pools, k, v, **{**keywords, "recent_rows": twice})
    frontend.paged_attention(
        q,
        *pools,
        **{**keywords, "recent_rows": FRAMEWORKS[framework][2](np.array([[1, 13], [1, 9], [-1, 0]], np.int32))},
    )
    slots = FRAMEWORKS[framework][2](np.full(12, -1, np.int32))
    some = {name: keywords[name] for name in ("k_scales", "v_scales", "k_recent", "v_recent", "recent_rows")}
    with pytest.raises(SpecError, match=r"^k_recent: expected None with slot_mapping, which does not say positions"):
        frontend.append_kv(*pools, k, v, slot_mapping=slots, **some)
    exact = make_paged((13, 9, 30), (2, 9, 1), **HALF)
    as_floats = [FRAMEWORKS[framework][2](np.nan_to_num(pool).astype(np.float32)) for pool in exact.inputs[1:3]]
    as_floats = [pool.bfloat16() if framework == "torch" else pool.astype("bfloat16") for pool in as_floats]
    rings = {name: array for name, array in keywords.items() if "scales" not in name}
    tables = {"block_table": rings["block_table"], "seq_lens": rings["seq_lens"]}
    for name in (*RING, "recent_rows"):  # one alone is not dropped by the path of usual appends
        with pytest.raises(SpecError, match=f"^{name}: expected None, because pages in bfloat16 are exact"):
            frontend.append_kv(*as_floats, k[:3], v[:3], **tables, **{name: rings[name]})
    with pytest.raises(SpecError, match=r"^k_recent: expected None, because pages in bfloat16 are exact"):
        frontend.paged_attention(q, *as_floats, **rings)


RING = ("k_recent", "v_recent")


def test_refusals_and_sizes() -> None:
    call, sizes = good(), {**HALF, "head_dim": 64, "value_dim": 64}
    wide = with_rings(quantised_call(make_paged((13, 9), None, **sizes), "int4", "token"), 5)
    paged = call.spec.paged
    assert "recent=5" in repr(paged) and "recent" not in repr(replace(paged, recent=None))
    readers = {"math", "sdpa_flash", "triton_splitkv"}
    for backend, target in (("triton_splitkv", "sm90"), ("flash3", "sm90"), ("math", "cpu"), ("sdpa_flash", "cpu")):
        why = explain(wide.spec, Target("torch", target), backend).reasons(backend)
        assert why == () if backend in readers else any("pages in int4" in each for each in why)
    lacks = replace(load("triton_splitkv", "sm90").FORWARD, paged_recent=False)
    assert unmet_claims(lacks, wide.spec, "sm90") == (
        "recent=5 exact tokens beside pages: the Triton split-KV kernel has none",
    )
    text = str(torch_frontend.explain_paged(*torch_arguments(call)[0], **torch_arguments(call)[1]))
    assert "the newest 5 tokens also in bfloat16, 480 bytes per sequence" in " ".join(text.split())
    sizes = {"num_pages": 4, "page_size": 4, "width": 2}
    with pytest.raises(SpecError, match=r"^recent=5: expected None without a dtype"):
        PagedKV(**sizes, recent=5)
    for wrong in (0, -1, 2.5):
        with pytest.raises(SpecError, match=r"^recent=.*: expected 1 or more tokens, or None$"):
            PagedKV(**sizes, dtype="int8", scales="token", recent=wrong)


# Compilers, layers and meshes


def test_a_compiled_step_writes_and_reads_the_same() -> None:
    call = good()
    (q, *_), keywords = torch_arguments(call)
    new = torch.randn(12, 2, 16).bfloat16(), torch.randn(12, 2, 8).bfloat16()

    def step(q: Any, k_pages: Any, v_pages: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
        torch_frontend.append_kv(k_pages, v_pages, k, v, **keywords)
        return torch_frontend.paged_attention(q, k_pages, v_pages, **keywords, backend="math")

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        own = {name: tensor.clone() for name, tensor in keywords.items()}
        pools = torch_pool(call.inputs.k), torch_pool(call.inputs.v)
        results.append((function(q, *pools, *new, own), own["k_recent"].nan_to_num(), own["v_recent"].nan_to_num()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(results[0][1], keywords["k_recent"].nan_to_num())


@pytest.mark.parametrize("shards", [2, 4])
def test_a_mesh_splits_rings_with_their_heads(shards: int) -> None:
    """With four devices each one has all kv heads, and picks one with its rings."""
    call = with_rings(
        quantised_call(make_paged((9, 5), (2, 1), num_heads=8, num_kv_heads=2, seed=2), "int4", "token"), 4
    )
    (q, k, v), keywords = jax_arguments(call)
    wanted = jax_frontend.paged_attention(q, k, v, **keywords, backend="math")
    mesh = jax.make_mesh((shards,), ("heads",), devices=jax.devices()[:shards])
    here = "heads" if shards == 2 else None

    def put(array: Any, *names: Any) -> Any:
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names)))

    keywords |= {name: put(keywords[name], None, None, here) for name in ("k_scales", "v_scales", *RING)}
    program = jax.jit(lambda *arrays, **options: jax_frontend.paged_attention(*arrays, **options, backend="math"))
    actual = program(put(q, None, "heads"), *(put(pool, None, None, here) for pool in (k, v)), **keywords)
    np.testing.assert_allclose(actual, wanted, atol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_layer_reads_its_ring(framework: str) -> None:
    """With a ring as long as the text, the layer computes what it computes on exact pages."""
    outs, sizes = [], {"num_layers": 1, "num_pages": 4, "page_size": 4, "kv_heads": 2, "head_dim": 16}
    x = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    for options in ({}, {"kv_dtype": "int4", "recent": 6, "rings": 1}, {"kv_dtype": "int4", "recent": 2, "rings": 1}):
        cache = FRAMEWORKS[framework][0].PagedKVCache(**sizes, **options)
        cache.add("a")
        pages = cache.pages(0, cache.step(["a"], 6))
        if framework == "torch":
            from torch_frontend.module import Attention

            torch.manual_seed(0)
            layer = Attention(num_heads=4, num_kv_heads=2, in_features=32, head_dim=16, causal=True)
            with torch.no_grad():
                out, pool = layer(torch.from_numpy(x), pages=pages)
        else:
            from jax_frontend.linen import Attention as Linen

            linen = Linen(num_heads=4, num_kv_heads=2, head_dim=16, causal=True)
            weights = linen.init(jax.random.key(1), jnp.asarray(x)[None])
            out, pool = linen.apply(weights, jnp.asarray(x), pages=pages)
        assert len(pool) == (6 if options else 2)
        outs.append(np.asarray(out))
    np.testing.assert_allclose(outs[1], outs[0], atol=1e-6)
    assert np.abs(outs[2] - outs[0]).max() > 1e-3
