"""The order of automatic choice for a call: by the time that a cost model predicts for each backend.

The models are data: the table of the device, shipped with the package or written by ``attn tune`` (tables.py). Without
a table of the device the static order of ``attn_core.backends`` applies, corrected by figures that others published
(tables.py); for JAX on a CPU ``xla_is_faster`` says for which calls ``jax_xla`` comes first.

On a GPU the models were measured in torch. In JAX the kernels take as long, but the host's time differs: XLA launches
some kernels itself, and reaches the others through a callback into Python, which costs the host more than torch does.
So both frameworks choose alike unless the host's time decides. All times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from operator import attrgetter, mul
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.call.functions import has_functions
from attn_core.call.masks import band
from attn_core.call.spec import FLOAT_BITS, AttentionSpec, PagedKV
from attn_core.selection.cost_model import FEW_QUERIES, WIDTHS, Kind, Models, is_ragged, kind_of_call, sizes_of_call
from attn_core.selection.tables import Figures, Table, figures_for, table_in_force
from attn_core.selection.target import Target, reasons_of

CAUTION = 0.25
"""A predicted time counts as longer by this many times the model's error, so that doubtful backends lose ties."""

SLOW = 4.0
"""Backends that would take this many times as long as the best rank after backends without a model."""

HOST = 2.0
"""On a GPU, the host's time of a shipped table counts this many times.

The models saw other hosts, which ran one call after another. Hosts of the same cards took 2.3 times as long on
2026-12-01, and a host that trains a model runs more than attention. A kernel that needs the host less loses little
where the host is fast: over the calls of the sweeps .3 % in training and 1 % forward."""

CALLBACK_TABLE = {False: 250.0, True: 500.0}
"""Host microseconds, forward (False) and training (True), of a callback for a mask or a bias, which it prepares. Those
of the callback itself are in each backend's ``Timing``."""

XLA_PRODUCT = {False: 65e-9, True: 180e-9}
"""Device microseconds of ``jax_xla`` on a GPU, forward and training, for each product of a score: as many as both head
dims have channels, hidden or not. Small calls took 30 to 100 and 90 to 290 for 1e9 of them, large ones the least.
From jitted calls on an H200 on 2026-12-01."""

XLA_PRODUCT_OF_WIDE = XLA_PRODUCT | {True: 40e-9}
"""The same for heads wider than WIDTHS. No table was measured with them, and other kernels' gradients are slow: on an
H200 on 2026-11-30 the training of ``jax_xla`` took 2.5 and 13 ms where ``sdpa_efficient`` took 8.8 and 48."""

XLA_BYTE = 4e-7
"""Device microseconds of ``jax_xla`` for each byte of keys and values: what decoding takes."""

HIDDEN_BY_HOST = 0.5
"""In training, a kernel that XLA launches takes about this share of the predicted time if torch's host takes as long.

There the fit saw the host's time alone. The share grows to 1 for kernels that take twice as long as the host. From
jitted calls on an H200 and an H100."""

TINY_HEADS, TINY_SCORES = 24, 2**12
"""Heads of all rows, and scores, up to which a call takes as long as the callback into Python."""

SMALL_SCORES = 2**18
"""Scores (batch * heads * q_len * kv_len) up to which XLA is faster than the math backend, which skips blocks."""

SMALL_GRADIENT = 2**21
"""The same for gradients of half precision, compared with torch's flash kernel."""


class Candidate(NamedTuple):
    """A backend that has a model, for one kind of call."""

    place: int  # in the usual order; it decides between equal times
    name: str
    backend: backends.Backend
    caution: float  # how many times as long its predicted times count
    host: float  # the host's time, with caution and ``weight_of_host``
    rates: tuple[float, ...]  # for each size, with caution

    def shortened(self, share: float) -> Candidate:
        """Returns the candidate with this share of its times."""
        return self._replace(host=share * self.host, rates=tuple(share * rate for rate in self.rates))


