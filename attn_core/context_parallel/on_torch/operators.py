"""A step's tiles as operators of torch that XLA runs without Python, one text for each part.

Each part's text runs the part's own tiles and writes their results into two buffers: out
``[batch, rows, heads, value_dim]`` in the call's dtype, and lse ``[batch, heads, rows]``. A row without a tile gets
-inf as lse; its out is not written. The caller merges them into the results of earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from attn_core import backends
from attn_core.backends.shared.programs import operator_recorder
from attn_core.backends.shared.programs.kernel_programs import Unrecordable
from attn_core.context_parallel.on_torch.step import PartStep, StepCall, prepare_part
from attn_core.context_parallel.places import places_of_tile

Operand = tuple[tuple[int, ...], str]
"""The shape and the dtype of an operand."""


def refusal(step_call: StepCall, kind: str) -> str | None:
    """Returns why a step has no texts, or None.

    Args:
        kind: of the devices, "cpu" or "cuda".
    """
    for tiles in step_call.step.tiles:
        rows = [places_of_tile(tile)[0] for tile in tiles]
        if rows and len(np.unique(np.concatenate(rows))) < sum(map(len, rows)):
            return "tiles of one part share rows, so their results would have to be merged"
        for tile in tiles:
            _, name = step_call.call.backend_of(tile)
            if backends.operator_functions(backends.load(name, kind)) is None:
                return f"{name}: its kernels are no operators of torch"
    return None


@lru_cache(maxsize=256)
def texts(step_call: StepCall, operands: tuple[Operand, ...], device: str) -> tuple[str, ...]:
    """Returns the text of each part, see ``operator_recorder``. Its tensors are the operands, then out and lse.

    Args:
        operands: of q and of the keys, in the form that ``StepCall`` describes.
        device: that tensors without memory are on.

    Raises:
        Unrecordable: if a part's tiles read a table of places, or packed documents.
    """
    return tuple(_text(step_call, part, operands, device) for part in range(len(step_call.step.tiles)))


def by_device(texts: dict[int, str]) -> str:
    """Returns one text of several for devices that run other operators, by the device's number in its process.

    Its first line is "devices" with ``device:program`` for each device; then come the programs, with "---" between.
    """
    distinct = list(dict.fromkeys(texts.values()))
    places = " ".join(f"{device}:{distinct.index(text)}" for device, text in sorted(texts.items()))
    return f"devices {places}\n" + "\n---\n".join(distinct)


def _text(step_call: StepCall, part: int, operands: Sequence[Operand], device: str) -> str:
    import torch

    with operator_recorder.without_memory():
        q, *keys = (torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in operands)
        spec = step_call.call.spec
        value_dim = keys[-1].shape[-1]
        out = torch.empty((*q.shape[:3], value_dim), dtype=q.dtype, device=device)
        lse_dtype = getattr(torch, spec.lse_dtype)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype, device=device)
        part_step = prepare_part(step_call, part, torch.device(device))
        if any(run.cu_seqlens is not None for run in part_step.tiles):
            raise Unrecordable("packed documents: their offsets are tensors of the step")
        fake_results = _fake_results(step_call, part, torch.device(device).type)
        return operator_recorder.record(
            lambda: _attend_apart(part_step, q, keys, out, lse), [q, *keys, out, lse], fake_results
        )


def _fake_results(step_call: StepCall, part: int, kind: str) -> Any:
    """Returns the stand-ins for operators that torch cannot run without memory, of all backends of a part's tiles."""
    names = {step_call.call.backend_of(tile)[1] for tile in step_call.step.tiles[part]}
    every = [backends.operator_functions(backends.load(name, kind)).fake_results for name in sorted(names)]

    def fake_results(op: Any, arguments: dict[str, Any]) -> Any:
        answers = (fake(op, arguments) for fake in every if fake is not None)
        return next((results for results in answers if results is not None), None)

    return fake_results


def _attend_apart(part_step: PartStep, q: Any, keys: Sequence[Any], out: Any, lse: Any) -> None:
    """Writes each tile's results to its rows of out and lse."""
    if sum(run.rows.count for run in part_step.tiles) < q.shape[1]:
        lse.fill_(-float("inf"))
    if not part_step.tiles:
        return
    if part_step.keys is not None:
        keys = tuple(map(part_step.keys.take, keys))
    k, v = keys if len(keys) == 2 else keys[0].unbind(0)
    for run in part_step.tiles:
        # A kernel writes into a view of the rows if they are one range, else into buffers of its own.
        direct = run.writes and run.rows.is_one_range
        buffers = [(run.rows.take(out), run.rows.take(lse, 2))] if direct else []
        for target, result, axis in zip((out, lse), run.attend(q, k, v, *buffers), (1, 2), strict=True):
            if not (buffers and result is buffers[0][axis - 1]):
                run.rows.put(target, result, axis)
