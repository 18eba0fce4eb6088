"""Runs diffusers' models on our kernels: ``with installed():``, or ``install()`` once for the process.

diffusers looks ``torch.nn.functional.scaled_dot_product_attention`` up at every call, in its ``native`` attention and
in the processors without its dispatcher. While installed, our equivalent function replaces it. diffusers' own list of
attention backends cannot be extended, because it is a closed enumeration: docs/how_to/migrate/diffusers.md.

``use_backend`` and ``attention_provider`` choose the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch.jit._builtins import _register_builtin
from torch.overrides import handle_torch_function, has_torch_function_variadic

from attn_core.dropins.replacement import Replacement
from torch_frontend.dispatch.tensor_kinds import PLAIN
from torch_frontend.finetrainers import attention_dispatch

__all__ = ["install", "installed", "is_installed", "uninstall"]

Tensor = torch.Tensor

NAME = "scaled_dot_product_attention"

# The builtin itself: torch.nn.functional's name for it may already refer to another function at import.
_torch_attention = torch._C._nn.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs ``attention_dispatch`` with the signature of torch's function: ``[batch, heads, q_len, head_dim]``.

    Like torch's own, it offers itself to an active ``TorchFunctionMode``. diffusers skips attention scores with such a
    mode (``LayerSkipConfig(skip_attention_scores=True)``), which recognises the function under torch's public name.
    """
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    operands = (query, key, value)
    # attention_dispatch hands tensor subclasses to torch's own function, which offers them to modes itself.
    if has_torch_function_variadic(*operands) and all(type(tensor) in PLAIN for tensor in operands):
        return handle_torch_function(_attention, operands, *operands, attn_mask, dropout_p, is_causal, **options)
    return attention_dispatch(*operands, attn_mask, dropout_p, is_causal, **options)


_register_builtin(_attention, f"aten::{NAME}")  # so that torch.jit.script compiles it as torch's own


def _apply() -> Callable[[], None]:
    """Puts our function in place of torch's, and returns what takes it back."""
    before = getattr(functional, NAME)
    if before not in (_torch_attention, attention_dispatch):
        raise RuntimeError(
            f"torch.nn.functional.{NAME}: expected torch's own function, found {_name_of(before)}; remove that first, "
            "because it would have no effect"
        )

    def restore() -> None:
        current = getattr(functional, NAME)  # it may have been replaced again since
        if current is _attention:
            setattr(functional, NAME, before)
        elif current not in (_torch_attention, attention_dispatch):
            raise RuntimeError(
                f"torch.nn.functional.{NAME}: expected the function that was installed, found {_name_of(current)} on "
                "top of it; remove that, then call torch_frontend.diffusers.uninstall()"
            )

    try:
        setattr(functional, NAME, _attention)
        return restore
    except BaseException:  # Ctrl-C right after the change
        restore()
        raise


_replacement = Replacement(_apply, is_in_place=lambda: getattr(functional, NAME) is _attention)
installed = _replacement.installed
"""Replaces torch's own attention with ours in a block, in every thread and for every caller of that name.

A module that imported the function by name (``from torch.nn.functional import scaled_dot_product_attention``, as
openai-whisper) keeps torch's. Set its name to ``torch_frontend.scaled_dot_product_attention``.

Raises:
    RuntimeError: if another library's function has replaced torch's at the start, or has replaced ours at the end.
        That function stays.
"""
install = _replacement.install
"""Puts our attention in torch's place until ``uninstall``. Idempotent. Raises as ``installed``."""
uninstall = _replacement.uninstall
"""Undoes all calls of ``install``. Running blocks of ``installed`` keep our attention until their end."""
is_installed = _replacement.is_installed
"""Returns whether our attention is in torch's place now."""


def _name_of(function: object) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
