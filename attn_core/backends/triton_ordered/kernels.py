"""The Triton kernels of the forward and of the gradients: dense and packed tensors, in the order of calls on pages.

Forward: a program computes a tile of rows, queries times the heads of a group, of one sequence and kv head;
``in_order.rows`` says in which order it adds. A key past the end of its sequence is never read.

Gradients: with p = exp(t - lse), where t is the logit of a pair and s = scale q.k its score before softcap and ALiBi:

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

from attn_core.backends.shared.in_order.rows import LOG2_E, attend_rows, document_at, read


@triton.jit
def sequence_at(sequence, cu_seqlens_q, cu_seqlens_k, q_tokens, k_tokens, PACKED: tl.constexpr):
    """Returns (row, first query, queries, first key, keys), the row and the first tokens in 64 bits.

    A packed call has one row. Its offsets are on the device and cannot be checked, so they are clamped to the tokens.
    """
    if PACKED:
        row = (sequence * 0).to(tl.int64)
        first_query, queries = document_at(cu_seqlens_q, sequence, q_tokens)
        first_key, keys = document_at(cu_seqlens_k, sequence, k_tokens)
    else:
        row = sequence.to(tl.int64)
        first_query, queries, first_key, keys = (sequence * 0), q_tokens, (sequence * 0), k_tokens
    return row, first_query.to(tl.int64), queries, first_key.to(tl.int64), keys


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(
    do_not_specialize=[
        "q_tokens",
        "k_tokens",
        "left",
        "right",
        "slope_row",
        "lse_row",
        "lse_share",
        "lse_head",
    ]
)
def attend(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    sinks,
    alibi_slopes,
    out,
    lse,
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
    out_row,
    out_share,
    out_token,
    out_head,
    lse_row,
    lse_share,
    lse_head,
    slope_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    NEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    ALIBI: tl.constexpr,
    PARTIAL: tl.constexpr,
    ONE_SHARE: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes out and lse; with PARTIAL float32 partial results of one share, which ``merge_in_order`` adds.

    q, out ``[rows, q_tokens, heads, dim]``, k, v ``[rows, k_tokens, kv_heads, dim]``, lse ``[rows, heads, q_tokens]``;
    a packed call has one row. Channels and the tokens of lse are contiguous; the other numbers are strides in elements.
    cu_seqlens int32 ``[documents + 1]``, sinks ``[heads]``, alibi_slopes float32 ``[heads]`` or ``[rows, heads]``; the
    kernel does not read absent ones. NEAR: an offset of a key in its sequence, in units of 16 bytes, fits int32.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    place = sequence_at(sequence, cu_seqlens_q, cu_seqlens_k, q_tokens, k_tokens, PACKED)
    row, first_query, queries, first_key, keys = place
    begin = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS  # the last rows see the most keys, so they start first
    if begin >= queries * GROUP:  # the grid is sized for the longest sequence
        return
    own = keys - queries if BOTTOM_RIGHT else 0
    tensors = q + row * q_row, sinks, alibi_slopes + row * slope_row, out + row * out_row, lse + row * lse_row
    k += row * k_row + first_key * k_token + kv_head * k_head
    v += row * v_row + first_key * v_token + kv_head * v_head
    # Without pages: slots are tokens, the stride by page and the table are not used.
    attend_rows(
        tensors,
        (k, 0, k_token, v, 0, v_token),
        k,
        (kv_head, first_query, queries, begin, own, keys),
        (scale, softcap, left, right, 0, 0),
        (q_token, q_head, out_share, out_token, out_head, lse_share, lse_head),
        GROUP,
        0,
        NEAR,
        HEAD_DIM,
        VALUE_DIM,
        SOFTCAP,
        SINKS,
        LEFT_OPEN,
        ALIBI,
        PARTIAL,
        ONE_SHARE,
        SHARE,
        ROWS,
        KEYS,
    )


@triton.jit(do_not_specialize=["tokens", "lse_row", "lse_head"])
def row_sums(
    out,
    dout,
    lse,
    dlse,
    shift,
    delta,
    tokens,
    out_row,
    out_token,
    out_head,
    dout_row,
    dout_token,
    dout_head,
    lse_row,
    lse_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DLSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes delta and the shift of a tile of tokens of one row and head: the lse in base 2.

    For a query that sees no key delta is 0, and the shift inf, so that its weights are 0. out, dout ``[rows, tokens,
    heads, value_dim]``; lse, dlse, shift and delta ``[rows, heads, tokens]`` have the same strides. DLSE: whether there
    is a dlse.
    """
    blocks = (tokens + ROWS - 1) // ROWS
    place = tl.program_id(0) // blocks
    row, head = (place // HEADS).to(tl.int64), (place % HEADS).to(tl.int64)
    token = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, VALUE_DIM)
    is_row = token < tokens
    lse_at = row * lse_row + head * lse_head + token
    out_at = out + row * out_row + head * out_head + token[:, None] * out_token + channel[None, :]
    dout_at = dout + row * dout_row + head * dout_head + token[:, None] * dout_token + channel[None, :]
    products = tl.load(out_at, mask=is_row[:, None], other=0.0).to(tl.float32)
    products *= tl.load(dout_at, mask=is_row[:, None], other=0.0).to(tl.float32)
    total = tl.sum(products, 1)
    if DLSE:
        total -= tl.load(dlse + lse_at, mask=is_row, other=0.0)
    row_lse = tl.load(lse + lse_at, mask=is_row, other=0.0)
    sees = row_lse != float("-inf")
    tl.store(shift + lse_at, tl.where(sees, row_lse * LOG2_E, float("inf")), mask=is_row)
    tl.store(delta + lse_at, tl.where(sees, total, 0.0), mask=is_row)


