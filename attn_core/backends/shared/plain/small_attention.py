"""The forward of a call with few scores on a CPU, as one block with less Python around the arithmetic.

Such a call takes as long as its operations and their Python, so a softcapped call of a few tokens is twice as fast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from attn_core.backends.shared.plain.block_operands import LOG2E, WINDOW_BLOCK
from attn_core.backends.shared.plain.block_scores import (
    factor_of,
)
from attn_core.backends.shared.plain.block_weights import softmax, without_unit
from attn_core.backends.shared.plain.contained_sums import products, sum_over_keys
from attn_core.call.functions import has_functions
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

MOST_SCORES = 2**17
"""The most scores of a call, all heads and rows together: 512 KiB in float32, which stay in a processor's cache."""


@lru_cache(maxsize=4096)
def fits(spec: AttentionSpec) -> bool:
    """Returns whether ``forward`` runs a call: few scores, no row without keys, no extras but a softcap and a band."""
    tables = (spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.key_ranges_shape)
    extras = spec.packed or spec.sinks or spec.dropout or any(shape is not None for shape in tables)
    extras = extras or has_functions(spec)
    if extras or spec.dtype == "float64":
        return False
    edge = band(spec)
    if edge.left is not None and spec.q_len > WINDOW_BLOCK:
        return False  # several blocks read fewer keys than one
    scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
    # A block would not read the keys that no row sees.
    all_seen = edge.keys_of(0, spec.q_len - 1, spec.kv_len) == (0, spec.kv_len)
    return scores <= MOST_SCORES and all_seen and not edge.empties_a_row(spec.q_len, spec.kv_len)


def results(spec: AttentionSpec, inputs: Inputs, maximum: bool) -> tuple[Any, Any, Any] | None:
    """Returns out, lse and the rows' largest logits, or without ``maximum`` None, of a call that ``fits``.

    Returns None if a logit that is multiplied by log2(e) overflowed; a softcap excludes that.

    The arithmetic is that of ``forward_block``. Called without autograd.
    """
    import torch

    # [batch, heads, len, dim]
    q, k, v = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    if q.dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    grouped = (spec.batch, spec.num_kv_heads, spec.group_size, spec.q_len, spec.head_dim)
    q = (q * factor_of(spec, LOG2E)).view(grouped)
    scores, hidden = products(q, k.mT), _hidden(spec)
    if spec.softcap is not None:
        scores = scores.tanh_().mul_(spec.softcap * LOG2E)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    if spec.softcap is None and not math.isfinite(top.sum()):
        return None
    weights, total, lse = softmax(scores, top, None, LOG2E)
    out = sum_over_keys(weights, v, hidden).div_(total).flatten(1, 2).transpose(1, 2)
    out = out if q.dtype == inputs.q.dtype else out.to(inputs.q.dtype)
    return out.contiguous(), lse.view(spec.lse_shape), without_unit(top, LOG2E) if maximum else None


@lru_cache(maxsize=64)
def _hidden(spec: AttentionSpec) -> Any:
    """Returns which keys the band hides, bool ``[1, 1, 1, q_len, kv_len]``; None if it hides none."""
    import torch

    edge = band(spec)
    if edge.hides_nothing(spec.q_len, spec.kv_len):
        return None
    with torch.inference_mode(False):  # the tensor serves later calls outside of inference mode
        rows, columns = (torch.arange(length, device="cpu") for length in (spec.q_len, spec.kv_len))
        return ~edge.contains(rows[:, None], columns)[None, None, None]
