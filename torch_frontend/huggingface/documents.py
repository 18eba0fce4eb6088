"""Which documents a transformers model packs in its rows: by numbers, by offsets, or by positions that restart."""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import torch

from attn_core.call.seq_info import SeqInfo
from attn_core.errors import SpecError
from torch_frontend.huggingface.described import DescribedMask, Visible

Tensor = torch.Tensor


def numbered(numbers: Tensor) -> SeqInfo:
    """The documents of packed rows ``[batch, tokens]``, each token with its document's number, as one long row's."""
    table = numbers.cpu().numpy()
    return _beginning(table[:, 1:] != table[:, :-1])


def given_documents(cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> SeqInfo | None:
    """The documents of ``cu_seq_lens_q/k`` and ``max_length_q/k``, or None without them."""
    given = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_length_q": max_q, "max_length_k": max_k}
    if cu_q is None and cu_k is None:
        return None
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise SpecError(f"{', '.join(missing)}: expected all of {', '.join(given)}, or none")
    offsets_q = cu_q.to(torch.int32)
    offsets_k = offsets_q if cu_k is cu_q else cu_k.to(torch.int32)
    longest_q, longest_k = (int(length) if isinstance(length, Tensor) else length for length in (max_q, max_k))
    return SeqInfo(offsets_q, offsets_k, longest_q, longest_k)


def told_by_positions(position_ids: Tensor, batch: int, visible: Visible, mask: Any) -> SeqInfo | None:
    """The documents of causal rows that ``position_ids [batch or 1, tokens]`` tell apart, or None.

    They are looked at where nothing else has spoken: in causal attention of whole rows to themselves, without padding
    and without a table. Their values are read once for all layers that share a mask; nothing is read while compiling.
    """
    queries, keys = visible.lengths
    whole = visible.right == 0 and visible.keys is None and queries == keys and queries != 1
    if not whole or not _readable(position_ids, batch, queries):
        return None
    if not isinstance(mask, DescribedMask):
        return _restarting(position_ids, batch)
    if mask.told is None or mask.told[0]() is not position_ids:
        mask.told = ref(position_ids), _restarting(position_ids, batch)
    return mask.told[1]


def _readable(position_ids: Tensor, batch: int, tokens: int) -> bool:
    """Whether the positions are one a token (M-RoPE has three) and have values that can be looked at."""
    if torch.compiler.is_compiling() or tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        return False
    if type(position_ids) is not Tensor or position_ids.is_meta:
        return False
    return not (position_ids.is_cuda and torch.cuda.is_current_stream_capturing())


def _restarting(position_ids: Tensor, batch: int) -> SeqInfo | None:
    """The documents of rows that count on from token to token, or begin again at their first position.

    Positions that do anything else (jump, or stand still on padding) tell of no documents.
    """
    table = position_ids.to("cpu", torch.float64).numpy()  # numpy has no bfloat16
    again = table[:, 1:] == table[:, :1]
    if not again.any() or not (again | (np.diff(table, axis=1) == 1)).all():
        return None
    return _beginning(np.broadcast_to(again, (batch, again.shape[1])))


def _beginning(again: np.ndarray) -> SeqInfo:
    """The documents of rows as one long row's: one begins with each row, and where ``again [batch, tokens - 1]`` is."""
    starts = np.concatenate([np.ones((len(again), 1), bool), again], axis=1).reshape(-1)
    bounds = np.append(np.flatnonzero(starts), starts.size)
    return SeqInfo.from_lengths(np.diff(bounds).tolist())
