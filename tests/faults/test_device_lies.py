"""Tests that wrong offsets, tables and lengths in tensors never lead a kernel outside of its buffers.

Queries, keys, values and pools are parts of larger buffers, and what lies around them is huge. A call with a lie is
refused by name, or its output has no trace of the surroundings; an append never writes there. On a CPU torch's tables
are checked; a program of ``jax.jit`` and a GPU see their values only in the kernels, which clamp them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch
from both_frontends import compiles_for_long

import jax_frontend
import torch_frontend
from attn_core import SeqInfo, SpecError, backends

HUGE = 1e30
"""What lies around the arrays. One such value in a sum shows in every result that it reaches."""
AROUND = 64
"""Rows around an array. A multiple of XLA's alignment, so that JAX does not copy the array elsewhere."""
LOW, HIGH = -(2**31), 2**31 - 1

OFFSETS = {
    "negative": [-5, 4, 8, 12],
    "decreasing": [0, 9, 3, 12],
    "beyond the tokens": [0, 4, 8, 40],
    "all beyond": [20, 30, 40, 50],
    "int32 extremes": [LOW, HIGH, LOW, HIGH],
    "differences that wrap": [HIGH, LOW, 0, 12],
    "not from 0": [3, 4, 8, 12],
}
TABLES = {
    "pages just outside": ([[-1, 6], [6, -2], [-1, 7]], [8, 8, 8]),
    "pages far away": ([[LOW, HIGH], [10**6, -(10**6)], [HIGH, LOW]], [8, 8, 8]),
    "lengths beyond the table": ([[0, 1], [2, 3], [4, 5]], [9, HIGH, 10**6]),
    "negative lengths": ([[0, 1], [2, 3], [4, 5]], [-1, LOW, -8]),
    "everything": ([[LOW, 6], [HIGH, -1], [6, LOW]], [HIGH, LOW, -1]),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
NAMES = re.compile("cu_seqlens|seq_lens|block_table|max_len|offsets")
"""What an error about a lie names."""


def inside(*shape: int, device: str, value: float = HUGE) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of a larger buffer, and the buffer. Both have ``shape`` behind the first axis."""
    whole = torch.full((shape[0] + 2 * AROUND, *shape[1:]), value, device=device)
    part = whole[AROUND:-AROUND]
    part.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))
    return part, whole


def surroundings_unchanged(whole: torch.Tensor) -> bool:
    return bool((whole[:AROUND] == HUGE).all() and (whole[-AROUND:] == HUGE).all())


def to_jax(tensor: torch.Tensor) -> Any:
    """The same memory in JAX."""
    array = jax.dlpack.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    return array


def refused_or_clean(run: Callable[[], Any], device: str) -> bool:
    """Whether a call ran; checks that its results are free of the surroundings, or that its error names the lie."""
    try:
        results = run()
        leaves = [leaf if isinstance(leaf, torch.Tensor) else np.asarray(leaf) for leaf in jax.tree.leaves(results)]
    except (SpecError, jax.errors.JaxRuntimeError) as error:
        assert NAMES.search(str(error)), error
        return False
    if device == "cuda":
        torch.cuda.synchronize()
    for leaf in leaves:
        values = leaf.float().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf
        values = values[np.isfinite(values) | np.isnan(values)]  # -inf is the log-sum-exp of a row without keys
        assert not np.isnan(values).any()
        assert abs(values).max(initial=0) < 1e6
    return True


def names_for(device: str, framework: str, *, paged: bool) -> list[str]:
    return list(backends.usual_order(framework, device, paged=paged))


# On a GPU torch's kernels read the same offsets in JAX, and XLA compiles each.
@pytest.mark.on_gpus(only=lambda framework, side, **_: framework == "torch" or side == "both")
@pytest.mark.parametrize("side", ["q", "k", "both"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_lying_offsets_of_documents(framework: str, device: str, side: str) -> None:
    """Every lie of a backend in one case, because they differ in numbers alone and run one program."""
    true = [0, 4, 8, 12]
    parts = [inside(12, heads, 32, device=device) for heads in (4, 2, 2)]
    arguments: tuple[Any, ...] = tuple(part for part, _ in parts)
    frontend: Any = torch_frontend if framework == "torch" else jax_frontend
    if framework == "jax":
        arguments = tuple(map(to_jax, arguments))
    ran = []
    for name in names_for(device, framework, paged=False):
        if compiles_for_long(name, device) and side != "both":
            continue

        def call(q: Any, k: Any, v: Any, queries: Any, keys: Any, name: str = name) -> Any:
            info = SeqInfo(queries, keys, 5, 5)
            return frontend.attention(q, k, v, seq_info=info, causal=True, return_lse=True, backend=name)

        true_info = SeqInfo(np.array(true, np.int32), np.array(true, np.int32), 5, 5)
        how = {"seq_info": true_info, "causal": True, "return_lse": True, "backend": name}
        if frontend.explain(*arguments, **how).backend is None:
            continue
        function = call if framework == "torch" else jax.jit(call)
        for lie, lying in OFFSETS.items():
            both: Any = (lying if side in (at, "both") else true for at in "qk")
            both = [torch.tensor(each, dtype=torch.int32, device=device) for each in both]
            if framework == "jax":
                both = [jnp.asarray(each.cpu().numpy()) for each in both]
            ran.append((name, lie, refused_or_clean(lambda f=function, o=both: f(*arguments, *o), device)))
            assert all(surroundings_unchanged(whole) for _, whole in parts), ran
    assert ran
    if device == "cuda":
        assert all(outcome for *_, outcome in ran), ran  # nothing waits for the device to look


@pytest.mark.parametrize("chunk", [False, True], ids=["decode", "chunk"])
@pytest.mark.parametrize("lie", TABLES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_lying_tables_of_pages(framework: str, device: str, lie: str, chunk: bool) -> None:
    page_size = 16 if device == "cuda" else 4
    table, lengths = TABLES[lie]
    scaled = [length if abs(length) > 100 else length * page_size // 4 for length in lengths]
    tokens = 5 if chunk else 3
    q, new = (inside(tokens, heads, 32, device=device)[0] for heads in (4, 2))
    pools = [inside(6, page_size, 2, 32, device=device) for _ in "kv"]
    values: dict[str, Any] = {"block_table": table, "seq_lens": scaled}
    if chunk:
        values["cu_seqlens_q"] = [0, 9, -3, 100]
    tables = {name: torch.tensor(rows, dtype=torch.int32, device=device) for name, rows in values.items()}
    k_pages, v_pages = (part for part, _ in pools)
    frontend: Any = torch_frontend if framework == "torch" else jax_frontend
    q_, new_, k_, v_ = (each if framework == "torch" else to_jax(each) for each in (q, new, k_pages, v_pages))
    if framework == "jax":
        tables = {name: jnp.asarray(each.cpu().numpy()) for name, each in tables.items()}
    ran = []
    for name in names_for(device, framework, paged=True):

        def call(q: Any, k: Any, v: Any, tables: Any, name: str = name) -> Any:
            return frontend.paged_attention(q, k, v, **tables, return_lse=True, backend=name)

        if frontend.explain_paged(q_, k_, v_, **tables, return_lse=True, backend=name).backend is None:
            continue
        function = call if framework == "torch" else jax.jit(call)
        ran.append(refused_or_clean(lambda f=function: f(q_, k_, v_, tables), device))

    def append(k: Any, v: Any, new: Any, tables: Any) -> Any:
        return frontend.append_kv(k, v, new, new, **tables)

    before = [whole.clone() for _, whole in pools]
    function = append if framework == "torch" else jax.jit(append)
    appended = refused_or_clean(lambda: function(k_, v_, new_, tables), device)
    assert ran
    assert all(surroundings_unchanged(whole) for _, whole in pools)
    if not appended:
        assert all(torch.equal(whole, old) for (_, whole), old in zip(pools, before, strict=True))


def test_a_read_of_the_surroundings_is_seen() -> None:
    part, whole = inside(12, 2, 8, device="cpu")
    assert surroundings_unchanged(whole)
    with pytest.raises(AssertionError):
        refused_or_clean(lambda: whole[AROUND - 1 : -AROUND].sum(0), "cpu")
    assert refused_or_clean(lambda: part.sum(0), "cpu")
    whole[-AROUND] = 0
    assert not surroundings_unchanged(whole)
