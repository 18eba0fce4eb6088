"""The Triton kernel of ``return_max_logit``: the largest logit of each row, without values and without exponentials.

Offsets of documents may be traced values that nobody could check, so they are clamped to the tokens. A key past the
end of its document is never read.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton_jvp.tile_functions import document_at, load_tile, tanh_and_slope


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
