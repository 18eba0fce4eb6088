"""Finds the packed documents of a transformers model's rows: from document numbers, offsets or restarting positions."""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import torch

from attn_core.call.seq_info import SeqInfo
from attn_core.errors import SpecError
from torch_frontend.huggingface.described_mask import DescribedMask, VisibleKeys

Tensor = torch.Tensor


def documents_from_numbers(numbers: Tensor) -> SeqInfo:
    """Returns the documents of all rows laid end to end, from each token's document number ``[batch, tokens]``."""
    table = numbers.cpu().numpy()
    return _documents_from_starts(table[:, 1:] != table[:, :-1])


def documents_from_offsets(cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> SeqInfo | None:
    """Returns the documents of ``cu_seq_lens_q/k`` and ``max_length_q/k``, or None if both offsets are None."""
    arguments = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_length_q": max_q, "max_length_k": max_k}
    if cu_q is None and cu_k is None:
        return None
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise SpecError(f"{', '.join(missing)}: expected all of {', '.join(arguments)}, or none")
    offsets_q = cu_q.to(torch.int32)
    offsets_k = offsets_q if cu_k is cu_q else cu_k.to(torch.int32)
    longest_q, longest_k = (int(length) if isinstance(length, Tensor) else length for length in (max_q, max_k))
    return SeqInfo(offsets_q, offsets_k, longest_q, longest_k)


def documents_from_positions(position_ids: Tensor, batch: int, visible: VisibleKeys, mask: Any) -> SeqInfo | None:
    """Returns the documents of causal rows whose ``position_ids [batch or 1, tokens]`` restart, or None.

    Positions count only for causal self-attention of whole rows without padding. Layers that share a mask read the
    values once, because a read waits for the GPU. Nothing is read while compiling.
    """
    if not counts_positions(visible) or not are_readable(position_ids, batch, visible.lengths[0]):
        return None
    if not isinstance(mask, DescribedMask):
        return _read_documents(position_ids, batch)
    # Weak, so that the mask keeps no position ids alive. By identity, so that other position ids are read again.
    if mask.position_documents is None or mask.position_documents[0]() is not position_ids:
        mask.position_documents = ref(position_ids), _read_documents(position_ids, batch)
    return mask.position_documents[1]


def counts_positions(visible: VisibleKeys) -> bool:
    """Returns whether position ids may describe documents: in causal self-attention of whole rows without padding."""
    queries, keys = visible.lengths
    return visible.right == 0 and visible.keys is None and queries == keys and queries != 1


def are_readable(position_ids: Tensor, batch: int, tokens: int) -> bool:
    """Returns whether there is one position per token (M-RoPE has three) and its value can be read now."""
    if torch.compiler.is_compiling() or tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        return False
    if type(position_ids) is not Tensor or position_ids.is_meta:
        return False
    return not (position_ids.is_cuda and torch.cuda.is_current_stream_capturing())


def _read_documents(position_ids: Tensor, batch: int) -> SeqInfo | None:
    """Returns the documents of rows whose positions rise by 1 or restart at the row's first position, else None.

    Positions that jump, or repeat on padding, do not describe documents.
    """
    table = position_ids.to("cpu", torch.float64).numpy()  # numpy has no bfloat16
    restarts = table[:, 1:] == table[:, :1]
    if not restarts.any() or not (restarts | (np.diff(table, axis=1) == 1)).all():
        return None
    return _documents_from_starts(np.broadcast_to(restarts, (batch, restarts.shape[1])))


def _documents_from_starts(restarts: np.ndarray) -> SeqInfo:
    """Returns the documents of all rows laid end to end; ``restarts [batch, tokens - 1]`` marks starts inside a row."""
    starts = np.concatenate([np.ones((len(restarts), 1), bool), restarts], axis=1).reshape(-1)
    bounds = np.append(np.flatnonzero(starts), starts.size)
    return SeqInfo.from_lengths(np.diff(bounds).tolist())
