"""Automatic choice with ``invariant``, and which settings of a kernel keep a call's bits the same, as words.

Backends round differently, so one backend must compute all calls in which a row's bits are promised to be the same.
Which one depends on no length, and on no form of the call: dense or packed, with a mask for padding, for training or
inference, and with "prefix" also from pages. It is the first backend in the usual order that runs the most of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from operator import attrgetter
from typing import Any

from attn_core import backends
from attn_core.call.functions import has_functions
from attn_core.call.pages import PagedKV
from attn_core.call.spec import AttentionSpec
from attn_core.selection import preference
from attn_core.selection.target import Target, reasons_of

WORDS = {
    "query_tile": "tiles of {} positions",
    "key_tile": "of {} keys",
    "tile_keys": "tiles of {} keys",
    "share_keys": "added in shares of {}",
    "num_splits": "keys in {} part",
    "deterministic": "gradients summed in order",
}
"""By the names of a backend's settings in ``lower``."""

BECAUSE = "it runs a row's calls of every length, dense, packed, masked and in training, so their bits are equal"
"""Why a backend was chosen for a call with ``invariant``."""

FROM_PAGES = {"triton_ordered": "triton_splitkv"}
"""The backend that reads pages with the bits of another one, if that is not itself."""
SHARED = (
    *("num_heads", "num_kv_heads", "head_dim", "value_dim", "dtype", "causal", "alignment", "window", "softcap"),
    *("scale", "bias_dtype", "sinks", "deterministic", "invariant"),
)
"""The fields of a spec that all calls with a row have in common."""
_shared_of = attrgetter(*SHARED)
QUERIES, KEYS = 192, 256
"""The lengths of the calls that are compared with a backend's claims. Any would do, but unequal ones."""


def candidates(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Returns the candidates of automatic choice, best first; with ``invariant`` the one backend of all calls."""
    if spec.invariant is None:
        return preference.order(spec, target.framework, target.device)
    paged, keeper = spec.paged is not None, None
    if spec.key_ranges_shape is None and not has_functions(spec):
        axes = None if spec.bias_shape is None else tuple(size == 1 for size in spec.bias_shape)
        in_pages = paged and spec.invariant == "batch"
        keeper = _keeper(_shared_of(spec), len(spec.alibi_shape or ()), axes, in_pages, target)
    if keeper is None:
        return _order(target, paged)
    return (FROM_PAGES.get(keeper, keeper) if paged else keeper,)


@lru_cache(maxsize=1024)  # a decoding loop asks with every new length
def _keeper(
    shared: tuple[Any, ...], slopes: int, axes: tuple[bool, ...] | None, in_pages: bool, target: Target
) -> str | None:
    """Returns the first backend that runs the most calls with a row; None if none runs any.

    Args:
        shared: the values of SHARED. slopes, axes: see ``_forms``.
        in_pages: whether all of a row's calls are on pages: "batch" does not promise the bits of other calls there.
    """
    forms = list(_forms(dict(zip(SHARED, shared, strict=True)), slopes, axes, in_pages))

    def runs(name: str) -> int:
        return sum(
            next(reasons_of(FROM_PAGES.get(name, name) if form.paged else name, form, target), None) is None
            for form in forms
        )

    names = _order(target, in_pages)
    best = max(names, key=runs, default=None)
    return best if best is not None and runs(best) else None


def _forms(
    shared: dict[str, Any], slopes: int, axes: tuple[bool, ...] | None, in_pages: bool
) -> Iterator[AttentionSpec]:
    """Yields a row's calls.

    Args:
        slopes: how many axes ``alibi_slopes`` has, or 0. axes: which axes of the bias have size 1, or None.
    """
    heads = shared["num_heads"]

    def tables(batch: int, queries: int, keys: int) -> dict[str, Any]:
        sizes = batch, heads, queries, keys
        bias = None if axes is None else tuple(1 if one else size for one, size in zip(axes, sizes, strict=True))
        return {"bias_shape": bias, "alibi_shape": (None, (heads,), (batch, heads))[slopes]}

    rows = {"batch": 2, "q_len": QUERIES, "kv_len": KEYS, **tables(2, QUERIES, KEYS)}
    square = {**rows, "q_len": KEYS, **tables(2, KEYS, KEYS)}
    packed = {**rows, "batch": 1, "documents": 2, "max_len_q": QUERIES, "max_len_k": KEYS, **tables(1, QUERIES, KEYS)}
    masked = {**rows, "mask_shape": (2, 1, QUERIES, KEYS)}
    for form, trains, lse in product(() if in_pages else (rows, square, packed, masked), (False, True), (False, True)):
        yield AttentionSpec(**shared, **form, needs_backward=trains, return_lse=lse)
    pages_fit = axes is None and shared["alignment"] == "bottom_right"  # no others are a call
    if pages_fit and (in_pages or shared["invariant"] == "prefix"):
        pool = PagedKV(num_pages=64, page_size=16, width=KEYS // 16)
        of_pages = {**packed, "paged": pool, "max_len_k": KEYS, **tables(2, QUERIES, KEYS)}
        for queries, lse in product((1, QUERIES // 2), (False, True)):
            yield AttentionSpec(**shared, **{**of_pages, "q_len": 2 * queries, "max_len_q": queries}, return_lse=lse)


def _order(target: Target, in_pages: bool) -> tuple[str, ...]:
    """Returns the usual order, in which a backend of one order of sums comes after faster ones."""
    names = backends.usual_order(target.framework, target.kind, paged=in_pages)
    in_order = backends.IN_ORDER.get(target.kind)
    if in_order is None or in_pages:
        return names
    fast = [name for name in names if name not in ("jax_xla", "math")]
    return (*fast, in_order, *(name for name in names if name not in fast))


def describe_same_bits(spec: AttentionSpec, backend: str | None, kind: str) -> str | None:
    """Returns what a call promises by ``invariant``, and the settings for it; None without a promise or a backend."""
    if spec.invariant is None or backend is None:
        return None
    lowered = backends.load(backend, kind).lower(spec)
    settings: dict[str, Any] = {}
    for each in (lowered, *(value for value in lowered.values() if isinstance(value, dict))):
        settings |= {name: each[name] for name in WORDS if each.get(name)}
    if not spec.needs_backward:
        settings.pop("deterministic", None)
    words = [WORDS[name].format(value) for name, value in settings.items()]
    why = ", ".join(words) if words else "work divided by heads and rows alone"
    return f"in every {'batch' if spec.invariant == 'batch' else 'batch, chunk and page'}: {why}"
