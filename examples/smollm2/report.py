"""The results of the demo as data, how they are shown, and what counts as failure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from examples.smollm2.layers import LayerCheck

EXPECTED = "Paris"
"""The answer to the first question must contain this word."""


@dataclass
class Report:
    """The results of the demo.

    Attributes:
        weights: the file of the weights; versions: the versions of the frameworks.
        questions: the prompts; torch_texts, jax_texts: the answers, in the same order.
        same_tokens: whether both frameworks chose the same token ids.
        reread_tokens_differ: the number of tokens that one uncached pass over the finished row chooses differently.
        logit_difference: the largest absolute difference of prefill logits; largest_logit: the largest absolute logit.
        smallest_lead: the smallest lead of a chosen token over the second-best token, in logits.
        layers: one entry for each layer and captured step.
        selections: the explanation of the choice of backend, by framework.
        seconds: times by stage.
        memory_gib: the largest resident size of the process.
    """

    weights: str
    versions: dict[str, str]
    questions: list[str]
    torch_texts: list[str]
    jax_texts: list[str]
    same_tokens: bool
    reread_tokens_differ: int
    logit_difference: float
    largest_logit: float
    smallest_lead: float
    layers: list[LayerCheck]
    selections: dict[str, str]
    seconds: dict[str, float]
    memory_gib: float

    def failures(self) -> list[str]:
        """Returns the failed checks as sentences."""
        failed = []
        if not self.same_tokens or self.torch_texts != self.jax_texts:
            failed.append("torch and JAX wrote different texts")
        if EXPECTED not in self.torch_texts[0]:
            failed.append(f"the answer to {self.questions[0]!r} does not name {EXPECTED}: {self.torch_texts[0]!r}")
        if self.reread_tokens_differ:
            failed.append(f"without a cache, {self.reread_tokens_differ} tokens would be different")
        unequal = sum(not check.equal for check in self.layers)
        if unequal or not self.layers:
            failed.append(f"{unequal} of {len(self.layers)} layer calls are not bit-equal across frameworks")
        return failed

    def as_json(self) -> dict[str, Any]:
        """Returns plain data for ``json.dump``."""
        return {**asdict(self), "failures": self.failures()}


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{report.weights} on {versions}", highlight=False, soft_wrap=True)
    console.print(_answers(report))
    console.print(_figures(report))
    for framework, text in report.selections.items():
        console.print(f"[italic]The backend in {framework}, and the reasons against the others[/]")
        console.print(f"{text}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(_times(report))
    failures = report.failures()
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {escape(failure)}")
    if not failures:
        console.print("[bold green]OK[/] torch and JAX wrote the same text; the attention of every layer is bit-equal")


def _answers(report: Report) -> Table:
    table = Table(title="Answers, all prompts packed into one row", title_justify="left", show_lines=True)
    table.add_column("prompt", style="cyan", max_width=24)
    table.add_column("torch (transformers)")
    table.add_column("JAX (Flax NNX)")
    for question, ours, theirs in zip(report.questions, report.torch_texts, report.jax_texts, strict=True):
        same = "[green]the same text[/]" if ours == theirs else f"[bold red]differs:[/] {escape(theirs)}"
        table.add_row(escape(question), escape(ours), f"{escape(theirs)}\n{same}" if ours == theirs else same)
    return table


def _figures(report: Report) -> Table:
    table = Table(title="Agreement", title_justify="left", show_header=False)
    for queries in dict.fromkeys(check.queries for check in report.layers):
        checks = [check for check in report.layers if check.queries == queries]
        equal = sum(check.equal for check in checks)
        worst = max(check.difference for check in checks)
        verdict = f"{equal} of {len(checks)} layers bit-equal, out and LSE, on the same q, k, v"
        verdict += "" if equal == len(checks) else f"; largest difference {worst:.1e}"
        table.add_row(f"attention, step of {queries} queries", verdict)
    table.add_row(
        "largest logit difference, prefill",
        f"{report.logit_difference:.1e}, of logits up to {report.largest_logit:.0f}; matrix products differ",
    )
    table.add_row("smallest lead of a chosen token", f"{report.smallest_lead:.1e}")
    table.add_row("tokens that differ without a cache", f"{report.reread_tokens_differ}")
    return table


def _times(report: Report) -> Table:
    table = Table(title="Times", title_justify="left", show_header=False)
    for what, seconds in report.seconds.items():
        table.add_row(what, f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms")
    table.add_row("peak memory", f"{report.memory_gib:.1f} GiB")
    return table
