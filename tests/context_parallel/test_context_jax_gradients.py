"""Tests the gradients of steps as operators of torch: one call has the operators of all parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import cpu_meshes
import jax
import jax.numpy as jnp
import torch
from jax.interpreters import mlir
from test_context_jax_operators import PACKED, ROW, attend_by_operators, operands_of, seen_by, step_of

from attn_core.backends.shared.programs import operator_recorder
from attn_core.backends.shared.programs.kernel_programs import OPERATOR
from attn_core.backends.shared.programs.operator_recorder import Functions
from attn_core.call.tensors import Gradients
from attn_core.context_parallel.on_torch import operators
from attn_core.context_parallel.on_torch.step import GradientForm
from jax_frontend import shard_sequence
from jax_frontend.bridge.bridged_call import BridgedStep
from jax_frontend.context_parallel import step, tiles
from jax_frontend.context_parallel.attention import context_parallel_attention
from jax_frontend.context_parallel.tiles import PartTiles, TileContext, WholeRows

pytestmark = [pytest.mark.usefixtures("four_devices"), pytest.mark.slow]

STEPS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "own, zigzag": ("ring", "zigzag", 2, {"number": 0, "causal": True}),
    "ring, zigzag": ("ring", "zigzag", 2, {"causal": True}),
    "all_gather, zigzag": ("all_gather", "zigzag", 2, {"causal": True}),
    "all_gather, four parts": ("all_gather", "zigzag", 4, {"causal": True}),
    # The first part sees none of the keys of others.
    "all_gather, contiguous": ("all_gather", "contiguous", 2, {"causal": True}),
    "ring, contiguous window": ("ring", "contiguous", 4, {"causal": True, "window": 5}),
    "own, window": ("ring", "window:9", 2, {"number": 0, "causal": True, "window": 9}),
    "own, documents": ("ring", "documents", 2, {"number": 0, **PACKED}),
    "ring, contiguous documents": ("ring", "contiguous", 2, PACKED),
}


def gradients_by_operators(
    spec: Any, inputs: Any, out: Any, lse: Any, dout: Any, dlse: Any = None, into: Any = None
) -> Gradients:
    """As ``attend_by_operators``, by the formula of a softmax's gradient."""
    q, k, v, out, dout = (each.flatten(0, -3) for each in (*inputs[:3], out, dout))
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    lse = lse if spec.packed else lse[0]
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = torch.exp(scores - lse[..., None]).masked_fill(~seen_by(spec, inputs, len(q), len(k)), 0)
    weights = weights.masked_fill(torch.isneginf(lse)[..., None], 0)
    of_rows = -(dout * out).sum(-1).t()
    if dlse is not None:
        of_rows = of_rows + (dlse if spec.packed else dlse[0])
    change = weights * (torch.einsum("qhd,khd->hqk", dout, v) + of_rows[..., None]) * q.shape[-1] ** -0.5
    dq = torch.einsum("hqk,khd->qhd", change, k)
    dk, dv = torch.einsum("hqk,qhd->khd", change, q), torch.einsum("hqk,qhd->khd", weights, dout)
    dk, dv = (each.unflatten(1, (-1, group)).sum(2) for each in (dk, dv))
    found = [each if spec.packed else each[None] for each in (dq, dk, dv)]
    for at, buffer in enumerate(into or ()):
        found[at] = found[at] if buffer is None else buffer.copy_(found[at])
    return Gradients(*found)


