"""Draws the calls of a certificate: those of a campaign, without the features that a backend refuses.

A number gives the same call on every machine. A call that a backend refuses is simplified, one feature after another,
until the backend takes it: so a backend with few claims is checked as often as one with many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from attn_core.call.pages import PagedKV
from attn_core.call.spec import DTYPES, AttentionSpec
from attn_core.cli.campaign.case import Case, Lengths
from attn_core.cli.campaign.draw import Place, new_lengths, number_seed, structure
from attn_core.cli.campaign.entries import entry_of
from attn_core.cli.campaign.pages import LARGE_PAGES, page_size_of
from attn_core.cli.certify.subject import DENSE, PAGED, Subject
from attn_core.errors import SpecError
from attn_core.selection import choice

TRIES = 60
"""Structures to draw until one fits."""
GROUP = 4
"""Draws that share a structure where each structure is compiled."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(AttentionSpec)}
Call = tuple[AttentionSpec, Lengths | None]


def drawn(
    subject: Subject,
    seed: int,
    number: int,
    adapt: Callable[[AttentionSpec], AttentionSpec],
    fits: Callable[[AttentionSpec], bool],
    paged: bool = False,
    packed: bool | None = None,
) -> Case | str:
    """Returns a draw of a subject, or why none of TRIES structures fits.

    Args:
        adapt: changes a drawn spec before the backend is asked.
        fits: whether a check can use a spec.
        paged: whether keys and values lie in pages.
        packed: whether documents are packed; drawn if None.
    """
    compiled = subject.framework == "jax" or subject.kind == "cuda" or subject.compiling > 0
    block = number // GROUP if compiled else number
    names = PAGED if paged else DENSE
    packed = True if paged else packed
    why = "the check needs another call"
    for attempt in range(TRIES):
        place = Place(seed, block * TRIES + attempt, number)
        spec, lengths = structure(place, subject.kind, packed=packed)
        # Kernels that refuse small pages get large ones.
        numbers = number_seed(place) + (LARGE_PAGES if paged and attempt % 2 else 0)
        try:
            spec = adapt(replace(spec, **{"dropout": 0.0} | (NOT_ON_PAGES if paged else {})))
        except SpecError:  # the options of the check do not go together with what was drawn
            continue
        if lengths is not None and not fit(spec, lengths):  # a check has made the keys those of the queries
            lengths = lengths[0], lengths[0]
        simple = simplified((spec, lengths), partial(_refusals, subject, names, numbers))
        if isinstance(simple, str):
            why = simple
            continue
        spec, lengths = simple
        if not fits(spec):
            continue
        if lengths is not None and compiled and number % GROUP:
            lengths = new_lengths(spec, place)
        return Case(names[subject.framework], spec, subject.backend, numbers, lengths)
    return f"no drawn call fits: {why}"


def _refusals(subject: Subject, names: dict[str, str], numbers: int, call: Call) -> tuple[str, ...]:
    spec, lengths = call
    refused = entry_of(names[subject.framework]).refuses(spec)
    if refused is not None:
        return (refused,)
    asked = paged_spec(spec, lengths, numbers) if names is PAGED and lengths is not None else spec
    return choice.refusals(subject.backend, asked, subject.target)


