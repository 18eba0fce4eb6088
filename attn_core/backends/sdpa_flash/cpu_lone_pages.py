"""One query of each sequence in pages with ``invariant``, such as in decoding; ``cpu_lone.py`` says with which calls.

Sequences that see equally many keys before the tile of their query are rows of one call, or of several: the keys of a
call are gathered first, and few enough of them stay in the processor's cache until the kernel reads them. No row is
padded to the length of another, but for the keys of its own tile.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from attn_core.backends.sdpa_flash import cpu_lone
from attn_core.backends.sdpa_flash.cpu_invariant import computed_in
from attn_core.backends.sdpa_flash.cpu_rows import TILE
from attn_core.backends.sdpa_flash.cpu_same_bits import width_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs

GATHERED = 2**21
"""Bytes of the keys, and of the values, that are gathered for one call, but always those of one sequence."""


class Pool(NamedTuple):
    """k and v ``[num_pages, page_size, kv_heads, dim]``, and the block table of the sequences in the order of the rows.

    dtype: of the computation. lengths: of the sequences. before: how many keys each sees in a call of their own,
    in ascending order.
    """

    k: Any
    v: Any
    table: Any
    dtype: Any
    lengths: list[int]
    before: list[int]

    def gathered(self, pages: Any, keys: int) -> list[Any]:
        """Returns k and v ``[sequences, keys, kv_heads, dim]`` of pages ``[sequences, pages]``."""
        shape, flat = (len(pages), -1, *self.k.shape[2:]), pages.reshape(-1)
        both = [pool.index_select(0, flat).view(shape)[:, :keys] for pool in (self.k, self.v)]
        return both if self.k.dtype == self.dtype else [each.to(self.dtype).contiguous() for each in both]


def forward(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Any, Any] | None:
    """Returns (out, lse) of a call whose tables are checked; None if it is not one for these calls of the kernel."""
    offsets = inputs.cu_seqlens_q
    if offsets is not None and not (len(offsets) == spec.q_len + 1 and bool((offsets.diff() == 1).all())):
        return None
    q, k, v, table, lengths = (each.detach() for each in inputs[:5])
    return decoder(spec)(q, k, v, table, lengths, inputs.sinks)


@lru_cache(maxsize=4096)
def decoder(spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None]:
    """Returns a function of q, k, v, the block table, the lengths and the sinks; see ``contract.paged_shortcut``."""
    paged, promise = spec.paged, spec.invariant or ""
    plain = paged is not None and paged.dtype is None and not (paged.starts or paged.recent or spec.empty)

    def run(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any) -> tuple[Any, Any] | None:
        import torch

        if width_of(spec) != spec.head_dim:
            return None
        q, size, ends = q.contiguous().to(getattr(torch, computed_in(spec))), k.shape[1], lengths.tolist()
        rows = cpu_lone.rows_for(promise, q, k)
        if promise == "prefix":
            size = math.gcd(size, TILE)
        if rows is None or not any(ends) or not (size == k.shape[1] or (k.is_contiguous() and v.is_contiguous())):
            return None
        before = [cpu_lone.tile_before(end) if promise == "prefix" else end for end in ends]
        order, in_order = None, q
        if not all(ends) or any(one > other for one, other in pairwise(before)):
            order = sorted((number for number, end in enumerate(ends) if end), key=before.__getitem__)
            in_order, table = q[order], table[order]
            ends, before = ([each[number] for number in order] for each in (ends, before))
        pool = _in_pages_of(size, Pool(k, v, table, q.dtype, ends, before))
        out, lse = _all_keys(cpu_lone.in_rows(in_order, k.shape[2], rows), pool, spec.scale)
        out, lse = cpu_lone.of_heads(out, lse, in_order, in_order.shape)
        if order is not None:
            out, lse = (_placed(each, order, len(q), rest) for each, rest in ((out, 0.0), (lse, -math.inf)))
        return out.to(k.dtype), lse.t()

    return run if plain and cpu_lone.sees_every_key(spec) else lambda *_: None


def _placed(results: Any, order: list[int], number: int, rest: float) -> Any:
    """Returns the results of so many sequences from those of some, whose numbers are ``order``."""
    placed = results.new_full((number, *results.shape[1:]), rest)
    placed[order] = results
    return placed


def _in_pages_of(size: int, pool: Pool) -> Pool:
    """Returns a pool with its pages cut into smaller ones, as views, so that a tile begins with a page."""
    import torch

    parts = pool.k.shape[1] // size
    if parts == 1:
        return pool
    k, v = (each.view(-1, size, *each.shape[2:]) for each in (pool.k, pool.v))
    table = pool.table.clamp(0, len(pool.k) - 1)[:, :, None] * parts + torch.arange(parts, device="cpu")
    return pool._replace(k=k, v=v, table=table.flatten(1))


def _all_keys(grouped: Any, pool: Pool, scale: float | None) -> tuple[Any, Any]:
    """Returns (out, lse) of queries ``[sequences, kv_heads, rows, dim]``."""
    import torch

    first = sum(not keys for keys in pool.before)  # the first sequence with such keys
    parts = list(_on_keys_before(grouped, pool, first, scale))
    before = tuple(torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
    if pool.lengths == pool.before:  # no tiles
        return before  # type: ignore[return-value]
    out, lse = _on_own_keys(grouped, pool, scale)
    if not parts:
        return out, lse
    rest, rest_lse = cpu_lone.merged(out[first:], lse[first:], before[0], before[1])
    return (
        (torch.cat([out[:first].to(rest.dtype), rest]), torch.cat([lse[:first], rest_lse]))
        if first
        else (rest, rest_lse)
    )


def _on_keys_before(grouped: Any, pool: Pool, first: int, scale: float | None) -> Iterator[tuple[Any, Any]]:
    """Yields (out, lse) of sequences in order, from the first one on that has such keys."""
    page_size, kv_heads, dim = pool.k.shape[1:]
    while first < len(pool.before):
        keys = pool.before[first]
        most = max(1 if kv_heads > 1 else 2, GATHERED // (keys * kv_heads * dim * pool.k.element_size()))
        last = min(first + most, bisect_right(pool.before, keys))
        k, v = pool.gathered(pool.table[first:last, : -(-keys // page_size)], keys)
        yield cpu_lone.attend(grouped[first:last], k, v, scale)
        first = last


def _on_own_keys(grouped: Any, pool: Pool, scale: float | None) -> tuple[Any, Any]:
    """Returns (out, lse) of the queries on the keys of their own tiles."""
    import torch

    page_size, starts = pool.k.shape[1], pool.before
    own = [length - before for length, before in zip(pool.lengths, starts, strict=True)]
    keys = cpu_lone.height_of(max(own))
    columns = torch.arange(-(-keys // page_size), device="cpu")
    if starts[0] != starts[-1]:
        columns = columns + torch.tensor(starts, device="cpu")[:, None] // page_size
    else:
        columns = (columns + starts[0] // page_size).expand(len(own), -1)
    pages = pool.table.long().gather(1, columns.clamp(max=pool.table.shape[1] - 1))
    k, v = pool.gathered(pages.clamp_(0, len(pool.k) - 1), keys)  # entries behind a last page may hold any value
    if min(own) == max(own):
        k[:, own[0] :], v[:, own[0] :] = 0.0, 0.0
    else:
        hidden = (torch.arange(keys, device="cpu") >= torch.tensor(own, device="cpu")[:, None])[:, :, None, None]
        k.masked_fill_(hidden, 0.0)
        v.masked_fill_(hidden, 0.0)
    return cpu_lone.attend(grouped, k, v, scale, own)
