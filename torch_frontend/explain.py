"""explain: what ``attention`` would run on torch tensors, and why."""

from __future__ import annotations

from typing import Unpack

import torch

from attn_core.call import cache_rows
from attn_core.call.cache_rows import CacheRows
from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import ExplainKeywords
from attn_core.call.mask_objects import Visible, is_object
from attn_core.call.options import Door, Options, check_layout, names_at
from attn_core.call.segments import Segments
from attn_core.selection import Selection
from torch_frontend.attention import attention
from torch_frontend.dispatch import general_calls, heads_first, nested, plan, segments
from torch_frontend.paged import dense_caches

Tensor = torch.Tensor
Keywords = ExplainKeywords[Tensor, torch.Generator]

_shared = SharedOptions(attention, names_at(Door.ATTENTION))


@_shared
def explain(
    q: Tensor, k: Tensor, v: Tensor, *, needs_backward: bool | None = None, **options: Unpack[Keywords]
) -> Selection:
    """Returns the backend that ``attention`` chooses for these arguments and why the others cannot run. Runs nothing.

    ``needs_backward`` states whether the call is for training; if None, the tensors' ``requires_grad`` decides. The
    other arguments are those of ``attention``.
    """
    said = _shared.complete(explain, {**options})
    rows = CacheRows(*(said.pop(name) for name in CacheRows._fields))
    tokens = Segments(*(said.pop(name) for name in Segments._fields))
    layout, in_cache = said["layout"], any(array is not None for array in rows)
    if any(array is not None for array in tokens):
        if in_cache:
            cache_rows.refuse(said["seq_info"], *tokens)
        seen = said["causal"], said["window"], said["mask_mod"], said["aux"]
        alone = said["seq_info"], said["alibi_slopes"]
        said |= segments.without_segments(tokens, seen, (q, k), layout, alone)._asdict()
    if in_cache:
        return dense_caches.explain(explain, (q, k, v), rows, said, needs_backward)
    if check_layout(layout) == "bhsd":
        q, k, v = heads_first.all_exchanged((q, k, v))
    if nested.has_jagged(q, k, v):
        others = {name: said[name] for name in ("seq_info", "mask", "bias", "key_ranges", "mask_mod", "score_mod")}
        (q, k, v), said["seq_info"] = nested.as_documents((q, k, v), others)
    if is_object(said["mask"], said["bias"]):
        said |= plan.read_mask_object(q, k, tuple([said[name] for name in Visible._fields]))._asdict()
    tensors = (q, k, v, *(said[name] for name in ("mask", "bias", "alibi_slopes", "sinks")))
    functions = said["mask_mod"], said["score_mod"], said["aux"]
    extras = said["dropout_rng"], said["backend"], said["key_ranges"], functions
    plain = Options.of(said)
    maximum = said["return_max_logit"]
    return general_calls.explain(tensors, said["seq_info"], plain, *extras, needs_backward, maximum)
