"""Unsloth's ``run_attention`` for torch tensors: the same result on every backend (see attn_core.dropins.unsloth)."""

from __future__ import annotations

import torch

from attn_core import backends
from attn_core.call.tensors import dtype_name
from attn_core.dropins.unsloth import (
    AttentionConfig,
    AttentionContext,
    choose_word,
    computed_in,
    prepare,
    trains,
)
from attn_core.selection import override
from torch_frontend.backends import available_here
from torch_frontend.dispatch.autocast import autocast_dtype
from torch_frontend.dispatch.backend_names import FROM_CONTEXT
from torch_frontend.dispatch.plan import check_tensor, device_name
from torch_frontend.dispatch.tensor_kinds import check_data
from torch_frontend.recomputed import attention_of_layer

Tensor = torch.Tensor
# Dynamo would trace how the order is derived. It depends on constants alone, so Dynamo takes the result.
vars(backends.usual_order.__wrapped__).update(_dynamo_marked_constant=True)


def run_attention(*, config: AttentionConfig, context: AttentionContext, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Computes attention: ``Q [bsz, n_heads, q_len, head_dim]``, ``K, V [bsz, n_kv_heads, kv_len, head_dim]``.

    It is causal unless the config's keyword arguments, ``context.is_causal`` or a complete mask state otherwise. With
    ``context.seq_info`` the rows are laid end to end and hold packed documents; with ``context.prefix_seg_info`` they
    share prefixes.
    ``config.backend`` is a preference: automatic choice runs what that backend cannot, with the same result.

    Returns:
        ``[bsz, q_len, n_heads, head_dim]`` in Q's dtype, even if the kernel computes a float32 Q in another dtype:
        under ``torch.autocast``, and if K or V has a half dtype.

    Raises:
        SpecError and its subclasses: for contradictions, unknown keys and wrong sizes, before any kernel runs.
    """
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        check_tensor(name, tensor)
    check_data(Q, K=K, V=V)
    check_data(K, Q=Q)
    for name in ("attention_mask", "causal_mask"):  # other types are masks of the host's own classes
        mask = getattr(context, name, None)
        if isinstance(mask, Tensor):
            check_tensor(f"context.{name}", mask)
    call = prepare("torch", device_name(Q.device), check_tensor, config, context, (Q, K, V))
    out = attention_of_layer(
        *call.rows(*_in_one_dtype(Q, K, V)),
        # Re-entrant checkpointing runs a layer twice, and both passes must run the same kernel.
        trains=trains(context),
        **call.options,
        backend=_backends(call.preferred),
    )
    return call.split(out).to(Q.dtype)  # type: ignore[no-any-return]


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns Q, K, V with float32 cast to the others' half dtype; unchanged under autocast, which casts them later."""
    if tensors[0].dtype == tensors[1].dtype == tensors[2].dtype:
        return tensors
    half = computed_in(*map(dtype_name, tensors))
    if half is None or autocast_dtype(tensors[0].device) is not None:
        return tensors
    return tuple(tensor.to(getattr(torch, half)) for tensor in tensors)


def _backends(preferred: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns the backends of ``use_backend``, else the preferred ones; compiled code looks them up when it runs."""
    if preferred is None:
        return None
    return (FROM_CONTEXT, *preferred) if torch.compiler.is_compiling() else override.requested() or preferred


def select_attention_backend(use_varlen: bool = False, dropout_p: float = 0.0) -> str:
    """Returns the host's word for this machine's backend, in the host's order: flash-attn, xformers, SDPA.

    Packed rows (``use_varlen``) without dropout prefer SDPA to xformers, if torch's own flash kernel runs here.
    """
    return choose_word(available_here(), use_varlen, dropout_p)
