"""Attention in tiles of one size: a result's bits then depend on nothing but the tokens that it belongs to.

A document (a row of a batch, or one of packed documents, or a sequence in pages) is cut into tiles of QUERY_TILE
positions and KEY_TILE keys, both counted from the document's first key. So a token is in the same row of the same tile
in a whole prompt, in a chunk of it and alone. Tokens beside the document are never in its tiles: what is missing is 0,
and hidden. Every product has the same shape, so that the library behind torch multiplies all of them with one kernel,
and sums are added in the order of the tiles. Tiles in which a query sees nothing change none of its bits: their weights
are 0, and the running maximum stays.

exp, tanh and log have the same bits at every place of a tensor; torch's exp2 and sigmoid do not, because the last
elements, which fill no vector register, take another function.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attn_core.backends.math.tile_operands import KEY_TILE, QUERY_TILE, Part, Tiles, parts, tiles_of
from attn_core.backends.math.tile_products import over_keys, over_rows, tile_products
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.plain.attention import without_autocast
from attn_core.call.large_logits import LARGE_LSE, may_be_large
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


@without_gradient
def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    with without_autocast(inputs.q):
        q = inputs.q[None] if spec.packed else inputs.q
        out = q.new_zeros((*q.shape[:3], spec.value_dim))
        lse = q.new_full((q.shape[0], spec.num_heads, q.shape[1]), -math.inf, dtype=_wide(spec))
        for part in parts(spec, inputs):
            tiles = tiles_of(spec, inputs, part)
            for number in range(tiles.query_tiles):
                part_out, part_lse = _attend(spec, tiles, number)
                _put(spec, part, tiles, number, out, part_out)
                _put(spec, part, tiles, number, lse.transpose(1, 2)[..., None], part_lse)
    return (out[0], lse[0]) if spec.packed else (out, lse)


def _wide(spec: AttentionSpec) -> Any:
    import torch

    return getattr(torch, spec.lse_dtype)


def _put(spec: AttentionSpec, part: Part, tiles: Tiles, number: int, into: Any, rows: Any) -> None:
    """Writes a tile's rows ``[batch * kv_heads, group, QUERY_TILE, channels]`` to ``[batch, q_len, heads, channels]``.

    Rows of the tile that are no queries of the part are left out.
    """
    start, first, last = tiles.queries_of(number)
    grouped = rows.unflatten(0, (-1, spec.num_kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    target = into[part.batch, part.rows.start + first : part.rows.start + last]
    target.copy_(grouped[:, first - start : last - start])


def _attend(spec: AttentionSpec, tiles: Tiles, number: int) -> tuple[Any, Any]:
    """Returns a tile's out ``[batch * kv_heads, group, QUERY_TILE, value_dim]``, and its lse with one channel."""
    out, lse = _attend_once(spec, tiles, number, exact=not tiles.finite)
    if tiles.finite and not math.isfinite(out.sum()):  # a product of finite numbers overflowed
        out, lse = _attend_once(spec, tiles, number, exact=True)
    return out, lse


