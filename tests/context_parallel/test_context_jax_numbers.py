"""Context parallelism in JAX on four devices: every strategy computes what one device computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_jax_cases import (
    CASES,
    CAUSAL,
    NEAR,
    Case,
    check,
    from_shards,
    operations,
    program,
    reference_results,
    sharded_arrays,
)

from jax_frontend import (
    attention,
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
    unshard_sequence,
)

pytestmark = [pytest.mark.usefixtures("four_devices", "x64"), pytest.mark.sampled]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_strategy_gives_what_one_device_gives(case):
    check(case)


@pytest.mark.parametrize(
    "name", ["ring-4-band", "ring-3-rows", "ring-4-uneven", "all_gather-4-scores", "ring-2x2-causal"]
)
def test_operations_of_xla_take_branches(name):
    """XLA's own operations need no host to launch them, and a branch of them costs little."""
    case = CASES[name]
    check(case, backend="jax_xla")
    traced = jax.make_jaxpr(program(case, backend="jax_xla"))(sharded_arrays(case, case.arrays())).jaxpr
    names = {name for name, _ in operations(traced)}
    assert "cond" in names and "attn_step" not in names


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_kernel_behind_the_bridge_runs_the_tiles(strategy):
    case = Case(strategy, (2, 2)[: 1 + (strategy == "ring")], **CAUSAL)
    check(case, backend="math")
    wanted = {"strategy": strategy, "mesh": case.mesh, "axis_name": case.axis_name, "length": 23, "backend": "math"}
    given = sharded_arrays(case, case.arrays())
    assert "backends: math" in str(explain_context_parallel(*(given[name] for name in "qkv"), causal=True, **wanted))


def test_bfloat16_is_as_near_as_on_one_device():
    """The mean error is within 1.5 times, and the largest within 3 times, the error of the backend on one device."""
    options = {"causal": True, "return_lse": True}
    case = Case("ring", (4,), lengths=(61, 61), dims=(16, 16), sinks=True, options=options)
    arrays = {name: np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64) for name, array in case.arrays().items()}
    right = reference_results(case, arrays)
    low, plain = (
        {name: jnp.asarray(array, jnp.float32 if name == "dlse" else jnp.bfloat16) for name, array in each.items()}
        for each in (sharded_arrays(case, arrays), arrays)
    )
    alone = program(case, partial(attention, **options, backend="math"))(plain)
    found = program(case, backend="math")(low)
    for name, truth in right.items():
        one, array = np.asarray(alone[name], np.float64), np.asarray(found[name], np.float64)
        if name != "dsinks":
            array = from_shards(array, case.table(0), 61, 2 if name == "lse" else 1, -np.inf if name == "lse" else 0.0)
        errors, usual = abs(array - truth), abs(one - truth)
        assert errors.mean() <= 1.5 * usual.mean() + 1e-5, (name, errors.mean(), usual.mean())
        assert errors.max() <= 3 * usual.max() + 1e-5, (name, errors.max(), usual.max())
        assert found[name].dtype == alone[name].dtype


def test_layers_under_scan_and_remat():
    """Three layers, each recomputed in the backward."""
    case = Case("ring", (2,), heads=(2, 2), **CAUSAL)
    arrays = {name: jnp.asarray(array) for name, array in case.arrays().items()}
    weights = jnp.asarray(np.random.default_rng(6).standard_normal((3, 5, 5)))
    options = {"mesh": case.mesh, "axis_name": "outer", "strategy": "ring", "layout": "zigzag"}
    spread_call = partial(context_parallel_attention, **options, length=23, causal=True)

    def loss(call: Any, x: Any, weights: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, weight: Any) -> Any:
            q = x @ weight
            return x + call(q, x, q * x), None

        return jax.lax.scan(layer, x, weights)[0]

    def trained(call: Any, x: Any, dout: Any) -> Any:
        out, pull = jax.vjp(partial(loss, call), x, weights)
        return out, *pull(dout)

    right = jax.jit(partial(trained, partial(attention, causal=True)))(arrays["q"], arrays["dout"])
    split = partial(shard_sequence, mesh=case.mesh, layout="zigzag")
    found = jax.jit(partial(trained, spread_call))(split(arrays["q"]), split(arrays["dout"]))
    for at, (one, other) in enumerate(zip(found, right, strict=True)):
        one = one if at == 2 else unshard_sequence(one, case.mesh, length=23)
        size = np.abs(other).max()  # sums of large terms of both signs: a small element may lose as much as a large one
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=NEAR, atol=NEAR * size)


def test_copied_kv_heads_of_a_row_without_positions():
    case = Case("ring", (2, 2), "striped", lengths=(0, 0), heads=(4, 1), batch=1)
    empty = {name: jnp.zeros((1, 0, heads, 5)) for name, heads in (("q", 4), ("k", 1), ("v", 1), ("dout", 4))}
    found = program(case)(empty)
    assert [found[name].shape for name in ("out", "dq", "dk", "dv")] == [
        empty[name].shape for name in ("q", "q", "k", "v")
    ]