def order(spec: AttentionSpec, framework: str, device: str) -> tuple[str, ...]:
    """Returns the candidates for automatic choice, best first. The same in a process for the same arguments.

    For calls with ``invariant`` ask ``candidates`` instead.
    """
    paged, kind = spec.paged is not None, backends.kind_of(device)
    # With few queries, reading keys dominates. With many, the products do, so the usual order applies.
    few_queries = paged and not spec.symbolic and (spec.max_len_q or 0) <= FEW_QUERIES  # a symbol cannot be compared
    usual = backends.usual_order(framework, kind, paged=paged, few_queries=few_queries)
    if spec.symbolic or paged:
        return usual
    if _table(framework, device) is not None and (timed := _order_by_time(_of_round_lengths(spec), framework, device)):
        return timed
    if (framework, device) == ("jax", "cpu") and xla_is_faster(spec):
        plain = backends.plain_backend("jax")
        return (plain, *(name for name in usual if name != plain))
    figures = published(spec, framework, device)
    return usual if figures is None else figures.ordered(usual)


@from_records(maxsize=4096)
def _order_by_time(spec: AttentionSpec, framework: str, device: str) -> tuple[str, ...]:
    """Returns the candidates by predicted time; () if the device's table has none of them."""
    timed = _cautious(spec, framework, device)
    return _ranked(timed, backends.usual_order(framework, backends.kind_of(device))) if timed else ()


def _of_round_lengths(spec: AttentionSpec) -> AttentionSpec:
    """Returns a dense call with lengths of at most five binary digits before the zeros, rounded up.

    So the steps of a decoding loop, and prompts of similar lengths, share one order. All backends take longer alike, by
    at most a sixteenth. Up to 4096 tokens the number of tiles of 128 stays right.
    """
    if spec.documents is not None or spec.alibi_shape or spec.key_ranges_shape or spec.symbolic:
        return spec
    q_len, kv_len = _round_up(spec.q_len), _round_up(spec.kv_len)
    if is_ragged(spec) and kv_len % 8 == 0:
        kv_len -= 1  # so that it is of the same kind
        q_len = kv_len if spec.q_len == spec.kv_len else q_len
    if q_len == spec.q_len and kv_len == spec.kv_len:
        return spec
    mask_shape, bias_shape = (
        shape and (*shape[:2], 1 if shape[2] == 1 else q_len, 1 if shape[3] == 1 else kv_len)
        for shape in (spec.mask_shape, spec.bias_shape)
    )
    return spec.with_lengths(spec.batch, q_len, kv_len, mask_shape, bias_shape)


