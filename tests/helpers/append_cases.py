"""Appends to pages, drawn and written by a loop in numpy: by tables or by slots, with or without rotated keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import torch_frontend


@dataclass(frozen=True, eq=False)
class Append:
    """New tokens of several sequences in a pool, as torch tensors and numpy arrays.

    Attributes:
        places: (page, offset, position) of each new token; None for one without a place.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    block_table: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray | None
    places: list[tuple[int, int, int] | None] = field(default_factory=list)
    interleaved: bool = False

    @property
    def tables(self) -> dict[str, Any]:
        names = ("block_table", "seq_lens", "cu_seqlens_q")
        return {name: getattr(self, name) for name in names}

    @property
    def slots(self) -> np.ndarray:
        size = self.k_pages.shape[1]
        return np.array([-1 if at is None else at[0] * size + at[1] for at in self.places], np.int64)

    @property
    def positions(self) -> np.ndarray:
        """Of each token; for those without a place a number that is no position."""
        return np.array([-7 if at is None else at[2] for at in self.places], np.int64)

    def expected(self, rotates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools afterwards, one token after another."""
        k_pages, v_pages = self.k_pages.clone(), self.v_pages.clone()
        for token, place in enumerate(self.places):
            if place is not None:
                page, offset, position = place
                key, at = self.k[token], np.array(position)
                if rotates:
                    options = {"positions": at, "interleaved": self.interleaved}
                    key = torch_frontend.apply_rotary(key, self.cos, self.sin, **options)
                k_pages[page, offset], v_pages[page, offset] = key, self.v[token]
        return k_pages, v_pages


def make_append(
    lengths: list[int],
    new: list[int] | None,
    *,
    page_size: int = 4,
    dim: int = 10,
    value_dim: int = 6,
    rotary_dim: int = 10,
    dtype: str = "float32",
    table: str = "float32",
    interleaved: bool = False,
    left_out: int = 0,
    seed: int = 0,
) -> Append:
    """An append; lengths count the new tokens. left_out: tokens at the end that belong to no sequence."""
    random = np.random.default_rng(seed)
    counts = [1] * len(lengths) if new is None else new
    width = max([-(-n // page_size) for n in lengths], default=1) + 1
    pages = random.permutation(width * len(lengths) + 2)
    rows = np.full((len(lengths), width), -1, np.int32)
    places: list[tuple[int, int, int] | None] = []
    for row, length, count in zip(rows, lengths, counts, strict=True):
        used = -(-length // page_size)
        row[:used], pages = pages[:used], pages[used:]
        places += [(int(row[at // page_size]), at % page_size, at) for at in range(length - count, length)]
    places += [None] * left_out
    tokens, longest = len(places), max(lengths, default=0) + int(random.integers(1, 9))
    angles = random.uniform(-9, 9, (longest, rotary_dim // 2))

    def numbers(*shape: int) -> torch.Tensor:
        return torch.tensor(random.standard_normal(shape)).to(getattr(torch, dtype))

    pool = (width * len(lengths) + 2, page_size, 2)
    return Append(
        *(numbers(*pool, dim), numbers(*pool, value_dim), numbers(tokens, 2, dim), numbers(tokens, 2, value_dim)),
        *(torch.tensor(turn(angles)).to(getattr(torch, table)) for turn in (np.cos, np.sin)),
        *(rows, np.array(lengths, np.int32)),
        None if new is None else np.cumsum([0, *counts]).astype(np.int32),
        places,
        interleaved,
    )


@st.composite
def appends(draw: Any, dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")) -> Append:
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    each = draw(st.booleans())
    new = None if each else [draw(st.integers(0, length)) for length in lengths]
    dim, dtype = draw(st.integers(2, 20)), draw(st.sampled_from(dtypes))
    return make_append(
        lengths,
        new,
        page_size=draw(st.sampled_from((1, 3, 4))),
        dim=dim,
        value_dim=draw(st.integers(1, 20)),
        rotary_dim=2 * draw(st.integers(1, dim // 2)),
        dtype=dtype,
        table=draw(st.sampled_from(("float32", dtype))),
        interleaved=draw(st.booleans()),
        left_out=0 if each else draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )
