"""Check: one property that a certificate proves by draws, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import aux_of
from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.case import Case
from attn_core.cli.campaign.entries import entry_of
from attn_core.cli.certify.subject import Subject
from attn_core.cli.trial import Trial

Arrays = dict[str, np.ndarray]
Part = tuple[slice, slice]
"""The queries and the keys of one document, or of one batch row."""

ABSENT = ""
"""A reason for which a certificate has no entry at all, because another subject's entry has the check."""


class Finding(NamedTuple):
    """The outcome of one draw.

    Attributes:
        fault: what is wrong, or None.
        use: the largest error as a part of its bound; 0 if the check compares bits.
    """

    fault: str | None = None
    use: float = 0.0


def _as_it_is(subject: Subject, spec: AttentionSpec) -> AttentionSpec:
    return spec


class Check(NamedTuple):
    """A check.

    Attributes:
        name: one word, for the command line and the file.
        says: what it proves, as a sentence.
        draws: how many calls of each subject it runs.
        excludes: returns why a subject cannot have the check, ABSENT, or None if it can.
        run: runs one draw.
        adapt: changes a drawn spec into one that the check can use.
        fits: whether it can use a spec.
        paged: whether keys and values lie in pages. For backends that read pages alone they always do.
        packed: whether the drawn calls have packed documents, as far as the backend takes them; drawn if None.
    """

    name: str
    says: str
    draws: int
    excludes: Callable[[Subject], str | None]
    run: Callable[[Subject, Case], Finding]
    adapt: Callable[[Subject, AttentionSpec], AttentionSpec] = _as_it_is
    fits: Callable[[AttentionSpec], bool] = lambda spec: True
    paged: bool = False
    packed: bool | None = None


def seen_by(trial: Trial) -> np.ndarray:
    """Returns which keys each query sees: bool ``[batch, heads, q_len, kv_len]``."""
    spec, inputs = trial.spec, trial.inputs
    seen = visible(spec, inputs.mask, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.key_ranges, aux_of(inputs))
    if inputs.bias is not None:
        seen = seen & (inputs.bias != -np.inf)
    return np.broadcast_to(seen, (spec.batch, spec.num_heads, spec.q_len, spec.kv_len))


def run_call(subject: Subject, case: Case, trial: Trial) -> Arrays:
    """Returns the results of a trial on a subject as float64 arrays by name."""
    return entry_of(case.entry).run(trial, case.backend, subject.device)


def parts_of(trial: Trial) -> list[Part]:
    """Returns the documents of a packed trial, or the batch rows of another one."""
    info = trial.seq_info
    if info is None:
        return [(slice(row, row + 1), slice(row, row + 1)) for row in range(trial.spec.batch)]
    queries, keys = (offsets.tolist() for offsets in (info.cu_seqlens_q, info.cu_seqlens_k))
    return list(zip(map(slice, queries, queries[1:]), map(slice, keys, keys[1:])))


def of_part(trial: Trial, arrays: Arrays, part: Part) -> Arrays:
    """Returns the results that belong to one part, as flat arrays. Sums over all parts belong to none."""
    rows, keys = part
    places: dict[str, Any] = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    places["lse"] = (slice(None), rows) if trial.spec.packed else rows
    return {name: array[places[name]].ravel() for name, array in arrays.items() if name in places}


def differing(one: Arrays, other: Arrays) -> list[str]:
    """Returns the results that differ in any bit, each with the largest difference."""
    found = []
    for name, array in one.items():
        if array.tobytes() == other[name].tobytes():  # as bytes, because NaN differs from itself, and -0.0 equals 0.0
            continue
        with np.errstate(invalid="ignore"):
            size = np.abs(array - other[name])
        found.append(f"{name} by {np.nanmax(size, initial=0.0):.2g}")
    return found


def stable(subject: Subject, spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec with ``deterministic`` if only that promises equal bits: a GPU may add in any order."""
    return replace(spec, deterministic=True) if subject.kind != "cpu" and subject.claims.deterministic else spec


def stable_results(subject: Subject, spec: AttentionSpec, arrays: Arrays) -> Arrays:
    """Returns the results whose bits are the same in every run of a call."""
    if subject.kind == "cpu" or spec.deterministic:
        return arrays
    return {name: array for name, array in arrays.items() if name == "out"}


def no_dense(subject: Subject) -> str | None:
    """Excludes backends that read pages alone."""
    return "reads pages alone" if subject.pages_alone else None


def everything(subject: Subject) -> str | None:
    """Excludes nothing."""
    return None
