"""Finetrainers' attention dispatch: its providers, their backends here, and what a call is as calls of ``attention``.

The names are Finetrainers' (``finetrainers/models/attention_dispatch.py``); the meaning is the same on every provider.
The host's own providers differ from each other; docs/how_to/migrate/finetrainers.md lists our choices. Arrays are torch
tensors or JAX arrays: everything here uses only what both have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.call.arguments import ArrayFacts, check_qkv
from attn_core.call.kinds import check_kind
from attn_core.call.options import check_flag
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import dtype_name, mask_or_bias
from attn_core.dropins.flash_attn.arguments import FLASH_KERNELS, distances
from attn_core.dropins.replacement import Replacement
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.selection import Target, override

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


def provider_of(value: Any) -> AttentionProvider:
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


def shared_rows(mesh: Any, convert_to_fp32: Any, rotate_method: Any) -> SharedRows | None:
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
def provided(
    provider: Any, use_backend: Callable[..., AbstractContextManager[None]], shared: SharedRows | None = None
) -> Iterator[AttentionProvider]:
    """Implements ``attention_provider``: sets the provider, and requests its backends by the frontend's use_backend.

    Args:
        shared: for calls of ``attention_dispatch``. As in the host, an inner block without a mesh shares nothing.
    """
    chosen = provider_of(provider)
    before = _active.get(), _shared.get()
    try:  # around the change as well, because Ctrl-C may raise right after it
        _active.set(chosen)
        _shared.set(shared)
        # No names for native: automatic choice, also inside a block that names backends.
        with use_backend(*chosen.kernels), nullcontext() if shared is None else _sharing.installed():
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
    if name in dict(target.unavailable):
        return False
    forward, backward = target.claims(name)
    if not forward.runs_on(target.device) or (training and backward is None):
        return False
    halves = [half for half in (forward, backward if training else None) if half is not None]
    row_by_row = provider == SAGE_VARLEN and target.framework == "torch"  # each row on the keys that its mask leaves
    if not uses_mask or row_by_row:
        return True
    return all(half.packed if provider == FLASH_VARLEN else half.mask for half in halves)


class HostOptions(NamedTuple):
    """The options of ``attention_kwargs`` in our terms."""

    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    deterministic: bool = False
    return_lse: bool = False

    @property
    def anchored(self) -> bool:
        """Whether an option counts distances from the last key, as flash-attn does."""
        return self.window is not None or self.alibi_slopes is not None


OPTIONS = ("window_size", *HostOptions._fields[1:])
"""The keys of ``attention_kwargs``."""


def interpret(kwargs: Mapping[str, Any] | None) -> HostOptions:
    """Translates ``attention_kwargs``. Every provider takes every option; its kernel may still refuse one.

    ``softcap=0`` and ``window_size=(-1, -1)`` are flash-attn's "none".

    Raises:
        SpecError: for unknown keys.
    """
    if kwargs is None:
        return HostOptions()
    check_kind("attention_kwargs", kwargs, Mapping, "a dict or None")
    for key in kwargs:
        if key not in OPTIONS:
            raise SpecError(
                f"attention_kwargs[{key!r}]: unknown; expected one of {', '.join(OPTIONS)}; packed documents are "
                "attention(seq_info=)"
            )
    softcap = kwargs.get("softcap")
    return HostOptions(
        window=distances(kwargs.get("window_size"), "attention_kwargs['window_size']"),
        # flash-attn writes 0 for no softcap, which ``attention`` refuses.
        softcap=None if isinstance(softcap, (int, float)) and softcap == 0 else softcap,
        alibi_slopes=kwargs.get("alibi_slopes"),
        deterministic=check_flag("attention_kwargs['deterministic']", kwargs.get("deterministic", False)),
        return_lse=check_flag("attention_kwargs['return_lse']", kwargs.get("return_lse", False)),
    )


class DispatchCall(NamedTuple):
    """The arguments that torch's own function also has."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


Results = tuple[Any, Any]
"""The output, and the log-sum-exp or None."""
Attend = Callable[..., Results]
"""``attention`` with the options of a call: (q, k, v, causal=, mask=, seq_info=, ...) -> Results."""


def attention_with(
    attention: Callable[..., Any],
    call: DispatchCall,
    options: HostOptions,
    provider: AttentionProvider | None,
    **frontend_options: Any,
) -> Attend:
    """Returns a frontend's ``attention`` with the options that every form of the call shares.

    Args:
        provider: whose backends may run the call, or those of ``use_backend``. None leaves them to ``attention``, as
            compiled code must, which cannot see them.
        frontend_options: options that only this frontend has.
    """
    keywords = {**options._asdict(), **frontend_options, "scale": call.scale, "dropout": call.dropout_p}
    keywords["backend"] = None if provider is None else override.requested() or provider.kernels or None

    def attend(q: Any, k: Any, v: Any, **form: Any) -> Results:
        results = attention(q, k, v, **form, **keywords)
        return results if options.return_lse else (results, None)

    return attend


