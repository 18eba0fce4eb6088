"""NaN containment: a NaN or Inf in one document or batch row changes no bit of the others."""

from __future__ import annotations

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.case import Case
from attn_core.cli.campaign.judge import trial_of
from attn_core.cli.certify.check import (
    Arrays,
    Finding,
    Part,
    differing,
    of_part,
    parts_of,
    run_call,
    seen_by,
    stable_results,
)
from attn_core.cli.certify.subject import Subject
from attn_core.cli.trial import Trial

HIDES_POISON = ("xformers_splitk",)
"""Its merge of splits drops a NaN part, so such a row becomes 0; docs/reference/semantics.md documents it."""
REACHES_BACK = dict.fromkeys(
    ("flash3", "flash4", "xformers_flash3"), "the last tile of a document holds the next one's first tokens"
)
"""A NaN may reach documents before it, as a tile may hold several; docs/reference/semantics.md documents these."""
SPLITS_KEYS = ("flash2", "flash3", "xformers_flash3", "triton_splitkv")
"""Where these split the keys of few queries, a row that is NaN may be 0 in the output."""


def has_neighbours(spec: AttentionSpec) -> bool:
    """Returns whether there is more than one document or batch row, with something in it."""
    return not spec.empty and (spec.documents or spec.batch) > 1


def excludes(subject: Subject) -> str | None:
    """Excludes approximate backends, whose scales an Inf spoils."""
    return "approximate: an Inf spoils what it is quantised with" if subject.claims.approximate else None


def contains_nan(subject: Subject, case: Case) -> Finding:
    """Fills one document or batch row, and the tokens behind the last document, with NaN or Inf."""
    trial, value = trial_of(case), np.nan if case.seed % 2 else np.inf
    parts = parts_of(trial)
    number = case.seed // 2 % len(parts)
    poisoned = _poisoned(trial, parts, number, value, behind=not _reaches_back(subject, trial))
    clean, broken = (run_call(subject, case, each) for each in (trial, poisoned))
    spared = range(number + 1) if _reaches_back(subject, trial) else (number,)
    for other, part in enumerate(parts):
        if other in spared:
            continue
        both = (stable_results(subject, case.spec, of_part(trial, arrays, part)) for arrays in (clean, broken))
        if wrong := differing(*both):
            what = "document" if trial.spec.packed else "batch row"
            return Finding(f"{value} in {what} {number} changes {', '.join(wrong)} of {what} {other}")
    return Finding(_hidden(subject, trial, parts[number], broken, value))


def _reaches_back(subject: Subject, trial: Trial) -> bool:
    return subject.backend in REACHES_BACK and trial.spec.packed


def _poisoned(trial: Trial, parts: list[Part], number: int, value: float, behind: bool) -> Trial:
    """Returns a trial with a value in one part, and with NaN in the tokens behind the last document if ``behind``."""
    rows, keys = parts[number]
    tails = (slice(parts[-1][0].stop, None), slice(parts[-1][1].stop, None))
    changed: dict[str, np.ndarray] = {}
    for name in ("q", "k", "v"):
        array = getattr(trial.inputs, name).copy()
        array[rows if name == "q" else keys] = value
        if behind and trial.spec.packed:
            array[tails[0 if name == "q" else 1]] = np.nan
        changed[name] = array
    dout = trial.dout.copy()
    dout[rows] = value
    return trial._replace(inputs=trial.inputs._replace(**changed), dout=dout)


def _hidden(subject: Subject, trial: Trial, part: Part, broken: Arrays, value: float) -> str | None:
    """Returns a fault if no row that sees a poisoned key shows it."""
    if subject.backend in (*HIDES_POISON, *SPLITS_KEYS) or trial.spec.score_mod is not None:
        return None  # a score function may read no score
    rows, keys = part
    seen = seen_by(trial)
    own = seen[:, :, rows, keys] if trial.spec.packed else seen[rows]
    if not own.any() or not np.isfinite(broken["out"][rows]).all():
        return None
    return f"{value} in visible keys does not show in the output"
