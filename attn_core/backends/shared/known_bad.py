"""Known-bad kernels: what versions of upstream packages compute wrongly, as rows of ``known_bad.json``.

A row that is "refused" adds a refusal to its backends for the calls and versions it describes. A row that is "avoided"
refuses nothing: it says how our own calls stay clear of the fault. Both name a link and the test that shows the fault.
The conditions of a row are data in a closed vocabulary, QUANTITIES and RELATIONS, and ``holds`` evaluates them.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from attn_core.backends.shared.aten_masks import explicit, needed_band
from attn_core.backends.shared.kernel_limits import dq_elements
from attn_core.backends.shared.rewrites import whole_eights
from attn_core.backends.support import compute_capability, kind_of
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

DATA = Path(__file__).with_suffix(".json")
EVERY_CALL = "every call"
"""The ``when`` of a row without conditions: it must be said, so that an empty list refuses nothing by accident."""

Version = tuple[int, ...]


class Condition(NamedTuple):
    """A comparison of a quantity of the call with a number or a word."""

    quantity: str
    relation: str
    value: Any


class Row(NamedTuple):
    """One fault of one package.

    Attributes:
        name: stable and unique.
        backends: those whose kernel has the fault; ``"xformers:flash"`` is one operator of a backend that chooses
            between several, which asks about it itself.
        package: the package that has the fault, as ``Build.version`` of the backends counts it.
        versions: the faulty versions, such as ``">=9.19,<9.25.1"``; empty for all.
        devices: kinds (``"cuda"``), devices (``"sm90"``) or ranges (``"sm100-sm119"``).
        direction: "forward" concerns every call, "backward" only calls that may need a gradient.
        when: the conditions, which must all hold, or EVERY_CALL.
        handling: "refused" or "avoided".
        how: for "avoided", how our calls stay clear of the fault.
        symptom: what goes wrong.
        link: to the public report, or to the faulty code.
        found: the day of the report, or the day on which our own test found it.
        test: the test in tests/backends/test_known_bad.py that turns red once upstream has mended the fault.
    """

    name: str
    backends: tuple[str, ...]
    package: str
    versions: str
    devices: tuple[str, ...]
    direction: str
    when: tuple[Condition, ...] | str
    handling: str
    how: str
    symptom: str
    link: str
    found: str
    test: str

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions; none if the row is about every call."""
        return () if isinstance(self.when, str) else self.when


class Quantity(NamedTuple):
    """A fact of a call that conditions may compare: what it is, the fields of the spec to show, and its value."""

    meaning: str
    shown: tuple[str, ...]
    value: Callable[[AttentionSpec], Any]


def _window(spec: AttentionSpec) -> str:
    left, right, _ = needed_band(spec)
    if right == 0:
        return "causal" if left is None else "causal window"
    return "none" if left is None and right is None else "two-sided"


def _misplaced_window(spec: AttentionSpec) -> bool:
    """Returns whether FlashAttention 2's rule for open right sides changes the window of a call without documents.

    It takes a right side of kv_len or more as open, and an open one as kv_len.
    """
    edge, kv_len = band(spec), spec.kv_len
    if spec.packed or spec.q_len <= kv_len + 1 or (edge.right is not None and edge.right < kv_len):
        return False
    if edge.left is None or edge.left >= kv_len:  # the kernel then has no window at all
        return edge.right is not None and not edge.hides_nothing(spec.q_len, kv_len)
    return edge.right != kv_len


def _mask_elements(spec: AttentionSpec) -> int:
    rows = max((shape[2] for shape in (spec.mask_shape, spec.bias_shape) if shape), default=1)
    return rows * whole_eights(spec.kv_len) if rows > 1 else 0


def _surplus_queries(spec: AttentionSpec) -> int:
    # A packed document may have no key at all.
    return (spec.max_len_q or 0) if spec.packed else spec.q_len - spec.kv_len


LENGTHS = ("q_len", "kv_len")
QUANTITIES = {
    "q_len": Quantity("queries of a row", ("q_len",), lambda spec: spec.q_len),
    "kv_len % 64": Quantity("keys after the last whole tile of 64", ("kv_len",), lambda spec: spec.kv_len % 64),
    "kv_len % 128": Quantity("keys after the last whole tile of 128", ("kv_len",), lambda spec: spec.kv_len % 128),
    "lengths % 128": Quantity(
        "queries or keys after the last whole tile of 128", LENGTHS, lambda spec: spec.q_len % 128 or spec.kv_len % 128
    ),
    "surplus queries": Quantity("queries beyond the number of keys", LENGTHS, _surplus_queries),
    "packed": Quantity("documents in one row", ("documents",), lambda spec: spec.packed),
    "causal alone": Quantity(
        "causal or a causal window, without mask and bias",
        ("causal", "mask_shape", "bias_shape"),
        lambda spec: needed_band(spec).right == 0 and not explicit(spec),
    ),
    "square causal": Quantity(
        "causal with as many queries as keys", ("causal",), lambda spec: spec.causal and spec.q_len == spec.kv_len
    ),
    "window": Quantity("none, causal, causal window or two-sided", ("window",), _window),
    "misplaced window": Quantity(
        "a window that FlashAttention 2 widens or cuts, because it takes a long right side as open, and that as kv_len",
        ("window", *LENGTHS),
        _misplaced_window,
    ),
    "mask or bias": Quantity("a mask or a bias", ("mask_shape", "bias_shape"), explicit),
    "offset": Quantity("keys before the diagonal's start", LENGTHS, lambda spec: needed_band(spec).offset),
    "mask elements": Quantity(
        "elements of a mask or bias with a row for each query, for one head", LENGTHS, _mask_elements
    ),
    "dq elements": Quantity(
        "elements of FlashAttention 2's float32 sums of dq", ("batch", "q_len", "num_heads", "head_dim"), dq_elements
    ),
}
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le},
    **{">": operator.gt, ">=": operator.ge},
}