def run_dense(
    attend: Attend,
    call: DispatchCall,
    options: HostOptions,
    smaller: Callable[[Any, Any], Any] | None = None,
    **form: Any,
) -> Results:
    """Runs rows without documents: ``[batch, heads, q_len, value_dim]``, or fewer axes as in query.

    Args:
        smaller: a function for the smaller of two lengths that may be symbols, which cannot be compared. None compares.
        form: further options of ``attention``.
    """
    query, key, value, mask = call[:4]
    q_len, kv_len = query.shape[-2], key.shape[-2]
    # No query sees a key behind its own place. Without these keys both alignments are the same.
    if call.is_causal and smaller is not None:  # in compiled code, which has no attention_kwargs
        key, value, mask = cut_keys(smaller(q_len, kv_len), key, value, mask)
    elif call.is_causal and q_len != kv_len:
        check_alignment(options, q_len, kv_len)
        if kv_len > q_len:
            key, value, mask = cut_keys(q_len, key, value, mask)
    missing = 4 - query.ndim
    if missing:  # axes of 1 in front
        query, key, value = (array[(None,) * missing] for array in (query, key, value))
    mask, bias = (None, None) if mask is None else mask_or_bias("attn_mask", mask)
    out, lse = attend(
        query.swapaxes(1, 2),  # [batch, heads, len, head_dim] -> [batch, len, heads, head_dim]
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        causal=call.is_causal,
        alignment="bottom_right" if options.anchored else "top_left",
        mask=mask,
        bias=bias,
        **form,
    )
    out = out.swapaxes(1, 2)
    return out[(0,) * missing] if missing else out, lse


def run_key_mask(
    provider: AttentionProvider,
    call: DispatchCall,
    options: HostOptions,
    attend: Attend,
    keep: Any,
    xp: Any,
    take: Callable[[Any, Any], Any],
) -> Results:
    """Runs a varlen provider's mask of keys. flash_varlen packs the visible keys.

    A causal call needs the mask's values to cut its documents, and sage has no documents: their kernels get the mask as
    a mask.

    Args:
        keep: the result of ``key_mask``.
        xp: torch or jax.numpy.
        take: returns the elements of an array's first axis at indices.
    """
    keep = xp.broadcast_to(keep, (call.key.shape[0], call.key.shape[2]))  # [batch, kv_len]
    if provider is FLASH_VARLEN and not call.is_causal:
        return _run_visible_keys(attend, call, keep, xp, take)
    return run_dense(attend, call._replace(attn_mask=keep[:, None, None, :]), options)


def _run_visible_keys(
    attend: Attend, call: DispatchCall, keep: Any, xp: Any, take: Callable[[Any, Any], Any]
) -> Results:
    """Runs a mask of keys in one packed call, without reading the mask on the host.

    A row's visible keys become a document with all of the row's queries, and its hidden keys a document without
    queries. So no size depends on the mask's values, which may be traced.
    """
    q, k, v = (array.swapaxes(1, 2) for array in call[:3])  # [batch, len, heads, head_dim]
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]
    visible = keep.sum(axis=1)  # [batch]
    every, none = visible * 0 + kv_len, visible * 0
    # Stable, so that visible keys keep their order and every run sums them alike.
    order = xp.argsort(~keep, axis=1, stable=True) + (xp.cumsum(every, axis=0) - kv_len)[:, None]
    order = order.reshape(-1)  # [batch * kv_len], in the rows laid end to end

    def offsets_of(*lengths: Any) -> Any:  # of two documents in each row: int32 [2 * batch + 1]
        ends = xp.cumsum(xp.stack(lengths, axis=1).reshape(-1), axis=0, dtype=xp.int32)
        return xp.concatenate((ends[:1] * 0, ends))

    info = SeqInfo(offsets_of(none + q_len, none), offsets_of(visible, every - visible), q_len, kv_len)
    q, k, v = (rows.reshape(-1, *rows.shape[2:]) for rows in (q, k, v))  # [batch * len, heads, head_dim]
    # A kernel's last tile may reach into the next document, where 0 * NaN of padding is NaN. So hidden keys become 0.
    is_visible = take(keep.reshape(-1), order)[:, None, None]
    k, v = (xp.where(is_visible, take(rows, order), 0) for rows in (k, v))
    out, lse = attend(q, k, v, causal=False, seq_info=info)
    out = out.reshape(batch, q_len, *out.shape[1:]).swapaxes(1, 2)
    return out, None if lse is None else lse.reshape(-1, batch, q_len).swapaxes(0, 1)  # [batch, heads, q_len]


NAMES = ("query", "key", "value")


