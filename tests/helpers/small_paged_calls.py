"""Small calls on keys and values in pages on a GPU, for tests of memory accesses. Imports no JAX.

A pool lies in the middle of its own allocation, between pages of NaN. A read just outside of the pool shows in the
result, a write there shows in the NaN, and an access further away is outside of the allocation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import torch_frontend
from attn_core import backends
from attn_core.selection import Selection

TRUE_KINDS = ("paged decode", "paged chunk", "paged tree")
LYING_KINDS = tuple(f"{kind}, lying tables" for kind in TRUE_KINDS)
KINDS = (*TRUE_KINDS, *LYING_KINDS)
"""One new token of each sequence, several, or a tree of them; and the same with wrong tables on the device."""
PAGE_SIZES = (16, 128, 256)
"""Tried in this order: the first size that the backend accepts."""
GUARD = 3
"""Pages of NaN before a pool, and behind it."""
PAGES, WIDTH, LENGTHS, NEW = 11, 4, (2.5, 0.1, 3.0, 1.0), (5, 1, 16, 0)
"""Sizes of the pool and the table; tokens of each sequence in pages, and how many of them a chunk has."""


class PagedCall(NamedTuple):
    """q ``[tokens, heads, head_dim]``, k and v ``[tokens, kv_heads, head_dim]``; the pools, their allocations
    ``[GUARD + PAGES + GUARD, page_size, kv_heads, head_dim]``, and the tables."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pools: tuple[torch.Tensor, torch.Tensor]
    around: tuple[torch.Tensor, torch.Tensor]
    tables: dict[str, Any]
    masking: dict[str, Any]
    """key_ranges, if there are any: int32 ``[1, 1, tokens, 1, 2]``."""

    def selection(self, backend: str) -> Selection:
        """Whether a backend can run it, and the reasons if it cannot."""
        return torch_frontend.explain_paged(self.q, *self.pools, **self.tables, **self.masking, backend=backend)

    def attend(self, backend: str) -> torch.Tensor:
        """``[tokens, heads, head_dim]``."""
        options = {**self.tables, **self.masking, "backend": backend}
        out: torch.Tensor = torch_frontend.paged_attention(self.q, *self.pools, **options)
        return out

    def append(self) -> None:
        """Writes k and v to the places that the tables name."""
        torch_frontend.append_kv(*self.pools, self.k, self.v, **self.tables)

    def guarded(self) -> bool:
        """Whether everything around the pools is still NaN."""
        return all(bool(a[:GUARD].isnan().all() and a[-GUARD:].isnan().all()) for a in self.around)


def paged_call(kind: str, page_size: int, *, seed: int = 0, device: str = "cuda") -> PagedCall:
    """A call of one of KINDS in bfloat16, 8 query and 2 key/value heads of 64 channels; the pool contains no NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    decode, lying = "decode" in kind, "lying" in kind
    tokens = len(LENGTHS) if decode else sum(NEW)
    around = [torch.randn((PAGES + 2 * GUARD, page_size, 2, 64), **made) for _ in "kv"]
    pools = [whole[GUARD:-GUARD] for whole in around]
    for whole in around:
        whole[:GUARD] = whole[-GUARD:] = torch.nan
    q, k, v = (torch.randn((tokens, heads, 64), **made) for heads in (8, 2, 2))
    table, lengths, offsets = _wrong(page_size, tokens) if lying else _true(page_size)
    tables = {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": None if decode else offsets}
    kept = {name: rows for name, rows in tables.items() if rows is not None}
    there = {name: torch.tensor(rows, dtype=torch.int32, device=device) for name, rows in kept.items()}
    masking = {}
    if "tree" in kind:
        token = torch.arange(tokens)
        wrong = torch.tensor([[-(2**31), 2**31 - 1], [7, -7]]).repeat(tokens // 2, 1)
        ranges = wrong if lying else torch.stack([token, (token + 3).clamp(max=tokens)], 1)
        masking["key_ranges"] = ranges.view(1, 1, tokens, 1, 2).int().to(device)
    return PagedCall(q, k, v, tuple(pools), tuple(around), there, masking)  # type: ignore[arg-type]


def _true(page_size: int) -> tuple[list[list[int]], list[int], list[int]]:
    """(block_table, seq_lens, cu_seqlens_q) with the pages of the pool in mixed order; unused entries are -1."""
    free = [(5 * page + 3) % PAGES for page in range(PAGES)]
    lengths = [max(int(pages * page_size), new) for pages, new in zip(LENGTHS, NEW, strict=True)]
    rows = []
    for length in lengths:
        count = -(-length // page_size)
        rows.append([free.pop() for _ in range(count)] + [-1] * (WIDTH - count))
    return rows, lengths, [0, *(sum(NEW[: at + 1]) for at in range(len(NEW)))]


def _wrong(page_size: int, tokens: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Pages just outside of the pool and far from it, lengths below 0 and beyond the table, unordered offsets.

    The first sequence's last token has a valid place, because an append that writes nowhere would show nothing.
    """
    table = [
        [-1, PAGES, PAGES + GUARD - 1, 4],
        [-(2**31), 2**31 - 1, -(2**20), 2**20],
        [0, PAGES - 1, PAGES + GUARD, -GUARD - 1],
        [2**30, -(2**30), 1, -GUARD],
    ]
    return table, [WIDTH * page_size, 2**31 - 1, WIDTH * page_size + 1, -5], [-7, 5, 2**31 - 1, 2, tokens + 100]


def paged_backends() -> tuple[str, ...]:
    """The names of backends with GPU kernels that claim pages of torch tensors, installed or not."""
    actual = {name: backends.load(name, "cuda") for name in backends.names()}
    return tuple(name for name, each in actual.items() if each.framework == "torch" and each.forward_claims.paged)


def first_accepted(kind: str, backend: str, device: str = "cuda") -> PagedCall | None:
    """The call on pages of the first size that the backend accepts; None if it accepts none."""
    for page_size in PAGE_SIZES:
        call = paged_call(kind, page_size, device=device)
        if call.selection(backend).backend is not None:
            return call
    return None


def why_not(kind: str, backend: str, device: str = "cuda") -> str:
    """Every reason why a backend cannot run the call on the largest pages, in one line."""
    call = paged_call(kind, PAGE_SIZES[-1], device=device)
    return f"{backend}: {'; '.join(call.selection(backend).reasons(backend))}"
