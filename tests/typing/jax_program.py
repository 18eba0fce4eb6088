"""A user's program in JAX, for type checkers: the type of every result follows from what is returned."""

from __future__ import annotations

from typing import assert_type

import jax
import numpy as np
from jax import Array

from jax_frontend import (
    PagedKVCache,
    SeqInfo,
    attention,
    attention_qkvpacked,
    context_parallel_attention,
    dot_product_attention,
    merge_states,
    paged_attention,
    pages_of,
    repad,
    unpad,
)


def calls(q: Array, k: Array, v: Array, qkv: Array, flag: bool) -> None:
    assert_type(attention(q, k, v), Array)
    assert_type(attention(q, k, v, causal=True, window=(3, None), return_lse=False), Array)
    assert_type(
        attention(q, k, v, softcap=50.0, seq_info=SeqInfo.from_lengths([3]), return_lse=True), tuple[Array, Array]
    )
    assert_type(
        attention(q, k, v, dropout=0.1, dropout_rng=jax.random.key(0), return_lse=flag), Array | tuple[Array, Array]
    )
    assert_type(attention(q, k, v, return_max_logit=True), tuple[Array, Array])
    assert_type(attention(q, k, v, return_lse=True, return_max_logit=True), tuple[Array, Array, Array])
    assert_type(attention(q, k, v, return_max_logit=flag), Array | tuple[Array, ...])
    assert_type(attention_qkvpacked(qkv, causal=True), Array)
    assert_type(attention_qkvpacked(qkv, backend=("flex", "math"), return_lse=True), tuple[Array, Array])
    assert_type(attention_qkvpacked(qkv, return_lse=flag), Array | tuple[Array, Array])
    assert_type(dot_product_attention(q, k, v, None, None, is_causal=True), Array)
    assert_type(dot_product_attention(q, k, v, scale=0.5, return_residual=True), tuple[Array, Array])
    assert_type(dot_product_attention(q, k, v, return_residual=flag), Array | tuple[Array, Array])


def padded(mask: Array, x: Array) -> None:
    row, padding = unpad(mask, x, total=7)
    assert_type(row, Array)
    attention(row, row, row, seq_info=padding.seq_info)
    assert_type(repad(row, padding), Array)
    repad(row, mask)  # error: what unpad returned last


def decode(q: Array, k_pages: Array, v_pages: Array, table: np.ndarray, lengths: np.ndarray, flag: bool) -> None:
    assert_type(paged_attention(q, k_pages, v_pages, block_table=table, seq_lens=lengths), Array)
    lse = paged_attention(q, k_pages, v_pages, block_table=table, seq_lens=lengths, window=4, return_lse=True)
    assert_type(lse, tuple[Array, Array])
    either = paged_attention(q, k_pages, v_pages, block_table=table, seq_lens=lengths, return_lse=flag)
    assert_type(either, Array | tuple[Array, Array])
    assert_type(merge_states([q, q], [q, q]), tuple[Array, Array])
    assert_type(pages_of((k_pages, v_pages), "HND"), tuple[Array, Array])


def cached(cache: PagedKVCache, q: Array, flag: bool) -> None:
    step = cache.step(["one"])
    assert_type(cache.attend(0, q, step), Array)
    assert_type(cache.attend(0, q, step, window=4, return_lse=True), tuple[Array, Array])
    assert_type(cache.attend(0, q, step, return_lse=flag), Array | tuple[Array, Array])
    cache.attend(0, q, step, is_causal=True)  # error: no such keyword


def split(q: Array, k: Array, v: Array, mesh: jax.sharding.Mesh, flag: bool) -> None:
    assert_type(context_parallel_attention(q, k, v, mesh=mesh, axis_name="cp"), Array)
    lse = context_parallel_attention(q, k, v, mesh=mesh, axis_name="cp", strategy="ring", causal=True, return_lse=True)
    assert_type(lse, tuple[Array, Array])
    assert_type(
        context_parallel_attention(q, k, v, mesh=mesh, axis_name="cp", return_lse=flag), Array | tuple[Array, Array]
    )
    context_parallel_attention(q, k, v, mesh=mesh, axis_name="cp", is_causal=True)  # error: no such keyword


def mistakes(q: Array, k: Array, v: Array) -> None:
    attention(q, k, v, is_causal=True)  # error: no such keyword
    attention(q, k, v, causal="yes")  # error: a bool
    attention(q, k)  # error: v is missing
    print(attention(q, k, v).lse)  # error: an array has none
    dot_product_attention(q, k, v, causal=True)  # error: no such keyword
    paged_attention(q, k, v)  # error: block_table and seq_lens are missing