def _round_up(length: int) -> int:
    step = 1 << max(0, length.bit_length() - 5)
    return -(-length // step) * step


def predicted(spec: AttentionSpec, framework: str, device: str) -> dict[str, float]:
    """Returns the predicted microseconds of each backend that has a model, whether or not it can run the call.

    They are what ``order`` compares, but for its cautions: with ``weight_of_host``.
    """
    if spec.symbolic or spec.paged is not None:
        return {}
    rounded = _of_round_lengths(spec)  # so that explain shows the times that ``order`` compares
    cautions = {each.name: each.caution for each in _candidates(framework, device, kind_of_call(rounded))}
    return {name: time / cautions.get(name, 1.0) for time, _, name in _cautious(rounded, framework, device)}


def source(framework: str, device: str) -> str | None:
    """Returns what the order of a device is derived from, as text; None for the static order."""
    table = _table(framework, device)
    return None if table is None else table.source


def published(spec: AttentionSpec, framework: str, device: str) -> Figures | None:
    """Returns the figures of others that decide the order of a call; None if there are none, or a table decides."""
    return figures_for(spec, device) if _table(framework, device) is None else None


def _cautious(spec: AttentionSpec, framework: str, device: str) -> list[tuple[float, int, str]]:
    """Returns (predicted time with caution, place in the usual order, name) of each backend that has a model."""
    table = _table(framework, device)
    if table is None:
        return []
    known = [each for each in _candidates(framework, device, kind_of_call(spec)) if each.backend.modelled(spec)]
    sizes = sizes_of_call(spec, table.tile, table.processors)
    if spec.causal and not band(spec).offset and not (spec.mask_shape is spec.bias_shape is None):
        known = [each.shortened(each.backend.timing.beside_table) for each in known]
    on_device = [sum(map(mul, each.rates, sizes)) for each in known]
    if framework == "jax" and device != "cpu":
        timed = [
            (_predicted_in_jax(each, time, spec, device), each.place, each.name) for each, time in zip(known, on_device)
        ]
        if not timed:
            return []
        # torch does not run JAX's own operations, so they have no model.
        plain = backends.plain_backend("jax")
        launch = backends.load(plain, backends.kind_of(device)).timing.in_xla[spec.needs_backward]
        return [*timed, (launch + _device_time_of_xla(spec), timed[-1][1] + 1, plain)]
    return [(max(each.host, time), each.place, each.name) for each, time in zip(known, on_device)]


def _device_time_of_xla(spec: AttentionSpec) -> float:
    """Returns the microseconds that JAX's own operations take on a GPU, but for their launch."""
    wide = max(spec.head_dim, spec.value_dim) > WIDTHS[-1]
    product = (XLA_PRODUCT_OF_WIDE if wide else XLA_PRODUCT)[spec.needs_backward]
    channels = spec.head_dim + spec.value_dim
    products = spec.batch * spec.num_heads * spec.q_len * spec.kv_len * channels
    bytes_of_keys = spec.batch * spec.kv_len * spec.num_kv_heads * channels * FLOAT_BITS[spec.dtype] // 8
    return product * products + XLA_BYTE * bytes_of_keys


def _table(framework: str, device: str) -> Table | None:
    # A GPU's kernels are measured in torch.
    return table_in_force(framework if device == "cpu" else "torch", device)


@from_records(maxsize=4096)  # because a new shape often is of a known kind
def _candidates(framework: str, device: str, kind: Kind) -> tuple[Candidate, ...]:
    """Returns the backends that have a model, in the usual order."""
    cautions, models = _models(framework, device, kind.training)
    grows = framework == "torch" and kind.decode and not (kind.training or kind.mask or kind.bias)
    where, table = backends.kind_of(device), _table(framework, device)
    weight = 1.0 if table is None else weight_of_host(table, framework, where)
    found: list[Candidate] = []
    for (name, caution), (host, *rates) in zip(cautions.items(), models.of_kind(kind) if cautions else ()):
        backend = backends.load(name, where)
        of_host, of_device = backend.timing.of_model
        host = host * of_host * weight + grows * backend.timing.new_length
        found.append(Candidate(len(found), name, backend, caution, host, tuple(rate * of_device for rate in rates)))
    return tuple(found)


def weight_of_host(table: Table, framework: str, kind: str) -> float:
    """Returns how many times the host's time in a table counts.

    In JAX, XLA or a callback launches the kernels, and these have times of their own.

    Args:
        kind: of the device: "cpu" has no host beside it.
    """
    return HOST if framework == "torch" and kind != "cpu" and not table.of_this_host else 1.0


@from_records(maxsize=64)
def _models(framework: str, device: str, training: bool) -> tuple[dict[str, float], Models]:
    """Returns the caution of each backend that has a model in a direction, in the usual order, and these models."""
    table = _table(framework, device)
    known = {} if table is None else table.models[training]
    kind = backends.kind_of(device)
    named = {}
    for name in backends.usual_order(framework, kind):
        of_others = backends.load(name, kind).timing.model_of
        kernel = name if of_others is None else of_others[training]
        if kernel in known:
            named[name] = known[kernel]
    cautions = {name: caution(name, kind, model.error) for name, model in named.items()}
    return cautions, Models(list(named.values()), list(cautions.values()))


def caution(name: str, kind: str, error: float) -> float:
    """Returns how many times as long the predicted times of a backend count, by the error of its model."""
    return backends.load(name, kind).timing.caution * math.exp(CAUTION * error)


@from_records(maxsize=1)
def behind() -> tuple[dict[str, str], dict[str, str]]:
    """Returns what each backend never ranks before: whatever the call, and without a predicted time."""
    every = [(name, backend.timing) for name in backends.names() for backend in backends.records(name).values()]
    always = {name: timing.behind for name, timing in every if timing.behind is not None}
    without = {name: timing.behind_without_time for name, timing in every if timing.behind_without_time is not None}
    return always, without


def _plain() -> tuple[str, ...]:
    """Returns the backends of the frameworks' own operations."""
    return backends.plain_backend("jax"), backends.plain_backend("torch")


def ranking(times: Mapping[str, float], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all candidates, best first, by their predicted times with caution; ``usual`` is the static order."""
    return _ranked([(times[name], place, name) for place, name in enumerate(usual) if name in times], usual)


def _ranked(timed: list[tuple[float, int, str]], usual: tuple[str, ...]) -> tuple[str, ...]:
    timed.sort()
    limit = SLOW * timed[0][0] if timed else 0.0
    fast = sum(time < limit for time, _, _ in timed)
    return _completed(tuple(name for _, _, name in timed), fast, usual)


@from_records(maxsize=4096)
def _completed(timed: tuple[str, ...], fast: int, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all candidates: ``timed`` with the backends without a model between the ``fast`` first and the others.

    JAX's own operations rank directly before torch's if neither has a model: JAX's need no bridge.
    """
    unknown = [name for name in usual if name not in timed]
    of_torch = backends.plain_backend("torch")
    # It may be the only one of ``timed`` that can run a call, and where it comes last (on a GPU) it is slow even if
    # nothing says so.
    if of_torch in timed[:fast] and usual[-1] == of_torch:
        fast = timed.index(of_torch)
    late = [name for name in unknown if name in _plain()]
    ranked = [*timed[:fast], *(name for name in unknown if name not in late), *timed[fast:]]
    place = ranked.index(of_torch) if of_torch in ranked else len(ranked)
    ranked[place:place] = late
    always, without_time = behind()
    untimed = {name: ahead for name, ahead in without_time.items() if name not in timed}
    for name, ahead in (always | untimed).items():
        if ahead in timed and name in ranked and ranked.index(name) < ranked.index(ahead):
            ranked.remove(name)
            ranked.insert(ranked.index(ahead) + 1, name)
    return tuple(ranked)


def xla_is_faster(spec: AttentionSpec) -> bool:
    """Returns whether XLA's operations run a call with numbers as sizes faster on a CPU than torch's kernels.

    torch's kernels share the heads of a call among all cores and skip hidden blocks. XLA multiplies the heads' matrices
    one after another, so it is slower from a few heads on: up to nine times on two cores. It wins for calls so small
    that the callback into Python counts, and for small gradients of half precision, for which torch's kernel is slow.

    The limits follow random calls on two cores of an Intel Xeon, and ``benchmarks/results/sweep-jax-cpu.json`` judges
    them on other calls. On a single core XLA is faster for more calls; ``attn tune --framework jax`` measures it.
    """
    heads = spec.batch * spec.num_heads
    scores = heads * spec.q_len * spec.kv_len
    if heads <= TINY_HEADS and scores <= TINY_SCORES:
        return True
    if spec.packed:
        return False  # XLA computes the pairs of different documents, too
    if spec.softcap is not None or spec.value_dim != spec.head_dim:  # torch's flash kernel has neither
        return scores <= SMALL_SCORES
    return spec.needs_backward and spec.dtype in ("bfloat16", "float16") and scores <= SMALL_GRADIENT


def _predicted_in_jax(candidate: Candidate, device_time: float, spec: AttentionSpec, device: str) -> float:
    """Returns the predicted time of a backend, with caution; ``device_time``: the device's own, with caution."""
    backend, caution, host_in_torch = candidate.backend, candidate.caution, candidate.host
    timing, training = backend.timing, spec.needs_backward
    has_table = spec.mask_shape is not None or spec.bias_shape is not None
    slowest = timing.in_callback[training] + has_table * CALLBACK_TABLE[training]
    if device_time >= max(caution * slowest, 2 * host_in_torch):
        return device_time  # the device surely takes longer than the host
    # XLA launches a backend of JAX without a program of ours.
    if backend.framework == "torch" and backend.program_refuses(spec, device) != ():
        return max(caution * slowest, device_time)
    if training and host_in_torch:
        device_time *= min(1.0, max(HIDDEN_BY_HOST, device_time / (2 * host_in_torch)))
    return max(caution * timing.in_xla[training], device_time)


# Calls with ``invariant``. Backends round differently, so one backend must compute all calls in which a row's bits are
# promised to be the same. Which one depends on no length, and on no form of the call: dense or packed, with a mask for
# padding, for training or inference, and with "prefix" also from pages. It is the first backend in the usual order that
# runs the most of them.

SETTINGS = {
    "query_tile": "tiles of {} positions",
    "key_tile": "of {} keys",
    "tile_keys": "tiles of {} keys",
    "share_keys": "added in shares of {}",
    "num_splits": "keys in {} part",
    "deterministic": "gradients summed in order",
}
"""The settings of a kernel that keep a call's bits the same, in words, by their names in ``Backend.lower``."""

BECAUSE = "it runs a row's calls of every length, dense, packed, masked and in training, so their bits are equal"
"""Why a backend was chosen for a call with ``invariant``."""

SHARED = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "value_dim",
    "dtype",
    "causal",
    "alignment",
    "window",
    "softcap",
    "scale",
    "bias_dtype",
    "sinks",
    "deterministic",
    "invariant",
)
"""The fields of a spec that all calls with a row have in common."""
_shared_of = attrgetter(*SHARED)
QUERIES, KEYS = 192, 256
"""The lengths of the calls that are compared with a backend's claims. Any would do, but unequal ones."""


def candidates(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    """Returns the candidates of automatic choice, best first; with ``invariant`` the one backend of all calls."""
    if spec.invariant is None:
        return order(spec, target.framework, target.device)
    paged, keeper = spec.paged is not None, None
    if spec.key_ranges_shape is None and not has_functions(spec):
        axes = None if spec.bias_shape is None else tuple(size == 1 for size in spec.bias_shape)
        in_pages = paged and spec.invariant == "batch"
        keeper = _keeper(_shared_of(spec), len(spec.alibi_shape or ()), axes, in_pages, target)
    if keeper is None:
        return _order(target, paged)
    return (_in_pages(keeper, target.kind) if paged else keeper,)


def _in_pages(name: str, kind: str) -> str:
    return backends.load(name, kind).in_pages or name


@from_records(maxsize=1024)  # a decoding loop asks with every new length
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
            next(reasons_of(_in_pages(name, target.kind) if form.paged else name, form, target), None) is None
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
    in_order = backends.in_order_on(target.kind)
    if in_order is None or in_pages:
        return names
    fast = [name for name in names if name not in _plain()]
    return (*fast, in_order, *(name for name in names if name not in fast))


def describe_same_bits(spec: AttentionSpec, backend: str | None, kind: str) -> str | None:
    """Returns what a call promises by ``invariant``, and the settings for it; None without a promise or a backend."""
    if spec.invariant is None or backend is None:
        return None
    lowered = backends.load(backend, kind).lower(spec)
    settings: dict[str, Any] = {}
    for each in (lowered, *(value for value in lowered.values() if isinstance(value, dict))):
        settings |= {name: each[name] for name in SETTINGS if each.get(name)}
    if not spec.needs_backward:
        settings.pop("deterministic", None)
    words = [SETTINGS[name].format(value) for name, value in settings.items()]
    why = ", ".join(words) if words else "work divided by heads and rows alone"
    return f"in every {'batch' if spec.invariant == 'batch' else 'batch, chunk and page'}: {why}"
