"""Tests the gradients of steps as operators of torch: one call has the operators of all parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import jax
import jax.numpy as jnp
import torch
from test_context_jax_operators import PACKED, ROW, operands_of, seen_by, step_of

from attn_core import backends
from attn_core.backends.shared.programs.operator_program import Functions
from attn_core.call.tensors import Gradients
from attn_core.context_parallel.on_torch import gradient_operators, operators
from attn_core.context_parallel.on_torch.gradient_operators import GradientStep
from jax_frontend.bridge.bridged_call import BridgedStep
from jax_frontend.context_parallel import step_operators, tiles
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
    monkeypatch.setattr(backends, "operator_functions", lambda module: found)


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
    form = GradientStep(step_call, "own" if step_call.step.own else "sent", with_dlse, bool(earlier))
    given = [q, *keys, *rows, *more, *earlier]
    about = tuple((each.shape, str(each.dtype)) for each in given)
    texts = gradient_operators.texts(form, about, "cpu")
    context = TileContext(step_call.call, "cpu")
    types = [jax.typeof(jnp.zeros(*each)) for each in gradient_operators.results(form, about)]
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
            lambda *arrays, text=text, call=call: step_operators.run(
                call, operators.by_device({0: text}), types, arrays
            )
        )
        for found, expected in zip(run(*given), right, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_text_begins_with_a_pause_if_an_exchange_was_started(library: Path) -> None:
    step_call = step_of("all_gather", "contiguous", 2, causal=True)
    q, *keys = operands_of(step_call)
    lse = np.zeros((1, 4, ROW // 2), np.float32)
    about = tuple((each.shape, "float32") for each in (q, *keys, q, lse, q))
    form = GradientStep(step_call, "sent", False, False)
    for overlaps in (False, True):
        first, last = gradient_operators.texts(form, about, "cpu", overlaps)
        assert ("attn_core_kernels::pause" in last.splitlines()[1]) == overlaps
        assert "pause" not in first  # this part has no tile
