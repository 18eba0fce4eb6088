"""The launches of the Triton kernels: how the work is cut, their grids, numbers and constants.

The work is cut into tiles of queries and keys, and each sequence's keys into splits. A call that was seen before has
both of its launches at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared.in_order.order import Tiles, grid_of
from attn_core.backends.shared.pages import pools
from attn_core.backends.shared.readable import dense_channels, readable
from attn_core.backends.shared.triton import Description, Direct, remember
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS = 4
"""Programs that a multiprocessor runs at once. They saturate its memory bandwidth."""
SPEEDS = (0.0, 0.6, 0.93, 0.99, 1.0)
"""The part of the bandwidth that 0 to PROGRAMS programs on each multiprocessor reach: a fit to calls on an H200."""
START = 25
"""The keys, of 256 channels with their values, that a program could read in the time that it takes to start."""
TAIL = 0.05
"""The part of a program's time for which the longest sequence runs alone at the end, because lengths differ."""
PROGRAMS_OF_INT4 = 6
"""As PROGRAMS, for int4 pages: their programs have few registers, and so many run at once."""
FEWEST_KEYS = 128
"""The fewest keys that are worth a program of their own; of drafts and quantised pages twice as many."""
SHARE = 1024
"""The keys of a share if sequences are many. Their lengths differ, and shares of one size finish together."""
MOST_ROUNDS = 5
"""The most rounds of programs that shares of one size may need."""
MOST_SPLITS = 128
TURNED_ROWS = 8
"""The rows of a tile whose products are turned around; see ``products``."""


def tiles(spec: AttentionSpec) -> Tiles:
    """Returns the tile sizes for a call: the fastest on an H200 of those tried for 8 to 64 sequences of 8192 tokens."""
    rows, wide = rows_of(spec), max(spec.head_dim, spec.value_dim)
    if wide > 128:
        return Tiles(rows, 32, 4 if rows > TURNED_ROWS else 2, 2)
    if is_quantised(spec):
        return Tiles(rows, 128, 2, 2) if rows <= 16 else Tiles(rows, 64, 2, 3 if rows == 32 else 2)
    if rows == 16:
        return Tiles(16, 64, 2, 2) if wide > 64 else Tiles(16, 128, 4, 2)
    if rows == 128:
        # With 128 registers for each thread, two programs run at once, and one multiplies while the other adds.
        return Tiles(128, 64, 8, 2, 128) if _one_block(spec) and wide > 64 else Tiles(128, 64, 8, 3)
    return Tiles(rows, 64, 2 if rows == 32 else 4, 2 if rows == 64 else 3)


def is_quantised(spec: AttentionSpec) -> bool:
    """Returns whether the pages store quantised numbers."""
    return spec.paged is not None and spec.paged.dtype is not None


def _one_block(spec: AttentionSpec) -> bool:
    """Returns whether one tile holds all queries of a sequence, so that few programs each read many keys."""
    return (spec.max_len_q or 1) * spec.group_size <= rows_of(spec)


def rows_of(spec: AttentionSpec) -> int:
    """Returns the rows of a tile, queries times heads of a group: a power of two from 8 to 128.

    Quantised pages have smaller tiles. Triton 3.6 compiles a product of 64 rows in four warps to wgmma, and then reads
    converted values from the wrong shared memory: results are wrong, or the access is illegal.
    """
    rows, wide = (spec.max_len_q or 1) * spec.group_size, max(spec.head_dim, spec.value_dim)
    most = 64 if wide > 128 else 128  # wider tiles of 128 rows need too much memory
    least = 16
    if is_quantised(spec):
        # Pages that are not quantised are read at the speed of memory, whatever the products cost.
        most, least = most // 2, TURNED_ROWS
    return min(most, max(least, 1 << (rows - 1).bit_length()))


