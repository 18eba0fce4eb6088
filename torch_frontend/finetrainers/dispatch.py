"""Finetrainers' ``attention_dispatch`` for torch tensors, with one meaning on every provider.

Without ``attention_kwargs``, and on the native provider, a call means what
``torch.nn.functional.scaled_dot_product_attention`` means by the same arguments, and may stand in its place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.jit._builtins import _register_builtin
from torch.overrides import handle_torch_function, has_torch_function_variadic

from attn_core.call.options import flag
from attn_core.dropins import finetrainers
from attn_core.dropins.finetrainers import KERNELS, NATIVE, AttentionProvider
from attn_core.dropins.finetrainers_kwargs import Words
from attn_core.errors import SpecError
from attn_core.selection import NoBackendError, Target, override
from torch_frontend.attention import attention
from torch_frontend.backends import here
from torch_frontend.dispatch.plain import PLAIN, are_jit_traces_active, as_causal, is_foreign, is_plain, torch_attention
from torch_frontend.finetrainers.call import Call, check_heads, dense, on_provider, rephrased

__all__ = ["AttentionProvider", "attention_dispatch", "attention_provider", "list_providers"]

Tensor = torch.Tensor

_is_compiling, _modes = torch.compiler.is_compiling, torch._C._len_torch_function_stack


def attention_provider(
    provider: AttentionProvider | str = NATIVE,
    *,
    mesh: None = None,
    convert_to_fp32: bool = True,
    rotate_method: str = "allgather",
) -> AbstractContextManager[AttentionProvider]:
    """Runs the block's attention on a provider's kernel: ``attention_dispatch``, and ``attention`` as ``use_backend``.

    Nests; safe with threads and asyncio tasks. An inner ``use_backend`` chooses another kernel for the same meaning.

    Args:
        provider: a name or a member of ``AttentionProvider``. native is automatic choice; any other runs or raises.
        mesh: context parallelism is not offered; ``convert_to_fp32`` and ``rotate_method`` say how it would be done.

    Raises:
        SpecError: for a provider nobody knows, or a mesh.
    """
    return finetrainers.provided(provider, mesh, override.use_backend)


def list_providers(*, training: bool = False, uses_mask: bool = False) -> list[AttentionProvider]:
    """The providers that have a kernel on this machine, by what its backends claim.

    Args:
        training: whether it must have a gradient.
        uses_mask: whether it must take a mask: of scores, on the varlen providers of keys.
    """
    return list(finetrainers.providers_on(Target.here("torch", here()), training=training, uses_mask=uses_mask))


def attention_dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Attention on the active provider: ``query [batch, heads, q_len, head_dim]``, and so the result.

    Args:
        key, value: ``[batch, kv_heads, kv_len, ...]``; fewer kv heads than heads need ``enable_gqa=True``.
        attn_mask: bool, True = visible, or float, added; broadcastable to ``[batch, heads, q_len, kv_len]``. Two axes
            are ``[q_len, kv_len]``; on the varlen providers ``[batch, kv_len]`` of keys, bool, and on flex and
            xformers what the shape says. On flex also a ``BlockMask``.
        is_causal: query i sees keys 0 to i, whatever the lengths.
        attention_kwargs: ``window_size``, ``softcap``, ``alibi_slopes``, ``deterministic``, ``return_lse``,
            ``cu_seqlens_q``, ``cu_seqlens_k``, ``max_seqlen_q``, ``max_seqlen_k``, by flash-attn's meaning, on whatever
            provider; and what the host's kernels know besides, as far as it is what they do here.

    Returns:
        ``[batch, heads, q_len, value_dim]``; with ``return_lse`` also the log-sum-exp ``[batch, heads, q_len]``.

    Raises:
        SpecError and its kinds: for what means nothing, or nothing on this provider; NoBackendError: where the
        provider's kernel cannot run the call, with every reason. On native, without ``attention_kwargs``, whatever no
        backend takes is torch's own function's.
    """
    if enable_gqa is not True and enable_gqa is not False:
        flag("enable_gqa", enable_gqa)
    if attn_mask is not None:
        attn_mask, is_causal = as_causal(attn_mask, is_causal, query)
    if _is_compiling():
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        unclear = attention_kwargs or finetrainers.DEFAULT != "native" or any(map(is_foreign, call[:4]))
        if unclear or (attn_mask is not None and attn_mask.dim() == 2):
            return _outside_the_graph(*call, attention_kwargs)
        return _as_torch(call)  # on the provider's kernels, which the op asks for when it runs
    if _modes() and (shown := _shown_to_modes(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)):
        return shown[0]
    provider = finetrainers.stated_provider() or finetrainers.default_provider()
    native = provider is NATIVE and not attention_kwargs
    plain = attn_mask is None and not attention_kwargs and not dropout_p
    if plain and _is_simple(query, key, value, is_causal, enable_gqa) and (not native or _is_everyday()):
        try:
            return _simply(
                query, key, value, dropout_p, is_causal, scale, override.requested() or KERNELS[provider] or None
            )
        except SpecError:  # named below, or native's: what torch takes and we do not, a scale of 0, say
            pass
        except NoBackendError as error:
            if not native or error.selection.requested:
                raise
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _as_torch(call) if native else on_provider(provider, call, attention_kwargs)


