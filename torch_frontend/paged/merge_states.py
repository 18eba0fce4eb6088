"""merge_states: one result from the results of the same queries over parts of the keys, for torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_core.backends.shared.triton import has_triton
from attn_core.paged.merge_states import merged, parts_of
from torch_frontend.dispatch.plan import check_tensor, facts, on_device
from torch_frontend.dispatch.transforms import is_one_op

Tensor = torch.Tensor


def merge_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merges the results of attention over parts of the keys into the result over all of them.

    With l the log-sum-exp of all ``lses``, the output is the sum of ``exp(lses[i] - l) * outs[i]``. It is computed in
    the dtype of ``lses`` and rounded once. A part with -inf saw no key and adds nothing, whatever its output is. No key
    may be in two parts. On a GPU, without gradients and in float32, one Triton kernel computes it.

    Args:
        outs: the outputs, ``[batch, q_len, heads, value_dim]`` or packed ``[tokens, heads, value_dim]``: a sequence, or
            one tensor with the parts along its first axis.
        lses: the log-sum-exps in the same form, each ``[batch, heads, q_len]`` or packed ``[heads, tokens]``, natural
            log, float32 or float64, as ``return_lse=True`` gives them. With sinks, only one part may have had them.

    Returns:
        (out, lse) in the shapes and dtypes of one part. A row that no part gave a key has 0 and -inf. Both have
        gradients with respect to all parts.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for parts that do not belong together.
        TypeError: for parts that are no tensors.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    parts, part_lses = parts_of(outs, lses, check_tensor, lambda part: facts(part.shape, part.dtype, part.device))
    packed = parts[0].dim() == 3
    if packed:  # as one row of a batch
        parts, part_lses = [out[None] for out in parts], [lse[None] for lse in part_lses]
    out, lse = _run(parts, part_lses)
    return (out[0], lse[0]) if packed else (out, lse)


def _run(parts: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    observed = is_one_op(parts[0]) or (torch.is_grad_enabled() and any(each.requires_grad for each in (*parts, *lses)))
    if observed or not parts[0].is_cuda or lses[0].dtype != torch.float32 or not has_triton():
        return _plain(parts, lses)
    from attn_core.context_parallel.on_torch.merge_triton import merge_parts

    return on_device(merge_parts, parts[0].device)(torch.stack(parts), torch.stack(lses))  # type: ignore[no-any-return]


def _plain(parts: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) by torch's own operations, which autograd differentiates."""
    return merged(torch, parts, lses, Tensor.to, Tensor.detach)  # type: ignore[no-any-return]
