"""Merges partial attentions of the same queries by their log-sum-exp, in place, in torch."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.triton import has_triton


def merge(out: Any, lse: Any, part_out: Any, part_lse: Any) -> None:
    """Merges a part's keys into ``out`` and ``lse``, in place.

    With l the larger of both log-sum-exp (0 where both are -inf) and z = e^(lse - l) + e^(part_lse - l): the new
    log-sum-exp is l + log z, the part's weight w = e^(part_lse - l) / z, and out moves by w (part_out - out). Rows
    without keys, in ``out`` or in the part, need no special case. (Dao et al. 2022; Liu et al. 2023.)

    Args:
        out: ``[batch, rows, heads, value_dim]``, of any dtype.
        lse: ``[batch, heads, rows]``, float32 or float64, the dtype of the arithmetic.
        part_out, part_lse: the same shapes; part_out of any dtype.
    """
    import torch

    if out.is_cuda and lse.dtype == torch.float32 and has_triton():
        from attn_core.context_parallel.on_torch.merge_triton import merge as merge_on_gpu

        with torch.cuda.device(out.device):  # where Triton's kernels start
            merge_on_gpu(out, lse, part_out, part_lse)
        return
    larger = torch.maximum(lse, part_lse)
    larger = larger.masked_fill(larger == -torch.inf, 0.0)
    mine, its = (lse - larger).exp_(), (part_lse - larger).exp_()
    total = mine.add_(its)
    weight = torch.where(total == 0, 0.0, its / total)
    lse.copy_(larger + total.log_())
    before = out.to(lse.dtype)
    out.copy_(before + (part_out - before).mul_(weight.transpose(1, 2)[..., None]))
