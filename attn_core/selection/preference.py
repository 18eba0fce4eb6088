"""The order of automatic choice for a call: what was fastest on the measured call that is most like it.

The measurements are data (``measured/<device>.json``). A call finds its like in two steps: the cases that
share its features, where features are given up in the order of RELAXED until some case is left; then the nearest of
those by size. Where nothing was measured the static order of ``attn_core.backends`` stands.

What was measured is torch. From JAX the same kernels take as long, but where they are short it counts who launches
them: a call through Python costs tens of microseconds, one that XLA launches by itself less than ten. So in JAX those
come first for calls that are short, and nowhere else: both frameworks then choose alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.call.arithmetic import pairs
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

FEW_QUERIES = 16
"""Up to so many queries a row is decoding: what counts there is how the keys are split, not how queries are tiled."""

HEAD_DIM_CLASSES = (64, 96, 128, 192, 256)
"""The widths that kernels are compiled for; a head_dim belongs to the first that holds it."""

SLOW = 4.0
"""Measured backends that took so many times as long as the best stand behind those that were never measured."""


SHORT = {False: 60.0, True: 250.0}
"""Forward alone, and training: calls whose fastest backend takes fewer microseconds in torch are short in JAX.

That is what most backends cost there through Python (``benchmarks/results/hopper.json``, JAX: the backends by the size
of a call), and about where torch's own launching is all that the sweep has measured.
"""


class Features(NamedTuple):
    """What kind of call it is: differences that change which kernel is fastest at any size."""

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
"""The features in the order in which they are given up when no measured case shares them all; ``training`` never is."""


class Case(NamedTuple):
    """One measured case.

    Attributes:
        name: of the case in the sweep.
        features, sizes: what ``features`` and ``sizes`` say of its spec.
        times: ``((backend, time relative to the fastest), ...)`` in the order of preference.
        microseconds: of the fastest.
        failed: the backends that raised or gave wrong numbers, though they claim the case.
    """

    name: str
    features: Features
    sizes: tuple[float, ...]
    times: tuple[tuple[str, float], ...]
    microseconds: float
    failed: tuple[str, ...] = ()


def order(spec: AttentionSpec, framework: str, device: str) -> tuple[str, ...]:
    """The candidates for automatic choice, best first. Pure: the measurements are part of the package."""
    where = (framework, backends.kind_of(device))
    if spec.symbolic:  # of no size that was measured
        return (backends.PREFERENCE if spec.paged is None else backends.PAGED_PREFERENCE).get(where, ())
    if spec.paged is not None:
        return _paged_order(spec, backends.PAGED_PREFERENCE.get(where, ()))
    usual = backends.PREFERENCE.get(where, ())
    cases = measured(device) if usual else ()
    if not cases:
        return usual
    case = nearest(features(spec), sizes(spec), cases)
    if case is None:
        return usual
    found = ranking(case, usual)
    if framework != "jax" or not _is_short(spec, case):
        return found
    first = [name for name in found if name not in case.failed and _launched_by_xla(name, spec, device)]
    return (*first, *(name for name in found if name not in first))


def _paged_order(spec: AttentionSpec, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Where the queries are few, reading the keys is all, and the kernel that splits them best comes first."""
    if backends.DECODING not in usual or (spec.max_len_q or 0) > FEW_QUERIES:
        return usual
    return (backends.DECODING, *(name for name in usual if name != backends.DECODING))


def _is_short(spec: AttentionSpec, case: Case) -> bool:
    """Whether a call would take less than SHORT: the case's time, in proportion where the call has fewer pairs."""
    pairs_less = sizes(spec)[0] - case.sizes[0]  # as a power of 2
    return case.microseconds * 2.0 ** min(0.0, pairs_less) < SHORT[spec.needs_backward]


def _launched_by_xla(name: str, spec: AttentionSpec, device: str) -> bool:
    """Whether a JAX program runs a fused kernel of this backend without Python."""
    if name == "jax_cudnn":
        return True
    return backends.program_refusals(backends.load(name, backends.kind_of(device)), spec, device) == ()


def features(spec: AttentionSpec) -> Features:
    """The kind of call that a spec describes."""
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
    """How large a call is, as base-2 logarithms of counts.

    The (query, key) pairs of all heads; the queries and the keys of all heads; the keys of the longest row; the width;
    the elements of mask and bias. The lengths of packed documents are on the device: the longest, which is on the host,
    stands for them all.
    """
    heads, kv_heads = spec.batch * spec.num_heads, spec.batch * spec.num_kv_heads
    given = sum(math.prod(shape) for shape in (spec.mask_shape, spec.bias_shape) if shape is not None)
    width = max(spec.head_dim, spec.value_dim)
    counts = (heads * pairs(spec), heads * spec.q_len, kv_heads * spec.kv_len, _longest(spec)[1], width, given)
    return tuple(round(math.log2(max(1.0, count)), 3) for count in counts)


def nearest(asked: Features, size: tuple[float, ...], cases: Sequence[Case]) -> Case | None:
    """The measured case most like a call, or None if nothing was measured in its direction.

    Features are equal as far as any case has them; among those cases the sizes differ least in sum.
    """
    in_direction = [case for case in cases if case.features.training is asked.training]
    given_up = [_given_up(asked, case.features) for case in in_direction]
    fewest = min(given_up, default=0)
    alike = [case for case, count in zip(in_direction, given_up) if count == fewest]
    return min(alike, key=lambda case: sum(abs(one - other) for one, other in zip(case.sizes, size)), default=None)


@lru_cache(maxsize=4096)
def _given_up(asked: Features, found: Features) -> int:
    """How many of RELAXED must be given up, from the front, until the two are equal in the rest."""
    return max(
        (place + 1 for place, name in enumerate(RELAXED) if getattr(asked, name) != getattr(found, name)), default=0
    )


def ranking(case: Case, usual: tuple[str, ...]) -> tuple[str, ...]:
    """All candidates in the order that a case suggests; ``usual`` is the order without measurements.

    What was fast, best first; then what the case says nothing of, as usual; then what was slow; last what failed. JAX's
    own kernels stand before "math", wherever that is: both are plain operations, and JAX's need no bridge.
    """
    fast = [name for name, time in case.times if time < SLOW]
    slow = [name for name, time in case.times if time >= SLOW]
    from_jax = [name for name in usual if name.startswith("jax_")]
    unknown = [name for name in usual if name not in (*fast, *slow, *case.failed, *from_jax)]
    found = [*fast, *(name for name in unknown if name != "math"), *slow]
    found += [name for name in ("math",) if name in unknown]
    found += [name for name in case.failed if name in usual]
    at = found.index("math") if "math" in found else len(found)
    return (*found[:at], *from_jax, *found[at:])


@cache
def measured(device: str) -> tuple[Case, ...]:
    """The measured cases of a device such as "sm90"; none where it was not measured."""
    file = files("attn_core.selection.measured") / f"{device}.json"
    return cases_of(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else ()


def cases_of(table: dict[str, Any]) -> tuple[Case, ...]:
    """The cases of a derived table, as it is written to a file."""
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
    """ "full" (nothing hidden, whatever was asked for), "causal" or "window"."""
    edge = band(spec)
    if edge.left is None and edge.right is None:
        return "full"
    lengths = _longest(spec)
    if band(spec, *lengths).hides_nothing(*lengths):
        return "full"
    return "causal" if spec.causal and edge.left is None else "window"


def _longest(spec: AttentionSpec) -> tuple[int, int]:
    """The queries and keys of a row, or of the longest packed document."""
    if not spec.packed:
        return spec.q_len, spec.kv_len
    return spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len
