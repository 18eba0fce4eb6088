"""Writes the documents of a call as segment ids and positions, for the entries that pass these instead of offsets.

Ids are drawn, so neighbours and rows have any. A call without tables also gets its tokens in another order: then ids
return later in the row, and positions run in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.cli.trial import Trial
from tests.campaign.case import is_banded
from tests.campaign.entries import without

MOST = 4
"""Arrays that functions, ids and positions may have together."""
ORDERS = ("q_order", "kv_order")


def arrays_of(trial: Trial) -> dict[str, np.ndarray]:
    """Returns ids, positions if the call has a band, and two orders of tokens; int32 ``[batch, length]``."""
    spec, random = trial.spec, np.random.default_rng((trial.seed, 41))
    documents = spec.documents or 1
    # The last two are of the tokens behind the last document, of queries and of keys, which see nothing.
    names = [
        random.permutation(np.arange(-3, documents + 9, dtype=np.int32))[: documents + 2] for _ in range(spec.batch)
    ]
    lengths, arrays = _lengths(trial), {}
    for side, tokens, tail in (("q", spec.q_len, -2), ("kv", spec.kv_len, -1)):
        counts = lengths[0 if side == "q" else 1]
        behind = tokens - sum(counts)
        ids = [np.repeat(ids[[*range(documents), tail]], [*counts, behind]) for ids in names]
        # A bottom-right diagonal ends at the last key of a document, so its queries count from there.
        right = side == "q" and spec.alignment == "bottom_right"
        starts = [kv - q if right else 0 for q, kv in zip(*lengths, strict=True)]
        places = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        positions = np.concatenate([*places, random.integers(-9, 9, behind)])
        orders = [random.permutation(tokens) if _moves(spec) else np.arange(tokens) for _ in range(spec.batch)]
        order = np.array(orders, np.int32).reshape(spec.batch, tokens)
        arrays[f"{side}_order"] = order
        rows = {f"{side}_segment_ids": np.array(ids), f"{side}_positions": np.tile(positions, (spec.batch, 1))}
        for name, numbers in rows.items():
            if name.endswith("ids") or is_banded(spec):
                arrays[name] = np.take_along_axis(numbers.astype(np.int32), order, 1)
    return arrays


def refuses(spec: AttentionSpec) -> str | None:
    """Returns why a spec is no call with segment ids, or None."""
    if spec.packed and spec.sinks:
        return "no sinks of documents"  # tokens behind the last document have none
    if len(spec.aux) + (4 if is_banded(spec) else 2) > MOST:
        return f"at most {MOST} arrays of functions and segments"
    return without("alibi", "dropout", key_ranges=True, functions=True)(spec)


def attend(attention: Any, take: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """Runs a call of ``arrays_of`` and of the other arrays; returns its results in the shapes of the spec.

    Args:
        attention: the framework's.
        take: ``(array, places, axis) -> array``, its take_along_axis.
    """

    def along(array: Any, order: Any, axis: int) -> Any:
        """Takes the places ``[batch, length]`` of each row along an axis."""
        return take(
            array,
            order.reshape(order.shape[0], *(1,) * (axis - 1), order.shape[1], *(1,) * (array.ndim - axis - 1)),
            axis,
        )

    packed = arrays["q"].ndim == 3
    q, k, v = (arrays[name][None] if packed else arrays[name] for name in ("q", "k", "v"))
    q_order, kv_order = (arrays[name] for name in ORDERS)
    rows = {"q": along(q, q_order, 1), "k": along(k, kv_order, 1), "v": along(v, kv_order, 1)}
    rest = {name: array for name, array in arrays.items() if name not in ORDERS}
    results = attention(**rest | rows, **options)
    back = q_order.argsort(-1)
    if not isinstance(results, tuple):
        out = along(results, back, 1)
        return out[0] if packed else out
    moved = along(results[0], back, 1), along(results[1], back, 2)
    return tuple(each[0] for each in moved) if packed else moved


def _lengths(trial: Trial) -> tuple[list[int], list[int]]:
    info, spec = trial.seq_info, trial.spec
    if info is None:
        return [spec.q_len], [spec.kv_len]
    queries, keys = (np.diff(np.asarray(offsets)).tolist() for offsets in (info.cu_seqlens_q, info.cu_seqlens_k))
    return queries, keys


def _moves(spec: AttentionSpec) -> bool:
    """Returns whether tokens may change their order: nothing else counts places in the row."""
    tables = spec.mask_shape, spec.bias_shape, spec.key_ranges_shape, spec.mask_mod, spec.score_mod
    return all(table is None for table in tables)
