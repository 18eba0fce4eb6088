"""diffusers' models on our kernels: ``with installed():``, or ``install()`` once for the process.

diffusers looks ``torch.nn.functional.scaled_dot_product_attention`` up at every call, in its ``native`` attention and
in the processors that do without its dispatcher. A function that means the same stands there while it is installed.
diffusers' own list of attention backends is a closed enumeration: docs/how_to/migrate/diffusers.md.

Which kernels run is chosen beside it, by ``use_backend`` and ``attention_provider``.
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

from torch_frontend.dispatch.plain import PLAIN
from torch_frontend.finetrainers.dispatch import attention_dispatch

__all__ = ["install", "installed", "is_installed", "uninstall"]

Tensor = torch.Tensor

NAME = "scaled_dot_product_attention"

# The builtin itself: torch.nn.functional's name for it may stand for another function by the time this is read.
_torch_attention = torch._C._nn.scaled_dot_product_attention


@contextmanager
def installed() -> Iterator[None]:
    """Puts our attention in the place of torch's own for the block: in every thread, for every caller of that name.

    Blocks nest and overlap, in one thread or several; when the last one ends, however it ends, what stood there before
    stands there again.

    Raises:
        RuntimeError: when another library's function stands there at the start, or was put on top and is still there
            at the end. It is left where it is.
    """
    holder = object()
    _place.hold(holder)
    try:
        yield
    finally:
        _place.release(holder)


def install() -> None:
    """Puts our attention in the place of torch's own until ``uninstall``. Again is fine.

    Raises:
        RuntimeError: when another library's function stands there; it is left where it is.
    """
    _place.hold(_PROCESS)


def uninstall() -> None:
    """Takes ``install`` back, however often it was called; blocks of ``installed`` keep theirs to their end.

    Raises:
        RuntimeError: when another library's function was put on top and is still there; it is left where it is.
    """
    _place.release(_PROCESS)


def is_installed() -> bool:
    """Whether our attention stands in the place of torch's own now."""
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
    """torch's function, by its signature: ``[batch, heads, q_len, head_dim]``, as ``attention_dispatch`` runs it.

    Like torch's own it shows itself to a ``TorchFunctionMode``, under the function that the caller finds in the place:
    diffusers leaves out attention scores by such a mode (``LayerSkipConfig(skip_attention_scores=True)``).
    """
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    given = (query, key, value)
    # Tensor subclasses go to torch's own function, which shows them itself.
    if has_torch_function_variadic(*given) and all(type(tensor) in PLAIN for tensor in given):
        return handle_torch_function(_attention, given, *given, attn_mask, dropout_p, is_causal, **options)
    return attention_dispatch(*given, attn_mask, dropout_p, is_causal, **options)


_register_builtin(_attention, f"aten::{NAME}")  # torch.jit.script takes ours for torch's


class _Place:
    """torch.nn.functional's name, who wants our attention there, and what is to come back after the last of them.

    The name is one for the process, so this is, too.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: set[object] = set()
        self.before: Callable[..., Any] = _torch_attention

    def hold(self, holder: object) -> None:
        with self.lock:
            there = getattr(functional, NAME)
            if there is not _attention:
                if there not in (_torch_attention, attention_dispatch):
                    raise RuntimeError(
                        f"torch.nn.functional.{NAME}: expected torch's own function, found {_told(there)}; take that "
                        "away first, for what it does would be lost"
                    )
                self.before = there
                setattr(functional, NAME, _attention)
            self.holders.add(holder)

    def release(self, holder: object) -> None:
        with self.lock:
            held = holder in self.holders
            self.holders.discard(holder)
            if self.holders:
                return
            there = getattr(functional, NAME)
            if there is _attention:
                setattr(functional, NAME, self.before)
            elif held and there not in (_torch_attention, attention_dispatch):
                raise RuntimeError(
                    f"torch.nn.functional.{NAME}: expected the function that was installed, found {_told(there)} on "
                    "top; take that away, then call torch_frontend.diffusers.uninstall()"
                )


_PROCESS = object()  # the holder that install stands for
_place = _Place()


def _told(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
