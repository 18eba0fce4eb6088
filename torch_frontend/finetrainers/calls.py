"""What a call of ``attention_dispatch`` is as calls of ``attention``: the same on every provider.

The host's own providers differ from each other; docs/how_to/migrate/finetrainers.md lists our choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from attn_core.call.arguments import ArrayFacts, check_qkv
from attn_core.call.kinds import check_kind
from attn_core.call.options import check_flag
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import dtype_name, mask_or_bias
from attn_core.dropins.flash_attn.arguments import distances
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.selection import override
from torch_frontend.dispatch.autocast import autocast_dtype
from torch_frontend.dispatch.plan import check_tensor, smaller
from torch_frontend.finetrainers.providers import FLASH_VARLEN, VARLEN, AttentionProvider

Tensor = torch.Tensor


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
    **further: Any,
) -> Attend:
    """Returns ``attention`` with the options that every form of the call shares.

    Args:
        attention: ``attention``, or ``context_parallel_attention``.
        provider: whose backends may run the call, or those of ``use_backend``. None leaves them to ``attention``, as
            compiled code must, which cannot see them.
        further: options that only this function has.
    """
    keywords = {**options._asdict(), **further, "scale": call.scale, "dropout": call.dropout_p}
    keywords["backend"] = None if provider is None else override.requested() or provider.kernels or None

    def attend(q: Tensor, k: Tensor, v: Tensor, **form: Any) -> Results:
        results = attention(q, k, v, **form, **keywords)
        return results if options.return_lse else (results, None)

    return attend


def run_dense(attend: Attend, call: DispatchCall, options: HostOptions, **form: Any) -> Results:
    """Runs rows without documents: ``[batch, heads, q_len, value_dim]``, or fewer axes as in query.

    Args:
        form: further options of ``attention``.
    """
    query, key, value, mask = call[:4]
    q_len, kv_len = query.shape[-2], key.shape[-2]
    # No query sees a key behind its own place. Without these keys both alignments are the same.
    if call.is_causal and torch.compiler.is_compiling():  # lengths may be symbols; there are no attention_kwargs
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
        query.transpose(1, 2),  # [batch, heads, len, head_dim] -> [batch, len, heads, head_dim]
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=call.is_causal,
        alignment="bottom_right" if options.anchored else "top_left",
        mask=mask,
        bias=bias,
        **form,
    )
    out = out.transpose(1, 2)
    return out[(0,) * missing] if missing else out, lse


def run_key_mask(provider: AttentionProvider, call: DispatchCall, options: HostOptions, attend: Attend) -> Results:
    """Runs a varlen provider's mask of keys: flash_varlen packs the visible keys, sage_varlen runs row by row.

    A causal call needs the mask's values to cut its documents, so its kernel gets the mask as a mask.
    """
    keep = _key_mask(provider, call, options).expand(call.key.shape[0], call.key.shape[2])  # [batch, kv_len]
    if provider is FLASH_VARLEN and not call.is_causal:
        return _run_visible_keys(attend, call, keep)
    if not call.is_causal and 0 not in keep.shape:
        return _run_rows(attend, call, keep)
    return run_dense(attend, call._replace(attn_mask=keep[:, None, None, :]), options)


def _run_visible_keys(attend: Attend, call: DispatchCall, keep: Tensor) -> Results:
    """Runs a mask of keys in one packed call, without reading the mask on the host.

    A row's visible keys become a document with all of the row's queries, and its hidden keys a document without
    queries. So no size depends on the mask's values.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in call[:3])  # [batch, len, heads, head_dim]
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]
    visible = keep.sum(1)  # [batch]
    every, none = visible * 0 + kv_len, visible * 0
    # Stable, so that visible keys keep their order and every run sums them alike.
    order = torch.argsort(~keep, dim=1, stable=True) + (every.cumsum(0) - kv_len)[:, None]
    order = order.reshape(-1)  # [batch * kv_len], in the rows laid end to end

    def offsets_of(*lengths: Tensor) -> Tensor:  # of two documents in each row: int32 [2 * batch + 1]
        ends = torch.stack(lengths, 1).reshape(-1).cumsum(0, dtype=torch.int32)
        return torch.cat((ends[:1] * 0, ends))

    info = SeqInfo(offsets_of(none + q_len, none), offsets_of(visible, every - visible), q_len, kv_len)
    q, k, v = (rows.reshape(-1, *rows.shape[2:]) for rows in (q, k, v))  # [batch * len, heads, head_dim]
    # A kernel's last tile may reach into the next document, where 0 * NaN of padding is NaN. So hidden keys become 0.
    is_visible = keep.reshape(-1).index_select(0, order)[:, None, None]
    k, v = (torch.where(is_visible, rows.index_select(0, order), 0) for rows in (k, v))
    out, lse = attend(q, k, v, causal=False, seq_info=info)
    out = out.reshape(batch, q_len, *out.shape[1:]).transpose(1, 2)
    return out, None if lse is None else lse.reshape(-1, batch, q_len).transpose(0, 1)  # [batch, heads, q_len]


