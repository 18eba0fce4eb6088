"""Finetrainers' providers: their backends here, the provider that is active, and the mesh of its block.

The names are Finetrainers' (``finetrainers/models/attention_dispatch.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core import backends
from attn_core.call.options import check_flag
from attn_core.dropins.flash_attn.arguments import FLASH_KERNELS
from attn_core.dropins.replacement import Replacement
from attn_core.errors import SpecError, shown
from attn_core.selection import Target, override

if TYPE_CHECKING:  # torch may be built without torch.distributed
    from torch.distributed.device_mesh import DeviceMesh


ENVIRONMENT = "FINETRAINERS_ATTN_PROVIDER"
DEFAULT = os.environ.get(ENVIRONMENT, "native")
"""The provider outside of all ``attention_provider`` blocks; checked on first use."""


class AttentionProvider(StrEnum):
    """The host's names for kernels. ``kernels`` are the backends of each, of which the first that supports a call runs;
    none is automatic choice."""

    _value_: str
    kernels: tuple[str, ...]

    def __new__(cls, word: str, *kernels: str) -> AttentionProvider:
        member = str.__new__(cls, word)
        member._value_, member.kernels = word, kernels
        return member

    FLASH = ("flash", *FLASH_KERNELS)
    FLASH_VARLEN = ("flash_varlen", *FLASH_KERNELS)
    FLEX = ("flex", "flex")
    NATIVE = ("native",)
    _NATIVE_CUDNN = ("_native_cudnn", "sdpa_cudnn")
    _NATIVE_EFFICIENT = ("_native_efficient", "sdpa_efficient")
    _NATIVE_FLASH = ("_native_flash", "sdpa_flash")
    _NATIVE_MATH = ("_native_math", "math")
    SAGE = ("sage", "sage")
    SAGE_VARLEN = ("sage_varlen", "sage")
    _SAGE_QK_INT8_PV_FP8_CUDA = ("_sage_qk_int8_pv_fp8_cuda", "sage_fp8_cuda")
    _SAGE_QK_INT8_PV_FP8_CUDA_SM90 = ("_sage_qk_int8_pv_fp8_cuda_sm90", "sage_fp8_cuda_sm90")
    _SAGE_QK_INT8_PV_FP16_CUDA = ("_sage_qk_int8_pv_fp16_cuda", "sage_fp16_cuda")
    _SAGE_QK_INT8_PV_FP16_TRITON = ("_sage_qk_int8_pv_fp16_triton", "sage_fp16_triton")
    XFORMERS = ("xformers", "xformers")


NATIVE, FLASH_VARLEN, SAGE_VARLEN = (
    AttentionProvider.NATIVE,
    AttentionProvider.FLASH_VARLEN,
    AttentionProvider.SAGE_VARLEN,
)
VARLEN = (FLASH_VARLEN, SAGE_VARLEN)
"""Providers whose masks are of keys, ``[batch, kv_len]``: packing removes the masked keys before the kernel runs."""

_active: ContextVar[AttentionProvider | None] = ContextVar("attn_core_finetrainers_provider", default=None)
_shared: ContextVar[SharedRows | None] = ContextVar("attn_core_finetrainers_mesh", default=None)


def provider_of(value: object) -> AttentionProvider:
    """Returns the provider for a string, or for a member of the host's enumeration or of ours.

    Raises:
        SpecError: for an unknown name, with close matches.
    """
    # By value, so that a member of the host's own enumeration is accepted as well.
    word = getattr(value, "value", value)
    provider = _BY_WORD.get(word) if isinstance(word, str) else None
    if provider is not None:
        return provider
    close = get_close_matches(word, _WORDS, n=3) if isinstance(word, str) else []
    hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(_WORDS)}"
    raise SpecError(f"provider={shown(value)}: unknown attention provider; {hint}")


_BY_WORD = {provider.value: provider for provider in AttentionProvider}
_WORDS = tuple(_BY_WORD)


def stated_provider() -> AttentionProvider | None:
    """Returns the provider of the innermost block in this thread or task, or None outside of all blocks."""
    return _active.get()


def default_provider() -> AttentionProvider:
    """Returns the provider in FINETRAINERS_ATTN_PROVIDER, read when this module was imported, or native.

    Raises:
        SpecError: for an unknown name.
    """
    provider = _BY_WORD.get(DEFAULT)
    if provider is None:
        raise SpecError(f"{ENVIRONMENT}={DEFAULT!r}: unknown attention provider; expected one of {', '.join(_WORDS)}")
    return provider


class SharedRows(NamedTuple):
    """A mesh whose ranks share the rows of every call of a block, and the strategy of the exchange."""

    mesh: Any
    strategy: str


ROTATE_METHODS: Mapping[str, str] = {"allgather": "all_gather", "alltoall": "ring"}
"""The strategy of each of the host's ``rotate_method`` words."""

