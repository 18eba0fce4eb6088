"""The names that Unsloth's models import: ``run_attention``, packed masks and labels, and softcapped attention.

``with installed():``, or ``install()`` once for the process, runs Unsloth's own models on them. Unsloth's model files
import their attention functions by name. So each of these functions is replaced in every loaded module of unsloth,
under whatever name the module has it. Modules that are imported later receive ours from the module that defines it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from attn_core.dropins.replacement import Replacement
from attn_core.dropins.unsloth import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    choose_word,
    resolve_prefix_seg_info,
)
from attn_core.errors import SpecError
from torch_frontend.backends import available_here
from torch_frontend.unsloth.dispatch import run_attention, select_attention_backend
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
        return "xformers" in available_here()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


def _replacements() -> list[tuple[Any, Any]]:
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


def _outside_context_parallelism(manager: Callable[[], Any] | None) -> Callable[..., Any]:
    """Returns ``run_attention`` with a refusal of the host's context parallelism, which splits rows among processes."""
    if manager is None:
        return _run_attention

    def run_on_one_device(**call: Any) -> Any:
        parallel = manager()
        if parallel is not None:
            raise SpecError(
                f"unsloth's context parallelism ({parallel.backend}): expected none with torch_frontend.unsloth "
                "installed, because each process has only a part of the keys; call uninstall(), or split rows with "
                "torch_frontend.context_parallel_attention"
            )
        return run_attention(**call)

    return run_on_one_device


def _run_attention(**call: Any) -> Any:
    """Calls ``run_attention``. Another object than it, so that restoring cannot touch a caller's own import of it."""
    return run_attention(**call)


def _replace(functions: dict[int, Any]) -> None:
    """Replaces functions by identity in every loaded module of unsloth."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "unsloth":
            for name, value in list(vars(module).items()):
                if id(value) in functions:
                    setattr(module, name, functions[id(value)])