def _run_rows(attend: Attend, call: DispatchCall, keep: Tensor) -> Results:
    """Runs each row on the keys that it sees, for a kernel that has neither masks nor documents.

    The number of keys depends on the mask's values, so this waits for the device.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in call[:3])  # [batch, len, heads, head_dim]
    results = [
        attend(q[row : row + 1], k[row : row + 1, visible], v[row : row + 1, visible], causal=False)
        for row, visible in enumerate(keep)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs).transpose(1, 2), None if lses[0] is None else torch.cat(lses)


NAMES = ("query", "key", "value")


def check_operands(call: DispatchCall) -> None:
    """Checks query, key and value, alone and against each other; errors name them as the host does.

    Raises:
        TypeError, ShapeError, DTypeError, SpecError: naming the tensor and what was expected.
    """
    for name, tensor in zip(NAMES, call[:3], strict=True):
        check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ShapeError(f"{name}: expected [batch, heads, len, head_dim], got {list(tensor.shape)}")
    check_heads(call)
    casts = autocast_dtype(call.query.device) is not None  # autocast makes the dtypes equal
    facts = []
    for tensor in call[:3]:
        batch, heads, length, dim = tensor.shape
        facts.append(ArrayFacts((batch, length, heads, dim), dtype_name(call.query if casts else tensor), ""))
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


def cut_keys(
    length: int | torch.SymInt, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cuts off the keys that no query of a causal call sees, so that both alignments of the kernels agree."""
    # A mask with one column for all keys broadcasts, so there is nothing to cut off.
    if mask is not None and mask.ndim and mask.shape[-1] == key.shape[-2]:
        mask = mask[..., :length]
    return key[..., :length, :], value[..., :length, :], mask


def with_mask_axes(provider: AttentionProvider, query: Tensor, mask: Tensor) -> Tensor:
    """Returns the mask with four axes if the query has four, unless the provider is a varlen one.

    Two axes are ``[batch, kv_len]`` on flex and xformers, else ``[q_len, kv_len]`` as in torch. Raises DTypeError for a
    mask of integers.
    """
    mask_or_bias("attn_mask", mask)
    # The varlen providers read two axes as keys themselves (``run_key_mask``).
    if mask.ndim == 2 and query.ndim == 4 and provider not in VARLEN:
        of_keys = provider in (AttentionProvider.FLEX, AttentionProvider.XFORMERS)
        return mask[:, None, None, :] if of_keys else mask[None, None]
    # torch reads three axes as [heads, q_len, kv_len].
    return mask[None] if mask.ndim == 3 and query.ndim == 4 else mask


def _key_mask(provider: AttentionProvider, call: DispatchCall, options: HostOptions) -> Tensor:
    """Returns a varlen provider's mask as bool ``[batch or 1, kv_len or 1]``, True for visible keys.

    Raises:
        SpecError, DTypeError, ShapeError: for options that count distances between keys, an additive mask, or a mask
            that differs among queries or heads.
    """
    if options.anchored:
        raise SpecError(
            f"attn_mask with window_size or alibi_slopes: provider {provider.value} packs the visible keys, "
            "which changes the distances between them; use another provider"
        )
    (batch, _, kv_len, _), mask = call.key.shape, call.attn_mask
    expected = f"[batch, kv_len] = [{batch}, {kv_len}], or [batch, 1, 1, kv_len]"
    if mask.dtype != torch.bool:
        raise DTypeError(
            f"attn_mask: provider {provider.value} takes bool masks of keys {expected}, got {mask.dtype} "
            f"{list(mask.shape)}; for an additive mask use another provider"
        )
    # One axis is of keys by broadcasting, the same for every row.
    keep = mask[None] if mask.ndim == 1 else _without_copies(mask)
    if keep.ndim == 4 and tuple(keep.shape[1:3]) == (1, 1):
        keep = keep[:, 0, 0]
    if keep.ndim != 2 or keep.shape[0] not in (1, batch) or keep.shape[1] not in (1, kv_len):
        raise ShapeError(
            f"attn_mask: provider {provider.value} takes masks of keys {expected}, got {list(mask.shape)}; for a mask "
            "that differs among queries or heads use another provider"
        )
    return keep


def _without_copies(mask: Tensor) -> Tensor:
    """Returns the mask with one entry for all heads, and one for all queries, if that axis was expanded."""
    if mask.dim() == 4:
        for axis in (1, 2):
            mask = mask.narrow(axis, 0, 1) if mask.shape[axis] > 1 and mask.stride(axis) == 0 else mask
    return mask
