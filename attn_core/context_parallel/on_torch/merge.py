"""Merges attention results of the same queries over different keys, in place, on torch tensors."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.triton import has_triton


def merge(out: Any, lse: Any, part_out: Any, part_lse: Any) -> None:
    """Merges the results over further keys, ``part_out`` and ``part_lse``, into ``out`` and ``lse``, in place.

    Let l be the larger log-sum-exp (0 if both are -inf) and z = e^(lse - l) + e^(part_lse - l). The new log-sum-exp is
    l + log z. The part's weight is w = e^(part_lse - l) / z, and out becomes out + w (part_out - out). Rows without
    keys, in ``out`` or in the part, need no special case. (Milakov and Gimelshein 2018; Dao et al. 2022.)

    Args:
        out: ``[batch, rows, heads, value_dim]``, of any dtype.
        lse: ``[batch, heads, rows]``, float32 or float64, the dtype of the arithmetic.
        part_out, part_lse: the same shapes; part_out of any dtype.
    """
    import torch

    # The Triton kernel computes in float32, which would lose the precision of float64.
    if out.is_cuda and lse.dtype == torch.float32 and has_triton():
        from attn_core.context_parallel.on_torch.merge_triton import merge as merge_on_gpu

        with torch.cuda.device(out.device):  # Triton launches on the current device
            merge_on_gpu(out, lse, part_out, part_lse)
        return
    larger = torch.maximum(lse, part_lse)
    # -inf - -inf would be NaN in rows that neither result gave a key.
    larger = larger.masked_fill(larger == -torch.inf, 0.0)
    weight, part_weight = (lse - larger).exp_(), (part_lse - larger).exp_()
    # ``weight`` is not needed again: the part's share alone moves ``out``.
    total = weight.add_(part_weight)
    share = torch.where(total == 0, 0.0, part_weight / total)
    lse.copy_(larger + total.log_())
    before = out.to(lse.dtype)
    out.copy_(before + (part_out - before).mul_(share.transpose(1, 2)[..., None]))
