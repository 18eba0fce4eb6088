"""explain: what ``attention`` would run on JAX arrays, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import jax
import numpy as np

from attn_core.call import cache_rows
from attn_core.call.cache_rows import OPTIONS, CacheRows
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.layouts import Layout, check_layout
from attn_core.call.options import Options, Window, check_flag, requested_names
from attn_core.call.segments import Segments
from attn_core.call.seq_info import SeqInfo
from attn_core.context_parallel.one_device import described
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import Selection, override
from attn_core.selection.row_maximum import with_max_logit
from jax_frontend.attention import gather_arguments
from jax_frontend.context_parallel.one_device import rows_are_here
from jax_frontend.dispatch import offsets, plan, value_checks
from jax_frontend.dispatch.heads_first import exchanged
from jax_frontend.dispatch.written import Written, as_plain
from jax_frontend.paged import dense_caches


@hide_unknown
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Any = None,
    key_ranges: Any = None,
    mask_mod: Callable[..., Any] | TracedFunction | None = None,
    score_mod: Callable[..., Any] | TracedFunction | None = None,
    aux: Sequence[Any] = (),
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seq_info: Any = None,
    layout: Layout = "bshd",
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    dropout_rng: Any = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cache_index: Any = None,
    needs_backward: bool | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Selection:
    """Returns the backend that ``attention`` chooses for these arguments and why the others cannot run. Runs nothing.

    Takes arrays or ``jax.ShapeDtypeStruct``. JAX's arguments do not show whether a gradient will be computed; pass
    ``needs_backward=True`` for training: of every tensor, the bias included, but of no array in ``aux``.
    """
    if unknown:
        refuse_keywords(explain, unknown)
    if check_layout(layout) == "bhsd":
        q, k, v = map(exchanged, (q, k, v))
    segments = Segments(q_segment_ids, kv_segment_ids, q_positions, kv_positions)
    if not (kv_lengths is None and kv_starts is None and cache_index is None):
        cache_rows.refuse(seq_info, *segments)
        rows, first = CacheRows(kv_lengths, kv_starts, cache_index), (causal, alignment, window, softcap, scale, mask)
        more = (bias, alibi_slopes, sinks, seq_info, dropout, deterministic, backend, return_lse, dropout_rng)
        values = (*first, *more, key_ranges, return_max_logit, mask_mod, score_mod, aux, invariant)
        return dense_caches.explain(explain, (q, k, v), rows, dict(zip(OPTIONS, values, strict=True)), needs_backward)
    written = Written(causal, alignment, window, softcap, scale, mask, key_ranges, mask_mod, score_mod, aux)
    plain = as_plain(written, segments, (q, k), seq_info, alibi_slopes)
    causal, alignment, window, softcap, scale, mask, key_ranges, mask_mod, score_mod, aux = plain
    arrays = (q, k, v, mask, bias, alibi_slopes, sinks)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    options = options._replace(invariant=invariant)
    info = SeqInfo.coerce(seq_info)
    masking: dict[str, Any] = {"key_ranges": key_ranges, "functions": (mask_mod, score_mod, aux)}
    inputs, options = gather_arguments(arrays, info, options, dropout_rng, shapes_only=True, **masking)
    if needs_backward is not None:
        check_flag("needs_backward", needs_backward)
    trains, requested = bool(needs_backward), requested_names(backend) or override.requested()
    # Shapes do not show which arrays get gradients, so training counts with a gradient of every bias.
    bias_gradient = trains and bias is not None
    selection = plan.explanation(plan.metadata(inputs), plan.device_name(q), options, trains, bias_gradient, requested)
    selection = with_max_logit(selection) if check_flag("return_max_logit", return_max_logit) else selection
    offsets.check(selection.spec, info)
    if not isinstance(inputs.key_ranges, jax.ShapeDtypeStruct):
        value_checks.check_key_ranges(selection.spec, inputs.key_ranges)
    # As ``context_parallel.one_device`` decides, but for the question whether the program is traced.
    whole = key_ranges is not None and requested is None and not rows_are_here(selection.spec.batch)
    tables = (*aux, *(mask_mod.captured if isinstance(mask_mod, TracedFunction) else ()))
    if value_checks.ranges_here(key_ranges, named=requested is not None):
        key_ranges = np.asarray(key_ranges)
    here = all(isinstance(table, np.ndarray) for table in (key_ranges, *tables) if table is not None)
    # Arrays that an untraced function captured are not among the tables.
    if whole or not here or len(tables) != len(selection.spec.aux):
        return selection
    return described(selection, key_ranges, tables)
