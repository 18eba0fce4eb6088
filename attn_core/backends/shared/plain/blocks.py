"""One block of attention in torch operations, forward and backward: the arithmetic behind the math backend.

Scores and weights are ``[batch, kv_heads, group, rows, keys]``: each key/value head is read once for its whole group.
In products, a NaN or Inf reaches only the results of rows and keys that see it. A backward computes the weights again
from the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attn_core.backends.shared.row_blocks import RowBlock
from attn_core.call.arithmetic import LARGE_LSE, dropout_keeps, may_be_large
from attn_core.call.functions import aux_of, has_functions, lookup_slopes, slope
from attn_core.call.key_ranges import contains
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, part_of
from attn_core.expressions.on_torch import add_at_lookup, evaluate_torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Rows = TypeVar("Rows", bound=tuple["Tensor | None", ...])

FEW_ROWS = 2**10
"""A call of so few query rows does not read its inputs to learn whether they are finite; see BlockOperands.bounded."""
NARROW = 512
"""The most keys of a row in a narrow window, beside its own."""
WINDOW_BLOCK = 64
"""The most query rows on a CPU with a narrow window: fewer keys of a block are hidden than with more rows."""
LOG2E = math.log2(math.e)
LARGEST = 1e30
"""Products of norms below this cannot overflow in float32."""


class ScoreMemory:
    """Memory that all blocks of a call use in turn. The first write to new memory takes as long as a matrix product."""

    def __init__(self, like: Tensor, size: int) -> None:
        self._like, self._size = like, size
        self._tensors: dict[str, Any] = {}

    def part(self, name: str, *shape: int) -> Tensor:
        """Returns an uninitialised tensor, which shares its memory with earlier ones of the name."""
        wanted = math.prod(shape)
        memory = self._tensors.get(name)
        if memory is None or memory.shape[0] < wanted:
            memory = self._tensors[name] = self._like.new_empty(max(wanted, self._size))
        return memory[:wanted].view(shape)


class BlockOperands(NamedTuple):
    """The call's tensors in the layouts that the blocks read.

    q: the caller's, ``[batch, q_len, heads, head_dim]``. k, v: ``[batch, kv_heads, kv_len, dim]``, accumulation dtype;
        contiguous but with a narrow window.
    mask, bias: ``[batch, kv_heads, group, q_len, kv_len]``; any axis may be 1. slopes, sinks: the last two axes are 1.
    key_ranges: int32 ``[batch or 1, kv_heads or 1, 1, kv_len, ranges, 2]``, the starts of a range contiguous.
    aux: the arrays of the call's functions.
    bounded: whether no hidden score, weight or gradient can be NaN, so that hidden scores may be set by an addition.
    scratch: where the blocks write their scores; None for new tensors.
    unit: what scores are multiplied by: log2(e), because exp2 takes half the time of exp on a CPU, or 1 where a score
        may be so large that its multiple overflows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Any
    slopes: Tensor | None
    sinks: Any
    rng: Tensor | None
    bounded: bool
    key_ranges: Any = None
    aux: tuple[Tensor, ...] = ()
    scratch: ScoreMemory | None = None
    unit: float = LOG2E


class SavedTensors(NamedTuple):
    """The forward's results and the incoming gradients, with a batch axis."""

    out: Tensor
    lse: Any
    dout: Tensor
    dlse: Any


