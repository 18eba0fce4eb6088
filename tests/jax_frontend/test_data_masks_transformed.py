"""Tests masks and scores that are data (segment ids, positions, traced windows and scales, arrays of a score
function): on a mesh that splits the batch, under remat and scan, and exported for another platform with open
sizes. tests/jax_frontend/test_persistent_cache.py has them in JAX's persistent cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax")
import cpu_meshes
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import COLLECTIVE, assert_close, normal

from attn_core import SpecError
from jax_frontend import attention, export_checks

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 10, 4, 2, 8
BACKENDS = ("math", "jax_xla")
pytestmark = pytest.mark.sampled


class Case(NamedTuple):
    """A call ``f(arrays, **options)``.

    Attributes:
        call: takes q, k and v, and further arrays by name.
        more: these arrays.
        whole: their names if a mesh does not split them.
    """

    call: Callable[..., Any]
    more: dict[str, np.ndarray]
    whole: tuple[str, ...] = ()


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, shape, np.int32)


IDS, POSITIONS = numbers(5, BATCH, LENGTH), numbers(6, BATCH, LENGTH)


def by_row(q: Any, k: Any, v: Any, weights: Any, shift: Any, **options: Any) -> Any:
    """One array has a row for each batch row, the other is shared by the batch; both have gradients."""
    score_mod = lambda s, b, h, i, j, weights, shift: s * weights[b, j] + shift[i]  # noqa: E731
    return attention(q, k, v, score_mod=score_mod, aux=(weights, shift), **options)


CASES = {
    "segments": Case(partial(attention, causal=True), {"q_segment_ids": IDS}),
    "positions": Case(partial(attention, window=(1, 1)), {"q_segment_ids": IDS, "q_positions": POSITIONS}),
    "window": Case(partial(attention, causal=True), {"window": np.int32(3)}, ("window",)),
    "scale": Case(partial(attention, softcap=3.0), {"scale": np.float32(0.3)}, ("scale",)),
    "arrays": Case(by_row, {"weights": abs(normal(8, BATCH, LENGTH)), "shift": normal(9, LENGTH)}, ("shift",)),
}


def arrays_of(case: Case) -> dict[str, Any]:
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    rows = {name: normal(at, BATCH, LENGTH, heads, DIM) for at, (name, heads) in enumerate(shapes.items())}
    return {name: jnp.asarray(array) for name, array in (rows | case.more).items()}


def with_gradients(call: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Returns a function of arrays that gives the output, and the gradients of all arrays of floats."""

    def run(arrays: dict[str, Any]) -> Any:
        floats = {name: array for name, array in arrays.items() if array.dtype == jnp.float32}
        out, pull = jax.vjp(lambda floats: call(**arrays | floats), floats)
        return out, pull(jnp.cos(out))[0]

    return run


