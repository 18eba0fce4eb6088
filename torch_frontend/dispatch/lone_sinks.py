"""The log-sum-exp of rows that see no key, in calls with sinks: there the sink is alone in the sum.

Backends give -inf for such a row, sinks or not: it is how their backwards know it, and keep its dout out. The callers
get the sink, by torch operations behind the call, so that its gradient is autograd's own.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs

Tensor = torch.Tensor


def for_caller(found: Any, inputs: Inputs, seq_info: Any) -> Any:
    """The results of a call, ``(out, lse)`` or the output alone, with the sinks of rows that see no key in lse.

    Args:
        inputs: with a document for every token or not; those of ``seq_info``, as the caller gave it, are the first.
    """
    if inputs.sinks is None or not isinstance(found, tuple):
        return found
    info = SeqInfo.coerce(seq_info)
    end = None if info is None else inputs.cu_seqlens_q[info.cu_seqlens_q.shape[0] - 1]
    return found[0], in_lse(found[1], inputs.sinks, end)


def in_lse(lse: Tensor, sinks: Tensor, end: Any = None) -> Tensor:
    """A log-sum-exp ``[..., heads, rows]`` with the sinks ``[heads]`` where it is -inf.

    Args:
        end: where rows that belong to nobody begin, an int or a tensor; None where there are none. They keep -inf.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    alone = (lse == -torch.inf) & (sinks != -torch.inf)
    if end is not None:
        alone = alone & (torch.arange(lse.shape[-1], device=lse.device) < end)
    return torch.where(alone, sinks, lse)
