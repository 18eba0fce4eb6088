"""explain: what ``attention`` would run on torch tensors, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import torch

from attn_core.call import cache_rows
from attn_core.call.cache_rows import OPTIONS, CacheRows
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.layouts import Layout, check_layout
from attn_core.call.mask_objects import is_object
from attn_core.call.options import Options, Window
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import Selection
from torch_frontend.dispatch import general_calls, heads_first, nested, plan, segments
from torch_frontend.paged import dense_caches

Tensor = torch.Tensor


@hide_unknown
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_ranges: Any = None,
    mask_mod: Callable[..., Any] | TracedFunction | None = None,
    score_mod: Callable[..., Any] | TracedFunction | None = None,
    aux: Sequence[Any] = (),
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: Any = None,
    layout: Layout = "bshd",
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    dropout_rng: torch.Generator | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cache_index: Any = None,
    needs_backward: bool | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Selection:
    """Returns the backend that ``attention`` chooses for these arguments and why the others cannot run. Runs nothing.

    ``needs_backward`` states whether the call is for training; if None, the tensors' ``requires_grad`` decides.
    """
    if unknown:
        refuse_keywords(explain, unknown)
    if not (q_segment_ids is None and kv_segment_ids is None and q_positions is None and kv_positions is None):
        said, alone = (q_segment_ids, kv_segment_ids, q_positions, kv_positions), (seq_info, alibi_slopes)
        if not (kv_lengths is None and kv_starts is None and cache_index is None):
            cache_rows.refuse(seq_info, *said)
        seen = causal, window, mask_mod, aux
        causal, window, mask_mod, aux = segments.without_segments(said, seen, (q, k), layout, alone)
    if not (kv_lengths is None and kv_starts is None and cache_index is None):
        rows, first = CacheRows(kv_lengths, kv_starts, cache_index), (causal, alignment, window, softcap, scale, mask)
        more = (bias, alibi_slopes, sinks, seq_info, dropout, deterministic, backend, return_lse, dropout_rng)
        values = (*first, *more, key_ranges, return_max_logit, mask_mod, score_mod, aux, invariant)
        keywords = dict(zip(OPTIONS, values, strict=True)) | {"layout": layout}
        return dense_caches.explain(explain, (q, k, v), rows, keywords, needs_backward)
    if check_layout(layout) == "bhsd":
        q, k, v = heads_first.all_exchanged((q, k, v))
    if nested.has_jagged(q, k, v):
        others = {"seq_info": seq_info, "mask": mask, "bias": bias, "key_ranges": key_ranges}
        others |= {"mask_mod": mask_mod, "score_mod": score_mod}
        (q, k, v), seq_info = nested.as_documents((q, k, v), others)
    if is_object(mask, bias):
        visible = causal, alignment, window, mask, bias, seq_info
        causal, alignment, window, mask, bias, seq_info = plan.read_mask_object(q, k, visible)
    tensors = (q, k, v, mask, bias, alibi_slopes, sinks)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    options = options._replace(invariant=invariant)
    extras = dropout_rng, backend, key_ranges, (mask_mod, score_mod, aux)
    return general_calls.explain(tensors, seq_info, options, *extras, needs_backward, return_max_logit)
