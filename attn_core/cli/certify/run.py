"""The loop of a certificate: every check of every subject, in turn, within the time allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

from attn_core.cli.certify import known_rows
from attn_core.cli.certify.certificate import FAILED, NOT_RUN, PASSED, Entry
from attn_core.cli.certify.check import ABSENT, Check, Finding
from attn_core.cli.certify.checks import CHECKS
from attn_core.cli.certify.draw import drawn
from attn_core.cli.certify.subject import Subject
from attn_core.errors import LayoutWarning

NO_TIME = "no time was left; allow more with --minutes"


class Job(NamedTuple):
    """One check of one subject."""

    check: Check
    subject: Subject


def jobs_of(subjects: Sequence[Subject], names: Sequence[str] = ()) -> list[Job]:
    """Returns the jobs of the checks with these names, or of all; backends that compile for seconds come last."""
    checks = [check for name, check in CHECKS.items() if not names or name in names]
    jobs = [Job(check, subject) for check in checks for subject in subjects]
    jobs = [job for job in jobs if job.check.excludes(job.subject) != ABSENT]
    return sorted(jobs, key=lambda job: job.subject.compiling)


def run_jobs(jobs: Sequence[Job], seed: int, seconds: float, only: int | None = None) -> Iterator[Entry]:
    """Runs jobs and yields an entry for each.

    A job may take an equal share of the time that is left, and runs one draw at least unless all time is over.

    Args:
        only: the number of the only draw to run; None for all.
    """
    ends = monotonic() + seconds
    runs = [job.check.excludes(job.subject) is None for job in jobs]
    for number, job in enumerate(jobs):
        now, left = monotonic(), max(1, sum(runs[number:]))
        yield run_job(job, seed, now + (ends - now) / left if now < ends else 0.0, only)


def run_job(job: Job, seed: int, ends: float, only: int | None = None) -> Entry:
    """Runs one check of one subject until its draws are done, one is wrong, or its time ends.

    Args:
        ends: the time, of ``monotonic``; 0 if there is none left.
    """
    check, subject = job
    entry = partial(
        Entry,
        check=check.name,
        backend=subject.backend,
        framework=subject.framework,
        device=subject.device,
        planned=check.draws if only is None else 1,
    )
    if why := check.excludes(subject):
        return entry(result=NOT_RUN, reason=why, planned=0)
    if not ends:
        return entry(result=NOT_RUN, reason=NO_TIME)
    began, draws, gradients, worst = monotonic(), 0, 0, 0.0
    for number in range(check.draws) if only is None else (only,):
        if draws and monotonic() > ends:
            break
        case = drawn(subject, seed, number, partial(check.adapt, subject), check.fits, *_form(job))
        if isinstance(case, str):
            return entry(result=NOT_RUN, reason=case, draws=draws, seconds=_since(began))
        finding = _finding(lambda case=case: check.run(subject, case))  # type: ignore[misc]
        draws, gradients, worst = draws + 1, gradients + case.spec.needs_backward, max(worst, finding.use)
        if finding.fault is not None:
            shown = None if not worst or worst == float("inf") else round(worst, 3)
            counts: Any = {"draws": draws, "gradients": gradients, "worst": shown, "seconds": _since(began)}
            reason = f"{finding.fault} ({case.spec})"
            return entry(result=FAILED, reason=reason, repeat=repeat_of(job, seed, number), **counts)
    shown = round(worst, 3) if worst else None
    return entry(result=PASSED, draws=draws, gradients=gradients, worst=shown, seconds=_since(began))


def _form(job: Job) -> tuple[bool, bool | None]:
    return job.check.paged or job.subject.pages_alone, job.check.packed


def _finding(check: Callable[[], Finding]) -> Finding:
    try:
        with catch_warnings():
            simplefilter("ignore", LayoutWarning)  # drawn sizes look like any layout
            return check()
    except Exception as error:  # whatever a call raises although it was accepted is a fault
        return Finding(f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _since(began: float) -> float:
    return round(monotonic() - began, 2)


def repeat_of(job: Job, seed: int, number: int) -> str:
    """Returns the command that runs one draw again."""
    check, subject = job
    where = f"--backend {subject.backend} --framework {subject.framework} --device {subject.device}"
    return f"attn certify {where} --check {check.name} --seed {seed} --draw {number}"


def known_bad_entry() -> Entry:
    """Asks selection for the calls that rows of known-bad kernels must refuse."""
    began, calls = monotonic(), known_rows.refused_calls()
    wrong = [finding.fault for finding in map(known_rows.check, calls) if finding.fault is not None]
    counts: Any = {"draws": len(calls), "planned": len(calls), "seconds": _since(began)}
    if not wrong:
        return Entry(check=known_rows.NAME, result=PASSED, **counts)
    repeat = f"attn certify --check {known_rows.NAME}"
    return Entry(check=known_rows.NAME, result=FAILED, reason="; ".join(wrong[:3]), repeat=repeat, **counts)