def check_operands(call: DispatchCall, *, any_dtypes: bool = False) -> None:
    """Checks query, key and value against each other; errors name them as the host does.

    Args:
        any_dtypes: whether their dtypes may differ, because autocast makes them equal.

    Raises:
        ShapeError, DTypeError, SpecError: naming the array and what was expected.
    """
    for name, array in zip(NAMES, call[:3], strict=True):
        if array.ndim != 4:
            raise ShapeError(f"{name}: expected [batch, heads, len, head_dim], got {list(array.shape)}")
    check_heads(call)
    facts = []
    for array in call[:3]:
        batch, heads, length, dim = array.shape
        facts.append(ArrayFacts((batch, length, heads, dim), dtype_name(call.query if any_dtypes else array), ""))
    q, k, v = facts
    check_qkv(q, k, v, names=NAMES)


def check_heads(call: DispatchCall) -> None:
    """Raises SpecError for grouped heads without ``enable_gqa``; a single kv head broadcasts to all heads."""
    if call.enable_gqa or call.query.ndim < 3:
        return
    heads, kv_heads = call.query.shape[-3], call.key.shape[-3]
    # torch broadcasts a single kv head, with or without enable_gqa.
    if kv_heads not in (1, heads):
        raise SpecError(
            f"enable_gqa={call.enable_gqa} with {heads} heads of query and {kv_heads} of key: pass enable_gqa=True"
        )


def with_positive_scale(call: DispatchCall) -> DispatchCall:
    """Returns an equivalent call with a scale above 0, as ``attention`` requires: the query takes the sign."""
    if isinstance(call.scale, (int, float)) and call.scale <= 0:
        # A scale of 0 makes all scores equal: so does a query of zeros, at any positive scale.
        return call._replace(query=call.query * (-1 if call.scale else 0), scale=-call.scale or 1.0)
    return call


def check_alignment(options: HostOptions, q_len: int, kv_len: int) -> None:
    """Raises SpecError if a causal call of unequal lengths has options that count from the last key."""
    if options.anchored:
        raise SpecError(
            f"is_causal with window_size or alibi_slopes, q_len {q_len} and kv_len {kv_len}: expected equal "
            "lengths; is_causal counts from the first key, flash-attn's window_size and alibi_slopes from the last"
        )


def cut_keys(length: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Cuts off the keys that no query of a causal call sees, so that both alignments of the kernels agree."""
    # A mask with one column for all keys broadcasts, so there is nothing to cut off.
    if mask is not None and mask.ndim and mask.shape[-1] == key.shape[-2]:
        mask = mask[..., :length]
    return key[..., :length, :], value[..., :length, :], mask


def with_mask_axes(provider: AttentionProvider, query: Any, mask: Any) -> Any:
    """Returns the mask with four axes if the query has four, unless the provider is a varlen one.

    Two axes are ``[batch, kv_len]`` on flex and xformers, else ``[q_len, kv_len]`` as in torch. Raises DTypeError for a
    mask of integers.
    """
    mask_or_bias("attn_mask", mask)
    # The varlen providers read two axes as keys themselves (``key_mask``).
    if mask.ndim == 2 and query.ndim == 4 and provider not in VARLEN:
        of_keys = provider in (AttentionProvider.FLEX, AttentionProvider.XFORMERS)
        return mask[:, None, None, :] if of_keys else mask[None, None]
    # torch reads three axes as [heads, q_len, kv_len].
    return mask[None] if mask.ndim == 3 and query.ndim == 4 else mask


def key_mask(provider: AttentionProvider, call: DispatchCall, options: HostOptions, mask: Any) -> Any:
    """Returns a varlen provider's mask as bool ``[batch or 1, kv_len or 1]``, True for visible keys.

    Args:
        mask: the call's mask, with one entry for an axis that was expanded.

    Raises:
        SpecError, DTypeError, ShapeError: for options that count distances between keys, an additive mask, or a mask
            that differs among queries or heads.
    """
    if options.anchored:
        raise SpecError(
            f"attn_mask with window_size or alibi_slopes: provider {provider.value} packs the visible keys, "
            "which changes the distances between them; use another provider"
        )
    batch, _, kv_len, _ = call.key.shape
    shape, expected = list(call.attn_mask.shape), f"[batch, kv_len] = [{batch}, {kv_len}], or [batch, 1, 1, kv_len]"
    if dtype_name(mask) != "bool":
        raise DTypeError(
            f"attn_mask: provider {provider.value} takes bool masks of keys {expected}, got {mask.dtype} {shape}; "
            "for an additive mask use another provider"
        )
    # One axis is of keys by broadcasting, the same for every row.
    keep = mask[None] if mask.ndim == 1 else mask
    if keep.ndim == 4 and tuple(keep.shape[1:3]) == (1, 1):
        keep = keep[:, 0, 0]
    if keep.ndim != 2 or keep.shape[0] not in (1, batch) or keep.shape[1] not in (1, kv_len):
        raise ShapeError(
            f"attn_mask: provider {provider.value} takes masks of keys {expected}, got {shape}; for a mask that "
            "differs among queries or heads use another provider"
        )
    return keep
