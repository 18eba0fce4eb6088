"""Drawn calls in forward mode: tangents for a call, its results through either frontend, and their verdict."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import forward_mode_reference as forward_mode
import numpy as np
from oracle_cases import rounded
from spec_strategies import Call

from attn_core.call.tensors import Inputs, Tangents
from attn_core.correctness import accuracy

NAMES = ("q", "k", "v", "bias", "sinks")
"""The inputs that may have tangents."""


def in_forward_mode(call: Call) -> Call:
    """The call without gradients in reverse mode, and with the log-sum-exp.

    torch itself gives no tangent to a tensor whose elements share memory.
    """
    layout = "contiguous" if call.layout == "one_head_expanded" else call.layout
    return replace(call, spec=replace(call.inference.spec, return_lse=True), layout=layout)


def tangents_of(call: Call, names: tuple[str, ...] = NAMES) -> Tangents:
    """Tangents for some of the call's inputs: float64 numbers that the inputs' dtypes represent."""
    random = np.random.default_rng(call.seed + 7)
    moved = {}
    for name in NAMES:
        primal = getattr(call.inputs, name)
        if primal is not None:
            values = rounded(random.standard_normal(primal.shape), call.dtype_of(name))
            moved[f"d{name}"] = values if name in names else None
    return Tangents(**moved)


def judge(call: Call, tangents: Tangents, results: dict[str, Any], inputs: Inputs | None = None) -> accuracy.Accuracy:
    """The verdict on out, lse, dout and dlse as a caller gets them."""
    return forward_mode.expect(call.spec, inputs or call.inputs, tangents).compare(results)


def run(framework: str, call: Call, tangents: Tangents, backend: str | None, device: str = "cpu") -> dict[str, Any]:
    """out, lse, dout and dlse in the shapes of the spec, from the frontend's forward mode."""
    moved = {name[1:]: tangent for name, tangent in tangents._asdict().items() if tangent is not None}
    primals = {name: call.arrays()[name] for name in moved}
    moved = {name: tangent.reshape(primals[name].shape) for name, tangent in moved.items()}
    results = (_run_torch if framework == "torch" else _run_jax)(call, moved, backend, device)
    named = dict(zip(("out", "lse", "dout", "dlse"), results, strict=True))
    return named | {name: named[name][0] for name in ("out", "dout") if call.one_row}


def _run_torch(call: Call, moved: dict[str, Any], backend: str | None, device: str) -> list[np.ndarray]:
    import torch
    from both_frontends import _numpy, _torch_arrays, _torch_info

    import torch_frontend
    from attn_core.cli.trial import as_keywords

    arrays, _ = _torch_arrays(call, device)
    kinds = {name: arrays[name].dtype for name in moved}
    tangents = [torch.from_numpy(np.array(each)).to(device, kinds[name]) for name, each in moved.items()]

    def attend(*primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = as_keywords(arrays | dict(zip(moved, primals, strict=True)))
        return torch_frontend.attention(**given, **call.options, **_torch_info(call, device), backend=backend)

    results = torch.func.jvp(attend, tuple(arrays[name] for name in moved), tuple(tangents))
    return [_numpy(tensor) for pair in results for tensor in pair]


def _run_jax(call: Call, moved: dict[str, Any], backend: str | None, device: str) -> list[np.ndarray]:
    import jax.numpy as jnp
    from both_frontends import _jax_arrays, _jax_info, _jax_on

    with _jax_on(call, device):
        given = _jax_arrays(call)
        primals = {name: given.pop(name) for name in moved}
        tangents = {name: jnp.asarray(moved[name], array.dtype) for name, array in primals.items()}
        program = _program(backend, tuple(sorted(call.options.items(), key=itemgetter(0))))
        return [np.asarray(array) for pair in program(primals, tangents, given, *_jax_info(call)) for array in pair]


@lru_cache(maxsize=256)
def _program(backend: str | None, options: tuple[tuple[str, Any], ...]) -> Any:
    import jax
    from both_frontends import compiled_as

    import jax_frontend
    from attn_core.cli.trial import as_keywords

    @partial(jax.jit, compiler_options=compiled_as(backend))
    def program(primals: Any, tangents: Any, given: Any, info: Any, key: Any) -> Any:
        def forward(moving: dict[str, Any]) -> Any:
            arrays = as_keywords({**moving, **given})
            return jax_frontend.attention(**arrays, **dict(options), seq_info=info, dropout_rng=key, backend=backend)

        return jax.jvp(forward, (primals,), (tangents,))

    return program
