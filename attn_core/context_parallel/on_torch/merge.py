"""Merges attention results of the same queries over different keys, in place, on torch tensors."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.programs.triton import has_triton
from attn_core.context_parallel.on_torch.current_gpu import with_current


def merge(out: Any, lse: Any, part_out: Any, part_lse: Any) -> None:
    """Merges the results over further keys, ``part_out`` and ``part_lse``, into ``out`` and ``lse``, in place.

    Let l be the larger log-sum-exp (0 if both are -inf), a = e^(lse - l) and b = e^(part_lse - l). The new log-sum-exp
    is l + log(a + b), and out becomes (a / (a + b)) out + (b / (a + b)) part_out. (Milakov and Gimelshein 2018; Dao et
    al. 2022.) With one weight, as out + w (part_out - out), an output of little weight would leave its rounding error.

    Args:
        out: ``[batch, rows, heads, value_dim]``, of any dtype.
        lse: ``[batch, heads, rows]``, float32 or float64, the dtype of the arithmetic.
        part_out, part_lse: the same shapes; part_out of any dtype.
    """
    import torch

    # The Triton kernel computes in float32, which would lose the precision of float64.
    if out.is_cuda and lse.dtype == torch.float32 and has_triton():
        from attn_core.context_parallel.on_torch.merge_triton import merge as merge_on_gpu

        with with_current(out.device):
            merge_on_gpu(out, lse, part_out, part_lse)
        return
    larger = torch.maximum(lse, part_lse)
    # -inf - -inf would be NaN in rows that neither result gave a key.
    larger = larger.masked_fill(larger == -torch.inf, 0.0)
    weight, part_weight = (lse - larger).exp_(), (part_lse - larger).exp_()
    total = weight + part_weight
    lse.copy_(larger + total.log())
    total.masked_fill_(total == 0, 1.0)  # both results are 0 in such a row
    by_row = [each.div_(total).transpose(1, 2)[..., None] for each in (weight, part_weight)]
    out.copy_(by_row[0] * out + by_row[1] * part_out)
