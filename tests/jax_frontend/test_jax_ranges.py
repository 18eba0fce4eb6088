"""Tests the names of JAX's operations: in the lowered and the compiled program, and in a trace of the host."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_frontend import SeqInfo, attention, paged_attention

SIZES = "b2 q8 kv8 h4:2 d16 f32"
Array = jax.Array


def operands() -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 8, heads, 16)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    return q, k, v


def ranges_in(program: str) -> set[str]:
    """The names of ranges in a program, without the operations inside them."""
    return set(re.findall(r'attn\.[a-z_0-9]+ [^/")]+', program))


def both_texts(function: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    lowered = jax.jit(function).lower(*arguments)
    return lowered.as_text(debug_info=True), lowered.compile().as_text() or ""


@pytest.mark.parametrize("backend", ["jax_xla", "sdpa_flash", "math"])
def test_operations_are_named_in_both_directions(backend: str) -> None:
    def loss(*arrays: Array) -> Array:
        return attention(*arrays, causal=True, window=3, backend=backend).sum()

    forward, backward = (f"attn.{backend} {direction} {SIZES} causal w3" for direction in ("forward", "backward"))
    for text in both_texts(loss, *operands()):
        assert ranges_in(text) == {forward}
    for text in both_texts(jax.grad(loss, (0, 1, 2)), *operands()):
        assert ranges_in(text) == {forward, backward}


def test_every_operation_of_a_call_is_named() -> None:
    lowered, _ = both_texts(lambda *arrays: attention(*arrays, backend="jax_xla"), *operands())
    products = re.findall(r'loc\("([^"]*dot_general)"', lowered)
    assert products and all(f"attn.jax_xla forward {SIZES}" in name for name in products)


def test_names_under_vmap_are_those_of_the_call_that_runs() -> None:
    q, k, v = operands()
    mapped = jax.vmap(lambda row: attention(row, k, v, backend="sdpa_flash"))
    assert ranges_in(both_texts(mapped, jnp.stack([q, q, q]))[0]) == {"attn.sdpa_flash forward b6 q8 kv8 h4:2 d16 f32"}


def test_documents_and_pages_are_named() -> None:
    q, k, v = (array.reshape(16, *array.shape[2:]) for array in operands())
    info = SeqInfo.from_lengths([9, 7])
    packed = both_texts(lambda *arrays: attention(*arrays, seq_info=info, backend="jax_xla"), q, k, v)[0]
    assert ranges_in(packed) == {"attn.jax_xla forward b1 q16 kv16 h4:2 d16 f32 docs2"}
    pool = jnp.zeros((3, 4, 2, 16))
    table, lengths = jnp.array([[2, 0], [1, -1]], jnp.int32), jnp.array([6, 3], jnp.int32)
    paged = both_texts(
        lambda q: paged_attention(q, pool, pool, block_table=table, seq_lens=lengths, backend="jax_xla"), q[:2]
    )[0]
    assert ranges_in(paged) == {"attn.jax_xla forward b1 q2 kv8 h4:2 d16 f32 causal docs2 pages4"}


def test_a_program_without_debug_information_has_no_names() -> None:
    """So a cache of compiled programs, whose key has no names either, finds the same entries."""
    lowered = jax.jit(lambda *arrays: attention(*arrays, backend="jax_xla")).lower(*operands())
    assert not ranges_in(lowered.as_text())


def test_symbolic_lengths_have_names() -> None:
    (length,) = jax.export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct((2, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    function = jax.jit(lambda *arrays: attention(*arrays, backend="jax_xla"))
    assert ranges_in(function.lower(*shapes).as_text(debug_info=True)) == {
        "attn.jax_xla forward b2 qn kvn h4:2 d16 f32"
    }


def host_events(directory: Path, run: Callable[[], Any]) -> list[str]:
    with jax.profiler.trace(str(directory)):
        jax.block_until_ready(run())
    (path,) = directory.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("attn.")]


def test_a_trace_of_the_host_shows_bridged_calls(tmp_path: Path) -> None:
    gradients = jax.jit(jax.grad(lambda *arrays: attention(*arrays, backend="sdpa_flash").sum(), (0, 1, 2)))
    jax.block_until_ready(gradients(*operands()))
    seen = host_events(tmp_path, lambda: gradients(*operands()))
    assert seen == [f"attn.sdpa_flash {direction} {SIZES}" for direction in ("forward", "backward")]


def test_no_annotation_is_made_unless_a_trace_records(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_frontend.bridge import bridged_run

    class Annotation(jax.profiler.TraceAnnotation):
        def __init__(self, *_: Any) -> None:
            raise AssertionError("an annotation without a trace")

    monkeypatch.setattr(bridged_run, "TraceAnnotation", Annotation)
    arrays = operands()
    out = attention(*arrays, scale=0.377, backend="math")  # a call that no cache of callbacks has
    monkeypatch.undo()
    assert jnp.allclose(out, attention(*arrays, scale=0.377, backend="jax_xla"), atol=1e-5)
