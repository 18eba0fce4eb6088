"""The order of automatic choice for a call: the ranking of the most similar measured call.

The measurements are data (``measured/<device>.json``). The most similar case is found in two steps: first the cases
that share the call's features, dropping features in the order of RELAXED until a case is left; then the nearest of
them by size. Without measurements of the device the static order of ``attn_core.backends`` applies.

The measurements were made in torch. In JAX the same kernels take as long, but for short calls the launch matters: one
through Python costs tens of microseconds, one by XLA itself less than ten. So in JAX the backends that XLA launches
come first for short calls. For all other calls both frameworks choose alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from operator import sub
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.call.arithmetic import pairs
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

FEW_QUERIES = 16
"""A row with at most this many queries is decoding: its speed depends on splitting the keys, not on tiling queries."""

HEAD_DIM_CLASSES = (64, 96, 128, 192, 256)
"""The widths that kernels are compiled for; a head_dim belongs to the first that is not smaller."""

SLOW = 4.0
"""Backends that took this many times as long as the best rank after backends that were not measured."""

SHORT = {False: 60.0, True: 250.0}
"""Microseconds in torch below which a call counts as short in JAX: forward alone (False), training (True).

Most backends cost that much in JAX through Python (``benchmarks/results/hopper.json``, JAX: the backends by the size of
a call), and below it the sweep measured little more than torch's own launch time.
"""


class Features(NamedTuple):
    """The kind of a call: properties that decide which kernel is fastest, at any size."""

    training: bool
    half: bool
    dense: bool
    decode: bool
    softcap: bool
    band: str
    alibi: bool
    packed: bool
    sinks: bool
    head_dim: int
    grouped: bool


RELAXED = ("grouped", "sinks", "head_dim", "packed", "alibi", "band", "softcap", "decode", "dense", "half")
"""The features in the order in which they are dropped if no measured case shares them all; never ``training``."""


class Case(NamedTuple):
    """One measured case.

    Attributes:
        name: of the case in the sweep.
        features, sizes: the results of the functions ``features`` and ``sizes`` for its spec.
        times: ``((backend, time relative to the fastest), ...)`` in the order of preference.
        microseconds: of the fastest.
        failed: the backends that raised or returned wrong numbers though they claim the case.
    """

    name: str
    features: Features
    sizes: tuple[float, ...]
    times: tuple[tuple[str, float], ...]
    microseconds: float
    failed: tuple[str, ...] = ()


def order(spec: AttentionSpec, framework: str, device: str) -> tuple[str, ...]:
    """Returns the candidates for automatic choice, best first. Pure: the measurements are part of the package."""
    where = (framework, backends.kind_of(device))
    if spec.symbolic:  # a symbol cannot be compared with measured sizes
        return (backends.PREFERENCE if spec.paged is None else backends.PAGED_PREFERENCE).get(where, ())
    if spec.paged is not None:
        return _paged_order(spec, backends.PAGED_PREFERENCE.get(where, ()))
    usual = backends.PREFERENCE.get(where, ())
    size = sizes(spec) if usual and measured(device) else ()
    case = _nearest_in_size(size, _alike_on(device, features(spec))) if size else None
    if case is None:
        return usual
    ranked = ranking(case, usual)
    if framework != "jax" or not _is_short(size, case, spec.needs_backward):
        return ranked
    first = [name for name in ranked if name not in case.failed and _launched_by_xla(name, spec, device)]
    return (*first, *(name for name in ranked if name not in first))


def _paged_order(spec: AttentionSpec, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the order for paged calls. With few queries, reading keys dominates, so DECODING comes first."""
    # With many queries the products dominate, so the usual order applies.
    if backends.DECODING not in usual or (spec.max_len_q or 0) > FEW_QUERIES:
        return usual
    return (backends.DECODING, *(name for name in usual if name != backends.DECODING))


def _is_short(size: tuple[float, ...], case: Case, training: bool) -> bool:
    """Returns whether a call would take less than SHORT: the case's time, scaled down if the call has fewer pairs."""
    fewer_pairs = size[0] - case.sizes[0]  # sizes are logarithms, so this is log2 of a ratio
    return case.microseconds * 2.0 ** min(0.0, fewer_pairs) < SHORT[training]


def _launched_by_xla(name: str, spec: AttentionSpec, device: str) -> bool:
    """Returns whether a JAX program runs a fused kernel of this backend without Python."""
    # jax_cudnn is JAX's own call of cuDNN, so XLA launches it without a program of ours.
    if name == "jax_cudnn":
        return True
    return backends.program_refusals(backends.load(name, backends.kind_of(device)), spec, device) == ()


def features(spec: AttentionSpec) -> Features:
    """Returns the features of a spec."""
    width = max(spec.head_dim, spec.value_dim)
    return Features(
        training=spec.needs_backward,
        half=spec.dtype in ("bfloat16", "float16"),
        dense=spec.mask_shape is not None or spec.bias_shape is not None,
        decode=_longest(spec)[0] <= FEW_QUERIES,
        softcap=spec.softcap is not None,
        band=_band(spec),
        alibi=spec.alibi_shape is not None,
        packed=spec.packed,
        sinks=spec.sinks,
        head_dim=next((limit for limit in HEAD_DIM_CLASSES if width <= limit), width),
        grouped=spec.group_size > 1,
    )


