"""Context parallelism in JAX beside other axes of a mesh, inside ``jax.shard_map`` and outside."""

from __future__ import annotations

from functools import partial

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_jax_cases import CAUSAL, NEAR, ZIGZAG_ROWS, Case, differences, program, reference_results, sharded_arrays
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core.backends.shared.in_jax import document_numbers
from jax_frontend import context_parallel_attention

pytestmark = [pytest.mark.usefixtures("four_devices", "x64"), pytest.mark.sampled]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_inside_shard_map_beside_data_parallelism(strategy, check_vma):
    """Sinks are the same on every device: their gradient is summed over both axes."""
    case = Case(strategy, (2,), sinks=True, **CAUSAL)
    mesh = cpu_meshes.mesh((2, 2), ("data", "cp"))
    options = {"axis_name": "cp", "strategy": strategy, "length": 23, "causal": True, "backend": "math"}

    def call(q, k, v, sinks):
        inside = lambda q, k, v, sinks: context_parallel_attention(q, k, v, sinks=sinks, **options)  # noqa: E731
        row = P("data", "cp")
        specs = (row, row, row, P())
        return jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=row, check_vma=check_vma)(q, k, v, sinks)

    arrays = case.arrays()
    worst = differences(case, program(case, call)(sharded_arrays(case, arrays)), reference_results(case, arrays))
    assert max(worst.values()) < NEAR, worst


BESIDE = {"batch": P("data", "cp"), "heads": P(None, "cp", "data")}


@pytest.mark.parametrize("spec", BESIDE.values(), ids=BESIDE)
def test_outside_shard_map_beside_data_and_tensor_parallelism(spec):
    """On Auto axes the caller says how arrays are split; on Explicit axes the arrays' types do."""
    case = Case("all_gather", (2,), sinks=True, **CAUSAL)
    arrays = case.arrays()
    right, given = reference_results(case, arrays), sharded_arrays(case, arrays)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = cpu_meshes.mesh((2, 2), ("data", "cp"), kind)
        with jax.set_mesh(mesh):
            known = {"partition_spec": spec} if kind is AxisType.Auto else {}
            keywords = {"mesh": mesh if known else None, "axis_name": "cp", "backend": "math", **known}
            split = {name: spec if name != "sinks" else P() for name in given}
            placed = {name: jax.device_put(array, NamedSharding(mesh, split[name])) for name, array in given.items()}
            found = program(case, **keywords)(placed)
            worst = differences(case, found, right)
        assert max(worst.values()) < NEAR, worst
        assert tuple(found["out"].sharding.spec)[: len(spec)] == tuple(spec)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_sinks_of_no_mesh_beside_arrays_on_one_with_explicit_axes(strategy):
    case = Case(strategy, (2,), heads=(8, 4), sinks=True, **CAUSAL)
    arrays = case.arrays()
    mesh = cpu_meshes.mesh((2, 2), ("cp", "model"), AxisType.Explicit)
    given = {
        name: array if name == "sinks" else jax.device_put(array, NamedSharding(mesh, P(None, "cp", "model")))
        for name, array in sharded_arrays(case, arrays).items()
    }
    found = program(case, mesh=mesh, axis_name="cp", backend="math")(given)
    assert max(differences(case, found, reference_results(case, arrays)).values()) < NEAR


def test_arrays_that_are_split_over_an_axis_that_stays_automatic():
    case = Case("ulysses", (2,), heads=(4, 4), **CAUSAL)
    mesh = cpu_meshes.mesh((2, 2), ("data", "cp"))
    given = {
        name: jax.device_put(array, NamedSharding(mesh, P("data", "cp")))
        for name, array in sharded_arrays(case, case.arrays()).items()
    }
    found = program(case, mesh=mesh, axis_name="cp", backend="jax_xla")(given)
    assert max(differences(case, found, reference_results(case, case.arrays())).values()) < NEAR
    with pytest.raises(jax.errors.JaxRuntimeError, match="q: expected to be whole along every mesh axis that"):
        program(case, mesh=mesh, axis_name="cp", backend="math")(given)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_ring_inside_shard_map_over_one_of_two_axes(kind):
    """The sent blocks are split over the other axis, as the arrays are."""
    case = Case("ring", (2,), "contiguous", (24, 24), dims=(5, 5))
    arrays = case.arrays()
    mesh = cpu_meshes.mesh((2, 2), ("data", "cp"), kind)
    call = partial(context_parallel_attention, axis_name="cp", strategy="ring", layout="contiguous", length=24)
    with jax.set_mesh(mesh):
        row = P(None, "cp")
        mapped = jax.shard_map(partial(call, backend="jax_xla"), in_specs=(row,) * 3, out_specs=row, axis_names={"cp"})
        given = [jax.device_put(arrays[name], NamedSharding(mesh, P("data", "cp"))) for name in "qkv"]
        out = jax.jit(mapped)(*given)
    assert np.abs(np.asarray(out) - reference_results(case, arrays)["out"]).max() < NEAR


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_documents_beside_an_axis_that_stays_automatic(strategy):
    case = Case(strategy, (2,), **ZIGZAG_ROWS)
    arrays = case.arrays()
    mesh = cpu_meshes.mesh((2, 2), ("data", "cp"))
    found = program(case, mesh=mesh, axis_name="cp", backend="jax_xla")(sharded_arrays(case, arrays))
    assert max(differences(case, found, reference_results(case, arrays)).values()) < NEAR


@pytest.mark.parametrize("axes", [{"cp"}, {"data", "cp"}], ids=["one axis", "both"])
@pytest.mark.parametrize("own", [False, True], ids=["the same", "each its own"])
def test_the_document_of_a_place_inside_shard_map(axes, own):
    """Documents may be empty, end outside of the row, or come in another order."""
    ends = np.array([[3, 3, 7, 11], [9, 0, 12, -1]])
    mesh = cpu_meshes.mesh((2, 2), ("data", "cp"))
    split = P("cp") if own else P()
    mapped = jax.shard_map(
        lambda ends: document_numbers(ends[0], 9)[None], in_specs=split, out_specs=split, axis_names=axes
    )
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(jnp.asarray(ends if own else ends[:1]))
    for one, row in zip(np.asarray(found), ends, strict=False):
        np.testing.assert_array_equal(one, np.searchsorted(np.sort(row), np.arange(9), side="right"))