@pytest.fixture(autouse=True)
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the plain backend for one whose programs are operators of torch."""
    found = Functions(lambda *_: None, gradients_by_operators, True)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(operators, "functions_of", lambda name, kind: found)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_each_device_computes_the_gradients_of_its_part(library: Path, name: str, with_dlse: bool) -> None:
    strategy, layout, ranks, options = STEPS[name]
    step_call = step_of(strategy, layout, ranks, **options)
    q, *keys = operands_of(step_call)
    draw = np.random.default_rng(1)
    rows = [draw.standard_normal(shape).astype(np.float32) for shape in (q.shape, (1, 4, ROW // ranks), q.shape)]
    rows[1] = rows[1] + 4  # about as large as a log-sum-exp
    more = [draw.standard_normal(rows[1].shape).astype(np.float32)] if with_dlse else []
    earlier = [] if step_call.step.own else [draw.standard_normal(q.shape).astype(np.float32)]
    form = GradientForm("own" if step_call.step.own else "sent", with_dlse, bool(earlier))
    given = [q, *keys, *rows, *more, *earlier]
    about = tuple((each.shape, str(each.dtype)) for each in given)
    texts = operators.texts(step_call, about, "cpu", gradient=form)
    context = TileContext(step_call.call, "cpu")
    types = [jax.typeof(jnp.zeros(*each)) for each in operators.results(step_call, about, form)]
    for part, text in enumerate(texts):
        part_tiles = PartTiles(
            step_call.step.tiles[part], step_call.step.gathered, part if step_call.step.gathered else None
        )
        right = tiles.gradients(
            *(context, form.of_keys, part_tiles, jnp.asarray(q), tuple(map(jnp.asarray, keys))),
            WholeRows(*map(jnp.asarray, rows), jnp.asarray(more[0]) if more else None),
            *map(jnp.asarray, earlier),
        )
        call = BridgedStep(step_call, "cpu", False, gradient=form)
        run = jax.jit(
            lambda *arrays, text=text, call=call: step.run_operators(
                *arrays, call=call, text=operators.by_device({0: text}), results=types
            )
        )
        for found, expected in zip(run(*given), right, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


CALLS = {
    "ring, two": ("ring", "zigzag", 2, {}),
    "ring, four": ("ring", "zigzag", 4, {"return_lse": True}),
    "all_gather, two": ("all_gather", "zigzag", 2, {}),
    "all_gather, four": ("all_gather", "contiguous", 4, {}),
    "borders": ("ring", "contiguous", 4, {"window": 5}),
    "kept borders": ("ring", "window:9", 2, {"window": 9}),
    "documents": ("ring", "documents", 2, {"seq_info": PACKED["seq_info"]}),
}


def forget_texts() -> None:
    """Forgets what was recorded, and what JAX has traced."""
    operators.texts.cache_clear()
    jax.clear_caches()


@pytest.fixture
def as_on_gpus(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lowers steps for CPUs as for GPUs whose kernels XLA launches: by operators."""

    def forward(spec: Any, inputs: Any, into: Any = None) -> Any:
        out, lse = attend_by_operators(spec, inputs)
        return (out, lse) if into is None else (into[0].copy_(out), into[1].copy_(lse))

    found = Functions(forward, gradients_by_operators, True)
    monkeypatch.setattr(operators, "functions_of", lambda name, kind: found)
    monkeypatch.setattr(step, "_runs_by_callback", lambda *_: False)
    monkeypatch.setattr(step, "_runs_operators", lambda *_: True)
    monkeypatch.setattr(step, "runs_on", lambda *_: True)
    monkeypatch.setattr(operator_recorder, "FAKE_DEVICE", "cpu")
    forget_texts()
    mlir.register_lowering(step.step_p, step._lower_for_gpu, platform="cpu")
    yield
    mlir.register_lowering(step.step_p, step._lower_for_cpu, platform="cpu")
    forget_texts()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_over_devices_by_operators_has_the_results_of_branches(
    name: str, request: pytest.FixtureRequest
) -> None:
    strategy, layout, ranks, more = CALLS[name]
    mesh, draw = cpu_meshes.mesh((ranks,), ("cp",)), np.random.default_rng(3)
    where = {"mesh": mesh, "strategy": strategy, "layout": layout, "causal": True, "backend": "math", **more}
    info = more.get("seq_info")
    q, k, v, dout = (
        shard_sequence(
            jnp.asarray(draw.standard_normal((1, ROW, heads, 8)), jnp.float32), mesh, layout=layout, seq_info=info
        )
        for heads in (4, 2, 2, 4)
    )

    def call(q: Any, k: Any, v: Any, dout: Any) -> Any:
        results, gradients = jax.vjp(partial(context_parallel_attention, **where), q, k, v)
        if not isinstance(results, tuple):
            return results, *gradients(dout)
        return *results, *gradients((dout, results[1] / 7))

    expected = jax.jit(lambda *arrays: call(*arrays))(q, k, v, dout)
    request.getfixturevalue("as_on_gpus")
    program = jax.jit(lambda *arrays: call(*arrays)).lower(q, k, v, dout)
    text = program.as_text()
    assert OPERATOR in text and "stablehlo.case" not in text
    for found, right in zip(program.compile()(q, k, v, dout), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


def test_a_text_begins_with_a_pause_if_an_exchange_was_started(library: Path) -> None:
    step_call = step_of("all_gather", "contiguous", 2, causal=True)
    q, *keys = operands_of(step_call)
    lse = np.zeros((1, 4, ROW // 2), np.float32)
    about = tuple((each.shape, "float32") for each in (q, *keys, q, lse, q))
    form = GradientForm("sent", False, False)
    for overlaps in (False, True):
        first, last = operators.texts(step_call, about, "cpu", overlaps, form)
        assert ("attn_core_kernels::pause" in last.splitlines()[1]) == overlaps
        assert "pause" not in first  # this part has no tile
