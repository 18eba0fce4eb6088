"""Runs one case and judges it. A fault is a text; a case without a fault has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from attn_core import backends
from attn_core.call.tensors import Gradients
from attn_core.cli.trial import Trial, draw, expectation
from attn_core.correctness.accuracy import Accuracy, Expected
from attn_core.errors import SpecError
from attn_core.selection import NoBackendError, Target, choice
from tests.campaign.case import Case, same_documents
from tests.campaign.entries import Entry, entry_of
from tests.campaign.relations import RELATIONS
from tests.campaign.same_bits import PAIRS, differences, must_agree

MERGE = 0.25
"""How much of a bound one merge may add. A merge rounds weights and sums once more; 1.02 of the bound was seen."""


class Verdict(NamedTuple):
    """The outcome of a case.

    Attributes:
        skipped: why the case cannot run here, or None.
        fault: what is wrong, or None.
        use: the largest error as a part of its bound.
        differing: the results and gradients whose bits the two ways of a pair gave otherwise; None if the case ran one
            way.
    """

    skipped: str | None = None
    fault: str | None = None
    use: float = 0.0
    differing: tuple[str, ...] | None = None


def trial_of(case: Case) -> Trial:
    """Returns the numbers of a case. In every second case a quarter of the bias is -inf, which hides its pairs;
    in the others key ranges are runs of keys that form bands."""
    trial = draw(case.spec, case.seq_info, case.seed)
    if case.seed % 2 and case.spec.key_ranges_shape is not None:
        trial = trial._replace(inputs=trial.inputs._replace(key_ranges=_banded_ranges(case)))
    if trial.inputs.bias is None or case.seed % 2:
        return trial
    hidden = np.random.default_rng(case.seed + 1).random(trial.inputs.bias.shape) < 0.25
    return trial._replace(inputs=trial.inputs._replace(bias=np.where(hidden, -np.inf, trial.inputs.bias)))


def _banded_ranges(case: Case) -> np.ndarray:
    """Draws ranges whose ends stay, or move by one query with each key, over up to three runs of keys."""
    random = np.random.default_rng((case.seed, 1))
    rows, heads, keys, count, _ = case.spec.key_ranges_shape or ()
    run = np.searchsorted(np.sort(random.integers(0, keys + 1, 2)), np.arange(keys), side="right")
    ends = np.sort(random.integers(0, case.spec.q_len + 1, (rows, heads, 3, count, 2), np.int32), -1)[:, :, run]
    moves = random.integers(0, 2, (rows, heads, 3, count, 2), np.int32)[:, :, run]
    ranges = np.minimum(ends + moves * np.arange(keys, dtype=np.int32)[:, None, None], case.spec.q_len)
    return np.where(ranges[..., :1] < ranges[..., 1:], ranges, 0)


def verdict_of(case: Case, device: str) -> Verdict:
    """Runs a case on a device, such as "cpu" or "sm90", and compares it with the reference.

    Raises:
        SpecError: for an entry, backend or relation that does not exist.
    """
    entry = entry_of(case.entry)
    if case.relation is not None and case.relation not in (known := {**RELATIONS, **PAIRS}):
        raise SpecError(f"relation={case.relation!r}: expected one of {', '.join(known)}")
    if case.relation in PAIRS:
        return _both_ways(case, entry, device)
    relation = None if case.relation is None else RELATIONS[case.relation]
    if relation is not None and not relation.takes(case.spec):
        return Verdict(skipped=f"{case.relation}: cannot rewrite the call")
    trial = trial_of(case)
    trials, join = ((trial,), None) if relation is None else relation.rewrite(trial)
    target = Target.here(entry.framework, device)
    for each in trials:
        if (reason := _refusal(each, case, entry, target)) is not None:
            return Verdict(skipped=reason)
    try:
        results = [entry.run(each, case.backend, device) for each in trials]
        arrays = results[0] if join is None else join(results)
        return _judged(trial, arrays, entry)
    except Exception as error:  # whatever a call raises although it was accepted is a fault of this project
        if isinstance(error, NoBackendError) and entry.masks and case.backend is not None:
            return Verdict(skipped=f"{case.backend}: {error}")
        return Verdict(fault=_words(error))


def _both_ways(case: Case, entry: Entry, device: str) -> Verdict:
    """Runs a call as a program and eagerly, judges both, and compares their bits."""
    assert case.relation is not None
    pair, target, trial = PAIRS[case.relation], Target.here(entry.framework, device), trial_of(case)
    if case.entry != pair.program or case.backend is None:
        return Verdict(skipped=f"{case.relation}: expected {pair.program!r} and a backend by name")
    for each in (entry, eager := entry_of(pair.eager)):
        if (reason := _refusal(trial, case, each, target)) is not None:
            return Verdict(skipped=reason)
    try:
        program, plain = (each.run(trial, case.backend, device) for each in (entry, eager))
        verdict, differing = _judged(trial, program, entry), differences(program, plain)
        if differing and verdict.fault is None:
            verdict = _judged(trial, plain, eager)
    except Exception as error:
        return Verdict(fault=_words(error))
    agree = must_agree(case.backend, case.spec, entry.framework, backends.kind_of(device))
    if differing and verdict.fault is None and agree:
        sizes = ", ".join(f"{name} by {size:.2g}" for name, size in differing.items())
        verdict = Verdict(fault=f"other bits than in an eager call: {sizes}")
    return verdict._replace(differing=tuple(differing))


def _refusal(trial: Trial, case: Case, entry: Entry, target: Target) -> str | None:
    spec = trial.spec
    if (reason := entry.refuses(spec)) is not None:
        return f"{case.entry}: {reason}"
    if spec.dropout and entry.words is None:
        return f"{case.entry}: no dropout"
    if entry.same_documents and trial.seq_info is not None and not same_documents(spec, trial.seq_info):
        return f"{case.entry}: the same documents of queries and keys, and no token behind them"
    if case.backend is None:
        return None
    reasons = choice.refusals(case.backend, spec, target)
    return f"{case.backend}: {reasons[0]}" if reasons else None


def _words(error: Exception) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _judged(trial: Trial, arrays: dict[str, np.ndarray], entry: Entry) -> Verdict:
    inputs = trial.inputs
    if trial.spec.dropout and entry.words is not None:
        inputs = inputs._replace(rng=entry.words(trial.seed))
    accuracy = compared(expectation(trial._replace(inputs=inputs)), trial.learned, arrays)
    allowed = 1 + MERGE * (entry.parts - 1)
    wrong = [str(quantity) for quantity in accuracy.quantities if not quantity.use <= allowed]
    return Verdict(fault="; ".join(wrong) or None, use=accuracy.worst / allowed)


def compared(expected: Expected, learned: tuple[str, ...], results: dict[str, np.ndarray]) -> Accuracy:
    """Compares the results of a call, with the gradients of all its learned inputs, with the reference's."""
    gradients = Gradients(**{f"d{name}": results[f"d{name}"] for name in learned}) if learned else None  # type: ignore[arg-type]
    return expected.judge(out=results["out"], lse=results.get("lse"), gradients=gradients)


def fails_alike(fault: str, device: str) -> Callable[[Case], bool]:
    """Returns whether a case has a fault of the same kind: a wrong number must not shrink to an error that hides it."""

    def fails(case: Case) -> bool:
        other = verdict_of(case, device).fault
        return other is not None and _kind(other) == _kind(fault)

    return fails


def _kind(fault: str) -> str:
    raised = re.match(r"raised \w+", fault)
    return raised[0] if raised else "other bits" if fault.startswith("other bits") else "wrong numbers"
