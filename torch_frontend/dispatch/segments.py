"""Segment ids and positions of a call of torch tensors, as its mask function."""

from __future__ import annotations

from typing import Any

from attn_core.call import segments
from attn_core.call.options import check_layout
from attn_core.call.segments import Segments, Visible
from attn_core.errors import SpecError
from torch_frontend.dispatch import nested
from torch_frontend.dispatch.block_masks import function_of, is_block_mask
from torch_frontend.dispatch.general_calls import trace_mask_outside

# Dynamo would trace how an expression is built. It depends on constants alone, so Dynamo takes the result.
vars(segments.function_of).update(_dynamo_marked_constant=True)


def without_segments(
    said: tuple[Any, ...], visible: tuple[Any, ...], rows: tuple[Any, Any], layout: Any, others: tuple[Any, Any]
) -> Visible:
    """Returns causal, window, mask_mod and aux of the same call without segments.

    Args:
        said: the four fields of ``Segments``.
        visible: the fields of ``Visible``.
        rows: q and k in the layout of the call.
        others: seq_info and alibi_slopes.
    """
    causal, window, mask_mod, aux = visible
    if nested.has_jagged(*rows, rows[1]):
        raise SpecError("q_segment_ids: expected None with NestedTensors, whose rows are documents already")
    by_heads = check_layout(layout) == "bhsd"
    shapes = [tuple(getattr(array, "shape", ())) for array in rows]
    if by_heads:
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) if len(shape) > 2 else shape for shape in shapes]
    if is_block_mask(mask_mod):
        sizes = shapes[0][0], shapes[0][-2], shapes[0][-3], shapes[1][-3]
        mask_mod = function_of(mask_mod, *sizes, "mask_mod")
    named = dict(zip(("seq_info", "alibi_slopes"), others, strict=True))
    visible_now = Visible(causal, window, mask_mod, aux)
    return segments.without_segments(Segments(*said), visible_now, (shapes[0], shapes[1]), named, trace_mask_outside)
