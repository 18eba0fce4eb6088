"""The table at the end of the example, and what counts as failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.rl.run import Outcome


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the failed checks as sentences: one bit differs with "prefix", or a step did not raise its objective."""
    failed = []
    for one in outcomes:
        if one.invariant == "prefix" and one.equal != one.tokens:
            differ = one.tokens - one.equal
            failed.append(f"{one.framework}: {differ} of {one.tokens} log-probabilities differ with invariant='prefix'")
        if one.step is not None and not (np.isfinite(one.step[0]) and one.step[1] > 0):
            failed.append(f"{one.framework}: the training step changed the objective by {one.step[1]:.1e}")
    if not any(one.invariant == "prefix" for one in outcomes):
        failed.append("nothing ran with invariant='prefix'")
    return failed


def show(console: Console, outcomes: Sequence[Outcome]) -> int:
    """Prints the table and the checks; returns 1 if a check failed, otherwise 0."""
    table = Table(title="Log-probabilities of sampled tokens: from pages, and in packed training", title_justify="left")
    for name in ("framework", "invariant", "tokens", "equal bits", "largest difference", "seconds"):
        table.add_column(name, justify="left" if name in ("framework", "invariant") else "right")
    for one in outcomes:
        share, seconds = f"{one.equal / one.tokens:.0%}", f"{one.seconds:.1f}"
        name = "none" if one.invariant is None else one.invariant
        table.add_row(one.framework, name, str(one.tokens), share, f"{one.difference:.1e}", seconds)
    console.print(table)
    for one in outcomes:
        if one.step is not None:
            norm, gain = one.step
            what = f"changed the objective by {gain:+.1e} (gradient {norm:.1e})"
            console.print(f"{one.framework}: a step of policy gradients {what}", highlight=False, soft_wrap=True)
    failed = failures(outcomes)
    for failure in failed:
        console.print(f"[bold red]FAILED[/] {failure}", highlight=False)
    if not failed:
        console.print("[bold green]OK[/] with invariant='prefix', training scores every token as sampling did")
    return 1 if failed else 0
