"""xformers' operators on tensors: the installed ones, their masks, and their forward and backward in our conventions.

Corrections: rows that see no key have a log-sum-exp of +inf in flash and 0 in CUTLASS, here -inf; CUTLASS pads the
log-sum-exp to a multiple of 32 rows; a backward needs as many key/value heads as heads, so k and v are repeated for it
and the gradients of a group are summed in float32.

A mask is the bias class for a spec, built without a synchronisation. The meaning of the classes, with
W = ``_window_size`` keys, including the query's own, and inclusive distances ``window_left`` and ``window_right``:

    LowerTriangularMask                                 top-left diagonal
    ...FromBottomRight..., LocalAttention...            bottom-right diagonal, in each document for BlockDiagonal...
    ..._window_size=W                                   causal, and the last W keys

The class methods that build block-diagonal masks need the documents' lengths on the host. The flash kernels read only
the offsets on the device and the longest document, so we build masks from those and leave ``seqstart_py``, which serves
checks and splitting on the host, empty. The split-KV kernel compares its last entry with the number of queries, so
masks for that kernel have it; there all documents have one length.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.flash2_conventions import longest_query
from attn_core.backends.shared.readable import readable
from attn_core.backends.shared.rewrites import by_kv_head, power_of_two, whole_eights
from attn_core.call.masks import Band, band
from attn_core.call.observe import bias_copied, mask_converted
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from xformers.ops.fmha.attn_bias import AttentionBias
    from xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase

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


def documents_mask(attn_bias: ModuleType, mask: Mask, spec: AttentionSpec, inputs: Inputs) -> AttentionBias:
    """Returns a block-diagonal mask of the documents. attn_bias: xformers' module of that name."""
    sides = ((inputs.cu_seqlens_q, longest_query(spec)), (inputs.cu_seqlens_k, spec.max_len_k))
    queries, keys = (
        attn_bias._SeqLenInfo(seqstart=offsets, max_seqlen=longest, min_seqlen=0, seqstart_py=[])
        for offsets, longest in sides
    )
    return getattr(attn_bias, mask.name or "")(q_seqinfo=queries, k_seqinfo=keys, **mask.window)


def rows_mask(attn_bias: ModuleType, mask: Mask, spec: AttentionSpec, device: torch.device) -> AttentionBias:
    """Returns a block-diagonal mask of batch rows laid end to end; the split-KV kernel needs causal rows so."""
    import torch

    def starts(length: int) -> Tensor:
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


def added_tensor(spec: AttentionSpec, inputs: Inputs, dtype: torch.dtype) -> Tensor:
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


MODULES = {"flash": "flash", "cutlass": "cutlass", "splitk": "triton_splitk"}
"""Each operator's module in ``xformers.ops.fmha``."""
COMPILED = (32, 64, 96, 128, 192, 256)
"""The head dimensions of a full build of the flash kernels. Each kernel also runs smaller dimensions."""


@cached_once
def load_operator(word: str) -> tuple[ModuleType, type[AttentionFwOpBase], type[AttentionBwOpBase] | None]:
    """Imports and returns ``xformers.ops.fmha``, and an operator's forward and backward (None if it has none)."""
    import xformers.ops.fmha as fmha

    module = getattr(fmha, MODULES[word])
    return fmha, module.FwOp, getattr(module, "BwOp", None)


@cached_once
def flash_widths() -> tuple[int, ...]:
    """Finds the head dimensions of the installed flash kernels by running each once on the current device.

    Raises:
        RuntimeError: if none runs.
    """
    fmha, operator, _ = load_operator("flash")
    if getattr(fmha.flash, "_USE_PT_FLASH_ATTN", False):
        return COMPILED  # torch's own has them all
    installed = tuple(width for width in COMPILED if runs(width))
    if not installed:
        raise RuntimeError(f"{operator.NAME} runs no head dimension on this device")
    return installed


def runs(width: int, *, backward: bool = False) -> bool:
    """Returns whether flash runs a call of one head on the current device. A build raises for kernels that it lacks."""
    import torch

    fmha, forward_op, backward_op = load_operator("flash")
    x = torch.zeros((1, 8, 1, width), dtype=torch.bfloat16, device="cuda")
    try:
        with torch.no_grad():
            out, lse = fmha.memory_efficient_attention_forward_requires_grad(x, x, x, op=forward_op)
            if backward:
                fmha.memory_efficient_attention_backward(x, out, lse, x, x, x, op=backward_op)
    except torch.OutOfMemoryError:  # says nothing about the installation
        raise
    except (RuntimeError, ValueError):
        return False
    return True


def width(word: str, dim: int) -> int:
    """Returns the head dimension that an operator runs ``dim`` at."""
    if word == "splitk":
        return power_of_two(dim)
    eights = whole_eights(dim)
    if word == "cutlass":
        return eights
    installed = flash_widths()
    needed = next(compiled for compiled in COMPILED if compiled >= eights)
    # Without the kernel of that width, a wider one must run, on zero-padded operands.
    return eights if needed in installed else next(compiled for compiled in installed if compiled >= eights)


