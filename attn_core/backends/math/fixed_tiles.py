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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.plain import blocks
from attn_core.backends.shared.plain.attention import without_autocast
from attn_core.backends.shared.row_blocks import documents
from attn_core.call.arithmetic import LARGE_LSE, may_be_large
from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, part_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUERY_TILE = 128
"""Positions of a tile. One new token computes as many rows, because all products must have the same shape."""
KEY_TILE = 128

Visibility = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""(distance, hidden, limit), see ``Tiles.visibility``."""


class Part(NamedTuple):
    """Rows of a batch that have the same queries and keys: all rows of a dense call, one document or one row of others.

    The slices count tokens of the whole row; ``edge`` counts the part's own.
    """

    batch: slice
    rows: slice
    keys: slice
    edge: Band


def parts(spec: AttentionSpec, inputs: Inputs) -> Iterator[Part]:
    """Yields the parts of a call. Queries in no part see no key."""
    if spec.packed:
        for rows, keys in documents(spec, inputs.cu_seqlens_q.numpy(), inputs.cu_seqlens_k.numpy()):
            yield Part(slice(0, 1), rows, keys, band(spec, rows.stop - rows.start, keys.stop - keys.start))
    elif inputs.mask is None and inputs.bias is None:
        yield Part(slice(0, spec.batch), slice(0, spec.q_len), slice(0, spec.kv_len), band(spec))
    else:
        for number in range(spec.batch):
            yield from _unpadded(spec, inputs, number)


def _positions(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the positions of queries ``[rows, 1]`` and of keys ``[columns]``."""
    import torch

    return torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)


def _unpadded(spec: AttentionSpec, inputs: Inputs, number: int) -> Iterator[Part]:
    """Yields one row without the queries and keys at its ends that are in no visible pair: padding, on either side."""
    import torch

    device = inputs.q.device
    seen = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
    for table in (inputs.mask, None if inputs.bias is None else inputs.bias != -math.inf):
        if table is not None:
            seen = seen & table[min(number, table.shape[0] - 1)].any(0, keepdim=True)
    seen = seen[0].expand(spec.q_len, spec.kv_len)
    edge = band(spec)
    if not edge.hides_nothing(spec.q_len, spec.kv_len):
        seen = seen & edge.contains(*_positions(spec.q_len, spec.kv_len, device))
    queries, keys = seen.any(1).nonzero().flatten().tolist(), seen.any(0).nonzero().flatten().tolist()
    if queries:
        rows, columns = slice(queries[0], queries[-1] + 1), slice(keys[0], keys[-1] + 1)
        edge = edge._replace(offset=edge.offset + rows.start - columns.start)
        yield Part(slice(number, number + 1), rows, columns, edge)