def tangents(call: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Returns a function of arrays that gives the output and its tangent by q, k and v."""

    def run(arrays: dict[str, Any]) -> Any:
        rows = {name: arrays[name] for name in "qkv"}
        return jax.jvp(lambda rows: call(**arrays | rows), (rows,), (jax.tree.map(jnp.cos, rows),))

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_a_split_batch_stays_split(name: str, backend: str) -> None:
    """No array is gathered, and only gradients of arrays that all rows share are summed over devices."""
    case, mesh = CASES[name], cpu_meshes.mesh((2, 2), ("data", "model"))
    arrays = arrays_of(case)
    place = lambda name: NamedSharding(mesh, P() if name in case.whole else P("data"))  # noqa: E731
    split = {name: jax.device_put(array, place(name)) for name, array in arrays.items()}
    call = partial(case.call, backend=backend)
    summed = [f"f32[{','.join(map(str, arrays[name].shape))}]" for name in case.whole if name != "window"]
    # Forward mode of XLA's own operations asks whether all values are finite: a sum of one number.
    for run, expected in ((with_gradients(call), summed), (tangents(call), ["f32[]"] * (backend == "jax_xla"))):
        program = jax.jit(run).lower(split).compile()
        found = [line for line in program.as_text().splitlines() if COLLECTIVE.search(line)]
        assert all("all-reduce(" in line for line in found), found
        assert [line.split(" = ")[1].split()[0].partition("{")[0] for line in found] == expected
        results = program(split)
        assert_close(results, jax.jit(run)(arrays))
        assert jax.tree.leaves(results)[0].sharding.spec[0] == "data"


@pytest.mark.parametrize("policy", ["nothing", "dots"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scan_over_layers_of_packed_rows_with_remat(backend: str, policy: str) -> None:
    """Layers alternate local and global: their windows and scales are traced, and all of them get one set of ids."""
    arrays, windows = arrays_of(CASES["segments"]), jnp.asarray([3, 2**30, 2], jnp.int32)
    scales, policies = jnp.asarray([0.3, 0.5, 0.4]), jax.checkpoint_policies
    saved = policies.nothing_saveable if policy == "nothing" else policies.dots_saveable
    k, v, ids = arrays["k"], arrays["v"], arrays["q_segment_ids"]

    def layer(x: Any, window: Any, scale: Any) -> Any:
        return attention(x, k, v, causal=True, window=window, scale=scale, q_segment_ids=ids, backend=backend)

    def scanned(x: Any, scales: Any) -> Any:
        step = jax.checkpoint(lambda x, each: (layer(x, *each), None), policy=saved)
        return (jax.lax.scan(step, x, (windows, scales))[0] ** 2).sum()

    def unrolled(x: Any, scales: Any) -> Any:
        for window, scale in zip((3, None, 2), scales, strict=True):
            x = layer(x, window, scale)
        return (x**2).sum()

    results, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(arrays["q"], scales) for f in (scanned, unrolled))
    assert_close(results, expected, rtol=1e-4, atol=1e-5)
    if backend == "jax_xla":  # and the tangent of the whole loss
        (one,), (other,) = (
            jax.jvp(lambda x, f=f: (f(x, scales),), (arrays["q"],), (k[:, :, [0, 1, 0, 1]],))[1]
            for f in (scanned, unrolled)
        )
        assert_close(one, other, rtol=1e-4, atol=1e-5)


OPEN = {"q": "b,n,4,8", "k": "b,n,2,8", "v": "b,n,2,8", "q_segment_ids": "b,n", "q_positions": "b,n", "weights": "b,n"}
"""Shapes whose batch and length are open."""


def open_shapes(arrays: dict[str, Any]) -> dict[str, Any]:
    scope = jax.export.SymbolicScope()
    texts = {name: OPEN.get(name, "n" if array.ndim else "") for name, array in arrays.items()}
    shape = lambda text: jax.export.symbolic_shape(text, scope=scope) if text else ()  # noqa: E731
    return {name: jax.ShapeDtypeStruct(shape(texts[name]), array.dtype) for name, array in arrays.items()}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_program_serves_every_batch_and_length(name: str) -> None:
    """It is compiled for this host and for others, with gradients and tangents, and contains XLA's operations alone."""
    case = CASES[name]
    arrays = arrays_of(case)
    both = lambda arrays: (with_gradients(case.call)(arrays), tangents(case.call)(arrays))  # noqa: E731
    exported = jax.export.export(jax.jit(both), platforms=("cpu", "cuda", "tpu"))(open_shapes(arrays))
    assert "attn_core.callback" not in exported.mlir_module()
    sizes = {"b": BATCH - 1, "n": LENGTH - 3}
    cut = {}
    for each, array in arrays.items():
        axes = OPEN.get(each, "n").split(",")[: array.ndim]
        cut[each] = array[tuple(slice(0, sizes.get(axis)) for axis in axes)]
    assert_close(exported.call(cut), jax.jit(both)(cut), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_program_over_a_mesh_is_exported_and_stays_split(name: str, mesh: Any) -> None:
    """In another process, XLA alone splits it: it contains XLA's operations, on the platform of this host, too.

    XLA may swap the parts of a gradient (collective-permute), but gathers none.
    """
    case = CASES[name]
    arrays = arrays_of(case)
    place = lambda name: NamedSharding(mesh, P() if name in case.whole else P("data"))  # noqa: E731
    split = {name: jax.device_put(array, place(name)) for name, array in arrays.items()}
    both = lambda arrays: (with_gradients(case.call)(arrays), tangents(case.call)(arrays))  # noqa: E731
    with jax.set_mesh(mesh):
        exported = jax.export.export(jax.jit(both), platforms=("cpu", "tpu"))(split)
        assert exported.nr_devices == 4 and "attn_core.callback" not in exported.mlir_module()
        program = jax.jit(exported.call).lower(split).compile()
        results = program(split)
    assert not re.search(r" (all-gather|all-to-all)(?:-start)?\(", program.as_text())
    assert_close(results, jax.jit(both)(arrays))
    assert not jax.tree.leaves(results)[0].sharding.is_fully_replicated


def test_an_open_batch_over_a_mesh(auto_mesh: Any) -> None:
    """Heads are split, too."""
    q, k, v = (arrays_of(CASES["segments"])[name] for name in "qkv")
    place = NamedSharding(auto_mesh, P("data", None, "model"))
    scope = jax.export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"4*b,n,{x.shape[2]},8", scope=scope), x.dtype, sharding=place)
        for x in (q, k, v)
    ]
    run = jax.value_and_grad(
        lambda *qkv: (attention(*qkv, causal=True, return_max_logit=True)[0] ** 2).sum(), (0, 1, 2)
    )
    exported = jax.export.export(jax.jit(run), platforms=("cpu", "tpu"))(*shapes)
    program = jax.jit(exported.call).lower(*(jax.device_put(x, place) for x in (q, k, v))).compile()
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", program.as_text())
    assert_close(program(*(jax.device_put(x, place) for x in (q, k, v))), jax.jit(run)(q, k, v), rtol=1e-4, atol=1e-5)


def test_a_named_kernel_over_a_mesh_is_refused_and_stays_in_a_shard_map(auto_mesh: Any) -> None:
    q, k, v = (arrays_of(CASES["segments"])[name] for name in "qkv")
    split = [jax.device_put(x, NamedSharding(auto_mesh, P("data"))) for x in (q, k, v)]
    call = partial(attention, causal=True, backend="math")
    with pytest.raises(SpecError, match=r"jax.export over a mesh: .* inside jax.shard_map, .* got backend='math'"):
        jax.export.export(jax.jit(call))(*split)
    mapped = jax.shard_map(call, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    exported = jax.export.export(jax.jit(mapped), disabled_checks=export_checks())(*split)
    assert "attn_core.callback" in exported.mlir_module()
    assert_close(jax.jit(exported.call)(*split), call(q, k, v))
