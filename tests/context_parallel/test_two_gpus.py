"""Tests a mesh of two GPUs: a split batch or split heads stay split, on every lane, with the bits of one GPU.

Also tests a row over both GPUs, where the host must map each device to its part.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core import NoBackendError, SeqInfo, Target
from jax_frontend import attention, context_parallel_attention, shard_sequence, unshard_sequence

BACKENDS = ("flash4", "flash2", "flash3", "sdpa_flash", "jax_cudnn", "jax_xla")
SPLITS = {"batch": P("x"), "heads": P(None, None, "x")}
_COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")

pytestmark = [pytest.mark.cuda, pytest.mark.two_gpus]


def two_gpus_for(backend: str) -> list[Any]:
    """JAX's GPUs; skips the test with the reason if it cannot run."""
    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    if reason := dict(Target.here("jax", "sm90").unavailable).get(backend, ""):
        pytest.skip(reason)
    return devices


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_batch_or_split_heads_are_not_gathered(backend: str, spec: P, kind: str) -> None:
    devices = two_gpus_for(backend)
    trained = backend != "flash3"  # its published build has no backward
    # the other backends add gradients in any order, or compile code for each shape
    exact = backend in ("flash4", "flash2")
    call = partial(attention, causal=True, window=70, deterministic=trained and exact, backend=backend)

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        if not trained:
            return (call(q, k, v),)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    rng = np.random.default_rng(0)
    shapes = ((2, 150, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64), (2, 150, 4, 64))
    given = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]
    alone = [np.asarray(actual.astype(jnp.float32)) for actual in jax.jit(run)(*given)]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(getattr(AxisType, kind),), devices=devices[:2])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array in given]
        compiled = jax.jit(run).lower(*placed).compile()
        assert not _COLLECTIVE.findall(compiled.as_text())
        actual = compiled(*placed)
        for one in actual:
            assert {shard.device for shard in one.addressable_shards} == set(devices[:2])
            assert all(shard.data.size * 2 == one.size for shard in one.addressable_shards)
        split = [np.asarray(jax.device_get(one)).astype(np.float32) for one in actual]
    for place, (one, other) in enumerate(zip(split, alone, strict=True)):
        if exact or (place == 0 and backend != "jax_xla"):
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.02 * np.abs(other).max())


ROWS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "documents": {"causal": True, "seq_info": SeqInfo.from_lengths([70, 201, 150])},
}


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("strategy, layout", [("all_gather", "zigzag"), ("ring", "zigzag"), ("ring", "striped")])
@pytest.mark.parametrize("backend", ["flash3", "flash2", "flash4", "sdpa_flash", "jax_xla"])
def test_a_row_over_two_gpus_equals_the_row_on_one(
    backend: str, strategy: str, layout: str, options: dict[str, Any], turned: bool
) -> None:
    """Either device may come first in the mesh. The row does not divide; its gradients are compared as well."""
    devices = two_gpus_for(backend)[:2]
    trained = backend != "flash3" and not turned
    rng, length = np.random.default_rng(0), 421
    shapes = ((1, length, 4, 64), (1, length, 2, 64), (1, length, 2, 64), (1, length, 4, 64))
    whole = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]

    def run(call: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        if not trained:
            return (call(q, k, v),)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    mesh = jax.sharding.Mesh(np.array(devices[::-1] if turned else devices), ("cp",))
    where = {"mesh": mesh, "axis_name": "cp", "layout": layout, "seq_info": options.get("seq_info")}
    given = [shard_sequence(array, **where) for array in whole]
    length_of = {} if "seq_info" in options else {"length": length}
    call = partial(
        context_parallel_attention, mesh=mesh, axis_name="cp", strategy=strategy, layout=layout, backend=backend
    )
    try:
        alone = jax.jit(partial(run, partial(attention, backend=backend, **options)))(*whole)
        actual = jax.jit(partial(run, partial(call, **options, **length_of)))(*given)
    except NoBackendError as error:
        pytest.skip(str(error))
    for one, other in zip(actual, alone, strict=True):
        one, other = unshard_sequence(one, **where, **length_of), jax.device_get(other)
        one, other = (np.asarray(jax.device_get(each)).astype(np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=0.05, atol=0.02 * np.abs(other).max())