class Sums(NamedTuple):
    """Running sums of the gradients, in the accumulation dtype and the layouts of BlockOperands.

    dq has q's dtype: each of its rows belongs to one block and is written once.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None
    daux: dict[int, Tensor] | None = None
    """By the numbers of the aux arrays whose gradient is needed."""


def operands_of(spec: AttentionSpec, inputs: Inputs, saved: SavedTensors | None = None) -> BlockOperands:
    """Brings the call's tensors into the layouts and dtypes of BlockOperands."""
    import torch

    wide = getattr(torch, spec.lse_dtype)
    grouped = (spec.num_kv_heads, spec.group_size)
    q, k, v = (tensor[None] if spec.packed else tensor for tensor in (inputs.q, inputs.k, inputs.v))

    def by_group(table: Tensor | None) -> Tensor | None:
        # [batch, heads or 1, q, kv] -> [batch, kv_heads or 1, group or 1, q, kv]
        return None if table is None else table.unflatten(1, grouped if table.shape[1] > 1 else (1, 1))

    def per_head(values: Tensor | None) -> Tensor | None:
        # [heads] or [batch, heads] -> [batch or 1, kv_heads, group, 1, 1]
        return None if values is None else values.to(wide).reshape(-1, *grouped, 1, 1)

    k, v = (tensor.transpose(1, 2).to(wide) for tensor in (k, v))
    if spec.batch > 1 or not has_narrow_window(spec) or not k.is_cpu or k.stride(3) != 1 or v.stride(3) != 1:
        k, v = k.contiguous(), v.contiguous()  # else too few rows read a key for a copy to be worth its time
    return BlockOperands(
        q=q,
        k=k,
        v=v,
        mask=by_group(inputs.mask),
        bias=by_group(inputs.bias),
        slopes=per_head(inputs.alibi_slopes),
        sinks=per_head(inputs.sinks),
        rng=inputs.rng,
        bounded=is_bounded(spec, inputs, saved),
        key_ranges=_keys_last(inputs.key_ranges),
        aux=aux_of(inputs),
        unit=LOG2E if k.is_cpu or not may_be_large(spec) else 1.0,
    )


def _keys_last(key_ranges: Tensor | None) -> Tensor | None:
    """Returns key ranges with the axis of the group. In memory the keys come last, because blocks compare rows."""
    if key_ranges is None:
        return None
    return key_ranges.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)[:, :, None]


def has_narrow_window(spec: AttentionSpec) -> bool:
    """Returns whether a row sees so few keys that the work beside the matrix products counts."""
    left, right = spec.window
    right = 0 if spec.causal else right
    return left is not None and right is not None and left + right <= NARROW


def is_bounded(spec: AttentionSpec, inputs: Inputs, saved: SavedTensors | None = None) -> bool:
    """Returns ``BlockOperands.bounded``: True if the norms of the tensors show it, which a large call on a CPU reads.

    Args:
        saved: in a backward, whose gradients count, too.
    """
    import torch

    tables = any((spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.key_ranges_shape, has_functions(spec)))
    if not inputs.q.is_cpu or spec.batch * spec.q_len * spec.num_heads <= FEW_ROWS or tables:
        return False
    norm = torch.linalg.vector_norm
    q, k, v = (float(norm(tensor)) for tensor in inputs[:3])
    factor = max(abs(spec.scale or 1.0), 1.0) / min(spec.softcap or 1.0, 1.0)
    bounded = q * k * factor < LARGEST and v < LARGEST  # False for NaN
    if saved is None or not bounded:
        return bounded
    gradients = [float(norm(tensor)) for tensor in (saved.dout, saved.out, saved.dlse) if tensor is not None]
    return v * max(gradients) < LARGEST and math.isfinite(sum(gradients)) and not bool(saved.lse.isnan().any())


def empty_sums(spec: AttentionSpec, operands: BlockOperands) -> Sums:
    """Returns sums of zeros for the gradients that the call needs."""
    import torch

    dbias = operands.k.new_zeros(operands.bias.shape) if spec.bias_gradient else None
    return Sums(
        dq=torch.zeros_like(operands.q, memory_format=torch.contiguous_format),
        dk=torch.zeros_like(operands.k),
        dv=torch.zeros_like(operands.v),
        dbias=dbias,
        dsinks=torch.zeros_like(operands.sinks) if spec.sinks else None,
        daux={number: operands.k.new_zeros(spec.aux[number].shape) for number in spec.aux_gradients} or None,
    )


def heads_first(spec: AttentionSpec, tensor: Tensor, block: RowBlock, dtype: torch.dtype) -> Tensor:
    """The block's rows of ``[batch, q_len, heads, dim]`` as ``[batch, kv_heads, group, rows, dim]`` in the dtype."""
    rows = tensor if block.rows == slice(0, tensor.shape[1]) else tensor[:, block.rows]
    shape = (*rows.shape[:2], spec.num_kv_heads, spec.group_size, rows.shape[3])
    return rows.reshape(shape).permute(0, 2, 3, 1, 4).to(dtype).contiguous()


