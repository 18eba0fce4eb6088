"""Calls with ``invariant``: one order of sums for every batch, chunk and page, by ``ordered_kernels``."""

from __future__ import annotations

from functools import cache
from typing import Any

from attn_core.backends.shared.in_order import merge
from attn_core.backends.shared.in_order.order import PROVEN, How, blocks, grid_of, how
from attn_core.backends.shared.programs.triton import Description, Direct, launch
from attn_core.backends.triton_splitkv.launches import Launches, are_near, operands_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs


def refusals(spec: AttentionSpec, device: str, kernel: str) -> list[str]:
    """Returns why a call with ``invariant`` is not known to have the same bits in every chunk and batch."""
    if spec.invariant is None:
        return []
    paged = spec.paged
    lacks = {
        f"device {device}": device not in PROVEN,
        "key_ranges": spec.key_ranges_shape is not None,
        f"pages in {paged.dtype if paged else None}": paged is not None and paged.dtype is not None,
    }
    return [f"{what} with invariant={spec.invariant!r}: {kernel} has none" for what in lacks if lacks[what]]


def attend(spec: AttentionSpec, operands: tuple[Any, ...], settings: dict[str, Any], way: How) -> Description:
    """Returns the grid, the numbers and the constants of ``attend_in_order``.

    Args:
        operands: the kernel's tensors. settings: the scalar arguments of ``kernels.attend``.
    """
    q, k, v, table, *_, out, lse = operands
    paged, tiles = spec.paged, way.tiles
    assert paged is not None
    # The kernel indexes partial results by share first.
    out_strides = out.stride() if way.shares else (0, *out.stride())
    lse_strides = lse.stride() if way.shares else (0, *lse.stride())
    numbers = (
        *(settings["scale"], settings["softcap"]),
        *(spec.q_len, paged.num_pages, paged.width, settings["left"], settings["right"]),
        *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], table.stride(0)),
        *(*out_strides[:3], *lse_strides[:2]),
        spec.num_heads if len(spec.alibi_shape or ()) == 2 else 0,
    )
    constants = {
        **{"KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "PAGE": paged.page_size},
        "NEAR": are_near((k, v)),
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{name: settings[name] for name in ("ONE_QUERY", "SOFTCAP", "SINKS", "LEFT_OPEN", "ALIBI", "STARTS")},
        **{"PARTIAL": way.shares > 0, "ONE_SHARE": way.one_share, "SHARE": way.share},
        **{"ROWS": tiles.rows, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages},
        "enable_fp_fusion": False,
    }
    grid = grid_of(spec, settings["ONE_QUERY"], way.shares, blocks(spec, tiles))
    return grid, numbers, constants


@cache
def _kernels() -> Any:
    from attn_core.backends.triton_splitkv import ordered_kernels

    return ordered_kernels


def forward(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, settings: dict[str, Any], multiprocessors: int
) -> tuple[Any, Any, Launches | None]:
    """Returns (out, lse), and the launches if they fit other tensors of the same strides.

    Args:
        settings: the scalar arguments of ``kernels.attend``.
    """
    import torch

    kernels, way = _kernels(), how(spec, multiprocessors)
    read, copied = operands_of(inputs)
    q, sinks = read.q, read.sinks
    out, lse = (None, None) if into is None else into
    if out is None:
        out = torch.empty(spec.out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(spec.lse_shape, dtype=torch.float32, device=q.device)
    parts, part_lse = out, lse
    if way.shares:
        parts = torch.empty((way.shares, *spec.out_shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((way.shares, *spec.lse_shape), dtype=torch.float32, device=q.device)
    # The current device, because Triton launches there. Tests run the kernels on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if q.is_cuda else -1
    results = out.stride(), lse.stride(), sinks.dtype
    strides = [each.stride() for each in read[:3]]
    layout = (*strides, read.table.stride(0), *results, inputs.cu_seqlens_q is None)
    operands = (*read[:7], read.slopes, read.starts, parts, part_lse)  # no ranges
    key = ("attend_in_order", spec, way, layout, current)
    attend_at = launch(kernels.attend_in_order, key, operands, lambda: attend(spec, operands, settings, way))
    merge_at = None
    if way.shares:
        merge_at = merge.launch_merge(spec, (parts, part_lse, sinks, out, lse), way.shares, current)
    if copied or attend_at is None or (way.shares and merge_at is None):
        return out, lse, None
    return out, lse, Launches(way.shares, _as_attend(attend_at), merge_at)


def _as_attend(direct: Direct) -> Direct:
    """Returns a launch that takes the addresses of ``kernels.attend``, of which this kernel has some."""

    def run(*at: int) -> None:
        direct(*at[:7], *at[8:10], *at[-2:])  # all up to the sinks, slopes and starts, out and lse

    return run
