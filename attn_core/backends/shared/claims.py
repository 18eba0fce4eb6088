"""Compares a call with the claims of a backend: the refusal for each unmet claim."""

from __future__ import annotations

from collections.abc import Callable

from attn_core.backends.support import Support
from attn_core.call.functions import listed
from attn_core.call.masks import band
from attn_core.call.seq_info import is_number
from attn_core.call.spec import AttentionSpec

Check = Callable[[Support, AttentionSpec], str | None]


def unmet_claims(support: Support, spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns every reason why the claims do not cover the call, in the order of the spec's fields; empty if they do.

    A spec field that differs from its default and has no check here is refused: new fields are denied by default.
    """
    runs = support.runs_on(device)
    reasons = [] if runs else [f"device {device}: {support.kernel} needs {' or '.join(support.devices)}"]
    for field in spec.__dataclass_fields__.values():  # dataclasses.fields would build a tuple on every call
        value, check = getattr(spec, field.name), CHECKS.get(field.name)
        # Most fields of most calls have their default, which requires nothing. Only the default alignment does.
        if value == field.default and check is not _alignment:
            continue
        reason = check(support, spec) if check else f"{field.name}={value!r}: no backend has claimed it"
        if reason:
            reasons.append(reason)
    return tuple(reasons)


def _nothing(support: Support, spec: AttentionSpec) -> None:
    """Checks nothing: for fields that every backend supports."""


def _flag(claim: str, requested: Callable[[AttentionSpec], object], what: Callable[[AttentionSpec], str]) -> Check:
    def check(support: Support, spec: AttentionSpec) -> str | None:
        if not requested(spec) or getattr(support, claim):
            return None
        return f"{what(spec)}: {support.kernel} has none"

    return check


def _dtype(support: Support, spec: AttentionSpec) -> str | None:
    if spec.dtype in support.dtypes:
        return None
    return f"dtype {spec.dtype}: {support.kernel} takes {', '.join(support.dtypes)}"


def _head_dim(support: Support, spec: AttentionSpec) -> str | None:
    dims, limit, multiple = (spec.head_dim, spec.value_dim), support.max_head_dim, support.head_dim_multiple
    if limit is not None and max(dims) > limit:
        return f"head_dim={max(dims)}: {support.kernel} stops at {limit}"
    if any(dim % multiple for dim in dims):
        return f"head_dim={next(dim for dim in dims if dim % multiple)}: {support.kernel} takes multiples of {multiple}"
    return None


def _value_dim(support: Support, spec: AttentionSpec) -> str | None:
    if spec.value_dim == spec.head_dim or support.value_dim:
        return None
    return f"value_dim={spec.value_dim}: {support.kernel} needs value_dim == head_dim ({spec.head_dim})"


def _kv_heads(support: Support, spec: AttentionSpec) -> str | None:
    if spec.group_size == 1 or support.grouped_heads:
        return None
    return f"num_kv_heads={spec.num_kv_heads}: {support.kernel} needs as many kv heads as heads ({spec.num_heads})"


def _alignment(support: Support, spec: AttentionSpec) -> str | None:
    edge = band(spec)
    # Without a band, and for q_len equal to kv_len in a dense call, both alignments mean the same.
    banded = edge.left is not None or edge.right is not None
    if not banded or (spec.q_len == spec.kv_len and not spec.packed) or spec.alignment in support.alignments:
        return None
    has = " and ".join(support.alignments) or "no other"
    return f"alignment={spec.alignment} with q_len {spec.q_len} and kv_len {spec.kv_len}: {support.kernel} has {has}"


def _return_lse(support: Support, spec: AttentionSpec) -> str | None:
    if not spec.return_lse:
        return None
    if not support.lse:
        return f"return_lse: {support.kernel} has no log-sum-exp output"
    if spec.needs_backward and not support.lse_gradient:
        return f"return_lse with gradients: {support.kernel} takes no gradient of the log-sum-exp"
    return None


def _size(name: str) -> Check:
    def check(support: Support, spec: AttentionSpec) -> str | None:
        size = getattr(spec, name)
        if size is None or is_number(size) or support.symbolic:
            return None
        return f"{name}={size}: {support.kernel} needs a number, this one is symbolic"

    return check


def _documents(support: Support, spec: AttentionSpec) -> str | None:
    if spec.packed and not support.packed:
        return f"seq_info with packed documents: {support.kernel} has none"
    return _size("documents")(support, spec)


def _paged(support: Support, spec: AttentionSpec) -> str | None:
    if spec.paged is None:
        return None
    if not support.paged:
        return f"keys and values in pages of {spec.paged.page_size}: {support.kernel} has none"
    reads = support.page_dtypes
    if spec.paged.dtype not in (None, *reads):
        return f"pages in {spec.paged.dtype}: {support.kernel} reads {', '.join(reads) or 'no quantised ones'}"
    if spec.paged.starts and not support.paged_starts:
        return f"kv_starts of sequences in pages: {support.kernel} has none"
    return None


def _alibi(support: Support, spec: AttentionSpec) -> str | None:
    if spec.alibi_shape is None or (support.alibi if spec.paged is None else support.paged_alibi):
        return None
    return f"alibi_slopes{'' if spec.paged is None else ' with pages'}: {support.kernel} has none"


def _invariant(support: Support, spec: AttentionSpec) -> str | None:
    if spec.invariant is None or spec.invariant in support.invariant:
        return None
    has = f"keeps {' and '.join(support.invariant)} alone" if support.invariant else "promises no equal bits there"
    return f"invariant={spec.invariant!r}: {support.kernel} {has}"


CHECKS: dict[str, Check] = {
    **{name: _size(name) for name in ("batch", "q_len", "kv_len")},
    **dict.fromkeys(("num_heads", "scale", "max_len_q", "max_len_k"), _nothing),
    **dict.fromkeys(("needs_backward", "bias_dtype", "aux"), _nothing),  # backends have rules of their own about them
    "dtype": _dtype,
    "head_dim": _head_dim,
    "value_dim": _value_dim,
    "num_kv_heads": _kv_heads,
    "alignment": _alignment,
    "return_lse": _return_lse,
    "causal": _flag("causal", lambda s: s.causal, lambda s: "causal"),
    "window": _flag("window", lambda s: s.window != (None, None), lambda s: f"window={s.window}"),
    "softcap": _flag("softcap", lambda s: s.softcap is not None, lambda s: f"softcap={s.softcap}"),
    "mask_shape": _flag("mask", lambda s: s.mask_shape, lambda s: f"mask of shape {list(s.mask_shape or ())}"),
    "key_ranges_shape": _flag(
        "key_ranges", lambda s: s.key_ranges_shape, lambda s: f"key_ranges of shape {list(s.key_ranges_shape or ())}"
    ),
    "mask_mod": _flag("mask_mod", lambda s: s.mask_mod is not None, lambda s: "mask_mod"),
    "score_mod": _flag("score_mod", lambda s: s.score_mod is not None, lambda s: "score_mod"),
    "bias_shape": _flag("bias", lambda s: s.bias_shape, lambda s: f"bias of shape {list(s.bias_shape or ())}"),
    "bias_gradient": _flag("bias_gradient", lambda s: s.bias_gradient, lambda s: "gradient of the bias"),
    "aux_gradients": _flag(
        "aux_gradients",
        lambda s: s.aux_gradients,
        lambda s: f"gradient of {listed(s.aux_gradients)}",
    ),
    "alibi_shape": _alibi,
    "sinks": _flag("sinks", lambda s: s.sinks, lambda s: "sinks"),
    "documents": _documents,
    "dropout": _flag("dropout", lambda s: s.dropout, lambda s: f"dropout={s.dropout}"),
    "deterministic": _flag("deterministic", lambda s: s.deterministic, lambda s: "deterministic=True"),
    "partial": _flag("partial", lambda s: s.partial, lambda s: "a part of each row's keys"),
    "paged": _paged,
    "invariant": _invariant,
}