@triton.jit(do_not_specialize=["rows", "tokens", "sums_row", "sums_head"])
def sink_sums(
    sinks,
    shift,
    delta,
    dsinks,
    rows,
    tokens,
    sums_row,
    sums_head,
    TILE: tl.constexpr,
):
    """Computes the gradient of one head's sink, the sum over rows of -exp(sink - lse) delta; dsinks float32 [heads]."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    total = tl.zeros([TILE], tl.float32)  # a sum for each place in a tile, so that no order depends on timing
    for row in range(0, rows):
        for at in range(0, tokens, TILE):
            token = at + tl.arange(0, TILE)
            sums_at = tl.cast(row, tl.int64) * sums_row + head * sums_head + token
            weight = tl.exp2(sink - tl.load(shift + sums_at, mask=token < tokens, other=float("inf")))
            total = tl.fma(weight, tl.load(delta + sums_at, mask=token < tokens, other=0.0), total)
    tl.store(dsinks + head, -tl.sum(total, 0))


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
    # Queries from low to high see some key of the tile.
    low = tl.maximum(begin - own - right, 0) // QUERIES * QUERIES
    high = tl.minimum(queries, last - own + left + 1)
    # From border on, no query is too far left to see one of the keys; tiles up to whole exist as a whole.
    whole = high // QUERIES * QUERIES
    border = tl.maximum((tl.maximum(last - own - right, 0) + QUERIES - 1) // QUERIES * QUERIES, low)
    key_sums = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    value_sums = tl.zeros([KEYS, VALUE_DIM], tl.float32)
    # The heads of a group share the keys, so their gradients add up here, head by head.
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
                    (key_sums, value_sums),
                    (keys_tile, values_tile, queries_tile, dout_tile),
                    (row_shift, row_delta, query + own, key, slope),
                    (scale, softcap, left, right),
                    SOFTCAP,
                    ALIBI,
                    part == 1,
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

    # Keys from low to high are seen by some row. Those up to by_all need no mask unless the window has a left side.
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
                sums,
                (queries_tile, dout_tile, keys_tile, values_tile),
                (row_shift, row_delta, query + own, key, slope),
                (scale, softcap, left, right, keys),
                SOFTCAP,
                ALIBI,
                not masked,
            )
    dq_at = dq + row * dq_row + head * dq_head + token * dq_token + channel[None, :]
    tl.store(dq_at, (sums * scale).to(dq.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _weights_of(scores, shift, distance, slope, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Returns p of a tile of pairs, and the derivative of the softcap, 1 - tanh(s / softcap)^2; 1 without one.

    Args:
        scores: the products q.k. shift: lse / log(2), +inf for a row that sees no key.
        distance: of each key from its query's own position. slope: ALiBi's over log(2).
    """
    # The steps are those of ``in_order.rows.attend_to_share``, so a logit is rounded as in the forward.
    to_logits = scale * LOG2_E
    factor, derivative = to_logits, 1.0
    if SOFTCAP:
        bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (to_logits * (2.0 / softcap))))
        scores = bent * (softcap * LOG2_E)
        factor, derivative = 1.0, 1.0 - bent * bent
    elif ALIBI:
        scores = scores * to_logits
        factor = 1.0
    if ALIBI:
        scores = scores - slope * tl.abs(distance).to(tl.float32)
    ones = tl.full(scores.shape, 1.0, tl.float32)
    return tl.exp2(tl.fma(scores, ones * factor, tl.broadcast_to(-shift, scores.shape))), derivative


