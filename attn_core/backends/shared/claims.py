"""Compares a call with the claims of a backend: the refusal for each unmet claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from attn_core.backends.support import Support
from attn_core.call.functions import listed
from attn_core.call.kinds import is_number
from attn_core.call.options import FLAGS
from attn_core.call.spec import AttentionSpec


class Feature(NamedTuple):
    """A field of a spec that asks for a feature whenever it differs from its default: the claim, and what to refuse."""

    claim: str
    text: Callable[[AttentionSpec], str]


Check = Callable[[Support, AttentionSpec], str | None]


def unmet_claims(support: Support, spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns every reason why the claims do not cover the call, in the order of the spec's fields; empty if they do.

    A spec field that differs from its default and has no check here is refused: new fields are denied by default.
    """
    runs = support.runs_on(device)
    reasons = [] if runs else [f"device {device}: {support.kernel} needs {' or '.join(support.devices)}"]
    reasons += _unmet_sizes(support, spec)
    for name, field in spec.__dataclass_fields__.items():  # dataclasses.fields would build a tuple on every call
        value, check = getattr(spec, name), CHECKS.get(name)
        # Most fields of most calls have their default, which requires nothing. Only the default alignment does.
        if value == field.default and check is not _alignment:
            continue
        if name not in CHECKS:
            reasons.append(f"{name}={value!r}: no backend has claimed it")
        elif isinstance(check, Feature):
            if not getattr(support, check.claim):
                reasons.append(f"{check.text(spec)}: {support.kernel} has none")
        elif check is not None and (reason := check(support, spec)) is not None:
            reasons.append(reason)
    return tuple(reasons)


def _unmet_sizes(support: Support, spec: AttentionSpec) -> Iterator[str]:
    """Yields the reasons against the sizes and the dtype, which every call has."""
    if spec.symbolic and not support.symbolic:
        yield from (_symbol(support, spec, name) for name in LENGTHS if not is_number(getattr(spec, name)))
    if spec.num_heads != spec.num_kv_heads and not support.grouped_heads:
        yield f"num_kv_heads={spec.num_kv_heads}: {support.kernel} needs as many kv heads as heads ({spec.num_heads})"
    largest, limit, multiple = max(spec.head_dim, spec.value_dim), support.max_head_dim, support.head_dim_multiple
    if limit is not None and largest > limit:
        yield f"head_dim={largest}: {support.kernel} stops at {limit}"
    elif spec.head_dim % multiple or spec.value_dim % multiple:
        odd = spec.head_dim if spec.head_dim % multiple else spec.value_dim
        yield f"head_dim={odd}: {support.kernel} takes multiples of {multiple}"
    if spec.value_dim != spec.head_dim and not support.value_dim:
        yield f"value_dim={spec.value_dim}: {support.kernel} needs value_dim == head_dim ({spec.head_dim})"
    if spec.dtype not in support.dtypes:
        yield f"dtype {spec.dtype}: {support.kernel} takes {', '.join(support.dtypes)}"


def _symbol(support: Support, spec: AttentionSpec, name: str) -> str:
    return f"{name}={getattr(spec, name)}: {support.kernel} needs a number, this one is symbolic"


def _alignment(support: Support, spec: AttentionSpec) -> str | None:
    # Without a band, and for q_len equal to kv_len in a dense call, both alignments mean the same.
    banded = spec.causal or spec.window != (None, None)
    if not banded or (spec.q_len == spec.kv_len and not spec.packed) or spec.alignment in support.alignments:
        return None
    has = " and ".join(support.alignments) or "no other"
    return f"alignment={spec.alignment} with q_len {spec.q_len} and kv_len {spec.kv_len}: {support.kernel} has {has}"


def _return_lse(support: Support, spec: AttentionSpec) -> str | None:
    if not support.lse:
        return f"return_lse: {support.kernel} has no log-sum-exp output"
    if spec.needs_backward and not support.lse_gradient:
        return f"return_lse with gradients: {support.kernel} takes no gradient of the log-sum-exp"
    return None


def _documents(support: Support, spec: AttentionSpec) -> str | None:
    if not support.packed:
        return f"seq_info with packed documents: {support.kernel} has none"
    return None if is_number(spec.documents) or support.symbolic else _symbol(support, spec, "documents")


def _paged(support: Support, spec: AttentionSpec) -> str | None:
    """Returns why a backend cannot run a call on pages, None if it can."""
    assert spec.paged is not None
    if not support.paged:
        return f"keys and values in pages of {spec.paged.page_size}: {support.kernel} has none"
    reads = support.page_dtypes
    if spec.paged.dtype not in (None, *reads):
        return f"pages in {spec.paged.dtype}: {support.kernel} reads {', '.join(reads) or 'no quantised ones'}"
    if spec.paged.starts and not support.paged_starts:
        return f"kv_starts of sequences in pages: {support.kernel} has none"
    return None


def _alibi(support: Support, spec: AttentionSpec) -> str | None:
    if support.alibi if spec.paged is None else support.paged_alibi:
        return None
    return f"alibi_slopes{'' if spec.paged is None else ' with pages'}: {support.kernel} has none"


def _invariant(support: Support, spec: AttentionSpec) -> str | None:
    if spec.invariant in support.invariant:
        return None
    has = f"keeps {' and '.join(support.invariant)} alone" if support.invariant else "promises no equal bits there"
    return f"invariant={spec.invariant!r}: {support.kernel} {has}"


def _flag(name: str) -> Feature:
    return Feature(name, lambda spec: name)


LENGTHS = ("batch", "q_len", "kv_len")
CHECKS: dict[str, Check | Feature | None] = {
    # None: ``_unmet_sizes`` checks the field, or backends have rules of their own about it, or it requires nothing.
    **dict.fromkeys((*LENGTHS, "num_heads", "num_kv_heads", "head_dim", "value_dim", "dtype")),
    **dict.fromkeys(("scale", "max_len_q", "max_len_k", "needs_backward", "bias_dtype", "aux")),
    **{name: _flag(name) for name in FLAGS},
    "alignment": _alignment,
    "return_lse": _return_lse,
    "window": Feature("window", lambda s: f"window={s.window}"),
    "softcap": Feature("softcap", lambda s: f"softcap={s.softcap}"),
    "mask_shape": Feature("mask", lambda s: f"mask of shape {list(s.mask_shape or ())}"),
    "key_ranges_shape": Feature("key_ranges", lambda s: f"key_ranges of shape {list(s.key_ranges_shape or ())}"),
    "mask_mod": Feature("mask_mod", lambda s: "mask_mod"),
    "score_mod": Feature("score_mod", lambda s: "score_mod"),
    "bias_shape": Feature("bias", lambda s: f"bias of shape {list(s.bias_shape or ())}"),
    "bias_gradient": Feature("bias_gradient", lambda s: "gradient of the bias"),
    "aux_gradients": Feature("aux_gradients", lambda s: f"gradient of {listed(s.aux_gradients)}"),
    "alibi_shape": _alibi,
    "sinks": Feature("sinks", lambda s: "sinks"),
    "documents": _documents,
    "dropout": Feature("dropout", lambda s: f"dropout={s.dropout}"),
    "deterministic": Feature("deterministic", lambda s: "deterministic=True"),
    "partial": Feature("partial", lambda s: "a part of each row's keys"),
    "paged": _paged,
    "invariant": _invariant,
}
