"""explain_paged: which backend runs a call on pages, for JAX arrays."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import ExplainPagedKeywords
from attn_core.call.options import Options, check_options, requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.selection import Selection, explain, override
from jax_frontend.bridge import compiled_lane
from jax_frontend.dispatch import plan
from jax_frontend.paged.attention import gather, metadata_of, paged_attention, request

_shared = SharedOptions(paged_attention, ExplainPagedKeywords.__optional_keys__)


@_shared
def explain_paged(
    q: Any, k_pages: Any, v_pages: Any, *, block_table: Any, seq_lens: Any, **options: Unpack[ExplainPagedKeywords[Any]]
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    said = _shared.complete(explain_paged, {**options}) | {"block_table": block_table, "seq_lens": seq_lens}
    given = PagedInputs(q, k_pages, v_pages, **{name: said[name] for name in PagedInputs._fields if name not in "qkv"})
    inputs = gather(given, shapes_only=True)
    if isinstance(q, jax.Array):
        plan.check_array("q", q)  # not deleted, because its device counts
    call = check_options(Options.of(said))
    requested = requested_names(said["backend"]) or override.requested()
    return compiled_lane.with_program_reasons(
        explain(*request(metadata_of(inputs), plan.device_name(q), call, requested))
    )
