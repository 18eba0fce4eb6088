"""Bounds and pages: results and gradients stay within the error bounds of the float64 reference."""

from __future__ import annotations

import numpy as np

from attn_core.cli.campaign.case import Case
from attn_core.cli.campaign.judge import trial_of
from attn_core.cli.certify.check import Arrays, Finding, run_call
from attn_core.cli.certify.subject import Subject
from attn_core.cli.trial import Outcome, Trial, expectation, judge


def within_bounds(subject: Subject, case: Case) -> Finding:
    """Compares every result and gradient with the reference. An approximate backend must give no NaN."""
    trial = trial_of(case)
    arrays = run_call(subject, case, trial)
    if subject.claims.approximate:
        return Finding(_not_finite(trial, arrays))
    accuracy = judge(expectation(trial), Outcome(arrays, 0.0))
    wrong = [str(quantity) for quantity in accuracy.quantities if not quantity.use <= 1]
    return Finding("; ".join(wrong) or None, accuracy.worst)


def _not_finite(trial: Trial, arrays: Arrays) -> str | None:
    names = [name for name, array in arrays.items() if np.isnan(array).any()]
    return f"NaN in {', '.join(names)} of finite inputs" if names else None


def without_pages(subject: Subject) -> str | None:
    """Excludes backends that do not read pages."""
    return None if subject.claims.paged else "claims no keys and values in pages"
