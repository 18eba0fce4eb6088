"""unpad and repad: from a padded batch of torch tensors to packed documents, and back."""

from __future__ import annotations

from typing import Any, TypeVarTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from attn_core.call.padding import Padding, check_batch, check_packed, kept
from attn_core.errors import SpecError
from torch_frontend.dispatch.plan import check_tensor
from torch_frontend.dispatch.tensor_kinds import are_modes_active

Tensor = torch.Tensor
Tensors = TypeVarTuple("Tensors")


def unpad(
    attention_mask: Tensor | np.ndarray, *tensors: *Tensors, total: int | None = None
) -> tuple[*Tensors, Padding]:
    """Takes the padding out of a batch: what remains is one row of packed documents, one for each row of the batch.

    ``q, k, v, padding = unpad(attention_mask, q, k, v)``, then ``attention(..., seq_info=padding.seq_info)``. It reads
    the mask on the host, so it waits for a GPU: call it once for a batch, with embeddings and positions for a whole
    model. Distances (window, ALiBi) count the tokens that remain, which differs from a mask only if a row has holes.

    Args:
        attention_mask: bool or int ``[batch, length]``: True or 1 is a token, False or 0 is padding, at any place.
        tensors: ``[batch, length, ...]`` each.
        total: the tokens of the packed row, if all batches are to have equally many. Those behind the last document
            are 0, and ``length`` counts as the longest document, so that a compiled program serves every batch.

    Returns:
        Each tensor as ``[1, tokens, ...]``, with a gradient, and the ``Padding`` for ``repad``.

    Raises:
        ShapeError, DTypeError, SpecError, TypeError: naming the argument.
    """
    if not isinstance(attention_mask, np.ndarray):
        _check("attention_mask", attention_mask)
        if attention_mask.is_meta or type(attention_mask) is FakeTensor:
            raise SpecError("attention_mask: expected values, which unpad reads, got a tensor without data")
    given: tuple[Any, ...] = tensors
    for number, tensor in enumerate(given):
        _check(f"tensors[{number}]", tensor)
    check_batch(attention_mask, given, total)
    mask = attention_mask if isinstance(attention_mask, np.ndarray) else attention_mask.cpu().numpy()
    seq_info, places = kept(mask, total)
    count = int(seq_info.cu_seqlens_q[-1])
    indices = torch.from_numpy(places).to(given[0].device if given else None)
    rows: Any = [_taken(tensor, mask.size, indices[:count].to(tensor.device), len(places)) for tensor in given]
    return (*rows, Padding(seq_info, indices, attention_mask))  # type: ignore[return-value]


def _check(name: str, tensor: Tensor) -> None:
    check_tensor(name, tensor)
    if not torch.compiler.is_compiling() and type(tensor) is FakeTensor and not are_modes_active():
        raise SpecError(f"{name}: expected a tensor with data, got a FakeTensor")


def _taken(tensor: Tensor, size: int, indices: Tensor, total: int) -> Tensor:
    """Returns the tokens at the indices as one row, with 0 behind them up to ``total``."""
    row = tensor.reshape(size, *tensor.shape[2:]).index_select(0, indices)
    if len(indices) < total:
        row = torch.cat((row, row.new_zeros(total - len(indices), *row.shape[1:])))
    return row[None]


def repad(packed: Tensor, padding: Padding) -> Tensor:
    """Puts packed tokens back into the batch that ``unpad`` took them from; padding is 0.

    Args:
        packed: ``[1, tokens, ...]``, such as an output of attention or of a whole model.
        padding: of ``unpad``.

    Returns:
        ``[batch, length, ...]``, with a gradient.

    Raises:
        ShapeError, SpecError, TypeError: naming the argument.
    """
    _check("packed", packed)
    check_packed(packed, padding)
    check_tensor("padding.indices", padding.indices)
    batch, length = padding.attention_mask.shape
    # One place more, for the tokens that stand for none.
    places = packed.new_zeros(batch * length + 1, *packed.shape[2:])
    filled = places.index_put((padding.indices.to(packed.device),), packed[0])
    return filled[:-1].reshape(batch, length, *packed.shape[2:])
