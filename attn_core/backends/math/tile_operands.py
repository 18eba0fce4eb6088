"""The operands of ``fixed_tiles``: documents cut into tiles of one size, from the document's first key on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from attn_core.backends.shared.parts.split_documents import documents
from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

QUERY_TILE = 128
"""Positions of a tile. One new token computes as many rows, because all products must have the same shape."""
KEY_TILE = 128


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


def _positions(rows: int, columns: int, device: Any) -> tuple[Any, Any]:
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
    q: Any
    k: Any
    v: Any
    slopes: Any
    sinks: Any
    mask: Any
    bias: Any
    finite: bool
    shift: int
    tables: dict[Any, Any]

    @property
    def query_tiles(self) -> int:
        """The number of tiles of queries."""
        return -(-(int(self.q.shape[1]) + self.shift) // QUERY_TILE)

    def queries(self, number: int) -> Any:
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
        tile.mul_(spec.scale if spec.softcap is None else spec.scale / spec.softcap)  # type: ignore[operator]
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

    def block(self, padded: Any, number: int) -> Any:
        """Returns a tile of ``[batch * kv_heads, keys, dim]``, a view."""
        return padded[:, number * KEY_TILE : (number + 1) * KEY_TILE]

    def for_scores(self) -> Any:
        """Returns memory for the scores of a tile, the same for all tiles: pages that are new to the process cost time.

        Its shape is ``[batch * kv_heads or 2, group * QUERY_TILE, KEY_TILE]``.
        """
        if "scores" not in self.tables:
            shape = max(self.k.shape[0], 2), self.spec.group_size * QUERY_TILE, KEY_TILE
            self.tables["scores"] = self.k.new_empty(shape)
        return self.tables["scores"]

    def visibility(self, number: int, block: int) -> tuple[Any, Any, Any]:
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

    def _band_of(self, number: int, block: int) -> tuple[Any, Any, Any]:
        import torch

        keys, edge = self.part.keys.stop - self.part.keys.start, self.part.edge
        start, first = self.queries_of(number)[0], block * KEY_TILE
        filled = min(KEY_TILE, keys - first)
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
        return self.tables[place]  # type: ignore[no-any-return]

    def table(self, table: Any, number: int, block: int) -> Any:
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

    def of_rows(self, rows: Any, fill: float = 0.0) -> Any:
        """Returns ``[batch, q_len, heads, channels]`` of the whole call in tiles of queries.

        Their shape is ``[batch * kv_heads, tiles, group, QUERY_TILE, channels]``.
        """
        return _in_tiles(self.spec, self.part, rows, self.shift, fill)


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

    def per_head(numbers: Any) -> Any:  # [heads] or [batch, heads] -> [batch or 1 * kv_heads, group, 1, 1]
        if numbers is None:
            return None
        rows = numbers.to(wide).reshape(-1, spec.num_kv_heads, spec.group_size, 1, 1)
        rows = rows[part.batch] if rows.shape[0] > 1 else rows
        return rows.expand(queries.shape[0], *rows.shape[1:]).flatten(0, 1)

    mask, bias = (_cut(table, part) for table in (inputs.mask, inputs.bias))
    rest: Any = mask, None if bias is None else bias.to(wide), finite, part.edge.offset % QUERY_TILE, {}
    return Tiles(spec, part, queries, keys, values, per_head(inputs.alibi_slopes), per_head(inputs.sinks), *rest)


def _cut(table: Any, part: Part) -> Any:
    """Returns a part's pairs of a mask or bias ``[batch or 1, heads or 1, q_len or 1, kv_len or 1]``."""
    if table is None:
        return None
    table = table[part.batch] if table.shape[0] > 1 else table
    table = table if table.shape[2] == 1 else table[:, :, part.rows]
    return table if table.shape[3] == 1 else table[..., part.keys]


def _in_tiles(spec: AttentionSpec, part: Part, rows: Any, shift: int, fill: float) -> Any:
    import torch

    rows = rows[part.batch, part.rows]
    batch, count, _, channels = rows.shape
    tiles = -(-(count + shift) // QUERY_TILE)
    padded = rows.new_full((batch, tiles * QUERY_TILE, *rows.shape[2:]), fill, dtype=getattr(torch, spec.lse_dtype))
    padded[:, shift : shift + count] = rows
    # [batch, tiles, QUERY_TILE, kv_heads, group, channels] -> [batch * kv_heads, tiles, group, QUERY_TILE, channels]
    split = padded.view(batch, tiles, QUERY_TILE, spec.num_kv_heads, spec.group_size, channels)
    return split.permute(0, 3, 1, 4, 2, 5).flatten(0, 1).contiguous()


def _padded_keys(keys: Any, wide: Any) -> Any:
    batch, count, heads, dim = keys.shape
    padded = keys.new_zeros((batch, heads, -(-count // KEY_TILE) * KEY_TILE, dim), dtype=wide)
    padded[:, :, :count] = keys.transpose(1, 2)
    return padded.flatten(0, 1)
