"""A step's tiles as operators of torch that XLA runs without Python, one text (``operator_recorder``) for each part.

Kernels that are no operators of torch are launched by one of ours (``launched_kernels``). Each part's text runs the
part's own tiles. The offsets of every part's packed documents are operands.

The text of a forward writes the tiles' results into two buffers: out ``[batch, rows, heads, value_dim]`` in the call's
dtype, and lse ``[batch, heads, rows]``. A row without a tile gets -inf as lse. In the first step its out is 0; in later
steps it is not written, because the caller merges both into the results of earlier steps. The text of a backward writes
dq, dk and dv of all places, in the dtypes of sums; 0 at places without a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from attn_core import backends
from attn_core.backends.shared.programs import launched_kernels, operator_recorder
from attn_core.backends.shared.programs.operator_recorder import Functions
from attn_core.context_parallel.on_torch.current_gpu import HEAD_START
from attn_core.context_parallel.on_torch.rows import SavedRows, Total, add_gradients
from attn_core.context_parallel.on_torch.step import GradientForm, PartStep, StepCall, prepare_part
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
    program = backends.load(name, kind).program
    if program is None:
        return None
    return program.operator_functions or launched_kernels.functions_of(program.make)


@lru_cache(maxsize=256)
def texts(
    step_call: StepCall,
    operands: tuple[Operand, ...],
    device: str,
    overlaps_exchange: bool = False,
    gradient: GradientForm | None = None,
) -> tuple[str, ...]:
    """Returns the text of each part, see ``operator_recorder``.

    Its tensors are the operands, then those of ``offsets``, then those of ``results``.

    Args:
        operands: of q and of the keys, in the form that ``StepCall`` describes; in a backward also of out, lse, dout,
            and of dlse and dq if there are any.
        device: that tensors without memory are on.
        overlaps_exchange: whether an exchange was just started, which gets a head start.
        gradient: the form of a backward; None for a forward.

    Raises:
        Unrecordable: if a part's tiles read a table of places.
    """
    parts = range(len(step_call.step.tiles))
    return tuple(_text(step_call, part, operands, device, overlaps_exchange, gradient) for part in parts)


def results(step_call: StepCall, operands: Sequence[Operand], gradient: GradientForm | None) -> tuple[Operand, ...]:
    """Returns out and lse of a forward, or dq, dk and dv of a backward, as shapes and dtypes."""
    call, (q, dtype) = step_call.call, operands[0]
    keys = [shape for shape, _ in operands[1 : 1 + step_call.key_arrays]]
    if gradient is None:
        batch, rows, heads = q[:3]
        return ((*q[:3], keys[-1][-1]), dtype), ((batch, heads, rows), call.spec.lse_dtype)
    if step_call.stacked:  # [..., 2, batch, places, ...]
        keys = [(*keys[0][: len(keys[0]) - 5], *keys[0][len(keys[0]) - 4 :])] * 2
    if step_call.step.gathered:  # [parts, batch, places, ...] -> [batch, parts * places, ...]
        keys = [(batch, parts * places, *rest) for parts, batch, places, *rest in keys]
    of_keys = call.accumulator(gradient.of_keys)
    return ((q, call.accumulator("q")), *((shape, of_keys) for shape in keys))


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


def _text(
    step_call: StepCall,
    part: int,
    operands: Sequence[Operand],
    device: str,
    overlaps_exchange: bool,
    gradient: GradientForm | None,
) -> str:
    import torch

    with operator_recorder.without_memory():
        arrays, every = _empty(operands, device), _empty_offsets(step_call, device)
        written = _empty(results(step_call, operands, gradient), device)
        prepared = prepare_part(step_call, part, torch.device(device), gradients=gradient is not None)
        part_step = _recorded_part(step_call, part, prepared, device, every)

        def run() -> None:
            q, *keys = arrays
            if overlaps_exchange and part_step.tiles:
                torch.ops.attn_core_kernels.pause(q, HEAD_START)  # as ``head_start``
            if gradient is None:
                out, lse = written
                _attend_apart(part_step, q, keys, out, lse, zeros=not step_call.has_earlier_results)
            else:
                _write_gradients(step_call, part_step, gradient, arrays, written)

        tensors = [*arrays, *every, *written]
        return operator_recorder.record(run, tensors, _fake_results(step_call, part, device))


def _empty(operands: Sequence[Operand], device: str) -> list[Any]:
    """Returns tensors without memory; call it in ``operator_recorder.without_memory``."""
    import torch

    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in operands]


def _empty_offsets(step_call: StepCall, device: str) -> list[Any]:
    """Returns ``offsets`` without memory."""
    return _empty([((len(each),), "int32") for each in offsets(step_call)], device)


def _recorded_part(step_call: StepCall, part: int, part_step: PartStep, device: str, every: Sequence[Any]) -> PartStep:
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


def _fake_results(step_call: StepCall, part: int, device: str) -> Any:
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


def _write_gradients(
    step_call: StepCall, part_step: PartStep, gradient: GradientForm, arrays: Sequence[Any], written: Sequence[Any]
) -> None:
    """Writes dq, dk and dv of a part's tiles, the memory of each as a whole."""
    q, *rest = arrays
    keys, saved = rest[: step_call.key_arrays], rest[step_call.key_arrays :]
    out, lse, dout, *more = saved
    dlse = more[0] if gradient.with_dlse else None
    dq, dk, dv = (Total(each, each.shape[1], each.dtype, each) for each in written)
    totals = (Total.in_place(written[0]) if gradient.with_dq else dq, dk, dv)
    k, v = _in_rows(step_call, keys)
    add_gradients(part_step.tiles, SavedRows(q, out, lse, dout, dlse), k, v, totals, lends=True)
    for total in totals:
        total.tensor()  # 0 if nothing was added


def _in_rows(step_call: StepCall, keys: Sequence[Any]) -> tuple[Any, Any]:
    """Returns k and v, ``[batch, places, kv_heads, dim]``, of all parts end to end if they are gathered."""
    if step_call.stacked:
        keys = keys[0].unbind(-5)
    k, v = keys
    if not step_call.step.gathered:
        return k, v
    k, v = (each.transpose(0, 1).flatten(1, 2) for each in keys)
    return k, v
