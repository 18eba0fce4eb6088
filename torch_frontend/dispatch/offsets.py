"""Converts the offsets of packed documents (cu_seqlens) to tensors that are safe for every kernel.

Every token gets a document, because kernels leave rows outside of all documents unwritten. Offsets on a GPU are clamped
into range on the GPU, so that no kernel can read or write out of bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core.backends.shared.triton import has_triton
from attn_core.call.seq_info import SeqInfo, Tail, append_tail, check_cu_seqlens, cover_tail, tail_of
from attn_core.call.tensors import Inputs
from torch_frontend.dispatch import plan, tensor_kinds

Tensor = torch.Tensor
Longest = tuple[Any, Any]
"""The lengths of the longest documents of q and of k."""


def attach(info: SeqInfo, inputs: Inputs) -> tuple[Inputs, Longest]:
    """Returns the inputs with the caller's offsets, and the longest documents. An op completes them when it runs."""
    queries, keys = info.cu_seqlens_q, info.cu_seqlens_k
    if isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray):
        if not torch.compiler.is_compiling() and tensor_kinds.is_watched(inputs.q):  # Dynamo cannot trace is_watched
            check_cu_seqlens(queries, info.max_len_q, side="q", tokens=inputs.q.shape[-3])
            check_cu_seqlens(keys, info.max_len_k, side="k", tokens=inputs.k.shape[-3])
        queries, keys = (tensor_kinds.to_device_of(inputs.q, offsets) for offsets in (queries, keys))
    for side, offsets in (("q", queries), ("k", keys)):
        plan.check_tensor(f"seq_info.cu_seqlens_{side}", offsets)
    if not (type(queries) is type(keys) is type(inputs.q) is Tensor):
        named = {"seq_info.cu_seqlens_q": queries, "seq_info.cu_seqlens_k": keys}
        tensor_kinds.check_data(inputs.q, **named)
    return inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys), (info.max_len_q, info.max_len_k)


def attach_complete(info: SeqInfo, inputs: Inputs) -> tuple[Inputs, Longest]:
    """Returns the inputs with offsets that give every token a document, and the longest documents.

    See ``attn_core.call.seq_info.Tail``. The SeqInfo caches numpy offsets as checked and completed tensors per
    device, so a second call with the same SeqInfo copies nothing to the device.

    Raises:
        ShapeError, SpecError: for offsets on the CPU that do not fit the tokens of q and k.
    """
    q, k = inputs.q, inputs.k
    numpy = isinstance(info.cu_seqlens_q, np.ndarray) and isinstance(info.cu_seqlens_k, np.ndarray)
    if numpy and q.dim() >= 3 and k.dim() >= 3 and info.cu_seqlens_q.shape == info.cu_seqlens_k.shape:
        tokens = (q.shape[-3], k.shape[-3])
        converted = info.converted((q.device, *tokens), lambda info: _to_device(info, q.device, tokens))
        return attach(converted, inputs)
    inputs, longest = attach(info, inputs)
    if q.device.type == "cpu" and not numpy and torch.is_grad_enabled():
        # The offsets may share memory with a numpy array. Autograd does not notice if that array changes before the
        # backward, so the forward saves a copy.
        copy, same = inputs.cu_seqlens_q.clone(), inputs.cu_seqlens_k is inputs.cu_seqlens_q
        inputs = inputs._replace(cu_seqlens_q=copy, cu_seqlens_k=copy if same else inputs.cu_seqlens_k.clone())
    return complete(inputs, longest)


def _to_device(info: SeqInfo, device: torch.device, tokens: tuple[int, int]) -> SeqInfo:
    """Returns a SeqInfo whose numpy offsets are checked, completed and copied to a device."""
    if device.type != "cpu":  # run_plan.check_offsets checks offsets on the CPU later
        check_cu_seqlens(info.cu_seqlens_q, info.max_len_q, side="q", tokens=tokens[0])
        check_cu_seqlens(info.cu_seqlens_k, info.max_len_k, side="k", tokens=tokens[1])
    whole = cover_tail(info, tokens)
    with torch.inference_mode(False):  # a later training call uses the cached tensors, which must not be inference ones
        queries = torch.from_numpy(whole.cu_seqlens_q).to(device)
        same = whole.cu_seqlens_k is whole.cu_seqlens_q
        keys = queries if same else torch.from_numpy(whole.cu_seqlens_k).to(device)
    return SeqInfo.unchecked(queries, keys, whole.max_len_q, whole.max_len_k)


