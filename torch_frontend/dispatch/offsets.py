"""The offsets of packed documents as tensors that no kernel can be led outside its buffers by, for every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core.call import trailing_tokens
from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.call.tensors import Inputs
from attn_core.call.trailing_tokens import Tail
from torch_frontend.dispatch import plain, plan

Tensor = torch.Tensor
Longest = tuple[Any, Any]
"""The longest documents of q and of k."""


def given(info: SeqInfo, inputs: Inputs) -> tuple[Inputs, Longest]:
    """Inputs with the offsets as the caller wrote them, and the longest documents: for a call that an op completes."""
    queries, keys = info.cu_seqlens_q, info.cu_seqlens_k
    if isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray):
        if not torch.compiler.is_compiling() and plain.is_watched(inputs.q):  # Dynamo cannot follow the question
            check_cu_seqlens(queries, info.max_len_q, side="q", tokens=inputs.q.shape[-3])
            check_cu_seqlens(keys, info.max_len_k, side="k", tokens=inputs.k.shape[-3])
        queries, keys = (plain.placed(inputs.q, offsets) for offsets in (queries, keys))
    for side, offsets in (("q", queries), ("k", keys)):
        plan.check_tensor(f"seq_info.cu_seqlens_{side}", offsets)
    return inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys), (info.max_len_q, info.max_len_k)


def of(info: SeqInfo, inputs: Inputs) -> tuple[Inputs, Longest]:
    """Inputs with offsets that have a document for every token, and the longest documents.

    See ``attn_core.call.trailing_tokens``.

    numpy arrays are checked, completed and copied to a device once, not once a call.

    Raises:
        ShapeError, SpecError: for offsets on the host that do not fit the tokens of q and k.
    """
    q, k = inputs.q, inputs.k
    numpy = isinstance(info.cu_seqlens_q, np.ndarray) and isinstance(info.cu_seqlens_k, np.ndarray)
    if numpy and q.dim() >= 3 and k.dim() >= 3 and info.cu_seqlens_q.shape == info.cu_seqlens_k.shape:
        tokens = (q.shape[-3], k.shape[-3])
        made = info.converted((q.device, *tokens), lambda info: _kept(info, q.device, tokens))
        return given(made, inputs)
    inputs, longest = given(info, inputs)
    if q.device.type == "cpu" and not numpy and torch.is_grad_enabled():
        # Their memory may be a numpy array's, and then autograd does not see who writes there.
        copy, same = inputs.cu_seqlens_q.clone(), inputs.cu_seqlens_k is inputs.cu_seqlens_q
        inputs = inputs._replace(cu_seqlens_q=copy, cu_seqlens_k=copy if same else inputs.cu_seqlens_k.clone())
    return completed(inputs, longest)


def _kept(info: SeqInfo, device: torch.device, tokens: tuple[int, int]) -> SeqInfo:
    """Offsets of numpy arrays as tensors on a device. Training can use them, also if inference mode was on first."""
    if device.type != "cpu":  # what is on the CPU the frontend checks, of any kind
        check_cu_seqlens(info.cu_seqlens_q, info.max_len_q, side="q", tokens=tokens[0])
        check_cu_seqlens(info.cu_seqlens_k, info.max_len_k, side="k", tokens=tokens[1])
    made = trailing_tokens.completed(info, tokens)
    with torch.inference_mode(False):
        queries = torch.from_numpy(made.cu_seqlens_q).to(device)
        same = made.cu_seqlens_k is made.cu_seqlens_q
        keys = queries if same else torch.from_numpy(made.cu_seqlens_k).to(device)
    return SeqInfo.unchecked(queries, keys, made.max_len_q, made.max_len_k)


def completed(inputs: Inputs, longest: Longest) -> tuple[Inputs, Longest]:
    """Inputs whose offsets have a document for every token, and the longest documents.

    Offsets that are on a GPU cannot be looked at without waiting for it. So any may end early, and they are made safe,
    on every call: they may have been written to since the last one (a CUDA graph's static buffer is).

    Raises:
        ShapeError, SpecError: for offsets on the CPU that end early and do not describe documents.
    """
    queries, keys = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    fit = all(o.dtype == torch.int32 and o.dim() == 1 and o.device == inputs.q.device for o in (queries, keys))
    rows = inputs.q.dim() >= 3 and inputs.k.dim() >= 3  # else there are no tokens to speak of
    if not (fit and rows and queries.shape == keys.shape and queries.shape[0] > 1):
        return inputs, longest  # what is wrong is refused by name
    tokens, documents = (inputs.q.shape[-3], inputs.k.shape[-3]), queries.shape[0] - 1
    if queries.is_cuda:
        tail = trailing_tokens.tail_of(tokens, longest, documents)
        if tail is None:
            return inputs, longest
        queries, keys = _safe(queries, keys, tail, tokens)
    elif queries.device.type == "cpu":
        tail = trailing_tokens.tail_of(tokens, longest, documents, (int(queries.numpy()[-1]), int(keys.numpy()[-1])))
        if tail is None:
            return inputs, longest
        check_cu_seqlens(queries.numpy(), longest[0], side="q", tokens=tokens[0])
        check_cu_seqlens(keys.numpy(), longest[1], side="k", tokens=tokens[1])
        both = ((queries, tail.ends_q), (keys, tail.ends_k))
        queries, keys = (torch.from_numpy(trailing_tokens.followed(o.numpy(), ends)) for o, ends in both)
    else:
        return inputs, longest
    return inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys), (tail.max_len_q, tail.max_len_k)


def _safe(queries: Tensor, keys: Tensor, tail: Tail, tokens: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Offsets that start at 0, never decrease, and end at the token counts; right ones are as they were, in front.

    The ends of the tail are made in every call, by kernels alone. A copy from the host would wait for the device. A
    tensor that a call keeps while torch.compile prepares a CUDA graph lies in the graph's memory, which torch refuses.
    """
    device, others, as_many = queries.device, len(tail.ends_k) - tail.queries, tokens[0] == tokens[1]
    alike = as_many and tail.max_len_q == tail.max_len_k  # then one kernel serves both sides
    ends_q = _ends(tokens[0], tail.queries, tail.max_len_q, device)
    ends_k = ends_q if alike else _ends(tokens[1], others, tail.max_len_k, device)
    # Documents of keys alone repeat the last offset of the queries, and the other way round.
    pieces = queries, ends_q, queries[-1:].expand(others), keys, keys[-1:].expand(tail.queries), ends_k
    both = torch.cat(pieces).view(2, -1)
    both[:, 0].zero_()
    for rows, count in [(both, tokens[0])] if as_many else zip(both, tokens):
        rows.clamp_(0, count)
    safe_q, safe_k = torch.cummax(both, 1).values
    return safe_q, safe_k


def _ends(tokens: int, number: int, step: int, device: Any) -> Tensor:
    """So many ends of documents, int32: ``step`` tokens apart, the last behind the last token."""
    step = max(1, min(step, tokens))
    first = tokens - (number - 1) * step
    return torch.arange(first, first + number * step, step, dtype=torch.int32, device=device)


def within(offsets: Tensor, tokens: int) -> Tensor:
    """The offsets, made to start at 0, never to decrease, and to stay within ``tokens``; right ones as they are."""
    safe = offsets.clamp(0, tokens)
    safe[:1].zero_()  # assigning a number to an element would copy it from the host, and wait
    return torch.cummax(safe, 0).values


def cleared(out: Tensor, lse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """A call's results with 0 and -inf for tokens behind the last offset, which kernels leave unwritten.

    Args:
        out: ``[tokens, heads, value_dim]``; lse: ``[heads, tokens]``.
    """
    behind = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
    return out.masked_fill_(behind[:, None, None], 0.0), lse.masked_fill_(behind, -torch.inf)
