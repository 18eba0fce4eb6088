"""A user's program in torch, for type checkers: the type of every result follows from what is returned."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_frontend import (
    PagedKVCache,
    SeqInfo,
    attention,
    attention_qkvpacked,
    context_parallel_attention,
    merge_states,
    paged_attention,
    pages_of,
    repad,
    unpad,
)


def calls(q: Tensor, k: Tensor, v: Tensor, qkv: Tensor, flag: bool) -> None:
    assert_type(attention(q, k, v), Tensor)
    assert_type(attention(q, k, v, causal=True, window=(3, None), return_lse=False), Tensor)
    assert_type(
        attention(q, k, v, softcap=50.0, seq_info=SeqInfo.from_lengths([3]), return_lse=True), tuple[Tensor, Tensor]
    )
    assert_type(
        attention(q, k, v, dropout=0.1, dropout_rng=torch.Generator(), return_lse=flag), Tensor | tuple[Tensor, Tensor]
    )
    assert_type(attention(q, k, v, return_max_logit=True), tuple[Tensor, Tensor])
    assert_type(attention(q, k, v, return_lse=True, return_max_logit=True), tuple[Tensor, Tensor, Tensor])
    assert_type(attention(q, k, v, return_max_logit=flag), Tensor | tuple[Tensor, ...])
    assert_type(attention_qkvpacked(qkv, causal=True), Tensor)
    assert_type(attention_qkvpacked(qkv, backend=("flex", "math"), return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention_qkvpacked(qkv, return_lse=flag), Tensor | tuple[Tensor, Tensor])


def padded(mask: Tensor, x: Tensor) -> None:
    row, padding = unpad(mask, x, total=7)
    assert_type(row, Tensor)
    attention(row, row, row, seq_info=padding.seq_info)
    assert_type(repad(row, padding), Tensor)
    repad(row, mask)  # error: what unpad returned last


def decode(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: np.ndarray, lengths: np.ndarray, flag: bool) -> None:
    assert_type(paged_attention(q, k_pages, v_pages, block_table=table, seq_lens=lengths), Tensor)
    lse = paged_attention(q, k_pages, v_pages, block_table=table, seq_lens=lengths, window=4, return_lse=True)
    assert_type(lse, tuple[Tensor, Tensor])
    either = paged_attention(q, k_pages, v_pages, block_table=table, seq_lens=lengths, return_lse=flag)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(merge_states([q, q], [q, q]), tuple[Tensor, Tensor])
    assert_type(pages_of((k_pages, v_pages), "HND"), tuple[Tensor, Tensor])


def cached(cache: PagedKVCache, q: Tensor, flag: bool) -> None:
    step = cache.step(["one"])
    assert_type(cache.attend(0, q, step), Tensor)
    assert_type(cache.attend(0, q, step, window=4, return_lse=True), tuple[Tensor, Tensor])
    assert_type(cache.attend(0, q, step, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    cache.attend(0, q, step, is_causal=True)  # error: no such keyword


def split(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, flag: bool) -> None:
    assert_type(context_parallel_attention(q, k, v, mesh=mesh), Tensor)
    lse = context_parallel_attention(q, k, v, mesh=mesh, strategy="ring", causal=True, return_lse=True)
    assert_type(lse, tuple[Tensor, Tensor])
    assert_type(context_parallel_attention(q, k, v, mesh=mesh, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    context_parallel_attention(q, k, v, mesh=mesh, is_causal=True)  # error: no such keyword


def mistakes(q: Tensor, k: Tensor, v: Tensor) -> None:
    attention(q, k, v, is_causal=True)  # error: no such keyword
    attention(q, k, v, causal="yes")  # error: a bool
    attention(q, k)  # error: v is missing
    print(attention(q, k, v).lse)  # error: a tensor has none
    paged_attention(q, k, v)  # error: block_table and seq_lens are missing
