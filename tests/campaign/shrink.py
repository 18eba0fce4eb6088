"""Shrinks a failing case: tries simpler cases, and keeps each that still fails, until none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from attn_core.call.functions import has_functions
from attn_core.errors import SpecError
from tests.campaign.case import Case

PLAIN: dict[str, Any] = {
    "causal": False,
    "alignment": "bottom_right",
    "window": (None, None),
    "softcap": None,
    "mask_shape": None,
    "key_ranges_shape": None,
    "alibi_shape": None,
    "sinks": False,
    "dropout": 0.0,
    "deterministic": False,
    "needs_backward": False,
    "bias_gradient": False,
    "return_lse": False,
    "dtype": "float32",
}
"""Options and the values that make a call simpler."""

MOST_RUNS = 200
"""Cases that one shrinking tries at most."""


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Returns the simplest case found that still fails.

    Args:
        fails: runs a case. A case that is skipped does not fail.
    """
    runs = 0
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(case):
            runs += 1
            if runs > MOST_RUNS:
                return case
            if fails(simpler):
                case, progress = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:  # noqa: C901
    spec = case.spec
    if case.relation is not None:
        yield replace(case, relation=None)
    if spec.bias_shape is not None:
        yield from _with(case, bias_shape=None, bias_dtype=None, bias_gradient=False)
    for name, value in PLAIN.items():
        if getattr(spec, name) != value:
            yield from _with(case, **{name: value})
    if has_functions(spec):
        yield from _with(case, mask_mod=None, score_mod=None, aux=(), aux_gradients=())
    if case.lengths is not None:
        yield from _fewer_documents(case)
        return
    for name in ("batch", "q_len", "kv_len"):
        size = getattr(spec, name)
        for smaller in dict.fromkeys((1, size // 2, size - 1)):
            if 0 < smaller < size:
                yield from _resized(case, {name: smaller})
    if spec.num_kv_heads > 1:
        yield from _resized(case, {"num_heads": spec.group_size, "num_kv_heads": 1})
    if spec.group_size > 1:
        yield from _resized(case, {"num_heads": spec.num_kv_heads})
    for width in (4, 8, 16):
        if width < spec.head_dim:
            yield from _resized(case, {"head_dim": width, "value_dim": width})


def _fewer_documents(case: Case) -> Iterator[Case]:
    assert case.lengths is not None
    queries, keys = case.lengths
    for left_out in range(len(queries)):
        pairs = [pair for number, pair in enumerate(zip(queries, keys)) if number != left_out]
        if pairs:
            yield from _repacked(case, tuple(q for q, _ in pairs), tuple(k for _, k in pairs))
    for number in range(len(queries)):
        for smaller in dict.fromkeys((1, queries[number] // 2)):
            if smaller < queries[number]:
                changed = tuple(smaller if n == number else length for n, length in enumerate(queries))
                yield from _repacked(case, changed, changed if queries == keys else keys)


def _repacked(case: Case, queries: tuple[int, ...], keys: tuple[int, ...]) -> Iterator[Case]:
    sizes = {"q_len": sum(queries), "kv_len": sum(keys), "documents": len(queries)}
    sizes |= {"max_len_q": max(queries), "max_len_k": max(keys)}
    yield from _resized(replace(case, lengths=(queries, keys)), sizes)


def _resized(case: Case, sizes: dict[str, int]) -> Iterator[Case]:
    """Yields the case with other sizes, its tables and slopes with them."""
    spec, old = case.spec, case.spec
    axes = ("batch", "num_heads", "q_len", "kv_len")
    tables = {
        f"{name}_shape": tuple(
            size if size == 1 else sizes.get(axis, getattr(old, axis)) for size, axis in zip(shape, axes)
        )
        for name in ("mask", "bias")
        if (shape := getattr(spec, f"{name}_shape")) is not None
    }
    if spec.key_ranges_shape is not None:
        of = ("batch", "num_kv_heads", "kv_len", "ranges", "ends")
        shape = zip(spec.key_ranges_shape, of, strict=True)
        # An axis of the keys is never shared, also if it has one key.
        tables["key_ranges_shape"] = tuple(
            size if size == 1 and axis != "kv_len" else sizes.get(axis, getattr(old, axis, size))
            for size, axis in shape
        )
    if spec.alibi_shape is not None:
        heads, batch = sizes.get("num_heads", spec.num_heads), sizes.get("batch", spec.batch)
        tables["alibi_shape"] = (heads,) if len(spec.alibi_shape) == 1 else (batch, heads)
    yield from _with(case, **sizes, **tables)


def _with(case: Case, **fields: Any) -> Iterator[Case]:
    try:
        yield replace(case, spec=replace(case.spec, **fields))
    except SpecError:
        return  # such a call does not exist
