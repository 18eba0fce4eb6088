"""Checks the types of a spec's fields, so that the checks of their values may compare them."""

from __future__ import annotations

from typing import Any

from attn_core.call.kinds import check_hashable, check_kind, is_size
from attn_core.call.options import check_flag
from attn_core.call.pages import PagedKV
from attn_core.errors import ShapeError, SpecError, shown

_NONE = type(None)


def check_field_types(spec: Any) -> None:
    """Checks the fields of an ``AttentionSpec`` that ``check_options`` does not.

    Raises:
        ShapeError, SpecError: naming the field.
    """
    for name in ("batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "value_dim"):
        if not is_size(getattr(spec, name)):
            raise ShapeError(f"{name}={shown(getattr(spec, name))}: expected an int")
    for name in ("documents", "max_len_q", "max_len_k"):
        if getattr(spec, name) is not None and not is_size(getattr(spec, name)):
            raise SpecError(f"{name}={shown(getattr(spec, name))}: expected an int, or None")
    for name in ("mask_shape", "key_ranges_shape", "bias_shape", "alibi_shape"):
        check_kind(name, getattr(spec, name), (tuple, _NONE), "a tuple of ints, or None")
        check_hashable(name, getattr(spec, name))
    for name in ("sinks", "needs_backward", "bias_gradient", "partial"):
        check_flag(name, getattr(spec, name))
    if not isinstance(spec.window, tuple) or len(spec.window) != 2:
        raise SpecError(
            f"window={shown(spec.window)}: expected a pair (left, right) of inclusive distances, None unbounded"
        )
    check_hashable("dtype", spec.dtype)
    check_kind("paged", spec.paged, (PagedKV, _NONE), "a PagedKV, or None")
