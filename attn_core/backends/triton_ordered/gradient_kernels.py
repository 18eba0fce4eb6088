"""The Triton kernels of the gradients of a tile of keys, and of a tile of queries.

With p = exp(t - lse), where t is the logit of a pair and s = scale q.k its score before softcap and ALiBi:

    delta = sum over channels of out dout, minus dlse (``row_sums``)
    ds = p (dout.v - delta) (1 - tanh(s / softcap)^2)
    dv = sum over queries of p dout        dk = scale sum over queries of ds q        dq = scale sum over keys of ds k

Each program adds in ascending order of heads and of tiles, which begin at multiples of their size. No two programs add
to the same number. So the gradients of a document depend on the document alone. ``tl.fma`` says where a product and a
sum round once; nothing else is fused (``enable_fp_fusion=False``).

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.loads import read
from attn_core.backends.shared.in_order.running_maximum import LOG2_E
from attn_core.backends.triton_ordered.gradient_sums import add_keys, add_queries
from attn_core.backends.triton_ordered.sequences import sequence_at


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "left", "right", "slope_row", "sums_row", "sums_head"])
def of_keys(
    q,
    k,
    v,
    dout,
    shift,
    delta,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    dk,
    dv,
    scale,
    softcap,
    q_tokens,
    k_tokens,
    left,
    right,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    dout_row,
    dout_token,
    dout_head,
    sums_row,
    sums_head,
    dk_row,
    dk_token,
    dk_head,
    dv_row,
    dv_token,
    dv_head,
    slope_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    ALIBI: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes dk and dv of a tile of keys of one kv head. The arguments are those of ``kernels.attend``."""
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    place = sequence_at(sequence, cu_seqlens_q, cu_seqlens_k, q_tokens, k_tokens, PACKED)
    row, first_query, queries, first_key, keys = place
    begin = tl.program_id(1) * KEYS  # the first keys are seen by most queries, so they start first
    if begin >= keys:  # the grid is sized for the longest sequence
        return
    key = begin + tl.arange(0, KEYS)
    is_key = (key < keys)[:, None]
    token = (first_key + key)[:, None]
    channel, value_channel = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    keys_at = k + row * k_row + kv_head * k_head + token * k_token + channel[None, :]
    values_at = v + row * v_row + kv_head * v_head + token * v_token + value_channel[None, :]
    keys_tile, values_tile = tl.load(keys_at, mask=is_key, other=0.0), tl.load(values_at, mask=is_key, other=0.0)

    own = keys - queries if BOTTOM_RIGHT else 0  # the key at the first query's own position
    last = tl.minimum(begin + KEYS, keys) - 1
    low = tl.maximum(begin - own - right, 0) // QUERIES * QUERIES
    high = tl.minimum(queries, last - own + left + 1)
    # From border on, no query is too far left to see one of the keys; tiles up to whole exist as a whole.
    whole = high // QUERIES * QUERIES
    border = tl.maximum((tl.maximum(last - own - right, 0) + QUERIES - 1) // QUERIES * QUERIES, low)
    key_sums = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    value_sums = tl.zeros([KEYS, VALUE_DIM], tl.float32)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        slope = 0.0
        if ALIBI:
            slope = tl.load(alibi_slopes + row * slope_row + head) * LOG2_E
        queries_of = q + row * q_row + head * q_head + first_query * q_token + channel[None, :]
        douts_of = dout + row * dout_row + head * dout_head + first_query * dout_token + value_channel[None, :]
        sums_of = row * sums_row + head * sums_head + first_query
        for part in tl.static_range(0 if LEFT_OPEN else 2, 3):  # part 1 has whole tiles that see all keys
            start = tl.maximum(border, whole) if LEFT_OPEN and part == 2 else border if part == 1 else low
            stop = tl.minimum(border, high) if part == 0 else whole if part == 1 else high
            for at in range(start, stop, QUERIES):
                query = at + tl.arange(0, QUERIES)
                is_row = query < queries
                far = query.to(tl.int64)[:, None]
                if part == 1:
                    row_shift = tl.load(shift + sums_of + query)
                    sees = is_row
                else:  # the dout of a query that sees no key may be NaN
                    row_shift = tl.load(shift + sums_of + query, mask=is_row, other=float("inf"))
                    sees = row_shift != float("inf")
                row_delta = read(delta + sums_of + query, is_row, part == 1)
                queries_tile = read(queries_of + far * q_token, is_row[:, None], part == 1)
                dout_tile = read(douts_of + far * dout_token, sees[:, None], part == 1)
                key_sums, value_sums = add_queries(
                    *((key_sums, value_sums), (keys_tile, values_tile, queries_tile, dout_tile)),
                    *((row_shift, row_delta, query + own, key, slope), (scale, softcap, left, right)),
                    *(SOFTCAP, ALIBI, part == 1),
                )
    dk_at = dk + row * dk_row + kv_head * dk_head + token * dk_token + channel[None, :]
    dv_at = dv + row * dv_row + kv_head * dv_head + token * dv_token + value_channel[None, :]
    tl.store(dk_at, (key_sums * scale).to(dk.dtype.element_ty), mask=is_key)
    tl.store(dv_at, value_sums.to(dv.dtype.element_ty), mask=is_key)


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "left", "right", "slope_row", "sums_row", "sums_head"])
def of_queries(
    q,
    k,
    v,
    dout,
    shift,
    delta,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    dq,
    scale,
    softcap,
    q_tokens,
    k_tokens,
    left,
    right,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    dout_row,
    dout_token,
    dout_head,
    sums_row,
    sums_head,
    dq_row,
    dq_token,
    dq_head,
    slope_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    ALIBI: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes dq of a tile of queries of one head. The arguments are those of ``kernels.attend``."""
    sequence = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    place = sequence_at(sequence, cu_seqlens_q, cu_seqlens_k, q_tokens, k_tokens, PACKED)
    row, first_query, queries, first_key, keys = place
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES  # the last rows see the most keys
    if begin >= queries:
        return
    query = begin + tl.arange(0, QUERIES)
    is_row = query < queries
    token = (first_query + query)[:, None]
    channel, value_channel = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    sums_at = row * sums_row + head * sums_head + first_query + query
    row_shift = tl.load(shift + sums_at, mask=is_row, other=float("inf"))
    row_delta = tl.load(delta + sums_at, mask=is_row, other=0.0)
    queries_at = q + row * q_row + head * q_head + token * q_token + channel[None, :]
    queries_tile = tl.load(queries_at, mask=is_row[:, None], other=0.0)
    # The dout of a query that sees no key may be NaN.
    dout_at = dout + row * dout_row + head * dout_head + token * dout_token + value_channel[None, :]
    dout_tile = tl.load(dout_at, mask=(row_shift != float("inf"))[:, None], other=0.0)
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + row * slope_row + head) * LOG2_E

    own = keys - queries if BOTTOM_RIGHT else 0
    low = tl.maximum(begin + own - left, 0) // KEYS * KEYS
    high = tl.minimum(tl.minimum(begin + QUERIES, queries) + own + right, keys)
    by_all = tl.maximum(tl.minimum(begin + own + right + 1, keys), 0) // KEYS * KEYS  # every row sees the keys to there
    kv_head = head // GROUP
    keys_of = k + row * k_row + kv_head * k_head + first_key * k_token + channel[None, :]
    values_of = v + row * v_row + kv_head * v_head + first_key * v_token + value_channel[None, :]
    sums = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    for masked in tl.static_range(0 if LEFT_OPEN else 1, 2):
        for at in range(by_all if masked and LEFT_OPEN else low, high if masked else by_all, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = (key < keys)[:, None]
            far = key.to(tl.int64)[:, None]
            keys_tile = read(keys_of + far * k_token, is_key, not masked)
            values_tile = read(values_of + far * v_token, is_key, not masked)
            sums = add_keys(
                *(sums, (queries_tile, dout_tile, keys_tile, values_tile)),
                *((row_shift, row_delta, query + own, key, slope), (scale, softcap, left, right, keys)),
                *(SOFTCAP, ALIBI, not masked),
            )
    dq_at = dq + row * dq_row + head * dq_head + token * dq_token + channel[None, :]
    tl.store(dq_at, (sums * scale).to(dq.dtype.element_ty), mask=is_row[:, None])