def _attend_once(spec: AttentionSpec, tiles: Tiles, number: int, exact: bool) -> tuple[Any, Any]:
    """See ``_attend``. exact: NaN hides and shows exactly; without it the bits of finite results are the same."""
    import torch

    q, lowest = tiles.queries(number), torch.finfo(tiles.k.dtype).min
    top: Any = None
    for block in tiles.blocks_of(number):
        scores, hidden, _ = _scores(spec, tiles, q, number, block, exact)
        top_here = scores.amax(-1, keepdim=True)
        new_top = top_here if top is None else torch.maximum(top, top_here)
        base = new_top.clamp(min=lowest)  # a row that sees nothing here would have -inf - -inf
        weights = _exp(scores.sub_(base))
        part_total, part = (
            weights.sum(-1, keepdim=True),
            over_keys(weights, tiles.block(tiles.v, block), tiles, hidden),
        )
        if top is None:
            total, summed = part_total, part
        else:
            fade = _exp(top.sub_(base))
            total, summed = total.mul_(fade).add_(part_total), summed.mul_(fade).add_(part)
        top = new_top
    if top is None:
        empty = q.new_zeros((*q.shape[:3], spec.value_dim))
        return empty, q.new_full((*q.shape[:3], 1), -math.inf)
    empty_rows = total == 0.0
    some_empty = bool(empty_rows.any())
    if tiles.sinks is not None:
        joined = torch.maximum(top, tiles.sinks)
        base = joined.masked_fill(joined == -math.inf, 0.0)
        fade = (top - base).exp()
        total, summed, top = total * fade + (tiles.sinks - base).exp(), summed * fade, base
    if some_empty:
        total = total.masked_fill(empty_rows, 1.0)
    lse, out = top + total.log(), summed / total
    if some_empty:
        lse, out = lse.masked_fill_(empty_rows, -math.inf), out.masked_fill_(empty_rows, 0.0)
    out.add_(0.0)  # makes 0 of -0, whose sign depends on how many empty tiles were added
    if exact:
        out, lse = (each.masked_fill_(each.isnan(), math.nan) for each in (out, lse))
    return out, lse


def _exp(differences: Any) -> Any:
    """Computes exp in place; the smallest normal results, and all below, are 0.

    torch's exp takes 13 times as long for -inf as for other numbers, and 140 times as long for results that are not
    normal (torch 2.13 with MKL). So these are not computed.
    """
    import torch

    tiny = torch.finfo(differences.dtype).tiny
    lowest = math.log(tiny) + 0.3
    return torch.threshold_(differences.clamp_(min=lowest).exp_(), 2 * tiny, 0.0)


def _scores(
    spec: AttentionSpec, tiles: Tiles, q: Any, number: int, block: int, exact: bool = True
) -> tuple[Any, Any, Any]:
    """Returns the scores of a tile ``[batch * kv_heads, group, QUERY_TILE, KEY_TILE]``, what is hidden, the slope.

    The slope is that of the softcap, or None. Hidden scores are -inf; unless exact, a hidden NaN stays NaN.
    """
    import torch

    scores = tile_products(q, tiles.block(tiles.k, block).mT, tiles.for_scores())
    slope = None
    if spec.softcap is not None:
        bent = scores.tanh_()
        slope = 1.0 - bent.square() if spec.needs_backward else None
        scores = bent * spec.softcap
    distance, hidden, limit = tiles.visibility(number, block)
    if tiles.slopes is not None:
        scores.sub_(tiles.slopes * distance)
    if tiles.bias is not None:
        scores.add_(tiles.table(tiles.bias, number, block))
    if limit is not None and not exact:
        torch.minimum(scores, limit, out=scores)  # takes a sixth of the time of masked_fill_
    elif hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    return scores, hidden, slope


class Saved(NamedTuple):
    """What a backward reads besides q, k and v, as ``Tiles.of_rows`` returns it: dout, lse, and the term of each row.

    The term is dlse - sum(dout * out), the same for all keys.
    """

    dout: Any
    lse: Any
    term: Any


