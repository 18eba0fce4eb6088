"""The log-sum-exp and the softmax weights that flash-attn's ``return_attn_probs`` returns, for torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.seq_info import SeqInfo
from torch_frontend.attention import attention
from torch_frontend.dispatch import plan

Tensor = torch.Tensor
Options = dict[str, Any]


def lse_of_flash_attn(lse: Tensor) -> Tensor:
    """Returns a log-sum-exp in flash-attn 2's convention: +inf, not -inf, for a query that sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def with_probabilities(
    qkv: tuple[Tensor, ...], dropout: float, generator: torch.Generator | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, softmax_lse, S_dmask) of ``attention``.

    Args:
        qkv: q, k and v of ``attention``.
        options: its other keywords, among them seq_info, a SeqInfo with offsets on q's device, for packed tensors.
    """
    q, k, v = qkv
    if not dropout:
        out, lse = attention(q, k, v, return_lse=True, dropout_rng=generator, **options)
        return out, lse_of_flash_attn(lse), q.new_empty(0)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        plan.check_tensor(name, tensor)
    drops = {"dropout": dropout, "dropout_rng": generator, **options, "backend": "math"}
    before = _copy_of(generator)
    out, lse = attention(q, k, v, return_lse=True, **drops)
    # The weights are the output for values that are rows of an identity, which `math` alone takes so wide.
    with torch.no_grad():
        q, k, values = q.detach().float(), k.detach().float(), _identity(k, options.get("seq_info"))
        weights = attention(q, k, values, **options, backend="math")
        after_dropout = attention(q, k, values, **{**drops, "dropout_rng": before})
        largest = weights.amax(-1, keepdim=True)
        numerators = weights / torch.where(largest > 0, largest, 1.0)
        signed = torch.where((after_dropout == 0) & (weights > 0), -numerators, numerators).to(out.dtype)
        numerators = _by_document(signed, options.get("seq_info"))
    return out, lse_of_flash_attn(lse), numerators


def _copy_of(generator: torch.Generator | None) -> torch.Generator:
    """Returns a generator that draws what ``generator``, or torch's own if None, draws next."""
    source = torch.default_generator if generator is None else generator
    copy = torch.Generator(source.device)
    copy.set_state(source.get_state())
    return copy


def _identity(k: Tensor, info: SeqInfo | None) -> Tensor:
    """Returns float32 values ``[..., kv_len, kv_heads, width]``, 1 at the place of their key in its row or document."""
    length, heads = k.shape[-3], k.shape[-2]
    places = torch.arange(length, device=k.device)
    width = length
    if info is not None:
        _, places = places_in_documents(info.cu_seqlens_k, length)
        width = info.max_len_k
    rows = places[:, None] == torch.arange(width, device=k.device)
    return rows.float()[:, None].expand(*k.shape[:-3], length, heads, width)


def _by_document(weights: Tensor, info: SeqInfo | None) -> Tensor:
    """Returns weights ``[batch, heads, q_len, kv_len]`` of ``[batch, q_len, heads, kv_len]`` or packed ones."""
    if info is None:
        return weights.transpose(1, 2)
    documents, places = places_in_documents(info.cu_seqlens_q, weights.shape[0])
    count = info.cu_seqlens_q.shape[0] - 1
    # A document more, for tokens behind the last offset.
    table = weights.new_zeros(count + 1, info.max_len_q, *weights.shape[1:])
    table[documents, places.clamp(max=max(info.max_len_q - 1, 0))] = weights
    return table[:count].transpose(1, 2)


def places_in_documents(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the document of each token, and its place there, int64 ``[tokens]``.

    A token behind the last offset has the number of documents as its document.
    """
    at = torch.arange(tokens, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True)
    return documents, at - cu_seqlens[documents]