may_share = False
"""Whether a block with a mesh may be active in some thread. Compiled code cannot see the context, but this."""


def _announce_sharing() -> Callable[[], None]:
    global may_share  # a hint that is true too long at worst; ``active_rows`` belongs to the thread or task
    may_share = True
    return _end_sharing


def _end_sharing() -> None:
    global may_share
    may_share = False


_sharing = Replacement(_announce_sharing)


def shared_rows(mesh: DeviceMesh | None, convert_to_fp32: bool, rotate_method: str) -> SharedRows | None:
    """Returns the host's options of context parallelism in our terms; None without a mesh.

    Raises:
        SpecError: for a ``rotate_method`` that is unknown, and for ``convert_to_fp32=False``.
    """
    if mesh is None:
        return None
    if check_flag("convert_to_fp32", convert_to_fp32) is False:
        raise SpecError("convert_to_fp32=False: expected True with a mesh; results of ranks are merged in float32")
    strategy = ROTATE_METHODS.get(rotate_method) if isinstance(rotate_method, str) else None
    if strategy is None:
        raise SpecError(f"rotate_method={shown(rotate_method)}: expected one of {', '.join(ROTATE_METHODS)}")
    return SharedRows(mesh, strategy)


@contextmanager
def provided(provider: AttentionProvider | str, shared: SharedRows | None = None) -> Iterator[AttentionProvider]:
    """Implements ``attention_provider``: sets the provider, and requests its backends.

    Args:
        shared: for calls of ``attention_dispatch``. As in the host, an inner block without a mesh shares nothing.
    """
    chosen = provider_of(provider)
    before = _active.get(), _shared.get()
    try:  # around the change as well, because Ctrl-C may raise right after it
        _active.set(chosen)
        _shared.set(shared)
        # No names for native: automatic choice, also inside a block that names backends.
        with override.use_backend(*chosen.kernels), nullcontext() if shared is None else _sharing.installed():
            yield chosen
    finally:
        _active.set(before[0])
        _shared.set(before[1])


def active_rows() -> SharedRows | None:
    """Returns the mesh of the innermost block in this thread or task, or None."""
    return _shared.get()


def providers_on(target: Target, *, training: bool, uses_mask: bool) -> tuple[AttentionProvider, ...]:
    """Returns the providers that have a kernel on a machine, by its backends' claims; see ``list_providers``."""
    for name, flag in (("training", training), ("uses_mask", uses_mask)):
        check_flag(name, flag)
    return tuple(provider for provider in AttentionProvider if _kernel_on(target, provider, training, uses_mask))


def _kernel_on(target: Target, provider: AttentionProvider, training: bool, uses_mask: bool) -> bool:
    # native is automatic choice, so any backend in its order of preference will do.
    names = provider.kernels or backends.usual_order(target.framework, target.kind)
    return any(_serves(target, provider, name, training, uses_mask) for name in names)


def _serves(target: Target, provider: AttentionProvider, name: str, training: bool, uses_mask: bool) -> bool:
    """Returns whether a backend can run a provider's calls. A mask of padding becomes documents on varlen ones."""
    if name in dict(target.unavailable):
        return False
    forward, backward = target.claims(name)
    if not forward.runs_on(target.device) or (training and backward is None):
        return False
    halves = [half for half in (forward, backward if training else None) if half is not None]
    if not uses_mask or provider == SAGE_VARLEN:  # which runs each row on the keys that its mask leaves
        return True
    return all(half.packed if provider == FLASH_VARLEN else half.mask for half in halves)
