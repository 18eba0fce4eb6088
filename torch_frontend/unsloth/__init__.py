"""The names that Unsloth's models import: ``run_attention``, packed masks and labels, and softcapped attention.

``with installed():``, or ``install()`` once for the process, runs Unsloth's own models on them. Unsloth's model files
import their attention functions by name. So each of these functions is replaced in every loaded module of unsloth,
under whatever name the module has it. Modules that are imported later receive ours from the module that defines it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_core import backends
from attn_core.call.tensors import dtype_name
from attn_core.dropins.replacement import Replacement
from attn_core.dropins.unsloth import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    choose_word,
    computed_in,
    has_xformers,
    prepare,
    resolve_prefix_seg_info,
    trains,
)
from attn_core.errors import SpecError
from attn_core.selection import override
from torch_frontend.dispatch.autocast import autocast_dtype
from torch_frontend.dispatch.op_arguments import FROM_CONTEXT
from torch_frontend.dispatch.plan import check_tensor, device_name
from torch_frontend.dispatch.tensor_kinds import check_data
from torch_frontend.explain import available_here
from torch_frontend.recomputed import attention_of_layer
from torch_frontend.unsloth.packing import (
    build_sdpa_packed_attention_mask,
    build_xformers_block_causal_mask,
    cover_padded_cu_seqlens,
    get_packed_info_from_kwargs,
    mask_packed_boundary_labels,
    mask_packed_sequence_boundaries,
    move_xformers_attention_bias,
)
from torch_frontend.unsloth.softcapping import (
    HAS_FLEX_ATTENTION,
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)

__all__ = [
    "AttentionConfig",
    "AttentionContext",
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "HAS_FLASH_ATTENTION",
    "HAS_FLEX_ATTENTION",
    "HAS_XFORMERS",
    "SDPA",
    "SDPA_HAS_GQA",
    "XFORMERS",
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "cover_padded_cu_seqlens",
    "create_flex_attention_causal_mask",
    "create_flex_attention_sliding_window_mask",
    "decode_scaled_dot_product_attention",
    "get_packed_info_from_kwargs",
    "install",
    "installed",
    "is_installed",
    "mask_packed_boundary_labels",
    "mask_packed_sequence_boundaries",
    "move_xformers_attention_bias",
    "resolve_prefix_seg_info",
    "run_attention",
    "select_attention_backend",
    "slow_attention_softcapping",
    "slow_inference_attention_softcapping",
    "uninstall",
]


Tensor = torch.Tensor
# Dynamo would trace how the order is derived. A compiled function keeps the order of the backends that were registered.
vars(backends.usual_order.__wrapped__).update(_dynamo_marked_constant=True)

SDPA_HAS_GQA = True
"""Whether torch's own attention supports grouped heads: True for every torch that this package supports."""

decode_scaled_dot_product_attention: Callable[..., Any]
"""Attention with the signature of torch's own function, which decoding calls; loads at first use."""
HAS_FLASH_ATTENTION: bool
"""Whether a FlashAttention package runs on this machine; looked up on access."""
HAS_XFORMERS: bool
"""Whether xformers runs on this machine; looked up on access."""


def __getattr__(name: str) -> Any:
    if name == "decode_scaled_dot_product_attention":
        from torch_frontend.finetrainers import attention_dispatch  # loads at first use, like this drop-in everywhere

        return attention_dispatch
    if name == "HAS_FLASH_ATTENTION":
        return choose_word(available_here(), use_varlen=True) == FLASH_VARLEN
    if name == "HAS_XFORMERS":
        return has_xformers(available_here())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


_DISPATCH, _SOFTCAPPING = "unsloth.utils.attention_dispatch", "unsloth.kernels.flex_attention"


def _apply() -> Callable[[], None]:
    pairs = _replacements()
    _replace({id(theirs): ours for theirs, ours in pairs})
    return lambda: _replace({id(ours): theirs for theirs, ours in pairs})


_replacement = Replacement(_apply)
installed = _replacement.installed
"""Replaces Unsloth's attention with ours in a block, in every thread.

Raises:
    RuntimeError: if unsloth is not imported, or is a release without ``run_attention``.
"""
install = _replacement.install
"""Puts our attention in Unsloth's place until ``uninstall``. Idempotent. Raises as ``installed``."""
uninstall = _replacement.uninstall
"""Undoes all calls of ``install``. Running blocks of ``installed`` keep our attention until their end."""
is_installed = _replacement.is_installed
"""Returns whether our attention is in Unsloth's place now."""


def _replacements() -> list[tuple[object, Callable[..., object]]]:
    """Returns each function of the host that exists, with ours. Raises RuntimeError if unsloth is not imported."""
    dispatch = sys.modules.get(_DISPATCH)
    # unsloth changes transformers and must be imported before it, so it is not imported here.
    if dispatch is None:
        raise RuntimeError(f"{_DISPATCH}: expected to be imported before install(); put `import unsloth` first")
    if not hasattr(dispatch, "run_attention"):
        raise RuntimeError(f"{_DISPATCH}: expected run_attention, which this release of unsloth does not have")
    from torch_frontend.finetrainers import attention_dispatch  # loads at first use, like this drop-in everywhere

    parallel = sys.modules.get("unsloth.context_parallel")
    ours: dict[tuple[str, str], Callable[..., Any]] = {
        (_DISPATCH, "run_attention"): _outside_context_parallelism(getattr(parallel, "get_cp_manager", None)),
        (_DISPATCH, "select_attention_backend"): select_attention_backend,
        (_DISPATCH, "decode_scaled_dot_product_attention"): attention_dispatch,
        (_SOFTCAPPING, "slow_attention_softcapping"): slow_attention_softcapping,
        (_SOFTCAPPING, "slow_inference_attention_softcapping"): slow_inference_attention_softcapping,
    }
    found = ((getattr(sys.modules.get(module), name, None), function) for (module, name), function in ours.items())
    return [(theirs, function) for theirs, function in found if theirs is not None]


def _outside_context_parallelism(manager: Callable[[], Any] | None) -> Callable[..., Tensor]:
    """Returns ``run_attention`` with a refusal of the host's context parallelism, which splits rows among processes."""
    if manager is None:
        return _run_attention

    def run_on_one_device(**call: Any) -> Tensor:
        parallel = manager()
        if parallel is not None:
            raise SpecError(
                f"unsloth's context parallelism ({parallel.backend}): expected none with torch_frontend.unsloth "
                "installed, because each process has only a part of the keys; call uninstall(), or split rows with "
                "torch_frontend.context_parallel_attention"
            )
        return run_attention(**call)

    return run_on_one_device


def _run_attention(**call: Any) -> Tensor:
    """Calls ``run_attention``. Another object than it, so that restoring cannot touch a caller's own import of it."""
    return run_attention(**call)


def _replace(functions: Mapping[int, object]) -> None:
    """Replaces functions by identity in every loaded module of unsloth."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "unsloth":
            for name, value in list(vars(module).items()):
                if id(value) in functions:
                    setattr(module, name, functions[id(value)])
