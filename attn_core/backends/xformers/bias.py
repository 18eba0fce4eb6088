"""xformers' masks: the bias class for a spec, built without a synchronisation.

The meaning of the classes, with W = ``_window_size`` keys, including the query's own, and inclusive distances
``window_left`` and ``window_right``:

    LowerTriangularMask                                 top-left diagonal
    ...FromBottomRight..., LocalAttention...            bottom-right diagonal, in each document for BlockDiagonal...
    ..._window_size=W                                   causal, and the last W keys

The class methods that build block-diagonal masks need the documents' lengths on the host. The flash kernels read only
the offsets on the device and the longest document, so we build masks from those and leave ``seqstart_py``, which serves
checks and splitting on the host, empty. The split-KV kernel compares its last entry with the number of queries, so
masks for that kernel have it; there all documents have one length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.backends.shared.flash2_conventions import longest_query
from attn_core.call.masks import Band, band
from attn_core.call.observe import bias_copied, mask_converted
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

TENSOR = "Tensor"
"""Stands for a tensor that is added to the scores, instead of a class of masks."""
NO_CLASS = ""
"""Stands for a band that no class of xformers describes."""


class Mask(NamedTuple):
    """A bias as data: the name of its class (or TENSOR, NO_CLASS, or None if all keys are visible) and its window."""

    name: str | None
    window: dict[str, int]


def mask_of(spec: AttentionSpec) -> Mask:
    """Returns the bias that expresses a spec's mask, bias and band."""
    if spec.mask_shape is not None or spec.bias_shape is not None:
        return Mask(TENSOR, {})
    left, right, offset = _needed(spec)
    if left is None and right is None:
        return Mask("BlockDiagonalMask" if spec.packed else None, {})
    window = {} if left is None else {"_window_size": left + 1}
    if spec.packed:
        if right != 0 or spec.alignment != "bottom_right":
            return Mask(NO_CLASS, {})
        local = "" if left is None else "LocalAttention"
        return Mask(f"BlockDiagonalCausal{local}FromBottomRightMask", window)
    if offset != spec.kv_len - spec.q_len:  # top-left, and not a square
        return Mask("LowerTriangularMask", {}) if (left, right) == (None, 0) else Mask(NO_CLASS, {})
    if right != 0:
        # This class has no open sides. A distance beyond the row stands for one.
        reach = spec.q_len + spec.kv_len
        sides = {"window_left": reach if left is None else left, "window_right": reach if right is None else right}
        return Mask("LocalAttentionFromBottomRightMask", sides)
    local = "" if left is None else "LocalAttention"
    return Mask(f"LowerTriangularFromBottomRight{local}Mask", window)


def _needed(spec: AttentionSpec) -> Band:
    """Returns the spec's band with None for sides that hide nothing, and causal if that hides the same keys."""
    edge = band(spec)
    if spec.packed:
        return edge
    ahead = spec.kv_len - 1 - edge.offset  # distance from the first query forward to the last key
    behind = spec.q_len - 1 + edge.offset  # distance from the last query back to the first key
    left = None if edge.left is None or edge.left >= behind else edge.left
    right = None if edge.right is None or edge.right >= ahead else edge.right
    if left is not None and ahead <= 0:  # no key lies ahead of any query, so a causal window is the same
        right = 0
    return Band(left, right, edge.offset)


def documents_mask(attn_bias: Any, mask: Mask, spec: AttentionSpec, inputs: Inputs) -> Any:
    """Returns a block-diagonal mask of the documents. attn_bias: xformers' module of that name."""
    sides = ((inputs.cu_seqlens_q, longest_query(spec)), (inputs.cu_seqlens_k, spec.max_len_k))
    queries, keys = (
        attn_bias._SeqLenInfo(seqstart=offsets, max_seqlen=longest, min_seqlen=0, seqstart_py=[])
        for offsets, longest in sides
    )
    return getattr(attn_bias, mask.name or "")(q_seqinfo=queries, k_seqinfo=keys, **mask.window)


def rows_mask(attn_bias: Any, mask: Mask, spec: AttentionSpec, device: Any) -> Any:
    """Returns a block-diagonal mask of batch rows laid end to end; the split-KV kernel needs causal rows so."""
    import torch

    def starts(length: int) -> Any:
        return torch.arange(0, (spec.batch + 1) * length, length, dtype=torch.int32, device=device)

    def starts_on_host(length: int) -> list[int]:
        return list(range(0, (spec.batch + 1) * length, length))

    q_len, kv_len = spec.q_len, spec.kv_len
    queries = attn_bias._SeqLenInfo(
        seqstart=starts(q_len), max_seqlen=q_len, min_seqlen=q_len, seqstart_py=starts_on_host(q_len)
    )
    keys = attn_bias._PaddedSeqLenInfo(
        seqstart=starts(kv_len),
        max_seqlen=kv_len,
        min_seqlen=kv_len,
        seqstart_py=starts_on_host(kv_len),
        seqlen=torch.full((spec.batch,), kv_len, dtype=torch.int32, device=device),
        seqlen_py=[kv_len] * spec.batch,
        padding=kv_len,
    )
    return getattr(attn_bias, mask.name or "")(q_seqinfo=queries, k_seqinfo=keys, **mask.window)


def added_tensor(spec: AttentionSpec, inputs: Inputs, dtype: Any) -> Any:
    """Returns bias, mask and band as one additive tensor ``[batch, heads, q_len, kv_len]``; -inf is hidden.

    Axes that none of them has are expanded. Rows start at multiples of 8 elements, which the CUTLASS kernel requires.
    """
    import torch

    left, right, _ = edge = _needed(spec)
    shapes = [tensor.shape for tensor in (inputs.mask, inputs.bias) if tensor is not None]
    batch, heads, rows = (max(shape[axis] for shape in shapes) for axis in range(3))
    banded = left is not None or right is not None
    width = -(-spec.kv_len // 8) * 8
    storage = inputs.q.new_zeros((batch, heads, spec.q_len if banded else rows, width), dtype=dtype)
    added = storage[..., : spec.kv_len]
    if inputs.bias is not None:
        bias_copied()
        added.copy_(inputs.bias.expand(added.shape))
    if inputs.mask is not None:
        mask_converted()
        added.masked_fill_(~inputs.mask, -torch.inf)
    if banded:
        columns = torch.arange(spec.kv_len, device=added.device)
        seen = edge.contains(torch.arange(spec.q_len, device=added.device)[:, None], columns)
        added.masked_fill_(~seen, -torch.inf)
    return added.expand(spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