def splits(spec: AttentionSpec, multiprocessors: int) -> int:
    """Returns the number of splits of each sequence's keys. It depends on shapes alone, so equal calls run equally."""
    rows, sequences = rows_of(spec), spec.documents or 1
    programs = sequences * spec.num_kv_heads * -(-(spec.max_len_q or 1) * spec.group_size // rows)
    full = multiprocessors * PROGRAMS
    reach = band(spec).left
    keys = spec.max_len_k or spec.kv_len
    if reach is not None:  # a window bounds the keys that the queries of a sequence see together
        keys = min(keys, reach + (spec.max_len_q or 1))
    if is_quantised(spec) and rows <= 16:
        if spec.paged is not None and spec.paged.dtype == "int4":
            full = multiprocessors * PROGRAMS_OF_INT4
        # Lengths differ, and with three shares each the longest sequence does not run alone at the end.
        least = 3 if programs < 2 * full else 1
        fewest_keys = 2 * FEWEST_KEYS if 2 * programs <= full else 2 * SHARE
        count = min(_fewest_rounds(programs, full, least), -(-keys // fewest_keys))
    elif tiles(spec).registers is not None:  # a multiprocessor has room for two
        count = min(_fewest_rounds(programs, 2 * multiprocessors), -(-keys // SHARE))
    elif rows == 16:
        start = START * 256 / (spec.head_dim + spec.value_dim)
        count = _fastest(programs, keys, multiprocessors, start, TAIL if sequences > 1 else 0.0)
    else:
        even = min(-(-keys // (SHARE if rows < 128 else 2 * SHARE)), MOST_ROUNDS * full // max(programs, 1))
        count = max(even, min(full // 2 // max(programs, 1), -(-keys // (2 * FEWEST_KEYS))))
    return max(1, min(count, MOST_SPLITS))


def _fastest(programs: int, keys: int, multiprocessors: int, start: float, tail: float) -> int:
    """Returns the number of splits with the least predicted time, which is counted in keys of a program.

    Programs run in rounds. The last round may be too small to use all bandwidth. Merging a split takes about one key.
    Simulations of even and uneven lengths chose these terms; they are within 2 % of the best number in the mean.
    """
    full = multiprocessors * PROGRAMS

    def time(count: int) -> float:
        rounds, rest = divmod(programs * count, full)
        here, part = divmod(rest / multiprocessors, 1)
        speed = SPEEDS[int(here)] + part * (SPEEDS[int(here) + 1] - SPEEDS[int(here)])
        return (keys / count + start) * (rounds + (rest / full / speed if rest else 0)) + tail * keys / count + count

    return min(range(1, max(1, min(MOST_SPLITS, keys // FEWEST_KEYS)) + 1), key=time)


def _fewest_rounds(programs: int, at_once: int, least: int = 1) -> int:
    """Returns a number of splits, from the least on, that leaves few programs of a GPU idle in their last round.

    Args:
        at_once: how many programs the GPU runs at once, because of their registers or shared memory.
    """
    times = {count: -(-programs * count // at_once) / count for count in range(least, MOST_SPLITS + 1)}
    return min(count for count, time in times.items() if time <= 1.05 * min(times.values()))


class Launches(NamedTuple):
    """The direct launches of a call, and the number of splits. merge is None if the keys are not split."""

    splits: int
    attend: Direct
    merge: Direct | None


class Operands(NamedTuple):
    """The tensors that both kernels for pages read, in their order, with dense channels.

    Absent tensors are replaced by another one; ONE_QUERY, SINKS and the like keep the kernels from reading it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    offsets: Tensor
    sinks: Tensor
    key_ranges: Tensor
    slopes: Tensor
    starts: Tensor


def operands_of(inputs: PagedInputs) -> tuple[Operands, bool]:
    """Returns the operands of a call, and whether one was copied, so that it has other strides than the caller's."""
    q = readable(inputs.q, dense_channels)
    table, lengths = inputs.block_table, inputs.seq_lens.contiguous()
    table = table if table.stride(-1) == 1 or table.shape[1] <= 1 else table.contiguous()
    operands = Operands(
        q,
        *pools(inputs),
        table,
        lengths,
        lengths if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.contiguous(),
        q if inputs.sinks is None else inputs.sinks.contiguous(),
        q if inputs.key_ranges is None else inputs.key_ranges.contiguous(),
        q if inputs.alibi_slopes is None else inputs.alibi_slopes.float().contiguous(),
        lengths if inputs.kv_starts is None else inputs.kv_starts.contiguous(),
    )
    return operands, q is not inputs.q or table is not inputs.block_table or lengths is not inputs.seq_lens


def attend(
    spec: AttentionSpec, operands: tuple[Tensor, ...], settings: dict[str, Any], tile: Tiles, count: int
) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.attend``.

    Args:
        settings: the kernel's scalar arguments, from ``lower``.
        count: the number of splits.
    """
    q, k, v, table, *_, k_scales, v_scales, out, lse = operands
    paged = spec.paged
    assert paged is not None
    # The kernel indexes results by split first. Without splits that stride is 0.
    out_strides = out.stride() if count > 1 else (0, *out.stride())
    lse_strides = lse.stride() if count > 1 else (0, *lse.stride())
    blocks = -(-(spec.max_len_q or 1) * spec.group_size // tile.rows)
    grid = grid_of(spec, settings["ONE_QUERY"], count if count > 1 else 0, blocks)
    numbers = (
        settings["scale"],
        settings["softcap"],
        spec.q_len,
        paged.num_pages,
        paged.width,
        settings["left"],
        settings["right"],
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        table.stride(0),
        *out_strides[:3],
        *lse_strides[:2],
        2 * settings["RANGES"] * spec.q_len if (spec.key_ranges_shape or (1, 1))[1] > 1 else 0,
        spec.num_heads if len(spec.alibi_shape or ()) == 2 else 0,
        *scale_strides(spec, k_scales),
        *scale_strides(spec, v_scales),
    )
    constants = {
        **{"KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "PAGE": paged.page_size},
        "NEAR": are_near((k, v), (k_scales, v_scales)),
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim, "SPLITS": count},
        **{name: settings[name] for name in ("ONE_QUERY", "SOFTCAP", "SINKS", "RANGES", "ALIBI", "STARTS")},
        # Tests run the kernel on the CPU, in Triton's interpreter, which runs no PTX.
        **{name: settings[name] for name in ("LEFT_OPEN", "FUSED", "KIND")},
        "ASSEMBLY": q.device.type != "cpu",
        **{"ROWS": tile.rows, "KEYS": tile.keys},
        **{"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers},
    }
    return grid, numbers, constants


def are_near(pools: tuple[Tensor, Tensor], scales: tuple[Tensor, ...] = ()) -> bool:
    """Returns whether every offset in the pools, in units of 16 bytes, and in their scales, in elements, fits int32."""
    bytes_of_pools = max(_reach(pool) * pool.element_size() for pool in pools)
    return bytes_of_pools // 16 < 2**31 and all(_reach(each) < 2**31 for each in scales)


def _reach(tensor: Tensor) -> int:
    """Returns the largest offset of an element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def scale_strides(spec: AttentionSpec, scales: Tensor) -> tuple[int, ...]:
    """Returns the strides of scales by page, slot and head; 0 for an axis that they lack."""
    assert spec.paged is not None
    if spec.paged.dtype is None:
        return 0, 0, 0
    by_page = spec.paged.scales == "page"
    return (scales.stride(0), 0, scales.stride(1)) if by_page else tuple(scales.stride())


def merge(spec: AttentionSpec, operands: tuple[Tensor, ...], count: int) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.merge``."""
    parts, part_lse, _, out, lse = operands
    numbers = (*parts.stride()[:3], *part_lse.stride()[:2], *out.stride()[:2], lse.stride(0))
    # Programs for single heads take longer to start than to run if they merge few splits.
    heads = math.gcd(spec.num_heads, 4) if count <= 4 else 1
    constants = {
        **{"VALUE_DIM": spec.value_dim, "SPLITS": count, "SINKS": spec.sinks},
        **{"SHARES": min(8, count), "HEADS": heads, "num_warps": heads},
    }
    return (spec.q_len, spec.num_heads // heads, 1), numbers, constants


First = Callable[[PagedInputs], tuple[Any, Any, Launches | None]]


def repeated(spec: AttentionSpec, first: First) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns a function of a call's tensors that repeats the launches of an earlier call with the same strides.

    It only allocates and launches. Its arguments are those of ``Backend.paged_shortcut_of``.

    Args:
        first: runs a call with new strides, or at addresses that are no multiples of 16. Returns (out, lse) and the
            launches, or None if they fit no other tensors.
    """
    import torch

    seen: dict[Hashable, Any] = {}  # by strides: the launches, and whether the output is like q
    shape, lse_shape, returns_lse = spec.out_shape, spec.lse_shape, spec.return_lse
    # In float32, rounded up to 16 bytes, so that each part of the space below starts at a multiple of 16.
    size, lse_size = (4 * -(-math.prod(shape) // 4) for shape in (shape, lse_shape))
    empty, single = torch.empty, torch.float32

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lengths: Tensor,
        sinks: Tensor | None,
        cu: Tensor | None = None,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        strides: Hashable = (q.stride(), k.stride(), v.stride(), table.stride(), lengths.stride())
        at_q, at_k, at_v, at_table, at_lengths = [tensor.data_ptr() for tensor in (q, k, v, table, lengths)]
        # q stands for absent sinks and scales, the lengths for absent offsets.
        at_sinks = at_q if sinks is None else sinks.data_ptr()
        at_cu = at_lengths if cu is None else cu.data_ptr()
        at_k_scales = at_v_scales = at_q
        if k_scales is not None:
            strides = strides, k_scales.stride(), v_scales.stride()  # type: ignore[union-attr]
            at_k_scales, at_v_scales = k_scales.data_ptr(), v_scales.data_ptr()  # type: ignore[union-attr]
        launches, like_q = seen.get(strides) or (None, False)
        unaligned = (at_q | at_k | at_v | at_table | at_lengths | at_sinks | at_cu | at_k_scales | at_v_scales) & 15
        dense = (sinks is None or sinks.is_contiguous()) and (cu is None or cu.is_contiguous())
        if launches is None or unaligned or not dense:
            scales = {"k_scales": k_scales, "v_scales": v_scales}
            out, lse, launches = first(PagedInputs(q, k, v, table, lengths, cu, sinks, **scales))
            remember(seen, strides, launches and (launches, q.shape == out.shape and q.is_contiguous()))
            return out, lse
        count, attend, merge = launches
        device = q.device
        out = torch.empty_like(q) if like_q else empty(shape, dtype=q.dtype, device=device)
        lse = empty(lse_shape, dtype=single, device=device) if returns_lse else None
        # One allocation for everything that the caller does not get: the partial results, then the log-sum-exp.
        parts = count * (size + lse_size) if count > 1 else 0
        space = empty(parts + (0 if returns_lse else lse_size), dtype=single, device=device)
        at_out, at_parts = out.data_ptr(), space.data_ptr()
        at_lse = at_parts + 4 * parts if lse is None else lse.data_ptr()
        # q stands for the absent key_ranges and slopes, the lengths for the absent starts.
        absent = at_q, at_q, at_lengths
        tables = (at_q, at_k, at_v, at_table, at_lengths, at_cu, at_sinks, *absent, at_k_scales, at_v_scales)
        if merge is None:
            attend(*tables, at_out, at_lse)
        else:
            at_part_lse = at_parts + 4 * count * size
            attend(*tables, at_parts, at_part_lse)
            merge(at_parts, at_part_lse, at_sinks, at_out, at_lse)
        return out, lse

    return run
