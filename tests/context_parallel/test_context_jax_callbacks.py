"""Context parallelism in JAX on four devices: kernels that the host calls back, and the bits that they compute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from context_jax_cases import CALLED, NEAR, Case, check, equations, forward_call, operations, sharded_arrays
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core.context_parallel import borders
from jax_frontend import context_parallel_attention
from torch_frontend.context_parallel import forward as torch_forward
from torch_frontend.context_parallel.mesh import SINGLE_RANK, RankAxis
from torch_frontend.context_parallel.prepare import build_rank_plan

pytestmark = [pytest.mark.usefixtures("four_devices", "x64"), pytest.mark.sampled]

UNEQUAL = {
    "lengths": Case("all_gather", (4,), "zigzag", (23, 31), options={"causal": True}),
    "lengths-wide": Case("all_gather", (3,), "zigzag", (23, 23), dims=(5, 3), options={"causal": True}),
    "a-row-of-each": Case("all_gather", (4,), "striped", (24, 24), batch=1, options={"causal": True}),
    "window": Case("ring", (4,), "contiguous", (29, 29), options={"causal": True, "window": 9}, sinks=True),
    "window-both-sides": Case("ring", (3,), "zigzag", (29, 31), options={"window": (4, 6), "return_lse": True}),
    "window-by-window": Case("ring", (2,), "window:9", (45, 45), batch=1, options={"causal": True, "window": 9}),
    "documents": Case("ring", (4,), "contiguous", (23, 23), batch=1, documents=(0, 1, 7, 8, 23)),
    "documents-causal": Case(
        "all_gather", (3,), "striped", (23, 23), batch=1, documents=(0, 2, 11, 23), options={"causal": True}
    ),
    "documents-dealt": Case(
        "ring", (4,), "documents", (48, 48), batch=1, documents=(0, 9, 30, 36, 48), options={"causal": True}
    ),
    "documents-zigzag": Case(
        "all_gather", (2, 2), "zigzag", (24, 24), batch=1, documents=(0, 9, 24), options={"causal": True}
    ),
}


@pytest.mark.parametrize("case", [*CALLED.values(), *UNEQUAL.values()], ids=[*CALLED, *UNEQUAL])
def test_kernels_called_back_take_no_branches_forward(case):
    """The host runs each part's own tiles."""
    check(case, backend="math")
    given = sharded_arrays(case, case.arrays())
    options = {"strategy": case.strategy, "layout": case.layout, "mesh": case.mesh, "backend": "math", **case.options}
    options |= {"seq_info": case.info} if case.documents else {"length": case.lengths}
    call = partial(context_parallel_attention, axis_name=case.axis_name, **options)
    names = [name for name, _ in operations(jax.make_jaxpr(call)(*(given[name] for name in "qkv")).jaxpr)]
    assert "attn_step" in names and "cond" not in names


def test_eager_gradients_on_explicit_axes():
    """They need ``jax.set_mesh`` where JAX's own operations do: JAX creates the 1 that a gradient starts with."""
    case = CALLED["ring-zigzag-2"]
    mesh = cpu_meshes.mesh((2,), (case.axis_name,), AxisType.Explicit)
    given = [sharded_arrays(case, case.arrays())[key] for key in "qkv"]
    placed = [jax.device_put(array, NamedSharding(mesh, P(None, case.axis_name))) for array in given]
    call = forward_call(case, mesh=mesh)

    def loss(*qkv):
        return (call(*qkv) ** 2).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    right = jax.jit(gradient)(*placed)
    out, pull = jax.vjp(call, *placed)  # whose cotangent is the caller's
    with jax.set_mesh(mesh):
        inside = gradient(*placed)
    for found in (inside, pull(2 * out)):
        for one, other in zip(found, right, strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, 4)
            assert np.abs(np.asarray(one) - np.asarray(other)).max() < NEAR
    try:
        jax.grad(lambda q: (q * q).sum())(placed[0])
    except ValueError as error:
        assert "jax.set_mesh" in str(error)
        with pytest.raises(ValueError, match=r"jax\.set_mesh"):
            gradient(*placed)
    else:
        gradient(*placed)


EQUAL = {
    "ring-alike": Case("ring", (3,), "zigzag", (48, 48)),
    "ring-alike-wide": Case("ring", (4,), "contiguous", (64, 64), dims=(5, 3)),
    "ring-striped": Case("ring", (4,), "striped", (24, 24), options={"causal": True}),
}
BITS = [
    "all_gather-zigzag-2",
    "all_gather-zigzag-4",
    "a-row-of-each",
    "documents-causal",
    "ring-zigzag-2",
    "window",
    *EQUAL,
]


@pytest.mark.parametrize("name", BITS)
def test_the_bits_are_those_that_a_rank_of_torch_computes(name):
    """For one plan and the same keys, both run the same kernels on the same tiles and merge in the same order."""
    case = replace((CALLED | UNEQUAL | EQUAL)[name], sinks=False)
    given = {key: jnp.asarray(array, jnp.float32) for key, array in sharded_arrays(case, case.arrays()).items()}
    run = forward_call(case)
    found = run(*(given[key] for key in "qkv"))
    found = np.asarray(found[0] if case.options.get("return_lse") else found)
    steps = equations(jax.make_jaxpr(run)(*(given[key] for key in "qkv")).jaxpr)
    call = next(each.params["call"].step.call for each, _ in steps if each.primitive.name == "attn_step")
    plan = call.plan
    rows = [torch.from_numpy(np.array(given[key])) for key in "qkv"]
    rows = [row if row.ndim == 4 else row[None] for row in rows]
    found = found if found.ndim == 4 else found[None]
    blocks = list(zip(*(row.chunk(plan.outer, 1) for row in rows), strict=True))

    def received(rank_plan):
        for step, of_rank in rank_plan.steps:
            shift = 1 if step.gathered else step.shift  # two ranks swap their blocks
            keys = blocks[(rank_plan.outer.rank - shift) % plan.outer][1:]
            if step.gathered and plan.outer > 2:
                keys = rows[1:]
            if step.border is not None:
                keys = [array[:, borders.places(step.border)] for array in keys]
            yield step, of_rank, keys

    for part, (mine, own) in enumerate(zip(blocks, np.split(found, plan.outer, 1), strict=True)):
        rank_plan = build_rank_plan(call, RankAxis("", plan.outer, part), SINGLE_RANK, torch.device("cpu"))
        keys = SimpleNamespace(blocks=partial(received, rank_plan))
        out, _ = torch_forward._attend(rank_plan, mine, keys)
        held = plan.q_layout.position_count(part)
        assert np.array_equal(out.numpy()[:, :held], own[:, :held])
