"""Context parallelism in JAX: how a program finds the part of a device, here and on GPUs."""

from __future__ import annotations

import re

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from context_jax_cases import CALLED, NEAR, Case, equations, forward_call, sharded_arrays
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch_first import torch_first  # noqa: F401 (a fixture)

from attn_core.errors import BridgeError
from jax_frontend.bridge import bridged_run, targets
from jax_frontend.context_parallel import step as jax_step
from jax_frontend.dispatch import local_call
from jax_frontend.dispatch.export import export_checks

pytestmark = pytest.mark.usefixtures("four_devices", "x64")

DEVICES = {
    "in order": ((4,), ("outer",), (0, 1, 2, 3)),
    "turned": ((4,), ("outer",), (3, 1, 0, 2)),
    "beside data": ((2, 2), ("data", "outer"), (0, 1, 2, 3)),
    "before data": ((2, 2), ("outer", "data"), (2, 3, 1, 0)),
}


@pytest.fixture
def as_if_on_gpus(monkeypatch):
    """What was planned for these CPUs counts as planned for the platform that it is lowered for, as GPUs' would."""
    for module in (jax_step, local_call):
        monkeypatch.setattr(module, "runs_on", lambda call, platform: True)


@pytest.mark.usefixtures("torch_first")  # on this platform the program calls a torch kernel
def test_a_program_for_another_platform_takes_branches_of_xla_s_operations():
    case, row = CALLED["ring-zigzag-2"], P(None, "outer")
    mesh = Mesh(np.array(cpu_meshes.devices(2)), ("outer",))
    inside = forward_call(case, mesh=None, axis_name="outer", backend=None)
    run = jax.shard_map(inside, mesh=mesh, in_specs=(row,) * 3, out_specs=row)
    given = [jax.device_put(sharded_arrays(case, case.arrays())[key], NamedSharding(mesh, row)) for key in "qkv"]
    assert "attn_core.callback" in jax.jit(run).trace(*given).lower().as_text()
    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "attn_core.callback" not in text and "stablehlo.case" in text


@pytest.mark.parametrize(("sizes", "names", "order"), DEVICES.values(), ids=DEVICES)
def test_a_program_for_gpus_knows_which_device_is_which_part(sizes, names, order, as_if_on_gpus):
    """The lowered program holds a table from device to part, in which the host looks its part up."""
    mesh = Mesh(np.array(cpu_meshes.devices())[list(order)].reshape(sizes), names)
    case = Case("ring", (mesh.shape["outer"],), "zigzag", (32, 32), options={"causal": True})
    given = sharded_arrays(case, case.arrays())
    placed = [jax.device_put(given[key], NamedSharding(mesh, P(None, "outer"))) for key in "qkv"]
    inside, row = forward_call(case, mesh=None, axis_name="outer"), P(None, "outer")
    run = jax.shard_map(inside, mesh=mesh, in_specs=(row,) * 3, out_specs=row)
    text = jax.jit(run).trace(*placed).lower(lowering_platforms=("cuda",)).as_text()
    tokens = re.findall(r'attn_core.callback.step.v1.*call = "([^"]{7})"', text)
    assert len(tokens) == mesh.shape["outer"] - 1 and "stablehlo.case" not in text
    right = np.moveaxis(mesh.devices, names.index("outer"), 0)
    for token in tokens:
        parts = dict(targets.call_of(token).parts)
        assert parts == {device.id: part for part, devices in enumerate(right) for device in np.ravel(devices)}
        here = bridged_run.parts_by_device(tuple(parts.items()), cpu_meshes.devices())
        assert here == {device.local_hardware_id: parts[device.id] for device in cpu_meshes.devices()}
    truth = jax.jit(forward_call(case))(*(given[key] for key in "qkv"))
    assert np.abs(np.asarray(jax.jit(run)(*placed)) - np.asarray(truth)).max() < NEAR


def test_an_exported_program_runs_on_devices_in_another_order():
    """An exported program takes branches, because it knows no devices."""
    case, row = CALLED["all_gather-zigzag-2"], P(None, "outer")
    given = [sharded_arrays(case, case.arrays())[key] for key in "qkv"]
    here, there = (Mesh(np.array(cpu_meshes.devices())[list(order)], ("outer",)) for order in ((0, 1), (3, 1)))
    inside = forward_call(case, mesh=None, axis_name="outer")
    run = jax.jit(jax.shard_map(inside, mesh=here, in_specs=(row,) * 3, out_specs=row))
    right = np.asarray(run(*given))
    placed = [jax.device_put(array, NamedSharding(here, row)) for array in given]
    exported = jax.export.export(run, disabled_checks=export_checks())(*placed)
    assert "callback.step" not in exported.mlir_module() and "stablehlo.case" in exported.mlir_module()
    elsewhere = [jax.device_put(array, NamedSharding(there, row)) for array in given]
    assert np.abs(np.asarray(jax.jit(exported.call)(*elsewhere)) - right).max() < NEAR


def test_a_program_traced_under_one_mesh_and_lowered_under_another_takes_branches(as_if_on_gpus):
    """JAX runs the program on the first mesh's devices, but lowering names the second mesh's devices."""
    case, row = CALLED["ring-zigzag-2"], P(None, "outer")
    given = [sharded_arrays(case, case.arrays())[key] for key in "qkv"]
    one, other = (
        Mesh(np.array(cpu_meshes.devices())[list(order)], ("outer",), axis_types=(AxisType.Auto,))
        for order in ((0, 1), (1, 0))
    )
    for later, taken in ((one, True), (other, False)):
        jax.clear_caches()  # what was lowered under the first stays right
        inside = forward_call(case, mesh=None, axis_name="outer")
        run = jax.jit(jax.shard_map(inside, in_specs=(row,) * 3, out_specs=row))
        with jax.set_mesh(one):
            traced = run.trace(*given)
        with jax.set_mesh(later):
            assert ("callback.step" in traced.lower(lowering_platforms=("cuda",)).as_text()) == taken


def test_a_device_that_a_program_was_not_compiled_for_is_named(monkeypatch):
    case = CALLED["ring-zigzag-2"]
    traced = jax.make_jaxpr(forward_call(case))(*(sharded_arrays(case, case.arrays())[key] for key in "qkv"))
    step = next(each.params["call"] for each, _ in equations(traced.jaxpr) if each.primitive.name == "attn_step")
    monkeypatch.setattr(jax, "local_devices", lambda backend: cpu_meshes.devices(1))
    run = bridged_run.run_of(step._replace(parts=((cpu_meshes.devices()[0].id, 1),)))
    with pytest.raises(
        BridgeError, match=r"GPU -1: expected one of .* that this program with context parallelism was compiled for"
    ):
        run((torch.zeros(1),))


def test_a_program_for_gpus_without_devices_takes_branches(as_if_on_gpus):
    case = CALLED["ring-zigzag-2"]
    run, row = forward_call(case, mesh=None, axis_name="outer"), P(None, "outer")
    mesh = jax.sharding.AbstractMesh((2,), ("outer",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(row,) * 3, out_specs=row)
    given = [jax.ShapeDtypeStruct(sharded_arrays(case, case.arrays())[key].shape, jnp.float32) for key in "qkv"]
    text = jax.jit(mapped).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "callback.step" not in text and "stablehlo.case" in text