@cache
def rows() -> tuple[Row, ...]:
    """Returns all rows."""
    return tuple(_row(**fields) for fields in json.loads(DATA.read_text(encoding="utf-8")))


def _row(backends: list[str], devices: list[str], when: str | list[list[Any]], **fields: str) -> Row:
    conditions = when if isinstance(when, str) else tuple(Condition(*condition) for condition in when)
    return Row(backends=tuple(backends), devices=tuple(devices), when=conditions, **fields)


@lru_cache(maxsize=512)
def rows_of(backend: str, device: str, version: Version = ()) -> tuple[Row, ...]:
    """Returns the rows that refuse calls of a backend on a device.

    Args:
        version: of the installed package; empty if it is unknown, as in plans for another machine. That counts as a
            faulty version, except for rows about every call: one bad version would hide the backend from every plan.
    """
    return tuple(
        row
        for row in rows()
        if row.handling == "refused" and backend in row.backends and concerns(row, device, version)
        if version or row.when != EVERY_CALL
    )


def rows_about(backend: str, device: str, version: Version = ()) -> tuple[Row, ...]:
    """Returns the rows that refuse calls of a backend, or of one of its operators; see ``rows_of``."""
    names = dict.fromkeys(name for row in rows() for name in row.backends if name.partition(":")[0] == backend)
    return tuple(row for name in names for row in rows_of(name, device, version))


def versioned_package(backend: str) -> str | None:
    """Returns the package whose version decides about a refusal of a backend, or None."""
    found = (row.package for row in rows() if row.handling == "refused" and backend in row.backends and row.versions)
    return next(found, None)


def concerns(row: Row, device: str, version: Version) -> bool:
    """Returns whether a row is about a device and an installed version; an unknown version counts as faulty."""
    here = any(_covers(named, device) for named in row.devices)
    return here and (not version or includes(row.versions, version))


def _covers(named: str, device: str) -> bool:
    first, dash, last = named.partition("-")
    if dash:
        return compute_capability(first) <= compute_capability(device) <= compute_capability(last)
    return named in (device, kind_of(device))


def includes(versions: str, version: Version) -> bool:
    """Returns whether a version is among ``versions``, such as ``">=9.19,<9.25.1,!=9.24.1"``; empty is all."""
    comparisons = re.findall(r"([<>=!]=|[<>])([\d.]+)", versions)
    return all(RELATIONS[relation](*_same_length(version, numbers_of(other))) for relation, other in comparisons)


def _same_length(one: Version, other: Version) -> tuple[Version, Version]:
    length = max(len(one), len(other))
    return one + (0,) * (length - len(one)), other + (0,) * (length - len(other))


def numbers_of(version: str) -> Version:
    """Returns the leading numbers of a version: (2, 13, 0) for ``"2.13.0+cu130"``."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, matched[0].split("."))) if matched else ()


def holds(condition: Condition, spec: AttentionSpec) -> bool:
    """Returns whether a condition holds for a call."""
    return RELATIONS[condition.relation](QUANTITIES[condition.quantity].value(spec), condition.value)


def refusals(backend: str, spec: AttentionSpec, device: str, version: Version = ()) -> tuple[str, ...]:
    """Returns a reason for each row that is about a call; see ``rows_of`` for ``version``."""
    return tuple(
        _reason(row, spec, version)
        for row in rows_of(backend, device, version)
        if (row.direction == "forward" or spec.needs_backward) and all(holds(one, spec) for one in row.conditions)
    )


def _reason(row: Row, spec: AttentionSpec, version: Version) -> str:
    """Returns the sentence of a refusal: the row's quantities in this call, what would happen, and who reported it."""
    fields = dict.fromkeys(field for one in row.conditions for field in QUANTITIES[one.quantity].shown)
    values = ", ".join(f"{field}={getattr(spec, field)!r}" for field in fields) or EVERY_CALL
    where = f"every {row.package} so far"
    if row.versions:
        installed = ".".join(map(str, version)) or "of unknown version"
        where = f"{row.package} {installed}, known bad in {row.versions}"
    backward = "backward: " if row.direction == "backward" else ""
    return f"{backward}{values}: {row.symptom} ({where}; {row.link})"
