"""The Triton kernel of forward mode: out, lse and the tangents of both, in one pass over the keys; and that of
``return_max_logit``: the largest logit of each row, without values and without exponentials.

With s = scale q.k, t = softcap tanh(s / softcap) or s, and p the softmax weights of t:

    ds = scale (dq.k + q.dk)        dt = (1 - tanh^2) ds        mean = sum p dt
    out = sum p v                   dout = sum p (dt v + dv) - mean out
    lse = log sum exp t             dlse = mean

The sums of a row are relative to its largest logit so far (the running maximum of FlashAttention, Dao et al. 2022,
arXiv:2205.14135), so a larger one rescales all of them together. Nothing is stored for a pair.

Offsets of documents may be traced values that nobody could check, so they are clamped to the tokens. A key past the
end of its document is never read.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.rows import LN_2, LOG2_E, document_at, raise_maximum


@triton.jit
def load_tile(at, rows, channels, ALL_ROWS: tl.constexpr, ALL_CHANNELS: tl.constexpr):
    """Loads a tile ``[rows, channels]``; what does not exist is 0. Only an axis that may be too long is masked."""
    if ALL_ROWS and ALL_CHANNELS:
        return tl.load(at)
    if ALL_ROWS:
        return tl.load(at, mask=channels[None, :], other=0.0)
    if ALL_CHANNELS:
        return tl.load(at, mask=rows[:, None], other=0.0)
    return tl.load(at, mask=rows[:, None] & channels[None, :], other=0.0)


@triton.jit
def tanh_and_slope(x, ACCURATE: tl.constexpr):
    """Returns tanh(x) and its slope ``1 - tanh^2``, which loses no digits for large x.

    ACCURATE: also keep float32's digits near 0, which a difference of exponentials loses.
    """
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))  # between 0 and 1, whatever x is
    share = 1.0 / (1.0 + decay)
    tanh = (1.0 - decay) * share
    if ACCURATE:  # the first terms of the series of tanh
        square = x * x
        series = 62.0 / 2835.0 - square * (1382.0 / 155925.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * series)))
        tanh = tl.where(size < 0.25, size * series, tanh)
    return tl.where(x < 0.0, -tanh, tanh), 4.0 * decay * share * share


LARGEST_MOVE = tl.constexpr(16384.0)
"""Tangents of logits up to this size are in float16's range, also after they are multiplied by a weight."""


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "blocks", "left", "right"])
def attend(
    q,
    k,
    v,
    sinks,
    dq,
    dk,
    dv,
    dsinks,
    cu_seqlens_q,
    cu_seqlens_k,
    out,
    lse,
    dout,
    dlse,
    scale,
    softcap,
    q_tokens,
    k_tokens,
    blocks,
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
    dq_row,
    dq_token,
    dq_head,
    dk_row,
    dk_token,
    dk_head,
    dv_row,
    dv_token,
    dv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DQ: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DSINKS: tl.constexpr,
    PRIMALS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes a tile of queries of one head: out and lse if PRIMALS, dout and dlse if anything moves.

    q, dq ``[rows, tokens, heads, head_dim]``; k, dk, v, dv likewise; packed tensors have one row. out, dout ``[rows,
    tokens, heads, value_dim]`` and lse, dlse ``[rows, heads, tokens]`` are contiguous. DQ, DK, DV, DSINKS: which
    tangents exist; the others are 0. LEFT: whether a window ends on the left. HEAD_WIDTH, VALUE_WIDTH: channels of a
    tile, powers of two; each program has all channels of the logits, and one tile's of the values. The other numbers
    are strides in elements.
    """
    LOGITS_MOVE: tl.constexpr = DQ or DK
    MOVES: tl.constexpr = DQ or DK or DV or DSINKS
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    NARROW: tl.constexpr = q.dtype.element_ty == tl.float16
    ALL: tl.constexpr = HEAD_WIDTH == HEAD_DIM
    PARTS: tl.constexpr = (VALUE_DIM + VALUE_WIDTH - 1) // VALUE_WIDTH
    ALL_VALUES: tl.constexpr = PARTS * VALUE_WIDTH == VALUE_DIM
    # The last tiles of a causal call have most keys, so they start first.
    begin = (blocks - 1 - tl.program_id(0) % blocks) * QUERIES
    place = tl.program_id(0) // blocks
    value_part = place % PARTS
    head = (place // PARTS % HEADS).to(tl.int64)
    row = (place // PARTS // HEADS).to(tl.int64)
    kv_head = head // GROUP
    first_query, queries = 0, q_tokens
    first_key, keys = 0, k_tokens
    if PACKED:
        first_query, queries = document_at(cu_seqlens_q, row, q_tokens)
        first_key, keys = document_at(cu_seqlens_k, row, k_tokens)
        row = row * 0
        if begin >= queries:  # the grid is sized for the longest document
            return

    query = begin + tl.arange(0, QUERIES)
    is_row = query < queries
    token = (first_query + query).to(tl.int64)
    channel = tl.arange(0, HEAD_WIDTH)
    is_channel = channel < HEAD_DIM
    value_channel = value_part * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH)
    is_value = value_channel < VALUE_DIM

    # The key at a query's own position is query + offset. From low to high are the keys that the tile's queries see.
    offset = keys - queries if BOTTOM_RIGHT else 0
    low = tl.maximum(begin + offset - left, 0)
    high = tl.minimum(tl.minimum(begin + QUERIES, queries) + offset + right, keys)
    # From start to stop are whole tiles of keys that every query sees, so they need no mask.
    start = low
    stop = low + tl.maximum(tl.minimum(begin + offset + right + 1, keys) - low, 0) // KEYS * KEYS
    if LEFT:
        start = low + (tl.maximum(begin + QUERIES - 1 + offset - left - low, 0) + KEYS - 1) // KEYS * KEYS
        stop = tl.where(start < stop, stop, low)
        start = tl.minimum(start, stop)

    queries_at = q + row * q_row + head * q_head + token[:, None] * q_token + channel[None, :]
    queries_tile = load_tile(queries_at, is_row, is_channel, False, ALL)
    if DQ:
        moved_queries_at = dq + row * dq_row + head * dq_head + token[:, None] * dq_token + channel[None, :]
        moved_queries = load_tile(moved_queries_at, is_row, is_channel, False, ALL)
    k += row * k_row + kv_head * k_head + first_key * k_token
    v += row * v_row + kv_head * v_head + first_key * v_token
    dk += row * dk_row + kv_head * dk_head + first_key * dk_token
    dv += row * dv_row + kv_head * dv_head + first_key * dv_token
    # With a softcap the scores below are the arguments of its tanh, without one they are base-2 logits.
    inner = scale / softcap if SOFTCAP else scale * LOG2_E

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    moved = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    unit = tl.full([QUERIES], 1.0, tl.float32)  # of moved: a power of two, other than 1 in float16 alone
    for part in tl.static_range(
        0 if LEFT else 1, 3
    ):  # keys left of the whole tiles, the whole tiles, keys right of them
        first = low if part == 0 else start if part == 1 else stop
        last = start if part == 0 else stop if part == 1 else high
        for at in range(first, last, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = key < keys
            far = key.to(tl.int64)[:, None]
            keys_tile = load_tile(k + far * k_token + channel[None, :], is_key, is_channel, part == 1, ALL)
            scores = tl.dot(queries_tile, tl.trans(keys_tile), input_precision=PRECISION) * inner
            if LOGITS_MOVE:
                moves = tl.zeros([QUERIES, KEYS], tl.float32)
                if DK:
                    moved_keys = load_tile(dk + far * dk_token + channel[None, :], is_key, is_channel, part == 1, ALL)
                    moves = tl.dot(queries_tile, tl.trans(moved_keys), moves, input_precision=PRECISION)
                if DQ:
                    moves = tl.dot(moved_queries, tl.trans(keys_tile), moves, input_precision=PRECISION)
                moves = moves * scale
            if SOFTCAP:
                scores, slope = tanh_and_slope(scores, WIDE)
                scores = scores * (softcap * LOG2_E)
                if LOGITS_MOVE:
                    moves = moves * slope
            if part != 1:
                distance = key[None, :] - (query + offset)[:, None]
                seen = is_key[None, :] & (distance <= right) & (distance >= -left)
                scores = tl.where(seen, scores, float("-inf"))
                if LOGITS_MOVE:
                    moves = tl.where(seen, moves, 0.0)  # 0 times the NaN of a hidden key is NaN
            top, base, fade = raise_maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - base[:, None])
            total = total * fade + tl.sum(weights, 1)
            values_tile = load_tile(v + far * v_token + value_channel[None, :], is_key, is_value, part == 1, ALL_VALUES)
            kind = values_tile.dtype  # the tensor cores take both operands in one dtype; the sums stay float32
            summed = tl.dot(weights.to(kind), values_tile, summed * fade[:, None], input_precision=PRECISION)
            if LOGITS_MOVE or DV:
                moved = moved * fade[:, None]
                if LOGITS_MOVE:
                    mean = mean * fade + tl.sum(weights * moves, 1)
                    if NARROW:
                        wanted = tl.max(tl.abs(moves), 1) * (1.0 / LARGEST_MOVE)
                        larger = tl.where(wanted > unit, tl.exp2(tl.ceil(tl.log2(wanted))), unit)
                        moved = moved * (unit / larger)[:, None]
                        unit = larger
                        weights = weights / unit[:, None]
                    moved = tl.dot((weights * moves).to(kind), values_tile, moved, input_precision=PRECISION)
                if DV:
                    moved_values_at = dv + far * dv_token + value_channel[None, :]
                    moved_values = load_tile(moved_values_at, is_key, is_value, part == 1, ALL_VALUES)
                    moved = tl.dot(weights.to(kind), moved_values, moved, input_precision=PRECISION)

    empty = total == 0.0  # before the sink is added: a row without keys has output 0 whatever its sink is
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E + tl.zeros([QUERIES], tl.float32)
        top, base, fade = raise_maximum(top, sink)
        weight = tl.exp2(sink - base)
        total = total * fade + weight
        summed = summed * fade[:, None]
        if MOVES:
            mean = mean * fade
            moved = moved * fade[:, None]
        if DSINKS:
            mean += weight * tl.load(dsinks + head).to(tl.float32)
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    result = summed * share[:, None]
    rows_at = (row * HEADS + head) * q_tokens + token
    tile_at = ((row * q_tokens + token) * HEADS + head)[:, None] * VALUE_DIM + value_channel[None, :]
    is_stored = is_row[:, None] & is_value[None, :]
    if PRIMALS:
        row_lse = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
        if value_part == 0:
            tl.store(lse + rows_at, row_lse, mask=is_row)
        tl.store(out + tile_at, result.to(out.dtype.element_ty), mask=is_stored)
    if MOVES:
        mean = mean * share
        if value_part == 0:
            tl.store(dlse + rows_at, mean, mask=is_row)
        moved = moved * (share * unit)[:, None] - mean[:, None] * result
        tl.store(dout + tile_at, moved.to(dout.dtype.element_ty), mask=is_stored)


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "blocks", "left", "right"])
def row_maximum(
    q,
    k,
    mask,
    bias,
    slopes,
    ranges,
    cu_seqlens_q,
    cu_seqlens_k,
    result,
    scale,
    softcap,
    q_tokens,
    k_tokens,
    blocks,
    left,
    right,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    mask_row,
    mask_head,
    mask_query,
    mask_key,
    bias_row,
    bias_head,
    bias_query,
    bias_key,
    slopes_row,
    slopes_head,
    ranges_row,
    ranges_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SLOPES: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes a tile of queries of one head.

    q ``[rows, tokens, heads, head_dim]``, k likewise with kv heads; packed tensors have one row. mask (bytes) and bias
    ``[rows, heads, q_tokens, k_tokens]`` and slopes ``[rows, heads]`` have strides of 0 along axes that broadcast.
    ranges int32 ``[rows, kv heads, k_tokens, RANGES, 2]``, whose last three axes are contiguous. result ``[rows, heads,
    q_tokens]`` is contiguous. LEFT: whether a window ends on the left. HEAD_WIDTH: channels of a tile, a power of two.
    The other numbers are strides in elements.
    """
    ALL: tl.constexpr = HEAD_WIDTH == HEAD_DIM
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    ADDED: tl.constexpr = BIAS or SLOPES
    # The last tiles of a causal call have most keys, so they start first.
    begin = (blocks - 1 - tl.program_id(0) % blocks) * QUERIES
    place = tl.program_id(0) // blocks
    head = (place % HEADS).to(tl.int64)
    row = (place // HEADS).to(tl.int64)
    kv_head = head // GROUP
    first_query, queries = 0, q_tokens
    first_key, keys = 0, k_tokens
    if PACKED:
        first_query, queries = document_at(cu_seqlens_q, row, q_tokens)
        first_key, keys = document_at(cu_seqlens_k, row, k_tokens)
        row = row * 0
        if begin >= queries:  # the grid is sized for the longest document
            return

    query = begin + tl.arange(0, QUERIES)
    is_row = query < queries
    token = (first_query + query).to(tl.int64)
    channel = tl.arange(0, HEAD_WIDTH)
    is_channel = channel < HEAD_DIM

    # The key at a query's own position is query + offset. From low to high are the keys that the tile's queries see.
    offset = keys - queries if BOTTOM_RIGHT else 0
    low = tl.maximum(begin + offset - left, 0)
    high = tl.minimum(tl.minimum(begin + QUERIES, queries) + offset + right, keys)
    # From start to stop are whole tiles of keys that the band shows to every query, so they need no comparison.
    start = low
    stop = low + tl.maximum(tl.minimum(begin + offset + right + 1, keys) - low, 0) // KEYS * KEYS
    if LEFT:
        start = low + (tl.maximum(begin + QUERIES - 1 + offset - left - low, 0) + KEYS - 1) // KEYS * KEYS
        stop = tl.where(start < stop, stop, low)
        start = tl.minimum(start, stop)

    queries_at = q + row * q_row + head * q_head + token[:, None] * q_token + channel[None, :]
    queries_tile = load_tile(queries_at, is_row, is_channel, False, ALL)
    k += row * k_row + kv_head * k_head + first_key * k_token
    if MASK:
        mask += row * mask_row + head * mask_head + token[:, None] * mask_query
    if BIAS:
        bias += row * bias_row + head * bias_head + token[:, None] * bias_query
    if SLOPES:
        slope = tl.load(slopes + row * slopes_row + head * slopes_head).to(tl.float32)
    if RANGES:
        ranges += row * ranges_row + kv_head * ranges_head
    inner = scale / softcap if SOFTCAP else scale

    # The largest of each place in the tiles; one reduction at the end compares the places of a row.
    largest = tl.full([QUERIES, KEYS], float("-inf"), tl.float32)
    for part in tl.static_range(
        0 if LEFT else 1, 3
    ):  # keys left of the whole tiles, the whole tiles, keys right of them
        first = low if part == 0 else start if part == 1 else stop
        last = start if part == 0 else stop if part == 1 else high
        for at in range(first, last, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = key < keys
            far = key.to(tl.int64)
            keys_tile = load_tile(k + far[:, None] * k_token + channel[None, :], is_key, is_channel, part == 1, ALL)
            scores = tl.dot(queries_tile, tl.trans(keys_tile), input_precision=PRECISION) * inner
            inside = is_row[:, None] & is_key[None, :]
            key_token = first_key + far
            if ADDED:
                if SOFTCAP:
                    scores = softcap * tanh_and_slope(scores, WIDE)[0]
                if SLOPES:
                    scores -= slope * tl.abs(key[None, :] - (query + offset)[:, None]).to(tl.float32)
                if BIAS:
                    term = tl.load(bias + key_token[None, :] * bias_key, mask=inside, other=float("-inf"))
                    # A hidden score may be NaN, and NaN plus -inf is NaN.
                    scores = tl.where(term == float("-inf"), float("-inf"), scores + term.to(tl.float32))
            if MASK:
                shown = tl.load(mask + key_token[None, :] * mask_key, mask=inside, other=0)
                scores = tl.where(shown != 0, scores, float("-inf"))
            if RANGES:
                shown = token[:, None] < 0
                for number in tl.static_range(RANGES):
                    range_at = ranges + (key_token * RANGES + number) * 2
                    range_start = tl.load(range_at, mask=is_key, other=0)
                    range_stop = tl.load(range_at + 1, mask=is_key, other=0)
                    shown |= (range_start[None, :] <= token[:, None]) & (token[:, None] < range_stop[None, :])
                scores = tl.where(shown, scores, float("-inf"))
            if part != 1:
                distance = key[None, :] - (query + offset)[:, None]
                seen = is_key[None, :] & (distance <= right) & (distance >= -left)
                scores = tl.where(seen, scores, float("-inf"))
            largest = tl.maximum(largest, scores, propagate_nan=tl.PropagateNan.ALL)
    is_nan = largest != largest  # tl.max ignores NaN
    top = tl.max(tl.where(is_nan, float("-inf"), largest), 1)
    top = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), top)
    if SOFTCAP and not ADDED:  # softcap's tanh keeps the order of the scores
        top = tl.where(top == float("-inf"), top, softcap * tanh_and_slope(top, WIDE)[0])
    tl.store(result + (row * HEADS + head) * q_tokens + token, top, mask=is_row)