def rows_first(tensor: Tensor) -> Tensor:
    """``[batch, kv_heads, group, rows, dim]`` -> ``[batch, rows, heads, dim]``."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)


def products(rows: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """``[batch, kv_heads, group, rows, a]`` times ``[batch, kv_heads, a, b]``; bmm has the least work around it.

    Args:
        out: ``[batch * kv_heads, group * rows, b]`` to write into, or None.
    """
    import torch

    batch, heads, group, height, width = rows.shape
    product = torch.bmm(rows.reshape(batch * heads, group * height, width), matrix.flatten(0, 1), out=out)
    return product.view(batch, heads, group, height, matrix.shape[3])


def sum_over_keys(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Sums over keys ``[batch, kv_heads, keys, dim]`` -> ``[batch, kv_heads, group, rows, dim]``.

    A value that is not finite makes exactly the rows that see it NaN.
    """
    if _harmless(values, hidden):
        return products(weights, values)
    seen, broken = _visibility(weights, hidden), ~values.isfinite()  # type: ignore[arg-type]  # None is harmless
    reached = seen @ broken[:, :, None].to(seen.dtype) > 0
    return sum_over_keys(weights, values.masked_fill(broken, 0.0), None).masked_fill(reached, float("nan"))


def sum_over_rows(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Sums over group and rows ``[batch, kv_heads, group, rows, dim]`` -> ``[batch, kv_heads, keys, dim]``.

    A value that is not finite makes exactly the keys that are seen from its row NaN.
    """
    if _harmless(values, hidden):
        return weights.flatten(2, 3).mT @ values.flatten(2, 3)
    seen, broken = _visibility(weights, hidden), ~values.isfinite()  # type: ignore[arg-type]  # None is harmless
    reached = (seen.mT @ broken.to(seen.dtype) > 0).any(dim=2)
    return sum_over_rows(weights, values.masked_fill(broken, 0.0), None).masked_fill(reached, float("nan"))


def _harmless(values: Tensor, hidden: Tensor | None) -> bool:
    """Returns whether a plain matrix product is right. It is not if a hidden value is NaN or infinite: 0 * NaN is NaN.

    On CUDA, reading the values would synchronise, so the answer is False whenever something is hidden.
    """
    if hidden is None or values.device.type != "cpu":
        return hidden is None
    return math.isfinite(values.sum()) or bool(values.isfinite().all())  # a finite sum has no NaN or Inf in it


def _visibility(weights: Tensor, hidden: Tensor) -> Tensor:
    """Returns 1 where visible, 0 where hidden: ``[batch or 1, kv_heads or 1, group or 1, rows, keys]``."""
    return (~hidden).to(weights.dtype).expand(*hidden.shape[:3], *weights.shape[3:])


def scores_and_top(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, keep: bool = False
) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Returns ``scores_of``, the largest score of each row, which rows see no key, and which overflowed; None for none.

    A row overflows if all of its scores are too large to be multiplied by the unit. The caller computes these rows
    again with the unit 1. Off the CPU, to look at the scores would wait for the device; see ``operands_of``.
    """
    import torch

    scores, slopes, hidden = scores_of(spec, operands, block, hidden_in(spec, operands, block), keep)
    top, overflowed = scores.amax(dim=-1, keepdim=True), None
    if top.is_cpu and type(top) is torch.Tensor:  # a fake tensor has no values to look at
        if (hidden is None and operands.bounded) or math.isfinite(top.sum()):
            return scores, slopes, hidden, top, None, None
        if operands.unit != 1.0:
            overflowed = top.isinf() if hidden is None else top.isinf() & ~hidden.all(dim=-1, keepdim=True)
            overflowed = overflowed if overflowed.any() else None
    return scores, slopes, hidden, top, None if hidden is None else top == -torch.inf, overflowed


def scores_of(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, hidden: Tensor | None, keep: bool = False
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Returns the scores, -inf where hidden, what their gradient is multiplied by in turn, and what is hidden.

    The factors are the slopes of score function and softcap; without ``keep`` there are none. A score function may hide
    more pairs. The scores are multiplied by ``operands.unit``. The caller may overwrite them.
    """
    import torch

    unit = operands.unit
    cap, slopes, factor = spec.softcap, [], unit if spec.score_mod is None else 1.0
    q = heads_first(spec, operands.q, block, operands.k.dtype) * factor_of(spec, unit)
    scores = scratch_products(operands, "scores", q, keys_in(operands.k, block).mT)
    if cap is not None:
        tanh = scores.tanh_()
        scores = tanh * (cap * factor) if keep else tanh.mul_(cap * factor)
        slopes = [1.0 - tanh.square()] if keep else []
    if spec.score_mod is not None:
        places = places_of(spec, operands, block)
        capped, scores = scores, evaluate_torch(spec.score_mod, places, scores, operands.aux)
        scores = scores.expand(capped.shape).clone() if scores is capped or scores.shape != capped.shape else scores
        if keep:
            slopes.insert(0, evaluate_torch(slope(spec.score_mod), places, capped, operands.aux))
        excluded = scores == float("-inf")
        hidden = excluded if hidden is None else excluded | hidden
        scores = scores if unit == 1.0 else scores.mul_(unit)
    # Sums that overflow are looked at only where they may: after an overflow on a CPU, or of two large summands.
    may_overflow = unit == 1.0 and (scores.is_cpu or (operands.bias is not None and spec.score_mod is not None))
    infinite = scores.isinf() if may_overflow else None
    if operands.bias is not None:
        scores = scores.add_(part_of(operands.bias, block.rows, block.keys).to(scores.dtype), alpha=unit)
    if operands.slopes is not None:
        scores = scores.sub_(operands.slopes * block.distance.abs(), alpha=unit)
    if infinite is not None:
        largest = torch.finfo(scores.dtype).max
        scores = torch.where(infinite, scores, scores.clamp(-largest, largest))
    if hidden is None:
        return scores, slopes, None
    others = operands.mask, operands.bias, operands.key_ranges, spec.mask_mod, spec.score_mod
    if block.shades is None or any(table is not None for table in others):
        scores = scores.masked_fill_(hidden, float("-inf"))
    elif operands.bounded:  # to add takes a tenth of the time
        for keys, shade in block.shades:
            scores[..., keys].add_(shade)
    else:
        for keys, _ in block.shades:
            scores[..., keys].masked_fill_(hidden[..., keys], float("-inf"))
    return scores, slopes, hidden


def capped_scores(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Tensor:
    """Returns what the score function takes: scores with scale and softcap, in memory of their own."""
    rows = heads_first(spec, operands.q, block, operands.k.dtype)
    scores = products(rows * factor_of(spec, 1.0), keys_in(operands.k, block).mT)
    return scores if spec.softcap is None else scores.tanh_().mul_(spec.softcap)


def scratch_products(operands: BlockOperands, name: str, rows: Tensor, matrix: Tensor) -> Tensor:
    """``products`` in the memory of that name."""
    if operands.scratch is None:
        return products(rows, matrix)
    batch, heads, group, height, _ = rows.shape
    return products(rows, matrix, operands.scratch.part(name, batch * heads, group * height, matrix.shape[3]))


def factor_of(spec: AttentionSpec, unit: float) -> float:
    """Returns the factor of the queries: with a softcap that of the tanh's argument, else the scale times the unit.

    A score function takes scores without the unit.
    """
    if spec.softcap is not None:
        return spec.scale / spec.softcap  # type: ignore[operator]
    return spec.scale * (unit if spec.score_mod is None else 1.0)  # type: ignore[operator]


def keys_in(table: Tensor, block: RowBlock) -> Tensor:
    """Returns a block's keys or values of ``[batch, kv_heads, kv_len, dim]``."""
    return table if block.keys == slice(0, table.shape[2]) else table[:, :, block.keys]


def hidden_in(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Tensor | None:
    """Returns which scores anything but a score function hides: bool, 5-D, broadcastable, or None."""
    hidden = None if block.hidden is None else block.hidden[None, None, None]
    if operands.mask is not None:
        masked = ~part_of(operands.mask, block.rows, block.keys)
        hidden = masked if hidden is None else masked | hidden
    if operands.key_ranges is not None:
        outside = _outside_ranges(operands, block)
        hidden = outside if hidden is None else outside | hidden
    if spec.mask_mod is not None:
        wide = operands.k.dtype
        shown = evaluate_torch(spec.mask_mod, places_of(spec, operands, block), None, operands.aux, wide)
        masked = ~shown.expand(*(1,) * (5 - shown.dim()), *shown.shape)
        hidden = masked if hidden is None else masked | hidden
    if operands.bias is not None:
        excluded = part_of(operands.bias, block.rows, block.keys) == float("-inf")
        hidden = excluded if hidden is None else excluded | hidden
    return hidden


def places_of(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> tuple[Tensor, ...]:
    """Returns b, h, q and k of the block's scores: int32, each with five axes, of which it uses its own."""
    import torch

    def count(start: int, stop: int, *shape: int) -> Tensor:
        return torch.arange(start, stop, dtype=torch.int32, device=operands.k.device).view(shape)

    return (
        count(0, spec.batch, -1, 1, 1, 1, 1),
        count(0, spec.num_heads, 1, spec.num_kv_heads, spec.group_size, 1, 1),
        count(block.rows.start, block.rows.stop, 1, 1, 1, -1, 1),
        count(block.keys.start, block.keys.stop, 1, 1, 1, 1, -1),
    )


def _outside_ranges(operands: BlockOperands, block: RowBlock) -> Tensor:
    """Returns which scores of the block no range shows: bool ``[batch or 1, kv_heads or 1, 1, rows, keys]``."""
    import torch

    rows = torch.arange(block.rows.start, block.rows.stop, dtype=torch.int32, device=operands.k.device)
    return contains(operands.key_ranges[:, :, :, block.keys], rows).logical_not_()


LN2 = math.log(2.0)


def softmax(scores: Tensor, top: Tensor, empty: Tensor | None, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights that are not divided by their sums, the sums, and the log-sum-exp; overwrites the scores.

    Args:
        scores: multiplied by the unit.
        top: the largest score of each row.
        empty: which rows see no key, or None. Their weights are 0, and their log-sum-exp is -inf.
        unit: see BlockOperands.
    """
    weights = _exponentials(scores.sub_(top if empty is None else top.masked_fill(empty, 0.0)), unit)
    total = weights.sum(dim=-1, keepdim=True)
    return weights, total, total.log().add_(top) if unit == 1.0 else total.log2().add_(top).mul_(LN2)


def without_unit(scores: Tensor, unit: float) -> Tensor:
    """Returns scores that are not multiplied by the unit."""
    return scores if unit == 1.0 else scores * LN2


def _exponentials(scores: Tensor, unit: float) -> Tensor:
    return scores.exp_() if unit == 1.0 else scores.exp2_()


class SavedRows(NamedTuple):
    """What a backward knows of a block's rows: ``[batch, kv_heads, group, rows, 1]``.

    Attributes:
        lse: the log-sum-exps, 0 in rows that see no key.
        empty: which rows see no key; None if there are none.
        large: the rows with an lse beyond LARGE_LSE; None if there are none.
        overflowed: the rows whose scores are too large to be multiplied by log2(e); None if there are none.
    """

    lse: Tensor
    empty: Tensor | None
    large: Tensor | None
    overflowed: Tensor | None


def saved_rows(spec: AttentionSpec, lse: Tensor) -> SavedRows:
    """Returns what log-sum-exps say of their rows. Off the CPU, to look at the values would wait for the device."""
    import torch

    size = torch.linalg.vector_norm
    on_host = lse.is_cpu and type(lse) is torch.Tensor  # a fake tensor has no values to look at
    if on_host and size(lse, math.inf).item() < LARGE_LSE:  # False for NaN, and if a row sees no key
        return SavedRows(lse, None, None, None)
    empty = lse == -torch.inf
    lse, large, overflowed = lse.masked_fill(empty, 0.0), None, None
    if (on_host and not size(lse, math.inf).item() < LARGE_LSE) or (not on_host and may_be_large(spec)):
        # The rest of a row is in other parts, so its sum is not known here.
        large = None if spec.partial else (lse.abs() >= LARGE_LSE) & lse.isfinite()
    if on_host and large is not None:
        overflowed = large & (lse.abs() > torch.finfo(lse.dtype).max / LOG2E)
        overflowed = overflowed if overflowed.any() else None
    return SavedRows(lse, empty, large, overflowed)


def weights_again(operands: BlockOperands, scores: Tensor, rows: SavedRows) -> tuple[Tensor, Tensor | None]:
    """Returns the weights, and those of the sinks or None; overwrites the scores.

    They are exp(score - lse). Where the lse is so large that it has lost the logarithm of the row's sum, they are
    divided by their own sum, as in a forward.
    """
    import torch

    unit, sinks, large = operands.unit, operands.sinks, rows.large
    shift = rows.lse if unit == 1.0 else rows.lse * unit
    of_sinks: Any = None if sinks is None else torch.exp(sinks - rows.lse)
    if large is not None:
        top = scores.amax(dim=-1, keepdim=True)
        top = top if sinks is None else torch.maximum(top, sinks * unit)
        shift = torch.where(large, top, shift)
    weights = _exponentials(scores.sub_(shift), unit)
    if large is not None:
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            alone = _exponentials(sinks * unit - top, unit)
            total = total + alone
            of_sinks = torch.where(large, alone / total, of_sinks)
        weights = weights.div_(torch.where(large, total, 1.0))
    if of_sinks is not None and rows.empty is not None:
        of_sinks = of_sinks.masked_fill(rows.empty, 0.0)
    return weights, of_sinks


def forward_block(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, maximum: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out ``[batch, kv_heads, group, rows, value_dim]``, lse without value_dim, and such row maxima or None."""
    import torch

    scores, _, hidden, top, empty, overflowed = scores_and_top(spec, operands, block)
    weights, total, lse = softmax(scores, top, empty, operands.unit)
    if spec.dropout:
        weights = weights * dropout_factors(spec, operands, block)
    out = sum_over_keys(weights, keys_in(operands.v, block), None if operands.bounded else hidden)
    out = out.div_(total if empty is None else total.masked_fill_(empty, 1.0))
    if operands.sinks is not None:
        share = torch.sigmoid(lse - operands.sinks)  # 0 for an empty row, but NaN if its sink is -inf, too
        out = out.mul_(share if empty is None else share.masked_fill_(empty, 0.0))
        lse = torch.logaddexp(lse, operands.sinks)
        lse = lse if empty is None else lse.masked_fill_(empty, -torch.inf)
    results = out, lse.squeeze(-1), without_unit(top, operands.unit).squeeze(-1) if maximum else None
    if overflowed is None:
        return results
    return in_rows(overflowed, forward_block(spec, operands._replace(unit=1.0), block, maximum), results)


def in_rows(rows: Tensor, ones: Rows, others: Rows) -> Rows:
    """Returns ``ones`` in some rows ``[batch, kv_heads, group, rows, 1]`` and ``others`` elsewhere; None stays None."""
    import torch

    fitting = {rows.dim(): rows, rows.dim() - 1: rows.squeeze(-1)}
    pairs = zip(ones, others, strict=True)
    return tuple(None if one is None else torch.where(fitting[one.dim()], one, other) for one, other in pairs)  # type: ignore[return-value, arg-type]


def backward_block(
    spec: AttentionSpec, operands: BlockOperands, saved: SavedTensors, sums: Sums, block: RowBlock
) -> None:
    """Adds one block's share to the sums: ``ds = p * (dp - delta + dlse)`` with ``delta = sum(dout * out)``."""
    grouped = (spec.num_kv_heads, spec.group_size)
    rows = saved_rows(spec, saved.lse[:, :, block.rows].unflatten(1, grouped)[..., None])
    hidden = hidden_in(spec, operands, block)
    scores, slopes, hidden = scores_of(spec, operands, block, hidden, keep=True)
    hidden = None if operands.bounded else hidden  # hidden weights are 0, whatever they are multiplied by
    out, dout = (heads_first(spec, tensor, block, scores.dtype) for tensor in (saved.out, saved.dout))
    row_term = -(dout * out).sum(dim=-1, keepdim=True)  # dlse - delta, the same for all keys of a row
    if saved.dlse is not None:
        row_term = row_term + saved.dlse[:, :, block.rows].to(row_term.dtype).unflatten(1, grouped)[..., None]
    row_term = row_term if rows.empty is None else row_term.masked_fill(rows.empty, 0.0)

    weights, of_sinks = weights_of_backward(spec, operands, block, scores, rows)
    weights = zero_hidden(weights, hidden)
    dweights = scratch_products(operands, "dweights", dout, keys_in(operands.v, block).mT)
    dropped = weights
    if spec.dropout:
        factors = dropout_factors(spec, operands, block)
        dropped, dweights = weights * factors, dweights * factors
    sums.dv[:, :, block.keys] += sum_over_rows(dropped, dout, hidden)
    dscores = zero_hidden(dweights.add_(row_term).mul_(weights), hidden)
    if sums.dbias is not None:
        # The bias is added after softcap and score function, so its gradient has no factor of theirs.
        part = part_of(sums.dbias, block.rows, block.keys)
        part += dscores.sum_to_size(part.shape)
    if sums.dsinks is not None:
        sums.dsinks.add_((row_term * of_sinks).sum(dim=(0, 3), keepdim=True))  # type: ignore[operator]
    if sums.daux is not None:
        _add_to_aux(spec, operands, block, dscores, hidden, sums.daux)
    for each in slopes:
        dscores = zero_hidden(dscores * each, hidden)  # a hidden score may be NaN
    dscores = dscores * spec.scale  # type: ignore[operator]  # every spec has set its scale
    sums.dq[:, block.rows] = rows_first(sum_over_keys(dscores, keys_in(operands.k, block), hidden))
    q = heads_first(spec, operands.q, block, scores.dtype)
    sums.dk[:, :, block.keys] += sum_over_rows(dscores, q, hidden)


def weights_of_backward(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, scores: Tensor, rows: SavedRows
) -> tuple[Tensor, Tensor | None]:
    """Returns ``weights_again``, with the unit 1 in rows whose scores overflowed."""
    results = weights_again(operands, scores, rows)
    if rows.overflowed is None:
        return results
    natural = operands._replace(unit=1.0, scratch=None)
    exact, _, _ = scores_of(spec, natural, block, hidden_in(spec, operands, block))
    return in_rows(rows.overflowed, weights_again(natural, exact, rows), results)


def _add_to_aux(
    spec: AttentionSpec,
    operands: BlockOperands,
    block: RowBlock,
    dlogits: Tensor,
    hidden: Tensor | None,
    sums: dict[int, Tensor],
) -> None:
    """Adds one block's share to the gradients of the score function's arrays; hidden pairs, of any slope, add 0."""
    places, scores = places_of(spec, operands, block), capped_scores(spec, operands, block)
    for node, tree in lookup_slopes(spec.score_mod, spec.aux_gradients):
        summand = zero_hidden(dlogits * evaluate_torch(tree, places, scores, operands.aux), hidden)
        add_at_lookup(sums[int(node.value or 0)], node, summand, places, scores, operands.aux)


def zero_hidden(values: Tensor, hidden: Tensor | None) -> Tensor:
    """Returns the values with 0 where they are hidden; overwrites them."""
    return values if hidden is None else values.masked_fill_(hidden, 0.0)


def dropout_factors(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Tensor:
    """Returns 0 where a weight is dropped, ``1 / (1 - dropout)`` elsewhere."""
    import torch

    device = operands.k.device
    batch = torch.arange(spec.batch, device=device)[:, None, None, None, None]
    head = torch.arange(spec.num_heads, device=device).view(spec.num_kv_heads, spec.group_size, 1, 1)
    row = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None]
    column = torch.arange(block.keys.start, block.keys.stop, device=device)
    kept = dropout_keeps(operands.rng, (batch, head, row, column), spec.dropout)
    return kept.to(operands.k.dtype) / (1.0 - spec.dropout)
