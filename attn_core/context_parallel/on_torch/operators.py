"""A step's tiles as operators of torch that XLA runs without Python, one text (``operator_recorder``) for each part.

Kernels that are no operators of torch are launched by one of ours (``launched_kernels``). Each part's text runs the
part's own tiles. That of a forward writes their results into two buffers: out ``[batch, rows, heads, value_dim]`` in
the call's dtype, and lse ``[batch, heads, rows]``. A row without a tile gets -inf as lse. In the first step its out is
0; in later steps it is not written, because the caller merges both into the results of earlier steps. That of a
backward is in ``gradient_operators``. The offsets of every part's packed documents are operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from attn_core import backends
from attn_core.backends.shared.programs import launched_kernels, operator_recorder
from attn_core.backends.shared.programs.operator_program import Functions
from attn_core.context_parallel.on_torch.head_start import HEAD_START
from attn_core.context_parallel.on_torch.step import PartStep, StepCall, prepare_part
from attn_core.context_parallel.places import places_of_tile
from attn_core.context_parallel.tiles import Tile

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
            if functions_of(name, kind) is None:
                return f"{name}: XLA launches none of its kernels"
    return None


def functions_of(name: str, kind: str) -> Functions | None:
    """Returns what texts record of a backend: operators of torch, or launches of its programs' kernels; else None."""
    module: Any = backends.load(name, kind)
    functions: Functions | None = module.OPERATOR_FUNCTIONS
    if functions is None and module.program is not None:
        return launched_kernels.functions_of(module.program)
    return functions


@lru_cache(maxsize=256)
def texts(
    step_call: StepCall, operands: tuple[Operand, ...], device: str, overlaps_exchange: bool = False
) -> tuple[str, ...]:
    """Returns the text of each part, see ``operator_recorder``.

    Its tensors are the operands, then those of ``offsets``, then out and lse.

    Args:
        operands: of q and of the keys, in the form that ``StepCall`` describes.
        device: that tensors without memory are on.
        overlaps_exchange: whether an exchange was just started, which gets a head start.

    Raises:
        Unrecordable: if a part's tiles read a table of places.
    """
    parts = range(len(step_call.step.tiles))
    return tuple(_text(step_call, part, operands, device, overlaps_exchange) for part in parts)


def offsets(step_call: StepCall) -> list[np.ndarray]:
    """Returns int32 ``[documents + 1]``: the offsets of the queries and of the keys of every packed tile, of all parts.

    Each device has those of all parts, as constants, and runs a text that reads its own part's.
    """
    return [
        np.asarray(side, np.int32)
        for tiles in step_call.step.tiles
        for tile in tiles
        if tile.packed
        for side in tile.offsets
    ]


def by_device(texts: dict[int, str]) -> str:
    """Returns one text of several for devices that run other operators, by the number of each device in JAX.

    It is the same in every process. Its first line is "devices" with ``device:program`` for each device; then come the
    programs, with "---" between.
    """
    distinct = list(dict.fromkeys(texts.values()))
    places = " ".join(f"{device}:{distinct.index(text)}" for device, text in sorted(texts.items()))
    return f"devices {places}\n" + "\n---\n".join(distinct)


def _text(step_call: StepCall, part: int, operands: Sequence[Operand], device: str, overlaps_exchange: bool) -> str:
    import torch

    with operator_recorder.without_memory():
        q, *keys = empty(operands, device)
        spec = step_call.call.spec
        value_dim = keys[-1].shape[-1]
        out = torch.empty((*q.shape[:3], value_dim), dtype=q.dtype, device=device)
        lse_dtype = getattr(torch, spec.lse_dtype)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype, device=device)
        every = empty_offsets(step_call, device)
        part_step = recorded_part(step_call, part, prepare_part(step_call, part, torch.device(device)), device, every)
        first = not step_call.has_earlier_results

        def run() -> None:
            if overlaps_exchange and part_step.tiles:
                pause(q)
            _attend_apart(part_step, q, keys, out, lse, zeros=first)

        return operator_recorder.record(run, [q, *keys, *every, out, lse], fake_results(step_call, part, device))


def empty(operands: Sequence[Operand], device: str) -> list[Any]:
    """Returns tensors without memory; call it in ``operator_recorder.without_memory``."""
    import torch

    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in operands]


def empty_offsets(step_call: StepCall, device: str) -> list[Any]:
    """Returns ``offsets`` without memory."""
    return empty([((len(each),), "int32") for each in offsets(step_call)], device)


def pause(q: Any) -> None:
    """Gives an exchange a head start, as ``head_start`` does."""
    import torch

    torch.ops.attn_core_kernels.pause(q, HEAD_START)


def recorded_part(step_call: StepCall, part: int, part_step: PartStep, device: str, every: Sequence[Any]) -> PartStep:
    """Returns a part's step whose tiles run what texts record, and read their offsets from ``every``, the operands."""
    before = 2 * sum(tile.packed for tiles in step_call.step.tiles[:part] for tile in tiles)
    own, runs = iter(every[before:]), []
    for tile, run in zip(step_call.step.tiles[part], part_step.tiles, strict=True):
        functions = _functions_of_tile(step_call, tile, device)
        cu_seqlens = None if run.cu_seqlens is None else (next(own), next(own))
        forward, backward, writes, _ = functions
        recorded = run._replace(
            forward=forward, backward=backward, writes=writes, writes_gradients=writes, cu_seqlens=cu_seqlens
        )
        runs.append(recorded)
    return part_step._replace(tiles=tuple(runs))


def fake_results(step_call: StepCall, part: int, device: str) -> Any:
    """Returns the stand-ins for operators that torch cannot run without memory, of all backends of a part's tiles."""
    every = [_functions_of_tile(step_call, tile, device).fake_results for tile in step_call.step.tiles[part]]

    def of_operator(op: Any, arguments: dict[str, Any]) -> Any:
        answers = (fake(op, arguments) for fake in every if fake is not None)
        return next((results for results in answers if results is not None), None)

    return of_operator


def _functions_of_tile(step_call: StepCall, tile: Tile, device: str) -> Functions:
    functions = functions_of(step_call.call.backend_of(tile)[1], device.partition(":")[0])
    assert functions is not None, "a step without refusals has functions for every tile"
    return functions


def _attend_apart(part_step: PartStep, q: Any, keys: Sequence[Any], out: Any, lse: Any, *, zeros: bool) -> None:
    """Writes each tile's results to its rows of out and lse.

    Args:
        zeros: whether to write 0 to the other rows of out.
    """
    if sum(run.rows.count for run in part_step.tiles) < q.shape[1]:
        lse.fill_(-float("inf"))
        if zeros and len(part_step.tiles) == 1 and part_step.tiles[0].rows.is_one_range:
            part_step.tiles[0].rows.zero_others(out)
        elif zeros:
            out.zero_()
    if not part_step.tiles:
        return
    if part_step.keys is not None:
        keys = tuple(map(part_step.keys.take, keys))
    k, v = keys if len(keys) == 2 else keys[0].unbind(0)
    for run in part_step.tiles:
        if not (run.writes and run.rows.is_one_range):
            for target, result, axis in zip((out, lse), run.attend(q, k, v), (1, 2), strict=True):
                run.rows.put(target, result, axis)
            continue
        # The kernel writes into views of the rows; those of packed documents have no batch axis.
        views = run.rows.take(out), run.rows.take(lse, 2)
        buffers = (views[0][0], views[1][0]) if run.spec.packed else views
        for buffer, result in zip(buffers, run.forward(run.spec, run.inputs(q, k, v), buffers), strict=True):
            if result is not buffer:
                buffer.copy_(result)