@without_gradient
def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    import torch

    with without_autocast(inputs.q):
        wide = _wide(spec)
        out, lse, dout, dlse = (t[None] if spec.packed and t is not None else t for t in (out, lse, dout, dlse))
        # [batch, q_len, heads, 1]; contiguous, because the strides decide the order of a sum
        term = -(dout.to(wide) * out.to(wide)).contiguous().sum(-1, keepdim=True)
        lse = lse.transpose(1, 2)[..., None]
        if dlse is not None:
            term = term + dlse.transpose(1, 2)[..., None]
        term = term.masked_fill(lse == -math.inf, 0.0)
        q, k, v = (tensor[None] if spec.packed else tensor for tensor in inputs[:3])
        dq, dk, dv = (torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
        for part in parts(spec, inputs):
            finite = bool(dout[part.batch, part.rows].isfinite().all())
            tiles = tiles_of(spec, inputs, part, finite)
            # A row that sees no key, and one that is no query, has weights exp(s - inf) = 0.
            no_weight = lse.masked_fill(lse == -math.inf, math.inf)
            saved = Saved(tiles.of_rows(dout), tiles.of_rows(no_weight, math.inf), tiles.of_rows(term))
            part_dk, part_dv = torch.zeros_like(tiles.k), torch.zeros_like(tiles.v)
            for number in range(tiles.query_tiles):
                part_dq = _add_gradients(spec, tiles, saved, number, part_dk, part_dv)
                _put(spec, part, tiles, number, dq, part_dq)
            for whole, tiled in ((dk, part_dk.mul_(spec.softcap or 1.0)), (dv, part_dv)):
                # [batch * kv_heads, keys, dim] -> [batch, keys, kv_heads, dim]
                keys = tiled.unflatten(0, (-1, spec.num_kv_heads)).transpose(1, 2)
                whole[part.batch, part.keys] = keys[:, : part.keys.stop - part.keys.start].to(whole.dtype)
    dsinks = _sinks_gradient(inputs.sinks, lse, term) if spec.sinks else None
    return Gradients(*((dq[0], dk[0], dv[0]) if spec.packed else (dq, dk, dv)), dsinks=dsinks)


def _sinks_gradient(sinks: Any, lse: Any, term: Any) -> Any:
    """Returns ``[heads]``, a sum over all rows: only this gradient depends on the other rows of a batch."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
    return (weights * term).sum((0, 1, 3)).to(sinks.dtype)


def _add_gradients(spec: AttentionSpec, tiles: Tiles, saved: Saved, number: int, dk: Any, dv: Any) -> Any:
    """Adds a tile of queries to dk and dv, and returns its dq ``[batch * kv_heads, group, QUERY_TILE, head_dim]``."""
    q, dout, lse = tiles.queries(number), saved.dout[:, number], saved.lse[:, number]
    dq = q.new_zeros(q.shape)
    shift, total = _exact_sums(spec, tiles, q, number, lse) if may_be_large(spec) else (lse, None)
    for block in tiles.blocks_of(number):
        weights, hidden, slope = _scores(spec, tiles, q, number, block)
        weights = _exp(weights.sub_(shift))
        weights = weights if total is None else weights.div_(total)
        dscores = tile_products(dout, tiles.block(tiles.v, block).mT).add_(saved.term[:, number])
        if hidden is not None:
            weights.masked_fill_(hidden, 0.0)
            dscores.masked_fill_(hidden, 0.0)
        tiles.block(dv, block).add_(over_rows(weights, dout, tiles, hidden))
        dscores.mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        if slope is not None and hidden is not None:
            dscores.masked_fill_(hidden, 0.0)
        dq.add_(over_keys(dscores, tiles.block(tiles.k, block), tiles, hidden))
        tiles.block(dk, block).add_(over_rows(dscores, q, tiles, hidden))
    return dq.mul_(spec.scale)


def _exact_sums(spec: AttentionSpec, tiles: Tiles, q: Any, number: int, lse: Any) -> tuple[Any, Any]:
    """Returns what a tile's weights are: exp(score - first) / second. The second is None for 1.

    They are the lse and 1, but in rows whose lse is so large that it has lost the logarithm of the row's sum.
    """
    import torch

    large = (lse.abs() >= LARGE_LSE) & lse.isfinite()
    if not large.any():
        return lse, None
    top: Any = torch.full_like(lse, -math.inf) if tiles.sinks is None else tiles.sinks.expand(lse.shape)
    total = torch.zeros_like(lse) if tiles.sinks is None else torch.ones_like(lse)
    for block in tiles.blocks_of(number):
        scores, _, _ = _scores(spec, tiles, q, number, block)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.clamp(min=torch.finfo(lse.dtype).min)
        total = total * _exp(top - base) + _exp(scores.sub_(base)).sum(-1, keepdim=True)
        top = new_top
    return torch.where(large, top, lse), torch.where(large, total, 1.0)


__all__ = ["KEY_TILE", "QUERY_TILE", "backward", "forward"]
