"""Calls of attention on meshes of four devices, and the checks of what they give.

Every program is compiled, and its HLO is searched for collectives: a batch or heads that are split stay split.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_frontend import attention

BACKENDS = ("sdpa_flash", "math", "jax_xla")
BOTH_WAYS = ("math", "jax_xla")
"""A backend behind the bridge, and one of JAX's own operations."""
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 4, 10, 14, 8, 4, 6
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(heads: int = HEADS, kv_heads: int = KV_HEADS) -> tuple[np.ndarray, ...]:
    sizes = ((Q_LEN, heads), (KV_LEN, kv_heads), (KV_LEN, kv_heads))
    return tuple(normal(seed, BATCH, length, count, DIM) for seed, (length, count) in enumerate(sizes))


def with_gradients(call: Any) -> Any:
    """Returns a function of arrays that gives the output, and the gradient of every array."""

    def run(*arrays: Any) -> Any:
        out, pull = jax.vjp(call, *arrays)
        return out, pull(jnp.cos(out))

    return run


@cache
def call_of(**options: Any) -> Any:
    """Returns ``attention`` with options. Equal options give one object, so that ``on_one_device`` compiles it once."""
    return partial(attention, **options)


@cache
def _compiled_on_one_device(call: Any) -> Any:
    return jax.jit(with_gradients(call))


def on_one_device(call: Any, *arrays: Any) -> Any:
    """Returns the result of ``with_gradients`` on one device. Equal calls and shapes share a program."""
    return jax.tree.map(np.asarray, _compiled_on_one_device(call)(*map(jnp.array, arrays)))


def place(mesh: Any, arrays: Any, specs: Any) -> list[Any]:
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]


def run_split(mesh: Any, call: Any, arrays: Any, specs: Any) -> tuple[Any, Counter[str], str]:
    """Returns the result of ``with_gradients`` on a mesh, the number of collectives of each kind, and the HLO."""
    results, text, _ = run_on(mesh, with_gradients(call), arrays, specs)
    return results, Counter(COLLECTIVE.findall(text)), text


def run_on(mesh: Any, function: Any, arrays: Any, specs: Any) -> tuple[Any, str, list[Any]]:
    """Returns the results of a function in one program on a mesh, the HLO, and the arrays on the mesh."""
    with jax.set_mesh(mesh):
        on_mesh = place(mesh, arrays, specs)
        program = jax.jit(function).lower(*on_mesh).compile()
        return program(*on_mesh), program.as_text(), on_mesh


def check_on(mesh: Any, function: Any, arrays: Any, specs: Any) -> tuple[Any, str, list[Any]]:
    """Compares a mesh with one device; returns the result of ``run_on``."""
    expected = jax.tree.map(np.asarray, jax.jit(function)(*map(jnp.array, arrays)))
    results, text, on_mesh = run_on(mesh, function, arrays, specs)
    assert_close(results, expected)
    return results, text, on_mesh


def check_types(mesh: Any, results: Any, like: Any) -> None:
    """Raises AssertionError if types on Explicit axes, which contain how arrays are split, differ."""
    if "Explicit" in str(mesh.axis_types):
        assert list(map(jax.typeof, results)) == list(map(jax.typeof, like))


def assert_close(result: Any, expected: Any, rtol: float = 2e-5, atol: float = 5e-6) -> None:
    """Raises AssertionError if results differ by more than the rounding of sums in another order."""
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=rtol, atol=atol)


def spec_entries(array: Any) -> tuple[Any, ...]:
    """Returns the array's PartitionSpec with as many entries as the array has axes."""
    spec = array.sharding.spec
    return (*spec, *(None,) * (array.ndim - len(spec)))


def check_split(mesh: Any, call: Any, arrays: Any, specs: Any, gathers: int = 0) -> tuple[Any, Counter[str], str]:
    """Compares a mesh with one device and counts gathers; returns the result of ``run_split``."""
    expected = on_one_device(call, *arrays)
    (out, gradients), collectives, text = run_split(mesh, call, arrays, specs)
    assert_close((out, gradients), expected)
    assert collectives["all-gather"] == gathers, collectives
    assert not collectives.keys() & {"all-to-all", "collective-permute", "reduce-scatter"}, collectives
    return (out, gradients), collectives, text


def check_shard_map(mesh: Any, backend: str, spec: Any) -> None:
    """Compares the gradient of a mapped call, and a mapped gradient, with those of one device."""
    call = call_of(causal=True, backend=backend)
    expected, arrays = on_one_device(call, *qkv()), [jnp.asarray(array) for array in qkv()]
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    assert_close(jax.jit(with_gradients(mapped))(*arrays), expected)
    inside = jax.shard_map(with_gradients(call), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, (spec,) * 3))
    assert_close(jax.jit(inside)(*arrays), expected)
