"""Turns Levanter's ``AttentionMask`` into keywords of ``attention``. Its parts hide keys together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.call.options import check_flag
from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend.levanter.named_axes import Axes, grouped, sizes_of

_FIELDS = ("is_causal", "causal_offset", "explicit_mask", "segment_ids", "sliding_window")


def visible(mask: Any, axes: Axes) -> dict[str, Any]:
    """Returns the keywords of ``attention`` for a mask: an ``AttentionMask``, or a named array."""
    if not hasattr(mask, "is_causal"):
        return {"mask": grouped("mask", mask, axes.scores, axes, broadcast=False).astype(bool)}
    for name, value in vars(mask).items():
        if name not in _FIELDS and value is not None and value is not False:
            raise SpecError(f"mask.{name}: expected None, because the fields known here are {', '.join(_FIELDS)}")
    options: dict[str, Any] = {}
    if mask.explicit_mask is not None:
        table = grouped("mask.explicit_mask", mask.explicit_mask, axes.scores, axes, broadcast=False)
        options["mask"] = table.astype(bool)
    if mask.segment_ids is not None:
        ids = mask.segment_ids if isinstance(mask.segment_ids, tuple) else (mask.segment_ids, mask.segment_ids)
        options["q_segment_ids"] = _of_tokens("mask.segment_ids", ids[0], axes, axes.queries)
        options["kv_segment_ids"] = _of_tokens("mask.segment_ids", ids[1], axes, axes.keys)
    window, offset = mask.sliding_window, mask.causal_offset if check_flag("mask.is_causal", mask.is_causal) else None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise SpecError(f"mask.sliding_window={shown(window)}: expected None or an int of 1 or more")
    if offset is not None:
        options |= _shifted(offset, axes)
        # Levanter's window ignores the offset: query i sees keys i - window + 1 to i.
        return options if window is None else options | {"mask_mod": _band(window)}
    if window is not None or mask.is_causal:
        options |= {"causal": True, "alignment": "top_left", "window": window}
    return options


def _band(window: int) -> Any:
    return lambda b, h, q, k, *aux: (k <= q) & (k >= q - (window - 1))


def _of_tokens(argument: str, named: Any, axes: Axes, length: str) -> jax.Array:
    """Returns numbers of tokens, int32 ``[batch, length]``. Levanter names both axes of tokens as that of queries."""
    own = sizes_of(argument, named)
    stated = length if length in own else axes.queries
    names = (axes.batch, (stated,))
    if own.get(stated) != axes.sizes[length]:
        raise ShapeError(f"{argument}: expected size {axes.sizes[length]} of the axis {stated}, got {own.get(stated)}")
    sizes = axes.sizes | {stated: axes.sizes[length]}
    return grouped(argument, named, names, axes._replace(sizes=sizes)).astype(jnp.int32)


def _shifted(offset: Any, axes: Axes) -> dict[str, Any]:
    """Returns the causal mask ``k <= q + offset``, with an offset for each row of the batch."""
    if not hasattr(offset, "axes"):
        raise TypeError(f"mask.causal_offset: expected a named array, got {type(offset).__name__}")
    rows = grouped("mask.causal_offset", offset, (axes.batch,), axes).astype(jnp.int32)  # [batch]
    queries, keys = (jnp.arange(axes.sizes[name], dtype=jnp.int32) for name in (axes.queries, axes.keys))
    places = jnp.broadcast_to(keys, (len(rows), len(keys)))
    return {"causal": True, "q_positions": queries + rows[:, None], "kv_positions": places}