@triton.jit
def add_queries(sums, tiles, about, numbers, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ALL: tl.constexpr):
    """Adds a tile of queries to the sums of dk and dv, both ``[keys, channels]``, and returns them.

    Args:
        tiles: keys, values, queries and dout. about: of queries their lse over log(2), delta and the key at their own
            position; the keys' places; the slope over log(2). numbers: (scale, softcap, left, right).
        ALL: every query sees every key.
    """
    key_sums, value_sums = sums
    keys_tile, values_tile, queries_tile, dout_tile = tiles
    shift, delta, diagonal, key, slope = about
    scale, softcap, left, right = numbers
    scores = tl.dot(keys_tile, tl.trans(queries_tile))
    distance = key[:, None] - diagonal[None, :]
    weights, derivative = _weights_of(scores, shift[None, :], distance, slope, scale, softcap, SOFTCAP, ALIBI)
    if not ALL:
        seen = (distance <= right) & (distance >= -left)
        weights = tl.where(seen, weights, 0.0)
    value_sums = tl.dot(weights.to(dout_tile.dtype), dout_tile, value_sums)
    ds = weights * (tl.dot(values_tile, tl.trans(dout_tile)) - delta[None, :])
    if SOFTCAP:
        ds = ds * derivative
    if not ALL:  # 0 times the NaN of a hidden value is NaN
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(queries_tile.dtype), queries_tile, key_sums), value_sums


@triton.jit
def add_keys(sums, tiles, about, numbers, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ALL: tl.constexpr):
    """Adds a tile of keys to the sums of dq ``[queries, channels]``, and returns them.

    Args:
        tiles: queries, dout, keys and values. about: as in ``add_queries``.
        numbers: (scale, softcap, left, right, number of keys).
    """
    queries_tile, dout_tile, keys_tile, values_tile = tiles
    shift, delta, diagonal, key, slope = about
    scale, softcap, left, right, keys = numbers
    scores = tl.dot(queries_tile, tl.trans(keys_tile))
    distance = key[None, :] - diagonal[:, None]
    weights, derivative = _weights_of(scores, shift[:, None], distance, slope, scale, softcap, SOFTCAP, ALIBI)
    ds = weights * (tl.dot(dout_tile, tl.trans(values_tile)) - delta[:, None])
    if SOFTCAP:
        ds = ds * derivative
    if not ALL:  # a key past the end was read as 0, and q.0 is a logit like any other
        seen = (distance <= right) & (distance >= -left) & (key < keys)[None, :]
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(keys_tile.dtype), keys_tile, sums)