def _is_simple(query: Any, key: Any, value: Any, is_causal: Any, enable_gqa: Any) -> bool:
    """Whether these are plain tensors ``[batch, heads, len, head_dim]`` that fit, in a call without anything unusual.

    What most calls are; the checks of all others cost more than a small kernel.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    q, k, v = query.shape, key.shape, value.shape
    if len(q) != 4 or len(k) != 4 or k[0] != q[0] or k[3] != q[3] or v[:3] != k[:3] or len(v) != 4:
        return False
    if (k[1] != q[1] and not (enable_gqa and k[1] and not q[1] % k[1])) or (is_causal and q[2] != k[2]):
        return False
    if query.layout is not torch.strided or key.layout is not torch.strided or value.layout is not torch.strided:
        return False
    return 0 not in q and 0 not in k and v[3] != 0 and query.device.type in ("cpu", "cuda")


def _simply(
    query: Tensor, key: Tensor, value: Tensor, dropout: Any, causal: bool, scale: float | None, names: Any
) -> Tensor:
    out = attention(
        query.transpose(1, 2),  # [batch, heads, len, head_dim] -> [batch, len, heads, head_dim]
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        alignment="top_left",
        scale=scale,
        dropout=dropout,  # 0 of some type: the plan refuses a type that is wrong
        backend=names,
    )
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def _shown_to_modes(*arguments: Any) -> tuple[Any] | None:
    """What a ``TorchFunctionMode`` that is active makes of the call, as it would of torch's own function.

    One compares the function it is shown with ``F.scaled_dot_product_attention``, and so finds it where this stands in
    its place. Tensor subclasses are torch's own function's, which shows them itself. None where nobody looks.
    """
    given = arguments[:3]
    if not has_torch_function_variadic(*given) or not all(type(tensor) in PLAIN for tensor in given):
        return None
    options = {"scale": arguments[6], "enable_gqa": arguments[7]}
    return (handle_torch_function(attention_dispatch, given, *arguments[:6], **options),)


@torch.compiler.disable(reason="which provider is active decides what these arguments of attention_dispatch mean")
def _outside_the_graph(*arguments: Any) -> Any:
    return attention_dispatch(*arguments)


def _as_torch(call: Call) -> Tensor:
    """torch's meaning, on automatic choice or what ``use_backend`` asks for; torch's own function for all else."""
    if _is_ours(call):
        try:
            check_heads(call)
            return dense(rephrased(call), _NO_WORDS, None)[0]
        except SpecError:  # what torch takes and we do not, or neither does: its own function knows
            pass
        except NoBackendError as error:
            if error.selection.requested:
                raise
    return torch_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)  # type: ignore[no-any-return]


_NO_WORDS = Words()


def _is_ours(call: Call) -> bool:
    """Whether these are plain tensors, in a call whose result has the axes and rows of query."""
    query, key, value, mask = call[:4]
    for tensor in (query, key, value) if mask is None else (query, key, value, mask):
        if not is_plain(tensor):
            return False
    rank, rows = query.dim(), query.shape[:-3]
    if rank not in (2, 3, 4) or key.dim() != rank or value.dim() != rank:
        return False
    if key.shape[:-3] != rows or value.shape[:-3] != rows or query.device.type not in ("cpu", "cuda"):
        return False
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        return False
    if mask is not None and (mask.dim() > rank or mask.dtype not in (torch.bool, torch.float32, query.dtype)):
        return False
    return torch.compiler.is_compiling() or _is_everyday()


def _is_everyday() -> bool:
    """Whether no transform and no trace is at work, and torch's kernels are all allowed: what only torch heeds."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    if are_jit_traces_active() is not None:
        return False
    allowed = torch._C
    if not (allowed._get_flash_sdp_enabled() and allowed._get_mem_efficient_sdp_enabled()):
        return False
    return allowed._get_math_sdp_enabled() and allowed._get_cudnn_sdp_enabled()  # type: ignore[no-any-return]


_register_builtin(attention_dispatch, "aten::scaled_dot_product_attention")  # torch.jit.script takes ours for torch's
