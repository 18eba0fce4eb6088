"""Attention of a layer that may be recomputed: re-entrant checkpointing must run the same kernel in both passes.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the first pass without gradients and the second with them.
If the tensors alone decided, the first pass could choose a kernel without a backward and drop other weights than the
second. So the layer states whether it trains.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.options import Window
from attn_core.call.seq_info import SeqInfoLike
from torch_frontend.attention import attention
from torch_frontend.dispatch import transforms
from torch_frontend.dispatch.prepared import training_layer

Tensor = torch.Tensor


def attention_of_layer(q: Tensor, k: Tensor, v: Tensor, *, trains: bool, **options: Any) -> Any:
    """Computes ``attention`` of the same arguments; if the layer ``trains``, on a kernel that has a backward.

    If no requested backend has a backward and no gradient is needed, a kernel without one runs. Under compilers, modes
    and transforms the tensors decide, as in ``attention``.
    """
    if not trains or transforms.is_one_op(q):
        return attention(q, k, v, **options)
    trainable = (q, k, v, options.get("bias"), options.get("sinks"))
    # Then attention itself chooses a kernel with a backward, and autograd must record the call.
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in trainable):
        return attention(q, k, v, **options)
    with training_layer():
        return attention(q, k, v, **options)


def attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    trains: bool,
    seq_info: SeqInfoLike = None,
    key_ranges: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Computes ``attention_of_layer`` of tensors ``[batch, heads, len, dim]``.

    With documents, the rows of the batch are laid end to end.

    Returns:
        ``[batch, q_len, heads, value_dim]``; with return_lse ``(out, lse)``, lse ``[batch, heads, q_len]``.
    """
    plain = seq_info is None and softcap is None and sinks is None and not dropout and not return_lse
    plain = plain and key_ranges is None
    if plain and q.shape[2] == 1 and _fits_packing(q, k, **options):
        group = q.reshape(*k.shape[:2], -1, q.shape[3])  # [batch, kv_heads, heads of a kv head, dim]
        rows_of_group = attention_of_heads(group, k, v, trains=trains, **options)  # [batch, heads of a kv head, ...]
        return rows_of_group.transpose(1, 2).reshape(q.shape[0], 1, q.shape[1], v.shape[3])
    # Then the tensors decide. Else a layer that trains needs a kernel that has a backward, although it computes none.
    decided = not trains or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    if q.is_cpu and plain and decided:  # torch's CPU kernel has this layout
        return attention(q, k, v, layout="bhsd", **options).transpose(1, 2)
    options |= {"softcap": softcap, "sinks": sinks, "dropout": dropout, "seq_info": seq_info, "return_lse": return_lse}
    options |= {} if key_ranges is None else {"key_ranges": key_ranges}
    rows = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, len, heads, dim]
    if seq_info is not None:
        rows = rows[0].flatten(0, 1), rows[1].flatten(0, 1), rows[2].flatten(0, 1)  # [batch * len, heads, dim]
    results: Any = attention(*rows, **options) if decided else attention_of_layer(*rows, trains=trains, **options)
    if seq_info is None:
        return results
    out = results[0] if return_lse else results
    out = out.reshape(q.shape[0], q.shape[2], *out.shape[-2:])
    return (out, results[1].unflatten(-1, (q.shape[0], q.shape[2])).transpose(0, 1)) if return_lse else out


LONG_ROW = 128
"""From this number of keys on, a kernel's reading of keys takes longer than two views."""


def _fits_packing(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    invariant: str | None = None,
    **_: object,
) -> bool:
    """Returns whether a single query's heads of one kv head may become queries of one head: a kernel without grouped
    heads then needs no copies of the keys, and torch's CPU kernel reads them once.

    Kernels of a GPU without masks do the same themselves. All heads must see the same keys.
    """
    if causal or window is not None or bias is not None or not (q.is_cpu or mask is not None):
        return False
    if invariant is not None:  # the number of keys decides, and other rows may pad it
        return False
    if k.dim() != 4 or q.shape[1] == k.shape[1] or (k.shape[2] < LONG_ROW and not torch.compiler.is_compiling()):
        return False
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1):
        return False
    return q.shape[0] == k.shape[0] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
