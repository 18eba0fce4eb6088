"""The positions of a layer's tokens: in their rows, in packed documents, and in the sequences of a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.call.seq_info import SeqInfo
from attn_core.paged.step import Step
from torch_frontend.dispatch.tensor_kinds import to_device_of


def token_positions(positions: Tensor | None, seq_info: SeqInfo | None, q: Tensor) -> Tensor:
    """Returns int positions ``[batch, seq]`` for ``q [batch, seq, heads, head_dim]``.

    They are the caller's (``[seq]`` or ``[batch, seq]``), else counted from each row's or document's start.
    """
    if positions is None:
        positions = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        if seq_info is not None:
            starts = to_device_of(q, seq_info.cu_seqlens_q)
            # Search all offsets, not a view of them: a compiled searchsorted may ignore the view's start. The clamp
            # keeps tokens behind the last offset in the last document.
            document = (torch.searchsorted(starts, positions, right=True) - 1).clamp(max=len(starts) - 2)  # [tokens]
            positions = positions - starts[document]
    return positions.expand(q.shape[:2])


def token_places(step: Step, x: Tensor) -> Tensor:
    """Returns int ``[tokens]``: the position of each new token ``x [tokens, features]`` in its own sequence."""
    lengths = to_device_of(x, step.seq_lens)
    if step.cu_seqlens_q is None:
        return lengths - 1
    offsets = to_device_of(x, step.cu_seqlens_q)
    token = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
    # Tokens behind the last offset belong to no sequence. The clamp only keeps their index in range.
    sequence = (torch.searchsorted(offsets, token, right=True) - 1).clamp(max=len(offsets) - 2)
    return lengths[sequence] - (offsets[sequence + 1] - token)
