"""The gradients of a step's tiles as operators of torch that XLA runs without Python, one text for each part.

``operators`` says what a text is. Each part's text writes dq, dk and dv of all places, in the dtypes of sums; 0 at
places without a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.shared.programs import operator_recorder
from attn_core.context_parallel.on_torch import operators
from attn_core.context_parallel.on_torch.operators import Operand
from attn_core.context_parallel.on_torch.rows import SavedRows, Total, tile_gradients
from attn_core.context_parallel.on_torch.step import PartStep, StepCall
from attn_core.context_parallel.on_torch.tiles import RowCoverage, build_tile_run
from attn_core.context_parallel.places import places_in_gathered, places_of_tile

Tensor = Any


class GradientStep(NamedTuple):
    """A step of a plan, and the form of its operands in the backward.

    Attributes:
        of_keys: "own" or "sent", see ``ContextCall.accumulator``.
        with_dlse: whether the log-sum-exp has a gradient.
        with_dq: whether dq continues the sum of earlier steps, in place.
    """

    step_call: StepCall
    of_keys: str
    with_dlse: bool
    with_dq: bool


@lru_cache(maxsize=256)
def texts(
    gradient_step: GradientStep, operands: tuple[Operand, ...], device: str, overlaps_exchange: bool = False
) -> tuple[str, ...]:
    """Returns the text of each part.

    Its tensors are the operands, then those of ``operators.offsets``, then dq, dk and dv.

    Args:
        operands: of q, of the keys in the form that ``StepCall`` describes, of out, lse and dout, and of dlse and dq if
            there are any.
        device: that tensors without memory are on.
        overlaps_exchange: whether an exchange was just started, which gets a head start.

    Raises:
        Unrecordable: if a part's tiles read a table of places.
    """
    parts = range(len(gradient_step.step_call.step.tiles))
    return tuple(_text(gradient_step, part, operands, device, overlaps_exchange) for part in parts)


def results(gradient_step: GradientStep, operands: Sequence[Operand]) -> tuple[Operand, ...]:
    """Returns dq, dk and dv as shapes and dtypes."""
    call, count = gradient_step.step_call.call, gradient_step.step_call.key_arrays
    q, keys = operands[0][0], [shape for shape, _ in operands[1 : 1 + count]]
    if gradient_step.step_call.stacked:  # [..., 2, batch, places, ...]
        keys = [(*keys[0][: len(keys[0]) - 5], *keys[0][len(keys[0]) - 4 :])] * 2
    if gradient_step.step_call.step.gathered:  # [parts, batch, places, ...] -> [batch, parts * places, ...]
        keys = [(batch, parts * places, *rest) for parts, batch, places, *rest in keys]
    of_keys = call.accumulator(gradient_step.of_keys)
    return ((q, call.accumulator("q")), *((shape, of_keys) for shape in keys))


def _text(
    gradient_step: GradientStep, part: int, operands: Sequence[Operand], device: str, overlaps_exchange: bool
) -> str:
    step_call = gradient_step.step_call
    with operator_recorder.without_memory():
        given = operators.empty(operands, device)
        every = operators.empty_offsets(step_call, device)
        dq, dk, dv = operators.empty(results(gradient_step, operands), device)
        prepared = _prepared(step_call, part, device)
        part_step = operators.recorded_part(step_call, part, prepared, device, every)

        def run() -> None:
            q, *rest = given
            keys, saved = rest[: step_call.key_arrays], rest[step_call.key_arrays :]
            out, lse, dout, *more = saved
            dlse = more[0] if gradient_step.with_dlse else None
            if overlaps_exchange and part_step.tiles:
                operators.pause(q)
            of_queries = Total.in_place(dq) if gradient_step.with_dq else Total(dq, dq.shape[1], dq.dtype, dq)
            key_totals = [Total(each, each.shape[1], each.dtype, each) for each in (dk, dv)]
            _add_gradients(
                part_step, SavedRows(q, out, lse, dout, dlse), _in_rows(step_call, keys), (of_queries, *key_totals)
            )

        tensors = [*given, *every, dq, dk, dv]
        return operator_recorder.record(run, tensors, operators.fake_results(step_call, part, device))


def _prepared(step_call: StepCall, part: int, device: str) -> PartStep:
    """Returns a part's step whose tiles have the places of all gathered keys, because their gradients have them."""
    import torch

    call, coverage, runs = step_call.call, RowCoverage(step_call.rows), []
    gathered = places_in_gathered(call.plan, part) if step_call.step.gathered else None
    for tile in step_call.step.tiles[part]:
        rows, keys = places_of_tile(tile)
        keys = keys if gathered is None else gathered[keys]
        runs.append(build_tile_run(call, tile, (rows, keys, keys), torch.device(device), coverage))
    return PartStep(tuple(runs), None, direct=False, initialise=False)


def _in_rows(step_call: StepCall, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns k and v, ``[batch, places, kv_heads, dim]``, of all parts end to end if they are gathered."""
    if step_call.stacked:
        keys = keys[0].unbind(-5)
    k, v = keys
    if not step_call.step.gathered:
        return k, v
    k, v = (each.transpose(0, 1).flatten(1, 2) for each in keys)
    return k, v


def _add_gradients(part_step: PartStep, saved: SavedRows, keys: tuple[Tensor, Tensor], totals: Sequence[Total]) -> None:
    """Adds the gradients of a part's tiles to the totals of dq, dk and dv, whose memory is written as a whole."""
    for at, tile in enumerate(part_step.tiles):
        gradients = tile_gradients(tile, saved, *keys, () if at else totals)
        for total, places, gradient in zip(totals, (tile.rows, tile.key_sums, tile.key_sums), gradients, strict=True):
            total.add(places, gradient)
    for total in totals:
        total.tensor()  # 0 if nothing was added
