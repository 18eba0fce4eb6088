"""Which form a call on rows of a dense cache takes: pages, packed documents, or key ranges; see ``cache_rows``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.cache_rows import CacheRows, takes_pages
from attn_core.call.options import Options, check_options
from attn_core.selection.choice import explain
from attn_core.selection.cost_model import FEW_QUERIES
from attn_core.selection.target import Target

Form = Literal["pages", "documents", "ranges"]


def form_of(
    rows: CacheRows,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    arrays: Arrays | None,
    where: tuple[str, str],
    names: tuple[str, ...] | None,
) -> Form:
    """Returns the form of a checked call that has no gradient.

    Args:
        rows: only which of its fields are None counts.
        sizes: the batch, q_len, kv_len and the rows of the cache.
        options: the arguments of ``attention`` by name; the window is a pair.
        arrays: the facts of q, k, v, slopes and sinks; None for a call that cannot run as documents.
        where: the framework and the device.
        names: the backends that the caller names.
    """
    framework, device = where
    if not takes_pages(sizes, options):
        return "ranges"
    if names is not None and not read_pages(names, device):
        return "ranges"
    if arrays is None:
        return "pages"
    call, target = check_options(Options.of(options)), Target.here(framework, device)
    return "documents" if runs_packed(rows, arrays, call, target, names) else "pages"


def read_pages(names: tuple[str, ...], device: str) -> bool:
    """Returns whether one of these backends reads pages on a device. Whoever runs the call refuses unknown names."""
    known = [backends.load(name, backends.kind_of(device)) for name in names if name in backends.names()]
    return any([backend.forward_claims.paged for backend in known])


def runs_packed(
    rows: CacheRows, arrays: Arrays, options: Options, target: Target, names: tuple[str, ...] | None
) -> bool:
    """Returns whether a call that could take the form of pages runs as packed documents instead.

    It does on a GPU if the rows have many queries, and a backend ``for_cache_rows`` is the choice. Documents lie in
    the order of the cache, so a call with cache_index stays on pages, and so does one with slopes for each row.

    Args:
        rows: only which of its fields are None counts.
        arrays: of q, k, v, slopes and sinks, ``[batch, seq, heads, dim]``.
        names: the backends that the caller names. The first of them must be the choice.
    """
    slopes = arrays.alibi_slopes
    if target.device == "cpu" or rows.cache_index is not None or (slopes is not None and len(slopes.shape) != 1):
        return False
    if options.invariant is not None:  # few queries and many must have one kernel
        return False
    if arrays.q.shape[1] <= FEW_QUERIES or prod(arrays.k.shape[:2]) >= 2**31:
        return False
    return _runs_packed(arrays, options, target, names)


@from_records(maxsize=1024)
def _runs_packed(arrays: Arrays, options: Options, target: Target, names: tuple[str, ...] | None) -> bool:
    """Returns whether selection chooses a backend ``for_cache_rows`` for the call as packed documents."""
    (batch, q_len), kv_len = arrays.q.shape[:2], arrays.k.shape[1]
    offsets = ArrayFacts((2 * batch + 2,), "int32", arrays.q.device)
    packed = [facts._replace(shape=(prod(facts.shape[:2]), *facts.shape[2:])) for facts in arrays[:3]]
    named = dict(zip("qkv", packed, strict=True))
    arrays = arrays._replace(**named, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    spec = build_spec(arrays, options._replace(max_len_q=q_len, max_len_k=2 * kv_len))
    chosen = explain(spec, target, names).backend
    if chosen is None or (names is not None and chosen != names[0]):
        return False
    return backends.load(chosen, target.kind).for_cache_rows
