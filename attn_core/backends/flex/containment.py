"""Keeps NaN within its document in a compiled FlexAttention call, whose blocks hold tokens of several documents."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.backends.flex.functions import PackedTokens
from attn_core.backends.flex.operands import arrange, offsets
from attn_core.backends.flex.program import program
from attn_core.backends.flex.tables import length_classes
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


class Contained(NamedTuple):
    """Packed tensors without NaN and Inf, and which rows and keys must become NaN, bool ``[tokens]`` each."""

    tensors: tuple[Any, ...]
    rows: Any
    keys: Any


def contain(
    spec: AttentionSpec, where: PackedTokens, inputs: Inputs, by_query: tuple[Any, ...], by_key: tuple[Any, ...]
) -> Contained:
    """Replaces non-finite elements of tensors ``[1, tokens, heads, dim]`` by 0, and finds the affected rows and keys.

    Without this a NaN would reach other documents that share a block, because 0 * NaN is NaN.

    A non-finite query marks its own row; a non-finite key marks every row of its document. Either marks every key of
    that document.
    """
    tensors, layouts = zip(*map(arrange, (*by_query, *by_key)))
    shapes = tuple((str(tensor.dtype), tuple(tensor.shape[2:])) for tensor in tensors)
    clean = program(_contain, ("q",) * len(by_query), shapes, layouts, length_classes(spec))
    return clean(where, *offsets(inputs), *tensors)


def _contain(how: Any, where: PackedTokens, cu_q: Any, cu_k: Any, *tensors: Any) -> Contained:
    import torch

    count = len(how[0])  # the signature holds a tuple of this length because a number would become a symbol
    finite = [torch.isfinite(tensor) for tensor in tensors]
    clean = tuple(torch.where(fine, tensor, 0.0) for fine, tensor in zip(finite, tensors))
    bad = [~fine.all(3).all(2)[0] for fine in finite]  # [tokens]
    bad_rows, bad_keys = torch.zeros_like(where.of_query, dtype=torch.bool), bad[count]
    for one in bad[:count]:
        bad_rows = bad_rows | one
    for one in bad[count + 1 :]:
        bad_keys = bad_keys | one
    by_keys, by_rows = _in_documents(bad_keys, cu_k), _in_documents(bad_rows, cu_q)
    documents = cu_q.shape[0] - 1
    of_query, of_key = where.of_query.clamp(0, documents - 1), where.of_key.clamp(0, documents - 1)
    rows = bad_rows | (by_keys[of_query] & (where.of_query >= 0))
    keys = (by_keys | by_rows)[of_key] & (where.of_key < documents)
    return Contained(clean, rows, keys)


def _in_documents(bad: Any, cu_seqlens: Any) -> Any:
    """Returns which documents contain a bad token: bool ``[documents]``."""
    import torch

    total = torch.nn.functional.pad(bad.cumsum(0), (1, 0))
    return total[cu_seqlens.clamp(0, bad.shape[0])].diff() > 0


def mark(results: Any, tokens: Any, lse: Any = None) -> Any:
    """Writes NaN into ``[1, tokens, heads, dim]`` at ``tokens``, except in rows that see no key according to lse."""
    import torch

    places = tokens[None, :, None, None]
    if lse is not None:  # [1, heads, tokens] -> [1, tokens, heads, 1]
        places = places & (lse != -torch.inf).transpose(1, 2)[..., None]
    return results.masked_fill_(places, torch.nan)