def sizes(spec: AttentionSpec) -> tuple[float, ...]:
    """Returns the size of a call, as base-2 logarithms of counts.

    The (query, key) pairs of all heads; the queries and the keys of all heads; the keys of the longest row; the width;
    the elements of mask and bias. The lengths of packed documents are on the device, so all are counted as long as the
    longest, which is known on the host.
    """
    heads, kv_heads = spec.batch * spec.num_heads, spec.batch * spec.num_kv_heads
    elements = sum(math.prod(shape) for shape in (spec.mask_shape, spec.bias_shape) if shape is not None)
    width = max(spec.head_dim, spec.value_dim)
    counts = (heads * pairs(spec), heads * spec.q_len, kv_heads * spec.kv_len, _longest(spec)[1], width, elements)
    # At least 1, because a call without mask or without rows has counts of 0.
    return tuple(round(math.log2(max(1.0, count)), 3) for count in counts)


def nearest(requested: Features, size: tuple[float, ...], cases: Sequence[Case]) -> Case | None:
    """Returns the measured case most similar to a call, or None if none was measured in its direction.

    As few features as possible are dropped; among the remaining cases the sum of size differences is smallest.
    """
    return _nearest_in_size(size, alike(requested, cases))


def _nearest_in_size(size: tuple[float, ...], cases: Sequence[Case]) -> Case | None:
    return min(cases, key=lambda case: sum(map(abs, map(sub, case.sizes, size))), default=None)


def alike(requested: Features, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Returns the cases in a call's direction that share its features, after dropping as few of RELAXED as possible."""
    in_direction = [case for case in cases if case.features.training is requested.training]
    dropped = [_dropped(requested, case.features) for case in in_direction]
    fewest = min(dropped, default=0)
    return tuple(case for case, count in zip(in_direction, dropped) if count == fewest)


@lru_cache(maxsize=1024)
def _alike_on(device: str, requested: Features) -> tuple[Case, ...]:
    """Returns ``alike`` for a device's measured cases. Cached, because a new shape rarely has new features."""
    return alike(requested, measured(device))


def _dropped(requested: Features, measured: Features) -> int:
    """Returns how many of RELAXED must be dropped, from the front, until the two agree in the rest."""
    differ = (getattr(requested, name) != getattr(measured, name) for name in RELAXED)
    return max((place + 1 for place, differs in enumerate(differ) if differs), default=0)


def ranking(case: Case, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all candidates in the order of a case; ``usual`` is the order without measurements.

    Fast backends, best first; then unmeasured ones in the usual order; then slow ones; failed ones last. JAX's own
    kernels rank directly before "math": both are plain operations, but JAX's need no bridge.
    """
    fast = [name for name, time in case.times if time < SLOW]
    slow = [name for name, time in case.times if time >= SLOW]
    from_jax = [name for name in usual if name.startswith("jax_")]  # the sweep runs in torch, so never measured
    unknown = [name for name in usual if name not in (*fast, *slow, *case.failed, *from_jax)]
    ranked = [*fast, *(name for name in unknown if name != "math"), *slow]
    ranked += [name for name in ("math",) if name in unknown]
    # A backend that failed stays a candidate, because it may be the only one that claims the call.
    ranked += [name for name in case.failed if name in usual]
    at = ranked.index("math") if "math" in ranked else len(ranked)
    return (*ranked[:at], *from_jax, *ranked[at:])


@cache
def measured(device: str) -> tuple[Case, ...]:
    """Returns the measured cases of a device such as "sm90"; none if it was not measured."""
    file = files("attn_core.selection.measured") / f"{device}.json"
    return cases_of(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else ()


def cases_of(table: dict[str, Any]) -> tuple[Case, ...]:
    """Returns the cases of a derived table, in the format of the files."""
    return tuple(
        Case(
            case["name"],
            Features(**case["features"]),
            tuple(case["sizes"]),
            tuple(case["times"].items()),
            case["microseconds"],
            tuple(case.get("failed", ())),
        )
        for case in table["cases"]
    )


def _band(spec: AttentionSpec) -> str:
    """Returns "full" (nothing is hidden, whatever the options are), "causal" or "window"."""
    edge = band(spec)
    if edge.left is None and edge.right is None:
        return "full"
    lengths = _longest(spec)
    # A window longer than the row hides nothing, so the call costs as much as one without it.
    if band(spec, *lengths).hides_nothing(*lengths):
        return "full"
    return "causal" if spec.causal and edge.left is None else "window"


def _longest(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the queries and keys of a row, or of the longest packed document."""
    if not spec.packed:
        return spec.q_len, spec.kv_len
    return spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len
