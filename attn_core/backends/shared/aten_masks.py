"""Helpers for torch's own CUDA kernels: the band of a call, mask and bias as one additive tensor, and limits.

No function here synchronises: empty rows are found on the device, and the result stays there. Masks keep their additive
form, so that the layers of a model convert one mask once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from attn_core.backends.shared import kernel_limits
from attn_core.backends.shared.readable import readable
from attn_core.backends.support import compute_capability
from attn_core.call.masks import Band, band
from attn_core.call.observe import bias_copied, mask_converted
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEPT_ELEMENTS = 2**22
"""The most elements of a kept form: 16 MiB in float32. Larger calls take much longer than the conversion."""

KEPT_MARK = "_attn_core_additive"
"""The attribute of a mask that keeps its forms. Callers look for it first, so that other masks cost no call."""


def keep_additive(mask: Tensor) -> None:
    """Lets a bool mask keep its additive forms, for the calls that read it. A change in place invalidates them."""
    if not mask.is_inference():  # inference tensors do not count their changes
        setattr(mask, KEPT_MARK, (ref(mask), {}))


def makes_plain_tensors() -> bool:
    """Returns whether a new tensor is a plain one, so that later calls may read it.

    Under a mode it may have no data. Under a transform or functionalisation it belongs to these.
    """
    import torch

    dispatch = torch._C
    if dispatch._len_torch_dispatch_stack() or dispatch._are_functorch_transforms_active():
        return False
    return not dispatch._dispatch_tls_is_dispatch_key_included(dispatch.DispatchKey.Functionalize)


def kept_additive(mask: Tensor, form: tuple[object, ...], convert: Callable[[], Tensor]) -> Tensor:
    """Returns the additive form of a mask that has KEPT_MARK: the kept one, or a new one, which is kept if it is small.

    Args:
        form: what the additive form depends on beside the mask, a key of a dict.
        convert: computes it.
    """
    import torch

    original, forms = getattr(mask, KEPT_MARK)
    # A captured graph must convert the mask in every replay.
    captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    # A deep copy has the attributes of its original.
    if original() is not mask or captured or not makes_plain_tensors() or torch.compiler.is_compiling():
        mask_converted()
        return convert()
    # Another stream does not wait for the conversion, and a tensor made in inference mode cannot be used in training.
    stream = torch.cuda.current_stream(mask.device).cuda_stream if mask.is_cuda else 0
    key = (*form, mask._version, torch.is_inference_mode_enabled(), stream)
    result = forms.get(key)
    if result is None:
        mask_converted()
        result = convert()
        if result.numel() <= KEPT_ELEMENTS:
            forms[key] = result
    return result


ROW_MULTIPLE = 8
"""Rows of an additive tensor begin at multiples of 8 elements: 16 bytes in the smallest dtype."""


def needed_band(spec: AttentionSpec) -> Band:
    """Returns the band of a spec, with None for each side that hides nothing.

    Packed calls keep both sides because each document has its own lengths. If the left side hides something and the
    right side hides nothing, the right side becomes 0 if that hides nothing either: more kernels have a causal window
    than a one-sided one.
    """
    edge = band(spec)
    if spec.packed:
        return edge
    lengths = spec.q_len, spec.kv_len
    # Each side by itself: a side that hides nothing is dropped, because fewer options fit more kernels.
    left = None if edge._replace(right=None).hides_nothing(*lengths) else edge.left
    right = None if edge._replace(left=None).hides_nothing(*lengths) else edge.right
    if left is not None and right is None and Band(None, 0, edge.offset).hides_nothing(*lengths):
        right = 0
    return Band(left, right, edge.offset)


def explicit(spec: AttentionSpec) -> bool:
    """Returns whether the call has a mask or a bias."""
    return spec.mask_shape is not None or spec.bias_shape is not None


def limits(
    spec: AttentionSpec, device: str, kernel: str, sequences: int | None = None, oldest: int = 80
) -> tuple[str, ...]:
    """Returns refusals of GPUs that are too old for a kernel, and of calls beyond the launch grid.

    Args:
        sequences: the number of sequences that the kernel sees; by default the batch rows or documents.
        oldest: the first compute capability that torch itself lets the kernel run on: 80 for flash attention and
            cuDNN, 50 for memory-efficient attention (the ``check_..._hardware_support`` of each in
            https://github.com/pytorch/pytorch/blob/001f694a/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    reasons = []
    if 0 < compute_capability(device) < oldest:
        reasons.append(f"device {device}: {kernel} needs sm{oldest} or newer")
    return (*reasons, *kernel_limits.grid(spec, kernel, sequences))


def detached(bias: Tensor | None) -> Tensor | None:
    """Returns the bias without its autograd history, or None."""
    return None if bias is None else bias.detach()


def additive(
    mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype, kv_len: int, *, aligned: bool = True
) -> Tensor:
    """Returns bias and mask as one tensor of ``dtype``, -inf where the mask hides; autograd can differentiate it.

    Args:
        mask, bias: ``[batch or 1, heads or 1, q_len or 1, kv_len or 1]``, or None; not both None.
        aligned: whether rows must begin at multiples of ROW_MULTIPLE elements; else the last axis is merely dense.

    Returns:
        ``[batch or 1, heads or 1, q_len or 1, kv_len]``. A bias that already is one is returned as it is.
    """
    import torch

    if bias is not None and bias.dtype is not dtype:
        bias_copied()
        bias = bias.to(dtype)
    if mask is not None and (bias is not None or KEPT_MARK not in mask.__dict__):
        mask_converted()
    if mask is None:
        return in_rows_of(bias, kv_len, aligned)  # type: ignore[arg-type]  # not both None
    if bias is not None:
        return in_rows_of(torch.where(mask, bias, -torch.inf), kv_len, aligned)
    # log(True) is 0 and log(False) is -inf: one kernel reads the mask and writes the result.
    keys = mask if mask.shape[3] == kv_len else mask.expand(*mask.shape[:3], kv_len)
    if KEPT_MARK not in mask.__dict__:
        return torch.log(keys, out=_empty_rows_of(keys, dtype, aligned))
    form = dtype, kv_len, aligned
    return kept_additive(mask, form, lambda: torch.log(keys, out=_empty_rows_of(keys, dtype, aligned)))


def additive_of(spec: AttentionSpec, dtype: str, *, aligned: bool = True) -> Callable[..., Tensor]:
    """Returns ``additive`` as a function of mask and bias for calls of one spec. Checks of shapes and dtypes run once.

    Args:
        dtype: of the result, by name.
    """
    import torch

    kind, kv_len, shape = getattr(torch, dtype), spec.kv_len, spec.bias_shape or spec.mask_shape
    fits = shape is not None and shape[3] == kv_len and not (aligned and kv_len % ROW_MULTIPLE)
    if fits and spec.mask_shape is None and (spec.bias_dtype or spec.dtype) == dtype:

        def as_it_is(mask: None, bias: Tensor) -> Tensor:
            # Rows of a contiguous bias begin at multiples of 16 bytes if they must.
            if bias.is_contiguous() and not bias.data_ptr() % 16:
                return bias
            return in_rows_of(bias, kv_len, aligned)

        return as_it_is
    if fits and spec.bias_shape is None:
        empty_like, log, contiguous = torch.empty_like, torch.log, torch.contiguous_format

        def of_mask(mask: Tensor, bias: None) -> Tensor:
            if KEPT_MARK in mask.__dict__:
                return additive(mask, None, kind, kv_len, aligned=aligned)
            mask_converted()
            return log(mask, out=empty_like(mask, dtype=kind, memory_format=contiguous))

        return of_mask
    return partial(additive, dtype=kind, kv_len=kv_len, aligned=aligned)


def in_rows(table: Tensor | None, rows: slice) -> Tensor | None:
    """Slices the query rows out of a mask or bias ``[batch, heads, q_len or 1, keys]``, or None."""
    return table if table is None or table.shape[2] == 1 else table[:, :, rows]


def in_rows_of(added: Tensor, kv_len: int, aligned: bool = True) -> Tensor:
    """Expands an additive tensor ``[batch, heads, rows, kv_len or 1]`` to ``[..., kv_len]`` as kernels can load it."""
    whole = added.shape[3] == kv_len
    if whole and not aligned and added.stride(3) == 1 and not added.data_ptr() % 16:
        return added
    if whole and aligned and not kv_len % ROW_MULTIPLE:
        return readable(added)
    bias_copied()
    added = added.expand(*added.shape[:3], kv_len)
    return _empty_rows_of(added, added.dtype, aligned).copy_(added)


def _empty_rows_of(like: Tensor, dtype: torch.dtype, aligned: bool) -> Tensor:
    """Returns a new tensor of the shape of ``like``; see ``additive`` for ``aligned``.

    Kernels load whole vectors, so the padding of each row is 0.
    """
    import torch

    *others, kv_len = like.shape
    if not aligned or not kv_len % ROW_MULTIPLE:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    width = -(-kv_len // ROW_MULTIPLE) * ROW_MULTIPLE
    return like.new_zeros((*others, width), dtype=dtype)[..., :kv_len]


def empty_rows(visible: Tensor, edge: Band | None, rows: slice, kv_len: int) -> Tensor:
    """Returns which of the query rows in ``rows`` see no key: bool ``[batch or 1, heads or 1, rows or 1]``.

    A mask that all queries share is summed once along the keys; each row then compares the sums at the two ends of its
    band, which takes no memory of the size of the scores.

    Args:
        visible: bool ``[batch or 1, heads or 1, rows or 1, kv_len or 1]``; False is hidden.
        edge: the band of the call, or None if it hides nothing; the band of every row in ``rows`` contains a key.
    """
    import torch

    seen = visible.expand(*visible.shape[:3], kv_len)
    if edge is None or (edge.left is None and edge.right is None):
        return ~seen.any(-1)
    positions = torch.arange(rows.start, rows.stop, device=visible.device)
    if seen.shape[2] > 1:
        columns = torch.arange(kv_len, device=visible.device)
        return ~(seen & edge.contains(positions[:, None], columns)).any(-1)
    # before[j] counts the visible keys before key j, so equal counts at both ends of a band mean that it shows none.
    before = torch.nn.functional.pad(seen[:, :, 0].cumsum(-1), (1, 0))  # [batch, heads, kv_len + 1]
    stop = torch.full_like(positions, kv_len) if edge.right is None else positions + (edge.offset + edge.right + 1)
    start = torch.zeros_like(positions) if edge.left is None else positions + (edge.offset - edge.left)
    return before[..., stop.clamp(0, kv_len)] == before[..., start.clamp(0, kv_len)]
