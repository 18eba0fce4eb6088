"""Attention in plain torch operations, forward and backward, block by block: the loops behind the math backend.

Other backends use it for rows that their kernel computes wrongly, e.g. rows with NaN. Batch rows and heads are split
into chunks, whose blocks are in ``blocks``.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.plain.blocks import (
    LOG2E,
    WINDOW_BLOCK,
    BlockOperands,
    SavedTensors,
    ScoreMemory,
    Sums,
    backward_block,
    empty_sums,
    factor_of,
    forward_block,
    has_narrow_window,
    operands_of,
    products,
    rows_first,
    scores_and_top,
    softmax,
    sum_over_keys,
    without_unit,
)
from attn_core.backends.shared.row_blocks import DocumentSlices, blocks
from attn_core.call.functions import DAUX, aux_of, has_functions
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor


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
        of_kv_heads = ("k", "v", "mask", "bias", "slopes", "sinks", "key_ranges")
        parts: dict[str, Any] = {name: self._of_kv_heads(getattr(operands, name)) for name in of_kv_heads}
        return operands._replace(q=operands.q[self.batch, :, self.heads], **parts)

    def of_saved(self, saved: SavedTensors) -> SavedTensors:
        """The saved tensors of the chunk."""
        out, dout = (tensor[self.batch, :, self.heads] for tensor in (saved.out, saved.dout))
        lse, dlse = (None if rows is None else rows[self.batch, self.heads] for rows in (saved.lse, saved.dlse))
        return SavedTensors(out, lse, dout, dlse)

    def of_sums(self, sums: Sums) -> Sums:
        """Views of the sums; to add to a view changes the sum. A call with daux has no chunks."""
        return Sums(sums.dq[self.batch, :, self.heads], *[self._of_kv_heads(table) for table in sums[1:]])  # type: ignore[arg-type]

    def _of_kv_heads(self, table: Tensor | None) -> Tensor | None:
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


QUERY_BLOCK = 128
"""The most query rows computed at once: the scores in memory are ``[batch, heads, QUERY_BLOCK, kv_len]``."""
FEWEST_ROWS = 32
CACHED_SCORES = 2**19
"""On a CPU a block is computed for fewer heads, then has fewer rows, down to FEWEST_ROWS, if it would have more scores
than this, 2 MiB in float32: each operation reads and writes all of them, in the processor's cache if they fit."""


def forward(
    spec: AttentionSpec, inputs: Inputs, valid_documents: list[DocumentSlices] | None = None
) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs.

    Args:
        valid_documents: see ``row_blocks.blocks``.
    """
    out, lse, _ = results(spec, inputs, valid_documents)
    return out, lse


def forward_with_maximum(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Backend.forward_with_maximum``."""
    out, lse, top = results(spec, inputs, maximum=True)
    return out, lse, top.view(spec.lse_shape)  # type: ignore[union-attr]  # not None with maximum


