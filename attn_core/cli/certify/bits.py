"""Repeats and frameworks: equal bits on every run of a deterministic call, and in torch and JAX on one backend."""

from __future__ import annotations

from dataclasses import replace

from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.case import Case
from attn_core.cli.campaign.judge import trial_of
from attn_core.cli.certify.check import ABSENT, Finding, differing, run_call, seen_by, stable_results
from attn_core.cli.certify.subject import DENSE, PAGED, Subject
from attn_core.cli.frameworks import devices_of, installed

RUNS = 3


def promises_nothing(subject: Subject) -> str | None:
    """Excludes backends without a claim to equal bits on every run."""
    return None if subject.claims.deterministic else "claims no deterministic results"


def deterministic(subject: Subject, spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec of a call that asks for equal bits on every run."""
    return replace(spec, deterministic=True)


def repeats(subject: Subject, case: Case) -> Finding:
    """Runs one deterministic call several times."""
    trial = trial_of(case)
    first, *others = (run_call(subject, case, trial) for _ in range(RUNS))
    for other in others:
        if wrong := differing(first, other):
            return Finding(f"another run differs: {', '.join(wrong)}")
    return Finding()


def one_framework(subject: Subject) -> str | None:
    """Excludes what cannot run in both frameworks. The entry is that of JAX."""
    if subject.framework != "jax":
        return ABSENT
    if not subject.of_torch:
        return "runs in JAX only"
    if "torch" not in installed():
        return "torch is not installed"
    return None if subject.device in devices_of("torch") else f"torch has no {subject.device} here"


def agrees(subject: Subject, case: Case) -> Finding:
    """Runs one call in torch and in JAX."""
    trial, twin = trial_of(case), subject._replace(framework="torch")
    names = PAGED if case.entry in PAGED.values() else DENSE
    ours = run_call(twin, replace(case, entry=names["torch"]), trial)
    theirs = run_call(subject, case, trial)
    # Each framework adds the gradient of the sinks itself for rows that see no key.
    kept = [name for name in theirs if name != "dsinks" or seen_by(trial).any(-1).all()]
    both = (stable_results(subject, case.spec, {name: arrays[name] for name in kept}) for arrays in (theirs, ours))
    wrong = differing(*both)
    return Finding(f"torch and JAX differ: {', '.join(wrong)}" if wrong else None)
