"""The log-sum-exp of rows that see no key: the caller gets the sink, the only term of such a row's sum.

Backends return -inf for such a row with or without sinks, because their backwards recognise it by that and ignore its
dout. Torch operations after the kernel put the sink there, so that autograd computes its gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs

Tensor = torch.Tensor


def finish_results(results: Any, inputs: Inputs, seq_info: Any) -> Any:
    """Returns a call's results, ``(out, lse)`` or the output alone, with the sinks of rows that see no key in lse.

    Args:
        results: ``(out, lse)``, or the output alone.
        inputs: their offsets may be completed; the documents of ``seq_info`` come first.
        seq_info: the documents as the caller passed them.
    """
    if inputs.sinks is None or not isinstance(results, tuple):
        return results
    info = SeqInfo.coerce(seq_info)
    # The offsets may have documents for trailing tokens at the end; those rows keep -inf.
    end = None if info is None else inputs.cu_seqlens_q[info.cu_seqlens_q.shape[0] - 1]
    return results[0], fill_with_sinks(results[1], inputs.sinks, end)


def fill_with_sinks(lse: Tensor, sinks: Tensor, end: Any = None) -> Tensor:
    """Returns the log-sum-exp ``[..., heads, rows]`` with -inf replaced by the sinks ``[heads]``.

    Args:
        end: the number of rows that belong to a document, an int or a tensor; later rows keep -inf. None: all rows.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    # A row also has -inf if its sink is -inf. The sink must not get a gradient there.
    alone = (lse == -torch.inf) & (sinks != -torch.inf)
    if end is not None:
        alone = alone & (torch.arange(lse.shape[-1], device=lse.device) < end)
    return torch.where(alone, sinks, lse)
