"""explain_paged: which backend runs a call on pages, for JAX arrays."""

from __future__ import annotations

from typing import Any, Never

import jax

from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.options import requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.paged.options import check_paged_options
from attn_core.selection import Selection, explain, override
from jax_frontend.bridge import compiled_lane
from jax_frontend.dispatch import plan
from jax_frontend.paged.attention import gather, metadata_of, request


@hide_unknown
def explain_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    key_ranges: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    alibi_slopes: Any = None,
    kv_starts: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    if unknown:
        refuse_keywords(explain_paged, unknown)
    tables, scales = (block_table, seq_lens, cu_seqlens_q), (k_scales, v_scales)
    given = PagedInputs(q, k_pages, v_pages, *tables, sinks, key_ranges, alibi_slopes, kv_starts, *scales)
    inputs = gather(given, shapes_only=True)
    if isinstance(q, jax.Array):
        plan.check_array("q", q)  # not deleted, because its device counts
    options = check_paged_options(causal, window, softcap, scale, deterministic, return_lse, max_len_q, invariant)
    requested = requested_names(backend) or override.requested()
    return compiled_lane.with_program_reasons(
        explain(*request(metadata_of(inputs), plan.device_name(q), options, requested))
    )
