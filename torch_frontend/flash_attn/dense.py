"""flash_attn_func and its packed forms, with the arguments of flash-attn 2.8, for torch tensors."""

from __future__ import annotations

import torch

from attn_core.call.options import check_flag
from attn_core.dropins.flash_attn import (
    KEYS_PACKED,
    OPTIONS,
    SELF_PACKED,
    check_packed,
    options_of,
    rate_of,
    renamed,
    softcap_of,
    window_of,
)
from attn_core.errors import SpecError
from torch_frontend.attention import attention
from torch_frontend.dispatch import plan
from torch_frontend.flash_attn.probabilities import with_probabilities
from torch_frontend.qkvpacked import attention_qkvpacked

Tensor = torch.Tensor
Results = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_rng: torch.Generator | None = None,
) -> Results:
    """Computes ``flash_attn.flash_attn_func(...)`` on the kernel that selection picks, with its gradients.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``; k, v: ``[batch, seqlen_k, kv_heads, head_dim]``. Query head h reads
            kv head ``h // (heads // kv_heads)``.
        dropout_p: probability of dropping a softmax weight; other ones are dropped than there.
        softmax_scale: factor on ``q . k``; ``1 / sqrt(head_dim)`` if None.
        causal: query i sees key ``j <= i + seqlen_k - seqlen_q``.
        window_size: inclusive distances ``(left, right)`` from that diagonal; -1 is no limit.
        softcap: ``softcap * tanh(s / softcap)``; 0 or less switches it off.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``: adds ``-slope * |i + seqlen_k - seqlen_q - j|``. No gradient.
        deterministic: use only kernels that give the same bits on every run.
        return_attn_probs: return ``(out, softmax_lse, S_dmask)``.
        dropout_rng: the generator of dropout; flash-attn has no such argument.

    Returns:
        ``[batch, seqlen_q, heads, head_dim]``, 0 for a query that sees no key. softmax_lse is float32 ``[batch, heads,
        seqlen_q]``, natural log, +inf for such a query. S_dmask is empty without dropout. With dropout it is ``exp(s -
        row's largest s)``, ``[batch, heads, seqlen_q, seqlen_k]``, negative where dropped, and the backend is ``math``.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    try:
        if return_attn_probs is False:
            return attention(
                q,
                k,
                v,
                causal=causal,
                window=None if type(window_size) is tuple and window_size == (-1, -1) else window_of(window_size),
                softcap=None if type(softcap) is float and softcap <= 0.0 else softcap_of(softcap),
                scale=softmax_scale,
                alibi_slopes=alibi_slopes,
                dropout=dropout_p,
                deterministic=deterministic,
                dropout_rng=dropout_rng,
            )
        check_flag("return_attn_probs", return_attn_probs)
        options = {
            **options_of(softmax_scale, causal, window_size, softcap, deterministic),
            "alibi_slopes": alibi_slopes,
        }
        return with_probabilities((q, k, v), rate_of(dropout_p), dropout_rng, options)
    except (SpecError, TypeError) as error:
        raise renamed(error, OPTIONS) from None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_rng: torch.Generator | None = None,
) -> Results:
    """Computes ``flash_attn.flash_attn_qkvpacked_func(...)``; the backward writes one gradient without a concatenation.

    Args:
        qkv: ``[batch, seqlen, 3, heads, head_dim]``.

    The other arguments, the results and the errors are those of ``flash_attn_func``.
    """
    try:
        plan.check_tensor("qkv", qkv)
        check_packed("qkv", qkv.shape, 3, packed=False)
        options = {
            **options_of(softmax_scale, causal, window_size, softcap, deterministic),
            "alibi_slopes": alibi_slopes,
        }
        if check_flag("return_attn_probs", return_attn_probs):
            return with_probabilities(qkv.unbind(2), rate_of(dropout_p), dropout_rng, options)
        return attention_qkvpacked(qkv, dropout=dropout_p, dropout_rng=dropout_rng, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, SELF_PACKED) from None


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_rng: torch.Generator | None = None,
) -> Results:
    """Computes ``flash_attn.flash_attn_kvpacked_func(...)``.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``.
        kv: ``[batch, seqlen_k, 2, kv_heads, head_dim]``.

    The other arguments, the results and the errors are those of ``flash_attn_func``.
    """
    try:
        plan.check_tensor("kv", kv)
        check_packed("kv", kv.shape, 2, packed=False)
        k, v = kv.unbind(2)
        options = {
            **options_of(softmax_scale, causal, window_size, softcap, deterministic),
            "alibi_slopes": alibi_slopes,
        }
        if check_flag("return_attn_probs", return_attn_probs):
            return with_probabilities((q, k, v), rate_of(dropout_p), dropout_rng, options)
        return attention(q, k, v, dropout=dropout_p, dropout_rng=dropout_rng, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, KEYS_PACKED) from None
