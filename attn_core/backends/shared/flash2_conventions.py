"""Conventions of FlashAttention 2's kernel: the longest query document, ALiBi's log-sum-exp, dropout's random numbers.

Under the causal mask the kernel adds ``slope * key`` to a score, not ``-slope * (query + offset - key)``. The softmax
is the same, but the log-sum-exp is larger by ``slope * (query + offset)`` and rounded to float32 at that size. Windows
and full attention add the true distance, so they need no correction. Source: flash-attn 2.8.3,
csrc/flash_attn/src/mask.h and alibi.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def longest_query(spec: AttentionSpec) -> int:
    """Returns ``max_seqlen_q`` of packed documents, safe for every build of the kernel.

    With 1 the kernel assumes that every document has exactly one query, and groups heads by that. So the result is 2 if
    some documents have none; the kernel only needs an upper bound.
    """
    return max(spec.max_len_q or 0, 1 if spec.q_len == spec.documents else 2)


def slopes_of(spec: AttentionSpec, inputs: Inputs) -> Tensor | None:
    """Returns float32 ``[heads]`` or ``[batch, heads]``, or None. Packed calls get ``[heads]``, because the kernel
    would take a batch axis for one of documents."""
    if spec.alibi_shape is None:
        return None
    slopes = inputs.alibi_slopes.detach().float().contiguous()
    return slopes.view(-1) if spec.packed else slopes


def shift_lse(spec: AttentionSpec, inputs: Inputs, lse: Tensor, slopes: Tensor, sign: int) -> Tensor:
    """Returns ``lse + sign * slope * (query + offset)``: sign 1 gives the kernel's own log-sum-exp, -1 undoes it.

    Args:
        lse: float32 ``[batch, heads, q_len]`` or packed ``[heads, tokens]``. slopes: from ``slopes_of``.
    """
    import torch

    offset = band(spec).offset
    places = torch.arange(spec.q_len, device=lse.device, dtype=torch.int32)
    if spec.packed:
        ends, key_ends = inputs.cu_seqlens_q[1:], inputs.cu_seqlens_k[1:]
        # Tokens after the last document keep their log-sum-exp of -inf. The clamp only makes their index valid.
        document = torch.searchsorted(ends, places, right=True).clamp_(max=ends.shape[0] - 1)
        offset = (key_ends - inputs.cu_seqlens_k[:-1] - ends)[document]  # query - start + kv_len - q_len
    # [..., heads, q_len] + [..., heads, 1] * [q_len]
    return torch.addcmul(lse, slopes[..., None], (places + offset).to(lse.dtype), value=sign)


def _seed(inputs: Inputs) -> int:
    """Returns a 63-bit seed from the call's (seed, offset), which are on the host."""
    import torch

    if inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout while a CUDA graph is captured: flash-attn would drop the same weights in each replay"
        )
    seed, offset = inputs.rng.tolist()
    # The factor, 2**64 over the golden ratio, gives consecutive offsets distant seeds. 63 bits, because the state on
    # the device is int64.
    return (seed + 0x9E3779B97F4A7C15 * offset) & (2**63 - 1)


def generator_of(inputs: Inputs) -> torch.Generator:
    """Returns a fresh generator on the device. The forward draws its dropout mask from it.

    Raises:
        RuntimeError: while a CUDA graph is captured.
    """
    import torch

    return torch.Generator(inputs.q.device).manual_seed(_seed(inputs))


def rng_state_of(inputs: Inputs) -> Tensor:
    """Returns int64 ``[seed, 0]`` on the device: the state that the forward records of a fresh generator.

    The device fills it, because copying it from the host would synchronise.
    """
    import torch

    state = torch.full((2,), _seed(inputs), dtype=torch.int64, device=inputs.q.device)
    state[1:].zero_()
    return state