def paged_spec(spec: AttentionSpec, lengths: Lengths, numbers: int) -> AttentionSpec:
    """Returns the spec of a packed call whose keys lie in pages, as ``campaign.pages`` lays them out."""
    size = page_size_of(numbers, np.random.default_rng(numbers))
    counts = [-(-length // size) for length in lengths[1]]
    pages = PagedKV(num_pages=sum(counts) + 3, page_size=size, width=max(*counts, 1))
    return replace(spec, paged=pages, kv_len=pages.width * size, max_len_k=None, alignment="bottom_right")


def fit(spec: AttentionSpec, lengths: Lengths) -> bool:
    """Returns whether documents of these lengths are no longer, and no more tokens, than a packed spec says."""
    sides = (lengths[0], spec.max_len_q, spec.q_len), (lengths[1], spec.max_len_k, spec.kv_len)
    return all(max(side, default=0) <= (longest or 0) and sum(side) <= tokens for side, longest, tokens in sides)


def simplified(call: Call, refusals: Callable[[Call], tuple[str, ...]]) -> Call | str:
    """Returns the call without what is refused, or a reason that remains. Each step must leave fewer reasons."""
    reasons = refusals(call)
    for simpler in (*STEPS, *STEPS):
        if not reasons:
            break
        for other in simpler(*call):
            if other == call:
                continue
            fewer = refusals(other)
            if len(fewer) < len(reasons):
                call, reasons = other, fewer
                break
    return reasons[0] if reasons else call


def _changed(spec: AttentionSpec, lengths: Lengths | None, **values: Any) -> Iterator[Call]:
    try:
        yield replace(spec, **values), lengths
    except SpecError:  # the values do not describe a call with the rest
        return


def _reset(*names: str) -> Callable[[AttentionSpec, Lengths | None], Iterator[Call]]:
    """Returns a step that gives fields their defaults."""

    def step(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
        yield from _changed(spec, lengths, **{name: DEFAULTS[name] for name in names})

    return step


TABLES = ("mask_shape", "key_ranges_shape", "bias_shape", "bias_dtype", "bias_gradient", "mask_mod", "score_mod", "aux")
FUNCTIONS = ("mask_mod", "score_mod", "aux", "aux_gradients")
WITHOUT_TABLES: dict[str, Any] = {name: DEFAULTS[name] for name in (*TABLES, "aux_gradients")}
NOT_ON_PAGES: dict[str, Any] = WITHOUT_TABLES | {
    "alibi_shape": None,
    "needs_backward": False,
    "alignment": "bottom_right",
}


def _dtypes(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    for dtype in reversed(DTYPES):
        yield from _changed(spec, lengths, dtype=dtype)


def _other_alignment(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    other = "top_left" if spec.alignment == "bottom_right" else "bottom_right"
    yield from _changed(spec, lengths, alignment=other)


def _widths(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    for width in (spec.head_dim, 64, 128):
        yield from _changed(spec, lengths, head_dim=width, value_dim=width)


def _same_heads(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    yield from _changed(spec, lengths, num_kv_heads=spec.num_heads, key_ranges_shape=None)


UNPACKED: dict[str, Any] = {"documents": None, "max_len_q": None, "max_len_k": None}


def _unpacked(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    if spec.packed:
        yield from _changed(spec, None, **UNPACKED)


def _lengths(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    for q_len, kv_len in ((spec.kv_len, spec.kv_len), (spec.q_len, spec.q_len), (64, 64), (128, 128), (1, 128)):
        sizes = {"q_len": q_len, "kv_len": kv_len, **WITHOUT_TABLES, **UNPACKED}
        yield from _changed(spec, None, **sizes)
        # A band that hid nothing at the old lengths may be refused at these.
        yield from _changed(spec, None, **sizes, causal=False, window=(None, None))


def _same_documents(spec: AttentionSpec, lengths: Lengths | None) -> Iterator[Call]:
    if lengths is None:
        return
    queries, total, longest = lengths[0], sum(lengths[0]), max(lengths[0])
    values: dict[str, Any] = {
        "q_len": total,
        "kv_len": total,
        "max_len_q": longest,
        "max_len_k": longest,
        **WITHOUT_TABLES,
    }
    yield from _changed(spec, (queries, queries), **values)


STEPS: tuple[Callable[[AttentionSpec, Lengths | None], Iterator[Call]], ...] = (
    _dtypes,
    _reset("aux_gradients"),
    _reset(*FUNCTIONS),
    _reset("bias_gradient"),
    _reset("bias_shape", "bias_dtype", "bias_gradient"),
    _reset("alibi_shape"),
    _reset("sinks"),
    _reset("key_ranges_shape"),
    _reset("mask_shape"),
    _reset("softcap"),
    _reset("window"),
    _other_alignment,
    _widths,
    _same_heads,
    _reset("causal"),
    _reset("causal", "window"),
    _same_documents,
    _unpacked,
    _lengths,
    _reset("needs_backward", "bias_gradient", "aux_gradients"),
    _reset("return_lse"),
    _reset("deterministic"),
)
"""What to simplify, in order: what costs the least coverage comes first."""
