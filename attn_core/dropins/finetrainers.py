"""Finetrainers' attention dispatch, as data: its providers, their kernels here, and what a call's words mean.

The names are Finetrainers' (``finetrainers/models/attention_dispatch.py``); the meaning is the same on every provider.
The host's own providers differ from each other; docs/how_to/migrate/finetrainers.md lists our choices. Nothing here is
a tensor operation: the frontends turn this into calls of ``attention``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from attn_core import backends
from attn_core.errors import ShapeError, SpecError
from attn_core.selection import Target

ENVIRONMENT = "FINETRAINERS_ATTN_PROVIDER"
DEFAULT = os.environ.get(ENVIRONMENT, "native")
"""The provider outside of every ``attention_provider`` block; checked when it is first used."""


class AttentionProvider(StrEnum):
    """The host's names for kernels."""

    FLASH = "flash"
    FLASH_VARLEN = "flash_varlen"
    FLEX = "flex"
    NATIVE = "native"
    _NATIVE_CUDNN = "_native_cudnn"
    _NATIVE_EFFICIENT = "_native_efficient"
    _NATIVE_FLASH = "_native_flash"
    _NATIVE_MATH = "_native_math"
    SAGE = "sage"
    SAGE_VARLEN = "sage_varlen"
    _SAGE_QK_INT8_PV_FP8_CUDA = "_sage_qk_int8_pv_fp8_cuda"
    _SAGE_QK_INT8_PV_FP8_CUDA_SM90 = "_sage_qk_int8_pv_fp8_cuda_sm90"
    _SAGE_QK_INT8_PV_FP16_CUDA = "_sage_qk_int8_pv_fp16_cuda"
    _SAGE_QK_INT8_PV_FP16_TRITON = "_sage_qk_int8_pv_fp16_triton"
    XFORMERS = "xformers"


NATIVE, FLASH_VARLEN, SAGE_VARLEN = (
    AttentionProvider.NATIVE,
    AttentionProvider.FLASH_VARLEN,
    AttentionProvider("sage_varlen"),
)
VARLEN = (FLASH_VARLEN, SAGE_VARLEN)
"""Providers whose masks are of keys: ``[batch, kv_len]``, packed away before the kernel runs."""

_FLASH = ("flash3", "flash4", "flash2", "sdpa_flash")
KERNELS: Mapping[AttentionProvider, tuple[str, ...]] = {
    AttentionProvider(word): names
    for word, names in {
        "flash": _FLASH,
        "flash_varlen": _FLASH,
        "flex": ("flex",),
        "native": (),
        "_native_cudnn": ("sdpa_cudnn",),
        "_native_efficient": ("sdpa_efficient",),
        "_native_flash": ("sdpa_flash",),
        "_native_math": ("math",),
        "sage": ("sage",),
        "sage_varlen": ("sage",),
        "_sage_qk_int8_pv_fp8_cuda": ("sage_fp8_cuda",),
        "_sage_qk_int8_pv_fp8_cuda_sm90": ("sage_fp8_cuda_sm90",),
        "_sage_qk_int8_pv_fp16_cuda": ("sage_fp16_cuda",),
        "_sage_qk_int8_pv_fp16_triton": ("sage_fp16_triton",),
        "xformers": ("xformers",),
    }.items()
}
"""The backends of each provider, the first that can runs; none named is automatic choice."""

_active: ContextVar[AttentionProvider | None] = ContextVar("attn_core_finetrainers_provider", default=None)


def provider_of(value: Any) -> AttentionProvider:
    """The provider that a string, or a member of the host's enumeration or of ours, names.

    Raises:
        SpecError: for a name nobody knows, with the close matches.
    """
    word = getattr(value, "value", value)
    found = _BY_WORD.get(word) if isinstance(word, str) else None
    if found is not None:
        return found
    close = get_close_matches(str(word), _WORDS, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(_WORDS)}"
    raise SpecError(f"provider={value!r}: unknown attention provider; {hint}")


_BY_WORD = {provider.value: provider for provider in AttentionProvider}
_WORDS = tuple(_BY_WORD)


def stated_provider() -> AttentionProvider | None:
    """The provider of the innermost block in this thread or task, or None outside of all."""
    return _active.get()


def default_provider() -> AttentionProvider:
    """What FINETRAINERS_ATTN_PROVIDER said when this module was imported, or native.

    Raises:
        SpecError: naming the variable, for a name nobody knows.
    """
    found = _BY_WORD.get(DEFAULT)
    if found is None:
        raise SpecError(f"{ENVIRONMENT}={DEFAULT!r}: unknown attention provider; expected one of {', '.join(_WORDS)}")
    return found


@contextmanager
def provided(
    provider: Any, mesh: Any, use_backend: Callable[..., AbstractContextManager[None]]
) -> Iterator[AttentionProvider]:
    """The block of ``attention_provider``: the provider, and its kernels by the frontend's own ``use_backend``."""
    chosen = provider_of(provider)
    if mesh is not None:
        raise SpecError(f"mesh={mesh!r}: expected None; context parallelism is not offered here")
    token = _active.set(chosen)
    try:
        with use_backend(*KERNELS[chosen]):
            yield chosen
    finally:
        _active.reset(token)


def two_axes(provider: AttentionProvider, mask: tuple[int, ...], batch: int, q_len: int, kv_len: int) -> str:
    """What a mask of two axes is about: ``"keys"``, ``[batch, kv_len]``, or ``"scores"``, ``[q_len, kv_len]``.

    torch's masks of two axes are of scores, those of the varlen providers of keys. flex and xformers have been given
    both by their callers, and the shape tells which.

    Raises:
        ShapeError: where the shape fits neither, or both with different meanings.
    """
    if provider.value not in ("flex", "xformers"):
        return "keys" if provider in VARLEN else "scores"
    keys, scores = (mask[0] in (1, rows) and mask[1] in (1, kv_len) for rows in (batch, q_len))
    if keys and scores and mask[0] != 1:
        raise ShapeError(
            f"attn_mask: {list(mask)} is both [batch, kv_len] and [q_len, kv_len], which mean different things; "
            "give four axes, [batch, 1, 1, kv_len] or [1, 1, q_len, kv_len]"
        )
    if not keys and not scores:
        raise ShapeError(
            f"attn_mask: expected [batch, kv_len] = [{batch}, {kv_len}] or [q_len, kv_len] = [{q_len}, {kv_len}], "
            f"got {list(mask)}"
        )
    return "scores" if scores else "keys"


def providers_on(target: Target, *, training: bool, uses_mask: bool) -> tuple[AttentionProvider, ...]:
    """The providers that have a kernel on a machine, by what its backends claim; see ``list_providers``."""
    return tuple(provider for provider in AttentionProvider if _kernel_on(target, provider, training, uses_mask))


def _kernel_on(target: Target, provider: AttentionProvider, training: bool, uses_mask: bool) -> bool:
    names = KERNELS[provider] or backends.PREFERENCE.get((target.framework, target.kind), ())
    return any(_serves(target, provider, name, training, uses_mask) for name in names)


def _serves(target: Target, provider: AttentionProvider, name: str, training: bool, uses_mask: bool) -> bool:
    if name in dict(target.unavailable):
        return False
    forward, backward = target.claims(name)
    if not forward.runs_on(target.device) or (training and backward is None):
        return False
    halves = [half for half in (forward, backward if training else None) if half is not None]
    if not uses_mask or provider == SAGE_VARLEN:  # which runs row by row, each row on the keys that are left
        return True
    return all(half.packed if provider == FLASH_VARLEN else half.mask for half in halves)
