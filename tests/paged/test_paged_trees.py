"""Tests key_ranges with keys and values in pages: trees of drafts, as speculative decoding verifies them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import cpu_meshes
import torch
from both_frontends import DEVICES, FRAMEWORKS, module_on, same_bits, target
from frameworks import EVERYWHERE, Framework, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from paged_cases import (
    PagedCall,
    conforms,
    explained,
    jax_arguments,
    jax_on,
    judge,
    make_paged,
    paged_backends,
    run,
    torch_arguments,
)
from torch._dynamo.testing import CompileCounterWithBackend

import jax_frontend
import torch_frontend
from attn_core import DeviceError, DTypeError, ShapeError, SpecError, explain, masks
from attn_core.backends import math as math_backend
from attn_core.correctness.reference import gather_pages

pytestmark = pytest.mark.sampled

CLAIMED = [
    pytest.param(name, device, marks=(pytest.mark.cuda,) if device == "cuda" else (), id=f"{name}-{device}")
    for name, device in paged_backends()
    if module_on(name, device).forward_claims.key_ranges
]
HALF = {"dtype": "float16", "head_dim": 64, "value_dim": 64}


@st.composite
def forests(draw: Any) -> tuple[list[int], list[list[int]]]:
    """(tokens before the drafts, parents of the drafts) of some sequences."""
    before = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    trees = []
    for _ in before:
        path, parents = [-1], []
        for token in range(draw(st.integers(0, 9))):
            depth = draw(st.integers(1, len(path)))  # below the last token, or below one of its ancestors
            path = path[:depth]
            parents.append(path[-1])
            path.append(token)
        trees.append(parents)
    return before, trees


def tree_call(before: list[int], trees: list[list[int]], **fields: Any) -> PagedCall:
    """The call that verifies drafts; ``attn_core.masks.tree`` takes the trees of all sequences end to end."""
    new = [len(parents) for parents in trees]
    call = make_paged([n + count for n, count in zip(before, new)], new, ranges=(1, 1), **fields)
    starts = np.cumsum([0, *new])
    parents = [p if p < 0 else p + start for tree, start in zip(trees, starts) for p in tree]
    ranges = masks.tree(np.array(parents, np.int32)) if parents else np.zeros((1, 1, 0, 1, 2), np.int32)
    return replace(call, inputs=call.inputs._replace(key_ranges=ranges))


def along_paths(call: PagedCall, trees: list[list[int]]) -> np.ndarray:
    """The output by another way: each draft as the last token of a sequence of its own, without ranges."""
    packed, inputs = gather_pages(replace(call.spec, key_ranges_shape=None), call.inputs._replace(key_ranges=None))
    rows, at = [], 0
    for sequence, parents in enumerate(trees):
        start, stop = inputs.cu_seqlens_k[sequence : sequence + 2]
        keys, values = (np.asarray(x[start:stop], np.float64) for x in inputs[1:3])
        for token in range(len(parents)):
            path, node = [], token
            while node >= 0:
                path.append(len(keys) - len(parents) + node)
                node = parents[node]
            seen = [*range(len(keys) - len(parents)), *sorted(path)]
            head = []
            for h in range(packed.num_heads):
                scores = keys[seen, h // packed.group_size] @ np.asarray(inputs.q[at, h], np.float64) * packed.scale
                weights = np.exp(scores - scores.max())
                head.append(weights / weights.sum() @ values[seen, h // packed.group_size])
            rows.append(head)
            at += 1
    return np.array(rows).reshape(call.spec.out_shape)


@given(forests())
def test_the_reference_of_a_tree_is_attention_along_each_path(forest: Any) -> None:
    before, trees = forest
    call = tree_call(before, trees, dtype="float64")
    if call.spec.q_len:
        np.testing.assert_allclose(run("torch", call, "math")["out"], along_paths(call, trees), atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), CLAIMED)
def test_trees(backend: str, device: str, framework: str) -> None:
    fields = HALF if device == "cuda" else {}
    compiles = framework == "jax"
    ran = []

    @settings(max_examples=3 if compiles else 30)
    @given(forests(), st.booleans(), st.sampled_from((1, 4, 16)))
    def every_forest(forest: Any, causal: bool, page_size: int) -> None:
        call = tree_call(*forest, causal=causal, page_size=page_size, return_lse=True, sinks=True, **fields)
        ran.append(conforms(framework, call, backend, device))

    if explain(tree_call([3], [[-1]], **fields).spec, target(framework, device), backend).reasons(backend):
        pytest.skip(f"{backend} does not run here in {framework}")
    every_forest()
    assert all(ran)


@pytest.mark.parametrize("fault", ["a range ends one too early", "axes swapped", "the last sequence's shifted"])
def test_wrong_ranges_are_noticed(fault: str) -> None:
    call = tree_call([5, 0, 9], [[-1, 0, 1, 0, 3], [-1, 0], [-1, 0, 0, 2, 2]])
    right = call.inputs.key_ranges
    wrong = right.copy()
    if fault == "a range ends one too early":
        wrong[0, 0, 1, 0, 1] -= 1
    elif fault == "axes swapped":
        wrong = np.ascontiguousarray(wrong[:, :, ::-1])
    else:
        wrong[0, 0, -5:] = (wrong[0, 0, -5:] + 1).clip(0, 12)
    results = run("torch", replace(call, inputs=call.inputs._replace(key_ranges=wrong)), "math")
    assert judge(call, run("torch", call, "math")).ok and not judge(call, results).ok


@given(forests())
def test_both_frameworks_have_the_same_bits(forest: Any) -> None:
    call = tree_call(*forest, host_tables=True)
    if call.spec.q_len:
        assert same_bits(run("torch", call, "math"), run("jax", call, "math")) == []


@settings(max_examples=40)
@given(forests(), st.sampled_from(((1, 1), (1, 2), (2, 2))), st.integers(0, 99))
def test_rows_of_padded_keys(forest: Any, ranges: tuple[int, int], seed: int) -> None:
    """What ``math`` does on a GPU, where the lengths are unknown on the host; here on a CPU, with any ranges."""
    before, trees = forest
    new = [len(parents) for parents in trees]
    call = make_paged([n + c for n, c in zip(before, new)], new, ranges=ranges, return_lse=True, seed=seed)
    if not call.spec.q_len:
        return
    (q, k, v), tables = torch_arguments(call)
    inputs = math_backend.PagedInputs(q, k, v, **{n: torch.as_tensor(t) for n, t in tables.items()})
    out, lse = math_backend._as_dense_rows(call.spec, inputs)
    verdict = judge(call, {"out": out.numpy(), "lse": lse.numpy()})
    assert verdict.ok, verdict


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_programs_take_new_trees(device: str) -> None:
    """The ranges are data: torch.compile and jax.jit compile once for trees of one size."""
    fields = HALF if device == "cuda" else {}
    trees = [[-1, 0, 1, 1], [-1, 0]], [[-1, 0, 0, 0], [-1, -1]]
    calls = [tree_call([9, 6], each, return_lse=True, **fields) for each in trees]

    def attend(q: Any, k: Any, v: Any, tables: dict[str, Any]) -> Any:
        return torch_frontend.paged_attention(q, k, v, **tables, max_len_q=4, return_lse=True)

    counted = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=counted)
    program = jax.jit(lambda x, t: jax_frontend.paged_attention(*x, **t, max_len_q=4, return_lse=True))
    for call in calls:
        arrays, tables = torch_arguments(call, device)
        out, lse = (x.cpu().numpy() for x in compiled(*arrays, tables))
        verdict = judge(call, {"out": out, "lse": lse})
        assert verdict.ok, verdict
        with jax_on(call, device):
            out, lse = map(np.asarray, program(*jax_arguments(call)))
        verdict = judge(call, {"out": out, "lse": lse})
        assert verdict.ok, verdict
    assert counted.frame_count == 1 and program._cache_size() == 1


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
@pytest.mark.parametrize(("heads", "kv_heads", "of_heads"), [(4, 2, 2), (4, 2, 1), (4, 1, 1), (6, 3, 3), (4, 4, 4)])
def test_meshes_split_the_heads_of_ranges(
    heads: int, kv_heads: int, of_heads: int, backend: str, four_devices: None
) -> None:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "ranges": (of_heads, 2), "return_lse": True}
    call = make_paged((9, 6, 20), (4, 3, 1), **sizes)
    mesh = cpu_meshes.mesh((2,), ("model",))
    program = jax.jit(
        lambda q, k, v, t: jax_frontend.paged_attention(q, k, v, **t, max_len_q=4, return_lse=True, backend=backend)
    )
    with jax_on(call, "cpu"):
        arrays, tables = jax_arguments(call)
        split = [jax.device_put(arrays[0], NamedSharding(mesh, P(None, "model")))]
        over = "model" if kv_heads % 2 == 0 else None
        split += [jax.device_put(pool, NamedSharding(mesh, P(None, None, over))) for pool in arrays[1:]]
        out, lse = program(*split, tables)
        assert out.sharding.spec[1] == "model"
        verdict = judge(call, {"out": np.asarray(out), "lse": np.asarray(lse)})
        assert verdict.ok, verdict
        # A batch of masks: the second hides every new token.
        ranges = tables.pop("key_ranges")
        many = jax.vmap(lambda r: program(*arrays, {**tables, "key_ranges": r}))
        first, second = np.asarray(many(jnp.stack([ranges, jnp.zeros_like(ranges)]))[0])
    np.testing.assert_allclose(first, np.asarray(out), atol=1e-6)
    nothing = replace(call, inputs=call.inputs._replace(key_ranges=np.zeros_like(call.inputs.key_ranges)))
    verdict = judge(nothing, {"out": second})
    assert verdict.ok, verdict


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
@pytest.mark.parametrize("axes", [1, 2])
def test_meshes_split_the_heads_of_slopes(axes: int, backend: str, four_devices: None) -> None:
    call = make_paged((9, 6, 20), (4, 3, 1), alibi=axes, starts=True, return_lse=True)
    mesh = cpu_meshes.mesh((2,), ("model",))
    program = jax.jit(
        lambda q, k, v, t: jax_frontend.paged_attention(q, k, v, **t, max_len_q=4, return_lse=True, backend=backend)
    )
    with jax_on(call, "cpu"):
        arrays, tables = jax_arguments(call)
        split = [jax.device_put(arrays[0], NamedSharding(mesh, P(None, "model")))]
        split += [jax.device_put(pool, NamedSharding(mesh, P(None, None, "model"))) for pool in arrays[1:]]
        over = P("model") if axes == 1 else P(None, "model")
        tables["alibi_slopes"] = jax.device_put(tables["alibi_slopes"], NamedSharding(mesh, over))
        out, lse = program(*split, tables)
        assert out.sharding.spec[1] == "model"
    verdict = judge(call, {"out": np.asarray(out), "lse": np.asarray(lse)})
    assert verdict.ok, verdict


@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_a_cache_verifies_a_tree(framework: Framework) -> None:
    """A tree in a step of a cache gives what each of its paths gives as a fork of its own."""
    random = np.random.default_rng(3)
    parents, count = [-1, 0, 1, 0], 4
    old, new = ([random.standard_normal((n, 2, 16)).astype(np.float32) for _ in "qkv"] for n in (5, count))
    with framework.as_default(), torch.no_grad():
        place = framework.device if framework.name == "torch" else None
        sizes = {"num_layers": 1, "num_pages": 30, "page_size": 4, "kv_heads": 2, "head_dim": 16, "device": place}
        cache = framework.frontend.PagedKVCache(**sizes)

        def step(name: str, tokens: list[np.ndarray], **options: Any) -> np.ndarray:
            at = cache.step([name], len(tokens[0]))
            q, k, v = map(framework.array, tokens)
            cache.update(0, k, v, at)
            return as_numpy(cache.attend(0, q, at, **options))

        cache.add("whole")
        step("whole", old)
        for leaf in range(count):
            cache.fork("whole", f"path {leaf}")
        out = step("whole", new, key_ranges=masks.tree(parents))
        rough = 3e-6 if framework.device == "cpu" else 1e-4
        for leaf, path in enumerate(([0], [0, 1], [0, 1, 2], [0, 3])):
            alone = step(f"path {leaf}", [each[path] for each in new])
            np.testing.assert_allclose(out[leaf], alone[-1], atol=rough, rtol=rough)


def wrong_ranges(ranges: np.ndarray) -> dict[str, tuple[Any, type[Exception], str]]:
    late, backwards = ranges.copy(), ranges.copy()
    late[0, 0, 1, 0, 1], backwards[0, 0, 2, 0] = 7, (3, 2)
    return {
        "shape": (ranges[0], ShapeError, r"key_ranges: expected shape \[1, kv_heads or 1, tokens of q, ranges, 2\]"),
        "keys": (np.repeat(ranges, 2, 2), ShapeError, r"\[1 or 1, 2 or 1, 6, 1 or 2, 2\], got \[1, 1, 12, 1, 2\]"),
        "dtype": (ranges.astype(np.int64), DTypeError, "key_ranges: expected dtype int32, got int64; cast it to int32"),
        "beyond q": (late, SpecError, r"stop <= q_len \(6\), got start 1 and stop 7 for key 1"),
        "backwards": (backwards, SpecError, "got start 3 and stop 2 for key 2"),
    }


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("name", wrong_ranges(np.zeros((1, 1, 6, 1, 2), np.int32)))
@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_wrong_ranges_have_errors(framework: Framework, name: str, as_array: bool) -> None:
    call = tree_call([9, 6], [[-1, 0, 1, 1], [-1, 0]], host_tables=True)
    ranges, error, words = wrong_ranges(call.inputs.key_ranges)[name]
    if as_array and framework.device != "cpu" and error is SpecError:
        pytest.skip("the values of ranges on a GPU are not read; kernels only compare them")
    in_torch = framework.name == "torch"
    with jax_on(call, framework.device):
        arrays, tables = torch_arguments(call, framework.device) if in_torch else jax_arguments(call)
        if as_array:
            with jax.enable_x64(True):
                ranges = torch.tensor(ranges, device=framework.device) if in_torch else jnp.array(ranges)
        with pytest.raises(error, match=words):
            framework.frontend.paged_attention(*arrays, **{**tables, "key_ranges": ranges})


def test_ranges_elsewhere_have_an_error() -> None:
    call = tree_call([9, 6], [[-1, 0, 1, 1], [-1, 0]])
    (q, k, v), tables = torch_arguments(call)
    ranges = tables["key_ranges"].to("meta")
    with pytest.raises((DeviceError, SpecError), match="key_ranges"):
        torch_frontend.paged_attention(q, k, v, **{**tables, "key_ranges": ranges})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_other_backends_refuse_ranges_in_words(framework: str) -> None:
    selection = explained(framework, tree_call([9, 6], [[-1, 0, 1, 1], [-1, 0]]))
    assert selection.backend is not None
    for name in ("sdpa_flash", "flash2", "flash3", "flash4"):
        assert any("key_ranges of shape" in why for why in selection.reasons(name)), (name, selection.reasons(name))
