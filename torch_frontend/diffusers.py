"""Runs diffusers' models on our kernels: ``with installed():``, or ``install()`` once for the process.

diffusers looks ``torch.nn.functional.scaled_dot_product_attention`` up at every call, in its ``native`` attention and
in the processors without its dispatcher. While installed, our equivalent function replaces it. diffusers' own list of
attention backends cannot be extended, because it is a closed enumeration: docs/how_to/migrate/diffusers.md.

``use_backend`` and ``attention_provider`` choose the kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch.jit._builtins import _register_builtin
from torch.overrides import handle_torch_function, has_torch_function_variadic

from attn_core.call.after_fork import free_in_children
from torch_frontend.dispatch.tensor_kinds import PLAIN
from torch_frontend.finetrainers.dispatch import attention_dispatch

__all__ = ["install", "installed", "is_installed", "uninstall"]

Tensor = torch.Tensor

NAME = "scaled_dot_product_attention"

# The builtin itself: torch.nn.functional's name for it may already refer to another function at import.
_torch_attention = torch._C._nn.scaled_dot_product_attention


@contextmanager
def installed() -> Iterator[None]:
    """Replaces torch's own attention with ours in a block, in every thread and for every caller of that name.

    A module that imported the function by name (``from torch.nn.functional import scaled_dot_product_attention``, as
    openai-whisper) keeps torch's. Set its name to ``torch_frontend.scaled_dot_product_attention``.

    Blocks nest and overlap, in one thread or several. The end of the last block restores the previous function, also
    after an exception.

    Raises:
        RuntimeError: if another library's function has replaced torch's at the start, or has replaced ours at the end.
            That function stays.
    """
    holder = object()
    try:  # around the change as well, because Ctrl-C may raise right after it
        _place.hold(holder)
        yield
    finally:
        _place.release(holder)


def install() -> None:
    """Replaces torch's own attention with ours until ``uninstall``. Idempotent.

    Raises:
        RuntimeError: if another library's function has replaced torch's. That function stays.
    """
    _place.hold(_PROCESS)


def uninstall() -> None:
    """Undoes all calls of ``install``. Running blocks of ``installed`` keep our attention until their end.

    Raises:
        RuntimeError: if another library's function has replaced ours. That function stays.
    """
    _place.release(_PROCESS)


def is_installed() -> bool:
    """Returns whether our attention currently replaces torch's own."""
    return getattr(functional, NAME) is _attention


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
    # Tensor subclasses go to torch's own function, which offers them to modes itself.
    if has_torch_function_variadic(*operands) and all(type(tensor) in PLAIN for tensor in operands):
        return handle_torch_function(_attention, operands, *operands, attn_mask, dropout_p, is_causal, **options)
    return attention_dispatch(*operands, attn_mask, dropout_p, is_causal, **options)


_register_builtin(_attention, f"aten::{NAME}")  # so that torch.jit.script compiles it as torch's own


class _Place:
    """The public name in torch.nn.functional, the holders that need our attention there, and the function to restore.

    One for the process, because the name is one for the process.
    """

    def __init__(self) -> None:
        self.lock = free_in_children(threading.Lock())
        self.holders: set[object] = set()
        self.before: Callable[..., Any] = _torch_attention

    def hold(self, holder: object) -> None:
        with self.lock:
            current = getattr(functional, NAME)
            if current is not _attention:
                if current not in (_torch_attention, attention_dispatch):
                    raise RuntimeError(
                        f"torch.nn.functional.{NAME}: expected torch's own function, found {_name_of(current)}; remove "
                        "that first, because it would have no effect"
                    )
                self.before = current
                setattr(functional, NAME, _attention)
            self.holders.add(holder)

    def release(self, holder: object) -> None:
        with self.lock:
            was_holding = holder in self.holders
            self.holders.discard(holder)
            if self.holders:
                return
            current = getattr(functional, NAME)  # it may have been replaced again since
            if current is _attention:
                setattr(functional, NAME, self.before)
            elif was_holding and current not in (_torch_attention, attention_dispatch):
                raise RuntimeError(
                    f"torch.nn.functional.{NAME}: expected the function that was installed, found "
                    f"{_name_of(current)} on top of it; remove that, then call torch_frontend.diffusers.uninstall()"
                )


_PROCESS = object()  # the holder that install stands for
_place = _Place()


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