@without_gradient
def forward(how: dict[str, Any], spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call as the backend's ``lower`` describes it, at the operator's head dimensions."""
    fmha, operator, _ = load_operator(how["operator"])
    q, k, v = (_rows(spec, tensor) for tensor in inputs[:3])
    mask = _mask(fmha.attn_bias, how, spec, inputs)
    hidden = _hidden_rows(mask) if how["attn_bias"] == TENSOR else None  # type: ignore[arg-type]
    if how["laid_end_to_end"]:  # [batch, length, heads, dim] -> [1, batch * length, heads, dim]
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    if how["groups"] == "five axes":
        groups = (spec.num_kv_heads, spec.group_size)
        q = q.unflatten(2, groups)  # [batch, q_len, kv_heads, group, dim]; k and v the same, expanded
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, spec.group_size, -1) for x in (k, v))  # stride 0: no copy
        mask = mask if hidden is None else mask.unflatten(1, groups)  # type: ignore[union-attr]
    elif how["groups"] == "repeated":
        k, v = _repeated(spec, k), _repeated(spec, v)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, mask, 0.0, how["scale"], op=operator)
    return out.reshape(spec.out_shape), _convert_lse(how, spec, lse, hidden)


@without_gradient
def backward(
    how: dict[str, Any], spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor
) -> Gradients:
    """Returns the gradients of a call as the backend's ``lower`` describes it."""
    import torch

    fmha, _, operator = load_operator(how["operator"])
    q, k, v, dout = (_rows(spec, tensor) for tensor in (*inputs[:3], dout))
    out, lse = (x[None] if spec.packed else x for x in (out.contiguous(), lse))
    if how["empty_rows"]:  # exp(score - inf) is 0 whatever the score
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if how["groups"]:
        k, v = _repeated(spec, k), _repeated(spec, v)
    mask = _mask(fmha.attn_bias, how, spec, inputs)
    dq, dk, dv = fmha.memory_efficient_attention_backward(
        dout, out, lse.contiguous(), q, k, v, mask, 0.0, how["scale"], op=operator
    )
    if how["groups"]:
        dk, dv = by_kv_head(dk, spec.num_kv_heads), by_kv_head(dv, spec.num_kv_heads)
    return Gradients(*((x[0] for x in (dq, dk, dv)) if spec.packed else (dq, dk, dv)))


def _rows(spec: AttentionSpec, tensor: Tensor) -> Tensor:
    """Returns a tensor as ``[batch, length, heads, dim]`` (batch 1 if packed), copied if a kernel cannot read it."""
    tensor = readable(tensor)
    return tensor[None] if spec.packed else tensor


def _mask(
    attn_bias: ModuleType, how: dict[str, Any], spec: AttentionSpec, inputs: Inputs
) -> AttentionBias | Tensor | None:
    """Returns the ``attn_bias`` for xformers."""
    name, window = how["attn_bias"], how["window"]
    if name is None:
        return None
    if name == TENSOR:
        import torch

        # split-KV adds in float32 whatever the bias is; CUTLASS needs q's dtype, which represents 0 and -inf exactly
        return added_tensor(spec, inputs, inputs.q.dtype if how["operator"] == "cutlass" else torch.float32)
    if spec.packed:
        return documents_mask(attn_bias, Mask(name, window), spec, inputs)
    if how["laid_end_to_end"]:
        return rows_mask(attn_bias, Mask(name, window), spec, inputs.q.device)
    return getattr(attn_bias, name)(**window)


def _hidden_rows(mask: Tensor) -> Tensor:
    """Returns which rows of an additive tensor are all -inf: ``[batch or 1, heads or 1, q_len or 1]``."""
    import torch

    # Expanded axes have stride 0: look at one of their equal entries only.
    once = mask[tuple(slice(1 if stride == 0 else None) for stride in mask.stride())]
    return (once == -torch.inf).all(-1)


def _repeated(spec: AttentionSpec, tensor: Tensor) -> Tensor:
    """``[batch, kv_len, kv_heads, dim]`` -> ``[batch, kv_len, heads, dim]``: head h is kv head ``h // group``."""
    return tensor.repeat_interleave(spec.group_size, dim=2)


def _convert_lse(how: dict[str, Any], spec: AttentionSpec, lse: Tensor, hidden: Tensor | None) -> Tensor:
    """Converts xformers' log-sum-exp to ``spec.lse_shape``: no padded rows, and -inf for rows that see no key.

    xformers returns ``[batch, heads, rows]`` or ``[batch, kv_heads, group, rows]``, with batch 1 for documents, and
    ``[1, ..., batch * q_len]`` for rows laid end to end.
    """
    import torch

    heads, rows = spec.num_heads, spec.q_len
    if how["laid_end_to_end"]:
        lse = lse.reshape(heads, spec.batch, rows).transpose(0, 1)
    lse = lse.reshape(spec.batch, heads, -1)[..., :rows]
    if hidden is not None:
        lse = lse.masked_fill(hidden, -torch.inf)
    elif how["empty_rows"]:
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return lse.reshape(spec.lse_shape).contiguous()
