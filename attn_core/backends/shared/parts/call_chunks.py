"""Splits a call's batch rows and heads, for attention written in torch operations."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.shared.plain.block_operands import BlockOperands, SavedTensors, Sums
from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec


class CallChunk(NamedTuple):
    """Some batch rows, and some key/value heads with their query heads. Methods return views of the call's tensors.

    spec: the chunk as a call of its own, but for its tables, whose shapes the block functions read from the operands.
    whole: whether the chunk is the whole call.
    """

    spec: AttentionSpec
    batch: slice
    kv_heads: slice
    heads: slice
    whole: bool

    def of_operands(self, operands: BlockOperands) -> BlockOperands:
        """The operands of the chunk."""
        k, v, mask, bias, slopes, sinks = (self._of_kv_heads(table) for table in operands[1:7])
        q, ranges = operands.q[self.batch, :, self.heads], self._of_kv_heads(operands.key_ranges)
        tables = {"mask": mask, "bias": bias, "slopes": slopes, "sinks": sinks, "key_ranges": ranges}
        return operands._replace(q=q, k=k, v=v, **tables)

    def of_saved(self, saved: SavedTensors) -> SavedTensors:
        """The saved tensors of the chunk."""
        out, dout = (tensor[self.batch, :, self.heads] for tensor in (saved.out, saved.dout))
        lse, dlse = (None if rows is None else rows[self.batch, self.heads] for rows in (saved.lse, saved.dlse))
        return SavedTensors(out, lse, dout, dlse)

    def of_sums(self, sums: Sums) -> Sums:
        """Views of the sums; to add to a view changes the sum."""
        return Sums(sums.dq[self.batch, :, self.heads], *[self._of_kv_heads(table) for table in sums[1:]])

    def _of_kv_heads(self, table: Any) -> Any:
        """Cuts ``[batch or 1, kv_heads or 1, ...]``."""
        if table is None:
            return None
        rows = table if table.shape[0] == 1 else table[self.batch]
        return rows if rows.shape[1] == 1 else rows[:, self.kv_heads]


@lru_cache(maxsize=1024)
def chunks(spec: AttentionSpec, most: int) -> tuple[CallChunk, ...]:
    """Returns the chunks of a call, of at most ``most`` key/value heads counted in all batch rows, but at least one.

    A chunk has all heads of its batch rows, or some heads of one row: so its keys are contiguous.
    """
    number, group = spec.num_kv_heads, spec.group_size
    counts = spec.dropout or has_functions(spec)  # both count the rows and heads of the whole call
    if spec.batch * number <= most or counts:
        return (CallChunk(spec, slice(0, spec.batch), slice(0, number), slice(0, spec.num_heads), True),)
    rows, heads = max(most // number, 1), min(max(most, 1), number)
    tables: dict[str, Any] = {"mask_shape": None, "bias_shape": None, "alibi_shape": None, "bias_gradient": False}
    tables |= {"bias_dtype": None, "key_ranges_shape": None}
    result = []
    for first in range(0, spec.batch, rows):
        batch = slice(first, min(first + rows, spec.batch))
        for start in range(0, number, heads):
            stop = min(start + heads, number)
            sizes: dict[str, Any] = {"batch": batch.stop - first, "num_kv_heads": stop - start}
            sizes["num_heads"] = (stop - start) * group
            part = replace(spec, **sizes, **tables)
            result.append(CallChunk(part, batch, slice(start, stop), slice(start * group, stop * group), False))
    return tuple(result)