@without_gradient
def results(
    spec: AttentionSpec, inputs: Inputs, valid_documents: list[DocumentSlices] | None = None, maximum: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out, lse, and the rows' largest logits of lse's shape, or without ``maximum`` None."""
    import torch

    with without_autocast(inputs.q):
        # A fake tensor has no values to look at, and is of another type.
        if inputs.q.is_cpu and has_few_scores(spec) and type(inputs.q) in (torch.Tensor, torch.nn.Parameter):
            found = results_of_few(spec, inputs, maximum)
            if found is not None:
                return found
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs), scores)
        out: Any = None
        lse: Any = None
        top: Any = None
        for block in blocks(spec, inputs, height, valid_documents):
            for chunk in parts:
                some = operands if chunk.whole else chunk.of_operands(operands)
                part, part_lse, part_top = forward_block(chunk.spec, some, block, maximum)
                # [batch, rows, heads, dim], [batch, heads, rows]
                part, part_lse = rows_first(part), part_lse.flatten(1, 2)
                part_top = None if part_top is None else part_top.flatten(1, 2)
                if part_lse.shape == (spec.batch, spec.num_heads, spec.q_len):  # the only block
                    out, lse, top = part.to(inputs.q.dtype).contiguous(), part_lse, part_top
                    break
                if out is None:
                    out, lse = _empty_results(spec, inputs, operands)
                    top = lse.clone() if maximum else None
                out[chunk.batch, block.rows, chunk.heads] = part
                lse[chunk.batch, chunk.heads, block.rows] = part_lse
                if maximum:
                    top[chunk.batch, chunk.heads, block.rows] = part_top
        if out is None:
            out, lse = _empty_results(spec, inputs, operands)
            top = lse.clone() if maximum else None
    return (out[0], lse[0], top[0] if maximum else None) if spec.packed else (out, lse, top)


@without_gradient
def row_maximum(spec: AttentionSpec, inputs: Inputs) -> Tensor:
    """See ``RowMaximumPass``."""
    import torch

    with without_autocast(inputs.q):
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs), scores)
        # Rows in no block see no key.
        result = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
        for block in blocks(spec, inputs, height):
            for chunk in parts:
                some = operands if chunk.whole else chunk.of_operands(operands)
                # [batch, kv_heads, group, rows, 1]
                *_, top, _, overflowed = scores_and_top(chunk.spec, some, block)
                top = without_unit(top, some.unit)
                if overflowed is not None:
                    exact = scores_and_top(chunk.spec, some._replace(unit=1.0), block)[3]
                    top = torch.where(overflowed, exact, top)
                result[chunk.batch, chunk.heads, block.rows] = top.flatten(1, 2).squeeze(-1)
    return result[0] if spec.packed else result


@lru_cache(maxsize=1024)
def block_sizes(spec: AttentionSpec, on_cpu: bool) -> tuple[int, tuple[CallChunk, ...], int]:
    """Returns a block's number of rows, the chunks of the call, and the most scores of a block in a chunk.

    The scores of a chunk stay in the cache. Their number is 0 if the blocks need no memory in common.
    """
    if not on_cpu:
        return QUERY_BLOCK, chunks(spec, spec.batch * spec.num_kv_heads), 0
    left, right = spec.window
    right = 0 if spec.causal else right
    keys = spec.kv_len if spec.max_len_k is None else spec.max_len_k
    tallest = min(QUERY_BLOCK, WINDOW_BLOCK) if has_narrow_window(spec) else QUERY_BLOCK
    rows = min(spec.q_len if spec.max_len_q is None else spec.max_len_q, tallest)
    if left is not None and right is not None:
        keys = min(keys, left + right + rows)
    in_cache = CACHED_SCORES // max(1, spec.group_size * keys)  # rows of one key/value head
    parts = chunks(spec, in_cache // max(rows, 1))
    heads = 1 if not parts[0].whole else spec.batch * spec.num_kv_heads
    height = min(max(in_cache // heads, FEWEST_ROWS), tallest)
    largest = max(part.spec.batch * part.spec.num_heads for part in parts) * min(height, rows) * keys
    return height, parts, 0 if parts[0].whole and height >= spec.q_len else largest


def with_scratch(operands: BlockOperands, scores: int) -> BlockOperands:
    return operands._replace(scratch=ScoreMemory(operands.k, scores)) if scores else operands


def _empty_results(spec: AttentionSpec, inputs: Inputs, operands: BlockOperands) -> tuple[Tensor, Tensor]:
    """Returns out and lse of rows in no block, which see no key: 0 and -inf. Their largest logit is -inf, too."""
    out = inputs.q.new_zeros((spec.batch, spec.q_len, spec.num_heads, spec.value_dim))
    lse = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
    return out, lse


@without_gradient
def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """See ``Backend.backward``."""
    with without_autocast(inputs.q):
        out, lse, dout, dlse = (t[None] if spec.packed and t is not None else t for t in (out, lse, dout, dlse))  # type: ignore[assignment]
        saved = SavedTensors(out, lse, dout, dlse)
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs, saved), scores)
        sums = empty_sums(spec, operands)
        for block in blocks(spec, inputs, height):
            for chunk in parts:
                if chunk.whole:
                    backward_block(spec, operands, saved, sums, block)
                    continue
                of_chunk = chunk.of_operands(operands), chunk.of_saved(saved), chunk.of_sums(sums)
                backward_block(chunk.spec, *of_chunk, block)
        return gradients_of(spec, inputs, sums)


def without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast, which would round the float32 products."""
    import torch

    if not torch._C._is_any_autocast_enabled():  # to enter autocast takes as long as several operations
        return nullcontext()
    return torch.autocast(q.device.type, enabled=False)


def gradients_of(spec: AttentionSpec, inputs: Inputs, sums: Sums) -> Gradients:
    """Returns sums of gradients in the shapes and dtypes of the inputs."""
    # [batch, kv_heads, kv_len, dim] -> [batch, kv_len, kv_heads, dim]
    dk, dv = (total.transpose(1, 2).to(inputs.k.dtype).contiguous() for total in (sums.dk, sums.dv))
    dq = sums.dq
    if spec.packed:  # one row
        dq, dk, dv = dq[0], dk[0], dv[0]
    return Gradients(
        dq,
        dk,
        dv,
        dbias=None if sums.dbias is None else sums.dbias.view(inputs.bias.shape).to(inputs.bias.dtype),
        dsinks=None if sums.dsinks is None else sums.dsinks.view(spec.num_heads).to(inputs.sinks.dtype),
        **{DAUX[number]: total.to(aux_of(inputs)[number].dtype) for number, total in (sums.daux or {}).items()},
    )


MOST_SCORES = 2**17
"""The most scores of a call, all heads and rows together: 512 KiB in float32, which stay in a processor's cache."""


@lru_cache(maxsize=4096)
def has_few_scores(spec: AttentionSpec) -> bool:
    """Returns whether ``results_of_few`` runs a call: few scores, no row without keys, softcap and band alone."""
    tables = (spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.key_ranges_shape)
    extras = spec.packed or spec.sinks or spec.dropout or any(shape is not None for shape in tables)
    extras = extras or has_functions(spec)
    if extras or spec.dtype == "float64":
        return False
    edge = band(spec)
    if edge.left is not None and spec.q_len > WINDOW_BLOCK:
        return False  # several blocks read fewer keys than one
    scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
    # A block would not read the keys that no row sees.
    all_seen = edge.keys_of(0, spec.q_len - 1, spec.kv_len) == (0, spec.kv_len)
    return scores <= MOST_SCORES and all_seen and not edge.empties_a_row(spec.q_len, spec.kv_len)


def results_of_few(spec: AttentionSpec, inputs: Inputs, maximum: bool) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Returns out, lse and the rows' largest logits, or without ``maximum`` None, of a call that ``has_few_scores``.

    Returns None if a logit that is multiplied by log2(e) overflowed; a softcap excludes that.

    The arithmetic is that of ``forward_block``, with less Python around it: such a call takes as long as its operations
    and their Python, so a softcapped call of a few tokens is twice as fast. Called without autograd.
    """
    import torch

    # [batch, heads, len, dim]
    q, k, v = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    if q.dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    grouped = (spec.batch, spec.num_kv_heads, spec.group_size, spec.q_len, spec.head_dim)
    q = (q * factor_of(spec, LOG2E)).view(grouped)
    scores, hidden = products(q, k.mT), _hidden(spec)
    if spec.softcap is not None:
        scores = scores.tanh_().mul_(spec.softcap * LOG2E)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    if spec.softcap is None and not math.isfinite(top.sum()):
        return None
    weights, total, lse = softmax(scores, top, None, LOG2E)
    out = sum_over_keys(weights, v, hidden).div_(total).flatten(1, 2).transpose(1, 2)
    out = out if q.dtype == inputs.q.dtype else out.to(inputs.q.dtype)
    return out.contiguous(), lse.view(spec.lse_shape), without_unit(top, LOG2E) if maximum else None


@lru_cache(maxsize=64)
def _hidden(spec: AttentionSpec) -> Tensor | None:
    """Returns which keys the band hides, bool ``[1, 1, 1, q_len, kv_len]``; None if it hides none."""
    import torch

    edge = band(spec)
    if edge.hides_nothing(spec.q_len, spec.kv_len):
        return None
    with torch.inference_mode(False):  # the tensor serves later calls outside of inference mode
        rows, columns = (torch.arange(length, device="cpu") for length in (spec.q_len, spec.kv_len))
        return ~edge.contains(rows[:, None], columns)[None, None, None]