def complete(inputs: Inputs, longest: Longest) -> tuple[Inputs, Longest]:
    """Returns the inputs with offsets that give every token a document, and the longest documents.

    Reading offsets on a GPU would wait for it. So offsets on any device but a CPU are always completed and clamped, on
    every call, because their values may have changed since the last one (a CUDA graph's static buffer does).

    Raises:
        ShapeError, SpecError: for offsets on the CPU that end early and are invalid.
    """
    queries, keys = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    fit = all(o.dtype == torch.int32 and o.dim() == 1 and o.device == inputs.q.device for o in (queries, keys))
    rows = inputs.q.dim() >= 3 and inputs.k.dim() >= 3  # else there is no token axis
    if not (fit and rows and queries.shape == keys.shape and queries.shape[0] > 1):
        return inputs, longest  # build_spec raises an error that names the invalid argument
    tokens, documents = (inputs.q.shape[-3], inputs.k.shape[-3]), queries.shape[0] - 1
    if not queries.is_cpu:
        tail = tail_of(tokens, longest, documents)
        if tail is None:
            return inputs, longest
        queries, keys = _safe(queries, keys, tail, tokens)
    else:
        tail = tail_of(tokens, longest, documents, (int(queries.numpy()[-1]), int(keys.numpy()[-1])))
        if tail is None:
            return inputs, longest
        check_cu_seqlens(queries.numpy(), longest[0], side="q", tokens=tokens[0])
        check_cu_seqlens(keys.numpy(), longest[1], side="k", tokens=tokens[1])
        both = ((queries, tail.ends_q), (keys, tail.ends_k))
        queries, keys = (torch.from_numpy(append_tail(o.numpy(), ends)) for o, ends in both)
    return inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys), (tail.max_len_q, tail.max_len_k)


def _safe(queries: Tensor, keys: Tensor, tail: Tail, tokens: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns ``safe_by_torch``, on a GPU with Triton by one kernel."""
    if queries.is_cuda and has_triton():
        from torch_frontend.dispatch import triton_offsets

        result = triton_offsets.safe(queries, keys, tail, tokens)
        if result is not None:
            return result
    return safe_by_torch(queries, keys, tail, tokens)


def safe_by_torch(queries: Tensor, keys: Tensor, tail: Tail, tokens: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns offsets that start at 0, never decrease, and end at the token counts. Valid offsets stay as a prefix.

    Kernels compute the tail's ends in every call. A copy from the host would wait for the device. A cached tensor is no
    way out: if torch.compile captures a CUDA graph, the tensor lies in the graph's memory pool, and torch raises.
    """
    device, others, same_count = queries.device, len(tail.ends_k) - tail.queries, tokens[0] == tokens[1]
    alike = same_count and tail.max_len_q == tail.max_len_k  # then one kernel computes both sides
    ends_q = _ends(tokens[0], tail.queries, tail.max_len_q, device)
    ends_k = ends_q if alike else _ends(tokens[1], others, tail.max_len_k, device)
    # Documents without queries repeat the queries' last offset; documents without keys repeat the keys'.
    pieces = queries, ends_q, queries[-1:].expand(others), keys, keys[-1:].expand(tail.queries), ends_k
    both = torch.cat(pieces).view(2, -1)
    # In place, here and below: torch.cat has just allocated the tensor, and each new tensor costs a kernel.
    both[:, 0].zero_()
    for rows, count in [(both, tokens[0])] if same_count else zip(both, tokens):
        rows.clamp_(0, count)
    # cummax also makes the tail's ends no smaller than the last offset, whose value only the device knows.
    safe_q, safe_k = torch.cummax(both, 1).values
    return safe_q, safe_k


def _ends(tokens: int, number: int, step: int, device: torch.device) -> Tensor:
    """Returns the ends of ``number`` documents, int32: ``step`` tokens apart, the last equal to ``tokens``."""
    step = max(1, min(step, tokens))
    first = tokens - (number - 1) * step
    return torch.arange(first, first + number * step, step, dtype=torch.int32, device=device)


def clamp(offsets: Tensor, tokens: int) -> Tensor:
    """Returns offsets that start at 0, never decrease and stay within ``tokens``. Valid offsets keep their values."""
    if offsets.is_cuda and offsets.shape[0] and has_triton():
        from torch_frontend.dispatch import triton_offsets

        result = triton_offsets.safe(offsets, offsets, triton_offsets.NO_TAIL, (tokens, tokens))
        if result is not None:
            return result[0]
    safe = offsets.clamp(0, tokens)
    safe[:1].zero_()  # an assignment of a number would copy it from the host and wait for the device
    return torch.cummax(safe, 0).values


def clear_tail(out: Tensor, lse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Writes 0 (out) and -inf (lse) to the tokens behind the last offset, which kernels leave unwritten.

    Args:
        out: ``[tokens, heads, value_dim]``; lse: ``[heads, tokens]``.
    """
    behind = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
    return out.masked_fill_(behind[:, None, None], 0.0), lse.masked_fill_(behind, -torch.inf)