class Tiles(NamedTuple):
    """A part in tiles.

    Attributes:
        q: ``[batch, queries, heads, head_dim]`` of the part, as they are; ``queries`` returns them in tiles.
        k, v: ``[batch * kv_heads, keys, dim]``, the keys padded with 0 to a multiple of KEY_TILE.
        slopes, sinks: ``[batch * kv_heads or 1, ...]``, broadcast to a tile's scores, or None.
        mask, bias: ``[batch, heads or 1, queries or 1, keys or 1]`` of the part, or None.
        finite: whether q, k, v and dout have no NaN or Inf, so that hidden weights of 0 hide their values.
        shift: rows of the first tile before the first query. spec: of the whole call.
    """

    spec: AttentionSpec
    part: Part
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Any
    sinks: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    finite: bool
    shift: int
    tables: dict[Any, Any]

    @property
    def query_tiles(self) -> int:
        """The number of tiles of queries."""
        return -(-(int(self.q.shape[1]) + self.shift) // QUERY_TILE)

    def queries(self, number: int) -> Tensor:
        """Returns a tile ``[batch * kv_heads, group, QUERY_TILE, head_dim]``, multiplied by scale (scale / softcap)."""
        spec, rows = self.spec, self.q
        start, first, last = self.queries_of(number)
        place = slice(first - start, last - start)
        shape = rows.shape[0], spec.num_kv_heads, spec.group_size, QUERY_TILE, rows.shape[3]
        filled = place == slice(0, QUERY_TILE)
        tile = (self.k.new_empty if filled else self.k.new_zeros)(shape)
        # [batch, queries, kv_heads, group, head_dim] -> [batch, kv_heads, group, queries, head_dim]
        split = rows[:, first:last].unflatten(2, (spec.num_kv_heads, spec.group_size))
        tile[:, :, :, place] = split.permute(0, 2, 3, 1, 4)
        tile.mul_(spec.scale if spec.softcap is None else spec.scale / spec.softcap)  # type: ignore[operator, arg-type]
        return tile.flatten(0, 1)

    def queries_of(self, number: int) -> tuple[int, int, int]:
        """Returns the query of a tile's first row, maybe below 0, and the first and last (exclusive) real ones."""
        start = number * QUERY_TILE - self.shift
        return start, max(start, 0), min(start + QUERY_TILE, self.part.rows.stop - self.part.rows.start)

    def blocks_of(self, number: int) -> range:
        """Returns the tiles of keys that some query of a tile sees, in order."""
        _, first, last = self.queries_of(number)
        start, stop = self.part.edge.keys_of(first, last - 1, self.part.keys.stop - self.part.keys.start)
        return range(start // KEY_TILE, -(-stop // KEY_TILE))

    def block(self, padded: Tensor, number: int) -> Tensor:
        """Returns a tile of ``[batch * kv_heads, keys, dim]``, a view."""
        return padded[:, number * KEY_TILE : (number + 1) * KEY_TILE]

    def for_scores(self) -> Tensor:
        """Returns memory for the scores of a tile, the same for all tiles: pages that are new to the process cost time.

        Its shape is ``[batch * kv_heads or 2, group * QUERY_TILE, KEY_TILE]``.
        """
        if "scores" not in self.tables:
            shape = max(self.k.shape[0], 2), self.spec.group_size * QUERY_TILE, KEY_TILE
            self.tables["scores"] = self.k.new_empty(shape)
        return self.tables["scores"]

    def visibility(self, number: int, block: int) -> Visibility:
        """Returns the distances of a tile's pairs if slopes need them, which pairs are hidden, and limits of scores.

        All broadcast to ``[batch * kv_heads, group, QUERY_TILE, KEY_TILE]``, or are None. A limit is -inf for a hidden
        pair, else inf. There are none if a table hides pairs, too.
        """
        distance, hidden, limit = self._band_of(number, block)
        for table in (self.mask, None if self.bias is None else self.bias != -math.inf):
            if table is not None:
                unseen = ~self.table(table, number, block)
                hidden, limit = unseen if hidden is None else hidden | unseen, None
        return distance, hidden, limit

    def _band_of(self, number: int, block: int) -> Visibility:
        """Returns ``visibility`` of the band and of the end of the keys. Tiles at the same place of both share it."""
        import torch

        keys, edge = self.part.keys.stop - self.part.keys.start, self.part.edge
        start, first = self.queries_of(number)[0], block * KEY_TILE
        filled = min(KEY_TILE, keys - first)
        # A band that contains the corners farthest from the diagonal contains the whole tile.
        corners = edge.contains(start, first + KEY_TILE - 1) and edge.contains(start + QUERY_TILE - 1, first)
        if corners and filled == KEY_TILE and self.slopes is None:
            return None, None, None
        place = start + edge.offset - first, filled
        if place not in self.tables:
            rows, columns = _positions(QUERY_TILE, KEY_TILE, self.q.device)
            rows, columns = rows + start, columns + first
            hidden = (columns >= keys).expand(1, 1, QUERY_TILE, KEY_TILE)
            if not corners:
                hidden = hidden | ~edge.contains(rows, columns)
            distance = (columns - rows - edge.offset).abs().to(self.k.dtype) if self.slopes is not None else None
            if bool(hidden.any()):
                self.tables[place] = distance, hidden, torch.where(hidden, -math.inf, math.inf).to(self.k.dtype)
            else:
                self.tables[place] = distance, None, None
        return self.tables[place]

    def table(self, table: Tensor, number: int, block: int) -> Tensor:
        """Returns a tile of a mask or bias, which broadcasts to the scores; what lies outside of the part is 0."""
        import torch

        _, heads, queries, keys = table.shape
        start, first, last = self.queries_of(number)
        begin, end = block * KEY_TILE, min((block + 1) * KEY_TILE, keys)
        here = table if queries == 1 else table[:, :, first:last]
        here = here if keys == 1 else here[..., begin:end]
        of_queries = (0, 0) if queries == 1 else (first - start, start + QUERY_TILE - last)
        pads = (0, 0 if keys == 1 else KEY_TILE - (end - begin), *of_queries)
        here = torch.nn.functional.pad(here, pads)
        grouped = (self.spec.num_kv_heads, self.spec.group_size) if heads > 1 else (1, 1)
        here = here.unflatten(1, grouped)
        here = here.expand(self.q.shape[0], self.spec.num_kv_heads, *here.shape[2:])
        return here.flatten(0, 1)

    def of_rows(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Returns ``[batch, q_len, heads, channels]`` of the whole call in tiles of queries.

        Their shape is ``[batch * kv_heads, tiles, group, QUERY_TILE, channels]``.
        """
        import torch

        rows, spec = rows[self.part.batch, self.part.rows], self.spec
        batch, count, _, channels = rows.shape
        shape = (batch, self.query_tiles * QUERY_TILE, *rows.shape[2:])
        padded = rows.new_full(shape, fill, dtype=getattr(torch, spec.lse_dtype))
        padded[:, self.shift : self.shift + count] = rows
        # [batch, tiles, QUERY_TILE, kv_heads, group, channels]
        split = padded.view(batch, self.query_tiles, QUERY_TILE, spec.num_kv_heads, spec.group_size, channels)
        return split.permute(0, 3, 1, 4, 2, 5).flatten(0, 1).contiguous()


def tiles_of(spec: AttentionSpec, inputs: Inputs, part: Part, finite: bool = True) -> Tiles:
    """Returns a part in tiles.

    Args:
        finite: whether all that the caller multiplies with these operands is finite.
    """
    import torch

    wide = getattr(torch, spec.lse_dtype)
    q, k, v = (tensor[None] if spec.packed else tensor for tensor in inputs[:3])
    queries = q[part.batch, part.rows]
    keys, values = (_padded_keys(tensor[part.batch, part.keys], wide) for tensor in (k, v))
    finite = finite and all(math.isfinite(t.sum()) or bool(t.isfinite().all()) for t in (queries, keys, values))

    def per_head(
        numbers: Tensor | None,
    ) -> Tensor | None:  # [heads] or [batch, heads] -> [batch or 1 * kv_heads, group, 1, 1]
        if numbers is None:
            return None
        rows = numbers.to(wide).reshape(-1, spec.num_kv_heads, spec.group_size, 1, 1)
        rows = rows[part.batch] if rows.shape[0] > 1 else rows
        return rows.expand(queries.shape[0], *rows.shape[1:]).flatten(0, 1)

    mask, bias = (_cut(table, part) for table in (inputs.mask, inputs.bias))
    rest: Any = mask, None if bias is None else bias.to(wide), finite, part.edge.offset % QUERY_TILE, {}
    return Tiles(spec, part, queries, keys, values, per_head(inputs.alibi_slopes), per_head(inputs.sinks), *rest)


def _cut(table: Tensor | None, part: Part) -> Tensor | None:
    """Returns a part's pairs of a mask or bias ``[batch or 1, heads or 1, q_len or 1, kv_len or 1]``."""
    of_rows = table if table is None or table.shape[0] == 1 else table[part.batch]
    return part_of(of_rows, part.rows, part.keys)


def _padded_keys(keys: Tensor, wide: torch.dtype) -> Tensor:
    batch, count, heads, dim = keys.shape
    padded = keys.new_zeros((batch, heads, -(-count // KEY_TILE) * KEY_TILE, dim), dtype=wide)
    padded[:, :, :count] = keys.transpose(1, 2)
    return padded.flatten(0, 1)


@without_gradient
def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    import torch

    with without_autocast(inputs.q):
        q = inputs.q[None] if spec.packed else inputs.q
        out = q.new_zeros((*q.shape[:3], spec.value_dim))
        lse = q.new_full((q.shape[0], spec.num_heads, q.shape[1]), -math.inf, dtype=getattr(torch, spec.lse_dtype))
        for part in parts(spec, inputs):
            tiles = tiles_of(spec, inputs, part)
            for number in range(tiles.query_tiles):
                part_out, part_lse = _attend(spec, tiles, number)
                _put(spec, part, tiles, number, out, part_out)
                _put(spec, part, tiles, number, lse.transpose(1, 2)[..., None], part_lse)
    return (out[0], lse[0]) if spec.packed else (out, lse)


def _put(spec: AttentionSpec, part: Part, tiles: Tiles, number: int, into: Tensor, rows: Tensor) -> None:
    """Writes a tile's rows ``[batch * kv_heads, group, QUERY_TILE, channels]`` to ``[batch, q_len, heads, channels]``.

    Rows of the tile that are no queries of the part are left out.
    """
    start, first, last = tiles.queries_of(number)
    grouped = rows.unflatten(0, (-1, spec.num_kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    target = into[part.batch, part.rows.start + first : part.rows.start + last]
    target.copy_(grouped[:, first - start : last - start])


def _attend(spec: AttentionSpec, tiles: Tiles, number: int) -> tuple[Tensor, Tensor]:
    """Returns a tile's out ``[batch * kv_heads, group, QUERY_TILE, value_dim]``, and its lse with one channel."""
    out, lse = _attend_once(spec, tiles, number, exact=not tiles.finite)
    if tiles.finite and not math.isfinite(out.sum()):  # a product of finite numbers overflowed
        out, lse = _attend_once(spec, tiles, number, exact=True)
    return out, lse


def _attend_once(spec: AttentionSpec, tiles: Tiles, number: int, exact: bool) -> tuple[Tensor, Tensor]:
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
            _over_keys(weights, tiles.block(tiles.v, block), tiles, hidden),
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


def _exp(differences: Tensor) -> Tensor:
    """Computes exp in place; the smallest normal results, and all below, are 0.

    torch's exp takes 13 times as long for -inf as for other numbers, and 140 times as long for results that are not
    normal (torch 2.13 with MKL). So these are not computed.
    """
    import torch

    tiny = torch.finfo(differences.dtype).tiny
    lowest = math.log(tiny) + 0.3
    return torch.threshold_(differences.clamp_(min=lowest).exp_(), 2 * tiny, 0.0)


def _scores(
    spec: AttentionSpec, tiles: Tiles, q: Tensor, number: int, block: int, exact: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the scores of a tile ``[batch * kv_heads, group, QUERY_TILE, KEY_TILE]``, what is hidden, the slope.

    The slope is that of the softcap, or None. Hidden scores are -inf; unless exact, a hidden NaN stays NaN.
    """
    import torch

    scores = _tile_products(q, tiles.block(tiles.k, block).mT, tiles.for_scores())
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

    dout: Tensor
    lse: Tensor
    term: Tensor


@without_gradient
def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``."""
    import torch

    with without_autocast(inputs.q):
        wide = getattr(torch, spec.lse_dtype)
        out, lse, dout, dlse = (t[None] if spec.packed and t is not None else t for t in (out, lse, dout, dlse))  # type: ignore[assignment]
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


def _sinks_gradient(sinks: Tensor, lse: Tensor, term: Tensor) -> Tensor:
    """Returns ``[heads]``, a sum over all rows: only this gradient depends on the other rows of a batch."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
    return (weights * term).sum((0, 1, 3)).to(sinks.dtype)


def _add_gradients(spec: AttentionSpec, tiles: Tiles, saved: Saved, number: int, dk: Tensor, dv: Tensor) -> Tensor:
    """Adds a tile of queries to dk and dv, and returns its dq ``[batch * kv_heads, group, QUERY_TILE, head_dim]``."""
    q, dout, lse = tiles.queries(number), saved.dout[:, number], saved.lse[:, number]
    dq = q.new_zeros(q.shape)
    shift, total = _exact_sums(spec, tiles, q, number, lse) if may_be_large(spec) else (lse, None)
    for block in tiles.blocks_of(number):
        weights, hidden, slope = _scores(spec, tiles, q, number, block)
        weights = _exp(weights.sub_(shift))
        weights = weights if total is None else weights.div_(total)
        dscores = _tile_products(dout, tiles.block(tiles.v, block).mT).add_(saved.term[:, number])
        if hidden is not None:
            weights.masked_fill_(hidden, 0.0)
            dscores.masked_fill_(hidden, 0.0)
        tiles.block(dv, block).add_(_over_rows(weights, dout, tiles, hidden))
        dscores.mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        if slope is not None and hidden is not None:
            dscores.masked_fill_(hidden, 0.0)
        dq.add_(_over_keys(dscores, tiles.block(tiles.k, block), tiles, hidden))
        tiles.block(dk, block).add_(_over_rows(dscores, q, tiles, hidden))
    return dq.mul_(spec.scale)  # type: ignore[arg-type]


def _exact_sums(spec: AttentionSpec, tiles: Tiles, q: Tensor, number: int, lse: Tensor) -> tuple[Tensor, Tensor | None]:
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


# The matrix products: each has the shape of a whole tile, and is never of one matrix alone: a lone head is multiplied
# twice. The library gives each of several matrices to one thread. One alone it may share among threads, or multiply by
# a loop for vectors, in another order of sums.


def _tile_products(rows: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """``[batch * kv_heads, group, QUERY_TILE, a]`` times ``[batch * kv_heads, a, b]``. out: memory to write into."""
    several = _several(rows, matrix)
    return blocks.products(several[0][:, None], several[1][:, None], out)[: len(rows), 0]


def _over_keys(weights: Tensor, values: Tensor, tiles: Tiles, hidden: Tensor | None) -> Tensor:
    """Sums values ``[batch * kv_heads, KEY_TILE, dim]`` over the keys of a tile; a NaN reaches who sees it."""
    hidden = None if tiles.finite or hidden is None else hidden[:, None]
    several = _several(weights, values)
    return blocks.sum_over_keys(several[0][:, None], several[1][:, None], hidden)[: len(weights), 0]


def _over_rows(weights: Tensor, rows: Tensor, tiles: Tiles, hidden: Tensor | None) -> Tensor:
    """Sums rows ``[batch * kv_heads, group, QUERY_TILE, dim]`` over group and queries of a tile."""
    hidden = None if tiles.finite or hidden is None else hidden[:, None]
    several = _several(weights, rows)
    return blocks.sum_over_rows(several[0][:, None], several[1][:, None], hidden)[: len(weights), 0]


def _several(*operands: Tensor) -> tuple[Tensor, ...]:
    """Returns operands of products of at least two matrices, as views."""
    return operands if len(operands[0]) > 1 else tuple(each.expand(2, *each.shape[1:]) for each in operands)
