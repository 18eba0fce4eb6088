"""Tests steps of context parallelism whose kernels are operators of torch: one call has the operators of all parts."""

from __future__ import annotations

import ctypes
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
from attn_core.backends.shared.programs.operator_recorder import Functions
from attn_core.context_parallel.on_torch import operators, step
from attn_core.context_parallel.on_torch import places as on_torch_places
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

    def functions_of(name: str, kind: str) -> Functions:
        record = backends.load(name, kind)
        assert record.backward is not None
        return Functions(record.forward, record.backward, bool(record.writes_into))

    monkeypatch.setattr(operators, "functions_of", functions_of)


def attend_by_operators(spec: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, or packed documents, by operators that read offsets on the device; the plain backend needs values."""
    q, k, v = (each.flatten(0, -3) for each in inputs[:3])
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen_by(spec, inputs, len(q), len(k)), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[..., None]), v).contiguous()
    return (out, lse) if spec.packed else (out[None], lse[None])


def seen_by(spec: Any, inputs: Any, queries: int, keys: int) -> torch.Tensor:
    """Which keys each query sees, by offsets on the device."""
    places, from_end = [], []
    for count, offsets in ((queries, inputs.cu_seqlens_q), (keys, inputs.cu_seqlens_k)):
        at = torch.arange(count)
        places.append(torch.zeros_like(at) if offsets is None else torch.searchsorted(offsets[1:], at, right=True))
        from_end.append((count if offsets is None else offsets[places[-1] + 1]) - at)
    distance = from_end[1] - from_end[0][:, None]
    seen = places[0][:, None] == places[1]
    left, right = spec.window[0], 0 if spec.causal else spec.window[1]
    seen = seen if right is None else seen & (distance >= -right)
    return seen if left is None else seen & (distance <= left)


@pytest.fixture
def packed_operators(replace_fields: Any) -> None:
    """Lets the plain backend run tiles by operators that can be recorded, packed ones too, into buffers."""

    def forward(spec: Any, inputs: Any, into: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend_by_operators(spec, inputs)
        if into is None:
            return out, lse
        assert into[0].shape == out.shape and into[1].shape == lse.shape
        return into[0].copy_(out), lse

    replace_fields(backends.load("math", "cpu"), forward=forward, writes_into=("forward",))


def step_of(strategy: str, layout: str, ranks: int, number: int = 1, **options: Any) -> StepCall:
    """A step of a float32 row of ROW positions on CPUs, the second one by default; the keys travel as one array."""
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
    return StepCall(results[0].call, number, stacked=number > 0)


def operands_of(step_call: StepCall) -> list[np.ndarray]:
    """q and the keys of the step, with values."""
    draw, plan = np.random.default_rng(0), step_call.call.plan
    shard = plan.q_layout.shard
    # Two parts swap their keys, so each receives one block; several parts receive all of them.
    lead = () if not step_call.step.gathered else (1 if plan.outer == 2 else plan.outer,)
    keys = [(*lead, 2, 1, shard, 2, 8)] if step_call.stacked else [(1, shard, 2, 8)] * 2
    shapes = [(1, shard, 4, 8), *keys]
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


PACKED = {"causal": True, "seq_info": SeqInfo.from_lengths([3, 17, 4, 6, 2])}
STEPS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "ring, zigzag": ("ring", "zigzag", 2, {"causal": True}),
    "all_gather, zigzag": ("all_gather", "zigzag", 2, {"causal": True}),
    "all_gather, four parts": ("all_gather", "zigzag", 4, {"causal": True}),
    # The first part sees none of the gathered keys.
    "all_gather, contiguous": ("all_gather", "contiguous", 2, {"causal": True}),
    "ring, contiguous, softcap": ("ring", "contiguous", 4, {"causal": True, "softcap": 5.0}),
    "own, documents": ("ring", "documents", 2, {"number": 0, **PACKED}),
    "own, contiguous documents": ("ring", "contiguous", 4, {"number": 0, **PACKED}),
    "ring, contiguous documents": ("ring", "contiguous", 2, PACKED),
    "all_gather, zigzag documents": ("all_gather", "zigzag", 2, PACKED),
    "own, window": ("ring", "window:9", 2, {"number": 0, "causal": True, "window": 9}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_each_device_runs_the_operators_of_its_part(library: Path, request: pytest.FixtureRequest, name: str) -> None:
    if "number" in STEPS[name][3] or "documents" in name:
        request.getfixturevalue("packed_operators")
    strategy, layout, ranks, options = STEPS[name]
    step_call = step_of(strategy, layout, ranks, **options)
    assert operators.refusal(step_call, "cpu") is None
    operands = operands_of(step_call)
    texts = operators.texts(step_call, tuple((each.shape, str(each.dtype)) for each in operands), "cpu")
    assert len(set(texts)) > 1
    out_type = jax.ShapeDtypeStruct(operands[0].shape, np.float32)
    lse_type = jax.ShapeDtypeStruct((1, 4, ROW // ranks), np.float32)
    # Devices in another order than their parts, as on a turned mesh.
    order = list(range(ranks))[::-1]
    text = operators.by_device({device: texts[part] for device, part in enumerate(order)})
    offsets = operators.offsets(step_call)
    assert offsets or not ("documents" in name and "own" in name)
    call = jax.jit(lambda *arrays: jax.ffi.ffi_call(OPERATOR, (out_type, lse_type))(*arrays, *offsets, operators=text))
    for device, part in enumerate(order):
        placed = [jax.device_put(each, jax.devices("cpu")[device]) for each in operands]
        out, lse = (np.array(each) for each in call(*placed))
        unseen = np.isneginf(lse).swapaxes(1, 2)[..., None]
        right, right_lse = torch.zeros(out.shape), torch.full(lse.shape, -torch.inf)
        scratch = torch.empty(step_call.scratch("cpu")), torch.empty(lse.size)
        q, *keys = map(torch.from_numpy, operands)
        step.attend(step.prepare_part(step_call, part, q.device), q, keys, (right, right_lse), scratch)
        np.testing.assert_array_equal(lse, right_lse.numpy())
        # The first step's results are whole; those of later ones are merged.
        np.testing.assert_array_equal(np.where(unseen, 0, out) if step_call.step_index else out, right.numpy())


def test_a_device_that_the_text_lacks_is_an_error(library: Path) -> None:
    text = operators.by_device({7: "2\naten::copy_ - t1 t0 b0 > -1 ~"})
    result = jax.ShapeDtypeStruct((3,), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="compile it for the devices"):
        jax.block_until_ready(jax.ffi.ffi_call(OPERATOR, result)(np.ones(3, np.float32), operators=text))


def test_tables_of_places_and_tiles_that_share_rows_are_left_to_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(on_torch_places, "contiguous_ranges", lambda index: None)
        step_call = step_of("ring", "contiguous", 2, causal=True, window=9)
        operands = tuple((each.shape, "float32") for each in operands_of(step_call))
        with pytest.raises(Unrecordable):
            operators.texts(step_call, operands, "cpu")
    plain = step_of("ring", "zigzag", 2, causal=True)
    (tile,) = plain.step.tiles[1]
    twice: Any = SimpleNamespace(call=plain.call, step=SimpleNamespace(tiles=((tile,), (tile, tile))))
    assert "share rows" in str(operators.refusal(twice, "cpu"))


def test_the_results_of_earlier_steps_are_merged(library: Path) -> None:
    """The custom call and the merge around it are what branches compute."""
    step_call = step_of("ring", "zigzag", 2, causal=True)
    q, keys = operands_of(step_call)
    draw = np.random.default_rng(1)
    out, lse = (
        draw.standard_normal(q.shape).astype(np.float32),
        draw.standard_normal((1, 4, ROW // 2)).astype(np.float32),
    )
    lse[:, :, 3] = -np.inf
    out[:, 3] = 0
    texts = operators.texts(step_call, ((q.shape, "float32"), (keys.shape, "float32")), "cpu")
    types = [jax.typeof(jnp.asarray(out)), jax.typeof(jnp.asarray(lse))]
    for part in range(2):
        call = BridgedStep(step_call, "cpu", False)
        text = operators.by_device({0: texts[part]})
        run = jax.jit(
            lambda *arrays, text=text, call=call: jax_step.run_operators(*arrays, call=call, text=text, results=types)
        )
        context = TileContext(step_call.call, "cpu")
        tiles = PartTiles(step_call.step.tiles[part])
        right = attend(context, tiles, jnp.asarray(q), (jnp.asarray(keys),), (jnp.asarray(out), jnp.asarray(lse)))
        for one, other in zip(run(q, keys, out, lse), right, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_the_first_step_needs_no_merge(library: Path, packed_operators: None) -> None:
    step_call = step_of("ring", "documents", 2, 0, **PACKED)
    operands = operands_of(step_call)
    texts = operators.texts(step_call, tuple((each.shape, "float32") for each in operands), "cpu")
    types = [jax.typeof(jnp.zeros(shape)) for shape in ((1, ROW // 2, 4, 8), (1, 4, ROW // 2))]
    for part, text in enumerate(texts):
        context = TileContext(step_call.call, "cpu")
        right = attend(context, PartTiles(step_call.step.tiles[part]), operands[0], tuple(operands[1:]), None)
        actual = jax.jit(
            lambda *arrays, text=text: jax_step.run_operators(
                *arrays,
                call=BridgedStep(step_call, "cpu", False),
                text=operators.by_device({0: text}),
                results=types,
            )
        )(*operands)
        for one, other in zip(actual, right, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_text_has_the_devices_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes must lower one program."""
    step_call = step_of("ring", "zigzag", 2, causal=True)
    monkeypatch.setattr(compiled_lane, "register_launches", lambda: None)
    monkeypatch.setattr(operators, "texts", lambda *_: ("one", "other"))
    call = BridgedStep(step_call, "sm90", False, parts=((5, 0), (2048, 1), (2053, 0)))
    assert jax_step.text_of(call, []) == "devices 5:0 2048:1 2053:0\none\n---\nother"


def test_a_device_has_the_number_that_jax_gives_it(library: Path) -> None:
    compiled, result = ctypes.CDLL(str(library)), jax.ShapeDtypeStruct((3,), np.float32)
    text = operators.by_device({7: "2\naten::copy_ - t1 t0 b0 > -1 ~"})
    call = jax.jit(lambda x: jax.ffi.ffi_call(OPERATOR, result)(x, operators=text))
    number, numbers = ctypes.c_int64(0), [ctypes.c_int64(each) for each in (7, 0)]
    compiled.attn_core_set_device(number, numbers[0])
    try:
        np.testing.assert_array_equal(call(np.ones(3, np.float32)), np.ones(3))
    finally:
        compiled.attn_core_set_device(number, numbers[1])


def test_a_step_that_cannot_be_recorded_has_branches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step_call = step_of("ring", "zigzag", 2, causal=True)
    call = BridgedStep(step_call, "sm90", False, parts=((0, 0), (1, 1)))

    def changed(*_: Any) -> Any:
        raise TypeError("forward() got an unexpected keyword")

    monkeypatch.setattr(compiled_lane, "register_launches", lambda: None)
    monkeypatch.setattr(operators, "texts", changed)
    assert jax_step.text_of(call, []) is None
    assert "runs in branches: TypeError: forward() got an unexpected keyword" in caplog.text


def test_steps_of_operators_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lane has a program, the step of a GPU is the primitive that knows its device's part."""
    step_call = step_of("ring", "zigzag", 2, causal=True)
    monkeypatch.setattr(jax_step.compiled_lane, "lane_of", lambda call: compiled_lane.Lane("a program"))
    jax_step._runs_operators.cache_clear()
    assert jax_step._runs_operators(step_call, "sm90")
    monkeypatch.setattr(operators, "functions_of", lambda name, kind: None)
    jax_step._runs_operators.cache_clear()
    assert not jax_step._runs_operators(step_call, "sm90")
    jax_step._runs_operators.cache_clear()
