"""The launch of the forward: its grid, numbers and constants."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.in_order.order import How, blocks, sequences
from attn_core.backends.shared.programs.triton import Description
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

FAR = 2**30
"""A distance that reaches every key. Kernels add positions to it in int32, so it must stay far below 2**31."""


def settings_of(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernels' scalar arguments. An open side of the window becomes a distance that reaches every key."""
    edge = band(spec)
    return {
        "scale": spec.scale,
        "softcap": spec.softcap or 1.0,  # unused without SOFTCAP
        "left": FAR if edge.left is None else edge.left,
        "right": FAR if edge.right is None else edge.right,
        "PACKED": spec.packed,
        "BOTTOM_RIGHT": spec.alignment == "bottom_right",
        "SOFTCAP": spec.softcap is not None,
        "SINKS": spec.sinks,
        "LEFT_OPEN": edge.left is None,
        "ALIBI": spec.alibi_shape is not None,
    }


def by_row(tensor: Any, packed: bool) -> tuple[int, ...]:
    """Returns the strides of a tensor by row, token and head, or by row and head of lse; a packed call has one row."""
    return (0, *tensor.stride()[:-1]) if packed else tuple(tensor.stride()[:-1])


def slope_row(spec: AttentionSpec) -> int:
    """Returns the stride of slopes by row."""
    return spec.num_heads if len(spec.alibi_shape or ()) == 2 and not spec.packed else 0


def attend(spec: AttentionSpec, operands: tuple[Any, ...], settings: dict[str, Any], way: How) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.attend``.

    Args:
        operands: the kernel's tensors; partial results ``[shares, tokens of all rows, heads, dim]``, and their
            log-sum-exps ``[shares, heads, tokens of all rows]``.
        settings: from ``settings_of``.
    """
    q, k, v, *_, out, lse = operands
    tiles, packed = way.tiles, spec.packed
    if way.shares:
        out_strides = (spec.q_len * out.stride(1), *out.stride()[:3])
        lse_strides = (spec.q_len, *lse.stride()[:2])
    else:
        row, token, head = by_row(out, packed)
        out_strides = (row, 0, token, head)
        row, head = by_row(lse, packed)
        lse_strides = (row, 0, head)
    strides = [by_row(each, packed) for each in (q, k, v)]
    numbers = (
        *(settings["scale"], settings["softcap"]),
        *(spec.q_len, spec.kv_len, settings["left"], settings["right"]),
        *(step for each in strides for step in each),
        *(*out_strides, *lse_strides, slope_row(spec)),
    )
    constants = {
        **{"KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size},
        "NEAR": all(step % 8 == 0 and spec.kv_len * step < 2**34 for step in (strides[1][1], strides[2][1])),
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{name: value for name, value in settings.items() if name.isupper()},
        **{"PARTIAL": way.shares > 0, "ONE_SHARE": way.one_share, "SHARE": way.share},
        **{"ROWS": tiles.rows, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages},
        "enable_fp_fusion": False,
    }
    # Sequences times heads come first, because only the first axis of a grid may exceed 65535.
    grid = (sequences(spec)[0] * spec.num_kv_heads, max(way.shares, 1), blocks(spec, tiles))
    return grid, numbers, constants
