"""Mask and score functions of a call of torch tensors: traced, from a BlockMask of FlexAttention, from segment ids.

A BlockMask's mask function says what is visible; its tables only repeat it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_core.call import segments
from attn_core.call.functions import Traced, trace
from attn_core.call.options import Layout, check_layout
from attn_core.call.segments import Segments, Visible
from attn_core.call.seq_info import SeqInfoLike
from attn_core.errors import ShapeError, SpecError
from attn_core.expressions.tracing import TracedFunction, trace_mask
from torch_frontend.dispatch import layouts

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Dynamo would trace how an expression is built. It depends on constants alone, so Dynamo takes the result.
vars(segments.function_of).update(_dynamo_marked_constant=True)


def _trace_outside(*functions: Any) -> Traced:
    """``functions.trace`` outside of a program that torch compiles: Dynamo would trace the tracing itself."""
    dynamo = sys.modules.get("torch._dynamo")  # after a broken graph it runs this function, too
    return (trace if dynamo is None else dynamo.disable(trace))(*functions)


def _trace_mask_outside(mask_mod: Callable[..., object], aux: Sequence[object]) -> TracedFunction:
    """``trace_mask`` outside of a program that torch compiles."""
    dynamo = sys.modules.get("torch._dynamo")
    return (trace_mask if dynamo is None else dynamo.disable(trace_mask))(mask_mod, aux)  # type: ignore[no-any-return]


# As torch.compiler.disable does, which would load the compiler.
for _function in (_trace_outside, _trace_mask_outside):
    vars(_function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="attention traces mask_mod and score_mod, which breaks the graph: pass what "
        "attn_core.expressions.trace_mask and trace_score return for them",
    )


def traced(q: torch.Tensor, k: torch.Tensor, functions: tuple[Any, Any, Any]) -> Traced:
    """Returns mask_mod and score_mod as expressions, and their arrays.

    Args:
        functions: mask_mod, score_mod and aux.
    """
    mask_mod, score_mod, aux = functions
    if is_block_mask(mask_mod):
        batch = 1 if q.dim() == 3 else q.shape[0]
        mask_mod = function_of(mask_mod, batch, q.shape[-2], q.shape[-3], k.shape[-3], "mask_mod")
    untraced = any(each is not None and type(each) is not TracedFunction for each in (mask_mod, score_mod))
    return (_trace_outside if untraced else trace)(mask_mod, score_mod, aux)


def without_segments(
    tokens: Segments,
    visible: Visible,
    rows: tuple[torch.Tensor, torch.Tensor],
    layout: Layout | None,
    seq_info: SeqInfoLike,
    alibi_slopes: torch.Tensor | None,
) -> Visible:
    """Returns causal, window, mask_mod and aux of the same call without segments.

    Args:
        rows: q and k in the layout of the call.
        seq_info, alibi_slopes: of the call.
    """
    q, k = rows
    if layouts.has_jagged(q, k):
        raise SpecError("q_segment_ids: expected None with NestedTensors, whose rows are documents already")
    q_shape, k_shape = (tuple(getattr(array, "shape", ())) for array in rows)
    if check_layout(layout) == "bhsd":
        q_shape, k_shape = _exchanged(q_shape), _exchanged(k_shape)
    if is_block_mask(visible.mask_mod):
        sizes = q_shape[0], q_shape[-2], q_shape[-3], k_shape[-3]
        visible = visible._replace(mask_mod=function_of(visible.mask_mod, *sizes, "mask_mod"))
    others = {"seq_info": seq_info, "alibi_slopes": alibi_slopes}
    return segments.without_segments(tokens, visible, (q_shape, k_shape), others, _trace_mask_outside)


def _exchanged(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape with the axes of the sequence and the heads exchanged."""
    return (*shape[:-3], shape[-2], shape[-3], shape[-1]) if len(shape) > 2 else shape


def is_block_mask(value: object) -> bool:
    """Returns whether a value is torch's ``BlockMask``; imports nothing."""
    kind = type(value)
    return kind.__name__ == "BlockMask" and kind.__module__ == "torch.nn.attention.flex_attention"


def function_of(mask: BlockMask, batch: int, heads: int, q_len: int, kv_len: int, name: str) -> Callable[..., object]:
    """Returns a BlockMask's mask function, ``f(b, h, q, k)``.

    Args:
        batch, heads, q_len, kv_len: of the call.
        name: of the argument, for errors.

    Raises:
        ShapeError: for a mask of other sizes.
        SpecError: for a mask whose blocks alone say what is visible.
    """
    from torch.nn.attention.flex_attention import noop_mask

    mask_batch, mask_heads, *lengths = mask.shape
    if mask_batch not in (1, batch) or mask_heads not in (1, heads) or lengths != [q_len, kv_len]:
        raise ShapeError(
            f"{name}: expected a BlockMask of [{batch} or 1, {heads} or 1, {q_len}, {kv_len}], got {list(mask.shape)}"
        )
    if mask.mask_mod is noop_mask and not _lists_all_blocks(mask):
        raise SpecError(
            f"{name}: expected a BlockMask that has a mask function, because its blocks alone would have to be read "
            "from the device; pass mask_mod= to BlockMask.from_kv_blocks, or no mask if it hides nothing"
        )
    return mask.mask_mod  # type: ignore[no-any-return]


def _lists_all_blocks(mask: Any) -> bool:
    """Returns whether a mask without a function is known to hide nothing: only if its counts can be read at once."""
    counts = [table for table in (mask.kv_num_blocks, mask.full_kv_num_blocks) if table is not None]
    if torch.compiler.is_compiling() or not all([type(table) is torch.Tensor and table.is_cpu for table in counts]):
        return False
    try:
        # In numpy, because a torch mode would see an operation on tensors. A block is listed as partial or as full.
        numbers = sum(np.array(table.tolist()) for table in counts)
    except RuntimeError:  # a wrapper of a transform
        return False
    return bool((numbers == -(-mask.shape[-1] // mask.BLOCK_SIZE[1])).all())
