"""Tests steps of context parallelism whose kernels are operators of torch: one call has the operators of all parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import cpu_meshes
import jax
import jax.numpy as jnp
import torch

from attn_core import SeqInfo, backends
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Unrecordable
from attn_core.context_parallel.on_torch import operators, step
from attn_core.context_parallel.on_torch.step import StepCall
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedStep
from jax_frontend.context_parallel import explain_context_parallel
from jax_frontend.context_parallel import step as jax_step
from jax_frontend.context_parallel.tiles import PartTiles, TileContext, attend

pytestmark = [pytest.mark.usefixtures("four_devices"), pytest.mark.slow]
ROW = 32


@pytest.fixture(autouse=True)
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the plain backend for one whose programs are operators of torch. On a CPU none is, and it runs them."""
    monkeypatch.setattr(backends, "operator_functions", lambda module: SimpleNamespace(fake_results=None))


def second_step(strategy: str, layout: str, ranks: int, **options: Any) -> StepCall:
    """The second step of a float32 row of ROW positions on CPUs; the keys travel as one array."""
    mesh, size = cpu_meshes.mesh((ranks,), ("cp",)), ROW // ranks
    arrays = [jax.ShapeDtypeStruct((1, size, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    in_mesh = jax.shard_map(
        lambda *qkv: results.append(explain(qkv)) or qkv[0],
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(None, "cp"),
        out_specs=jax.sharding.PartitionSpec(None, "cp"),
    )
    results: list[Any] = []

    def explain(qkv: Any) -> Any:
        return explain_context_parallel(
            *qkv, axis_name="cp", strategy=strategy, layout=layout, backend="math", **options
        )

    jax.eval_shape(in_mesh, *(each.update(shape=(1, ROW, *each.shape[2:])) for each in arrays))
    return StepCall(results[0].call, 1, stacked=True)


def operands_of(step_call: StepCall) -> list[np.ndarray]:
    """q and the keys of the step, with values."""
    draw, plan = np.random.default_rng(0), step_call.call.plan
    shard = plan.q_layout.shard
    # Two parts swap their keys, so each receives one block; several parts receive all of them.
    lead = () if not step_call.step.gathered else (1 if plan.outer == 2 else plan.outer,)
    shapes = [(1, shard, 4, 8), (*lead, 2, 1, shard, 2, 8)]
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


STEPS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "ring, zigzag": ("ring", "zigzag", 2, {"causal": True}),
    "all_gather, zigzag": ("all_gather", "zigzag", 2, {"causal": True}),
    "all_gather, four parts": ("all_gather", "zigzag", 4, {"causal": True}),
    # The first part sees none of the gathered keys.
    "all_gather, contiguous": ("all_gather", "contiguous", 2, {"causal": True}),
    "ring, contiguous, softcap": ("ring", "contiguous", 4, {"causal": True, "softcap": 5.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_each_device_runs_the_operators_of_its_part(library: Path, name: str) -> None:
    strategy, layout, ranks, options = STEPS[name]
    step_call = second_step(strategy, layout, ranks, **options)
    assert operators.refusal(step_call, "cpu") is None
    operands = operands_of(step_call)
    texts = operators.texts(step_call, tuple((each.shape, str(each.dtype)) for each in operands), "cpu")
    assert len(set(texts)) > 1
    out_type = jax.ShapeDtypeStruct(operands[0].shape, np.float32)
    lse_type = jax.ShapeDtypeStruct((1, 4, ROW // ranks), np.float32)
    # Devices in another order than their parts, as on a turned mesh.
    order = list(range(ranks))[::-1]
    text = operators.by_device({device: texts[part] for device, part in enumerate(order)})
    call = jax.jit(lambda *arrays: jax.ffi.ffi_call(OPERATOR, (out_type, lse_type))(*arrays, operators=text))
    for device, part in enumerate(order):
        placed = [jax.device_put(each, jax.devices("cpu")[device]) for each in operands]
        out, lse = (np.array(each) for each in call(*placed))
        unseen = np.isneginf(lse).swapaxes(1, 2)[..., None]
        right, right_lse = torch.zeros(out.shape), torch.full(lse.shape, -torch.inf)
        scratch = torch.empty(step_call.scratch("cpu")), torch.empty(lse.size)
        q, *keys = map(torch.from_numpy, operands)
        step.attend(step.prepare_part(step_call, part, q.device), q, keys, (right, right_lse), scratch)
        np.testing.assert_array_equal(lse, right_lse.numpy())
        np.testing.assert_array_equal(np.where(unseen, 0, out), right.numpy())


def test_a_device_that_the_text_lacks_is_an_error(library: Path) -> None:
    text = operators.by_device({7: "2\naten::copy_ - t1 t0 b0 > -1 ~"})
    result = jax.ShapeDtypeStruct((3,), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="compile it for the devices"):
        jax.block_until_ready(jax.ffi.ffi_call(OPERATOR, result)(np.ones(3, np.float32), operators=text))


def test_packed_documents_and_tiles_that_share_rows_are_left_to_branches() -> None:
    packed = second_step("ring", "zigzag", 2, causal=True, seq_info=SeqInfo.from_lengths([10, 22]))
    operands = tuple((each.shape, "float32") for each in operands_of(packed))
    with pytest.raises(Unrecordable, match="packed documents"):
        operators.texts(packed, operands, "cpu")
    plain = second_step("ring", "zigzag", 2, causal=True)
    (tile,) = plain.step.tiles[1]
    twice: Any = SimpleNamespace(call=plain.call, step=SimpleNamespace(tiles=((tile,), (tile, tile))))
    assert "share rows" in str(operators.refusal(twice, "cpu"))


def test_the_results_of_earlier_steps_are_merged(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The custom call and the merge around it are what branches compute."""
    step_call = second_step("ring", "zigzag", 2, causal=True)
    q, keys = operands_of(step_call)
    draw = np.random.default_rng(1)
    out, lse = (
        draw.standard_normal(q.shape).astype(np.float32),
        draw.standard_normal((1, 4, ROW // 2)).astype(np.float32),
    )
    lse[:, :, 3] = -np.inf
    out[:, 3] = 0
    texts = operators.texts(step_call, ((q.shape, "float32"), (keys.shape, "float32")), "cpu")
    branches = SimpleNamespace(out_avals=[jax.typeof(jnp.asarray(out)), jax.typeof(jnp.asarray(lse))])
    for part in range(2):
        call = BridgedStep(step_call, "cpu", False)
        text = operators.by_device({0: texts[part]})
        run = jax.jit(
            lambda *arrays, text=text, call=call: jax_step._run_operators(
                *arrays, call=call, text=text, branches=branches
            )
        )
        context = TileContext(step_call.call, "cpu")
        tiles = PartTiles(step_call.step.tiles[part])
        right = attend(context, tiles, jnp.asarray(q), (jnp.asarray(keys),), (jnp.asarray(out), jnp.asarray(lse)))
        for one, other in zip(run(q, keys, out, lse), right, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_programs_of_several_processes_have_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    step_call = second_step("ring", "zigzag", 2, causal=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert jax_step._operator_text(BridgedStep(step_call, "sm90", False), []) is None


def test_steps_of_operators_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lane has a program, the step of a GPU is the primitive that knows its device's part."""
    step_call = second_step("ring", "zigzag", 2, causal=True)
    monkeypatch.setattr(jax_step.compiled_lane, "lane_of", lambda call: compiled_lane.Lane("a program"))
    jax_step._runs_operators.cache_clear()
    assert jax_step._runs_operators(step_call, "sm90")
    monkeypatch.setattr(backends, "operator_functions", lambda module: None)
    jax_step._runs_operators.cache_clear()
    assert not jax_step._runs_operators(step_call, "sm90")
    jax_step._runs_operators.cache_clear()
