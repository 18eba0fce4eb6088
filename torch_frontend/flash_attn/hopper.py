"""The functions of FlashAttention 3 (``hopper/flash_attn_interface.py`` of flash-attention), for torch tensors.

They run on any device, on the kernel that selection picks. Results have FlashAttention 3's form: without
``return_attn_probs`` the output, else ``(out, softmax_lse)``, with -inf for a query that sees no key.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core import backends
from attn_core.call.options import Options, check_flag, check_options
from attn_core.call.seq_info import is_host_int
from attn_core.call.tensors import Inputs
from attn_core.dropins.flash_attn import (
    CACHE,
    OPTIONS,
    SELF_PACKED,
    check_hints,
    check_packed,
    host_int,
    options_of,
    refuse,
    refuse_chunks,
    renamed,
)
from attn_core.dropins.flash_attn_cache import Cached
from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError, shown
from attn_core.selection import NoBackendError
from torch_frontend.attention import attention
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.flash_attn.kvcache import attend
from torch_frontend.flash_attn.varlen import documents_of
from torch_frontend.qkvpacked import attention_qkvpacked

Tensor = torch.Tensor
Results = Tensor | tuple[Tensor, Tensor]

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Computes FlashAttention 3's ``flash_attn_func(...)``, with its gradients.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``; k: ``[batch, seqlen_k, kv_heads, head_dim]``; v with value_dim.
        softmax_scale, causal, window_size, softcap, deterministic: as in ``torch_frontend.flash_attn.flash_attn_func``.
        q_descale, k_descale, v_descale: float32 ``[batch, kv_heads]``, the factors of q, k and v in float8_e4m3fn; None
            for 1. The output is bfloat16, without gradients. Only FlashAttention 3 itself runs such calls, if its build
            has float8; elsewhere an error has the reason.
        qv, attention_chunk: raise an error that says what to do instead.
        num_splits, pack_gqa, sm_margin: hints about speed without effect.

    Returns:
        The output; with return_attn_probs ``(out, softmax_lse)``, float32 ``[batch, heads, seqlen_q]``, natural log.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    try:
        refuse(qv=qv)
        refuse_chunks(attention_chunk)
        check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
        options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
        if _is_scaled((q, k, v), factors := (q_descale, k_descale, v_descale)):
            options["return_lse"] = check_flag("return_attn_probs", return_attn_probs)
            return _attend_scaled((q, k, v), factors, options)
        return attention(q, k, v, return_lse=return_attn_probs, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, OPTIONS) from None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Computes FlashAttention 3's ``flash_attn_qkvpacked_func(...)``.

    Args:
        qkv: ``[batch, seqlen, 3, heads, head_dim]``; or ``[batch, seqlen, num_heads_q + 2 * kv_heads, head_dim]``.
        num_heads_q: the query heads of the second form.

    The other arguments, the results and the errors are those of ``flash_attn_func``.
    """
    try:
        refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        refuse_chunks(attention_chunk)
        check_hints(sm_margin=sm_margin)
        plan.check_tensor("qkv", qkv)
        options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
        options["return_lse"] = return_attn_probs
        if qkv.dim() != 4:
            check_packed("qkv", qkv.shape, 3, packed=False)
            return attention_qkvpacked(qkv, **options)
        heads: int = qkv.shape[2]
        queries: Any = num_heads_q if is_host_int(num_heads_q) else 0
        if not 0 < queries < heads or (heads - queries) % 2:
            raise ShapeError(
                f"num_heads_q={shown(num_heads_q)}: expected the query heads among the {heads} heads of qkv, which "
                "leave as many key heads as value heads"
            )
        kv_heads = (heads - queries) // 2
        return attention(*qkv.split((queries, kv_heads, kv_heads), 2), **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, SELF_PACKED) from None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Computes FlashAttention 3's ``flash_attn_varlen_func(...)`` on packed documents, with its gradients.

    Args:
        q: ``[total_q, heads, head_dim]``; k: ``[total_k, kv_heads, head_dim]``; v: ``[total_k, kv_heads, value_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[documents + 1]``. max_seqlen_q, max_seqlen_k: ints on the host.
        seqused_q, seqused_k: raise an error.

    The other arguments, the results and the errors are those of ``flash_attn_func``; softmax_lse ``[heads, total_q]``.
    """
    try:
        refuse(seqused_q=seqused_q, seqused_k=seqused_k)
        refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        refuse_chunks(attention_chunk, "documents")
        check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
        options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
        info = documents_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attention(q, k, v, seq_info=info, return_lse=return_attn_probs, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, OPTIONS) from None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes FlashAttention 3's ``flash_attn_with_kvcache(...)``: appends in place, rotates, and attends.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with cu_seqlens_q, int32 ``[batch +
            1]``, and max_seqlen_q, an int on the host, at least the most queries of a sequence.
        page_table: int32 ``[batch, width]``: each sequence's pages in order.
        qv, cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale, v_descale, attention_chunk: raise an error.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: hints about speed without effect.

    The other arguments and the errors are those of ``torch_frontend.flash_attn.flash_attn_with_kvcache``.

    Returns:
        The output in the shape of q; with return_softmax_lse ``(out, softmax_lse, out_accum, softmax_lse_accum)``, of
        which the last two, the partial results of splits, are empty.
    """
    call = Cached(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad),
        *(page_table, cu_seqlens_q),
    )
    try:
        refuse(qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
        refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        refuse_chunks(attention_chunk, "cache")
        check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
        options = options_of(softmax_scale, causal, window_size, softcap, False)
        options["return_lse"] = check_flag("return_softmax_lse", return_softmax_lse)
        if cu_seqlens_q is not None:
            max_seqlen_q = host_int("max_seqlen_q", max_seqlen_q)
        interleaved = check_flag("rotary_interleaved", rotary_interleaved)
        results = attend(call, interleaved, options, "page_table", max_seqlen_q)
    except (SpecError, TypeError) as error:
        raise renamed(error, CACHE | {"block_table": "page_table"}) from None
    if not return_softmax_lse:
        return results
    return *results, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


BACKEND = "flash3_fp8"
NAMES = ("q_descale", "k_descale", "v_descale")
E4M3 = torch.float8_e4m3fn


def _is_scaled(tensors: tuple[Any, Any, Any], factors: tuple[Any, Any, Any]) -> bool:
    """Returns whether a call has a tensor in float8_e4m3fn or a factor."""
    if any([each is not None for each in factors]):
        return True
    return any([isinstance(each, Tensor) and each.dtype is E4M3 for each in tensors])


def _attend_scaled(
    tensors: tuple[Tensor, Tensor, Tensor], factors: tuple[Any, Any, Any], options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns out in bfloat16, or (out, lse), of dense q, k and v in float8_e4m3fn. Forward only.

    Args:
        tensors: ``[batch, length, heads, dim]`` each.
        factors: q_descale, k_descale and v_descale, float32 ``[batch, kv_heads]``: a number is ``stored * factor``.
            None for 1.
        options: keywords of ``attention``, return_lse among them.

    Raises:
        TypeError, DTypeError, ShapeError, DeviceError, SpecError: naming the argument; also if this machine has no
            FlashAttention 3 with such kernels, with the reason.
    """
    named = dict(zip(NAMES, factors, strict=True))
    for name, each in (*zip("qkv", tensors, strict=True), *named.items()):
        if name in "qkv" or each is not None:
            plan.check_tensor(name, each)
    for name, each in zip("qkv", tensors, strict=True):
        if each.dtype is not E4M3:
            raise DTypeError(f"{name}: expected float8_e4m3fn, as factors and float8 tensors need, got {each.dtype}")
    q = tensors[0]
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        raise SpecError("q: float8_e4m3fn runs eagerly alone, not under torch.compile or a transform")
    if torch.is_grad_enabled() and any([each.requires_grad for each in tensors]):
        raise SpecError("q: float8_e4m3fn has no gradient; call the function inside torch.no_grad()")
    inputs = Inputs(*tensors)
    entries = tuple([entry and (entry[0], torch.bfloat16, entry[2]) for entry in plan.metadata(inputs)])
    arguments = entries, check_options(Options(**options)), False, False, (BACKEND,)
    try:
        planned = plan.plan(*arguments)  # cached, so that a repeated call selects nothing again
    except NoBackendError as error:
        reasons = "; ".join(error.selection.reasons(BACKEND))
        raise SpecError(f"q: float8_e4m3fn cannot run here: {reasons}; pass bfloat16") from None
    spec = planned.spec
    sizes = torch.Size((spec.batch, spec.num_kv_heads))
    for name, each in named.items():
        if each is not None:
            _check_factor(name, each, sizes, q.device)
    if spec.empty:
        out, lse = planned.forward(spec, inputs._replace(q=q.to(torch.bfloat16)))
    else:
        backend: Any = backends.load(BACKEND, "cuda")
        dense = tuple([None if each is None else each.contiguous() for each in factors])
        out, lse = on_device(backend.forward_of_e4m3, q.device)(spec, inputs, dense)
    return (out, lse) if options["return_lse"] else out


def _check_factor(name: str, factor: Any, sizes: torch.Size, device: torch.device) -> None:
    if factor.dtype is not torch.float32:
        raise DTypeError(f"{name}: expected dtype float32, got {factor.dtype}")
    if factor.shape != sizes:
        raise ShapeError(f"{name}: expected [batch, kv_heads] = {list(sizes)}, got {list(factor.shape)}")
    if factor.device != device:
        raise DeviceError(f"{name}: expected the device of q ({device}), got {factor.device}")
